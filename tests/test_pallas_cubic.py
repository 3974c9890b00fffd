"""The cap as a cubic: its error, and that the row sums prove what they are taken to prove.

The kernel's own functions run on NumPy arrays, a register an array of threads: what stands for MLIR and PTX
below is all that is not theirs.
"""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap.softcap import LARGE_CAP, LOG2E, bounded_shift
from tests.test_pallas_forward import BASE

cubic = pytest.importorskip("jaxcap.pallas.cubic")


class Register(np.ndarray):
    """A value of every thread."""

    type = property(lambda self: self.dtype)


def register(x) -> Register:
    return np.asarray(x).view(Register)


def const(value):
    if isinstance(value, float):
        return np.float32(value)
    return np.uint32(int(value) & 0xFFFFFFFF).view(np.int32)


def fma(a, b, c):
    """The product is exact in float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def rounded(x):
    """To bfloat16, in float32."""
    return register(np.asarray(x).astype(jnp.bfloat16).astype(np.float32))


def asm(_, args, text, *__):
    if text == "mul.ftz.sat.f32 $0, $1, $1;":
        product = np.nan_to_num(args[0] * args[0], nan=0.0, posinf=1.0)
        return np.where(product < np.finfo(np.float32).tiny, np.float32(0), np.minimum(product, 1))
    assert text == "cvt.rn.bf16x2.f32 $0, $1, $2;"
    high, low = (rounded(x).view(np.int32) for x in args)
    return np.bitwise_or(high & -65536, low >> 16 & 65535)


COMPARED = {"OGT": np.greater, "OLT": np.less}  # ordered: false of a NaN
INTEGERS = {"slt": np.less, "sgt": np.greater, "ne": np.not_equal}
LANES = register(np.arange(128, dtype=np.int32))
ARITH = types.SimpleNamespace(
    CmpFPredicate=types.SimpleNamespace(OGT="OGT", OLT="OLT"),
    addi=lambda a, b: a + b,
    subi=lambda a, b: a - b,
    mulf=lambda a, b: a * b,
    shli=lambda a, b: a << b,
    andi=lambda a, b: a & b,
    ori=lambda a, b: a | b,
    xori=lambda a, b: a ^ b,
    maxsi=np.maximum,
    minsi=np.minimum,
    cmpf=lambda op, a, b: COMPARED[op](a, b),
    sitofp=lambda _, n: register(n).astype(np.float32),
    bitcast=lambda kind, x: register(x).view(kind),
    constant=lambda kind, n: np.array(n, kind),
)


@pytest.fixture(autouse=True)
def on_numbers(monkeypatch):
    ins = types.SimpleNamespace(
        f32=lambda: np.float32,
        i32=lambda: np.int32,
        asm=asm,
        scalars=lambda x: list(x.registers),
        fragment=lambda values, *_: types.SimpleNamespace(registers=values, shape=None),
        joined=lambda e, r: (register(e).view(np.int32) << 5) + register(r).view(np.int32),
        first_row_and_column=lambda: (LANES // 32 * 16 + LANES % 32 // 4, LANES % 4 * 2),
        any_of_warpgroup=np.any,
        scalar=lambda x: (types.SimpleNamespace(registers={(): np.int32(x)}), None),
        struct=lambda *_: None,
        inline=lambda body, arguments, *_: body(None, *(x for x, _ in arguments)),
        SPLAT=None,
    )
    sc = types.SimpleNamespace(
        asm=asm,
        fma=fma,
        compare=lambda a, op, b: INTEGERS[op](a, b),
        maximum=np.fmax,
    )
    names = {"ins": ins, "sc": sc, "const": const, "arith": ARITH}
    names["mlir_math"] = types.SimpleNamespace(absf=np.abs)
    for name, value in names.items():
        monkeypatch.setattr(cubic, name, value)
    with np.errstate(all="ignore"):
        yield


def spec_of(cap=50.0, scale=128**-0.5, keys=8192, **changes):
    return BASE.replace(softcap=cap, scale=scale, key_length=keys, is_causal=False, **changes)


def inner_of(spec):
    """tanh's argument over the product of the scaled Q with K."""
    return spec.scale * 2.0 ** cubic.log2_scale(spec) / spec.softcap


