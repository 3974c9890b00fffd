"""Where the tokens of a sequence lie on P devices: contiguous, zigzag or striped.

With 8 tokens on 2 devices:

    contiguous   0 1 2 3 | 4 5 6 7
    zigzag       0 1 6 7 | 2 3 4 5      device i holds the chunks i and 2P - 1 - i of 2P
    striped      0 2 4 6 | 1 3 5 7      device i holds the tokens i, i + P, i + 2P, ...

Under causality a contiguous layout leaves the first device little to do and the last one everything;
the two others give all the same.

Sources: Zhu, "Zigzag ring attention", 2024 (ring-flash-attention); Brandon et al., "Striped
attention", 2023 (arXiv:2311.09431).
"""

import operator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LoadBalance = Literal["contiguous", "zigzag", "striped"]
LOAD_BALANCES = ("contiguous", "zigzag", "striped")


class Run(NamedTuple):
    """Neighbours in a shard: place `offset + i` holds token `start + stride * i`, i < length."""

    offset: int
    length: int
    start: Any
    stride: int


def runs(load_balance: str, length: int, size: int, rank: Any) -> tuple[Run, ...]:
    """The runs of the shard `rank`, an int, NumPy array or traced, of `length` tokens."""
    if size == 1 or load_balance == "contiguous":
        return (Run(0, length, rank * length, 1),)
    if load_balance == "striped":
        return (Run(0, length, rank, size),)
    half = length // 2
    last = 2 * size - 1
    return Run(0, half, rank * half, 1), Run(half, half, (last - rank) * half, 1)


def _count(name: str, what: str, value: Any, least: int = 1) -> int:
    """An int, Python's or NumPy's; ValueError otherwise."""
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return count


def _devices(size: Any) -> int:
    return _count("size", "the number of devices, a positive int", size)


def _axis(x: Any, axis: Any) -> int:
    place = _count("axis", f"one of an array of shape {list(x.shape)}", axis, -x.ndim)
    if place >= x.ndim:
        raise ValueError(f"axis must be one of an array of shape {list(x.shape)}, got {axis!r}")
    return place % x.ndim


def check_load_balance(load_balance: Any) -> None:
    if load_balance not in LOAD_BALANCES:
        raise ValueError(f"load_balance must be one of {LOAD_BALANCES}, got {load_balance!r}")


def length_multiple(size: int, load_balance: str = "zigzag") -> int:
    """What a length must be a multiple of on `size` devices: twice the size for "zigzag"."""
    check_load_balance(load_balance)
    size = _devices(size)
    return 2 * size if load_balance == "zigzag" and size > 1 else size


def check_length(name: str, length: int, size: int, load_balance: str) -> None:
    multiple = length_multiple(size, load_balance)
    if length % multiple:
        padded = -(-length // multiple) * multiple
        raise ValueError(
            f"{name} has length {length}, which {size} devices in the {load_balance} layout need to"
            f" be a multiple of {multiple}: pad to {padded} with jaxcap.pad_to_multiple(x, {multiple})"
            " and mask the rest with query_seq_lengths and key_value_seq_lengths, or segment ids"
        )


def pad_to_multiple(x: Any, multiple: int, axis: int = 1, value: Any = 0) -> Any:
    """`x` with `value` appended along `axis` until its length is a multiple.

    Pad before `reorder_for_load_balance`, and mask the padding: by lengths or by a segment id.

    Args:
      x: `[B, T, ...]`, or any other array and its `axis`; NumPy stays NumPy.
      multiple: of `length_multiple(devices, load_balance)`, for example.
      axis: the axis of the length.
      value: what to append.

    Raises:
      ValueError: multiple is not a positive int, or there is no such axis.

    Example:
      >>> import numpy as np, jaxcap
      >>> jaxcap.pad_to_multiple(np.ones((2, 13)), 8).shape
      (2, 16)
    """
    multiple = _count("multiple", "a positive int", multiple)
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    axis = _axis(x, axis)
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return (jnp if isinstance(x, jax.Array) else np).pad(x, widths, constant_values=value)


def _prepared(x: Any, size: int, load_balance: str, axis: int) -> tuple[Any, Any, int]:
    check_load_balance(load_balance)
    size = _devices(size)
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    axis = _axis(x, axis)
    check_length(f"axis {axis} of x", x.shape[axis], size, load_balance)
    return x, jnp if isinstance(x, jax.Array) else np, axis


def _part(x: Any, axis: int, index: Any) -> Any:
    return x[(slice(None),) * axis + (index,)]


def reorder_for_load_balance(
    x: Any, size: int, load_balance: LoadBalance = "zigzag", axis: int = 1
) -> Any:
    """`x` in the order in which a sequence is split over `size` devices.

    For the data pipeline: reorder tokens, targets, positions and segment ids once, and no
    activation ever. A bias or mask is reordered along both of its axes.

    Args:
      x: `[B, T, ...]`, or any other array and its `axis`; NumPy stays NumPy.
      size: devices of the context axis (of the ring axis where kind is "hybrid").
      load_balance: "contiguous" (as it is), "zigzag" or "striped".
      axis: the axis of the length.

    Raises:
      ValueError: the length is no multiple of `length_multiple(size, load_balance)`.

    Example:
      >>> import numpy as np, jaxcap
      >>> jaxcap.reorder_for_load_balance(np.arange(8), 2, axis=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    x, xp, axis = _prepared(x, size, load_balance, axis)
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if size == 1 or load_balance == "contiguous":
        return x
    if load_balance == "striped":
        parts = x.reshape(*before, length // size, size, *after).swapaxes(axis, axis + 1)
    else:
        chunks = x.reshape(*before, 2 * size, length // (2 * size), *after)
        low = _part(chunks, axis, slice(size))
        high = xp.flip(_part(chunks, axis, slice(size, None)), axis)
        parts = xp.stack([low, high], axis + 1)
    return parts.reshape(x.shape)


def restore_order(x: Any, size: int, load_balance: LoadBalance = "zigzag", axis: int = 1) -> Any:
    """The inverse of `reorder_for_load_balance`, with the same arguments.

    Example:
      >>> import numpy as np, jaxcap
      >>> x = jaxcap.reorder_for_load_balance(np.arange(8), 2, axis=0)
      >>> jaxcap.restore_order(x, 2, axis=0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    x, xp, axis = _prepared(x, size, load_balance, axis)
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    if size == 1 or load_balance == "contiguous":
        return x
    if load_balance == "striped":
        whole = x.reshape(*before, size, length // size, *after).swapaxes(axis, axis + 1)
    else:
        pairs = x.reshape(*before, size, 2, length // (2 * size), *after)
        low, high = (_part(pairs, axis + 1, i) for i in (0, 1))
        whole = xp.concatenate([low, xp.flip(high, axis)], axis)
    return whole.reshape(x.shape)


def positions(length: int, size: int, load_balance: LoadBalance = "zigzag") -> np.ndarray:
    """`[length]` int32: of each place in the reordered sequence the position it had before.

    Example:
      >>> import jaxcap.sharding
      >>> jaxcap.sharding.positions(8, 2, "striped").tolist()
      [0, 2, 4, 6, 1, 3, 5, 7]
    """
    length = _count("length", "a positive int", length)
    return reorder_for_load_balance(np.arange(length, dtype=np.int32), size, load_balance, axis=0)
