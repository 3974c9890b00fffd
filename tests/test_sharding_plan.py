"""Which pieces are computed: together exactly what the mask keeps, each entry once, on every device."""

import itertools
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from jaxcap import sharding
from jaxcap.sharding import layout, pieces, ring
from jaxcap.sharding.layout import LOAD_BALANCES
from jaxcap.sharding.plan import Plan
from jaxcap.spec import AttentionSpec


def spec(queries, keys, **changes):
    given = AttentionSpec(1, queries, keys, 4, 2, 8, 8, "bfloat16", 1.0, softcap=50.0)
    return given.replace(**changes)


def tokens(runs):
    return np.concatenate([run.start + run.stride * np.arange(run.length) for run in runs])


def wanted(plan, q, k):
    """[T, S] bool on original positions."""
    ahead = k[None] - (q[:, None] + plan.offset)
    low, high = plan.spec.band
    kept = np.ones(ahead.shape, bool)
    if low is not None:
        kept &= ahead >= low
    if high is not None:
        kept &= ahead <= high
    return kept


def computed(plan, hops, rank, source):
    """How often each entry of the shards `rank` and `source` is computed, masked as asked for."""
    queries, keys = plan.query_runs(rank), plan.key_runs(source)
    q, k = tokens(queries), tokens(keys)
    count = np.zeros((len(q), len(k)), int)
    for step in plan.steps(hops):
        piece = step.options[int(step.choose(np.int32(rank), np.int32(source), None))]
        if piece is None:
            continue
        rows, columns = queries[slice(*piece.queries)], keys[slice(*piece.keys)]
        top, left = rows[0].offset, columns[0].offset
        i = np.arange(sum(run.length for run in rows))
        j = np.arange(sum(run.length for run in columns))
        if piece.band is None:
            kept = wanted(plan, q[top : top + len(i)], k[left : left + len(j)])
        else:
            low, high = piece.band
            kept = np.ones((len(i), len(j)), bool)
            kept &= True if low is None else j[None] - i[:, None] >= low
            kept &= True if high is None else j[None] - i[:, None] <= high
        count[top : top + len(i), left : left + len(j)] += kept
    return count, wanted(plan, q, k)


BANDS = (
    {},
    {"is_causal": True},
    {"is_causal": True, "window": (3, 0)},
    {"is_causal": True, "window": (13, 2)},
    {"window": (5, 2)},
    {"window": (None, 4)},
    {"window": (0, 0)},
    {"window": (6, None), "causal_alignment": "bottom_right"},
    {"is_causal": True, "causal_alignment": "bottom_right"},
    {"is_causal": True, "alibi": True},
    {"is_causal": True, "dropout_rate": 0.5},
    {"window": (2, 1), "kv_lengths": True},
)


@pytest.mark.parametrize("load_balance", LOAD_BALANCES)
@pytest.mark.parametrize("gathered", [False, True])
def test_pieces_are_what_the_mask_keeps(load_balance, gathered):
    for size, band, lengths in itertools.product(
        (1, 2, 3, 5), BANDS, ((4, 4), (4, 8), (6, 2), (2, 2))
    ):
        queries, keys = lengths
        whole = keys * size if gathered else keys
        plan = Plan(spec(queries, whole, **band), size, load_balance, gathered)
        for rank in range(size):
            for hop in range(plan.hops):
                source = 0 if gathered else (rank - hop) % size
                members = [hop] if hop in plan.active_hops else None
                if members is None:
                    q, k = tokens(plan.query_runs(rank)), tokens(plan.key_runs(source))
                    assert not wanted(plan, q, k).any()
                    continue
                count, kept = computed(plan, members, rank, source)
                np.testing.assert_array_equal(count, kept)
                if hop and not gathered:  # as in a loop, in which all hops are alike
                    count, kept = computed(plan, range(1, plan.hops), rank, source)
                    np.testing.assert_array_equal(count, kept)


@pytest.mark.parametrize("load_balance", ["zigzag", "striped"])
def test_causal_work_is_even(load_balance):
    """Every device and hop computes about the same; in the contiguous layout the last does most."""

    def work(load_balance):
        plan = Plan(spec(16, 16, is_causal=True), 4, load_balance)
        hops = [[(h, r) for r in range(4)] for h in range(4)]
        return np.array(
            [[computed(plan, [h], r, (r - h) % 4)[0].sum() for h, r in x] for x in hops]
        )

    even = work(load_balance)
    assert even[1:].max() <= 1.2 * even[1:].min()
    assert even.sum(axis=0).max() <= 1.1 * even.sum(axis=0).min()
    assert work("contiguous").sum(axis=0)[3] == work("contiguous").sum(axis=0).max()
    assert work("contiguous").sum(axis=0).max() > 5 * work("contiguous").sum(axis=0).min()


def test_plain_zigzag_has_one_piece_a_hop():
    plan = Plan(spec(16, 16, is_causal=True), 4, "zigzag")
    assert [len(plan.steps([h])) for h in range(4)] == [1, 1, 1, 1]
    (step,) = plan.steps([2])
    assert [(p.queries, p.keys, p.band) for p in step.options if p] == [
        ((1, 2), (0, 2), (None, None)),
        ((0, 2), (0, 1), (None, None)),
    ]


