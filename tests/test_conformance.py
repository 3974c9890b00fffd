"""Every backend of the registry over one table of cases: forward, residual and every gradient.

On CPU each case runs on `xla` and on `blockwise`, in small tiles where tiles matter, in float32 or
bfloat16 by turns; cases that list float16 run in everything on all (in large tiles in one dtype). A
backend that cannot run a case must refuse it with the reasons that it gives, and a case that would not
notice a dropped cap fails. `pytest -m gpu` runs all cases at the lengths and head sizes of a GPU.
"""

import jax
import numpy as np
import pytest

from jaxcap import selection
from tests import cases, conformance, oracle

BACKENDS = (*selection.backends(), conformance.TILED.name)
CORE = tuple(case for case in cases.CASES if "float16" in case.dtypes)


@pytest.fixture(autouse=True, scope="module")
def tiled_blockwise():
    with conformance.registered(conformance.TILED):
        yield


#: Cases of scores and heads, without masks: one tile says as much as many.
ONE_TILE = {
    "cap_30",
    "cap_small",
    "cap_saturated",
    "scale",
    "layer_scale",
    "layer_scale_uncapped",
    "mha",
    "mqa",
    "head_8",
    "head_40",
    "value_wider",
    "one_key",
    "one_entry",
    "alibi_both_sides",
}


def runs_on_cpu(backend: str, case: cases.Case, dtype: str) -> bool:
    """One dtype a case, and GPU backends refuse the core alone: compiling takes the time."""
    if case in CORE and backend == "blockwise":
        return dtype == case.dtypes[CORE.index(case) % 3]
    if case in CORE or backend not in ("xla", "blockwise", conformance.TILED.name):
        return case in CORE
    if backend != "xla" and (backend == "blockwise") != (case.name in ONE_TILE):
        return False
    return dtype == case.dtypes[cases.CASES.index(case) % 2]


ON_CPU = [
    pytest.param(backend, case, dtype, id=f"{backend}-{case.name}-{dtype}")
    for backend in BACKENDS
    for case in cases.CASES
    for dtype in case.dtypes
    if runs_on_cpu(backend, case, dtype)
]
ON_GPU = [
    pytest.param(backend, case, dtype, id=f"{backend}-{case.name}-{dtype}")
    for backend in selection.backends()
    for case in (case.larger() for case in cases.CASES)
    for dtype in case.dtypes
]


@pytest.mark.parametrize(("backend", "case", "dtype"), ON_CPU)
def test_backend(backend, case, dtype):
    conformance.check(backend, case, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CORE, ids=lambda c: c.name)
def test_inference(backend, case):
    """Without gradients another rule of the custom_vjp runs, and backends may be chosen differently."""
    conformance.check(backend, case, "float32", inference=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "case", "dtype"), ON_GPU)
def test_backend_on_gpu(backend, case, dtype):
    if not conformance.check(backend, case, dtype):  # it may have a forward
        conformance.check(backend, case, dtype, inference=True)


def test_names_are_unique():
    assert len(cases.BY_NAME) == len(cases.CASES)


def test_cases_have_poison():
    """NaN stands in keys, values, queries and cotangents of the cases that leave some out."""
    inputs = cases.build(cases.BY_NAME["both_lengths"], "bfloat16")
    for x in (*(inputs.operands[n] for n in ("query", "key", "value")), inputs.d_out):
        wide = x.astype(np.float32)
        assert np.isnan(wide).any()
        assert np.isinf(wide).any()


ONE = np.ones((1, 1, 1, 1))


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_oracle_philox(key, counter, words):
    """The known answers that Random123 publishes for philox4x32-10."""
    assert " ".join(f"{int(x):08x}" for x in oracle.philox(key, counter)) == words


ORACLE_CASES = ("one_entry", "sinks_empty_rows", "bias_hides_rows", "dropout_sinks", "everything")


@pytest.mark.parametrize("name", ORACLE_CASES)
def test_oracle_backward_against_finite_differences(name):
    """The hand-written gradients are those of the oracle's own forward."""
    case = cases.BY_NAME[name]
    inputs = cases.build(case, "float64", poison=False)
    rng = np.random.default_rng(0)
    words = (3, 4)
    work = inputs.oracle(words)
    lse_weight = np.where(np.isfinite(work.lse), inputs.d_lse, 0)

    def loss(operands):
        result = inputs._replace(operands=operands).oracle(words)
        lse = np.where(np.isfinite(result.lse), result.lse, 0)
        return (result.out * inputs.d_out).sum() + (lse * lse_weight).sum()

    grads = work.backward(inputs.d_out, inputs.d_lse)._asdict()
    for name, x in inputs.operands.items():
        for _ in range(4):
            finite = np.isfinite(x)
            direction = np.where(finite, rng.standard_normal(x.shape), 0)
            step = 1e-5
            up, down = (
                loss(inputs.operands | {name: np.where(finite, x + sign * step * direction, x)})
                for sign in (1, -1)
            )
            expected = (grads[name] * direction).sum()
            np.testing.assert_allclose((up - down) / (2 * step), expected, rtol=1e-5, atol=1e-6)


def test_oracle_by_hand():
    """Two keys, worked out on paper: logits 3 and 0, cap 2, bias 1 on the second key, sink 0.5."""
    work = oracle.Attention(
        3 * ONE,
        np.array([1.0, 0.0]).reshape(1, 2, 1, 1),
        np.array([1.0, 5.0]).reshape(1, 2, 1, 1),
        np.array([0.0, 1.0]).reshape(1, 1, 1, 2),
        softcap=2.0,
        scale=1.0,
        sinks=np.array([0.5]),
    )
    first, second, sink = np.exp(2 * np.tanh(1.5)), np.e, np.exp(0.5)
    total = first + second + sink
    np.testing.assert_allclose(work.lse.ravel(), np.log(total))
    np.testing.assert_allclose(work.out.ravel(), (first + 5 * second) / total)
    grads = work.backward(ONE, 0 * ONE[..., 0])
    p, q, s = first / total, second / total, sink / total
    ds = p * (1 - work.out.item())
    np.testing.assert_allclose(grads.query.item(), ds * (1 - np.tanh(1.5) ** 2))
    np.testing.assert_allclose(grads.key.ravel()[0], 3 * ds * (1 - np.tanh(1.5) ** 2))
    np.testing.assert_allclose(grads.value.ravel(), [p, q])
    np.testing.assert_allclose(grads.bias.ravel(), [ds, q * (5 - work.out.item())])
    np.testing.assert_allclose(grads.sinks, [-s * work.out.item()])


def test_float64_agrees_to_rounding():
    """The plain yardstick and the oracle are the same function: in float64 they meet."""
    with jax.enable_x64(True):
        for name in ("everything", "sinks_empty_rows", "dropout_sinks"):
            wanted = conformance.expected(cases.BY_NAME[name], "float64")
            for norm, _ in wanted.tolerances.values():
                assert norm < 1e-9
