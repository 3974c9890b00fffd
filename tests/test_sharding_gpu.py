"""Context parallelism with the kernels inside: on two GPUs, and on one that stands in for four.

One device can stand in for several: under `jax.vmap` with an axis name each shard is an entry of a batch,
collectives are rearrangements of it, and every piece is computed.
"""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
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
    case("gpu_cross", key_length=1024, is_causal=True),
    case("gpu_one_key_head", kv_heads=1, is_causal=True),  # for two devices
)
BY_NAME = {c.name: c for c in CASES}
KINDS = (
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("ring", "contiguous"),
    ("all_gather", "zigzag"),
    ("all_gather", "striped"),
    ("all_gather", "contiguous"),
    ("all_to_all", "contiguous"),
    ("all_to_all", "zigzag"),
    ("all_to_all", "striped"),
)
LAYOUTS = ("zigzag", "striped", "contiguous")
ROUTES = ("auto", "shard_map", "explicit", "unchecked")


def kernels() -> str | None:
    hopper = jax.devices()[0].compute_capability == "9.0"
    return "pallas" if hopper else None


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_one_device(case, kind):
    index = CASES.index(case) + KINDS.index(kind)
    dtype = ("bfloat16", "float16")[index % 2]
    sharded.check(case, sharded.Setting(*kind, (2,), ROUTES[index % 4], kernels()), dtype)


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["ring", "exchange"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_hybrid_on_two(case, sizes):
    """An axis of each size; the four that a real one needs are under `jax.vmap` below."""
    index = CASES.index(case)
    setting = sharded.Setting("hybrid", LAYOUTS[index % 3], sizes, ROUTES[index % 4], kernels())
    sharded.check(case, setting, ("bfloat16", "float16")[index // 4 % 2])


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("kind", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("name", ["gpu_bias", "gpu_mask"])
def test_split_by_columns(name, kind):
    """A bias or mask split along its keys, in the user's own shard_map."""
    setting = sharded.Setting(kind, "zigzag", (2,), "shard_map", kernels())
    sharded.check(BY_NAME[name], setting, "bfloat16", columns=True)


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("route", ["auto", "explicit"])
@pytest.mark.parametrize(
    "sizes", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["data", "context", "model"]
)
def test_beside_data_and_model_axes(sizes, route):
    """Under jit, with dropout, which counts on over them."""
    kind = AxisType.Explicit if route == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(sizes, ("data", "context", "model"), (kind,) * 3)
    cp = jaxcap.ContextParallel(
        kind="ring", load_balance="zigzag", batch_axes="data", head_axis="model", mesh=mesh
    )
    wanted = conformance.expected(BY_NAME["gpu_dropout"], "bfloat16")
    wanted = conformance.allowed_of(wanted, kernels() or "xla", "bfloat16")
    inputs, place = wanted.inputs, NamedSharding(mesh, P("data", "context", "model"))

    def moved(x, move):
        return move(np.asarray(x), sizes[1])

    def run(operands, d_out, d_lse):
        def call(operands):
            return jaxcap.dot_product_attention(
                **operands,
                **inputs.static,
                dropout_rng=jax.random.key(inputs.dropout_seed),
                return_residual=True,
                implementation=kernels(),
                context_parallel=cp,
            )

        (out, lse), pullback = jax.vjp(call, operands)
        return {"out": out, "lse": lse, **pullback((d_out, d_lse))[0]}

    arrays = inputs.operands, inputs.d_out, inputs.d_lse
    arrays = jax.tree.map(
        lambda x: jax.device_put(moved(x, jaxcap.reorder_for_load_balance), place), arrays
    )
    with jax.set_mesh(mesh) if route == "explicit" else contextlib.nullcontext():
        results = jax.jit(run)(*arrays)
    measured = {n: moved(x, jaxcap.restore_order) for n, x in results.items()}
    found = conformance.complaints(measured, wanted)
    assert not found, "\n".join([*found, *sharded.whereabouts(found, measured, wanted)])


@pytest.mark.gpu
@pytest.mark.multigpu(2)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[5], KINDS[6]], ids="-".join)
@pytest.mark.parametrize("backend", ["fa2", "fa3", "fa4"])
def test_flash_attention_inside(backend, kind):
    """Where it is installed, and has a backward."""
    q = jax.ShapeDtypeStruct((2, 512, 4, 64), "bfloat16")
    plan = jaxcap.explain(q, q, q, softcap=50.0, is_causal=True, implementation=backend)
    if why := plan.training.reasons[backend]:
        pytest.skip("; ".join(why))
    sharded.check(BY_NAME["gpu_causal"], sharded.Setting(*kind, (2,), "auto", backend), "bfloat16")


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
