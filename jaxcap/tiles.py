"""Which KV tiles a Q tile needs and the converse: skip, partial, full.

Tile (i, j) holds queries [i * tq, i * tq + tq) and keys [j * tk, j * tk + tk). With queries down
and keys across, `#` full (needs no mask), `+` partial and `.` skipped, tiles of 4 by 4:

    causal     causal, window (8, 0)   kv length 14   segments, new at 10
    +.....     +.....                  ###+..         ##+...
    #+....     #+....                  ###+..         ##+...
    ##+...     +#+...                  ###+..         ++++++
    ###+..     .+#+..                  ###+..         ..+###
    ####+.     ..+#+.                  ###+..         ..+###
    #####+     ...+#+                  ###+..         ..+###

Two levels. Here, causality, window and lengths: a contiguous range of tiles by arithmetic, exact in
both directions and cheap enough for a kernel's prologue. Segments, explicit positions and boolean
masks need tables: `tile_tables.py`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcap.spec import AttentionSpec


class Range(NamedTuple):
    """Tiles [first, stop) are needed; of them [full_first, full_stop) need no mask.

    An empty range has first == stop, without full tiles full_first == full_stop, and always
    first <= full_first <= full_stop <= stop.
    """

    first: Any
    stop: Any
    full_first: Any
    full_stop: Any


class Lengths(NamedTuple):
    """How much of an axis is there: bounds over the batch entries that share a tile."""

    least: Any
    most: Any


def array_module(*args: Any) -> Any:
    """jax.numpy if any argument is JAX's, else NumPy."""
    return jnp if any(isinstance(x, jax.Array) for x in args) else np


def _pick(name: str, *args: Any) -> Any:
    return getattr(array_module(*args), name)(*args)


def _min(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _pick("minimum", a, b)


def _max(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _pick("maximum", a, b)


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool):
        return a if condition else b
    return _pick("where", condition, a, b)


def _tiles_below(x: Any, tile: int) -> Any:
    """max(x, 0) // tile, a shift where it can be: kernels have no cheap division."""
    x = _max(x, 0)
    return x >> (tile.bit_length() - 1) if tile & (tile - 1) == 0 else x // tile


@dataclasses.dataclass(frozen=True)
class Grid:
    """The tiles of a call and its band: `low <= k - (q + offset) <= high` on indices, low <= high.

    All numbers are static; bounds that hold for every entry become None. The lengths that the
    methods take, and the indices of tiles, may be Python ints, NumPy arrays or traced int32,
    scalars or arrays that broadcast. Slots past the end of either axis count as masked, so that a
    tile that sticks out is partial; a kernel that needs no mask for rows past the end may round
    `query_length` up to whole tiles.
    """

    query_length: int
    key_length: int
    tq: int
    tk: int
    low: int | None = None
    high: int | None = None
    offset: int = 0

    def __post_init__(self):
        last_query = self.query_length - 1 + self.offset
        if self.low is not None and self.low <= -last_query:
            object.__setattr__(self, "low", None)
        if self.high is not None and self.high >= self.key_length - 1 - self.offset:
            object.__setattr__(self, "high", None)

    @classmethod
    def of(cls, spec: AttentionSpec, tq: int, tk: int) -> "Grid":
        """The grid of `spec`; explicit positions leave the band to the tables."""
        low, high = spec.band
        if spec.query_positions or spec.kv_positions:
            low = high = None
        return cls(spec.query_length, spec.key_length, tq, tk, low, high, spec.query_offset)

    @property
    def q_tiles(self) -> int:
        return -(-self.query_length // self.tq)

    @property
    def kv_tiles(self) -> int:
        return -(-self.key_length // self.tk)

    def transposed(self) -> "Grid":
        """The grid with queries and keys exchanged."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Grid(self.key_length, self.query_length, self.tk, self.tq, low, high, -self.offset)

    def kv_range(
        self, i: Any, q_lengths: Lengths | None = None, kv_lengths: Lengths | None = None
    ) -> Range:
        """The KV tiles that Q tile `i` needs."""
        rows = q_lengths or Lengths(self.query_length, self.query_length)
        keys = kv_lengths or Lengths(self.key_length, self.key_length)
        tq, tk = self.tq, self.tk

        # 1. The rows [top, bottom) that are there, and the keys [left, right) that any of them
        #    attends: from the first row's lower to the last row's upper bound, without a gap.
        top = i * tq
        bottom = _min(top + tq, _min(rows.most, self.query_length))
        left, right = 0, _min(keys.most, self.key_length)
        if self.low is not None:
            left = _max(top + (self.offset + self.low), 0)
        if self.high is not None:
            right = _min(right, bottom + (self.offset + self.high))
        first = _tiles_below(left, tk)
        stop = _tiles_below(right + (tk - 1), tk)
        some = (top < bottom) & (left < right)
        stop = _where(some, _max(first, stop), first)

        # 2. The keys [left, right) that every row of the whole tile attends, in whole tiles.
        left, right = 0, _min(keys.least, self.key_length)
        if self.low is not None:
            left = top + (tq - 1 + self.offset + self.low)
        if self.high is not None:
            right = _min(right, top + (self.offset + self.high + 1))
        whole = top + tq <= _min(rows.least, self.query_length)
        full_first = _min(_max(_tiles_below(left + (tk - 1), tk), first), stop)
        full_stop = _min(_max(_tiles_below(right, tk), full_first), stop)
        full_stop = _where(whole, full_stop, full_first)
        return Range(first, stop, full_first, full_stop)

    def q_range(
        self, j: Any, q_lengths: Lengths | None = None, kv_lengths: Lengths | None = None
    ) -> Range:
        """The Q tiles that KV tile `j` is needed by."""
        return self.transposed().kv_range(j, kv_lengths, q_lengths)
