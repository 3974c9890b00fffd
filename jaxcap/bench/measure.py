"""Times of several implementations of a case in one process, by turns."""

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxcap.bench.cases import Case
from jaxcap.bench.implementations import Implementation
from jaxcap.bench.turns import Work, by_turns

PASSES = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Row:
    case: str
    implementation: str
    passes: str  # one of PASSES
    ms: float | None  # median of rounds; None where it cannot run
    first_ms: float | None  # of the first calls of the first round, after the pause of compilation
    tflops: float | None
    error: str | None = None
    burst_tflops: float | None = None  # of a turn's first calls, where `tflops` is sustained
    spread: float | None = None  # of rounds: between the slowest and the fastest, of `ms`
    ahead: float | None = None  # on a GPU, `Turn.ahead` of the worst round: 1, or it may have idled


def _jax_runner(implementation: Implementation, case: Case, with_backward: bool) -> Work:
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
    return Work(lambda: compiled(*arguments), jax.block_until_ready)


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


def _torch_runner(implementation: Implementation, case: Case, with_backward: bool) -> Work:
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

    def launch():
        once()
        event = torch.cuda.Event()
        event.record()
        return event

    return Work(launch, lambda event: event.synchronize())


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


def _silent(text: str, often: bool = False) -> None:
    pass


def prepare(
    case: Case,
    implementations: Sequence[Implementation],
    passes: str,
    progress: Callable[[str], None] = _silent,
) -> dict[str, Work | str]:
    """The work of each, or why there is none."""
    with_backward = passes == PASSES[1]

    def one(implementation: Implementation) -> Work | str:
        if with_backward and not implementation.backward:
            return "has no backward"
        make = _jax_runner if implementation.framework == "jax" else _torch_runner
        try:
            return make(implementation, case, with_backward)
        except Exception as error:  # whatever a peer raises is its row's text, not our end
            return _short(error)

    found = {}
    for number, implementation in enumerate(implementations, 1):
        name = implementation.name
        progress(f"{case.name} {passes}: compiling {name}, {number} of {len(implementations)}")
        found[name] = one(implementation)
    return found


def measure(
    case: Case,
    implementations: Sequence[Implementation],
    passes: Sequence[str],
    *,
    rounds: int = 5,
    burst_s: float = 0.15,
    sustain_s: float = 0.0,
    progress: Callable[..., None] = _silent,
    lock: pathlib.Path | None = None,
) -> Iterator[Row]:
    """A row for each pass and implementation of one case; what cannot run says why.

    `progress` is told what comes next, with `often=True` what takes but a moment.
    """
    import jax

    prepared: dict[str, dict[str, Work | str]] = {}
    with turn(lock, alone=False):
        for name in passes:
            prepared[name] = prepare(case, implementations, name, progress)
    for name, found in prepared.items():
        works = {who: work for who, work in found.items() if isinstance(work, Work)}

        def say(text: str, where: str = f"{case.name} {name}") -> None:
            progress(f"{where}: {text}", often=True)

        progress(f"{case.name} {name}: timing {len(works)} implementations, {rounds} rounds")
        with turn(lock):
            turns = by_turns(works, rounds, burst_s, sustain_s, say)
        flops = case.flops(name == PASSES[1])
        for who, taken in turns.items():
            seconds = sorted(x.seconds for x in taken)
            middle = statistics.median(seconds)
            first = statistics.median(x.first for x in taken)
            yield Row(
                case.name,
                who,
                name,
                ms=1e3 * middle,
                first_ms=1e3 * taken[0].first,
                tflops=flops / middle / 1e12,
                burst_tflops=flops / first / 1e12 if sustain_s else None,
                spread=(seconds[-1] - seconds[0]) / middle,
                ahead=min(x.ahead for x in taken) if jax.default_backend() != "cpu" else None,
            )
        for who, why in found.items():
            if isinstance(why, str):
                yield Row(case.name, who, name, None, None, None, why)


def _short(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
