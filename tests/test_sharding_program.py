"""What context-parallel programs hold: transfers, memory, what waits for what, kernels, loops, processes."""

import functools
import os
import re
import socket
import subprocess
import sys

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import device, sharding
from jaxcap.sharding import ring
from tests import cases, conformance, fakes, plain, sharded

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def loss(q, k, v, **keywords):
    out = jaxcap.dot_product_attention(q, k, v, softcap=50.0, **keywords)
    return jnp.sum(out.astype(jnp.float32) ** 2)


def lowered(setting, per_device, *, grad, **keywords):
    """A program on shapes alone, on P = product of the setting's sizes devices."""
    mesh = setting.mesh
    length = per_device * mesh.size
    shard = NamedSharding(mesh, P(None, setting.axes))
    x = jax.ShapeDtypeStruct((1, length, 8, 16), jnp.bfloat16, sharding=shard)
    cp = setting.context_parallel()
    function = functools.partial(
        loss, context_parallel=cp, implementation=setting.backend, **keywords
    )
    function = jax.grad(function, (0, 1, 2)) if grad else function
    return plain.quick_jit(function).lower(x, x, x)


def compiled(setting, per_device, **options):
    return lowered(setting, per_device, **options).compile()


def permutes(program):
    return len(re.findall(r"\bcollective-permute(?:-start)?\(", program.as_text()))


# ---- Transfers ----


@pytest.mark.parametrize(
    ("load_balance", "window", "hops"),
    [
        ("contiguous", (63, 0), 2),
        ("contiguous", (65, 0), 3),
        ("contiguous", (20, 20), 3),
        ("contiguous", (0, 0), 1),
        ("zigzag", (20, 0), 3),
        ("zigzag", None, 8),
    ],
)
def test_hops_outside_the_window_are_not_made(load_balance, window, hops):
    setting = sharded.Setting("ring", load_balance, (8,))
    causal = window is None or window[1] == 0
    options = {"is_causal": causal, "local_window_size": window}
    assert permutes(compiled(setting, 64, grad=False, **options)) == hops - 1


def test_gradients_travel_and_come_home():
    """K and V as one to hop 1 forward, and backward again, where dK and dV follow as one and return."""
    setting = sharded.Setting("ring", "contiguous", (4,))
    options = {"is_causal": True, "local_window_size": (63, 0)}
    assert permutes(compiled(setting, 64, grad=True, **options)) == 1 + 1 + 1 + 2


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_other_kinds_permute_nothing(kind):
    text = compiled(sharded.Setting(kind, "zigzag", (4,)), 64, grad=True, is_causal=True).as_text()
    assert ("all-gather" in text) == (kind == "all_gather")
    assert ("all-to-all" in text) == (kind == "all_to_all")
    assert "collective-permute" not in text


# ---- Memory ----


def temporary(kind, size, load_balance="zigzag"):
    """Bytes beyond arguments and results, in shards of the query."""
    setting = sharded.Setting(kind, load_balance, (size,))
    program = compiled(setting, 512, grad=True, is_causal=True)
    return program.memory_analysis().temp_size_in_bytes / (512 * 8 * 16 * 2)


def test_memory_of_the_other_kinds():
    """On 4 and on 8 devices with shards of one size: an all-gather's grows with the sequence."""
    four, eight = (temporary("all_to_all", size, "contiguous") for size in (4, 8))
    assert eight <= 1.1 * four
    # K and V in bfloat16, dK and dV in float32, of 8 shards, and copies that XLA makes of them.
    assert eight < temporary("all_gather", 8, "contiguous") < 8 * 20


# ---- What waits for what ----


def walk(jaxpr, dependencies, found):
    """By value the calls that it depends on. A barrier lets each of its operands through alone."""

    def of(atoms):
        known = [dependencies.get(a, frozenset()) for a in atoms if hasattr(a, "count")]
        return frozenset().union(*known)

    for eqn in jaxpr.eqns:
        name = eqn.params.get("name", "")
        if name.startswith("recorder_"):
            found.append(("call", of(eqn.invars)))
            outputs = of(eqn.invars) | {len(found) - 1}
        elif eqn.primitive.name == "ppermute":
            found.append(("permute", of(eqn.invars)))
            outputs = of(eqn.invars)
        elif eqn.primitive.name == "optimization_barrier":
            for x, y in zip(eqn.invars, eqn.outvars, strict=True):
                dependencies[y] = of([x])
            continue
        else:
            inner = [
                sub.jaxpr if hasattr(sub, "jaxpr") else sub
                for p in eqn.params.values()
                for sub in (p if isinstance(p, tuple | list) else (p,))
                if hasattr(sub, "eqns") or hasattr(sub, "jaxpr")
            ]
            outputs = of(eqn.invars)
            for sub in inner:
                if eqn.primitive.name == "cond":
                    pairs = zip(sub.invars, eqn.invars[1:], strict=True)
                else:
                    pairs = zip(sub.invars, eqn.invars[-len(sub.invars) :], strict=False)
                own = {x: of([y]) for x, y in pairs}
                results = walk(sub, own, found)
                if len(results) == len(eqn.outvars) and eqn.primitive.name != "cond":
                    for y, r in zip(eqn.outvars, results, strict=True):
                        dependencies[y] = r
                    outputs = None
                else:
                    outputs = outputs | frozenset().union(*results)
        if outputs is not None:
            for y in eqn.outvars:
                dependencies[y] = outputs
    return [of([x]) for x in jaxpr.outvars]


