"""The decoder: pairs of a sliding-window and a global layer, both with capped attention.

Letters: B batch, T tokens, M = B * T, S places in the cache, L pairs of layers, D width, V
vocabulary, N query heads, K key/value heads, H head size. The residual stream is [M, D]: with
[B, T, D], XLA on CPU transposes copies for the weights' gradients, and the MLP takes twice as long.

Source: "Gemma 2: Improving Open Language Models at a Practical Size", arXiv:2408.00118.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcap

from .config import Config

Array = jax.Array


class Cache(NamedTuple):
    """Keys and values of the tokens so far, rotated; places not yet written hold zeros."""

    key: Array  # [B, S, K, H]; [L, B, S, K, H] for all pairs
    value: Array


class PairCache(NamedTuple):
    sliding: Cache
    full: Cache


#: Larger vocabularies are gathered from, see `look_up`.
LARGEST_PRODUCT = 4096


def look_up(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """`table[tokens]` in dtype, [M, D], of a table [V, D]: the same values if all are finite and tokens < V.

    Up to `LARGEST_PRODUCT` rows a product with one-hot rows, a sum of one term; its gradient is rounded to
    dtype once, as that of the model's other products. A gather's adds to the table's rows by atomics, in
    turn where tokens are equal: 16,384 bytes among 256 rows kept an H200 busy for 21 to 60 ms a step, in
    which all else took 8. Gemma 2's 256,000 pieces are gathered: they collide less, and the product would
    cost as much as the logits.
    """
    if len(table) > LARGEST_PRODUCT:
        return table[tokens].astype(dtype)  # in this order: gradients add up in the table's dtype
    rows = jax.nn.one_hot(tokens, len(table), dtype=dtype)
    # By default a GPU would round float32 to TF32.
    return jnp.dot(rows, table.astype(dtype), precision=jax.lax.Precision.HIGHEST)


def softcap(logits: Array, cap: float) -> Array:
    return cap * jnp.tanh(logits / cap) if cap else logits


def rope(x: Array, positions: Array, theta: float) -> Array:
    """Rotates the pairs (x[h], x[h + H/2]) of x [B, T, N, H] by positions [T] * theta^(-2h/H)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[None, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`x / rms(x) * (1 + scale)` in float32."""

    def __init__(self, config: Config):
        self.scale = nnx.Param(jnp.zeros(config.width, config.param_dtype))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        scale = 1.0 + self.scale[...].astype(jnp.float32)
        return (wide * scale[None, :]).astype(x.dtype)


def linear(inputs: int, outputs: int, config: Config, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Attention(nnx.Module):
    def __init__(
        self, config: Config, *, sliding: bool, rngs: nnx.Rngs, context_parallel: Any = None
    ):
        self.config, self.context_parallel = config, context_parallel
        self.window = (config.window - 1, 0) if sliding else None
        queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        self.query = linear(config.width, queries, config, rngs)
        self.key = linear(config.width, keys, config, rngs)
        self.value = linear(config.width, keys, config, rngs)
        self.out = linear(queries, config.width, config, rngs)

    def __call__(self, x: Array, batch: int, start: Array | int, cache: Cache | None):
        c, parallel, length = self.config, self.context_parallel, x.shape[0] // batch
        places = jnp.arange(length, dtype=jnp.int32)
        if parallel is not None:
            places = jnp.asarray(parallel.positions(length))
        positions = start + places
        query = self.query(x).reshape(batch, length, c.heads, c.head_size)
        key = self.key(x).reshape(batch, length, c.kv_heads, c.head_size)
        value = self.value(x).reshape(batch, length, c.kv_heads, c.head_size)
        query, key = rope(query, positions, c.rope_theta), rope(key, positions, c.rope_theta)
        where: dict[str, Any] = {}
        if cache is not None:
            key = jax.lax.dynamic_update_slice_in_dim(cache.key, key, start, axis=1)
            value = jax.lax.dynamic_update_slice_in_dim(cache.value, value, start, axis=1)
            cache = Cache(key, value)
            # Causality hides the places that are not yet written: they lie after every query.
            keys = jnp.arange(key.shape[1], dtype=jnp.int32)
            where = {"query_positions": positions, "key_value_positions": keys}
        attended = jaxcap.dot_product_attention(
            query,
            key,
            value,
            softcap=c.attention_softcap,
            scale=c.attention_scale,
            is_causal=True,
            local_window_size=self.window,
            implementation=c.backend,
            context_parallel=parallel,
            **where,
        )
        return self.out(attended.reshape(x.shape[0], -1)), cache


class MLP(nnx.Module):
    """GeGLU: `down(gelu(gate(x)) * up(x))`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.gate = linear(config.width, config.mlp_width, config, rngs)
        self.up = linear(config.width, config.mlp_width, config, rngs)
        self.down = linear(config.mlp_width, config.width, config, rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class Layer(nnx.Module):
    """Attention, then MLP, each between two norms and around a residual."""

    def __init__(
        self, config: Config, *, sliding: bool, rngs: nnx.Rngs, context_parallel: Any = None
    ):
        self.attention = Attention(
            config, sliding=sliding, rngs=rngs, context_parallel=context_parallel
        )
        self.mlp = MLP(config, rngs=rngs)
        self.pre_attention_norm, self.post_attention_norm = RMSNorm(config), RMSNorm(config)
        self.pre_mlp_norm, self.post_mlp_norm = RMSNorm(config), RMSNorm(config)

    def __call__(self, x: Array, batch: int, start: Array | int, cache: Cache | None):
        attended, cache = self.attention(self.pre_attention_norm(x), batch, start, cache)
        x += self.post_attention_norm(attended)
        x += self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))
        return x, cache


