"""All-to-all: a shard of the sequence with all heads becomes the sequence with a shard of the heads.

The call in between is an ordinary one on N / P heads, balanced whatever the masks are, or, in hybrid
attention, one that is sharded over another axis in turn. Before and after it each device exchanges
(P - 1) / P of its queries, keys, values and outputs. Memory is that of the shard's arrays twice.

K key/value heads on more devices: each is repeated until every device has one, if P is a multiple
of K. Their gradients are summed in float32.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023 (arXiv:2309.14509).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap.partitioning import vary, varying_axes
from jaxcap.placement import add_up
from jaxcap.sharding.layout import LoadBalance, reorder_for_load_balance, restore_order
from jaxcap.spec import Array, AttentionSpec, Operands

Axes = tuple[str, ...]


def refusal(spec: AttentionSpec, size: int) -> str | None:
    """Why the heads of a call cannot be exchanged for the sequence; None if they can."""
    if spec.query_heads % size:
        return (
            f"an all-to-all over {size} devices needs a multiple of {size} query heads, got"
            f" {spec.query_heads}"
        )
    if spec.kv_heads % size and size % spec.kv_heads:
        return (
            f"an all-to-all over {size} devices splits key/value heads that are a multiple of"
            f" {size}, or repeats those that divide {size}; got {spec.kv_heads}"
        )
    return None


def split_rows(spec: AttentionSpec, rows: int) -> bool:
    """Whether `rows` of a bias or mask are the shard's, of a call on a shard.

    Where a shard is one query a row may be its own or everyone's. Its own it is then: gathered, a row
    of everyone is P equal ones, of which the gradients add up.
    """
    return rows > 1 or spec.query_length == 1


def exchanged(spec: AttentionSpec, size: int) -> AttentionSpec:
    """The call in between, of a call on a shard."""

    def heads(shape):
        if shape is None:
            return None
        batch, count, rows, columns = shape
        split = split_rows(spec, rows)
        return batch, max(1, count // size), rows * size if split else 1, columns

    return spec.replace(
        query_length=spec.query_length * size,
        key_length=spec.key_length * size,
        query_heads=spec.query_heads // size,
        kv_heads=max(1, spec.kv_heads // size),
        bias_shape=heads(spec.bias_shape),
        mask_shape=heads(spec.mask_shape),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def repeated(x: Array, times: int, axis: int) -> Array:
    """Each entry along `axis` `times` times; the gradient is summed in float32."""
    return jnp.repeat(x, times, axis)


def _repeated_fwd(x, times, axis):
    return repeated(x, times, axis), None


def _repeated_bwd(times, axis, _, g):
    wide = g if g.dtype == jnp.float64 else g.astype(jnp.float32)
    shape = (*g.shape[:axis], g.shape[axis] // times, times, *g.shape[axis + 1 :])
    return (jnp.sum(wide.reshape(shape), axis + 1).astype(g.dtype),)


repeated.defvjp(_repeated_fwd, _repeated_bwd)


def over(x: Array, axes: Axes) -> Array:
    """`x` as one that may differ between devices along `axes`, which shard_map may track."""
    return vary(x, varying_axes(jax.lax.axis_index(axes)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: Array, axes: Axes, axis: int) -> Array:
    """`all_gather` along `axis`; the gradient is summed in float32."""
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True)


def _gathered_fwd(x, axes, axis):
    return gathered(x, axes, axis), None


def _gathered_bwd(axes, axis, _, g):
    wide = g if g.dtype == jnp.float64 else g.astype(jnp.float32)
    part = jax.lax.psum_scatter(wide, axes, scatter_dimension=axis, tiled=True)
    return (part.astype(g.dtype),)


gathered.defvjp(_gathered_fwd, _gathered_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def taken(x: Array, start: Array, count: int, axis: int, axes: Axes) -> Array:
    """`count` entries along `axis` from `start`, which depends on the device along `axes`.

    The gradient, where x is the same on all devices, is summed in float32.
    """
    del axes
    return jax.lax.dynamic_slice_in_dim(x, start, count, axis)


def _taken_fwd(x, start, count, axis, axes):
    return taken(x, start, count, axis, axes), (x, start)


def _taken_bwd(count, axis, axes, saved, g):
    del count
    x, start = saved
    wide = g if g.dtype == jnp.float64 else g.astype(jnp.float32)
    zeros = jnp.zeros(x.shape, wide.dtype)
    full = jax.lax.dynamic_update_slice_in_dim(zeros, wide, start, axis)
    extra = tuple((varying_axes(full) & set(axes)) - varying_axes(x))
    return add_up(full, extra).astype(g.dtype), None


taken.defvjp(_taken_fwd, _taken_bwd)


class Exchange:
    """Between the two layouts of a call; arrays inside are in the original order of the tokens."""

    def __init__(self, axes: Axes, size: int, load_balance: LoadBalance, spec: AttentionSpec):
        self.axes, self.size, self.spec = axes, size, spec
        self.load_balance: LoadBalance = load_balance

    def _restored(self, x: Array, axis: int) -> Array:
        return restore_order(x, self.size, self.load_balance, axis)

    def _swap(self, x: Array, split: int, concat: int) -> Array:
        return jax.lax.all_to_all(x, self.axes, split, concat, tiled=True)

    def whole_sequence(self, x: Array) -> Array:
        """[B, T / P, N, D] -> [B, T, N / P, D]"""
        return self._restored(self._swap(x, 2, 1), 1)

    def _keys(self, x: Array) -> Array:
        if self.spec.kv_heads % self.size:
            x = repeated(x, self.size // self.spec.kv_heads, 2)
        return self.whole_sequence(x)

    def _row(self, x: Array | None) -> Array | None:
        """[B or 1, T / P] -> [B or 1, T]"""
        if x is None:
            return None
        return self._restored(jax.lax.all_gather(x, self.axes, axis=1, tiled=True), 1)

    def _heads(self, x: Any, axis: int = 1) -> Any:
        """The heads of this device."""
        if x is None or x.shape[axis] == 1:
            return x
        count = x.shape[axis] // self.size
        start = jax.lax.axis_index(self.axes) * count
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jax.lax.dynamic_slice_in_dim(x, start, count, axis)
        return taken(x, start, count, axis, self.axes)

    def _tile(self, x: Any) -> Array | None:
        """Of a bias or mask [B or 1, N or 1, T / P or 1, S or 1] the heads, all rows."""
        if x is None:
            return None
        if not split_rows(self.spec, x.shape[2]):
            return self._restored_tile(self._heads(x))
        x = over(x, self.axes)
        if x.shape[1] == 1:
            x = gathered(x, self.axes, 2) if jnp.issubdtype(x.dtype, jnp.floating) else self._all(x)
        else:
            x = self._swap(x, 1, 2)
        return self._restored_tile(x)

    def _restored_tile(self, x: Array) -> Array:
        for axis in (2, 3):
            if x.shape[axis] != 1:
                x = self._restored(x, axis)
        return x

    def _all(self, x: Array) -> Array:
        return jax.lax.all_gather(x, self.axes, axis=2, tiled=True)

    def inside(self, operands: Operands) -> Operands:
        dropout = operands.dropout
        if dropout is not None:
            dropout = dropout._replace(head=self._heads(dropout.head, axis=0))
        return Operands(
            query=self.whole_sequence(operands.query),
            key=self._keys(operands.key),
            value=self._keys(operands.value),
            bias=self._tile(operands.bias),
            mask=self._tile(operands.mask),
            query_lengths=operands.query_lengths,
            kv_lengths=operands.kv_lengths,
            query_segment_ids=self._row(operands.query_segment_ids),
            kv_segment_ids=self._row(operands.kv_segment_ids),
            query_positions=self._row(operands.query_positions),
            kv_positions=self._row(operands.kv_positions),
            alibi_slopes=self._heads(operands.alibi_slopes),
            sinks=self._heads(operands.sinks),
            dropout=dropout,
        )

    def outside(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """[B, T, N / P, V] and [B, N / P, T] -> [B, T / P, N, V] and [B, N, T / P]"""
        out = reorder_for_load_balance(out, self.size, self.load_balance, 1)
        lse = reorder_for_load_balance(lse, self.size, self.load_balance, 2)
        return self._swap(out, 1, 2), self._swap(lse, 2, 1)


def attend(
    axes: Axes,
    size: int,
    load_balance: LoadBalance,
    spec: AttentionSpec,
    operands: Operands,
    inner: Callable[[AttentionSpec, Operands], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """(out, lse) of a shard, by `inner(spec, operands)` on all of the sequence and some heads."""
    if size == 1:
        return inner(spec, operands)
    exchange = Exchange(axes, size, load_balance, spec)
    given: Any = exchange.inside(operands)
    return exchange.outside(*inner(exchanged(spec, size), given))
