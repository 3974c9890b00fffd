"""Tile sizes of the backward kernel on sm90, with the evidence for each."""

import dataclasses
from typing import Literal

from jaxcap.softcap import LARGE_CAP

Design = Literal["rows", "products"]


LOADER_REGISTERS = 24


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How one thread block works through the queries of its KV tile.

    `rows`: every compute warpgroup owns `block_kv / compute` rows of the KV tile and does S^T, dP^T, dV
    and dK for them; another computes dQ = dS K, adds it to memory and, without `loader`, issues the loads.
    `products`: warpgroup 0 does S^T and dV, warpgroup 1 dP^T and dK, warpgroup 2 dQ and the loads.
    """

    design: Design
    block_q: int
    block_kv: int
    compute: int  # compute warpgroups; one more computes dQ
    stages: int  # tiles of Q in flight, and of dO
    stages_ds: int  # tiles of dS between the compute warpgroups and the one for dQ
    dq: Literal["tma", "red"]  # staged TMA reduce-add, or red.global.add.v4 from registers
    registers: tuple[int, int]  # of a compute warpgroup, of the dQ warpgroup
    dq_buffers: int = 2
    delta_late: bool = False  # delta is subtracted in step 5 instead of starting dP^T from -delta
    load_early: bool = False  # Q and dO are loaded beside adding the last piece of dQ, not after it
    q_by_ds: bool = False  # `products`: warpgroup 1 loads Q as soon as both have read it
    joined: bool = False  # `rows`: Q and dO of a step share their barriers
    paired: bool = False  # in bfloat16: 1 - t^2 and its product with P in pairs of float16
    late: bool = False  # with `loader`: where tiles have masks, dS is announced beside the next S
    loader: bool = False  # one more warpgroup only loads, as soon as a tile's place is free
    evidence: str = ""

    def __post_init__(self) -> None:
        rows = self.design == "rows"
        assert rows or not self.joined, "of `rows`"
        assert self.joined or not self.loader, "the loads wait for q_free alone"
        assert not self.q_by_ds or self.design == "products", "of `products`"
        assert not (self.loader and self.load_early), "two warpgroups would load"
        assert self.loader or not self.late, "who adds dQ would load too late"

    def pairs(self, dtype: str, softcap: float | None) -> bool:
        """Whether 1 - t^2 of a call is in pairs of float16: not where tanh is the accurate one."""
        return self.paired and dtype == "bfloat16" and (softcap or 0.0) <= LARGE_CAP

    @property
    def warpgroups(self) -> int:
        return self.compute + 1 + self.loader

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def rows(self) -> int:
        """Rows of the KV tile that one compute warpgroup works on."""
        return self.block_kv // self.compute if self.design == "rows" else self.block_kv


#: By the larger of the two head sizes, rounded up to 64. All measured on one H200, 2026-11-30, cap 50, length
#: 8192, TFLOP/s of the whole backward (delta, zero fill and conversion of dQ in it): first calls / sustained.
#: More in docs/kernels.md.
CONFIGS = {
    64: BackwardConfig(
        design="rows",
        block_q=64,
        block_kv=192,
        compute=3,
        stages=2,
        stages_ds=2,
        dq="tma",
        registers=(144, 80),
        load_early=True,
        joined=True,
        paired=True,
        evidence="paired beside without it: causal 501 / 476 and 490 / 459, full 518 / 490 and 499 / 458. "
        "Before: causal 491 / 468, in the same run without joined 480 / 459, with four stages 477 / 459, "
        "and 452 / 434 before load_early and joined. Lost, when it was 446 / 424: delta_late 439 / 422; "
        "two compute warpgroups on 128 x 128 448 / 419, on 64 x 128 with dP^T beside S^T 387 / 380",
    ),
    128: BackwardConfig(
        design="rows",
        block_q=64,
        block_kv=128,
        compute=2,
        stages=2,
        stages_ds=2,
        dq="tma",
        registers=(208, 72),
        delta_late=True,
        joined=True,
        late=True,
        loader=True,
        evidence="late beside without it: causal 32k 585 / 562 and 571 / 549, causal 582 / 531 and 561 / "
        "528, window 555 / 510 and 551 / 507, 16 x 1k 356 / 337 and 355 / 341; where no tile has masks "
        "586 / 553 and 596 / 554, so it is not done there. Before: full 609 / 578, window 566 / 521, "
        "causal 580 / 538, in the same run without loader (216 registers) 561 / 543, 543 / 507 and 574 / "
        "535, another run causal 577 / 518 and 545 / 499; with "
        "three stages full 604 / 556, causal 534 / 500. Without loader causal 565 / 526, without joined too "
        "551 / 494. Lost: "
        "load_early 551 / 521 beside 566 / 529; -delta added by a product with ones, in three parts "
        "of 16 bits, 558 / 528. When it was 534 / 493, and 570 / 538 full: without delta_late 532 / "
        "488 and 573 / 533; P (1 - t^2) through shared memory 521 / 474; three stages of Q 513 / 466, "
        "of dO 570 / 528 full. dQ by 128 columns and dP^T beside S^T spill",
    ),
    192: BackwardConfig(
        design="products",
        block_q=64,
        block_kv=64,
        compute=2,
        stages=2,
        stages_ds=1,
        dq="red",
        registers=(208, 88),
        q_by_ds=True,
        paired=True,
        evidence="as for 256; not tuned",
    ),
    256: BackwardConfig(
        design="products",
        block_q=64,
        block_kv=64,
        compute=2,
        stages=2,
        stages_ds=1,
        dq="red",
        registers=(208, 88),
        q_by_ds=True,
        paired=True,
        evidence="paired beside without it: causal 483 / 441 and 474 / 431. Before: 484 / 450 and 478 / 467, "
        "in the same runs without q_by_ds 444 / 409 and 455 / 426, with dO loaded so as well 420 / 404, "
        "load_early 392 / 388, -delta by a product with ones 486 "
        "/ 460 and 487 / 461. Lost, when it was 444 / 410: delta_late 436 / 401, Pallas' own barriers "
        "442 / 410; TMA reduce (another kernel) 389 to 412",
    ),
}


#: 128 with more registers, for dropout and the gradient of a bias.
HEAVY_128 = dataclasses.replace(
    CONFIGS[128], loader=False, late=False, registers=(216, 72), evidence=""
)


def config_for(head_size: int, value_size: int, heavy: bool = False) -> BackwardConfig:
    """The configuration for a pair of head sizes up to 256; `heavy`: dropout or the gradient of a bias."""
    size = -(-max(head_size, value_size) // 64) * 64
    return HEAVY_128 if heavy and size == 128 else CONFIGS[size]
