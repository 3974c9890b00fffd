"""Attention on shards, inside the user's own `shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import arguments, attention, selection
from jaxcap.keywords import bind
from jaxcap.sharding.bias import own_rows
from jaxcap.sharding.config import check_axes, names_of
from jaxcap.sharding.layout import LoadBalance, check_length, check_load_balance
from jaxcap.sharding.run import Sharded
from jaxcap.spec import Dropout, shape_of


def _size(name: str, axis: str) -> int:
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        there = tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
        raise ValueError(
            f"{name}: the axis {axis!r} is not one of a shard_map around this call, which has"
            f" {there or 'none'}; outside of one pass context_parallel=jaxcap.ContextParallel(...) to"
            " jaxcap.dot_product_attention"
        ) from None


def _checked_axes(
    name: str, axes: tuple[str, ...], batch_axes: Any, head_axis: Any
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes of the sequence's `axes`, and the names of those of the batch."""
    batch, head = check_axes(name, axes, batch_axes, head_axis)
    sizes = tuple(_size(name, a) for a in axes)
    for argument, names in (("batch_axes", batch), ("head_axis", head)):
        for a in names:
            _size(argument, a)
    return sizes, batch


def _offset_dropout(dropout: Dropout, batch_axes: tuple[str, ...], head: str | None) -> Dropout:
    """The places of this shard's batch entries and heads in the whole."""
    batch, heads = dropout.batch, dropout.head
    if batch_axes:
        batch = batch + jax.lax.axis_index(batch_axes) * batch.shape[0]
    if head is not None:
        heads = heads + jax.lax.axis_index(head) * heads.shape[0]
    return dropout._replace(batch=batch, head=heads)


def _call(
    kind: str,
    axis_argument: str,
    axes: tuple[str, ...],
    load_balance: LoadBalance,
    batch_axes: Any,
    head_axis: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    check_load_balance(load_balance)
    if "context_parallel" in keywords:
        raise ValueError(
            "context_parallel is for jaxcap.dot_product_attention outside of a shard_map"
        )
    given = bind(attention.dot_product_attention, arrays, keywords)
    sizes, batch = _checked_axes(axis_argument, axes, batch_axes, head_axis)
    requested = selection.requested(given.pop("implementation"))
    tiles = {name: given[name] for name in ("bias", "mask")}
    broadcast = given["dropout_broadcast"]
    spec, operands, lead = attention.prepare({**given, "bias": None, "mask": None})

    # 1. Which shard this is, and what lies where in the whole.
    sharded = Sharded(kind, axes, sizes, load_balance)
    layout = sizes[0] if kind == "hybrid" else sharded.size
    for name, length in (("query", spec.query_length), ("key", spec.key_length)):
        check_length(name, length * sharded.size, layout, load_balance)
    if operands.dropout is not None and not broadcast:
        dropout = _offset_dropout(operands.dropout, batch, head_axis)
        operands = operands._replace(dropout=dropout)

    # 2. Bias and mask, of which all columns are needed.
    shape = (spec.batch, spec.query_heads, spec.query_length, spec.key_length)
    for name, x in tiles.items():
        if x is None:
            continue
        checked = arguments.floating(name, x) if name == "bias" else arguments.boolean(name, x)
        own = own_rows(name, checked, axes, sharded.size, shape, lead)
        operands = operands._replace(**{name: own})
        changes: dict[str, Any] = {f"{name}_shape": shape_of(own)}
        if name == "bias":
            changes["bias_dtype"] = own.dtype.name
        spec = spec.replace(**changes)

    out, lse = sharded.attend(spec, operands, requested)
    out = out.reshape(*lead, *out.shape[1:])
    if not spec.return_residual:
        return out
    lse = jnp.swapaxes(lse, 1, 2)
    return out, lse.reshape(*lead, *lse.shape[1:])


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    axis_name: str | tuple[str, ...],
    load_balance: LoadBalance = "contiguous",
    batch_axes: str | tuple[str, ...] = (),
    head_axis: str | None = None,
    **keywords: Any,
) -> Any:
    """Ring attention inside a `shard_map` that splits the sequence over `axis_name`.

    The result is that of `jaxcap.dot_product_attention` on the whole sequence, of which every device
    has the shard that its queries are in. Layouts other than contiguous are those that
    `jaxcap.reorder_for_load_balance` makes; positions are the original ones. Works with
    `check_vma=True` and `False`, under jit, grad, vmap, scan and remat.

    Args:
      query: `[B, T / P, N, H]`.
      key: `[B, S / P, K, H]`.
      value: `[B, S / P, K, V]`.
      bias: broadcastable to `[B, N, rows, columns]`: the shard's rows (or all T) and all S columns, or
        the shard's columns (S / P) with all rows or one.
      mask: likewise, boolean.
      axis_name: the mesh axis that splits the sequence, or several, major first.
      load_balance: "contiguous", "zigzag" or "striped".
      batch_axes: mesh axes that split the batch; dropout counts on over them.
      head_axis: the mesh axis that splits the heads; likewise.
      **keywords: the others of `jaxcap.dot_product_attention`; segment ids and positions are the
        shard's, `[B, T / P]` and `[B, S / P]`, lengths those of the whole, `[B]`.

    Returns:
      `[B, T / P, N, V]`, and with `return_residual` the log-sum-exp `[B, T / P, N]` over all keys.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from jaxcap.sharding import ring_attention
      >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> ring = functools.partial(ring_attention, axis_name="context", softcap=50.0)
      >>> q = jnp.ones((1, 8, 2, 16))
      >>> jax.shard_map(ring, mesh=mesh, in_specs=P(None, "context"),
      ...               out_specs=P(None, "context"))(q, q, q).shape
      (1, 8, 2, 16)

    Source: Liu et al., "Ring attention with blockwise transformers", 2023 (arXiv:2310.01889).
    """
    arrays = (query, key, value, bias, mask)
    axes = names_of("axis_name", axis_name)
    return _call("ring", "axis_name", axes, load_balance, batch_axes, head_axis, arrays, keywords)


