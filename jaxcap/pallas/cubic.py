"""The cap as a cubic where every logit is far below it: proved at the end of a tile, else done again.

tanh(x) = x (A + B x**2) up to a limit L, as near as the special-function unit comes, in three instructions
with the exponent's factor in them and nothing for that unit. Larger |x| are found out for nothing. The
square saturates at one, for which Q is scaled by a power of two; from there on the exponent goes on in a
straight line, so that it rises everywhere. With c = cap * log2(e) * tanh(L) therefore

- a row sum below 2**(c - shift) says that no x was above L;
- one above n 2**(MARGIN - c - shift), of n keys, that those below -L weigh less than 2**-MARGIN of it.

A sum that does not say both (that of a NaN, too) makes its warpgroup take the exact form from then on, and
its block does that tile once more, after all others. A warpgroup takes the exact form for a tile, too, whose
first step has logits that make this likely. All of it follows from the data of the call alone, so that it
gives the same bits again; but the form of a row depends on other rows, its bits (not its error) as well.
It is weights that are proved: a key far below -L may weigh nothing, also where its value is 1e30 or infinite.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as mlir_math

from jaxcap.pallas import instructions as ins
from jaxcap.pallas import scores as sc
from jaxcap.pallas.instructions import ACC, const
from jaxcap.softcap import LARGE_CAP, LOG2E
from jaxcap.spec import AttentionSpec

#: Limits of |x|, and A, B of tanh(x) = x (A + B x**2) up to there, relative minimax.
CUBICS = (
    (0.35, (0.9997628021537706, -0.3176961859703187)),  # 2**-12.0
    (0.40, (0.9996017104524755, -0.31317268170877477)),  # 2**-11.3
)
#: Share of the limit that the first step's 64 keys, from which the others are judged, may reach.
FIRST = 0.6
MARGIN = 10
#: A block must have as many tiles on average, of which one may have to be done again, and a tile as many
#: steps, or its beginning and end cost more than is won. Beside a transfer blocks have fewer.
LEAST_TILES, LEAST_BESIDE, LEAST_STEPS = 8, 3, 8


def applies(spec: AttentionSpec, keys: int, steps: np.ndarray, blocks: int) -> bool:
    """Whether the cap leaves room for a step of `keys` keys, and for a row, below c; `steps` of each tile."""
    if spec.softcap is None or spec.softcap > LARGE_CAP or not spec.scale:
        return False
    room = 2.0 ** log2_highest(spec) >= max(4 * keys, 2 * spec.key_length)
    room = room and 0 <= log2_scale(spec) <= 24  # Q stays far from the ends of bfloat16
    least = LEAST_BESIDE if spec.beside_transfers else LEAST_TILES
    return room and len(steps) >= least * blocks and float(np.mean(steps)) >= LEAST_STEPS


def fitted(spec: AttentionSpec) -> tuple[float, tuple[float, float]]:
    """The cubic: the more accurate one where a row's sum may well be below its 2**c."""
    enough = 1 + math.log2(spec.key_length)
    return next((c for c in CUBICS if _room(spec, c[0]) >= enough), CUBICS[-1])


def log2_scale(spec: AttentionSpec) -> int:
    """Q is divided by 2**this, with which the square of a product is one between 0.47 and 0.95 of the cap."""
    assert spec.softcap is not None
    return math.floor(math.log2(0.95 * spec.softcap / abs(spec.scale)))


def log2_highest(spec: AttentionSpec) -> float:
    """The c above."""
    return _room(spec, fitted(spec)[0])


def _room(spec: AttentionSpec, limit: float) -> float:
    assert spec.softcap is not None
    return spec.softcap * LOG2E * math.tanh(limit)


def exponents(
    x: list[ir.Value], inner: float, outer: float, shift: int, coefficients: tuple[float, float]
) -> list[ir.Value]:
    """outer * tanh(inner * x) - shift."""
    a, b = (c * outer * inner ** (2 * i + 1) for i, c in enumerate(coefficients))
    out = []
    for v in x:
        square = sc.asm(ins.f32(), [v], "mul.ftz.sat.f32 $0, $1, $1;", "=f,f")
        factor = sc.fma(square, const(b), const(a))
        e = sc.fma(v, factor, const(float(-shift))) if shift else arith.mulf(v, factor)
        out.append(e)
    return out


