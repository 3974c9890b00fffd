"""Measures cells, in a process of its own: `python -m benchmarks.scaling_worker JOB.json`.

The job is {"lock": PATH} with "about": true, with "links": [devices, ...], with "hops": [part, parts],
with "training": flags, or with "cells": [...] and "seconds"; "first" is the device that meshes begin
with. Each line of the output is a JSON object: {"state": "compiling" | "waiting" | "running", "key":
...} says where it is, {"row": {...}}, {"link": {...}}, {"hop": {...}}, {"training": {...}} and
{"about": {...}} are results. A job's cells are all compiled before the first is run. Several of these
compile side by side; the locks let one at a time run on a device.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import scaling_links, scaling_rates, scaling_silence, scaling_training
from benchmarks.scaling_cells import Cell
from benchmarks.scaling_timing import alone, timed

COMPILERS = 3  # threads of a worker


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece, from any thread
    sys.stdout.flush()


@functools.cache
def introduce(mesh: Any) -> None:
    """One small collective of each sort over each axis: the first one of some GPUs takes seconds."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def meet(x):
        for axis in mesh.axis_names:
            size = jax.lax.axis_size(axis)
            x = jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])
            x = jax.lax.all_to_all(x, axis, 0, 0, tiled=True)
            x = jax.lax.all_gather(x, axis, tiled=True)
            x = jax.lax.psum_scatter(x, axis, tiled=True)
        return x

    split = PartitionSpec(mesh.axis_names)
    run = jax.jit(jax.shard_map(meet, mesh=mesh, in_specs=split, out_specs=split))
    jax.block_until_ready(run(jnp.ones(mesh.size**2)))


class Program(NamedTuple):
    mesh: Any
    call: Any  # compiled, as are the others
    draw: Any
    finite: Any
    compile_s: float


def mesh_of(cell: Cell, first: int) -> Any:
    import jax
    from jax.sharding import AxisType

    shape: tuple[int, ...] = (cell.devices,)
    axes: tuple[str, ...] = ("context",)
    if cell.exchange:
        shape, axes = (cell.devices // cell.exchange, cell.exchange), ("ring", "exchange")
    devices = jax.devices()[first : first + cell.devices]
    return jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes), devices=devices)


