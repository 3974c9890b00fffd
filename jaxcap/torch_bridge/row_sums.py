"""Row by row products of two `[B, T, N, V]` tensors as `[B, N, T]` float32, in one pass over memory.

This is delta = sum(out * d_out) of the backward pass, which XLA fuses and PyTorch's own operations would
go over memory five times for.
"""

from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 32


@triton.jit
def _kernel(x, y, out, length, heads, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tiles = tl.cdiv(length, ROWS)
    place = tl.program_id(0)
    batch_head, tile = place // tiles, place % tiles
    batch, head = batch_head // heads, batch_head % heads
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = batch.to(tl.int64) * length + row
    at = (token[:, None] * heads + head) * size + column[None, :]
    inside = (row < length)[:, None] & (column < size)[None, :]
    left = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    where = batch_head.to(tl.int64) * length + row
    tl.store(out + where, tl.sum(left * right, axis=1), mask=row < length)


def row_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """sum(x * y, -1) of contiguous `[B, T, N, V]`, as contiguous `[B, N, T]` float32."""
    batch, length, heads, size = x.shape
    out = torch.empty((batch, heads, length), dtype=torch.float32, device=x.device)
    grid = (batch * heads * triton.cdiv(length, ROWS),)
    columns = triton.next_power_of_2(size)
    sizes: dict[str, Any] = {"ROWS": ROWS, "COLUMNS": columns}
    _kernel[grid](x, y, out, length, heads, size, **sizes)
    return out
