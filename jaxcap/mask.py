"""Which keys a query may attend: the predicate, and the dense array of a tile.

With queries down and keys across (T = S = 5), `#` kept and `.` masked:

    causal     window (1, 1)   causal, window (1, 0)   segments 00111   kv length 3
    #....      ##...           #....                   ##...            ###..
    ##...      ###..           ##...                   ##...            ###..
    ###..      .###.           .##..                   ..###            ###..
    ####.      ..###           ..##.                   ..###            ###..
    #####      ...##           ...##                   ..###            ###..
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcap.spec import Array, AttentionSpec, Operands


class Side(NamedTuple):
    """What the masks need to know of some queries or keys; absent parts are None."""

    position: Array  # [B or 1, t] int32
    valid: Array | None  # [B, t] bool: inside the length
    segment: Array | None  # [B or 1, t] int32


def in_band(spec: AttentionSpec, q_pos: Any, k_pos: Any) -> Any:
    """Causality and window on broadcastable positions, NumPy's or JAX's; None without either."""
    low, high = spec.band
    kept = None
    if low is not None:
        kept = k_pos - q_pos >= low
    if high is not None:
        below = k_pos - q_pos <= high
        kept = below if kept is None else kept & below
    return kept


def _slice(x: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _side(start, size, offset, positions, lengths, segments) -> Side:
    index = start + jnp.arange(size, dtype=jnp.int32)
    return Side(
        position=(index + offset)[None] if positions is None else _slice(positions, start, size),
        valid=None if lengths is None else index[None] < lengths[:, None],
        segment=None if segments is None else _slice(segments, start, size),
    )


def query_side(spec: AttentionSpec, operands: Operands, start: Any, size: int) -> Side:
    """Queries `start` to `start + size`, which must lie inside the array."""
    return _side(
        start,
        size,
        spec.query_offset,
        operands.query_positions,
        operands.query_lengths,
        operands.query_segment_ids,
    )


def key_side(spec: AttentionSpec, operands: Operands, start: Any, size: int) -> Side:
    """Keys `start` to `start + size`, which must lie inside the array."""
    del spec
    return _side(
        start, size, 0, operands.kv_positions, operands.kv_lengths, operands.kv_segment_ids
    )


def keep(spec: AttentionSpec, q: Side, k: Side) -> Array | None:
    """[B or 1, 1, tq, tk] bool of every mask but the boolean one; None where nothing masks."""
    kept = in_band(spec, q.position[:, :, None], k.position[:, None, :])
    parts = [] if kept is None else [kept]
    if q.valid is not None:
        parts.append(q.valid[:, :, None])
    if k.valid is not None:
        parts.append(k.valid[:, None, :])
    if q.segment is not None and k.segment is not None:
        parts.append(q.segment[:, :, None] == k.segment[:, None, :])
    if not parts:
        return None
    kept = parts[0]
    for part in parts[1:]:
        kept = kept & part
    return kept[:, None]


def tile_of(x: Array, q_start: Any, tq: int, k_start: Any, tk: int) -> Array:
    """The part of a `[B or 1, N or 1, T or 1, S or 1]` bias or mask that a tile sees."""
    if x.shape[2] != 1:
        x = jax.lax.dynamic_slice_in_dim(x, q_start, tq, axis=2)
    if x.shape[3] != 1:
        x = jax.lax.dynamic_slice_in_dim(x, k_start, tk, axis=3)
    return x


def keep_tile(
    spec: AttentionSpec, operands: Operands, q_start: Any, tq: int, k_start: Any, tk: int
) -> Array | None:
    """[B or 1, N or 1, tq or 1, tk or 1] bool: which entries of a tile take part; None if all do.

    All masks are in it. A bias of -inf masks too: a key that it hides everywhere is unattended.
    """
    q, k = query_side(spec, operands, q_start, tq), key_side(spec, operands, k_start, tk)
    kept = keep(spec, q, k)
    if operands.mask is not None:
        mask = tile_of(operands.mask, q_start, tq, k_start, tk)
        kept = mask if kept is None else kept & mask
    if operands.bias is not None:
        finite = tile_of(operands.bias, q_start, tq, k_start, tk) != -jnp.inf
        kept = finite if kept is None else kept & finite
    return kept
