"""Backends `fa2`, `fa3` and `fa4` over stand-ins of their libraries: the whole path, on CPU."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

import jaxcap
from jaxcap import selection
from jaxcap.spec import AttentionSpec, Operands
from jaxcap.torch_bridge import fa2, fa3, fa4, probe
from jaxcap.torch_bridge.backend import FlashAttention
from tests import cases, conformance, flash_fakes, sharded

CPU = ("cpu",)
BACKENDS = {
    "fa2": FlashAttention("fa2", (fa2.FlashAttention2(CPU),)),
    "fa3": FlashAttention("fa3", (fa3.FlashAttention3(CPU),)),
    "fa4": FlashAttention("fa4", (fa4.FlashAttention4(CPU),)),
}
INSTALL = {
    "fa2": flash_fakes.install_fa2,
    "fa3": flash_fakes.install_fa3,
    "fa4": flash_fakes.install_fa4,
}
#: What differs between the libraries.
OWN = (
    *("capped", "uncapped", "causal_long_query", "bottom_right_empty_rows", "window_left"),
    *("window_both", "both_lengths", "lengths_causal", "query_lengths", "mask"),
    *("past", "past_bottom_right"),
)
#: Queries that end past the keys' length, which causality and the length mask together.
PAST = cases.Case(
    "past", query_lengths=(0.9, 0.4), kv_lengths=(0.5, 0.8), is_causal=True, query_length=45
)
PAST_BOTTOM_RIGHT = dataclasses.replace(
    PAST, name="past_bottom_right", causal_alignment="bottom_right"
)


#: Scores and heads, which are the library's affair.
NOT_OURS = (
    "cap_",
    "scale",
    "layer_scale_",
    "mha",
    "mqa",
    "groups",
    "head_8",
    "one_",
    "window_zero",
)


def runs(name, case):
    """`fa2` all that it can be told, and of the rest, which is refused alike, the core."""
    if name != "fa2" or "float16" in case.dtypes:
        return name == "fa2" or case.name in OWN
    untold = (case.bias, case.mask, case.segments, case.query_positions, case.kv_positions)
    told = all(x is None for x in untold) and not case.dropout_rate
    return told and not case.name.startswith(NOT_OURS)


RUNS = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in BACKENDS
    for case in (*cases.CASES, PAST, PAST_BOTTOM_RIGHT)
    if runs(name, case)
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Installs one library at a time, and has its backend take the CPU for its GPU."""

    @functools.cache
    def folder(name):
        made = tmp_path_factory.mktemp(name)
        INSTALL[name](made)
        return made

    return lambda name: flash_fakes.importable(folder(name))


@pytest.fixture(params=BACKENDS)
def backend(request, installed):
    with installed(request.param), conformance.registered(BACKENDS[request.param]):
        yield request.param


@pytest.fixture
def library(installed):
    """The extension of `fa2`, where it does not matter which library it is."""
    with installed("fa2"), conformance.registered(BACKENDS["fa2"]):
        yield probe.load("flash_attn_2_cuda")


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_conformance(installed, name, case):
    with installed(name):
        before = selection.backends()[name]
        selection.register(BACKENDS[name])
        try:
            conformance.check(name, case, "bfloat16")
        finally:
            selection.register(before)


def test_inference(backend):
    conformance.check(backend, cases.BY_NAME["both_lengths"], "float16", inference=True)


def normal(*shape, seed=0, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)


def qkv(t=24, s=24, batch=2):
    shapes = ((batch, t, 4, 16), (batch, s, 2, 16), (batch, s, 2, 16))
    return [normal(*shape, seed=i, scale=3.0) for i, shape in enumerate(shapes)]


def attend(backend, *arrays, **keywords):
    keywords = {"softcap": 10.0, "is_causal": True} | keywords
    return jaxcap.dot_product_attention(*arrays, implementation=backend, **keywords)


def alike(measured, expected, tolerance=0.02):
    for a, b in zip(jax.tree.leaves(measured), jax.tree.leaves(expected), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def scanned(backend, q, k, v):
    """The gradient of a scan over a rematerialised layer."""

    def layer(x, _):
        return attend(backend, x, k, v), None

    def loss(q):
        out, _ = jax.lax.scan(jax.checkpoint(layer), q, None, length=2)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss)(q)


def mapped(backend, q, k, v):
    """The gradient of a call over a vmapped axis, the keys shared."""

    def loss(q):
        out = jax.vmap(lambda x: attend(backend, x, k, v))(jnp.stack([q, 2 * q]))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss)(q)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("transformed", [scanned, mapped])
def test_transformations(transformed):
    run = jax.jit(transformed, static_argnums=0)
    # Rounded once more in each layer.
    alike(run("fa2", *qkv()), run("blockwise", *qkv()), tolerance=0.05)


@pytest.mark.usefixtures("library")
def test_sharded_over_devices():
    """Batch and heads under plain jit, and a shard_map: each device calls the library on its part."""
    mesh = jax.make_mesh((2, 2), ("b", "n"))
    arrays = qkv()
    sharding = NamedSharding(mesh, PartitionSpec("b", None, "n"))
    sharded = [jax.device_put(x, sharding) for x in arrays]

    def loss(name, q, k, v):
        return jnp.sum(attend(name, q, k, v).astype(jnp.float32) ** 2)

    def gradients(name):
        return jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2)))

    wanted = gradients("blockwise")(*arrays)
    alike(gradients("fa2")(*sharded), wanted)
    hlo = gradients("fa2").lower(*sharded).compile().as_text() or ""
    assert "all-gather" not in hlo
    assert "bf16[1,24,2,16]" in hlo
    mapped = jax.shard_map(
        functools.partial(attend, "fa2"),
        mesh=mesh,
        in_specs=PartitionSpec("b", None, "n"),
        out_specs=PartitionSpec("b", None, "n"),
    )
    alike(jax.jit(mapped)(*sharded), attend("blockwise", *arrays))


