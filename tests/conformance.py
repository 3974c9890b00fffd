"""How every backend is judged: its error against float64 beside that of plain JAX in the same dtype.

Each result of a case (out, lse, a gradient) may be twice as far from the oracle as the plain
implementation is, and by a floor of a rounding error of the sums behind it, for the plain one is
sometimes exact by luck. A backend with an approximate tanh says so (`tanh_error`), and may be off by
what that error makes of the residual and of the cap's derivative, to first order; so does one whose residual
is that of the probabilities as its product with V takes them, rounded (`sum_error`). Both the norm over
the tensor and the largest error count. The results come from the public function, forced to the
backend, under jit.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcap
from jaxcap import blockwise, selection
from tests import cases, oracle, plain

RATIO = 2.0  # DESIGN.md, style 7
FLOOR = (
    1.0  # steps of the input's dtype on the sum of absolute values: two roundings at their worst
)
FLOOR_OF_SCORES = (
    2.0  # rounding errors of float32 on a score; they are relative errors of exp(score)
)
MUTANT_TOLERANCES = 10.0  # dropping the cap must move the result by more than these

MOST_PROGRAMS = 200  # compiled at a time, see `plain.forget_programs`

Results = dict[str, Any]


class Expected(NamedTuple):
    """What a case must give, and the (norm, maximum) of the error allowed for each of its results."""

    inputs: cases.Inputs
    work: oracle.Attention
    exact: dict[str, np.ndarray]
    tolerances: dict[str, tuple[float, float]]


def dropout_words(inputs: cases.Inputs) -> np.ndarray:
    """The two words that stand for `dropout_rng`."""
    return np.asarray(jax.random.bits(jax.random.key(inputs.dropout_seed), (2,), jnp.uint32))


def exact_results(inputs: cases.Inputs, work: oracle.Attention) -> dict[str, np.ndarray]:
    grads = work.backward(inputs.d_out, inputs.d_lse)._asdict()
    named = {name: x for name, x in grads.items() if x is not None}
    return {"out": work.out, "lse": work.lse, **named}


def error_of(measured: Any, exact: np.ndarray) -> np.ndarray:
    """Float64 difference, 0 where both are the same infinity, NaN where only one is infinite."""
    measured = np.asarray(measured).astype(np.float64)
    same = np.isinf(exact) & (measured == exact)
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, np.where(np.isfinite(exact), measured - exact, np.nan))


def size(error: np.ndarray) -> tuple[float, float]:
    """Norm and largest magnitude."""
    return float(np.linalg.norm(error)), float(np.abs(error).max(initial=0.0))


def floor(name: str, dtype: str, score: float) -> float:
    """By how much a result may be off, in units of the sum of absolute values behind it."""
    accumulator = "float64" if dtype == "float64" else "float32"
    of_scores = FLOOR_OF_SCORES * float(jnp.finfo(accumulator).eps) * score
    # The residual is in the accumulator's dtype, whatever the inputs are.
    return of_scores + FLOOR * float(jnp.finfo(accumulator if name == "lse" else dtype).eps)


def approximation(
    work: oracle.Attention,
    inputs: cases.Inputs,
    tanh_error: float,
    score_error: float = 0.0,
    slope_error: float = 0.0,
) -> dict[str, np.ndarray]:
    """What a tanh of relative error `tanh_error`, and capped scores of absolute error `score_error`, may
    change in a result, to first order.

    lse: the sum of probability times error of the score, the errors of scores independent. Gradients of
    the scores: 1 - tanh**2 is off by 2 tanh**2 times the error, so by at most twice the error of a
    derivative of 1; and by `slope_error`.
    """
    if not (tanh_error or score_error) or not work.softcap:
        return {}
    of_scores = tanh_error * work.softcap * np.abs(work.tanh) + score_error
    lse = np.swapaxes(np.sqrt(np.sum((work.p * of_scores) ** 2, axis=3)), 1, 2)
    uncapped = copy.copy(work)
    uncapped.tanh = np.zeros_like(work.tanh)
    sums = uncapped.magnitudes(inputs.d_out, inputs.d_lse)
    inside = [name for name in ("query", "key", "bias") if name in sums]
    of_slopes = 2 * tanh_error + slope_error
    return {"lse": lse, **{name: of_slopes * sums[name] for name in inside}}


#: How far the largest of thousands of independent errors is from zero, in standard deviations.
LARGEST = 4.0


def allowed(
    wanted: Expected,
    tanh_error: float,
    sum_error: float = 0.0,
    score_error: float = 0.0,
    slope_error: float = 0.0,
) -> Expected:
    """With the tolerances of a backend with those relative errors of tanh, and of probabilities summed, and
    those absolute ones of scores and of 1 - tanh**2."""
    wider = dict(wanted.tolerances)
    if sum_error:
        norm, largest = size(sum_error * np.sqrt(np.sum(wanted.work.p**2, axis=3)))
        wider["lse"] = (wider["lse"][0] + RATIO * norm, wider["lse"][1] + LARGEST * largest)
    found = approximation(wanted.work, wanted.inputs, tanh_error, score_error, slope_error)
    for name, error in found.items():
        wider[name] = tuple(a + b for a, b in zip(wider[name], size(error), strict=True))
    return wanted._replace(tolerances=wider)


def allowed_of(wanted: Expected, backend: str, dtype: str) -> Expected:
    """With the tolerances of the backend of that name."""
    found, cap = selection.backends()[backend], wanted.work.softcap
    tanh_error = getattr(found, "tanh_error", lambda softcap: 0.0)
    sum_error = getattr(found, "sum_error", lambda softcap, dtype: 0.0)
    score_error = getattr(found, "score_error", lambda softcap: 0.0)
    slope_error = getattr(found, "slope_error", lambda softcap, dtype, sizes: 0.0)
    if not cap:
        return allowed(wanted, 0.0)
    operands = wanted.inputs.operands
    sizes = operands["query"].shape[-1], operands["value"].shape[-1]
    slopes = slope_error(cap, dtype, sizes)
    return allowed(wanted, tanh_error(cap), sum_error(cap, dtype), score_error(cap), slopes)


@functools.lru_cache(maxsize=256)
def expected(case: cases.Case, dtype: str, seed: int = 0) -> Expected:
    inputs = cases.build(case, dtype, seed)
    work = inputs.oracle(dropout_words(inputs))
    exact = exact_results(inputs, work)
    magnitudes = work.magnitudes(inputs.d_out, inputs.d_lse)
    score = max(1.0, float(np.abs(work.scores).max(initial=0.0)))
    tolerances = {}
    for name, value in plain.results(inputs, work).items():
        least = floor(name, dtype, score)
        pairs = zip(size(error_of(value, exact[name])), size(magnitudes[name]), strict=True)
        norm, largest = (RATIO * error + least * magnitude for error, magnitude in pairs)
        tolerances[name] = (norm, largest)
    return Expected(inputs, work, exact, tolerances)


def complaints(measured: Results, wanted: Expected, tolerances: float = 1.0) -> list[str]:
    """What is wrong with the results, none of which may be missing unless it is None; [] passes."""
    found = []
    for name, exact in wanted.exact.items():
        if measured[name] is None:
            continue
        value = np.asarray(measured[name])
        if value.shape != exact.shape:
            found.append(f"{name}: shape {value.shape}, expected {exact.shape}")
            continue
        sizes = size(error_of(value, exact))
        for kind, error, allowed in zip(
            ("norm", "largest"), sizes, wanted.tolerances[name], strict=True
        ):
            if not error <= tolerances * allowed:  # also where it is NaN
                found.append(
                    f"{name}: {kind} error {error:.3g}, allowed {tolerances * allowed:.3g}"
                )
    return found


def wrong_dtypes(measured: Results, inputs: cases.Inputs) -> list[str]:
    """Output in the query's dtype, residual in the accumulator's, gradients in their operand's."""
    query = inputs.operands["query"].dtype
    kinds = {name: x.dtype for name, x in inputs.operands.items()}
    kinds |= {"out": query, "lse": np.dtype(query if query == np.float64 else np.float32)}
    return [
        f"{name}: dtype {x.dtype}, expected {kinds[name]}"
        for name, x in measured.items()
        if x is not None and x.dtype != kinds[name]
    ]


