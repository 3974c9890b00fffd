"""Sharded arrays under plain jit: batch and heads stay where they are, on auto and explicit meshes.

What moves between devices is read from the compiled program. Eight virtual devices.
"""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import fine_mesh, partitioning
from tests import fakes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
WRAPPED = "blockwise"
BACKENDS = (WRAPPED, "xla")
B, T, H, CAP = 4, 16, 8, 5.0
DIFFERENTIATED = ("query", "key", "value", "bias", "sinks")
GATHERS = {"all-gather", "all-to-all", "collective-permute", "reduce-scatter", "dynamic-reshape"}

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def mesh_of(*types, shape=(2, 4)):
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=types)


@functools.cache
def inputs(n=8, k=4, batch=B):
    """All that is not an option, under the argument's name."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    ids = np.broadcast_to(np.arange(T, dtype=np.int32) // 9, (batch, T))
    lengths = np.array([16, 12, 9, 16], np.int32)[:batch]
    return {
        "query": normal(batch, T, n, H) * 3,
        "key": normal(batch, T, k, H),
        "value": normal(batch, T, k, H),
        "bias": normal(1, n, T, T),
        "mask": random.uniform(size=(batch, 1, T, T)) > 0.1,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths[::-1],
        "query_segment_ids": ids,
        "key_value_segment_ids": ids,
        "query_positions": np.arange(T, dtype=np.int32),
        "key_value_positions": np.arange(T, dtype=np.int32) + 1,
        "alibi_slopes": normal(batch, n) ** 2,
        "sinks": normal(n),
    }


def specs(batch, heads, kv_heads=None):
    per_batch = P(batch)
    return {
        "query": P(batch, None, heads),
        "key": P(batch, None, kv_heads),
        "value": P(batch, None, kv_heads),
        "bias": P(None, heads),
        "mask": per_batch,
        "query_seq_lengths": per_batch,
        "key_value_seq_lengths": per_batch,
        "query_segment_ids": per_batch,
        "key_value_segment_ids": per_batch,
        "query_positions": P(),
        "key_value_positions": P(),
        "alibi_slopes": P(batch, heads),
        "sinks": P(heads),
    }


def put(mesh, arrays, placed):
    return {n: jax.device_put(x, NamedSharding(mesh, placed[n])) for n, x in arrays.items()}


@functools.cache
def training(backend, dropout=0.2):
    """jit of ((out, residual), gradients) with everything switched on."""

    def loss(given, rest):
        out, residual = jaxcap.dot_product_attention(
            **given,
            **rest,
            softcap=CAP,
            is_causal=True,
            local_window_size=(12, 3),
            dropout_rate=dropout,
            dropout_rng=jax.random.key(3),
            return_residual=True,
            implementation=backend,
        )
        used = jnp.where(jnp.isfinite(residual), jnp.cos(residual), 0.0)
        return jnp.sum(jnp.sin(out)) + jnp.sum(used), (out, residual)

    def both(arrays):
        given = {n: arrays[n] for n in DIFFERENTIATED}
        rest = {n: x for n, x in arrays.items() if n not in given}
        grads, results = jax.grad(loss, has_aux=True)(given, rest)
        return results, grads

    return jax.jit(both)


@functools.cache
def wanted(backend, n=8, k=4, dropout=0.2):
    return jax.tree.map(np.asarray, training(backend, dropout)(inputs(n, k)))


def moves(compiled):
    """Kinds of communication in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"\b({kinds})(?:-start)?\(", compiled.as_text()))


def same(got, want, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance
        ),
        got,
        want,
    )


def attend(q, k=None, v=None, **options):
    k = q if k is None else k
    v = k if v is None else v
    return jaxcap.dot_product_attention(q, k, v, softcap=CAP, **options)


def query(n=8, batch=B):
    return inputs(n=n, batch=batch)["query"]