def test_library_works_on_xlas_own_buffers(library, monkeypatch):
    """The operands that the library sees are the arrays, and what it fills is the result."""
    arrays, seen = qkv(), []

    def spy(q, k, v, out, *others):
        seen.extend(x.data_ptr() for x in (q, k, v, out))
        return flash_fakes.fwd(q, k, v, out, *others)

    monkeypatch.setattr(library, "fwd", spy)
    run = jax.jit(functools.partial(attend, "fa2"))
    out = run(*arrays)
    assert seen == [x.unsafe_buffer_pointer() for x in (*arrays, out)]
    # Beside the results there is room for the log-sum-exp alone.
    lse = 4 * math.prod((2, 24, 4))
    memory = run.lower(*arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= lse + 256


def test_an_error_of_the_library(backend, monkeypatch):
    """One readable exception that names backend and call; the next call works."""
    run = jax.jit(functools.partial(attend, backend))
    arrays = qkv()
    wanted = run(*arrays)
    monkeypatch.setattr(flash_fakes.Failing, "on", True)
    # JAX raises one of two types, by whether it has run the function before.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(run(*arrays))
    message = str(caught.value)
    assert f"backend {backend!r}: the forward of" in message
    assert f"failed with RuntimeError: {flash_fakes.FAILURE} (called with q bfloat16[" in message
    monkeypatch.setattr(flash_fakes.Failing, "on", False)
    np.testing.assert_array_equal(np.float32(run(*arrays)), np.float32(wanted))


@pytest.mark.usefixtures("library")
def test_cap_under_jaxs_compilation_cache(tmp_path):
    """To the cache, calls that differ in the cap alone are one program; each runs with its own cap."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    arrays, files = qkv(), []
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        found = []
        for softcap in (50.0, 3.0):
            run = jax.jit(functools.partial(attend, "fa2", softcap=softcap))
            found.append(run(*arrays))
            files.append(sum(1 for f in tmp_path.iterdir() if f.name.endswith("-cache")))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert files == [1, 1]
    for softcap, out in zip((50.0, 3.0), found, strict=True):
        alike(out, attend("blockwise", *arrays, softcap=softcap))
    assert np.abs(np.float32(found[0]) - np.float32(found[1])).max() > 0.1


def test_residual_costs_a_second_backward_only_where_it_is_used(library, monkeypatch):
    calls = []
    monkeypatch.setattr(library, "bwd", lambda *a: (calls.append(1), flash_fakes.bwd(*a))[1])

    @functools.partial(jax.jit, static_argnums=1)
    @functools.partial(jax.grad)
    def gradient(q, used):
        out, lse = attend("fa2", q, *qkv()[1:], return_residual=True)
        return jnp.sum(out.astype(jnp.float32)) + (jnp.sum(lse) if used else 0.0)

    for used, count in ((False, 1), (True, 2)):
        calls.clear()
        jax.block_until_ready(gradient(qkv()[0], used))
        assert len(calls) == count


PART = AttentionSpec(
    batch=2,
    query_length=24,
    key_length=16,
    query_heads=4,
    kv_heads=2,
    head_size=16,
    value_size=16,
    dtype="bfloat16",
    scale=0.25,
    softcap=10.0,
    is_causal=True,
    platform="cpu",
    partial=True,
)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("offset", [-8, -30])
def test_part_of_a_longer_call(offset):
    """Keys that lie before or after the queries, or all after them; sums come in float32."""
    spec = PART.replace(position_offset=offset, gradients=("query", "key", "value"))
    operands = Operands(*qkv(24, 16))
    d_out = jax.random.normal(jax.random.key(9), (2, 24, 4, 16))
    known: dict[str, Any] = dict(selection.backends())
    assert known["fa2"].reasons(spec) == []

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, operands):
        out, lse = known["blockwise"].forward(spec, operands)
        grads = known[name].backward(spec, operands, out, lse, d_out, None)
        return *known[name].forward(spec, operands), *grads[:3]

    found, expected = run("fa2", operands), run("blockwise", operands)
    assert all(x.dtype == jnp.float32 for x in found)
    alike(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)
    alike(found[2:], expected[2:])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_context_parallel(backend):
    """The hops of a ring, each given the residual of all keys, against one device."""
    case = cases.Case("hops", query_length=32, key_length=32, is_causal=True, sinks=True)
    sharded.program.cache_clear()  # a backend of this name may be another than before
    sharded.check(case, sharded.Setting("ring", "zigzag", (2,), "auto", backend), "bfloat16")


@pytest.mark.usefixtures("library")
def test_sinks_of_rows_that_attend_nothing():
    """The gradient of such a sink is the residual's cotangent; NaN in the row has no effect."""
    q, k, v = qkv(24, 16)
    q = q.at[:, :8].set(jnp.nan)  # bottom-right, these come before all keys
    sinks = jnp.linspace(-1.0, 2.0, 4)

    def loss(name, q, sinks):
        out, lse = attend(
            name, q, k, v, sinks=sinks, return_residual=True, causal_alignment="bottom_right"
        )
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.sin(lse))

    run = jax.jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    found, expected = run("fa2", q, sinks), run("blockwise", q, sinks)
    assert jnp.isfinite(found[1]).all()
    alike(found, expected)
