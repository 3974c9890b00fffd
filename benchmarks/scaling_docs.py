"""Writes the tables and the picture of docs/scaling.md: `python -m benchmarks.scaling_docs`.

The measured ones are of benchmarks/results; the model has the kernels of hops_h200.json and the stated links.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import scaling_measured
from benchmarks.scaling_hardware import HOPS, Hardware, h200, row_features
from benchmarks.scaling_hardware import PASSES as HOP_PASSES
from benchmarks.scaling_model import KINDS, PASSES, Case, Prediction, alone, efficiency, predict

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs" / "scaling.md"
PICTURE = ROOT / "docs" / "images" / "scaling.svg"
ROOM = 120 * 2**30  # bytes a GPU that attention may take
POWERS = tuple(2**n for n in range(1, 11))
LENGTHS = {"128k": 2**17, "512k": 2**19, "1M": 2**20, "4M": 2**22}
NAMES = {kind: kind.replace("_", "-") for kind in KINDS}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@functools.cache
def predicted(case: Case, passes: str, hardware: Hardware) -> Prediction | None:
    """None where the kind is not possible or does not fit into memory."""
    try:
        found = predict(case, passes, hardware)
    except ValueError:
        return None
    return found if found.memory <= ROOM else None


# Tables.


def hops() -> str:
    """Measured against the fitted lines."""
    by_shape: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in json.loads(HOPS.read_text())["rows"]:
        shape = tuple(row[n] for n in ("queries", "keys", "causal", "heads"))
        by_shape.setdefault((*shape, row["hop"]), {})[row["passes"]] = row
    lines = []
    for (queries, keys, causal, heads, hop), rows in by_shape.items():
        cells = [f"{queries} x {keys}", "causal" if causal else "full", str(heads)]
        cells.append("hop" if hop else "call")
        for name in HOP_PASSES:
            row = rows.get(name)
            if row is None:
                cells += ["–"] * 3
                continue
            kernel = getattr(h200(), f"hop_{name}" if hop else name)
            line = float(kernel.seconds(row_features(row))) * 1e3
            cells += [f"{row['ms']:.2f}", f"{row['tflops']:.0f}", f"{line:.2f}"]
        lines.append((hop, queries * keys * (0.5 if causal else 1.0) * heads, cells))
    header = ["queries x keys", "mask", "heads", "as"]
    for name in HOP_PASSES:
        header += [f"{name}, ms", "TFLOP/s", "line, ms"]
    return markdown(header, [cells for *_, cells in sorted(lines, reverse=True)])


def node(devices: Sequence[int], lengths: Sequence[str]) -> str:
    """Milliseconds and speedup of every kind within one NVLink domain."""
    rows = []
    for mask, length, passes, p in (
        (mask, length, passes, p)
        for mask in ("causal", "full")
        for passes in PASSES
        for length in lengths
        for p in devices
    ):
        case = Case(LENGTHS[length], p, causal=mask == "causal")
        one = alone(case, passes, h200()).seconds
        cells = [mask, passes, length, str(p), f"{one * 1e3:.0f}"]
        for kind in KINDS:
            found = predicted(dataclasses.replace(case, kind=kind), passes, h200())
            cells.append(f"{found.seconds * 1e3:.1f} ({one / found.seconds:.2f})" if found else "–")
        contiguous = dataclasses.replace(case, load_balance="contiguous")
        found = predicted(contiguous, passes, h200())
        assert found is not None
        cells.append(f"{found.seconds * 1e3:.1f} ({one / found.seconds:.2f})")
        rows.append(cells)
    header = ["mask", "passes", "tokens", "GPUs", "1 GPU", *NAMES.values(), "ring, contiguous"]
    return markdown(header, rows)


def best(domain: int) -> str:
    """The fastest kind that fits, and its efficiency; forward and backward, causal, zigzag."""
    hardware, rows = h200(domain), []
    for p in POWERS[2:]:
        cells = [str(p)]
        for tokens in LENGTHS.values():
            kinds = {k: Case(tokens, p, k) for k in KINDS}
            found = {
                k: x.seconds for k, c in kinds.items() if (x := predicted(c, PASSES[1], hardware))
            }
            if not found:
                cells.append("–")
                continue
            kind = min(found, key=lambda k: found[k])
            cells.append(f"{NAMES[kind]} {efficiency(kinds[kind], PASSES[1], hardware):.0%}")
        rows.append(cells)
    return markdown(["GPUs", *LENGTHS], rows)


def windows() -> str:
    """Milliseconds of 1M tokens with Gemma's window of 4096, forward and backward."""
    tried = {
        "ring, contiguous": ("ring", "contiguous"),
        "ring, zigzag": ("ring", "zigzag"),
        "all-gather": ("all_gather", "contiguous"),
        "all-to-all": ("all_to_all", "contiguous"),
        "hybrid": ("hybrid", "contiguous"),
    }
    rows = []
    for p in (2, 8, 32, 128, 512):
        cells = [str(p)]
        for kind, layout in tried.values():
            case = Case(LENGTHS["1M"], p, kind, layout, window=4095)
            found = predicted(case, PASSES[1], h200())
            share = efficiency(case, PASSES[1], h200()) if found else 0.0
            cells.append(f"{found.seconds * 1e3:.1f} ({share:.0%})" if found else "–")
        rows.append(cells)
    return markdown(["GPUs", *tried], rows)


