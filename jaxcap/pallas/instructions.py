"""What Mosaic GPU has no name for: wgmma on chunked tiles, named barriers, PTX one-liners.

A tile of `rows` x `size` 16-bit values lies in shared memory as [chunks, rows, width]: the head
dimension is cut into chunks as wide as the swizzle (64 values for 128 bytes, 32 for 64 bytes). TMA
writes each chunk as rows x width, so that any number of rows can be clipped at the array's own end, and
fills up what the array does not have with zeros.

Accumulators are plain values in the layout `ACC`: one float32 a register, in the order (8-column
group, row or row + 8, column or column + 1). A product is in flight from `qk` or `pv` until
`plgpu.wgmma_wait`; nothing may read or write its registers before.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

WG = plgpu.Layout.WGMMA
ACC = plgpu.Layout._WGMMA_ACC_32BIT
ROW = WG.reduce(1)  # two values a thread: its row and the row 8 below
SPLAT = plgpu.Layout.WG_SPLAT
WARPGROUP = 128


def f32() -> ir.Type:
    return ir.F32Type.get()


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def const(value: float | int) -> ir.Value:
    if isinstance(value, float):
        return arith.constant(f32(), ir.FloatAttr.get(f32(), value))
    value = int(value) & 0xFFFFFFFF
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value - (value >> 31 << 32)))


def asm(
    result: Any, args: Sequence[Any], text: str, constraints: str, effects: bool = False
) -> Any:
    return llvm.inline_asm(result, list(args), text, constraints, has_side_effects=effects)


def void() -> ir.Type:
    return ir.Type.parse("!llvm.void")


# ---- fragments: FragmentedArrays as flat lists of scalars ---------------------------------------
def elements(x: ir.Value) -> list[ir.Value]:
    """Of a vector in registers."""
    return [vector.extract(x, [], [i]) for i in range(ir.VectorType(x.type).shape[0])]


def scalars(x: mgpu.FragmentedArray) -> list[ir.Value]:
    """The registers of an array in `ACC` or `ROW`."""
    registers: Any = x.registers
    return [vector.extract(v, [], [0]) for v in registers.flat]


def fragment(values: Sequence[ir.Value], shape: tuple[int, ...], layout: Any) -> Any:
    """The converse of `scalars`."""
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), object)
    kind = ir.VectorType.get((1,), values[0].type)
    for i, value in enumerate(values):
        registers.flat[i] = vector.from_elements(kind, [value])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def inline(body: Callable, arguments: Sequence[tuple[Any, Any]], returns: Any = None) -> Any:
    """`body(launch context, values...)` in the kernel; arguments are (value, layout or RefType)."""
    types = tuple(kind for _, kind in arguments)
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)(body)(*(x for x, _ in arguments))


def struct(shape: tuple[int, ...], dtype: Any, layout: Any) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


def scalar(x: Any) -> tuple[jax.Array, Any]:
    return jnp.asarray(x, jnp.int32), SPLAT


def swizzled(ref: Any, swizzle: int) -> tuple[Any, plgpu.RefType]:
    return ref, plgpu.RefType((plgpu.SwizzleTransform(swizzle),))


# ---- where a thread is --------------------------------------------------------------------------
def lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """Lane, and warp within the warpgroup, as int32."""
    tid = nvvm.read_ptx_sreg_tid_x()
    return arith.andi(tid, const(31)), arith.andi(arith.shrui(tid, const(5)), const(3))


def first_row_and_column() -> tuple[ir.Value, ir.Value]:
    """Row (of 64) and column (of 8) of a thread's first register; it also has row + 8 and column + 1."""
    lane, warp = lane_and_warp()
    row = arith.addi(arith.shli(warp, const(4)), arith.shrui(lane, const(2)))
    return row, arith.shli(arith.andi(lane, const(3)), const(1))


# ---- products -----------------------------------------------------------------------------------
def base_of(ref: Any, swizzle: int) -> Any:
    """Where a buffer begins, as matrix descriptors count: 16 bytes a unit, an int32 scalar."""

    def body(ctx, ref):
        del ctx
        address = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        unit = arith.shrui(arith.andi(address, const(0x3FFFF)), const(4))
        return mgpu.FragmentedArray.splat(unit, (), is_signed=True)

    return inline(body, [swizzled(ref, swizzle)], struct((), jnp.int32, SPLAT))


def _described(unit: ir.Value, leading: int, stride: int, swizzle: int) -> ir.Value:
    """The matrix descriptor of a tile that begins at `unit` (16 bytes each)."""
    i64 = ir.IntegerType.get_signless(64)
    kind = {128: 1, 64: 2, 32: 3}[swizzle]
    high = (stride >> 4) | (kind << 30)
    low = arith.extui(i64, arith.ori(unit, const((leading >> 4) << 16)))
    return llvm.or_(low, arith.shli(arith.extui(i64, const(high)), arith.constant(i64, 32)))


