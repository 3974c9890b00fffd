"""DESIGN.md's "Semantics, exactly": empty rows, NaN that has no effect, sinks."""

import jax
import numpy as np
import pytest

import jaxcap
from tests import plain
from tests.calls import BOTH, attend, attend_and_gradients, normal, qkv, same

# Empty rows, NaN


EMPTY = {
    "mask": {"mask": np.broadcast_to(np.arange(21)[:, None] != 3, (1, 1, 21, 37))},
    "bias": {
        "bias": np.where(np.arange(21)[:, None] == 3, np.float32(-np.inf), np.float32(0.5))[
            None, None
        ]
        * np.ones((1, 1, 1, 37), np.float32)
    },
    "bias and mask together": {
        "bias": np.where(np.arange(37) < 20, np.float32(-np.inf), np.float32(0))[None, None, None],
        "mask": (np.arange(21)[:, None] != 3)[None, None] | (np.arange(37) < 20)[None, None, None],
    },
    "segments": {
        "query_segment_ids": np.where(np.arange(21) == 3, 9, 1).astype(np.int32)[None].repeat(2, 0),
        "key_value_segment_ids": np.ones((2, 37), np.int32),
    },
    "positions": {
        "is_causal": True,
        "query_positions": np.where(np.arange(21) == 3, -1, 50).astype(np.int32),
    },
}


@BOTH
@pytest.mark.parametrize("why", EMPTY)
def test_empty_row(backend, why):
    """ "Empty row (also one whose bias is -inf throughout): output 0, gradients 0, residual -inf";

    and its query and cotangents may be NaN.
    """
    keywords = EMPTY[why] | {"implementation": backend}
    operands = list(qkv())
    if "bias" in keywords:
        operands.append(keywords.pop("bias"))
    d_out, d_lse = normal(2, 21, 2, 8, seed=5), normal(2, 21, 2, seed=6)
    clean = attend_and_gradients(operands, (d_out, d_lse), **keywords)
    (out, lse), grads = clean
    assert (out[:, 3] == 0).all()
    assert (lse[:, 3] == -np.inf).all()
    assert (grads[0][:, 3] == 0).all()
    assert np.isfinite(np.delete(lse, 3, axis=1)).all()
    assert all(np.isfinite(x).all() for x in grads)
    # d_lse too: whoever squares a residual of -inf hands back an infinite cotangent.
    operands[0][:, 3], d_out[:, 3], d_lse[:, 3] = np.nan, np.inf, np.nan
    again = attend_and_gradients(operands, (d_out, d_lse), **keywords)
    same(again, clean, rtol=0, atol=0)


UNATTENDED = {
    "mask": {"mask": np.isin(np.arange(37), (4, 30), invert=True)[None, None, None]},
    "bias": {
        "bias": np.where(np.isin(np.arange(37), (4, 30)), np.float32(-np.inf), np.float32(1))[
            None, None, None
        ]
    },
    "segments": {
        "query_segment_ids": np.ones((2, 21), np.int32),
        "key_value_segment_ids": np.isin(np.arange(37), (4, 30), invert=True)
        .astype(np.int32)[None]
        .repeat(2, 0),
    },
    "positions": {
        "is_causal": True,
        "query_positions": np.full(21, 50, np.int32),
        "key_value_positions": np.where(np.isin(np.arange(37), (4, 30)), 99, 0).astype(np.int32),
    },
}


@BOTH
@pytest.mark.parametrize("why", UNATTENDED)
def test_unattended_keys(backend, why):
    """ "NaN or infinity at a key or value position that no query [...] attends [...] has no effect"."""
    keywords = UNATTENDED[why] | {"implementation": backend}
    operands = [*qkv(), *([keywords.pop("bias")] if "bias" in keywords else [])]
    cotangents = normal(2, 21, 2, 8, seed=5), normal(2, 21, 2, seed=6)
    clean = attend_and_gradients(operands, cotangents, **keywords)
    assert all((x[:, [4, 30]] == 0).all() for x in clean[1][1:3])
    for poison in (np.nan, np.inf, -np.inf):
        for name in (1, 2):
            operands[name][:, [4, 30]] = poison
        again = attend_and_gradients(operands, cotangents, **keywords)
        same(again, clean, rtol=0, atol=0)


@BOTH
def test_what_is_attended(backend):
    """NaN there is in output and residual of the rows that see it, and in no others."""
    q, k, v = qkv()
    k[0, 4] = np.nan
    for _ in range(2):
        out, lse = attend(q, k, v, implementation=backend)
        assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
        assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()
        k[0, 4], v[0, 4] = np.inf, 0  # infinity as a score is none either


# Sinks


@BOTH
def test_sinks(backend):
    """ "`exp(sink)` joins the denominator; the residual includes it"."""
    q, k, v = qkv()
    sinks = np.array([1.5, 30.0], np.float32)
    out, lse = attend(q, k, v, implementation=backend)
    with_sink = attend(q, k, v, sinks=sinks, implementation=backend)
    share = 1 / (1 + np.exp(sinks - lse))
    same(with_sink, (out * share[..., None], np.logaddexp(lse, sinks)))


@BOTH
def test_sink_of_an_empty_row(backend):
    """ "(an empty row's residual is the sink)", and hands its cotangent to the sink."""
    q, k, v = qkv()
    sinks = np.array([1.5, -70.0], np.float32)
    lengths = np.array([0, 37], np.int32)

    def call(sinks):
        return jaxcap.dot_product_attention(
            q,
            k,
            v,
            sinks=sinks,
            key_value_seq_lengths=lengths,
            return_residual=True,
            implementation=backend,
        )

    @plain.quick_jit
    def run(sinks, d_out, d_lse):
        (out, lse), pullback = jax.vjp(call, sinks)
        return out, lse, pullback((d_out, d_lse))[0]

    d_lse = normal(2, 21, 2, seed=4)
    d_lse[1] = 0  # of rows that attend something
    out, lse, d_sinks = run(sinks, np.zeros((2, 21, 2, 8), np.float32), d_lse)
    assert (out[0] == 0).all()
    same(lse[0], np.broadcast_to(sinks, (21, 2)))
    same(d_sinks, d_lse[0].sum(axis=0))


@BOTH
@pytest.mark.parametrize("level", [-1e4, -300.0, 300.0, 1e4])
def test_sinks_far_from_the_scores(backend, level):
    """However large or small: no overflow, no NaN. With -inf there is no sink."""
    q, k, v = qkv()
    sinks = np.full(2, level, np.float32)
    result = attend(q, k, v, sinks=sinks, implementation=backend)
    without = attend(q, k, v, implementation=backend)
    if level < 0:
        same(result, without)
        same(
            attend(q, k, v, sinks=np.full(2, -np.inf, np.float32), implementation=backend), without
        )
    else:
        same(result, (0 * result[0], np.full_like(result[1], level)))
