"""Tile sizes and schedules of the forward kernel, with the evidence for each choice.

Figures: one H200, 2026-11-30, JAX 0.11.2, driver 580, ptxas 13.0, bfloat16, cap 50, in TFLOP/s, burst
(0.05 s after a pause) / sustained (0.2 s, 700 W, clock pulled down). Spread about 2%. `wW K` is W
warpgroups and K keys, `eab` a of every b exp2 on the multiply-add pipe, `t` turns, `p` persistent, `f` PV
first, `hab` a of every b pairs of exp2 in float16 and the row sums by a column of ones. Without `h` they are
by additions. "Apart": K and V had slots of their own, as the kernel had them before. "Cubic": standard normal
logits, for which the cap is a cubic; all other figures with a cap are of the exact form.
"""

import dataclasses

from jaxcap.softcap import bounded_shift
from jaxcap.spec import AttentionSpec

#: Largest sum of a thread's entries of a row beside an old maximum, as a power of two (`softmax`). float16
#: ends at 2**16; in float32 products with values and their sums have 2**97 left.
HEADROOM = {"bfloat16": 30, "float16": 14}


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """One forward kernel: `warpgroups` of 64 queries each share tiles of `keys` keys."""

    warpgroups: int
    keys: int
    stages: int  # slots of a tile of K and one of V
    pv_first: bool = False  # a step's products are awaited together: none beside P, more registers
    turns: bool = False  # the warpgroups issue their products by turns (ping-pong)
    exp_fma: tuple[int, int] | None = None  # a of every b exp2 on the multiply-add pipe
    # Bounded and bfloat16: row sums by a column of ones beside V, which takes room for a chunk a stage, and
    # with them a of every b pairs of exp2 in float16 instead of `exp_fma`.
    ones: bool = True
    exp_packed: tuple[int, int] | None = None
    cubic: bool = False  # with ones: the cap as a cubic where the logits allow it, see `cubic`
    persistent: bool = False  # a CTA takes a list of tiles (`schedule`); needs room for two of Q

    @property
    def queries(self) -> int:
        return 64 * self.warpgroups

    @property
    def register_split(self) -> tuple[int, int]:
        """Registers of a thread, of consumers and of the producer."""
        return {1: (240, 40), 2: (240, 24), 3: (160, 32), 4: (112, 32)}[self.warpgroups]


