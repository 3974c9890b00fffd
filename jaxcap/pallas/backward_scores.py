"""Register arithmetic of the backward: from S^T to P and P (1 - tanh^2), from dP^T to dS, one pass a tile.

All tiles are transposed (keys down, queries across) and lie in the WGMMA layout. A thread holds, for each
64 rows m, 8 columns j, half h and e: row 64 m + 8 h + 16 warp + lane / 4, column 8 j + 2 (lane % 4) + e.

P(1 - t^2) goes through shared memory in 16 bits. float16 keeps three bits more of it than bfloat16 does, and
`boost` keeps small probabilities normal: P is computed as P * 2**boost, divided out of dK, dV and dQ again.
Entries below 2**-25 of that are lost: 2e-12 (float16 inputs: 3e-8), which matters only where every logit lies
far beyond the cap. Its sign bit says that dropout took the entry.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from jaxcap import dropout as philox
from jaxcap.pallas.scores import tanh

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
F32 = jnp.float32


def boost(dtype: Any) -> int:
    """P is scaled by 2**boost; room is left for P = 4. float16 stays unscaled: its own dS would overflow."""
    return 14 if jnp.dtype(dtype) == jnp.bfloat16 else 0


@dataclasses.dataclass(frozen=True)
class Scores:
    """What happens to one score, all static; a part that is off leaves no instruction."""

    scale: float
    softcap: float | None
    dtype: Any
    band: tuple[int | None, int | None]  # bounds of key - query, indices or positions
    query_offset: int  # position of query 0 for ALiBi
    positions: bool = False
    segments: bool = False
    dead_keys: bool = False
    mask: tuple[int, int] | None = None  # strides of query and key in a [T or 1, S or 1] plane
    mask_planes: tuple[int, int] = (1, 1)  # its batch and heads
    mask_size: int = 1  # elements of a plane
    last: tuple[int, int] = (0, 0)  # query and key
    bias: tuple[int, int] | None = None
    bias_dtype: Any = None
    bias_gradient: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    paired: bool = False  # 1 - t^2 and its product with P in pairs of float16

    @property
    def masks(self) -> bool:
        """Whether a partial tile differs from a full one."""
        return self.band != (None, None) or self.segments or self.dead_keys or self.mask is not None


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _k(value: float) -> ir.Value:
    return arith.constant(_f32(), ir.FloatAttr.get(_f32(), value))


def _n(value: int) -> ir.Value:
    value = int(value) & 0xFFFFFFFF
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value - (value >> 31 << 32)))


def _asm(result: Any, args: list, text: str, constraints: str, effects: bool = False) -> Any:
    return llvm.inline_asm(result, args, text, constraints, has_side_effects=effects)


def _at(vec: Any, e: int) -> ir.Value:
    where = ir.DenseI64ArrayAttr.get([e])
    return vector.extract(vec, dynamic_position=[], static_position=where)


def _scalar(x: Any) -> ir.Value:
    return x.registers.item() if hasattr(x, "registers") else x


def _select(condition: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    return arith.select(condition, yes, no)


def _compare(op: str, a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(getattr(arith.CmpIPredicate, op), a, b)


class _Thread:
    """Where this thread's registers lie in a tile."""

    def __init__(self) -> None:
        tid = arith.remui(utils.thread_idx(), _n(128))
        lane = arith.remui(tid, _n(32))
        warp = arith.divui(tid, _n(32))
        self.row = arith.addi(arith.muli(warp, _n(16)), arith.divui(lane, _n(4)))
        self.column = arith.muli(arith.remui(lane, _n(4)), _n(2))

    def columns(self, ref: Any, kind: Any) -> Callable[[int], ir.Value]:
        """j -> the two values of a [columns] vector in shared memory that the thread needs."""
        base = utils.getelementptr(utils.memref_ptr(ref), [self.column], kind)
        pair = ir.VectorType.get((2,), kind)
        return lambda j: llvm.load(pair, utils.getelementptr(base, [8 * j], kind))

    def rows(self, ref: Any, kind: Any, tall: int) -> dict[tuple[int, int], ir.Value]:
        """The thread's values of a [rows] vector in shared memory."""
        base = utils.getelementptr(utils.memref_ptr(ref), [self.row], kind)
        return {
            (m, h): llvm.load(kind, utils.getelementptr(base, [64 * m + 8 * h], kind))
            for m in range(tall)
            for h in range(2)
        }


