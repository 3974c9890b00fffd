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
from jaxcap.pallas import scores as sc
from jaxcap.pallas.instructions import const

#: By a predicate, not behind a branch on which the threads of a warp differ: past one, ptxas holds what the
#: warp shares (the slots) in each thread's registers.
STORE = "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.v2.f32 [$0+%d], {$1, $2}; }"


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
                line = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), line)
                there = arith.extui(ins.i32(), sc.compare(at, "slt", const(length)))
                for j in range(min(wide, size // 8)):
                    values = ins.elements(pairs[(m * wide + j) * 2 + half])
                    ins.asm(ins.void(), [line, *values, there], STORE % (32 * j), "l,f,f,r", True)

    assert x.dtype == ref.dtype == jnp.float32
    place = [ins.scalar(v) for v in (batch, first, head)]
    ins.inline(body, [(x, layout), (ref, plgpu.RefType()), *place])
