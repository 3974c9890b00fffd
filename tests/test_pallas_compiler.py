"""What a process says whose JAX compiles the kernels badly."""

import warnings

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest

import jaxcap
from jaxcap import cli, device
from jaxcap.pallas import compiler


@pytest.fixture
def having(monkeypatch):
    def having(version, mapped=True):
        monkeypatch.setattr(jaxlib.version, "__version__", version)
        monkeypatch.setattr(compiler, "_mapped", lambda library: mapped)

    compiler.warn.cache_clear()
    yield having
    compiler.warn.cache_clear()


def test_only_the_versions_that_were_measured(having):
    for version in ("0.12.0", "0.12.0.1", "0.12.0.dev20261101"):
        having(version)
        assert "setmaxnreg" in str(compiler.slow())
        having(version, mapped=False)
        assert compiler.slow() is None
    for version in ("0.11.2", "0.12.1", "0.120.0", "0.13.0"):
        having(version)
        assert compiler.slow() is None


def test_a_library_is_mapped_or_not():
    assert not compiler._mapped("libnvJitLink-of-nobody")
    assert compiler._mapped("libc.so")


def test_a_call_warns_once(having, monkeypatch):
    monkeypatch.setattr(device, "platform", lambda *arrays: "sm90")

    def trace(length):  # a length of its own, or JAX would know the program
        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
        call = jax.jit(lambda x: jaxcap.dot_product_attention(x, x, x, softcap=50.0))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call.trace(x).lower(lowering_platforms=("cuda",))
        return [str(w.message) for w in seen if "libnvJitLink" in str(w.message)]

    having("0.11.2")
    assert trace(272) == []
    compiler.warn.cache_clear()
    having("0.12.0.1")
    (message,) = trace(288)
    assert "jax[cuda13]==0.11.2" in message
    assert trace(304) == []


def test_doctor_says_so(having, capsys):
    having("0.12.0.1")
    assert cli.main(["doctor"]) == 0
    assert str(compiler.slow()) in capsys.readouterr().out
    having("0.11.2")
    assert cli.main(["doctor"]) == 0
    assert "libnvJitLink" not in capsys.readouterr().out
