"""Which pieces of the score matrix a device computes when the keys of another come by.

A shard is one run of tokens, or two (zigzag), see `layout.py`. Where two runs meet, the band that
causality and window leave (`bands.py`) is empty, or everything, or one of a few that are known when the
program is traced: then each is compiled by itself, with the tiles that it needs, and the device's rank
picks one. Where positions are given, are needed for ALiBi, or would make too many bands, they go along
as arrays.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcap.sharding import bands
from jaxcap.sharding.bands import Band
from jaxcap.sharding.layout import LoadBalance, Run, runs
from jaxcap.sharding.steps import Bounds, Piece, Runs, Step, always_first, number
from jaxcap.spec import AttentionSpec
from jaxcap.tile_tables import inside_band

#: More different bands than these are told apart by position arrays: each is compiled by itself.
MOST_BANDS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """The pieces of a call whose queries, and whose keys, are shards in one layout.

    `spec` describes the shard. With `gathered`, all keys are there, in their original order.
    """

    spec: AttentionSpec
    size: int
    load_balance: LoadBalance
    gathered: bool = False

    # The layout.

    def query_runs(self, rank: Any) -> tuple[Run, ...]:
        return runs(self.load_balance, self.spec.query_length, self.size, rank)

    def key_runs(self, source: Any) -> tuple[Run, ...]:
        if self.gathered:
            return (Run(0, self.spec.key_length, 0, 1),)
        return runs(self.load_balance, self.spec.key_length, self.size, source)

    @property
    def counts(self) -> tuple[int, int]:
        """Runs of queries and of keys."""
        return len(self.query_runs(0)), len(self.key_runs(0))

    @property
    def offset(self) -> int:
        """Position of the first query of the whole sequence."""
        spec = self.spec
        if spec.causal_alignment == "top_left":
            return 0
        keys = spec.key_length if self.gathered else spec.key_length * self.size
        return keys - spec.query_length * self.size

    # What the masks ask for.

    @property
    def given(self) -> bool:
        return self.spec.query_positions or self.spec.kv_positions

    @property
    def by_place(self) -> bool:
        """Whether lengths or dropout need one run at a time: its places are in even steps."""
        spec = self.spec
        return spec.query_lengths or spec.kv_lengths or spec.dropout_rate > 0

    @functools.cached_property
    def mirrored(self) -> bool:
        """Zigzag and plainly causal: a device's places are in order, and half of a hop is needed."""
        spec = self.spec
        square = spec.query_length == spec.key_length and not self.gathered
        plain = spec.band == (None, 0) and self.offset == 0 and not self.by_place
        return self.counts == (2, 2) and square and plain and not self.positional

    @functools.cached_property
    def positional(self) -> bool:
        """Whether position arrays are needed."""
        spec = self.spec
        if spec.alibi:
            return True
        if spec.band == (None, None):
            return False
        return self.given or self.uneven or self._most_bands() > MOST_BANDS

    @property
    def uneven(self) -> bool:
        """Whether queries and keys are in different steps."""
        return self.query_runs(0)[0].stride != self.key_runs(0)[0].stride

    def _most_bands(self) -> int:
        every = range(self.hops)
        found = [set(self._known_bands(a, b, every)) for a, b in self._pairs()]
        return max(len(some - {None, (None, None)}) for some in found)

    def _pairs(self) -> list[tuple[int, int]]:
        queries, keys = self.counts
        return [(a, b) for a in range(queries) for b in range(keys)]

    @property
    def hops(self) -> int:
        return 1 if self.gathered else self.size

    # Bands.

    def bands(self, a: int, b: int, rank: Any, source: Any) -> tuple[Any, Any]:
        """(low, high) of run `a` of the queries and run `b` of the keys, see `bands.between`."""
        q, k = self.query_runs(rank)[a], self.key_runs(source)[b]
        reach = (self.spec.query_length + self.spec.key_length) * self.size
        return bands.between(self.spec.band, q, k, self.offset, reach)

    @functools.cached_property
    def _codes(self) -> dict[tuple[int, int], np.ndarray]:
        """[hops, P]: of each pair of runs the band in each hop."""
        rank = np.arange(self.size)[None]
        source = (rank - np.arange(self.hops)[:, None]) % self.size
        return {
            (a, b): np.broadcast_to(bands.encoded(*self.bands(a, b, rank, source)), source.shape)
            for a, b in self._pairs()
        }

    def _known_bands(self, a: int, b: int, hops: Sequence[int]) -> list[Band | None]:
        """All that any rank meets in these hops; None is the empty one."""
        return bands.decoded(self._codes[a, b][list(hops)])

    # Steps.

    @functools.cached_property
    def groups(self) -> list[Runs]:
        """Runs of the queries whose results are one array; a piece has queries of one group."""
        queries, _ = self.counts
        unbanded = self.positional or self.spec.band == (None, None)
        if self.mirrored or (unbanded and not self.by_place):
            return [(0, queries)]
        return [(a, a + 1) for a in range(queries)]

    def steps(self, hops: Sequence[int]) -> list[Step]:
        """What a device does in any of these hops: keys that come from `hop` ranks below it."""
        if self.mirrored:
            return self._mirrored(hops)
        queries, keys = self.counts
        band = self.spec.band
        if self.positional or band == (None, None):
            whole = not self.by_place
            spans = [((0, queries), (0, keys))] if whole else self._single_runs()
            steps = [self._uniform(q, k, hops) for q, k in spans]
        else:
            steps = [self._banded(a, b, hops) for a, b in self._pairs()]
        return [step for step in steps if any(step.options)]

    def _single_runs(self) -> list[tuple[Runs, Runs]]:
        return [((a, a + 1), (b, b + 1)) for a, b in self._pairs()]

    def _mirrored(self, hops: Sequence[int]) -> list[Step]:
        """From a rank below, the first half of its keys is seen by all queries; from a rank above, all
        its keys by the second half of the queries. Both cost the same."""
        if list(hops) == [0]:
            return [Step((Piece((0, 2), (0, 2), (None, 0)),), always_first)]
        below = Piece((0, 2), (0, 1), (None, None))
        above = Piece((1, 2), (0, 2), (None, None))

        def choose(rank, source, bounds):
            del bounds
            return number(source < rank)

        return [Step((above, below), choose)]

    def _uniform(self, queries: Runs, keys: Runs, hops: Sequence[int]) -> Step:
        """No band, or position arrays that tell it."""
        spec = self.spec
        piece = Piece(queries, keys, None if self.positional else (None, None))
        if spec.band == (None, None) or (self.uneven and not self.given):
            return Step((piece,), always_first)
        if self.given:

            def meets(rank, source, bounds: Bounds):
                del rank, source
                some, _ = inside_band(*spec.band, bounds.queries, bounds.keys)
                return number(jnp.any(some))

            return Step((None, piece), meets)
        pairs = [(a, b) for a in range(*queries) for b in range(*keys)]
        known = [band for a, b in pairs for band in self._known_bands(a, b, hops)]
        if None not in known:
            return Step((piece,), always_first)
        if not any(known):
            return Step((None,), always_first)

        def reaches(rank, source, bounds):
            del bounds
            found = [self.bands(a, b, rank, source) for a, b in pairs]
            some = functools.reduce(operator.or_, [low <= high for low, high in found])
            return number(some)

        return Step((None, piece), reaches)

    def _banded(self, a: int, b: int, hops: Sequence[int]) -> Step:
        """One run against another, in each of the bands that there may be."""
        known = self._known_bands(a, b, hops)
        options = tuple(
            None if band is None else Piece((a, a + 1), (b, b + 1), band) for band in known
        )
        if len(known) == 1:
            return Step(options, always_first)

        def choose(rank, source, bounds):
            del bounds
            low, high = self.bands(a, b, rank, source)
            index = 0
            for i, band in enumerate(known):
                least, most = bands.ends(band)
                index = index + number((low == least) & (high == most), i)
            return index

        return Step(options, choose)

    @functools.cached_property
    def active_hops(self) -> list[int]:
        """The hops in which some device has something to do, 0 first."""
        if self.given or self.spec.band == (None, None) or self.uneven:
            return list(range(self.hops))
        empty = bands.encoded(*bands.ends(None))
        some = [np.any(codes != empty, axis=1) for codes in self._codes.values()]
        made = np.any(some, axis=0)
        made[0] = True
        return np.flatnonzero(made).tolist()
