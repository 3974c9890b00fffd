"""The one translation between jaxcap's conventions and FlashAttention's.

FlashAttention aligns causality and windows at the bottom right: of T queries and S keys, query i stands
at i + S - T, and keys from `left` before it to `right` after it take part, -1 being unbounded. It has no
rows that nobody attends in mind: NaN there spreads over a tile. Both are met by leaving out, as views,
the queries and keys that causality and window make useless; what is left fits bottom-right exactly:

    causal, top-left, T = 3, S = 5         keys 3, 4 are left out: causal, T = S = 3
    causal, top-left, T = 5, S = 3         right = T - S = 2, a window
    causal, bottom-right, T = 5, S = 3     queries 0, 1 are left out: causal, T = S = 3

Sources: the docstrings of `flash_attn_func` in flash-attention 2.8.3, and `set_params_fprop` there and in
its `hopper` folder for what the kernels make of them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcap.spec import Array, AttentionSpec, Operands

DTYPES = ("bfloat16", "float16")
LARGEST_HEAD = 256


class Mask(NamedTuple):
    """Causality and window, bottom-right over `rows` and `keys`, which are start and stop."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    left: int  # -1: unbounded
    right: int
    shift: int  # by how much our position of a query exceeds FlashAttention's

    @property
    def empty(self) -> bool:
        return self.rows[0] == self.rows[1]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]

    @property
    def local(self) -> bool:
        """Whether the kernels take it for a window rather than for causality or nothing."""
        return not self.causal and (self.left >= 0 or self.right >= 0)


class Call(NamedTuple):
    """The static arguments of a FlashAttention call."""

    mask: Mask
    scale: float
    softcap: float  # 0.0: off
    deterministic: bool


def mask_of(spec: AttentionSpec) -> Mask:
    """The static masks of a call; without rows where no query attends a key."""
    low, high = spec.band
    total_q, total_k, offset = spec.query_length, spec.key_length, spec.query_offset
    first_row = 0 if high is None else max(0, -offset - high)
    last_row = total_q if low is None else min(total_q, total_k - offset - low)
    if first_row >= last_row:
        return Mask((0, 0), (0, 0), False, -1, -1, 0)
    first_key = 0 if low is None else max(0, first_row + offset + low)
    last_key = total_k if high is None else min(total_k, last_row + offset + high)
    t, s = last_row - first_row, last_key - first_key
    shift = (first_row + offset - first_key) - (s - t)
    left = -1 if low is None else -(shift + low)
    right = -1 if high is None else shift + high
    # A window that reaches to the end for every query bounds nothing.
    left = -1 if left >= s - 1 else left
    right = -1 if right >= t - 1 else right
    causal = left == -1 and right == 0
    return Mask((first_row, last_row), (first_key, last_key), causal, left, right, shift)


def call_of(spec: AttentionSpec) -> Call:
    # layer_scale divides scale and cap and multiplies the result: mathematically nothing.
    return Call(mask_of(spec), spec.scale, spec.softcap or 0.0, spec.deterministic)


def inexpressible(spec: AttentionSpec) -> list[str]:
    """What no FlashAttention can be told, or cannot do."""
    found = []

    def refuse(condition: Any, reason: str) -> None:
        if condition:
            found.append(reason)

    sizes = (spec.batch, spec.query_length, spec.key_length, spec.query_heads)
    refuse(min(sizes) < 1, "an axis of length 0")
    refuse(spec.dtype not in DTYPES, f"bfloat16 and float16 only, got {spec.dtype}")
    refuse(
        spec.head_size % 8 or not 8 <= spec.head_size <= LARGEST_HEAD,
        f"head sizes are multiples of 8 up to {LARGEST_HEAD}, got {spec.head_size}",
    )
    refuse(
        spec.value_size != spec.head_size,
        f"head sizes of key and value must be equal, got {spec.head_size} and {spec.value_size}",
    )
    refuse(spec.bias_shape is not None, "no bias: its entry points take none")
    refuse(spec.mask_shape is not None, "no boolean mask: its entry points take none")
    refuse(
        spec.segment_ids,
        "no segment ids: runs of equal ids could be packed, but whether they are runs is not known"
        " when the call is traced",
    )
    refuse(spec.query_positions or spec.kv_positions, "no positions")
    refuse(
        spec.kv_lengths and spec.band[0] is not None,
        "no key lengths with a window's left end: it counts from the end of the length",
    )
    refuse(spec.dropout_rate > 0, "cannot drop the entries that the key names")
    return found