# ---- Batch and heads ----


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(b, kind) for b in BACKENDS for kind in ("auto", "explicit, set")] + [(WRAPPED, "explicit")],
)
def test_batch_and_heads_stay(backend, kind):
    mesh = mesh_of(*[AUTO if kind == "auto" else EXPLICIT] * 2)
    with jax.set_mesh(mesh) if "set" in kind else contextlib.nullcontext():
        arrays = put(mesh, inputs(), specs("x", "y", "y"))
        compiled = training(backend).lower(arrays).compile()
        (out, residual), grads = compiled(arrays)
    assert moves(compiled) == {"all-reduce"}  # of the gradients of bias and sinks
    same(((out, residual), grads), wanted(backend))
    expected = {name: arrays[name].sharding for name in grads}
    for name, x in (grads | {"out": out}).items():
        sharding = expected.get(name, arrays["query"].sharding)
        assert x.sharding.is_equivalent_to(sharding, x.ndim), name


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    ("n", "k", "batch", "heads", "kv_heads"),
    [
        (8, 1, "x", "y", None),  # one key/value head for all
        (8, 2, "x", "y", None),  # an axis of 4 over 2 groups
        (
            4,
            2,
            None,
            ("x", "y"),
            "x",
        ),  # axes within groups; more shards than heads is refused by JAX
        (4, 4, "y", "x", "x"),  # axes the other way around
    ],
    ids=["MQA", "parts of groups", "axis within groups", "transposed"],
)
def test_heads_that_fit(kind, n, k, batch, heads, kv_heads):
    mesh = mesh_of(kind, kind, shape=(2, 2) if heads == ("x", "y") else (2, 4))
    arrays = put(mesh, inputs(n, k), specs(batch, heads, kv_heads))
    compiled = training(WRAPPED, 0.0).lower(arrays).compile()
    same(compiled(arrays), wanted(WRAPPED, n, k, 0.0))
    # Of an axis of which but a part splits the key/value heads, no array has a gradient in pieces:
    # JAX's shardings cannot say so, and the compiler gathers the gradients of key and value.
    gathered = {"all-gather"} if kind == AUTO and k == 2 and kv_heads is None else set()
    assert moves(compiled) == {"all-reduce"} | gathered


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_heads_that_do_not_fit(kind):
    mesh = mesh_of(kind, kind)
    arrays = put(mesh, inputs(12, 3), specs("x", "y"))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, jaxcap.BackendError),
        match=r"'blockwise' cannot split 12 query heads over 4 shards: a shard must hold whole groups",
    ):
        training(WRAPPED, 0.0)(arrays)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_forward_moves_nothing(kind):
    mesh = mesh_of(kind, kind)
    arrays = put(mesh, inputs(), specs("x", "y", "y"))
    q, k, v = (arrays[n] for n in ("query", "key", "value"))
    compiled = jax.jit(functools.partial(attend, implementation=WRAPPED)).lower(q, k, v).compile()
    assert moves(compiled) == set()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_backend_with_tables(kind):
    """NumPy arrays that a kernel takes along are constants of what is partitioned."""
    with fakes.registered(fakes.Tabled("tabled")):
        mesh = mesh_of(kind, kind)
        arrays = put(mesh, inputs(), specs("x", "y", "y"))
        compiled = training("tabled").lower(arrays).compile()
        assert moves(compiled) == {"all-reduce"}
        same(compiled(arrays), wanted("xla"))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_is_whole_is_cut(kind):
    """A batch that only the query has split; nothing is gathered."""
    mesh = mesh_of(kind, kind)
    arrays = put(mesh, inputs(), specs(None, None))
    arrays["query"] = jax.device_put(arrays["query"], NamedSharding(mesh, P("x")))
    compiled = jax.jit(
        lambda a: attend(a["query"], a["key"], a["value"], implementation=WRAPPED)
    ).lower(arrays)
    compiled = compiled.compile()
    assert moves(compiled) == set()
    assert compiled(arrays).sharding.spec[0] == "x"


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_dropout_falls_on_the_same_entries(kind):
    """Zeros of the probabilities, which an identity as value shows."""
    q, eye = query(), np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None], (B, T, 8, T))

    @jax.jit
    def dropped(q, eye):
        rng = jax.random.key(1)
        return attend(q, q, eye, dropout_rate=0.4, dropout_rng=rng, implementation=WRAPPED) == 0

    place = NamedSharding(mesh_of(kind, kind), P("x", None, "y"))
    got = dropped(jax.device_put(q, place), jax.device_put(eye, place))
    np.testing.assert_array_equal(got, dropped(q, eye))
    assert 0.3 < np.mean(got) < 0.5


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_eager_calls_too(kind):
    q = query()
    sharded = jax.device_put(q, NamedSharding(mesh_of(kind, kind), P("x", None, "y")))
    got = attend(sharded, implementation=WRAPPED)
    assert got.sharding.is_equivalent_to(sharded.sharding, 4)
    same(got, attend(q, implementation=WRAPPED))


def test_bfloat16_gradients_are_summed_in_float32():
    q = jnp.asarray(query(), jnp.bfloat16)
    key = q[:, :, :1]
    place = NamedSharding(mesh_of(AUTO, AUTO), P("x", None, "y"))

    def grad(q, k):
        return jax.grad(lambda k: jnp.sum(attend(q, k, implementation=WRAPPED), dtype=jnp.float32))(
            k
        )

    text = jax.jit(grad).lower(jax.device_put(q, place), key).compile().as_text()
    summed = re.findall(r"= (?:\()?(\w+)\[.* all-reduce\(", text)
    assert set(summed) == {"f32"}


