"""The example in examples/gemma2: its numbers, its training, its command lines."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcap
from examples.gemma2 import checkpoint, compare, convert, data, generate, model, report, train
from examples.gemma2.config import PRESETS, Config
from examples.gemma2.model import Gemma2
from jaxcap import marks

ROOT = Path(__file__).resolve().parent.parent

# Caps near the logits' size, so that both bite; a window shorter than the text.
SMALL = Config(
    layers=4,
    width=16,
    mlp_width=24,
    heads=4,
    kv_heads=2,
    head_size=8,
    window=3,
    vocab_size=50,
    query_pre_attn_scalar=5.0,
    attention_softcap=1.5,
    final_softcap=2.0,
)
TOLERANCE = 2e-5


def random_tensors(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """A state dict as Hugging Face names it, norms and all drawn at random."""
    rng = np.random.default_rng(seed)
    d, h = config.width, config.head_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, d), "model.norm.weight": (d,)}
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (config.heads * h, d),
            at + "self_attn.k_proj.weight": (config.kv_heads * h, d),
            at + "self_attn.v_proj.weight": (config.kv_heads * h, d),
            at + "self_attn.o_proj.weight": (d, config.heads * h),
            at + "mlp.gate_proj.weight": (config.mlp_width, d),
            at + "mlp.up_proj.weight": (config.mlp_width, d),
            at + "mlp.down_proj.weight": (d, config.mlp_width),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[at + norm + "_layernorm.weight"] = (d,)
    return {
        name: (rng.normal(size=shape) * (0.5 if len(shape) == 2 else 0.3)).astype(np.float32)
        for name, shape in shapes.items()
    }


def oracle(
    tensors: dict[str, np.ndarray],
    config: Config,
    tokens: np.ndarray,
    *,
    uncapped: int | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> np.ndarray:
    """Logits [B, T, vocabulary] in float64, straight from the tensors; one layer may go uncapped."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    c, (batch, length) = config, tokens.shape
    windows = windows or (c.window, None) * (c.layers // 2)
    position = np.arange(length)
    distance = position[:, None] - position[None, :]

    def norm(x, name):
        rms = np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon)
        return x / rms * (1 + w[name])

    def rotate(x):
        half = c.head_size // 2
        angle = position[:, None] * c.rope_theta ** (-np.arange(half) / half)
        turn = np.exp(1j * angle)[None, :, None, :]
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def cap(x, limit):
        return limit * np.tanh(x / limit) if limit else x

    table = w["model.embed_tokens.weight"]
    x = table[tokens] * math.sqrt(c.width)
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (y @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(batch, length, -1, c.head_size)
            for name in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(z, c.heads // c.kv_heads, axis=2) for z in (k, v))
        logits = np.einsum("btnh,bsnh->bnts", q, k) * c.attention_scale
        logits = cap(logits, 0.0 if layer == uncapped else c.attention_softcap)
        keep = distance >= 0
        if windows[layer] is not None:
            keep = keep & (distance < windows[layer])
        logits = np.where(keep, logits, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y = np.einsum("bnts,bsnh->btnh", p, v).reshape(batch, length, -1)
        y = y @ w[at + "self_attn.o_proj.weight"].T
        x = x + norm(y, at + "post_attention_layernorm.weight")
        y = norm(x, at + "pre_feedforward_layernorm.weight")
        gated = gelu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        y = gated @ w[at + "mlp.down_proj.weight"].T
        x = x + norm(y, at + "post_feedforward_layernorm.weight")
    logits = norm(x, "model.norm.weight") @ table.T
    return cap(logits, 0.0 if uncapped == c.layers else c.final_softcap)


def model_of(tensors: dict[str, np.ndarray], config: Config) -> Gemma2:
    model = Gemma2(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(
        state, jax.tree.map(jnp.asarray, convert.parameters_from(tensors, config))
    )
    nnx.update(model, state)
    return model


def logits_of(model: Gemma2, tokens: np.ndarray) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda s, t: nnx.merge(graph, s)(t)[0])(state, tokens))


TOKENS = np.random.default_rng(1).integers(0, SMALL.vocab_size, (2, 10)).astype(np.int32)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(SMALL)


@pytest.fixture(scope="module")
def logits(tensors) -> np.ndarray:
    """Of the whole model in float32, with a default configuration of layers."""
    return logits_of(model_of(tensors, SMALL), TOKENS)


def test_whole_model_against_float64(tensors, logits):
    np.testing.assert_allclose(logits, oracle(tensors, SMALL, TOKENS), atol=TOLERANCE)


@pytest.mark.parametrize("layer", range(SMALL.layers + 1))
def test_cap_reaches_every_layer_and_the_final_logits(tensors, logits, layer):
    without = oracle(tensors, SMALL, TOKENS, uncapped=layer)
    assert np.abs(without - logits).max() > 100 * TOLERANCE


@pytest.mark.parametrize("layer", range(SMALL.layers))
def test_sliding_and_global_layers_alternate(tensors, logits, layer):
    windows: list[int | None] = [SMALL.window, None] * (SMALL.layers // 2)
    windows[layer] = None if windows[layer] else SMALL.window
    swapped = oracle(tensors, SMALL, TOKENS, windows=tuple(windows))
    assert np.abs(swapped - logits).max() > 100 * TOLERANCE


def test_caps_switch_off(tensors, logits):
    config = SMALL.replace(attention_softcap=0.0, final_softcap=0.0)
    off = logits_of(model_of(tensors, config), TOKENS)
    assert np.abs(off - logits).max() > 100 * TOLERANCE
    np.testing.assert_allclose(off, oracle(tensors, config, TOKENS), atol=10 * TOLERANCE)


def test_the_final_cap_bounds_the_logits(logits):
    assert np.abs(logits).max() < SMALL.final_softcap


def test_what_attention_receives(tensors, monkeypatch):
    calls = []
    attend = jaxcap.dot_product_attention

    def spy(*arrays, **keywords):
        calls.append(keywords)
        return attend(*arrays, **keywords)

    monkeypatch.setattr(jaxcap, "dot_product_attention", spy)
    jax.eval_shape(model_of(tensors, SMALL.replace(backend="xla")), TOKENS)
    assert [call["local_window_size"] for call in calls[:2]] == [(SMALL.window - 1, 0), None]
    assert {call["softcap"] for call in calls} == {SMALL.attention_softcap}
    assert {call["scale"] for call in calls} == {5.0**-0.5}
    assert {call["implementation"] for call in calls} == {"xla"}


def test_scan_remat_and_gather_change_nothing(tensors, monkeypatch):
    def gradients(**changes):
        graph, state = nnx.split(model_of(tensors, SMALL.replace(**changes)))
        loss = train.loss_function(graph)
        return jax.jit(jax.value_and_grad(loss))(state, TOKENS)

    first = gradients(scan_layers=True)
    monkeypatch.setattr(model, "LARGEST_PRODUCT", 0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4),
        first,
        gradients(scan_layers=False, remat=True),
    )


@pytest.mark.parametrize("rows", [0, model.LARGEST_PRODUCT], ids=["gathered", "multiplied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tokens_are_looked_up_exactly(dtype, rows, monkeypatch):
    """And the gradients of equal tokens add up without a rounding each."""
    monkeypatch.setattr(model, "LARGEST_PRODUCT", rows)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(6, 8)) * 10.0 ** np.arange(-3, 3)[:, None], jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 5, 4096), jnp.int32)
    look_up = lambda t: model.look_up(t, tokens, jnp.dtype(dtype))  # noqa: E731
    found, pullback = jax.vjp(jax.jit(look_up), table)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(table.astype(dtype))[tokens])
    d_out = jnp.asarray(rng.uniform(1, 2, found.shape), dtype)
    expected = np.zeros(table.shape)
    np.add.at(expected, np.asarray(tokens), np.asarray(d_out, np.float64))
    (gradient,) = pullback(d_out)
    np.testing.assert_allclose(gradient, expected, rtol=max(float(jnp.finfo(dtype).eps), 1e-5))


