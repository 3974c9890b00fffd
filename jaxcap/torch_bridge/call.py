"""One call from PyTorch: its tensors in canonical form, its settings, and the AttentionSpec of both.

FlashAttention's conventions become jaxcap's here and nowhere else: -1 in a window is unbounded, causality is
bottom-right.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch

from jaxcap import arguments, selection
from jaxcap.environment import ENVIRONMENT
from jaxcap.spec import AttentionSpec
from jaxcap.torch_bridge.checks import (
    FLOATS,
    Tensor,
    four,
    per_head,
    requires_grad,
    segments,
    window,
)


class Tensors(NamedTuple):
    """The tensors of a call, `[B, T, N, H]` and so on as in `jaxcap.spec.Operands`; absent ones are None."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    kv_lengths: Tensor | None = None
    query_segment_ids: Tensor | None = None
    kv_segment_ids: Tensor | None = None
    query_positions: Tensor | None = None
    kv_positions: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_key: Tensor | None = None  # [1, 2] int32, two words of a key


class Settings(NamedTuple):
    """What is not a tensor: Python values, hashable."""

    softcap: float = 0.0
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    scale: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    backend: str | None = None


def check_settings(settings: Settings) -> None:
    """Raises ValueError or TypeError where a number is none or out of range."""
    for name in ("softcap", "scale", "dropout_p"):
        if isinstance(value := getattr(settings, name), Tensor):
            raise TypeError(
                f"{name} must be a Python number, got a tensor ({value}); pass {name}.item()"
            )
    arguments.soft_cap(settings.softcap)
    if settings.scale is not None:
        arguments.static_number("scale", settings.scale, "pass a float, or None for H ** -0.5")
    rate = arguments.static_number("dropout_p", settings.dropout_p, "pass a float in [0, 1)")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {settings.dropout_p!r}")
    for name in ("causal", "deterministic", "return_lse"):
        arguments.flag(name, getattr(settings, name))
    window(settings.window_size)
    requested(settings.backend)


def requested(backend: Any) -> str | None:
    """The backend that argument, context or environment names; None is automatic."""
    if backend is None:
        return selection.requested(None)
    return selection.check_name(backend, "backend")


_NONE = type(None)
_PLAIN = frozenset(
    (float, bool, tuple, scale, float, bool, bool, backend)
    for scale, backend in itertools.product((float, _NONE), (str, _NONE))
)


def settings_of(*values: Any) -> Settings:
    """`Settings` whose values are of one type each, so that equal ones mean the same; others are checked."""
    given = Settings(*values)
    if torch.compiler.is_compiling():  # the operator's schema says the types
        return given
    if tuple(map(type, given)) in _PLAIN and tuple(map(type, given.window_size)) == (int, int):
        return given
    check_settings(given)
    return given._replace(
        softcap=float(given.softcap or 0.0),
        causal=bool(given.causal),
        window_size=window(given.window_size),
        scale=None if given.scale is None else float(given.scale),
        dropout_p=float(given.dropout_p),
        deterministic=bool(given.deterministic),
        return_lse=bool(given.return_lse),
    )


def canonical(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, alibi_slopes: Any, segment_ids: Any, sinks: Any
) -> Tensors:
    """The tensors of a call in `[B, T, N, H]`, after `check_inputs`."""
    (batch, length, heads, _), key_length = q.shape, k.shape[1]
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dtype not in FLOATS:
            got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise TypeError(f"bias must be a floating tensor, got {got}")
        bias = four("bias", bias, [batch, heads, length, key_length])
    q_ids, k_ids = segments(segment_ids, batch, length, key_length)
    if alibi_slopes is not None:
        alibi_slopes = per_head("alibi_slopes", alibi_slopes, batch, heads, batched=True)
        if torch.is_grad_enabled() and requires_grad(alibi_slopes):
            raise ValueError(
                "alibi_slopes requires a gradient and has none; pass alibi_slopes.detach(), or learn a bias"
            )
        alibi_slopes = alibi_slopes.detach().to(torch.float32)
    if sinks is not None:
        sinks = per_head("sinks", sinks, batch, heads, batched=False)
    return Tensors(
        q,
        k,
        v,
        bias=bias,
        query_segment_ids=q_ids,
        kv_segment_ids=k_ids,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )


def check_devices(tensors: Tensors) -> None:
    """A kernel would take the address of a tensor elsewhere for one of its own."""
    device = tensors.query.device
    for name, x in zip(Tensors._fields, tensors, strict=True):
        if x is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device}, q on {device}; move one to the other")


@functools.cache
def platform(device: torch.device) -> str:
    """ "cpu", or "sm90" and the like."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    if device.type == "cpu":
        return "cpu"
    raise ValueError(
        f"q is on {device}; jaxcap runs on CUDA and CPU tensors (for explain name one: platform='sm90')"
    )


def spec_of(
    settings: Settings,
    tensors: Tensors,
    gradients: tuple[str, ...] = (),
    elsewhere: str | None = None,
) -> AttentionSpec:
    """The static description of a call on canonical tensors, `elsewhere` as if on that platform."""
    check_settings(settings)
    q, v = tensors.query, tensors.value
    batch, length, heads, size = q.shape
    sides = [None if side < 0 else side for side in window(settings.window_size)]
    positions = tensors.query_positions is not None or tensors.kv_positions is not None
    bias, mask = tensors.bias, tensors.mask

    def shape(x: Tensor | None) -> Any:
        return None if x is None else tuple(x.shape)

    return AttentionSpec(
        batch=batch,
        query_length=length,
        key_length=v.shape[1],
        query_heads=heads,
        kv_heads=v.shape[2],
        head_size=size,
        value_size=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        scale=1 / math.sqrt(size) if settings.scale is None else float(settings.scale),
        softcap=arguments.soft_cap(settings.softcap),
        is_causal=bool(settings.causal),
        causal_alignment="top_left" if positions else "bottom_right",
        window=None if sides == [None, None] else (sides[0], sides[1]),
        bias_shape=shape(bias),
        bias_dtype=None if bias is None else str(bias.dtype).removeprefix("torch."),
        mask_shape=shape(mask),
        kv_lengths=tensors.kv_lengths is not None,
        segment_ids=tensors.query_segment_ids is not None,
        query_positions=tensors.query_positions is not None,
        kv_positions=tensors.kv_positions is not None,
        alibi=tensors.alibi_slopes is not None,
        sinks=tensors.sinks is not None,
        dropout_rate=float(settings.dropout_p),
        deterministic=settings.deterministic or ENVIRONMENT.deterministic,
        return_residual=settings.return_lse,
        gradients=gradients,
        platform=elsewhere or platform(q.device),
    )
