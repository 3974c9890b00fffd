"""DESIGN.md's "Semantics, exactly": dropout, residual, dtypes, `jax.nn`'s answers, heads, axes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from tests import cases, conformance, plain
from tests.calls import BOTH, attend, normal, qkv, same

# Dropout


@BOTH
def test_dropout_acts_on_normalised_probabilities(backend):
    """ "survivors divided by 1 - p, residual undropped", sinks being part of what is normalised."""
    q, k, _ = qkv()
    v = np.broadcast_to(np.eye(37, dtype=np.float32)[None, :, None], (2, 37, 1, 37))
    sinks = np.array([25.0, 35.0], np.float32)
    p, lse = attend(q, k, v, sinks=sinks, implementation=backend)
    dropped, again = attend(
        q,
        k,
        v,
        sinks=sinks,
        dropout_rate=0.25,
        dropout_rng=jax.random.key(0),
        implementation=backend,
    )
    np.testing.assert_array_equal(again, lse)
    kept = dropped != 0
    assert 0.6 < kept.mean() < 0.9
    same(dropped, np.where(kept, p / 0.75, 0.0))


# Residual and dtypes


@BOTH
def test_residual(backend):
    """ "adds the log-sum-exp, natural logarithm, float32, `[B, T, N]`, differentiable"."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in qkv())
    bias = np.zeros((2, 2, 21, 37), np.float32)
    out, lse = attend(q, k, v, bias, implementation=backend)
    assert out.dtype == jnp.bfloat16
    assert lse.shape == (2, 21, 2)
    assert lse.dtype == np.float32
    wide = (np.asarray(x, np.float64) for x in (q, k))
    logits = np.einsum("btnh,bsh->btns", next(wide), next(wide)[:, :, 0]) / 8**0.5
    same(lse, np.log(np.exp(50 * np.tanh(logits / 50)).sum(axis=-1)), rtol=1e-5)

    # Its gradient in the scores is the softmax.
    @plain.quick_jit
    def slopes(bias):
        return jax.grad(
            lambda bias: jaxcap.dot_product_attention(
                q, k, v, bias, softcap=50.0, return_residual=True, implementation=backend
            )[1].sum()
        )(bias)

    np.testing.assert_allclose(slopes(bias).sum(axis=-1), 1.0, rtol=1e-5)


@BOTH
def test_float64_stays_float64(backend):
    """ "float64 stays float64 in `xla` and `blockwise`": results to 1e-9 and better."""
    with jax.enable_x64(True):
        conformance.check(backend, cases.BY_NAME["everything"], "float64")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saturated_rows_at_the_edge_of_the_bound(dtype):
    """ "No running maximum only where it is provably safe": rows all at -cap, or all at cap, survive.

    The caps put exponents at the edge of the normal numbers and around it.
    """
    sign = np.array([-1.0, 1.0], np.float32).reshape(1, 2, 1, 1)
    q, k = np.broadcast_to(sign, (1, 2, 1, 8)), np.full((1, 21, 1, 8), 1e4, np.float32)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, normal(1, 21, 1, 8)))
    mean = np.asarray(v, np.float32).mean(axis=1)[0]
    for exponent in (63 - 1e-6, 63, 64, 70):
        cap = exponent / math.log2(math.e)
        out, lse = attend(q, k, v, softcap=cap, implementation="blockwise")
        expected = np.broadcast_to(mean, (2, 1, 8))
        np.testing.assert_allclose(out[0].astype(np.float32), expected, atol=0.02, rtol=0.02)
        same(lse[0, :, 0], math.log(21) + np.array([-cap, cap]))


# What jax.nn has


JAX_NN = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "window": {"local_window_size": (5, 3)},
    "one window": {"local_window_size": 4, "is_causal": True},
    "mask": {"mask": np.random.default_rng(0).random((2, 4, 21, 21)) < 0.8},
    "bias": {"bias": normal(1, 4, 21, 21, seed=7)},
    "kv lengths": {"key_value_seq_lengths": np.array([9, 21], np.int32)},
    "lengths": {
        "query_seq_lengths": np.array([21, 11], np.int32),
        "key_value_seq_lengths": np.array([9, 21], np.int32),
        "is_causal": True,
    },
}


