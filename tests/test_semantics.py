"""DESIGN.md's "Semantics, exactly": the score, causality, windows, positions, segments, lengths.

The conformance suite compares all of this with the oracle; here and in `test_semantics_rows.py` and
`test_semantics_results.py` each line stands by itself, quoted, worked out by hand or as an equality
between two calls, so that the oracle is not its only reading.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from tests.calls import BOTH, attend, normal, picture, qkv, same, seen

# score = cap * tanh(scale * q.k / cap) + bias - slope * |q_pos - k_pos|


@BOTH
def test_the_score(backend):
    """ "`score = cap * tanh(scale * q.k / cap) + bias - slope * |q_pos - k_pos|`", by hand."""
    q = np.full((1, 1, 1, 1), 6.0, np.float32)
    k = np.array([1.0, 0.5, -1.0], np.float32).reshape(1, 3, 1, 1)
    v = np.array([1.0, 10.0, 100.0], np.float32).reshape(1, 3, 1, 1)
    bias = np.array([0.5, 20.0, -1.0], np.float32).reshape(1, 1, 1, 3)
    slopes = np.array([3.0], np.float32)
    out, lse = attend(
        q, k, v, bias, softcap=4.0, scale=0.5, alibi_slopes=slopes, implementation=backend
    )
    scores = [
        4 * math.tanh(0.5 * 6 * key / 4) + extra - 3 * place
        for place, (key, extra) in enumerate(zip((1, 0.5, -1), (0.5, 20.0, -1.0), strict=True))
    ]
    weights = np.exp(scores)
    same(lse.item(), math.log(weights.sum()))
    same(out.item(), (weights * [1, 10, 100]).sum() / weights.sum())


@BOTH
def test_bias_and_alibi_are_outside_the_cap(backend):
    """ "bias (and ALiBi [...]) outside the cap": a large bias arrives whole."""
    q, k, v = qkv()
    bias = np.full((1, 1, 1, 1), 300.0, np.float32)
    _, lse = attend(q, k, v, softcap=5.0, implementation=backend)
    _, biased = attend(q, k, v, bias, softcap=5.0, implementation=backend)
    same(biased, lse + 300.0)


@BOTH
def test_alibi_slopes_by_head_and_batch(backend):
    """ "slopes `[N]` or `[B, N]`": the same slopes in either form, and as a bias."""
    q, k, v = qkv()
    slopes = np.array([0.5, 0.125], np.float32)
    distance = np.abs(np.arange(21)[:, None] - np.arange(37)[None]).astype(np.float32)
    as_bias = (-slopes[:, None, None] * distance)[None]
    by_head = attend(q, k, v, alibi_slopes=slopes, implementation=backend)
    by_batch = attend(q, k, v, alibi_slopes=np.stack([slopes, slopes]), implementation=backend)
    same(by_head, by_batch)
    same(by_head, attend(q, k, v, as_bias, implementation=backend))


@BOTH
def test_alibi_has_no_gradient(backend):
    """ "(and ALiBi, [...] no gradient)"."""
    q, k, v = qkv()

    def loss(slopes):
        out = jaxcap.dot_product_attention(q, k, v, alibi_slopes=slopes, implementation=backend)
        return out.sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.array([0.5, 0.1])), 0.0)


@BOTH
def test_masks_come_last(backend):
    """ "then masks": no bias brings a masked key back."""
    q, k, v = qkv()
    bias = np.where(np.arange(37) < 5, np.float32(1e6), np.float32(0))[None, None, None]
    mask = (np.arange(37) >= 5)[None, None, None]
    hidden = attend(q, k, v, bias, mask, implementation=backend)
    same(hidden, attend(q, k[:, 5:], v[:, 5:], implementation=backend))


@BOTH
@pytest.mark.parametrize("layer_scale", [2.0, 3.0, 46.0])
def test_layer_scale(backend, layer_scale):
    """ "the factor is divided out of the cap and never touches the bias": the same result."""
    q, k, v = qkv()
    bias = normal(1, 2, 21, 37, seed=3)
    with_factor = attend(q, k, v, bias, layer_scale=layer_scale, implementation=backend)
    same(with_factor, attend(q, k, v, bias, implementation=backend), rtol=2e-4, atol=2e-5)


@BOTH
def test_zero_cap_is_no_cap(backend):
    """ "Off is 0.0 or None": the same program, and not one that divides by 0."""
    q, k, v = qkv()

    def program(cap):
        return str(
            jax.make_jaxpr(
                lambda q, k, v: jaxcap.dot_product_attention(
                    q, k, v, softcap=cap, implementation=backend
                )
            )(q, k, v)
        )

    assert program(0.0) == program(None)
    assert program(50.0) != program(None)
    off = attend(q, k, v, softcap=0.0, implementation=backend)
    jax.tree.map(
        np.testing.assert_array_equal, off, attend(q, k, v, softcap=None, implementation=backend)
    )


# Causality, windows, positions


@BOTH
def test_causal_alignments(backend):
    """ "top-left, `jax.nn`" and "`i + S - T` (bottom-right, FlashAttention)"."""
    top = seen(backend, 3, 5, is_causal=True)
    assert picture(top) == ["#....", "##...", "###.."]
    bottom = seen(backend, 3, 5, is_causal=True, causal_alignment="bottom_right")
    assert picture(bottom) == ["###..", "####.", "#####"]
    longer = seen(backend, 5, 3, is_causal=True, causal_alignment="bottom_right")
    assert picture(longer) == ["...", "...", "#..", "##.", "###"]


@BOTH
def test_windows(backend):
    """ "Window `(left, right)`: [...] None is unbounded, int W is (W, W), intersected with causal"."""
    assert picture(seen(backend, 4, 4, local_window_size=(2, 0))) == [
        "#...",
        "##..",
        "###.",
        ".###",
    ]
    assert picture(seen(backend, 4, 4, local_window_size=1)) == ["##..", "###.", ".###", "..##"]
    assert picture(seen(backend, 3, 4, local_window_size=(None, 1))) == ["##..", "###.", "####"]
    assert picture(seen(backend, 3, 4, local_window_size=(0, None))) == ["####", ".###", "..##"]
    both = seen(backend, 4, 4, local_window_size=(1, 2), is_causal=True)
    assert picture(both) == ["#...", "##..", ".##.", "..##"]
    bottom = seen(backend, 2, 4, local_window_size=(1, 0), causal_alignment="bottom_right")
    assert picture(bottom) == [".##.", "..##"]


@BOTH
def test_gemma_window(backend):
    """ "Gemma's `sliding_window=4096` is `(4095, 0)`": W keys, the query's own among them."""
    kept = seen(backend, 23, 23, is_causal=True, local_window_size=(5, 0))
    assert (kept.sum(axis=1) == np.minimum(np.arange(23) + 1, 6)).all()


