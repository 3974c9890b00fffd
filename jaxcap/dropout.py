"""Dropout keyed by position: a pure function of the key and four indices.

Entry (b, n, q, k), indices of batch, query head, query and key in the whole array, is kept iff

    Philox4x32-10(key, counter = (drop3(k), drop3(q), n, b))[2 * bit3(q) + bit3(k)] >= rate * 2**32

where bit3 is bit 3 of an index and drop3 removes it. The four words of a call serve entries 8
apart in query and key, which one thread holds in the accumulator layout of the matrix units both of
S and of its transpose: forward and backward kernels pay one call for four entries.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap.spec import Array, Dropout

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def threshold(rate: float) -> int:
    """Words below it are dropped."""
    return math.floor(rate * 2**32)


def key_words(rng: Array) -> Array:
    """[2] uint32 out of a JAX key of any implementation."""
    return jax.random.bits(rng, (2,), jnp.uint32)


def _mulhilo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low word of a 32 x 32 bit product, without 64-bit types."""
    mask, half = jnp.uint32(0xFFFF), jnp.uint32(16)
    a_lo, a_hi = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_lo, b_hi = b & mask, b >> half
    mid = a_hi * b_lo + ((a_lo * b_lo) >> half)
    low = a_lo * b_hi + (mid & mask)
    return a_hi * b_hi + (mid >> half) + (low >> half), jnp.uint32(a) * b


def philox(key: tuple[Array, Array], counter: tuple[Array, ...]) -> tuple[Array, ...]:
    """Philox4x32-10 on broadcastable uint32 arrays; four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        hi0, lo0 = _mulhilo(MULTIPLIERS[0], c0)
        hi1, lo1 = _mulhilo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def _split(index: Array) -> tuple[Array, Array]:
    x = index.astype(jnp.uint32)
    rest = ((x >> jnp.uint32(4)) << jnp.uint32(3)) | (x & jnp.uint32(7))
    return rest, (x >> jnp.uint32(3)) & jnp.uint32(1)


def bits(rng: Array, batch: Array, head: Array, query: Array, key: Array) -> Array:
    """uint32 word of every entry; `rng` is [..., 2], the indices broadcast against each other."""
    (q, q3), (k, k3) = _split(query), _split(key)
    counter = (k, q, head.astype(jnp.uint32), batch.astype(jnp.uint32))
    words = philox((rng[..., 0], rng[..., 1]), counter)
    by_key = [jnp.where(k3 == 0, words[2 * i], words[2 * i + 1]) for i in range(2)]
    return jnp.where(q3 == 0, by_key[0], by_key[1])


def keep_tile(rate: float, dropout: Dropout, q_start: Any, tq: int, k_start: Any, tk: int) -> Array:
    """[B, N, tq, tk] bool: the entries of a tile that survive."""

    def index(start, size, place):
        return place[0] + place[1] * (start + jnp.arange(size, dtype=jnp.int32))

    word = bits(
        dropout.rng[:, None, None, None, :],
        dropout.batch[:, None, None, None],
        dropout.head[None, :, None, None],
        index(q_start, tq, dropout.query)[None, None, :, None],
        index(k_start, tk, dropout.key)[None, None, None, :],
    )
    return word >= jnp.uint32(threshold(rate))
