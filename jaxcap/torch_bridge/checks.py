"""Checks of the tensors of a call from PyTorch; each error names the argument and says what to change."""

from typing import Any

import numpy as np
import torch

from jaxcap import arguments

Tensor = torch.Tensor
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def _shape(x: Any) -> list[Any]:
    return list(x.shape)


def layout(value: Any) -> None:
    if value not in ("bshd", "bhsd"):
        raise ValueError(f"layout must be 'bshd' or 'bhsd', got {value!r}")


def generator(value: Any, device: torch.device | None = None) -> None:
    """Without a device: whether it is one at all."""
    if value is None:
        return
    if not isinstance(value, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(value).__name__}")
    if device is not None and value.device.type != device.type:
        raise ValueError(
            f"generator is of {value.device}, q on {device}; make it torch.Generator({device.type!r})"
        )


def requires_grad(x: Tensor) -> bool:
    """Also of what `torch.func.vmap` has wrapped, which denies it."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        wrapped: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
        while wrapped.is_functorch_wrapped_tensor(x):
            x = wrapped.get_unwrapped(x)
    return x.requires_grad


def dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; pack its values for varlen_attention")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}; pass {name}.to_dense()")


def check_inputs(q: Any, k: Any, v: Any, order: str) -> None:
    """Raises ValueError or TypeError unless `[B, T, N, H]`, `[B, S, K, H]`, `[B, S, K, V]` fit together."""
    layout(order)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        dense(name, x)
        if x.dim() != 4:
            axes = (
                "[batch, length, heads, size]"
                if order == "bshd"
                else "[batch, heads, length, size]"
            )
            raise ValueError(f"{name} must be {axes} (layout={order!r}), got {_shape(x)}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, q {q.dtype}; cast one to the other")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; move one to the other")
        if 0 in x.shape:
            raise ValueError(f"{name} must have no axis of length 0, got {_shape(x)}")
    if order == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    (batch, _, heads, size), (_, length, kv_heads, _) = q.shape, k.shape
    wanted = [batch, length, kv_heads]
    if _shape(k) != [*wanted, size]:
        raise ValueError(
            f"k must be [{batch}, S, K, {size}] to go with q, got {_shape(k)} (as bshd)"
        )
    if _shape(v)[:3] != wanted:
        wanted = ", ".join(map(str, wanted))
        raise ValueError(f"v must be [{wanted}, V] to go with k, got {_shape(v)} (as bshd)")
    if heads % kv_heads:
        raise ValueError(f"q's {heads} heads must be a multiple of the {kv_heads} heads of k and v")
    if order == "bshd" and not torch.compiler.is_compiling():
        shapes = (q.shape[1], heads), (length, kv_heads)
        arguments.hint_at_layout("q", *shapes, ", of attention by layout='bhsd'")


def window(value: Any) -> tuple[int, int]:
    advice = "pass (left, right), -1 on a side for unbounded"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"window_size must have two sides, got {value!r}; {advice}")
    for side in value:
        if isinstance(side, bool) or not isinstance(side, int | np.integer):
            raise TypeError(f"window_size must be of ints, got {value!r}; {advice}")
        if side < -1:
            raise ValueError(f"window_size must not be below -1, got {value!r}; {advice}")
    left, right = (-1 if side >= 2**31 - 1 else int(side) for side in value)
    return left, right


def four(name: str, x: Tensor, full: list[int]) -> Tensor:
    """`[B or 1, N or 1, T or 1, S or 1]`."""
    dense(name, x)
    shape = [1] * (4 - x.dim()) + _shape(x)
    if len(shape) > 4 or any(s not in (1, f) for s, f in zip(shape, full, strict=True)):
        raise ValueError(f"{name} must broadcast to {full}, got {_shape(x)}")
    return x.reshape(shape)


def integers(name: str, x: Any, batch: int, length: int) -> Tensor:
    """`[B, length]` or `[length]` as `[B or 1, length]`."""
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of integers, got {got}")
    dense(name, x)
    if _shape(x) not in ([batch, length], [length]):
        raise ValueError(f"{name} must be {[batch, length]} or {[length]}, got {_shape(x)}")
    return x.reshape(-1, length)


def segments(value: Any, batch: int, length: int, key_length: int) -> tuple[Any, Any]:
    """int32 ids of the queries and of the keys, from one tensor or a pair."""
    if value is None:
        return None, None
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(
                f"segment_ids must be a tensor or (of q, of k), got {len(value)} of them"
            )
        q_ids, k_ids = value
    else:
        q_ids = k_ids = value
        if length != key_length:
            raise ValueError(
                f"segment_ids must be a pair (of q, of k) where the lengths differ, {length} and {key_length}"
            )
    found = integers("segment_ids of q", q_ids, batch, length)
    if q_ids is k_ids:
        (ids,) = narrow(found)
        return ids, ids
    of_q, of_k = narrow(found, integers("segment_ids of k", k_ids, batch, key_length))
    return of_q, of_k


def narrow(*ids: Tensor) -> tuple[Tensor, ...]:
    """The same equalities in int32: wide ids by their rank in their batch, which asks the device nothing."""
    if all(x.dtype != torch.int64 for x in ids):
        return tuple(x.to(torch.int32) for x in ids)
    batch = max(x.shape[0] for x in ids)
    joined = torch.cat([x.to(torch.int64).expand(batch, -1) for x in ids], 1)
    ordered, places = joined.sort(1)
    new = torch.zeros_like(places, dtype=torch.int32)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ranks = torch.empty_like(new).scatter_(1, places, new.cumsum(1, dtype=torch.int32))
    return tuple(ranks.split([x.shape[1] for x in ids], 1))


def per_head(name: str, x: Any, batch: int, heads: int, *, batched: bool) -> Tensor:
    """`[N]`, or `[B, N]` where `batched`, as `[B or 1, N]` float32."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a floating tensor, got {got}")
    dense(name, x)
    shapes = [[heads], [batch, heads]] if batched else [[heads]]
    if _shape(x) not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, got {_shape(x)}")
    return x.reshape(-1, heads)
