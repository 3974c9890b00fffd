"""A call cut into tiles: what the forward and the backward of `blockwise` do alike.

Letters as in spec.py, and G = N / K query heads to a KV head, tq and tk the sizes of a tile. Inside
a tile arrays are [B, K, G, tq, ...] and [B, K, tk, ...]: G is an axis of its own, so that K and V
are not repeated, and B and K are, so that XLA can split them over devices.

Where tiles do not divide an axis, the last tile is moved back to end with the array: it shares rows
with the tile before it, and nothing is padded.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcap import dropout, mask, softcap, tile_tables, tiles
from jaxcap.reference import precision_of
from jaxcap.spec import Array, AttentionSpec, Operands

# Most logits of a tile over batch and heads. On CPU 2**19 of them (2 MiB) stay in the second-level
# cache. CPU milliseconds of forward and backward by tile, causal, D = 64, two cores of a Xeon
# (Sapphire Rapids) shared with other work, so that the clock on the wall said less:
#                               64    128    256    512   unfused
#     B 8, N 4, T 512    f32   147    110    185    938       440
#                        bf16   91     63     96    367       344
#     B 1, N 4, T 2048   f32   209    210    211    364      1404
#                        bf16  133     92    114    147      1198
#     B 1, N 1, T 8192   bf16  470    359    348    389         -
# Elsewhere launches cost more than caches give: larger, by reasoning and not by measurement.
TILE_LOGITS_ON_CPU = 2**19
TILE_LOGITS = 2**24


def tile_sizes(spec: AttentionSpec) -> tuple[int, int]:
    """The most queries and keys of a tile: 64 to 512, and more keys where there are few queries."""
    most = TILE_LOGITS_ON_CPU if spec.platform == "cpu" else TILE_LOGITS
    heads = spec.batch * spec.query_heads
    size = 512
    while size > 64 and heads * size * size > most:
        size //= 2
    keys = size
    while keys < 8192 and heads * spec.query_length * keys * 2 <= most:
        keys *= 2
    return size, keys


def tile_size(length: int, most: int) -> int:
    """Even tiles of at most `most`, in multiples of 8 where there are several."""
    count = -(-length // most)
    return max(length, 1) if count <= 1 else -(-length // (8 * count)) * 8


def _varying_axes(x: Any) -> frozenset:
    return getattr(jax.typeof(x), "manual_axis_type").varying  # noqa: B009  (unknown to pyright)


def varying_over(*trees: Any) -> Callable[[Array], Array]:
    """Marks a constant as varying over every mesh axis that some array varies over.

    Inside shard_map a loop's carry must vary from the start if it will at the end.
    """
    axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(trees)))

    def mark(x: Array) -> Array:
        missing = tuple(axes - _varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return mark


def loop(count: Any, step: Callable, carry: Any) -> Any:
    """`step(n, carry)` for n below `count`, n int32; no loop around a single step."""
    if isinstance(count, int):
        if count <= 1:
            return step(0, carry) if count == 1 else carry
        count = np.int32(count)
    return jax.lax.fori_loop(np.int32(0), count, step, carry)


def take(x: Array, start: Any, size: int, axis: int) -> Array:
    return x if x.shape[axis] == size else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def put(x: Array, part: Array, starts: tuple[Any, ...]) -> Array:
    part = part.astype(x.dtype)
    if x.shape == part.shape:
        return part
    starts = tuple(jnp.asarray(start, jnp.int32) for start in starts)
    return jax.lax.dynamic_update_slice(x, part, starts)


def put_sum(x: Array, part: Array, starts: tuple[Any, ...]) -> Array:
    if x.shape == part.shape:
        return x + part
    starts = tuple(jnp.asarray(start, jnp.int32) for start in starts)
    return put(x, jax.lax.dynamic_slice(x, starts, part.shape) + part, starts)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    axes = tuple(a for a, size in enumerate(shape) if size == 1 and x.shape[a] != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def cleared(x: Array, used: Array) -> Array:
    """`x` with zeros in rows that take no part, which may hold NaN."""
    return jnp.where(used[..., None], x, jnp.zeros_like(x))


class Keys(NamedTuple):
    """A KV tile."""

    index: Any
    start: Any
    k: Array  # [B, K, tk, H]
    v: Array  # [B, K, tk, V]


class Chunks:
    def __init__(self, spec: AttentionSpec, operands: Operands, tq: int, tk: int):
        self.spec, self.operands = spec, operands
        self.tq = tile_size(spec.query_length, tq)
        self.tk = tile_size(spec.key_length, tk)
        self.grid = tiles.Grid.of(spec, self.tq, self.tk)
        # Where no table is needed: what any, and what every entry of the batch has.
        self.lengths = [
            None if x is None else tiles.Lengths(jnp.min(x), jnp.max(x))
            for x in (operands.query_lengths, operands.kv_lengths)
        ]
        self.visits = None
        if tile_tables.needs_pairs(spec) and self.grid.kv_tiles > 1:
            some, every = tile_tables.pairs(spec, operands, self.grid)
            self.visits = tile_tables.visits(jnp.any(some, (0, 1)), jnp.all(every, (0, 1)))
        self.dot = functools.partial(
            jnp.einsum, precision=precision_of(spec), preferred_element_type=spec.accumulator
        )

    # Which tiles.

    def for_queries(self, step: Callable, carry: Any) -> Any:
        """`step(i, carry)` for each Q tile, the last one first: the rows that it shares with its
        neighbour are put down again by that one, which visits all the KV tiles they need."""
        count = self.grid.q_tiles
        return loop(count, lambda n, c: step(count - 1 - n, c), carry)

    def for_keys(self, i: Any, step: Callable, carry: Any) -> Any:
        """`step(j, masked, carry)` for the KV tiles that Q tile `i` needs."""
        if self.grid.kv_tiles <= 1:
            return loop(self.grid.kv_tiles, lambda n, c: step(n, True, c), carry)
        if self.visits is not None:
            order, partial, stop = (x[i] for x in self.visits)
            carry = loop(partial, lambda n, c: step(order[n], True, c), carry)
            return loop(stop - partial, lambda n, c: step(order[partial + n], False, c), carry)

        first, stop, full_first, full_stop = self.grid.kv_range(i, *self.lengths)
        before, full = full_first - first, full_stop - full_first

        def partial_step(n, c):
            return step(jnp.where(n < before, first + n, full + first + n), True, c)

        carry = loop(stop - first - full, partial_step, carry)
        return loop(full, lambda n, c: step(full_first + n, False, c), carry)

    # What is in them.

    def heads(self, x: Array) -> Array:
        """[B or 1, N or 1, ...] -> [B or 1, K or 1, G or 1, ...]"""
        split = (1, 1) if x.shape[1] == 1 else (self.spec.kv_heads, self.spec.group_size)
        return x.reshape(x.shape[0], *split, *x.shape[2:])

    def query_start(self, i: Any) -> Any:
        if self.grid.q_tiles == 1:
            return 0
        return jnp.minimum(i * self.tq, self.spec.query_length - self.tq)

    def queries(self, x: Array, start: Any) -> Array:
        """Of [B, T, N, D] the tile [B, K, G, tq, D]."""
        return self.heads(jnp.swapaxes(take(x, start, self.tq, 1), 1, 2))

    def keys(self, j: Any) -> Keys:
        start = 0
        if self.grid.kv_tiles > 1:
            start = jnp.minimum(j * self.tk, self.spec.key_length - self.tk)
        k, v = (
            jnp.swapaxes(take(x, start, self.tk, 1), 1, 2)
            for x in (self.operands.key, self.operands.value)
        )
        return Keys(j, start, k, v)

    def kept(self, q_start: Any, keys: Keys) -> Array | None:
        """[B or 1, K or 1, G or 1, tq or 1, tk or 1]: what takes part in a tile."""
        kept = mask.keep_tile(self.spec, self.operands, q_start, self.tq, keys.start, self.tk)
        if self.spec.key_length % self.tk:  # without the keys that the tile before has seen
            index = keys.start + jnp.arange(self.tk, dtype=jnp.int32)
            new = (index >= keys.index * self.tk)[None, None, None]
            kept = new if kept is None else kept & new
        return kept if kept is None else self.heads(kept)

    def scores(self, q: Array, q_start: Any, keys: Keys) -> tuple[Array, Array]:
        """(capped, with bias and ALiBi), both [B, K, G, tq, tk], nothing masked."""
        spec, operands = self.spec, self.operands
        products = self.dot("bkgth,bksh->bkgts", q, keys.k)
        capped = softcap.cap(products * spec.scale, spec.softcap, spec.layer_scale)
        scores = capped
        if operands.bias is not None:
            bias = mask.tile_of(operands.bias, q_start, self.tq, keys.start, self.tk)
            scores = scores + self.heads(bias.astype(spec.accumulator))
        if operands.alibi_slopes is not None:
            q_pos = mask.query_side(spec, operands, q_start, self.tq).position
            k_pos = mask.key_side(spec, operands, keys.start, self.tk).position
            distance = jnp.abs(q_pos[:, :, None] - k_pos[:, None, :]).astype(spec.accumulator)
            slopes = self.heads(operands.alibi_slopes.astype(spec.accumulator))
            scores = scores - slopes[..., None, None] * distance[:, None, None]
        return capped, scores

    def survivors(self, q_start: Any, keys: Keys) -> Array | None:
        """[B, K, G, tq, tk]: what dropout keeps; None where it is off."""
        if self.operands.dropout is None:
            return None
        place = (q_start, self.tq, keys.start, self.tk)
        return self.heads(dropout.keep_tile(self.spec.dropout_rate, self.operands.dropout, *place))
