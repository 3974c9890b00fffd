"""The sm90 backward's barriers, tiles and schedule: its own code on the machine of `backward_machine`.

What the kernel calls (`lax`, `plgpu`, its stores) is replaced by the machine's.
"""

import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap.pallas import backward
from jaxcap.pallas.backward_config import CONFIGS, HEAVY_128
from jaxcap.spec import QuerySum
from tests.backward_machine import WARPS, Accumulator, Barrier, Global, Machine, Memory, Value, View
from tests.test_pallas_backward import call
from tests.test_pallas_protocol import At, Forwarding


def fori_loop(first, end, body, carry):
    for j in range(first, end):
        carry = body(j, carry)
    return carry


def rem(x, y):
    assert x >= 0, "a stage before the first"  # Python's remainder is not the kernel's there
    return x % y


LAX = types.SimpleNamespace(
    add=lambda x, y: x + y,
    rem=rem,
    div=lambda x, y: x // y,
    cond=lambda condition, yes, no: yes() if condition else no(),
    fori_loop=fori_loop,
    broadcast_in_dim=lambda x, *_: x,
)
JNP = Forwarding(
    jnp,
    maximum=max,
    minimum=min,
    clip=lambda x, low, high: min(max(x, low), high),
    logical_or=lambda x, y: x or y,
    where=lambda condition, x, y: x if condition else y,
)


def cleaned(_: Any, x: Value, __: Any) -> Value:
    return Value(x.of | {f"clean {side}" for side, *_ in x.of})


def replaced(patch: pytest.MonkeyPatch, machine: Machine) -> Any:
    """The kernel's module, on the machine."""
    from jaxcap.pallas import backward_plan, backward_sm90, backward_tiles

    def kernel(body, scratch_types, **_):
        results = Global("dk"), Global("dv")
        return lambda *arrays: machine.run(lambda: body(*arrays, *results, *scratch_types))

    def axis_index(name):
        return machine.me // WARPS if name == "wg" else machine.place["bhn".index(name)]

    def store_rows(value, target, batch, first, head, _):
        machine.store(target.name, batch, head, first, value.of)

    real = backward_sm90.plgpu
    plgpu = Forwarding(
        real,
        **{name: getattr(machine, name) for name in vars(Machine) if hasattr(real, name)},
        kernel=kernel,
        SMEM=lambda shape, *_, **__: View(machine, Memory(shape)),
        RefUnion=lambda *views: views[:1] * 2,
        Barrier=lambda **numbers: Barrier(machine, **numbers),
        ACC=lambda shape, *_: Accumulator(machine, shape),
        set_max_registers=lambda *_, **__: None,
    )
    pl = types.SimpleNamespace(
        when=lambda condition: lambda body: body() if condition else None,
        ds=lambda first, size: slice(first, first + size),
        run_scoped=lambda body, *made: body(*made),
        get_global=lambda _: Global("order"),
    )
    plain = {"lax": Forwarding(LAX, axis_index=axis_index), "jnp": JNP, "i32": int}
    every = {**plain, "plgpu": plgpu, "pl": pl}
    own = {
        "wait": machine.barrier_wait,
        "arrive": machine.barrier_arrive,
        "zeros": lambda _: Value(),
        "probabilities": machine.probabilities,
        "score_gradients": machine.gradients,
        "store_pairs": machine.write,
        "store_fragments": machine.write,
        "red_add": lambda place, part, first: machine.add(*place[1], 8 * first, part.of),
        "wide": types.SimpleNamespace(store_rows=store_rows),
    }
    tiles = {"jnp": Forwarding(JNP, where=cleaned, zeros_like=lambda _: None)}
    fakes = {backward_plan: plain, backward_tiles: every | tiles, backward_sm90: every | own}
    for module, names in fakes.items():
        for name, x in names.items():
            patch.setattr(module, name, x)
    return backward_sm90


def tables(plan: Any) -> tuple[np.ndarray, np.ndarray]:
    """(spans, ranks) as of `backward_tables`: KV tile n has n query tiles, modulo one more than there are."""
    rng, q = np.random.default_rng(0), plan.q_tiles
    count = np.arange(plan.kv_tiles) % (q + 1)
    first = rng.integers(0, q - count + 1)
    full = np.sort(rng.integers(0, q + 1, (plan.kv_tiles, 2)))
    spans = np.stack([first, (first + count) * (count > 0), *full.T], -1)
    visits = (spans[:, :1] <= np.arange(q)) & (np.arange(q) < spans[:, 1:2])
    ranks = np.cumsum(visits[::-1], 0)[::-1] - visits
    return np.stack([spans] * plan.batch), np.stack([ranks] * plan.batch)


def run(plan: Any, change: Callable = lambda places: None) -> set[int]:
    """All blocks of a call, one by one as they start. Returns how many steps they take.

    `change` gets the shared memory and barriers of each by name.
    """
    scores, (spans, ranks) = plan.scores, tables(plan)
    names = ["q", "k", "v", "do", "nlse", "ndelta", "bias", *["dead"] * scores.dead_keys]
    names += ["kseg", "qseg"] * scores.segments + ["kpos", "qpos"] * scores.positions
    inputs = {name: Global(name) for name in names}
    places = np.zeros((plan.batch, plan.query_heads, 8), np.int32)
    for name, x in {"spans": spans, "ranks": ranks, "places": places}.items():
        inputs[name] = Global(name, x)
    sums = {name: Global(name) for name in ("dq", "dbias")}
    turns, blocks = collections.Counter(), []
    for seed, place in enumerate(np.ndindex(plan.batch, plan.kv_heads, plan.kv_tiles)):
        machine = Machine(plan, place, turns, seed)
        with pytest.MonkeyPatch.context() as patch:
            module = replaced(patch, machine)
            scratch = module.scratch(plan, inputs)
            for name, x in scratch.items():
                x = x[0] if isinstance(x, tuple) else x
                for part in x.stages if isinstance(x, Barrier) else [x.memory]:
                    part.name = name
            change(scratch)
            patch.setattr(module, "scratch", lambda *_, made=scratch: made)
            machine.block = module.Block(plan, inputs | scratch)
            module.kernel(plan, inputs, sums)
        blocks.append(machine.block)
    assert len({(x.b, x.h, x.n) for x in blocks}) == len(blocks)
    return {x.walk.total for x in blocks}


