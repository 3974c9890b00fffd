"""`MultiHeadAttention` for Linen: Flax's names and parameters, with a cap, GQA, RoPE and sinks."""

import dataclasses
import functools
from typing import Any, Unpack

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxcap.linen.attention import DotProductAttention
from jaxcap.modules import common, kv_cache, rope
from jaxcap.spec import Alignment, Array


class MultiHeadAttention(nn.Module):
    """Multi-head attention with a cap, in the names and parameters of Flax's Linen module.

    Attributes:
      num_heads: query heads N.
      dtype: of the computation; None infers. param_dtype: of the parameters.
      qkv_features: N * H; None is the size of inputs_q.
      out_features: size of the output's last axis; None is that of inputs_q.
      broadcast_dropout: drop the same entries for all batch entries and heads.
      dropout_rate: share of the probabilities dropped, in [0, 1).
      deterministic: True switches dropout off.
      precision: of the projections, and of attention where a backend can honour it, or an error.
      kernel_init, out_kernel_init, bias_init, out_bias_init: of the parameters;
        `nn.with_partitioning` around them shards these. An "out" of None is the other.
      use_bias: in the projections.
      decode: append to the cache and attend to all of it, causally.
      normalize_qk: layer-normalise queries and keys.
      num_kv_heads: key and value heads K, of which N is a multiple; None is N.
      softcap: the cap, a Python number; None or 0.0 is none.
      scale, is_causal, causal_alignment, local_window_size, layer_number, apply_qk_layer_scaling,
        implementation, deterministic_backward, context_parallel: as in `DotProductAttention`.
      softmax_type: "vanilla", "off-by-one" (a sink of 0) or "learnable" (a parameter, one a head).
      enable_rotary_pos_emb: rotate queries and keys by their positions.
      rotary_pos_emb_windows: smallest and largest time scale in positions; (1, theta).
      rotary_pos_emb_group_method: "consecutive" or "alternate" (Gemma, Llama, `nnx.RoPE`).

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcap.linen
      >>> layer = jaxcap.linen.MultiHeadAttention(
      ...     num_heads=4, num_kv_heads=2, softcap=50.0, is_causal=True, enable_rotary_pos_emb=True)
      >>> x = jnp.ones((2, 6, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x, softcap=30.0).shape
      (2, 6, 16)
      >>> prompt, cache = layer.apply(
      ...     variables, x, decode=True, max_decode_length=8, mutable=["cache"])
      >>> layer.apply({**variables, **cache}, x[:, :1], decode=True, mutable=["cache"])[0].shape
      (2, 1, 16)
    """

    num_heads: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = initializers.zeros
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    decode: bool = False
    normalize_qk: bool = False
    num_kv_heads: int | None = None
    softcap: float | None = None
    scale: float | None = None
    is_causal: bool = False
    causal_alignment: Alignment = "top_left"
    local_window_size: common.Window = None
    softmax_type: str = "vanilla"
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[float, float] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    layer_number: int | None = None
    apply_qk_layer_scaling: bool = False
    implementation: str | None = None
    deterministic_backward: bool | None = None
    context_parallel: Any = None

    def __post_init__(self) -> None:
        common.Settings.of(self)  # raises
        common.check_softmax_type(self.softmax_type)
        common.check_heads(self.num_heads, self.num_kv_heads or self.num_heads)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        softcap: float | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        max_decode_length: int | None = None,
        is_causal: bool | None = None,
        input_positions: Array | None = None,
        kv_input_positions: Array | None = None,
        **arrays: Unpack[common.Arrays],
    ) -> Array:
        """Project, attend, project.

        Args:
          inputs_q: `[.., T, features]`.
          inputs_k: `[.., S, features]`; None is inputs_q.
          inputs_v: `[.., S, features]`; None is inputs_k.
          softcap: None is the constructor's, 0.0 none.
          mask: broadcastable to `[.., N, T, S]`, of any dtype; zero masks. S is the cache's length
            while decoding.
          bias: broadcastable to `[.., N, T, S]`, added outside the cap.
          deterministic: True switches dropout off; None is the constructor's.
          dropout_rng: a JAX random key, instead of one from the stream `dropout`.
          sow_weights: True raises: a fused kernel has no weights.
          decode: None is the constructor's. `init` makes a cache as long as its inputs, as in Flax;
            max_decode_length makes one of so many tokens where there is none.
          is_causal: None is the constructor's.
          input_positions: `[T]` or `[.., T]`, the angles of the queries, and of the keys where
            inputs_k is None; None counts from 0, or from the cache's tokens.
          kv_input_positions: `[S]` or `[.., S]`, the angles of the keys.
          **arrays: lengths, segment ids, positions, ALiBi slopes, sinks: see
            `jaxcap.dot_product_attention`.

        Returns:
          `[.., T, out_features]`; NaN where, under jit, the cache is full.
        """
        common.refuse_sowing(sow_weights)
        itself = inputs_k is None
        inputs_k, inputs_v = common.keys_and_values(inputs_q, inputs_k, inputs_v)
        features = self.qkv_features or inputs_q.shape[-1]
        if features % self.num_heads:
            raise ValueError(
                f"qkv_features ({features}) must be a multiple of num_heads ({self.num_heads})"
            )
        size = features // self.num_heads
        linear = functools.partial(
            nn.DenseGeneral,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            use_bias=self.use_bias,
            precision=self.precision,
        )
        project = functools.partial(linear, kernel_init=self.kernel_init, bias_init=self.bias_init)
        kv_heads = self.num_kv_heads or self.num_heads
        query = project((self.num_heads, size), name="query")(inputs_q)
        key = project((kv_heads, size), name="key")(inputs_k)
        value = project((kv_heads, size), name="value")(inputs_v)
        if self.normalize_qk:
            wide = common.norm_dtype(self.dtype, self.param_dtype)
            norm = functools.partial(
                nn.LayerNorm, use_bias=False, dtype=wide, param_dtype=self.param_dtype
            )
            query = norm(name="query_ln")(query.astype(wide)).astype(query.dtype)
            key = norm(name="key_ln")(key.astype(wide)).astype(key.dtype)

        decode = bool(common.inherit(self.decode, decode))
        parallel = self.context_parallel
        kv_cache.check_call(itself, decode, max_decode_length, parallel)
        cache = self._cache(key, value, max_decode_length) if decode else None
        start = None if cache is None else cache[2].value
        query, key = rope.rotate_pair(
            self, query, key, start, itself, (input_positions, kv_input_positions), parallel
        )
        sinks = None
        if self.softmax_type == "learnable":
            zeros = initializers.zeros
            sinks = self.param("sinks", zeros, (self.num_heads,), self.param_dtype)
        arrays = common.add_sinks(arrays, self.softmax_type, sinks, self.num_heads)
        if cache is not None and start is not None:
            step = kv_cache.step(cache[0].value, cache[1].value, start, key, value, arrays)
            cache[0].value, cache[1].value, cache[2].value = step[:3]
            key, value, arrays = step.key, step.value, step.arrays
        out = DotProductAttention(
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(common.Settings)},
            deterministic=self.deterministic,
            name="attention",
        )(
            query,
            key,
            value,
            bias,
            mask,
            softcap,
            is_causal=True if decode else is_causal,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            precision=self.precision,
            **arrays,
        )
        if cache is not None:
            out = kv_cache.poison(out, cache[2].value, key.shape[-3])
        return linear(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        )(out)

    def _cache(
        self, key: Array, value: Array, max_decode_length: int | None
    ) -> tuple[nn.Variable, nn.Variable, nn.Variable] | None:
        """Keys, values and tokens in the cache, made if need be; None while initializing."""
        exists = self.has_variable("cache", "cached_key")
        if not exists and max_decode_length is None and not self.is_initializing():
            raise ValueError("decode needs a cache: from init with decode, or max_decode_length")
        length = key.shape[-3] if max_decode_length is None else max_decode_length

        def zeros(x: Array) -> Array:
            return jnp.zeros((*x.shape[:-3], length, *x.shape[-2:]), x.dtype)

        cached_key = self.variable("cache", "cached_key", zeros, key)
        cached_value = self.variable("cache", "cached_value", zeros, value)
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        if self.is_initializing():
            return None
        kv_cache.check_length(cached_key.value.shape[-3], max_decode_length)
        return cached_key, cached_value, index