def _advanced(descriptor: ir.Value, offset: int) -> ir.Value:
    if not offset:
        return descriptor
    i64 = ir.IntegerType.get_signless(64)
    step = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, offset >> 4)).result
    return llvm.add(descriptor, step, overflow_flags=llvm.IntegerOverflowFlags.none)


def _wgmma(
    acc: list[ir.Value] | None, a: Any, b: ir.Value, n: int, kind: str, b_rows: bool
) -> list:
    """One m64 x n x k16 product into `acc` (None: into zero). `a`: descriptor or four registers.

    b_rows: B lies with its n columns contiguous (V), else with its k rows contiguous (K transposed)."""
    count = n // 2
    out = ",".join(f"${i}" for i in range(count))
    at = count if acc is None else 2 * count
    in_registers = isinstance(a, list)
    a_text = "{" + ",".join(f"${at + i}" for i in range(4)) + "}" if in_registers else f"${at}"
    b_text = f"${at + (4 if in_registers else 1)}"
    transposed = f"{int(b_rows)}" if in_registers else f"0, {int(b_rows)}"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(acc is not None)}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        f" {{{out}}}, {a_text}, {b_text}, p, 1, 1, {transposed}; }}"
    )
    constraints = ["=f"] * count
    if acc is not None:
        constraints += [str(i) for i in range(count)]
    constraints += ["r"] * 4 if in_registers else ["l"]
    constraints += ["l"]
    args = [*(acc or []), *(a if in_registers else [a]), b]
    result = llvm.StructType.get_literal([f32()] * count)
    done = asm(result, args, text, ",".join(constraints), True)
    return [llvm.extractvalue(f32(), done, [i]) for i in range(count)]


def _commit() -> None:
    asm(void(), [], "wgmma.commit_group.sync.aligned;", "", True)


def _fence() -> None:
    nvvm.wgmma_fence_aligned()


def _name(dtype: Any) -> str:
    return "bf16" if dtype == jnp.bfloat16 else "f16"


