"""What one GPU takes for the hops of a ring: the figures that calibrate `scaling_model`.

A zigzag ring of P devices gives each two chunks of c = T / 2P tokens. Its first hop is causal, 2c
queries against 2c keys; each later one is full, 2c queries against c keys or c against 2c.
"""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

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

    @property
    def pairs(self) -> int:
        square = self.queries * (self.queries + 1) // 2
        return square if self.causal else self.queries * self.keys

    def flops(self, name: str) -> float:
        """Two products of the forward, five of the backward."""
        return (4.0 if name == "forward" else 10.0) * self.heads * self.head_size * self.pairs


def shapes(chunks: Iterable[int] = CHUNKS) -> Iterator[Shape]:
    """The three hops of each chunk, then what an all-to-all over 8 devices leaves of 128k tokens."""
    for c in chunks:
        yield Shape(2 * c, c, False)
        yield Shape(c, 2 * c, False)
        yield Shape(2 * c, 2 * c, True)
    yield Shape(131072, 131072, True, HEADS // 8, KV_HEADS // 8)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table; `ms` is the median of bursts without a pause: sustained."""

    queries: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int
    head_size: int
    passes: str
    ms: float
    tflops: float


def _programs(shape: Shape, backend: str, dtype: str) -> tuple[Callable, Callable]:
    """Compiled forward (q, k, v) -> (results, pull) and backward (pull, results) -> gradients."""
    import jax

    import jaxcap

    attend = functools.partial(
        jaxcap.dot_product_attention,
        softcap=SOFTCAP,
        is_causal=shape.causal,
        return_residual=True,
        implementation=backend,
    )

    def forward(q, k, v):
        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, lse, pull

    def backward(pull, out, lse):
        return pull((out, lse))

    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    q = array((1, shape.queries, shape.heads, shape.head_size))
    k = array((1, shape.keys, shape.kv_heads, shape.head_size))
    lowered = jax.jit(forward).lower(q, k, k)
    out, lse, pull = jax.eval_shape(forward, q, k, k)
    return lowered.compile(), jax.jit(backward).lower(pull, out, lse).compile()


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


def measure(
    chosen: Iterable[Shape],
    *,
    backend: str = "pallas",
    dtype: str = "bfloat16",
    seconds: float = 0.1,
    rounds: int = 3,
    deadline: float = float("inf"),
    workers: int = 12,
    progress: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Two rows a shape, as they come.

    Past `deadline`, a `time.monotonic()`, the shapes that are left are left out.
    """
    import jax

    chosen = list(chosen)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_programs, shape, backend, dtype) for shape in chosen]
        # All of them before the first is timed: XLA tunes on the same GPU.
        compiled = [future.result() for future in futures]
    for shape, (forward, backward) in zip(chosen, compiled, strict=True):
        if time.monotonic() > deadline:
            progress(f"out of time: {shape} and what follows are left out")
            return
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = ((shape.queries, shape.heads), *((shape.keys, shape.kv_heads),) * 2)
        q, k, v = (
            jax.random.normal(key, (1, *size, shape.head_size), dtype)
            for key, size in zip(keys, sizes, strict=True)
        )
        out, lse, pull = forward(q, k, v)
        calls = (functools.partial(forward, q, k, v), functools.partial(backward, pull, out, lse))
        for name, call in zip(PASSES, calls, strict=True):
            taken = _time(call, seconds, rounds)
            yield Row(
                **dataclasses.asdict(shape),
                passes=name,
                ms=taken * 1e3,
                tflops=shape.flops(name) / taken / 1e12,
            )
