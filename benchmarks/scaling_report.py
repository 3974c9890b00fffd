"""The results of `benchmarks.scaling`: a document for programs, tables for people."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.scaling_cells import Cell
from benchmarks.scaling_hardware import Hardware, Link, h200
from benchmarks.scaling_model import PASSES, predict

Document = dict[str, Any]
GIB = 2**30
LISTS = ("commands", "rows", "links", "hops", "training")


def start(path: pathlib.Path, fresh: bool, about: Mapping[str, Any]) -> Document:
    """The document at `path` to go on with, or an empty one; another machine's is never mixed in."""
    document: Document = {name: [] for name in LISTS}
    if path.exists() and not fresh:
        document = json.loads(path.read_text())
        before, now = document["versions"], about["versions"]
        if before != now or document["platform"] != about["platform"]:
            raise SystemExit(
                f"{path} is of another machine or other versions ({before}, here {now}):"
                " --fresh overwrites it, --json FILE leaves it"
            )
    today = datetime.date.today().isoformat()
    return {"date": today, **about, **{name: document.get(name, []) for name in LISTS}}


def hops_document(versions: Mapping[str, Any], command: str) -> Document:
    """Of the kernels alone."""
    today = datetime.date.today().isoformat()
    return {"date": today, "command": command, "versions": dict(versions), "rows": []}


def hardware() -> Hardware | None:
    """What predictions are made for; None before its kernels were measured."""
    try:
        return h200()
    except FileNotFoundError:
        return None


def add(document: Document, kind: str, result: dict[str, Any], cells: Mapping[str, Cell]) -> None:
    """Adds a worker's result, in place of an earlier one of the same cell, with what was predicted."""
    if kind != "row":
        document[{"link": "links", "hop": "hops"}.get(kind, kind)].append(result)
        return
    cell = cells[result["key"]]
    row = {**dataclasses.asdict(cell), **result}
    if "ms" in row:
        row["tflops"] = cell.flops / cell.devices / row["ms"] / 1e9
    machine = hardware() if document["platform"] == "gpu" else None
    if machine is not None:
        found = predict(cell.case, cell.passes, machine)
        seconds = found.compute if cell.silent else found.seconds
        row |= {"predicted_ms": seconds * 1e3, "predicted_memory": found.memory}
    document["rows"] = [r for r in document["rows"] if r["key"] != row["key"]] + [row]


def hop_line(row: Mapping[str, Any]) -> str:
    """Of a kernel alone."""
    mask, what = "causal" if row["causal"] else "full", "hop" if row["hop"] else "call"
    size = (
        f"{row['queries']:7d} x {row['keys']:7d} {mask:6s} {row['heads']}/{row['kv_heads']} heads"
    )
    return f"{size} {what} {row['passes']:8s} {row['ms']:9.3f} ms {row['tflops']:6.0f} TFLOP/s"


def training_line(row: Mapping[str, Any]) -> str:
    """Of the example on one mesh."""
    if "error" in row:
        return f"training: {row['error']}"
    agrees = "agrees" if row["difference"] <= row["allowed"] else "DIFFERS"
    return (
        f"training on {row['mesh']}, {row['kind']}, {row['layout']}, {row['tokens']} tokens,"
        f" {row['dtype']}: loss {row['losses'][-1][0]:.5f}, one device {row['losses'][-1][1]:.5f},"
        f" largest difference {row['difference']:.1e} of {row['allowed']:g}: {agrees};"
        f" {row['tokens_a_second']:,.0f} tokens/s; {row['attention']}"
    )


def line(kind: str, document: Document) -> str:
    """The newest result."""
    if kind == "hop":
        return hop_line(document["hops"][-1])
    if kind == "training":
        return training_line(document["training"][-1])
    if kind == "link":
        link = document["links"][-1]
        rate = link["bytes"] / link["us"] / 1e3
        what = f"{link['collective']} of {link['bytes'] / 2**20:g} MiB"
        return f"{what} on {link['devices']}: {link['us']:.0f} us, {rate:.0f} GB/s"
    row = document["rows"][-1]
    if "error" in row:
        return f"{row['key']}: {row['error']}"
    predicted = f" (predicted {row['predicted_ms']:.2f})" if "predicted_ms" in row else ""
    return f"{row['key']}: {row['ms']:.2f} ms{predicted}, {row['tflops']:.1f} TFLOP/s a device"


def fitted_links(links: Iterable[Mapping[str, Any]]) -> dict[str, Link]:
    """Step and rate of the model's links, from the measured collectives: {"permute": Link, ...}."""
    found = {}
    for name, collectives in {
        "permute": ("permute",),
        "gather": ("gather", "scatter"),
        "exchange": ("exchange",),
    }.items():
        rows = [row for row in links if row["collective"] in collectives]
        if len(rows) < 2:
            continue
        p = np.array([row["devices"] for row in rows], np.float64)
        steps = p - 1 if name == "gather" else np.ones_like(p)
        share = {"permute": np.ones_like(p), "gather": p - 1, "exchange": (p - 1) / p}[name]
        seconds = np.array([row["us"] for row in rows]) / 1e6
        size = np.array([row["bytes"] for row in rows], np.float64) * share
        a = np.stack([steps, size], 1) / seconds[:, None]
        step, slope = np.linalg.lstsq(a, np.ones(len(rows)), rcond=None)[0]
        if slope > 0:
            found[name] = Link(1 / slope, max(float(step), 0.0))
    return found


