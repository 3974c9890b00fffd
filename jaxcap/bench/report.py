"""A table for people, rows for programs, and a picture."""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxcap.bench.measure import PASSES, Row

_PACKAGES = ("jaxcap", "jax", "jaxlib", "torch", "triton", "tokamax")
_FLASH = ("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl")

#: Those have the same colours in every picture.
_COLOURED = ("jaxcap-pallas", "jax-cudnn", "fa3-fwd", "fa4", "tokamax", "fa2")


def versions() -> dict[str, str]:
    """Of what took part, the GPU's name among them."""
    import jax

    device = jax.devices()[0]
    found = {"device": device.device_kind}
    for name in (*_PACKAGES, *_FLASH):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def base(implementation: str) -> str:
    """Its name without what says whether it caps."""
    return implementation.removesuffix("+cap").removesuffix(" plain")


def _short(tflops: float) -> str:
    """Whole above 10, two digits below: a CPU's are hundredths."""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _speeds(row: Row) -> str:
    sustained = _short(row.tflops or 0.0)
    return sustained if row.burst_tflops is None else f"{_short(row.burst_tflops)} / {sustained}"


def table(rows: Sequence[Row], passes: str) -> str:
    """TFLOP/s, a line a case and a column an implementation that ran one of them, in Markdown."""
    rows = [row for row in rows if row.passes == passes]
    both = ", first calls / sustained" if any(row.burst_tflops for row in rows) else ""
    names = list(dict.fromkeys(row.implementation for row in rows if row.tflops is not None))
    found = {(row.case, row.implementation): row for row in rows}
    lines = [f"| {passes}, TFLOP/s{both} | " + " | ".join(names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for case in dict.fromkeys(row.case for row in rows):
        cells = []
        for name in names:
            row = found.get((case, name))
            cells.append("–" if row is None or row.tflops is None else _speeds(row))
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def refusals(rows: Sequence[Row], named: bool = True) -> str:
    """A line for each implementation and reason, and where that was if not everywhere.

    One for all that ran nowhere, if they were not named and something ran: much is not for every machine.
    """
    asked: dict[str, list[str]] = {}
    found: dict[tuple[str, str], list[str]] = {}
    ran = {row.implementation for row in rows if row.tflops is not None}
    for row in rows:
        place = f"{row.case} {row.passes}"
        asked.setdefault(row.implementation, []).append(place)
        if row.error and (named or not ran or row.implementation in ran):
            found.setdefault((row.implementation, row.error), []).append(place)
    lines = [
        f"{name}: {error}" + ("" if places == asked[name] else f" ({', '.join(places)})")
        for (name, error), places in found.items()
    ]
    absent = [name for name in asked if name not in ran | {name for name, _ in found}]
    if absent:
        bases = dict.fromkeys(base(name) for name in absent)
        lines.append(f"did not run: {', '.join(bases)}; why: name them, --implementations")
    return "\n".join(lines)


def idle(rows: Sequence[Row]) -> str:
    """A line for each row in which the host did not launch as fast as the GPU computed."""
    return "\n".join(
        f"{row.implementation}, {row.case} {row.passes}: the GPU waited for the host"
        for row in rows
        if row.ahead is not None and row.ahead < 0.9
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """Where rows come from."""

    date: str
    command: str
    versions: dict[str, str]

    @classmethod
    def now(cls, command: str) -> "Run":
        return cls(datetime.date.today().isoformat(), command, versions())


def write(rows: Sequence[Row], run: Run, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = dataclasses.asdict(run) | {"rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _parsed(path: pathlib.Path) -> tuple[list[Row], Run]:
    try:
        found = json.loads(path.read_text())
        rows = [Row(**row) for row in found.pop("rows")]
        run = Run(**found)
        texts = [run.date, run.command, *run.versions.values(), run.versions["device"]]
        for row in rows:
            texts += [row.case, row.implementation, row.passes]
        speeds = [x for row in rows for x in (row.tflops, row.burst_tflops) if x is not None]
        right = all(isinstance(x, str) for x in texts)
        if not right or not all(isinstance(x, int | float) for x in speeds):
            raise TypeError("text and numbers are not where they should be")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"--merge: {path} is no file that --json wrote: {error!r}") from error
    return rows, run


def read(paths: Sequence[pathlib.Path]) -> tuple[list[Row], Run]:
    """The rows of files that `write` made, and the run.

    ValueError: other files, of different versions, or a row twice, or sustained and not.
    """
    rows: list[Row] = []
    runs: list[Run] = []
    for path in paths:
        more, run = _parsed(path)
        if runs and run.versions != runs[0].versions:
            raise ValueError(
                f"--merge: {path} is of {run.versions}, {paths[0]} of {runs[0].versions}: "
                "put together what ran on one machine with the same packages"
            )
        known = {(row.case, row.implementation, row.passes) for row in rows}
        for row in more:
            if (row.case, row.implementation, row.passes) in known:
                raise ValueError(
                    f"--merge: {path} has {row.case}, {row.implementation}, {row.passes} once more"
                )
        rows += more
        runs.append(run)
    if len({row.burst_tflops is None for row in rows if row.tflops is not None}) > 1:
        raise ValueError(
            "--merge: some of these are sustained, others are not (--sustain 0): they do not compare"
        )
    command = "; ".join(dict.fromkeys(run.command for run in runs))
    return rows, Run(max(run.date for run in runs), command, runs[0].versions)


def picture(rows: Sequence[Row], path: pathlib.Path, title: str) -> None:
    """Bars a case, fast ones first: capped ones solid, plain ones pale. Needs matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = [row for row in rows if row.tflops]
    shown = [passes for passes in PASSES if any(row.passes == passes for row in rows)]
    names = sorted({row.implementation for row in rows}, key=lambda name: (" plain" in name, name))
    bases = list(dict.fromkeys([*_COLOURED, *(base(row.implementation) for row in rows)]))
    kind = ", sustained" if any(row.burst_tflops for row in rows) else ""
    figure = Figure(figsize=(12, 3.6 * len(shown) + 1), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    bars: dict[str, Any] = {}
    for axis, passes in zip(axes, shown, strict=True):
        cases = list(dict.fromkeys(row.case for row in rows if row.passes == passes))
        width = 0.88 / len(names)
        for place, case in enumerate(cases):
            group = [row for row in rows if (row.passes, row.case) == (passes, case)]
            group.sort(key=lambda row: (" plain" in row.implementation, -(row.tflops or 0)))
            for n, row in enumerate(group):
                bars[row.implementation] = axis.bar(
                    place + (n - (len(group) - 1) / 2) * width,
                    row.tflops,
                    0.9 * width,
                    color=f"C{bases.index(base(row.implementation)) % 10}",
                    alpha=0.35 if " plain" in row.implementation else 1.0,
                )
        axis.set_xticks(range(len(cases)), cases)
        axis.set(ylabel=f"{passes}, TFLOP/s{kind}")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        [bars[name] for name in names], names, loc="outside lower center", ncols=6, frameon=False
    )
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