def cap_moves_too_little(case: cases.Case, wanted: Expected) -> bool:
    """Whether a backend that dropped the cap could pass: then the case is no test of it."""
    inputs = wanted.inputs
    if not case.softcap or not wanted.work.part.any():
        return False
    moved = inputs.oracle(dropout_words(inputs), softcap=None)
    # Where each query attends one key at most the output is that value, capped or not.
    name = "out" if wanted.work.part.sum(axis=3).max() > 1 else "lse"
    one = {name: getattr(moved, name)}
    rest = {n: None for n in wanted.exact if n != name}
    return not complaints(one | rest, wanted, MUTANT_TOLERANCES)


def arguments(inputs: cases.Inputs) -> dict[str, Any]:
    """Of `dot_product_attention`, without `implementation`."""
    rng = jax.random.key(inputs.dropout_seed) if inputs.static["dropout_rate"] else None
    return inputs.operands | inputs.arrays | inputs.static | {"dropout_rng": rng}


@functools.cache
def _program(backend: Any, names: tuple[str, ...], static: tuple[Any, ...], inference: bool) -> Any:
    """One jitted function for all inputs of the same static arguments; `backend` is its object."""

    def run(dynamic, d_out, d_lse):
        operands = {name: dynamic[name] for name in names}
        arrays = {name: x for name, x in dynamic.items() if name not in names}

        def call(operands):
            result = jaxcap.dot_product_attention(
                **operands, **arrays, **dict(static), implementation=backend.name
            )
            return result if d_lse is not None else (result, None)

        if inference:
            out, lse = call(operands)
            return {"out": out, "lse": lse, **dict.fromkeys(operands)}
        (out, lse), pullback = jax.vjp(call, operands)
        return {"out": out, "lse": lse, **pullback((d_out, d_lse))[0]}

    return plain.quick_jit(run)


