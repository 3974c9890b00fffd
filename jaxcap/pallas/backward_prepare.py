"""What the backward starts from: -delta = -sum(out * d_out) a row, and an accumulator of dQ full of zeros.

Both are bound by memory, so one pass does both: a warpgroup takes 64 rows of a head, 8 values of a row a
lane, and clears the rows' share of the accumulator. 516 MB (16 x 1k, 32 heads of 128) take 130 us, 4.0 TB/s,
where XLA's sum and its zeros took 150; 248 MB (2 x 8k, 32 heads of 64) 68 and 79 (one H200, 2026-12-01).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as mlir_math

from jaxcap.pallas import instructions as ins
from jaxcap.pallas import scores as sc
from jaxcap.pallas.backward_plan import Plan, divmod_by
from jaxcap.pallas.backward_tables import empty_queries, may_have_empty_queries
from jaxcap.pallas.instructions import const
from jaxcap.spec import AttentionSpec, Operands

ROWS = 64
LANE = 8  # values of a row that a lane loads at once


def _global(ref: Any) -> ir.Value:
    return llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), utils.memref_ptr(ref))


def _long(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def _row_sums(out: Any, d_out: Any, target: Any, batch: Any, head: Any, first: Any) -> None:
    """Writes -sum(out * d_out) of rows first..+64 of [B, T, N, V] to `target` [64]; 0 past the last row."""
    (_, length, heads, size), dtype = out.shape, jnp.dtype(out.dtype)
    lanes = max(2, 1 << (size // LANE - 1).bit_length())
    at_once = 32 // lanes  # rows of a warp, which has 16

    def body(ctx, out, d_out, target, *place):
        del ctx
        batch, head, first = (v.registers[()] for v in place)
        lane, warp = ins.lane_and_warp()
        column = arith.muli(arith.andi(lane, const(lanes - 1)), const(LANE))
        inside = sc.compare(column, "slt", const(size))
        column = arith.select(inside, column, const(0))
        mine = arith.addi(arith.muli(warp, const(16)), arith.divui(lane, const(lanes)))
        begin = arith.muli(batch, const(length))
        kind = utils.dtype_to_ir_type(dtype)
        eight = ir.VectorType.get((LANE,), kind)
        loaded = []
        for i in range(0, 16, at_once):
            row = arith.addi(first, arith.addi(mine, const(i)))
            there = sc.compare(row, "slt", const(length))
            row = arith.addi(begin, arith.select(there, row, const(length - 1)))
            line = arith.addi(arith.muli(_long(row), _long(const(heads))), _long(head))
            at = arith.addi(arith.muli(line, _long(const(size))), _long(column))
            pair = [
                llvm.load(eight, utils.getelementptr(base, [at], kind), alignment=16)
                for base in (_global(out), _global(d_out))
            ]
            loaded.append((i, there, pair))
        base = _global(target)
        for i, there, (x, y) in loaded:
            total = const(0.0)
            for a, b in zip(ins.elements(x), ins.elements(y), strict=True):
                total = mlir_math.fma(arith.extf(ins.f32(), a), arith.extf(ins.f32(), b), total)
            total = arith.select(arith.andi(inside, there), arith.negf(total), const(0.0))
            step = lanes // 2
            while step:
                text = f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;"
                total = arith.addf(total, ins.asm(ins.f32(), [total], text, "=f,f", True))
                step //= 2
            at = utils.getelementptr(base, [arith.addi(mine, const(i))], ins.f32())
            writes = sc.compare(arith.andi(lane, const(lanes - 1)), "eq", const(0))
            text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }"
            args = [at, total, arith.extui(ins.i32(), writes)]
            ins.asm(ins.void(), args, text, "l,f,r", True)

    memory = [(ref, plgpu.RefType()) for ref in (out, d_out, target)]
    ins.inline(body, [*memory, *(ins.scalar(x) for x in (batch, head, first))])


def _clear(target: Any) -> None:
    """Zeros in `target` [n] float32, n a multiple of 512."""

    def body(ctx, target):
        del ctx
        lane, warp = ins.lane_and_warp()
        thread = arith.addi(arith.shli(warp, const(5)), lane)
        base = utils.getelementptr(_global(target), [arith.muli(thread, const(4))], ins.f32())
        text = "st.global.v4.f32 [$0], {$1, $1, $1, $1};"
        for at in range(0, size, 512):
            place = utils.getelementptr(base, [at], ins.f32())
            ins.asm(ins.void(), [place, const(0.0)], text, "l,f", True)

    (size,) = target.shape
    ins.inline(body, [(target, plgpu.RefType())])


def row_vectors(spec: AttentionSpec, operands: Operands, lse, ndelta, d_lse, pad: int, up: int):
    """(-lse log2(e) + up, -delta), [B, N, T + pad] float32, and the gradient of the sinks if asked for.

    delta = sum(out * d_out) - d_lse, of which `ndelta` [B, N, T + pad] is the negative of the former. Empty
    rows: -inf instead of -lse, and no part of out * d_out.
    """
    changed = d_lse is not None or operands.sinks is not None or may_have_empty_queries(spec)
    delta = -ndelta[..., : spec.query_length]
    empty = None
    if may_have_empty_queries(spec):
        # With a sink an empty row has its lse, which says nothing.
        sinks = operands.sinks is not None
        empty = empty_queries(spec, operands) if sinks else lse == -jnp.inf
        delta = jnp.where(empty, 0.0, delta)
    if d_lse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0.0, d_lse.astype(jnp.float32))
    d_sinks = None
    if operands.sinks is not None and "sinks" in spec.gradients:
        share = jnp.exp(operands.sinks.astype(jnp.float32)[:, :, None] - lse)
        share = jnp.where(lse == -jnp.inf, 0.0, share)
        d_sinks = -(share * delta).sum(-1)
        if operands.sinks.shape[0] == 1:
            d_sinks = d_sinks.sum(0, keepdims=True)
        d_sinks = d_sinks.astype(operands.sinks.dtype)
    nlse = lse * -1.4426950408889634 + up
    if empty is not None:
        nlse = jnp.where(empty, -jnp.inf, nlse)
    if pad:
        nlse = jnp.pad(nlse, ((0, 0), (0, 0), (0, pad)), constant_values=-jnp.inf)
    if changed:
        ndelta = jnp.pad(-delta, ((0, 0), (0, 0), (0, pad)))
    return nlse, ndelta, d_sinks


def prepared(plan: Plan, out: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-delta [B, N, padded T] float32, 0 past the last row, and zeros of `plan.dq_shape`."""
    tiles, heads = plan.padded_queries // ROWS, plan.query_heads

    def body(out, d_out, ndelta, dq):
        rest, n = divmod_by(lax.axis_index("x"), heads)  # neighbours read a row's neighbours
        b, t = divmod_by(rest, tiles)
        _clear(dq.at[b, n, t])
        _row_sums(out, d_out, ndelta.at[b, n, pl.ds(t * ROWS, ROWS)], b, n, t * ROWS)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    ndelta, dq = plgpu.kernel(
        body,
        out_type=[
            f32(plan.batch, heads, plan.padded_queries),
            f32(plan.batch, heads, tiles, ROWS * plan.padded_head_size),
        ],
        grid=(plan.batch * tiles * heads,),
        grid_names=("x",),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        kernel_name="jaxcap_backward_prepare",
    )(out, d_out)
    return ndelta, dq.reshape(plan.dq_shape)