def test_hops_under_a_window():
    def hops(load_balance, **band):
        return Plan(spec(64, 64, **band), 8, load_balance).active_hops

    assert hops("contiguous", is_causal=True, window=(63, 0)) == [0, 1]
    assert hops("contiguous", is_causal=True, window=(65, 0)) == [0, 1, 2]
    assert hops("contiguous", window=(1, 1)) == [0, 1, 7]
    assert hops("contiguous", window=(0, 0)) == [0]
    assert hops("zigzag", is_causal=True, window=(10, 0)) == [0, 1, 7]
    assert hops("zigzag", is_causal=True) == list(range(8))


def test_a_thousand_devices():
    """Plans are made in time that nobody notices."""
    start = time.process_time()
    for load_balance, band in itertools.product(LOAD_BALANCES, ({}, {"window": (4095, 0)})):
        plan = Plan(spec(1024, 1024, is_causal=True, **band), 1024, load_balance)
        assert plan.active_hops[0] == 0
        assert plan.steps(range(1, 1024))
    assert time.process_time() - start < 20


def test_stretches():
    """Long runs of hops are loops; the first hop, which is like no other, is none of them."""
    assert ring.stretches([0]) == [(0, 1)]
    assert ring.stretches([0, 1, 2, 7]) == [(0, 1), (1, 1), (2, 1), (7, 1)]
    many = ring.UNROLLED + 5
    assert ring.stretches(list(range(many))) == [(0, 1), (1, many - 1)]
    assert ring.stretches([0, *range(90, 90 + many)]) == [(0, 1), (90, many)]


# ---- Layouts ----


@pytest.mark.parametrize("load_balance", LOAD_BALANCES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_reordering(load_balance, size):
    x = np.arange(2 * 48 * 3).reshape(2, 48, 3)
    moved = jaxcap.reorder_for_load_balance(x, size, load_balance)
    np.testing.assert_array_equal(jaxcap.restore_order(moved, size, load_balance), x)
    where = sharding.positions(48, size, load_balance)
    np.testing.assert_array_equal(moved, x[:, where])
    shards = [
        tokens(layout.runs(load_balance, 48 // size, size, rank)).tolist() for rank in range(size)
    ]
    assert np.concatenate(shards).tolist() == where.tolist()
    traced = jaxcap.reorder_for_load_balance(jnp.asarray(x), size, load_balance, axis=-2)
    np.testing.assert_array_equal(traced, moved)
    np.testing.assert_array_equal(jaxcap.restore_order(traced, size, load_balance), x)


def test_zigzag_by_hand():
    assert jaxcap.reorder_for_load_balance(np.arange(12), 3, axis=0).tolist() == [
        *(0, 1, 10, 11),
        *(2, 3, 8, 9),
        *(4, 5, 6, 7),
    ]


def test_padding():
    x = np.ones((2, 13, 3), np.int32)
    padded = jaxcap.pad_to_multiple(x, sharding.length_multiple(4), value=7)
    assert padded.shape == (2, 16, 3)
    assert (padded[:, 13:] == 7).all()
    assert jaxcap.pad_to_multiple(jnp.ones(16), 8, axis=0).shape == (16,)
    assert [sharding.length_multiple(4, b) for b in LOAD_BALANCES] == [4, 8, 4]


def test_numpy_integers():
    four = np.int64(4)
    assert jaxcap.pad_to_multiple(np.ones((1, 13)), four).shape == (1, 16)
    assert sharding.length_multiple(four) == 8
    assert list(sharding.positions(np.int32(16), four)) == list(sharding.positions(16, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxcap.pad_to_multiple(np.ones(3), 0, axis=0), "multiple must be a positive int"),
        (lambda: jaxcap.reorder_for_load_balance(np.ones((1, 6)), 4), "axis 1 of x has length 6"),
        (lambda: jaxcap.reorder_for_load_balance(np.ones(8), 2), "axis must be one of an array"),
        (lambda: jaxcap.restore_order(np.ones((1, 8)), 0), "size must be the number of devices"),
        (lambda: jaxcap.restore_order(np.ones((1, 8)), 2, "spiral"), "load_balance must be one of"),
        (lambda: jaxcap.restore_order(np.ones((1, 8)), True), "size must be the number .*got True"),
        (lambda: jaxcap.pad_to_multiple(np.ones(3), 4), r"axis must be one of .*\[3\], got 1"),
        (lambda: jaxcap.pad_to_multiple(np.ones(3), 4, axis="t"), "axis must be one of .*got 't'"),
        (lambda: sharding.length_multiple("4"), "size must be the number of devices, .*got '4'"),
        (lambda: sharding.length_multiple(0), "size must be the number of devices, .*got 0"),
        (lambda: sharding.positions(0, 4), "length must be a positive int, got 0"),
        (lambda: sharding.positions(16.0, 4), "length must be a positive int, got 16.0"),
    ],
)
def test_bad_layouts(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_specs_are_shards():
    """A backend is asked about pieces of the shard, never about the whole."""
    plan = Plan(spec(16, 16, is_causal=True, bias_shape=(1, 4, 16, 64)), 4, "zigzag")
    asked = pieces.specs(plan)
    assert {(s.query_length, s.key_length) for s in asked} == {(16, 16), (16, 8), (8, 16)}
    assert {s.bias_shape for s in asked} == {(1, 4, 16, 16), (1, 4, 16, 8), (1, 4, 8, 16)}
    assert all(s.softcap == 50.0 and s.return_residual and s.partial for s in asked)