def exponents(u, spec, coefficients=None):
    """Of tanh's arguments: float32 as the kernel gives them, the shift not yet taken off."""
    inner = inner_of(spec)
    x = register((np.asarray(u, np.float64) / inner).astype(np.float32))
    coefficients = coefficients or cubic.fitted(spec)[1]
    return cubic.exponents([x], inner, spec.softcap * LOG2E, 0, coefficients)[0]


# ---- the cubic ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("cubic_", "bits"), list(zip(cubic.CUBICS, (12.0, 11.3), strict=True)))
@pytest.mark.parametrize(("cap", "scale"), [(50.0, 128**-0.5), (30.0, -1.0), (97.0, 2.0**-17)])
def test_the_cubic_is_as_near_as_it_says(cubic_, bits, cap, scale):
    limit, coefficients = cubic_
    spec = spec_of(cap, scale)
    x = np.linspace(0, limit / abs(inner_of(spec)), 100_001)[1:].astype(np.float32)
    x = np.concatenate([x, x[:1] * np.float32(2.0) ** -np.arange(90, dtype=np.float32)])
    u = x.astype(np.float64) * inner_of(spec)
    for sign in (1, -1):
        got = exponents(sign * u, spec, coefficients)
        error = np.abs(got / (cap * LOG2E * np.tanh(sign * u)) - 1)
        assert 2.0 ** -(bits + 0.1) < error.max() < 2.0 ** -(bits - 0.02)


def test_the_exponent_rises_everywhere_and_is_odd():
    """Else a logit above the limit could have an exponent below that of the limit."""
    steps = np.arange(0, 2**31, 2**12, dtype=np.int64).astype(np.int32).view(np.float32)
    x = np.sort(steps[(steps <= 1e6) & (steps >= 1e-30)])
    grid = [(c, s) for c in (5.0, 20.0, 30.0, 50.0, 77.0, 100.0) for s in (1.0, -0.088, 3.0, 1e-5)]
    for (cap, scale), (_, coefficients) in ((g, c) for g in grid for c in cubic.CUBICS):
        spec = spec_of(cap, scale)
        inner, outer = inner_of(spec), cap * LOG2E
        assert 0.47 < abs(inner) <= 0.95
        a, b = (np.float32(c * outer * inner ** (2 * i + 1)) for i, c in enumerate(coefficients))
        exact = x * (np.float64(a) + np.float64(b) * np.minimum(x.astype(np.float64) ** 2, 1))
        assert (np.diff(exact * np.sign(scale)) > 0).all()
        got = cubic.exponents([register(x)], inner, outer, 0, coefficients)[0]
        assert (np.abs(got / exact - 1) < 2.0**-22).all()
        assert (cubic.exponents([register(-x)], inner, outer, 0, coefficients)[0] == -got).all()


def test_what_is_no_number_has_an_exponent_that_shows():
    spec = spec_of()
    found = exponents([np.nan, np.inf, -np.inf, 1e30, 0.0], spec)
    assert np.isnan(found[0])
    assert found[1] == np.inf == -found[2]
    assert np.exp2(found[3]) == np.inf
    assert found[4] == 0
    assert disproved(np.full(1, np.nan), spec).all()
    assert disproved(np.full(1, np.inf), spec).all()


