"""The sm90 forward's barriers, slots and schedule: its own code, a Python thread a warpgroup.

What the kernel calls (`lax`, `plgpu`, `instructions`, ...) is replaced by a machine that knows what is read
until when. Vector clocks, joined at barriers alone, say what a warpgroup may know: one run shows a race, a
phase that may be missed or a deadlock, whatever its timing. A tile is its coordinates, nothing is computed.
"""

import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap.pallas import config
from jaxcap.spec import AttentionSpec, Operands
from tests.test_pallas_forward import length, sized

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
    uses: list[Use] = dataclasses.field(default_factory=list)
    cleaned: set[int] = dataclasses.field(default_factory=set)
    rows: dict[int, tuple] = dataclasses.field(default_factory=dict)  # O, by its first row


@dataclasses.dataclass
class Value:
    """S, P or O: the tiles that it is made of. Not `done` while its product is in flight.

    `scale`: with a running maximum, the tile whose maximum P and O were last scaled by.
    """

    tiles: list[tuple]
    done: bool = True
    scale: Any = None


@dataclasses.dataclass
class Barrier:
    """An mbarrier: its completions, and how many a warpgroup has waited for, the last until which tick."""

    arrivals: int
    pending: int = 0
    clocks: list[np.ndarray] = dataclasses.field(default_factory=list)
    waited: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Named:
    """A named barrier: who is there, the clocks of its completions, the tick of who synced after the last."""

    here: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    syncs: int | None = None
    clocks: list[np.ndarray] = dataclasses.field(default_factory=list)
    synced: tuple[int, float] | None = None


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
        self.flight: list[list] = [[] for _ in range(count)]  # (value, uses), the oldest first
        self.stores: list[list[Use]] = [[] for _ in range(count)]

    @property
    def me(self) -> int:
        return self.local.me

    def run(self, body: Callable) -> None:
        def warpgroup(number):
            self.local.me = number
            try:
                body()
                assert not self.flight[number] and not self.stores[number], "ends too early"
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
            if barrier.synced is not None:
                owner, after = barrier.synced
                assert self.clocks[self.me, owner] >= after, "may arrive in the phase before"
            assert self.me not in barrier.here, "arrives twice"
            barrier.here[self.me] = self.clocks[self.me].copy()
            if op == "sync":
                assert barrier.syncs is None
                barrier.syncs = self.me
            phase = len(barrier.clocks)
            if len(barrier.here) == threads // 128:
                assert barrier.syncs is not None, "nobody waits"
                barrier.clocks.append(np.max(list(barrier.here.values()), axis=0))
                barrier.here, barrier.synced = {}, (barrier.syncs, np.inf)
                barrier.syncs = None
                self.lock.notify_all()
            if op == "sync":
                self.until(lambda: len(barrier.clocks) > phase, barrier.clocks, phase)
                barrier.synced = self.me, self.tick()

    def barrier_wait(self, barrier: Barrier) -> None:
        with self.lock:
            count = barrier.waited.get(self.me, (0, 0))[0]
            self.until(lambda: len(barrier.clocks) > count, barrier.clocks, count)
            barrier.waited[self.me] = count + 1, self.tick()

    # -- copies --
    def load(self, source: tuple, target: tuple, barrier: Barrier) -> None:
        (array, (batch, rows, head, _)), (memory, (slot, chunk)) = source, target
        slot = memory.slots[slot]
        with self.lock:
            self.tick()
            if not barrier.pending:
                for w in range(self.count - 1) if barrier.clocks else ():
                    count, after = barrier.waited.get(w, (0, 0))
                    seen = count == len(barrier.clocks) and self.clocks[self.me, w] >= after
                    assert seen, "a phase may be missed"
            if not chunk:
                assert all(map(self.knows, slot.uses)), f"{memory.name} is loaded while it is used"
                slot.uses, slot.cleaned, slot.rows, slot.chunks = [], set(), {}, 0
            assert slot.chunks == chunk and not slot.uses
            slot.content, slot.chunks = (array.name, batch, head, rows[0]), chunk + 1
            barrier.pending += 1
            if barrier.pending == barrier.arrivals:
                barrier.pending = 0
                barrier.clocks.append(self.clocks[self.me].copy())
                self.lock.notify_all()

    def store(self, source: tuple, target: tuple) -> None:
        (memory, (slot, _, rows)), (_, (batch, at, head, _)) = source, target
        slot = memory.slots[slot]
        with self.lock:
            assert slot.rows[rows[0]] == (batch, head, at[0])
            self.stores[self.me].append(Use(self.me))
            slot.uses.append(self.stores[self.me][-1])

    def stored(self, count: int, wait_read_only: bool = False) -> None:
        del wait_read_only
        assert not count
        with self.lock:
            for use in self.stores[self.me]:
                use.ended = self.tick()
            self.stores[self.me] = []

    # -- products --
    def begun(self, tiles: list[tuple], *slots: Slot) -> Value:
        value, uses = Value(tiles, False), [Use(self.me) for _ in slots]
        for slot, use in zip(slots, uses, strict=True):
            slot.uses.append(use)
        self.flight[self.me].append((value, uses))
        return value

    def wait(self, left: int = 0) -> None:
        with self.lock:
            flight = self.flight[self.me]
            for value, uses in flight[: len(flight) - left]:
                value.done = True
                for use in uses:
                    use.ended = self.tick()
            self.flight[self.me] = flight[len(flight) - left :]

    def finished(self, where: tuple, tiles: list[tuple]) -> None:
        with self.lock:
            assert where not in self.found, "a tile twice"
            self.found[where] = tiles


