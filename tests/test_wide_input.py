"""Values that would wrap, overflow or divide by zero further in get an error, or the right answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap

Q = jnp.ones((1, 4, 2, 8))


def attend(backend="blockwise", **keywords):
    return jaxcap.dot_product_attention(Q, Q, Q, softcap=3.0, implementation=backend, **keywords)


@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (0, 4, 2, 8), (1, 4, 0, 8), (1, 4, 2, 0)])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_empty_axes(name, shape):
    arrays = {"query": Q, "key": Q, "value": Q} | {name: jnp.ones(shape)}
    with pytest.raises(ValueError, match=f"{name} must have no axis of length 0, got"):
        jaxcap.dot_product_attention(**arrays)


def test_integers_that_do_not_fit():
    wide = jnp.full((1, 4), 2**32 - 1, jnp.uint32)
    narrow = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(TypeError, match="query_segment_ids must be of a dtype among.*uint32"):
        attend(query_segment_ids=wide, key_value_segment_ids=narrow)
    with pytest.raises(ValueError, match="query_positions must fit in int32, got up to 4294967296"):
        attend(query_positions=np.full((1, 4), 2**32))
    with jax.enable_x64(True), pytest.raises(TypeError, match="key_value_positions.*int64.*cast"):
        attend(key_value_positions=jnp.arange(4))
    wanted = attend(is_causal=True)
    for kind in (np.int64, np.int8, np.uint8, np.int16):
        got = attend(is_causal=True, query_positions=np.arange(4, dtype=kind))
        np.testing.assert_array_equal(got, wanted)
    got = attend(is_causal=True, query_positions=[0, 1, 2, 3])
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["softcap", "scale", "layer_scale"])
@pytest.mark.parametrize("value", [1e39, 1e38, 1e-40])
def test_numbers_beyond_float32(name, value):
    arguments = {"softcap": 3.0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be 0 or between 1e-30 and 1e.30, got"):
        jaxcap.dot_product_attention(Q, Q, Q, **arguments)
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        jaxcap.dot_product_attention(Q, Q, Q, **(arguments | {name: 10**400}))


@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_a_window_past_every_key_is_none(backend):
    wanted = attend(backend)
    for window in (2**31 - 1, 2**40, (2**40, None)):
        np.testing.assert_array_equal(attend(backend, local_window_size=window), wanted)


@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_slopes_have_no_gradient(backend):
    """ALiBi alone may be asked for: zeros, not an error."""

    def loss(slopes, q):
        out = jaxcap.dot_product_attention(
            q, Q, Q, softcap=3.0, alibi_slopes=slopes, implementation=backend
        )
        return out.sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(2), Q), 0)
    both = jax.grad(loss, (0, 1))(jnp.ones(2), Q)
    np.testing.assert_array_equal(both[0], 0)
    assert np.isfinite(both[1]).all()