# Head size 256, causal 8k: this 763 / 696, apart 768 / 688, without t 767 / 692; full 766 / 706, without t
# 768 / 699, apart 758 / 694; without a cap 775 / 692, apart 760 / 675, without t 777 / 693, f 775 / 694
# (FlashAttention 3: 775 / 673). Apart: e13 768 / 710 beside 776 / 715; keys 80 772 / 705 with spills; with
# the maximum of every tile, no cap, 713 / 623; ones as a product of their own 757 / 673 beside 778 / 686,
# as a second wgmma for half the columns 701 / 697 beside 776 / 705.
WIDE = ForwardConfig(2, 64, 2, turns=True, ones=False)
# The same with a cap, bounded, and without masks but of the band: causal 781 / 703 and 771 / 689, WIDE in the
# same runs 771 / 686 and 739 / 689, this without t 769 / 691; full 791 / 712 beside 770 / 721. All with sums
# of P before it is rounded.
CAPPED_256 = dataclasses.replace(WIDE, keys=80)
# Q and O in chunks of different widths, so that O has no room where Q was.
WIDE_APART = dataclasses.replace(WIDE, keys=48)
# 192, causal 8k: this 738 / 675, apart without h 727 / 666; h34 743 / 674; ones without h 724 / 653;
# another run: this 747 / 668, without t 742 / 659, f 727 / 641. Without h: w2 96 t 725 / 646, without ones
# 702 / 629.
SIZE_192 = ForwardConfig(2, 80, 2, turns=True, exp_packed=(1, 2))
# 128, full 8k: this 731 / 653 (FlashAttention 3 plain in the same run 739 / 667), causal 699 / 620 (722 /
# 633), window 4096 of 8k 684 / 601, with four stages and without p 680 / 601. Apart, h12: 685 / 634, causal
# 689 / 622, window 642 / 572. h12 704 / 638 full; h58 721 / 642, causal 694 / 623; h78 710 / 637; h11 708 /
# 636, causal 662 / 598; h38 679 / 617. f 80 with two stages: h12 726 / 643, h34 719 / 641, causal 680 /
# 597; f h12 700 / 625; w2 128 h12 675 / 604, f 642 / 579. Without ones, apart, full: e13 649 / 599, p 658 /
# 598; causal: e13 p 646 / 598, with turns 631 / 582. Between transfers of a ring four stages, apart, were
# 615 and three, whose slots were divided for by three in every step, 562; four together 618, of which three
# are the same loop.
# Cubic: full 766 / 691 (exact in the same run 705 / 651), causal 731 / 662 (665 / 617), window 691 / 636
# (664 / 609), 32k with a cap of 30 777 / 695 (716 / 649), 512 keys 386 / 362 (415 / 372: not there). Logits
# that reach the cap, one step of P V under the fence of S: full 689 / 653 (734 / 659), causal 689 / 632
# (689 / 629).
CAPPED_128 = ForwardConfig(3, 64, 3, exp_fma=(1, 3), exp_packed=(3, 4), persistent=True, cubic=True)
# 128, causal 16 x 1k, where 192 queries leave a third of the last tile empty: this 506 / 454
# (FlashAttention 3 plain 513 / 456), h34 508 / 452, apart 497 / 447; h11 448, w3 64 three stages h34 429
# sustained. Without h, apart, another run: 461, without p 389.
# Cubic: 507 / 454 (502 / 446); where logits reach the cap 488 / 436 (502 / 446).
CAPPED_128_1K = ForwardConfig(2, 64, 4, exp_packed=(1, 2), persistent=True, cubic=True)
# 128 without a cap, full 8k: this 818 / 720 (FlashAttention 3: 734 / 666), apart 787 / 721, f 808 / 722;
# ones, beside a maximum that is 2**29 too large so that one OR of P shows whether it held, 807 / 718, f 788
# / 705. Apart: without p 783 / 681; w2 128 t 774 / 687; w2 112 t 751 / 678; w2 96 t 665 / 597. With the
# maximum of every tile: 662 / 604. Window of 4096: 732 / 663, without p 725 / 656, apart 732 / 649.
# Another run, two steps of P V under the fence of S: full 792 / 737 beside 800 / 722, causal 771 / 712 beside
# 779 / 704.
UNCAPPED_128 = ForwardConfig(3, 64, 4, persistent=True, ones=False)
# The same, causal 16 x 1k: this 548 / 486, apart 556 / 491; without t 494 / 468; w2 64 530 / 471; w2 80 t
# 510 / 457; w2 96 499 / 457; f: w2 96 497 / 446, w2 128 483 / 460. FlashAttention 3 497 / 448 in another
# run.
UNCAPPED_128_1K = ForwardConfig(2, 128, 2, turns=True, persistent=True, ones=False)
# 96, causal 8k: this 557 / 518; with three stages 568 / 514; h12 529 / 496, apart 528 / 497. Without h,
# apart: 527 / 488; without p 516 / 483; w3 80 e12 p 526 / 491.
# Cubic: 631 / 575 (579 / 520).
SIZE_96 = ForwardConfig(3, 64, 4, exp_fma=(1, 2), exp_packed=(3, 4), persistent=True, cubic=True)
# 64, causal 8k: this 484 / 461 (FlashAttention 3 plain 541 / 491), apart w4 48 h58 446 / 433; f h78 460 /
# 447, h34 428 / 427; w4 48 without f: h78 475 / 454, h58 465 / 441, h11 456 / 438; w3 128 three stages f
# h11 458 / 438, h58 447 / 433; w3 80 h58 445 / 427; w3 64 h58 433 / 426. Without h, apart: w4 48 e12 417 /
# 414; w3 64 e12 408 / 404. With segments w3 64 h34 takes 3% longer.
# Cubic: causal 579 / 523 (474 / 454), full 537 / 509 (455 / 442); where logits reach the cap 464 / 451 (475 /
# 460).
SIZE_64 = ForwardConfig(
    4, 64, 4, pv_first=True, exp_fma=(1, 2), exp_packed=(1, 1), persistent=True, cubic=True
)
# 64 without a cap, causal 8k: this 620 / 559 (FlashAttention 3: 541 / 487), w4 48 without f 574 / 522,
# apart 546 / 516; apart: w3 80 538 / 504; w3 64 518 / 487, with p 529 / 495, with e14 448 / 421; w2 128 t
# 472 / 455. With the maximum of every tile: w3 64 432 / 426. With segments w3 64 takes 7% longer.
UNCAPPED_64 = ForwardConfig(4, 64, 4, pv_first=True, persistent=True, ones=False)
# Bias, boolean masks, ALiBi, dropout: 240 registers a thread.
HEAVY = ForwardConfig(2, 64, 4)
# One tile of 64 queries, or two.
SHORT = ForwardConfig(1, 64, 4)


def forward_config(spec: AttentionSpec) -> ForwardConfig:
    """The configuration that a call runs with."""
    size = max(spec.head_size, spec.value_size)
    positions = spec.query_positions or spec.kv_positions
    masked = bool(spec.query_lengths or spec.kv_lengths or spec.segment_ids or positions)
    heavy = spec.bias_shape or spec.mask_shape or spec.alibi or spec.dropout_rate
    if size > 192:
        if 192 < min(spec.head_size, spec.value_size) <= 224 < size:
            return WIDE_APART
        simple = not masked and not heavy and spec.head_size == spec.value_size
        bounded = spec.dtype == "bfloat16" and bounded_shift(spec, spec.dtype) is not None
        return CAPPED_256 if simple and bounded else WIDE
    if size > 128:
        return SIZE_192
    if spec.query_length <= 64:
        return SHORT
    if heavy or spec.query_length <= 128:
        return HEAVY
    capped = spec.softcap is not None
    if size <= 64:
        return SIZE_64 if capped else UNCAPPED_64
    if size <= 96:
        return SIZE_96
    low, high = spec.band
    if not masked and low is None and high is not None and 768 < spec.query_length <= 1536:
        return CAPPED_128_1K if capped else UNCAPPED_128_1K
    return CAPPED_128 if capped else UNCAPPED_128
