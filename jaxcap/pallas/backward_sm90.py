"""The backward kernel for sm90: dK, dV and dQ in one pass, five matrix products a tile.

A thread block owns one tile of keys of one KV head and walks through the query tiles that see it, over all
query heads of the group, so that dK and dV of the group are summed in registers:

    1  S^T  = K Q^T                          (keys down, queries across)
    2  P    = exp2(cap log2(e) tanh(scale S / cap) - lse log2(e)),  D = P (1 - tanh^2)
    3  dP^T = V dO^T - delta                 (starts from -delta; with `delta_late` or dropout, in 5)
    4  dV  += P dO
    5  dS   = D dP
    6  dK  += dS Q
    7  dQ  += dS^T K                         (float32 in global memory, several blocks add)

Warpgroups of 128 threads. Barriers in shared memory, their arrivals in brackets:
    kv_full    K, V and their row vectors are there                           [copies]
    q_full     stage of Q, -lse and its row vectors is there                  [copies]
    do_full    stage of dO and -delta is there                                [copies]
    q_free     nobody reads the stage of Q any more                           [compute]
    do_free    the same of dO                                                 [compute]
    ds_full    a dS tile is complete; `late`: and S of the next step begun    [its writers]
    ds_free    dQ has read the dS tile                                        [1]
    d_full     (design `products`) a D tile is complete                       [1]
    d_free     (design `products`) dS has been made of it                     [1]
    clean      rows of Q and dO that attend nothing are zero                  [compute]
With `joined` q_full and q_free are of dO as well, and do_full and do_free stay unused.

Lengths: TMA clips every tile at the array's own end and fills up with zeros, so nothing is padded. Where the
number of rows is no multiple of 8, or a head size none of 64, tiles are copied in chunks of 64 columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcap.pallas import wide
from jaxcap.pallas.backward_config import LOADER_REGISTERS
from jaxcap.pallas.backward_plan import WIDTH, Plan, Walk
from jaxcap.pallas.backward_scores import (
    boost,
    probabilities,
    red_add,
    score_gradients,
    store_fragments,
    store_pairs,
)
from jaxcap.pallas.backward_tiles import (
    F32,
    TILED16,
    WGMMA,
    Tile,
    i32,
    over_head,
    to_head,
    zeros,
)

wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive


class Block:
    """One thread block: its references, barriers and the roles of its warpgroups."""

    def __init__(self, plan: Plan, refs: dict[str, Any]):
        self.plan, self.refs, self.c = plan, refs, plan.config
        b, h, n = (lax.axis_index(a) for a in ("b", "h", "n"))  # they start in this order
        self.b, self.h, self.n = plan.block_at((b * plan.kv_heads + h) * plan.kv_tiles + n)
        if plan.deterministic:  # blocks start in the order in which they add to dQ, see `ranks`
            self.n = plan.kv_tiles - 1 - self.n
        self.walk = Walk(plan, refs, self.b, self.n)
        self.K = Tile(plan, refs["ks"], plan.padded_head_size)
        self.V = Tile(plan, refs["vs"], plan.padded_value_size)
        self.Q = Tile(plan, refs["qs"], plan.padded_head_size)
        self.dO = Tile(plan, refs["dos"], plan.padded_value_size)

    def __getattr__(self, name: str) -> Any:
        return self.refs[name]

    def row_of(self, name: str) -> Any:
        return i32(0) if name in self.plan.shared_rows else self.b

    @property
    def kv_at(self) -> tuple:
        return self.b, pl.ds(self.n * self.c.block_kv, self.c.block_kv), self.h

    # -- loads, by the last warpgroup --
    def load_kv(self, k: bool) -> None:
        if k:
            self.K.load(self.k, self.kv_at, self.kv_full)
            keys = pl.ds(self.n * self.c.block_kv, self.c.block_kv)
            for name in ("dead", "kseg", "kpos"):
                if name in self.refs:
                    source = self.refs[name].at[self.row_of(name), keys]
                    plgpu.copy_gmem_to_smem(source, self.refs[name + "_s"], self.kv_full)
        else:
            self.V.load(self.v, self.kv_at, self.kv_full)

    def _place(self, at: tuple) -> tuple[Any, Any, Any]:
        """Query head, query tile, its rows."""
        g, i = at
        return self.h * self.plan.group + g, i, pl.ds(i * self.c.block_q, self.c.block_q)

    def load_q(self, at: tuple, stage: Any) -> None:
        head, _, rows = self._place(at)
        barrier = self.q_full.at[stage]
        self.Q[stage].load(self.q, (self.b, rows, head), barrier)
        plgpu.copy_gmem_to_smem(self.nlse.at[self.b, head, rows], self.nlse_s.at[stage], barrier)
        for name in ("qseg", "qpos"):
            if name in self.refs:
                source = self.refs[name].at[self.row_of(name), rows]
                plgpu.copy_gmem_to_smem(source, self.refs[name + "_s"].at[stage], barrier)

    def load_do(self, at: tuple, stage: Any) -> None:
        head, _, rows = self._place(at)
        barrier = (self.q_full if self.c.joined else self.do_full).at[stage]
        self.dO[stage].load(self.do, (self.b, rows, head), barrier)
        plgpu.copy_gmem_to_smem(
            self.ndelta.at[self.b, head, rows], self.ndelta_s.at[stage], barrier
        )

    # -- 2: P and D --
    def softmax(self, s: Any, stage: Any, at: tuple, row: Any) -> tuple[Any, Any]:
        """P and D of an S^T tile whose first key is row `row` of the KV tile."""
        plan, scores = self.plan, self.plan.scores
        g, i = at
        head = self.h * plan.group + g
        k0, q0 = self.n * self.c.block_kv + row, i * self.c.block_q
        refs: dict[str, Any] = {}
        for name in ("dead", "kseg", "kpos"):
            if name in self.refs:
                refs[name] = self.refs[name + "_s"].at[pl.ds(row, s.shape[0])]
        for name in ("qseg", "qpos"):
            if name in self.refs:
                refs[name] = self.refs[name + "_s"].at[stage]
        if scores.bias is not None:
            one_head = self.bias.shape[1] == 1
            refs["bias"] = self.bias.at[self.row_of("bias"), i32(0) if one_head else head]
        plane = i32(0)
        if scores.mask is not None:
            batch, heads = scores.mask_planes
            refs["mask"] = self.mask
            plane = (self.b * heads if batch > 1 else 0) + (head if heads > 1 else 0) + i32(0)
        if scores.alibi:
            refs["slope"] = self.slopes.at[self.row_of("slopes"), head]
        if scores.dropout_rate:
            refs["place"] = self.places.at[self.b, head]

        def run(masked: bool, aligned: bool = True) -> tuple[Any, Any]:
            nlse = self.nlse_s.at[stage]
            return probabilities(scores, s, nlse, k0, q0, plane, refs, masked, aligned)

        def with_masks(aligned: bool = True) -> tuple[Any, Any]:
            partial = self.walk.partial(i, row, s.shape[0])
            if partial is None:
                return run(False, aligned)
            return lax.cond(partial, lambda: run(True, aligned), lambda: run(False, aligned))

        if not scores.dropout_rate:
            return with_masks()
        q_start, q_step, k_start, k_step = (self.places[self.b, head, x] for x in range(4, 8))
        aligned = (q_step == 1) & (k_step == 1) & (lax.rem(q_start | k_start, i32(16)) == 0)
        return lax.cond(aligned, lambda: with_masks(True), lambda: with_masks(False))

    def init_dp(self, acc: Any, stage: Any) -> None:
        """dP^T starts from -delta, so that the subtraction is free; or from zero, delta joins in step 5."""
        if self.c.delta_late or self.plan.scores.dropout_rate:
            acc[...] = zeros(acc.shape)
        else:
            delta = plgpu.load(self.ndelta_s.at[stage], layout=WGMMA.reduce(0))
            acc[...] = lax.broadcast_in_dim(delta, acc.shape, [1])

    def gradients(self, d: Any, dp: Any, stage: Any, at: tuple, row: Any, whole: list[Any]) -> Any:
        """5: dS, and the gradient of the bias."""
        scores, bias = self.plan.scores, None
        if whole:
            g, i = at
            one_head = self.dbias.shape[1] == 1
            head = i32(0) if one_head else self.h * self.plan.group + g
            k0, q0 = self.n * self.c.block_kv + row, i * self.c.block_q
            bias = (whole[0], self.dbias.at[self.row_of("bias"), head], k0, q0)
        return score_gradients(scores, d, dp, self.ndelta_s.at[stage], self.c.delta_late, bias)

    def clean_kv(self, tile: Tile, first: Any, rows: int) -> None:
        """Zeroes the keys that nobody attends.

        Not where no query sees the tile: another warpgroup may write its zeros over it already.
        """
        if not self.plan.scores.dead_keys:
            return

        @pl.when(self.walk.total > 0)
        def _():
            for m in range(rows // 64):
                at = first + 64 * m
                dead = plgpu.load(self.dead_s.at[pl.ds(at, 64)], layout=WGMMA.reduce(1))
                tile.keep_rows(at, dead == 0)
            plgpu.commit_smem()

    def finish(self, tile: Tile, first: Any, value: Any, target: Any) -> None:
        """Writes dK or dV over K or V in shared memory and begins to copy it out; in float32 directly."""
        if self.plan.partial:
            row = self.n * self.c.block_kv + first
            wide.store_rows(value, target, self.b, row, self.h, WGMMA)
            return
        rows = pl.ds(first, self.c.rows)
        tile.write(rows, value.astype(self.plan.dtype))
        plgpu.commit_smem()
        keys = pl.ds(self.n * self.c.block_kv + first, self.c.rows)
        tile.store(rows, target, (self.b, keys, self.h))

    def drain(self, free: Any, stages: int) -> None:
        """Waits until the last tiles handed over have been read."""
        for d in range(stages, 0, -1):

            @pl.when(self.walk.total >= d)
            def _(d=d):
                wait(free.at[lax.rem(self.walk.total - d, i32(stages))])

    @property
    def dk_factor(self) -> float:
        return self.plan.scores.scale * 2.0 ** -boost(self.plan.dtype)

    @property
    def dv_factor(self) -> float:
        return 2.0 ** -boost(self.plan.dtype) / (1.0 - self.plan.scores.dropout_rate)

    # -- roles --
    def compute_rows(self, wg: Any) -> None:
        """Design `rows`: steps 1 to 6 for `rows` keys of the tile."""
        c, plan = self.c, self.plan
        first = wg * c.rows
        rows = pl.ds(first, c.rows)
        wait(self.kv_full)
        self.clean_kv(self.K, first, c.rows)
        self.clean_kv(self.V, first, c.rows)

        late = c.late and plan.scores.masks

        def announce(j):
            plgpu.commit_smem()
            arrive(self.ds_full.at[lax.rem(j, i32(c.stages_ds))])

        def outer(s_acc, dk_acc, dv_acc):
            @self.walk.each
            def _(j, at):
                stage = lax.rem(j, i32(c.stages))
                bb = lax.rem(j, i32(c.stages_ds))
                wait(self.q_full.at[stage])
                if plan.empty_queries:
                    if not c.joined:
                        wait(self.do_full.at[stage])
                    self.clean_queries(wg, at, stage)
                s_acc[...] = zeros((c.rows, c.block_q))
                over_head(s_acc, self.K, rows, self.Q[stage])  # 1
                if late:  # a fence waits for what was stored
                    pl.when(j > 0)(lambda: announce(j - 1))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                p, d, *whole = self.softmax(s, stage, at, first)  # 2

                # A branch between softmax and products keeps ptxas from moving the wait in front.
                @pl.when(j >= c.stages_ds)
                def _():
                    wait(self.ds_free.at[bb])

                if not plan.empty_queries and not c.joined:
                    wait(self.do_full.at[stage])

                def products(p_acc):
                    self.init_dp(p_acc, stage)
                    over_head(p_acc, self.V, rows, self.dO[stage])  # 3
                    groups = to_head(dv_acc, p, self.dO[stage])  # 4, beside 5
                    dp = plgpu.wgmma_accumulator_load(p_acc, wait_n=groups)
                    return self.gradients(d, dp, stage, at, first, whole)  # 5

                ds = pl.run_scoped(products, plgpu.ACC((c.rows, c.block_q), F32))
                to_head(dk_acc, ds, self.Q[stage])  # 6, beside storing dS: both only read it
                store_pairs(self.ds.at[bb, rows], ds)
                if not late:
                    announce(j)
                plgpu.wgmma_wait(0)
                arrive(self.q_free.at[stage])
                if not c.joined:
                    arrive(self.do_free.at[stage])

            if late:
                pl.when(self.walk.total > 0)(lambda: announce(self.walk.total - 1))
            return dk_acc[...], dv_acc[...]

        dk, dv = pl.run_scoped(
            outer,
            plgpu.ACC((c.rows, c.block_q), F32),
            plgpu.ACC((c.rows, plan.padded_head_size), F32),
            plgpu.ACC((c.rows, plan.padded_value_size), F32),
        )
        # Only this warpgroup read its rows of V.
        self.finish(self.V, first, dv * self.dv_factor, self.dv)
        self.drain(self.ds_free, c.stages_ds)  # dQ reads all of K until its last tile
        self.finish(self.K, first, dk * self.dk_factor, self.dk)
        plgpu.wait_smem_to_gmem(0)

    def clean_queries(self, wg: Any, at: tuple, stage: Any) -> None:
        """Warpgroup 0 cleans Q, warpgroup 1 dO, the third of design `rows` only waits."""
        _, i = at

        @pl.when(self.walk.partial(i, 0, self.c.block_kv))
        def _():
            for owner, tile in ((0, self.Q), (1, self.dO)):

                @pl.when(wg == owner)
                def _(tile=tile):
                    for m in range(self.c.block_q // 64):
                        lse = self.nlse_s.at[stage, pl.ds(64 * m, 64)]
                        lse = plgpu.load(lse, layout=WGMMA.reduce(1))
                        tile[stage].keep_rows(64 * m, lse > -jnp.inf)
                    plgpu.commit_smem()

            arrive(self.clean)
            wait(self.clean)

    def compute_p(self) -> None:
        """Design `products`, warpgroup 0: steps 1, 2 and 4."""
        c, plan, total = self.c, self.plan, self.walk.total
        tile = (c.block_kv, c.block_q)
        rows = pl.ds(0, c.block_kv)
        ahead = not plan.empty_queries  # S of the next tile runs beside dV
        wait(self.kv_full)
        self.clean_kv(self.K, 0, c.block_kv)

        def outer(s_acc, dv_acc):
            def start_s(stage):
                s_acc[...] = zeros(tile)
                return over_head(s_acc, self.K, rows, self.Q[stage])

            if ahead:

                @pl.when(total > 0)
                def _():
                    wait(self.q_full.at[0])

                start_s(0)
                plgpu.wgmma_wait(0)

            @self.walk.each
            def _(j, at):
                stage = lax.rem(j, i32(c.stages))
                bb = lax.rem(j, i32(c.stages_ds))
                if not ahead:
                    wait(self.q_full.at[stage])
                    wait(self.do_full.at[stage])
                    self.clean_queries(i32(0), at, stage)
                    start_s(stage)  # 1
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=None if ahead else 0)
                p, d, *whole = self.softmax(s, stage, at, 0)  # 2
                arrive(self.q_free.at[stage])

                @pl.when(j >= c.stages_ds)
                def _():
                    wait(self.d_free.at[bb])

                store_pairs(self.d.at[bb], d)
                if whole:
                    self.p.at[bb][...] = whole[0]
                plgpu.commit_smem()
                arrive(self.d_full.at[bb])
                if ahead:
                    wait(self.do_full.at[stage])
                    following = lax.rem(j + 1, i32(c.stages))

                    @pl.when(j + 1 < total)
                    def _():
                        wait(self.q_full.at[following])

                    s_acc[...] = zeros(tile)
                    to_head(dv_acc, p, self.dO[stage])  # 4
                    groups = over_head(s_acc, self.K, rows, self.Q[following])  # 1; idle at the end
                    plgpu.wgmma_wait(groups)
                    arrive(self.do_free.at[stage])
                    plgpu.wgmma_wait(0)
                else:
                    to_head(dv_acc, p, self.dO[stage])
                    plgpu.wgmma_wait(0)
                    arrive(self.do_free.at[stage])

            return dv_acc[...]

        dv = pl.run_scoped(
            outer, plgpu.ACC(tile, F32), plgpu.ACC((c.block_kv, plan.padded_value_size), F32)
        )
        self.drain(self.d_free, c.stages_ds)  # warpgroup 1 reads V until its last dP
        self.finish(self.V, 0, dv * self.dv_factor, self.dv)
        plgpu.wait_smem_to_gmem(0)

    def compute_ds(self) -> None:
        """Design `products`, warpgroup 1: steps 3, 5 and 6."""
        c, plan = self.c, self.plan
        tile = (c.block_kv, c.block_q)
        wait(self.kv_full)
        self.clean_kv(self.V, 0, c.block_kv)

        def outer(dk_acc):
            @self.walk.each
            def _(j, at):
                stage = lax.rem(j, i32(c.stages))
                bb = lax.rem(j, i32(c.stages_ds))
                wait(self.do_full.at[stage])
                if plan.empty_queries:
                    wait(self.q_full.at[stage])
                    self.clean_queries(i32(1), at, stage)

                def inner(p_acc):
                    self.init_dp(p_acc, stage)
                    over_head(p_acc, self.V, pl.ds(0, c.block_kv), self.dO[stage])  # 3
                    return plgpu.wgmma_accumulator_load(p_acc, wait_n=0)

                dp = pl.run_scoped(inner, plgpu.ACC(tile, F32))
                wait(self.d_full.at[bb])
                d = plgpu.load(self.d.at[bb], layout=WGMMA)
                whole = []
                if plan.scores.bias_gradient:
                    whole = [plgpu.load(self.p.at[bb], layout=WGMMA)]
                ds = self.gradients(d, dp, stage, at, 0, whole)  # 5
                arrive(self.do_free.at[stage])
                arrive(self.d_free.at[bb])

                @pl.when(j >= c.stages_ds)
                def _():
                    wait(self.ds_free.at[bb])

                store_pairs(self.ds.at[bb], ds)
                plgpu.commit_smem()
                arrive(self.ds_full.at[bb])
                if not plan.empty_queries:
                    wait(self.q_full.at[stage])
                to_head(dk_acc, ds, self.Q[stage])  # 6
                plgpu.wgmma_wait(0)
                arrive(self.q_free.at[stage])
                if c.q_by_ds:

                    @pl.when(j + c.stages < self.walk.total)
                    def _():
                        ahead = at
                        for _ in range(c.stages):
                            ahead = self.walk.after(ahead)
                        wait(self.q_free.at[stage])
                        self.load_q(ahead, stage)

            return dk_acc[...]

        dk = pl.run_scoped(outer, plgpu.ACC((c.block_kv, plan.padded_head_size), F32))
        self.drain(self.ds_free, c.stages_ds)
        self.finish(self.K, 0, dk * self.dk_factor, self.dk)
        plgpu.wait_smem_to_gmem(0)

    def first_loads(self) -> tuple[Any, Any]:
        """Begins to load K, V and as many tiles of Q and dO as there is room for; returns where to go on."""
        total = self.walk.total
        self.load_kv(True)
        at = self.walk.start

        @pl.when(total > 0)
        def _():
            self.load_q(at, 0)

        self.load_kv(False)

        @pl.when(total > 0)
        def _():
            self.load_do(at, 0)

        ahead = self.walk.after(at)
        for s in range(1, self.c.stages):

            @pl.when(s < total)
            def _(ahead=ahead, s=s):
                self.load_q(ahead, s)
                self.load_do(ahead, s)

            ahead = self.walk.after(ahead)
        return ahead

    def load_ahead(self, j: Any, ahead: tuple) -> None:
        """Begins to load the tiles at `ahead`, `stages` steps after step j, over those of step j."""
        c = self.c

        @pl.when(j + c.stages < self.walk.total)
        def _():
            stage = lax.rem(j, i32(c.stages))
            if not c.q_by_ds:
                wait(self.q_free.at[stage])
                self.load_q(ahead, stage)
            if not c.joined:
                wait(self.do_free.at[stage])
            self.load_do(ahead, stage)

    def load(self) -> None:
        """With `loader`, the last warpgroup."""
        stages = self.c.stages
        self.load_kv(True)

        def step(j, at):
            stage = lax.rem(j, i32(stages))

            @pl.when(j >= stages)
            def _():
                wait(self.q_free.at[stage])

            self.load_q(at, stage)

            @pl.when(j == 0)
            def _():
                self.load_kv(False)

            self.load_do(at, stage)
            return self.walk.after(at)

        lax.fori_loop(i32(0), self.walk.total, step, self.walk.start)

        @pl.when(self.walk.total == 0)
        def _():
            self.load_kv(False)

    def compute_dq(self) -> None:
        """The warpgroup after the computing ones: step 7 and, without `loader`, the loads."""
        c, plan, total = self.c, self.plan, self.walk.total
        at = self.walk.start
        ahead = at if c.loader else self.first_loads()
        wait(self.kv_full)
        pieces = [
            (m, col)
            for m in range(0, c.block_q, 64)
            for col in range(0, plan.padded_head_size, WIDTH)
        ]

        def step(j, carry):
            g, i, *ahead = carry
            ahead = tuple(ahead)
            head = self.h * plan.group + g
            bb = lax.rem(j, i32(c.stages_ds))
            wait(self.ds_full.at[bb])
            if plan.deterministic:  # the blocks add from the last KV tile to the first
                turn = self.order.at[self.b, head, i]
                plgpu.semaphore_wait(
                    turn, self.ranks[self.b, self.n, i], decrement=False, memory_scope="gpu"
                )

            for x, (m, col) in enumerate(pieces):
                last = x == len(pieces) - 1

                def product(acc, m=m, col=col):
                    ds = self.ds.at[bb, :, pl.ds(m, 64)]
                    plgpu.wgmma(acc, ds.transpose((1, 0)), self.K.columns(col))
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                part = pl.run_scoped(product, plgpu.ACC((64, WIDTH), F32))
                if last:
                    arrive(self.ds_free.at[bb])
                    if c.load_early:
                        self.load_ahead(j, ahead)
                tile = plan.first_tile + i * (c.block_q // 64) + m // 64
                if c.dq == "red":
                    red_add(self.dq.at[self.b, head, tile], part, col // 8)
                    plgpu.commit_smem()  # keeps ptxas from interleaving the pieces (registers)
                else:
                    buffer = x % c.dq_buffers
                    if len(pieces) % c.dq_buffers:  # else step after step begins with the same
                        buffer = lax.rem(j * len(pieces) + x, i32(c.dq_buffers))
                    plgpu.wait_smem_to_gmem(c.dq_buffers - 1, wait_read_only=True)
                    store_fragments(self.dqs.at[buffer], part)
                    plgpu.commit_smem()
                    target = self.dq.at[self.b, head, tile, pl.ds(col // 4, 16)]
                    plgpu.copy_smem_to_gmem(self.dqs.at[buffer], target, reduction_op="add")
            if plan.deterministic:
                if c.dq == "tma":
                    plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(turn, 1, memory_scope="gpu")

            if c.loader:
                return *self.walk.after((g, i)), *ahead
            if not c.load_early:
                self.load_ahead(j, ahead)
            return *self.walk.after((g, i)), *self.walk.after(ahead)

        lax.fori_loop(0, total, step, (*at, *ahead))
        plgpu.wait_smem_to_gmem(0)


def scratch(plan: Plan, inputs: dict[str, Any]) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    c, dtype = plan.config, plan.dtype
    SM, BR = plgpu.SMEM, plgpu.Barrier
    head, value = plan.padded_head_size, plan.padded_value_size
    copies_q = 1 if plan.whole else head // WIDTH
    copies_do = 1 if plan.whole else value // WIDTH
    out: dict[str, Any] = {
        "ks": Tile.scratch(plan, c.block_kv, head),
        "vs": Tile.scratch(plan, c.block_kv, value),
        "qs": Tile.scratch(plan, c.block_q, head, c.stages),
        "dos": Tile.scratch(plan, c.block_q, value, c.stages),
        "nlse_s": SM((c.stages, c.block_q), F32),
        "ndelta_s": SM((c.stages, c.block_q), F32),
        "ds": SM((c.stages_ds, c.block_kv, c.block_q), dtype, transforms=TILED16),
    }
    if c.dq == "tma":
        out["dqs"] = SM((c.dq_buffers, 16, 256), F32)
    if c.design == "products":
        out["d"] = SM((c.stages_ds, c.block_kv, c.block_q), dtype, transforms=TILED16)
        if plan.scores.bias_gradient:
            out["p"] = SM((c.stages_ds, c.block_kv, c.block_q), dtype, transforms=TILED16)
    keys = [name for name in ("dead", "kseg", "kpos") if name in inputs]
    queries = [name for name in ("qseg", "qpos") if name in inputs]
    for name in keys:
        out[name + "_s"] = SM((c.block_kv,), inputs[name].dtype)
    for name in queries:
        out[name + "_s"] = SM((c.stages, c.block_q), inputs[name].dtype)
    writers = c.compute if c.design == "rows" else 1
    full_q, full_do = copies_q + 1 + len(queries), copies_do + 1
    if c.joined:
        full_q += full_do
    out |= {
        "kv_full": BR(num_arrivals=copies_q + copies_do + len(keys)),
        "q_full": BR(num_arrivals=full_q, num_barriers=c.stages),
        "do_full": BR(num_arrivals=full_do, num_barriers=c.stages),
        "q_free": BR(num_arrivals=c.compute, num_barriers=c.stages),
        "do_free": BR(num_arrivals=c.compute, num_barriers=c.stages),
        "ds_full": BR(num_arrivals=writers, num_barriers=c.stages_ds),
        "ds_free": BR(num_arrivals=1, num_barriers=c.stages_ds),
    }
    if c.design == "products":
        out["d_full"] = BR(num_arrivals=1, num_barriers=c.stages_ds)
        out["d_free"] = BR(num_arrivals=1, num_barriers=c.stages_ds)
    if plan.empty_queries:
        out["clean"] = BR(num_arrivals=c.compute)
    return out


def kernel(plan: Plan, inputs: dict[str, Any], sums: dict[str, Any]) -> tuple[Any, Any]:
    """(dK, dV); adds to float32 references `dq` of shape `plan.dq_shape` and `dbias`, both unscaled.

    inputs: q, k, v, do, nlse and ndelta [B, N, padded T] float32, and what the plan asks for of
    spans [B, KV tiles, 4], ranks [B, KV tiles, Q tiles], dead, kseg, kpos [B or 1, padded S],
    qseg, qpos [B or 1, padded T], mask [elements], bias, slopes [B or 1, N, 1], places [B, N, 8].
    """
    c = plan.config
    names = list(inputs)
    places = scratch(plan, inputs)

    def body(*refs):
        named = dict(zip((*names, *sums, "dk", "dv", *places), refs, strict=True))
        if plan.deterministic:
            shape = (plan.batch, plan.query_heads, plan.q_tiles)
            named["order"] = pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
        block = Block(plan, named)
        wg = lax.axis_index("wg")
        high, low = c.registers
        # all threads start with an equal share of 65536 registers
        change = "increase" if high > 65536 // c.threads // 8 * 8 else "decrease"
        if c.design == "rows":

            @pl.when(wg < c.compute)
            def _():
                plgpu.set_max_registers(high, action=change)
                block.compute_rows(wg)

        else:
            for x, role in enumerate((block.compute_p, block.compute_ds)):

                @pl.when(wg == x)
                def _(role=role):
                    plgpu.set_max_registers(high, action=change)
                    role()

        @pl.when(wg == c.compute)
        def _():
            plgpu.set_max_registers(low, action="decrease")
            block.compute_dq()

        if c.loader:

            @pl.when(wg == c.compute + 1)
            def _():
                plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
                block.load()

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(inputs[x].shape, plan.result_dtype) for x in ("k", "v")],
        grid=(plan.batch, plan.kv_heads, plan.kv_tiles),
        grid_names=("b", "h", "n"),
        num_threads=c.warpgroups,
        thread_name="wg",
        scratch_types=list(places.values()),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        kernel_name="jaxcap_backward",
    )(*inputs.values(), *sums.values())
