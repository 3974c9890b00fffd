"""A thread block of the sm90 backward on a machine of warps, mbarriers, TMA and wgmma; a thread a warp.

It knows what is read until when: vector clocks, joined at barriers alone, say what a warp may know, so that
one run shows a race, a phase that may be missed or a deadlock, whatever its timing; which warp goes on is
drawn. Nothing is computed: a tile is its coordinates, and what is stored must be made of the right ones.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.test_pallas_protocol import At

WARPS = 2  # of a warpgroup; the first has the thread that issues copies
Box = tuple[tuple[int, int], ...]  # (first, end) by axis


def size_of(box: Box) -> int:
    return math.prod(max(0, end - first) for first, end in box)


def shared(a: Box, b: Box) -> int:
    """How many elements are in both."""
    return size_of(tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True)))


@dataclasses.dataclass(frozen=True)
class Value:
    """In registers. `of`: the tiles that it is made of, (side, batch, head, first row), and cleaned sides."""

    of: frozenset = frozenset()
    shape: tuple[int, int] = (64, 64)

    def same(self, *_: Any) -> "Value":
        return self

    __mul__ = __gt__ = __getitem__ = astype = same


@dataclasses.dataclass
class Use:
    """A warp reads shared memory until tick `ended`. A product that is not `needed` may read anything."""

    warp: int
    ended: int | None = None
    needed: bool = False
    spoiled: str = ""


@dataclasses.dataclass
class Memory:
    """An array in shared memory. `contents`: (tiles, a warp or barrier, which of its ticks), newest last."""

    shape: tuple[int, ...]
    name: str = ""
    contents: dict[Box, tuple[frozenset, int, int]] = dataclasses.field(default_factory=dict)
    uses: dict[tuple[int, Box], list[Use]] = dataclasses.field(default_factory=dict)


class View:
    """A part of shared memory."""

    def __init__(self, machine: Any, memory: Memory, index: Any = ()):
        self.machine, self.memory = machine, memory
        index = index if isinstance(index, tuple) else (index,)
        pairs = list(itertools.zip_longest(memory.shape, index, fillvalue=slice(None)))
        self.axes = sum(isinstance(i, slice) for _, i in pairs)
        ends = [i.indices(n) if isinstance(i, slice) else (int(i), int(i) + 1) for n, i in pairs]
        self.box: Box = tuple((x[0], x[1]) for x in ends)
        self.at = At(lambda index: View(machine, memory, index))

    @property
    def mine(self) -> Box:
        """What this warp has of it: its rows of a matrix, all of a vector."""
        if self.axes < 2:
            return self.box
        *lead, (first, end), columns = self.box
        warp, rows = self.machine.me % WARPS, (end - first) // WARPS
        return *lead, (first + warp * rows, first + (warp + 1) * rows), columns

    def transpose(self, _: Any) -> "View":
        return self

    def __setitem__(self, _: Any, value: Value) -> None:
        self.machine.write(self, value)


class Global:
    """An array in global memory."""

    def __init__(self, name: str, array: Any = None):
        self.name, self.array = name, np.zeros((1,) * 4, np.int32) if array is None else array
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self.side = "k" if name in ("k", "v", "dead", "kseg", "kpos") else "q"
        self.at = At(lambda index: (self, index))

    def __getitem__(self, index: Any) -> int:
        return int(self.array[index])


class Accumulator:
    """Of wgmma, as one warp has it."""

    def __init__(self, machine: Any, shape: tuple[int, int]):
        self.machine, self.shape, self.at = machine, shape, At(lambda _: self)
        self.of: frozenset = frozenset()
        self.uses: list[Use] = []

    def __setitem__(self, _: Any, value: Value) -> None:
        self.of, self.uses = value.of, []

    def __getitem__(self, _: Any) -> Value:
        return self.machine.wgmma_accumulator_load(self)


class Barrier:
    """An mbarrier, the first of `stages`."""

    def __init__(self, machine: Any, num_arrivals: int, num_barriers: int = 1, warps: int = WARPS):
        self.name, self.arrivals, self.arrived = "", num_arrivals * warps, 0
        self.joined: Any = 0  # the clocks of those who have arrived
        self.clocks: list[np.ndarray] = []  # of its completions
        self.waits = collections.defaultdict(list)  # by warp, until which tick
        machine.barriers.append(self)
        self.clock = machine.count + len(machine.barriers) - 1
        self.stages = [self, *(Barrier(machine, num_arrivals) for _ in range(num_barriers - 1))]
        self.at = At(self.stages.__getitem__)


class Machine:
    """A thread block, with methods named as in `plgpu`. One warp at a time runs, until it waits."""

    def __init__(self, plan: Any, place: tuple[int, ...], turns: Any, seed: int):
        self.plan, self.c, self.place, self.turns = plan, plan.config, place, turns
        self.random, self.me, self.count = random.Random(seed), 0, WARPS * self.c.warpgroups
        self.block: Any = None
        self.failure: Any = None
        self.barriers: list[Barrier] = []
        self.syncs = [Barrier(self, WARPS, warps=1) for _ in range(self.c.warpgroups)]
        self.turn = [threading.Semaphore(0) for _ in range(self.count)]
        self.waiting: dict[int, tuple[Callable, str]] = {}
        self.flight: list[list] = [[] for _ in range(self.count)]  # (accumulator, uses)
        self.stores: list[list[Use]] = [[] for _ in range(self.count)]  # not known to be complete
        self.commits: list[list[int]] = [[] for _ in range(self.count)]  # ticks
        self.loading: set[Barrier] = set()
        self.rows: set[tuple[str, int]] = set()  # of dK and dV
        self.added: collections.Counter[tuple] = collections.Counter()  # to dQ

    # -- the schedule --
    def run(self, body: Callable) -> None:
        self.clocks = np.zeros((self.count, self.count + len(self.barriers)), int)

        def warp(number):
            self.turn[number].acquire()
            try:
                if self.failure is None:
                    body()
                    assert not self.flight[number] + self.stores[number], "ends too early"
            except BaseException as failure:
                self.failure = self.failure or failure
            self.draw()

        threads = [threading.Thread(target=warp, args=(w,)) for w in range(self.count)]
        self.waiting = {w: (lambda: True, "") for w in range(self.count)}
        for thread in threads:
            thread.start()
        self.draw()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        self.check()

    def draw(self) -> None:
        """Lets one of those go on that can."""
        ready = [w for w, (holds, _) in self.waiting.items() if self.failure or holds()]
        if self.waiting and not ready:
            waits = ", ".join(f"{w} for {name}" for w, (_, name) in sorted(self.waiting.items()))
            self.failure = AssertionError(f"deadlock: warps wait, {waits}")
            ready = list(self.waiting)
        if ready:
            self.me = self.random.choice(ready)
            del self.waiting[self.me]
            self.turn[self.me].release()

    def tick(self) -> int:
        self.clocks[self.me, self.me] += 1
        return int(self.clocks[self.me, self.me])

    def knows(self, clock: int, tick: int | None) -> bool:
        return tick is not None and self.clocks[self.me, clock] >= tick

    # -- barriers --
    def barrier_wait(self, barrier: Barrier) -> None:
        me, before = self.me, len(barrier.waits[self.me])
        self.waiting[me] = (lambda: len(barrier.clocks) > before), barrier.name
        self.draw()
        self.turn[me].acquire()
        if self.failure is not None:
            raise self.failure
        self.clocks[me] = np.maximum(self.clocks[me], barrier.clocks[before])
        barrier.waits[me].append(self.tick())

    def barrier_arrive(self, barrier: Barrier) -> int:
        """Returns the phase for which it counts, from 1 on."""
        phase = len(barrier.clocks) + 1
        assert self.knows(barrier.clock, phase - 1), f"{barrier.name}: an arrival out of phase"
        barrier.arrived += 1
        barrier.joined = np.maximum(barrier.joined, self.clocks[self.me])
        if barrier.arrived == barrier.arrivals:
            barrier.joined[barrier.clock] = phase
            barrier.clocks.append(barrier.joined)
            barrier.joined, barrier.arrived = 0, 0
        return phase

    def commit_smem(self) -> None:
        self.commits[self.me].append(self.tick())
        self.sync()

    def sync(self) -> None:
        """The warps of a warpgroup wait for each other."""
        self.barrier_arrive(self.syncs[self.me // WARPS])
        self.barrier_wait(self.syncs[self.me // WARPS])

    # -- shared memory --
    def there(self, clock: int, tick: int, committed: bool) -> bool:
        """Copies and products see what a warp has written and then committed."""
        if committed and clock < self.count:
            after = bisect.bisect(self.commits[clock], tick)
            return any(self.knows(clock, x) for x in self.commits[clock][after : after + 1])
        return self.knows(clock, tick)

    def read(self, view: View, box: Box, committed: bool = True) -> tuple[frozenset, Use]:
        """Begins to read; returns what is there."""
        memory, use, left, of = view.memory, Use(self.me), size_of(box), frozenset()
        for at, (tiles, clock, tick) in reversed(memory.contents.items()):
            common = shared(box, at)
            if common and left > 0:
                of, left = of | tiles, left - common
                if not self.there(clock, tick, committed):
                    use.spoiled = f"{memory.name} is read before it is there"
        if left:
            use.spoiled = f"{memory.name} is read while parts are missing"
        uses = memory.uses.setdefault((self.me, box), [])
        if uses and uses[-1].needed:
            del uses[:-1]  # who knows the end of this one knows theirs
        uses.append(use)
        return of, use

    def need(self, use: Use) -> None:
        assert not use.spoiled, use.spoiled
        use.needed = True

    def put(self, view: View, box: Box, of: frozenset, clock: int, tick: int) -> None:
        memory = view.memory
        uses = (x for (_, at), x in memory.uses.items() if shared(box, at))
        for use in itertools.chain(*uses):
            if not self.knows(use.warp, use.ended):
                use.spoiled = f"{memory.name} is written while it is used"
                assert not use.needed, use.spoiled
        for at, (_, *before) in list(memory.contents.items()):
            if common := shared(box, at):
                assert self.knows(*before), f"{memory.name} is written over what is on its way"
                if common == size_of(at):
                    del memory.contents[at]
        memory.contents[box] = of, clock, tick

    def load(self, view: View, layout: Any = None) -> Value:
        del layout
        of, use = self.read(view, view.mine, committed=False)
        self.need(use)
        use.ended = self.tick()
        return Value(of)

    def write(self, view: View, value: Value) -> None:
        self.put(view, view.mine, value.of, self.me, self.tick())

    # -- copies: every warp arrives, the first one issues --
    def copy_gmem_to_smem(self, source: tuple, view: View, barrier: Barrier) -> None:
        phase = self.barrier_arrive(barrier)
        if self.me % WARPS == 0:
            array, index = source
            rows = next(i for i in index if isinstance(i, slice))
            tile = array.side, *(int(i) for i in index if not isinstance(i, slice)), rows.start
            self.put(view, view.box, frozenset([tile]), barrier.clock, phase)
            self.loading.add(barrier)

    def copy_smem_to_gmem(self, view: View, target: tuple, reduction_op: str | None = None) -> None:
        if self.me % WARPS == 0:
            of, use = self.read(view, view.box)
            self.need(use)
            self.stores[self.me].append(use)
            array, (batch, *index) = target
            if reduction_op == "add":
                head, tile, columns = index
                self.add(batch, head, tile, 4 * columns.start, of)
            else:
                rows, head, *_ = index
                self.store(array.name, batch, head, rows.start, of)

    def wait_smem_to_gmem(self, left: int, wait_read_only: bool = False) -> None:
        stores = self.stores[self.me]
        over = stores[: max(len(stores) - left, 0)]
        for use in over:
            use.ended = use.ended or self.tick()
        if not wait_read_only:
            del stores[: len(over)]
        self.sync()

    # -- products --
    def wgmma(self, acc: Accumulator, *factors: Any) -> None:
        reads = [self.read(x, x.box) for x in factors if isinstance(x, View)]
        given = [x.of for x in factors if isinstance(x, Value)]
        of, uses = frozenset().union(*given, *(x for x, _ in reads)), [use for _, use in reads]
        assert all(sum(x[0] == side for x in of) < 2 for side in "qk"), "a product of two steps"
        acc.of, acc.uses = acc.of | of, acc.uses + uses
        self.flight[self.me].append((acc, uses))

    def wgmma_wait(self, left: int) -> None:
        flight = self.flight[self.me]
        over = flight[: max(len(flight) - left, 0)]
        for use in itertools.chain(*(uses for _, uses in over)):
            use.ended = self.tick()
        del flight[: len(over)]

    def wgmma_accumulator_load(self, acc: Accumulator, wait_n: int | None = None) -> Value:
        if wait_n is not None:
            self.wgmma_wait(wait_n)
        assert all(x is not acc for x, _ in self.flight[self.me]), "a product is not awaited"
        for use in acc.uses:
            self.need(use)
        return Value(acc.of, acc.shape)

    # -- what it comes to --
    def step(self, head: int, q0: int) -> set:
        """What S, dP, dS and dQ of a step are made of."""
        block, c = self.block, self.c
        partial = block.walk.partial(q0 // c.block_q, 0, c.block_kv)
        cleaned = ["clean k"] * self.plan.scores.dead_keys
        cleaned += ["clean q"] * bool(self.plan.empty_queries and partial)
        k0 = block.n * c.block_kv
        return {("k", block.b, block.h, k0), ("q", block.b, head, q0), *cleaned}

    def steps(self) -> list[tuple[int, int]]:
        """(query head, first row)"""
        walk, group = self.block.walk, self.plan.group
        heads = range(self.block.h * group, (self.block.h + 1) * group)
        return [(x, i * self.c.block_q) for x in heads for i in range(walk.first, walk.end)]

    def probabilities(self, scores, s, nlse, k0, q0, _, vectors, *__) -> list[Value]:
        ((*_, batch, head, row),) = self.load(nlse).of
        assert row == q0 and s.of == self.step(head, q0), "S is of other tiles"
        firsts = {"k": k0 // self.c.block_kv * self.c.block_kv, "q": q0}
        for name in {"dead", "kseg", "kpos", "qseg", "qpos"} & vectors.keys():
            side = "q" if name[0] == "q" else "k"
            assert self.load(vectors[name]).of == {(side, batch, firsts[side])}, name
        return [Value(s.of, s.shape)] * (3 if scores.bias_gradient else 2)

    def gradients(self, scores, d, dp, ndelta, late, bias) -> Value:
        late = late or scores.dropout_rate
        assert d.of == dp.of and (not late or self.load(ndelta).of < d.of), "dP is of other tiles"
        assert bias is None or bias[0].of == d.of, "P is of other tiles"
        return Value(d.of, d.shape)

    def store(self, name: str, batch: int, head: int, first: int, of: frozenset) -> None:
        """Rows of dK or dV."""
        assert (batch, head) == (self.block.b, self.block.h)
        assert of == set().union(*(self.step(*x) for x in self.steps())), f"steps of {name}"
        self.rows.add((name, first))

    def add(self, batch: int, head: int, tile: int, column: int, of: frozenset) -> None:
        """64 rows and columns of dQ."""
        tile -= self.plan.first_tile
        q0 = tile * 64 // self.c.block_q * self.c.block_q
        assert batch == self.block.b and of == self.step(head, q0), "dQ is of other tiles"
        self.added[head, tile, column] += 1

    def check(self) -> None:
        """At the end: everything is stored, once, and every warp saw every phase that it waited for."""
        first = self.block.n * self.c.block_kv
        firsts = range(first, first + self.c.block_kv, self.c.rows)
        assert self.rows == set(itertools.product(("dk", "dv"), firsts))
        tiles = [(x, q0 + m) for x, q0 in self.steps() for m in range(0, self.c.block_q, 64)]
        pieces = itertools.product(tiles, range(0, self.plan.padded_head_size, 64))
        times = WARPS if self.c.dq == "red" else 1
        assert self.added == {(x, row // 64, column): times for (x, row), column in pieces}
        for barrier in self.barriers:
            assert not barrier.arrived, f"{barrier.name} ends half way"
            for warp, ticks in barrier.waits.items():
                known = [x[warp] for x in barrier.clocks[1:]]
                missed = any(x < tick for tick, x in zip(ticks, known, strict=False))
                assert not missed, f"{barrier.name}: a phase may be missed"
        for x in self.loading:
            assert self.clocks[:, x.clock].max() == len(x.clocks), f"{x.name}: loads in flight"

    # -- turns --
    def semaphore_wait(self, turn: tuple, rank: int, **_: Any) -> None:
        assert self.turns[turn[1]] == rank, "it is not its turn"

    def semaphore_signal(self, turn: tuple, *_: Any, **__: Any) -> None:
        if self.me % WARPS == 0:
            assert not self.stores[self.me], "the turn is passed on before dQ is added"
            self.turns[turn[1]] += 1