def attend(
    inputs: cases.Inputs, backend: str, residual: bool = True, inference: bool = False
) -> Results:
    """Out, lse and gradients of the public function on `backend`; of `inference` only the first two."""
    if _program.cache_info().currsize >= MOST_PROGRAMS:
        _program.cache_clear()
        plain.forget_programs()
    static = inputs.static | {"return_residual": residual}
    dynamic = {k: v for k, v in arguments(inputs).items() if k not in static and v is not None}
    run = _program(
        selection.backends()[backend],
        tuple(inputs.operands),
        tuple(sorted(static.items())),
        inference,
    )
    return run(dynamic, inputs.d_out, inputs.d_lse if residual else None)


def check(
    backend: str,
    case: cases.Case,
    dtype: str,
    seed: int = 0,
    *,
    inference: bool = False,
    must_move: bool = True,
) -> bool:
    """Whether one case ran on one backend, then right in everything; else refused with its reasons."""
    wanted = expected(case, dtype, seed)
    if must_move:
        assert not cap_moves_too_little(case, wanted), "this case would pass without the cap"
    for residual in (True, False):
        plan = jaxcap.explain(
            **arguments(wanted.inputs), return_residual=residual, implementation=backend
        )
        decision = plan.forward if inference else plan.training
        reasons = decision.reasons[backend]
        if not reasons:
            break
        try:
            attend(wanted.inputs, backend, residual, inference)
        except jaxcap.BackendError as error:
            said = plan.forward.reasons[backend] or reasons  # the forward is asked first
            assert str(error).endswith(f": {'; '.join(said)}"), error  # noqa: PT017
        else:
            raise AssertionError(f"{backend} ran what it says it cannot: {'; '.join(reasons)}")
    else:
        return False
    inputs = wanted.inputs
    if not residual:  # nothing to compare, and no cotangent of it
        inputs = inputs._replace(d_lse=np.zeros_like(inputs.d_lse))
        wanted = wanted._replace(exact=exact_results(inputs, wanted.work))
    wanted = allowed_of(wanted, backend, dtype)
    measured = attend(inputs, backend, residual, inference)
    found = wrong_dtypes(measured, inputs) + complaints(measured, wanted)
    assert not found, "\n".join(found)
    return True


#: `blockwise` in tiles so small that small cases have many.
TILED = blockwise.Blockwise("blockwise_tiled", lambda spec: (16, 8))


class Fresh:
    """A backend that equals no other: nothing traced before, for it or its like, is used for it."""

    def __init__(self, backend: Any):
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@contextlib.contextmanager
def registered(*backends: Any) -> Iterator[None]:
    """`backends` instead of those of their names, or beside the others."""
    before = selection.backends()
    for backend in backends:
        selection.register(backend)
    try:
        yield
    finally:
        for backend in backends:
            selection.unregister(backend.name)
            if backend.name in before:
                selection.register(before[backend.name])
        plain.forget_programs()
