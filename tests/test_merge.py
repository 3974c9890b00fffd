"""Partial results combine to the whole, whatever the parts are."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import merge, softcap
from jaxcap.merge import Part, Sums
from jaxcap.spec import AttentionSpec


def exact(scores, values, sink=None) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of scores [R, S] and values [S, V] in float64; -inf is masked."""
    scores = scores.astype(np.float64)
    sink = np.full(len(scores), -np.inf) if sink is None else sink.astype(np.float64)
    top = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(scores - top[:, None])
    total = p.sum(axis=1) + np.exp(sink - top)
    some = total > 0
    safe = np.where(some, total, 1)
    return p @ values / safe[:, None], np.where(some, top + np.log(safe), -np.inf)


def sums_of(scores, values, top=None) -> Sums:
    """The sums over some keys, relative to `top` or to their maximum."""
    if top is None:
        top = scores.max(axis=1)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0)[:, None])
    return Sums(*map(jnp.asarray, (p @ values, top, p.sum(axis=1))))


def part_of(scores, values) -> Part:
    return merge.finish(sums_of(scores, values))


def assert_close(part, want, rtol=2e-6):
    np.testing.assert_allclose(part.out, want[0], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(part.lse, want[1], rtol=rtol, atol=rtol)


def rounding(scores) -> float:
    """A log-sum-exp in float32 is no more exact than the scores are."""
    return 2e-6 + 3e-7 * float(np.abs(scores[np.isfinite(scores)]).max(initial=0))


@st.composite
def pieces(draw):
    """Scores and values of 1 to 5 pieces, with rows that have no key in some or in all of them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    widths = [3] * draw(st.integers(1, 5))  # of one size, so that eager JAX compiles little
    scale = draw(st.sampled_from((0.1, 3.0, 80.0, 3000.0)))
    scores = rng.standard_normal((6, sum(widths))) * scale + rng.standard_normal((6, 1)) * scale
    ends = np.cumsum(widths)[:-1]
    scores = np.where(rng.random(scores.shape) < 0.2, -np.inf, scores).astype(np.float32)
    scores[0] = -np.inf
    for piece in np.split(scores, ends, axis=1):
        piece[rng.random(6) < 0.3] = -np.inf
    values = rng.standard_normal((scores.shape[1], 3)).astype(np.float32)
    split = list(zip(np.split(scores, ends, 1), np.split(values, ends), strict=True))
    return scores, values, split, rng.permutation(len(widths))


@hypothesis.given(pieces())
def test_pieces_in_any_order_and_form_make_the_whole(given):
    scores, values, split, order = given
    want = exact(scores, values)
    tolerance = rounding(scores)
    sums = [sums_of(*split[i]) for i in order]
    parts = [part_of(*split[i]) for i in order]
    total, part = sums[0], parts[0]
    for more_sums, more_part in zip(sums[1:], parts[1:], strict=True):
        total, part = merge.add(total, more_sums), merge.combine(part, more_part)
    assert_close(merge.finish(total), want, tolerance)
    assert_close(part, want, tolerance)
    stacked = Part(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    assert_close(merge.combine_all(stacked), want, tolerance)
    assert part.lse[0] == -np.inf
    assert not np.any(part.out[0])


@hypothesis.settings(max_examples=50)
@hypothesis.given(pieces())
def test_combining_is_associative(given):
    scores, _, split, _ = given
    parts = [part_of(*split[i % len(split)]) for i in range(3)]
    a, b, c = parts
    left = merge.combine(merge.combine(a, b), c)
    right = merge.combine(a, merge.combine(b, c))
    assert_close(left, right, rounding(scores))


def test_nothing_is_neutral():
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((4, 5)), rng.standard_normal((5, 2))
    some = part_of(scores.astype(np.float32), values.astype(np.float32))
    nothing = Part(jnp.zeros((4, 2)), jnp.full(4, -jnp.inf))
    for result in (merge.combine(some, nothing), merge.combine(nothing, some)):
        np.testing.assert_array_equal(result.out, some.out)
        np.testing.assert_array_equal(result.lse, some.lse)
    both = merge.combine(nothing, nothing)
    np.testing.assert_array_equal(both.out, nothing.out)
    np.testing.assert_array_equal(both.lse, nothing.lse)
    empty = merge.finish(Sums(jnp.zeros((4, 2)), jnp.full(4, -jnp.inf), jnp.zeros(4)))
    np.testing.assert_array_equal(empty.out, nothing.out)
    np.testing.assert_array_equal(empty.lse, nothing.lse)


@pytest.mark.parametrize("cap", [1.0, 30.0, 40.0])
def test_bounded_scores_need_no_maximum(cap):
    """At the edges of the cap too, all rows at +cap and all at -cap."""
    spec = AttentionSpec(1, 1, 64, 1, 1, 8, 8, "float32", 1.0, softcap=cap)
    shift = softcap.bounded_shift(spec, "float32")
    assert shift is not None
    rng = np.random.default_rng(1)
    scores = (cap * np.tanh(rng.standard_normal((5, 64)) * 2)).astype(np.float32)
    scores[0], scores[1], scores[2] = cap, -cap, -np.inf
    values = rng.standard_normal((64, 3)).astype(np.float32)
    top = np.full(5, merge.shift_to_top(shift), np.float32)
    halves = [sums_of(scores[:, s], values[s], top) for s in (slice(0, 32), slice(32, 64))]
    assert_close(merge.finish(merge.add_bounded(*halves)), exact(scores, values), rtol=1e-5)


@pytest.mark.parametrize("sink", [-np.inf, -2e4, -3.0, 0.0, 9.0, 2e4])
@pytest.mark.parametrize("level", [-40.0, 0.0, 40.0])
def test_a_sink_joins_once_at_the_end(sink, level):
    rng = np.random.default_rng(2)
    scores = (rng.standard_normal((4, 6)) + level).astype(np.float32)
    scores[0] = -np.inf
    values = rng.standard_normal((6, 3)).astype(np.float32)
    sinks = np.full(4, sink, np.float32)
    want = exact(scores, values, sinks)
    assert_close(merge.finish(sums_of(scores, values), jnp.asarray(sinks)), want, rtol=2e-5)
    halves = [part_of(scores[:, s], values[s]) for s in (slice(0, 3), slice(3, 6))]
    joined = merge.with_sink(merge.combine(*halves), jnp.asarray(sinks))
    assert_close(joined, want, rtol=2e-5)
    np.testing.assert_array_equal(joined.lse[0], np.float32(sink))
    assert not np.any(joined.out[0])


def test_dtypes():
    lse = jnp.zeros(2)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        part = Part(jnp.ones((2, 3), dtype), lse)
        assert merge.combine(part, part).out.dtype == jnp.float32
        assert merge.with_sink(part, jnp.zeros(2)).out.dtype == jnp.float32
    with jax.enable_x64(True):
        part = Part(jnp.ones((2, 3), jnp.float64), jnp.zeros(2, jnp.float64))
        for result in (merge.combine(part, part), merge.with_sink(part, jnp.zeros(2))):
            assert {x.dtype for x in result} == {jnp.dtype(jnp.float64)}


def test_combine_broadcasts_over_any_leading_axes():
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((2, 4, 6)).astype(np.float32)
    values = rng.standard_normal((6, 3)).astype(np.float32)
    halves = [slice(0, 3), slice(3, 6)]
    rows = [part_of(x[:, s], values[s]) for x, s in itertools.product(scores, halves)]
    stacked = [
        Part(*(jnp.stack(x) for x in zip(rows[i], rows[i + 2], strict=True))) for i in range(2)
    ]
    found = merge.combine(*stacked)
    for i in range(2):
        assert_close(Part(found.out[i], found.lse[i]), exact(scores[i], values))
