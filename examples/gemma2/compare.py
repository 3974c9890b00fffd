"""Trains one model on several backends from the same start and data: `python -m examples.gemma2.compare`.

Their losses cannot be equal: each backend rounds in another order, and training spreads that. So every
backend trains several times, the rows of each batch rotated by a share of the batch each time, which is
the same mean summed in another order: two backends agree if their runs are no further apart than those
of one of them are.
"""

import argparse
import itertools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from . import data
from .checkpoint import initial
from .settings import Settings, add_flags, from_flags, given
from .train import programs

Curves = dict[str, np.ndarray]
RUN = ", run "


def curve(settings: Settings, text: data.Text, rotated: int) -> np.ndarray:
    """The training loss of every step, with the rows of its batch rotated by so many."""
    step, _ = programs(settings)
    state = initial(settings)
    for done in range(settings.steps):
        windows = data.batch(text.train, settings.seed, done, settings.batch, settings.length)
        state, _ = step(state, jnp.asarray(np.roll(windows, rotated, axis=0)))
    return np.asarray(state.losses)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference over all steps."""
    return float(np.sqrt(np.mean((a - b) ** 2)))


def backend_of(name: str) -> str:
    return name.partition(RUN)[0]


def table(curves: Curves) -> str:
    """Each curve's last losses, and how far runs of a backend and of two are from each other."""
    last = max(1, len(next(iter(curves.values()))) // 10)
    lines = [f"{'':32s} last {last} steps"]
    lines += [f"{name:32s} {losses[-last:].mean():13.4f}" for name, losses in curves.items()]
    pairs: dict[str, list[float]] = {}
    for one, other in itertools.combinations(curves, 2):
        kind = " and ".join(dict.fromkeys((backend_of(one), backend_of(other))))
        pairs.setdefault(kind, []).append(apart(curves[one], curves[other]))
    lines.append(f"\n{'':32s} apart, root mean square of all steps")
    for kind, found in pairs.items():
        lines.append(
            f"{kind:32s} {np.mean(found):13.4f} ({min(found):.4f} to {max(found):.4f}; pairs: {len(found)})"
        )
    return "\n".join(lines)


def draw(path: Path, curves: Curves, title: str) -> None:
    """The losses over each other, and below each one less the mean of all."""
    from matplotlib.figure import Figure  # not pyplot, which takes a second to import

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    middle = np.mean(list(curves.values()), axis=0)
    steps = np.arange(1, len(middle) + 1)
    names = list(dict.fromkeys(map(backend_of, curves)))
    for name, losses in curves.items():
        backend = backend_of(name)
        style = {"color": f"C{names.index(backend)}", "linewidth": 0.8}
        upper.plot(steps, losses, label=backend if name == backend else None, **style)
        lower.plot(steps, losses - middle, **style)
    upper.set(ylabel="loss (nats a byte)", title=title)
    upper.set_ylim(0, None)
    upper.legend(frameon=False)
    lower.axhline(0.0, color="0.6", linewidth=0.8)
    lower.set(xlabel="step", ylabel="less the mean of all", xlim=(1, len(steps)))
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def write(path: Path, curves: Curves) -> None:
    rows = [",".join(["step", *(f'"{name}"' for name in curves)])]
    for step, losses in enumerate(zip(*curves.values(), strict=True), 1):
        rows.append(",".join([str(step), *(f"{loss:.6g}" for loss in losses)]))
    path.write_text("\n".join(rows) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.gemma2.compare", description=__doc__)
    add_flags(parser)
    parser.add_argument("--backends", default="xla,pallas", metavar="NAME,NAME")
    parser.add_argument("--runs", default=2, metavar="N", type=int, help="of each backend; 2")
    parser.add_argument("--out", default="runs/gemma2-compared", metavar="FOLDER", type=Path)
    flags = parser.parse_args(arguments)
    if flags.backend is not None:
        parser.error("--backend: name all that shall be compared in --backends")
    if flags.runs < 1:
        parser.error(f"--runs must be at least 1, got {flags.runs}")
    curves: Curves = {}
    try:
        text = data.load(flags.data)
        wishes = {"steps": 300, **given(flags)}
        for backend in flags.backends.split(","):
            settings = from_flags({**wishes, "backend": backend}, text)
            for run in range(flags.runs):
                name = backend + (f"{RUN}{run + 1}" if run else "")
                print(f"training {settings.steps} steps on {name}", flush=True)
                curves[name] = curve(settings, text, run * settings.batch // flags.runs)
    except ValueError as error:
        parser.error(str(error))
    flags.out.mkdir(parents=True, exist_ok=True)
    write(flags.out / "losses.csv", curves)
    draw(flags.out / "losses.png", curves, f"one model, {len(curves)} trainings on {text.name}")
    print(f"{table(curves)}\nwritten to {flags.out}: losses.csv, losses.png")


if __name__ == "__main__":
    main(sys.argv[1:])
