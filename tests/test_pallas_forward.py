"""The sm90 forward kernel: what compiles, its arithmetic and its schedule on CPU, and itself on a GPU."""

import dataclasses
import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import tiles
from jaxcap.pallas import config, schedule
from jaxcap.pallas.backend import BACKEND
from jaxcap.softcap import LOG2E, TANH_ERROR, bounded_shift
from jaxcap.spec import AttentionSpec, Dropout, Operands
from tests import compile_sm90

BASE = AttentionSpec(
    batch=2,
    query_length=8192,
    key_length=8192,
    query_heads=32,
    kv_heads=16,
    head_size=128,
    value_size=128,
    dtype="bfloat16",
    scale=128**-0.5,
    softcap=50.0,
    is_causal=True,
    platform="sm90",
)


def sized(head: int, value: int | None = None, **changes) -> AttentionSpec:
    return BASE.replace(head_size=head, value_size=value or head, scale=head**-0.5, **changes)


def length(t: int, s: int | None = None) -> dict:
    return {"query_length": t, "key_length": s or t}


FULL = {"is_causal": False}
PLAIN = {"softcap": None}
MASK, BIAS = (2, 32, 8192, 8192), (1, 32, 8192, 8192)

#: name: (spec, bytes of spill stores that are allowed: the more of JAX 0.11.2's and 0.12.0.1's). With 0.11.2
#: a step of a full tile spills one word at most.
PROGRAMS = {
    "d64": (sized(64), 0),
    "d64_full": (sized(64, **FULL, partial=True), 0),
    "d64_few": (sized(64, **length(2048)), 0),
    "d64_plain": (sized(64, **PLAIN), 4),
    "d96": (sized(96), 8),
    "d96_few": (sized(96, **length(2048)), 0),
    "d128": (sized(128), 0),
    "d128_full": (sized(128, **FULL), 0),
    "d128_window": (sized(128, window=(4095, 0)), 0),
    "d128_1k": (sized(128, **length(1024), batch=16), 0),
    "d128_partial": (sized(128, **FULL, partial=True), 0),
    "d128_cap_8": (sized(128, **FULL, softcap=8.0), 0),
    "d128_few": (sized(128, **length(2048), window=(999, 0)), 0),
    "d128_f16": (sized(128, dtype="float16", softcap=8.0), 4),
    "d128_plain": (sized(128, **PLAIN), 0),
    "d128_plain_full": (sized(128, **PLAIN, **FULL), 0),
    "d128_plain_1k": (sized(128, **PLAIN, **length(1024)), 20),
    "d128_plain_window": (sized(128, **PLAIN, window=(4095, 0)), 0),
    "d192": (sized(192), 0),
    "d256": (sized(256), 0),
    "d256_plain": (sized(256, **PLAIN), 0),
    "d256_full": (sized(256, **FULL, partial=True, **length(8128)), 0),  # a warpgroup without rows
    "lengths": (sized(128, query_lengths=True, kv_lengths=True), 28),
    "segments": (sized(128, segment_ids=True), 32),
    "positions": (sized(128, query_positions=True, kv_positions=True, window=(99, 9)), 24),
    "mask": (sized(128, mask_shape=MASK), 0),
    "bias": (sized(128, bias_shape=BIAS, bias_dtype="bfloat16"), 0),
    "alibi": (sized(128, alibi=True), 0),
    "dropout": (sized(128, dropout_rate=0.1), 0),
    "sinks": (sized(128, sinks=True), 0),
    "d256_bias": (sized(256, bias_shape=BIAS, bias_dtype="float32"), 16),
    "d256_dropout": (sized(256, dropout_rate=0.1), 96),  # Philox is what takes the time
    "d64_lengths": (sized(64, kv_lengths=True), 0),
    "d8": (sized(8), 0),
    "d72_40": (sized(72, 40), 0),
    "d40_248": (sized(40, 248, partial=True), 0),
    "d200_16": (sized(200, 16), 0),
    "d256_224": (sized(256, 224), 0),
    "decode": (sized(128, **length(1, 4097), **FULL), 0),
    "beside_transfers": (sized(128, **FULL, beside_transfers=True, partial=True), 0),
    "t100": (sized(128, **length(100, 77)), 0),
    "t1000_bottom_right": (sized(128, **length(1000, 777), causal_alignment="bottom_right"), 0),
}