def _pair(kind: str, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two float32 as a pair of 16-bit values of `kind`."""
    return _asm(_i32(), [high, low], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f")


def _typed(pair: ir.Value, dtype: Any) -> ir.Value:
    """A pair of 16-bit values of any kind, as of `dtype`."""
    one = vector.broadcast(ir.VectorType.get((1,), _i32()), pair)
    return vector.bitcast(ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype))), one)


def _pack(kind: str, dtype: Any, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two float32 as a pair of 16-bit values of `kind` in a register typed as `dtype`."""
    return _typed(_pair(kind, low, high), dtype)


def _times_slope(p: ir.Value, t: ir.Value) -> ir.Value:
    """p (1 - t^2) of pairs of float16."""
    text = "{ .reg .b32 a; neg.f16x2 a, $2; fma.rn.f16x2 a, a, $2, $3; mul.rn.f16x2 $0, a, $1; }"
    return _asm(_i32(), [p, t, _n(0x3C003C00)], text, "=r,r,r,r")


def _name(dtype: Any) -> str:
    return {jnp.dtype(jnp.bfloat16): "bf16x2", jnp.dtype(jnp.float16): "f16x2"}[jnp.dtype(dtype)]


def _philox(key: tuple, counter: tuple) -> list[ir.Value]:
    """`jaxcap.dropout.philox` on registers."""
    c = list(counter)
    k = list(key)
    for r in range(philox.ROUNDS):
        hi, lo = [], []
        for factor, word in zip(philox.MULTIPLIERS, (c[0], c[2]), strict=True):
            hi.append(_asm(_i32(), [word, _n(factor)], "mul.hi.u32 $0, $1, $2;", "=r,r,r"))
            lo.append(arith.muli(word, _n(factor)))
        c = [
            arith.xori(arith.xori(hi[1], c[1]), k[0]),
            lo[1],
            arith.xori(arith.xori(hi[0], c[3]), k[1]),
            lo[0],
        ]
        if r + 1 < philox.ROUNDS:
            k = [arith.addi(k[i], _n(philox.WEYL[i])) for i in range(2)]
    return c


def _drop3(x: ir.Value) -> ir.Value:
    high = arith.shli(arith.shrui(x, _n(4)), _n(3))
    return arith.ori(high, arith.andi(x, _n(7)))


class _Dropout:
    """Which entries survive; `place`: int32 [8] in memory, see `backward_tables.dropout_places`."""

    def __init__(
        self, place: Any, k0: ir.Value, q0: ir.Value, thread: _Thread, rate: float, aligned: bool
    ):
        pointer = utils.memref_ptr(place)
        word = [llvm.load(_i32(), utils.getelementptr(pointer, [i], _i32())) for i in range(8)]
        self.key = (word[0], word[1])
        self.batch, self.head = word[2], word[3]
        self.q_start, self.q_step, self.k_start, self.k_step = word[4:]
        self.k = arith.addi(k0, thread.row)
        self.q = arith.addi(q0, thread.column)
        self.least = _n(philox.threshold(rate))
        self.aligned = aligned
        self.cache: dict = {}

    def _index(self, start, step, base, offset):
        return arith.addi(start, arith.muli(step, arith.addi(base, _n(offset))))

    def keep(self, m: int, j: int, h: int, e: int) -> ir.Value:
        if self.aligned:  # rows 8 apart and columns 8 apart share a call
            block = (m, j // 2, e)
            if block not in self.cache:
                k = self._index(self.k_start, self.k_step, self.k, 64 * m)
                q = self._index(self.q_start, self.q_step, self.q, 16 * (j // 2) + e)
                counter = (_drop3(k), _drop3(q), self.head, self.batch)
                self.cache[block] = _philox(self.key, counter)
            word = self.cache[block][2 * (j % 2) + h]
        else:
            k = self._index(self.k_start, self.k_step, self.k, 64 * m + 8 * h)
            q = self._index(self.q_start, self.q_step, self.q, 8 * j + e)
            words = _philox(self.key, (_drop3(k), _drop3(q), self.head, self.batch))
            bit = lambda x: _compare("ne", arith.andi(x, _n(8)), _n(0))
            of_key = [_select(bit(k), words[2 * i + 1], words[2 * i]) for i in range(2)]
            word = _select(bit(q), of_key[1], of_key[0])
        return _compare("uge", word, self.least)


def probabilities(
    scores: Scores,
    s: Any,
    nlse: Any,
    k0: Any,
    q0: Any,
    plane: Any,
    refs: dict[str, Any],
    masked: bool,
    aligned: bool,
) -> tuple[Any, ...]:
    """(P, P (1 - t^2)) of an S^T tile whose first key is k0 and first query q0.

    t = tanh(scale s / cap);  P = 2**((cap t + bias - slope |distance|) log2(e) + nlse), 0 if masked

    nlse: [queries] float32 in shared memory, -lse log2(e) + boost, -inf for an empty row.
    refs: in shared memory `dead` [keys] float32 (0 or -inf), `kseg`, `qseg`, `kpos`, `qpos` int32; in
    global memory `mask` (all planes in a row, of which number `plane`), `bias` (one plane
    [T or 1, S or 1]), `slope` [1], `place` [8].
    With `bias_gradient` a third result, P in float16 before dropout.
    """
    names = list(refs)
    shape = s.shape
    cap = scores.softcap or 0.0
    capped = cap > 0.0
    paired = scores.paired and capped and not scores.dropout_rate and not scores.bias_gradient
    c1 = scores.scale / cap if capped else scores.scale * LOG2E
    c2 = cap * LOG2E

    def body(ctx, s, nlse, k0, q0, plane, *args):
        del ctx
        r = dict(zip(names, args, strict=True))
        k0, q0, plane = _scalar(k0), _scalar(q0), _scalar(plane)
        thread = _Thread()
        tall, wide = shape[0] // 64, shape[1] // 8
        regs = s.registers.reshape(tall, wide, 2)
        nl = thread.columns(nlse, _f32())
        by_index = scores.band != (None, None) and not scores.positions
        if (by_index and masked) or (scores.alibi and not scores.positions):
            first = arith.subi(arith.addi(k0, thread.row), arith.addi(q0, thread.column))
        if masked and scores.dead_keys:
            dead = thread.rows(r["dead"], _f32(), tall)
        if masked and scores.segments:
            kseg, qseg = thread.rows(r["kseg"], _i32(), tall), thread.columns(r["qseg"], _i32())
        if scores.positions and (masked or scores.alibi):
            kpos, qpos = thread.rows(r["kpos"], _i32(), tall), thread.columns(r["qpos"], _i32())
        if scores.alibi:
            slope = arith.mulf(llvm.load(_f32(), utils.memref_ptr(r["slope"])), _k(-LOG2E))
        planes = {}
        if "bias" in r:
            planes["bias"] = _plane(
                utils.memref_ptr(r["bias"]), scores.bias, scores, thread, k0, q0
            )
        if "mask" in r and masked:
            # A reference to booleans counts in bits, the array has one a byte: no slicing before this.
            size = arith.constant(_i64(), ir.IntegerAttr.get(_i64(), scores.mask_size))
            start = arith.muli(arith.extsi(_i64(), plane), size)
            byte = ir.IntegerType.get_signless(8)
            pointer = utils.getelementptr(utils.memref_ptr(r["mask"]), [start], byte)
            planes["mask"] = _plane(pointer, scores.mask, scores, thread, k0, q0)
        drop = None
        if scores.dropout_rate:
            drop = _Dropout(r["place"], k0, q0, thread, scores.dropout_rate, aligned)

        def one(m, j, h, e, nl, qs, qp):
            x = _at(regs[m, j, h], e)
            if capped:
                t = tanh(arith.mulf(x, _k(c1)), cap)
                a = mlir_math.fma(t, _k(c2), _at(nl, e))
            else:
                a = mlir_math.fma(x, _k(c1), _at(nl, e))
            distance: Any = None
            if scores.positions and (masked or scores.alibi):
                distance = arith.subi(kpos[m, h], _at(qp, e))
            offset = 64 * m + 8 * h - 8 * j - e
            if scores.alibi:
                d = distance
                if d is None:
                    d = arith.addi(first, _n(offset - scores.query_offset))
                d = mlir_math.absf(arith.sitofp(_f32(), d))
                a = mlir_math.fma(slope, d, a)
            keep = []
            if "bias" in planes:
                bias = planes["bias"](m, j, h, e, scores.bias_dtype)
                a = mlir_math.fma(bias, _k(LOG2E), a)
                hidden = arith.cmpf(arith.CmpFPredicate.OEQ, bias, _k(-math.inf))
                a = _select(hidden, _k(-math.inf), a)
            if masked:
                if scores.dead_keys:
                    a = arith.addf(a, dead[m, h])
                low, high = scores.band
                if by_index:
                    if low is not None:
                        keep.append(_compare("sge", first, _n(low - offset)))
                    if high is not None:
                        keep.append(_compare("sle", first, _n(high - offset)))
                elif scores.positions:
                    if low is not None:
                        keep.append(_compare("sge", distance, _n(low)))
                    if high is not None:
                        keep.append(_compare("sle", distance, _n(high)))
                if scores.segments:
                    keep.append(_compare("eq", kseg[m, h], _at(qs, e)))
                if "mask" in planes:
                    keep.append(planes["mask"](m, j, h, e, jnp.int8))
                for kept in keep:
                    a = _select(kept, a, _k(-math.inf))
            if "bias" in planes:
                # P is at most 1. Of a row whose biases are all -1e9, say, the residual is off by tens.
                most = _k(float(boost(scores.dtype)))
                a = _asm(_f32(), [a, most], "min.NaN.f32 $0, $1, $2;", "=f,f,f")
            p = _asm(_f32(), [a], "ex2.approx.ftz.f32 $0, $1;", "=f,f")
            if paired:  # the product is of two at a time
                return p, t, p
            pd = arith.mulf(p, mlir_math.fma(arith.negf(t), t, _k(1.0))) if capped else p
            whole = p
            if drop is not None:
                kept = drop.keep(m, j, h, e)
                p = _select(kept, p, _k(0.0))
                pd = _select(kept, pd, arith.negf(pd))
            return p, pd, whole

        ps, pds, pfs = (np.empty(regs.shape, object) for _ in range(3))
        for j in range(wide):
            n_j = nl(j)
            qs = qseg(j) if masked and scores.segments else None
            qp = qpos(j) if scores.positions and (masked or scores.alibi) else None
            for m in range(tall):
                for h in range(2):
                    (p0, d0, f0), (p1, d1, f1) = (one(m, j, h, e, n_j, qs, qp) for e in range(2))
                    ps[m, j, h] = _pack(_name(scores.dtype), scores.dtype, p0, p1)
                    pair = _pair("f16x2", d0, d1)
                    if paired:
                        pair = _times_slope(_pair("f16x2", p0, p1), pair)
                    pds[m, j, h] = _typed(pair, scores.dtype)
                    if scores.bias_gradient:
                        pfs[m, j, h] = _pack("f16x2", scores.dtype, f0, f1)

        def array(x):
            return mgpu.FragmentedArray(
                _registers=x.reshape(s.registers.shape), _layout=s.layout, _is_signed=None
            )

        return (array(ps), array(pds), *([array(pfs)] if scores.bias_gradient else []))

    kinds = (WGMMA, plgpu.RefType(), WGMMA, WGMMA, WGMMA, *(plgpu.RefType() for _ in names))
    out = plgpu.ShapeDtypeStruct(shape, scores.dtype, layout=WGMMA)
    call = plgpu.inline_mgpu(arg_types=kinds, return_type=(out,) * (2 + scores.bias_gradient))(body)
    return call(s, nlse, jnp.int32(k0), jnp.int32(q0), jnp.int32(plane), *refs.values())


def _addresses(
    pointer: Any, strides: tuple[int, int], scores: Scores, thread: _Thread, k0: Any, q0: Any
) -> Callable:
    """Pointers to single elements of a plane; indices past the end give the last element."""
    q_last, k_last = scores.last
    k, q = arith.addi(k0, thread.row), arith.addi(q0, thread.column)
    by: dict = {}

    def offset(kind, base, at, last, stride):
        if (kind, at) not in by:
            index = arith.extsi(_i64(), arith.minsi(arith.addi(base, _n(at)), _n(last)))
            factor = arith.constant(_i64(), ir.IntegerAttr.get(_i64(), stride))
            by[kind, at] = arith.muli(index, factor)
        return by[kind, at]

    def address(m, j, h, e, dtype):
        at = None
        if strides[0]:
            at = offset("q", q, 8 * j + e, q_last, strides[0])
        if strides[1]:
            step = offset("k", k, 64 * m + 8 * h, k_last, strides[1])
            at = step if at is None else arith.addi(at, step)
        kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
        return pointer if at is None else utils.getelementptr(pointer, [at], kind)

    return address


def _plane(*where: Any) -> Callable:
    """Reader of single elements of a mask or bias plane."""
    address = _addresses(*where)

    def read(m, j, h, e, dtype):
        kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
        value = llvm.load(kind, address(m, j, h, e, dtype))
        if jnp.dtype(dtype) == jnp.int8:
            return _compare("ne", value, arith.constant(kind, ir.IntegerAttr.get(kind, 0)))
        return value if jnp.dtype(dtype) == F32 else arith.extf(_f32(), value)

    return read


def score_gradients(
    scores: Scores, pd: Any, dp: Any, ndelta: Any, late: bool, bias: tuple | None = None
) -> Any:
    """dS = P (1 - t^2) (dP - delta) in the input's dtype; `pd` as `probabilities` packed it.

    dP arrives with -delta in it, unless `late`. With dropout it never does: dS = P (1 - t^2) (keep dP / (1 -
    rate) - delta). bias: (P, plane, k0, q0), adds P (dP - delta) to a float32 plane [T or 1, S or 1].
    """
    drop = bool(scores.dropout_rate)
    late = late or drop
    shape = dp.shape

    def body(ctx, pd, dp, *rest):
        del ctx
        rest = list(rest)
        tall, wide = shape[0] // 64, shape[1] // 8
        packed, dps = pd.registers.reshape(tall, wide, 2), dp.registers.reshape(tall, wide, 2)
        out = np.empty(packed.shape, object)
        if late:
            nd = _Thread().columns(rest.pop(0), _f32())
        if drop:
            inverse = _k(1.0 / (1.0 - scores.dropout_rate))
        if bias is not None:
            whole, plane, k0, q0 = rest
            whole = whole.registers.reshape(packed.shape)
            gradients = np.empty((*packed.shape, 2), object)
        halves = ir.VectorType.get((2,), ir.F16Type.get())
        for j in range(wide):
            nd_j = nd(j) if late else None
            for m in range(tall):
                for h in range(2):
                    pair = vector.bitcast(halves, packed[m, j, h])
                    ds = []
                    for e in range(2):
                        p = arith.extf(_f32(), _at(pair, e))
                        g = _at(dps[m, j, h], e)
                        if drop:
                            gone = _compare("slt", arith.bitcast(_i32(), p), _n(0))
                            g = _select(gone, _k(0.0), arith.mulf(g, inverse))
                            p = mlir_math.absf(p)
                        if late:
                            g = arith.addf(g, _at(nd_j, e))
                        ds.append(arith.mulf(p, g))
                        if bias is not None:
                            p = arith.extf(_f32(), _at(vector.bitcast(halves, whole[m, j, h]), e))
                            gradients[m, j, h, e] = arith.mulf(p, g)
                    out[m, j, h] = _pack(_name(scores.dtype), scores.dtype, *ds)
        if bias is not None:
            _add_to_plane(plane, gradients, scores, _scalar(k0), _scalar(q0))
        return mgpu.FragmentedArray(
            _registers=out.reshape(pd.registers.shape), _layout=pd.layout, _is_signed=None
        )

    extra: list[Any] = []
    kinds: list[Any] = [WGMMA, WGMMA]
    if late:
        extra.append(ndelta)
        kinds.append(plgpu.RefType())
    if bias is not None:
        extra += [bias[0], bias[1], jnp.int32(bias[2]), jnp.int32(bias[3])]
        kinds += [WGMMA, plgpu.RefType(), WGMMA, WGMMA]
    result = plgpu.ShapeDtypeStruct(shape, scores.dtype, layout=WGMMA)
    return plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=result)(body)(pd, dp, *extra)


def _add_to_plane(ref: Any, x: np.ndarray, scores: Scores, k0: ir.Value, q0: ir.Value) -> None:
    """Adds a tile [m, j, h, e] to a plane, summed over keys or queries first where the plane has only one."""
    assert scores.bias is not None
    by_query, by_key = scores.bias
    tall, wide = x.shape[:2]
    thread = _Thread()
    address = _addresses(utils.memref_ptr(ref), scores.bias, scores, thread, k0, q0)
    lane = arith.remui(utils.thread_idx(), _n(32))

    def summed(values: list, lanes: tuple[int, ...]) -> ir.Value:
        total = values[0]
        for v in values[1:]:
            total = arith.addf(total, v)
        for step in lanes:
            text = f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;"
            total = arith.addf(total, _asm(_f32(), [total], text, "=f,f", True))
        return total

    def red(value: Any, place: ir.Value, when: ir.Value | None) -> None:
        void = ir.Type.parse("!llvm.void")
        if when is None:
            _asm(void, [place, value], "red.relaxed.gpu.global.add.f32 [$0], $1;", "l,f", True)
            return
        text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.add.f32 [$0], $1; }"
        _asm(void, [place, value, arith.extui(_i32(), when)], text, "l,f,r", True)

    across_queries, across_keys = (1, 2), (4, 8, 16)  # lanes that hold other columns, other rows
    first_column = _compare("eq", arith.andi(lane, _n(3)), _n(0))
    first_row = _compare("ult", lane, _n(4))
    if by_query and by_key:
        for m, j, h, e in np.ndindex(x.shape):
            red(x[m, j, h, e], address(m, j, h, e, F32), None)
    elif by_key:
        for m, h in np.ndindex(tall, 2):
            total = summed(list(x[m, :, h, :].flat), across_queries)
            red(total, address(m, 0, h, 0, F32), first_column)
    elif by_query:
        for j, e in np.ndindex(wide, 2):
            total = summed(list(x[:, j, :, e].flat), across_keys)
            red(total, address(0, j, 0, e, F32), first_row)
    else:
        total = summed(list(x.flat), across_queries + across_keys)
        red(total, address(0, 0, 0, 0, F32), _compare("eq", lane, _n(0)))


def red_add(ref: Any, x: Any, first: int) -> None:
    """red.global.add.v4.f32 of a 64 x n float32 tile into `ref` [columns / 8, 128, 4], from 8 * first on."""

    def add(ctx, ref, x):
        del ctx
        tid = arith.remui(utils.thread_idx(), _n(128))
        base = utils.getelementptr(utils.memref_ptr(ref), [arith.muli(tid, _n(4))], _f32())
        regs = x.registers.reshape(x.shape[1] // 8, -1)
        for j, group in enumerate(regs):
            size = ir.VectorType(group[0].type).shape[0]
            values = [_at(v, e) for v in group for e in range(size)]
            place = utils.getelementptr(base, [(first + j) * 512], _f32())
            text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1,$2,$3,$4};"
            _asm(ir.Type.parse("!llvm.void"), [place, *values], text, "l,f,f,f,f", True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))(add)(ref, x)


def store_fragments(ref: Any, x: Any) -> None:
    """A 64 x n float32 tile into shared memory `ref` [n / 4, 256], in the order in which `red_add` adds."""

    def store(ctx, ref, x):
        del ctx
        tid = arith.remui(utils.thread_idx(), _n(128))
        base = utils.getelementptr(utils.memref_ptr(ref), [arith.muli(tid, _n(4))], _f32())
        regs = x.registers.reshape(x.shape[1] // 8, -1)
        four = ir.VectorType.get((4,), _f32())
        for j, group in enumerate(regs):
            size = ir.VectorType(group[0].type).shape[0]
            values = [_at(v, e) for v in group for e in range(size)]
            place = utils.getelementptr(base, [j * 512], _f32())
            llvm.store(vector.from_elements(four, values), place, alignment=16)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))(store)(ref, x)


