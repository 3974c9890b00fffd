"""What the backward kernel is compiled for, and which query tiles a thread block walks through."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcap.pallas.backward_config import BackwardConfig
from jaxcap.pallas.backward_scores import Scores

i32 = jnp.int32
#: Of Q, dO and dQ at work: 16 x 1k with 34 MB is faster than head by head, with 134 MB slower.
L2_BYTES = 36 * 2**20
WIDTH = 64  # columns of a chunk: 128 bytes, the swizzle


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that the kernel is compiled for."""

    config: BackwardConfig
    scores: Scores
    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    table: bool = False  # the query tiles of a KV tile come from memory
    empty_queries: bool = False  # rows that attend nothing may hold NaN
    deterministic: bool = False
    partial: bool = False  # dK and dV in float32
    first_tile: int = 0  # of 64 queries, in the sum of dQ
    multiprocessors: int = 132
    shared_rows: tuple[str, ...] = ()  # operands whose batch axis is 1

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def dtype(self) -> Any:
        return self.scores.dtype

    @property
    def result_dtype(self) -> Any:
        return jnp.dtype(jnp.float32) if self.partial else self.dtype

    @property
    def whole(self) -> bool:
        """Tiles are copied whole rather than in chunks of 64 columns."""
        sizes = (self.head_size, self.value_size)
        lengths = (self.query_length, self.key_length)
        return all(s % WIDTH == 0 for s in sizes) and all(n % 8 == 0 for n in lengths)

    @property
    def q_tiles(self) -> int:
        return -(-self.query_length // self.config.block_q)

    @property
    def kv_tiles(self) -> int:
        return -(-self.key_length // self.config.block_kv)

    @property
    def together(self) -> int:
        """How many KV heads take turns block by block: KV tile 0 of all starts first, then tile 1.

        So a causal grid ends with short blocks, not with a long one of its last head. As many as fill the
        multiprocessors, or more while their Q, dO and dQ stay in the L2.
        """
        if self.deterministic:  # blocks start in the order in which they add, see `ranks`
            return 1
        row = 6 * self.padded_head_size + 2 * self.padded_value_size
        cached = L2_BYTES / (self.query_length * self.group * row)
        wanted = max(1.0, self.multiprocessors / self.kv_tiles, cached)
        heads = self.batch * self.kv_heads
        most = min(heads, math.ceil(wanted**2))  # 1 is nearer than more
        divisors = [x for x in range(1, most + 1) if heads % x == 0]
        return min(divisors, key=lambda x: max(x / wanted, wanted / x))

    def block_at(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch entry, KV head and KV tile of the block that starts as the `number`-th."""
        together = self.together
        tile, one = divmod_by(number, together)
        turn, n = divmod_by(tile, self.kv_tiles)
        b, h = divmod_by(turn * together + one, self.kv_heads)
        return b, h, n

    @property
    def padded_queries(self) -> int:
        return self.q_tiles * self.config.block_q

    @property
    def padded_keys(self) -> int:
        return self.kv_tiles * self.config.block_kv

    @property
    def padded_head_size(self) -> int:
        return -(-self.head_size // WIDTH) * WIDTH

    @property
    def padded_value_size(self) -> int:
        return -(-self.value_size // WIDTH) * WIDTH

    @property
    def dq_shape(self) -> tuple[int, ...]:
        b, n, t, h = self.batch, self.query_heads, self.padded_queries, self.padded_head_size
        if self.config.dq == "red":
            return (b, n, t // 64, h // 8, 128, 4)
        return (b, n, t // 64, h // 4, 256)


def divmod_by(x: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and rest, of x >= 0."""
    quotient = lax.div(x, i32(divisor))
    return quotient, x - quotient * divisor


class Walk:
    """The query tiles of KV tile `n` of batch entry `b`: `total` steps over heads and tiles."""

    def __init__(self, plan: Plan, refs: dict[str, Any], b: Any, n: Any):
        self.plan, self.n = plan, n
        bm, bn = plan.config.block_q, plan.config.block_kv
        if plan.table:
            # + 0: what is read varies over a mesh's axes, what is computed here does not, for JAX's types.
            spans = [refs["spans"][b, n, x] + 0 for x in range(4)]
            self.first, self.end, self.full_from, self.full_to = spans
        else:
            low, high = plan.scores.band
            self.first, self.end = i32(0), i32(plan.q_tiles)
            if high is not None:
                least = n * bn - high
                self.first = lax.div(jnp.maximum(least, 0), i32(bm))
            if low is not None:
                last = jnp.minimum((n + 1) * bn, plan.key_length) - 1 - low
                self.end = jnp.clip(lax.div(last + bm, i32(bm)), 0, plan.q_tiles)
                self.end = jnp.where(last < 0, 0, self.end)
        self.tiles = jnp.maximum(self.end - self.first, 0)
        self.total = self.tiles * plan.group

    @property
    def start(self) -> tuple[Any, Any]:
        """Query head within the group, and query tile, of the first step."""
        return i32(0), self.first

    def after(self, at: tuple[Any, Any]) -> tuple[Any, Any]:
        """The same of the next step: dividing its number by `tiles` in every step costs up to 6%."""
        g, i = at
        if self.plan.group == 1:
            return g, i + 1
        last = i + 1 == self.end
        return jnp.where(last, g + 1, g), jnp.where(last, self.first, i + 1)

    def each(self, body: Callable[[Any, tuple[Any, Any]], None]) -> None:
        """body(j, at) for every step."""

        def step(j, at):
            body(j, at)
            return self.after(at)

        lax.fori_loop(i32(0), self.total, step, self.start)

    def partial(self, i: Any, row: Any, rows: int) -> Any:
        """Whether tile `i` needs its masks for keys `row` to `row + rows` of the KV tile; None: never."""
        plan = self.plan
        if not plan.scores.masks:
            return None
        if plan.table:
            return (i < self.full_from) | (i >= self.full_to)
        bm, bn = plan.config.block_q, plan.config.block_kv
        low, high = plan.scores.band
        k0, q0 = self.n * bn + row, i * bm
        tests = []
        if high is not None:
            tests.append(k0 + rows - 1 - q0 > high)
        if low is not None:
            tests.append(k0 - (q0 + bm - 1) < low)
        if plan.scores.dead_keys:
            tests.append((self.n + 1) * bn > plan.key_length)
        return functools.reduce(jnp.logical_or, tests)
