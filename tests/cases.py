"""One table of named cases for all backends, and the inputs of each from a seed.

Everything that depends on a length is written as a fraction of it or as a style, so that
`Case.larger` makes the shapes of a GPU test from those of a CPU test. NaN and infinity stand wherever
the semantics say that a value has no effect. Importable without JAX.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from tests import oracle

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
#: Arguments of the function that are arrays with a gradient.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
#: With q scaled by cap / 4 the logits are cap / 2 on average, and often above the cap.
KEY_AMPLITUDE = 2.0
Window = int | tuple[int | None, int | None] | None


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Dimension letters in strings (as in "BN--") are those that an array does not broadcast."""

    name: str = ""
    batch: int = 2
    query_length: int = 37
    key_length: int = 53
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    value_size: int = 16
    softcap: float | None = 50.0
    scale: float | None = None
    layer_scale: float = 1.0
    is_causal: bool = False
    causal_alignment: str = "top_left"
    window: Window = None
    query_lengths: tuple[float, ...] | None = None  # fractions of T, cycled over the batch
    kv_lengths: tuple[float, ...] | None = None
    segments: Literal["packed", "shuffled", "strangers"] | None = None
    query_positions: Literal["reversed", "shuffled", "offset"] | None = None
    kv_positions: Literal["reversed", "shuffled", "offset"] | None = None
    bias: str | None = None
    bias_hides: float = 0.0  # fraction of the bias's entries that are -inf
    bias_dtype: str | None = None  # None: the query's
    mask: str | None = None
    mask_keeps: float = 0.6
    alibi: Literal["N", "BN"] | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    amplitude: float | None = None  # of q; None: softcap / 4, so that logits reach the cap
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def larger(self, length: int = 8, head_size: int = 64) -> "Case":
        """The same case at `length` times the lengths, still no multiple of a tile, and real head sizes."""

        def grown(size: int) -> int:
            return size if size == 1 else size * length + 1

        def wide(size: int) -> int:
            return min(256, math.ceil(size / 16) * head_size)

        window = self.window
        if isinstance(window, int):
            window = window * length
        elif window is not None:
            left, right = (None if w is None else w * length for w in window)
            window = (left, right)
        return dataclasses.replace(
            self,
            query_length=grown(self.query_length),
            key_length=grown(self.key_length),
            head_size=wide(self.head_size),
            value_size=wide(self.value_size),
            window=window,
            dtypes=("bfloat16", "float16"),
        )


class Inputs(NamedTuple):
    """Arguments of `dot_product_attention` as NumPy arrays and static values, and cotangents."""

    operands: dict[str, np.ndarray]  # with a gradient: query, key, value, bias, sinks
    arrays: dict[str, np.ndarray]  # without: masks, lengths, ids, positions, slopes
    static: dict[str, Any]
    dropout_seed: int
    d_out: np.ndarray
    d_lse: np.ndarray

    def oracle(self, dropout_key: Any = None, **changes: Any) -> oracle.Attention:
        arguments = self.operands | self.arrays | self.static | changes
        return oracle.Attention(**arguments, dropout_key=dropout_key)


def _ids(rng: np.random.Generator, style: str, batch: int, length: int, own: int) -> np.ndarray:
    """Segment ids; 0 and negative ones are as good as any."""
    if style == "packed":
        ends = np.sort(rng.integers(0, length + 1, (batch, 3)), axis=1)
        return (np.arange(length)[None, None] >= ends[:, :, None]).sum(1).astype(np.int32) - 1
    ids = rng.integers(-1, 2, (batch, length)).astype(np.int32)
    if style == "strangers":  # a third of either side meets nobody
        ids = np.where(ids == 1, np.int32(own), ids)
    return ids


def _positions(rng: np.random.Generator, style: str, batch: int, length: int) -> np.ndarray:
    index = np.arange(length, dtype=np.int32)
    if style == "reversed":
        rows = [index[::-1]] * batch
    elif style == "shuffled":
        rows = [rng.permutation(index) for _ in range(batch)]
    else:
        rows = [index + rng.integers(-9, 9, dtype=np.int32) for _ in range(batch)]
    return np.stack(rows)


def _poison(x: np.ndarray, where: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """NaN, infinity and minus infinity by turns along the last axis in the places `where`."""
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)[np.arange(x.shape[-1]) % 3]
    return np.where(where[..., None], bad.astype(x.dtype), x)


