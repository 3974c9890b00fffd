"""The shapes that are measured, and what they cost."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """One call in bfloat16 with `scale = head_size ** -0.5`; `window_left` None is unbounded.

    `logits`: their standard deviation before the cap, of normal inputs.
    """

    name: str
    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_size: int
    causal: bool
    window_left: int | None = None
    softcap: float = 50.0
    dtype: str = "bfloat16"
    logits: float = 1.0

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs of one batch entry and head, causality from the top left."""
        if not self.causal and self.window_left is None:
            return self.query_length * self.key_length
        total = 0
        for i in range(self.query_length):
            last = min(i, self.key_length - 1) if self.causal else self.key_length - 1
            first = 0 if self.window_left is None else max(0, i - self.window_left)
            total += max(0, last - first + 1)
        return total

    def flops(self, with_backward: bool) -> float:
        """Of the two products of the forward, and of the five of the backward if asked."""
        forward = 4.0 * self.batch * self.query_heads * self.head_size * self.pairs
        return forward * (3.5 if with_backward else 1.0)


CASES = {
    case.name: case
    for case in (
        Case("d128_causal_8k", 2, 8192, 8192, 32, 16, 128, True),  # Gemma 2 27B, global layer
        Case("d128_window4k_8k", 2, 8192, 8192, 32, 16, 128, True, 4095),  # its local layer
        Case("d128_full_8k", 2, 8192, 8192, 32, 16, 128, False),
        Case("d256_causal_8k", 2, 8192, 8192, 16, 8, 256, True),  # Gemma 2 9B, global layer
        Case("d64_causal_8k", 2, 8192, 8192, 32, 32, 64, True),
        Case("d128_causal_32k", 1, 32768, 32768, 16, 8, 128, True, softcap=30.0),  # Grok-1's cap
        Case("d128_causal_1k", 16, 1024, 1024, 32, 16, 128, True),
        Case("d128_causal_512", 16, 512, 512, 32, 16, 128, True),
    )
}
