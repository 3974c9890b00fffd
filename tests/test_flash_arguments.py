"""The translation to FlashAttention's conventions, against masks written out."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import mask as mask_lib
from jaxcap.spec import AttentionSpec, Operands
from jaxcap.torch_bridge import arguments


def spec(**changes):
    base = AttentionSpec(
        batch=2,
        query_length=6,
        key_length=9,
        query_heads=4,
        kv_heads=2,
        head_size=64,
        value_size=64,
        dtype="bfloat16",
        scale=0.125,
        softcap=50.0,
    )
    return base.replace(**changes)


def ours(s):
    q, k = np.arange(s.query_length) + s.query_offset, np.arange(s.key_length)
    kept = mask_lib.in_band(s, q[:, None], k[None])
    shape = (s.query_length, s.key_length)
    return np.ones(shape, bool) if kept is None else np.broadcast_to(kept, shape)


def theirs(s):
    """By the docstring of `flash_attn_func`, within the rows and keys that are passed."""
    mask = arguments.mask_of(s)
    found = np.zeros((s.query_length, s.key_length), bool)
    t, n = mask.sizes
    i, j = np.arange(t)[:, None] + n - t, np.arange(n)[None]
    kept = np.ones((t, n), bool)
    if mask.causal or mask.right >= 0:
        kept &= j <= i + (0 if mask.causal else mask.right)
    if mask.left >= 0:
        kept &= j >= i - mask.left
    found[slice(*mask.rows), slice(*mask.keys)] = kept
    return found


ENDS = (None, 0, 1, 2, 5, 40)
LENGTHS = ((6, 9), (9, 6), (7, 7), (1, 5), (5, 1), (13, 3), (3, 13))
WINDOWS = (None, *itertools.product(ENDS, ENDS))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("t", "s"), LENGTHS)
def test_every_mask_is_translated_exactly(t, s, alignment):
    """Entry for entry, and no query and no key is passed that takes no part."""
    for causal, window, offset in itertools.product((False, True), WINDOWS, (0, 4, -3, 30)):
        call = spec(
            query_length=t,
            key_length=s,
            is_causal=causal,
            window=window,
            causal_alignment=alignment,
            position_offset=offset,
        )
        kept, mask = ours(call), arguments.mask_of(call)
        np.testing.assert_array_equal(theirs(call), kept, str(call))
        assert mask.empty == (not kept.any())
        if not mask.empty:
            assert kept[slice(*mask.rows)].any(axis=1).all()
            assert kept[:, slice(*mask.keys)].any(axis=0).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ((0, 6), (0, 9), False, -1, -1)),
        ({"is_causal": True, "key_length": 6}, ((0, 6), (0, 6), True, -1, 0)),
        ({"is_causal": True}, ((0, 6), (0, 6), True, -1, 0)),
        (
            {"is_causal": True, "causal_alignment": "bottom_right"},
            ((0, 6), (0, 9), True, -1, 0),
        ),
        ({"is_causal": True, "query_length": 9, "key_length": 6}, ((0, 9), (0, 6), False, -1, 3)),
        (
            {"is_causal": True, "window": (2, 0), "key_length": 6},
            ((0, 6), (0, 6), False, 2, 0),
        ),
    ],
)
def test_masks_by_hand(changes, expected):
    mask = arguments.mask_of(spec(**changes))
    assert (mask.rows, mask.keys, mask.causal, mask.left, mask.right) == expected
    assert mask.local == (not mask.causal and expected[3:] != (-1, -1))


def test_scale_cap_and_layer_scale():
    call = arguments.call_of(spec(layer_scale=3.0, deterministic=True))
    assert (call.scale, call.softcap, call.deterministic) == (0.125, 50.0, True)
    assert arguments.call_of(spec(softcap=None)).softcap == 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 and float16 only, got float32"),
        ({"head_size": 60, "value_size": 60}, "multiples of 8 up to 256, got 60"),
        ({"head_size": 264, "value_size": 264}, "multiples of 8 up to 256, got 264"),
        ({"value_size": 32}, "must be equal, got 64 and 32"),
        ({"bias_shape": (1, 1, 6, 9)}, "no bias"),
        ({"mask_shape": (1, 1, 6, 9)}, "no boolean mask"),
        ({"segment_ids": True}, "no segment ids: runs of equal ids could be packed"),
        ({"query_positions": True}, "no positions"),
        ({"kv_positions": True}, "no positions"),
        ({"kv_lengths": True, "window": (3, 0)}, "no key lengths with a window's left end"),
        ({"dropout_rate": 0.1}, "cannot drop the entries that the key names"),
        ({"key_length": 0}, "an axis of length 0"),
    ],
)
def test_what_cannot_be_said_is_refused(changes, reason):
    assert arguments.inexpressible(spec()) == []
    [found] = arguments.inexpressible(spec(**changes))
    assert reason in found


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_used_rows_and_keys(causal, with_keys):
    """Against the mask of all lengths and causality, row by row and key by key."""
    lengths = jnp.array([4, 0], jnp.int32)
    kv = jnp.array([7, 3], jnp.int32) if with_keys else None
    call = spec(is_causal=causal, query_lengths=True, kv_lengths=with_keys)
    zero = jnp.zeros((2, 1, 1, 1))
    operands = Operands(zero, zero, zero, query_lengths=lengths, kv_lengths=kv)
    q = mask_lib.query_side(call, operands, 0, 6)
    k = mask_lib.key_side(call, operands, 0, 9)
    kept = np.broadcast_to(np.asarray(mask_lib.keep(call, q, k))[:, 0], (2, 6, 9))
    rows, keys = arguments.used(call, operands)
    assert rows is not None and keys is not None
    np.testing.assert_array_equal(rows, kept.any(axis=2))
    np.testing.assert_array_equal(keys, kept.any(axis=1))


def test_lengths_as_packed_sequences():
    """All queries with the keys inside the length, then none with the rest."""
    call = spec(kv_lengths=True)
    zero = jnp.zeros((2, 1, 1, 1))
    operands = Operands(zero, zero, zero, kv_lengths=jnp.array([4, 20], jnp.int32))
    [piece] = arguments.pieces(call, operands)
    assert piece.lengths is not None and piece.lengths.tolist() == [4, 9]
    bounds = arguments.packed_bounds(call, piece.lengths)
    assert bounds["cu_seqlens_q"].tolist() == [0, 6, 6, 12, 12]
    assert bounds["cu_seqlens_k"].tolist() == [0, 4, 9, 18, 18]
    assert all(x.dtype == jnp.int32 for x in bounds.values())
    assert arguments.packed_bounds(spec(), None) == {}


def test_causality_with_key_lengths_is_two_calls():
    """Each query is in one of them, with its own keys; the second has none where lengths agree."""
    call = spec(is_causal=True, query_length=6, key_length=6, query_lengths=True, kv_lengths=True)
    lengths = jnp.array([4, 5], jnp.int32), jnp.array([4, 2], jnp.int32)
    zero = jnp.zeros((2, 1, 1, 1))
    operands = Operands(zero, zero, zero, query_lengths=lengths[0], kv_lengths=lengths[1])
    first, second = arguments.pieces(call, operands)
    assert first.call.mask.causal and first.lengths is None
    assert not second.call.mask.causal and second.lengths.tolist() == [0, 2]
    assert first.rows.astype(int).tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert second.rows.astype(int).tolist() == [[0] * 6, [0, 0, 1, 1, 1, 0]]


def test_cotangent_of_the_residual_as_a_value():
    """d_out . v is d_lse to twice the precision of the dtype, for every key."""
    d_lse = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 6)), jnp.float32)
    v, d_out = arguments.lse_as_value(d_lse, jnp.zeros((2, 9, 2, 64), jnp.bfloat16), jnp.bfloat16)
    assert v.shape == (2, 9, 2, 64) and d_out.shape == (2, 6, 4, 64)
    dp = np.einsum("btnh,bsh->bnts", np.float64(d_out), np.float64(v[:, :, 0]))
    np.testing.assert_allclose(
        dp, np.broadcast_to(np.float64(d_lse)[..., None], dp.shape), rtol=2e-5
    )
