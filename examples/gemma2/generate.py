"""Sampling with a cache of keys and values; `python -m examples.gemma2.generate "The with"`."""

import argparse
import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .checkpoint import Run, abstract
from .config import Config
from .model import Gemma2

Array = jax.Array


@functools.partial(jax.jit, static_argnames=("graph", "count", "temperature"))
def _continue(
    graph: nnx.GraphDef, parameters: Any, prompt: Array, key: Array, count: int, temperature: float
) -> Array:
    model: Gemma2 = nnx.merge(graph, parameters)
    batch, length = prompt.shape

    def choose(logits: Array, step: Array | int) -> Array:
        if temperature == 0.0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drawn = jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)
        return drawn.astype(jnp.int32)

    logits, cache = model(prompt, cache=model.empty_cache(batch, length + count))

    def body(carry, step):
        token, cache = carry
        logits, cache = model(token[:, None], start=length + step, cache=cache)
        return (choose(logits[:, -1], step + 1), cache), token

    first = choose(logits[:, -1], 0)
    steps = jnp.arange(count - 1, dtype=jnp.int32)
    (last, _), tokens = jax.lax.scan(body, (first, cache), steps)
    return jnp.concatenate([tokens, last[None]]).T


def generate(
    config: Config,
    parameters: Any,
    prompt: Any,
    count: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
) -> np.ndarray:
    """`count` tokens after each row of `prompt` [B, T]; temperature 0.0 takes the likeliest."""
    prompt = jnp.asarray(prompt, jnp.int32)
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(f"prompt must be [B, T] with T of at least 1, got {list(prompt.shape)}")
    if count < 1:
        raise ValueError(f"at least one token must be asked for, got {count}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    key, graph = jax.random.key(seed), abstract(config)[0]
    return np.asarray(_continue(graph, parameters, prompt, key, count, float(temperature)))


class Bytes:
    """The tokenizer of the models trained here."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are no UTF-8 show as a replacement mark."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")


class Pieces:
    """Hugging Face's tokenizer of a converted model, which puts <bos> first."""

    def __init__(self, path: Path):
        try:
            self.tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
        except ImportError as error:
            raise ValueError(f"{path} needs `pip install tokenizers`") from error

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def continue_text(
    config: Config,
    parameters: Any,
    prompt: str,
    count: int,
    *,
    tokenizer: Bytes | Pieces | None = None,
    **sampling: Any,
) -> str:
    """`prompt` and `count` tokens more."""
    tokenizer = tokenizer or Bytes()
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ValueError("the prompt must not be empty")
    more = generate(config, parameters, [tokens], count, **sampling)[0]
    return tokenizer.decode(tokens + more.tolist())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.gemma2.generate", description=__doc__)
    parser.add_argument("prompt", nargs="?", default='The "with" statement')
    parser.add_argument("--out", default="runs/gemma2", metavar="FOLDER", help="of the model")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0: likeliest")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--backend", metavar="NAME", help="of attention (default: jaxcap chooses)")
    flags = parser.parse_args(arguments)
    try:
        run = Run(flags.out)
        config = run.config.replace(backend=flags.backend)
        pieces = run.folder / "tokenizer.json"
        text = continue_text(
            config,
            run.parameters(config),
            flags.prompt,
            flags.tokens,
            tokenizer=Pieces(pieces) if pieces.exists() else Bytes(),
            temperature=flags.temperature,
            seed=flags.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    print(text)


if __name__ == "__main__":
    main()
