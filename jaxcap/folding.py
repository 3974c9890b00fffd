"""A vmapped axis becomes part of the batch, so that no backend needs a batching rule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap.spec import Array, AttentionSpec, Dropout, Gradients, Operands

# Of `Operands`: first axis [B], always; or [B or 1].
_FULL = ("query", "key", "value", "query_lengths", "kv_lengths")


def _fold(x: Any, batched: bool, axis_size: int, batch: int, full: bool) -> Any:
    """[(V,) B or 1, ...] -> [V * B or 1, ...], row v * B + b."""
    if x is None:
        return None
    if batched:
        rest = x.shape[2:]
        wide = jnp.broadcast_to(x, (axis_size, batch, *rest))
    elif not full and x.shape[0] == 1:
        return x  # shared by all
    else:
        rest = x.shape[1:]
        wide = jnp.broadcast_to(x, (axis_size, batch, *rest))
    return wide.reshape(axis_size * batch, *rest)


def _fold_dropout(dropout, batched, axis_size: int, batch: int) -> Dropout | None:
    if dropout is None:
        return None
    if batched.head or batched.query or batched.key:
        raise NotImplementedError("vmap over the offsets of dropout")
    return dropout._replace(
        rng=_fold(dropout.rng, batched.rng, axis_size, batch, full=False),
        batch=_fold(dropout.batch, batched.batch, axis_size, batch, full=True),
    )


def fold_operands(
    operands: Operands, batched: Any, axis_size: int, batch: int, expanded: tuple[str, ...]
) -> Operands:
    """`expanded` names operands that get a row for each batch entry even where all share one."""
    folded = {}
    for name in Operands._fields:
        if name == "dropout":
            folded[name] = _fold_dropout(operands.dropout, batched.dropout, axis_size, batch)
            continue
        full = name in _FULL or name in expanded
        x, is_batched = getattr(operands, name), getattr(batched, name)
        folded[name] = _fold(x, bool(is_batched), axis_size, batch, full)
    return Operands(**folded)


def folds_vmap(function: Callable, spec: AttentionSpec) -> Callable:
    """`function(operands, *arrays)`, arrays [B, ...], with every vmapped axis folded into B."""

    @jax.custom_batching.custom_vmap
    def run(operands: Operands, *arrays: Array):
        return function(operands, *arrays)

    @run.def_vmap
    def rule(axis_size, batched, operands: Operands, *arrays):
        batched_operands, *batched_arrays = batched
        query = operands.query
        batch = query.shape[1] if batched_operands.query else query.shape[0]
        # A gradient that is a sum over the batch must not be one over the vmapped axis.
        summed = tuple(n for n in ("bias", "sinks") if n in spec.gradients and arrays)
        inner = fold_operands(operands, batched_operands, axis_size, batch, summed)
        flat = [
            _fold(x, flag, axis_size, batch, full=True)
            for x, flag in zip(arrays, batched_arrays, strict=True)
        ]
        results = folds_vmap(function, spec)(inner, *flat)
        apart = jax.tree.map(lambda x: x.reshape(axis_size, batch, *x.shape[1:]), results)
        if isinstance(apart, Gradients):
            for name in summed:
                x = getattr(operands, name)
                rows = x.shape[1] if getattr(batched_operands, name) else x.shape[0]
                if rows == 1:
                    grad = jnp.sum(getattr(apart, name), axis=1, keepdims=True)
                    apart = apart._replace(**{name: grad})
        return apart, jax.tree.map(lambda _: True, apart)

    return run
