"""Tiles against brute force over dense masks: never wrong the unsafe way, exact for bands."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import mask, tile_tables, tiles
from jaxcap.spec import AttentionSpec, Operands
from jaxcap.tile_tables import Interval
from jaxcap.tiles import Grid, Lengths


def dense(grid, band, q_length=None, kv_length=None) -> np.ndarray:
    """[q tiles * tq, kv tiles * tk]: what band and lengths keep, slots past the end masked."""
    q = np.arange(grid.q_tiles * grid.tq)[:, None]
    k = np.arange(grid.kv_tiles * grid.tk)[None]
    ahead = k - (q + grid.offset)
    low, high = band
    kept = (q < grid.query_length) & (k < grid.key_length)
    kept = kept & (True if q_length is None else q < q_length)
    kept = kept & (True if kv_length is None else k < kv_length)
    kept = kept & (True if low is None else ahead >= low)
    return kept & (True if high is None else ahead <= high)


def some_and_all(grid, kept) -> tuple[np.ndarray, np.ndarray]:
    shape = (*kept.shape[:-2], grid.q_tiles, grid.tq, grid.kv_tiles, grid.tk)
    apart = kept.reshape(shape)
    return apart.any(axis=(-3, -1)), apart.all(axis=(-3, -1))


def inside(range_, count) -> tuple[np.ndarray, np.ndarray]:
    j = np.arange(count)
    first, stop, full_first, full_stop = (np.asarray(x)[..., None] for x in range_)
    return (first <= j) & (j < stop), (full_first <= j) & (j < full_stop)


@st.composite
def bands(draw):
    length = st.integers(1, 40)
    bound = st.none() | st.integers(0, 45)
    t, s = draw(length), draw(length)
    left, right = draw(bound), draw(bound)
    low = None if left is None else -left
    offset = draw(st.sampled_from((0, s - t)) | st.integers(-50, 50))
    grid = Grid(t, s, draw(st.integers(1, 17)), draw(st.integers(1, 17)), low, right, offset)
    return grid, (low, right)


@hypothesis.settings(max_examples=400)
@hypothesis.given(bands(), st.data())
def test_ranges_are_exact_both_ways(given, data):
    grid, band = given
    q_length = data.draw(st.none() | st.integers(-1, grid.query_length + 5))
    kv_length = data.draw(st.none() | st.integers(-1, grid.key_length + 5))
    some, every = some_and_all(grid, dense(grid, band, q_length, kv_length))
    lengths = [None if x is None else Lengths(x, x) for x in (q_length, kv_length)]
    for table_some, table_all, of in (
        (some, every, grid.kv_range),
        (some.T, every.T, grid.q_range),
    ):
        for index in range(len(table_some)):
            found = of(index, *lengths)
            assert found.first <= found.full_first <= found.full_stop <= found.stop
            visited, full = inside(found, table_some.shape[1])
            np.testing.assert_array_equal(visited, table_some[index])
            np.testing.assert_array_equal(full, table_all[index])


@hypothesis.settings(max_examples=10)
@hypothesis.given(bands(), st.data())
def test_ints_numpy_and_traced_values_agree(given, data):
    grid, _ = given
    lengths = (
        Lengths(*sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))))
        for size in (grid.query_length, grid.key_length)
    )
    q_lengths, kv_lengths = lengths
    plain = [grid.kv_range(i, q_lengths, kv_lengths) for i in range(grid.q_tiles)]
    assert all(isinstance(x, int) for found in plain for x in found)
    as_numpy = grid.kv_range(np.arange(grid.q_tiles), q_lengths, kv_lengths)

    def traced(i, q_lengths, kv_lengths):
        return grid.kv_range(i, q_lengths, kv_lengths)

    wide = [jax.tree.map(jnp.int32, x) for x in (q_lengths, kv_lengths)]
    index = jnp.arange(grid.q_tiles, dtype=jnp.int32)
    as_jax = jax.vmap(traced, in_axes=(0, None, None))(index, *wide)
    for field in range(4):
        want = [found[field] for found in plain]
        for got in (as_numpy[field], as_jax[field]):
            np.testing.assert_array_equal(np.broadcast_to(got, len(want)), want)


@hypothesis.settings(max_examples=200)
@hypothesis.given(bands(), st.data())
def test_bounds_over_a_batch_cover_every_entry(given, data):
    grid, band = given
    some, every = [], []
    q_length = data.draw(st.lists(st.integers(0, grid.query_length), min_size=1, max_size=3))
    kv_length = [data.draw(st.integers(0, grid.key_length)) for _ in q_length]
    for q, k in zip(q_length, kv_length, strict=True):
        one = some_and_all(grid, dense(grid, band, q, k))
        some.append(one[0])
        every.append(one[1])
    lengths = [Lengths(min(x), max(x)) for x in (q_length, kv_length)]
    for i in range(grid.q_tiles):
        visited, full = inside(grid.kv_range(i, *lengths), grid.kv_tiles)
        assert np.all(visited >= np.any(some, axis=0)[i])
        assert np.all(full <= np.all(every, axis=0)[i])


def test_a_window_without_end_is_no_window():
    spec = _spec(40, 50, is_causal=True, window=(2**31 - 1, None))
    assert Grid.of(spec, 8, 8) == Grid(40, 50, 8, 8, None, 0)
    decode = _spec(1, 50, is_causal=True, causal_alignment="bottom_right")
    assert Grid.of(decode, 8, 8).high is None


def _spec(t, s, **changes) -> AttentionSpec:
    return AttentionSpec(1, t, s, 1, 1, 8, 8, "float32", 1.0, **changes)


def _visits(spec, tile) -> int:
    grid = Grid.of(spec, tile, tile)
    ranges = [grid.kv_range(i) for i in range(grid.q_tiles)]
    return sum(found.stop - found.first for found in ranges)


def test_causality_costs_half_and_a_window_its_width():
    length, tile = 32768, 512
    count = length // tile
    assert _visits(_spec(length, length), tile) == count**2
    assert _visits(_spec(length, length, is_causal=True), tile) == count * (count + 1) // 2
    for window in (1024, 4096):
        spec = _spec(length, length, is_causal=True, window=(window - 1, 0))
        assert _visits(spec, tile) <= count * (window // tile + 1)
    long, short = (
        _visits(_spec(size, size, is_causal=True, window=(4095, 0)), tile)
        for size in (65536, 32768)
    )
    assert long <= 2.1 * short  # linear in the length, not square


@st.composite
def calls(draw):
    """(spec, operands) with random masks of every sort."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.integers(1, 3))
    t, s = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    arrays = {}

    def coin(share=0.5):
        return rng.random() < share

    def row():
        return 1 if coin() else batch

    if coin():
        arrays["query_lengths"] = rng.integers(0, t + 3, batch)
    if coin():
        arrays["kv_lengths"] = rng.integers(0, s + 3, batch)
    if coin():
        for name, size in (("query_segment_ids", t), ("kv_segment_ids", s)):
            ids = rng.integers(-1, 3, (row(), size))
            arrays[name] = np.sort(ids, axis=1) if coin(0.7) else ids
    for name, size in (("query_positions", t), ("kv_positions", s)):
        if coin(0.3):
            arrays[name] = np.arange(size)[None] + rng.integers(-9, 9, (row(), 1))
            if coin():
                arrays[name] = rng.permuted(arrays[name], axis=1)
            if coin(0.1):
                arrays[name][:, rng.integers(size)] = 2**31 - 1
    arrays = {name: x.astype(np.int32) for name, x in arrays.items()}
    shape = [1 if coin(0.3) else size for size in (batch, 2, t, s)]
    if coin(0.3):
        blocks = np.repeat(np.repeat(rng.random((*shape[:2], 6, 6)) < 0.6, 7, 2), 7, 3)
        arrays["mask"] = blocks[:, :, : shape[2], : shape[3]]
    if coin(0.2):
        arrays["bias"] = np.where(rng.random(shape) < 0.7, 0.0, -np.inf).astype(np.float32)
    positions = "query_positions" in arrays or "kv_positions" in arrays
    zeros = np.zeros((batch, max(t, s), 2, 1))
    operands = Operands(zeros[:, :t], zeros[:, :s], zeros[:, :s], **arrays)
    window = tuple(None if coin(0.4) else int(rng.integers(0, 20)) for _ in range(2))
    spec = _spec(
        t,
        s,
        is_causal=coin(),
        window=window if coin() else None,
        causal_alignment="bottom_right" if coin(0.3) and not positions else "top_left",
        query_lengths="query_lengths" in arrays,
        kv_lengths="kv_lengths" in arrays,
        segment_ids="kv_segment_ids" in arrays,
        query_positions="query_positions" in arrays,
        kv_positions="kv_positions" in arrays,
    )
    return spec.with_shapes_of(operands), operands