#: Compiled as the body of a loop.
SCANNED = "d128"

#: Those that may take the cap as a cubic: many tiles a multiprocessor, many steps a tile, no small cap.
CUBIC_128 = ("d128", "d128_full", "d128_window", "d128_1k", "d128_partial", "sinks")
NEAR = {"d64", "d64_full", "d96", "beside_transfers", *CUBIC_128}


def operand_shapes(spec: AttentionSpec) -> Operands:
    def array(shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    b, t, s, n, k = (
        spec.batch,
        spec.query_length,
        spec.key_length,
        spec.query_heads,
        spec.kv_heads,
    )
    dropout = Dropout(array((1, 2), "uint32"), array((b,)), array((n,)), array((2,)), array((2,)))
    return Operands(
        query=array((b, t, n, spec.head_size), spec.dtype),
        key=array((b, s, k, spec.head_size), spec.dtype),
        value=array((b, s, k, spec.value_size), spec.dtype),
        bias=array(spec.bias_shape, spec.bias_dtype) if spec.bias_shape else None,
        mask=array(spec.mask_shape, "bool") if spec.mask_shape else None,
        query_lengths=array((b,)) if spec.query_lengths else None,
        kv_lengths=array((b,)) if spec.kv_lengths else None,
        query_segment_ids=array((b, t)) if spec.segment_ids else None,
        kv_segment_ids=array((b, s)) if spec.segment_ids else None,
        query_positions=array((b, t)) if spec.query_positions else None,
        kv_positions=array((b, s)) if spec.kv_positions else None,
        alibi_slopes=array((1, n), "float32") if spec.alibi else None,
        sinks=array((1, n), "float32") if spec.sinks else None,
        dropout=dropout if spec.dropout_rate else None,
    )


def compiled(name: str):
    """For `compile_sm90`."""
    spec, _ = PROGRAMS[name]
    forward = functools.partial(BACKEND.forward, spec)

    def layers(operands):
        """Results that a loop stacks for its backward, and of which one is the next layer's query."""

        def layer(query, _):
            results = forward(operands._replace(query=query))
            return results[0], results

        return jax.lax.scan(layer, operands.query, length=3)

    return layers if name == SCANNED else forward, (operand_shapes(spec),)


GROUPS = [list(PROGRAMS)[i::6] for i in range(6)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS, ids=[g[0] for g in GROUPS])
def test_compiles_for_sm90_without_spills(group):
    compile_sm90.required()
    found = []
    for name, report in compile_sm90.reports("tests.test_pallas_forward", group):
        spec, allowed = PROGRAMS[name]
        most = 65536 // (128 * (config.forward_config(spec).warpgroups + 1)) // 8 * 8
        fits = 0 < report.registers <= most
        alone = report.kernels == report.calls == 1
        if not alone or report.serialised or report.spill_stores > allowed or not fits:
            found.append(
                f"{name}: {report}, {allowed} bytes of spills and {most} registers allowed"
            )
    assert not found, "\n".join(found)


def test_which_programs_may_take_the_cap_as_a_cubic(monkeypatch):
    cubic = pytest.importorskip("jaxcap.pallas.cubic")
    applies, found = cubic.applies, set()
    for name, (spec, _) in PROGRAMS.items():
        if not config.forward_config(spec).cubic:
            continue

        def noted(*arguments, name=name):
            found.update([name] if applies(*arguments) else [])
            return False  # what it traces then is the shorter

        monkeypatch.setattr(cubic, "applies", noted)
        jax.eval_shape(functools.partial(BACKEND.forward, spec), operand_shapes(spec))
    assert found == NEAR


CONFIGS = {k: c for k, c in vars(config).items() if isinstance(c, config.ForwardConfig)}
#: Head sizes of those that are not for 128.
SIZES = {"SIZE_64": 64, "UNCAPPED_64": 64, "SIZE_96": 96, "SIZE_192": 192}
SIZES |= dict.fromkeys(("WIDE", "CAPPED_256", "WIDE_APART"), 256)


def test_every_configuration_is_compiled_and_every_choice_is_a_named_one():
    picked = {config.forward_config(spec) for spec, _ in PROGRAMS.values()}
    assert set(CONFIGS.values()) == picked


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_fit(name):
    c, size = CONFIGS[name], SIZES.get(name, 128)
    q = c.queries * size * 2 * (2 if c.persistent else 1)
    ones = (32 if size == 96 else 64) if c.ones else 0
    kv = c.keys * 2 * c.stages * (2 * size + ones)
    more = 1024 * (3 if c.cubic else 2)  # notes and tiles to be done again have a kilobyte each
    assert q + kv + more <= 232448
    consumers, producer = c.register_split
    assert 128 * (c.warpgroups * consumers + producer) <= 65536
    assert c.keys % 16 == 0
    forward_sm90 = pytest.importorskip("jaxcap.pallas.forward_sm90")
    assert forward_sm90.FREE + c.stages <= forward_sm90.MEET < 16  # named barriers


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"dtype": "float32"}, "blockwise"),
        ({"platform": "sm80"}, "sm90"),
        ({"head_size": 60}, "multiples of 8"),
        ({"value_size": 264}, "up to 256"),
        ({"bias_dtype": "float64", "bias_shape": (1, 1, 1, 1)}, "bias"),
        ({"key_length": 0}, "length 0"),
        ({"softcap": 5000.0}, "softcap up to 4096, got 5000: scores would be off by 0.001"),
    ],
)
def test_reasons(changes, part):
    assert not BACKEND.reasons(BASE)
    reasons = BACKEND.reasons(BASE.replace(**changes))
    assert len(reasons) == 1
    assert part in reasons[0]


