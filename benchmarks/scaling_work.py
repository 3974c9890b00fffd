"""What each device of a context-parallel call computes, hop by hop: counts, no arrays of tokens.

Hop h of a device is its queries against the keys of the device h ranks below. Layouts are those of
`jaxcap.sharding.layout`: contiguous shards, zigzag (chunks i and 2P - 1 - i of 2P), striped.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

Array = np.ndarray
LAYOUTS = ("contiguous", "zigzag", "striped")
OPEN = 2**60


@dataclasses.dataclass(frozen=True)
class Work:
    """Of a device in a hop, each [ranks, hops]: (query, key) pairs, kernel calls, rows and keys.

    `rows` and `keys` are what the calls read of either side, counted once a call; `diagonal` are the
    rows along the edge of a mask.
    """

    pairs: Array
    calls: Array
    rows: Array
    keys: Array
    diagonal: Array

    @property
    def hops(self) -> int:
        return self.pairs.shape[1]

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest device over those of the mean; 1 is perfect."""
        each = self.pairs.sum(1)
        return float(each.max() / each.mean())


def below(size: int, limit: Any) -> Any:
    """How many (i, j) of [0, size)^2 have j - i <= limit."""
    m = np.clip(np.asarray(limit, np.int64), -size, size - 1)
    lower = (size + m) * (size + m + 1) // 2
    upper = size * size - (size - 1 - m) * (size - m) // 2
    return np.where(m <= 0, lower, upper)


def in_band(size: int, low: Any, high: Any) -> Any:
    """How many (i, j) of [0, size)^2 have low <= j - i <= high."""
    return np.maximum(below(size, high) - below(size, np.asarray(low) - 1), 0)


def _runs(layout: str, tokens: int, devices: int, rank: Array) -> tuple[int, int, list[Array]]:
    """Length and stride of the runs of neighbours that a shard consists of, and their first tokens."""
    length = tokens // devices
    if layout == "contiguous" or devices == 1:
        return length, 1, [rank * length]
    if layout == "striped":
        return length, devices, [rank]
    half = length // 2
    return half, 1, [rank * half, (2 * devices - 1 - rank) * half]


def ranks_of(devices: int) -> Array:
    """The ranks that stand for all: every one of up to 32, else 32 from the first to the last."""
    return np.unique(np.linspace(0, devices - 1, min(devices, 32)).round().astype(np.int64))


@functools.lru_cache(16)
def work(
    layout: str, tokens: int, devices: int, *, causal: bool, window: int | None = None
) -> Work:
    """The hops of a ring that some device has a use for, for `ranks_of(devices)`.

    `window` is how many keys before its own a query sees, and with `causal=False` after it as well.

    Raises:
      ValueError: an unknown layout, or a length that does not divide.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    multiple = devices * (2 if layout == "zigzag" and devices > 1 else 1)
    if tokens % multiple:
        raise ValueError(f"tokens must be a multiple of {multiple}, got {tokens}")
    rank = ranks_of(devices)[:, None]
    source = (rank - np.arange(devices)[None]) % devices
    length, stride, queries = _runs(layout, tokens, devices, rank)
    keys = _runs(layout, tokens, devices, source)[2]
    low = -OPEN if window is None else -window
    high = 0 if causal else (OPEN if window is None else window)

    shape = source.shape
    pairs, calls, rows, columns, diagonal = (np.zeros(shape, np.int64) for _ in range(5))
    whole = low == -OPEN and high == OPEN
    mirrored = layout == "zigzag" and devices > 1 and causal and window is None
    for q in queries:
        for k in keys:
            ahead = k - q  # key token - query token at (0, 0) of this pair of runs
            found = in_band(length, -((ahead - low) // stride), (high - ahead) // stride)
            pairs += found
            calls += found > 0
            rows += (found > 0) * length
            columns += (found > 0) * length
            diagonal += ((found > 0) & (found < length**2)) * length
    if whole or mirrored:  # one call: all, half of the queries or half of the keys
        shard, first = tokens // devices, np.arange(devices)[None] == 0
        lower = (source < rank) & ~first
        calls[:] = 1
        rows[:] = shard
        columns[:] = shard
        if mirrored:
            rows -= np.where(lower | first, 0, shard // 2)
            columns -= np.where(lower, shard // 2, 0)
    used = pairs.any(axis=0)
    used[0] = True
    return Work(*(x[:, used] for x in (pairs, calls, rows, columns, diagonal)))


def gathered(
    layout: str, tokens: int, devices: int, *, causal: bool, window: int | None = None
) -> Work:
    """The same pairs in one hop: all keys are there, one call a run of the queries."""
    ring = work(layout, tokens, devices, causal=causal, window=window)
    pairs = ring.pairs.sum(1, keepdims=True)
    rows = np.full_like(pairs, tokens // devices)
    calls = np.full_like(pairs, 2 if layout == "zigzag" and devices > 1 and causal else 1)
    return Work(pairs, calls, rows, calls * tokens, ring.diagonal.sum(1, keepdims=True))
