"""What the NNX and the Linen TransformerLayer share: options in TE-JAX's names, and their checks."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax

from jaxcap.modules.common import Window
from jaxcap.spec import Array

Activation = str | Callable[[Array], Array]

_MASK_TYPES = {
    "no_mask": (False, False),
    "causal": (True, False),
    "padding": (False, True),
    "padding_causal": (True, True),
    "causal_padding": (True, True),
}

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda x: x,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jax.nn.tanh,
}


class BothAttentions(TypedDict, total=False):
    """Options that self-attention and cross-attention share."""

    scale: float | None
    softmax_type: str
    normalize_qk: bool
    layer_number: int | None
    apply_qk_layer_scaling: bool
    implementation: str | None
    deterministic_backward: bool | None
    context_parallel: Any


def check_both(options: Mapping[str, Any]) -> None:
    if unknown := sorted(set(options) - set(BothAttentions.__annotations__)):
        raise TypeError(
            f"TransformerLayer has no argument {', '.join(unknown)}; heads are num_attention_heads and"
            " num_gqa_groups, windows window_size"
        )


class TransformerLayerType(enum.StrEnum):
    """Whether a layer has cross-attention ("decoder") or not ("encoder"); equal to its string."""

    ENCODER = "encoder"
    DECODER = "decoder"


def layer_type(value: Any) -> TransformerLayerType:
    try:
        return TransformerLayerType(value)
    except ValueError:
        raise ValueError(f"layer_type must be 'encoder' or 'decoder', got {value!r}") from None


def mask_kind(name: str) -> tuple[bool, bool]:
    """(causal, padding) of a self_attn_mask_type."""
    if name not in _MASK_TYPES:
        raise ValueError(f"self_attn_mask_type must be one of {(*_MASK_TYPES,)}, got {name!r}")
    return _MASK_TYPES[name]


def window(value: Any) -> Window:
    """TE's window_size, where -1 is unbounded, as local_window_size, where None is."""
    if isinstance(value, tuple | list):
        sides = [None if side == -1 else side for side in value]
        if len(sides) != 2:
            raise ValueError(f"window_size must be (left, right), got {value!r}")
        return (sides[0], sides[1])
    if value is not None:
        raise ValueError(f"window_size must be (left, right) or None, got {value!r}")
    return None


def head_size(hidden_size: int, num_attention_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    if hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads"
            f" ({num_attention_heads}), or pass head_dim"
        )
    return hidden_size // num_attention_heads


def activations(names: Sequence[Activation]) -> list[Callable[[Array], Array]]:
    """The functions of one linear layer each whose product is the MLP's hidden layer."""
    if isinstance(names, str) or not names:
        raise ValueError(f"mlp_activations must be a tuple such as ('gelu',), got {names!r}")
    functions = []
    for name in names:
        function = _ACTIVATIONS.get(name) if isinstance(name, str) else name
        if not callable(function):
            raise ValueError(
                f"mlp_activations must be of {(*_ACTIVATIONS,)} or callables, got {name!r}"
            )
        functions.append(function)
    return functions


def check_norms(layernorm_type: str, post_residual: bool, output_layernorm: bool) -> None:
    if layernorm_type not in ("layernorm", "rmsnorm"):
        raise ValueError(f"layernorm_type must be 'layernorm' or 'rmsnorm', got {layernorm_type!r}")
    if post_residual and output_layernorm:
        raise ValueError(
            "apply_residual_connection_post_layernorm=True takes the residual after the first"
            " norm, which output_layernorm=True leaves out; set one of them"
        )


def check_call(
    kind: TransformerLayerType,
    mask_type: str,
    inputs: Array,
    own: tuple[Any, Any],
    crossing: tuple[Any, Any, Any],
    *,
    decode: bool,
) -> bool:
    """Raise ValueError where arguments do not go with the layer; else whether it is causal.

    `own` are attention_mask and segment_ids, `crossing` encoded, its mask and its segment ids.
    """
    causal, padding = mask_kind(mask_type)
    attention_mask, segment_ids = own
    encoded, encoder_decoder_mask, encoded_segment_ids = crossing
    if inputs.ndim < 3:
        raise ValueError(f"inputs must be [batch, length, hidden_size], got {list(inputs.shape)}")
    if attention_mask is not None and not padding:
        better = "padding_causal" if causal else "padding"
        raise ValueError(
            f"attention_mask does not go with self_attn_mask_type={mask_type!r}; use {better!r}"
        )
    if padding and attention_mask is None and segment_ids is None:
        raise ValueError(
            f"self_attn_mask_type={mask_type!r} needs attention_mask or segment_ids in the call"
        )
    if decode and not causal:
        raise ValueError(
            f"decode=True attends causally, which self_attn_mask_type={mask_type!r} does not"
        )
    if kind == TransformerLayerType.DECODER:
        if encoded is None:
            raise ValueError("encoded must be given where layer_type is 'decoder'")
        if (encoded_segment_ids is not None) and segment_ids is None:
            raise ValueError("encoded_segment_ids needs segment_ids, those of the inputs, too")
    else:
        given = {
            "encoded": encoded,
            "encoder_decoder_mask": encoder_decoder_mask,
            "encoded_segment_ids": encoded_segment_ids,
        }
        for name, array in given.items():
            if array is not None:
                raise ValueError(f"{name} must be None where layer_type is 'encoder'")
    return causal