def ready(value: Value) -> Value:
    assert value.done, "not awaited"
    return value


def settled(*values: Value) -> Any:
    return values[0] if len(list(map(ready, values))) == 1 else values


def run(spec: AttentionSpec, c: config.ForwardConfig, side: dict[str, np.ndarray]) -> dict:
    """What the CTAs of a call do: {(batch, head, first of 64 rows): [(first key, masked, cleaned)]}."""
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
            return machine.begun([(row[0], row[1], row[2] + 64 * machine.me, key[2])], q_at, k_at)

    def softmax(s, state, tile, extras, call, c, shift, masked, limit):
        del extras, call, c, limit
        assert ready(s).tiles == [(tile.batch, tile.head, tile.q_first, tile.k_first)]
        online = shift is None
        p = Value([(tile.k_first, masked)], scale=tile.k_first if online else None)
        return p, (*state[:2], p) if online else state

    def pv(o, p, v, *_):
        at = slot_at(captured["vs"], v)
        (k_first, masked), before = p.tiles[0], ready(o[0]).tiles
        with machine.lock:
            assert (at.content[0], at.content[3]) == ("v", k_first)
            assert not before or o[0].scale == p.scale, "O is not rescaled"
            visited = [*before, (k_first, masked, machine.me in at.cleaned)]
            return tuple(machine.begun(visited, at) for _ in o[:1]) + o[1:]

    def rescaled(o, newest):
        return Value(ready(o).tiles, scale=newest.scale)

    def done(o, state, lse, sinks, tile, *_):
        del state, lse, sinks
        machine.finished((tile.batch, tile.head, tile.q_first), ready(o).tiles)
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
            assert slot.content[0] == "v"
            slot.uses.append(Use(machine.me, machine.tick()))
            slot.cleaned.add(machine.me)

    def direct(o, out, batch, first, head, _):
        del out
        assert o.tiles == [(batch, head, first)]

    fakes = {
        "I32": int,
        "lax": types.SimpleNamespace(
            axis_index=lambda name: machine.me if name == "wg" else machine.cta,
            fori_loop=fori_loop,
            cond=lambda condition, yes, no, x: yes(x) if condition else no(x),
            rem=lambda x, y: x % y,
            div=lambda x, y: x // y,
            max=max,
            min=min,
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
            to_16bit=lambda p, *_: p,
            store_rows=store_rows,
            scalar=lambda x: x,
        ),
        "softmax": softmax,
        "rescaled": rescaled,
        "finished": done,
        "wide": types.SimpleNamespace(store_rows=direct),
        "filled": lambda *_: Value([]),
        "side_arrays": lambda *_: dict(side),
        "multiprocessors": lambda: WORKERS,
    }

    def empty(tokens, heads, size):
        return np.broadcast_to(jnp.zeros((), spec.dtype), (spec.batch, tokens, heads, size))

    operands = Operands(
        empty(spec.query_length, spec.query_heads, spec.head_size),
        empty(spec.key_length, spec.kv_heads, spec.head_size),
        empty(spec.key_length, spec.kv_heads, spec.value_size),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fakes.items():
            patch.setattr(f, name, value)
        f.forward(spec, operands, c)
        *shapes, q_full, kv_full = captured["scratch_types"]
        given = [Memory("side", x.shape, x) for x in captured["more"]]
        for cta in range(captured["grid"][0]):
            shared = [Memory("qkvo"[i] + "s", x, slots=x[0]) for i, x in enumerate(shapes)]
            captured.update(zip(("qs", "ks", "vs"), shared, strict=False))
            barriers = [[Barrier(n) for n in x] for x in (q_full, kv_full)]
            at = [types.SimpleNamespace(at=At(x.__getitem__)) for x in barriers]
            arrays = [*map(Memory, "qkv"), *given, Memory("out"), Memory("lse")]
            machine = Machine(c.warpgroups + 1, cta, found)
            machine.run(functools.partial(captured["body"], *arrays, *shared, *at))
    return found


# ---- calls --------------------------------------------------------------------------------------
CONFIGS = {k: c for k, c in vars(config).items() if isinstance(c, config.ForwardConfig)}
SIZES = {"SIZE_64": 64, "UNCAPPED_64": 64, "SIZE_96": 96, "SIZE_192": 192, "WIDE": 256}
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


@pytest.mark.parametrize("call", CALLS)
def test_every_configuration_keeps_the_protocol(call):
    """No race, no deadlock; every tile that is attended once, masked and rid of dead keys where needed."""
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
            dead = ~keep.any(0)
            for head, i in np.ndindex(heads, -(-spec.query_length // 64)):
                visited = found.pop((b, head, 64 * i))
                where = name, b, head, i, visited
                if call == "segments":
                    check_table(given, i * 64 // c.queries, c.keys, visited)
                    continue
                rows = keep[64 * i : 64 * i + 64]
                there = rows.any(1) if "kv_lengths" in side else np.ones(len(rows), bool)
                seen = np.zeros(spec.key_length, bool)
                for first, masked, cleaned in visited:
                    keys = slice(first, first + c.keys)
                    assert not seen[keys].any(), where
                    seen[keys] = True
                    assert rows[:, keys].any() or len(visited) == 1, where
                    whole = first + c.keys <= spec.key_length and rows[there][:, keys].all()
                    assert masked or whole, where
                    assert cleaned or not dead[keys].any(), where
                assert not rows[:, ~seen].any(), where
        # Rows that are not there: with a band a step that nobody stores, else nothing.
        assert all(spec.is_causal and first >= spec.query_length for _, _, first in found)


def check_table(given: dict[str, np.ndarray], i: int, keys: int, visited: list[tuple]) -> None:
    stop, partial = (int(given[name][0, 0, i]) for name in ("stop", "partial"))
    order = given["order"][0, 0, i, : max(stop, 1)] * keys
    assert [x[0] for x in visited] == list(order)
    assert all(masked for _, masked, _ in visited[: partial if stop else 1])
    assert all(cleaned for _, _, cleaned in visited[: partial if stop else 1])
