"""Selection: a cap never reaches a backend that ignores it, and every refusal says why."""

import dataclasses
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxcap
from jaxcap import environment, marks, selection
from jaxcap.spec import AttentionSpec, Gradients

PLATFORMS = ("cpu", "tpu", "sm80", "sm89", "sm90", "sm100", "sm120")


def spec(**changes):
    base = AttentionSpec(
        batch=2,
        query_length=64,
        key_length=64,
        query_heads=4,
        kv_heads=2,
        head_size=64,
        value_size=64,
        dtype="bfloat16",
        scale=0.125,
    )
    return base.replace(**changes)


class Fake:
    """Attention that ignores the cap, as cuDNN's would; preferred to every other."""

    def __init__(self, name="capless", forward_only=False, honest=True):
        self.name, self.forward_only, self.honest, self.calls = name, forward_only, honest, []

    def reasons(self, spec):
        why = []
        if self.honest and spec.softcap is not None:
            why.append("knows no soft cap")
        if self.forward_only and spec.gradients:
            why.append("has no backward")
        return why

    def forward(self, spec, operands):
        self.calls.append(("forward", spec))
        return selection.backends()["xla"].forward(spec.replace(softcap=None), operands)

    def backward(self, spec, operands, out, lse, d_out, d_lse):
        self.calls.append(("backward", spec))
        return Gradients(
            *(None if x is None else jnp.zeros_like(x) for x in operands[:4]), operands.sinks
        )


@pytest.fixture
def fake(request):
    backend = Fake(**getattr(request, "param", {}))
    selection.register(backend, before="pallas")
    yield backend
    selection.unregister(backend.name)


@pytest.fixture
def qkv():
    q = jax.random.normal(jax.random.key(0), (2, 8, 4, 16)) * 4
    return q, q[:, :, :2], q[:, :, 2:]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("gradients", [(), ("query", "key", "value")])
@pytest.mark.parametrize("features", [{}, {"is_causal": True}, {"dropout_rate": 0.1}])
def test_zero_selects_as_none(platform, gradients, features):
    base = spec(platform=platform, gradients=gradients, **features)
    off = selection.decide(base)
    assert off.backend is not None
    capped = selection.decide(base.replace(softcap=50.0))
    # In the public API 0.0 and None are the same spec, so the same decision follows.
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)
    zero = jaxcap.explain(q, k, k, softcap=0.0, platform=platform)
    none = jaxcap.explain(q, k, k, softcap=None, platform=platform)
    assert zero == none
    assert zero.spec.softcap is None
    assert capped.spec != off.spec


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_cap_never_reaches_cudnn(platform):
    for gradients in ((), ("query",)):
        decision = selection.decide(spec(platform=platform, gradients=gradients, softcap=50.0))
        assert any("soft cap" in why for why in decision.reasons["cudnn"])
        assert decision.backend != "cudnn"


def test_without_a_cap_cudnn_joins():
    assert selection.decide(spec(platform="sm90"), "cudnn").backend == "cudnn"
    order = selection.preference(spec())
    assert order.index("cudnn") < order.index("blockwise")


def test_every_backend_honours_or_refuses_a_cap(qkv):
    """Over the whole registry: with a cap the answer is capped, or there is a reason."""
    q, k, v = qkv
    capped = jaxcap.dot_product_attention(q, k, v, softcap=1.0, implementation="xla")
    plain = jaxcap.dot_product_attention(q, k, v, implementation="xla")
    assert jnp.abs(capped - plain).max() > 0.1
    for name in selection.backends():
        explained = jaxcap.explain(q, k, v, softcap=1.0, implementation=name)
        if explained.forward.reasons[name]:
            with pytest.raises(jaxcap.BackendError):
                jaxcap.dot_product_attention(q, k, v, softcap=1.0, implementation=name)
        else:
            out = jaxcap.dot_product_attention(q, k, v, softcap=1.0, implementation=name)
            assert jnp.abs(out - capped).max() < 1e-2, name