class Found:
    """Measured rows by what they are of."""

    def __init__(self, document: Document):
        rows = [row for row in document["rows"] if "ms" in row]
        self.rows, self.by_key = rows, {row["key"]: row for row in rows}

    def of(self, row: Mapping[str, Any], **changes: Any) -> Mapping[str, Any] | None:
        """The row of the same cell but for `changes`."""
        names = [field.name for field in dataclasses.fields(Cell)]
        cell = dataclasses.replace(Cell(**{name: row[name] for name in names}), **changes)
        return self.by_key.get(cell.key)

    def speedup(self, row: Mapping[str, Any]) -> float | None:
        """Over the same call on one GPU."""
        one = self.of(row, kind="one", devices=1, load_balance="zigzag")
        return one["ms"] / row["ms"] if one else None

    def weak(self, row: Mapping[str, Any]) -> float | None:
        """Against one GPU with the same work a GPU: all tokens, a P-th of the heads."""
        p = row["devices"]
        heads, kv_heads = row["heads"] // p, max(1, row["kv_heads"] // p)
        one = self.of(
            row, kind="one", devices=1, load_balance="zigzag", heads=heads, kv_heads=kv_heads
        )
        return one["ms"] / row["ms"] if one else None

    def exposed(self, row: Mapping[str, Any]) -> float | None:
        """Milliseconds that the communication adds; None if less than bursts of either differ by."""
        silent = self.of(row, silent=True)
        if silent is None:
            return None
        added = row["ms"] - silent["ms"]
        spreads = [np.inf if x.get("spread") is None else x["spread"] for x in (row, silent)]
        return added if added > max(spreads) * row["ms"] else None


def hidden(
    row: Mapping[str, Any], exposed: float | None, links: Mapping[str, Link]
) -> float | None:
    """Share of the communication, at the measured links' speed, that costs no time.

    None, too, where more is exposed than the communication takes: what else was slower is not known.
    """
    machine = hardware()
    if exposed is None or machine is None or not links:
        return None
    cell = Cell(**{field.name: row[field.name] for field in dataclasses.fields(Cell)})
    machine = dataclasses.replace(machine, **links)
    whole = predict(cell.case, cell.passes, machine).communication * 1e3
    return 1.0 - exposed / whole if exposed <= whole else None


def tables(document: Document) -> str:
    """Markdown: a table for each mask, length and pass."""
    found, links = Found(document), fitted_links(document["links"])
    groups = dict.fromkeys((r["mask"], r["tokens"], r["passes"]) for r in found.rows)
    parts = []
    for mask, tokens, passes in sorted(groups, key=lambda g: (g[0], g[1], PASSES.index(g[2]))):
        lines = [
            f"\n{passes}, {mask}, {tokens} tokens\n",
            "| GPUs | kind | layout | ms | predicted | TFLOP/s a GPU | speedup | weak"
            " | exposed, ms | hidden | GiB a GPU | predicted |",
            "|---" * 12 + "|",
        ]
        for row in sorted(found.rows, key=lambda r: (r["devices"], r["ms"])):
            whole_heads = row["kind"] != "one" or row["heads"] == max(
                r["heads"] for r in found.rows
            )
            if (row["mask"], row["tokens"], row["passes"]) != (mask, tokens, passes):
                continue
            if row["silent"] or not whole_heads:
                continue
            exposed, share = found.exposed(row), None
            if document["platform"] == "gpu":
                share = hidden(row, exposed, links)
            cells = [
                str(row["devices"]),
                row["kind"].replace("_", "-"),
                "" if row["kind"] in ("one", "all_to_all") else row["load_balance"],
                f"{row['ms']:.2f}",
                _number(row.get("predicted_ms"), ".2f"),
                f"{row['tflops']:.0f}",
                _number(found.speedup(row), ".2f"),
                _number(found.weak(row), ".0%"),
                _number(exposed, ".2f"),
                _number(share, ".0%"),
                f"{row['memory'] / GIB:.1f}",
                _number(row.get("predicted_memory"), ".1f", GIB),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    parts += ["", *map(training_line, document["training"])]
    errors = [f"{row['key']}: {row['error']}" for row in document["rows"] if "error" in row]
    return "\n".join([*parts, *(["", "Not measured:", *errors] if errors else [])])


def _number(value: Any, form: str, unit: float = 1.0) -> str:
    return "–" if value is None else format(value / unit, form)