#: Head size, value size, and what a call is beside them.
SIZES: dict[str, tuple[int, int, dict]] = {
    "64": (64, 64, {}),
    "narrow": (8, 128, {}),  # one piece of dQ, as 64
    "128": (128, 128, {}),
    "heavy": (128, 128, {"dropout_rate": 0.1}),
    "192": (192, 136, {}),
    "256": (256, 256, {}),
}
CAUSAL = {"is_causal": True}
#: Query tiles and rows that the last has not, the same of keys, query heads, and the rest.
CALLS: dict[str, tuple[int, int, int, int, int, dict]] = {
    "full": (3, 0, 2, 0, 1, {}),
    "one_query": (1, 63, 2, 1, 2, {"partial": True}),
    "causal": (3, 0, 4, 0, 4, {**CAUSAL, "kv_heads": 2}),  # keys that no query sees
    "bottom_right": (7, 8, 2, 8, 1, {**CAUSAL, "causal_alignment": "bottom_right"}),  # and queries
    "window": (5, 3, 3, 5, 3, {**CAUSAL, "window": (70, 0), "query_sum": QuerySum(128, 1.0)}),
    "deterministic": (6, 0, 7, 0, 1, {"deterministic": True}),
    "deterministic_group": (2, 1, 3, 8, 6, {"deterministic": True, "kv_heads": 2, "batch": 2}),
    "segments": (6, 0, 7, 0, 1, {"segment_ids": True}),
    "positions": (3, 5, 4, 5, 2, {"query_positions": True, "kv_positions": True, **CAUSAL}),
    "lengths": (2, 8, 3, 8, 3, {"query_lengths": True, "kv_lengths": True, "partial": True}),
    "bias": (2, 0, 3, 0, 2, {"bias_shape": (1, 1, 1, 1), "bias_dtype": "float32"}),
}


def plan_of(size: str, name: str) -> Any:
    """Of CALLS[name] at SIZES[size]."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    head, value, more = SIZES[size]
    q_tiles, less_q, kv_tiles, less_kv, heads, changes = CALLS[name]
    gradients = ("query", "key", "value", *["bias"] * (name == "bias"))
    spec = call(1, head, value_size=value, gradients=gradients, query_heads=heads)
    spec = spec.replace(**{"batch": 1, "kv_heads": 1, **more, **changes})
    c = backward.make_plan(spec).config
    t, s = q_tiles * c.block_q - less_q, kv_tiles * c.block_kv - less_kv
    return backward.make_plan(spec.replace(query_length=t, key_length=s))


@pytest.mark.parametrize("name", CALLS)
def test_every_configuration_keeps_the_protocol(name):
    """No race, no deadlock, no phase missed; dK, dV and dQ are made of every step's tiles, once."""
    plans = [plan_of(size, name) for size in SIZES]
    steps = [run(plan) for plan in plans]
    assert name == "bias" or {x.config for x in plans} == {*CONFIGS.values(), HEAVY_128}
    assert name != "deterministic" or steps == [set(range(7))] * len(SIZES)


# ---- what is wrong is found ---------------------------------------------------------------------
#: What one arrival less and one more than is right leads to.
ARRIVALS = {
    "kv_full": ("kv_full: an arrival out of phase", "deadlock.* for kv_full"),
    "q_full": ("q_full: an arrival out of phase", "deadlock.* for q_full"),
    "q_free": ("q_free: an arrival out of phase", "q_free ends half way"),
    "ds_full": ("ds_full: an arrival out of phase|ds is read|dQ is of", "deadlock.* for ds_full"),
    "clean": ("clean: an arrival out of phase|while|of other tiles", "deadlock.* for clean"),
}


@pytest.mark.parametrize("size", ["64", "128", "heavy"])
@pytest.mark.parametrize("name", ARRIVALS)
def test_wrong_arrivals_are_found(name, size):
    for more, message in zip((-1, 1), ARRIVALS[name], strict=True):

        def change(places, more=more):
            for stage in places[name].stages:
                stage.arrivals += WARPS * more

        with pytest.raises(AssertionError, match=message):
            run(plan_of(size, "segments"), change)


@pytest.mark.parametrize("size", ["64", "narrow"])
def test_one_buffer_of_dq_for_all_steps_is_found(size):
    """Where a step adds one piece: the copy of the step before may still read it."""

    def change(places):
        first = places["dqs"].at[0]
        places["dqs"].at = At(lambda _: first)

    with pytest.raises(AssertionError, match="dqs is written while it is used"):
        run(plan_of(size, "segments"), change)


def test_two_warpgroups_that_load_are_found():
    """Which a configuration refuses by itself."""
    plan = plan_of("128", "segments")
    config = copy.copy(plan.config)
    object.__setattr__(config, "load_early", True)
    with pytest.raises(AssertionError, match="q_full: an arrival out of phase"):
        run(dataclasses.replace(plan, config=config))
