"""Measures cells, in a process of its own: `python -m benchmarks.scaling_worker JOB.json`.

The job is {"lock": PATH} with "about": true, with "links": [devices, ...], or with "cells": [...] and
"seconds". Each line of the output is a JSON object: {"state": "compiling" | "waiting" | "running",
"key": ...} says where it is, {"row": {...}}, {"link": {...}} and {"about": {...}} are results. Several
of these compile side by side; the lock lets one run at a time.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import scaling_silence
from benchmarks.scaling_cells import Cell

#: A call longer than this is not repeated, nor run once before it counts.
LONG_S = 4.0


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """While no other worker runs; the lock of a worker that is killed is free at once."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(call: Callable[[], Any], seconds: float) -> tuple[float, Any]:
    """Seconds a call, and results: of a burst after one that warms up, or of one call if it is long."""
    import jax

    def run(count: int) -> tuple[float, Any]:
        begin = time.perf_counter()
        for _ in range(count):
            results = call()
            if virtual:  # few threads stand in for many devices: calls under way would starve
                jax.block_until_ready(results)
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / count, results

    virtual = jax.default_backend() == "cpu"
    first, results = run(1)
    if first > LONG_S:
        return first, results
    del results
    again, results = run(1)
    count = min(100, int(seconds / max(again, 1e-6)))
    if count < 2:
        return again, results
    del results
    return run(count)


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


def program(cell: Cell) -> tuple[Any, Callable[[], Any]]:
    """The compiled call, and a function that makes its arguments, sharded."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import jaxcap

    shape: tuple[int, ...] = (cell.devices,)
    axes: tuple[str, ...] = ("context",)
    if cell.exchange:
        shape, axes = (cell.devices // cell.exchange, cell.exchange), ("ring", "exchange")
    devices = jax.devices()[: cell.devices]
    mesh = jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes), devices=devices)
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
        return attend(q, k, v)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    split = NamedSharding(mesh, PartitionSpec(None, axes))
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)

    def draw():
        if cell.devices > 1:
            introduce(mesh)
        return drawn()

    @functools.partial(jax.jit, out_shardings=split)
    def drawn():
        keys = jax.random.split(jax.random.key(0), 4)
        return tuple(
            jax.random.normal(key, (1, cell.tokens, n, cell.head_size), cell.dtype)
            for key, n in zip(keys, heads, strict=True)
        )

    arrays = [
        jax.ShapeDtypeStruct((1, cell.tokens, n, cell.head_size), cell.dtype, sharding=split)
        for n in heads
    ]
    call = forward if cell.passes == "forward" else both
    return jax.jit(call, out_shardings=split).lower(*arrays).compile(), draw


def measure(cell: Cell, lock: str, seconds: float) -> dict[str, Any]:
    """Of one cell: milliseconds, bytes a device, or the error that it ended with."""
    import jax
    import jax.numpy as jnp

    say(state="compiling", key=cell.key)
    begin = time.perf_counter()
    try:
        compiled, draw = program(cell)
        compiling = time.perf_counter() - begin
        say(state="waiting", key=cell.key)
        with alone(lock):
            say(state="running", key=cell.key)
            arguments = draw()
            taken, results = timed(functools.partial(compiled, *arguments), seconds)
            finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(results))
            del arguments, results
        if not finite:
            raise FloatingPointError("a result is not finite")
    except Exception as error:  # the cell's result, not the worker's end
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return {"key": cell.key, "error": f"{type(error).__name__}: {lines[0]}"[:300]}
    analysis = compiled.memory_analysis()
    names = ("argument", "output", "temp")
    memory = sum(getattr(analysis, f"{name}_size_in_bytes") for name in names)
    return {"key": cell.key, "ms": taken * 1e3, "memory": int(memory), "compile_s": compiling}


#: Bytes a device, of the collectives' table.
LINK_SIZES = tuple(2**n for n in (20, 22, 24, 26, 28))


def links(devices: int, lock: str, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Seconds of each collective on arrays of `bytes` a device; a gather's is the shard."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    around = [(i, (i + 1) % devices) for i in range(devices)]
    one = functools.partial
    known = {
        "permute": one(jax.lax.ppermute, axis_name="x", perm=around),
        "gather": one(jax.lax.all_gather, axis_name="x", tiled=True),
        "scatter": one(jax.lax.psum_scatter, axis_name="x", tiled=True),
        "exchange": one(jax.lax.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True),
    }
    for name, collective in known.items():
        whole = PartitionSpec() if name == "gather" else PartitionSpec("x")
        run = jax.jit(
            jax.shard_map(
                collective, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=whole, check_vma=False
            )
        )
        for size in sizes:
            # A reduce-scatter starts from arrays of all shards.
            local = size // 4 * (devices if name == "scatter" else 1)
            with alone(lock):
                x = jax.device_put(
                    jnp.ones(local * devices, jnp.float32), NamedSharding(mesh, PartitionSpec("x"))
                )
                seconds, _ = timed(functools.partial(run, x), 0.02)
            yield {"collective": name, "devices": devices, "bytes": size, "us": seconds * 1e6}


def about() -> dict[str, Any]:
    """Devices and versions."""
    import jax

    from jaxcap.bench.report import versions

    return {
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def main() -> None:
    job = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if job.get("about"):
        say(about=about())
    for devices in job.get("links", ()):
        say(state="running", key=f"links of {devices}")
        for row in links(devices, job["lock"], tuple(job.get("sizes", LINK_SIZES))):
            say(link=row)
    cells = [Cell(**cell) for cell in job.get("cells", ())]
    if any(cell.silent for cell in cells):
        scaling_silence.silence()
    for cell in cells:
        say(row=measure(cell, job["lock"], job["seconds"]))


if __name__ == "__main__":
    main()
