"""The lines of DESIGN.md's "Semantics, exactly", one test or more each, quoted; on `xla` and `blockwise`.

The conformance suite compares all of this with the oracle; here each rule stands by itself, worked out by
hand or as an equality between two calls, so that the oracle is not the only reading of it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from tests import cases, conformance, plain

BOTH = pytest.mark.parametrize("backend", ["xla", "blockwise"])


@pytest.fixture(autouse=True, scope="module")
def tiled_blockwise():
    with conformance.registered(conformance.TILED):
        yield


def normal(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(scale)


def qkv(t=21, s=37, n=2, k=1, batch=2):
    return (
        normal(batch, t, n, 8, scale=12.0),
        normal(batch, s, k, 8, seed=1),
        normal(batch, s, k, 8, seed=2),
    )


@functools.cache
def program(differentiated, items):
    """One compiled program for all calls with the same static arguments (and shapes)."""
    static = {"softcap": 50.0, "return_residual": True} | dict(items)

    def call(operands, arrays):
        return jaxcap.dot_product_attention(*operands, **arrays, **static)

    def with_gradients(operands, arrays, cotangents):
        results, pullback = jax.vjp(lambda *given: call(given, arrays), *operands)
        return results, pullback(cotangents)

    return plain.quick_jit(with_gradients if differentiated else call)


def split(keywords):
    arrays = {k: v for k, v in keywords.items() if isinstance(v, np.ndarray | jax.Array)}
    static = {k: v for k, v in keywords.items() if k not in arrays and k != "dropout_rng"}
    if "dropout_rng" in keywords:
        arrays["dropout_rng"] = keywords["dropout_rng"]
    return arrays, tuple(sorted(static.items()))


def attend(*operands, **keywords):
    """(out, lse) under jit; arrays among the keywords are traced."""
    arrays, static = split(keywords)
    return jax.tree.map(np.asarray, program(False, static)(operands, arrays))


def attend_and_gradients(operands, cotangents, **keywords):
    """((out, lse), gradients of query, key, value and of bias where it is given)."""
    arrays, static = split(keywords)
    found = program(True, static)(tuple(operands), arrays, cotangents)
    return jax.tree.map(np.asarray, found)


def same(a, b, **tolerance):
    tolerance = tolerance or {"rtol": 2e-5, "atol": 2e-6}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def seen(backend, t=7, s=9, **keywords):
    """[T, S] bool: which keys a query attends, from values that name their key."""
    q, k = normal(1, t, 1, 8), normal(1, s, 1, 8, seed=1)
    v = np.eye(s, dtype=np.float32)[None, :, None]
    return attend(q, k, v, implementation=backend, **keywords)[0][0, :, 0] > 0


def picture(kept):
    return ["".join(".#"[int(x)] for x in row) for row in kept]


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
def test_nothing_to_attend_at_all(backend):
    """No keys, no queries or no batch at all are no error: empty rows, or nothing."""
    q, k, v = qkv()
    out, lse = attend(q, k[:, :0], v[:, :0], implementation=backend)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    out, lse = attend(q[:, :0], k, v, implementation=backend)
    assert out.shape == (2, 0, 2, 8)
    assert lse.shape == (2, 0, 2)
    assert attend(q[:0], k[:0], v[:0], implementation=backend)[0].shape == (0, 21, 2, 8)


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


@pytest.mark.parametrize("backend", ["xla", "blockwise", conformance.TILED.name])
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


@pytest.mark.parametrize(("backend", "axes"), [("xla", "TNH"), ("blockwise", "BTNH")])
@pytest.mark.parametrize("what", JAX_NN)
def test_replacing_jax_nn_changes_nothing(backend, what, axes):
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
