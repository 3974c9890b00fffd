"""`MultiHeadAttention` for NNX: Flax's, with a cap, RoPE, sinks and a prefillable cache."""

from typing import Any, Unpack, cast

import jax.numpy as jnp
from flax import nnx

from jaxcap.modules import common, kv_cache, rope
from jaxcap.nnx import blocks
from jaxcap.nnx.attention import DotProductAttention, Rngs
from jaxcap.spec import Alignment, Array

Cache = tuple[nnx.Cache, nnx.Cache, nnx.Cache]


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax's NNX multi-head attention, capped: its arguments, parameters and checkpoints, and more.

    Args:
      num_heads: query heads N.
      in_features: size of the inputs' last axis.
      qkv_features: N * H; None is in_features.
      out_features: size of the output's last axis; None is in_features.
      num_kv_heads: key and value heads K, of which N is a multiple; None is N.
      in_kv_features: size of the last axis of inputs_k and inputs_v; None is in_features.
      softcap: the cap, a Python number; None or 0.0 is none.
      scale, causal_alignment, local_window_size, layer_number, apply_qk_layer_scaling,
        implementation, deterministic_backward, context_parallel: as in `DotProductAttention`.
      is_causal: keep `k_pos <= q_pos`; decoding always does.
      softmax_type: "vanilla", "off-by-one" (a sink of 0) or "learnable" (a parameter, one a head).
      enable_rotary_pos_emb: rotate queries and keys by their positions.
      rotary_pos_emb_windows: smallest and largest time scale in positions; (1, theta).
      rotary_pos_emb_group_method: "consecutive" or "alternate" (Gemma, Llama, `nnx.RoPE`).
      rngs: of parameters and dropout.
      **flax: every other keyword of `flax.nnx.MultiHeadAttention` but attention_fn: dtype,
        use_bias, normalize_qk, dropout_rate, broadcast_dropout, deterministic, decode, precision,
        kernel_init, kernel_metadata and so on.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, jaxcap.nnx
      >>> layer = jaxcap.nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=16, num_kv_heads=2, softcap=50.0, is_causal=True,
      ...     enable_rotary_pos_emb=True, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 6, 16))).shape
      (2, 6, 16)
      >>> layer.init_cache((2, 8, 16))  # batch 2, 8 tokens
      >>> prompt = layer(jnp.ones((2, 5, 16)), decode=True)
      >>> layer(jnp.ones((2, 1, 16)), decode=True).shape
      (2, 1, 16)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        softcap: float | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        causal_alignment: Alignment = "top_left",
        local_window_size: common.Window = None,
        softmax_type: str = "vanilla",
        enable_rotary_pos_emb: bool = False,
        rotary_pos_emb_windows: tuple[float, float] = (1, 10000),
        rotary_pos_emb_group_method: str = "consecutive",
        layer_number: int | None = None,
        apply_qk_layer_scaling: bool = False,
        implementation: str | None = None,
        deterministic_backward: bool | None = None,
        context_parallel: Any = None,
        rngs: nnx.Rngs,
        **flax: Any,
    ):
        if "attention_fn" in flax:
            raise ValueError(
                "attention_fn: this module always runs jaxcap's; for another use"
                " flax.nnx.MultiHeadAttention"
            )
        common.check_softmax_type(softmax_type)
        attention = DotProductAttention(
            softcap=softcap,
            scale=scale,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            local_window_size=local_window_size,
            dropout_rate=flax.get("dropout_rate", 0.0),
            broadcast_dropout=flax.get("broadcast_dropout", True),
            layer_number=layer_number,
            apply_qk_layer_scaling=apply_qk_layer_scaling,
            implementation=implementation,
            deterministic_backward=deterministic_backward,
            context_parallel=context_parallel,
        )
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=attention,
            rngs=rngs,
            **flax,
        )
        for norm in (self.query_ln, self.key_ln):
            if norm is not None:
                norm.dtype = common.norm_dtype(self.dtype, self.param_dtype)
        if enable_rotary_pos_emb:
            rope.check_rotary(self.head_dim, rotary_pos_emb_windows, rotary_pos_emb_group_method)
        self.enable_rotary_pos_emb = enable_rotary_pos_emb
        self.rotary_pos_emb_windows = tuple(rotary_pos_emb_windows)
        self.rotary_pos_emb_group_method = rotary_pos_emb_group_method
        self.softmax_type = softmax_type
        learnable = softmax_type == "learnable"
        self.sinks = nnx.data(
            nnx.Param(jnp.zeros((num_heads,), self.param_dtype)) if learnable else None
        )

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
        rngs: Rngs | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        max_decode_length: int | None = None,
        is_causal: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
        kv_input_positions: Array | None = None,
        **arrays: Unpack[common.Arrays],
    ) -> Array:
        """Project, attend, project.

        Args:
          inputs_q: `[.., T, in_features]`.
          inputs_k, inputs_v: `[.., S, in_kv_features]`; None is inputs_q, or inputs_k.
          softcap: None is the constructor's, 0.0 none.
          mask: broadcastable to `[.., N, T, S]`, of any dtype; zero masks. S is the cache's length
            while decoding.
          bias: broadcastable to `[.., N, T, S]`, added outside the cap.
          deterministic: True switches dropout off; None is the constructor's.
          rngs: of dropout, instead of the constructor's.
          sow_weights: True raises: a fused kernel has no weights.
          decode: append to the cache and attend to all of it; None is the constructor's.
          max_decode_length: make a cache of so many tokens if there is none.
          is_causal: None is the constructor's.
          out_sharding, qkv_sharding: of the output and the input projections.
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
        common.check_features("inputs_q", inputs_q, self.in_features)
        common.check_features("inputs_k", inputs_k, self.in_kv_features)
        common.check_features("inputs_v", inputs_v, self.in_kv_features)
        projections = ((self.query, inputs_q), (self.key, inputs_k), (self.value, inputs_v))
        query, key, value = (f(x, out_sharding=qkv_sharding) for f, x in projections)
        query, key = blocks.normalise(self.query_ln, query), blocks.normalise(self.key_ln, key)

        decode = bool(common.inherit(self.decode, decode))
        parallel = self.attention_fn.context_parallel
        kv_cache.check_call(itself, decode, max_decode_length, parallel)
        cache = self._cache(inputs_q, decode, max_decode_length)
        start = None if cache is None else cache[2][...]
        query, key = rope.rotate_pair(
            self, query, key, start, itself, (input_positions, kv_input_positions), parallel
        )
        arrays = common.add_sinks(arrays, self.softmax_type, self.sinks, self.num_heads)
        if cache is not None and start is not None:
            step = kv_cache.step(cache[0][...], cache[1][...], start, key, value, arrays)
            cache[0][...], cache[1][...], cache[2][...] = step[:3]
            key, value, arrays = step.key, step.value, step.arrays
        out = self.attention_fn(
            query,
            key,
            value,
            bias,
            mask,
            softcap,
            is_causal=True if decode else is_causal,
            deterministic=common.inherit(self.deterministic, deterministic),
            rngs=common.inherit(self.rngs, rngs),
            precision=self.precision,
            **arrays,
        )
        if cache is not None:
            out = kv_cache.poison(out, cache[2][...], key.shape[-3])
        return self.out(out, out_sharding=out_sharding)

    def _cache(self, inputs: Array, decode: bool, max_decode_length: int | None) -> Cache | None:
        """Keys, values and tokens in the cache, made if need be; None without decoding."""
        if not decode:
            return None
        if self.cached_key is None:
            if max_decode_length is None:
                raise ValueError("decode needs a cache: call init_cache or pass max_decode_length")
            self.init_cache((*inputs.shape[:-2], max_decode_length, 1), self.dtype or inputs.dtype)
        cache = cast(Cache, (self.cached_key, self.cached_value, self.cache_index))
        kv_cache.check_length(cache[0].shape[-3], max_decode_length)
        return cache

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """For `nnx.view`.

        Args:
          deterministic: True switches dropout off.
          decode: whether calls append to the cache.
          batch_size: of the cache to make, with max_length, if there is none.
          max_length: of the cache to make, in tokens.
        """
        self.deterministic = common.inherit(self.deterministic, deterministic)
        self.decode = common.inherit(self.decode, decode)
        if (batch_size is None) != (max_length is None):
            raise ValueError("batch_size and max_length make a cache: pass both or neither")
        if batch_size is not None and max_length is not None and self.cached_key is None:
            lead = batch_size if isinstance(batch_size, tuple) else (batch_size,)
            self.init_cache((*lead, max_length, 1), self.dtype or self.param_dtype)