def test_error_of_the_accurate_tanh():
    """1 - 2 / (1 + exp(2 x)) in float32 with roundings: near zero it is absolute, so the cap is bounded."""
    x = np.concatenate([np.linspace(-20, 20, 400_001), np.geomspace(1e-12, 1, 10_000)])
    x = x.astype(np.float32)
    e = np.exp2(x * np.float32(2 * np.log2(np.e)))
    got = np.float32(1) - np.float32(2) * (np.float32(1) / (e + np.float32(1)))
    error = np.abs(got.astype(np.float64) - np.tanh(x.astype(np.float64)))
    assert 2.0**-24 < error.max() <= TANH_ERROR
    assert BACKEND.score_error(500.0) == 500 * TANH_ERROR
    assert BACKEND.score_error(50.0) == 0.0


# ---- arithmetic ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("degree", "bound"), [(3, 7.6e-5), (4, 2.7e-6)])
def test_exp2_on_the_multiply_add_pipe(degree, bound):
    scores = pytest.importorskip("jaxcap.pallas.scores")
    x = np.linspace(-125.9, 125.9, 1_000_003).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(scores.exp2_reference(x, degree) / exact - 1)
    assert error.max() < bound


def packed_exp2(y, kept=(True, True)):
    """float64 [n, 2] of what the kernel makes of exponents [n, 2]; halves that are not kept are masked."""
    scores = pytest.importorskip("jaxcap.pallas.scores")
    chosen = np.uint32(0xFFFF * kept[0] | 0xFFFF0000 * kept[1])
    e, r = (
        word & chosen | np.uint32(zero) & ~chosen
        for word, zero in zip(scores.packed_words(y), scores.PACKED_ZERO, strict=True)
    )
    pair = (e << 5) + r  # modulo 2**32
    halves = np.stack([pair << 16, pair & np.uint32(0xFFFF0000)], -1)
    return halves.view(np.float32).astype(np.float64)


def test_packed_exp2_is_as_good_as_rounding_to_bfloat16():
    y = np.random.default_rng(0).uniform(-126, 112, (500_000, 2)).astype(np.float32)
    error = packed_exp2(y) / np.exp2(y.astype(np.float64)) - 1
    rounded = np.exp2(y).astype(jnp.bfloat16).astype(np.float64) / np.exp2(y.astype(np.float64)) - 1
    assert np.abs(error).max() < 4.25e-3
    assert np.sqrt((error**2).mean()) < 1.02 * np.sqrt((rounded**2).mean())
    assert abs(error.mean()) < 1e-4