def test_a_capless_backend_is_refused_for_a_cap(fake, qkv):
    jaxcap.dot_product_attention(*qkv)
    assert [what for what, _ in fake.calls] == ["forward"]
    fake.calls.clear()
    jaxcap.dot_product_attention(*qkv, softcap=50.0)
    jax.grad(lambda q: jaxcap.dot_product_attention(q, *qkv[1:], softcap=50.0).sum())(qkv[0])
    assert fake.calls == []
    with pytest.raises(jaxcap.BackendError, match="'capless' cannot run.*knows no soft cap"):
        jaxcap.dot_product_attention(*qkv, softcap=50.0, implementation="capless")


@pytest.mark.parametrize("fake", [{"honest": False}], indirect=True)
def test_the_proof_can_fail(fake, qkv):
    """A backend that lies about its cap is caught by the comparison above."""
    with pytest.raises(AssertionError):
        test_every_backend_honours_or_refuses_a_cap(qkv)


@pytest.mark.parametrize("fake", [{"forward_only": True}], indirect=True)
def test_gradients_never_get_a_forward_only_backend(fake, qkv):
    jaxcap.dot_product_attention(*qkv)
    assert [what for what, _ in fake.calls] == ["forward"]
    fake.calls.clear()
    loss = lambda q: jaxcap.dot_product_attention(q, *qkv[1:]).sum()  # noqa: E731
    got = jax.grad(loss)(qkv[0])
    assert fake.calls == []
    with jaxcap.use_backend("xla"):
        assert jnp.allclose(got, jax.grad(loss)(qkv[0]), atol=1e-4)
    with jaxcap.use_backend("capless"), pytest.raises(jaxcap.BackendError, match="no backward"):
        jax.grad(loss)(qkv[0])


def test_none_left_lists_every_backend(monkeypatch):
    for backend in selection.backends().values():
        monkeypatch.setattr(
            type(backend), "reasons", lambda self, spec: [f"{self.name} is out", "twice"]
        )
    with pytest.raises(jaxcap.BackendError) as caught:
        selection.select(spec())
    for name in selection.backends():
        assert f"{name}: {name} is out; twice" in str(caught.value)


def test_named_backend_never_falls_back(qkv):
    q = qkv[0].astype(jnp.float64) if jax.config.jax_enable_x64 else qkv[0]
    with pytest.raises(jaxcap.BackendError, match="'cudnn' cannot run the forward.*sm80"):
        jaxcap.dot_product_attention(q, *qkv[1:], implementation="cudnn")


@pytest.mark.parametrize("name", ["flash", "", 3])
def test_unknown_backend(name, qkv):
    with pytest.raises(ValueError, match="implementation.*no backend.*xla"):
        jaxcap.dot_product_attention(*qkv, implementation=name)
    with pytest.raises(ValueError, match="use_backend.*no backend.*xla"), jaxcap.use_backend(name):
        pass


def test_order_of_requests(monkeypatch):
    env = dataclasses.replace(environment.ENVIRONMENT, backend="blockwise")
    monkeypatch.setattr(selection, "ENVIRONMENT", env)
    assert selection.requested(None) == "blockwise"
    with jaxcap.use_backend("cudnn"):
        assert selection.requested(None) == "cudnn"
        assert selection.requested("xla") == "xla"
        with jaxcap.use_backend(None):
            assert selection.requested(None) is None
        assert selection.requested("auto") is None
    assert selection.requested(None) == "blockwise"


