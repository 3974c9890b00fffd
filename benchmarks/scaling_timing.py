"""How a call is timed: alone on its devices, in bursts."""

import contextlib
import fcntl
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

#: A call longer than this is not repeated, nor run once before it counts.
LONG_S = 4.0
ROUNDS = 3


@contextlib.contextmanager
def alone(path: str, devices: Iterable[int]) -> Iterator[None]:
    """While no other worker runs on these; the locks of a worker that is killed are free at once."""
    with contextlib.ExitStack() as held:
        for device in sorted(devices):
            fcntl.flock(held.enter_context(open(f"{path}{device}", "w")), fcntl.LOCK_EX)
        yield


class Timed(NamedTuple):
    seconds: float  # a call: the median of bursts, or the one call that there is time for
    spread: float | None  # between the fastest and the slowest burst, relatively
    results: Any


def timed(call: Callable[[], Any], seconds: float) -> Timed:
    """Of bursts of some `seconds` in all, after a call that warms up."""
    import jax

    def run(count: int) -> tuple[float, Any]:
        begin = time.perf_counter()
        for _ in range(count):
            results = call()
            if virtual:  # few threads stand in for many devices: calls under way would starve
                jax.block_until_ready(results)
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / count, results

    virtual = jax.default_backend() == "cpu"
    first, results = run(1)
    if first > LONG_S:
        return Timed(first, None, results)
    del results
    again, results = run(1)
    if again > seconds:
        return Timed(again, None, results)
    count = max(1, min(100, int(seconds / ROUNDS / max(again, 1e-6))))
    taken = []
    for _ in range(ROUNDS):
        del results
        burst, results = run(count)
        taken.append(burst)
    middle = statistics.median(taken)
    return Timed(middle, (max(taken) - min(taken)) / middle, results)