def traced_events(function):
    """Calls of the backend and transfers of a forward in order, each with the calls it depends on."""
    setting = sharded.Setting("ring", "contiguous", (4,), backend="recorder")
    x = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    run = functools.partial(
        loss, context_parallel=setting.context_parallel(), implementation="recorder"
    )
    with fakes.registered(fakes.Recorder()):
        jaxpr = jax.make_jaxpr(function(run))(x, x, x)
    found = []
    walk(jaxpr.jaxpr, {}, found)
    return found


def test_transfers_do_not_wait_for_the_hop_they_overlap():
    """In the program's order, the transfer for hop n + 1 comes before the call of hop n and uses none of it,
    and no call uses another's result: partial sums are nobody's business but the sum's."""
    events = traced_events(lambda run: run)
    assert [kind for kind, _ in events] == [*["permute", "call"] * 3, "call"]
    assert all(not needed for _, needed in events)


def test_gradients_of_keys_travel_while_the_next_hop_computes():
    """With the keys for hop n + 1 travel the gradients of hop n - 1: no call needs those of the last one."""
    events = traced_events(lambda run: jax.grad(run, (0, 1, 2)))
    kinds = [kind for kind, _ in events]
    assert kinds == [
        *["permute", "call"] * 3,
        "call",
        *["permute", "call"] * 4,
        "permute",
        "permute",
    ]
    calls = [i for i, kind in enumerate(kinds) if kind == "call"]
    assert all(calls[n - 1] not in events[calls[n]][1] for n in range(5, 8))


# ---- Long rings ----


@pytest.mark.parametrize("load_balance", ["zigzag", "contiguous", "striped"])
def test_long_rings_are_loops(load_balance, monkeypatch):
    monkeypatch.setattr(ring, "UNROLLED", 2)
    case = cases.Case(
        "loop",
        query_length=64,
        key_length=64,
        head_size=8,
        value_size=8,
        is_causal=True,
        segments="packed" if load_balance == "striped" else None,
        bias="NTS" if load_balance == "contiguous" else None,
        sinks=load_balance == "zigzag",
    )
    plain.forget_programs()
    sharded.program.cache_clear()
    sharded.check(case, sharded.Setting("ring", load_balance, (8,), "shard_map"))
    program = lowered(sharded.Setting("ring", load_balance, (8,)), 16, grad=True, is_causal=True)
    # Before, in and after a loop, not one a hop; with ids or positions.
    assert 4 <= program.as_text().count("stablehlo.collective_permute") <= 4 + 8
    plain.forget_programs()
    sharded.program.cache_clear()


# ---- Kernels ----


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda *arrays: "sm90")


Q = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)


def kernels(function):
    gradient = jax.jit(jax.grad(function, (0, 1, 2)))
    text = gradient.trace(Q, KV, KV).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu_v2")


@pytest.mark.parametrize(
    ("setting", "options", "count"),
    [
        (("ring", "zigzag", (4,)), {"is_causal": True}, 8),
        (("ring", "striped", (4,)), {"is_causal": True}, 6),
        (("ring", "contiguous", (4,)), {"is_causal": True, "local_window_size": (255, 0)}, 4),
        (("all_gather", "contiguous", (8,)), {"is_causal": True}, 2),
        (("all_to_all", "contiguous", (2,)), {"is_causal": True}, 4),
        (("hybrid", "zigzag", (2, 2)), {"is_causal": True}, 6),
    ],
)
def test_pallas_inside(hopper, setting, options, count):
    """Each piece's kernel is lowered once, however many hops it serves; the last hop of the forward, beside
    which nothing is on its way, has its own."""
    cp = sharded.Setting(*setting).context_parallel()
    assert kernels(functools.partial(loss, context_parallel=cp, **options)) == count


@pytest.mark.parametrize(("kind", "wide"), [("all_gather", False), ("ring", True)])
def test_parts_that_nothing_is_added_to_are_in_16_bits(hopper, kind, wide):
    cp = sharded.Setting(kind, "zigzag", (4,)).context_parallel()
    run = functools.partial(
        jaxcap.dot_product_attention, softcap=50.0, is_causal=True, context_parallel=cp
    )
    text = jax.jit(run).trace(Q, KV, KV).lower(lowering_platforms=("cuda",)).as_text()
    assert ("x64xf32>" in text) == wide


