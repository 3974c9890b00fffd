"""Softmax of one tile of logits in registers: P, its row sums, and what O must be multiplied by.

Bounded form (`softcap.bounded_shift`): P = exp2(score - shift), one constant for all rows. In bfloat16 l is
the sum of the rounded P, as the product with V takes them, so that the rounding of a dominant P cancels in
O / l: a column of ones beside V adds them up, and nothing is added here, or where it has no room they are
rounded before they are added.

Online form: P = exp2(score - m), m the maximum of the row so far. Without a cap and a bias, a tile without
masks is tried with the m of the tiles before: wherever that m does, the sums of P are finite and below
2**config.HEADROOM, and neither a maximum is taken nor O rescaled. Where a sum of the warp is not (m = -inf,
of a row without entries yet, makes it infinite), the tile is done again with its own maximum. m only
scales numerator and denominator, and the log-sum-exp is m + log2(l) for any m.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from jaxcap.pallas import instructions as ins
from jaxcap.pallas import scores as sc
from jaxcap.pallas.config import ForwardConfig
from jaxcap.pallas.instructions import ACC, ROW, const, f32
from jaxcap.pallas.scores import At, Extras, Places, Scores, Tile


def softmax(
    s: Any,
    state: tuple,
    tile: Tile,
    extras: Extras,
    call: Scores,
    config: ForwardConfig,
    shift: int | None,
    masked: bool,
    limit: float | None,
    cap: Callable | None = None,
    rounded: bool = False,
):
    """(P float32, state): state is (l,) in the bounded form, (l, m, alpha) in the online form.

    `cap`: what makes exponents of logits without a mask, `cubic.exponents`. `limit`: of sums beside the old
    maximum, 2**config.HEADROOM; None where there is none yet.
    l is a thread's own partial sum of its two rows, so that no shuffle is needed before the end, in the
    bounded form of P `rounded` to bfloat16 if the product takes it so. The state is () where the product with
    V sums; P may hold pairs of words then, see `ForwardConfig.exp_packed`.
    """
    shape = s.shape

    def body(ctx, s, state, scalars, arrays):
        del ctx
        x = ins.scalars(s)
        at = Tile(*(v.registers[()] for v in scalars))
        arrays = Extras(*arrays)
        places = Places(at.q_first, at.k_first, shape[1])
        order = places.registers()
        keep = call.keep(places, at, arrays) if masked else (lambda *a: None)
        drop = call.survives(places, at, arrays)
        state = [ins.scalars(v) for v in state]
        if cap is not None:
            assert not masked
            p, new = [sc.exp2(e) for e in cap(x, call.inner, call.outer, shift)], []
        elif shift is not None:
            p, new = _bounded(x, state, order, keep, call, config, shift, rounded)
        else:
            added = call.added(places, at, arrays)
            p, new = _online(x, state, order, keep, added, call, None if masked else limit)
        if drop is not None:
            p = [arith.select(drop[at_], v, const(0.0)) for v, at_ in zip(p, order, strict=True)]
        rows = tuple(ins.fragment(v, (64,), ROW) for v in new)
        return (ins.fragment(p, shape, ACC), *rows)

    numbers = tuple(jnp.asarray(x, jnp.int32) for x in tile)
    given = jax.tree.map(lambda _: plgpu.RefType(), extras)
    rows = tuple(ins.struct((64,), jnp.float32, ROW) for _ in state)
    done = plgpu.inline_mgpu(
        arg_types=(ACC, (ROW,) * len(state), (ins.SPLAT,) * len(numbers), tuple(given)),
        return_type=(ins.struct(shape, jnp.float32, ACC), *rows),
    )(body)(s, state, numbers, tuple(extras))
    return done[0], tuple(done[1:])


def rescaled(acc: Any, alpha: Any) -> Any:
    """O * alpha, row by row; nothing is done where alpha is 1 throughout a warp."""

    def body(ctx, acc, alpha):
        del ctx
        a, x = ins.scalars(alpha), ins.scalars(acc)
        same = [arith.cmpf(arith.CmpFPredicate.OEQ, v, const(1.0)) for v in a]
        product = lambda: [arith.mulf(v, a[n // 2 % 2]) for n, v in enumerate(x)]
        out = _either(sc.all_of_warp(same), lambda: x, product, len(x))
        return ins.fragment(out, acc.shape, ACC)

    shape = ins.struct(acc.shape, jnp.float32, ACC)
    return ins.inline(body, [(acc, ACC), (alpha, ROW)], shape)


# ---- on registers -------------------------------------------------------------------------------
def _bounded(
    x: list,
    l: list,
    order: list[At],
    keep: Callable,
    call: Scores,
    config: ForwardConfig,
    shift: int,
    rounded: bool,
):
    """(P, [l] or []): P = 2**(cap * log2(e) * tanh - shift)."""
    p = []
    for n, at in enumerate(order):
        in_words = not l and sc.uses_fma(n // 2, config.exp_packed)
        if in_words and n % 2:
            continue
        t, factor = call.capped(x[n])
        if in_words:
            pair = sc.exp2_packed([t, call.capped(x[n + 1])[0]], factor, shift)
            p += sc.masked_pair(pair, [keep(*at), keep(*order[n + 1])])
            continue
        if l and sc.uses_fma(n, config.exp_fma):
            value = sc.exp2_fma(t, factor, shift, degree=3)
        elif shift:
            value = sc.exp2(sc.fma(t, const(factor), const(float(-shift))))
        else:
            value = sc.exp2(arith.mulf(t, const(factor)))
        p.append(sc.select(keep(*at), value, const(0.0)))
    if l and rounded:
        p = [half for pair in zip(p[::2], p[1::2], strict=True) for half in _rounded(*pair)]
    return p, [_sums(l[0], _row_sums(p, order))] if l else []


def _rounded(a: ir.Value, b: ir.Value) -> list[ir.Value]:
    """Both rounded to bfloat16, still float32."""
    word = ins.asm(ins.i32(), [b, a], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")
    halves = arith.shli(word, const(16)), arith.andi(word, const(0xFFFF0000))
    return [arith.bitcast(f32(), half) for half in halves]


def _online(
    x: list,
    state: list,
    order: list[At],
    keep: Callable,
    added: Callable,
    call: Scores,
    limit: float | None,
):
    """(P, [l, m, alpha]), a value of each for a thread's two rows; `limit` of the sums beside the old m."""
    l, m_old, _ = state
    # Without a cap and a bias the factor joins the subtraction of the maximum.
    factor = call.inner if call.softcap is None and not call.additive else 1.0
    late = factor != 1.0 and factor > 0

    def power(y: list, m: list) -> list:
        """2**(y - m)."""
        negative = [arith.subf(const(0.0), v) for v in m]
        p = []
        for v, (_, half, _) in zip(y, order, strict=True):
            e = sc.fma(v, const(factor), negative[half]) if late else arith.addf(v, negative[half])
            p.append(sc.exp2(e))
        return p

    def with_maximum() -> list:
        # 1. Exponents, -inf where masked.
        y = []
        for v, at in zip(x, order, strict=True):
            if not late:
                t, outer = call.capped(v)
                v = arith.mulf(t, const(outer)) if outer != 1.0 else t
                v = added(v, *at)
            y.append(sc.select(keep(*at), v, const(sc.NEGATIVE)))
        # 2. The maximum of each row; where all is -inf, zero stands in for it.
        m, base, alpha = [], [], []
        for half in (0, 1):
            row = [v for v, (_, h, _) in zip(y, order, strict=True) if h == half]
            top = functools.reduce(sc.maximum, row[1::2], row[0])
            top = sc.maximum(top, functools.reduce(sc.maximum, row[2::2], row[1]))
            top = sc.quad_max(top)
            if late:
                top = arith.mulf(top, const(factor))
            new_m = sc.maximum(m_old[half], top)
            none = arith.cmpf(arith.CmpFPredicate.OEQ, new_m, const(sc.NEGATIVE))
            m.append(new_m)
            base.append(arith.select(none, const(0.0), new_m))
            alpha.append(sc.exp2(arith.subf(m_old[half], base[half])))
        # 3. P.
        p = power(y, base)
        new_l = [sc.fma(a, b, c) for a, b, c in zip(l, alpha, _row_sums(p, order), strict=True)]
        return [*p, *new_l, *m, *alpha]

    if late and limit is not None:
        p = power(x, m_old)
        sums = _row_sums(p, order)
        good = sc.all_of_warp([sc.below(v, limit) for v in sums])
        done = [*p, *_sums(l, sums), *m_old, const(1.0), const(1.0)]
        done = _either(good, lambda: done, with_maximum, len(done))
    else:
        done = with_maximum()
    return done[:-6], [done[-6:-4], done[-4:-2], done[-2:]]


def _row_sums(p: list, order: list[At]) -> list:
    """A thread's sums of its two rows, each as two chains of additions."""
    partial: dict = {}
    for value, (_, half, e) in zip(p, order, strict=True):
        known = partial.get((half, e))
        partial[half, e] = value if known is None else arith.addf(known, value)
    return [arith.addf(partial[h, 0], partial[h, 1]) for h in (0, 1)]


def _sums(a: list, b: list) -> list:
    return [arith.addf(u, v) for u, v in zip(a, b, strict=True)]


def _either(
    condition: ir.Value, then: Callable[[], list], otherwise: Callable[[], list], count: int
) -> list:
    """A branch; `count` float32 values come out of it."""
    branch: Any = scf.IfOp(condition, [f32()] * count, has_else=True)
    for block, make in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_(make())
    return list(branch.results)