@pytest.mark.parametrize("vocabulary", [model.LARGEST_PRODUCT, model.LARGEST_PRODUCT + 1])
def test_only_a_large_vocabulary_is_scattered_to(vocabulary):
    """A small one's gradient would take a GPU longer so than all the rest of a step."""
    graph, shapes = checkpoint.abstract(SMALL.replace(layers=2, vocab_size=vocabulary))
    loss = lambda s: jnp.sum(nnx.merge(graph, s)(TOKENS)[0] ** 2)  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss)).lower(shapes).as_text()
    assert ("scatter" in step) == (vocabulary > model.LARGEST_PRODUCT)


def test_bfloat16(tensors, logits):
    half = logits_of(model_of(tensors, SMALL.replace(dtype="bfloat16")), TOKENS)
    assert half.dtype == np.float32
    assert np.abs(half - logits).max() < 0.3


def test_cached_generation_is_the_full_forward(tensors):
    config = SMALL.replace(final_softcap=30.0)
    model = model_of(tensors, config)
    parameters = nnx.state(model, nnx.Param)
    count = 8  # past the window
    got = generate.generate(config, parameters, TOKENS[:, :4], count, temperature=0.0)
    whole = np.concatenate([TOKENS[:, :4], got], axis=1)
    likeliest = logits_of(model, whole).argmax(-1)
    np.testing.assert_array_equal(got, likeliest[:, 3:-1])
    assert len(np.unique(got)) > 2


