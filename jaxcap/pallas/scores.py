"""Register arithmetic on a tile of logits: cap, exp2, masks, bias, ALiBi, dropout.

A tile of S is 64 queries x columns of keys in the accumulator layout: a thread holds, of rows r and
r + 8, the columns c, c + 1, c + 8, c + 9, ... (`Places`). Everything here runs inside the bodies
of `instructions.inline`, on MLIR scalars; what a call does not use is not emitted.

Exponents are in base 2: score * log2(e). Approximations, with their errors over all of float32:
tanh.approx.f32, relative 2**-11, for caps up to `softcap.LARGE_CAP`; ex2.approx.ftz.f32, relative 2**-22;
`exp2_fma`, the same on the multiply-add pipe for |exponent| < 126, relative 7.5e-5 (degree 3) or 2.6e-6
(degree 4). bfloat16 rounds by up to 3.9e-3, 1.66e-3 in the mean square; `exp2_packed`, which is rounded
to it, is off by up to 4.2e-3 and 1.68e-3.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf
from jaxlib.mlir.dialects import math as mlir_math

from jaxcap import dropout as philox
from jaxcap.pallas.instructions import asm, const, f32, first_row_and_column, i32
from jaxcap.softcap import LARGE_CAP, LOG2E
from jaxcap.spec import AttentionSpec

#: 2**f on [-1/2, 1/2], relative minimax; index i is the coefficient of f**i.
EXP2 = {
    3: (0.999928072470715, 0.6932609867148745, 0.24261114022877608, 0.05517167074709135),
    4: (
        0.9999992614340261,
        0.6931218144363279,
        0.24024744844444867,
        0.05591786278860605,
        0.009570102109042416,
    ),
}
#: `exp2_packed`: float16 coefficients of 36864 + 32 * 128 * (2**(v - 1) - 1) on [1, 2), the highest first,
#: twice in a word. There float16 goes in steps of 32, so that its bits are the seven of a bfloat16 fraction,
#: and 241 * 128. n - 114 is negative, so that the lower half of E << 5 plus R always carries into the upper
#: one, whose last coefficient is a step less.
PACKED_EXP2 = tuple(
    int(np.float16(a).view(np.uint16)) | int(np.float16(b).view(np.uint16)) << 16
    for a, b in ((306.5, 306.5), (23.78125, 23.78125), (1878.0, 1878.0), (34656.0, 34624.0))
)
PACKED_BIAS = 127 - 241
PACKED_FRACTION, PACKED_EXPONENT = 0x03FF03FF, 0x07FC07FC  # f, and n - 114 in nine bits
PACKED_ZERO = (0x00000400, 0xFFFF8000)  # whose sum is zero in both halves, with the carry
#: No row sum is as large, but of a NaN in `exp2_packed` or `exp2_fma`.
NAN_SUM = 2.0**100
At = tuple[int, int, int]
#: Adding it rounds to an integer that stands in the low bits of the sum.
MAGIC = 12582912.0
NEGATIVE = -math.inf


# ---- scalars ------------------------------------------------------------------------------------
def tanh(x: ir.Value, softcap: float) -> ir.Value:
    """One special-function operation; of a large cap, whose score it is too coarse for, two."""
    if softcap <= LARGE_CAP:
        return asm(f32(), [x], "tanh.approx.f32 $0, $1;", "=f,f")
    # 1 - 2 / (1 + exp(2 x)): absolute error 2**-22
    total = arith.addf(exp2(arith.mulf(x, const(2 * LOG2E))), const(1.0))
    return fma(reciprocal(total), const(-2.0), const(1.0))


def exp2(x: ir.Value) -> ir.Value:
    return asm(f32(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def log2(x: ir.Value) -> ir.Value:
    return asm(f32(), [x], "lg2.approx.f32 $0, $1;", "=f,f")


def reciprocal(x: ir.Value) -> ir.Value:
    return asm(f32(), [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f")


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return mlir_math.fma(a, b, c)


def maximum(a: ir.Value, b: ir.Value) -> ir.Value:
    """max.f32: of a number and a NaN the number."""
    return arith.maxnumf(a, b)


def exp2_fma(t: ir.Value, factor: float, shift: int, degree: int) -> ir.Value:
    """2**(t * factor - shift) on the multiply-add pipe; the exponent must be within +-126.

    A NaN, all its bits ones but the sign, gives the largest number, see `NAN_SUM`.
    """
    c, magic = const(float(factor)), const(MAGIC - shift)
    rounded = fma(t, c, magic)
    f = fma(t, c, arith.subf(magic, rounded))
    *rest, top = EXP2[degree]
    p = const(top)
    for a in reversed(rest):
        p = fma(p, f, const(a))
    exponent = arith.shli(arith.bitcast(i32(), rounded), const(23))
    return arith.bitcast(f32(), arith.addi(arith.bitcast(i32(), p), exponent))


def exp2_packed(t: Sequence[ir.Value], factor: float, shift: int) -> list[ir.Value]:
    """Two of 2**(t * factor - shift) as bfloat16, the exponent in [-126, 112]: words (E, R), as float32, for
    which (E << 5) + R has the first in its lower half and the second in its upper.

    With n + f = t * factor - shift in steps of 1/1024, 0 <= f < 1, a float32 sum's low bits are n and f;
    1 + f as float16 gives R, 2**f and a constant, by Horner's rule; E holds n. A NaN, all its bits ones but
    the sign, gives 2**113 or more, see `NAN_SUM`. `packed_words` is the same in NumPy.
    """
    first = MAGIC + 1024.0 * (PACKED_BIAS - shift)
    r = [arith.bitcast(i32(), fma(x, const(1024.0 * factor), const(first))) for x in t]
    low = asm(i32(), r, "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r")
    middle = asm(i32(), r, "prmt.b32 $0, $1, $2, 0x6521;", "=r,r,r")
    mask, one = const(PACKED_FRACTION), const(0x3C003C00)
    v = asm(i32(), [low, mask, one], "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r")  # (a & b) | c
    p, *rest = (const(c) for c in PACKED_EXP2)
    for c in rest:
        p = asm(i32(), [p, v, c], "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r")
    e = arith.andi(middle, const(PACKED_EXPONENT))
    return [arith.bitcast(f32(), x) for x in (e, p)]


def masked_pair(pair: Sequence[ir.Value], keep: Sequence[ir.Value | None]) -> list[ir.Value]:
    """`exp2_packed` where kept, else zeros."""
    if keep[0] is None and keep[1] is None:
        return list(pair)
    zero = const(0)
    halves = [
        const(bits) if kept is None else arith.select(kept, const(bits), zero)
        for kept, bits in zip(keep, (0xFFFF, 0xFFFF0000), strict=True)
    ]
    chosen = arith.ori(*halves)
    out = []
    for word, other in zip(pair, PACKED_ZERO, strict=True):
        args = [chosen, arith.bitcast(i32(), word), const(other)]
        word = asm(i32(), args, "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r")  # a ? b : c
        out.append(arith.bitcast(f32(), word))
    return out


def below(x: ir.Value, limit: float) -> ir.Value:
    """0 <= x < limit; false for a NaN."""
    bits = int(np.float32(limit).view(np.int32))
    return compare(arith.bitcast(i32(), x), "ult", const(bits))


def all_of_warp(conditions: Sequence[ir.Value]) -> ir.Value:
    """Whether all hold in all threads of the warp."""
    held = conditions[0]
    for other in conditions[1:]:
        held = arith.andi(held, other)
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.all.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
    )
    word = asm(i32(), [arith.extui(i32(), held)], text, "=r,r", True)
    return compare(word, "ne", const(0))


def select(condition: ir.Value | None, a: ir.Value, b: ir.Value) -> ir.Value:
    return a if condition is None else arith.select(condition, a, b)


def compare(a: ir.Value, op: str, b: ir.Value) -> ir.Value:
    return arith.cmpi(getattr(arith.CmpIPredicate, op), a, b)


def both(a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    if a is None or b is None:
        return b if a is None else a
    return arith.andi(a, b)


def load(ref: ir.Value, *indices: ir.Value | int) -> ir.Value:
    """An element of an array in global memory, 16-bit floats widened."""
    index = ir.IndexType.get()
    at = [arith.index_cast(index, const(i) if isinstance(i, int) else i) for i in indices]
    value = memref.load(ref, at)
    if isinstance(value.type, (ir.BF16Type, ir.F16Type)):
        value = arith.extf(f32(), value)
    return value


def quad_sum(x: ir.Value) -> ir.Value:
    for step in (1, 2):
        x = arith.addf(x, _shuffled(x, step))
    return x


def quad_max(x: ir.Value) -> ir.Value:
    for step in (1, 2):
        x = maximum(x, _shuffled(x, step))
    return x


def _shuffled(x: ir.Value, step: int) -> ir.Value:
    text = f"shfl.sync.bfly.b32 $0, $1, {step}, 31, -1;"
    return asm(f32(), [x], text, "=f,f", True)


# ---- where a register is ------------------------------------------------------------------------
class Places:
    """Indices along T and S of the registers of a 64 x `columns` tile at (q_first, k_first).

    Register (i, half, e) is query `rows[half]` and key `column + 8 * i + e` of the whole arrays.
    """

    def __init__(self, q_first: ir.Value, k_first: ir.Value, columns: int):
        row, column = first_row_and_column()
        row = arith.addi(row, q_first)
        self.rows = [row, arith.addi(row, const(8))]
        self.column = arith.addi(column, k_first)
        self.columns = columns

    def registers(self) -> list[At]:
        """(i, half, e) in the order of `instructions.scalars`."""
        groups = range(self.columns // 8)
        return [(i, half, e) for i in groups for half in (0, 1) for e in (0, 1)]

    def key(self, i: int, e: int) -> ir.Value:
        return arith.addi(self.column, const(8 * i + e))

    def by_row(self, make: Callable) -> Callable:
        """make(query) as a function of (i, half, e), emitted once a row."""
        known = [make(row) for row in self.rows]
        return lambda i, half, e: known[half]

    def by_column(self, make: Callable) -> Callable:
        """make(key) as a function of (i, half, e), emitted once a column."""
        known: dict = {}

        def value(i, half, e):
            if (i, e) not in known:
                known[i, e] = make(self.key(i, e))
            return known[i, e]

        return value


class Tile(NamedTuple):
    """int32 scalars of one step: first query and key, batch, head, and the ends of keys and queries."""

    q_first: Any
    k_first: Any
    batch: Any
    head: Any
    k_stop: Any
    q_stop: Any


class Extras(NamedTuple):
    """Arrays in global memory that the scores of a call depend on; None where it has none.

    Masks come as int8. `dropout`: rng, batch, head, query, key of `spec.Dropout`."""

    bias: Any = None
    mask: Any = None
    query_segments: Any = None
    kv_segments: Any = None
    query_positions: Any = None
    kv_positions: Any = None
    alibi: Any = None
    dropout: Any = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """The static part of the scores of a call.

    Bounds are those of `tiles.Grid` for whole tiles: None where they always hold; the band
    is `low <= k - (q + offset) <= high`. With explicit positions (`positional`) it is on those.
    """

    query_length: int
    key_length: int
    softcap: float | None
    scale: float
    low: int | None
    high: int | None
    offset: int
    positional: bool
    check_keys: bool  # some tile reaches past the last key
    segments: bool
    mask_shape: tuple[int, ...] | None
    bias_shape: tuple[int, ...] | None
    alibi: bool
    dropout_rate: float

    @classmethod
    def of(cls, spec: AttentionSpec, grid: Any) -> "Scores":
        positional = spec.query_positions or spec.kv_positions
        low, high = spec.band if positional else (grid.low, grid.high)
        return cls(
            spec.query_length,
            spec.key_length,
            spec.softcap,
            spec.scale,
            low,
            high,
            spec.query_offset,
            positional,
            spec.kv_lengths or spec.key_length % grid.tk != 0,
            spec.segment_ids,
            spec.mask_shape,
            spec.bias_shape,
            spec.alibi,
            spec.dropout_rate,
        )

    # -- factors ----------------------------------------------------------------------------------
    @property
    def inner(self) -> float:
        """What q . k is multiplied by first: tanh's argument, or without a cap the exponent."""
        return self.scale * LOG2E if self.softcap is None else self.scale / self.softcap

    @property
    def outer(self) -> float:
        """Exponent over tanh."""
        return 1.0 if self.softcap is None else self.softcap * LOG2E

    @property
    def additive(self) -> bool:
        return self.bias_shape is not None or self.alibi

    @property
    def masks(self) -> bool:
        """Whether any tile may need a mask."""
        return bool(
            self.low is not None
            or self.high is not None
            or self.check_keys
            or self.segments
            or self.mask_shape
        )

    # -- per register -----------------------------------------------------------------------------
    def keep(self, places: Places, tile: Tile, extras: Extras) -> Callable:
        """A function of (i, half, e): whether the entry takes part, or None if all do."""
        tests = [self._between(places, tile)]
        if self.segments:
            q = places.by_row(self._loads(extras.query_segments, tile, self.query_length))
            k = places.by_column(self._loads(extras.kv_segments, tile, self.key_length))
            tests.append(lambda *at: compare(q(*at), "eq", k(*at)))
        if self.positional and (self.low is not None or self.high is not None):
            q_pos = places.by_row(self._loads(extras.query_positions, tile, self.query_length))
            k_pos = places.by_column(self._loads(extras.kv_positions, tile, self.key_length))

            def in_band(*at):
                d, kept = arith.subi(k_pos(*at), q_pos(*at)), None
                if self.low is not None:
                    kept = compare(d, "sge", const(self.low))
                if self.high is not None:
                    kept = both(kept, compare(d, "sle", const(self.high)))
                return kept

            tests.append(in_band)
        if self.mask_shape is not None:
            entry = self._entry(places, tile, extras.mask, self.mask_shape)

            def unmasked(*at):
                value = entry(*at)
                return compare(value, "ne", arith.constant(value.type, 0))

            tests.append(unmasked)

        def kept(*at):
            result = None
            for test in tests:
                result = both(result, test(*at))
            return result

        return kept

    def _between(self, places: Places, tile: Tile) -> Callable:
        """Band and last key as bounds on 8 * i + e: at most two comparisons with constants an entry."""
        low, high = (None, None) if self.positional else (self.low, self.high)
        at_least: list[Any] = [None, None]
        at_most: list[Any] = [None, None]
        for half, row in enumerate(places.rows):  # low <= column - (row + offset) <= high
            base = arith.addi(arith.subi(row, places.column), const(self.offset))
            if low is not None:
                at_least[half] = arith.addi(base, const(low))
            if high is not None:
                at_most[half] = arith.addi(base, const(high))
            if self.check_keys:
                last = arith.subi(arith.subi(tile.k_stop, const(1)), places.column)
                bound = at_most[half]
                at_most[half] = last if bound is None else arith.minsi(bound, last)

        def test(i, half, e):
            kept, c = None, const(8 * i + e)
            if at_most[half] is not None:
                kept = compare(at_most[half], "sge", c)
            if at_least[half] is not None:
                kept = both(kept, compare(at_least[half], "sle", c))
            return kept

        return test

    def _loads(self, array: Any, tile: Tile, length: int) -> Callable:
        """index -> the element of a [B or 1, length] array, or the index itself where there is none."""
        if array is None:
            return lambda index: index
        return lambda index: load(array, row_of(array, tile.batch), clipped(index, length))

    def _entry(self, places: Places, tile: Tile, array: Any, shape: tuple[int, ...]) -> Callable:
        """A function of (i, half, e) that loads from a [B or 1, N or 1, T or 1, S or 1] array."""
        zero = const(0)
        b = tile.batch if shape[0] > 1 else zero
        n = tile.head if shape[1] > 1 else zero
        clip_q = lambda x: clipped(x, self.query_length)
        clip_k = lambda x: clipped(x, self.key_length)
        if shape[2] == 1:
            s = (lambda x: zero) if shape[3] == 1 else clip_k
            return places.by_column(lambda x: load(array, b, n, zero, s(x)))
        if shape[3] == 1:
            return places.by_row(lambda x: load(array, b, n, clip_q(x), zero))
        q, k = places.by_row(clip_q), places.by_column(clip_k)
        return lambda *at: load(array, b, n, q(*at), k(*at))

    def added(self, places: Places, tile: Tile, extras: Extras) -> Callable:
        """A function of (exponent, i, half, e): with bias and ALiBi added. A bias of -inf masks."""
        terms = []
        if self.bias_shape is not None:
            entry = self._entry(places, tile, extras.bias, self.bias_shape)

            def biased(y, *at):
                value = entry(*at)
                hidden = arith.cmpf(arith.CmpFPredicate.OEQ, value, const(NEGATIVE))
                return arith.select(hidden, value, fma(value, const(LOG2E), y))

            terms.append(biased)
        if self.alibi:
            slope = load(extras.alibi, row_of(extras.alibi, tile.batch), tile.head)
            slope = arith.mulf(slope, const(-LOG2E))
            distance = self._distance(places, tile, extras)
            terms.append(lambda y, *at: fma(mlir_math.absf(distance(*at)), slope, y))

        def total(y, *at):
            for term in terms:
                y = term(y, *at)
            return y

        return total

    def _distance(self, places: Places, tile: Tile, extras: Extras) -> Callable:
        """A function of (i, half, e): k_pos - q_pos in float32."""
        if self.positional:
            q = places.by_row(self._loads(extras.query_positions, tile, self.query_length))
            k = places.by_column(self._loads(extras.kv_positions, tile, self.key_length))
            return lambda *at: arith.sitofp(f32(), arith.subi(k(*at), q(*at)))
        offset = const(self.offset)

        def base(row):  # conversions are slow: one a row
            return arith.sitofp(f32(), arith.subi(places.column, arith.addi(row, offset)))

        first = places.by_row(base)
        return lambda i, half, e: arith.addf(first(i, half, e), const(float(8 * i + e)))

    def capped(self, x: ir.Value) -> tuple[ir.Value, float]:
        """(t, factor): the exponent of a raw product is t * factor."""
        if self.softcap is None:
            return x, self.inner
        return tanh(arith.mulf(x, const(self.inner)), self.softcap), self.outer

    def survives(self, places: Places, tile: Tile, extras: Extras) -> dict[At, ir.Value] | None:
        """What dropout keeps. One Philox call for four entries 8 apart, where the indices of the
        whole array allow it; else one an entry."""
        if not self.dropout_rate:
            return None
        rng, batch, head, query, key = extras.dropout
        row = row_of(rng, tile.batch)
        words = (load(rng, row, 0), load(rng, row, 1))
        who = (load(head, tile.head), load(batch, tile.batch))
        (q_offset, q_stride), (k_offset, k_stride) = (
            (load(x, 0), load(x, 1)) for x in (query, key)
        )
        limit = const(philox.threshold(self.dropout_rate))

        def indices(i, half, e):
            q = arith.addi(q_offset, arith.muli(q_stride, places.rows[half]))
            return q, arith.addi(k_offset, arith.muli(k_stride, places.key(i, e)))

        def call(q, k):
            return _philox(words, (_drop3(k), _drop3(q), *who))

        # Neighbours in the call are neighbours in the whole array: strides 1, offsets of 16 * n.
        strides = arith.ori(arith.subi(q_stride, const(1)), arith.subi(k_stride, const(1)))
        offsets = arith.andi(arith.ori(q_offset, k_offset), const(15))
        plain = compare(arith.ori(strides, offsets), "eq", const(0))
        out: dict[At, ir.Value] = {}
        for i in range(0, places.columns // 8, 2):
            for e in (0, 1):
                block = [
                    (i, 0, e),
                    (i + 1, 0, e),
                    (i, 1, e),
                    (i + 1, 1, e),
                ]  # by 2 * bit3(q) + bit3(k)
                branch: Any = scf.IfOp(plain, [i32()] * 4, has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    scf.yield_(call(*indices(*block[0])))
                with ir.InsertionPoint(branch.else_block):
                    found = []
                    for q, k in (indices(*at) for at in block):
                        w = call(q, k)
                        by_key = [arith.select(_bit3(k), w[2 * j + 1], w[2 * j]) for j in (0, 1)]
                        found.append(arith.select(_bit3(q), by_key[1], by_key[0]))
                    scf.yield_(found)
                for at, word in zip(block, branch.results, strict=True):
                    out[at] = compare(word, "uge", limit)
        return out


def row_of(array: ir.Value, batch: ir.Value) -> ir.Value:
    """The first index into an array [B or 1, ...]."""
    return const(0) if ir.MemRefType(array.type).shape[0] == 1 else batch


def clipped(index: ir.Value, length: int) -> ir.Value:
    return arith.minsi(index, const(length - 1))


# ---- dropout ------------------------------------------------------------------------------------
def _drop3(x: ir.Value) -> ir.Value:
    upper = arith.shli(arith.shrui(x, const(4)), const(3))
    return arith.ori(upper, arith.andi(x, const(7)))


def _bit3(x: ir.Value) -> ir.Value:
    return compare(arith.andi(x, const(8)), "ne", const(0))


def _philox(key: Sequence[ir.Value], counter: Sequence[ir.Value]) -> list[ir.Value]:
    """`dropout.philox` on MLIR scalars."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = (const(m) for m in philox.MULTIPLIERS)
    for _ in range(philox.ROUNDS):
        product0, product1 = arith.MulUIExtendedOp(m0, c0), arith.MulUIExtendedOp(m1, c2)
        c0, c1, c2, c3 = (
            arith.xori(arith.xori(product1.high, c1), k0),
            product1.low,
            arith.xori(arith.xori(product0.high, c3), k1),
            product0.low,
        )
        k0 = arith.addi(k0, const(philox.WEYL[0]))
        k1 = arith.addi(k1, const(philox.WEYL[1]))
    return [c0, c1, c2, c3]


def uses_fma(n: int, share: tuple[int, int] | None) -> bool:
    """Whether register n takes exp2 on the multiply-add pipe: `share` (a, b) is a of every b."""
    return share is not None and (n + 1) % share[1] < share[0]


def packed_words(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`exp2_packed` of factor 1 and shift 0 in NumPy: (E, R) as uint32, of y [..., 2]."""
    start = np.float64(MAGIC + 1024.0 * PACKED_BIAS)  # products and sums below are exact in float64
    r = (1024.0 * y.astype(np.float64) + start).astype(np.float32).view(np.uint32)
    r = np.where(np.isnan(y), np.uint32(0x7FFFFFFF), r)
    first, second = r[..., 0], r[..., 1]
    e = (first >> 8 & 0xFFFF | (second >> 8) << 16) & np.uint32(PACKED_EXPONENT)
    v = 1 + np.stack([first, second], -1).astype(np.int64) % 1024 / 1024
    words = np.array(PACKED_EXP2, np.uint32)
    p, *rest = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16).view(np.float16)
    for c in rest:
        p = (p.astype(np.float64) * v + c.astype(np.float64)).astype(np.float16)
    bits = p.view(np.uint16).astype(np.uint32)
    return e, bits[..., 0] | bits[..., 1] << 16


def exp2_reference(x: np.ndarray, degree: int) -> np.ndarray:
    """`exp2_fma` with factor 1 and shift 0 in NumPy, for the tests of its error."""
    x = x.astype(np.float32)
    nan = np.isnan(x)
    rounded = (x + np.float32(MAGIC)).astype(np.float32)
    f = (x + (np.float32(MAGIC) - rounded)).astype(np.float32)
    *rest, top = (np.float32(c) for c in EXP2[degree])
    p = np.full_like(f, top)
    for a in reversed(rest):
        p = (p.astype(np.float64) * f + a).astype(np.float32)
    terms = (np.where(nan, np.uint32(0x7FFFFFFF), y.view(np.uint32)) for y in (p, rounded))
    significand, exponent = terms
    return (significand + (exponent << 23)).view(np.float32)  # modulo 2**32