# ---- the proof ----------------------------------------------------------------------------------
def disproved(sums, spec, keys=None, first=0):
    """[R] bool of row sums [R], each as if its warpgroup had no other."""
    n = len(sums)
    arrays = [register(np.asarray(sums, np.float32))] * 4
    rows = register(np.zeros(n, np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cubic.ins, "first_row_and_column", lambda: (rows, rows))
        patch.setattr(cubic.ins, "any_of_warpgroup", lambda x: x)
        sums = types.SimpleNamespace(registers=arrays)
        return cubic.disproved(sums, first, keys or spec.key_length, spec, shift_of(spec))


def shift_of(spec):
    shift = bounded_shift(spec, "bfloat16")
    assert shift is not None
    return shift


def rows(spec, count, rng):
    """[count, S] of tanh's arguments: what the proof could stumble over, and at random."""
    limit, n = cubic.fitted(spec)[0], spec.key_length
    middle = np.log2(n) / (spec.softcap * LOG2E)  # how far one key weighs as much as n at nothing
    u = rng.uniform(-1, 1, (count, 1)) * limit + rng.standard_normal((count, n)) * rng.choice(
        [1e-3, 0.02, 0.1, 0.3, 1.0], (count, 1)
    )
    for row in u:
        some = rng.integers(0, n, rng.integers(1, 4))
        kind = rng.integers(8)
        if kind == 0:  # a few beyond the limit, by little or by much
            row[some] = limit * (1 + rng.choice([2.0**-9, 0.01, 0.1, 1.0, 30.0]))
        elif kind == 1:  # almost all below it, where the cubic weighs nothing and tanh a little
            rest = row[some].clip(-limit, limit)
            row[:] = -limit * (1 + rng.choice([2.0**-9, 0.1, 0.5, 1.0, 100.0]))
            row[some] = rest
        elif kind == 2:  # all below
            row[:] = -limit - np.abs(row)
        elif kind == 3:  # all above
            row[:] = limit + np.abs(row) / 8
        elif kind == 4:  # as much below as the least sum that is allowed bears
            row[:] = -limit * 1.01
            row[some[0]] = (
                -limit + middle + rng.uniform(0, 2) * cubic.MARGIN / (spec.softcap * LOG2E)
            )
        elif kind == 5:  # just under the limit
            row[:] = -0.3
            row[some] = limit * (1 - rng.choice([2.0**-9, 0.01, 0.1]))
    return u


def wrong(u, spec, first=64):
    """(proved, how wrong) of rows [R, S], their `first` keys exact: the largest relative error of a weight
    within the limits over what is promised, and the weight beyond them over 2**-MARGIN."""
    limit = cubic.fitted(spec)[0]
    exact = spec.softcap * LOG2E * np.tanh(u)
    near = np.concatenate([exact[:, :first], exponents(u[:, first:], spec)], 1).astype(np.float64)
    p = np.exp2(near - shift_of(spec)).astype(np.float32)
    proved = ~disproved(rounded(p).astype(np.float64).sum(1), spec)
    found, true = (w / w.sum(1, keepdims=True) for w in (p.astype(np.float64), np.exp2(exact)))
    within = np.abs(u) <= limit * (1 + 2.0**-10)
    bits = 12.0 if limit == cubic.CUBICS[0][0] else 11.3
    off = (
        spec.softcap * math.tanh(limit) * 2.0 ** -(bits - 0.05)
    )  # of an exponent, as a natural logarithm
    beyond = 1.02 * 2.0**-cubic.MARGIN
    relative = np.where(within, np.abs(found / true - 1), 0).max(1) / (np.expm1(2 * off) + beyond)
    lost = np.maximum(*(np.where(within, 0, w).sum(1) for w in (found, true))) / beyond
    return proved, np.nan_to_num(np.maximum(relative, lost), nan=np.inf)


@pytest.mark.parametrize(
    ("cap", "keys"), [(50.0, 2048), (30.0, 1024), (30.0, 16384), (20.0, 512), (55.0, 700)]
)
def test_a_row_whose_sum_proves_it_is_right(cap, keys):
    spec = spec_of(cap, keys=keys)
    assert cubic.applies(spec, 64, np.full(10_000, 99), 132)
    rng = np.random.default_rng(int(cap) + keys)
    u = rows(spec, 2**20 // keys, rng)
    proved, error = wrong(u, spec)
    assert 0.1 < proved.mean() < 0.9
    assert (error[proved] <= 1).all()
    # Rows of what attention mostly sees: nothing is done again.
    u = rng.standard_normal((100, keys)) * 0.03
    assert wrong(u, spec)[0].all()


@pytest.mark.parametrize("bound", ["low", "high"])
def test_without_a_bound_a_row_is_found_that_is_wrong(bound, monkeypatch):
    spec = spec_of(50.0, keys=1024)
    u = rows(spec, 1000, np.random.default_rng(3))
    op = {"low": "OGT", "high": "OLT"}[bound]
    monkeypatch.setitem(COMPARED, op, lambda a, b: np.ones_like(a, bool))
    proved, error = wrong(u, spec)
    assert (error[proved] > 1).any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "window": (99, 0)},
        {"window": (30, 40)},
        {"window": (30, None), "query_length": 600},
        {"window": (2**31 - 2, 2**31 - 2)},
        {"window": (2**31 - 2, 9), "causal_alignment": "bottom_right", "query_length": 600},
        {"is_causal": True, "causal_alignment": "bottom_right", "query_length": 600},
        {"query_length": 70},
    ],
    ids=str,
)
def test_the_least_sum_counts_the_keys_of_each_row(changes):
    """A row whose keys are all at zero is proved, one that lacks what few keys could hide is not."""
    spec = spec_of(50.0, keys=512).replace(**({"query_length": 512} | changes))
    low, high = spec.band
    least = 2.0 ** (cubic.MARGIN - cubic.log2_highest(spec) - shift_of(spec))
    for first in (0, 64, 448):
        q = first + np.arange(64)
        k = np.arange(512)[None] - q[:, None] - spec.query_offset
        kept = (k >= (-999 if low is None else low)) & (k <= (999 if high is None else high))
        n = kept.sum(1)
        there = (q < spec.query_length) & (n > 0)

        def found(sums, first=first):
            at = cubic.ins.first_row_and_column()[0]
            halves = [register(np.float32(sums[at + 8 * h])) for h in (0, 0, 1, 1)]
            sums = types.SimpleNamespace(registers=halves)
            return cubic.disproved(sums, first, 512, spec, shift_of(spec))

        good = np.where(there, n * 2.0 ** -shift_of(spec), 0.0)
        assert not found(good)
        for row in (0, 7, 8, 33, 63):
            for factor in (0.99, 1.01):
                sums = good.copy()
                sums[row] = n[row] * least * factor
                assert found(sums) == (there[row] and factor < 1), (first, row, factor)