def test_sampling_follows_the_seed(tensors):
    parameters = nnx.state(model_of(tensors, SMALL), nnx.Param)
    draw = [generate.generate(SMALL, parameters, TOKENS[:1], 6, seed=s) for s in (0, 0, 1)]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert (draw[0] != draw[2]).any()


@pytest.mark.parametrize(
    ("name", "billions"), [("gemma2_2b", 2.61), ("gemma2_9b", 9.24), ("gemma2_27b", 27.2)]
)
def test_presets_have_the_released_sizes(name, billions):
    config = PRESETS[name]
    shapes = jax.tree.leaves(checkpoint.abstract(config)[1])
    assert sum(math.prod(x.shape) for x in shapes) == config.parameters
    assert config.parameters / 1e9 == pytest.approx(billions, rel=5e-3)


# Weights from elsewhere


def hugging_face_config(config: Config) -> dict:
    return {
        "model_type": "gemma2",
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "sliding_window": config.window,
        "vocab_size": config.vocab_size,
        "query_pre_attn_scalar": int(config.attention_scale**-2 + 0.5),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.final_softcap or None,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": config.dtype,
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, blob = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(blob), len(blob) + len(raw)],
        }
        blob += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)


def test_conversion_there_and_back(tensors):
    parameters = convert.parameters_from(
        {**tensors, convert.TIED: tensors["model.embed_tokens.weight"]}, SMALL
    )
    back = convert.tensors_from(parameters, SMALL)
    assert back.keys() == tensors.keys()
    for name in tensors:
        np.testing.assert_array_equal(back[name], tensors[name], err_msg=name)


def test_converted_folder_generates(tensors, tmp_path, capsys):
    source, out = tmp_path / "released", tmp_path / "converted"
    source.mkdir()
    config = SMALL.replace(vocab_size=256)
    whole = random_tensors(config)
    names = sorted(whole)
    write_safetensors(source / "model-1.safetensors", {n: whole[n] for n in names[:9]})
    write_safetensors(source / "model-2.safetensors", {n: whole[n] for n in names[9:]})
    (source / "config.json").write_text(json.dumps(hugging_face_config(config)))
    convert.main([str(source), str(out)])
    assert f"{config.parameters:,} parameters" in capsys.readouterr().out
    run = checkpoint.Run(out)
    assert run.config == config.replace(param_dtype="float32")
    restored = convert.tensors_from(nnx.to_pure_dict(run.parameters(config)), config)
    for name in whole:
        np.testing.assert_array_equal(restored[name], whole[name], err_msg=name)
    generate.main(["ab", "--out", str(out), "--tokens", "3"])
    assert capsys.readouterr().out.startswith("ab")
    with pytest.raises(SystemExit):
        convert.main([str(source), str(out)])
    assert "holds a model already" in capsys.readouterr().err


def test_conversion_names_what_is_wrong(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    without = {n: t for n, t in tensors.items() if n != name}
    with pytest.raises(ValueError, match=rf"missing: \['{name}'\]; left over: \['x'\]"):
        convert.parameters_from({**without, "x": tensors[name]}, SMALL)
    with pytest.raises(ValueError, match=rf"{name} has shape \[16, 24\], expected \[24, 16\]"):
        convert.parameters_from({**tensors, name: tensors[name].T}, SMALL)
    with pytest.raises(ValueError, match="must be 'gemma2', got 'gemma'"):
        convert.config_from({"model_type": "gemma"})
    with pytest.raises(ValueError, match="lacks 'num_hidden_layers'"):
        convert.config_from({"model_type": "gemma2"})


def test_against_transformers(tensors):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = hugging_face_config(SMALL)
    theirs = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**values, attn_implementation="eager")
    ).eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    theirs.load_state_dict({**state, convert.TIED: state["model.embed_tokens.weight"]}, strict=True)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
    config = convert.config_from(values)
    got = logits_of(model_of(tensors, config), TOKENS)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)


# The text


