"""What a person sees of a run: a progress bar, or lines where no terminal is; a table; a picture."""

import sys
import time
from pathlib import Path
from types import TracebackType

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import jaxcap

from .settings import Settings


def backend(settings: Settings) -> str:
    """The backends that attention trains on, "blockwise" or "pallas, xla": sliding, then global.

    Raises ValueError, with every reason, where none can.
    """
    c = settings.config

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((settings.batch, settings.length, heads, c.head_size), c.dtype)

    names = []
    for window in ((c.window - 1, 0), None):
        decision = jaxcap.explain(
            shape(c.heads),
            shape(c.kv_heads),
            shape(c.kv_heads),
            softcap=c.attention_softcap,
            scale=c.attention_scale,
            is_causal=True,
            local_window_size=window,
            implementation=c.backend,
        ).training
        if decision.backend is None:
            raise ValueError(f"no backend can train this model:\n{decision}")
        names.append(decision.backend)
    return ", ".join(dict.fromkeys(names))


class Bar:
    """Progress of training, fed with losses; tokens/s leave compilation out."""

    def __init__(self, settings: Settings, step: int, backend: str):
        self.settings, self.step, self.backend = settings, step, backend
        self.loss, self.validation = float("nan"), float("nan")
        self.tokens, self.seconds, self.since = 0, 0.0, None
        self.console = Console(file=sys.stdout)
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("compiling", total=settings.steps, completed=step)

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def due(self) -> bool:
        """Whether to wait for the device and show where it is: four times a second."""
        return self.since is None or time.monotonic() - self.since >= 0.25

    def show(self, step: int, losses: np.ndarray) -> None:
        """`step` batches are done, `losses` those of the latest."""
        now = time.monotonic()
        if self.since is not None:
            self.tokens += (step - self.step) * self.settings.batch * self.settings.length
            self.seconds += now - self.since
        self.since, self.step, self.loss = now, step, float(np.mean(losses))
        self.progress.update(self.task, completed=step, description=self.text())

    def validated(self, loss: float) -> None:
        self.validation, self.since = loss, time.monotonic()
        if not self.console.is_terminal:
            print(f"step {self.step}/{self.settings.steps}  {self.text()}{self.left()}", flush=True)

    def text(self) -> str:
        rate = f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else "compiled"
        validation = "" if np.isnan(self.validation) else f" (val {self.validation:.3f})"
        return f"loss {self.loss:.3f}{validation}  {rate}  {self.backend}"

    def left(self) -> str:
        if not self.tokens:
            return ""
        steps = self.settings.steps - self.step
        each = self.seconds / self.tokens * self.settings.batch * self.settings.length
        return f"  {steps * each:.0f} s left" if steps else ""


def write_losses(path: Path, losses: np.ndarray, validation: np.ndarray) -> None:
    rows = [
        f"{i + 1},{a:.9g},{'' if np.isnan(b) else f'{b:.9g}'}"
        for i, (a, b) in enumerate(zip(losses, validation, strict=True))
    ]
    path.write_text("\n".join(["step,training,validation", *rows]) + "\n")


def draw(
    path: Path, losses: np.ndarray, validation: np.ndarray, unigram: float, title: str
) -> None:
    """Both losses and the entropy that a model without context cannot go below, as PNG."""
    from matplotlib.figure import Figure  # not pyplot, which takes a second to import
    from matplotlib.ticker import MaxNLocator

    steps = np.arange(1, len(losses) + 1)
    width = max(1, len(losses) // 50)
    smooth = [losses[max(0, i - width) : i].mean() for i in steps]
    measured = ~np.isnan(validation)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color="C0", label="training")
    axes.plot(
        steps[measured], validation[measured], "o-", color="C1", label="validation", clip_on=False
    )
    axes.axhline(unigram, color="0.3", linestyle="--", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.annotate(
        f"unigram entropy {unigram:.2f}",
        (1, unigram),
        (0, 4),
        ha="right",
        color="0.3",
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
    )
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title=title, xlim=(0, len(losses)))
    axes.set_ylim(0, None)
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
