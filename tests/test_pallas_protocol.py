"""The sm90 forward's barriers, slots and schedule: its own code, a Python thread a warpgroup.

What the kernel calls (`lax`, `plgpu`, `instructions`, ...) is replaced by a machine that knows what is read
until when. Vector clocks, joined at barriers alone, say what a warpgroup may know: one run shows a race, a
phase that may be missed or a deadlock, whatever its timing. A tile is its coordinates, nothing is computed:
which logits are large and which sums disprove a cubic is drawn.
"""

import dataclasses
import functools
import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap.pallas import config
from jaxcap.spec import AttentionSpec, Operands
from tests.test_pallas_forward import CONFIGS, SIZES, length, sized

WORKERS = 1  # multiprocessors, each with one CTA of a persistent grid


class Forwarding:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names)
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class At:
    """`x.at[index]`."""

    def __init__(self, take: Callable):
        self.take = take

    def __getitem__(self, index: Any) -> Any:
        return self.take(index)


class Memory:
    """An array in global memory, or slots of tiles in shared memory."""

    def __init__(self, name: str, shape: tuple[int, ...] = (), array: Any = None, slots: int = 0):
        self.name, self.shape, self.array = name, shape, array
        self.slots = [Slot(name) for _ in range(slots)]
        self.at = At(lambda index: (self, index))

    def __getitem__(self, index: Any) -> int:
        return int(self.array[index])


@dataclasses.dataclass
class Use:
    """Of a slot: by whom, and by which of its ticks it is over."""

    warpgroup: int
    ended: int | None = None


@dataclasses.dataclass
class Slot:
    """`content`: (array, batch, head, first row) that TMA wrote last."""

    name: str
    content: Any = None
    chunks: int = 0
    full: Any = None  # (barrier, how many completions) that say so
    scaled: bool = False
    uses: list[Use] = dataclasses.field(default_factory=list)
    cleaned: set[int] = dataclasses.field(default_factory=set)
    rows: dict[int, tuple] = dataclasses.field(default_factory=dict)  # O, by its first row


@dataclasses.dataclass
class Value:
    """S, P or O: the tiles that it is made of. Not `done` while its product is in flight.

    `scale`: with a running maximum, the tile whose maximum P and O were last scaled by. `words`: whether some
    pairs of P are, `where`: (batch, head, first of 64 rows) of P and O.
    """

    tiles: list[tuple]
    done: bool = True
    scale: Any = None
    words: bool = False
    where: Any = None


@dataclasses.dataclass
class Barrier:
    """An mbarrier: its completions, and how many a warpgroup has waited for, the last until which tick.

    `waiters`: who waits for each.
    """

    arrivals: int
    waiters: range
    pending: int = 0
    clocks: list[np.ndarray] = dataclasses.field(default_factory=list)
    waited: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Named:
    """A named barrier: who is there, the clocks of its completions, who synced last and the ticks after."""

    here: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    syncs: list[int] = dataclasses.field(default_factory=list)
    clocks: list[np.ndarray] = dataclasses.field(default_factory=list)
    synced: dict[int, float] = dataclasses.field(default_factory=dict)


class Words:
    """int32 in shared memory: who wrote each last, and who has read it since."""

    def __init__(self, machine: Any, size: int):
        self.machine = machine
        self.values: list[Any] = [None] * size
        self.uses: list[list[Use]] = [[] for _ in range(size)]

    def __getitem__(self, index: int) -> int:
        with self.machine.lock:
            uses = self.uses[index]
            assert uses and self.machine.knows(uses[0]), "a word is read before it is written"
            uses.append(Use(self.machine.me, self.machine.tick()))
            return self.values[index]

    def write(self, index: int, value: int) -> None:
        with self.machine.lock:
            assert all(map(self.machine.knows, self.uses[index])), "a word is written while in use"
            self.uses[index] = [Use(self.machine.me, self.machine.tick())]
            self.values[index] = value