@BOTH
def test_positions_replace_indices(backend):
    """ "Given positions replace i and j in all three": causality, window, ALiBi."""
    q, k, v = qkv(21, 21)
    slopes = np.array([0.5, 0.125], np.float32)
    features = {"is_causal": True, "local_window_size": (9, 0), "alibi_slopes": slopes}
    plain_call = attend(q, k, v, implementation=backend, **features)
    index = np.arange(21, dtype=np.int32)
    shifted = np.stack([index - 1000, index + 7])
    moved = {"query_positions": shifted, "key_value_positions": shifted}
    same(attend(q, k, v, implementation=backend, **features, **moved), plain_call)

    # Reorder queries and keys, and say so: the output comes out reordered.
    rng = np.random.default_rng(3)
    rows, columns = rng.permutation(21).astype(np.int32), rng.permutation(21).astype(np.int32)
    reordered = attend(
        q[:, rows],
        k[:, columns],
        v[:, columns],
        query_positions=rows,
        key_value_positions=columns,
        implementation=backend,
        **features,
    )
    same(reordered, tuple(x[:, rows] for x in plain_call))


@BOTH
def test_positions_imply_no_causality(backend):
    """ "imply no causality": without causality, window or ALiBi they change nothing."""
    q, k, v = qkv()
    given = attend(
        q,
        k,
        v,
        query_positions=np.arange(21, dtype=np.int32) * 3,
        key_value_positions=np.arange(37, dtype=np.int32)[::-1].copy(),
        implementation=backend,
    )
    same(given, attend(q, k, v, implementation=backend))


