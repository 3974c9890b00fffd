"""The band in which two runs of tokens meet.

The queries `q + m i` of a run meet the keys `k + m j` of another, m the stride, where causality and
window leave them:

    low <= k - q + m (j - i) - offset <= high    <=>    least <= j - i <= most.
"""

from typing import Any

import numpy as np

from jaxcap.sharding.layout import Run
from jaxcap.tiles import array_module

Band = tuple[int | None, int | None]

#: An end that bounds nothing. The empty band is (OPEN, -OPEN).
OPEN = 2**30


def between(band: Band, q: Run, k: Run, offset: int, reach: int) -> tuple[Any, Any]:
    """(least, most), of runs whose starts are ints, NumPy arrays or traced.

    `offset` is the position of the first query, and no position is further off than `reach`.
    """
    xp = array_module(q.start, k.start)
    low, high = band
    ahead = xp.asarray(k.start - q.start - offset)
    open_ = xp.asarray(OPEN, ahead.dtype)
    least = -open_ if low is None or low < -reach else -((ahead - low) // q.stride)
    most = open_ if high is None or high > reach else (high - ahead) // q.stride
    least = xp.where(least <= 1 - q.length, -open_, least)
    most = xp.where(most >= k.length - 1, open_, most)
    empty = (least > k.length - 1) | (most < 1 - q.length) | (least > most)
    return xp.where(empty, open_, least), xp.where(empty, -open_, most)


def ends(band: Band | None) -> tuple[int, int]:
    """A band as numbers; None is the empty one."""
    low, high = (OPEN, -OPEN) if band is None else band
    return -OPEN if low is None else low, OPEN if high is None else high


def encoded(low: Any, high: Any) -> Any:
    """A number a band."""
    return low * (4 * OPEN) + high


def decoded(codes: np.ndarray) -> list[Band | None]:
    """The different bands among them; None is the empty one."""
    found: list[Band | None] = []
    for code in np.unique(codes).tolist():
        low = (code + 2 * OPEN) // (4 * OPEN)
        high = code - low * (4 * OPEN)
        band = (None if low == -OPEN else low, None if high == OPEN else high)
        found.append(None if low > high else band)
    return found
