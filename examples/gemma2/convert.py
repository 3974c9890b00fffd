"""Hugging Face's Gemma 2 weights for this model: `python -m examples.gemma2.convert FOLDER OUT`.

FOLDER holds `config.json`, `*.safetensors` and `tokenizer.json`, as released; nothing is fetched. The
mapping of names and shapes is plain NumPy: theirs are one matrix [out, in] a layer, ours are
[in, out], stacked over the pairs of layers.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx, traverse_util

from .checkpoint import Run, abstract
from .config import Config

Tensors = Mapping[str, np.ndarray]

KINDS = ("sliding", "full")  # layers 0, 2, .. and 1, 3, ..
OUTSIDE = {
    ("embedding",): "model.embed_tokens.weight",
    ("final_norm", "scale"): "model.norm.weight",
}
INSIDE = {
    ("attention", "query", "kernel"): "self_attn.q_proj.weight",
    ("attention", "key", "kernel"): "self_attn.k_proj.weight",
    ("attention", "value", "kernel"): "self_attn.v_proj.weight",
    ("attention", "out", "kernel"): "self_attn.o_proj.weight",
    ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
    ("mlp", "up", "kernel"): "mlp.up_proj.weight",
    ("mlp", "down", "kernel"): "mlp.down_proj.weight",
    ("pre_attention_norm", "scale"): "input_layernorm.weight",
    ("post_attention_norm", "scale"): "post_attention_layernorm.weight",
    ("pre_mlp_norm", "scale"): "pre_feedforward_layernorm.weight",
    ("post_mlp_norm", "scale"): "post_feedforward_layernorm.weight",
}
TIED = "lm_head.weight"  # some state dicts repeat the embedding under this name


def parameters_from(tensors: Tensors, config: Config) -> dict[str, Any]:
    """Our parameters, as nested dicts, from a state dict of Hugging Face's.

    Raises ValueError that names every tensor that is missing, left over or of another shape.
    """
    names = {name for _, name, _ in _places(config)}
    missing, extra = names - set(tensors), set(tensors) - names - {TIED}
    if missing or extra:
        raise ValueError(
            f"this is not a Gemma 2 of {config.layers} layers; missing: {sorted(missing) or 'none'};"
            f" left over: {sorted(extra) or 'none'}"
        )
    shapes = _shapes(config)
    found: dict[tuple[str, ...], list[np.ndarray]] = {}
    for path, name, _ in _places(config):
        tensor = np.asarray(tensors[name])
        expected = shapes[path] if path in OUTSIDE else shapes[path][1:]
        ours = tensor.T if path[-1] == "kernel" else tensor
        if ours.shape != expected:
            theirs = expected[::-1] if path[-1] == "kernel" else expected
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(theirs)}")
        found.setdefault(path, []).append(ours)
    stacked = {path: x[0] if path in OUTSIDE else np.stack(x) for path, x in found.items()}
    return traverse_util.unflatten_dict(stacked)


def tensors_from(parameters: Mapping[str, Any], config: Config) -> dict[str, np.ndarray]:
    """The converse of `parameters_from`: a state dict for Hugging Face's model."""
    flat = traverse_util.flatten_dict(dict(parameters))
    tensors = {}
    for path, name, pair in _places(config):
        ours = np.asarray(flat[path]) if pair is None else np.asarray(flat[path])[pair]
        tensors[name] = ours.T if path[-1] == "kernel" else ours
    return tensors


def _places(config: Config) -> list[tuple[tuple[str, ...], str, int | None]]:
    """Our path, their name, and the index along our first axis, of every tensor."""
    places: list[tuple[tuple[str, ...], str, int | None]]
    places = [(path, name, None) for path, name in OUTSIDE.items()]
    for layer in range(config.layers):
        pair, kind = divmod(layer, 2)
        for path, name in INSIDE.items():
            places.append((("pairs", KINDS[kind], *path), f"model.layers.{layer}.{name}", pair))
    return places


def _shapes(config: Config) -> dict[tuple[str, ...], tuple[int, ...]]:
    flat: dict[Any, Any] = traverse_util.flatten_dict(nnx.to_pure_dict(abstract(config)[1]))
    return {path: x.shape for path, x in flat.items()}


def config_from(values: Mapping[str, Any]) -> Config:
    """`Config` from the contents of Hugging Face's `config.json`."""
    if values.get("model_type") != "gemma2":
        raise ValueError(f"model_type must be 'gemma2', got {values.get('model_type')!r}")
    activation = values.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation must be 'gelu_pytorch_tanh', got {activation!r}")
    rope = values.get("rope_parameters") or {"rope_theta": values.get("rope_theta", 10_000.0)}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type must be 'default', got {rope['rope_type']!r}")
    dtype = values.get("torch_dtype") or values.get("dtype") or "bfloat16"
    try:
        return Config(
            layers=values["num_hidden_layers"],
            width=values["hidden_size"],
            mlp_width=values["intermediate_size"],
            heads=values["num_attention_heads"],
            kv_heads=values["num_key_value_heads"],
            head_size=values["head_dim"],
            window=values["sliding_window"],
            vocab_size=values["vocab_size"],
            query_pre_attn_scalar=float(values["query_pre_attn_scalar"]),
            attention_softcap=values["attn_logit_softcapping"] or 0.0,
            final_softcap=values["final_logit_softcapping"] or 0.0,
            rope_theta=float(rope["rope_theta"]),
            norm_epsilon=values["rms_norm_eps"],
            dtype=dtype,
            param_dtype=dtype,
        )
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}") from error


DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, mapped and not read: a length, a JSON header, then the data."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:start].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path.name}: {name} is {entry['dtype']}, expected {list(DTYPES)}")
        first, last = entry["data_offsets"]
        data = raw[start + first : start + last]
        if data.size != math.prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize:
            raise ValueError(f"{path} is cut off in {name}")
        tensors[name] = np.ndarray(entry["shape"], DTYPES[entry["dtype"]], data)
    return tensors


def convert(source: Path, out: Path) -> Config:
    """Writes the folder that `examples.gemma2.generate --out` reads."""
    try:
        config = config_from(json.loads((source / "config.json").read_text()))
    except OSError as error:
        raise ValueError(f"cannot read {source / 'config.json'}: {error.strerror}") from error
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors.update(read_safetensors(path))
    Run(out).import_weights(config, parameters_from(tensors, config))
    if (source / "tokenizer.json").exists():
        shutil.copy(source / "tokenizer.json", out / "tokenizer.json")
    return config


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.gemma2.convert", description=__doc__)
    parser.add_argument("folder", type=Path, help="with config.json and *.safetensors")
    parser.add_argument("out", type=Path, help="to write the checkpoint to; must not hold a run")
    flags = parser.parse_args(arguments)
    try:
        config = convert(flags.folder, flags.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"{config.parameters:,} parameters, {config.param_dtype}, written to {flags.out}")
    print(f'python -m examples.gemma2.generate --out {flags.out} "Once upon a time"')


if __name__ == "__main__":
    main()
