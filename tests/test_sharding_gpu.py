"""Context parallelism with the kernels inside: on two GPUs, and on one that stands in for four.

One device can stand in for several: under `jax.vmap` with an axis name each shard is an entry of a batch,
collectives are rearrangements of it, and every piece is computed.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import cases, conformance, plain, sharded

SIZES = {"query_length": 512, "key_length": 512, "head_size": 64, "value_size": 64}


def case(name, **changes):
    return cases.Case(name, **(SIZES | changes))


CASES = (
    case("gpu_full"),
    case("gpu_causal", is_causal=True),
    case("gpu_bottom_right", is_causal=True, causal_alignment="bottom_right", key_length=1024),
    case("gpu_window", is_causal=True, window=(100, 0)),
    case("gpu_window_both", window=(150, 40)),
    case("gpu_lengths", is_causal=True, query_lengths=(0.9, 0.6), kv_lengths=(0.7, 0.8)),
    case("gpu_segments", is_causal=True, segments="packed"),
    case("gpu_positions", query_positions="shuffled", kv_positions="shuffled", window=(80, 50)),
    case("gpu_alibi", alibi="N", is_causal=True),
    case("gpu_sinks", sinks=True, is_causal=True, window=(70, 0)),
    case("gpu_sinks_empty_rows", sinks=True, is_causal=True, query_lengths=(0.4, 1.0)),
    case("gpu_bias", bias="BNTS", is_causal=True),
    case("gpu_bias_of_keys", bias="BS"),
    case("gpu_mask", mask="BTS"),
    case("gpu_dropout", dropout_rate=0.3, is_causal=True),
    case("gpu_value_wider", value_size=128, is_causal=True),
)
BY_NAME = {c.name: c for c in CASES}
KINDS = (
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("ring", "contiguous"),
    ("all_gather", "zigzag"),
    ("all_gather", "striped"),
    ("all_to_all", "contiguous"),
    ("all_to_all", "zigzag"),
)


def kernels() -> str | None:
    hopper = jax.devices()[0].compute_capability == "9.0"
    return "pallas" if hopper else None


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_one_device(case, kind):
    index = CASES.index(case) + KINDS.index(kind)
    route = ("auto", "shard_map", "explicit", "unchecked")[index % 4]
    dtype = ("bfloat16", "float16")[index % 2]
    sharded.check(case, sharded.Setting(*kind, (2,), route, kernels()), dtype)


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["ring", "exchange"])
@pytest.mark.parametrize("name", ["gpu_window", "gpu_sinks", "gpu_bias", "gpu_dropout"])
def test_hybrid_on_two(name, sizes):
    """An axis of each size; the four that a real one needs are under `jax.vmap` below."""
    route = ("auto", "shard_map")[sizes[0] - 1]
    setting = sharded.Setting("hybrid", "zigzag", sizes, route, kernels())
    sharded.check(BY_NAME[name], setting, "bfloat16")


def shards(setting, name, x):
    """[*sizes, ...] of what the sequence splits, a bias by its rows, and its axis in `jax.vmap`."""
    axis = sharded.TOKENS.get(name, (None,))[0]
    if axis is None or x.shape[axis] == 1:
        return x, None
    sizes = setting.sizes
    parts = x.reshape(*x.shape[:axis], *sizes, -1, *x.shape[axis + 1 :])
    return np.moveaxis(parts, range(axis, axis + len(sizes)), range(len(sizes))), 0


def joined(setting, name, x, mapped):
    """The inverse; the gradient of what all shards share is the sum of their parts."""
    x, count = np.asarray(x), len(setting.sizes)
    if not mapped:
        return x.astype(np.float32).sum(axis=tuple(range(count))).astype(x.dtype)
    axis = sharded.TOKENS[name][0]
    x = np.moveaxis(x, range(count), range(axis, axis + count))
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + count + 1 :])


def on_one_device(inputs, setting):
    arguments = conformance.arguments(inputs)
    static = {n: x for n, x in arguments.items() if n in inputs.static}
    dynamic = {n: x for n, x in arguments.items() if n not in static and x is not None}
    dynamic |= {"out": inputs.d_out, "lse": inputs.d_lse}
    moved = {n: shards(setting, n, x) for n, x in setting.reordered(dynamic).items()}
    names = tuple(inputs.operands)

    def run(arrays):
        arrays = dict(arrays)
        cotangents = arrays.pop("out"), arrays.pop("lse")
        given = {n: arrays.pop(n) for n in names}
        call = functools.partial(
            sharded.FUNCTIONS[setting.kind],
            **setting.names,
            load_balance=setting.load_balance,
            implementation=setting.backend,
            return_residual=True,
            **static,
        )
        (out, lse), pullback = jax.vjp(lambda given: call(**given, **arrays), given)
        return {"out": out, "lse": lse, **pullback(cotangents)[0]}

    axes = {n: axis for n, (_, axis) in moved.items()}
    mapped = run
    for axis in reversed(setting.axes):
        mapped = jax.vmap(mapped, in_axes=(axes,), axis_name=axis)
    results = plain.quick_jit(mapped)({n: x for n, (x, _) in moved.items()})
    whole = {n: joined(setting, n, x, axes.get(n) == 0) for n, x in results.items()}
    return setting.restored(whole)


def check_on_one(case, kind, dtype, backend):
    sizes = (2, 2) if kind[0] == "hybrid" else (4,)
    setting = sharded.Setting(*kind, sizes, "shard_map", backend)
    wanted = conformance.expected(case, dtype)
    if backend:
        wanted = conformance.allowed_of(wanted, backend, dtype)
    found = conformance.complaints(on_one_device(wanted.inputs, setting), wanted)
    assert not found, "\n".join(found)


#: Dropout's places differ from shard to shard, which a batch of calls cannot say.
ALONE = tuple(c for c in CASES if not c.dropout_rate)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS[:5], ("hybrid", "zigzag")], ids="-".join)
@pytest.mark.parametrize("case", ALONE, ids=lambda c: c.name)
def test_one_gpu_stands_in_for_four(case, kind):
    check_on_one(case, kind, ("bfloat16", "float16")[ALONE.index(case) % 2], kernels())


@pytest.mark.parametrize("name", ["gpu_sinks", "gpu_bias"])
def test_one_device_stands_in_for_four(name):
    small = {"query_length": 64, "key_length": 64, "head_size": 16, "value_size": 16}
    small |= {"window": (7, 0)} if name == "gpu_sinks" else {}
    case = dataclasses.replace(BY_NAME[name], **small)
    kind = "ring" if name == "gpu_sinks" else "hybrid"
    check_on_one(case, (kind, "zigzag"), "bfloat16", "blockwise")
