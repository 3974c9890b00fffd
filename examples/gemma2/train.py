"""Trains a Gemma-2-shaped model on text, byte by byte: `python -m examples.gemma2.train`.

It resumes after a kill, with the losses that an uninterrupted run would have had (to the last bit on
a CPU). On a GPU the same command trains a larger model, in bfloat16, on the best backend there is.
"""

import argparse
import contextlib
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import data, report
from .checkpoint import Run, State, abstract, optimizer
from .generate import continue_text
from .model import Gemma2
from .settings import Settings, add_flags, from_flags, given, resumed

Array = jax.Array
PROMPT = "The "


def loss_function(graph: nnx.GraphDef) -> Callable[[Any, Array], Array]:
    """Mean cross-entropy in nats of the bytes of windows [B, T + 1] but the first."""

    def loss(parameters: Any, windows: Array) -> Array:
        model: Gemma2 = nnx.merge(graph, parameters)
        logits, _ = model(windows[:, :-1])
        chosen = jnp.take_along_axis(logits, windows[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return loss


@functools.cache
def programs(settings: Settings) -> tuple[Callable, Callable]:
    """`step(state, windows)`: the new state and the batch's loss; `validate(parameters, windows)`."""
    loss, adamw = loss_function(abstract(settings.config)[0]), optimizer(settings)

    def step(state: State, windows: Array) -> tuple[State, Array]:
        value, gradients = jax.value_and_grad(loss)(state.parameters, windows)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            updates, moments = adamw.update(gradients, state.optimizer, state.parameters)
            parameters = optax.apply_updates(state.parameters, updates)
        losses = state.losses.at[state.step].set(value)
        return State(parameters, moments, state.step + 1, losses, state.validation), value

    return jax.jit(step, donate_argnums=0), jax.jit(loss)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into a step or a checkpoint; a second one breaks."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            signal.default_int_handler(number, frame)
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def train(run: Run, settings: Settings, text: data.Text, *, devices: int = 1) -> State:
    """Trains from the newest checkpoint to the last step.

    Raises KeyboardInterrupt after Ctrl-C, with a checkpoint of the step that was under way.
    """
    mesh = jax.make_mesh(
        (devices,), ("batch",), (AxisType.Auto,), devices=jax.local_devices()[:devices]
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("batch"))

    step, validate = programs(settings)
    held_out = data.windows(text.validation, settings.length, at_most=64)
    held_out = jax.device_put(held_out, everywhere if len(held_out) % devices else split)

    with run.manager() as manager, interruptible() as stop:
        state = jax.device_put(run.restore(manager, settings), everywhere)
        done = int(state.step)
        if done == settings.steps:
            print("this run is complete; `make demo ARGS=--fresh` trains anew")
            return state
        if done:
            print(f"resuming after step {done}")
        recent: list[Array] = []
        with report.Bar(settings, done, report.backend(settings)) as bar:
            while done < settings.steps:
                windows = data.batch(
                    text.train, settings.seed, done, settings.batch, settings.length
                )
                state, value = step(state, jax.device_put(windows, split))
                recent = [*recent[-19:], value]
                done += 1
                checkpoint = done % settings.checkpoint_every == 0 or done == settings.steps
                if checkpoint or bar.due():
                    bar.show(done, np.stack(jax.device_get(recent)))
                if checkpoint:
                    value = validate(state.parameters, held_out)
                    state = state._replace(validation=state.validation.at[done - 1].set(value))
                    bar.validated(float(value))
                if checkpoint or stop.is_set():
                    run.save(manager, state)
                if stop.is_set():
                    raise KeyboardInterrupt
    return state


def finish(run: Run, settings: Settings, text: data.Text, state: State) -> None:
    """Writes table, picture and sample, and says how good the model became."""
    losses, validation = np.asarray(state.losses), np.asarray(state.validation)
    unigram = text.unigram_entropy
    report.write_losses(run.folder / "losses.csv", losses, validation)
    title = f"Gemma 2 with {settings.config.parameters:,} parameters on {text.name}"
    report.draw(run.folder / "loss.png", losses, validation, unigram, title)
    parameters = jax.device_put(state.parameters, jax.local_devices()[0])
    sample = continue_text(settings.config, parameters, PROMPT, 400, seed=settings.seed)
    (run.folder / "sample.txt").write_text(sample + "\n")
    print(f"\nA sample, continuing {PROMPT!r}:\n\n{sample}\n")
    final = float(validation[-1])
    print(
        f"validation loss {final:.3f} nats a byte ({final / math.log(2):.2f} bits); the unigram"
        f" entropy of the text is {unigram:.3f} ({unigram / math.log(2):.2f} bits)"
    )
    print(f"written to {run.folder}: loss.png, losses.csv, sample.txt, checkpoints")
    where = "" if str(run.folder) == "runs/gemma2" else f" --out {run.folder}"
    print(f'more: {sys.executable} -m examples.gemma2.generate "The with statement"{where}')


def prepare(flags: argparse.Namespace) -> tuple[Run, Settings, data.Text]:
    """The run that the flags mean: the folder's if they agree with it, else a new one."""
    run, wishes = Run(flags.out), given(flags)
    saved = None if flags.fresh else run.settings
    text = data.load(flags.data or (saved.data if saved else None))
    if saved is not None:
        return run, resumed(saved, wishes, text), text
    settings = from_flags(wishes, text)
    data.batch(text.train, 0, 0, 1, settings.length)
    report.backend(settings)
    run.start(settings)
    return run, settings, text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.gemma2.train", description=__doc__)
    add_flags(parser)
    parser.add_argument("--out", default="runs/gemma2", metavar="FOLDER", type=Path)
    parser.add_argument("--fresh", action="store_true", help="start anew, deleting what is there")
    parser.add_argument("--devices", type=int, metavar="N", help="to split batches over")
    flags = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        run, settings, text = prepare(flags)
        devices = flags.devices or (
            math.gcd(settings.batch, jax.local_device_count())
            if jax.default_backend() == "gpu"
            else 1
        )
        if devices < 1 or devices > jax.local_device_count() or settings.batch % devices:
            raise ValueError(
                f"--devices must be at most {jax.local_device_count()} and divide the batch of"
                f" {settings.batch}, got {devices}"
            )
    except ValueError as error:
        parser.error(str(error))

    c = settings.config
    print(
        f"{text.name}: {len(text.train):,} bytes to train on, {len(text.validation):,} to validate;"
        f" unigram entropy {text.unigram_entropy:.3f} nats a byte\n"
        f"{c.layers} layers of width {c.width}, {c.parameters:,} parameters, {c.dtype};"
        f" attention capped at {c.attention_softcap:g} on {report.backend(settings)}, logits at"
        f" {c.final_softcap:g}; {devices} x {jax.local_devices()[0].device_kind}",
        flush=True,
    )
    try:
        state = train(run, settings, text, devices=devices)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here")
        sys.exit(130)
    finish(run, settings, text, state)
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
