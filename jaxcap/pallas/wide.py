"""Results in float32, of parts of a call: straight from the registers to global memory.

A tile of 16-bit results goes through shared memory, over operands that are not needed any more; in float32
it would need twice the room. Four lanes write 32 bytes of a row, which is a sector.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxcap.pallas import instructions as ins
from jaxcap.pallas.instructions import const


def _pairs(x: mgpu.FragmentedArray) -> list[ir.Value]:
    """Two float32 of neighbouring columns each, in the order (64 rows, 8 columns, row or row + 8)."""
    registers: Any = x.registers
    flat = list(registers.flat)
    if ir.VectorType(flat[0].type).shape[0] == 2:
        return flat
    pair, values = ir.VectorType.get((2,), ins.f32()), ins.scalars(x)
    return [vector.from_elements(pair, values[i : i + 2]) for i in range(0, len(values), 2)]


def store_rows(x: Any, ref: Any, batch: Any, first: Any, head: Any, layout: Any) -> None:
    """Writes x [64 m, n] float32 to ref[batch, first : first + 64 m, head] of [B, T, N, size], begun.

    `layout` is `Layout.WGMMA` or `ACC`. Rows and columns that `ref` does not have are left out.
    """
    _, length, heads, size = ref.shape
    tall, wide = x.shape[0] // 64, x.shape[1] // 8

    def body(ctx, x, ref, *place):
        del ctx
        batch, first, head = (v.registers[()] for v in place)
        row, column = ins.first_row_and_column()
        row = arith.addi(row, first)
        i64 = ir.IntegerType.get_signless(64)
        long = lambda value: arith.extsi(i64, value)
        times = lambda value, factor: arith.muli(value, arith.constant(i64, factor))
        base, pairs = utils.memref_ptr(ref), _pairs(x)
        start = arith.addi(times(long(batch), length * heads), long(head))
        start = arith.addi(times(start, size), long(column))
        for m in range(tall):
            for half in range(2):
                at = arith.addi(row, const(64 * m + 8 * half))
                line = arith.addi(start, times(long(at), heads * size))
                line = utils.getelementptr(base, [line], ins.f32())
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, at, const(length))):
                    for j in range(min(wide, size // 8)):
                        target = utils.getelementptr(line, [8 * j], ins.f32())
                        llvm.store(pairs[(m * wide + j) * 2 + half], target, alignment=8)

    assert x.dtype == ref.dtype == jnp.float32
    place = [ins.scalar(v) for v in (batch, first, head)]
    ins.inline(body, [(x, layout), (ref, plgpu.RefType()), *place])