class Pair(nnx.Module):
    """A sliding-window layer and a global one."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, context_parallel: Any = None):
        shared = {"rngs": rngs, "context_parallel": context_parallel}
        self.sliding = Layer(config, sliding=True, **shared)
        self.full = Layer(config, sliding=False, **shared)

    def __call__(self, x: Array, batch: int, start: Array | int, cache: PairCache | None):
        sliding, full = cache if cache is not None else (None, None)
        x, sliding = self.sliding(x, batch, start, sliding)
        x, full = self.full(x, batch, start, full)
        return x, None if sliding is None or full is None else PairCache(sliding, full)


class Gemma2(nnx.Module):
    """Tokens [B, T] to logits [B, T, vocabulary], float32.

    The parameters of all pairs are stacked along a first axis, with `scan_layers` and without, so
    that a checkpoint of one loads into the other. With a `jaxcap.ContextParallel` the tokens come in
    its layout, and no cache.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, context_parallel: Any = None):
        self.config = config
        shape = (config.vocab_size, config.width)
        embedding = jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype))
        self.embedding = nnx.Param(embedding * config.width**-0.5)
        self.final_norm = RMSNorm(config)
        make = nnx.vmap(lambda rngs: Pair(config, rngs=rngs, context_parallel=context_parallel))
        self.pairs = make(rngs.split(config.layers // 2))

    def __call__(
        self, tokens: Array, *, start: Array | int = 0, cache: PairCache | None = None
    ) -> tuple[Array, PairCache | None]:
        """Logits and, if one was given, the cache with these tokens written from place `start` on."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        table = self.embedding[...]
        x = look_up(table, tokens.reshape(-1), dtype) * jnp.asarray(c.width**0.5, dtype)

        structure, stacked = nnx.split(self.pairs)

        def body(x: Array, scanned):
            parameters, cache = scanned
            return nnx.merge(structure, parameters)(x, len(tokens), start, cache)

        if c.remat:
            body = jax.checkpoint(body)
        x, cache = jax.lax.scan(body, x, (stacked, cache), unroll=not c.scan_layers)

        x = self.final_norm(x)
        table = table.astype(dtype)
        logits = jnp.einsum("md,vd->mv", x, table, preferred_element_type=jnp.float32)
        return softcap(logits, c.final_softcap).reshape(*tokens.shape, -1), cache

    def empty_cache(self, batch: int, places: int) -> PairCache:
        """Room for `places` tokens in every layer."""
        c = self.config
        shape = (c.layers // 2, batch, places, c.kv_heads, c.head_size)
        zeros = jnp.zeros(shape, jnp.dtype(c.dtype))
        return PairCache(Cache(zeros, zeros), Cache(zeros, zeros))
