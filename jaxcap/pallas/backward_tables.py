"""What masks mean for the backward kernel, in arrays: dead keys, empty queries, tiles to walk, turns to
add; and where dropout's entries lie.

Pure functions of a spec and its operands; tests/test_pallas_backward.py holds them against the oracle.
"""

import jax
import jax.numpy as jnp

from jaxcap import mask as masks
from jaxcap.spec import Array, AttentionSpec, Operands


def index_band(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Bounds of key index - query index (of key - query position where positions are given)."""
    low, high = spec.band
    offset = 0 if has_positions(spec) else spec.query_offset
    return (None if low is None else low + offset, None if high is None else high + offset)


def has_positions(spec: AttentionSpec) -> bool:
    return spec.query_positions or spec.kv_positions


def looks_inside(spec: AttentionSpec) -> bool:
    """Whether more than band and lengths decides what is attended."""
    arrays = spec.bias_shape is not None or spec.mask_shape is not None
    return spec.segment_ids or has_positions(spec) or arrays


def may_have_empty_queries(spec: AttentionSpec) -> bool:
    low, high = index_band(spec)
    if looks_inside(spec) or spec.query_lengths or spec.kv_lengths:
        return True
    before = high is not None and high < 0
    return before or (low is not None and spec.query_length - 1 + low > spec.key_length - 1)


def may_have_dead_keys(spec: AttentionSpec) -> bool:
    low, high = index_band(spec)
    if looks_inside(spec) or spec.query_lengths or spec.kv_lengths:
        return True
    after = high is not None and spec.key_length - 1 > spec.query_length - 1 + high
    return after or (low is not None and low > 0)


def dead_keys(spec: AttentionSpec, operands: Operands) -> Array:
    """[B or 1, S] bool: keys that no query attends."""
    t, s = spec.query_length, spec.key_length
    if not looks_inside(spec):
        low, high = index_band(spec)
        key = jnp.arange(s, dtype=jnp.int32)[None]
        first = jnp.zeros_like(key) if high is None else jnp.maximum(key - high, 0)
        last = jnp.full_like(key, t - 1) if low is None else jnp.minimum(key - low, t - 1)
        if operands.query_lengths is not None:
            last = jnp.minimum(last, operands.query_lengths[:, None] - 1)
        dead = first > last
        if operands.kv_lengths is not None:
            dead = dead | (key >= operands.kv_lengths[:, None])
        return dead
    kept = masks.keep_tile(spec, operands, 0, t, 0, s)
    if kept is None:
        return jnp.zeros((1, s), bool)
    kept = jnp.broadcast_to(kept, (*kept.shape[:2], t, s))
    return ~kept.any(axis=(1, 2))


def empty_queries(spec: AttentionSpec, operands: Operands) -> Array:
    """[B or 1, N or 1, T] bool: queries that attend no key."""
    t, s = spec.query_length, spec.key_length
    if not looks_inside(spec):
        low, high = index_band(spec)
        query = jnp.arange(t, dtype=jnp.int32)[None]
        first = jnp.zeros_like(query) if low is None else jnp.maximum(query + low, 0)
        last = jnp.full_like(query, s - 1) if high is None else jnp.minimum(query + high, s - 1)
        if operands.kv_lengths is not None:
            last = jnp.minimum(last, operands.kv_lengths[:, None] - 1)
        empty = first > last
        if operands.query_lengths is not None:
            empty = empty | (query >= operands.query_lengths[:, None])
        return empty[:, None]
    kept = masks.keep_tile(spec, operands, 0, t, 0, s)
    if kept is None:
        return jnp.zeros((1, 1, t), bool)
    return ~jnp.broadcast_to(kept, (*kept.shape[:2], t, s)).any(axis=3)


def _by_tile(side: masks.Side, length: int, block: int) -> dict[str, Array]:
    """Least and greatest position and segment of the valid rows of each tile, and whether all are valid."""
    tiles = -(-length // block)
    inside = (jnp.arange(tiles * block) < length)[None]

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, tiles * block - length))).reshape(x.shape[0], tiles, block)

    valid = padded(jnp.ones((1, length), bool) if side.valid is None else side.valid)
    valid = valid & inside.reshape(1, tiles, block)
    out = {"all": valid.all(-1), "any": valid.any(-1)}
    top = jnp.iinfo(jnp.int32).max
    for name in ("position", "segment"):
        x = getattr(side, name)
        if x is not None:
            x = padded(x)
            out[name + "_min"] = jnp.where(valid, x, top).min(-1)
            out[name + "_max"] = jnp.where(valid, x, -top - 1).max(-1)
    return out


def needed_tiles(
    spec: AttentionSpec, operands: Operands, block_q: int, block_kv: int
) -> tuple[Array, Array]:
    """[B or 1, Q tiles, KV tiles] bool, twice: tiles that may hold a kept entry; tiles that hold no other."""
    t, s = spec.query_length, spec.key_length
    q = _by_tile(masks.query_side(spec, operands, 0, t), t, block_q)
    k = _by_tile(masks.key_side(spec, operands, 0, s), s, block_kv)
    q = {name: x[:, :, None] for name, x in q.items()}
    k = {name: x[:, None, :] for name, x in k.items()}
    need, full = q["any"] & k["any"], q["all"] & k["all"]
    low, high = spec.band
    if low is not None:
        need = need & (k["position_max"] >= q["position_min"] + low)
        full = full & (k["position_min"] >= q["position_max"] + low)
    if high is not None:
        need = need & (k["position_min"] <= q["position_max"] + high)
        full = full & (k["position_max"] <= q["position_min"] + high)
    if spec.segment_ids:
        apart = (k["segment_max"] < q["segment_min"]) | (k["segment_min"] > q["segment_max"])
        need = need & ~apart
        full = full & (q["segment_min"] == k["segment_max"])
        full = full & (q["segment_max"] == k["segment_min"])
    if spec.bias_shape is not None or spec.mask_shape is not None:
        full = jnp.zeros_like(full)
    return need, full & need


def spans(need: Array, full: Array) -> Array:
    """[B or 1, KV tiles, 4] int32: first Q tile, end; first full one, end of the full ones after it."""
    tiles = need.shape[1]
    index = jnp.arange(tiles, dtype=jnp.int32)[None, :, None]

    def first(x):
        return jnp.where(x, index, tiles).min(1)

    begin, end = first(need), jnp.where(need, index + 1, 0).max(1)
    full_from = first(full)
    full_to = first(~full & (index >= full_from[:, None]))
    return jnp.stack([begin, jnp.maximum(end, 0), full_from, full_to], -1)


def ranks(spans: Array, q_tiles: int) -> Array:
    """[B or 1, KV tiles, Q tiles] int32: how many later KV tiles add to a Q tile: they go first.

    So a causal tile begins with its diagonal block, which is the first that the block computes: none waits.
    """
    index = jnp.arange(q_tiles, dtype=jnp.int32)[None, None]
    visits = ((index >= spans[..., :1]) & (index < spans[..., 1:2])).astype(jnp.int32)
    later = jnp.cumsum(visits[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    return later - visits


def dropout_places(operands: Operands, batch: int, heads: int) -> Array:
    """[B, N, 8] int32: key words, batch, head, first query, its step, first key, its step."""
    d = operands.dropout
    rng = jax.lax.bitcast_convert_type(jnp.broadcast_to(d.rng, (batch, 2)), jnp.int32)
    parts = [
        jnp.broadcast_to(rng[:, None], (batch, heads, 2)),
        jnp.broadcast_to(d.batch.astype(jnp.int32)[:, None, None], (batch, heads, 1)),
        jnp.broadcast_to(d.head.astype(jnp.int32)[None, :, None], (batch, heads, 1)),
        jnp.broadcast_to(d.query.astype(jnp.int32), (batch, heads, 2)),
        jnp.broadcast_to(d.key.astype(jnp.int32), (batch, heads, 2)),
    ]
    return jnp.concatenate(parts, -1)
