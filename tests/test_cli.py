"""`jaxcap explain` and `jaxcap doctor`, called as a shell would."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxcap import cli, selection

ROOT = Path(__file__).parent.parent
GEMMA = ["explain", "--q", "2,8192,32,128", "--kv-heads", "16", "--softcap", "50", "--causal"]


def record(capsys, *arguments: str, status: int = 0) -> dict:
    assert cli.main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_explain_prints_every_backend_and_the_decision(capsys):
    assert cli.main([*GEMMA, "--platform", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "[2, 8192, 32, 128]" in printed
    assert "softcap 50" in printed
    assert "forward: blockwise" in printed
    for name in selection.backends():
        assert name in printed


def test_explain_json_has_spec_and_reasons(capsys):
    found = record(capsys, *GEMMA, "--platform", "sm90", "--kv-len", "4096", "--v-dim", "64")
    assert found["spec"]["kv_heads"] == 16
    assert found["spec"]["key_length"] == 4096
    assert found["spec"]["value_size"] == 64
    assert found["spec"]["softcap"] == 50.0
    assert found["spec"]["platform"] == "sm90"
    assert set(found["forward"]["reasons"]) == set(selection.backends())
    assert found["forward"]["reasons"]["cudnn"]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ([], "window", None),
        (["--window", "4095,0"], "window", [4095, 0]),
        (["--window", "none,0"], "window", [None, 0]),
        (["--window", "7"], "window", [7, 7]),
        (["--bottom-right"], "causal_alignment", "bottom_right"),
        (["--dtype", "float16"], "dtype", "float16"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--bias", "1,32,1,8192"], "bias_shape", [1, 32, 1, 8192]),
        (["--mask", "2,1,8192,8192"], "mask_shape", [2, 1, 8192, 8192]),
        (["--lengths"], "kv_lengths", True),
        (["--segments"], "segment_ids", True),
        (["--positions"], "query_positions", True),
        (["--alibi"], "alibi", True),
        (["--sinks"], "sinks", True),
        (["--dropout", "0.1"], "dropout_rate", 0.1),
        (["--residual"], "return_residual", True),
        (["--deterministic"], "deterministic", True),
        (["--scale", "0.25"], "scale", 0.25),
        (["--layer-scale", "4"], "layer_scale", 4.0),
    ],
)
def test_explain_option_reaches_the_spec(capsys, arguments, field, value):
    found = record(capsys, *GEMMA, "--platform", "cpu", *arguments)
    assert found["spec"][field] == value


def test_explain_window_reads_as_dot_product_attention_does(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*GEMMA, "--window", "1,2,3"])
    assert caught.value.code == 2
    assert "LEFT,RIGHT" in capsys.readouterr().err


def test_explain_gradients_are_those_asked_for(capsys):
    options = ["--platform", "cpu", "--bias", "1,1,1,8192"]
    every = record(capsys, *GEMMA, *options)
    some = record(capsys, *GEMMA, *options, "--gradients", "query,key")
    assert every["training"]["backend"]
    assert some["training"]["backend"]
    assert cli.main([*GEMMA, *options, "--gradients", "kwery"]) == 2
    assert "kwery" in capsys.readouterr().err


def test_a_named_backend_that_cannot_is_status_1_with_its_reasons(capsys):
    found = record(capsys, *GEMMA, "--platform", "sm90", "--backend", "cudnn", status=1)
    assert found["forward"]["backend"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--kv-heads", "5"], "multiple"),
        (["--softcap", "-1"], "softcap"),
        (["--softcap", "nan"], "softcap"),
        (["--dtype", "int8"], "int8"),
        (["--dropout", "1.5"], "dropout_rate"),
        (["--backend", "flash9000"], "flash9000"),
        (["--bias", "3,1,1,1"], "bias"),
        (["--positions", "--bottom-right"], "bottom_right"),
    ],
)
def test_a_wrong_call_is_the_error_of_the_function(capsys, changes, words):
    assert cli.main([*GEMMA, "--platform", "cpu", *changes]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["2,3", "2,8,4,x", "0,8,4,16"])
def test_a_wrong_shape_is_a_usage_error(capsys, shape):
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", "--q", shape])
    assert caught.value.code == 2
    assert "--q" in capsys.readouterr().err


def test_doctor_names_versions_devices_and_every_backend(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for words in ("jaxcap 0.1.0", "jax ", "jaxlib ", "flax ", "devices", "environment:"):
        assert words in printed
    for name in selection.backends():
        assert name in printed
    assert "without a cap" in printed


def test_doctor_says_what_is_wrong_with_the_environment():
    done = subprocess.run(
        [sys.executable, "-m", "jaxcap.cli", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAXCAP_BACKEND": "palas"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("jaxcap doctor: JAXCAP_BACKEND: no backend 'palas'")
    assert "Traceback" not in done.stderr


def test_doctor_imports_neither_torch_nor_triton():
    code = """
import sys
from jaxcap import cli
cli.main(["doctor"])
assert not {"torch", "triton", "flash_attn", "flash_attn_interface"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bench_is_there(capsys):
    assert cli.main(["bench", "--q", "oops"]) == 2
    assert "--q" in capsys.readouterr().err


def test_console_script_is_this_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jaxcap": "jaxcap.cli:main"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxcap.cli", "explain", "--q", "1,64,4,32", "--softcap", "50"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "blockwise" in done.stdout
