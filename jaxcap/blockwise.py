"""Backend `blockwise`: attention in plain JAX, chunked over queries and keys in O(T) memory.

The flash algorithm as XLA loops. Tiles that `tiles.py` finds empty are not visited, tiles that it
finds full are not masked, and the backward computes the probabilities anew from the log-sum-exp.

Source: Dao, "FlashAttention-2: Faster attention with better parallelism and work partitioning",
2023.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcap import merge, softcap
from jaxcap.chunks import Chunks, cleared, put, put_sum, sum_to, take, tile_sizes, varying_over
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands


class _Rows(NamedTuple):
    """A Q tile in the backward."""

    start: Any
    q: Array  # [B, K, G, tq, H]
    d_out: Array  # [B, K, G, tq, V]
    lse: Array  # [B, K, G, tq]
    delta: Array  # [B, K, G, tq]


class _Growing(NamedTuple):
    """Gradients while they are being summed, in the accumulator's dtype."""

    query: Array  # [B, K, G, tq, H], of one Q tile
    key: Array  # [B, K, S, H]
    value: Array  # [B, K, S, V]
    bias: Array | None  # as the bias


def forward(spec: AttentionSpec, operands: Operands, tiles: tuple[int, int]) -> tuple[Array, Array]:
    """(out [B, T, N, V], lse [B, N, T]), `tiles` being the most queries and keys of one."""
    call, acc = Chunks(spec, operands, *tiles), spec.accumulator
    # In float32 nothing bounds the values, so the maximum stays.
    narrow = spec.dtype in ("bfloat16", "float16")
    shift = softcap.bounded_shift(spec, spec.dtype) if narrow else None
    join = merge.add if shift is None else merge.add_bounded
    first_top = -jnp.inf if shift is None else merge.shift_to_top(shift)
    batch, kv_heads, group = spec.batch, spec.kv_heads, spec.group_size
    varying = varying_over(operands)

    def key_step(q, q_start, j, masked, sums):
        # 1. Scores, masked.
        keys = call.keys(j)
        _, scores = call.scores(q, q_start, keys)
        v, kept = keys.v, call.kept(q_start, keys) if masked else None
        if kept is not None:
            scores = jnp.where(kept, scores, -jnp.inf)
            v = cleared(v, jnp.any(kept, axis=(2, 3)))

        # 2. Exponentials, relative to the tile's maximum or to the bound of all scores.
        top = sums.top if shift is not None else jnp.max(scores, axis=-1)
        base = first_top if shift is not None else merge.finite_or_zero(top)[..., None]
        p = jnp.exp(scores - base)
        total = jnp.sum(p, axis=-1)

        # 3. Their product with the values; dropout leaves the denominator as it is.
        survives = call.survivors(q_start, keys)
        if survives is not None:
            p = jnp.where(survives, p, 0.0)
        numerator = call.dot("bkgts,bksv->bkgtv", p.astype(v.dtype), v)
        return join(sums, merge.Sums(numerator, top, total))

    def query_step(i, carry):
        q_start = call.query_start(i)
        step = functools.partial(key_step, call.queries(operands.query, q_start), q_start)
        rows = (batch, kv_heads, group, call.tq)
        nothing = merge.Sums(
            jnp.zeros((*rows, spec.value_size), acc),
            jnp.full(rows, first_top, acc),
            jnp.zeros(rows, acc),
        )
        sums = call.for_keys(i, step, jax.tree.map(varying, nothing))
        sink = None if operands.sinks is None else call.heads(operands.sinks)[..., None]
        part = merge.finish(sums, sink)
        tile = jnp.moveaxis(part.out / (1.0 - spec.dropout_rate), 3, 1)
        out, lse = carry
        return put(out, tile, (0, q_start, 0, 0, 0)), put(lse, part.lse, (0, 0, 0, q_start))

    out = jnp.zeros((batch, spec.query_length, kv_heads, group, spec.value_size), spec.result_dtype)
    lse = jnp.zeros((batch, kv_heads, group, spec.query_length), acc)
    out, lse = call.for_queries(query_step, (varying(out), varying(lse)))
    return (
        out.reshape(batch, spec.query_length, spec.query_heads, spec.value_size),
        lse.reshape(batch, spec.query_heads, spec.query_length),
    )