def used(spec: AttentionSpec, operands: Operands) -> tuple[Array | None, Array | None]:
    """[B, T] and [B, S] bool: queries with a key and keys with a query, None where `mask_of` says it all."""
    if not (spec.query_lengths or spec.kv_lengths):
        return None, None
    mask, (_, high) = mask_of(spec), spec.band
    row, key = jnp.arange(spec.query_length), jnp.arange(spec.key_length)
    stop = jnp.full((spec.batch,), mask.rows[1], jnp.int32)
    if operands.query_lengths is not None:
        stop = jnp.minimum(stop, operands.query_lengths)
    some = stop > mask.rows[0]
    until = jnp.full((spec.batch,), mask.keys[1], jnp.int32)
    if operands.kv_lengths is not None:
        until = jnp.minimum(until, operands.kv_lengths)
        some &= until > 0
    if high is not None:
        until = jnp.minimum(until, stop + spec.query_offset + high)
    rows = some[:, None] & (row >= mask.rows[0])[None] & (row[None] < stop[:, None])
    keys = some[:, None] & (key >= mask.keys[0])[None] & (key[None] < until[:, None])
    return rows, keys


def cleared(x: Array, kept: Array | None) -> Array:
    """`x` [B, t, heads, size] with zeros, whatever was there, where `kept` [B, t] is False."""
    return x if kept is None else jnp.where(kept[:, :, None, None], x, jnp.zeros_like(x))


def kept_lse(lse: Array, rows: Array | None, empty: float) -> Array:
    """`lse` [B, N, T] with `empty` in rows that attend nothing.

    Ours is -inf. The backward kernels are given +inf: exp(score - inf) is 0 whatever the score.
    """
    return lse if rows is None else jnp.where(rows[:, None, :], lse, jnp.full_like(lse, empty))


class Piece(NamedTuple):
    """One call of the library, for `rows` [B, T] and `keys` [B, S]; None is all that its mask leaves."""

    call: Call
    rows: Array | None
    keys: Array | None
    lengths: Array | None  # [B] int32 of the keys, within the array: `seqused_k`, `cache_seqlens`


def pieces(spec: AttentionSpec, operands: Operands) -> list[Piece]:
    """The calls that together are the whole: one, or two where causality meets key lengths.

    A query whose last key by causality lies within the length does not see the length; any other
    attends all keys within it. The second call has no keys, and costs nothing, in batch entries
    without such a query: those with as many keys as queries.
    """
    rows, keys = used(spec, operands)
    if operands.kv_lengths is None:
        return [Piece(call_of(spec), rows, keys, None)]
    lengths = jnp.clip(operands.kv_lengths, 0, spec.key_length).astype(jnp.int32)
    _, high = spec.band
    if high is None:
        return [Piece(call_of(spec), rows, keys, lengths)]
    last = jnp.arange(spec.query_length) + spec.query_offset + high
    past = last[None] >= lengths[:, None]
    late, early = rows & past, rows & ~past
    some = jnp.where(jnp.any(late, axis=1), lengths, jnp.zeros_like(lengths))
    within = keys & (jnp.arange(spec.key_length)[None] < some[:, None])
    unmasked = spec.replace(is_causal=False, window=None)
    return [
        Piece(call_of(spec), early, keys, None),
        Piece(call_of(unmasked), late, within, some),
    ]


def packed_bounds(spec: AttentionSpec, lengths: Array | None) -> dict[str, Array]:
    """`cu_seqlens_q` and `cu_seqlens_k` [2B + 1] for an entry that has no `seqused_k`; empty without lengths.

    Each batch entry is two sequences: all queries with the keys within the length, and no queries
    with the keys past it.
    """
    if lengths is None:
        return {}
    start = jnp.arange(spec.batch, dtype=jnp.int32)
    t, s = spec.query_length, spec.key_length
    queries = jnp.stack([start * t, (start + 1) * t], axis=1).reshape(-1)
    keys = jnp.stack([start * s, start * s + lengths], axis=1).reshape(-1)
    return {
        "cu_seqlens_q": jnp.pad(queries, (0, 1), constant_values=spec.batch * t),
        "cu_seqlens_k": jnp.pad(keys, (0, 1), constant_values=spec.batch * s),
    }


def lse_as_value(d_lse: Array, value: Array, dtype: Any) -> tuple[Array, Array]:
    """(v, d_out) of a second backward call whose dq and dk are those of the log-sum-exp.

    d lse / d score is p, so ds = p * d_lse. A kernel computes ds = p * (d_out . v - delta) with
    delta = d_out . out: with ones in two columns of v, d_lse in the same of d_out (rounded, and the
    rest), and 0 for out, that is it.
    """
    d_rows = jnp.swapaxes(d_lse, 1, 2)[..., None]  # [B, T, N, 1]
    high = d_rows.astype(dtype)
    low = (d_rows - high.astype(d_rows.dtype)).astype(dtype)
    columns = jnp.concatenate([high, low], axis=-1)
    size = value.shape[-1]
    ones = (jnp.arange(size) < 2).astype(dtype)
    d_out = jnp.pad(columns, ((0, 0), (0, 0), (0, 0), (0, size - 2)))
    return jnp.broadcast_to(ones, value.shape), d_out
