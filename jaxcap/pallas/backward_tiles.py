"""Tiles of 16-bit operands in shared memory, and the products that read them.

Where the number of rows is a multiple of 8 and the head sizes of 64, a tile is copied whole. Else it lies
and is copied in chunks of 64 columns, which TMA clips and fills with zeros at any row and column, and the
products go chunk by chunk (2% slower: causal 8190 beside 8192 on one H200, 2026-11-30, 5.36 and 5.26 ms).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcap.pallas.backward_plan import WIDTH, Plan

F32, i32 = jnp.float32, jnp.int32
WGMMA = plgpu.Layout.WGMMA
SWIZZLE = plgpu.SwizzleTransform(128)
TILED16 = (plgpu.TilingTransform((8, WIDTH)), SWIZZLE)
TILED32 = (plgpu.TilingTransform((8, 32)), SWIZZLE)


class Tile:
    """[rows, size] 16-bit values, whole or as [size / 64, rows, 64]; `stage` picks one of several."""

    def __init__(self, plan: Plan, ref: Any, size: int, stage: Any = None):
        self.plan, self.ref, self.size, self.stage = plan, ref, size, stage
        self.chunks = 1 if plan.whole else size // WIDTH

    @staticmethod
    def scratch(plan: Plan, rows: int, size: int, stages: int | None = None) -> Any:
        lead = () if stages is None else (stages,)
        if plan.whole:
            return plgpu.SMEM((*lead, rows, size), plan.dtype, transforms=TILED16)
        shape = (*lead, size // WIDTH, rows, WIDTH)
        return plgpu.RefUnion(
            plgpu.SMEM(shape, plan.dtype, transforms=(SWIZZLE,)),
            plgpu.SMEM(shape, plan.dtype, transforms=TILED16),
        )

    def __getitem__(self, stage: Any) -> "Tile":
        return Tile(self.plan, self.ref, self.size, stage)

    def _view(self, *index: Any, copied: bool = False) -> Any:
        ref = self.ref if self.plan.whole else self.ref[0 if copied else 1]
        at = (() if self.stage is None else (self.stage,)) + index
        return ref.at[at] if at else ref

    def load(self, source: Any, at: tuple, barrier: Any) -> None:
        """Begins to copy `source[at]`, `at` being (batch, rows, head); `chunks` arrivals."""
        if self.plan.whole:
            plgpu.copy_gmem_to_smem(source.at[at], self._view(), barrier)
            return
        for c in range(self.chunks):
            place = (*at, pl.ds(_traced(c * WIDTH), WIDTH))
            plgpu.copy_gmem_to_smem(source.at[place], self._view(c, copied=True), barrier)

    def store(self, rows: Any, target: Any, at: tuple) -> None:
        """Begins to copy the tile's `rows` to `target[at]`."""
        if self.plan.whole:
            plgpu.copy_smem_to_gmem(self._view(rows), target.at[at])
            return
        for c in range(self.chunks):
            place = (*at, pl.ds(_traced(c * WIDTH), WIDTH))
            plgpu.copy_smem_to_gmem(self._view(c, rows, copied=True), target.at[place])

    def write(self, rows: Any, value: Any) -> None:
        if self.plan.whole:
            self._view(rows)[...] = value
            return
        for c in range(self.chunks):
            self._view(c, rows)[...] = value[:, c * WIDTH : (c + 1) * WIDTH]

    def columns(self, first: int) -> Any:
        """All rows of 64 columns."""
        if self.plan.whole:
            return self._view(slice(None), pl.ds(first, WIDTH))
        return self._view(first // WIDTH)

    def rows_of(self, rows: Any) -> list[Any]:
        """The `rows`, one reference a chunk."""
        if self.plan.whole:
            return [self._view(rows)]
        return [self._view(c, rows) for c in range(self.chunks)]

    def keep_rows(self, first: Any, kept: Any) -> None:
        """Zeroes 64 rows from `first` on where `kept` [64] is False: they may hold NaN."""
        for c in range(self.size // WIDTH):
            rows = pl.ds(first, 64)
            if self.plan.whole:
                part = self._view(rows, pl.ds(c * WIDTH, WIDTH))
            else:
                part = self._view(c, rows)
            x = plgpu.load(part, layout=WGMMA)
            mask = lax.broadcast_in_dim(kept, x.shape, [0])
            part[...] = jnp.where(mask, x, jnp.zeros_like(x))


def _traced(x: int) -> Any:
    """x as a value, so that a slice may reach over the end of an array (TMA clips it)."""
    return lax.add(i32(x), i32(0))


def over_head(acc: Any, a: Tile, rows: Any, b: Tile) -> int:
    """acc += A[rows] B^T, begun; returns the number of wgmma groups."""
    everything = pl.ds(0, b.plan.config.block_q)
    pairs = list(zip(a.rows_of(rows), b.rows_of(everything), strict=True))
    for a_part, b_part in pairs:
        plgpu.wgmma(acc, a_part, b_part.transpose((1, 0)))
    return len(pairs)


def to_head(acc: Any, a: Any, b: Tile) -> int:
    """acc += A B for A in registers, begun; returns the number of wgmma groups."""
    parts = b.rows_of(pl.ds(0, b.plan.config.block_q))
    if len(parts) == 1:
        plgpu.wgmma(acc, a, parts[0])
    else:
        for c, part in enumerate(parts):
            plgpu.wgmma(acc.at[:, pl.ds(c * WIDTH, WIDTH)], a, part)
    return len(parts)


def zeros(shape: tuple[int, int]) -> Any:
    return plgpu.layout_cast(jnp.zeros(shape, F32), WGMMA)