def test_exp2_on_the_multiply_add_pipe_shows_nan():
    scores = pytest.importorskip("jaxcap.pallas.scores")
    found = scores.exp2_reference(np.array([np.nan, 1.0]), degree=3)
    assert scores.NAN_SUM < found[0] < np.inf and abs(found[1] - 2) < 1e-3


def test_packed_exp2_masks_and_shows_nan():
    scores = pytest.importorskip("jaxcap.pallas.scores")
    y = np.random.default_rng(1).uniform(-126, 112, (1000, 2)).astype(np.float32)
    y[0, 0], y[1, 1] = np.nan, np.nan
    whole = packed_exp2(y)
    for kept in ((True, False), (False, True), (False, False)):
        assert (packed_exp2(y, kept) == np.where(kept, whole, 0.0)).all()
    assert (whole[[0, 1], [0, 1]] > scores.NAN_SUM).all()


def test_the_residual_of_rounded_probabilities_is_allowed_and_nothing_coarser():
    from tests import cases, conformance

    inputs = cases.build(cases.BY_NAME["cap_30"], "bfloat16", 0)
    work = inputs.oracle(conformance.dropout_words(inputs))
    exact = conformance.Expected(inputs, work, {"lse": work.lse}, {"lse": (0.0, 0.0)})
    wider = conformance.allowed(exact, 0.0, BACKEND.sum_error(30.0, "bfloat16"))

    def complaints(dtype):
        p = work.p * 1.3  # no largest probability is exactly 1
        l = p.astype(dtype).astype(np.float64).sum(3) / p.sum(3)
        return conformance.complaints({"lse": work.lse + np.log(np.swapaxes(l, 1, 2))}, wider)

    assert not complaints(jnp.bfloat16)
    assert len(complaints(jnp.float8_e4m3b11fnuz)) == 2
    assert not BACKEND.sum_error(30.0, "float16") and not BACKEND.sum_error(None, "bfloat16")


def test_the_exponent_stays_where_exp2_on_the_multiply_add_pipe_is_right():
    for cap in (0.5, 1.0, 8.0, 30.0, 43.0, 50.0, 60.0):
        for s in (65, 8192, 2**20):
            for dtype in ("bfloat16", "float16"):
                spec = BASE.replace(softcap=cap, key_length=s, dtype=dtype)
                if (shift := bounded_shift(spec, dtype)) is not None:
                    assert -cap * LOG2E - shift >= -126
                    assert cap * LOG2E - shift + math.log2(s) < 100  # `scores.NAN_SUM`


# ---- schedule -----------------------------------------------------------------------------------
CASES = [
    {
        "query_length": t,
        "key_length": s,
        "is_causal": causal,
        "causal_alignment": alignment,
        "window": window,
    }
    for t, s in ((1000, 777), (300, 1001), (64, 64), (1, 1), (1, 333), (385, 129))
    for causal, alignment in ((True, "top_left"), (True, "bottom_right"), (False, "top_left"))
    for window in (None, (100, 0), (70, 33), (None, 5))
]


