"""The sm90 backward: its tables against the oracle on CPU, its gradients on the GPU."""

import dataclasses
import heapq
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import attention, blockwise, fragments
from jaxcap.pallas import backward, backward_prepare, backward_tables
from jaxcap.pallas.backend import BACKEND
from jaxcap.pallas.backward_config import CONFIGS, HEAVY_128, LOADER_REGISTERS
from jaxcap.spec import AttentionSpec, Operands, QuerySum
from tests import cases, compile_sm90, conformance
from tests.test_pallas_forward import operand_shapes

CASES = [case for case in cases.CASES if case.name not in ("layer_scale", "layer_scale_uncapped")]
BY_ID = {"ids": lambda case: case.name}


def prepared(case, dtype="bfloat16"):
    """(spec, operands, oracle) of a case, as a backend gets them."""
    inputs = cases.build(case, dtype)
    given = conformance.arguments(inputs)
    given = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in given.items()}
    bound = inspect.signature(attention.dot_product_attention).bind(**given)
    bound.apply_defaults()
    spec, operands, *_ = attention.prepare(dict(bound.arguments))
    return spec, operands, inputs.oracle(conformance.dropout_words(inputs))


# ---- the tables -------------------------------------------------------------------------------------
@pytest.mark.parametrize("blocks", [(8, 16), (32, 24)])
@pytest.mark.parametrize("case", CASES, **BY_ID)
def test_tables_agree_with_the_oracle(case, blocks):
    """No tile that holds an entry is skipped, none that hides one is full, dead keys are exactly those."""
    spec, operands, work = prepared(case)
    block_q, block_kv = blocks
    need, full = backward_tables.needed_tiles(spec, operands, block_q, block_kv)
    table = np.asarray(backward_tables.spans(need, full))
    b, n, t, s = work.part.shape
    tiles = (-(-t // block_q), -(-s // block_kv))
    part = np.zeros((b, n, tiles[0] * block_q, tiles[1] * block_kv), bool)
    part[:, :, :t, :s] = work.part
    by_tile = part.reshape(b, n, tiles[0], block_q, tiles[1], block_kv)
    some, every = by_tile.any((1, 3, 5)), by_tile.all((1, 3, 5))
    table = np.broadcast_to(table, (b, *table.shape[1:]))
    index = np.arange(tiles[0])[None, :, None]
    first, end, full_from, full_to = (table[:, None, :, i] for i in range(4))
    walked = (index >= first) & (index < end)
    unmasked = walked & (index >= full_from) & (index < full_to)
    assert not (some & ~walked).any()
    assert not (unmasked & ~every).any()
    dead = np.broadcast_to(np.asarray(backward_tables.dead_keys(spec, operands)), (b, s))
    np.testing.assert_array_equal(dead, ~work.attended)
    empty = np.asarray(backward_tables.empty_queries(spec, operands))
    np.testing.assert_array_equal(np.broadcast_to(empty, work.row.shape), ~work.row)
    assert backward_tables.may_have_dead_keys(spec) or not dead.any()
    assert backward_tables.may_have_empty_queries(spec) or work.row.all()


@pytest.mark.parametrize("case", CASES, **BY_ID)
def test_every_addition_to_dq_has_its_turn(case):
    """Ranks of the KV tiles that visit a query tile are 0, 1, 2, ... from the last to the first."""
    spec, operands, _ = prepared(case)
    table = backward_tables.spans(*backward_tables.needed_tiles(spec, operands, 8, 8))
    q_tiles = -(-spec.query_length // 8)
    ranks = np.asarray(backward_tables.ranks(table, q_tiles))
    table = np.asarray(table)
    for b, i in np.ndindex(table.shape[0], q_tiles):
        visits = [n for n in range(table.shape[1]) if table[b, n, 0] <= i < table[b, n, 1]]
        assert [ranks[b, n, i] for n in reversed(visits)] == list(range(len(visits)))


def test_deterministic_blocks_wait_for_earlier_ones_only(monkeypatch):
    """Blocks that run one by one, as they start, add in their turns: however few run at once, none hangs."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from jaxcap.pallas import backward_sm90

    plan = backward.make_plan(call(1000, 128, batch=3, query_heads=8, deterministic=True))
    ends = np.random.default_rng(0).integers(0, plan.q_tiles + 1, (3, plan.kv_tiles, 2))
    spans = jnp.asarray(np.sort(np.concatenate([ends, ends], -1))[..., [0, 2, 1, 3]], jnp.int32)
    ranks = np.asarray(jax.jit(backward_tables.ranks, static_argnums=1)(spans, plan.q_tiles))

    def started(place):
        monkeypatch.setattr(backward_sm90.lax, "axis_index", lambda x: place["bhn".index(x)])
        block = backward_sm90.Block(
            plan, {"spans": spans, **dict.fromkeys(("ks", "vs", "qs", "dos"))}
        )
        return jnp.stack([block.b, block.h, block.n, block.walk.first, block.walk.end])

    places = np.stack(list(np.ndindex(plan.batch, plan.kv_heads, plan.kv_tiles)))
    added = np.zeros((plan.batch, plan.query_heads, plan.q_tiles), int)
    for b, h, n, first, end in np.asarray(jax.jit(jax.vmap(started))(jnp.asarray(places))):
        heads = slice(h * plan.group, (h + 1) * plan.group)
        assert (added[b, heads, first:end] == ranks[b, n, first:end]).all()
        added[b, heads, first:end] += 1
    assert added.max() > 1


@pytest.mark.parametrize("length", [(65, 64), (192, 320), (320, 7)])
@pytest.mark.parametrize("window", [None, (0, 0), (70, 0), (None, 5), (130, None), (3, 200)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("causal", [False, True])
def test_walk_by_arithmetic(causal, alignment, window, length):
    """The range that the kernel computes for band masks, against the predicate on every pair."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from jaxcap.pallas.backward_plan import Walk

    t, s = length
    spec = AttentionSpec(
        batch=1,
        query_length=t,
        key_length=s,
        query_heads=2,
        kv_heads=1,
        head_size=64,
        value_size=64,
        dtype="bfloat16",
        scale=1.0,
        is_causal=causal,
        causal_alignment=alignment,
        window=window,
        platform="sm90",
    )
    plan = backward.make_plan(spec)
    assert not plan.table
    ahead = np.arange(s)[None, :] - np.arange(t)[:, None] - spec.query_offset
    low, high = spec.band
    kept = np.ones((t, s), bool)
    if low is not None:
        kept &= ahead >= low
    if high is not None:
        kept &= ahead <= high
    bm, bn = plan.config.block_q, plan.config.block_kv
    for n in range(plan.kv_tiles):
        walk = Walk(plan, {}, jnp.int32(0), jnp.int32(n))
        first, end = int(walk.first), int(walk.end)
        for i in range(plan.q_tiles):
            tile = kept[i * bm : (i + 1) * bm, n * bn : (n + 1) * bn]
            assert not tile.any() or first <= i < end
            partial = walk.partial(jnp.int32(i), 0, bn)
            if partial is None or not partial:
                assert tile.all() and tile.shape[1] == bn
        assert int(walk.total) == 2 * max(end - first, 0)
        at = walk.start
        for step in itertools.product(range(2), range(first, end)):
            assert tuple(int(x) for x in at) == step
            at = walk.after(at)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "length", "excess"),
    [(2, 16, 8192, 0.01), (16, 16, 1024, 0.03), (1, 8, 4096, 0.03), (3, 5, 2000, 0.05)],
)
def test_a_causal_grid_ends_evenly(batch, kv_heads, length, excess):
    """Every block starts once, and the last multiprocessor is done soon after the average one."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    lengths = {"query_length": length, "key_length": length}
    heads = {"batch": batch, "query_heads": kv_heads, "kv_heads": kv_heads}
    spec = call(length, 128, is_causal=True).replace(**lengths, **heads)
    plan = backward.make_plan(spec)
    blocks = batch * kv_heads * plan.kv_tiles
    started = np.stack(jax.vmap(plan.block_at)(jnp.arange(blocks, dtype=jnp.int32)), -1)
    assert sorted(map(tuple, started)) == list(np.ndindex(batch, kv_heads, plan.kv_tiles))
    busy = [0] * 132
    for _, _, n in started:
        first = n * plan.config.block_kv // plan.config.block_q
        heapq.heapreplace(busy, busy[0] + plan.q_tiles - first + 2)
    assert max(busy) <= (1 + excess) * np.mean(busy)


# ---- the schedule, tile by tile in NumPy -------------------------------------------------------------
def emulated(spec, operands, work, d_out, d_lse, block_q, block_kv):
    """Gradients by the kernel's schedule in float64: masks only where a tile is partial, clean rows."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (*operands[:3], d_out))
    b, t, n, _ = q.shape
    s, heads = k.shape[1:3]
    group = n // heads
    need, full = backward_tables.needed_tiles(spec, operands, block_q, block_kv)
    table = np.asarray(backward_tables.spans(need, full))
    table = np.broadcast_to(table, (b, *table.shape[1:]))
    dead = np.broadcast_to(np.asarray(backward_tables.dead_keys(spec, operands)), (b, s))
    lse = np.swapaxes(work.lse, 1, 2)
    sums = np.einsum("btnv,btnv->bnt", work.out, d_out)
    vectors = backward_prepare.row_vectors(
        spec,
        operands,
        jnp.asarray(lse, jnp.float32),
        jnp.asarray(-sums, jnp.float32),
        jnp.asarray(np.swapaxes(d_lse, 1, 2), jnp.float32),
        0,
        0,
    )
    nlse, ndelta = (np.asarray(x, np.float64) for x in vectors[:2])
    ln2 = np.log(2.0)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    cap = spec.softcap
    part = np.broadcast_to(work.part, (b, n, t, s))
    extra = np.where(part, work.scores, 0.0) - (
        cap * work.tanh if cap else np.where(part, work.scores, 0)
    )
    for at_b, head, tile in np.ndindex(b, n, table.shape[1]):
        keys = slice(tile * block_kv, min((tile + 1) * block_kv, s))
        kv = head // group
        gone = dead[at_b, keys][:, None]
        kt = np.where(gone, 0.0, k[at_b, keys, kv])
        vt = np.where(gone, 0.0, v[at_b, keys, kv])
        first, end, full_from, full_to = table[at_b, tile]
        for i in range(first, end):
            rows = slice(i * block_q, min((i + 1) * block_q, t))
            empty = np.isneginf(nlse[at_b, head, rows])[:, None]
            partial = not full_from <= i < full_to
            qt, dt = q[at_b, rows, head], d_out[at_b, rows, head]
            if partial:
                qt, dt = np.where(empty, 0.0, qt), np.where(empty, 0.0, dt)
            x = spec.scale * qt @ kt.T
            tanh = np.tanh(x / cap) if cap else 0.0 * x
            exponent = cap * tanh + extra[at_b, head, rows, keys] if cap else x
            exponent = exponent + nlse[at_b, head, rows][:, None] * ln2
            if partial:
                exponent = np.where(part[at_b, head, rows, keys], exponent, -np.inf)
            p = np.exp(exponent)
            ds = p * (1 - tanh**2) * (dt @ vt.T + ndelta[at_b, head, rows][:, None])
            dv[at_b, keys, kv] += p.T @ dt
            dk[at_b, keys, kv] += spec.scale * ds.T @ qt
            dq[at_b, rows, head] += spec.scale * ds @ kt
    return {"query": dq, "key": dk, "value": dv}


PLAIN = [c for c in CASES if not c.dropout_rate and (c.softcap or not (c.bias or c.alibi))]


@pytest.mark.parametrize("case", PLAIN, **BY_ID)
def test_schedule_equals_the_oracle(case):
    spec, operands, work = prepared(dataclasses.replace(case, layer_scale=1.0), "float32")
    inputs = cases.build(dataclasses.replace(case, layer_scale=1.0), "float32")
    with np.errstate(invalid="ignore"):
        found = emulated(spec, operands, work, inputs.d_out, inputs.d_lse, 16, 24)
    wanted = work.backward(inputs.d_out, inputs.d_lse)._asdict()
    for name, x in found.items():
        scale = max(1e-6, float(np.abs(wanted[name]).max()))
        # lse is rounded to float32
        atol = 3e-5 * max(1.0, (case.softcap or 0.0) / 100)
        np.testing.assert_allclose(x / scale, wanted[name] / scale, atol=atol, err_msg=name)


def test_reasons():
    spec, _, _ = prepared(cases.BY_NAME["bias"])
    spec = spec.replace(platform="sm90", gradients=("query", "bias"))
    assert backward.reasons(spec) == []
    assert "deterministic" in backward.reasons(spec.replace(deterministic=True))[0]
    assert "sm80" in backward.reasons(spec.replace(platform="sm80"))[0]
    assert "float32" in backward.reasons(spec.replace(dtype="float32"))[0]
    assert "head size 36" in backward.reasons(spec.replace(head_size=36))[0]
    assert "value size 264" in backward.reasons(spec.replace(value_size=264))[0]


# ---- compiled for sm_90a ------------------------------------------------------------------------------
def call(length, head_size, **changes):
    spec = AttentionSpec(
        batch=2,
        query_length=length,
        key_length=length,
        query_heads=4,
        kv_heads=2,
        head_size=head_size,
        value_size=head_size,
        dtype="bfloat16",
        scale=0.1,
        softcap=50.0,
        platform="sm90",
        gradients=("query", "key", "value"),
    )
    return spec.replace(**changes)


#: A part whose dQ is added to a sum over 1024 queries.
SUM = {"partial": True, "query_sum": QuerySum(256, 0.1)}

#: Bytes that ptxas may spill; the tuned configurations were measured with these spills (JAX 0.11.2;
#: 0.12.0.1 has fewer, but for d256_causal, which has none with 0.11.2).
COMPILED = {
    "d64_causal": (call(576, 64, is_causal=True), 0),
    "d64_full": (call(576, 64, partial=True), 16),
    "d128_causal": (call(512, 128, is_causal=True), 24),
    "d128_full": (call(512, 128), 16),
    "d128_float16": (call(512, 128, is_causal=True, dtype="float16"), 24),
    "d128_window": (call(512, 128, is_causal=True, window=(100, 0), **SUM), 40),
    "d128_ragged": (call(509, 128, is_causal=True, partial=True), 28),
    "d192": (call(512, 192, is_causal=True), 0),
    "d256_causal": (call(512, 256, is_causal=True), 12),
    "d256_full": (call(512, 256, **SUM), 12),
    "d128_deterministic": (call(512, 128, is_causal=True, deterministic=True), 52),
    "d128_segments": (call(512, 128, segment_ids=True, is_causal=True), 92),
    "d128_dropout": (call(512, 128, dropout_rate=0.1), 124),
    "d128_bias": (
        call(
            512,
            128,
            bias_shape=(1, 4, 512, 512),
            bias_dtype="float32",
            gradients=("query", "key", "value", "bias"),
        ),
        500,
    ),
}


def compiled(name: str):
    """For `compile_sm90`."""
    spec, _ = COMPILED[name]
    operands = operand_shapes(spec)
    lse = jax.ShapeDtypeStruct((spec.batch, spec.query_heads, spec.query_length), jnp.float32)

    def run(operands, out, lse, d_out, *query_sum):
        return BACKEND.backward(spec, operands, out, lse, d_out, None, *query_sum)

    arrays = operands, operands.query, lse, operands.query
    if spec.query_sum is None:
        return run, arrays
    total = fragments.sum_shape(spec.replace(query_length=1024))
    return run, (*arrays, jax.ShapeDtypeStruct(total, jnp.float32))


@pytest.mark.parametrize("config", [*CONFIGS.values(), HEAVY_128])
def test_the_warpgroups_wait_for_no_more_registers_than_a_block_has(config):
    """A block is started with 65536 registers at most, alike and in eights; more than that it never gets."""
    high, low = config.registers
    started = 65536 // config.threads // 8 * 8 * config.warpgroups
    assert config.compute * high + low + config.loader * LOADER_REGISTERS <= started


@pytest.mark.slow
@pytest.mark.parametrize("group", [list(COMPILED)[i::4] for i in range(4)])
def test_compiles_without_spills(group):
    compile_sm90.required()
    for name, report in compile_sm90.reports("tests.test_pallas_backward", group):
        allowed = COMPILED[name][1]
        whole = not COMPILED[name][0].partial  # parts are not prepared for, and stay in float32
        assert report.calls == (3 if whole else 1), name
        # Since JAX 0.12 a kernel that an earlier program has too is not compiled again.
        assert 1 <= report.kernels <= report.calls, name
        assert report.spill_stores <= allowed, (name, report)
        assert not report.serialised, (name, report)
        plan = backward.make_plan(COMPILED[name][0])
        assert report.registers == 65536 // plan.config.threads // 8 * 8, (name, report)
        if not plan.table:  # beyond inputs, outputs and lse: float32 dQ and one row vector
            row = plan.batch * plan.query_heads * plan.padded_queries
            assert report.temporary <= 4 * (math.prod(plan.dq_shape) + row) + 4096, (name, report)


# ---- on the GPU ---------------------------------------------------------------------------------------
class Backward:
    """The forward of `blockwise` with the gradients of the kernel."""

    name = "pallas_backward"

    def __init__(self, config=None):
        self.config = config

    def reasons(self, spec):
        return backward.reasons(spec) if spec.gradients else blockwise.BACKEND.reasons(spec)

    def forward(self, spec, operands):
        return blockwise.BACKEND.forward(spec, operands)

    def backward(self, spec, *arrays):
        return backward.backward(spec, *arrays, self.config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.CASES, **BY_ID)
def test_gradients_on_the_gpu(case, dtype):
    with conformance.registered(Backward()):
        conformance.check(Backward.name, case.larger(), dtype)


def gradients(case, deterministic, times):
    """Gradients of the same call several times, each after memory was filled with NaN."""
    spec, operands, work = prepared(case)
    inputs = cases.build(case, "bfloat16")
    spec = spec.replace(
        platform="sm90", deterministic=deterministic, gradients=("query", "key", "value")
    )
    assert backward.reasons(spec) == []
    run = jax.jit(lambda *arrays: backward.backward(spec, *arrays, None))
    lse = jnp.asarray(np.swapaxes(work.lse, 1, 2), jnp.float32)
    arrays = operands, jnp.asarray(work.out, jnp.bfloat16), lse, jnp.asarray(inputs.d_out)
    for _ in range(times):
        jnp.full((1 << 26,), jnp.nan).block_until_ready()
        yield [np.asarray(x, np.float64) for x in run(*arrays)[:3]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("length", "head_size"), [(1, 8), (77, 40), (128, 64), (509, 72), (200, 128), (190, 256)]
)
def test_conversion_of_dq(length, head_size, dtype):
    """The bits of XLA's transpose and rounding, overflow too."""
    from jaxcap.pallas import backward_convert

    plan = backward.make_plan(call(length, head_size, dtype=dtype))
    dq = jax.random.normal(jax.random.key(0), plan.dq_shape, jnp.float32) * 1e6
    got = jax.jit(lambda x: backward_convert.converted(plan, x, 0.3))(dq)
    total = dq.reshape(*dq.shape[:2], plan.padded_queries, plan.padded_head_size)
    wanted = fragments.rows_of(total, length, head_size) * 0.3
    np.testing.assert_array_equal(*(np.asarray(x.astype(dtype)) for x in (got, wanted)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("length", "size"), [(1, 8), (77, 16), (77, 40), (128, 64), (509, 72), (200, 128), (190, 256)]
)
def test_what_the_backward_starts_from(length, size, dtype):
    """Row sums of whatever lies in memory that is there, zeros past the last row and in all of dQ."""
    spec = call(length, 64, dtype=dtype, value_size=size, batch=3)
    plan = backward.make_plan(spec)
    shape = (3, length, spec.query_heads, size)
    out, d_out = (jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype)) for i in range(2))
    jnp.full((1 << 26,), jnp.nan).block_until_ready()
    ndelta, dq = jax.jit(lambda *x: backward_prepare.prepared(plan, *x))(out, d_out)
    assert dq.shape == plan.dq_shape
    assert not np.asarray(dq).any()
    assert ndelta.shape == (3, spec.query_heads, plan.padded_queries)
    ndelta = np.asarray(ndelta, np.float64)
    assert not ndelta[..., length:].any()
    out, d_out = (np.asarray(x, np.float64) for x in (out, d_out))
    products = np.einsum("btnv,btnv->bntv", out, d_out)
    error = np.abs(ndelta[..., :length] + products.sum(-1))
    assert (error <= 1e-6 * np.abs(products).sum(-1)).all()