@BOTH
def test_positions_of_one_side(backend):
    """The other side keeps its indices: a query at position 3 sees keys 0 to 3."""
    kept = seen(backend, 2, 5, is_causal=True, query_positions=np.array([3, 0], np.int32))
    assert picture(kept) == ["####.", "#...."]
    keys = np.array([9, 0, -5, 1], np.int32)
    kept = seen(backend, 2, 4, is_causal=True, key_value_positions=keys)
    assert picture(kept) == [".##.", ".###"]


# Segments and lengths


@BOTH
def test_segments(backend):
    """ "Segments attend where ids are equal, no id is special"."""
    ids = np.array([[0, 0, -1, 2, 0]], np.int32)
    kept = seen(backend, 5, 5, query_segment_ids=ids, key_value_segment_ids=ids)
    assert picture(kept) == ["##..#", "##..#", "..#..", "...#.", "##..#"]
    renamed = np.array([[7, 7, 0, -1, 7]], np.int32)
    again = seen(backend, 5, 5, query_segment_ids=renamed, key_value_segment_ids=renamed)
    np.testing.assert_array_equal(again, kept)


@BOTH
def test_lengths(backend):
    """ "Lengths cut tails; a padded query is an empty row"."""
    q, k, v = qkv()
    out, lse = attend(
        q,
        k,
        v,
        query_seq_lengths=np.array([5, 21], np.int32),
        key_value_seq_lengths=np.array([37, 11], np.int32),
        implementation=backend,
    )
    first = attend(q[:1, :5], k[:1], v[:1], implementation=backend)
    second = attend(q[1:], k[1:, :11], v[1:, :11], implementation=backend)
    same((out[:1, :5], lse[:1, :5]), first)
    same((out[1:], lse[1:]), second)
    assert (out[0, 5:] == 0).all()
    assert (lse[0, 5:] == -np.inf).all()


@pytest.mark.parametrize("level", [-1e4, -1e7, -1e9, -1e10, -1e30, float(np.finfo("float32").min)])
@pytest.mark.parametrize(
    "backend", ["xla", "blockwise", pytest.param("pallas", marks=pytest.mark.gpu)]
)
def test_rows_that_a_bias_pads(backend, level):
    """An additive mask gives a padding row the same bias everywhere: what no loss reads harms nobody."""
    dtype = jnp.dtype("bfloat16" if backend == "pallas" else "float32")
    q, k, v, d_out = (normal(1, 64, 2, 64, seed=i).astype(dtype) for i in range(4))
    d_out[:, :8] = 0
    bias = np.zeros((1, 1, 64, 64), np.float32)
    bias[:, :, :8] = level

    def gradients(q, k, v, bias, d_out):
        def out(q, k, v):
            return jaxcap.dot_product_attention(q, k, v, bias, softcap=2.0, implementation=backend)

        return jax.vjp(out, q, k, v)[1](d_out)

    got = jax.jit(gradients)(q, k, v, bias, d_out)
    wanted = jax.jit(gradients)(q[:, 8:], k, v, bias[:, :, 8:], d_out[:, 8:])
    assert not np.asarray(got[0][:, :8], np.float32).any()
    for x, y in zip((got[0][:, 8:], *got[1:]), wanted, strict=True):
        x, y = (np.asarray(value, np.float64) for value in (x, y))
        assert np.linalg.norm(x - y) <= (2e-2 if backend == "pallas" else 1e-5) * np.linalg.norm(y)