@pytest.mark.parametrize(
    ("what", "backend", "axes"),
    [(what, "blockwise", "BTNH") for what in JAX_NN]
    + [(what, "xla", "TNH") for what in ("plain", "mask", "bias", "lengths")],
)
def test_replacing_jax_nn_changes_nothing(what, backend, axes):
    """ "so that replacing one by the other changes nothing", values and gradients."""
    operands = [normal(2, 21, n, 8, seed=i) for i, n in enumerate((4, 2, 2))]
    keywords = dict(JAX_NN[what])
    if axes == "TNH":
        operands = [x[0] for x in operands]
        for name, x in keywords.items():
            if isinstance(x, np.ndarray) and (x.ndim == 1 or x.shape[0] == 2):
                keywords[name] = x[:1]

    @plain.quick_jit
    def both(operands, d_out):
        theirs, pull = jax.vjp(lambda *o: jax.nn.dot_product_attention(*o, **keywords), *operands)
        ours, our_pull = jax.vjp(
            lambda *o: jaxcap.dot_product_attention(*o, **keywords, implementation=backend),
            *operands,
        )
        return (theirs, *pull(d_out)), (ours, *our_pull(d_out))

    theirs, ours = both(operands, normal(*operands[0].shape, seed=9))
    same(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_residual_as_jax_nn(backend):
    """Its place and meaning; ours is float32 and has a gradient, theirs has the key's dtype."""
    operands = [normal(2, 21, n, 8, seed=i) for i, n in enumerate((4, 2, 2))]
    theirs = jax.nn.dot_product_attention(*operands, is_causal=True, return_residual=True)
    same(attend(*operands, softcap=None, is_causal=True, implementation=backend), theirs)


# Heads and leading axes


@BOTH
def test_grouped_heads(backend):
    """ "N a multiple of K": query heads n // (N / K) share a key/value head, as if it were repeated."""
    q, k, v = qkv(n=6, k=2)
    repeated = (np.repeat(x, 3, axis=2) for x in (k, v))
    same(attend(q, k, v, implementation=backend), attend(q, *repeated, implementation=backend))


@BOTH
def test_values_of_another_size(backend):
    """ "the value's H may differ": each column of the values stands for itself."""
    q, k, v = qkv()
    wide = np.concatenate([v, 2 * v, v[..., :3]], axis=-1)
    out, lse = attend(q, k, v, implementation=backend)
    expected = np.concatenate([out, 2 * out, out[..., :3]], axis=-1)
    same(attend(q, k, wide, implementation=backend), (expected, lse))


@BOTH
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
def test_leading_axes(backend, lead):
    """Any number of batch axes, for all arrays alike; bias and mask broadcast over them."""
    count = math.prod(lead)
    q, k, v = qkv(batch=count)
    lengths = np.arange(20, 20 + count, dtype=np.int32)
    bias = normal(2, 21, 37, seed=3)
    mask = np.random.default_rng(0).random((count, 1, 1, 37)) < 0.7
    flat = attend(q, k, v, bias[None], mask, key_value_seq_lengths=lengths, implementation=backend)
    shaped = attend(
        *(x.reshape(*lead, *x.shape[1:]) for x in (q, k, v)),
        bias,
        mask.reshape(*lead, 1, 1, 37),
        key_value_seq_lengths=lengths.reshape(lead),
        implementation=backend,
    )
    assert shaped[0].shape == (*lead, 21, 2, 8)
    assert shaped[1].shape == (*lead, 21, 2)
    same(shaped, tuple(x.reshape(*lead, *x.shape[1:]) for x in flat))


def test_gradients_of_some_operands():
    """Asked for a part of the gradients, a backend gives the same as asked for all."""
    operands = (*qkv(), normal(1, 2, 21, 37, seed=3), np.array([5.0, 30.0], np.float32))

    def loss(q, k, v, bias, sinks):
        out, lse = jaxcap.dot_product_attention(
            q,
            k,
            v,
            bias,
            softcap=50.0,
            sinks=sinks,
            is_causal=True,
            return_residual=True,
            implementation="blockwise",
        )
        return (out * normal(*out.shape, seed=5)).sum() + (lse * normal(*lse.shape, seed=6)).sum()

    every = plain.quick_jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*operands)
    for wanted in ((0,), (3,), (4,), (0, 2), (1, 3, 4)):
        some = plain.quick_jit(jax.grad(loss, argnums=wanted))(*operands)
        same(some, tuple(every[i] for i in wanted))
