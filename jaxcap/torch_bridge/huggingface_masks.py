"""Masks of Hugging Face Transformers as jaxcap takes them: short, and what a model may not make of them."""

from typing import Any

import torch
from torch.nn import functional

from jaxcap.torch_bridge.call import Tensor

#: Models that make a mask of their own out of Transformers', in versions without `allow_is_causal_skip` too.
OWN_MASKS = ("doge",)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **keywords: Any,
) -> Tensor | None:
    """A short mask `[B, S, S + 1 + W]` for causality, a window W and padding, else `[B, 1, T, S]`.

    True keeps. All columns of a short mask are the padding; W is 0 without a window, B without padding.
    It is never None, for not every model hands its window to its attention or says that it is causal; and
    it has the number of keys twice, so that a model that changes the mask or the keys is noticed.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if local_size is None:
        known = mask_function is causal_mask_function
    else:
        chunked = getattr(config, "attention_chunk_size", None) is not None
        known = not chunked and getattr(config, "sliding_window", None) == local_size
    own = getattr(config, "model_type", None) in OWN_MASKS
    if own or not (allow_is_causal_skip and aligned and known):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            config=config,
            **keywords,
        )
    width = kv_length + 1 + (local_size or 0)
    alone = torch.empty(0, kv_length, width, dtype=torch.bool, device=keywords.get("device"))
    if attention_mask is None:
        return alone
    padding = attention_mask[:, kv_offset : kv_offset + kv_length]
    if padding.shape[1] < kv_length:
        padding = functional.pad(padding, (0, kv_length - padding.shape[1]))
    # One question to the device for all layers of a step, as Transformers' own implementations ask.
    if not torch.compiler.is_compiling() and padding.all():
        return alone
    return padding[..., None].expand(-1, -1, width)


def causal_parts(module: Any, mask: Tensor, key_length: int) -> tuple[int | None, Tensor | None]:
    """(window, padding [B, S]) of a short mask; None is no window, nobody padded."""
    _, length, width = mask.shape
    window = width - length - 1
    if length != key_length or window < 0:
        raise ValueError(
            f"{type(module).__name__} attends {key_length} keys under a causal mask made for {length}, or"
            " changed since: what a query may see is not known; use attn_implementation='eager' for this"
            " model"
        )
    return window or None, (mask[..., 0] if len(mask) else None)
