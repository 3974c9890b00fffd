"""The long-context example: one device's losses on a mesh, with nothing gathered."""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from examples.long_context import train as example
from examples.long_context.parallel import AXES, Layout, shardings

SMALL = ["--length", "64", "--steps", "2", "--data", "2"]


def prepared(*words):
    return example.prepare(example.parser().parse_args([*SMALL, *words]))


def test_losses_are_those_of_one_device():
    """On data x context x tensor, in the zigzag layout, forward, backward and optimizer."""
    settings, layout, text = prepared("--devices", "8", "--context", "2", "--tensor", "2")
    config = settings.config.replace(layers=2, width=32, mlp_width=32, head_size=8, window=24)
    settings = dataclasses.replace(settings, config=config)
    run, alone = example.Run(settings, layout), example.Run(settings, Layout())
    assert (run.parallel.kind, run.parallel.head_axis, alone.parallel) == ("ring", "tensor", None)
    assert "ring over 'context'" in run.attention()
    batches = list(example.batches(settings, layout, text))

    # The sequence never comes together, and no parameter either.
    run.step = run.step.lower(run.state, *run.arrays(batches[0])).compile()
    found = set(re.findall(r"\b(all-gather|all-to-all|collective-permute)\b", run.step.as_text()))
    assert found == {"collective-permute"}

    losses = np.array([[one.train(windows) for one in (run, alone)] for windows in batches])
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-5)
    assert abs(losses[0, 0] - losses[1, 0]) > 1e-3  # the second step has learned from the first
    for x, y in zip(*(jax.tree.leaves(one.state.parameters) for one in (run, alone)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-4)


def test_layout_orders_tokens_as_the_model_is_told():
    layout = Layout(context=4)
    parallel = layout.context_parallel(layout.mesh())
    tokens = np.arange(64).reshape(1, 64)
    np.testing.assert_array_equal(layout.ordered(tokens)[0], parallel.positions(64))
    assert not np.array_equal(layout.ordered(tokens), tokens)
    hybrid = Layout(context=2, exchange=2, kind="hybrid")
    parallel = hybrid.context_parallel(hybrid.mesh())
    np.testing.assert_array_equal(hybrid.ordered(tokens)[0], parallel.positions(64))


def test_batches_are_those_of_one_device():
    settings, layout, text = prepared("--devices", "4", "--context", "2", "--accumulate", "3")
    first, second = example.batches(settings, layout, text)
    assert first.shape == (3, 2, 65)
    assert not np.array_equal(first, second)
    inputs, targets = (layout.ordered(x) for x in (first[..., :-1], first[..., 1:]))
    order = layout.ordered(np.arange(64))
    np.testing.assert_array_equal(targets, first[..., order + 1])
    np.testing.assert_array_equal(inputs, first[..., order])


def test_parameters_are_split_over_tensor():
    settings, layout, _ = prepared("--devices", "4", "--context", "1", "--tensor", "2")
    mesh = layout.mesh()
    shapes = jax.eval_shape(lambda: example.initial(settings).parameters)
    named = jax.tree.leaves_with_path(shardings(mesh, shapes))
    split = {jax.tree_util.keystr(path): place.spec for path, place in named}
    assert {name for name, spec in split.items() if "tensor" not in spec} == {
        name for name in split if "norm" in name
    }
    for name, spec in split.items():
        if "'down'" in name or "'out'" in name:
            assert spec[-2] == "tensor" and spec[-1] is None


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--devices", "9"], "--devices must be at most"),
        (["--devices", "8", "--context", "2"], "--devices is 8, but 2 data x 2 context are 4"),
        (
            ["--devices", "4", "--length", "62"],
            "length must be a multiple of 4 on 2 data x 2 context",
        ),
        (["--devices", "8", "--context", "1", "--tensor", "4"], "tensor must divide .* 2 kv_heads"),
        (["--devices", "4", "--kind", "hybrid"], "'hybrid' and an exchange above 1"),
        (["--devices", "2", "--context", "0"], "context must be at least 1"),
        (["--devices", "2", "--length", "99999999"], "longer than the"),
    ],
)
def test_bad_flags(words, match, capsys):
    with pytest.raises(SystemExit):
        example.main([*SMALL, *words])
    assert re.search(match, capsys.readouterr().err)


def test_main_says_whether_it_agrees(monkeypatch, capsys):
    losses = np.array([[3.0, 3.0], [2.5, 2.500001]])
    monkeypatch.setattr(example, "train", lambda *_, **__: losses)
    assert example.main([*SMALL, "--devices", "4"]) == 0
    assert "2.50000 on 2 data x 2 context, 2.50000 on one device" in capsys.readouterr().out
    losses[1, 0] = 2.6
    assert example.main([*SMALL, "--devices", "4"]) == 1
    losses[1, 0] = np.nan
    assert example.main([*SMALL, "--devices", "4"]) == 1
    assert set(AXES) == {"data", "context", "exchange", "tensor"}


def test_it_makes_its_own_devices():
    """Virtual ones, where nothing else has asked for some."""
    program = (
        "from examples.long_context.flags import make_devices; make_devices(3)\n"
        "import jax; print(jax.device_count())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["3"]


@pytest.mark.multigpu(2)
@pytest.mark.parametrize(("dtype", "length"), [("bfloat16", "4096"), ("float32", "512")])
def test_losses_on_two_gpus(dtype, length):
    """In float32 with a backend that is exact, in bfloat16 with what selection picks."""
    words = ["--devices", "2", "--data", "1", "--steps", "3", "--dtype", dtype]
    assert example.main([*words, "--length", length]) == 0
