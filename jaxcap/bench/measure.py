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
from collections.abc import Callable, Iterable, Iterator
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

    if case not in _inputs:
        _inputs.clear()
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (case.query_heads,) * 2 + (case.kv_heads,) * 2
        lengths = (case.query_length,) * 2 + (case.key_length,) * 2
        _inputs[case] = tuple(
            jax.random.normal(key, (case.batch, length, n, case.head_size), case.dtype)
            for key, length, n in zip(keys, lengths, heads, strict=True)
        )
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
def turn(lock: pathlib.Path | None) -> Iterator[None]:
    """Alone on the card among the processes that use the same lock file; None: no lock."""
    if lock is None:
        yield
        return
    import fcntl  # not on Windows

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def measure(
    case: Case,
    implementations: Iterable[Implementation],
    passes: str,
    *,
    rounds: int = 5,
    burst_s: float = 0.15,
    progress: Callable[[str], None] = lambda text: None,
    lock: pathlib.Path | None = None,
) -> Iterator[Row]:
    """A row for each implementation of one case and pass; what cannot run says why."""
    with_backward = passes == PASSES[1]
    runners: dict[str, Callable] = {}
    failed: dict[str, str] = {}
    for implementation in implementations:
        progress(f"{case.name} {passes}: preparing {implementation.name}")
        if with_backward and not implementation.backward:
            failed[implementation.name] = "has no backward"
            continue
        make = _jax_runner if implementation.framework == "jax" else _torch_runner
        try:
            runners[implementation.name] = make(implementation, case, with_backward)
        except Exception as error:  # whatever a peer raises is its row's text, not our end
            failed[implementation.name] = _short(error)
    times: dict[str, list[float]] = {name: [] for name in runners}
    generator = random.Random(0)
    with turn(lock):
        counts = {name: max(3, min(200, int(burst_s / run(1)))) for name, run in runners.items()}
        for number in range(rounds):
            for name in generator.sample(list(runners), len(runners)):
                progress(f"{case.name} {passes}: round {number + 1} of {rounds}, {name}")
                if number:
                    runners[name](max(1, counts[name] // 2))
                times[name].append(runners[name](counts[name]))
    for name, taken in times.items():
        seconds = statistics.median(taken)
        tflops = case.flops(with_backward) / seconds / 1e12
        yield Row(case.name, name, passes, seconds * 1e3, taken[0] * 1e3, tflops)
    for name, why in failed.items():
        yield Row(case.name, name, passes, None, None, None, why)


def _short(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
