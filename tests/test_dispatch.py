"""From a call to a backend: gradients of any subset, vmap in any order, scan, remat."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from jaxcap.spec import DIFFERENTIABLE
from tests import fakes

B, T, S, N, K, H, V = 2, 8, 6, 4, 2, 8, 4
CAP = 3.0
WRAPPED = "recorder"
AXES = {  # of every array that can be vmapped
    "query": (B, T, N, H),
    "key": (B, S, K, H),
    "value": (B, S, K, V),
    "bias": (1, N, T, S),
    "sinks": (N,),
    "mask": (B, 1, T, S),
    "alibi_slopes": (N,),
    "query_seq_lengths": (B,),
    "key_value_segment_ids": (B, S),
    "query_segment_ids": (B, T),
}


@pytest.fixture(scope="module", autouse=True)
def recorder():
    """A backend with a backward of its own whose mathematics are known to be right."""
    with fakes.registered(fakes.Recorder()) as backend:
        yield backend


def make(name, vmapped=()):
    shape = (*vmapped, *AXES[name])
    random = np.random.default_rng(list(AXES).index(name))
    if name == "mask":
        return random.uniform(size=shape) > 0.2
    if name == "query_seq_lengths":
        return random.integers(3, T + 1, shape).astype(np.int32)
    if "segment" in name:
        return np.sort(random.integers(0, 2, shape), axis=-1).astype(np.int32)
    x = random.normal(size=shape).astype(np.float32)
    return x**2 if name == "alibi_slopes" else 2 * x


def attend(arrays, backend, **options):
    return jaxcap.dot_product_attention(
        **arrays,
        softcap=CAP,
        is_causal=True,
        return_residual=True,
        implementation=backend,
        **options,
    )


def loss(arrays, backend, **options):
    out, residual = attend(arrays, backend, **options)
    used = jnp.where(jnp.isfinite(residual), jnp.cos(residual), 0.0)
    return jnp.sum(jnp.sin(out)) + jnp.sum(used)


def grads(arrays, names, backend, **options):
    given = {n: arrays[n] for n in names}
    return jax.grad(lambda given: loss(arrays | given, backend, **options))(given)


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


SUBSETS = [c for n in (1, 2, 5) for c in itertools.combinations(DIFFERENTIABLE, n)]


def test_gradients_of_subsets(recorder):
    """Those and only those are asked of the backend."""
    arrays = {n: make(n) for n in AXES}
    whole = jax.jit(lambda a: grads(a, DIFFERENTIABLE, "xla"))(arrays)
    for names in SUBSETS:
        recorder.calls.clear()
        # Traced, not run: values are compared for all at once, and for the last alone.
        jax.eval_shape(functools.partial(grads, names=names, backend=WRAPPED), arrays)
        assert recorder.gradients() == [names, names]
        if names in (("sinks",), DIFFERENTIABLE):
            got = jax.jit(functools.partial(grads, names=names, backend=WRAPPED))(arrays)
            same(got, {n: whole[n] for n in names})


@pytest.mark.parametrize("backend", ["blockwise", WRAPPED])
@pytest.mark.parametrize("which", ["out", "residual"])
def test_gradients_of_either_result(backend, which):
    arrays = {n: make(n) for n in ("query", "key", "value", "bias", "sinks")}

    def one(given, backend):
        out, residual = attend(arrays | given, backend)
        return jnp.sum(jnp.sin(out if which == "out" else residual))

    given = {n: arrays[n] for n in DIFFERENTIABLE}
    got, want = (
        jax.jit(jax.grad(functools.partial(one, backend=b)))(given) for b in (backend, "xla")
    )
    same(got, want)
    if which == "residual":
        assert not np.any(got["value"])


# ---- vmap ----

#: Arrays that carry the vmapped axis; the rest are shared by all.
VMAPPED = [
    ("query",),
    ("key", "value"),
    ("value",),
    ("bias",),
    ("sinks",),
    ("mask", "alibi_slopes", "query_seq_lengths"),
    ("query", "bias", "query_segment_ids"),
    tuple(AXES),
]
SIZE = 3


def batched(names):
    arrays = {n: make(n, (SIZE,) if n in names else ()) for n in AXES}
    return arrays, {n: 0 if n in names else None for n in arrays}


def both(arrays, backend):
    return attend(arrays, backend), grads(arrays, DIFFERENTIABLE, backend)


one_row = jax.jit(functools.partial(both, backend="xla"))


def each(arrays, names):
    """The loop that vmap stands for."""
    rows = [one_row({n: x[i] if n in names else x for n, x in arrays.items()}) for i in range(SIZE)]
    return jax.tree.map(lambda *x: np.stack(x), *rows)


@pytest.mark.parametrize("names", VMAPPED, ids="+".join)
def test_vmap_of_results_and_gradients(names):
    """A gradient under vmap has a row for each: what all share is not summed over the vmapped axis."""
    arrays, axes = batched(names)
    got = jax.jit(jax.vmap(functools.partial(both, backend=WRAPPED), (axes,)))(arrays)
    same(got, each(arrays, names))


@pytest.mark.parametrize(
    ("backend", "names"),
    [("blockwise", ("query",)), (WRAPPED, ("bias", "value")), ("blockwise", ("sinks", "mask"))],
)
def test_gradients_of_vmap(names, backend):
    """The other order: here what all share gets the sum."""
    arrays, axes = batched(names)

    def total(given, arrays, backend):
        run = jax.vmap(lambda a: loss(a, backend), (axes,))
        return jnp.sum(run(arrays | given))

    given = {n: arrays[n] for n in DIFFERENTIABLE}
    got, want = (
        jax.jit(jax.grad(functools.partial(total, backend=b)))(given, arrays)
        for b in (backend, "xla")
    )
    same(got, want)


def test_nested_vmap():
    """The outer over queries and bias, the inner over keys and sinks."""
    arrays = {n: make(n) for n in ("query", "key", "value", "bias", "sinks")}
    arrays |= {"query": make("query", (2,)), "bias": make("bias", (2,))}
    arrays |= {n: make(n, (3,)) for n in ("key", "value", "sinks")}
    outer = {n: 0 if n in ("query", "bias") else None for n in arrays}
    inner = {n: None if n in ("query", "bias") else 0 for n in arrays}

    def run(backend):
        one = functools.partial(both, backend=backend)
        return jax.jit(jax.vmap(jax.vmap(one, (inner,)), (outer,)))(arrays)

    same(run(WRAPPED), run("xla"))


def test_vmap_over_other_axes():
    """in_axes and out_axes other than the first."""
    arrays = {n: make(n, (SIZE,)) for n in ("query", "key", "value")}
    moved = {n: np.moveaxis(x, 0, 2) for n, x in arrays.items()}

    def run(a):
        return attend(a, "blockwise")[0]

    got = jax.vmap(run, (dict.fromkeys(moved, 2),), out_axes=1)(moved)
    same(np.moveaxis(got, 1, 0), jax.vmap(run)(arrays))


@pytest.mark.parametrize("names", [("query",), ("sinks",)])
def test_dropout_under_vmap(names):
    """A vmapped axis counts as batch, however many arrays carry it: no two rows drop the same."""
    arrays = {n: make(n, (SIZE,) if n in names else ()) for n in ("query", "key", "value", "sinks")}
    axes = {n: 0 if n in names else None for n in arrays}
    random = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}

    def run(backend):
        def one(a):
            return attend(a, backend, **random)[0], grads(a, ("value",), backend, **random)

        return jax.jit(jax.vmap(one, (axes,)))(arrays)

    got = run("blockwise")
    same(got, run("xla"))
    if names == ("sinks",):
        assert not np.allclose(got[0][0] == 0, got[0][1] == 0)


def test_vmap_over_dropout_keys():
    arrays = {n: make(n) for n in ("query", "key", "value")}
    keys = jax.random.split(jax.random.key(0), SIZE)

    def run(backend):
        def one(key):
            return attend(arrays, backend, dropout_rate=0.5, dropout_rng=key)[0]

        return jax.jit(jax.vmap(one))(keys)

    same(run("blockwise"), run("xla"))


# ---- scan and remat ----


@pytest.mark.parametrize(
    ("backend", "policy"), [("blockwise", None), ("blockwise", "ours"), (WRAPPED, "dots")]
)
def test_scan_over_rematted_layers(backend, policy):
    layers = np.random.default_rng(0).normal(size=(3, H, H)).astype(np.float32) / 8
    policies = {
        "dots": jax.checkpoint_policies.dots_saveable,
        "ours": jax.checkpoint_policies.save_only_these_names("jaxcap_out", "jaxcap_lse"),
    }

    def stack(layers, x, backend, remat):
        def layer(x, w):
            q = jnp.einsum("btnh,hk->btnk", x, w, precision="highest")
            out, _ = attend({"query": q, "key": q[:, :, :K], "value": x[:, :, :K]}, backend)
            return (x + out) / 2, None

        if remat:
            layer = jax.checkpoint(layer, policy=policies.get(policy))
        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, layers)[0]))

    def run(backend, remat):
        one = functools.partial(stack, backend=backend, remat=remat)
        return jax.jit(jax.grad(one, (0, 1)))(layers, make("query"))

    same(run(backend, True), run("xla", False))


def test_float64():
    with jax.enable_x64(True):
        arrays = {
            n: jnp.asarray(make(n), jnp.float64) for n in ("query", "key", "value", "bias", "sinks")
        }
        got, want = (
            jax.jit(functools.partial(grads, names=DIFFERENTIABLE, backend=b))(arrays)
            for b in ("blockwise", "xla")
        )
        assert {x.dtype.name for x in got.values()} == {"float64"}
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, want
        )
