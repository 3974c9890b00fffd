"""A bias or mask on a shard: all columns of the shard's own rows, however it is split."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcap.arguments import four
from jaxcap.sharding.all_to_all import gathered, over, taken
from jaxcap.spec import Array


def own_rows(
    name: str,
    x: Any,
    axes: tuple[str, ...],
    size: int,
    wanted: tuple[int, int, int, int],
    lead: tuple[int, ...],
) -> Array:
    """`x` inside a shard_map as [B or 1, N or 1, T / P or 1, S or 1].

    Its rows may be the shard's (T / P) or all (T), its columns all (S) or, with all rows or none, the
    shard's (S / P). `wanted` are the shard's B, N, T / P and S / P.

    Where a shard is one key a column may be its own or everyone's. With the shard's rows it is
    everyone's; else its own: gathered, a column of everyone is P equal ones.

    Raises:
      ValueError: any other shape; one entry where a shard is one query and one key, which may be the
        shard's row, its column or everyone's.
    """
    array = jnp.asarray(x)
    batch, heads, rows, columns = wanted
    shape = (1,) * (2 - array.ndim) + tuple(array.shape)
    t, s = shape[-2:]
    known = t in (1, rows, rows * size) and s in (1, columns, columns * size)
    if known and not (size > 1 and t == rows > 1 and s == columns > 1):
        array = four(name, array, (batch, heads, t, s), lead)
    else:
        raise ValueError(
            f"{name} on a shard must broadcast to [.., {heads}, rows, columns] with {rows} (the"
            f" shard's) or {rows * size} (all) rows and {columns * size} (all) columns, or"
            f" {columns} (the shard's) with all rows or one; got {list(jnp.shape(x))}"
        )
    if size == 1:
        return array
    if t == s == rows == columns == 1:
        raise ValueError(
            f"{name} of one row and one column on a shard of one query and one key may be the"
            f" shard's row, its column or the same on all: pass all {size} columns"
        )
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    if s == columns and (s > 1 or t in (1, rows * size)):
        array = over(array, axes)
        if t == 1:
            if floating:
                return gathered(array, axes, 3)
            return jax.lax.all_gather(array, axes, axis=3, tiled=True)
        return jax.lax.all_to_all(array, axes, 2, 3, tiled=True)
    if t == rows * size:
        start = jax.lax.axis_index(axes) * rows
        if floating:
            return taken(array, start, rows, 2, axes)
        return jax.lax.dynamic_slice_in_dim(array, start, rows, 2)
    return array
