"""Words in shared memory that spare the forward registers, and what its warpgroups leave for each other."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from jaxcap.pallas import instructions as ins
from jaxcap.pallas import scores as sc
from jaxcap.pallas.instructions import const


def note(ref: Any, row: int, value: Any) -> None:
    """ref[row, this warp] = value, the same in all its threads; int32 in shared memory [rows, warps]."""

    def body(ctx, ref, value):
        del ctx
        lane, _ = ins.lane_and_warp()
        text = (
            "{ .reg .pred p; setp.eq.b32 p, $2, 0; @p st.volatile.shared.b32 [$0], $1;"
            " bar.warp.sync -1; }"
        )
        args = [_place(ref, row), value.registers[()], lane]
        ins.asm(ins.void(), args, text, "r,r,r", True)

    ins.inline(body, [(ref, plgpu.RefType()), ins.scalar(value)])


def noted(ref: Any, row: int) -> Any:
    """1 where ref[row, this warp] is not 0, else 0: no register holds it in between."""

    def body(ctx, ref):
        del ctx
        text = (  # the vote tells ptxas that the warp agrees
            "{ .reg .pred p; .reg .b32 r; ld.volatile.shared.b32 r, [$1]; setp.ne.b32 p, r, 0;"
            " vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
        )
        word = ins.asm(ins.i32(), [_place(ref, row)], text, "=r,r", True)
        return mgpu.FragmentedArray.splat(word, (), is_signed=True)

    return ins.inline(body, [(ref, plgpu.RefType())], ins.struct((), jnp.int32, ins.SPLAT))


def _place(ref: ir.Value, row: int) -> ir.Value:
    warp = arith.shrui(ins.nvvm.read_ptx_sreg_tid_x(), const(5))
    word = arith.addi(warp, const(row * ir.MemRefType(ref.type).shape[1]))
    address = llvm.ptrtoint(ins.i32(), utils.memref_ptr(ref))
    return arith.addi(address, arith.shli(word, const(2)))


def note_once(ref: Any, index: Any, value: Any) -> None:
    """ref[index] = value, int32 in shared memory, by one thread of the warpgroup."""

    def body(ctx, ref, index, value):
        del ctx
        with mgpu.when(sc.compare(arith.ori(*ins.lane_and_warp()), "eq", const(0))):
            at = arith.index_cast(ir.IndexType.get(), index.registers[()])
            memref.store(value.registers[()], ref, [at])

    ins.inline(body, [(ref, plgpu.RefType()), ins.scalar(index), ins.scalar(value)])
