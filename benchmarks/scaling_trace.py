"""How much of the communication is hidden, out of profiles of single calls on several GPUs.

    python -m benchmarks.scaling_trace --devices 2 --tokens 131072

Of each device: the time in which kernels compute, in which transfers are under way, in which both are
(hidden transfers), in which only transfers are (exposed) and in which nothing is. A transfer's kernel waits
for the other side: how far devices are apart counts as transfer.
"""

import argparse
import concurrent.futures
import dataclasses
import gzip
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.scaling_cells import LAYOUTS, MASKS, Cell, Wanted
from benchmarks.scaling_model import KINDS, PASSES

Intervals = np.ndarray  # [n, 2] float64: begin, end


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Sorted, and disjoint."""
    found: list[list[float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return np.array(found, np.float64).reshape(-1, 2)


def length(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Milliseconds of one device in one call."""

    whole: float  # from the first kernel to the end of the last
    compute: float
    transfer: float
    exposed: float  # transfers beside which nothing computes
    idle: float

    @property
    def hidden(self) -> float | None:
        """Share of the transfers."""
        return 1.0 - self.exposed / self.transfer if self.transfer else None


def is_transfer(name: str) -> bool:
    return "nccl" in name.lower() or "p2p" in name.lower()


def overlap(events: Iterable[tuple[str, float, float]]) -> Overlap:
    """Of (name, begin, end) in microseconds, of one device."""
    sides: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for name, begin, end in events:
        sides[is_transfer(name)].append((begin, end))
    compute, transfer = union(sides[False]), union(sides[True])
    busy = union([*sides[False], *sides[True]])
    whole = float(busy[-1, 1] - busy[0, 0])
    exposed = length(busy) - length(compute)
    found = (whole, length(compute), length(transfer), exposed, whole - length(busy))
    return Overlap(*(x / 1e3 for x in found))


def kernels(trace: Mapping[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """By device what ran on its streams, of a profile as JSON."""
    names = {"process_name": {}, "thread_name": {}}
    for event in trace["traceEvents"]:
        if event.get("name") in names:
            place = event["pid"], event.get("tid") if event["name"] == "thread_name" else None
            names[event["name"]][place] = event["args"]["name"]
    found: dict[str, list[tuple[str, float, float]]] = {}
    for event in trace["traceEvents"]:
        device = names["process_name"].get((event.get("pid"), None), "")
        stream = names["thread_name"].get((event.get("pid"), event.get("tid")), "Stream")
        if event.get("ph") == "X" and "GPU" in device and stream.startswith("Stream"):
            end = event["ts"] + event["dur"]
            found.setdefault(device, []).append((event["name"], event["ts"], end))
    return found


def profiled(call: Any) -> dict[str, list[tuple[str, float, float]]]:
    """`kernels` of one call."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            return kernels(json.load(file))


def longest(events: Sequence[tuple[str, float, float]], most: int = 7) -> str:
    """The kernels that take most of a device's time."""
    total: dict[str, list[float]] = {}
    for name, begin, end in events:
        total.setdefault(name.split("(")[0][:40], []).append((end - begin) / 1e3)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:most]
    return ", ".join(f"{name} {len(each)} x {sum(each) / len(each):.2f}" for name, each in ranked)


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--devices", type=int, default=2)
    add("--tokens", type=int, default=131072)
    for name, known in (("kinds", KINDS), ("masks", MASKS), ("passes", PASSES)):
        add(f"--{name}", nargs="+", choices=known, default=known)
    add("--json", type=pathlib.Path, metavar="FILE")
    options = made.parse_args(arguments)

    from benchmarks.scaling_worker import attempt, introduce, program

    wanted = Wanted(
        (options.tokens,),
        (options.devices,),
        options.kinds,
        LAYOUTS[:1],
        options.masks,
        options.passes,
        silent=False,
    )
    cells: list[Cell] = list(wanted.cells())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda cell: attempt(lambda: program(cell, 0)), cells))
    rows = []
    print("| kind | mask | passes | GPU | ms | compute | transfers | exposed | idle | hidden |")
    print("|---" * 10 + "|")
    for cell, made_ in zip(cells, programs, strict=True):
        if isinstance(made_, dict):
            print(f"{cell.key}: {made_['error']}")
            continue
        introduce(made_.mesh)
        given = made_.draw()
        for _ in range(2):
            made_.call(*given)
        events = profiled(lambda call=made_.call, given=given: call(*given))
        for device, found in sorted(events.items()):
            row = {"key": cell.key, "device": device, **dataclasses.asdict(overlap(found))}
            rows.append(row | {"longest": longest(found)})
            share = overlap(found).hidden
            numbers = " | ".join(
                f"{row[n]:.2f}" for n in ("whole", "compute", "transfer", "exposed", "idle")
            )
            print(
                f"| {cell.kind} | {cell.mask} | {cell.passes} | {device[-1]} | {numbers} |"
                f" {'–' if share is None else format(share, '.0%')} | {rows[-1]['longest']}",
                flush=True,
            )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
