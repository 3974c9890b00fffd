"""Checks and canonical forms of what a user passes; each error says what to change."""

import math
import numbers
import os
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcap import dropout as dropout_lib
from jaxcap.marks import batch_index
from jaxcap.spec import Array, Dropout

LEAST, LARGEST = 1e-30, 1e30
INTEGERS = ("int32", "int16", "int8", "uint16", "uint8")
FLOATS = ("bfloat16", "float16", "float32", "float64")


def static_number(name: str, value: Any, advice: str) -> float:
    """A finite Python number; arrays, traced ones above all, would change the compiled kernel."""
    if isinstance(value, jax.Array):
        kind = "a traced value" if isinstance(value, Tracer) else "a JAX array"
        raise TypeError(
            f"{name} must be a Python number known when the program is traced, got {kind}"
            f" ({value}); {advice}"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}; {advice}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}; {advice}")
    if number and not LEAST <= abs(number) <= LARGEST:  # its inverse too must be a float32
        raise ValueError(
            f"{name} must be 0 or between {LEAST:g} and {LARGEST:g}, got {value!r}; {advice}"
        )
    return number


def soft_cap(value: Any) -> float | None:
    """None where it is off."""
    if value is None:
        return None
    advice = "pass softcap=50.0, or None or 0.0 for no cap"
    number = static_number("softcap", value, advice)
    if number < 0:
        raise ValueError(f"softcap must not be negative, got {value!r}; {advice}")
    return number or None


def positive(name: str, value: Any) -> float:
    number = static_number(name, value, f"pass {name} as a positive float")
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def window(value: Any) -> tuple[int | None, int | None] | None:
    if value is None:
        return None
    sides = value if isinstance(value, tuple | list) else (value, value)
    advice = "pass an int or (left, right), None on a side for unbounded"
    if len(sides) != 2:
        raise ValueError(f"local_window_size must have two sides, got {value!r}; {advice}")
    result = []
    for side in sides:
        if side is not None:
            if isinstance(side, bool) or not isinstance(side, numbers.Integral):
                raise TypeError(f"local_window_size must be of ints, got {value!r}; {advice}")
            if side < 0:
                raise ValueError(f"local_window_size must not be negative, got {value!r}; {advice}")
        # No position is further away than int32 reaches.
        result.append(None if side is None or side >= 2**31 - 1 else int(side))
    return None if result == [None, None] else (result[0], result[1])