@pytest.mark.parametrize("shape", CASES, ids=lambda x: "-".join(map(str, x.values())))
@pytest.mark.parametrize(
    "c", [config.CAPPED_128, config.SIZE_64, config.WIDE], ids=["w3", "w4", "w2"]
)
def test_schedule_visits_what_is_attended_and_masks_what_needs_it(shape, c):
    spec = BASE.replace(**shape)
    grid = tiles.Grid.of(spec, c.queries, c.keys)
    own = tiles.Grid.of(spec, 64, c.keys)
    t, s = spec.query_length, spec.key_length
    low, high = spec.band
    q = np.arange(grid.q_tiles * c.queries)[:, None] + spec.query_offset
    k = np.arange((grid.kv_tiles + 1) * c.keys)[None]
    keep = k < s
    keep = keep & (k - q >= low) if low is not None else keep
    keep = keep & (k - q <= high) if high is not None else keep
    keep = np.broadcast_to(keep, (q.shape[0], k.shape[1]))
    lead_most, trail_most = schedule.masked_at_most(grid, own, t)
    for own_grid in (None, own):
        for i in range(grid.q_tiles):
            for w in range(c.warpgroups):
                steps = schedule.band_steps(grid, own_grid, i, w, t, s)
                assert 0 <= steps.begin < steps.end <= steps.count
                if own_grid is not None:
                    assert steps.lead - steps.begin <= lead_most
                    assert steps.end - steps.full <= trail_most
                rows = slice(i * c.queries + w * 64, i * c.queries + w * 64 + 64)
                there = np.arange(rows.start, rows.stop) < t
                seen = np.zeros(k.shape[1], bool)
                for j in range(steps.begin, steps.end):
                    first = (steps.last - 1 - j) * c.keys
                    assert first >= 0
                    columns = slice(first, first + c.keys)
                    seen[columns] = True
                    if steps.lead <= j < steps.full:
                        assert keep[rows, columns][there].all()
                assert not keep[rows][there][:, ~seen].any()


def old_maximum_does(y, m, dtype):
    """[64]: whether a row's tile of exponents is computed beside the maximum `m` of the tiles before."""
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp2(y - m[:, None])
        threads = p.reshape(64, -1, 4, 2).sum(
            axis=(1, 3)
        )  # a thread has two of every eight columns
        warps = (threads < 2.0 ** config.HEADROOM[dtype]).reshape(4, 16 * 4).all(axis=1)
    return np.repeat(warps, 16)


def emulated(spec: AttentionSpec, q, k, v, c: config.ForwardConfig):
    """The kernel's schedule in float64 NumPy, for one batch entry and head: (out, lse)."""
    t, s = spec.query_length, spec.key_length
    grid, own = tiles.Grid.of(spec, c.queries, c.keys), tiles.Grid.of(spec, 64, c.keys)
    shift = bounded_shift(spec, spec.dtype) if s > c.keys else None
    low, high = spec.band
    out, lse = np.full((t, v.shape[1]), np.nan), np.full(t, np.nan)

    def padded(x, n):  # as TMA fills up
        return np.concatenate([x, np.zeros((n - x.shape[0], x.shape[1]))])

    q = padded(q, grid.q_tiles * c.queries)
    k, v = (padded(x, s + q.shape[0] + 2 * c.keys) for x in (k, v))
    for i in range(grid.q_tiles):
        for w in range(c.warpgroups):
            steps = schedule.band_steps(grid, own, i, w, t, s)
            rows = np.arange(i * c.queries + w * 64, i * c.queries + w * 64 + 64)
            o, l = np.zeros((64, v.shape[1])), np.zeros(64)
            m = np.full(64, -np.inf)
            for j in range(steps.begin, steps.end):
                cols = (steps.last - 1 - j) * c.keys + np.arange(c.keys)
                x = q[rows] @ k[cols].T * spec.scale
                y = LOG2E * (spec.softcap * np.tanh(x / spec.softcap) if spec.softcap else x)
                if not steps.lead <= j < steps.full:
                    d = cols[None] - (rows[:, None] + spec.query_offset)
                    keep = np.broadcast_to(cols[None] < s, d.shape)
                    keep = keep & (d >= low) if low is not None else keep
                    keep = keep & (d <= high) if high is not None else keep
                    y = np.where(keep, y, -np.inf)
                if shift is not None:
                    base, alpha = float(shift), 1.0
                else:
                    new = np.maximum(m, y.max(1))
                    if j > steps.begin and steps.lead <= j < steps.full and spec.softcap is None:
                        new = np.where(old_maximum_does(y, m, spec.dtype), m, new)
                    base = np.where(np.isinf(new), 0.0, new)[:, None]
                    alpha, m = np.exp2(m - base[:, 0]), new
                p = np.exp2(y - base)
                l = l * alpha + p.sum(1)
                o = o * np.reshape(alpha, (-1, 1)) + p @ v[cols]
            there = rows < t
            with np.errstate(divide="ignore", invalid="ignore"):
                base = float(shift) if shift is not None else m
                out[rows[there]] = np.where(l[:, None] > 0, o / l[:, None], 0.0)[there]
                lse[rows[there]] = (np.where(l > 0, np.log2(l) + base, -np.inf) * math.log(2))[
                    there
                ]
    return out, lse


