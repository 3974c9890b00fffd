"""Tables of tiles for segments, explicit positions and boolean masks; bands are in `tiles.py`.

A tile is judged by the least and the greatest id or position in it, or by a look at the mask: it
may be called partial where it is empty or full, never the reverse. Runs on NumPy and on JAX.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcap.spec import AttentionSpec, Operands
from jaxcap.tiles import Grid, Lengths, Range, array_module

# Differences of positions below this magnitude cannot overflow int32.
_SAFE_POSITION = 2**30


class Interval(NamedTuple):
    """Bounds, both included, of the integers in a tile; low > high where it holds none."""

    low: Any
    high: Any


def intervals(x: Any, tile: int, lengths: Any = None) -> Interval:
    """Bounds of `x` [B or 1, T] over each tile, [B or 1, tiles], inside the lengths [B]."""
    xp = array_module(x, lengths)
    info = np.iinfo(np.int32)
    size = x.shape[1]
    low = high = x
    if lengths is not None:
        inside = xp.arange(size, dtype=np.int32)[None] < lengths[:, None]
        low = xp.where(inside, x, np.int32(info.max))
        high = xp.where(inside, x, np.int32(info.min))
    pad = ((0, 0), (0, -size % tile))

    def tiles(y):  # these are small: a padded copy costs nothing
        return xp.pad(y, pad, mode="edge").reshape(y.shape[0], -1, tile)

    return Interval(tiles(low).min(axis=2), tiles(high).max(axis=2))


def same_segment(q: Interval, k: Interval) -> tuple[Any, Any]:
    """(some, all): may some pair of ids be equal, are all of them. Broadcasts."""
    some = (q.low <= k.high) & (k.low <= q.high)
    return some, (q.low == k.high) & (k.low == q.high)


def inside_band(low: int | None, high: int | None, q: Interval, k: Interval) -> tuple[Any, Any]:
    """(some, all): may some pair of positions lie in the band, do all of them. Broadcasts.

    Tiles with positions of 2**30 and beyond count as partial: there `mask.in_band` may wrap around.
    """
    some = (q.low <= q.high) & (k.low <= k.high)
    every = some
    if low is not None:
        some = some & (k.high - q.low >= low)
        every = every & (k.low - q.high >= low)
    if high is not None:
        some = some & (k.low - q.high <= high)
        every = every & (k.high - q.low <= high)
    held = (q.low <= q.high) & (k.low <= k.high)
    safe = (q.low > -_SAFE_POSITION) & (q.high < _SAFE_POSITION)
    safe = safe & (k.low > -_SAFE_POSITION) & (k.high < _SAFE_POSITION)
    return held & (some | ~safe), every & safe


def _over_tiles(kept: Any, axis: int, size: int, tile: int, reduce: Callable) -> list[Any]:
    """`reduce` over each tile of an axis, the short last one by itself: no padded copy."""
    before = (slice(None),) * axis
    whole = size // tile * tile
    main, rest = kept[(*before, slice(whole))], kept[(*before, slice(whole, size))]
    main = main.reshape(*kept.shape[:axis], whole // tile, tile, *kept.shape[axis + 1 :])
    parts = [reduce(main, axis=axis + 1)]
    return [*parts, reduce(rest, axis=axis, keepdims=True)] if whole < size else parts


def dense(kept: Any, grid: Grid) -> tuple[Any, Any]:
    """(some, all) [B or 1, N or 1, q tiles or 1, kv tiles or 1] of a boolean mask."""
    xp = array_module(kept)

    def tiles(x, reduce):
        for axis, size, tile in ((3, grid.key_length, grid.tk), (2, grid.query_length, grid.tq)):
            if x.shape[axis] == size:  # not broadcast
                x = xp.concatenate(_over_tiles(x, axis, size, tile, reduce), axis=axis)
        return x

    return tiles(kept, xp.any), tiles(kept, xp.all)


def _banded_positions(spec: AttentionSpec) -> bool:
    return (spec.query_positions or spec.kv_positions) and spec.band != (None, None)


def needs_pairs(spec: AttentionSpec) -> bool:
    """Whether anything but band and lengths may empty a tile."""
    masks = spec.mask_shape is not None or spec.bias_shape is not None
    return masks or spec.segment_ids or _banded_positions(spec)


def pairs(spec: AttentionSpec, operands: Operands, grid: Grid) -> tuple[Any, Any]:
    """(some, all) [B or 1, N or 1, q tiles, kv tiles] bool, everything that masks taken in.

    A tile without `some` attends nothing; one with `all` needs no mask.
    """
    xp = array_module(*jax.tree.leaves(operands))
    q_len, kv_len = operands.query_lengths, operands.kv_lengths

    # 1. Band and lengths, by the arithmetic of the grid.
    def column(x):
        return None if x is None else Lengths(x[:, None], x[:, None])

    i = xp.arange(grid.q_tiles, dtype=np.int32)[None]
    j = xp.arange(grid.kv_tiles, dtype=np.int32)[None, None]
    rows = (1 if q_len is None and kv_len is None else spec.batch, grid.q_tiles)
    ranges = grid.kv_range(i, column(q_len), column(kv_len))
    r = Range(*(xp.broadcast_to(x, rows)[..., None] for x in ranges))
    found = [((r.first <= j) & (j < r.stop), (r.full_first <= j) & (j < r.full_stop))]

    # 2. Segments and explicit positions, by the bounds of each tile.
    def bounds(q, k):
        q, k = intervals(q, grid.tq, q_len), intervals(k, grid.tk, kv_len)
        across = Interval(k.low[:, None, :], k.high[:, None, :])
        return Interval(q.low[:, :, None], q.high[:, :, None]), across

    if operands.query_segment_ids is not None:
        found.append(same_segment(*bounds(operands.query_segment_ids, operands.kv_segment_ids)))
    if _banded_positions(spec):
        q, k = operands.query_positions, operands.kv_positions
        q = xp.arange(spec.query_length, dtype=np.int32)[None] if q is None else q
        k = xp.arange(spec.key_length, dtype=np.int32)[None] if k is None else k
        found.append(inside_band(*spec.band, *bounds(q, k)))

    # 3. Masks and biases of -inf, by a look at each entry.
    found = [(some[:, None], every[:, None]) for some, every in found]
    if operands.mask is not None:
        found.append(dense(operands.mask, grid))
    if operands.bias is not None:
        found.append(dense(operands.bias != -np.inf, grid))
    some, every = found[0]
    for more_some, more_every in found[1:]:
        some, every = some & more_some, every & more_every
    return some, every


class Visits(NamedTuple):
    """For each row of tiles the columns that it needs, in `order[:stop]`.

    `order[:partial]` need a mask, `order[partial:stop]` do not.
    """

    order: Any  # [..., rows, columns] int32
    partial: Any  # [..., rows] int32
    stop: Any  # [..., rows] int32


def visits(some: Any, every: Any) -> Visits:
    """Lists from (some, all) tables [..., rows, columns]; swap these axes for the converse."""
    xp = array_module(some, every)
    rank = xp.where(some, xp.where(every, 1, 0), 2)
    order = xp.argsort(rank, axis=-1, stable=True).astype(np.int32)
    partial, stop = (xp.sum(x, axis=-1, dtype=np.int32) for x in (rank == 0, rank < 2))
    return Visits(order, partial, stop)
