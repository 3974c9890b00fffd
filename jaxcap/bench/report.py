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


def _short(tflops: float) -> str:
    """Whole above 10, two digits below: a CPU's are hundredths."""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def table(rows: Sequence[Row], passes: str) -> str:
    """TFLOP/s, a line a case and a column an implementation, in Markdown."""
    rows = [row for row in rows if row.passes == passes]
    names = list(dict.fromkeys(row.implementation for row in rows))
    found = {(row.case, row.implementation): row for row in rows}
    lines = [f"| {passes}, TFLOP/s | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for case in dict.fromkeys(row.case for row in rows):
        cells = []
        for name in names:
            row = found.get((case, name))
            cells.append("–" if row is None or row.tflops is None else _short(row.tflops))
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def refusals(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"{r.implementation}, {r.case}, {r.passes}: {r.error}" for r in rows if r.error
    )


def document(rows: Sequence[Row], command: str) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "versions": versions(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def write(rows: Sequence[Row], command: str, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(rows, command), indent=1) + "\n")


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file that `write` made."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def picture(rows: Sequence[Row], path: pathlib.Path, title: str) -> None:
    """Bars a case; capped ones solid, plain ones pale. Needs matplotlib."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    shown = [passes for passes in PASSES if any(row.passes == passes for row in rows)]
    figure, axes = plt.subplots(len(shown), 1, figsize=(12, 4 * len(shown)), squeeze=False)
    names = list(dict.fromkeys(row.implementation for row in rows if row.tflops))
    bases = list(dict.fromkeys(name.replace("+cap", "").replace(" plain", "") for name in names))
    for axis, passes in zip(axes[:, 0], shown, strict=True):
        found = {(r.case, r.implementation): r.tflops for r in rows if r.passes == passes}
        cases = list(dict.fromkeys(case for case, _ in found))
        width = 0.85 / max(len(names), 1)
        for n, name in enumerate(names):
            color = f"C{bases.index(name.replace('+cap', '').replace(' plain', '')) % 10}"
            heights = [found.get((case, name)) or 0.0 for case in cases]
            places = [c + (n - len(names) / 2) * width for c in range(len(cases))]
            alpha = 1.0 if name.endswith("+cap") else 0.4
            axis.bar(places, heights, width, label=name, color=color, alpha=alpha)
        axis.set_xticks(range(len(cases)), cases, rotation=15)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(passes)
    axes[0, 0].legend(fontsize=8, ncols=4)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