@pytest.mark.parametrize("shape", CASES[::3], ids=lambda x: "-".join(map(str, x.values())))
@pytest.mark.parametrize(("softcap", "size"), [(50.0, 12.5), (None, 1.0), (None, 40.0)])
def test_emulated_schedule_is_the_oracle(shape, softcap, size):
    """Logits of size 40 rise by more than `config.HEADROOM` between tiles."""
    from tests import oracle

    spec = BASE.replace(**shape, softcap=softcap, scale=0.25, batch=1, query_heads=1, kv_heads=1)
    rng = np.random.default_rng(3)
    q = rng.standard_normal((spec.query_length, 16)) * size
    k, v = (rng.standard_normal((spec.key_length, 16)) for _ in range(2))
    wanted = oracle.Attention(
        *(x[None, :, None] for x in (q, k, v)),
        softcap=softcap,
        scale=0.25,
        is_causal=spec.is_causal,
        causal_alignment=spec.causal_alignment,
        local_window_size=spec.window,
    )
    out, lse = emulated(spec, q, k, v, config.CAPPED_128)
    np.testing.assert_allclose(out, wanted.out[0, :, 0], atol=1e-10)
    np.testing.assert_allclose(lse.ravel(), np.ravel(wanted.lse), atol=1e-10)


def test_work_table_gives_every_tile_once_and_evenly():
    rng = np.random.default_rng(0)
    costs = np.sort(rng.integers(1, 20, 1000))[::-1]
    table = schedule.work_table(costs, 132)
    lists = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(lists)) == list(range(1000))
    loads = [costs[x].sum() for x in lists]
    assert max(loads) - min(loads) <= costs.max()


def started(lists, costs, free):
    """When multiprocessors that are free at times `free` have done the lists, each taking the next."""
    free, end = list(free), 0.0
    for mine in lists:
        at = heapq.heappop(free) + costs[mine].sum()
        heapq.heappush(free, at)
        end = max(end, at)
    return end


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles_each", [1.5, 7, 40, 90])
def test_short_lists_end_together_whoever_begins_late(causal, tiles_each):
    workers, tiles = 132, int(132 * tiles_each)
    costs = np.full(tiles, 10.0) if not causal else np.tile(np.arange(tiles // 4, 0, -1.0), 4)
    table = schedule.short_lists(costs, workers)
    lists = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(lists)) == list(range(len(costs)))
    assert [len(x) for x in lists[: schedule.DOORS]] == [1] * schedule.DOORS
    assert min(map(len, lists)) == 1
    if tiles_each >= 40:
        assert len(costs) / len(lists) > 4  # of which a cubic may repeat one
    for late in (0.0, 0.1, 0.5, 0.9):  # 16 multiprocessors, of the time that it takes
        whole = costs.sum() / (workers - 16 * late)
        free = sorted([0.0] * (workers - 16) + [late * whole] * 16)
        assert started(lists, costs, free) <= whole + 1.01 * costs.max()


def test_blocks_beside_transfers():
    """More than multiprocessors: one that waits for one of those would keep its share waiting."""

    def blocks(spec):
        traced = jax.make_jaxpr(lambda x: BACKEND.forward(spec, x))(operand_shapes(spec))
        return next(x.shape[0] for x in traced.consts if x.ndim == 2)

    assert blocks(BASE) == 132
    assert blocks(BASE.replace(beside_transfers=True)) > 4 * 132


def test_coordinates_are_a_permutation():
    index = np.arange(6 * 5)
    for heavy in (False, True):
        where = schedule.coordinates(index, 5, 3, heavy, np.floor_divide, np.remainder)
        assert len(set(zip(*where, strict=True))) == 30


# ---- under JAX's transformations (lowered for CUDA, not run) ---------------------------------------
SMALL = BASE.replace(query_length=1024, key_length=1024, batch=4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{"partial": True}, {"kv_lengths": True, "segment_ids": True}, {"sinks": True}],
    ids=str,
)
def test_lowers_under_shard_map(changes, check_vma):
    spec = SMALL.replace(**changes)
    operands = operand_shapes(spec)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=auto, devices=jax.devices()[:4])
    rows, shared = jax.P("x"), jax.P()
    specs = jax.tree.map(lambda a: rows if a.shape[0] == 4 else shared, operands)

    def shard(operands):
        return BACKEND.forward(spec.with_shapes_of(operands), operands)

    mapped = jax.shard_map(
        shard, mesh=mesh, in_specs=(specs,), out_specs=(rows, rows), check_vma=check_vma
    )
    lowered = jax.jit(mapped).trace(operands).lower(lowering_platforms=("cuda",))
    assert [x.shape for x in lowered.out_info] == [(4, 1024, 32, 128), (4, 32, 1024)]
    assert lowered.out_info[0].dtype == spec.result_dtype


