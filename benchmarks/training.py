"""A training step of the example's model with the cap on two backends, and without one: what a cap costs.

    python -m benchmarks.training

The `small` model of examples/gemma2 in bfloat16, at the batches that `make demo` trains it on and at longer
windows. All in one process by turns, so that the products around attention are the same programs;
forward, backward and AdamW count. cuDNN cannot cap, so it is measured without. The median round is
printed, with its spread.

The layers are unrolled. In a loop over layers (`--scan-layers`, which the preset has) the GPU also copies
what the backward needs into arrays of all layers and back, some 220 copies a step.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import statistics

# Beside other processes that measure by turns.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from examples.gemma2 import data
from examples.gemma2.checkpoint import initial
from examples.gemma2.settings import Settings, from_flags
from examples.gemma2.train import programs
from jaxcap.bench import report
from jaxcap.bench.measure import turn
from jaxcap.bench.turns import Work, by_turns

#: Backend and whether with the model's cap of 50.
VARIANTS = (("pallas", True), ("xla", True), ("pallas", False), ("cudnn", False))


def settings(text: data.Text, backend: str, capped: bool, batch: int, length: int, **sizes):
    """Of the preset `small` with its layers unrolled, or what `sizes` change in it."""
    flags = {"preset": "small", "scan_layers": False, "steps": 100_000}
    flags |= {"batch": batch, "length": length}
    found = from_flags({**flags, "backend": backend, **sizes}, text)
    cap = found.config.attention_softcap if capped else 0.0
    return dataclasses.replace(found, config=found.config.replace(attention_softcap=cap))


def runner(chosen: Settings, text: data.Text) -> Work:
    """Steps on one batch."""
    step, _ = programs(chosen)
    state = initial(chosen)
    windows = jnp.asarray(data.batch(text.train, 0, 0, chosen.batch, chosen.length))
    state, _ = step(state, windows)
    jax.block_until_ready(state)

    def launch() -> jax.Array:
        nonlocal state
        state, loss = step(state, windows)
        return loss

    return Work(launch, jax.block_until_ready)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    add = parser.add_argument
    add("--batches", default="32x512,4x4096", metavar="BxT,BxT")
    add("--variants", metavar="NAME+cap,NAME", help="of backends; all four")
    add("--layers", type=int, metavar="N", help="of another model")
    add("--scan-layers", action="store_true", help="in a loop, see above")
    add("--data", metavar="FILE", help="any text (default: Python's documentation topics)")
    add("--rounds", type=int, default=5)
    add("--burst", type=float, default=0.4, metavar="S", help="seconds of one burst; 0.4")
    add("--lock", type=pathlib.Path, metavar="FILE", help="by turns with processes that name it")
    add("--json", type=pathlib.Path, metavar="FILE", help="write rows there")
    flags = parser.parse_args(arguments)
    variants = VARIANTS
    if flags.variants is not None:
        variants = tuple(
            (x.removesuffix("+cap"), x.endswith("+cap")) for x in flags.variants.split(",")
        )
    sizes: dict[str, int | bool] = {"scan_layers": flags.scan_layers}
    if flags.layers is not None:
        sizes["layers"] = flags.layers
    text = data.load(flags.data)
    prepared: dict[tuple[int, int], dict[str, concurrent.futures.Future]] = {}
    with turn(flags.lock, alone=False), concurrent.futures.ThreadPoolExecutor() as pool:
        for shape in flags.batches.split(","):
            batch, length = map(int, shape.split("x"))
            chosen = [settings(text, *v, batch, length, **sizes) for v in variants]
            names = (f"{name}, {'capped' if cap else 'without a cap'}" for name, cap in variants)
            # XLA compiles them side by side.
            started = (pool.submit(runner, x, text) for x in chosen)
            prepared[batch, length] = dict(zip(names, started, strict=True))
    rows = []
    for (batch, length), ready in prepared.items():
        runners = {name: program.result() for name, program in ready.items()}
        with turn(flags.lock):
            turns = by_turns(runners, flags.rounds, flags.burst)
        print(f"{batch} x {length} bytes a step:")
        for name, taken in turns.items():
            ms = sorted(1e3 * x.seconds for x in taken)
            middle = statistics.median(ms)
            rate = f"{1e3 * batch * length / middle:,.0f} tokens/s"
            print(
                f"  {name:24s} {middle:8.2f} ms ({ms[0]:.2f} to {ms[-1]:.2f})  {rate}", flush=True
            )
            row = {"batch": batch, "length": length, "scan_layers": flags.scan_layers}
            rows.append({**row, "attention": name, "ms": ms})
    if flags.json is not None:
        flags.json.write_text(
            json.dumps({"versions": report.versions(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