def build(case: Case, dtype: str, seed: int = 0, poison: bool = True) -> Inputs:
    rng = np.random.default_rng([seed, *case.name.encode()])
    b, t, s = case.batch, case.query_length, case.key_length
    n, kinds = case.query_heads, DTYPES[dtype]
    accumulator = np.dtype(np.float64 if dtype == "float64" else np.float32)
    full = dict(zip("BNTS", (b, n, t, s), strict=True))

    def normal(*shape, scale=1.0, kind=kinds):
        return (rng.standard_normal(shape) * scale).astype(kind)

    def shaped(letters):
        return tuple(size if letter in letters else 1 for letter, size in full.items())

    amplitude = case.amplitude
    if amplitude is None:
        amplitude = case.softcap / 4 if case.softcap else 1.0
    operands = {
        "query": normal(b, t, n, case.head_size, scale=amplitude),
        "key": normal(b, s, case.kv_heads, case.head_size, scale=KEY_AMPLITUDE),
        "value": normal(b, s, case.kv_heads, case.value_size),
    }
    arrays = {}
    if case.bias is not None:
        kind = kinds if case.bias_dtype is None else DTYPES[case.bias_dtype]
        bias = normal(*shaped(case.bias), scale=2.0, kind=kind)
        hidden = rng.random(bias.shape) < case.bias_hides
        operands["bias"] = np.where(hidden, np.array(-np.inf, kind), bias)
    if case.sinks:
        # About as large as a row's largest scores: a sink far below them takes no part.
        level, spread = (0.6 * case.softcap, 8.0) if case.softcap else (4.0, 2.0)
        operands["sinks"] = (level + normal(n, scale=spread, kind=np.float64)).astype(accumulator)
    if case.mask is not None:
        arrays["mask"] = rng.random(shaped(case.mask)) < case.mask_keeps

    def lengths(fractions, size):
        return np.array([round(fractions[i % len(fractions)] * size) for i in range(b)], np.int32)

    if case.query_lengths is not None:
        arrays["query_seq_lengths"] = lengths(case.query_lengths, t)
    if case.kv_lengths is not None:
        arrays["key_value_seq_lengths"] = lengths(case.kv_lengths, s)
    if case.segments is not None:
        arrays["query_segment_ids"] = _ids(rng, case.segments, b, t, 7)
        arrays["key_value_segment_ids"] = _ids(rng, case.segments, b, s, 8)
    if case.query_positions is not None:
        arrays["query_positions"] = _positions(rng, case.query_positions, b, t)
    if case.kv_positions is not None:
        arrays["key_value_positions"] = _positions(rng, case.kv_positions, b, s)
    if case.alibi is not None:
        slopes = 2.0 ** -np.arange(1, n + 1)
        if case.alibi == "BN":
            slopes = slopes * rng.uniform(0.5, 1.5, (b, 1))
        arrays["alibi_slopes"] = slopes.astype(accumulator)
    static = {
        "softcap": case.softcap,
        "scale": case.scale,
        "layer_scale": case.layer_scale,
        "is_causal": case.is_causal,
        "causal_alignment": case.causal_alignment,
        "local_window_size": case.window,
        "dropout_rate": case.dropout_rate,
    }
    d_out = normal(b, t, n, case.value_size)
    d_lse = normal(b, t, n, kind=accumulator)
    inputs = Inputs(operands, arrays, static, seed + 1, d_out, d_lse)
    if not poison:
        return inputs
    work = inputs.oracle(dropout_key=(0, 0))
    unused_row = ~np.swapaxes(work.row, 1, 2)
    unused_key = np.broadcast_to(~work.attended[..., None], (b, s, case.kv_heads))
    operands["query"] = _poison(operands["query"], unused_row, rng)
    operands["key"] = _poison(operands["key"], unused_key, rng)
    operands["value"] = _poison(operands["value"], unused_key, rng)
    return inputs._replace(d_out=_poison(d_out, unused_row, rng))


def _case(name: str, **changes: Any) -> Case:
    return Case(name, **changes)


_ALL = ("float32", "bfloat16", "float16")
_SELF = {"query_length": 45, "key_length": 45}
_LONG_QUERY = {"query_length": 61, "key_length": 29}

