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
    """By the model as it is now, not as it was when the row was measured; of the rings of that time."""
    return predict(cell_of(row).case, row["passes"], dataclasses.replace(h200(), last_alone=False))


def doubtful(row: Row) -> bool:
    """Whether its bursts differ by more than 10%, or it was alone for none of them."""
    return (row["spread"] or 0.0) > MOST_SPREAD or row.get("shared", False)


def milliseconds(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{'~' if doubtful(row) else ''}{row['ms']:.1f}"


def ratio(one: Row | None, row: Row | None) -> float | None:
    """How many times as fast, of two that are not doubtful."""
    if one is None or row is None or doubtful(one) or doubtful(row):
        return None
    return one["ms"] / row["ms"]


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
            speedup = ratio(one, row)
            cells.append(milliseconds(row) + ("" if speedup is None else f" ({speedup:.2f})"))
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
            weak = ratio(share, each(found, cell, kind, layout))
            cells.append("–" if weak is None else f"{weak:.0%}")
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
            mark = "~" if doubtful(row) else ""
            cells.append(f"{ms:.1f} ({mark}{ms / row['ms'] - 1:+.0%})")
        rows.append(cells)
    return ["mask", "passes", "tokens", "GPUs", "1 GPU", *names()], rows


def hidden() -> tuple[Sequence[str], list[list[str]]]:
    """With the communication and without."""
    found, rows = Found(results()), []
    for cell, _ in groups(found):
        for kind in KINDS:
            whole = each(found, cell, kind, "zigzag")
            silent = each(found, cell, kind, "zigzag", silent=True)
            if whole is None or silent is None:
                continue
            alone = predicted(whole).communication * 1e3
            exposed = whole["ms"] - silent["ms"]
            cells = [cell.mask, cell.passes, length(cell.tokens), str(cell.devices)]
            cells += [kind.replace("_", "-"), f"{silent['ms']:.1f}", f"{alone:.1f}"]
            cells += [f"{whole['ms']:.1f}", f"{exposed:.1f}", f"{exposed / whole['ms']:.1%}"]
            rows.append(cells)
    header = ["mask", "passes", "tokens", "GPUs", "kind", "computing alone", "transfers alone"]
    return [*header, "both", "exposed", "of all"], rows


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
    """Of profiles of single calls, the mean of the devices."""
    rows = json.loads((RESULTS / "scaling_trace.json").read_text())
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row["key"], []).append(row)
    table = []
    for key, devices in by_key.items():
        size, mask, kind, layout, count, passes, _ = key.split("/")
        del layout
        numbers = [
            sum(row[name] for row in devices) / len(devices)
            for name in ("whole", "compute", "transfer", "exposed", "idle")
        ]
        share = f"{1 - numbers[3] / numbers[2]:.0%}" if numbers[2] else "–"
        words = [mask, passes, length(int(size.split("x")[0])), count, kind.replace("_", "-")]
        table.append([*words, *(f"{x:.1f}" for x in numbers), share])
    header = ["mask", "passes", "tokens", "GPUs", "kind", "whole", "computing", "transfers"]
    return [*header, "exposed", "idle", "hidden"], table
