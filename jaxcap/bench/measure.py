"""Timing several implementations of a case by turns, in one process.

A card at its power limit slows down under load, so figures taken one after the other do not compare:
each round times every implementation once, in bursts, and the median over rounds counts. Who follows a
slow one finds a cooler card, so each round has another order, and a burst is preceded by half a burst that
is not timed. The first burst after the pause of compilation, where the clock is higher, is kept too
(`first_ms`).
"""

import contextlib
import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxcap.bench.cases import Case
from jaxcap.bench.implementations import Implementation

PASSES = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Row:
    case: str
    implementation: str
    passes: str  # one of PASSES
    ms: float | None  # median; None where it cannot run
    first_ms: float | None
    tflops: float | None
    error: str | None = None


def _jax_runner(implementation: Implementation, case: Case, with_backward: bool) -> Callable:
    import jax
    import jax.numpy as jnp

    q, d_out, k, v = _jax_inputs(case)
    attend = implementation.make(case, implementation.capped)
    if with_backward:

        def step(q, k, v, d_out):
            out, pullback = jax.vjp(attend, q, k, v)
            return pullback(d_out.astype(out.dtype))

        compiled, arguments = jax.jit(step), (q, k, v, d_out)
    else:
        compiled, arguments = jax.jit(attend), (q, k, v)
    jax.block_until_ready(compiled(*arguments))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(compiled(*arguments)))

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            results = compiled(*arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / count

    return run


_inputs: dict[Case, tuple] = {}


def _jax_inputs(case: Case) -> tuple:
    import jax
    import jax.numpy as jnp

    if case not in _inputs:
        _inputs.clear()
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (case.query_heads,) * 2 + (case.kv_heads,) * 2
        lengths = (case.query_length,) * 2 + (case.key_length,) * 2
        q, *rest = (
            jax.random.normal(key, (case.batch, length, n, case.head_size), case.dtype)
            for key, length, n in zip(keys, lengths, heads, strict=True)
        )
        _inputs[case] = (q * jnp.asarray(case.logits, q.dtype), *rest)
    return _inputs[case]


def _torch_runner(implementation: Implementation, case: Case, with_backward: bool) -> Callable:
    import torch  # pyright: ignore[reportMissingImports]

    q, d_out, k, v = (torch.from_dlpack(x) for x in _jax_inputs(case))
    attend = implementation.make(case, implementation.capped)
    if with_backward:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def once():
        if with_backward:
            return torch.autograd.grad(attend(q, k, v), (q, k, v), d_out)
        with torch.no_grad():
            return (attend(q, k, v),)

    results = once()
    torch.cuda.synchronize()
    assert all(bool(torch.isfinite(x).all()) for x in results)

    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            once()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    return run


@contextlib.contextmanager
def turn(lock: pathlib.Path | None, alone: bool = True) -> Iterator[None]:
    """Alone on the card among the processes that use the same lock file, or not beside one that is.

    So all of them prepare side by side, and nobody times before all have. None: no lock.
    """
    if lock is None:
        yield
        return
    import fcntl  # not on Windows

    with lock.open("a+") as file:
        # Until the file is closed, and not inherited by what a peer may fork.
        fcntl.lockf(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def prepare(
    case: Case, implementations: Sequence[Implementation], passes: str
) -> dict[str, Callable | str]:
    """What runs a number of calls and gives the seconds of one; or why there is none."""
    with_backward = passes == PASSES[1]

    def one(implementation: Implementation) -> Callable | str:
        if with_backward and not implementation.backward:
            return "has no backward"
        make = _jax_runner if implementation.framework == "jax" else _torch_runner
        try:
            return make(implementation, case, with_backward)
        except Exception as error:  # whatever a peer raises is its row's text, not our end
            return _short(error)

    return {implementation.name: one(implementation) for implementation in implementations}


def measure(
    case: Case,
    implementations: Sequence[Implementation],
    passes: Sequence[str],
    *,
    rounds: int = 5,
    burst_s: float = 0.15,
    progress: Callable[[str], None] = lambda text: None,
    lock: pathlib.Path | None = None,
) -> Iterator[Row]:
    """A row for each pass and implementation of one case; what cannot run says why."""
    prepared: dict[str, dict[str, Callable | str]] = {}
    with turn(lock, alone=False):
        for name in passes:
            progress(f"{case.name} {name}: preparing {len(implementations)} implementations")
            prepared[name] = prepare(case, implementations, name)
    for name, found in prepared.items():
        runners = {who: run for who, run in found.items() if not isinstance(run, str)}

        def say(text: str, where: str = f"{case.name} {name}") -> None:
            progress(f"{where}: {text}")

        with turn(lock):
            times = by_turns(runners, rounds, burst_s, say)
        for who, taken in times.items():
            seconds = statistics.median(taken)
            tflops = case.flops(name == PASSES[1]) / seconds / 1e12
            yield Row(case.name, who, name, seconds * 1e3, taken[0] * 1e3, tflops)
        for who, why in found.items():
            if isinstance(why, str):
                yield Row(case.name, who, name, None, None, None, why)


def by_turns(
    runners: dict[str, Callable],
    rounds: int,
    burst_s: float,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """Seconds of a call, a burst a round. `runners` run a number of calls."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    generator = random.Random(0)
    counts = {name: max(3, min(200, int(burst_s / run(1)))) for name, run in runners.items()}
    for number in range(rounds):
        for name in generator.sample(list(runners), len(runners)):
            progress(f"round {number + 1} of {rounds}, {name}")
            if number:
                runners[name](max(1, counts[name] // 2))
            times[name].append(runners[name](counts[name]))
    return times


def _short(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