def no_tensors(given: dict[str, Any], instead: str) -> None:
    """TypeError where an argument is PyTorch's: NumPy would read it, and its gradient would be lost."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())  # a module may play its part
    for name, x in given.items():
        if isinstance(x, tensor):
            raise TypeError(f"{name} is a PyTorch tensor; {instead} takes those")


def floating(name: str, x: Any) -> Array:
    array = jnp.asarray(x)
    if array.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be of a dtype among {FLOATS}, got {array.dtype.name}")
    return array


def boolean(name: str, x: Any) -> Array:
    array = jnp.asarray(x)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"{name} must be boolean, True keeps, got {array.dtype.name}; pass"
            f" {name}.astype(bool), or an additive mask as bias"
        )
    return array


def expect(name: str, array: Array, *shapes: tuple[int, ...]) -> None:
    if tuple(array.shape) not in shapes:
        wanted = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
        raise ValueError(f"{name} must have shape {wanted}, got {list(array.shape)}")


def four(name: str, x: Any, wanted: tuple[int, int, int, int], lead: tuple[int, ...]) -> Array:
    """`[.., N, T, S]`, broadcastable, as `[B or 1, N or 1, T or 1, S or 1]`."""
    array = jnp.asarray(x)
    full = (*lead, *wanted[1:])
    if array.ndim > max(len(full), 4):
        raise ValueError(f"{name} must broadcast to {list(full)}, got {list(array.shape)}")
    shape = (1,) * (len(full) - array.ndim) + tuple(array.shape)
    if array.ndim == 4 and len(full) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != len(full) or any(s not in (1, f) for s, f in zip(shape, full, strict=True)):
        raise ValueError(
            f"{name} must broadcast to {list(full)}, got {list(array.shape)}; one of the keys alone"
            f" is {name}[:, None, None, :]"
        )
    front, rest = shape[: len(lead)], shape[len(lead) :]
    if all(s == 1 for s in front):
        return array.reshape(1, *rest)
    return jnp.broadcast_to(array.reshape(shape), (*lead, *rest)).reshape(wanted[0], *rest)


def integers(name: str, x: Any, lead: tuple[int, ...], length: int | None) -> Array:
    """`[.., length]` or `[length]` as `[B or 1, length]`; without a length `[..]` as `[B]`."""
    if not isinstance(x, jax.Array):  # NumPy's and Python's are int64, their values are known
        known = np.asarray(x)
        if known.size and known.dtype.kind in "iu":
            limits = np.iinfo(np.int32)
            if known.min() < limits.min or known.max() > limits.max:
                raise ValueError(f"{name} must fit in int32, got up to {known.max()}")
            x = known.astype(np.int32)
    array = jnp.asarray(x)
    if array.dtype.name not in INTEGERS:
        raise TypeError(
            f"{name} must be of a dtype among {INTEGERS}, got {array.dtype.name};"
            f" cast it with .astype(jnp.int32)"
        )
    array = array.astype(jnp.int32)
    if length is None:
        expect(name, array, lead or (1,), lead)
        return array.reshape(-1)
    if array.shape == (length,) and lead:
        return array[None]
    expect(name, array, (*lead, length), (length,))
    return array.reshape(-1, length)


def hint_at_layout(name: str, query: tuple[int, int], key: tuple[int, int], also: str = "") -> None:
    """Warns where lengths and heads, of both, have surely changed places: no model has so many heads."""
    length, heads = query
    if heads == key[1] > 512 and max(length, key[0]) <= 128:
        warnings.warn(
            f"{name} is taken for {heads} heads of length {length}: arrays are [batch, length, heads, size];"
            f" if these are [batch, heads, length, size] swap the two axes{also}",
            skip_file_prefixes=(os.path.dirname(__file__),),
        )


def known_bounds(name: str, x: Any, total: int) -> None:
    """ValueError unless `x`, values that the host knows, are bounds of sequences within `total` tokens."""
    known = np.asarray(x)
    (falls,) = np.nonzero(known[1:] < known[:-1])
    if falls.size:
        first, second = known[falls[0] : falls[0] + 2]
        raise ValueError(
            f"{name} must not decrease, got {first} and then {second}; they are where sequences begin and"
            " end, [0, 3, 10], not lengths"
        )
    if known[0] < 0 or known[-1] > total:
        raise ValueError(
            f"{name} must lie within the {total} tokens, got {known[0]} to {known[-1]}"
        )


def per_head(name: str, x: Any, lead: tuple[int, ...], heads: int, *, batched: bool) -> Array:
    """`[N]`, or `[.., N]` where `batched`, as `[B or 1, N]`."""
    array = floating(name, x)
    shapes = [(heads,), (*lead, heads)] if batched else [(heads,)]
    expect(name, array, *shapes)
    return array.reshape(-1, heads)


def drop(
    rate: Any, rng: Any, broadcast: bool, batch: int, heads: int, markers: list[Array]
) -> tuple[float, Dropout | None]:
    number = static_number("dropout_rate", rate, "pass a float in [0, 1)")
    if not 0 <= number < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate!r}")
    if number == 0:
        return 0.0, None
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate!r} needs dropout_rng, a key such as jax.random.key(0)"
        )
    try:
        words = dropout_lib.key_words(rng)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dropout_rng must be one JAX random key, got {rng!r}") from error
    head = jnp.zeros(heads, jnp.int32) if broadcast else jnp.arange(heads, dtype=jnp.int32)
    rows = jnp.zeros(batch, jnp.int32) if broadcast else batch_index(batch, words, *markers)
    start = jnp.array([0, 1], jnp.int32)
    return number, Dropout(words[None], rows, head, start, start)
