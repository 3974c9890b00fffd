"""Tile sizes and schedules of the forward kernel, with the evidence for each choice.

Figures: one H200, 2026-11-30, JAX 0.11.2, driver 580, ptxas 13.0, bfloat16, cap 50, in TFLOP/s, burst
(0.05 s after a pause) / sustained (0.25 s, 700 W, clock pulled down). Spread about 2%. `wW K` is W
warpgroups and K keys, `eab` a of every b exp2 on the multiply-add pipe, `t` turns, `p` persistent, `hab` a of
every b pairs of exp2 in float16 and the row sums by a column of ones. Without `h` they are by additions.
"""

import dataclasses

from jaxcap.spec import AttentionSpec

#: Largest sum of a thread's entries of a row beside an old maximum, as a power of two (`softmax`). float16
#: ends at 2**16; in float32 products with values and their sums have 2**97 left.
HEADROOM = {"bfloat16": 30, "float16": 14}


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """One forward kernel: `warpgroups` of 64 queries each share tiles of `keys` keys."""

    warpgroups: int
    keys: int
    k_stages: int
    v_stages: int
    turns: bool = False  # the warpgroups issue their products by turns (ping-pong)
    exp_fma: tuple[int, int] | None = None  # a of every b exp2 on the multiply-add pipe
    exp_degree: int = 3
    # Bounded and bfloat16: row sums by a column of ones beside V, which takes room for a chunk a stage, and
    # with them a of every b pairs of exp2 in float16 instead of `exp_fma`.
    ones: bool = True
    exp_packed: tuple[int, int] | None = None
    persistent: bool = False  # one CTA a multiprocessor takes many tiles; needs room for two of Q
    registers: tuple[int, int] | None = None  # a thread, consumers and producer

    @property
    def queries(self) -> int:
        return 64 * self.warpgroups

    @property
    def register_split(self) -> tuple[int, int]:
        split = {1: (240, 40), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
        return self.registers or split[self.warpgroups]


# Head size 256, causal 8k: this 776 / 715; e13 768 / 710; keys 80 772 / 705 with spills. Without a cap
# 782 / 683 (FlashAttention 3: 775 / 673), with the maximum of every tile 713 / 623. Ones as a product of
# their own 757 / 673 beside 778 / 686, as a second wgmma for half the columns 701 / 697 beside 776 / 705.
WIDE = ForwardConfig(2, 64, 2, 2, turns=True, ones=False)
# Q and O in chunks of different widths, so that O has no room where Q was.
WIDE_APART = dataclasses.replace(WIDE, v_stages=1)
# 192, causal 8k: without ones 719 / 686 (with them not measured); w2 96 t 734 / 677 with a spill of 24
# bytes; w2 80 t e13 713 / 659.
SIZE_192 = ForwardConfig(2, 80, 2, 2, turns=True)
# 128, window 4096 of 8k: this 622 / 579 beside 540 / 563 without h; full 684 / 617. Without h: window 610
# / 568, e13 608 / 558, p 610 / 566; full 654 / 605, e13 649 / 599, e13 p 658 / 598, w2 128 t 592 / 560,
# w3 48 e13 535 sustained. w3 80 and 96 spill.
SIZE_128 = ForwardConfig(3, 64, 4, 4, exp_packed=(1, 2))
# 128, causal and full 8k, the shipped one before (w3 64 e13 p, w3 64) in the same process: this 679 / 620
# beside 641 / 582 and 717 / 642 beside 610 / 609 (FlashAttention 3 plain: 729 / 651, 733 / 679); h58 full
# 718 / 647; w3 64 h12 with four stages, not p, 668 / 591 and 684 / 617; ones as a product of their own:
# h12 653 / 587 and 685 / 618, h38 660 / 593 and 675 / 610, h14 667 / 605 full, without h 611 / 570 and
# 630 / 588; w2 128 t h38 639 / 577 full. Without ones, causal: e13 p 646 / 598, without p 644 / 590,
# without e13 645 / 592, with turns 631 / 582; 32k, cap 30: 673 / 612, without p 657 / 613; 16 x 512: 330
# / 369, without p 290 / 315, w2 64 e13 p 319 / 349.
CAPPED_128 = ForwardConfig(3, 64, 3, 3, exp_fma=(1, 3), exp_packed=(1, 2), persistent=True)
# 128, causal 16 x 1k, where 192 queries leave a third of the last tile empty: this 448 beside 433 without h,
# sustained; CAPPED_128 424. Without h 450 / 461; e13 449 / 442; w3 64 e13 p 442 / 428; without p 389 / 390.
CAPPED_128_1K = ForwardConfig(2, 64, 4, 4, exp_packed=(1, 2), persistent=True)
# 128 without a cap, full 8k: this 792 / 730, causal 791 / 701 (FlashAttention 3: 742 / 661, 724 / 629);
# without p 783 / 681; w2 128 t 774 / 687, causal with p 786 / 692; w2 112 t 751 / 678; w2 96 t 665 / 597.
# Window of 4096 without p: 758 / 661. With the maximum of every tile: 662 / 604, window 602 / 539.
UNCAPPED_128 = ForwardConfig(3, 64, 4, 4, persistent=True, ones=False)
# The same, causal 16 x 1k: with two heads of a group in a block, which changes little, this 550 / 479
# (FlashAttention 3: 497 / 448); w2 64 p 530 / 457; w3 64 p 503 / 456.
UNCAPPED_128_1K = ForwardConfig(2, 128, 2, 2, turns=True, persistent=True, ones=False)
# 96, causal 8k: this 527 / 488; without p 516 / 483; w3 80 e12 p 526 / 491.
SIZE_96 = ForwardConfig(3, 64, 4, 4, exp_fma=(1, 2), exp_packed=(1, 2), persistent=True)
# 64, causal 8k: this 447 / 437 beside 397 / 410 for e12 without h; h34 419 / 431, h12 412 / 413 beside
# 410 / 386; w3 80 h12 423 / 406. Without h: this e12 417 / 414; w4 64 e12 p 408 / 388; w3 64 e12 408 /
# 404; w3 96 e23 t 400 / 393.
SIZE_64 = ForwardConfig(4, 48, 4, 4, exp_fma=(1, 2), exp_packed=(5, 8), persistent=True)
# 64 without a cap, causal 8k: this 553 / 509 (FlashAttention 3: 541 / 487); w3 80 538 / 504; w3 64 518 / 487,
# with p 529 / 495, with e14 448 / 421; w2 128 t 472 / 455. With the maximum of every tile: w3 64 432 / 426.
UNCAPPED_64 = ForwardConfig(4, 48, 4, 4, persistent=True, ones=False)
# Lengths, segments and positions at 64: scalars that SIZE_64 has no registers for.
MASKED_64 = ForwardConfig(3, 64, 4, 4, exp_fma=(1, 2), exp_packed=(1, 2))
# Bias, boolean masks, ALiBi, dropout: 240 registers a thread.
HEAVY = ForwardConfig(2, 64, 4, 4)
# One tile of 64 queries, or two.
SHORT = ForwardConfig(1, 64, 4, 4)


def forward_config(spec: AttentionSpec) -> ForwardConfig:
    """The configuration that a call runs with."""
    size = max(spec.head_size, spec.value_size)
    positions = spec.query_positions or spec.kv_positions
    masked = bool(spec.query_lengths or spec.kv_lengths or spec.segment_ids or positions)
    heavy = spec.bias_shape or spec.mask_shape or spec.alibi or spec.dropout_rate
    if size > 192:
        apart = 192 < min(spec.head_size, spec.value_size) <= 224 < size
        return WIDE_APART if apart else WIDE
    if size > 128:
        return SIZE_192
    if spec.query_length <= 64:
        return SHORT
    if heavy or spec.query_length <= 128:
        return HEAVY
    capped = spec.softcap is not None
    if size <= 64:
        return MASKED_64 if masked else SIZE_64 if capped else UNCAPPED_64
    if size <= 96:
        return SIZE_96
    low, high = spec.band
    if low is not None or masked:
        return SIZE_128
    if high is None:
        return CAPPED_128 if capped else UNCAPPED_128
    if 768 < spec.query_length <= 1536:
        return CAPPED_128_1K if capped else UNCAPPED_128_1K
    return CAPPED_128 if capped else UNCAPPED_128
