"""How a call is timed: alone on its devices, in bursts."""

import contextlib
import fcntl
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

#: A call longer than this is not run once before it counts.
LONG_S = 4.0
#: Bursts; of calls that take longer than all bursts should, the least that tell of a disturbance.
ROUNDS, LEAST = 3, 2


@contextlib.contextmanager
def alone(path: str, devices: Iterable[int]) -> Iterator[None]:
    """While no other worker runs on these; the locks of a worker that is killed are free at once."""
    with contextlib.ExitStack() as held:
        for device in sorted(devices):
            fcntl.flock(held.enter_context(open(f"{path}{device}", "w")), fcntl.LOCK_EX)
        yield


class Timed(NamedTuple):
    seconds: float  # a call: the median of bursts
    spread: float  # between the fastest and the slowest burst, relatively
    results: Any


def timed(call: Callable[[], Any], seconds: float) -> Timed:
    """Of bursts of some `seconds` in all, but at least two, after a call that warms up."""
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
    del results
    again, results = run(1)
    taken = [first] if first > LONG_S else []
    count = max(1, min(100, int(seconds / ROUNDS / max(again, 1e-6))))
    if count == 1:
        taken.append(again)
    while len(taken) < (LEAST if again > seconds else ROUNDS):
        del results
        burst, results = run(count)
        taken.append(burst)
    middle = statistics.median(taken)
    return Timed(middle, (max(taken) - min(taken)) / middle, results)