# ---- A sharded sequence ----

REFUSED = (
    r"'blockwise' cannot split {} over its (length|head size) \({}\)(.|\n)*context_parallel="
    r"(.|\n)*implementation='xla'(.|\n)*with_sharding_constraint"
)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    ("name", "place", "letter"),
    [
        ("query", P("x", "y"), "T"),
        ("key", P("x", "y"), "S"),
        ("value", P("x", None, None, "y"), "V"),
        ("mask", P("x", None, "y"), "T"),
        ("key_value_segment_ids", P("x", "y"), "S"),
    ],
)
def test_sequence_is_refused(kind, name, place, letter):
    mesh = mesh_of(kind, kind)
    arrays = put(mesh, inputs(), specs("x", None) | {name: place})
    # The compiler's own exception, as JAX has it, with the reason in it; on types, the reason itself.
    expected = jax.errors.JaxRuntimeError if kind == AUTO else jaxcap.BackendError
    with pytest.raises(expected, match=REFUSED.format(name, letter)):
        training(WRAPPED, 0.0)(arrays)
    place = NamedSharding(mesh, P("x"))
    attend(jax.device_put(query(), place), implementation=WRAPPED)  # and life goes on


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", ["query", "key"])
def test_sequence_is_left_to_xla(kind, name):
    mesh = mesh_of(kind, kind)
    placed = specs("x", None) | dict.fromkeys(
        ("query",) if name == "query" else ("key", "value"), P("x", "y")
    )
    arrays = put(mesh, inputs(), placed)
    got = training("xla", 0.0)(arrays)
    same(got, wanted("xla", 8, 4, 0.0))
    if kind == EXPLICIT and name == "query":
        assert jax.typeof(got[0][0]).sharding.spec == P("x", "y", None, None)


def test_a_consumers_sharding_stays_its_own():
    """What splits the output's sequence says nothing about the query's."""
    mesh, q = mesh_of(AUTO, AUTO), query()

    def loss(q, place):
        out = 2 * attend(q, implementation=WRAPPED)
        return jnp.sum(jnp.sin(jax.lax.with_sharding_constraint(out, place)))

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    split, one = (
        NamedSharding(mesh, P("x", "y")),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    same(grad(jax.device_put(q, NamedSharding(mesh, P("x"))), split), grad(q, one))


# ---- Manual and mixed axes ----

MANUAL = (P("x", None, "y"), P("x"), P("y"), P(None, "y"))


def sharded_grad(axes, vma, placed, inside=False):
    """Gradients of MQA with sinks and bias within a user's shard_map."""
    mesh = mesh_of(AUTO, AUTO)

    def attention(backend, q, k, s, b):
        return attend(q, k, sinks=s, bias=b, is_causal=True, implementation=backend)

    def grads(backend, *arrays):
        run = functools.partial(attention, backend)
        if axes and not inside:
            run = jax.shard_map(
                run, mesh=mesh, in_specs=placed, out_specs=placed[0], axis_names=axes, check_vma=vma
            )
        return jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1, 2, 3))(*arrays)

    if inside:
        return lambda backend: jax.shard_map(
            functools.partial(grads, backend), mesh=mesh, in_specs=placed, out_specs=placed
        )
    return lambda backend: functools.partial(grads, backend)


def mqa():
    x = inputs(8, 1)
    return x["query"], x["key"], x["sinks"], x["bias"]


@functools.cache
def mqa_grads():
    return jax.jit(sharded_grad(set(), False, ())("xla"))(*mqa())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vma", [True, False])
def test_in_a_shard_map(backend, vma):
    same(jax.jit(sharded_grad({"x", "y"}, vma, MANUAL)(backend))(*mqa()), mqa_grads())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_taken_in_a_shard_map(backend):
    """With check_vma a replicated operand's gradient comes back summed over the axes."""
    same(jax.jit(sharded_grad({"x", "y"}, True, MANUAL, inside=True)(backend))(*mqa()), mqa_grads())


def only(axis, placed):
    return tuple(P(*(d if d == axis else None for d in spec)) for spec in placed)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_in_a_shard_map_over_some_axes(axis):
    """The others are automatic, and the sums over them name devices of the whole mesh."""
    mesh = mesh_of(AUTO, AUTO)
    arrays = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(mqa(), MANUAL, strict=True)]
    run = jax.jit(sharded_grad({axis}, True, only(axis, MANUAL))(WRAPPED))
    same(run(*arrays), mqa_grads())


@pytest.mark.parametrize("types", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
@pytest.mark.parametrize("context", [jax.set_mesh, contextlib.nullcontext])
def test_mixed_axes(types, context):
    mesh = mesh_of(*types)
    with context(mesh):
        arrays = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(mqa(), MANUAL, strict=True)
        ]
        same(jax.jit(sharded_grad(set(), False, ())(WRAPPED))(*arrays), mqa_grads())


