"""The cells that `benchmarks.scaling` measures, in the order of their importance."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.scaling_model import KINDS, PASSES, Case

MASKS = ("causal", "full")
LAYOUTS = ("zigzag", "contiguous")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement: a call on `devices` GPUs, with its communication or (`silent`) without.

    `kind` "one" is a call on one GPU without context parallelism; with a share of the heads it is the
    work of one of several GPUs.
    """

    tokens: int
    devices: int
    kind: str
    load_balance: str
    mask: str
    passes: str
    silent: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    backend: str | None = "pallas"

    @property
    def key(self) -> str:
        """Its name in the results."""
        return "/".join(
            str(x)
            for x in (
                f"{self.tokens}x{self.heads}x{self.kv_heads}x{self.head_size}",
                self.mask,
                self.kind,
                self.load_balance,
                self.devices,
                self.passes,
                "silent" if self.silent else "whole",
            )
        )

    @property
    def exchange(self) -> int | None:
        """Of a hybrid: devices of the all-to-all, half of them all but not more than key heads.

        On two devices 1: a ring beside an axis that splits nothing.
        """
        return min(self.devices // 2, self.kv_heads) if self.kind == "hybrid" else None

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells that one process compiles, and then measures one after the other."""
        short = self.silent, self.tokens, self.devices, self.kind
        return (*short, self.heads, self.mask) if self.kind == "one" else short

    @property
    def case(self) -> Case:
        """What the model predicts it by."""
        return Case(
            self.tokens,
            self.devices,
            "ring" if self.kind == "one" else self.kind,
            self.load_balance,
            self.mask == "causal",
            None,
            self.heads,
            self.kv_heads,
            self.head_size,
            self.exchange,
        )

    @property
    def flops(self) -> float:
        """Of all devices: two products forward, five more backward, unmasked pairs."""
        t = self.tokens
        pairs = t * (t + 1) // 2 if self.mask == "causal" else t * t
        products = 2 if self.passes == PASSES[0] else 7
        return 2.0 * products * self.heads * self.head_size * pairs


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to measure; the lists are in the order of their importance."""

    tokens: Sequence[int]
    devices: Sequence[int]
    kinds: Sequence[str] = KINDS
    layouts: Sequence[str] = LAYOUTS
    masks: Sequence[str] = MASKS
    passes: Sequence[str] = PASSES[::-1]
    silent: bool = True
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    backend: str | None = "pallas"

    def possible(self, kind: str, devices: int) -> bool:
        if kind == "all_to_all":
            k = self.kv_heads
            return self.heads % devices == 0 and (k % devices == 0 or devices % k == 0)
        if kind == "hybrid":
            size = min(devices // 2, self.kv_heads)
            return devices > 1 and devices % size == 0 and self.kv_heads % size == 0
        return True

    def cells(self) -> Iterator[Cell]:
        """Rings first, the most GPUs first; then the other kinds and masks, then other layouts."""
        common = (self.head_size, self.dtype, self.backend)
        several = [n for n in sorted(self.devices, reverse=True) if n > 1]
        single = 1 in self.devices
        for mask, layout, kind in sorted(
            itertools.product(self.masks, self.layouts, self.kinds),
            key=lambda x: (
                self.layouts.index(x[1]) + self.masks.index(x[0]),
                self.kinds.index(x[2]),
            ),
        ):
            if layout != self.layouts[0] and (mask == "full" or kind == "all_to_all"):
                continue  # it makes no difference there
            for tokens, passes, silent in itertools.product(
                self.tokens, self.passes, (False, True) if self.silent else (False,)
            ):
                sizes = (passes, silent, self.heads, self.kv_heads, *common)
                if silent and layout != self.layouts[0]:
                    continue
                # What is exposed, the first layout shows, and the most devices.
                for devices in several[:1] if silent else several:
                    once = tokens == self.tokens[0] and layout == self.layouts[0] and not silent
                    if kind == "hybrid" and devices == 2 and not once:
                        continue  # a ring, on two
                    if self.possible(kind, devices):
                        yield Cell(tokens, devices, kind, layout, mask, *sizes)
                if single and not silent and kind == self.kinds[0] and layout == self.layouts[0]:
                    for share in (1, *reversed(several)):
                        heads, kv_heads = self.heads // share, max(1, self.kv_heads // share)
                        if heads * share == self.heads and heads % kv_heads == 0:
                            yield Cell(
                                tokens,
                                1,
                                "one",
                                LAYOUTS[0],
                                mask,
                                passes,
                                False,
                                heads,
                                kv_heads,
                                *common,
                            )