def bounds(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The band, None where it always holds: sums with what is left stay within int32."""
    low, high = spec.band
    offset = spec.query_offset
    if low is not None and low + offset + spec.query_length - 1 <= 0:
        low = None
    if high is not None and high + offset >= spec.key_length - 1:
        high = None
    return low, high


# ---- in the kernel ------------------------------------------------------------------------
def scale(ref: Any, slot: Any, swizzle: int, log2: int) -> None:
    """`ref` [slots, chunks, rows, width][slot] *= 2**-log2, bfloat16, by a warpgroup, for products."""
    _, chunks, rows, _ = ref.shape
    size = chunks * rows * swizzle

    def body(ctx, tile, at):
        del ctx
        lane, warp = ins.lane_and_warp()
        thread = arith.addi(arith.shli(warp, const(5)), lane)
        base = utils.memref_ptr(tile)
        i8 = ir.IntegerType.get_signless(8)
        words = ir.VectorType.get((4,), ins.i32())
        start = arith.muli(at.registers[()], const(size))
        start = arith.addi(start, arith.shli(thread, const(4)))
        half = int(np.float32(2.0**-log2).view(np.uint32)) >> 16
        factor = const(half << 16 | half)
        for part in range(0, size, 16 * ins.WARPGROUP):
            pointer = utils.getelementptr(base, [arith.addi(start, const(part))], i8)
            loaded = ins.elements(llvm.load(words, pointer, alignment=16))
            text = "mul.rn.bf16x2 $0, $1, $2;"
            scaled = [ins.asm(ins.i32(), [w, factor], text, "=r,r,r") for w in loaded]
            llvm.store(ins.vector.from_elements(words, scaled), pointer, alignment=16)
        ins.asm(ins.void(), [], "fence.proxy.async.shared::cta;", "", True)

    assert size % (16 * ins.WARPGROUP) == 0
    ins.inline(body, [ins.swizzled(ref, swizzle), ins.scalar(slot)])


def exact_form(s: Any, before: Any, largest: float) -> Any:
    """1 if a warpgroup takes the exact form: `before` is 1, or |S| of its first step exceeds `largest`."""

    def body(ctx, s, before):
        del ctx
        top = functools.reduce(sc.maximum, map(mlir_math.absf, ins.scalars(s)))
        large = arith.cmpf(arith.CmpFPredicate.OGT, top, const(largest))
        held = sc.compare(before.registers[()], "ne", const(0))
        return ins.any_of_warpgroup(arith.ori(large, held))

    result = ins.struct((), jnp.int32, ins.SPLAT)
    return ins.inline(body, [(s, ACC), ins.scalar(before)], result)


def disproved(sums: Any, first: Any, keys: Any, spec: AttentionSpec, shift: int) -> Any:
    """1 if a row of the warpgroup's 64 from `first` has a sum that does not prove its tile, else 0.

    sums [64, 8], their columns alike; `keys`: as many as a row attends at most.
    """
    high = 2.0 ** (log2_highest(spec) - shift)
    low = 2.0 ** (MARGIN - log2_highest(spec) - shift)
    band_low, band_high = bounds(spec)

    def body(ctx, sums, first, keys):
        del ctx
        row, _ = ins.first_row_and_column()
        row = arith.addi(row, first.registers[()])
        bad = []
        for half, l in enumerate(ins.scalars(sums)[::2]):
            at = arith.addi(row, const(8 * half))
            n = keys.registers[()]
            if band_low is not None or band_high is not None:
                position = arith.addi(at, const(spec.query_offset))
                start, stop = const(0), const(spec.key_length)
                if band_low is not None:
                    start = arith.maxsi(start, arith.addi(position, const(band_low)))
                if band_high is not None:
                    stop = arith.minsi(stop, arith.addi(position, const(band_high + 1)))
                n = arith.minsi(n, arith.subi(stop, start))
            least = arith.mulf(arith.sitofp(ins.f32(), n), const(low))
            above = arith.cmpf(arith.CmpFPredicate.OGT, l, least)
            below = arith.cmpf(arith.CmpFPredicate.OLT, l, const(high))
            good = arith.andi(above, below)
            there = sc.compare(at, "slt", const(spec.query_length))
            there = arith.andi(there, sc.compare(n, "sgt", const(0)))
            bad.append(arith.andi(there, arith.xori(good, arith.constant(good.type, 1))))
        return ins.any_of_warpgroup(arith.ori(*bad))

    arguments = [(sums, ACC), ins.scalar(first), ins.scalar(keys)]
    return ins.inline(body, arguments, ins.struct((), jnp.int32, ins.SPLAT))


def to_words(p: Any, packed: Callable[[int], bool]) -> Any:
    """P in float32 as `scores.exp2_packed` leaves it where `packed(pair)`, rounded to bfloat16."""

    def body(ctx, p):
        del ctx
        x = ins.scalars(p)
        for n in filter(packed, range(len(x) // 2)):
            text, pair = "cvt.rn.bf16x2.f32 $0, $1, $2;", [x[2 * n + 1], x[2 * n]]
            word = ins.asm(ins.i32(), pair, text, "=r,f,f")
            x[2 * n : 2 * n + 2] = const(0.0), arith.bitcast(ins.f32(), word)
        return ins.fragment(x, p.shape, ACC)

    return ins.inline(body, [(p, ACC)], ins.struct(p.shape, jnp.float32, ACC))


def to_numbers(p: Any, packed: Callable[[int], bool]) -> Any:
    """The converse."""

    def body(ctx, p):
        del ctx
        x = ins.scalars(p)
        for n in filter(packed, range(len(x) // 2)):
            word = ins.joined(*x[2 * n : 2 * n + 2])
            halves = arith.shli(word, const(16)), arith.andi(word, const(0xFFFF0000))
            x[2 * n : 2 * n + 2] = (arith.bitcast(ins.f32(), h) for h in halves)
        return ins.fragment(x, p.shape, ACC)

    return ins.inline(body, [(p, ACC)], ins.struct(p.shape, jnp.float32, ACC))