def test_use_backend_retraces_jit(qkv):
    q, k, v = qkv
    run = jax.jit(lambda q: jaxcap.dot_product_attention(q, k, v, softcap=5.0))
    run(q)
    with jaxcap.use_backend("cudnn"), pytest.raises(jaxcap.BackendError, match="cudnn"):
        run(q)
    run(q)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAXCAP_LOG", "loud"),
        ("JAXCAP_FLASH_ATTN_V3", "off"),
        ("JAXCAP_DETERMINISTIC", "maybe"),
    ],
)
def test_unknown_environment_value(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        environment.Environment.read({name: value})


def test_environment_values():
    read = environment.Environment.read
    assert read({}) == environment.Environment()
    assert read({"JAXCAP_FLASH_ATTN_V3": "0", "JAXCAP_FLASH_ATTN_V2": "1"}).steered_off == ("fa3",)
    assert read({"JAXCAP_DETERMINISTIC": "1"}).deterministic
    assert read({"JAXCAP_LOG": "DEBUG"}).log == "debug"
    assert read({"JAXCAP_BACKEND": "xla"}).backend == "xla"


def test_flash_attention_is_steered_off(monkeypatch):
    backend = Fake("fa3")
    selection.register(backend)
    try:
        assert selection.decide(spec(platform="cpu")).backend == "fa3"
        env = dataclasses.replace(environment.ENVIRONMENT, steered_off=("fa3",))
        monkeypatch.setattr(selection, "ENVIRONMENT", env)
        decision = selection.decide(spec(platform="cpu"))
        assert decision.backend != "fa3"
        assert decision.reasons["fa3"] == ("switched off by JAXCAP_FLASH_ATTN_V3=0",)
        assert selection.decide(spec(platform="cpu"), "fa3").backend == "fa3"  # named: served
    finally:
        selection.unregister("fa3")


def test_variables_reach_a_fresh_process():
    code = (
        "import jax.numpy as jnp, jaxcap\n"
        "q = jnp.ones((1, 4, 1, 8))\n"
        "jaxcap.dot_product_attention(q, q, q, softcap=2.0)\n"
        "jaxcap.dot_product_attention(q, q, q, softcap=2.0)\n"
    )
    env = {**os.environ, "JAXCAP_BACKEND": "xla", "JAXCAP_LOG": "debug"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stderr.splitlines()
    assert sum("jaxcap: xla runs the forward" in line for line in lines) == 2  # info and debug
    assert any("cudnn" in line and "cannot" in line for line in lines)
    env = {**os.environ, "JAXCAP_BACKEND": "flash"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode != 0
    assert "JAXCAP_BACKEND: no backend 'flash'" in run.stderr


def test_log_once_a_spec(qkv, caplog):
    marks.forget_reports()
    with caplog.at_level(logging.INFO, "jaxcap"):
        for _ in range(3):
            jaxcap.dot_product_attention(*qkv, softcap=7.0, implementation="xla")
        assert [r.getMessage() for r in caplog.records] == [
            "xla runs the forward: q [2, 8, 4, 16], kv [8, 2, 16], float32, softcap 7, on cpu"
        ]


def test_explain_is_a_table_and_an_object(qkv):
    found = jaxcap.explain(*qkv, softcap=50.0, is_causal=True)
    assert found.forward.backend in selection.backends()
    assert found.training.spec.gradients == ("query", "key", "value")
    text = str(found)
    assert "softcap 50" in text
    for name in selection.backends():
        assert name in text
    assert "cuDNN has no soft cap" in text
    with_bias = jaxcap.explain(*qkv, bias=jnp.zeros((1, 4, 8, 8)))
    assert "bias" in with_bias.training.spec.gradients
    only = jaxcap.explain(*qkv, gradients=("key",), implementation="xla")
    assert only.training.spec.gradients == ("key",)
    assert "asked for by name" in str(only)
    with pytest.raises(ValueError, match="gradients must be of"):
        jaxcap.explain(*qkv, gradients=("mask",))
    with pytest.raises(TypeError, match=r"gradients must be a tuple.*\('key',\)"):
        jaxcap.explain(*qkv, gradients="key")  # pyright: ignore[reportArgumentType]


def test_explain_other_platform_and_shapes():
    q = jax.ShapeDtypeStruct((2, 8192, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)
    found = jaxcap.explain(q, k, k, is_causal=True, platform="sm80", implementation="cudnn")
    assert found.forward.backend == "cudnn"
    found = jaxcap.explain(q, k, k, is_causal=True, platform="cpu")
    assert found.forward.backend == "blockwise"


def test_register_checks_its_argument():
    with pytest.raises(ValueError, match="needs name, reasons and forward"):
        selection.register(object())
