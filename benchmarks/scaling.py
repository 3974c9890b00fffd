"""Context parallelism on 1 to 8 GPUs, measured beside what the model predicts: one command.

    python -m benchmarks.scaling                                # all GPUs of this machine, 9.5 minutes
    python -m benchmarks.scaling --hops                         # one GPU, a minute: calibrates the model
    python -m benchmarks.scaling --platform cpu --tokens 512    # virtual CPU devices: does it work at all

It measures what matters most first and stops when the budget is spent; started again, it goes on from
the JSON. Worker processes compile side by side and run one at a time. A cell that hangs or crashes costs
itself: its worker is ended, and another goes on with the next cell.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks import scaling_rates, scaling_report, scaling_training
from benchmarks.scaling_cells import LAYOUTS, MASKS, Cell, Wanted
from benchmarks.scaling_model import KINDS, PASSES
from benchmarks.scaling_pool import Job, Pool

HOP_JOBS = 2  # processes that share the kernels' table
#: Compiling takes longer than running, on virtual devices.
QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
RESULTS = pathlib.Path(__file__).parent / "results"


def words(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [word for word in chosen if word not in known]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]}, choose from {', '.join(known)}")
    return chosen


def numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"positive numbers with commas, got {text!r}")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--platform", choices=("gpu", "cpu"), default="gpu")
    add(
        "--devices",
        type=numbers,
        help="sub-meshes to measure (default: 1, 2, 4, 8 of what is there)",
    )
    add("--tokens", type=numbers, help="lengths, the most important first")
    for name, known in (("kinds", KINDS), ("layouts", LAYOUTS), ("masks", MASKS)):
        add(f"--{name}", type=lambda text, known=known: words(text, known), default=known)
    add("--passes", type=lambda text: words(text, PASSES), default=PASSES[::-1])
    add("--no-silent", dest="silent", action="store_false", help="leave out runs without transfers")
    add("--no-links", dest="links", action="store_false", help="leave out the collectives alone")
    add("--budget", type=float, default=570.0, metavar="S", help="seconds for everything")
    add(
        "--cell-timeout",
        type=float,
        default=100.0,
        metavar="S",
        help="for compiling or running one",
    )
    add("--seconds", type=float, default=0.25, metavar="S", help="of timing a cell")
    workers = max(2, min(16, (os.cpu_count() or 1) // 3))
    add("--workers", type=int, default=workers, help="processes that compile side by side")
    add("--json", type=pathlib.Path, metavar="FILE", help="default: in benchmarks/results, or runs")
    add("--fresh", action="store_true", help="measure again what the JSON has")
    add("--hops", action="store_true", help="measure the kernels on one GPU, and nothing else")
    add("--no-training", dest="training", action="store_false", help="leave out the example")
    add("--no-hops", dest="kernels", action="store_false", help="leave out the kernels alone")
    return made


def environment(platform: str, devices: int) -> dict[str, str]:
    """Of the workers."""
    changed = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    if platform == "cpu":
        flags = (f"--xla_force_host_platform_device_count={devices}", *QUICK)
        changed |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return {**os.environ, **changed}


def write(path: pathlib.Path, document: dict[str, Any]) -> None:
    """In one go, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def kernels(options: argparse.Namespace) -> int:
    """Kernels alone, on one GPU, in this process."""
    from jaxcap.bench.report import versions

    deadline = time.monotonic() + min(options.budget, 90.0)
    document = scaling_report.hops_document(versions(), "python -m benchmarks.scaling --hops")
    path = options.json or RESULTS / "hops.json"
    chosen = list(scaling_rates.shapes())
    for row in scaling_rates.measure(chosen, scaling_rates.programs(chosen), deadline=deadline):
        document["rows"].append(dataclasses.asdict(row))
        print(scaling_report.hop_line(document["rows"][-1]), flush=True)
        write(path, document)
    return 0


def wanted(options: argparse.Namespace, available: int) -> Wanted:
    """What the flags mean on this machine.

    Raises ValueError for devices that are not there.
    """
    cpu = options.platform == "cpu"
    devices = options.devices or tuple(n for n in (1, 2, 4, 8) if n <= available)
    if max(devices) > available:
        raise ValueError(f"--devices {max(devices)}: there are {available}")
    lengths = (131072, 524288) if max(devices) > 2 else (131072, 65536, 262144)
    chosen = {
        name: getattr(options, name) for name in ("kinds", "layouts", "masks", "passes", "silent")
    }
    small = {"heads": 8, "kv_heads": 4, "head_size": 16, "dtype": "float32", "backend": None}
    tokens = options.tokens or ((512,) if cpu else lengths)
    return Wanted(tokens, devices, **chosen, **(small if cpu else {}))