def _kept(spec, operands, grid) -> np.ndarray:
    """[B, N, q tiles * tq, kv tiles * tk]: everything that masks, slots past the end masked."""
    size = (grid.q_tiles * grid.tq, grid.kv_tiles * grid.tk)

    def along(x, axis, value):  # [B or 1, length] to [B or 1, size], a row or a column
        more = size[axis] - x.shape[1]
        padded = np.pad(x.astype(np.int32), ((0, 0), (0, more)), constant_values=value)
        return np.expand_dims(padded, 2 - axis)

    kept = np.broadcast_to(dense(grid, (None, None)), (spec.batch, *size))
    lengths = (operands.query_lengths, operands.kv_lengths)
    positions = []
    for axis, given in enumerate((operands.query_positions, operands.kv_positions)):
        index = np.arange(size[axis], dtype=np.int32)[None] + (
            spec.query_offset if axis == 0 else 0
        )
        positions.append(along(index if given is None else given, axis, 0))
        if lengths[axis] is not None:
            kept = kept & along(np.arange(size[axis])[None] < lengths[axis][:, None], axis, 0)
    in_band = mask.in_band(spec, *positions)
    kept = kept if in_band is None else kept & in_band
    if operands.query_segment_ids is not None:
        q, k = along(operands.query_segment_ids, 0, 0), along(operands.kv_segment_ids, 1, 0)
        kept = kept & (q == k)
    kept = np.broadcast_to(kept[:, None], (spec.batch, 2, *size)).copy()
    inner = kept[:, :, : spec.query_length, : spec.key_length]
    inner &= True if operands.mask is None else operands.mask
    inner &= True if operands.bias is None else operands.bias != -np.inf
    return kept


