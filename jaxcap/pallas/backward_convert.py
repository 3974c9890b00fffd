"""From the float32 accumulator of dQ, in the order of wgmma's fragments, to rows in 16 bits.

The accumulator is [B, N, T / 64, H / 64, 4096]: tiles of 64 queries and 64 columns, in each 8 groups of 8
columns, of these 128 threads, of these four values, (row, row + 8) x (column, column + 1). A warpgroup
takes one tile, so that a thread reads its own registers of it, 8 times 16 bytes at once; TMA writes the rows
and clips what [B, T, N, H] does not have. Many small blocks keep memory busy: 268 MB in and 134 MB out take
103 us, 3.9 TB/s, where XLA's transpose takes 150 (one H200, 2026-11-30; two or four tiles a block take as
long, loads that leave the caches first 115). The bits are those of XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxcap.pallas import instructions as ins
from jaxcap.pallas.backward_plan import WIDTH, Plan, divmod_by
from jaxcap.pallas.backward_scores import write_pairs
from jaxcap.pallas.instructions import const

GROUPS = WIDTH // 8
TILE = 64 * WIDTH  # elements
PTX = {jnp.dtype(jnp.bfloat16): "bf16x2", jnp.dtype(jnp.float16): "f16x2"}


def _convert(source: Any, target: Any, factor: float) -> None:
    """Writes factor * `source` [4096] to `target` [64, 64] in shared memory, 16 bits, swizzled."""
    kind = PTX[jnp.dtype(target.dtype)]

    def body(ctx, source, target):
        del ctx
        lane, warp = ins.lane_and_warp()
        thread = arith.addi(arith.shli(warp, const(5)), lane)
        start = [arith.muli(thread, const(4))]
        base = utils.getelementptr(utils.memref_ptr(source), start, ins.f32())
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), base)
        four = ir.VectorType.get((4,), ins.f32())
        loaded = [
            llvm.load(four, utils.getelementptr(base, [512 * j], ins.f32()), alignment=16)
            for j in range(GROUPS)
        ]
        pairs = np.empty((1, GROUPS, 2), object)
        for g, values in enumerate(loaded):
            x = [arith.mulf(v, const(float(factor))) for v in ins.elements(values)]
            for half in (0, 1):
                text, two = f"cvt.rn.{kind}.f32 $0, $1, $2;", [x[2 * half + 1], x[2 * half]]
                pairs[0, g, half] = ins.asm(ins.i32(), two, text, "=r,f,f")
        write_pairs(target, pairs)

    ins.inline(body, [(source, plgpu.RefType()), ins.swizzled(target, 2 * WIDTH)])


def converted(plan: Plan, dq: jax.Array, factor: float) -> jax.Array:
    """factor * dQ [B, T, N, H] in `plan.dtype` from the accumulator of `plan.dq_shape`."""
    chunks, tiles = plan.padded_head_size // WIDTH, plan.padded_queries // 64
    heads = plan.query_heads

    def body(source, target, rows):
        rest, c = divmod_by(lax.axis_index("x"), chunks)  # neighbours write a row's neighbours
        rest, n = divmod_by(rest, heads)
        b, t = divmod_by(rest, tiles)
        _convert(source.at[b, n, t, c], rows, factor)
        plgpu.commit_smem()
        # No static slices, which might not reach over the array's end as TMA lets them.
        place = target.at[b, pl.ds(t * 64, 64), n, pl.ds(c * WIDTH, WIDTH)]
        plgpu.copy_smem_to_gmem(rows, place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    shape = (plan.batch, plan.query_length, heads, plan.head_size)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, plan.dtype),
        grid=(plan.batch * tiles * heads * chunks,),
        grid_names=("x",),
        scratch_types=[
            plgpu.SMEM((64, WIDTH), plan.dtype, transforms=(plgpu.SwizzleTransform(2 * WIDTH),))
        ],
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        kernel_name="jaxcap_backward_convert",
    )(dq.reshape(plan.batch, heads, tiles, chunks, TILE))
