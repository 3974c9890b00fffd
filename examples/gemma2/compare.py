"""Trains one model on several backends from the same start and data: `python -m examples.gemma2.compare`.

Their losses cannot be equal: each backend rounds in another order, and training spreads that. So every
backend trains twice, the second time with the rows of each batch in reverse order, which is the same
mean summed in another order: two backends agree if they differ by no more than one does from itself.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from . import data
from .checkpoint import initial
from .settings import Settings, add_flags, from_flags, given
from .train import programs

Curves = dict[str, np.ndarray]
REVERSED = ", batches reversed"


def curve(settings: Settings, text: data.Text, reverse: bool) -> np.ndarray:
    """The training loss of every step."""
    step, _ = programs(settings)
    state = initial(settings)
    for done in range(settings.steps):
        windows = data.batch(text.train, settings.seed, done, settings.batch, settings.length)
        state, _ = step(state, jnp.asarray(windows[::-1] if reverse else windows))
    return np.asarray(state.losses)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference over all steps."""
    return float(np.sqrt(np.mean((a - b) ** 2)))


def table(curves: Curves) -> str:
    """Each curve's last losses, and how far it is from the first one."""
    first = next(iter(curves.values()))
    last = max(1, len(first) // 10)
    lines = [f"{'':32s} last {last} steps   root mean square from the first"]
    for name, losses in curves.items():
        lines.append(f"{name:32s} {losses[-last:].mean():13.4f} {apart(losses, first):16.5f}")
    return "\n".join(lines)


def draw(path: Path, curves: Curves, title: str) -> None:
    """The losses over each other, and below each one less the first one's."""
    from matplotlib.figure import Figure  # not pyplot, which takes a second to import

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    first = next(iter(curves.values()))
    steps = np.arange(1, len(first) + 1)
    names = list(dict.fromkeys(name.removesuffix(REVERSED) for name in curves))
    for name, losses in curves.items():
        style = {
            "color": f"C{names.index(name.removesuffix(REVERSED))}",
            "linestyle": ":" if name.endswith(REVERSED) else "-",
            "linewidth": 1.0,
        }
        upper.plot(steps, losses, label=name, **style)
        if losses is not first:
            lower.plot(steps, losses - first, **style)
    upper.set(ylabel="loss (nats a byte)", title=title)
    upper.set_ylim(0, None)
    upper.legend(frameon=False)
    lower.axhline(0.0, color="0.6", linewidth=0.8)
    lower.set(xlabel="step", ylabel=f"less that of {next(iter(curves))}", xlim=(1, len(first)))
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
    parser.add_argument("--out", default="runs/gemma2-compared", metavar="FOLDER", type=Path)
    flags = parser.parse_args(arguments)
    if flags.backend is not None:
        parser.error("--backend: name all that shall be compared in --backends")
    curves: Curves = {}
    try:
        text = data.load(flags.data)
        wishes = {"steps": 300, **given(flags)}
        for backend in flags.backends.split(","):
            settings = from_flags({**wishes, "backend": backend}, text)
            for reverse in (False, True):
                name = backend + (REVERSED if reverse else "")
                print(f"training {settings.steps} steps on {name}", flush=True)
                curves[name] = curve(settings, text, reverse)
    except ValueError as error:
        parser.error(str(error))
    flags.out.mkdir(parents=True, exist_ok=True)
    write(flags.out / "losses.csv", curves)
    draw(flags.out / "losses.png", curves, f"one model, {len(curves)} trainings on {text.name}")
    print(f"{table(curves)}\nwritten to {flags.out}: losses.csv, losses.png")


if __name__ == "__main__":
    main(sys.argv[1:])
