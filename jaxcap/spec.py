"""`AttentionSpec`: the static description of one call, and the arrays that go with it.

Letters: B batch, T query length, S key length, N query heads, K key/value heads (N = K * G),
H head size of query and key, V head size of value and output.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Alignment = Literal["top_left", "bottom_right"]

#: Operands that a gradient can be asked for, in the order of `Gradients`.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


class Dropout(NamedTuple):
    """Where the entries of this call lie in the whole, unsharded and unordered array.

    Entry (b, n, i, j) of the call has the indices (batch[b], head[n],
    query[0] + query[1] * i, key[0] + key[1] * j) of the whole array.
    """

    rng: Array  # [B or 1, 2] uint32
    batch: Array  # [B] int32
    head: Array  # [N] int32
    query: Array  # [2] int32: offset, stride
    key: Array  # [2] int32: offset, stride


class Operands(NamedTuple):
    """The arrays of one call in canonical form; absent ones are None.

    A first axis written [B or 1] is 1 where all batch entries share the row.
    """

    query: Array  # [B, T, N, H]
    key: Array  # [B, S, K, H]
    value: Array  # [B, S, K, V]
    bias: Array | None = None  # [B or 1, N or 1, T or 1, S or 1] floating
    mask: Array | None = None  # [B or 1, N or 1, T or 1, S or 1] bool, True keeps
    query_lengths: Array | None = None  # [B] int32
    kv_lengths: Array | None = None  # [B] int32
    query_segment_ids: Array | None = None  # [B or 1, T] int32
    kv_segment_ids: Array | None = None  # [B or 1, S] int32
    query_positions: Array | None = None  # [B or 1, T] int32
    kv_positions: Array | None = None  # [B or 1, S] int32
    alibi_slopes: Array | None = None  # [B or 1, N] float32
    sinks: Array | None = None  # [B or 1, N] float32
    dropout: Dropout | None = None


def shape_of(x: Array) -> tuple[int, int, int, int]:
    batch, heads, rows, columns = x.shape
    return batch, heads, rows, columns


class Gradients(NamedTuple):
    """Cotangents in the shape and dtype of their operands (or wider, of a part of a call); None where
    not asked for."""

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


class QuerySum(NamedTuple):
    """What a part's gradient of the queries is added to: a sum over parts, see `fragments`."""

    first: int  # the row that is the part's first query
    factor: float  # by which all is multiplied at the end


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """All that a backend may decide on: static, hashable, without arrays."""

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: str
    scale: float
    softcap: float | None = None  # None: off; never 0.0
    layer_scale: float = 1.0
    is_causal: bool = False
    causal_alignment: Alignment = "top_left"
    window: tuple[int | None, int | None] | None = None
    bias_shape: tuple[int, int, int, int] | None = None
    bias_dtype: str | None = None
    mask_shape: tuple[int, int, int, int] | None = None
    query_lengths: bool = False
    kv_lengths: bool = False
    segment_ids: bool = False
    query_positions: bool = False
    kv_positions: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout_rate: float = 0.0
    deterministic: bool = False
    return_residual: bool = False
    gradients: tuple[str, ...] = ()  # names out of DIFFERENTIABLE; () is forward only
    platform: str = "cpu"  # "cpu", "tpu", "sm80", "sm90", "sm100", ... of the device it runs on
    # Of a part of a longer call: what is added to the positions of queries that are not given, and
    # whether output and gradients should be in the accumulator's dtype, for they will be summed.
    position_offset: int = 0
    partial: bool = False
    query_sum: QuerySum | None = None  # the backward adds to one, its last array, and returns it
    # Whether transfers hold some multiprocessors meanwhile: blocks may not wait for one of their own.
    beside_transfers: bool = False
    context_parallel: Any = None  # hashable; None on one device or where XLA partitions

    @property
    def group_size(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def accumulator(self) -> jnp.dtype:
        """Dtype of logits, probabilities and log-sum-exp."""
        return jnp.dtype("float64" if self.dtype == "float64" else "float32")

    @property
    def result_dtype(self) -> jnp.dtype:
        """Dtype of output and gradients."""
        return self.accumulator if self.partial else jnp.dtype(self.dtype)

    @property
    def query_offset(self) -> int:
        """Position of query 0 where no positions are given."""
        bottom_right = self.causal_alignment == "bottom_right"
        start = self.key_length - self.query_length if bottom_right else 0
        return start + self.position_offset

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(low, high): allowed is low <= k_pos - q_pos <= high, an end that is None is open."""
        left, right = self.window or (None, None)
        low = None if left is None else -left
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return low, right

    def replace(self, **changes: Any) -> "AttentionSpec":
        return dataclasses.replace(self, **changes)

    def with_shapes_of(self, operands: Operands) -> "AttentionSpec":
        """The same call on other shapes: a shard of it, or a vmapped axis folded into the batch."""
        batch, query_length, query_heads, head_size = operands.query.shape
        _, key_length, kv_heads, value_size = operands.value.shape
        changes: dict[str, Any] = {}
        if operands.bias is not None:
            changes["bias_shape"] = shape_of(operands.bias)
        if operands.mask is not None:
            changes["mask_shape"] = shape_of(operands.mask)
        return self.replace(
            batch=batch,
            query_length=query_length,
            key_length=key_length,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            value_size=value_size,
            **changes,
        )
