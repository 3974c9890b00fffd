"""`TransformerLayer` for Linen: the twin of `jaxcap.nnx.TransformerLayer`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import initializers

from jaxcap.linen.multihead import MultiHeadAttention
from jaxcap.modules import layer as common
from jaxcap.modules.common import check_rate, inherit, norm_dtype
from jaxcap.spec import Array

default_kernel_init = initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class TransformerLayer(nn.Module):
    """One layer of a transformer whose attentions are both capped; pre-norm by default.

    Attributes have the names, meanings and defaults of the arguments of
    `jaxcap.nnx.TransformerLayer`. **A mask's True (or nonzero) keeps, as in Flax; in TE it masks.**

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcap.linen
      >>> layer = jaxcap.linen.TransformerLayer(
      ...     hidden_size=16, mlp_hidden_size=32, num_attention_heads=2, layer_type="decoder",
      ...     softcap=50.0, deterministic=True)
      >>> x, encoded = jnp.ones((1, 4, 16)), jnp.ones((1, 6, 16))
      >>> variables = layer.init(jax.random.key(0), x, encoded)
      >>> layer.apply(variables, x, encoded, softcap=30.0).shape
      (1, 4, 16)
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    head_dim: int | None = None
    layer_type: str = "encoder"
    self_attn_mask_type: str = "causal"
    softcap: float | None = None
    scale: float | None = None
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[float, float] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    normalize_qk: bool = False
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    mlp_activations: Sequence[common.Activation] = ("gelu",)
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    deterministic: bool = False
    decode: bool = False
    use_bias: bool = False
    mha_kernel_init: Callable = default_kernel_init
    mha_out_kernel_init: Callable | None = None
    mlp_kernel_init: Callable = default_kernel_init
    mlp_out_kernel_init: Callable | None = None
    bias_init: Callable = initializers.zeros
    layer_number: int | None = None
    apply_qk_layer_scaling: bool = False
    implementation: str | None = None
    deterministic_backward: bool | None = None
    context_parallel: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        common.layer_type(self.layer_type)
        common.mask_kind(self.self_attn_mask_type)
        common.check_norms(
            self.layernorm_type,
            self.apply_residual_connection_post_layernorm,
            self.output_layernorm,
        )
        common.activations(self.mlp_activations)
        common.window(self.window_size)
        for name in ("hidden_dropout", "attention_dropout", "intermediate_dropout"):
            check_rate(name, getattr(self, name))
        super().__post_init__()

    def _attention(self, name: str, **own: Any) -> MultiHeadAttention:
        size = common.head_size(self.hidden_size, self.num_attention_heads, self.head_dim)
        return MultiHeadAttention(
            self.num_attention_heads,
            qkv_features=self.num_attention_heads * size,
            num_kv_heads=self.num_gqa_groups,
            softcap=self.softcap,
            scale=self.scale,
            softmax_type=self.softmax_type,
            normalize_qk=self.normalize_qk,
            dropout_rate=self.attention_dropout,
            broadcast_dropout=False,
            deterministic=self.deterministic,
            use_bias=self.use_bias,
            kernel_init=self.mha_kernel_init,
            out_kernel_init=self.mha_out_kernel_init,
            bias_init=self.bias_init,
            layer_number=self.layer_number,
            apply_qk_layer_scaling=self.apply_qk_layer_scaling,
            implementation=self.implementation,
            deterministic_backward=self.deterministic_backward,
            context_parallel=self.context_parallel,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name=name,
            **own,
        )

    def _mlp(self, x: Array, deterministic: bool) -> Array:
        linear = functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        functions = common.activations(self.mlp_activations)
        parts = linear(
            (len(functions), self.mlp_hidden_size), kernel_init=self.mlp_kernel_init, name="wi"
        )(x)
        product = functions[0](parts[..., 0, :])
        for i, function in enumerate(functions[1:], 1):
            product = product * function(parts[..., i, :])
        product = nn.Dropout(self.intermediate_dropout)(product, deterministic=deterministic)
        out_init = self.mlp_out_kernel_init or self.mlp_kernel_init
        return linear(self.hidden_size, kernel_init=out_init, name="wo")(product)

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        encoded: Array | None = None,
        attention_mask: Array | None = None,
        encoder_decoder_mask: Array | None = None,
        deterministic: bool | None = None,
        decode: bool | None = None,
        max_decode_length: int | None = None,
        softcap: float | None = None,
        attention_bias: Array | None = None,
        segment_ids: Array | None = None,
        encoded_segment_ids: Array | None = None,
        input_positions: Array | None = None,
    ) -> Array:
        """Self-attention, cross-attention in a decoder, MLP, each with norm, dropout and residual.

        Arguments as in `jaxcap.nnx.TransformerLayer`, dropout keys from the stream `dropout`; under
        `nn.remat` deterministic, decode, max_decode_length and softcap are static_argnums 5 to 8.
        `[B, T, hidden_size]` to the same.
        """
        deterministic = bool(inherit(self.deterministic, deterministic))
        decode = bool(inherit(self.decode, decode))
        causal = common.check_call(
            common.layer_type(self.layer_type),
            self.self_attn_mask_type,
            inputs,
            (attention_mask, segment_ids),
            (encoded, encoder_decoder_mask, encoded_segment_ids),
            decode=decode,
        )
        wide = norm_dtype(self.dtype, self.param_dtype)

        def norm(name: str, x: Array) -> Array:
            make = nn.LayerNorm if self.layernorm_type == "layernorm" else nn.RMSNorm
            module = make(
                epsilon=self.layernorm_epsilon, dtype=wide, param_dtype=self.param_dtype, name=name
            )
            return module(x.astype(wide)).astype(x.dtype)

        def add(x: Array, normed: Array, block: Array) -> Array:
            dropout = nn.Dropout(self.hidden_dropout, tuple(self.hidden_dropout_dims))
            residual = normed if self.apply_residual_connection_post_layernorm else x
            return residual + dropout(block, deterministic=deterministic)

        x = inputs if self.dtype is None else inputs.astype(self.dtype)
        normed = x if self.output_layernorm else norm("self_attention_norm", x)
        attended = self._attention(
            "self_attention",
            local_window_size=common.window(self.window_size),
            enable_rotary_pos_emb=self.enable_rotary_pos_emb,
            rotary_pos_emb_windows=self.rotary_pos_emb_windows,
            rotary_pos_emb_group_method=self.rotary_pos_emb_group_method,
        )(
            normed,
            softcap=softcap,
            mask=attention_mask,
            bias=attention_bias,
            deterministic=deterministic,
            decode=decode,
            max_decode_length=max_decode_length,
            is_causal=causal,
            input_positions=input_positions,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
        )
        x = add(x, normed, attended)
        if encoded is not None:
            normed = norm("cross_attention_norm", x)
            attended = self._attention("encoder_decoder_attention")(
                normed,
                encoded.astype(normed.dtype),
                softcap=softcap,
                mask=encoder_decoder_mask,
                deterministic=deterministic,
                query_segment_ids=None if encoded_segment_ids is None else segment_ids,
                key_value_segment_ids=encoded_segment_ids,
            )
            x = add(x, normed, attended)
        normed = norm("mlp_norm", x)
        x = add(x, normed, self._mlp(normed, deterministic))
        return norm("output_norm", x) if self.output_layernorm else x
