"""One piece of a shard's scores on a backend: its spec, its operands, its results.

The forward gives a normalised output and its log-sum-exp over the piece's keys. The backward is given
output and log-sum-exp over *all* keys: exp(score - lse) are then the final probabilities of the
piece, so its gradients are terms of the whole ones.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcap.sharding.bands import Band
from jaxcap.sharding.layout import Run
from jaxcap.sharding.plan import Plan
from jaxcap.sharding.steps import Bounds, Piece
from jaxcap.spec import Array, AttentionSpec, Operands
from jaxcap.tile_tables import Interval


class Keys(NamedTuple):
    """What belongs to keys and travels with them."""

    key: Array  # [B, S / P, K, H]
    value: Array
    segment_ids: Array | None = None  # [B or 1, S / P]
    positions: Array | None = None


class Results(NamedTuple):
    """Of the backward: what the forward's caller saved."""

    out: Array
    lse: Array
    d_out: Array
    d_lse: Array | None


def keys_of(operands: Operands) -> Keys:
    return Keys(operands.key, operands.value, operands.kv_segment_ids, operands.kv_positions)


def _lengths(plan: Plan, piece: Piece) -> tuple[int, int]:
    (q0, q1), (k0, k1) = piece.queries, piece.keys
    queries, keys = plan.query_runs(0)[q0:q1], plan.key_runs(0)[k0:k1]
    return sum(run.length for run in queries), sum(run.length for run in keys)


def _of_band(band: Band) -> dict[str, Any]:
    """Fields of a spec whose band is `low <= j - i <= high`."""
    low, high = band
    if high is not None:
        window = None if low is None else (high - low, None)
        return {"is_causal": True, "window": window, "position_offset": high}
    if low is not None:
        return {"is_causal": False, "window": (0, None), "position_offset": low}
    return {"is_causal": False, "window": None, "position_offset": 0}


def spec_of(plan: Plan, piece: Piece) -> AttentionSpec:
    """What a backend is asked for."""
    spec, (queries, keys) = plan.spec, _lengths(plan, piece)

    def cut(shape):
        if shape is None:
            return None
        batch, heads, rows, columns = shape
        return batch, heads, min(rows, queries), min(columns, keys)

    by_arrays = piece.band is None
    changes = {} if piece.band is None else _of_band(piece.band)
    return spec.replace(
        query_length=queries,
        key_length=keys,
        bias_shape=cut(spec.bias_shape),
        mask_shape=cut(spec.mask_shape),
        causal_alignment="top_left",
        query_positions=by_arrays,
        kv_positions=by_arrays,
        gradients=tuple(name for name in spec.gradients if name != "sinks"),
        return_residual=True,
        partial=True,
        context_parallel=None,
        **changes,
    )


@functools.lru_cache(maxsize=1024)
def specs(plan: Plan) -> list[AttentionSpec]:
    """Of every piece that some device may compute."""
    steps = [step for hop in plan.active_hops for step in plan.steps([hop])]
    pieces = dict.fromkeys(p for step in steps for p in step.options if p is not None)
    return list(dict.fromkeys(spec_of(plan, piece) for piece in pieces))


def indices(run: Run) -> Array:
    """[length] int32: the tokens of a run."""
    return run.start + run.stride * jnp.arange(run.length, dtype=jnp.int32)


def _inside(lengths: Array | None, run: Run) -> Array | None:
    """How much of a run lies inside the lengths [B] of the whole sequence."""
    if lengths is None:
        return None
    count = -((run.start - lengths) // run.stride)
    return jnp.clip(count, 0, run.length)


def _columns(x: Array, start: Any, size: int) -> Array:
    return x if x.shape[3] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis=3)


def span(runs: Sequence[Run]) -> slice:
    """The places of neighbouring runs."""
    return slice(runs[0].offset, runs[-1].offset + runs[-1].length)


def _positions(given: Array | None, runs: Sequence[Run], offset: int) -> Array:
    if given is not None:
        return given[:, span(runs)]
    return jnp.concatenate([indices(run) for run in runs])[None] + offset


def bounds(plan: Plan, operands: Operands, rank: Any, keys: Keys, source: Any) -> Bounds:
    """Of the positions that a shard's queries, and these keys, were given."""
    q = _positions(operands.query_positions, plan.query_runs(rank), plan.offset)
    k = _positions(keys.positions, plan.key_runs(source), 0)
    least, most = jnp.min, jnp.max
    return Bounds(*(Interval(least(x, axis=1), most(x, axis=1)) for x in (q, k)))


def operands_of(
    plan: Plan, piece: Piece, whole: Operands, rank: Any, keys: Keys, source: Any
) -> Operands:
    """The operands of a piece, of a shard's and the keys of the shard `source`."""
    q_runs = plan.query_runs(rank)[slice(*piece.queries)]
    k_runs = plan.key_runs(source)[slice(*piece.keys)]
    rows, columns = span(q_runs), span(k_runs)
    start = columns.start + source * plan.spec.key_length  # in the bias, a place in the layout

    def cut(x, part):
        return None if x is None else x[:, part]

    def tile(x):
        if x is None:
            return None
        x = x if x.shape[2] == 1 else x[:, :, rows]
        return _columns(x, start, columns.stop - columns.start)

    dropout = whole.dropout
    if dropout is not None:
        q, k = q_runs[0], k_runs[0]
        query, key = _within(dropout.query, q), _within(dropout.key, k)
        dropout = dropout._replace(query=query, key=key)
    q_pos = k_pos = None
    if piece.band is None:
        q_pos = _positions(whole.query_positions, q_runs, plan.offset)
        k_pos = _positions(keys.positions, k_runs, 0)
    return Operands(
        query=whole.query[:, rows],
        key=keys.key[:, columns],
        value=keys.value[:, columns],
        bias=tile(whole.bias),
        mask=tile(whole.mask),
        query_lengths=_inside(whole.query_lengths, q_runs[0]),
        kv_lengths=_inside(whole.kv_lengths, k_runs[0]),
        query_segment_ids=cut(whole.query_segment_ids, rows),
        kv_segment_ids=cut(keys.segment_ids, columns),
        query_positions=q_pos,
        kv_positions=k_pos,
        alibi_slopes=whole.alibi_slopes,
        sinks=whole.sinks,
        dropout=dropout,
    )


def _within(place: Array, run: Run) -> Array:
    """Offset and stride of a run, in terms of those of the whole."""
    return jnp.stack([place[0] + place[1] * run.start, place[1] * run.stride]).astype(jnp.int32)
