"""Forward kernel for Hopper: softmax(cap * tanh(scale * Q K^T / cap)) V, one CTA a tile of queries.

Roles. Warpgroups 0..W-1 consume: each owns 64 queries and computes, tile of keys by tile of keys,

    S = Q K^T;   P = exp2(score(S) - m);   l += rowsum(P);   O += P V

with m a constant where the cap bounds the scores (`softcap.bounded_shift`), else the running
maximum, for which l and O are rescaled. With a constant, in bfloat16, a chunk of ones stands beside V in
every slot, and the product with eight of its columns is rowsum(P). Warpgroup W produces: it issues the
TMA loads.

Schedule of a consumer, tile j: while P(j-1) V(j-1) runs, P(j) is computed from S(j). The wait for a
product stands at the top of the next step, behind a branch: before the branch ptxas would move it up in
front of the arithmetic. With `config.pv_first` nothing runs beside P: O += P(j-1) V(j-1) and S(j) are begun
and awaited together, and P has the registers.

With `near` the steps without masks take the cap as a cubic where the logits allow it (`cubic`); the producer
scales Q, and the last tiles of a CTA are those that have to be done again.

Slots. K(j) and V(j-1), which a step needs together, share one: unit u of a tile of queries is K(u) and
V(u-1), u = 0..count. Where the first has no V and the last no K, TMA fills up with zeros and reads nothing.

Barriers. mbarriers: q_full[s] and kv_full[s], one completion a use of slot s; a TMA copy a
chunk arrives on them, every consumer waits for every completion; with `near` the producer alone waits for
q_full[s] and arrives on q_scaled[s], for which the consumers wait. Named barriers (0..W+1
belong to Mosaic GPU), 128 * (W + 1) threads each, but turns with 256:
  FREE + s          slot s is read: the consumers arrive once a use, the producer syncs before
                    every use but a slot's first
  W + 2 + w         (turns) warpgroup w syncs before it issues its products, the one before it arrives
                    after it issued its own; the last arrives on W + 2 once at the start, 0 syncs at the end
  MEET              (near) all meet before tiles are done again
  Q_FREE + s        (persistent) Q slot s is read: the consumers arrive in the tile after, the
                    producer syncs before every use but a slot's first
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from jaxcap import tile_tables, tiles
from jaxcap.mask import keep_tile
from jaxcap.pallas import cubic, notes, schedule, wide
from jaxcap.pallas import instructions as ins
from jaxcap.pallas import scores as sc
from jaxcap.pallas.config import HEADROOM, ForwardConfig
from jaxcap.pallas.instructions import ACC, ROW, const
from jaxcap.pallas.scores import Extras, Places, Scores, Tile
from jaxcap.pallas.softmax import rescaled, softmax
from jaxcap.softcap import LOG2E, bounded_shift
from jaxcap.spec import Array, AttentionSpec, Operands

I32 = jnp.int32
Q_FREE, FREE, MEET = 6, 8, 12
ALWAYS, NOW = 0, 1  # rows of a warp's notes (`cubic`): the exact form from now on, and in this tile
SHARED_MEMORY = 225 * 1024  # for tiles, of the 227 KB that a block may have
NOTES = 1024  # what `near` takes of the tiles' share; barriers and notes have 3 KB then
MOST_TILES = 2**17  # whose order is worked out when the call is traced, at a microsecond each
LN2 = math.log(2.0)


def chunk_width(size: int) -> int:
    """Columns of a chunk of a head of `size`: as wide as the swizzle, little of it unused."""
    return 64 if -(-size // 32) % 2 == 0 else 32


# ---- end of a tile of queries --------------------------------------------------------------------
def finished(acc, state, lse, sinks, tile: Tile, call: Scores, shift: int | None, dtype: Any):
    """O / l in `dtype`; writes the log-sum-exp of the rows that are there. Empty rows: 0 and -inf."""
    rate = call.dropout_rate
    summed = state[0].ndim == 2  # by the product with V

    def body(ctx, acc, state, lse_ref, sink_refs, scalars):
        del ctx
        at = Tile(*(v.registers[()] for v in scalars))
        places = Places(at.q_first, at.k_first, 8)
        state = [ins.scalars(v) for v in state]
        lane, _ = ins.lane_and_warp()
        factors = []
        for half in (0, 1):
            row = places.rows[half]
            if summed:  # a whole row's, in each of two columns
                l = state[0][2 * half]
            else:
                l = sc.quad_sum(state[0][half])
            if shift is not None:  # exp2 without the special-function unit makes numbers of NaN
                good = arith.cmpf(arith.CmpFPredicate.OLT, l, const(sc.NAN_SUM))
                l = arith.select(good, l, const(math.nan))
            m = const(float(shift)) if shift is not None else state[1][half]
            inside = sc.compare(row, "slt", at.q_stop)
            zero = arith.cmpf(arith.CmpFPredicate.OEQ, l, const(0.0))
            empty = arith.ori(zero, arith.xori(inside, arith.constant(inside.type, 1)))
            total = arith.addf(sc.log2(l), m)  # log2 of the sum
            factor = arith.divf(const(1.0 / (1.0 - rate)), l)
            if sink_refs:
                # total' = log2(2**total + 2**sink), O *= 2**(total - total')
                sink = sc.load(sink_refs[0], sc.row_of(sink_refs[0], at.batch), at.head)
                sink = arith.mulf(sink, const(LOG2E))
                total = arith.select(empty, const(sc.NEGATIVE), total)
                top = sc.maximum(total, sink)
                none = arith.cmpf(arith.CmpFPredicate.OEQ, top, const(sc.NEGATIVE))
                base = arith.select(none, const(0.0), top)
                parts = [sc.exp2(arith.subf(x, base)) for x in (total, sink)]
                joint = arith.addf(base, sc.log2(arith.addf(*parts)))
                factor = arith.mulf(factor, sc.exp2(arith.subf(total, joint)))
                value = joint
            else:
                value = arith.select(empty, const(sc.NEGATIVE), total)
            value = arith.mulf(value, const(LN2))
            factors.append((factor, empty))
            first = sc.compare(arith.andi(lane, const(3)), "eq", const(0))
            there = sc.compare(row, "slt", const(call.query_length))
            with mgpu.when(arith.andi(first, there)):
                index = ir.IndexType.get()
                where = [arith.index_cast(index, x) for x in (at.batch, at.head, row)]
                memref.store(value, lse_ref, where)
        out = []
        for n, v in enumerate(ins.scalars(acc)):
            factor, empty = factors[n // 2 % 2]
            out.append(arith.select(empty, const(0.0), arith.mulf(v, factor)))
        return ins.fragment(out, acc.shape, ACC)

    numbers = tuple(jnp.asarray(x, jnp.int32) for x in tile)
    sinks = () if sinks is None else (sinks,)
    refs = plgpu.RefType()
    out = plgpu.inline_mgpu(
        arg_types=(
            ACC,
            (ACC if summed else ROW,) * len(state),
            refs,
            (refs,) * len(sinks),
            (ins.SPLAT,) * len(numbers),
        ),
        return_type=ins.struct(acc.shape, jnp.float32, ACC),
    )(body)(acc, state, lse, sinks, numbers)
    return out if dtype == jnp.float32 else ins.to_16bit(out, dtype)


# ---- what the kernel is told beside Q, K and V ---------------------------------------------------
def live_keys(spec: AttentionSpec, operands: Operands) -> Array:
    """[B or 1, S] int8: keys that some query of the batch entry attends."""
    kept = keep_tile(spec, operands, 0, spec.query_length, 0, spec.key_length)
    assert kept is not None  # where nothing masks nobody asks
    kept = jnp.any(kept, axis=(1, 2))
    return jnp.broadcast_to(kept, (kept.shape[0], spec.key_length)).astype(jnp.int8)


def side_arrays(spec: AttentionSpec, operands: Operands, grid: tiles.Grid) -> dict[str, Array]:
    """Arrays in global memory by name; an absent one is not a kernel argument."""
    found: dict[str, Array | None] = {
        "query_lengths": operands.query_lengths,
        "kv_lengths": operands.kv_lengths,
        "sinks": operands.sinks,
        "bias": operands.bias,
        "mask": None if operands.mask is None else operands.mask.astype(jnp.int8),
        "query_segments": operands.query_segment_ids,
        "kv_segments": operands.kv_segment_ids,
        "query_positions": operands.query_positions,
        "kv_positions": operands.kv_positions,
        "alibi": operands.alibi_slopes,
    }
    if operands.dropout is not None and spec.dropout_rate:
        drop = operands.dropout
        found["dropout_rng"] = lax.bitcast_convert_type(drop.rng, jnp.int32)
        for name in ("batch", "head", "query", "key"):
            found["dropout_" + name] = getattr(drop, name)
    if tile_tables.needs_pairs(spec):
        visits = tile_tables.visits(*tile_tables.pairs(spec, operands, grid))
        found |= {"order": visits.order, "partial": visits.partial, "stop": visits.stop}
        found["live"] = live_keys(spec, operands)
    return {name: x for name, x in found.items() if x is not None}


def attended(spec: AttentionSpec, q_stop: Any, k_stop: Any) -> tuple[Any, Any]:
    """Keys [first, stop) that the band and the lengths leave to some query."""
    low, high = spec.band
    if spec.query_positions or spec.kv_positions:
        low = high = None
    first = 0 if low is None else max(low + spec.query_offset, 0)
    if high is not None:
        k_stop = tiles._min(k_stop, q_stop + (spec.query_offset + high))
    return first, k_stop


# ---- kernel -------------------------------------------------------------------------------------
def forward(spec: AttentionSpec, operands: Operands, config: ForwardConfig) -> tuple[Array, Array]:
    """(out [B, T, N, V], lse [B, N, T])."""
    B, T, N, H = operands.query.shape
    _, S, K, V = operands.value.shape
    dtype = operands.query.dtype
    W, keys, stages = config.warpgroups, config.keys, config.stages
    rows, threads = 64 * W, 128 * (W + 1)
    assert keys % 16 == 0 and FREE + stages <= MEET
    turn = W + 2  # where the names of Mosaic GPU's own barriers end
    assert W == 2 or not (config.turns and config.persistent)  # three warpgroups' turns take Q_FREE

    grid = tiles.Grid.of(spec, rows, keys)
    call = Scores.of(spec, grid)
    # In a single tile the maximum costs nothing, and the largest probability is exactly one.
    shift = bounded_shift(spec, spec.dtype) if keys < S else None
    headroom = 2.0 ** HEADROOM[spec.dtype]
    side = side_arrays(spec, operands, grid)
    tabled = "order" in side
    banded = grid.low is not None or grid.high is not None
    own = tiles.Grid.of(spec, 64, keys) if banded and not tabled else None
    # Whether a warpgroup of the last tile has no rows (with a band it has one step).
    idle = own is None and -(-T // 64) % W > 0
    dynamic = "kv_lengths" in side or "query_lengths" in side
    masks = call.masks or tabled
    # Whether keys that nobody attends may lie in a tile that is visited.
    first_key, last_key = attended(spec, T, S)
    cleans = tabled or dynamic or first_key > 0 or last_key < S
    if not masks:
        lead_most = trail_most = 0
    elif dynamic or tabled:
        lead_most = trail_most = schedule.ALWAYS
    else:
        lead_most, trail_most = schedule.masked_at_most(grid, own, T)

    wq, wv = chunk_width(H), chunk_width(V)
    cq, cv = -(-H // wq), -(-V // wv)
    share = (cq, wq) == (cv, wv)  # O is staged where Q was
    staged = not spec.partial
    heads = next(g for g in range(min(8, B * N), 0, -1) if B * N % g == 0)
    place_of = functools.partial(
        schedule.coordinates,
        q_tiles=grid.q_tiles,
        heads=heads,
        heavy_first=grid.high is not None and grid.low is None,
    )
    total = B * N * grid.q_tiles
    workers = multiprocessors()
    persistent = config.persistent and share and not dynamic and not tabled
    persistent = persistent and workers < total <= MOST_TILES
    blocks = total
    if persistent:
        _, i = place_of(np.arange(total), div=np.floor_divide, rem=np.remainder)
        counts = schedule.band_steps(grid, None, i, 0, T, S).count + np.zeros(total)
        lists = schedule.short_lists if spec.beside_transfers else schedule.work_table
        table = lists(counts + schedule.OVERHEAD, workers)
        blocks = len(table)
        side["work"] = jnp.asarray(table)
    q_slots = 2 if persistent else 1
    # Where there is room, the product sums P; not with dropout, which comes after the sum.
    ones = config.ones and shift is not None and not spec.dropout_rate
    ones = ones and dtype == jnp.bfloat16 and V % wv == 0 and V <= 248
    elements = q_slots * cq * rows * wq + stages * keys * (cq * wq + (cv + 1) * wv)
    elements += 0 if share or not staged else cv * rows * wv
    ones = ones and 2 * elements <= SHARED_MEMORY
    packed = lambda pair: ones and sc.uses_fma(pair, config.exp_packed)
    near = config.cubic and ones and persistent and 2 * elements <= SHARED_MEMORY - NOTES
    near = near and cubic.applies(spec, keys, counts, blocks)
    # As many k steps of P V share the fence before S, so that their part of P is packed before S is begun:
    # what three warpgroups lack are registers.
    fenced = 0 if W != 3 or cleans else 2
    if near:
        log2_scale = cubic.log2_scale(spec)
        call = dataclasses.replace(call, scale=call.scale * 2.0**log2_scale)
        limit, coefficients = cubic.fitted(spec)
        largest = cubic.FIRST * limit / abs(call.inner)
        as_cubic = functools.partial(cubic.exponents, coefficients=coefficients)
    numbers = dataclasses.replace(config, exp_packed=None)
    names = list(side)

    def kernel(q, k, v, *refs):
        refs = list(refs)
        given = {name: refs.pop(0) for name in names}
        out, lse, qs, ks, vs, *rest = refs
        os = rest.pop(0) if staged and not share else qs
        q_full, kv_full, *rest = rest
        marks, undone, q_scaled = rest if near else (None,) * 3
        q_ready = q_scaled if near else q_full
        wg, cta = lax.axis_index("wg"), lax.axis_index("x")
        none = wg * 0  # a zero that is no constant: slices may reach past the end of an array
        extras = Extras(
            *(given.get(name) for name in Extras._fields[:-1]),
            dropout=tuple(given["dropout_" + x] for x in ("rng", "batch", "head", "query", "key"))
            if "dropout_rng" in given
            else None,
        )

        all_meet = lambda: ins.named_barrier("sync", MEET, threads)

        def for_each_tile(body, carry, decide=lambda: None):
            """body(n, index of the tile, carry) for the tiles of this CTA, n counting up.

            With `near` each warpgroup's one tile that its cubic did not do follows.
            """
            if not persistent:
                return body(I32(0), cta, carry)
            work = given["work"]
            count = work[cta, 0]
            if not near:
                one = lambda n, c: body(n, work[cta, n + 1], c)
                return lax.fori_loop(I32(0), count, one, carry)

            def undone_by(w):
                """The tile that warpgroup w has not done; -1: none, or one that another brings."""
                tile = undone[w]
                for v in range(W - 1):
                    tile = jnp.where((v < w) & (undone[I32(v)] == tile), I32(-1), tile)
                return tile

            def step(m, carry):
                pl.when(m == count)(decide)
                at = lax.cond(m < count, lambda: m, lambda: undone_by(m - count))
                do = lambda c: (c[0] + 1, body(c[0], work[cta, at + 1], c[1]))
                return lax.cond(at >= 0, do, lambda c: c, carry)

            return lax.fori_loop(I32(0), count + W, step, (I32(0), carry))[1]

        class Work:
            """One tile of queries: where it is, and its KV tiles step by step."""

            def __init__(self, index):
                div = lambda x, y: lax.div(x, I32(y))
                rem = lambda x, y: lax.rem(x, I32(y))
                bh, self.i = place_of(index, div=div, rem=rem)
                self.b, self.h = div(bh, N), rem(bh, N)
                self.q_first = self.i * rows
                self.q_stop = given["query_lengths"][self.b] if "query_lengths" in given else T
                self.k_stop = given["kv_lengths"][self.b] if "kv_lengths" in given else S
                if tabled:
                    stop, partial = self.entry("stop", self.i), self.entry("partial", self.i)
                    count = lax.max(stop, I32(1))
                    lead = jnp.where(stop > 0, partial, I32(1))
                    self.steps = schedule.Steps(None, count, I32(0), count, lead, count)
                else:
                    self.steps = self.band(None)

            def entry(self, name, *index):
                ref = given[name]
                at = [
                    x if size > 1 else 0
                    for x, size in zip((self.b, self.h), ref.shape[:2], strict=True)
                ]
                return ref[(*at, *index)]

            def band(self, own):
                found = schedule.band_steps(grid, own, self.i, wg, self.q_stop, self.k_stop)
                return schedule.Steps(*(jnp.asarray(x, jnp.int32) for x in found))

            def own_steps(self):
                return self.steps if own is None else self.band(own)

            def k_first(self, j):
                tile = self.entry("order", self.i, j) if tabled else self.steps.last - 1 - j
                return tile * keys

        @pl.when(wg < W)
        def consumer():
            plgpu.set_max_registers(config.register_split[0], action="increase")
            wait = lambda slot: plgpu.barrier_wait(kv_full.at[slot])
            free = lambda slot: ins.named_barrier("arrive", FREE + slot, threads)
            following = lambda slot: jnp.where(slot == stages - 1, I32(0), slot + 1)
            my_turn = your_turn = lambda: None
            if config.turns:
                after = lax.rem(wg + 1, I32(W))
                my_turn = lambda: ins.named_barrier("sync", turn + wg, 256)
                your_turn = lambda: ins.named_barrier("arrive", turn + after, 256)
                pl.when(wg == W - 1)(lambda: ins.named_barrier("arrive", turn, 256))
            # Units of 16 bytes: of a slot, and where the buffers begin.
            q_size, k_size, v_size = (
                c * r * w // 8
                for c, r, w in ((cq, rows, wq), (cq, keys, wq), (cv + ones, keys, wv))
            )
            q_base, k_base, v_base = (
                ins.base_of(x, 2 * w) for x, w in ((qs, wq), (ks, wq), (vs, wv))
            )
            q_base = q_base + wg * (64 * wq // 8)
            if ones:
                ins.write_ones(vs, cv, 2 * wv)

            def skip(_, slot):
                wait(slot)
                my_turn()
                your_turn()
                free(slot)
                return following(slot)

            def tile(n, index, slot):
                """One tile of queries; `slot` of its first unit, then of the next tile's."""
                work = Work(index)
                begin, end, lead, full = work.own_steps()[2:]
                count = work.steps.count
                first = work.q_first + wg * 64
                q_slot = n & (q_slots - 1)

                def clean(j, slot):
                    """Rows of V that nobody attends may hold NaN: zero them."""
                    if not cleans:
                        return
                    low, stop = attended(spec, work.q_stop, work.k_stop)
                    extra = [ins.scalar(x) for x in (work.k_first(j), low, stop, work.b)]
                    if "live" in given:
                        extra.append((given["live"], plgpu.RefType()))
                    dirty = (j < lead) | (j >= full)
                    pl.when(dirty)(lambda: ins.zero_rows(vs, slot, dead_key, extra, 2 * wv, cv))

                def score(j, s, state, masked, form, most: float | None = headroom):
                    at = Tile(first, work.k_first(j), work.b, work.h, work.k_stop, work.q_stop)
                    c = config if form == "words" else numbers
                    cap = as_cubic if form == "cubic" else None
                    rounded = dtype == jnp.bfloat16
                    return softmax(s, state, at, extras, call, c, shift, masked, most, cap, rounded)

                shapes = ((cq, rows, wq), (cq, keys, wq))
                q_tile = q_base + q_slot * q_size
                qk = lambda at: ins.qk(q_tile, k_base + at * k_size, *shapes, H, 2 * wq, dtype)
                pv = lambda o, p, at, fenced=0: ins.pv(
                    o, p, v_base + at * v_size, keys, 2 * wv, dtype, fenced
                )

                def free_q():
                    """The Q slot of the tile before: by now the store of its O has read it."""
                    if persistent:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        arrive = lambda: ins.named_barrier("arrive", Q_FREE + 1 - q_slot, threads)
                        pl.when(n > 0)(arrive)

                def computed(slot):
                    # 1. S(begin).
                    if own is not None:
                        slot = lax.fori_loop(I32(0), begin, skip, slot)
                    wait(slot)
                    my_turn()
                    s = qk(slot)
                    your_turn()
                    plgpu.wgmma_wait(0)
                    s = ins.settled(s)
                    if config.pv_first:
                        free(slot)
                    free_q()
                    form = "words"
                    if near:
                        form = "numbers"
                        away = cubic.exact_form(s, notes.noted(marks, ALWAYS), largest)
                        notes.note(marks, NOW, away)
                    # 2. P(begin). Then S(j) beside O += P(j-1) V(j-1), and P(j) beside the latter.
                    state = () if ones else (filled((64,), ROW),)
                    if shift is None:
                        state += (filled((64,), ROW, -jnp.inf), filled((64,), ROW))
                    p, state = score(begin, s, state, masks, form, None)

                    def awaited(o, state, before, done):
                        """O with the product in flight `done`, its slot free."""
                        if not config.pv_first:
                            done()
                            free(before)
                            if shift is None:
                                o = (rescaled(ins.settled(*o), state[2]),)
                        return o

                    def to_16bit(p, form):
                        words = packed if form == "words" else lambda pair: False
                        return ins.to_16bit(p, dtype, words)

                    def either(away, at, stop, steps, carry):
                        """The steps without masks, as cubics or exact in words."""

                        def exact(carry):
                            p, *rest = carry
                            p, *rest = steps(stop, "words", (cubic.to_words(p, packed), *rest))
                            return cubic.to_numbers(p, packed), *rest

                        def done(carry):
                            p, o, *rest = carry
                            plgpu.wgmma_wait(0)
                            return p, tuple(ins.settled(*o)), *rest

                        # A loop of no steps, not a branch: the first loop gets the better code.
                        last = jnp.where(away == 0, stop, at)
                        carry = done(steps(last, "cubic", carry))
                        away = notes.noted(marks, NOW)
                        return lax.cond(away == 0, lambda c: c, lambda c: done(exact(c)), carry)

                    def step(j, carry, masked, form):
                        p, o, state, (before, now) = carry
                        if config.pv_first:  # unlike 3., for LLVM would make one of what is alike
                            wait(now)
                        o = awaited(o, state, before, lambda: plgpu.wgmma_wait(0))
                        p = to_16bit(p, form)
                        if config.pv_first:
                            clean(j - 1, now)
                            my_turn()
                            o = pv(o, p, now)
                            s = qk(now)
                            your_turn()
                            plgpu.wgmma_wait(0)
                            s, *o = ins.settled(s, *o)
                            free(now)
                        else:
                            wait(now)
                            my_turn()
                            s = qk(now)
                            clean(j - 1, now)
                            o = pv(o, p, now, fenced)
                            your_turn()
                            plgpu.wgmma_wait(1)
                            s = ins.settled(s)
                        p, state = score(j, s, state, masked, form)
                        if config.pv_first and shift is None:
                            o = [rescaled(o[0], state[2])]
                        return p, tuple(o), state, (now, following(now))

                    o = tuple(filled((64, n), ACC) for n in ((V, 8) if ones else (V,)))
                    carry = (p, o, state, (slot, following(slot)))
                    at = begin + 1
                    parts = ((lead, lead_most - 1, True), (full, 1, False), (end, trail_most, True))
                    for stop, most, masked in parts:
                        if not most > 0:
                            continue
                        stop = jnp.clip(stop, at, end)
                        steps = lambda stop, form, carry, at=at, masked=masked: lax.fori_loop(
                            at, stop, functools.partial(step, masked=masked, form=form), carry
                        )
                        if near and not masked:
                            carry = either(away, at, stop, steps, carry)
                        else:
                            carry = steps(stop, form, carry)
                        at = stop

                    # 3. The last product, O / l and the log-sum-exp.
                    p, o, state, (before, now) = carry
                    o = awaited(o, state, before, ins.last_wait)
                    p = to_16bit(p, form)
                    wait(now)
                    clean(end - 1, now)
                    o = pv(o, p, now)
                    plgpu.wgmma_wait(0)
                    o = ins.settled(*o)
                    free(now)
                    slot = following(now)
                    if own is not None:
                        slot = lax.fori_loop(end, count, skip, slot)
                    if near:
                        assert shift is not None
                        most = (end - begin) * keys
                        bad = cubic.disproved(o[1], first, most, spec, shift)

                        @pl.when((notes.noted(marks, NOW) == 0) & (bad != 0))
                        def _():
                            notes.note_once(undone, wg, n)
                            notes.note(marks, ALWAYS, I32(1))

                    if ones:
                        o, *sums = o
                        state = tuple(sums)
                    where = Tile(first, I32(0), work.b, work.h, work.k_stop, work.q_stop)
                    sinks = given.get("sinks")
                    o = finished(o, state, lse, sinks, where, call, shift, spec.result_dtype)
                    if not staged:
                        wide.store_rows(o, out, work.b, first, work.h, ACC)
                        return slot
                    ins.store_rows(o, os, q_slot, wg * 64, 2 * wv)
                    plgpu.commit_smem()
                    for c in range(cv):
                        at = out.at[work.b, pl.ds(first, 64), work.h, pl.ds(none + c * wv, wv)]
                        plgpu.copy_smem_to_gmem(os.at[q_slot, c, pl.ds(wg * 64, 64)], at)
                    return slot

                def passed(slot):
                    """What others wait for, where no row is there."""
                    free_q()
                    slot = lax.fori_loop(I32(0), count, skip, slot)
                    wait(slot)
                    free(slot)
                    return following(slot)

                plgpu.barrier_wait(q_ready.at[q_slot])
                return lax.cond(first < T, computed, passed, slot) if idle else computed(slot)

            def decide():
                plgpu.wait_smem_to_gmem(0)  # before a tile is stored again
                all_meet()

            if near:
                notes.note_once(undone, wg, I32(-1))
                notes.note(marks, ALWAYS, I32(0))
            for_each_tile(tile, I32(0), decide)
            if config.turns:
                pl.when(wg == 0)(lambda: ins.named_barrier("sync", turn, 256))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == W)
        def producer():
            plgpu.set_max_registers(config.register_split[1], action="decrease")

            def tile(n, index, used):
                work = Work(index)
                hk = lax.div(work.h, I32(N // K))
                q_slot = n & (q_slots - 1)
                if persistent:
                    wait = lambda: ins.named_barrier("sync", Q_FREE + q_slot, threads)
                    pl.when(n >= q_slots)(wait)
                for c in range(cq):
                    at = q.at[work.b, pl.ds(work.q_first, rows), work.h, pl.ds(none + c * wq, wq)]
                    plgpu.copy_gmem_to_smem(at, qs.at[q_slot, c], q_full.at[q_slot])

                def scale():
                    plgpu.barrier_wait(q_full.at[q_slot])
                    cubic.scale(qs, q_slot, 2 * wq, log2_scale)
                    plgpu.barrier_arrive(q_scaled.at[q_slot])

                @pl.loop(I32(0), work.steps.count + 1)
                def _(u):
                    last, slot = work.steps.count - 1, lax.rem(used + u, I32(stages))
                    wait = functools.partial(ins.named_barrier, "sync", FREE + slot, threads)
                    pl.when(used + u >= stages)(wait)
                    k_first = jnp.where(u <= last, work.k_first(lax.min(u, last)), S)
                    v_first = jnp.where(u > 0, work.k_first(lax.max(u - 1, I32(0))), S)
                    for x, smem, first, chunks, width in (
                        (k, ks, k_first, cq, wq),
                        (v, vs, v_first, cv, wv),
                    ):
                        for c in range(chunks):
                            at = x.at[
                                work.b, pl.ds(first, keys), hk, pl.ds(none + c * width, width)
                            ]
                            plgpu.copy_gmem_to_smem(at, smem.at[slot, c], kv_full.at[slot])
                    if near:  # Q is there, and the consumers still have slots of the tile before
                        pl.when(u == 0)(scale)

                return used + work.steps.count + 1

            for_each_tile(tile, I32(0), all_meet)

    def dead_key(row, first_key, first, stop, batch, *live):
        """Whether nobody attends the key in a row of a tile of V."""
        key = arith.addi(row, first_key.registers[()])
        dead = sc.compare(key, "slt", first.registers[()])
        dead = arith.ori(dead, sc.compare(key, "sge", stop.registers[()]))
        if live:
            value = sc.load(live[0], sc.row_of(live[0], batch.registers[()]), sc.clipped(key, S))
            dead = arith.ori(dead, sc.compare(value, "eq", arith.constant(value.type, 0)))
        return dead

    def buffer(*shape):
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(2 * shape[-1]),))

    words = plgpu.SMEM((2, 4 * W), jnp.int32), plgpu.SMEM((W,), jnp.int32)
    q_scaled = plgpu.Barrier(num_arrivals=1, num_barriers=q_slots)
    cubic_scratch = (*words, q_scaled) if near else ()
    call_kernel = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((B, T, N, V), spec.result_dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("x",),
        num_threads=W + 1,
        thread_name="wg",
        scratch_types=[
            buffer(q_slots, cq, rows, wq),
            buffer(stages, cq, keys, wq),
            buffer(stages, cv + ones, keys, wv),
            *([buffer(1, cv, rows, wv)] if staged and not share else []),
            plgpu.Barrier(num_arrivals=cq, num_barriers=q_slots),
            plgpu.Barrier(num_arrivals=cq + cv, num_barriers=stages),
            *cubic_scratch,
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    results = call_kernel(operands.query, operands.key, operands.value, *side.values())
    # In a loop that stacks a result which something else reads too, XLA (JAX 0.11.2) would run the kernel
    # twice, once into the stack: openxla/xla#45799.
    return tuple(lax.optimization_barrier(tuple(results)))


def multiprocessors() -> int:
    """Of the GPU here, or of an H200 where there is none."""
    try:
        return getattr(jax.devices("gpu")[0], "core_count", 132)
    except RuntimeError:
        return 132


def filled(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> Any:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
