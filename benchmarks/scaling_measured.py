"""The tables of docs/scaling.md that are measured: benchmarks/results/scaling.json beside the model."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling_cells import Cell
from benchmarks.scaling_hardware import h200
from benchmarks.scaling_model import KINDS, PASSES, Prediction, predict
from benchmarks.scaling_report import GIB, Document, Found

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *((kind, "zigzag") for kind in KINDS),
    ("ring", "contiguous"),
    ("all_gather", "contiguous"),
)
MOST_SPREAD = 0.1
Row = Mapping[str, Any]


@functools.cache
def results() -> Document:
    return json.loads((RESULTS / "scaling.json").read_text())


def cell_of(row: Row) -> Cell:
    return Cell(**{field.name: row[field.name] for field in dataclasses.fields(Cell)})


def predicted(row: Row) -> Prediction:
    """By the model as it is now, not as it was when the row was measured."""
    return predict(cell_of(row).case, row["passes"], h200())


def error(row: Row) -> float:
    """Of the prediction, relative to what was measured."""
    found = predicted(row)
    return (found.compute if row["silent"] else found.seconds) * 1e3 / row["ms"] - 1


def single(row: Row) -> bool:
    """Whether it is one burst, of which nothing says whether something disturbed it."""
    return row["spread"] is None


def disturbed(row: Row) -> bool:
    """Whether its bursts differ by more than 10%."""
    return not single(row) and row["spread"] > MOST_SPREAD


def doubtful(row: Row) -> bool:
    """Listed and marked, but not counted."""
    return single(row) or disturbed(row)


def mark(*rows: Row) -> str:
    """Beside a figure: "~" if one of those that it is made of was disturbed, "†" if one is single."""
    return "~" if any(map(disturbed, rows)) else "†" if any(map(single, rows)) else ""


def milliseconds(row: Row | None) -> str:
    return "–" if row is None else f"{mark(row)}{row['ms']:.1f}"


def ratio(one: Row | None, row: Row | None, form: str) -> str | None:
    """How many times as fast, of two that nothing disturbed for all that is known."""
    if one is None or row is None or disturbed(one) or disturbed(row):
        return None
    return mark(one, row) + format(one["ms"] / row["ms"], form)


def groups(found: Found) -> Iterator[tuple[Cell, Row | None]]:
    """A cell on several GPUs for each length, mask and pass, and the same on one GPU."""
    seen = set()
    order = {"causal": 0, "full": 1}
    for row in sorted(
        found.rows,
        key=lambda r: (order[r["mask"]], PASSES.index(r["passes"]), r["tokens"], r["devices"]),
    ):
        name = row["mask"], row["passes"], row["tokens"], row["devices"]
        if row["devices"] > 1 and name not in seen:
            seen.add(name)
            cell = dataclasses.replace(
                cell_of(row), kind="ring", load_balance="zigzag", silent=False
            )
            yield cell, found.of(dataclasses.asdict(cell), kind="one", devices=1)


def each(found: Found, cell: Cell, kind: str, layout: str, **changes: Any) -> Row | None:
    wanted = dataclasses.replace(cell, kind=kind, load_balance=layout, **changes)
    return found.by_key.get(wanted.key)


def length(tokens: int) -> str:
    return f"{tokens // 1024}k"


def names() -> list[str]:
    return [f"{k.replace('_', '-')}{'' if b == 'zigzag' else ', contiguous'}" for k, b in COLUMNS]


def speed() -> tuple[Sequence[str], list[list[str]]]:
    """Milliseconds and speedup over one GPU."""
    found, rows = Found(results()), []
    for cell, one in groups(found):
        cells = [cell.mask, cell.passes, length(cell.tokens), str(cell.devices)]
        cells.append(milliseconds(one))
        for kind, layout in COLUMNS:
            row = each(found, cell, kind, layout)
            speedup = ratio(one, row, ".2f")
            cells.append(milliseconds(row) + ("" if speedup is None else f" ({speedup})"))
        rows.append(cells)
    return ["mask", "passes", "tokens", "GPUs", "1 GPU", *names()], rows


def weak() -> tuple[Sequence[str], list[list[str]]]:
    """Against one GPU with as much work as each of several: all tokens, a share of the heads."""
    found, rows = Found(results()), []
    for cell, _ in groups(found):
        share = found.of(
            dataclasses.asdict(cell),
            kind="one",
            devices=1,
            heads=cell.heads // cell.devices,
            kv_heads=max(1, cell.kv_heads // cell.devices),
        )
        cells = [cell.mask, cell.passes, length(cell.tokens), str(cell.devices)]
        cells.append(milliseconds(share))
        for kind, layout in COLUMNS[:4]:
            cells.append(ratio(share, each(found, cell, kind, layout), ".0%") or "–")
        rows.append(cells)
    return ["mask", "passes", "tokens", "GPUs", "same work on 1", *names()[:4]], rows


def model() -> tuple[Sequence[str], list[list[str]]]:
    """Predicted milliseconds, and how far they are from the measured ones."""
    found, rows = Found(results()), []
    for cell, one in groups(found):
        cells = [cell.mask, cell.passes, length(cell.tokens), str(cell.devices)]
        for row in (one, *(each(found, cell, kind, layout) for kind, layout in COLUMNS)):
            if row is None:
                cells.append("–")
                continue
            ms = predicted(row).seconds * 1e3
            cells.append(f"{ms:.1f} ({mark(row)}{ms / row['ms'] - 1:+.0%})")
        rows.append(cells)
    return ["mask", "passes", "tokens", "GPUs", "1 GPU", *names()], rows


def memory() -> tuple[Sequence[str], list[list[str]]]:
    """GiB a GPU, of the compiled program, and predicted."""
    found, rows = Found(results()), []
    for cell, one in groups(found):
        if cell.mask != "causal":
            continue
        cells = [cell.passes, length(cell.tokens), str(cell.devices)]
        for row in (one, *(each(found, cell, kind, layout) for kind, layout in COLUMNS[:4])):
            if row is None:
                cells.append("–")
                continue
            cells.append(f"{row['memory'] / GIB:.1f} ({predicted(row).memory / GIB:.1f})")
        rows.append(cells)
    return ["passes", "tokens", "GPUs", "1 GPU", *names()[:4]], rows


def traced() -> tuple[Sequence[str], list[list[str]]]:
    """Of profiles of single calls, GPU by GPU."""
    table = []
    for row in json.loads((RESULTS / "scaling_trace.json").read_text()):
        size, mask, kind, _, count, passes, _ = row["key"].split("/")
        names = ("whole", "compute", "transfer", "exposed", "idle")
        share = f"{1 - row['exposed'] / row['transfer']:.0%}" if row["transfer"] else "–"
        words = [mask, passes, length(int(size.split("x")[0])), count, kind.replace("_", "-")]
        words.append(row["device"].rsplit(":", 1)[-1])
        table.append([*words, *(f"{row[name]:.1f}" for name in names), share])
    header = ["mask", "passes", "tokens", "GPUs", "kind", "GPU", "whole", "computing", "transfers"]
    return [*header, "exposed", "idle", "hidden"], table