def test_documentation_is_english_without_repeats():
    text = data.load()
    assert len(text.train) > 100_000
    assert 2.5 < text.unigram_entropy < 4.0
    paragraphs = data.documentation().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_unigram_entropy():
    text = data.split("four letters", b"abcd" * 100)
    assert text.unigram_entropy == pytest.approx(math.log(4))


def test_batches_are_a_function_of_seed_and_step():
    text = np.arange(200, dtype=np.uint8)
    first, again, other = (data.batch(text, 0, step, 4, 8) for step in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.shape == (4, 9)
    assert (np.diff(first) == 1).all()


def test_windows_cover_the_text():
    text = np.arange(100, dtype=np.uint8)
    windows = data.windows(text, 10, at_most=100)
    np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, 91))
    assert data.windows(text, 10, at_most=3).shape == (3, 11)


# Training

MINI = "--layers 2 --width 32 --mlp-width 64 --heads 2 --kv-heads 1 --head-size 16 --window 8"
TRAINING = "--length 32 --batch 8 --steps 80 --checkpoint-every 20 --learning-rate 0.01 --seed 3"
FLAGS = [*MINI.split(), *TRAINING.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma2")
    sentence = "the cap is never dropped and the cap costs nothing said the fox to the dog"
    words = sentence.split()
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(rng.permutation(words * 40)))
    return folder


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """The folder of an uninterrupted run."""
    train.main([*FLAGS, "--data", str(folder / "text.txt"), "--out", str(folder / "whole")])
    return folder / "whole"


def losses(run: Path) -> np.ndarray:
    return np.genfromtxt(run / "losses.csv", delimiter=",", names=True)


def test_learns_far_below_the_unigram_entropy(folder, whole):
    unigram = data.load(str(folder / "text.txt")).unigram_entropy
    table = losses(whole)
    assert table["training"][0] > unigram
    assert table["validation"][-1] < 0.75 * unigram
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "sample.txt").read_text().startswith(train.PROMPT)