def all_gather_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    axis_name: str | tuple[str, ...],
    load_balance: LoadBalance = "contiguous",
    batch_axes: str | tuple[str, ...] = (),
    head_axis: str | None = None,
    **keywords: Any,
) -> Any:
    """As `ring_attention`, with all keys and values gathered at once: O(S) memory while it runs."""
    arrays = (query, key, value, bias, mask)
    axes = names_of("axis_name", axis_name)
    return _call(
        "all_gather", "axis_name", axes, load_balance, batch_axes, head_axis, arrays, keywords
    )


def all_to_all_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    axis_name: str | tuple[str, ...],
    load_balance: LoadBalance = "contiguous",
    batch_axes: str | tuple[str, ...] = (),
    head_axis: str | None = None,
    **keywords: Any,
) -> Any:
    """As `ring_attention`, with heads exchanged for sequence before and after an ordinary call.

    N must be a multiple of the P devices; so must K, or P of K, and then heads of keys and values are
    repeated P / K times.
    """
    arrays = (query, key, value, bias, mask)
    axes = names_of("axis_name", axis_name)
    return _call(
        "all_to_all", "axis_name", axes, load_balance, batch_axes, head_axis, arrays, keywords
    )


def hybrid_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    axis_a2a: str,
    axis_ring: str,
    load_balance: LoadBalance = "contiguous",
    batch_axes: str | tuple[str, ...] = (),
    head_axis: str | None = None,
    **keywords: Any,
) -> Any:
    """As `ring_attention` over `axis_ring`, each of its shards split in turn over `axis_a2a`.

    The sequence is split over `(axis_ring, axis_a2a)`, the ring's axis major; `load_balance` is the
    layout over the ring's axis. Heads divide by the all-to-all's axis as in `all_to_all_attention`.
    """
    arrays = (query, key, value, bias, mask)
    name = "axis_ring, axis_a2a"
    axes = names_of(name, (axis_ring, axis_a2a))
    return _call("hybrid", name, axes, load_balance, batch_axes, head_axis, arrays, keywords)
