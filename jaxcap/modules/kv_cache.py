"""The key/value cache of the modules: arrays of fixed length that calls append tokens to."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxcap.modules.common import Arrays
from jaxcap.spec import Array

#: What a call that appends to a cache knows better than its caller.
_OWN = ("query_seq_lengths", "key_value_seq_lengths", "query_positions", "key_value_positions")


def check_call(
    itself: bool, decode: bool, max_decode_length: int | None, context_parallel: Any
) -> None:
    if decode and context_parallel is not None:
        raise ValueError(
            "decode=True appends to a cache, which context_parallel does not split: make the module"
            " that decodes without it (its parameters are the same)"
        )
    if decode and not itself:
        raise ValueError("decode=True caches keys of the inputs themselves: leave inputs_k None")
    if max_decode_length is not None and not decode:
        raise ValueError("max_decode_length needs decode=True")


def check_length(length: int, wanted: int | None) -> None:
    if wanted is not None and wanted != length:
        raise ValueError(f"max_decode_length={wanted}, but the cache that exists holds {length}")


def _append(cached_key: Array, cached_value: Array, start: Array, key: Array, value: Array):
    """The caches with key and value `[.., T, K, H]` written from token `start` on."""
    *lead, length, heads, size = cached_key.shape
    tokens = key.shape[-3]
    wanted = (*lead, tokens, heads, size)
    if key.shape != wanted or tokens > length:
        raise ValueError(
            f"the cache of shape {list(cached_key.shape)} takes keys {list(wanted)} of at most"
            f" {length} tokens, got {list(key.shape)}"
        )
    if not isinstance(start, Tracer) and int(start) + tokens > length:
        raise ValueError(
            f"the cache holds {length} tokens; {int(start)} are taken, {tokens} do not fit"
        )
    zero = jnp.zeros((), start.dtype)
    corner = (*(zero for _ in lead), start, zero, zero)
    return (
        jax.lax.dynamic_update_slice(cached_key, key.astype(cached_key.dtype), corner),
        jax.lax.dynamic_update_slice(cached_value, value.astype(cached_value.dtype), corner),
    )


class Step(NamedTuple):
    """A call's part in decoding: what the cache becomes, and what its queries attend."""

    cached_key: Array  # [.., L, K, H]
    cached_value: Array  # [.., L, K, H]
    cache_index: Array  # [] int32, tokens in the cache
    key: Array  # the cache in the queries' dtype
    value: Array
    arrays: Arrays  # the caller's and where the queries are


def step(
    cached_key: Array, cached_value: Array, start: Array, key: Array, value: Array, arrays: Arrays
) -> Step:
    """Append key and value `[.., T, K, H]` to a cache that holds `start` tokens.

    Raises:
      ValueError: shapes that do not fit, arguments that the cache determines, or, outside jit, more
        tokens than it has room for.
    """
    for name in _OWN:
        if arrays.get(name) is not None:
            raise ValueError(f"{name} comes from the cache while decoding; do not pass it")
    cached = _append(cached_key, cached_value, start, key, value)
    tokens = key.shape[-3]
    index = start + jnp.asarray(tokens, start.dtype)
    known: Arrays = {
        "query_positions": start + jnp.arange(tokens, dtype=start.dtype),
        "key_value_seq_lengths": jnp.broadcast_to(index, key.shape[:-3]),
    }
    keys, values = (x.astype(key.dtype) for x in cached)
    return Step(*cached, index, keys, values, {**arrays, **known})


def poison(out: Array, index: Array, length: int) -> Array:
    """`out`, or NaN where the cache has overflowed, which under jit cannot raise."""
    return jnp.where(index <= length, out, jnp.full((), jnp.nan, out.dtype))
