"""Packed sequences equal each sequence alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from jaxcap import selection
from tests import oracle


def parts(cu):
    return list(itertools.pairwise(cu))


@pytest.mark.parametrize("name", ["xla", "blockwise"])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [([0, 3, 10, 10, 17], None), ([0, 4, 9], [0, 9, 12]), ([0, 9, 12], [0, 4, 9])],
)
@pytest.mark.parametrize(("alignment", "window"), [("top_left", (2, 1)), ("bottom_right", None)])
def test_equals_each_alone(name, cu_q, cu_k, alignment, window):
    assert name in selection.backends()
    other = cu_q if cu_k is None else cu_k
    pad = 3  # tokens past the last bound
    q = jax.random.normal(jax.random.key(0), (cu_q[-1] + pad, 4, 16)) * 3
    k, v = jax.random.normal(jax.random.key(1), (2, other[-1] + pad, 2, 16))
    k, v = (x.at[other[-1] :].set(jnp.nan) for x in (k, v))
    keywords = {
        "softcap": 3.0,
        "is_causal": True,
        "causal_alignment": alignment,
        "local_window_size": window,
        "alibi_slopes": jnp.array([0.1, 0.2, 0.3, 0.4]),
    }
    bounds = (jnp.array(cu_q), None if cu_k is None else jnp.array(cu_k))
    run = functools.partial(
        jaxcap.varlen_attention, return_residual=True, implementation=name, **keywords
    )
    out, lse = jax.jit(run)(q, k, v, *bounds)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for (a, b), (c, d) in zip(parts(cu_q), parts(other), strict=True):
        if a == b:
            continue
        alone = oracle.Attention(q[None, a:b], k[None, c:d], v[None, c:d], **keywords)
        np.testing.assert_allclose(out[a:b], alone.out[0], atol=5e-6)
        np.testing.assert_allclose(lse[a:b], alone.lse[0], atol=5e-6)
    np.testing.assert_array_equal(out[cu_q[-1] :], 0)
    np.testing.assert_array_equal(lse[cu_q[-1] :], -np.inf)


def test_a_traced_bound_past_the_tokens_is_their_end():
    q, k = jax.random.normal(jax.random.key(0), (2, 9, 2, 8))
    keywords = {"softcap": 2.0, "is_causal": True, "causal_alignment": "bottom_right"}
    run = jax.jit(functools.partial(jaxcap.varlen_attention, q, k, k, **keywords))
    inside = run(jnp.array([0, 4, 9]), jnp.array([0, 5, 9]))
    np.testing.assert_array_equal(run(jnp.array([-3, 4, 20]), jnp.array([0, 5, 90])), inside)
    assert jnp.abs(run(jnp.array([0, 4, 9]), jnp.array([0, 5, 8])) - inside).max() > 1e-3


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_bounds_of_any_integers_beside_more_tokens_than_they_count(dtype):
    q = jax.random.normal(jax.random.key(0), (300, 1, 8))
    bounds = jnp.array([0, 60, 100])
    wanted = jaxcap.varlen_attention(q, q, q, bounds, softcap=2.0)
    found = jaxcap.varlen_attention(q, q, q, bounds.astype(dtype), softcap=2.0)
    np.testing.assert_array_equal(found, wanted)
    assert jnp.abs(wanted[60:100]).max() > 0.1


def test_bounds_may_be_traced_and_gradients_flow():
    q = jax.random.normal(jax.random.key(0), (12, 2, 8))

    @jax.jit
    @jax.grad
    def grad(q, cu):
        return (jaxcap.varlen_attention(q, q, q, cu, softcap=5.0, is_causal=True) ** 2).sum()

    whole = grad(q, jnp.array([0, 5, 12]))
    alone = grad(q[:5], jnp.array([0, 5]))
    np.testing.assert_allclose(whole[:5], alone, atol=1e-5)
    assert jnp.abs(whole[5:]).max() > 0


def test_tokens_before_the_first_bound_are_padding():
    q = jax.random.normal(jax.random.key(0), (6, 2, 8))
    run = functools.partial(jaxcap.varlen_attention, q, q, q, jnp.array([2, 4, 6]), softcap=5.0)
    np.testing.assert_array_equal(run()[:2], 0)
    assert jnp.abs(run()[2:]).min() > 0


def test_lists_are_arrays():
    x = np.random.default_rng(0).standard_normal((4, 2, 8)).astype(np.float32)
    out = jaxcap.varlen_attention(x.tolist(), x.tolist(), x.tolist(), [0, 4], softcap=5.0)
    np.testing.assert_allclose(out, jaxcap.dot_product_attention(x, x, x, softcap=5.0), atol=1e-6)


@pytest.mark.parametrize("kind", [list, np.array, jnp.array])
def test_bounds_that_the_host_knows_are_checked(kind):
    q = jnp.ones((6, 2, 8))
    for bad, match in (
        ([3, 3, 1], "must not decrease, got 3 and then 1.*not lengths"),
        ([0, 4, 7], "must lie within the 6 tokens, got 0 to 7"),
        ([-1, 4, 6], "must lie within the 6 tokens, got -1 to 6"),
    ):
        bad = kind(bad)
        with pytest.raises(ValueError, match="cu_seqlens_q " + match):
            jaxcap.varlen_attention(q, q, q, bad)
        with pytest.raises(ValueError, match="cu_seqlens_k " + match):
            jax.jit(lambda q, bad=bad: jaxcap.varlen_attention(q, q, q, [0, 0, 6], bad))(q)
    traced = jax.jit(lambda x: jaxcap.varlen_attention(q, q, q, [0, x, 6]))(3)
    np.testing.assert_array_equal(traced, jaxcap.varlen_attention(q, q, q, kind([0, 3, 6])))


def test_bad_input():
    q = jnp.ones((6, 2, 8))
    cu = jnp.array([0, 6])
    for bad, match in (
        (jnp.array([0.0, 6.0]), "cu_seqlens_q must be.*integers"),
        (jnp.array([6]), "cu_seqlens_q"),
        (jnp.array([[0, 6]]), "cu_seqlens_q"),
    ):
        with pytest.raises(ValueError, match=match):
            jaxcap.varlen_attention(q, q, q, bad)
    with pytest.raises(ValueError, match="cu_seqlens_k must have shape"):
        jaxcap.varlen_attention(q, q, q, cu, jnp.array([0, 3, 6]))
    with pytest.raises(ValueError, match="query must be .total, heads, size."):
        jaxcap.varlen_attention(q[None], q, q, cu)
    with pytest.raises(ValueError, match="sets query_positions itself"):
        jaxcap.varlen_attention(q, q, q, cu, query_positions=jnp.arange(6))
    with pytest.raises(ValueError, match="causal_alignment must be"):
        jaxcap.varlen_attention(q, q, q, cu, causal_alignment="left")
