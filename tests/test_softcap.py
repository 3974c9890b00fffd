"""The cap, its derivative, and the edges of the predicate that spares a running maximum."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxcap
from jaxcap import softcap
from jaxcap.spec import AttentionSpec

PROBABILITIES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
LENGTHS = (1, 2, 77, 4096, 32768, 2**20)


def spec(cap, key_length=64, **changes):
    base = AttentionSpec(
        batch=1,
        query_length=1,
        key_length=key_length,
        query_heads=1,
        kv_heads=1,
        head_size=8,
        value_size=8,
        dtype="bfloat16",
        scale=1.0,
        softcap=cap,
    )
    return base.replace(**changes)


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0, 50.0, 1000.0])
@pytest.mark.parametrize("layer_scale", [1.0, 3.0, 64.0])
def test_cap_is_the_formula(cap, layer_scale):
    x = np.linspace(-8 * cap, 8 * cap, 1001).astype(np.float32)
    exact = cap * np.tanh(x.astype(np.float64) / cap)
    capped = np.asarray(softcap.cap(jnp.asarray(x), cap, layer_scale))
    np.testing.assert_allclose(capped, exact, rtol=2e-6)
    assert capped.dtype == np.float32
    assert (np.abs(capped) <= cap * (1 + 1e-6)).all()


@pytest.mark.parametrize("layer_scale", [1.0, 3.0])
def test_no_cap_is_the_identity(layer_scale):
    x = jnp.linspace(-1e4, 1e4, 101)
    np.testing.assert_allclose(softcap.cap(x, None, layer_scale), x, rtol=2e-7)
    assert softcap.derivative(x, None) == 1.0


@pytest.mark.parametrize("cap", [0.5, 30.0, 1000.0])
def test_derivative_is_that_of_the_cap(cap):
    x = jnp.linspace(-10 * cap, 10 * cap, 2001, dtype=jnp.float32)
    by_jax = jax.vmap(jax.grad(lambda x: softcap.cap(x, cap)))(x)
    ours = softcap.derivative(softcap.cap(x, cap), cap)
    # 1 - t * t loses relative accuracy where t is near 1, as it may: its scale is 1.
    np.testing.assert_allclose(ours, by_jax, atol=1e-6)
    exact = 1 / np.cosh(np.asarray(x, np.float64) / cap) ** 2
    np.testing.assert_allclose(ours, exact, atol=1e-6)


def test_derivative_vanishes_where_the_cap_saturates():
    for cap in (0.3, 7.0, 50.0, 77.7):
        saturated = softcap.cap(jnp.array([-1e9, 1e9, -np.inf, np.inf], jnp.float32), cap)
        slope = np.asarray(softcap.derivative(saturated, cap))
        assert np.isfinite(slope).all()
        np.testing.assert_allclose(slope, 0.0, atol=3e-7)


def largest_accepted(probabilities, key_length):
    """(accepted, refused): neighbouring float64 caps."""
    low, high = 1e-3, 1e4
    assert softcap.bounded_shift(spec(low, key_length), probabilities) is not None
    assert softcap.bounded_shift(spec(high, key_length), probabilities) is None
    while np.nextafter(low, high) < high:
        middle = (low + high) / 2
        accepted = softcap.bounded_shift(spec(middle, key_length), probabilities) is not None
        low, high = (middle, high) if accepted else (low, middle)
    return low, high


def weights(cap, shift, kind):
    """The least and the largest probability in their dtype, as float32 exponentials make them."""
    log2e = np.float32(math.log2(math.e))
    scores = np.array([-cap, cap], np.float32)
    return np.exp2(scores * log2e - np.float32(shift), dtype=np.float32).astype(kind)


def least_useful(probabilities):
    """Normal in its dtype (float16: two bits below), and normal in float32 times a small value."""
    smallest_normal = float(ml_dtypes.finfo(PROBABILITIES[probabilities]).smallest_normal)
    if probabilities == "float16":
        return smallest_normal / 4
    return smallest_normal * 2.0**-softcap.LOG2_LEAST_VALUE * (1 - 1e-4)


def summed(value, count):
    """Adding up `count` times `value` in float32, one after the other where that is quick."""
    if count <= 2**16:
        with np.errstate(over="ignore"):
            return float(np.add.accumulate(np.full(count, value, np.float32))[-1])
    return float(np.float32(value) * np.float32(count))


@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("key_length", LENGTHS)
def test_bound_holds_just_inside(probabilities, key_length):
    """Nothing is lost below and nothing overflows above, at the largest cap that is accepted."""
    cap, _ = largest_accepted(probabilities, key_length)
    shift = softcap.bounded_shift(spec(cap, key_length), probabilities)
    least, largest = weights(cap, shift, PROBABILITIES[probabilities])
    assert float(least) >= least_useful(probabilities)
    assert np.isfinite(largest)
    assert math.isfinite(summed(np.float32(largest), key_length))
    with np.errstate(over="ignore"):
        product = np.float32(largest) * np.float32(2.0**softcap.LOG2_LARGEST_VALUE)
    assert math.isfinite(summed(product, key_length))


@pytest.mark.parametrize("probabilities", PROBABILITIES)
def test_bound_leaves_room_for_rounding(probabilities):
    """Caps whose exponents are whole, and a rounding to either side: no weight becomes subnormal.

    XLA and the GPU's fast exponentials flush those to zero, and a row of them would look empty.
    """
    log2e = math.log2(math.e)
    for exponent in range(1, 95):
        for nudge in (-1e-5, -3e-6, -1e-6, 0.0, 1e-6, 1e-5):
            cap = (exponent + nudge) / log2e
            shift = softcap.bounded_shift(spec(cap), probabilities)
            if shift is None:
                continue
            least, _ = weights(cap, shift, np.float32)
            least = min(least, np.exp(np.float32(-cap) - np.float32(shift / log2e)))
            assert least >= np.finfo(np.float32).smallest_normal, (exponent, nudge, shift)
            rounded = float(least.astype(PROBABILITIES[probabilities]))
            assert rounded >= least_useful(probabilities), (exponent, nudge, shift)


@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("key_length", LENGTHS)
def test_bound_is_tight(probabilities, key_length):
    """With the cap a little larger, every shift loses something: weights, or sums of values."""
    _, refused = largest_accepted(probabilities, key_length)
    cap = refused + 1.5  # a shift is whole, and bounds are whole powers of two
    kind = PROBABILITIES[probabilities]
    bound = 2.0**softcap.LOG2_LARGEST_VALUE
    # float16 has no shift to choose: its probabilities feed the matrix units as they are.
    shifts = [0] if probabilities == "float16" else range(-200, 200)
    for shift in shifts:
        with np.errstate(over="ignore", under="ignore"):
            least, largest = weights(cap, shift, kind)
            total = float(largest) * bound * key_length  # inf where the weight is
        lost = float(least) < least_useful(probabilities)
        assert lost or total > float(np.finfo(np.float32).max), shift


def test_known_bounds():
    """Gemma 2's and Grok-1's caps need no maximum; float16 overflows above 11."""
    for length in (4096, 2**17):
        for cap in (30.0, 50.0):
            assert softcap.bounded_shift(spec(cap, length), "bfloat16") is not None
            assert softcap.bounded_shift(spec(cap, length), "float16") is None
    assert softcap.bounded_shift(spec(11.0), "float16") is not None
    assert softcap.bounded_shift(spec(11.2), "float16") is None
    assert math.exp(11.1) > float(np.finfo(np.float16).max) > math.exp(11.0)


@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize(
    "changes",
    [{"softcap": None}, {"bias_shape": (1, 1, 1, 64)}, {"alibi": True}],
    ids=["no cap", "bias", "alibi"],
)
def test_unbounded_scores_keep_the_maximum(probabilities, changes):
    assert softcap.bounded_shift(spec(5.0), probabilities) is not None
    assert softcap.bounded_shift(spec(5.0, **changes), probabilities) is None
    assert softcap.bounded_shift(spec(5.0, sinks=True), probabilities) is not None


@pytest.mark.parametrize("probabilities", PROBABILITIES)
def test_longer_rows_never_allow_more(probabilities):
    caps = [largest_accepted(probabilities, s)[0] for s in LENGTHS]
    assert caps == sorted(caps, reverse=True)


@pytest.mark.parametrize("backend", ["xla", "blockwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cap", [30.0, 45.0, 50.0, 53.0, 60.0, 70.0])
@pytest.mark.parametrize("size", [1e-8, 1e-2, 1.0, 1e12])
def test_rows_at_the_bottom_of_the_cap(backend, dtype, cap, size):
    """All logits at -cap: probabilities are as small as they get, and their products with values count."""
    q = jnp.full((1, 2, 1, 8), 1e3, dtype)
    v = jnp.full((1, 2, 1, 8), size, dtype)
    out = jaxcap.dot_product_attention(q, -q, v, softcap=cap, implementation=backend)
    np.testing.assert_allclose(out.astype(jnp.float32), v.astype(jnp.float32), rtol=1e-2)


def test_values_without_bound_in_float32():
    """What no shift could serve: values far beyond those that the bounded form is for."""
    q = jnp.full((1, 2, 1, 8), 1e3)
    for logits, size in ((q, 1e36), (-q, 1e-36)):
        v = jnp.full((1, 2, 1, 8), size)
        out = jaxcap.dot_product_attention(logits, q, v, softcap=50.0, implementation="blockwise")
        np.testing.assert_allclose(out, v, rtol=1e-5)