def test_lowers_under_scan_and_remat():
    @jax.checkpoint
    def layer(query, operands):
        return BACKEND.forward(SMALL, operands._replace(query=query))

    def run(operands):
        return jax.lax.scan(lambda q, _: layer(q, operands), operands.query, None, length=3)

    lowered = jax.jit(run).trace(operand_shapes(SMALL)).lower(lowering_platforms=("cuda",))
    assert lowered.out_info[1].shape == (3, 4, 32, 1024)


# ---- on a GPU -----------------------------------------------------------------------------------
GPU_CONFIGS = {
    **CONFIGS,
    "turns_of_three": dataclasses.replace(config.CAPPED_128, turns=True, persistent=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CONFIGS)
@pytest.mark.parametrize(("softcap", "causal"), [(50.0, True), (50.0, False), (None, True)])
def test_configurations_on_the_gpu(name, softcap, causal):
    """Each configuration, also where the selector would pick another; twice the same bits.

    800 queries leave warpgroups of the last tile without rows, be they two, three or four.
    """
    from jaxcap import reference
    from jaxcap.pallas import forward_sm90

    size = {"SIZE_64": 64, "UNCAPPED_64": 64, "SIZE_96": 96}.get(name, 128)
    t = 1000 if causal else 800
    spec = sized(size, softcap=softcap, batch=4, query_heads=16, kv_heads=4, **length(t, 777))
    spec = spec.replace(is_causal=causal)
    rng = np.random.default_rng(1)
    shapes = ((4, t, 16, size), (4, 777, 4, size), (4, 777, 4, size))
    factors = ((softcap or 4.0) / 4, 1.0, 1.0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s) * f, jnp.bfloat16)
        for s, f in zip(shapes, factors, strict=True)
    )
    run = jax.jit(lambda *x: forward_sm90.forward(spec, Operands(*x), GPU_CONFIGS[name]))
    out, lse = run(q, k, v)
    again = run(q, k, v)
    assert (out == again[0]).all()
    assert (lse == again[1]).all()
    exact = Operands(*(x.astype(jnp.float32) for x in (q, k, v)))
    wanted, wanted_lse = reference.BACKEND.forward(spec.replace(dtype="float32"), exact)
    error = jnp.linalg.norm(out.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    # With the sums of rounded probabilities the output's own rounding is most of the error.
    summed = softcap is not None
    assert error < (2e-3 if summed else 4e-3)
    dead = wanted_lse == -jnp.inf
    assert (dead == (lse == -jnp.inf)).all()
    rounding = 4.3e-3 if summed else 0.0
    assert jnp.where(dead, 0, jnp.abs(lse - wanted_lse)).max() < 5e-3 + rounding


@pytest.mark.gpu
@pytest.mark.parametrize("hop", [False, True])
@pytest.mark.parametrize(("size", "causal"), [(64, True), (96, False), (128, True), (128, False)])
def test_cubic_on_the_gpu(size, causal, hop, monkeypatch):
    """Logits for which the cap is a cubic, some that disprove it after the first step, and large ones."""
    from jaxcap import reference
    from jaxcap.pallas import cubic, forward_sm90

    taken, scale = [], cubic.scale
    monkeypatch.setattr(cubic, "scale", lambda *x: taken.append(1) or scale(*x))
    for least in ("LEAST_TILES", "LEAST_BESIDE", "LEAST_STEPS"):
        monkeypatch.setattr(cubic, least, 1)
    spec = sized(size, batch=4, query_heads=16, kv_heads=4, is_causal=causal, **length(1000))
    spec = spec.replace(partial=hop, beside_transfers=hop)
    run = jax.jit(lambda *x: forward_sm90.forward(spec, Operands(*x), config.forward_config(spec)))
    for name in ("small", "some large", "large"):
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal((4, 1000, n, size)) for n in (16, 4, 4))
        k *= 12.0 if name == "large" else 1.0
        if name == "some large":  # near each other, and not the first that a tile comes to
            k[1, 300:304, 2] = 16 * k[1, 300, 2] * np.linspace(1, 1.2, 4)[:, None]
        operands = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
        out, lse = run(*operands)
        again = run(*operands)
        assert (out == again[0]).all()
        assert (lse == again[1]).all()
        exact = Operands(*(x.astype(jnp.float32) for x in operands))
        wanted, wanted_lse = reference.BACKEND.forward(spec.replace(dtype="float32"), exact)
        # Of heads 8 to 11, batch entry 1, tanh's own error shows, 0.003; a cubic's there is 0.06 or more.
        off = np.asarray(out.astype(jnp.float32) - wanted)
        error = np.linalg.norm(off, axis=(1, 3)) / np.linalg.norm(wanted, axis=(1, 3))
        allowed = np.full((4, 16), 2.5e-3)
        if name == "some large":
            allowed[1, 8:12] = 8e-3
        assert (error < allowed).all(), error
        assert jnp.abs(lse - wanted_lse).max() < 0.03
    assert taken


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 64), ("float16", 128), ("bfloat16", 104), ("bfloat16", 256)]
)
def test_nan_keys_without_ones_on_the_gpu(dtype, size):
    """Each of 48 keys in turn, so that every way to compute exp2 meets one; the sums are in registers."""
    from jaxcap.pallas import forward_sm90

    spec = sized(size, **FULL, softcap=10.0, batch=48, query_heads=2, kv_heads=1, dtype=dtype)
    spec = spec.replace(**length(192))
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((48, 192, n, size)) for n in (2, 1, 1))
    k[np.arange(48), np.arange(48)] = np.nan
    run = jax.jit(lambda *x: forward_sm90.forward(spec, Operands(*x), config.forward_config(spec)))
    out, lse = run(*(jnp.asarray(x, dtype) for x in (q, k, v)))
    assert jnp.isnan(out).all() and jnp.isnan(lse).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [True, False])