CASES = (
    # The cap and the scale
    _case("uncapped", softcap=None),
    _case("capped", dtypes=_ALL),
    _case("cap_30", softcap=30.0, **_SELF),
    _case("cap_small", softcap=5.0),
    _case("cap_large", softcap=1000.0, amplitude=300.0),
    _case("cap_saturated", amplitude=400.0),
    _case("scale", scale=0.7, amplitude=5.0),
    _case("layer_scale", layer_scale=3.0),
    _case("layer_scale_uncapped", layer_scale=3.0, softcap=None),
    # Heads and sizes
    _case("mha", kv_heads=4),
    _case("mqa", query_heads=3, kv_heads=1),
    _case("groups_of_three", query_heads=6, kv_heads=2, is_causal=True),
    _case("head_8", head_size=8, value_size=8),
    _case("head_40", head_size=40, value_size=40),
    _case("value_wider", head_size=8, value_size=24),
    _case("value_narrower", head_size=24, value_size=8, is_causal=True, **_SELF),
    _case("decode", query_length=1, key_length=67),
    _case("decode_lengths", batch=5, query_length=1, key_length=67, kv_lengths=(0.5, 0.8)),
    _case("one_key", query_length=41, key_length=1),
    _case("one_entry", query_length=1, key_length=1),
    # Causality and windows
    _case("causal", is_causal=True, **_SELF),
    _case("causal_uncapped", is_causal=True, softcap=None, **_SELF),
    _case("causal_short_query", is_causal=True),
    _case("causal_long_query", is_causal=True, **_LONG_QUERY),
    _case("bottom_right", is_causal=True, causal_alignment="bottom_right"),
    _case(
        "bottom_right_empty_rows", is_causal=True, causal_alignment="bottom_right", **_LONG_QUERY
    ),
    _case("gemma_window", is_causal=True, window=(9, 0), **_SELF),
    _case("window_both", window=5),
    _case("window_left", window=(3, None)),
    _case("window_right", window=(None, 2)),
    _case("window_causal", window=(11, 4), is_causal=True),
    _case("window_zero", window=0, **_SELF),
    _case("window_bottom_right", window=(6, 3), causal_alignment="bottom_right"),
    _case("window_empty_rows", window=(2, 2), **_LONG_QUERY),
    # Lengths, segments, positions
    _case("kv_lengths", kv_lengths=(0.55, 1.0, 0.0), batch=3),
    _case("query_lengths", query_lengths=(0.4, 1.0)),
    _case("both_lengths", query_lengths=(0.8, 0.0, 0.5), kv_lengths=(0.3, 0.9), batch=3),
    _case(
        "lengths_causal", query_lengths=(0.8, 0.5), kv_lengths=(0.8, 0.5), is_causal=True, **_SELF
    ),
    _case("nothing_at_all", kv_lengths=(0.0,)),
    _case("segments_packed", segments="packed", is_causal=True, **_SELF),
    _case("segments_shuffled", segments="shuffled"),
    _case("segments_strangers", segments="strangers", window=(20, 9)),
    _case(
        "positions_reversed", query_positions="reversed", kv_positions="reversed", is_causal=True
    ),
    _case("positions_shuffled", query_positions="shuffled", kv_positions="shuffled", window=(8, 5)),
    _case("positions_of_queries", query_positions="offset", is_causal=True, **_SELF),
    _case("positions_of_keys", kv_positions="shuffled", is_causal=True, window=(9, None)),
    _case("positions_no_causality", query_positions="reversed", kv_positions="offset"),
    # Bias, masks, ALiBi, sinks
    _case("bias", bias="BNTS", dtypes=_ALL),
    _case("bias_shared", bias="TS", is_causal=True),
    _case("bias_of_keys", bias="BS"),
    _case("bias_of_heads", bias="N", query_heads=6),
    _case("bias_of_rows", bias="NT"),
    _case("bias_float32", bias="NTS", bias_dtype="float32"),
    _case("bias_scalar", bias=""),
    _case("bias_hides", bias="BNTS", bias_hides=0.3),
    _case("bias_hides_keys", bias="BS", bias_hides=0.4),
    _case("bias_hides_rows", bias="BNT", bias_hides=0.3),
    _case("mask", mask="BNTS"),
    _case("mask_of_keys", mask="BS"),
    _case("mask_of_heads", mask="NTS", is_causal=True, **_SELF),
    _case("mask_of_rows", mask="BT"),
    _case("alibi", alibi="N", is_causal=True, **_SELF),
    _case("alibi_batched", alibi="BN", causal_alignment="bottom_right", is_causal=True),
    _case("alibi_positions", alibi="N", query_positions="shuffled", kv_positions="reversed"),
    _case("alibi_both_sides", alibi="BN", **_LONG_QUERY),
    _case("sinks", sinks=True),
    _case("sinks_empty_rows", sinks=True, mask="BNT", is_causal=True, **_SELF),
    _case("sinks_uncapped", sinks=True, softcap=None, window=(7, 0), **_SELF),
    # Dropout
    _case("dropout", dropout_rate=0.3, dtypes=_ALL),
    _case("dropout_causal", dropout_rate=0.1, is_causal=True, kv_heads=4, **_SELF),
    _case("dropout_sinks", dropout_rate=0.5, sinks=True, kv_lengths=(0.0, 0.7)),
    # Together
    _case(
        "gemma_packed_training",
        is_causal=True,
        window=(15, 0),
        segments="packed",
        query_lengths=(0.9, 1.0),
        kv_lengths=(0.9, 1.0),
        **_SELF,
    ),
    _case(
        "everything",
        head_size=24,
        query_heads=6,
        scale=0.25,
        layer_scale=2.0,
        is_causal=True,
        window=(31, None),
        query_lengths=(0.9, 1.0),
        kv_lengths=(1.0, 0.8),
        segments="shuffled",
        query_positions="offset",
        kv_positions="shuffled",
        bias="NTS",
        bias_hides=0.1,
        mask="BS",
        mask_keeps=0.8,
        alibi="BN",
        sinks=True,
        dropout_rate=0.2,
        dtypes=_ALL,
    ),
)
BY_NAME = {case.name: case for case in CASES}
