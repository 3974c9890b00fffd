"""jaxcap as `attn_implementation="jaxcap"` of Hugging Face Transformers.

The mask is told by what it is made of wherever that is possible: causality and a sliding window are
settings, padding is one flag a key. Only what models add of their own becomes an array of all queries and
keys, boolean and shared by the heads.
"""

import inspect
from typing import Any

import torch
from torch.nn import functional

from jaxcap.torch_bridge import call, checks
from jaxcap.torch_bridge.call import Settings, Tensor, Tensors
from jaxcap.torch_bridge.functional import attend, autocast
from jaxcap.torch_bridge.huggingface_masks import attention_mask, causal_parts

NAME = "jaxcap"
#: Arguments of other implementations that would change the result.
REFUSED = ("head_mask", "output_attentions", "attention_bias", "alibi", "relative_position_bias")
#: Tensors whose meaning is in the mask already; of the packed lengths in one of queries and keys alone.
KNOWN = ("position_ids", "cache_position", "indices")
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


def register_with_transformers() -> None:
    """Makes `attn_implementation="jaxcap"` known to Hugging Face Transformers.

    The model's own cap, scale, sliding windows, grouped heads and sinks reach the kernel. A model that has a
    cap in its configuration and does not hand it over is an error, as is an argument that this cannot honour.

    Raises:
      ImportError: no Transformers, or one older than 5.4, whose masks are made from other arguments.

    Example:
      >>> torch_bridge.register_with_transformers()
      >>> model = AutoModelForCausalLM.from_pretrained("google/gemma-2-2b", attn_implementation="jaxcap")
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("jaxcap needs transformers 5.4 or newer")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`[B, N, T, H]` in, `[B, T, N, V]` out, as Transformers calls its attention implementations."""
    if refused := [name for name in REFUSED if keywords.get(name) not in (None, False)]:
        raise ValueError(
            f"jaxcap has no {', '.join(refused)}; use attn_implementation='eager' for it"
        )
    written = attention_mask is not None and attention_mask.dim() == 4
    known = KNOWN + PACKED if written else KNOWN
    if unknown := [n for n, x in keywords.items() if isinstance(x, Tensor) and n not in known]:
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which jaxcap does not"
            " know; use attn_implementation='eager' for this model"
        )
    declared = getattr(getattr(module, "config", None), "attn_logit_softcapping", None)
    if declared and not softcap:
        raise ValueError(
            f"{type(module).__name__} has attn_logit_softcapping={declared} in its configuration and calls"
            " attention without softcap: the cap would be dropped"
        )
    q, k, v = autocast(*(x.transpose(1, 2) for x in (query, key, value)))
    checks.check_inputs(q, k, v, "bshd")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    parts = {"bias": position_bias, "sinks": s_aux}
    window = sliding_window if causal else None
    if attention_mask is not None and attention_mask.dim() == 3:  # from `attention_mask`
        causal = True
        window, attention_mask = causal_parts(module, attention_mask, k.shape[1])
    if attention_mask is not None and attention_mask.dim() == 4:  # has all of it
        causal, window = False, None
        attention_mask = attention_mask[..., : k.shape[1]]
        if attention_mask.dtype != torch.bool:
            both = attention_mask if position_bias is None else attention_mask + position_bias
            parts["bias"], attention_mask = both, None
    if q.shape[1] == 1 and causal:
        causal = False  # the newest token sees all that the window leaves
        if window is not None and k.shape[1] > window:
            k, v = k[:, -window:], v[:, -window:]
            attention_mask = None if attention_mask is None else attention_mask[:, -window:]
            if position_bias is not None and position_bias.shape[-1] > 1:
                parts["bias"] = position_bias[..., -window:]
        window = None
    tensors = call.canonical(q, k, v, parts["bias"], None, None, parts["sinks"])
    tensors = _masked(tensors, attention_mask)
    settings = Settings(
        softcap=softcap or 0.0,
        causal=causal,
        window_size=(-1 if window is None else window - 1, -1),
        scale=scaling,
        dropout_p=dropout,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if not torch.compiler.is_compiling():
        tensors = _rounded(tensors, causal)
    out, _ = attend(settings, tensors)
    return out[:, : query.shape[2]], None


def _masked(tensors: Tensors, mask: Tensor | None) -> Tensors:
    """With the mask of Transformers: `[B, 1, T, S]`, or `[B, S]` of which queries are the last T."""
    length, key_length = tensors.query.shape[1], tensors.key.shape[1]
    if mask is None:
        return tensors
    if mask.dim() == 4:
        return tensors._replace(mask=mask)
    if length == 1:
        return tensors._replace(mask=mask[:, None, None, :])
    there = mask.to(torch.bool)
    queries = torch.where(there[:, key_length - length :], 1, -1).to(torch.int32)
    keys = torch.where(there, 1, -2).to(torch.int32)
    return tensors._replace(query_segment_ids=queries, kv_segment_ids=keys)


def _up(length: int, share: int) -> int:
    """The length rounded up by at most a `share`-th, to a multiple of 64."""
    step = max(64, 2 ** (length.bit_length() - 1) // share)
    return -(-length // step) * step


def _rounded(tensors: Tensors, causal: bool) -> Tensors:
    """Lengths rounded up, so that a growing cache or a batch of another length finds its kernel compiled.

    Added keys take no part: they lie behind every causal query, or past `kv_lengths`, or their mask is False.
    """
    q, k, v = tensors[:3]
    length, key_length = q.shape[1], k.shape[1]
    if tensors.bias is not None:
        return tensors
    if length == 1:
        more = _up(key_length, 4) - key_length
        if not more:
            return tensors
        k, v = (_longer(x, more) for x in (k, v))
        if tensors.mask is not None:
            mask = functional.pad(tensors.mask, (0, more))
            return tensors._replace(key=k, value=v, mask=mask)
        lengths = torch.full((q.shape[0],), key_length, dtype=torch.int32, device=q.device)
        return tensors._replace(key=k, value=v, kv_lengths=lengths)
    more = _up(length, 16) - length
    if not more or length != key_length or not causal:
        return tensors
    changed: dict[str, Any] = {"query": _longer(q, more), "key": _longer(k, more)}
    changed["value"] = _longer(v, more)
    ids = {"query_segment_ids": -1, "kv_segment_ids": -2}
    for name, nobody in ids.items():
        if (x := getattr(tensors, name)) is not None:
            changed[name] = functional.pad(x, (0, more), value=nobody)
    return tensors._replace(**changed)


def _longer(x: Tensor, more: int) -> Tensor:
    """`[B, length + more, heads, size]`, contiguous."""
    return functional.pad(x, (0, 0, 0, 0, 0, more))
