"""What one GPU takes for whole calls and for the hops of a ring: what calibrates `scaling_model`.

A zigzag ring of P devices gives each two chunks of c = T / 2P tokens. Its first hop is causal, 2c
queries against 2c keys; each later one is full, 2c queries against c keys or c against 2c. A hop is
a part of a call: results in float32, the gradient of the queries added to a sum where a backend does
that itself, and blocks that do not wait for a multiprocessor of their own.
"""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

CHUNKS = (16384, 4096, 1024, 32768, 8192, 2048, 512)  # the most telling first
HEADS, KV_HEADS, HEAD_SIZE, SOFTCAP = 32, 8, 128, 50.0
PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of a kernel on bfloat16, batch 1."""

    queries: int
    keys: int
    causal: bool
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_size: int = HEAD_SIZE
    hop: bool = False

    @property
    def pairs(self) -> int:
        square = self.queries * (self.queries + 1) // 2
        return square if self.causal else self.queries * self.keys

    def flops(self, name: str) -> float:
        """Two products of the forward, five of the backward."""
        return (4.0 if name == "forward" else 10.0) * self.heads * self.head_size * self.pairs


def shapes(chunks: Sequence[int] = CHUNKS) -> Iterator[Shape]:
    """The three hops of each chunk and whole calls; one of them is what 8 devices' all-to-all leaves."""
    for c in chunks:
        yield Shape(2 * c, 2 * c, True)
        yield Shape(2 * c, c, False, hop=True)
        yield Shape(c, 2 * c, False, hop=True)
        yield Shape(2 * c, 2 * c, True, hop=True)
        yield Shape(c, c, False)
    whole = 4 * max(chunks)
    yield Shape(whole, whole, True, HEADS // 8, KV_HEADS // 8)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table; `ms` is the median of bursts without a pause: sustained."""

    queries: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int
    head_size: int
    hop: bool
    passes: str
    ms: float
    tflops: float


def _programs(shape: Shape, backend: str, dtype: str) -> tuple[Callable, Callable]:
    """Compiled forward (q, k, v) -> (out, lse) and backward (q, k, v, out, lse, d_out) -> gradients."""
    import jax
    import jax.numpy as jnp

    from jaxcap import device, fragments, selection
    from jaxcap.spec import AttentionSpec, Operands, QuerySum

    chosen: Any = selection.backends()[backend]
    spec = AttentionSpec(
        1,
        shape.queries,
        shape.keys,
        shape.heads,
        shape.kv_heads,
        shape.head_size,
        shape.head_size,
        dtype,
        scale=shape.head_size**-0.5,
        softcap=SOFTCAP,
        is_causal=shape.causal,
        gradients=("query", "key", "value"),
        platform=device.platform(),
        partial=shape.hop and getattr(chosen, "wide", False),
        beside_transfers=shape.hop,
    )

    def forward(q, k, v):
        return chosen.forward(spec, Operands(q, k, v))

    def backward(q, k, v, out, lse, d_out, *query_sum):
        found = chosen.backward(asked, Operands(q, k, v), out, lse, d_out, None, *query_sum)
        return found.query, found.key, found.value

    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    q = array((1, shape.queries, shape.heads, shape.head_size))
    k = array((1, shape.keys, shape.kv_heads, shape.head_size))
    # In a ring the backward's output is the sum of the parts, in the caller's dtype.
    out, lse = q, jax.eval_shape(forward, q, k, k)[1]
    given, asked, total = (q, k, k, out, lse, q), spec, None
    if shape.hop and hasattr(chosen, "query_factor"):
        asked = spec.replace(query_sum=QuerySum(0, chosen.query_factor(spec)))
        total = jax.ShapeDtypeStruct(fragments.sum_shape(spec), jnp.float32)
        given = (*given, total)
    run = jax.jit(backward, donate_argnums=range(6, len(given))).lower(*given).compile()
    return jax.jit(forward).lower(q, k, k).compile(), run if total is None else _adding(run, total)


def _adding(run: Callable, total: Any) -> Callable:
    """`run` without its last argument: the sum that it was given the last time, and has added to."""
    import jax.numpy as jnp

    held = []

    def call(*arrays):
        found = run(*arrays, held.pop() if held else jnp.zeros(total.shape, total.dtype))
        held.append(found[0])
        return found

    return call


def _time(call: Callable, seconds: float, rounds: int) -> float:
    """Seconds a call: the median of `rounds` bursts without a pause."""
    import jax

    jax.block_until_ready(call())
    begin = time.perf_counter()
    jax.block_until_ready(call())
    count = max(1, min(500, int(seconds / max(time.perf_counter() - begin, 1e-6))))
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(count):
            results = call()
        jax.block_until_ready(results)
        taken.append((time.perf_counter() - begin) / count)
    return statistics.median(taken)


def programs(
    chosen: Sequence[Shape],
    backend: str = "pallas",
    dtype: str = "bfloat16",
    workers: int = 12,
) -> list[tuple[Callable, Callable]]:
    """All of them before the first is timed: compiling needs the processor that launches."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_programs, shape, backend, dtype) for shape in chosen]
        return [future.result() for future in futures]


def measure(
    chosen: Sequence[Shape],
    compiled: Sequence[tuple[Callable, Callable]],
    *,
    dtype: str = "bfloat16",
    seconds: float = 0.2,
    rounds: int = 3,
    deadline: float = float("inf"),
    progress: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Two rows a shape, as they come.

    Past `deadline`, a `time.monotonic()`, the shapes that are left are left out.
    """
    import jax

    for shape, (forward, backward) in zip(chosen, compiled, strict=True):
        if time.monotonic() > deadline:
            progress(f"out of time: {shape} and what follows are left out")
            return
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = ((shape.queries, shape.heads), *((shape.keys, shape.kv_heads),) * 2)
        q, k, v, d_out = (
            jax.random.normal(key, (1, *size, shape.head_size), dtype)
            for key, size in zip(keys, (*sizes, sizes[0]), strict=True)
        )
        out, lse = forward(q, k, v)
        calls = (
            functools.partial(forward, q, k, v),
            functools.partial(backward, q, k, v, out.astype(dtype), lse, d_out),
        )
        for name, call in zip(PASSES, calls, strict=True):
            taken = _time(call, seconds, rounds)
            yield Row(
                **dataclasses.asdict(shape),
                passes=name,
                ms=taken * 1e3,
                tflops=shape.flops(name) / taken / 1e12,
            )
