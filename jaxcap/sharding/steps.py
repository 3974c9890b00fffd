"""Pieces of a shard's scores, and the steps that choose one by a device's rank."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxcap.sharding.bands import Band
from jaxcap.tile_tables import Interval
from jaxcap.tiles import array_module

Runs = tuple[int, int]


class Piece(NamedTuple):
    """Runs [first, stop) of the queries against runs [first, stop) of the keys."""

    queries: Runs
    keys: Runs
    band: Band | None  # of key index - query index within the piece; None: by position arrays


class Step(NamedTuple):
    """Pieces of which a device computes one, or none where an option is None."""

    options: tuple[Piece | None, ...]
    choose: Callable[[Any, Any, Any], Any]  # of (rank, source, bounds): index of the option

    @property
    def queries(self) -> tuple[int, ...]:
        return tuple(sorted({i for p in self.options if p for i in range(*p.queries)}))

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(sorted({i for p in self.options if p for i in range(*p.keys)}))


class Bounds(NamedTuple):
    """Least and greatest of the given positions of queries and keys."""

    queries: Interval
    keys: Interval


def always_first(rank: Any, source: Any, bounds: Any) -> int:
    del rank, source, bounds
    return 0


def number(condition: Any, of: int = 1) -> Any:
    """`of` where a condition holds, else 0."""
    return array_module(condition).where(condition, np.int32(of), np.int32(0))
