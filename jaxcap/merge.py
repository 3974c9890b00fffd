"""Combining partial results of attention over disjoint sets of keys.

Two forms, both float32 (float64 stays): while a row is being summed, `Sums`, relative to a
reference exponent; once it is normalised, `Part`, what a backend returns. A row without keys is the
neutral element of either, and combining is associative up to rounding. Sinks stay out until the one
end.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcap.spec import Array

LN2 = math.log(2.0)


class Sums(NamedTuple):
    """sum(exp(score - top) * value), top and sum(exp(score - top)) over the keys so far.

    `top` is the maximum so far, -inf before any key; or one constant for all rows where the scores
    are bounded (`softcap.bounded_shift`), and then sums of different keys just add up.
    """

    numerator: Array  # [..., V]
    top: Array  # [...]
    total: Array  # [...]


class Part(NamedTuple):
    """Normalised output and log-sum-exp (natural, without sink); 0 and -inf without keys."""

    out: Array  # [..., V]
    lse: Array  # [...]


def finite_or_zero(top: Array) -> Array:
    """`top`, and 0 where it is -inf: what may be subtracted from a score or a maximum of -inf."""
    return jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)


def rescaled(sums: Sums, top: Array) -> Sums:
    """The same sums relative to `top`, which is at least as large as their own."""
    factor = jnp.exp(sums.top - finite_or_zero(top))
    return Sums(sums.numerator * factor[..., None], top, sums.total * factor)


def add(a: Sums, b: Sums) -> Sums:
    """Sums over both sets of keys."""
    top = jnp.maximum(a.top, b.top)
    a, b = rescaled(a, top), rescaled(b, top)
    return Sums(a.numerator + b.numerator, top, a.total + b.total)


def add_bounded(a: Sums, b: Sums) -> Sums:
    """`add` where both are relative to one constant: no maximum, no exponential, no product."""
    return Sums(a.numerator + b.numerator, a.top, a.total + b.total)


def shift_to_top(shift: int) -> float:
    """`Sums.top` for a `softcap.bounded_shift`: 2**shift as a natural exponent."""
    return shift * LN2


def finish(sums: Sums, sink: Array | None = None) -> Part:
    """Normalises, and lets `exp(sink)` join the denominator."""
    some = sums.total != 0  # NaN is not nothing
    total = jnp.where(some, sums.total, jnp.ones_like(sums.total))
    out = sums.numerator / total[..., None]
    lse = jnp.where(some, sums.top + jnp.log(total), -jnp.inf)
    part = Part(jnp.where(some[..., None], out, jnp.zeros_like(out)), lse)
    return part if sink is None else with_sink(part, sink)


def _accumulated(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def with_sink(part: Part, sink: Array) -> Part:
    """Lets `exp(sink)`, of a shape that broadcasts to `lse`, join the denominator, once.

    By logarithms, so that neither a sink far above nor one far below the scores overflows.
    """
    sink = jnp.broadcast_to(sink.astype(part.lse.dtype), part.lse.shape)
    lse = jnp.logaddexp(part.lse, sink)
    weight = jnp.exp(part.lse - finite_or_zero(lse))
    return Part(_accumulated(part.out) * weight[..., None], lse)


def combine(a: Part, b: Part) -> Part:
    """The result over both sets of keys, float32 also where out is narrower."""
    lse = jnp.logaddexp(a.lse, b.lse)
    reference = finite_or_zero(lse)
    weight_a = jnp.exp(a.lse - reference)[..., None]
    weight_b = jnp.exp(b.lse - reference)[..., None]
    return Part(weight_a * _accumulated(a.out) + weight_b * _accumulated(b.out), lse)


def combine_all(parts: Any) -> Part:
    """Several parts, stacked along a new first axis: `Part([P, ..., V], [P, ...])`."""
    top = jnp.max(parts.lse, axis=0)
    weights = jnp.exp(parts.lse - finite_or_zero(top)[None])
    total = jnp.sum(weights, axis=0)
    numerator = jnp.sum(weights[..., None] * _accumulated(parts.out), axis=0)
    return finish(Sums(numerator, top, total))
