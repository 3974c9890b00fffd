"""`Config`: the shape of one Gemma 2, and the shapes that have a name."""

import dataclasses

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and constants of a model; `PRESETS` names a few.

    Raises ValueError, with what was got and what was expected, for a shape that cannot be built.
    """

    layers: int  # even: sliding-window and global layers alternate, sliding first
    width: int  # D, the residual stream
    mlp_width: int  # F
    heads: int  # N query heads
    kv_heads: int  # K key/value heads, a divisor of N
    head_size: int  # H, even
    window: int  # W: a query of a sliding layer sees itself and W - 1 positions before
    vocab_size: int = 256  # bytes
    query_pre_attn_scalar: float | None = None  # logits are q.k / sqrt(this); None is the head size
    attention_softcap: float = 50.0  # 0.0 is off
    final_softcap: float = 30.0  # 0.0 is off
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    dtype: str = "float32"  # of activations and matrix products; norms and logits are float32
    param_dtype: str = "float32"
    scan_layers: bool = True  # one pair of layers compiled once; False unrolls them
    remat: bool = False  # recompute a pair's activations in the backward pass
    backend: str | None = None  # of attention; None lets jaxcap choose

    def __post_init__(self) -> None:
        for name in ("layers", "width", "mlp_width", "heads", "kv_heads", "window", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} must be of {DTYPES}, got {getattr(self, name)!r}")
        if self.layers % 2:
            raise ValueError(f"layers must be even (sliding, global, ...), got {self.layers}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_size must be even (RoPE), got {self.head_size}")

    @property
    def attention_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.head_size) ** -0.5

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        attention = 2 * self.width * self.head_size * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.mlp_width + 4 * self.width
        return self.vocab_size * self.width + self.layers * layer + self.width

    def replace(self, **changes) -> "Config":
        return dataclasses.replace(self, **changes)


def _released(
    layers: int, width: int, mlp_width: int, heads: int, kv_heads: int, **sizes
) -> Config:
    return Config(
        layers, width, mlp_width, heads, kv_heads, window=4096, vocab_size=256_000, **sizes
    )


PRESETS = {
    # The demo's: two minutes on two CPU cores, one on a GPU.
    "tiny": Config(4, 128, 384, heads=2, kv_heads=1, head_size=64, window=64, scan_layers=False),
    # Unrolled: 8 ms a step on an H200 where a loop over the layers takes 13, see benchmarks/RESULTS.md.
    "small": Config(
        layers=8,
        width=384,
        mlp_width=1152,
        heads=6,
        kv_heads=3,
        head_size=64,
        window=256,
        dtype="bfloat16",
        scan_layers=False,
    ),
    # Released by Google (arXiv:2408.00118, table 1).
    "gemma2_2b": _released(26, 2304, 9216, 8, 4, head_size=256),
    "gemma2_9b": _released(42, 3584, 14_336, 16, 8, head_size=256),
    "gemma2_27b": _released(46, 4608, 36_864, 32, 16, head_size=128, query_pre_attn_scalar=144.0),
}
