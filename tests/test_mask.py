"""Masks against brute force, tile by tile, and the pictures in the docstring drawn anew."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import mask
from jaxcap.spec import AttentionSpec, Operands
from tests import cases, conformance, plain

BANDS = [
    {},
    {"is_causal": True},
    {"window": (2, 0)},
    {"window": (0, 0)},
    {"window": (1, 3)},
    {"window": (None, 1)},
    {"window": (2, None)},
    {"window": (2, None), "is_causal": True},
    {"window": (1, 4), "is_causal": True},
]


def spec_of(t, s, **changes):
    base = AttentionSpec(
        batch=1,
        query_length=t,
        key_length=s,
        query_heads=1,
        kv_heads=1,
        head_size=8,
        value_size=8,
        dtype="float32",
        scale=1.0,
    )
    return base.replace(**changes)


def may_attend(q_pos, k_pos, is_causal=False, window=None):
    """The definition, one entry at a time."""
    left, right = window or (None, None)
    if is_causal and k_pos > q_pos:
        return False
    if left is not None and k_pos < q_pos - left:
        return False
    return right is None or k_pos <= q_pos + right


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("t", "s"), [(5, 5), (4, 7), (7, 4), (1, 6), (6, 1)])
def test_band_against_brute_force(band, alignment, t, s):
    spec = spec_of(t, s, causal_alignment=alignment, **band)
    offset = s - t if alignment == "bottom_right" else 0
    assert spec.query_offset == offset
    rows, columns = np.arange(t)[:, None] + offset, np.arange(s)[None]
    kept = mask.in_band(spec, rows, columns)
    if not band:
        assert kept is None
        return
    expected = [[may_attend(i + offset, j, **band) for j in range(s)] for i in range(t)]
    np.testing.assert_array_equal(np.broadcast_to(kept, (t, s)), expected)


@pytest.mark.parametrize("band", BANDS[1:], ids=str)
def test_band_of_arbitrary_positions(band):
    """Positions may be negative, large, repeated and in any order."""
    positions = np.array([-(2**29), -7, -1, 0, 0, 3, 4, 2**29], np.int32)
    kept = mask.in_band(spec_of(8, 8, **band), positions[:, None], positions[None])
    expected = [[may_attend(int(i), int(j), **band) for j in positions] for i in positions]
    np.testing.assert_array_equal(kept, expected)


def operands_of(inputs):
    arrays = inputs.arrays
    nothing = jnp.zeros(())

    def rows(name):
        return None if name not in arrays else jnp.asarray(np.atleast_2d(arrays[name]))

    def flat(name):
        return None if name not in arrays else jnp.asarray(arrays[name])

    bias = inputs.operands.get("bias")
    return Operands(
        query=nothing,
        key=nothing,
        value=nothing,
        bias=None if bias is None else jnp.asarray(bias),
        mask=flat("mask"),
        query_lengths=flat("query_seq_lengths"),
        kv_lengths=flat("key_value_seq_lengths"),
        query_segment_ids=rows("query_segment_ids"),
        kv_segment_ids=rows("key_value_segment_ids"),
        query_positions=rows("query_positions"),
        kv_positions=rows("key_value_positions"),
    )


def as_pair(window):
    return (window, window) if isinstance(window, int) else window


MASKED = [c for c in cases.CASES if cases.build(c, "float32").oracle((0, 0)).part.mean() < 1]


@pytest.mark.parametrize("case", MASKED, ids=lambda c: c.name)
def test_tiles_are_cut_from_the_whole(case):
    """`keep_tile` of any tile is the part of the oracle's mask that lies there."""
    t, s = case.query_length, case.key_length
    spec = spec_of(
        t,
        s,
        is_causal=case.is_causal,
        causal_alignment=case.causal_alignment,
        window=as_pair(case.window),
    )
    inputs = cases.build(case, "float32")
    operands, part = operands_of(inputs), inputs.oracle((0, 0)).part
    tq, tk = min(8, t), min(16, s)
    tiles = [(0, t, 0, s), (t - tq, tq, s - tk, tk), ((t - tq) // 2, tq, 0, tk)]

    @plain.quick_jit
    def cut(operands):
        return [mask.keep_tile(spec, operands, *tile) for tile in tiles]

    for (q_start, tq, k_start, tk), kept in zip(tiles, cut(operands), strict=True):
        expected = part[:, :, q_start : q_start + tq, k_start : k_start + tk]
        np.testing.assert_array_equal(np.broadcast_to(kept, expected.shape), expected)


def test_no_mask_is_none():
    inputs = cases.build(cases.BY_NAME["capped"], "float32")
    assert mask.keep_tile(spec_of(37, 53), operands_of(inputs), 0, 37, 0, 53) is None


def test_docstring_pictures():
    """The matrices drawn in the module's docstring are what the code keeps."""
    segments = jnp.array([[0, 0, 1, 1, 1]], jnp.int32)
    columns = {
        "causal": ({"is_causal": True}, {}),
        "window (1, 1)": ({"window": (1, 1)}, {}),
        "causal, window (1, 0)": ({"is_causal": True, "window": (1, 0)}, {}),
        "segments 00111": ({}, {"query_segment_ids": segments, "kv_segment_ids": segments}),
        "kv length 3": ({}, {"kv_lengths": jnp.array([3], jnp.int32)}),
    }
    pictures = []
    for title, (band, arrays) in columns.items():
        operands = Operands(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()), **arrays)
        kept = np.broadcast_to(
            mask.keep_tile(spec_of(5, 5, **band), operands, 0, 5, 0, 5), (1, 1, 5, 5)
        )
        rows = ["".join(".#"[int(x)] for x in row) for row in kept[0, 0]]
        pictures.append([title, *rows])
    drawn = [list(cells) for cells in zip(*pictures, strict=True)]
    lines = (mask.__doc__ or "").splitlines()
    documented = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert drawn[0] in documented, drawn
    at = documented.index(drawn[0])
    assert documented[at : at + len(drawn)] == drawn


def test_oracle_masks_against_brute_force():
    """The oracle's own masks, one entry at a time, with everything on."""
    case = cases.BY_NAME["everything"]
    inputs = cases.build(case, "float32")
    a, part = inputs.arrays, inputs.oracle(conformance.dropout_words(inputs)).part
    bias, window = inputs.operands["bias"], as_pair(case.window)
    for b, n, i, j in itertools.product(*(range(0, size, 3) for size in part.shape)):
        expected = (
            may_attend(
                int(a["query_positions"][b, i]),
                int(a["key_value_positions"][b, j]),
                case.is_causal,
                window,
            )
            and i < a["query_seq_lengths"][b]
            and j < a["key_value_seq_lengths"][b]
            and a["query_segment_ids"][b, i] == a["key_value_segment_ids"][b, j]
            and a["mask"][b, 0, 0, j]
            and bias[0, n, i, j] != -np.inf
        )
        assert part[b, n, i, j] == expected
