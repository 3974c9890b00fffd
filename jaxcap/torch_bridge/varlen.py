"""`varlen_attention` on PyTorch tensors: sequences packed one after another."""

from typing import Any

import torch

from jaxcap.arguments import known_bounds
from jaxcap.keywords import hinted
from jaxcap.torch_bridge import checks
from jaxcap.torch_bridge.call import Tensor, canonical, settings_of
from jaxcap.torch_bridge.functional import attend, autocast, eager


def _bounds(name: str, x: Any, device: torch.device, total: int) -> Tensor:
    """int32, within the tokens that there are; checked where the host knows the values."""
    if not isinstance(x, Tensor) or x.dtype not in checks.INTEGERS or x.dim() != 1 or len(x) < 2:
        got = f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [sequences + 1] integers, got {got}")
    checks.dense(name, x)
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}; move one to the other")
    if x.device.type == "cpu" and eager(x):
        known_bounds(name, x.tolist(), total)
    wide = x if x.dtype == torch.int64 else x.to(torch.int32)
    return wide.clamp(0, total).to(torch.int32)


def _locate(bounds: Tensor, total: int, outside: int) -> tuple[Tensor, Tensor]:
    """Of each token its position within its sequence and the sequence's number, `outside` for padding."""
    token = torch.arange(total, dtype=torch.int32, device=bounds.device)
    number = torch.searchsorted(bounds, token, right=True, out_int32=True) - 1
    sequences = len(bounds) - 1
    inside = (number >= 0) & (number < sequences)
    place = token - bounds[number.clamp(0, sequences)]
    return place, torch.where(inside, number, outside)


@hinted
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    softcap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """`attention` of sequences packed one after another, each attending itself only.

    Sequence i holds the queries `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` and the keys likewise; tokens
    before the first or past the last bound are padding.
    **Causality is bottom-right aligned in each sequence, -1 in a window is unbounded, as in FlashAttention.**
    Bounds on a GPU are not read back to the host, nor are those that `torch.compile` sees: there one outside
    the tokens is moved to their end, and decreasing ones give wrong results; on a CPU both are errors. A call
    that runs directly can be captured in a CUDA graph, and its bounds may change between replays; long inputs
    (where `[total_q, total_k]` bytes are more than twice the largest tensor) go through JAX, which cannot.

    Args:
      q: `[total_q, N, H]`.
      k: `[total_k, K, H]`.
      v: `[total_k, K, V]`.
      cu_seqlens_q: `[sequences + 1]` int, not decreasing, within the tokens, as a rule 0 first.
      cu_seqlens_k: likewise; None is `cu_seqlens_q`.
      alibi_slopes: `[N]`.

    The other arguments are those of `attention`.

    Returns:
      `[total_q, N, V]`, and with `return_lse` the log-sum-exp `[N, total_q]`.

    Raises:
      ValueError, TypeError, jaxcap.BackendError: as `attention`.

    Example:
      >>> q = torch.randn(10, 4, 16)
      >>> bounds = torch.tensor([0, 3, 10])
      >>> torch_bridge.varlen_attention(q, q, q, bounds, softcap=50.0, causal=True).shape
      torch.Size([10, 4, 16])

    Source: the packed entry of FlashAttention-2 (arXiv:2307.08691).
    """
    if torch.are_deterministic_algorithms_enabled():
        deterministic = True
    settings = settings_of(
        softcap, causal, window_size, scale, dropout_p, deterministic, return_lse, backend
    )
    checks.generator(generator)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor):
            checks.dense(name, x)
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be [total, heads, size], got {got}")
    q, k, v = autocast(q[None], k[None], v[None])
    checks.check_inputs(q, k, v, "bshd")
    tensors = canonical(q, k, v, None, alibi_slopes, None, sinks)
    bounds = _bounds("cu_seqlens_q", cu_seqlens_q, q.device, q.shape[1])
    q_place, q_ids = _locate(bounds, q.shape[1], -1)
    if cu_seqlens_k is None and q.shape[1] == k.shape[1]:
        # Indices differ as positions do wherever the ids are equal.
        k_place, k_ids = None, torch.where(q_ids < 0, -2, q_ids)
    else:
        given = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        k_bounds = _bounds("cu_seqlens_k", given, q.device, k.shape[1])
        if k_bounds.shape != bounds.shape:
            raise ValueError(
                f"cu_seqlens_k must be as long as cu_seqlens_q, {len(bounds)}, got {len(k_bounds)}"
            )
        k_place, k_ids = _locate(k_bounds, k.shape[1], -2)
        longer = k_bounds.diff() - bounds.diff()
        q_place = q_place + longer[q_ids.clamp(min=0)]
    tensors = tensors._replace(
        query_segment_ids=q_ids[None],
        kv_segment_ids=k_ids[None],
        query_positions=None if k_place is None else q_place[None],
        kv_positions=None if k_place is None else k_place[None],
    )
    out, lse = attend(settings, tensors, generator)
    return (out[0], lse[0]) if return_lse else out[0]
