"""`attention_fn`: capped attention as the `attention_fn` of Flax's own NNX and Linen modules."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxcap.keywords import hinted
from jaxcap.modules import common
from jaxcap.spec import Alignment, Array


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """What `attention_fn` returns; equal settings are equal functions, so jit does not retrace."""

    settings: common.Settings

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        input_positions: Array | None = None,
        softcap: float | None = None,
    ) -> Array:
        """Attention in Flax's convention: `[.., T, N, H]`, `[.., S, K, H]`; a mask's zero masks."""
        del force_fp32_for_softmax  # always: logits, cap and softmax are in float32
        common.refuse_sowing(module is not None)
        refused = {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, given in refused.items():
            if given is not None:
                raise ValueError(f"{name}: a fused kernel does its products itself; leave it None")
        if input_positions is not None:
            raise ValueError(
                "input_positions: attention_fn applies no rotary embedding; use"
                " jaxcap.nnx.MultiHeadAttention(enable_rotary_pos_emb=True)"
            )
        ours = self.settings
        if query.shape[-3] != key.shape[-3]:
            for name in ("is_causal", "local_window_size"):
                if getattr(ours, name) not in (False, None):
                    raise ValueError(
                        f"{name} of attention_fn needs as many queries as keys, got"
                        f" {query.shape[-3]} and {key.shape[-3]}: Flax does not say where the"
                        " queries are (its decode cache does not either); use"
                        " jaxcap.nnx.MultiHeadAttention or jaxcap.linen.MultiHeadAttention"
                    )
        if promote_dtype is not None:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        else:
            dtype = jnp.result_type(query, key, value) if dtype is None else dtype
            query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        settings = dataclasses.replace(
            ours, dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout
        )
        dropout_on = settings.drops(deterministic)
        if dropout_on and dropout_rng is None:
            raise ValueError(f"dropout_rate={dropout_rate} needs dropout_rng, a JAX random key")
        return common.attend(
            settings,
            query,
            key,
            value,
            bias,
            mask,
            softcap,
            is_causal=is_causal or ours.is_causal,
            dropout_rng=dropout_rng if dropout_on else None,
            precision=precision,
        )


@hinted
def attention_fn(
    *,
    softcap: float | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    local_window_size: common.Window = None,
    layer_number: int | None = None,
    apply_qk_layer_scaling: bool = False,
    implementation: str | None = None,
    deterministic_backward: bool | None = None,
    context_parallel: Any = None,
) -> AttentionFn:
    """Capped attention as `attention_fn` of `flax.nnx.MultiHeadAttention` and of Linen's modules.

    It takes the arguments that Flax passes, its float masks included, and honours or refuses each:
    dropout falls as in `dot_product_attention` (keyed by position; `broadcast_dropout` is Flax's),
    softmax is always in float32, `precision` is honoured where a backend can, and `sow_weights` and
    the einsum arguments raise, for a fused kernel has no weights. A row whose mask is all zero gives
    0, where Flax gives the mean of the values.

    Args:
      softcap: the cap, a Python number; None or 0.0 is none.
      scale: of the logits; None is `H ** -0.5`.
      is_causal: be causal without a mask, where the module cannot say so (Linen's).
      causal_alignment: "top_left" or "bottom_right", where T is not S.
      local_window_size: (left, right) in positions, None unbounded; not with Flax's decode cache.
      layer_number: from 1; needed by apply_qk_layer_scaling.
      apply_qk_layer_scaling: divide logits and cap by layer_number inside the kernel.
      implementation: a backend's name; None selects.
      deterministic_backward: gradients bitwise equal in every run; None is `JAXCAP_DETERMINISTIC`.
      context_parallel: a `jaxcap.ContextParallel`: how the sequence is split over devices.

    Returns:
      A hashable callable; query `[.., T, N, H]`, key and value `[.., S, K, H]`, bias and mask
      broadcastable to `[.., N, T, S]` to `[.., T, N, H]`.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, jaxcap
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=jaxcap.attention_fn(softcap=50.0))
      >>> layer(jnp.ones((1, 4, 8)), mask=nnx.make_causal_mask(jnp.ones((1, 4)))).shape
      (1, 4, 8)
    """
    return AttentionFn(common.Settings(**locals()))