# ---- vmap ----


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("place", [P("x", None, None, "y"), P(None, "x", None, "y")])
def test_vmap_of_sharded(kind, place):
    q, k, s, _ = mqa()
    q, k = np.stack([q, 2 * q]), np.stack([k, 2 * k])
    run = jax.jit(
        jax.vmap(lambda q, k, s: attend(q, k, sinks=s, implementation=WRAPPED), (0, 0, None))
    )
    want = run(q, k, s)
    mesh = mesh_of(kind, kind)
    placed = [
        jax.device_put(x, NamedSharding(mesh, p))
        for x, p in ((q, place), (k, P(*place[:2])), (s, P()))
    ]
    same(run(*placed), want)


def test_spmd_axis_name():
    mesh, q = mesh_of(AUTO, AUTO), np.stack([query(), 2 * query()])
    run = functools.partial(attend, implementation=WRAPPED)
    named = jax.jit(jax.vmap(run, spmd_axis_name="x"))
    same(named(jax.device_put(q, NamedSharding(mesh, P("x")))), jax.vmap(run)(q))


# ---- One device, and export ----


def test_export():
    """Of unsharded arrays it holds no callback, though this process has eight devices."""
    q = query()
    for backend in BACKENDS:
        run = jax.jit(functools.partial(attend, implementation=backend))
        exported = jax.export.export(run)(q)
        assert exported.nr_devices == 1
        assert "CustomSPMDPartitioning" not in exported.mlir_module()
        same(exported.call(q), run(q))


def test_export_for_a_gpu():
    export = jax.export.export(
        jax.jit(functools.partial(attend, implementation=WRAPPED)), platforms=("cuda",)
    )
    assert "CustomSPMDPartitioning" not in export(query()).mlir_module()


def test_one_device_has_nothing_around_the_call():
    code = (
        "import jax, jaxcap; q = jax.numpy.ones((2, 8, 4, 8));"
        "f = lambda q: jaxcap.dot_product_attention(q, q, q, softcap=5.0, implementation='blockwise');"
        "text = str(jax.make_jaxpr(jax.grad(lambda q: f(q).sum()))(q));"
        "assert jax.device_count() == 1 and 'custom_partitioning' not in text, text"
    )
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    here = jax.make_jaxpr(functools.partial(attend, implementation=WRAPPED))(query())
    assert "custom_partitioning" in str(here)


# ---- The pieces ----


def test_a_shard_is_asked_for_reasons():
    """A backend that can do the whole call may not be able to do a part of it."""

    def reasons(spec):
        return ["needs 4 heads"] if spec.query_heads < 4 else []

    place = NamedSharding(mesh_of(AUTO, AUTO), P(None, None, "y"))
    with (
        fakes.registered(fakes.Recorder("picky", reasons)),
        pytest.raises(
            jax.errors.JaxRuntimeError, match="'picky' cannot run a shard: needs 4 heads"
        ),
    ):
        attend(jax.device_put(query(), place), implementation="picky")


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (6,)])
def test_fine_mesh_reads_every_sharding(shape):
    """Named shardings come back as the axes they are made of, split into primes, major first."""
    names = tuple("abc"[: len(shape)])
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names)
    fine = {}
    for name, size in zip(names, shape, strict=True):
        for p in fine_mesh._primes(size):
            fine.setdefault(name, []).append((f"jaxcap_{sum(map(len, fine.values()))}", p))
    places = [
        P(),
        P(*names),
        P(*names[::-1]),
        P(None, names),
        P(names[::-1], None),
        P(None, names[-1]),
    ]
    shardings = [NamedSharding(mesh, place) for place in places]
    array = jax.ShapeDtypeStruct((24,) * 3, "float32", sharding=shardings[1])
    found = fine_mesh.FineMesh(mesh, jax.sharding.get_abstract_mesh(), [array])
    for place, sharding in zip(places, shardings, strict=True):
        got = found.axes(sharding, 3)
        for dim in range(3):
            axes = place[dim] if dim < len(place) and place[dim] else ()
            axes = axes if isinstance(axes, tuple) else (axes,)
            want = tuple(piece for a in axes for piece, _ in fine[a])
            assert got[dim] == want, (place, dim)
        again = found.sharding(P(*(axes or None for axes in got)))
        assert again.is_equivalent_to(sharding, 3)


def test_results_are_cached():
    """An eager call does not compile twice."""
    q = query()
    attend(q, implementation=WRAPPED)
    before = partitioning.partitioned.cache_info().misses
    attend(q, implementation=WRAPPED)
    assert partitioning.partitioned.cache_info().misses == before