@pytest.mark.fuzz
@hypothesis.given(calls(), st.integers(1, 17), st.integers(1, 17))
def test_tables_are_never_wrong_in_the_unsafe_direction(given, tq, tk):
    spec, operands = given
    grid = Grid.of(spec, tq, tk)
    some, every = some_and_all(grid, _kept(spec, operands, grid))
    found_some, found_all = tile_tables.pairs(spec, operands, grid)
    assert np.all(found_some >= some)
    assert np.all(found_all <= every)
    if not tile_tables.needs_pairs(spec):
        np.testing.assert_array_equal(np.broadcast_to(found_some, some.shape), some)
        np.testing.assert_array_equal(np.broadcast_to(found_all, every.shape), every)

    lists = tile_tables.visits(np.any(found_some, (0, 1)), np.all(found_all, (0, 1)))
    for i, (order, partial, stop) in enumerate(zip(*lists, strict=True)):
        assert set(order[:stop]) >= set(np.flatnonzero(some[:, :, i].any((0, 1))))
        assert set(order[partial:stop]) <= set(np.flatnonzero(every[:, :, i].all((0, 1))))
        assert sorted(order) == list(range(grid.kv_tiles))


def test_packed_segments_visit_only_their_own_tiles():
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 16)[None]
    x = jnp.zeros((1, 64, 1, 8))  # of JAX; the other tests go through NumPy
    operands = Operands(x, x, x, query_segment_ids=ids, kv_segment_ids=ids)
    spec = _spec(64, 64, segment_ids=True)
    some, every = tile_tables.pairs(spec, operands, Grid.of(spec, 8, 8))
    want = np.kron(np.eye(4), np.ones((2, 2)))[None, None]
    np.testing.assert_array_equal(some, want)
    np.testing.assert_array_equal(every, want)


def test_positions_that_wrap_around_are_left_to_the_mask():
    def point(x):
        return Interval(jnp.int32(x), jnp.int32(x))

    for q, k in ((-1, 2**31 - 1), (2**31 - 1, -(2**31)), (2**30, 0)):
        some, every = tile_tables.inside_band(None, 0, point(q), point(k))
        assert some
        assert not every
    near = tile_tables.inside_band(None, 0, point(2**29), point(-(2**29)))
    assert all(bool(x) for x in near)


def test_intervals_leave_out_what_is_past_the_length():
    ids = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)
    low, high = tile_tables.intervals(ids, 3, np.array([4]))
    np.testing.assert_array_equal(low[0, :2], [1, 1])
    np.testing.assert_array_equal(high[0, :2], [4, 1])
    assert low[0, 2] > high[0, 2]
    traced = tile_tables.intervals(jnp.asarray(ids), 3)
    np.testing.assert_array_equal(traced.low, [[1, 1, 2]])
    np.testing.assert_array_equal(traced.high, [[4, 9, 2]])


def test_pictures_of_the_docstring():
    def picture(some, every):
        signs = np.where(some, np.where(every, "#", "+"), ".")
        return ["".join(row) for row in signs]

    grid = functools.partial(Grid, 24, 24, 4, 4)
    segment = np.arange(24) >= 10
    kept = (
        dense(grid(), (None, 0)),
        dense(grid(), (-8, 0)),
        dense(grid(), (None, None), kv_length=14),
        segment[:, None] == segment[None],
    )
    columns = [picture(*some_and_all(grid(), x)) for x in kept]
    lines = re.findall(r"^ {4}(\S{6}) +(\S{6}) +(\S{6}) +(\S{6})$", tiles.__doc__ or "", re.M)
    assert [list(column) for column in zip(*lines, strict=True)] == columns
