"""What JAX does that bites, a test for each line of that section in the design.

Sharding under plain jit has its own file, `test_partitioning.py`; Flax and exports to GPUs have theirs.
"""

import functools
import logging
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import device, marks, partitioning, selection
from tests import fakes

CAP = 5.0
SAVE_OURS = jax.checkpoint_policies.save_only_these_names("jaxcap_out", "jaxcap_lse")


@pytest.fixture
def recorder():
    with fakes.registered(fakes.Recorder()) as backend:
        yield backend


@pytest.fixture
def said(caplog):
    """What the log of jaxcap says has run, message by message."""
    caplog.set_level(logging.INFO, logger="jaxcap")
    marks.forget_reports()

    def messages():
        found = [re.match(r"(\w+) runs the (\w+)", r.getMessage()) for r in caplog.records]
        caplog.clear()
        marks.forget_reports()
        return [f"{m[1]} {m[2]}" for m in found if m]

    return messages


@pytest.fixture
def q():
    return jax.random.normal(jax.random.key(0), (2, 8, 4, 8)) * 3


def attend(q, backend=None, **options):
    return jaxcap.dot_product_attention(q, q, q, softcap=CAP, implementation=backend, **options)


def total(q, backend=None, **options):
    return jnp.sum(jnp.sin(attend(q, backend, **options)))


def equations(jaxpr):
    """All equations of a program, those of its parts included, as often as they are run."""
    for eqn in jaxpr.eqns:
        yield eqn
        for part in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def kernels(function, *args, name="recorder"):
    """(forward, backward) kernels in a program."""
    traced = jax.jit(function).trace(*args).jaxpr.jaxpr
    names = [str(eqn.params.get("name")) for eqn in equations(traced)]
    return names.count(f"{name}_forward"), names.count(f"{name}_backward")


# ---- jit's cache ----


def test_use_backend_traces_anew(q, recorder):
    traced = []

    @jax.jit
    def run(q):
        traced.append(None)
        return attend(q)

    run(q)
    chosen = [len(recorder.calls)]
    with jaxcap.use_backend("xla"):
        run(q)
    chosen.append(len(recorder.calls))
    with jaxcap.use_backend("recorder"):
        run(q)
    run(q)
    assert len(traced) == 3  # once each; the last call finds the first program
    assert chosen[0] == chosen[1]  # and xla's program is not the recorder's
    with jaxcap.use_backend("xla"), jaxcap.use_backend(None):
        assert selection.requested(None) is None


def test_use_backend_is_seen_by_a_compiled_gradient(q):
    grad = jax.jit(jax.grad(total))

    def logits(text):
        return "tensor<2x4x8x8xf32>" in text or "tensor<2x4x1x8x8xf32>" in text

    programs = []
    for name in ("xla", "blockwise"):
        with jaxcap.use_backend(name):
            programs.append(grad.lower(q).as_text())
    assert programs[0] != programs[1]
    with jaxcap.use_backend("xla"):
        assert grad.lower(q).as_text() == programs[0]