def test_a_warpgroup_takes_the_exact_form_by_its_first_step_or_since_it_did():
    rng = np.random.default_rng(0)
    s = [register(rng.uniform(-1, 1, 128).astype(np.float32)) for _ in range(32)]
    s[9][77] = -1.5
    arrays = types.SimpleNamespace(registers=s)
    assert not cubic.exact_form(arrays, 0, 1.6)
    assert cubic.exact_form(arrays, 1, 1.6)
    assert cubic.exact_form(arrays, 0, 1.4)


# ---- P in words and in numbers ------------------------------------------------------------------
def test_probabilities_in_words_are_numbers_again():
    rng = np.random.default_rng(1)
    values = np.exp2(rng.uniform(-120, 100, (8, 128))).astype(np.float32)
    values[0, :3] = 0.0, np.inf, np.nan
    p = types.SimpleNamespace(registers=[register(x) for x in values], shape=None)

    def packed(pair):
        return pair % 4 != 3

    words = cubic.to_words(p, packed)
    back = cubic.to_numbers(words, packed)
    for n, (w, x, y) in enumerate(zip(words.registers, back.registers, values, strict=True)):
        kept = not packed(n // 2)
        np.testing.assert_array_equal(x, y if kept else rounded(y))
        assert not kept or (w is p.registers[n])


# ---- where it applies ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cap", "keys", "limit"),
    [
        (50.0, 8192, 0.35),
        (50.0, 2**20, 0.35),
        (30.0, 4096, 0.35),
        (30.0, 32768, 0.40),
        (30.0, 2**17, None),
        (20.0, 400, 0.35),
        (20.0, 512, 0.40),
        (20.0, 1024, None),
        (8.0, 512, None),
        (LARGE_CAP, 8192, 0.35),
        (LARGE_CAP + 1, 8192, None),
        (None, 8192, None),
    ],
)
def test_which_cubic_a_call_takes(cap, keys, limit):
    spec = spec_of(cap, keys=keys)
    steps = np.full(8 * 132, 8)
    assert cubic.applies(spec, 64, steps, 132) == (limit is not None)
    assert limit is None or cubic.fitted(spec)[0] == limit
    assert not cubic.applies(spec, 64, steps[1:], 132)
    assert not cubic.applies(spec, 64, steps - 1, 132)


def test_scales_that_q_does_not_bear_take_the_exact_form():
    steps = np.full(8 * 132, 8)
    for scale, wanted in ((0.0, False), (1e-9, False), (1e9, False), (-1.0, True), (2e-6, True)):
        assert cubic.applies(spec_of(scale=scale), 64, steps, 132) == wanted