@pytest.mark.gpu
def test_memory():
    """Beyond inputs, outputs and lse: one float32 dQ and one float32 row vector."""
    spec, (q, k, v, *_), _ = prepared(
        dataclasses.replace(
            cases.BY_NAME["causal"], query_length=1024, key_length=1024, head_size=128
        )
    )
    spec = spec.replace(platform="sm90", gradients=("query", "key", "value"))
    lse = jnp.zeros((spec.batch, spec.query_heads, spec.query_length), jnp.float32)
    out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)

    def run(q, k, v, out, lse, d_out):
        return backward.backward(spec, Operands(q, k, v), out, lse, d_out, None)[:3]

    memory = jax.jit(run).lower(q, k, v, out, lse, out).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * q.size + 4 * lse.size + 65536


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_parts_are_not_rounded(head_size):
    """Output and gradients of a part of a call are float32, and nearer to the exact ones."""
    case = cases.BY_NAME["causal"].larger()
    case = dataclasses.replace(case, head_size=head_size, value_size=head_size)
    spec, operands, work = prepared(case)
    inputs = cases.build(case, "bfloat16")
    exact = [work.out, *work.backward(inputs.d_out, np.zeros_like(inputs.d_lse))[:3]]
    lse = jnp.asarray(np.swapaxes(work.lse, 1, 2), jnp.float32)
    saved = operands, jnp.asarray(work.out, jnp.bfloat16), lse, jnp.asarray(inputs.d_out)

    def errors(spec):
        out, _ = jax.jit(lambda x: BACKEND.forward(spec, x))(operands)
        gradients = jax.jit(lambda *x: BACKEND.backward(spec, *x, None))(*saved)
        found = [out, *gradients[:3]]
        assert {x.dtype for x in found} == {spec.result_dtype}
        return [
            np.linalg.norm(np.asarray(x, np.float64) - y) for x, y in zip(found, exact, strict=True)
        ]

    spec = spec.replace(platform="sm90", gradients=("query", "key", "value"))
    pairs = zip(errors(spec.replace(partial=True)), errors(spec), strict=True)
    assert all(0 < part < rounded for part, rounded in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "head_size"), [(77, 40), (512, 64), (509, 128), (190, 256)])