@pytest.mark.parametrize("check_vma", [True, False])
def test_pallas_inside_a_users_shard_map(hopper, check_vma):
    setting = sharded.Setting("ring", "contiguous", (4,))
    run = functools.partial(
        sharding.ring_attention,
        axis_name="context",
        softcap=50.0,
        is_causal=True,
        dropout_rate=0.1,
        dropout_rng=jax.random.key(0),
        implementation="pallas",
    )
    token = P(None, "context")
    mapped = jax.shard_map(
        run, mesh=setting.mesh, in_specs=token, out_specs=token, check_vma=check_vma
    )
    assert kernels(lambda q, k, v: jnp.sum(mapped(q, k, v).astype(jnp.float32))) == 5


def test_pallas_where_other_axes_are_explicit(hopper):
    """A user's shard_map over the context axis alone: query and its gradient are of one type."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("context", "data"), explicit)
    token = P(None, "context")
    mapped = jax.shard_map(
        functools.partial(
            sharding.ring_attention, axis_name="context", softcap=50.0, implementation="pallas"
        ),
        mesh=mesh,
        in_specs=token,
        out_specs=token,
        axis_names={"context"},
        check_vma=False,
    )
    shard = NamedSharding(mesh, P("data", "context"))
    x = jax.ShapeDtypeStruct((4, 1024, 4, 64), jnp.bfloat16, sharding=shard)
    with jax.set_mesh(mesh):
        grad = jax.grad(lambda q, k, v: jnp.sum(mapped(q, k, v).astype(jnp.float32)), (0, 1, 2))
        text = jax.jit(grad).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def _reads(jaxpr, name, found):
    """Of each optimization_barrier, whether something in it comes from a function called `name`."""
    from_it = set()
    for equation in jaxpr.eqns:
        reads = any(not hasattr(x, "val") and x in from_it for x in equation.invars)
        if equation.primitive.name == "optimization_barrier":
            found.append(reads)
            pairs = zip(equation.invars, equation.outvars, strict=True)
            from_it |= {b for a, b in pairs if not hasattr(a, "val") and a in from_it}
            continue
        if reads or name in str(equation.params.get("name", "")):
            from_it |= set(equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            _reads(inner, name, found)


@pytest.mark.parametrize("wanted", [(0,), (0, 1), (1, 2)])
def test_hops_wait_for_the_backward_before(hopper, wanted):
    """Else all transfers run ahead of all kernels, and a ring holds the keys of every device."""
    cp = sharded.Setting("ring", "contiguous", (4,)).context_parallel()
    function = functools.partial(loss, context_parallel=cp, implementation="pallas")
    found = []
    _reads(jax.make_jaxpr(jax.grad(function, wanted))(Q, KV, KV).jaxpr, "hop_backward", found)
    assert sum(found) >= 3


# ---- Several hosts ----


def test_two_processes():
    """Two processes of two devices each, in one mesh, agree with one device."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    worker = [sys.executable, "-m", "tests.distributed_worker", str(port)]
    processes = [
        subprocess.Popen(
            [*worker, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "agrees" in output


# ---- Sizes ----


@pytest.mark.parametrize("size", [1, 6, 8])
@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_other_sizes(size, kind):
    heads = {"query_heads": 2, "kv_heads": 1}
    case = cases.Case(
        "size",
        query_length=48,
        key_length=48,
        head_size=8,
        value_size=8,
        batch=1,
        is_causal=True,
        **heads,
    )
    sharded.check(case, sharded.Setting(kind, "zigzag", (size,)))


def test_the_same_entries_are_dropped():
    """The zeros of the probabilities, which an identity as value shows, are those of one device."""
    length = 16
    case = cases.Case(
        "drops",
        query_length=length,
        key_length=length,
        value_size=length,
        dropout_rate=0.4,
        amplitude=1.0,
    )
    inputs = cases.build(case, "float32", poison=False)
    eye = np.broadcast_to(np.eye(length, dtype=np.float32)[None, :, None], (2, length, 2, length))
    inputs = inputs._replace(operands=inputs.operands | {"value": eye})
    one = conformance.attend(inputs, "xla")["out"]
    dropped = np.asarray(one) == 0
    assert 0.3 < dropped.mean() < 0.5
    arguments = {n: x for n, x in conformance.arguments(inputs).items() if x is not None}
    operands = {n: arguments.pop(n) for n in inputs.operands}
    for setting in (
        sharded.Setting("ring", "zigzag", (2,)),
        sharded.Setting("all_gather", "striped", (4,)),
        sharded.Setting("all_to_all", "zigzag", (2,)),
        sharded.Setting("hybrid", "striped", (2, 2)),
    ):
        attend = functools.partial(
            jaxcap.dot_product_attention,
            **arguments,
            context_parallel=setting.context_parallel(),
            implementation="blockwise",
        )
        out = plain.quick_jit(attend)(**setting.reordered(operands))
        np.testing.assert_array_equal(setting.restored({"out": out})["out"] == 0, dropped)