def test_resumes_after_a_kill_with_the_same_losses(folder, whole):
    out = folder / "killed"
    command = [sys.executable, "-W", "error", "-m", "examples.gemma2.train", *FLAGS]
    command += ["--data", str(folder / "text.txt"), "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while not (out / "checkpoints" / "20").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()
    assert not (out / "losses.csv").exists()

    train.main(["--out", str(out)])  # the settings are the folder's
    np.testing.assert_array_equal(losses(out)["training"], losses(whole)["training"])
    np.testing.assert_array_equal(losses(out)["validation"], losses(whole)["validation"])
    assert (out / "sample.txt").read_text() == (whole / "sample.txt").read_text()


def test_interrupting_saves_and_stops(folder, whole, monkeypatch, capsys):
    flags = ["--data", str(folder / "text.txt"), "--out", str(folder / "stopped")]
    with monkeypatch.context() as patch:
        patch.setattr(report.Bar, "show", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(SystemExit) as stopped:
            train.main([*FLAGS, *flags])
    assert stopped.value.code == 130
    assert "goes on from here" in capsys.readouterr().out
    train.main(flags)
    assert "resuming after step 1\n" in capsys.readouterr().out
    assert (folder / "stopped/losses.csv").read_text() == (whole / "losses.csv").read_text()


def test_the_backend_shown_is_the_one_that_runs(folder, caplog):
    text = data.load(str(folder / "text.txt"))
    for name in ("xla", "blockwise"):
        settings = train.from_flags({"preset": "tiny", "layers": 2, "backend": name}, text)
        marks.forget_reports()
        with caplog.at_level("INFO", logger="jaxcap"):
            state = jax.eval_shape(lambda settings=settings: checkpoint.initial(settings))
            windows = jax.ShapeDtypeStruct((settings.batch, settings.length + 1), jnp.int32)
            train.programs(settings)[0].lower(state, windows)
        ran = {record.getMessage().split()[0] for record in caplog.records}
        caplog.clear()
        assert ran == {name} == {report.backend(settings)}


def test_backends_compared(folder, capsys):
    """Both backends, and each with its batches rotated, learn alike."""
    out = folder / "compared"
    arguments = [*FLAGS, "--steps", "12", "--data", str(folder / "text.txt"), "--out", str(out)]
    compare.main([*arguments, "--backends", "xla,blockwise"])
    table = np.genfromtxt(out / "losses.csv", delimiter=",", skip_header=1)[:, 1:]
    assert table.shape == (12, 4)
    np.testing.assert_allclose(table, table[:, :1].repeat(4, axis=1), atol=1e-3)
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "blockwise, run 2" in printed
    assert re.search("xla and blockwise .*pairs: 4", printed)
    with pytest.raises(SystemExit):
        compare.main([*arguments, "--backend", "xla"])


def test_a_complete_run_is_kept(whole, capsys):
    before = (whole / "losses.csv").read_text()
    train.main(["--out", str(whole)])
    said = capsys.readouterr().out
    assert "this run is complete" in said
    assert "validation loss" in said
    assert (whole / "losses.csv").read_text() == before


def test_batches_split_over_devices(folder, whole):
    text, out = str(folder / "text.txt"), folder / "split"
    train.main([*FLAGS, "--data", text, "--out", str(out), "--devices", "4"])
    split, one = losses(out), losses(whole)
    np.testing.assert_allclose(split["training"][:10], one["training"][:10], rtol=1e-4)
    np.testing.assert_allclose(split["validation"][-1], one["validation"][-1], rtol=0.05)


def test_generate_continues_a_prompt(whole, capsys):
    generate.main(["the cap", "--out", str(whole), "--tokens", "20", "--temperature", "0"])
    said = capsys.readouterr().out
    assert said.startswith("the cap")
    assert len(said.rstrip("\n")) == len("the cap") + 20


def test_fresh_deletes_only_what_training_wrote(folder):
    run = checkpoint.Run(folder / "fresh")
    run.folder.mkdir()
    (run.folder / "notes.txt").write_text("mine")
    (run.folder / "checkpoints").mkdir()
    text = data.load(str(folder / "text.txt"))
    run.start(train.from_flags({"steps": 5}, text))
    assert sorted(p.name for p in run.folder.iterdir()) == ["notes.txt", "settings.json"]
    assert run.settings == train.from_flags({"steps": 5}, text)


# Bad input


def fails(main, arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(x) for x in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layers 3", "layers must be even (sliding, global, ...), got 3"),
        ("--layers 0", "layers must be at least 1, got 0"),
        ("--heads 3 --kv-heads 2", "heads must be a multiple of kv_heads, got 3 and 2"),
        ("--head-size 15", "head_size must be even (RoPE), got 15"),
        ("--steps 0", "steps must be at least 1, got 0"),
        ("--seed -1", "seed must not be negative, got -1"),
        ("--learning-rate nan", "learning_rate must be above 0, got nan"),
        ("--checkpoint-every 0", "checkpoint_every must be at least 1, got 0"),
        ("--backend nonsense", "no backend 'nonsense'"),
        ("--backend cudnn", "cuDNN has no soft cap"),
        ("--devices 3", "--devices must be at most 8 and divide the batch of 16, got 3"),
        ("--data /nowhere.txt", "cannot read the text /nowhere.txt: No such file"),
        ("--length 1000000", "a window of 1000000 + 1 bytes is longer than"),
        ("--preset huge", "invalid choice: 'huge'"),
    ],
)
def test_bad_flags_each_have_their_error(flags, message, tmp_path, capsys):
    assert message in fails(train.main, [*flags.split(), "--out", tmp_path / "run"], capsys)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_other_settings_do_not_touch_a_run(folder, whole, capsys):
    out = ["--out", whole]
    said = fails(train.main, [*out, "--steps", 90, "--preset", "small"], capsys)
    assert "steps: 80 and 90" in said
    assert "width: 32 and 384" in said
    (folder / "other.txt").write_text("quite another text " * 20)
    said = fails(train.main, [*out, "--data", folder / "other.txt"], capsys)
    assert "other settings" in said
    assert "the text" in said


def test_bad_prompts_each_have_their_error(whole, tmp_path, capsys):
    out = ["--out", whole]
    assert "holds no model" in fails(generate.main, ["a", "--out", tmp_path], capsys)
    assert "prompt must not be empty" in fails(generate.main, ["", *out], capsys)
    assert "at least one token" in fails(generate.main, ["a", *out, "--tokens", 0], capsys)
    said = fails(generate.main, ["a", *out, "--temperature", -1], capsys)
    assert "temperature must be finite" in said
    run = tmp_path / "none"
    checkpoint.Run(run).start(dataclasses.replace(checkpoint.Run(whole).settings))
    assert "has no checkpoint yet" in fails(generate.main, ["a", "--out", run], capsys)
    assert "cannot read" in fails(convert.main, [tmp_path, tmp_path / "out"], capsys)


def test_too_short_a_text():
    with pytest.raises(ValueError, match="has 3 bytes, expected at least 40"):
        data.split("x", b"abc")