def test_parts_are_added_to_a_sum(length, head_size):
    """Of queries in two parts: in the places of each, what the parts are by themselves."""
    spec = call(length, head_size, is_causal=True, partial=True)
    first = fragments.ROWS * (length // 128)
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal((2, length, n, head_size)), jnp.bfloat16)
        for n in (4, 2, 2, 4)
    )
    out, lse = BACKEND.forward(spec, Operands(q, k, v))
    factor = BACKEND.query_factor(spec)
    total = jnp.ones(fragments.sum_shape(spec), jnp.float32)
    parts = []
    for start, stop in ((0, first), (first, length)):
        if start == stop:
            continue
        rows = slice(start, stop)
        part = spec.replace(query_length=stop - start, position_offset=start)
        arrays = Operands(q[:, rows], k, v), out[:, rows], lse[:, :, rows], d_out[:, rows], None
        parts.append(jax.jit(lambda *x, part=part: BACKEND.backward(part, *x))(*arrays).query)
        added = part.replace(query_sum=QuerySum(start, factor))
        run = jax.jit(lambda *x, added=added: BACKEND.backward(added, *x), donate_argnums=5)
        total = run(*arrays, total).query
    found = np.asarray(fragments.rows_of(total, length, head_size) * factor)
    wanted = np.concatenate(parts, 1) + factor
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


REPEATED = ["causal", "gemma_window", "both_lengths", "segments_packed", "mask", "dropout"]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_runs(name, head_size, deterministic):
    """A race would move the error by more than the order of float32 additions does."""
    case = dataclasses.replace(
        cases.BY_NAME[name].larger(20), head_size=head_size, value_size=head_size
    )
    first, *others = gradients(case, deterministic, 10)
    for other in others:
        for a, b in zip(first, other, strict=True):
            if deterministic:
                np.testing.assert_array_equal(a, b)
            assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a)
