"""Speed of several works by turns, while a card is kept as busy as it is in training.

A card at its power limit slows down under load, so figures taken one after the other do not compare, and
of one that has just paused they flatter: what counts is a burst after work that has brought the clock
down, nothing between. Of that work the first calls are timed too. Who follows a slow work finds a cooler
card: every round has another order.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

#: Seconds of work that the host launches at once, and the most calls: twice as many are under way, JAX
#: allows 32.
_STEP_S, _STEP_CALLS = 0.004, 15
#: A wait of fewer seconds found its step over: the device may have had nothing to do.
_AT_ONCE_S = 20e-6


@dataclasses.dataclass(frozen=True)
class Work:
    """`launch` starts a call and gives at once what `wait` waits for."""

    launch: Callable[[], Any]
    wait: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Turn:
    seconds: float  # a call of the burst that counts
    first: float  # a call of the first third of what comes before it
    ahead: float  # share of the burst's steps whose end the host had to wait for


def by_turns(
    works: dict[str, Work],
    rounds: int,
    burst_s: float,
    sustain_s: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Turn]]:
    """A turn a round: bursts of `burst_s` seconds, right after `sustain_s` of the same work.

    Where that is 0, half a burst comes before one, but in the first round: after a pause.
    """
    found: dict[str, list[Turn]] = {name: [] for name in works}
    generator = random.Random(0)
    calls = {name: _calls(work) for name, work in works.items()}
    for number in range(rounds):
        before = sustain_s or (burst_s / 2 if number else 0.0)
        for name in generator.sample(list(works), len(works)):
            progress(f"round {number + 1} of {rounds}, {name}")
            found[name].append(_turn(works[name], calls[name], before, burst_s))
    return found


def _calls(work: Work) -> int:
    """Those of a step: of some milliseconds, so that whatever holds up the host for less costs nothing."""

    def seconds() -> float:
        begin = time.perf_counter()
        work.wait(work.launch())
        return time.perf_counter() - begin

    return max(1, min(_STEP_CALLS, int(_STEP_S / min(seconds(), seconds()))))


def _turn(work: Work, calls: int, before_s: float, burst_s: float) -> Turn:
    begin = now = time.perf_counter()
    first = None
    with contextlib.closing(_steps(work, calls)) as steps:
        if before_s:
            first, _, now = _until(steps, calls, begin, before_s / 3)
            if now < begin + before_s:
                _, _, now = _until(steps, calls, now, begin + before_s - now)
        seconds, ahead, _ = _until(steps, calls, now, burst_s, least=3)
    return Turn(seconds, seconds if first is None else first, ahead)


def _until(
    steps: Iterator[tuple[float, bool]], calls: int, begin: float, seconds: float, least: int = 1
) -> tuple[float, float, float]:
    """(seconds a call, share of steps that were waited for, end) up to `seconds` after `begin`."""
    number = waits = 0
    while True:
        end, waited = next(steps)
        number += 1
        waits += waited
        if end - begin >= seconds and number * calls >= least:
            return (end - begin) / (number * calls), waits / number, end


def _steps(work: Work, calls: int) -> Generator[tuple[float, bool]]:
    """(when it was over, whether the host had to wait) for each step of a number of calls, for ever.

    A step is launched before the one ahead of it is waited for, so that the device never is without work
    while the host is held up for less than a step takes.
    """

    def launch() -> Any:
        for _ in range(calls - 1):
            work.launch()
        return work.launch()

    running = launch()
    try:
        while True:
            ending, running = running, launch()
            begin = time.perf_counter()
            work.wait(ending)
            end = time.perf_counter()
            yield end, end - begin > _AT_ONCE_S
    finally:
        work.wait(running)