def delta_of(out: Array, lse: Array, d_out: Array, d_lse: Array | None) -> Array:
    """[B, N, T]: <out, d_out> - d_lse, what the backward of softmax subtracts.

    A row that attends nothing has an output of exactly 0, and its cotangents may be NaN: 0 there.
    """
    products = out.astype(lse.dtype) * d_out.astype(lse.dtype)
    products = jnp.where(out == 0, jnp.zeros_like(products), products)
    delta = jnp.swapaxes(jnp.sum(products, axis=-1), 1, 2)
    if d_lse is not None:
        delta = delta - jnp.where(lse > -jnp.inf, d_lse, jnp.zeros_like(d_lse)).astype(lse.dtype)
    return delta


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    tiles: tuple[int, int],
) -> Gradients:
    """The gradients that `spec.gradients` names; tiles as in `forward`."""
    call, acc = Chunks(spec, operands, *tiles), spec.accumulator
    batch, kv_heads, group = spec.batch, spec.kv_heads, spec.group_size
    survivor = 1.0 / (1.0 - spec.dropout_rate)
    varying = varying_over(operands, out, lse, d_out, d_lse)
    delta = delta_of(out, lse, d_out, d_lse)

    def rows_of(i):
        start = call.query_start(i)
        q, d_rows = call.queries(operands.query, start), call.queries(d_out, start)
        lse_rows, delta_rows = (call.heads(take(x, start, call.tq, 2)) for x in (lse, delta))
        if spec.query_length % call.tq:  # rows shared with the tile before pass nothing on
            new = (start + jnp.arange(call.tq, dtype=jnp.int32) >= i * call.tq)[None, None, None]
            q, d_rows = cleared(q, new), cleared(d_rows, new)
            lse_rows = jnp.where(new, lse_rows, jnp.inf)
            delta_rows = jnp.where(new, delta_rows, 0.0)
        return _Rows(start, q, d_rows, lse_rows, delta_rows)

    def key_step(rows, j, masked, sums):
        # 1. Scores as in the forward; what the tile does not use is cleared before all products.
        q, d_rows, keys = rows.q, rows.d_out, call.keys(j)
        kept = call.kept(rows.start, keys) if masked else None
        if kept is not None:
            row_used, key_used = jnp.any(kept, axis=4), jnp.any(kept, axis=(2, 3))
            q, d_rows = cleared(q, row_used), cleared(d_rows, row_used)
            keys = keys._replace(k=cleared(keys.k, key_used), v=cleared(keys.v, key_used))
        capped, scores = call.scores(q, rows.start, keys)

        # 2. Probabilities, from the log-sum-exp.
        p = jnp.exp(scores - rows.lse[..., None])
        if kept is not None:
            p = jnp.where(kept, p, 0.0)

        # 3. dV = P^T dO and dP = dO V^T over what survives dropout.
        dp = call.dot("bkgtv,bksv->bkgts", d_rows, keys.v)
        weights, survives = p, call.survivors(rows.start, keys)
        if survives is not None:
            weights = jnp.where(survives, p * survivor, 0.0)
            dp = jnp.where(survives, dp * survivor, 0.0)
        dv = call.dot("bkgts,bkgtv->bksv", weights.astype(d_rows.dtype), d_rows)

        # 4. Through the softmax to the bias, then through the cap.
        ds = p * (dp - rows.delta[..., None])
        bias = sums.bias
        if bias is not None:
            place = [(rows.start, call.tq), (keys.start, call.tk)]
            starts, sizes = zip(
                *[(0, 1) if bias.shape[a] == 1 else place[a - 2] for a in (2, 3)], strict=True
            )
            part = ds.reshape(batch, spec.query_heads, call.tq, call.tk)
            bias = put_sum(bias, sum_to(part, (*bias.shape[:2], *sizes)), (0, 0, *starts))
        dz = ds * softcap.derivative(capped, spec.softcap) * spec.scale
        dz = dz.astype(q.dtype)

        # 5. dQ = dZ K and dK = dZ^T Q.
        dq = call.dot("bkgts,bksh->bkgth", dz, keys.k)
        dk = call.dot("bkgts,bkgth->bksh", dz, q)
        at = (0, 0, keys.start, 0)
        return _Growing(
            sums.query + dq, put_sum(sums.key, dk, at), put_sum(sums.value, dv, at), bias
        )

    def query_step(i, carry):
        d_query, sums = carry
        rows = rows_of(i)
        zero = varying(jnp.zeros(rows.q.shape, acc))
        sums = call.for_keys(i, functools.partial(key_step, rows), sums._replace(query=zero))
        tile = jnp.moveaxis(sums.query, 3, 1)
        return put(d_query, tile, (0, rows.start, 0, 0, 0)), sums

    shape = (batch, kv_heads, spec.key_length)
    with_bias = "bias" in spec.gradients and operands.bias is not None
    sums = _Growing(
        query=jnp.zeros((batch, kv_heads, group, call.tq, spec.head_size), acc),
        key=jnp.zeros((*shape, spec.head_size), acc),
        value=jnp.zeros((*shape, spec.value_size), acc),
        bias=jnp.zeros(operands.bias.shape, acc) if with_bias else None,
    )
    d_query = jnp.zeros(
        (batch, spec.query_length, kv_heads, group, spec.head_size), spec.result_dtype
    )
    d_query, sums = call.for_queries(query_step, jax.tree.map(varying, (d_query, sums)))
    bias = sums.bias
    if bias is not None and not spec.partial:
        bias = bias.astype(operands.bias.dtype)
    return Gradients(
        query=d_query.reshape(operands.query.shape),
        key=jnp.swapaxes(sums.key, 1, 2).astype(spec.result_dtype),
        value=jnp.swapaxes(sums.value, 1, 2).astype(spec.result_dtype),
        bias=bias,
        sinks=None if operands.sinks is None else sink_gradient(operands.sinks, lse, delta),
    )


def sink_gradient(sinks: Array, lse: Array, delta: Array) -> Array:
    """-sum(exp(sink - lse) * delta): a sink is one more key, without a value."""
    sink = sinks.astype(lse.dtype)[:, :, None]
    p = jnp.where(lse > -jnp.inf, jnp.exp(sink - merge.finite_or_zero(lse)), jnp.zeros_like(lse))
    by_entry = -jnp.sum(p * delta, axis=2)
    return sum_to(by_entry, sinks.shape).astype(sinks.dtype)


@dataclasses.dataclass(frozen=True)
class Blockwise:
    name: str = "blockwise"
    wide: ClassVar[bool] = True  # partial results in the accumulator's dtype
    tile_sizes: Callable[[AttentionSpec], tuple[int, int]] = tile_sizes

    def reasons(self, spec: AttentionSpec) -> list[str]:
        del spec
        return []

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        return forward(spec, operands, self.tile_sizes(spec))

    def backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
    ) -> Gradients:
        return backward(spec, operands, out, lse, d_out, d_lse, self.tile_sizes(spec))


BACKEND = Blockwise()