def program(cell: Cell, first: int) -> Program:
    """The compiled call, what makes its arguments, sharded, and what checks its results."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxcap

    begin = time.perf_counter()
    mesh = mesh_of(cell, first)
    axes = mesh.axis_names
    parallel = None
    if cell.kind != "one":
        layout: dict[str, Any] = {"kind": cell.kind, "load_balance": cell.load_balance}
        axis = axes if len(axes) > 1 else axes[0]
        parallel = jaxcap.ContextParallel(axis=axis, mesh=mesh, **layout)
    attend = functools.partial(
        jaxcap.dot_product_attention,
        softcap=50.0,
        is_causal=cell.mask == "causal",
        implementation=cell.backend,
        context_parallel=parallel,
    )

    def forward(q, k, v, d_out):
        del d_out
        return (attend(q, k, v),)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    split = NamedSharding(mesh, PartitionSpec(None, axes))
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)

    @functools.partial(jax.jit, out_shardings=split)
    def draw():
        keys = jax.random.split(jax.random.key(0), 4)
        return tuple(
            jax.random.normal(key, (1, cell.tokens, n, cell.head_size), cell.dtype)
            for key, n in zip(keys, heads, strict=True)
        )

    @jax.jit
    def finite(results):
        return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in results]))

    arrays = [
        jax.ShapeDtypeStruct((1, cell.tokens, n, cell.head_size), cell.dtype, sharding=split)
        for n in heads
    ]
    call = jax.jit(forward if cell.passes == "forward" else both, out_shardings=split)
    compiled = call.lower(*arrays).compile()
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)
        for x in jax.tree.leaves(jax.eval_shape(call, *arrays))
    ]
    others = draw.lower().compile(), finite.lower(tuple(results)).compile()
    return Program(mesh, compiled, *others, time.perf_counter() - begin)


def attempt(function: Callable[[], Any]) -> Any:
    """Its result, or what it failed with: a cell's result, not the worker's end."""
    try:
        return function()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"[:300]}


def measure(cell: Cell, compiled: Program, seconds: float) -> dict[str, Any]:
    """Of one cell: milliseconds, and bytes a device."""
    if compiled.mesh.size > 1:  # not before: its transfers wait on devices that others are timed on
        introduce(compiled.mesh)
    arguments = compiled.draw()
    found = timed(functools.partial(compiled.call, *arguments), seconds)
    if not bool(compiled.finite(found.results)):
        raise FloatingPointError("a result is not finite")
    analysis = compiled.call.memory_analysis()
    names = ("argument", "output", "temp")
    return {
        "ms": found.seconds * 1e3,
        "spread": found.spread,
        "memory": sum(int(getattr(analysis, f"{name}_size_in_bytes")) for name in names),
        "compile_s": compiled.compile_s,
    }


def run(cells: list[Cell], lock: str, seconds: float, first: int) -> None:
    """All of them compiled, then all of them measured, by when nobody else is on their devices."""

    def compiled(cell: Cell) -> Any:
        say(state="compiling", key=cell.key)
        return attempt(lambda: program(cell, first))

    # Compiling must not slow what another worker measures.
    with concurrent.futures.ThreadPoolExecutor(COMPILERS, initializer=lambda: os.nice(10)) as pool:
        programs = list(pool.map(compiled, cells))
    say(state="waiting", key=cells[0].key)
    most = max(cell.devices for cell in cells)
    with alone(lock, range(first, first + most)):
        for cell, made in zip(cells, programs, strict=True):
            say(state="running", key=cell.key)
            failed = isinstance(made, dict)
            row = made if failed else attempt(lambda c=cell, m=made: measure(c, m, seconds))
            say(row={"key": cell.key, **row})


def about() -> dict[str, Any]:
    """Devices and versions."""
    import jax

    from jaxcap.bench.report import versions

    return {
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "cores": os.cpu_count(),
    }


def hops(part: int, parts: int, lock: str, first: int, options: dict[str, Any]) -> None:
    """Every so many of the kernels alone."""
    import jax

    say(state="compiling", key="kernels")
    jax.config.update("jax_default_device", jax.devices()[first])  # of the threads that compile too
    chunks = options.pop("chunks", scaling_rates.CHUNKS)
    chosen = list(scaling_rates.shapes(chunks))[part::parts]
    compiled = scaling_rates.programs(chosen, **options)
    say(state="waiting", key="kernels")
    with alone(lock, [first]):
        timing = {"dtype": options["dtype"]} if "dtype" in options else {}
        for row in scaling_rates.measure(chosen, compiled, **timing):
            say(state="running", key="kernels", hop=dataclasses.asdict(row))


def main() -> None:
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if job.get("about"):
        say(about=about())
    for devices in job.get("links", ()):
        say(state="running", key=f"links of {devices}")
        for row in scaling_links.measure(
            devices, job["lock"], job.get("sizes", scaling_links.SIZES)
        ):
            say(link=row)
    first = job.get("first", 0)
    if "hops" in job:
        part, parts = job["hops"]
        hops(part, parts, job["lock"], first, job.get("hop_options", {}))
    if "training" in job:
        say(state="compiling", key="training")
        words = [*job["training"], *job.get("training_options", [])]
        say(training=attempt(lambda: scaling_training.measure(words, job["lock"])), words=words)
    cells = [Cell(**cell) for cell in job.get("cells", ())]
    if any(cell.silent for cell in cells):
        scaling_silence.silence()
    if cells:
        run(cells, job["lock"], job["seconds"], first)


if __name__ == "__main__":
    main()