def run_python(code, **environment):
    env = {n: x for n, x in os.environ.items() if not n.startswith("JAXCAP_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_environment_is_read_once_at_import():
    """A program compiled under one setting would not see the next, so there is no next."""
    code = (
        "import os, jaxcap;"
        "from jaxcap import selection;"
        "print(selection.requested(None));"
        "os.environ['JAXCAP_BACKEND'] = 'blockwise';"
        "print(selection.requested(None))"
    )
    assert run_python(code, JAXCAP_BACKEND="xla") == ["xla", "xla"]


# ---- Replicated or varying under shard_map ----


@pytest.mark.parametrize("backend", ["xla", "blockwise", "recorder"])
def test_check_vma_knows_what_varies(backend, recorder):
    """A result that differs between shards must not pass as replicated."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q = jax.random.normal(jax.random.key(0), (4, 8, 2, 8))

    def run(out_specs, function):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=True)
        )(q)

    forward = functools.partial(attend, backend=backend, return_residual=True)
    backward = jax.grad(functools.partial(total, backend=backend))
    np.testing.assert_allclose(run(P("x"), forward)[0], attend(q), rtol=1e-5, atol=1e-5)
    for function in (forward, backward):
        with pytest.raises(ValueError, match="out_specs"):
            run(P(), function)


# ---- Which gradients are wanted ----


def test_symbolic_zeros_tell_what_is_differentiated(q, recorder):
    bias, sinks = jnp.zeros((1, 4, 8, 8)), jnp.zeros(4)

    def loss(q, k, v, bias, sinks):
        return jnp.sum(
            jaxcap.dot_product_attention(
                q, k, v, bias, softcap=CAP, sinks=sinks, implementation="recorder"
            )
        )

    def seen(function, *args):
        partitioning.partitioned.cache_clear()  # or a second trace would find the first
        recorder.calls.clear()
        jax.eval_shape(function, *args)
        return recorder.gradients()

    arrays = (q, q[:, :, :2], q[:, :, :2], bias, sinks)
    every = ("query", "key", "value", "bias", "sinks")
    assert seen(loss, *arrays) == [()]
    for i, name in enumerate(every):
        assert seen(jax.grad(loss, i), *arrays) == [(name,), (name,)]
        assert seen(jax.jit(jax.grad(loss, i)), *arrays) == [(name,), (name,)]
    assert seen(jax.grad(loss, (0, 3)), *arrays) == [("query", "bias"), ("query", "bias")]
    # One array in two places is wanted in both; one behind stop_gradient in none.
    same = jax.grad(lambda q: loss(q, q, jax.lax.stop_gradient(q), bias, sinks))
    assert seen(same, q) == [("query", "key"), ("query", "key")]
    inner = jax.grad(lambda q: jax.jit(loss)(q, *arrays[1:]))
    assert seen(inner, q)[-2:] == [("query",), ("query",)]


def test_a_forward_only_backend_serves_inference_alone(q):
    """Inside one custom_vjp, which is what tells the two apart."""

    def reasons(spec):
        return ["has no backward"] if spec.gradients else []

    with fakes.registered(fakes.Recorder("inference", reasons)) as backend:
        np.testing.assert_allclose(jax.jit(attend)(q), attend(q, "xla"), rtol=1e-5, atol=1e-5)
        assert len(backend.calls) >= 1
        before = len(backend.calls)
        got = jax.jit(jax.grad(total))(q)
        assert {spec.gradients for _, spec in backend.calls[before:]} <= {()}
        np.testing.assert_allclose(got, jax.grad(total)(q), rtol=1e-4, atol=1e-4)
        with pytest.raises(jaxcap.BackendError, match="'inference' cannot run gradients of query"):
            jax.grad(functools.partial(total, backend="inference"))(q)


def test_the_log_tells_what_runs(q, said):
    """jit, remat and scan trace the inference rule too, where gradients are taken: it never runs."""

    def reasons(spec):
        return ["has no backward"] if spec.gradients else []

    def layers(q):
        def layer(x, _):
            return x + attend(x), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0])

    with (
        fakes.registered(fakes.Recorder("inference", reasons)) as inference,
        fakes.registered(fakes.Recorder("training"), before="blockwise"),
    ):
        inference.calls.clear()
        jax.jit(lambda q: attend(q))(q)
        assert said() == ["inference forward"]
        jax.make_jaxpr(jax.grad(total))(q)
        jax.jit(lambda q: attend(q)).trace(q)
        assert said() == []
        jax.jit(jax.grad(lambda q: jax.jit(total)(q)))(q)
        assert said() == ["training forward", "training backward"]
        jax.jit(jax.grad(layers))(q)
        assert inference.calls  # was traced
        assert set(said()) == {"training forward", "training backward"}
        attend(q)
        assert said() == ["inference forward"]


# ---- Forward mode and second derivatives ----


def quadratic(q, backend):
    return jnp.sum(attend(q, backend) ** 2)


HIGHER = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,))[1],
    "jit of jvp": lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (q,))[1])(q),
    "jvp of jit": lambda f, q: jax.jvp(jax.jit(f), (q,), (q,))[1],
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
    "linearize": lambda f, q: jax.linearize(f, q)[1](q),
    "grad of grad": lambda f, q: jax.grad(lambda q: jnp.sum(jax.grad(f)(q) ** 2))(q),
    "jit of grad of grad": lambda f, q: jax.jit(jax.grad(lambda q: jnp.sum(jax.grad(f)(q) ** 2)))(
        q
    ),
    "hessian": lambda f, q: jax.hessian(f)(q),
    "jvp of grad": lambda f, q: jax.jvp(jax.grad(f), (q,), (q,))[1],
}


@pytest.mark.parametrize("kind", HIGHER)
@pytest.mark.parametrize("backend", ["blockwise", "recorder"])
def test_only_xla_has_higher_derivatives(kind, backend, recorder):
    q = jax.random.normal(jax.random.key(0), (1, 3, 2, 2))
    with pytest.raises(
        NotImplementedError, match=rf"backend '{backend}' has .*; .*pass implementation='xla'"
    ):
        HIGHER[kind](functools.partial(quadratic, backend=backend), q)


def test_xla_has_them():
    """Against differences of the gradient, and of the function."""
    with jax.enable_x64(True):
        q = jax.random.normal(jax.random.key(0), (1, 3, 2, 2), jnp.float64)
        f, step = jax.jit(functools.partial(quadratic, backend="xla")), 1e-5
        slope = (f(q + step * q) - f(q - step * q)) / (2 * step)
        for kind in ("jvp", "jit of jvp", "linearize"):
            np.testing.assert_allclose(HIGHER[kind](f, q), slope, rtol=1e-6)
        grad = jax.jit(jax.grad(f))
        curved = (grad(q + step * q) - grad(q - step * q)) / (2 * step)
        hessian = jax.jit(jax.hessian(f))(q).reshape(q.size, q.size)
        np.testing.assert_allclose(hessian @ q.ravel(), curved.ravel(), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(hessian, hessian.T, rtol=1e-9, atol=1e-9)
        both = jax.jit(functools.partial(HIGHER["grad of grad"], f))(q)
        want = 2 * hessian @ grad(q).ravel()
        np.testing.assert_allclose(both.ravel(), want, rtol=1e-9, atol=1e-9)


# ---- remat ----


def test_remat_saves_output_and_residual_by_name(q, recorder):
    run = functools.partial(total, backend="recorder")
    assert kernels(jax.value_and_grad(run), q) == (1, 1)
    forgetful = jax.checkpoint(run)
    assert kernels(jax.value_and_grad(forgetful), q) == (2, 1)
    saving = jax.checkpoint(run, policy=SAVE_OURS)
    assert kernels(jax.value_and_grad(saving), q) == (1, 1)
    want = jax.jit(jax.grad(functools.partial(total, backend="xla")))(q)
    np.testing.assert_allclose(jax.jit(jax.grad(saving))(q), want, rtol=1e-4, atol=1e-5)


def test_remat_by_name_in_a_scan(q, recorder):
    def layers(q, policy):
        layer = jax.checkpoint(lambda x, _: (x + attend(x, "recorder"), None), policy=policy)
        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0])

    # A scan has one body forward and one back.
    assert kernels(jax.value_and_grad(functools.partial(layers, policy=None)), q) == (2, 1)
    assert kernels(jax.value_and_grad(functools.partial(layers, policy=SAVE_OURS)), q) == (1, 1)


# ---- The device is a guess ----


def gpu(capability="9.0"):
    return types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="H100")


def cpu():
    return types.SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.fixture
def gpu_host(monkeypatch):
    """A machine whose first device is a GPU."""
    found = {None: [gpu()], "cpu": [cpu()], "gpu": [gpu()]}
    monkeypatch.setattr(jax, "devices", lambda kind=None: found[kind])


def platform_under_jit(array):
    seen = []
    jax.jit(lambda x: seen.append(device.platform(x)) or x).trace(array)
    return seen[0]


@pytest.mark.parametrize(
    ("capability", "name"), [("9.0", "sm90"), ("8.9", "sm89"), ("10.0", "sm100")]
)
def test_names_of_devices(capability, name):
    assert device.name_of(gpu(capability)) == name
    assert device.name_of(cpu()) == "cpu"


def test_device_of_traced_arrays_is_the_first(gpu_host, q):
    assert platform_under_jit(q) == "sm90"


def test_default_device_counts(gpu_host, q, monkeypatch):
    """jit for the CPU on a GPU host must not pick a kernel for GPUs."""
    with jax.default_device("cpu"):
        assert platform_under_jit(q) == "cpu"
    monkeypatch.undo()
    with jax.default_device(jax.devices("cpu")[1]):
        assert platform_under_jit(q) == "cpu"


def test_concrete_arrays_count(gpu_host, q):
    assert device.platform(q) == "cpu"


def test_mesh_counts(gpu_host, q):
    mesh = jax.sharding.Mesh(np.array(q.sharding.device_set.copy().pop()).reshape(1), ("x",))
    with jax.set_mesh(mesh):
        assert platform_under_jit(q) == "cpu"


def test_a_call_on_the_cpu_of_a_gpu_host(gpu_host, q):
    picky = fakes.Recorder("gpus", lambda spec: [] if spec.platform == "sm90" else ["needs sm90"])
    with fakes.registered(picky):
        assert (
            jaxcap.explain(jax.ShapeDtypeStruct(q.shape, q.dtype), *[q] * 2).spec.platform == "cpu"
        )
        shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)] * 3
        assert jaxcap.explain(*shapes, softcap=CAP).forward.backend == "gpus"
        with jax.default_device("cpu"):
            assert jaxcap.explain(*shapes, softcap=CAP).forward.backend != "gpus"
        np.testing.assert_allclose(attend(q), attend(q, "xla"), rtol=1e-5, atol=1e-5)
        assert not picky.calls


# ---- Strict promotion ----


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_strict_promotion_of_dtypes_and_ranks(backend, dtype):
    """The tests run with both strict (conftest); every argument at once, and its gradients."""
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.config.jax_numpy_rank_promotion == "raise"
    b, t, s, n, k, h = 2, 8, 8, 4, 2, 8
    cast = functools.partial(jnp.asarray, dtype=dtype)
    arrays = (cast(np.ones((b, t, n, h))), cast(np.ones((b, s, k, h))), cast(np.ones((b, s, k, h))))
    bias, sinks = cast(np.ones((n, t, s))), np.zeros(n, np.float32)

    def loss(q, k, v, bias, sinks):
        out, residual = jaxcap.dot_product_attention(
            q,
            k,
            v,
            bias,
            np.ones((b, 1, t, s), bool),
            softcap=CAP,
            is_causal=True,
            local_window_size=4,
            query_seq_lengths=np.array([8, 5]),
            key_value_seq_lengths=np.array([8, 5]),
            query_segment_ids=np.zeros((b, t), np.int8),
            key_value_segment_ids=np.zeros(s, np.int64),
            query_positions=np.arange(t),
            key_value_positions=np.arange(s),
            alibi_slopes=cast(np.ones(n)),
            sinks=sinks,
            dropout_rate=0.25,
            dropout_rng=jax.random.key(0),
            layer_scale=2.0,
            return_residual=True,
            implementation=backend,
        )
        assert out.dtype == dtype
        assert residual.dtype == jnp.float32
        some = jnp.where(jnp.isfinite(residual), residual, 0)
        return jnp.sum(out, dtype=jnp.float32) + jnp.sum(some)

    given = (*arrays, bias, sinks)
    grads = jax.jit(jax.grad(loss, range(5)))(*given)
    assert [g.dtype for g in grads] == [x.dtype for x in given]
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)
