"""`TransformerLayer` for NNX: self-attention, in a decoder cross-attention, and MLP."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers

from jaxcap.modules import layer as common
from jaxcap.modules.common import check_rate, inherit
from jaxcap.nnx import blocks
from jaxcap.nnx.attention import Rngs
from jaxcap.nnx.multihead import MultiHeadAttention
from jaxcap.spec import Array

default_kernel_init = initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class TransformerLayer(nnx.Module):
    """One layer of a transformer whose attentions are both capped; pre-norm by default.

    Names and defaults are TE-JAX's. **A mask's True (or nonzero) keeps, as in Flax; in TE it masks.**
    Logits are always scaled; window and rotary embedding are for self-attention.

    Args:
      hidden_size: of inputs and output; mlp_hidden_size: of the MLP's hidden layer.
      num_attention_heads: query heads N.
      num_gqa_groups: key and value heads K, of which N is a multiple; None is N.
      head_dim: H; None is hidden_size / N.
      layer_type: "encoder", or "decoder" with cross-attention.
      self_attn_mask_type: "causal", "no_mask", "padding" or "padding_causal"; the last two need
        attention_mask or segment_ids in each call.
      softcap: the cap of both attentions, a Python number; None or 0.0 is none.
      window_size: (left, right) in positions, -1 unbounded.
      enable_rotary_pos_emb, rotary_pos_emb_windows, rotary_pos_emb_group_method: as in
        `MultiHeadAttention`.
      layernorm_type: "layernorm" or "rmsnorm"; layernorm_epsilon is added to the variance.
      apply_residual_connection_post_layernorm: take residuals after the norm, not before.
      output_layernorm: norm the output instead of self-attention's input.
      mlp_activations: one input matrix each, multiplied; ("gelu", "linear") is GeGLU.
      hidden_dropout: after each block, the axes hidden_dropout_dims sharing one mask.
      attention_dropout: of the probabilities; intermediate_dropout: of the MLP's hidden layer.
      deterministic: True switches all dropout off; set by `train()` and `eval()`.
      decode: whether self-attention appends to a cache. use_bias: in all projections.
      mha_kernel_init, mha_out_kernel_init, mlp_kernel_init, mlp_out_kernel_init, bias_init: of the
        parameters; `nnx.with_partitioning` around them shards these. "out" None is the other.
      dtype: of the computation; None infers. param_dtype and rngs: of the parameters.
      **both: of both attentions, as in `MultiHeadAttention`: scale, softmax_type, normalize_qk,
        layer_number, apply_qk_layer_scaling, implementation, deterministic_backward,
        context_parallel.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, jaxcap.nnx
      >>> layer = jaxcap.nnx.TransformerLayer(
      ...     hidden_size=16, mlp_hidden_size=32, num_attention_heads=2, layer_type="decoder",
      ...     softcap=50.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 4, 16)), encoded=jnp.ones((1, 6, 16))).shape
      (1, 4, 16)
    """

    def __init__(
        self,
        hidden_size: int = 512,
        mlp_hidden_size: int = 2048,
        num_attention_heads: int = 8,
        num_gqa_groups: int | None = None,
        *,
        head_dim: int | None = None,
        layer_type: str = "encoder",
        self_attn_mask_type: str = "causal",
        softcap: float | None = None,
        window_size: tuple[int, int] | None = None,
        enable_rotary_pos_emb: bool = False,
        rotary_pos_emb_windows: tuple[float, float] = (1, 10000),
        rotary_pos_emb_group_method: str = "consecutive",
        layernorm_type: str = "layernorm",
        layernorm_epsilon: float = 1e-6,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        mlp_activations: Sequence[common.Activation] = ("gelu",),
        hidden_dropout: float = 0.1,
        hidden_dropout_dims: Sequence[int] = (),
        attention_dropout: float = 0.1,
        intermediate_dropout: float = 0.0,
        deterministic: bool = False,
        decode: bool = False,
        use_bias: bool = False,
        mha_kernel_init: Callable = default_kernel_init,
        mha_out_kernel_init: Callable | None = None,
        mlp_kernel_init: Callable = default_kernel_init,
        mlp_out_kernel_init: Callable | None = None,
        bias_init: Callable = initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **both: Unpack[common.BothAttentions],
    ):
        common.check_both(both)
        kind = common.layer_type(layer_type)
        common.mask_kind(self_attn_mask_type)
        common.check_norms(
            layernorm_type, apply_residual_connection_post_layernorm, output_layernorm
        )
        for name, rate in (("hidden", hidden_dropout), ("intermediate", intermediate_dropout)):
            check_rate(f"{name}_dropout", rate)
        size = common.head_size(hidden_size, num_attention_heads, head_dim)
        types = {"dtype": dtype, "param_dtype": param_dtype}
        linear = {"use_bias": use_bias, "bias_init": bias_init, **types}

        def attention(**own: Any) -> MultiHeadAttention:
            return MultiHeadAttention(
                num_attention_heads,
                hidden_size,
                num_attention_heads * size,
                num_kv_heads=num_gqa_groups,
                softcap=softcap,
                dropout_rate=attention_dropout,
                broadcast_dropout=False,
                deterministic=deterministic,
                kernel_init=mha_kernel_init,
                out_kernel_init=mha_out_kernel_init,
                rngs=rngs,
                **linear,
                **both,
                **own,
            )

        def norm() -> blocks.Norm:
            return blocks.norm(layernorm_type, hidden_size, layernorm_epsilon, rngs=rngs, **types)

        self.layer_type = kind
        self.self_attn_mask_type = self_attn_mask_type
        self.residual_post_norm = apply_residual_connection_post_layernorm
        self.dtype = dtype
        self.self_attention_norm = nnx.data(None if output_layernorm else norm())
        self.self_attention = attention(
            local_window_size=common.window(window_size),
            enable_rotary_pos_emb=enable_rotary_pos_emb,
            rotary_pos_emb_windows=rotary_pos_emb_windows,
            rotary_pos_emb_group_method=rotary_pos_emb_group_method,
            decode=decode,
        )
        crosses = kind == common.TransformerLayerType.DECODER
        self.cross_attention_norm = nnx.data(norm() if crosses else None)
        self.encoder_decoder_attention = nnx.data(attention() if crosses else None)
        self.mlp_norm = norm()
        self.mlp = blocks.MLP(
            hidden_size,
            mlp_hidden_size,
            mlp_activations,
            dropout=blocks.dropout(intermediate_dropout, rngs),
            kernel_init=mlp_kernel_init,
            out_kernel_init=mlp_out_kernel_init or mlp_kernel_init,
            rngs=rngs,
            **linear,
        )
        self.output_norm = nnx.data(norm() if output_layernorm else None)
        self.dropout = blocks.dropout(hidden_dropout, rngs, hidden_dropout_dims)
        self.set_attributes(deterministic=deterministic, raise_if_not_found=False)

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
        rngs: Rngs | None = None,
    ) -> Array:
        """Self-attention, cross-attention in a decoder, MLP, each with norm, dropout and residual.

        Under `nnx.remat` what is static are arguments 5 to 8: deterministic to softcap.

        Args:
          inputs: `[B, T, hidden_size]`; encoded: `[B, S, hidden_size]`, of a decoder.
          attention_mask: of self-attention, broadcastable to `[B, N, T, T]`, True keeps; the last T
            is the cache's length while decoding.
          encoder_decoder_mask: of cross-attention, broadcastable to `[B, N, T, S]`, True keeps.
          deterministic: True switches all dropout off; None is the constructor's.
          decode: append to self-attention's cache and attend to all of it.
          max_decode_length: make a cache of so many tokens if there is none.
          softcap: of both attentions; None is the constructor's, 0.0 none.
          attention_bias: of self-attention, broadcastable to `[B, N, T, T]`, outside the cap.
          segment_ids: `[B, T]`; equal ids attend, in cross-attention those of encoded_segment_ids.
          encoded_segment_ids: `[B, S]`.
          input_positions: `[B, T]` or `[T]`, angles of the rotary embedding.
          rngs: of dropout, instead of the constructor's.

        Returns:
          `[B, T, hidden_size]`.
        """
        causal = common.check_call(
            self.layer_type,
            self.self_attn_mask_type,
            inputs,
            (attention_mask, segment_ids),
            (encoded, encoder_decoder_mask, encoded_segment_ids),
            decode=bool(inherit(self.self_attention.decode, decode)),
        )
        switches = {"deterministic": deterministic, "rngs": rngs}  # None: as the submodules are set
        x = inputs if self.dtype is None else inputs.astype(self.dtype)

        def add(x: Array, normed: Array, block: Array) -> Array:
            return (normed if self.residual_post_norm else x) + self.dropout(block, **switches)

        normed = blocks.normalise(self.self_attention_norm, x)
        attended = self.self_attention(
            normed,
            softcap=softcap,
            mask=attention_mask,
            bias=attention_bias,
            is_causal=causal,
            decode=decode,
            max_decode_length=max_decode_length,
            input_positions=input_positions,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            **switches,
        )
        x = add(x, normed, attended)
        if self.encoder_decoder_attention is not None and encoded is not None:
            normed = blocks.normalise(self.cross_attention_norm, x)
            ids = None if encoded_segment_ids is None else segment_ids
            attended = self.encoder_decoder_attention(
                normed,
                encoded.astype(normed.dtype),
                softcap=softcap,
                mask=encoder_decoder_mask,
                decode=False,
                query_segment_ids=ids,
                key_value_segment_ids=encoded_segment_ids,
                **switches,
            )
            x = add(x, normed, attended)
        normed = blocks.normalise(self.mlp_norm, x)
        x = add(x, normed, self.mlp(normed, **switches))
        return blocks.normalise(self.output_norm, x)