def test_rising_maximum_on_the_gpu(dtype, causal):
    """Without a cap, logits that rise from tile to tile by less than `config.HEADROOM`, and by more."""
    from jaxcap import reference
    from jaxcap.pallas import forward_sm90

    t = 1024
    spec = sized(64, **PLAIN, batch=1, query_heads=4, kv_heads=2, is_causal=causal, dtype=dtype)
    spec = spec.replace(**length(t))
    rng = np.random.default_rng(5)
    q = np.abs(rng.standard_normal((1, t, 4, 64)))
    rise = np.exp2(np.linspace(5, -5, t))[None, :, None, None]  # the first keys come last
    k = np.abs(rng.standard_normal((1, t, 2, 64))) * rise * np.array([1.0, 8.0])[:, None] / 8
    v = rng.standard_normal((1, t, 2, 64))
    operands = Operands(*(jnp.asarray(x, dtype) for x in (q, k, v)))
    run = jax.jit(lambda x: forward_sm90.forward(spec, x, config.forward_config(spec)))
    out, lse = run(operands)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    wanted, wanted_lse = reference.BACKEND.forward(spec.replace(dtype="float32"), exact)
    error = jnp.linalg.norm(out.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    assert error < (4e-3 if dtype == "bfloat16" else 6e-4)
    assert (jnp.abs(lse - wanted_lse) <= 1e-5 * jnp.maximum(1, jnp.abs(wanted_lse))).all()
