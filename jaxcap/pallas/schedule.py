"""Who computes what and in which order in the forward kernel: pure functions of ints, NumPy or traced values.

A CTA takes tiles of `64 * warpgroups` queries; in each it walks over KV tiles from the last to the
first, step j taking tile `last - 1 - j`. A warpgroup skips the steps that its own 64 rows do not need.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np

from jaxcap import tiles
from jaxcap.tiles import _max, _min, _where

#: Bounds the rows that are there from above where a row past the end does no harm.
ALWAYS = 2**30
#: Start and end of a query tile cost about as much as this many steps.
OVERHEAD = 2.5
#: Beside a transfer: tiles of a list on average at most, and blocks that end after one tile.
LONGEST, DOORS = 16, 32


class Steps(NamedTuple):
    """Steps [begin, end) of `count`; of them [lead, full) need no mask. Never empty."""

    last: Any
    count: Any
    begin: Any
    end: Any
    lead: Any
    full: Any


def _clip(x: Any, low: Any, high: Any) -> Any:
    return _min(_max(x, low), high)


def band_steps(
    grid: tiles.Grid, own: tiles.Grid | None, i: Any, warpgroup: Any, q_stop: Any, k_stop: Any
) -> Steps:
    """The steps of Q tile `i`, and of its warpgroup on the grid `own` of 64 rows (None: all alike).

    A tile that needs nothing still takes one masked step, which finds nothing.
    """
    rows, keys = tiles.Lengths(ALWAYS, q_stop), tiles.Lengths(k_stop, k_stop)
    r = grid.kv_range(i, rows, keys)
    last = _max(r.stop, r.first + 1)
    count = last - r.first
    if own is None:
        return Steps(last, count, 0 * count, count, last - r.full_stop, last - r.full_first)
    o = own.kv_range(i * (grid.tq // own.tq) + warpgroup, rows, keys)
    first = _clip(o.first, r.first, last - 1)
    stop = _max(_min(o.stop, last), first + 1)
    full_first = _clip(o.full_first, first, stop)
    full_stop = _clip(o.full_stop, full_first, stop)
    full_stop = _where(o.stop > o.first, full_stop, full_first)
    return Steps(last, count, last - stop, last - first, last - full_stop, last - full_first)


def masked_at_most(grid: tiles.Grid, own: tiles.Grid | None, rows: int) -> tuple[int, int]:
    """How many masked steps there are before and after the full ones, over all tiles."""
    i = np.arange(grid.q_tiles)[:, None]
    w = np.arange(grid.tq // 64)[None]
    s = band_steps(grid, own, i, w, rows, grid.key_length)
    return int(np.max(s.lead - s.begin)), int(np.max(s.end - s.full))


def coordinates(index: Any, q_tiles: int, heads: int, heavy_first: bool, div: Any, rem: Any) -> Any:
    """(batch and head as one, Q tile) of a tile. `heads` heads at a time, so that K and V stay in L2."""
    group, rest = div(index, q_tiles * heads), rem(index, q_tiles * heads)
    i, head = div(rest, heads), rem(rest, heads)
    return group * heads + head, (q_tiles - 1 - i if heavy_first else i)


def work_table(costs: np.ndarray, workers: int) -> np.ndarray:
    """[workers, 1 + most] int32: how many tiles a worker takes, and which, in order.

    Each tile goes, in order, to the worker that is free first: what the hardware would do with a CTA a
    tile, without its gaps between one CTA and the next.
    """
    free = [(0.0, w) for w in range(workers)]
    lists: list[list[int]] = [[] for _ in range(workers)]
    for tile, cost in enumerate(costs):
        at, w = heapq.heappop(free)
        lists[w].append(tile)
        heapq.heappush(free, (at + float(cost), w))
    table = np.zeros((workers, 1 + max(map(len, lists))), np.int32)
    for row, mine in zip(table, lists, strict=True):
        row[0] = len(mine)
        row[1 : 1 + len(mine)] = mine
    return table


def short_lists(costs: np.ndarray, workers: int) -> np.ndarray:
    """A table like `work_table`'s for more blocks than `workers`, which the hardware starts in order.

    For when a transfer may hold some of the multiprocessors for a while, or wait for some: who has one takes
    the next list. The lists of a round have half of what is left, so that whoever begins late ends with
    the others; some of the first have one tile each, to let a transfer in.
    """
    doors = max(1, min(DOORS, workers // 4))
    first, blocks, count = 0, doors, doors
    rounds = []
    while first < len(costs):
        part = costs[first : first + count]
        table = work_table(part, min(blocks, len(part)))
        table[:, 1:] += first
        rounds.append(table)
        blocks = max(1, workers - doors) if first == 0 else workers
        first += len(part)
        left = np.cumsum(costs[first:])
        half = int(np.sum(2 * left < left[-1:])) + 1
        count = min(max(half, blocks), LONGEST * blocks)
    width = max(table.shape[1] for table in rounds)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in rounds])