class Others(NamedTuple):
    """What is measured besides cells: on so many devices collectives and training, and the kernels."""

    links: list[int]
    training: list[int]
    hops: int  # processes that share the kernels' table


def others(options: argparse.Namespace, cells: list[Cell], document: dict[str, Any]) -> Others:
    """What was asked for and not measured before."""
    several = sorted({c.devices for c in cells if c.devices > 1})
    hops = options.kernels and options.platform == "gpu" and not document["hops"]
    return Others(
        several if options.links and not document["links"] else [],
        several if options.training and not document["training"] else [],
        HOP_JOBS if hops else 0,
    )


def jobs(cells: list[Cell], also: Others, available: int, common: dict[str, Any]) -> list[Job]:
    """A job a group of cells; the collectives come first, kernels and training before silent cells.

    Groups of fewer devices than there are take turns in where they begin, to run side by side.
    """
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    turns: dict[int, int] = {}

    def place(devices: int) -> int:
        turn = turns[devices] = turns.get(devices, -1) + 1
        return turn % (available // devices) * devices

    found = [Job({**common, "links": also.links}, [])] if also.links else []
    ordered = sorted(groups, key=lambda group: (group[0], cells.index(groups[group][0])))
    for group in ordered:
        told = {**common, "first": place(groups[group][0].devices)}
        found.append(Job(told, groups[group]))
    between = sum(not (job.cells and job.cells[0].silent) for job in found)
    rest = [
        Job({**common, "hops": [part, also.hops], "first": place(1)}, [])
        for part in range(also.hops)
    ]
    for devices in also.training:
        rest += [Job({**common, "training": x}, []) for x in scaling_training.meshes(devices)]
    return [*found[:between], *rest, *found[between:]]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.hops:
        return kernels(options)
    begin = time.monotonic()
    path = options.json or (
        pathlib.Path("runs/scaling_cpu.json")
        if options.platform == "cpu"
        else RESULTS / "scaling.json"
    )
    most = max(options.devices or (8,))
    with tempfile.TemporaryDirectory() as scratch:
        common = {"lock": os.path.join(scratch, "lock"), "seconds": options.seconds}
        pool = Pool(environment(options.platform, most), scratch, options.cell_timeout)
        about = pool.ask({**common, "about": True}, "about")
        if about is None or (options.platform == "gpu" and about["platform"] != "gpu"):
            print("no GPU here: --platform cpu tries this on virtual CPU devices", file=sys.stderr)
            return 2
        try:
            cells = list(wanted(options, about["devices"]).cells())
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        document = scaling_report.start(path, options.fresh, about)
        words = sys.argv[1:] if arguments is None else arguments
        document["commands"].append(" ".join(["python -m benchmarks.scaling", *words]))
        done = {row["key"] for row in document["rows"] if "ms" in row}
        left = [cell for cell in cells if cell.key not in done]
        if options.platform == "cpu":
            common |= {"sizes": [2**12], "training_options": ["--length", "64"]}
        print(f"{len(cells)} cells, {len(cells) - len(left)} of them measured before", flush=True)

        def take(kind: str, result: dict[str, Any]) -> None:
            scaling_report.add(document, kind, result, {cell.key: cell for cell in cells})
            write(path, document)
            spent = f"{time.monotonic() - begin:4.0f} of {options.budget:.0f} s"
            count = sum(cell.key in {row["key"] for row in document["rows"]} for cell in cells)
            line = scaling_report.line(kind, document)
            print(f"[{spent}, {count} of {len(cells)}] {line}", flush=True)

        deadline = begin + options.budget
        most = max(cell.devices for cell in cells)
        todo = jobs(left, others(options, cells, document), most, common)
        pool.run(todo, options.workers, deadline, take)
        document["left"] = [
            c.key for c in left if c.key not in {r["key"] for r in document["rows"]}
        ]
        write(path, document)
    print(scaling_report.tables(document))
    print(f"{len(document['left'])} cells left; the same command goes on. Written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