def qk(
    q_unit: Any,
    k_unit: Any,
    q_shape: tuple[int, int, int],
    k_shape: tuple[int, int, int],
    size: int,
    swizzle: int,
    dtype: Any,
) -> Any:
    """S = Q K^T, begun. The units say where 64 rows of a tile of Q and a whole tile of K begin; the
    shapes are [chunks, rows, width] of both tiles."""
    (_, q_rows, width), (_, cols, _) = q_shape, k_shape

    def body(ctx, q, k):
        del ctx
        a, b = (_described(x.registers[()], 0, 8 * swizzle, swizzle) for x in (q, k))
        _fence()
        acc: Any = None
        for step in range(-(-size // 16)):
            chunk, inner = divmod(step * 16, width)
            a_step = _advanced(a, chunk * q_rows * swizzle + 2 * inner)
            b_step = _advanced(b, chunk * cols * swizzle + 2 * inner)
            acc = _wgmma(acc, a_step, b_step, cols, _name(dtype), False)
        _commit()
        return fragment(acc, (64, cols), ACC)

    return inline(body, [scalar(q_unit), scalar(k_unit)], struct((64, cols), jnp.float32, ACC))


def _pairs(x: mgpu.FragmentedArray) -> list[ir.Value]:
    """Registers of a 16-bit array in `WG` as int32, in the order that wgmma takes A."""
    pair = ir.VectorType.get((1,), i32())
    return [vector.extract(vector.bitcast(pair, v), [], [0]) for v in x.registers.flat]


def pv(
    acc: tuple, p: Any, v_unit: Any, rows: int, swizzle: int, dtype: Any, fenced: int = 0
) -> tuple:
    """(O + P V,), begun: `p` [64, rows] 16-bit in `WG`; a tile of V [chunks, rows, width] begins at `v_unit`.

    Of an `acc` (O, l), l [64, 8], the second is what P times the columns after V adds to it, in the same
    wgmma: in them are ones (`write_ones`). The first `fenced` k steps stand under the fence of a product that
    was begun just before.
    """
    n = sum(x.shape[1] for x in acc)

    def body(ctx, acc, p, v):
        del ctx
        b = _described(v.registers[()], rows * swizzle, 8 * swizzle, swizzle)
        a, o = _pairs(mgpu.optimization_barrier(p)), [y for x in acc for y in scalars(x)]
        for step in range(rows // 16):
            if step == fenced:
                _fence()
            b_step = _advanced(b, step * 16 * swizzle)
            o = _wgmma(o, a[4 * step : 4 * step + 4], b_step, n, _name(dtype), True)
        _commit()
        ends = [0, *itertools.accumulate(x.shape[1] // 2 for x in acc)]
        parts = (o[i:j] for i, j in itertools.pairwise(ends))
        return tuple(fragment(y, x.shape, ACC) for x, y in zip(acc, parts, strict=True))

    arguments = [(acc, (ACC,) * len(acc)), (p, WG), scalar(v_unit)]
    returns = tuple(struct(x.shape, jnp.float32, ACC) for x in acc)
    return inline(body, arguments, returns)


def last_wait() -> None:
    """`plgpu.wgmma_wait(0)` in other words, for behind a loop that waits at the top of its steps: LLVM would
    make one of both waits, which ptxas then moves up into the arithmetic at the end of a step."""

    def body(ctx):
        del ctx
        asm(void(), [], "wgmma.wait_group.sync.aligned 0; // last", "", True)

    inline(body, [])


def settled(*arrays: Any) -> Any:
    """The accumulators after a wait: no arithmetic on them may move in front of it."""

    def body(ctx, *xs):
        del ctx
        flat = [v for x in xs for v in scalars(x)]
        n = len(flat)
        result = llvm.StructType.get_literal([f32()] * n)
        text = ",".join(["=f"] * n + [str(i) for i in range(n)])
        done = asm(result, flat, "", text, True)
        out, at = [], 0
        for x in xs:
            size = len(scalars(x))
            new = [llvm.extractvalue(f32(), done, [at + i]) for i in range(size)]
            out.append(fragment(new, x.shape, ACC))
            at += size
        return tuple(out)

    returns = tuple(struct(x.shape, jnp.float32, ACC) for x in arrays)
    done = inline(body, [(x, ACC) for x in arrays], returns)
    return done if len(arrays) > 1 else done[0]


def joined(e: ir.Value, r: ir.Value) -> ir.Value:
    """The two bfloat16 that `scores.exp2_packed` leaves in two words."""
    e, r = (arith.bitcast(i32(), x) for x in (e, r))
    return arith.addi(arith.shli(e, const(5)), r)


def to_16bit(p: Any, dtype: Any, packed: Callable[[int], bool] = lambda pair: False) -> Any:
    """float32 in `ACC` -> 16-bit in `WG`, kept behind the wait before it (the empty asm is ordered).

    Where `packed(pair)`, the pair is in two words already (`scores.exp2_packed`): the result is their sum,
    not before the wait either, or ptxas lets it overwrite the operands of a product in flight.
    """

    def body(ctx, x):
        del ctx
        bf16 = dtype == jnp.bfloat16
        kind = ir.VectorType.get((2,), ir.BF16Type.get() if bf16 else ir.F16Type.get())
        name = "bf16x2" if bf16 else "f16x2"
        values = scalars(x)
        registers = np.empty(WG.to_mgpu().registers_shape(x.shape), object)
        for i in range(registers.size):  # the first source is the upper half
            low, high = values[2 * i], values[2 * i + 1]
            if packed(i):
                pair = joined(low, high)
            else:
                pair = asm(i32(), [high, low], f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f")
            one = vector.from_elements(ir.VectorType.get((1,), i32()), [pair])
            registers.flat[i] = vector.bitcast(kind, one)
        return mgpu.FragmentedArray(_registers=registers, _layout=WG.to_mgpu(), _is_signed=None)

    return inline(body, [(settled(p), ACC)], struct(p.shape, dtype, WG))


# ---- barriers -----------------------------------------------------------------------------------
def named_barrier(op: str, ident: Any, threads: int) -> None:
    """bar.sync or bar.arrive on the named barrier `ident`, an int or an int32 scalar."""

    def body(ctx, i=None):
        del ctx
        if i is None:
            asm(void(), [], f"bar.{op} {ident}, {threads};", "", True)
        else:
            asm(void(), [i.registers[()]], f"bar.{op} $0, {threads};", "r", True)

    inline(body, [] if isinstance(ident, int) else [scalar(ident)])


def any_of_warpgroup(condition: ir.Value) -> mgpu.FragmentedArray:
    """1 where a thread's condition holds, else 0, as a scalar; all threads meet here."""
    text = (
        "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; barrier.cta.red.or.aligned.pred q, $2, 128, p;"
        " vote.sync.any.pred q, q, -1; selp.b32 $0, 1, 0, q; }"
    )
    word = arith.extui(i32(), condition)
    args = [word, utils.warpgroup_barrier_idx(sync=False)]
    return mgpu.FragmentedArray.splat(asm(i32(), args, text, "=r,r,r", True), (), is_signed=True)


# ---- shared memory ------------------------------------------------------------------------------
def _swizzled_byte(row: ir.Value, byte: int, swizzle: int) -> tuple[ir.Value, ir.Value]:
    """(row * swizzle, xor of bits 4.. with the row's), from which an address within a chunk follows."""
    linear = arith.muli(row, const(swizzle))
    mask = {128: 0x70, 64: 0x30, 32: 0x10}[swizzle]
    return linear, arith.andi(arith.shrui(linear, const(3)), const(mask))


def store_rows(x: Any, ref: Any, slot: Any, first_row: Any, swizzle: int) -> None:
    """A 16-bit array in `WG` into rows first_row..+64 of `ref` [slots, chunks, rows, width][slot]."""
    _, chunks, rows, width = ref.shape

    def body(ctx, x, tile, at, first):
        del ctx
        row, column = first_row_and_column()
        row = arith.addi(row, first.registers[()])
        base = utils.memref_ptr(tile)
        i8 = ir.IntegerType.get_signless(8)
        pairs = _pairs(x)
        for half in (0, 1):
            r = arith.addi(row, const(8 * half))
            linear, flip = _swizzled_byte(r, 0, swizzle)
            start = arith.addi(linear, arith.shli(column, const(1)))
            start = arith.addi(start, arith.muli(at.registers[()], const(chunks * rows * swizzle)))
            for i in range(x.shape[1] // 8):
                chunk, inner = divmod(8 * i, width)
                within = arith.xori(const(2 * inner), flip)
                offset = arith.addi(arith.addi(start, within), const(chunk * rows * swizzle))
                pointer = utils.getelementptr(base, [offset], i8)
                llvm.store(pairs[2 * i + half], pointer)

    inline(body, [(x, WG), swizzled(ref, swizzle), scalar(slot), scalar(first_row)])


def write_ones(ref: Any, chunk: int, swizzle: int) -> None:
    """Ones of 16 bits into `chunk` of every slot of `ref` [slots, chunks, rows, width].

    Every warpgroup does, for itself as in `zero_rows`.
    """
    slots, chunks, rows, _ = ref.shape
    size = rows * swizzle

    def body(ctx, tile):
        del ctx
        lane, warp = lane_and_warp()
        at = arith.shli(arith.addi(arith.shli(warp, const(5)), lane), const(4))
        base = utils.memref_ptr(tile)
        i8 = ir.IntegerType.get_signless(8)
        bf16 = isinstance(ir.MemRefType(tile.type).element_type, ir.BF16Type)
        word = const(0x3F803F80 if bf16 else 0x3C003C00)
        ones = vector.broadcast(ir.VectorType.get((4,), i32()), word)
        for slot in range(slots):
            start = (slot * chunks + chunk) * size
            for first in range(0, size, 16 * WARPGROUP):
                inside = arith.cmpi(arith.CmpIPredicate.slt, at, const(size - first))
                with mgpu.when(inside):
                    offset = arith.addi(at, const(start + first))
                    llvm.store(ones, utils.getelementptr(base, [offset], i8), alignment=16)
        asm(void(), [], "fence.proxy.async.shared::cta;", "", True)
        utils.warpgroup_barrier()

    inline(body, [swizzled(ref, swizzle)])


def zero_rows(
    ref: Any, slot: Any, dead: Callable, extra: Sequence[tuple[Any, Any]], swizzle: int, used: int
) -> None:
    """Zero the rows of `ref` [slots, chunks, rows, width][slot] for which dead(row, *extra) holds, in the
    first `used` chunks.

    Every warpgroup that multiplies by the tile calls this first: it orders its own stores before its
    own products, and zeros over zeros harm nobody.
    """
    _, chunks, rows, _ = ref.shape

    def body(ctx, tile, at, *more):
        del ctx
        lane, warp = lane_and_warp()
        thread = arith.addi(arith.shli(warp, const(5)), lane)
        base = utils.memref_ptr(tile)
        i8 = ir.IntegerType.get_signless(8)
        start = arith.muli(at.registers[()], const(chunks * rows * swizzle))
        zero = vector.broadcast(ir.VectorType.get((4,), i32()), const(0))
        for first in range(0, rows, WARPGROUP):
            row = arith.addi(thread, const(first))
            kill = dead(row, *more)
            if first + WARPGROUP > rows:
                inside = arith.cmpi(arith.CmpIPredicate.slt, row, const(rows))
                kill = arith.andi(kill, inside)
            with mgpu.when(kill):
                at_row = arith.addi(start, arith.muli(row, const(swizzle)))
                for chunk in range(used):
                    for byte in range(0, swizzle, 16):
                        offset = arith.addi(at_row, const(chunk * rows * swizzle + byte))
                        llvm.store(zero, utils.getelementptr(base, [offset], i8), alignment=16)
        asm(void(), [], "fence.proxy.async.shared::cta;", "", True)
        utils.warpgroup_barrier()

    inline(body, [swizzled(ref, swizzle), scalar(slot), *extra])