def stops() -> str:
    """The most GPUs, of powers of two, on which a kind is at least 80% efficient."""
    rows = []
    for kind in KINDS:
        for domain in (8, 72):
            cells = [NAMES[kind], str(domain)]
            for tokens in LENGTHS.values():
                enough = [
                    p
                    for p in POWERS
                    if predicted(Case(tokens, p, kind), PASSES[1], h200(domain))
                    and efficiency(Case(tokens, p, kind), PASSES[1], h200(domain)) >= 0.8
                ]
                cells.append(str(max(enough)) if enough else "–")
            rows.append(cells)
    return markdown(["kind", "domain", *LENGTHS], rows)


TABLES: dict[str, Callable[[], str]] = {
    "hops": hops,
    "speed": lambda: markdown(*scaling_measured.speed()),
    "weak": lambda: markdown(*scaling_measured.weak()),
    "traced": lambda: markdown(*scaling_measured.traced()),
    "memory": lambda: markdown(*scaling_measured.memory()),
    "model": lambda: markdown(*scaling_measured.model()),
    "eight": lambda: node((4, 8), ("128k", "512k")),
    "best8": lambda: best(8),
    "best72": lambda: best(72),
    "stops": stops,
    "windows": windows,
}


def written(text: str) -> str:
    """`text` with its tables, between <!-- table: NAME --> and <!-- /table -->, made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- /table -->"
        new = f"{begin}\n{make()}\n{end}"
        text, count = re.subn(f"{begin}.*?{end}", lambda _, new=new: new, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{DOCS} must have one table {name!r}, found {count}")
    return text


# The picture.

WIDTH, HEIGHT, LEFT, TOP = 640, 330, 48, 34
COLOURS = {
    "ring": "#1f77b4",
    "all_gather": "#ff7f0e",
    "all_to_all": "#2ca02c",
    "hybrid": "#d62728",
}


def _x(devices: int) -> float:
    return LEFT + (WIDTH - LEFT - 16) * (devices.bit_length() - 2) / (len(POWERS) - 1)


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - 44) * (1 - share)


def picture() -> str:
    """Efficiency over GPUs of 1M tokens, every kind, domains of 8 (lines) and 72 (dashes), as SVG."""
    tokens = LENGTHS["1M"]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="12">Predicted efficiency of causal attention, forward and'
        " backward, 1M tokens, zigzag</text>",
    ]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth}%</text>')
    for p in POWERS:
        out.append(f'<text x="{_x(p):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{p}</text>')
    for domain, dash in ((8, ""), (72, ' stroke-dasharray="5 3"')):
        for kind, colour in COLOURS.items():
            points = [
                f"{_x(p):.1f} {_y(efficiency(case, PASSES[1], h200(domain))):.1f}"
                for p in POWERS
                if predicted(case := Case(tokens, p, kind), PASSES[1], h200(domain))
            ]
            out.append(
                f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            )
    x = LEFT
    for kind, colour in COLOURS.items():
        out.append(
            f'<text x="{x}" y="{HEIGHT - 8}" fill="{colour}" font-weight="bold">{NAMES[kind]}</text>'
        )
        x += 82
    out.append(
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 8}" text-anchor="end">GPUs; NVLink joins 8 (lines), 72'
        " (dashes)</text>"
    )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    DOCS.write_text(written(DOCS.read_text()))
    PICTURE.write_text(picture())
    print(f"written: {DOCS} and {PICTURE}")


if __name__ == "__main__":
    main()