def write_pairs(ref: Any, pairs: np.ndarray) -> None:
    """Values of 16 bits into the rows of `ref`, which is tiled by 8 x 64 and swizzled.

    pairs: int32 [rows / 64, columns / 8, 2], the two values that a thread has of its row and of row + 8. One
    stmatrix stores 16 columns, four 8 x 8 matrices, at whose rows the lanes 8 i to 8 i + 7 point: of matrix i
    the rows from 8 (i % 2) on, the columns from 8 (i / 2) on. Row r lies 128 r bytes into a tile, the piece c
    of its eight at c ^ (r % 8); 64 columns lie so without tiling, too.
    """
    tall, wide, _ = pairs.shape
    tid = arith.remui(utils.thread_idx(), _n(128))
    lane, warp = arith.remui(tid, _n(32)), arith.divui(tid, _n(32))
    i, r = arith.divui(lane, _n(8)), arith.remui(lane, _n(8))
    tiles = wide // 8  # side by side
    eight = arith.addi(arith.muli(warp, _n(2)), arith.remui(i, _n(2)))
    at = arith.addi(arith.muli(eight, _n(1024 * tiles)), arith.muli(r, _n(128)))
    at = arith.addi(at, arith.muli(arith.xori(arith.divui(i, _n(2)), r), _n(16)))
    at = arith.addi(at, llvm.ptrtoint(_i32(), utils.memref_ptr(ref)))
    void = ir.Type.parse("!llvm.void")
    for m, g in np.ndindex(tall, wide // 2):
        place = arith.xori(at, _n(32 * (g % 4)))
        place = arith.addi(place, _n(1024 * (8 * m * tiles + g // 4)))
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
        four = pairs[m, 2 * g : 2 * g + 2].flat
        _asm(void, [place, *four], text, "r,r,r,r,r", True)


def store_pairs(ref: Any, x: Any) -> None:
    """A 16-bit tile into `ref` (tiled by 8 x 64, swizzled), from registers ordered as wgmma's A: in any other
    order they would have to be moved together first."""

    def store(ctx, ref, x):
        del ctx
        one = ir.VectorType.get((1,), _i32())
        pairs = np.empty((x.shape[0] // 64, x.shape[1] // 8, 2), object)
        for at, pair in enumerate(x.registers.flat):
            pairs.flat[at] = _at(vector.bitcast(one, pair), 0)
        write_pairs(ref, pairs)

    kind = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    plgpu.inline_mgpu(arg_types=(kind, WGMMA))(store)(ref, x)
