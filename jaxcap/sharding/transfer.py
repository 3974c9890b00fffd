"""What travels around a ring: everything that is due at a time as one array.

XLA has one collective under way beside a kernel, unless a flag says otherwise. Of two that are due, one is
hidden behind the kernel and the other waited for; joined, both are hidden. The copies that joining costs
go at the speed of memory, some ten times that of the fastest link.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap.spec import Array


def shift(tree: Any, axes: tuple[str, ...], size: int, by: int) -> Any:
    """Each device's arrays to the device `by` ranks above."""
    if by % size == 0:
        return tree
    pairs = [(i, (i + by) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)


def joined(arrays: Sequence[Array]) -> Array:
    """[chunks, ...] of arrays that differ in their last axis; several dtypes as the bits of the widest.

    Chunks of one width: an array that is one of them is taken out without a copy.
    """
    widest = max((x.dtype for x in arrays), key=lambda dtype: dtype.itemsize)
    whole = [_as(widest, x) for x in arrays]
    width = math.gcd(*(x.shape[-1] for x in whole))
    return jnp.stack([x[..., i : i + width] for x in whole for i in range(0, x.shape[-1], width)])


def parted(x: Array, like: Sequence[Array]) -> list[Array]:
    """The inverse of `joined`: arrays of the shapes and dtypes of `like`."""
    found, start = [], 0
    for y in like:
        stop = start - (-y.shape[-1] * y.dtype.itemsize // (x.dtype.itemsize * x.shape[-1]))
        part, start = jnp.concatenate([x[i] for i in range(start, stop)], -1), stop
        if y.dtype != x.dtype:
            part = jax.lax.bitcast_convert_type(part, y.dtype)
            part = part.reshape(*y.shape[:-1], -1)[..., : y.shape[-1]]
        found.append(part)
    return found


def _as(wide: Any, x: Array) -> Array:
    """The bits of `x`, several to one of `wide`, the last of them zeros."""
    if x.dtype == wide:
        return x
    ratio = wide.itemsize // x.dtype.itemsize
    if short := -x.shape[-1] % ratio:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, ratio), wide)
