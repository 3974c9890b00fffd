"""Attention on packed sequences: `[total, N, H]` and where each sequence begins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcap import device
from jaxcap.arguments import expect, known_bounds, no_tensors
from jaxcap.attention import dot_product_attention
from jaxcap.spec import Alignment, Array

_OURS = (
    "query_segment_ids",
    "key_value_segment_ids",
    "query_positions",
    "key_value_positions",
    "query_seq_lengths",
    "key_value_seq_lengths",
)


def _bounds(name: str, x: Any, total: int) -> Array:
    """int32, within the tokens that there are; checked where the host knows the values."""
    known = _on_host(x)
    array = np.asarray(x) if known else jnp.asarray(x)
    if array.ndim != 1 or array.shape[0] < 2 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be [sequences + 1] integers, got {list(array.shape)} {array.dtype.name}"
        )
    if known:
        known_bounds(name, array, total)
    wide = array if array.dtype.itemsize >= 4 else array.astype(jnp.int32)  # `total` must fit
    return jnp.clip(wide, 0, total).astype(jnp.int32)


def _on_host(x: Any) -> bool:
    """Whether reading it waits for no accelerator."""
    if isinstance(x, jax.Array):
        known = not isinstance(x, Tracer) and x.is_fully_addressable
        return known and device.platform(x) == "cpu"
    if isinstance(x, list | tuple):
        return all(isinstance(bound, int | np.integer) for bound in x)
    return isinstance(x, np.ndarray)


def varlen_attention(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal_alignment: Alignment = "top_left",
    **keywords: Any,
) -> Any:
    """`dot_product_attention` of sequences packed one after another, each attending itself only.

    Sequence i holds the queries `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` and the keys likewise;
    what lies before the first or past the last bound is padding. Causality, windows and ALiBi count
    positions within a sequence, "bottom_right" aligns the ends of each.

    Args:
      query: `[total_q, N, H]`.
      key: `[total_k, K, H]`.
      value: `[total_k, K, V]`.
      cu_seqlens_q: `[sequences + 1]` int, not decreasing, within the tokens. That is checked where the
        host knows the values (NumPy, lists, arrays on a CPU); else, traced or on an accelerator, a bound
        past the tokens is moved to their end, and decreasing ones give wrong results.
      cu_seqlens_k: likewise; None is `cu_seqlens_q`.
      causal_alignment: as in `dot_product_attention`, for each sequence.
      **keywords: the other arguments of `dot_product_attention`.

    Returns:
      `[total_q, N, V]`, and the log-sum-exp `[total_q, N]` with `return_residual`.

    Raises:
      ValueError: shapes or bounds that do not fit, or a keyword that packing itself defines.

    Example:
      >>> q = jax.random.normal(jax.random.key(0), (10, 4, 16))
      >>> jaxcap.varlen_attention(q, q, q, jnp.array([0, 3, 10]), softcap=50.0).shape
      (10, 4, 16)

    Source: the packed entry of FlashAttention-2 (arXiv:2307.08691).
    """
    if taken := [name for name in _OURS if keywords.get(name) is not None]:
        raise ValueError(f"varlen_attention sets {', '.join(taken)} itself; leave it out")
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"causal_alignment must be 'top_left' or 'bottom_right', got {causal_alignment!r}"
        )
    tensors = {"query": query, "key": key, "value": value}
    no_tensors(tensors, "jaxcap.torch_bridge.varlen_attention")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 3:
            raise ValueError(f"{name} must be [total, heads, size], got {list(x.shape)}")
    q_bounds = _bounds("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    given = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    k_bounds = _bounds("cu_seqlens_k", given, key.shape[0])
    expect("cu_seqlens_k", k_bounds, tuple(q_bounds.shape))

    sequences = q_bounds.shape[0] - 1
    q_index, q_id = _locate(q_bounds, query.shape[0])
    k_index, k_id = _locate(k_bounds, key.shape[0])
    if causal_alignment == "bottom_right":
        longer = jnp.diff(k_bounds) - jnp.diff(q_bounds)
        q_index = q_index + longer[jnp.clip(q_id, 0, sequences - 1)]
    return dot_product_attention(
        query,
        key,
        value,
        query_segment_ids=jnp.where((q_id >= 0) & (q_id < sequences), q_id, -1),
        key_value_segment_ids=jnp.where((k_id >= 0) & (k_id < sequences), k_id, -2),
        query_positions=q_index,
        key_value_positions=k_index,
        **keywords,
    )


def _locate(bounds: Array, total: int) -> tuple[Array, Array]:
    """Of each token its position within its sequence, and the sequence's number."""
    token = jnp.arange(total, dtype=jnp.int32)
    number = jnp.searchsorted(bounds, token, side="right").astype(jnp.int32) - 1
    return token - bounds[jnp.clip(number, 0, bounds.shape[0] - 1)], number