@dataclasses.dataclass
class Attempt:
    """At 64 rows `where`: `visited` [(first key, masked, cleaned, whether as a cubic)], by the exact form or
    not; its warpgroup's tick then."""

    where: tuple
    cta: int
    warpgroup: int
    tick: int
    visited: list[tuple]
    exact: bool
    written: Use | None = None  # their store

    @property
    def tile(self) -> tuple:
        """The CTA's."""
        *where, row = self.where
        return *where, row - 64 * self.warpgroup


@dataclasses.dataclass
class Script:
    """Which shares of (batch, head, row) begin with large logits, and have sums that disprove a cubic; the
    latter in one tile alone where it is given."""

    shares: tuple[float, float]
    seed: int = 0
    tile: tuple | None = None
    rows: int = 64

    def _drawn(self, what: int, where: tuple) -> bool:
        return np.random.default_rng((self.seed, what, *where)).random() < self.shares[what]

    def large(self, where: tuple) -> bool:
        return self._drawn(0, where)

    def disproved(self, where: tuple) -> bool:
        *of, row = where
        alone = self.tile in (None, (*of, row // self.rows * self.rows))
        return alone and self._drawn(1, where)


class Machine:
    """One CTA: consumers and, the last of `count` warpgroups, the producer."""

    def __init__(self, count: int, cta: int, found: dict):
        self.count, self.cta, self.found = count, cta, found
        self.lock = threading.Condition(threading.RLock())
        self.local = threading.local()
        self.clocks = np.zeros((count, count), int)
        self.named: dict[int, Named] = {}
        self.waiting: dict[int, Callable] = {}
        self.alive = count
        self.failure: Any = None
        self.flight: list[list] = [[] for _ in range(count)]  # (values, uses), the oldest first
        self.reading: list[list[Use]] = [[] for _ in range(count)]  # by stores, of slots
        self.writing: list[list[Use]] = [[] for _ in range(count)]  # by stores
        self.notes: dict[tuple, int] = {}  # by warpgroup and row
        self.fresh: list[Slot] = []  # scaled, and nobody told

    @property
    def me(self) -> int:
        return self.local.me

    def run(self, body: Callable) -> None:
        def warpgroup(number):
            self.local.me = number
            try:
                body()
                assert not self.flight[number] and not self.writing[number], "ends too early"
            except BaseException as failure:
                with self.lock:
                    self.failure = self.failure or failure
            with self.lock:
                self.alive -= 1
                self.lock.notify_all()

        threads = [threading.Thread(target=warpgroup, args=(w,)) for w in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def tick(self) -> int:
        self.clocks[self.me, self.me] += 1
        return int(self.clocks[self.me, self.me])

    def knows(self, use: Use) -> bool:
        return use.ended is not None and self.clocks[self.me, use.warpgroup] >= use.ended

    def until(self, condition: Callable, clocks: list, index: int) -> None:
        self.waiting[self.me] = condition
        while not condition():
            if len(self.waiting) == self.alive and not any(x() for x in self.waiting.values()):
                self.failure = self.failure or AssertionError("deadlock")
            if self.failure is not None:
                self.lock.notify_all()
                raise self.failure
            self.lock.wait(10)
        del self.waiting[self.me]
        self.clocks[self.me] = np.maximum(self.clocks[self.me], clocks[index])

    # -- barriers --
    def named_barrier(self, op: str, ident: int, threads: int) -> None:
        with self.lock:
            self.tick()
            barrier = self.named.setdefault(ident, Named())
            after = [self.clocks[self.me, w] >= tick for w, tick in barrier.synced.items()]
            assert any(after) or not after, "may arrive in the phase before"
            assert self.me not in barrier.here, "arrives twice"
            barrier.here[self.me] = self.clocks[self.me].copy()
            if op == "sync":
                barrier.syncs.append(self.me)
            phase = len(barrier.clocks)
            if len(barrier.here) == threads // 128:
                assert len(barrier.syncs) in (1, threads // 128), "one waits, or all do"
                barrier.clocks.append(np.max(list(barrier.here.values()), axis=0))
                barrier.here, barrier.synced = {}, dict.fromkeys(barrier.syncs, np.inf)
                barrier.syncs = []
                self.lock.notify_all()
            if op == "sync":
                self.until(lambda: len(barrier.clocks) > phase, barrier.clocks, phase)
                barrier.synced[self.me] = self.tick()

    def barrier_wait(self, barrier: Barrier) -> None:
        with self.lock:
            count = barrier.waited.get(self.me, (0, 0))[0]
            self.until(lambda: len(barrier.clocks) > count, barrier.clocks, count)
            barrier.waited[self.me] = count + 1, self.tick()

    def arrive(self, barrier: Barrier) -> None:
        with self.lock:
            self.tick()
            if not barrier.pending:
                for w in barrier.waiters if barrier.clocks else ():
                    count, after = barrier.waited.get(w, (0, 0))
                    seen = count == len(barrier.clocks) and self.clocks[self.me, w] >= after
                    assert seen, "a phase may be missed"
            barrier.pending += 1
            if barrier.pending == barrier.arrivals:
                barrier.pending = 0
                barrier.clocks.append(self.clocks[self.me].copy())
                self.lock.notify_all()

    def barrier_arrive(self, barrier: Barrier) -> None:
        with self.lock:
            for slot in self.fresh:
                slot.full = barrier, len(barrier.clocks) + 1
            self.fresh = []
            self.arrive(barrier)

    def filled(self, slot: Slot) -> bool:
        barrier, completion = slot.full or (Barrier(0, range(0)), 1)
        return barrier.waited.get(self.me, (0, 0))[0] >= completion

    # -- copies --
    def load(self, source: tuple, target: tuple, barrier: Barrier) -> None:
        (array, (batch, rows, head, _)), (memory, (slot, chunk)) = source, target
        slot = memory.slots[slot]
        with self.lock:
            if not chunk:
                assert all(map(self.knows, slot.uses)), f"{memory.name} is loaded while it is used"
                slot.uses, slot.cleaned, slot.rows, slot.chunks = [], set(), {}, 0
                slot.full, slot.scaled = (barrier, len(barrier.clocks) + 1), False
            assert slot.chunks == chunk and not slot.uses
            slot.content, slot.chunks = (array.name, batch, head, rows[0]), chunk + 1
            self.arrive(barrier)

    def scale(self, memory: Memory, slot: int, *_: Any) -> None:
        at = memory.slots[slot]
        with self.lock:
            assert self.filled(at), "scaled before it is there"
            assert not at.scaled and not at.uses, "scaled twice or after it is read"
            at.full, at.scaled = None, True
            self.fresh.append(at)

    def store(self, source: tuple, target: tuple) -> None:
        (memory, (slot, _, rows)), (_, (batch, at, head, _)) = source, target
        slot = memory.slots[slot]
        with self.lock:
            where = batch, head, at[0]
            assert slot.rows[rows[0]] == where
            read, written = Use(self.me), Use(self.me)
            self.reading[self.me].append(read)
            self.writing[self.me].append(written)
            slot.uses.append(read)
            *earlier, attempt = self.found[where]
            before = [x.written for x in earlier]
            assert all(map(self.knows, before)), (
                "a tile is stored before its first store is complete"
            )
            attempt.written = written  # of the last chunk

    def stored(self, count: int, wait_read_only: bool = False) -> None:
        assert not count
        with self.lock:
            for uses in (self.reading, self.writing)[: 1 if wait_read_only else 2]:
                for use in uses[self.me]:
                    use.ended = self.tick()
                uses[self.me] = []

    # -- products --
    def begun(self, values: list[Value], *slots: Slot) -> list[Value]:
        uses = [Use(self.me) for _ in slots]
        for slot, use in zip(slots, uses, strict=True):
            assert self.filled(slot), "read before it is there"
            slot.uses.append(use)
        self.flight[self.me].append((values, uses))
        return values

    def wait(self, left: int = 0) -> None:
        with self.lock:
            flight = self.flight[self.me]
            for values, uses in flight[: len(flight) - left]:
                for value in values:
                    value.done = True
                for use in uses:
                    use.ended = self.tick()
            self.flight[self.me] = flight[len(flight) - left :]

    def finished(self, where: tuple, visited: list[tuple], exact: bool) -> None:
        with self.lock:
            self.found.setdefault(where, []).append(
                Attempt(where, self.cta, self.me, self.tick(), visited, exact)
            )


def ready(value: Value) -> Value:
    assert value.done, "not awaited"
    return value


def settled(*values: Value) -> Any:
    return values[0] if len(list(map(ready, values))) == 1 else values


def run(
    spec: AttentionSpec,
    c: config.ForwardConfig,
    side: dict[str, np.ndarray],
    script: Script | None = None,
) -> dict[tuple, list[Attempt]]:
    """What the CTAs of a call do, by (batch, head, first of 64 rows), in the order of the attempts.

    With a script, of a call that takes the cap as a cubic, however few its tiles and steps.
    """
    from jaxcap.pallas import forward_sm90 as f

    machine: Any = None
    captured: dict[str, Any] = {}
    found: dict = {}
    group = spec.query_heads // spec.kv_heads

    def kernel(body, **keywords):
        captured.update(keywords, body=body)
        return lambda q, k, v, *more: (captured.update(more=more), None)

    def fori_loop(start, stop, body, carry):
        for n in range(start, stop):
            carry = body(n, carry)
        return carry

    def loop(start, stop):
        return lambda body: fori_loop(start, stop, lambda n, _: body(n), None)

    def slot_at(memory, unit, inside=0):
        """Of the tile that begins at `unit`, 16 bytes each from the start of its buffer."""
        slot, rest = divmod(unit, int(np.prod(memory.shape[1:])) // 8)
        assert rest == inside
        return memory.slots[slot]

    def qk(q, k, q_shape, *_):
        q_at = slot_at(captured["qs"], q, machine.me * 64 * q_shape[2] // 8)
        k_at = slot_at(captured["ks"], k)
        with machine.lock:
            (q_name, *row), (k_name, *key) = q_at.content, k_at.content
            assert (q_name, k_name) == ("q", "k")
            assert (row[0], row[1] // group) == (key[0], key[1])
            assert q_at.scaled == (script is not None), "Q is not scaled"
            tile = row[0], row[1], row[2] + 64 * machine.me, key[2]
            return machine.begun([Value([tile], False)], q_at, k_at)[0]

    def softmax(s, state, tile, extras, call, c, shift, masked, limit, cap=None, rounded=False):
        del extras, call, limit, rounded
        *where, k_first = tile.batch, tile.head, tile.q_first, tile.k_first
        assert ready(s).tiles == [(*where, k_first)]
        assert cap is None or not masked, "no masks in a cubic"
        online = shift is None
        p = Value([(k_first, masked, cap is not None)], scale=k_first if online else None)
        p.words, p.where = not state and c.exp_packed is not None and cap is None, tuple(where)
        return p, (*state[:2], p) if online else state

    def to_16bit(p, dtype, packed=lambda pair: False):
        del dtype
        assert p.words == any(map(packed, range(c.keys // 2))), "words are taken for numbers"
        return p

    def converted(p, packed, words):
        assert any(map(packed, range(c.keys // 2))) and p.words != words
        return dataclasses.replace(p, words=words)

    def pv(o, p, v, *_):
        at = slot_at(captured["vs"], v)
        (k_first, masked, cap), before = p.tiles[0], ready(o[0]).tiles
        assert all(x.where in (None, p.where) and ready(x).tiles == before for x in o)
        with machine.lock:
            assert (at.content[0], at.content[3]) == ("v", k_first)
            assert not before or o[0].scale == p.scale, "O is not rescaled"
            visited = [*before, (k_first, masked, machine.me in at.cleaned, cap)]
            return tuple(machine.begun([Value(visited, False, where=p.where) for _ in o], at))

    def rescaled(o, newest):
        return Value(ready(o).tiles, scale=newest.scale, where=o.where)

    def done(o, state, lse, sinks, tile, *_):
        del lse, sinks
        assert o.where == (tile.batch, tile.head, tile.q_first)
        assert all(not isinstance(x, Value) or x.tiles in ([], o.tiles) for x in state[:1])
        exact = script is None or bool(machine.notes[machine.me, f.NOW])
        machine.finished(o.where, ready(o).tiles, exact)
        return Value([(tile.batch, tile.head, tile.q_first)])

    def store_rows(o, memory, slot, first, *_):
        slot = memory.slots[slot]
        with machine.lock:  # the other warpgroups read and store rows of their own
            mine = [x for x in slot.uses if x.warpgroup == machine.me]
            assert all(map(machine.knows, mine)), "O is written over what is read"
            slot.rows[first] = o.tiles[0]

    def zero_rows(memory, slot, *_):
        with machine.lock:
            slot = memory.slots[slot]
            assert slot.content[0] == "v" and machine.filled(slot)
            slot.uses.append(Use(machine.me, machine.tick()))
            slot.cleaned.add(machine.me)

    def direct(o, out, batch, first, head, _):
        del out
        assert o.tiles == [(batch, head, first)]

    def exact_form(s, before, largest):
        del largest
        assert machine.me < c.warpgroups
        return int(before or script.large(ready(s).tiles[0][:3]))

    def disproved(sums, first, keys, spec, shift):
        del spec, shift
        assert sums.where[2] == first and len(ready(sums).tiles) * c.keys == keys
        return int(script.disproved(sums.where))

    def note(notes, row, value):
        del notes
        machine.notes[machine.me, row] = value

    def applies(*arguments):
        return script is not None and applies_at_all(*arguments)

    fakes = {
        "I32": int,
        "lax": types.SimpleNamespace(
            axis_index=lambda name: machine.me if name == "wg" else machine.cta,
            fori_loop=fori_loop,
            cond=lambda condition, yes, no, *x: yes(*x) if condition else no(*x),
            rem=lambda x, y: x % y,
            div=lambda x, y: x // y,
            max=max,
            min=min,
            optimization_barrier=lambda results: results,
        ),
        "jnp": Forwarding(
            jnp,
            where=lambda condition, x, y: x if condition else y,
            clip=lambda x, low, high: min(max(x, low), high),
            asarray=lambda x, *_: np.asarray(x) if np.ndim(x) else int(x),
        ),
        "pl": types.SimpleNamespace(
            when=lambda condition: lambda body: body() if condition else None,
            loop=loop,
            ds=lambda *x: x,
        ),
        "plgpu": Forwarding(
            f.plgpu,
            kernel=kernel,
            SMEM=lambda shape, *_, **__: shape,
            Barrier=lambda num_arrivals, num_barriers: [num_arrivals] * num_barriers,
            set_max_registers=lambda *_, **__: None,
            barrier_wait=lambda x: machine.barrier_wait(x),
            barrier_arrive=lambda x: machine.barrier_arrive(x),
            copy_gmem_to_smem=lambda *x: machine.load(*x),
            copy_smem_to_gmem=lambda *x: machine.store(*x),
            commit_smem=lambda: None,
            wgmma_wait=lambda left: machine.wait(left),
            wait_smem_to_gmem=lambda *x, **named: machine.stored(*x, **named),
        ),
        "ins": types.SimpleNamespace(
            named_barrier=lambda *x: machine.named_barrier(*x),
            base_of=lambda *_: 0,
            write_ones=lambda *_: None,
            zero_rows=zero_rows,
            qk=qk,
            pv=pv,
            last_wait=lambda: machine.wait(),
            settled=settled,
            to_16bit=to_16bit,
            store_rows=store_rows,
            scalar=lambda x: x,
        ),
        "cubic": Forwarding(
            f.cubic,
            applies=applies,
            scale=lambda *x: machine.scale(*x),
            exact_form=exact_form,
            disproved=disproved,
            to_words=lambda p, packed: converted(p, packed, True),
            to_numbers=lambda p, packed: converted(p, packed, False),
        ),
        "notes": types.SimpleNamespace(
            note=note,
            noted=lambda _, row: int(machine.notes[machine.me, row] != 0),
            note_once=lambda words, index, value: words.write(index, value),
        ),
        "softmax": softmax,
        "rescaled": rescaled,
        "finished": done,
        "wide": types.SimpleNamespace(store_rows=direct),
        "filled": lambda *_: Value([]),
        "side_arrays": lambda *_: dict(side),
        "multiprocessors": lambda: WORKERS,
    }

    def barriers(arrivals, waiters):
        made = [Barrier(n, waiters) for n in arrivals]
        return types.SimpleNamespace(at=At(made.__getitem__))

    def empty(tokens, heads, size):
        return np.broadcast_to(jnp.zeros((), spec.dtype), (spec.batch, tokens, heads, size))

    operands = Operands(
        empty(spec.query_length, spec.query_heads, spec.head_size),
        empty(spec.key_length, spec.kv_heads, spec.head_size),
        empty(spec.key_length, spec.kv_heads, spec.value_size),
    )
    applies_at_all = f.cubic.applies
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LEAST_TILES", "LEAST_BESIDE", "LEAST_STEPS"):
            patch.setattr(f.cubic, name, 0)
        for name, value in fakes.items():
            patch.setattr(f, name, value)
        f.forward(spec, operands, c)
        scratch = captured["scratch_types"]
        near = scratch[-2] == (c.warpgroups,)
        assert near == (script is not None)
        *shapes, q_full, kv_full = scratch[:-3] if near else scratch
        consumers, producer = range(c.warpgroups), range(c.warpgroups, c.warpgroups + 1)
        given = [Memory("side", x.shape, x) for x in captured["more"]]
        for cta in range(captured["grid"][0]):
            shared = [Memory("qkvo"[i] + "s", x, slots=x[0]) for i, x in enumerate(shapes)]
            captured.update(zip(("qs", "ks", "vs"), shared, strict=False))
            machine = Machine(c.warpgroups + 1, cta, found)
            more = [barriers(q_full, producer if near else consumers), barriers(kv_full, consumers)]
            if near:
                more += [None, Words(machine, c.warpgroups), barriers(scratch[-1], consumers)]
            arrays = [*map(Memory, "qkv"), *given, Memory("out"), Memory("lse")]
            machine.run(functools.partial(captured["body"], *arrays, *shared, *more))
    return found


# ---- calls --------------------------------------------------------------------------------------
FULL = {"is_causal": False}
ENDS = {"query_lengths": np.array([0, 130, 257]), "kv_lengths": np.array([70, 0, 190])}
#: What a call is beside its sizes, and lengths of its batch entries.
CALLS: dict[str, tuple[dict, dict]] = {
    "causal": (length(321, 300), {}),
    "bottom_right": (length(300, 150) | {"causal_alignment": "bottom_right"}, {}),
    "window": (length(270, 400) | {"window": (60, 0), "causal_alignment": "bottom_right"}, {}),
    "full": (length(350, 190) | FULL, {}),
    "one_tile": (length(270, 7) | FULL, {}),
    "one_query": (length(1, 200) | FULL | {"partial": True}, {}),
    "between_transfers": (
        length(500, 270) | FULL | {"beside_transfers": True, "partial": True},
        {},
    ),
    "lengths": (length(260, 200) | {"query_lengths": True, "kv_lengths": True}, ENDS),
    "segments": (length(270, 400) | FULL | {"segment_ids": True}, {}),
}


def table(spec: AttentionSpec, c: config.ForwardConfig) -> dict[str, np.ndarray]:
    """A table as of `tile_tables.visits`: some KV tiles of each tile of queries, of the second none."""
    rng = np.random.default_rng(0)
    shape = 1, 1, -(-spec.query_length // c.queries)
    tiles = -(-spec.key_length // c.keys)
    order = np.stack([rng.permutation(tiles) for _ in range(shape[2])]).reshape(*shape, tiles)
    stop = rng.integers(1, tiles + 1, shape)
    stop[0, 0, 1:2] = 0
    found = {"order": order, "partial": rng.integers(0, stop + 1), "stop": stop}
    found["live"] = np.ones((1, spec.key_length))
    return {name: x.astype(np.int32) for name, x in found.items()}


def kept(spec: AttentionSpec, side: dict[str, np.ndarray], batch: int) -> np.ndarray:
    """[T, S] bool by band and lengths."""
    q, k = np.arange(spec.query_length)[:, None], np.arange(spec.key_length)[None]
    low, high = spec.band
    d = k - q - spec.query_offset
    keep = (d >= (-(2**30) if low is None else low)) & (d <= (2**30 if high is None else high))
    if "kv_lengths" in side:
        keep = keep & (q < side["query_lengths"][batch]) & (k < side["kv_lengths"][batch])
    return keep


def check_visited(
    spec: AttentionSpec, keep: np.ndarray, dynamic: bool, keys: int, row: int, visited: list[tuple]
) -> None:
    """Of 64 rows from `row`: every tile that is attended once, masked and rid of dead keys where needed."""
    dead = ~keep.any(0)
    rows = keep[row : row + 64]
    there = rows.any(1) if dynamic else np.ones(len(rows), bool)
    seen = np.zeros(spec.key_length, bool)
    for first, masked, cleaned, _ in visited:
        at = slice(first, first + keys)
        assert not seen[at].any()
        seen[at] = True
        assert rows[:, at].any() or len(visited) == 1
        assert masked or (first + keys <= spec.key_length and rows[there][:, at].all())
        assert cleaned or not dead[at].any()
    assert not rows[:, ~seen].any()


def check_table(given: dict[str, np.ndarray], i: int, keys: int, visited: list[tuple]) -> None:
    stop, partial = (int(given[name][0, 0, i]) for name in ("stop", "partial"))
    order = given["order"][0, 0, i, : max(stop, 1)] * keys
    assert [x[0] for x in visited] == list(order)
    assert all(masked for _, masked, *_ in visited[: partial if stop else 1])
    assert all(cleaned for _, _, cleaned, _ in visited[: partial if stop else 1])


@pytest.mark.parametrize("call", CALLS)
def test_every_configuration_keeps_the_protocol(call):
    """No race, no deadlock; what is visited is right."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    changes, side = CALLS[call]
    for name, c in CONFIGS.items():
        size = SIZES.get(name, 128)
        spec = sized(*((200, 256) if name == "WIDE_APART" else (size,)), **changes)
        plain = name.startswith("UNCAPPED")
        heads = 2 if call in ("causal", "full") else 1
        spec = spec.replace(batch=len(side.get("kv_lengths", [0])), query_heads=heads, kv_heads=1)
        spec = spec.replace(softcap=None if plain else 50.0)
        given = table(spec, c) if call == "segments" else side
        found = run(spec, c, given)
        for b in range(spec.batch):
            keep = kept(spec, side, b)
            for head, i in np.ndindex(heads, -(-spec.query_length // 64)):
                (attempt,) = found.pop((b, head, 64 * i))
                if call == "segments":
                    check_table(given, i * 64 // c.queries, c.keys, attempt.visited)
                else:
                    dynamic = "kv_lengths" in side
                    check_visited(spec, keep, dynamic, c.keys, 64 * i, attempt.visited)
        # Rows that are not there: with a band a step that nobody stores, else nothing.
        assert all(spec.is_causal and first >= spec.query_length for _, _, first in found)


# ---- the cap as a cubic -------------------------------------------------------------------------
NEAR = {name: c for name, c in CONFIGS.items() if c.cubic}
NEAR_CALLS = {
    "causal": length(600),
    "window": length(450, 700) | {"window": (200, 0), "causal_alignment": "bottom_right"},
    "full": length(500, 256) | FULL,
    "ragged": length(450, 300) | FULL | {"partial": True},
    "beside_transfers": length(700, 300) | FULL | {"partial": True, "beside_transfers": True},
}
SCRIPTS = [
    Script(*x) for x in (((0, 0),), ((0, 1),), ((0.1, 0.2), 0), ((0.1, 0.2), 1), ((0.3, 0.1), 2))
]


@pytest.mark.parametrize("call", NEAR_CALLS)
def test_what_a_cubic_did_not_do_is_done_again_once(call):
    """And stored once more after its first store, by the exact form, which its warpgroup keeps."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    asked: list[int] = []
    for name, c in NEAR.items():
        spec = sized(SIZES.get(name, 128), **NEAR_CALLS[call], batch=1, query_heads=3, kv_heads=1)
        order = []
        for script in SCRIPTS:
            order, by = played(spec, c, script)
            asked += by
        last = Script((0, 1), tile=order[-1], rows=c.queries)  # when nobody is beside it any more
        assert played(spec, c, last)[1]
    assert {1, 2, 3} <= set(asked)


def played(spec: AttentionSpec, c: config.ForwardConfig, script: Script) -> tuple[list, list[int]]:
    """(the tiles, how many warpgroups asked for each that is done again), checked."""
    found, keep = run(spec, c, {}, script), kept(spec, {}, 0)
    attempts = sorted(itertools.chain(*found.values()), key=lambda x: (x.cta, x.tick))
    order, by = [], []
    for _, group in itertools.groupby(attempts, key=lambda x: x.cta):
        tiles, asked = check_block(spec, c, script, list(group))
        order += tiles
        by += [asked.count(x) for x in set(asked)]
    assert len(set(order)) == len(order) == spec.query_heads * -(-spec.query_length // c.queries)
    for x in attempts:
        if x.where[2] < spec.query_length:
            check_visited(spec, keep, False, c.keys, x.where[2], x.visited)
    assert all(x[-1].exact or not script.disproved(where) for where, x in found.items())
    return order, by


def check_block(
    spec: AttentionSpec, c: config.ForwardConfig, script: Script, attempts: list[Attempt]
) -> tuple[list, list]:
    """(a CTA's tiles in order, those that its warpgroups asked for again)."""
    of = [[x for x in attempts if x.warpgroup == w] for w in range(c.warpgroups)]
    undone = [check_forms(mine, script) for mine in of]
    asked = [x.tile for x in undone if x is not None]
    tiles = [x.tile for x in of[0]]  # the first warpgroup has rows in each
    order = list(dict.fromkeys(tiles))
    assert tiles == [*order, *dict.fromkeys(asked)]
    for w, mine in enumerate(of):
        here = [x for x in tiles if spec.is_causal or x[2] + 64 * w < spec.query_length]
        assert [x.tile for x in mine] == here
    return order, asked


def check_forms(attempts: list[Attempt], script: Script) -> Attempt | None:
    """Of a warpgroup, whose tile that has to be done again is returned."""
    undone = None
    for x in attempts:
        assert x.exact == (undone is not None or script.large(x.where))
        for j, (_, masked, _, as_cubic) in enumerate(x.visited):
            assert as_cubic == (j > 0 and not masked and not x.exact)
        if not x.exact and script.disproved(x.where):
            undone = x
    return undone
