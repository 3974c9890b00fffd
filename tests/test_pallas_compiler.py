"""What a process says whose JAX compiles the kernels badly."""

import contextlib
import sys
import types
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
    """A process with this jaxlib, with libnvJitLink or not, and with a Hopper GPU in JAX or not."""

    def having(version, mapped=True, hopper=True):
        compiler.warn.cache_clear()
        monkeypatch.setattr(jaxlib.version, "__version__", version)
        monkeypatch.setattr(compiler, "_mapped", lambda library: mapped)
        monkeypatch.setattr(compiler, "_hopper", lambda: hopper)

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


def test_a_library_is_mapped_or_not(monkeypatch):
    assert not compiler._mapped("libnvJitLink-of-nobody")
    if sys.platform == "linux":
        assert compiler._mapped("libc.so")

    def nothing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(compiler, "open", nothing, raising=False)
    assert not compiler._mapped("libc.so")


def test_where_jax_has_a_hopper(having, monkeypatch):
    having("0.12.0.1")
    monkeypatch.undo()
    assert not compiler._hopper()
    for capability in ("8.0", "9.0"):
        gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda platform, gpu=gpu: [gpu])
        assert compiler._hopper() == (capability == "9.0")


def test_a_call_warns_once(having, monkeypatch):
    monkeypatch.setattr(device, "platform", lambda *arrays: "sm90")

    def trace(length):  # a length of its own, or JAX would know the program
        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
        call = jax.jit(lambda x: jaxcap.dot_product_attention(x, x, x, softcap=50.0))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call.trace(x)
        return [w for w in seen if "libnvJitLink" in str(w.message)]

    having("0.11.2")
    assert trace(272) == []
    having("0.13.0")
    assert trace(280) == []
    having("0.12.0.1", hopper=False)  # for another machine
    assert trace(288) == []
    having("0.12.0.1")
    (warned,) = trace(296)
    assert "jax[cuda13]==0.11.2" in str(warned.message) and warned.category is UserWarning
    assert warned.filename == __file__
    assert trace(304) == []


def test_the_first_kernel_that_pytorch_launches_warns(having, monkeypatch):
    launcher = pytest.importorskip("jaxcap.torch_bridge.launcher")
    library = types.SimpleNamespace(MosaicGpuCompile=lambda module, size: None)
    monkeypatch.setattr(launcher, "_plugin", lambda: launcher.Interface(library, True))
    monkeypatch.setattr(launcher.context, "on_device", lambda index: contextlib.nullcontext())
    having("0.12.0.1", hopper=False)  # it runs here, whatever JAX sees
    with (
        pytest.warns(UserWarning, match="libnvJitLink"),
        pytest.raises(RuntimeError, match="compile"),
    ):
        launcher.load(b"no kernel", 0)


@pytest.mark.parametrize("command", [["doctor"], ["explain", "--q", "1,1024,8,64"]])
def test_the_commands_say_so(having, monkeypatch, capsys, command):
    monkeypatch.setattr(device, "platform", lambda *arrays: "sm90")

    def says(*process):
        having(*process)
        assert cli.main(command) == 0
        return "libnvJitLink" in capsys.readouterr().out

    assert says("0.12.0.1")
    assert not says("0.12.0.1", True, False)
    assert not says("0.11.2")


def test_on_a_cpu_explain_has_nothing_to_say(having, capsys):
    having("0.12.0.1")
    assert cli.main(["explain", "--q", "1,1024,8,64", "--platform", "cpu"]) == 0
    assert "libnvJitLink" not in capsys.readouterr().out
