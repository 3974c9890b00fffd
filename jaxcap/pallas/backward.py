"""Gradients through the sm90 backward kernel: what surrounds it, and what it cannot do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import fragments
from jaxcap import mask as masks
from jaxcap.chunks import varying_over
from jaxcap.marks import invariant
from jaxcap.pallas.backward_tables import (
    dead_keys,
    dropout_places,
    has_positions,
    index_band,
    looks_inside,
    may_have_dead_keys,
    may_have_empty_queries,
    needed_tiles,
    ranks,
    spans,
)
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands

MAX_HEAD_SIZE = 256
MAX_GRID = 65535  # thread blocks along the second and third axis


def reasons(spec: AttentionSpec) -> list[str]:
    """Why the kernel cannot give these gradients; [] if it can. Imports no Mosaic."""
    found = []
    if spec.platform != "sm90":
        found.append(f"the kernel is for sm90 and the device is {spec.platform}")
    if spec.dtype not in ("bfloat16", "float16"):
        found.append(f"backward in {spec.dtype}: the kernel takes bfloat16 and float16")
    for name, size in (("head size", spec.head_size), ("value size", spec.value_size)):
        if size % 8 or not 8 <= size <= MAX_HEAD_SIZE:
            found.append(f"backward with {name} {size}: multiples of 8 up to {MAX_HEAD_SIZE}")
    if min(spec.batch, spec.query_length, spec.key_length, spec.query_heads) < 1:
        found.append("backward of an empty array")
    if max(spec.batch, spec.kv_heads) > MAX_GRID:
        found.append(
            f"backward of batch {spec.batch} and {spec.kv_heads} key heads: up to {MAX_GRID}"
        )
    if spec.bias_dtype not in (None, "bfloat16", "float16", "float32"):
        found.append(f"backward with a bias in {spec.bias_dtype}")
    if "bias" in spec.gradients and spec.deterministic:
        found.append("the gradient of a bias is summed in no fixed order: not deterministic")
    return found


def make_plan(spec: AttentionSpec, config: Any = None) -> Any:
    """The static description that the kernel is compiled for."""
    from jaxcap.pallas.backward_config import config_for
    from jaxcap.pallas.backward_plan import Plan
    from jaxcap.pallas.backward_scores import Scores
    from jaxcap.pallas.forward_sm90 import multiprocessors

    heavy = bool(spec.dropout_rate) or "bias" in spec.gradients
    config = config or config_for(spec.head_size, spec.value_size, heavy)

    def strides(shape):
        return None if shape is None else (shape[3] * (shape[2] > 1), int(shape[3] > 1))

    dynamic = looks_inside(spec) or spec.query_lengths or spec.kv_lengths
    ragged = spec.key_length % config.block_kv != 0
    scores = Scores(
        scale=float(spec.scale),
        softcap=spec.softcap,
        dtype=jnp.dtype(spec.dtype),
        band=index_band(spec),
        query_offset=spec.query_offset,
        positions=has_positions(spec),
        segments=spec.segment_ids,
        dead_keys=ragged or may_have_dead_keys(spec),
        mask=strides(spec.mask_shape),
        mask_planes=(1, 1) if spec.mask_shape is None else spec.mask_shape[:2],
        mask_size=1 if spec.mask_shape is None else spec.mask_shape[2] * spec.mask_shape[3],
        last=(spec.query_length - 1, spec.key_length - 1),
        bias=strides(spec.bias_shape),
        bias_dtype=spec.bias_dtype,
        bias_gradient="bias" in spec.gradients,
        alibi=spec.alibi,
        dropout_rate=spec.dropout_rate,
        paired=config.pairs(spec.dtype, spec.softcap),
    )
    return Plan(
        config=config,
        scores=scores,
        batch=spec.batch,
        query_length=spec.query_length,
        key_length=spec.key_length,
        query_heads=spec.query_heads,
        kv_heads=spec.kv_heads,
        head_size=spec.head_size,
        value_size=spec.value_size,
        table=dynamic or spec.deterministic,
        empty_queries=may_have_empty_queries(spec),
        deterministic=spec.deterministic,
        partial=spec.partial,
        first_tile=0 if spec.query_sum is None else spec.query_sum.first // fragments.ROWS,
        multiprocessors=multiprocessors(),
    )


def _padded(x: Any, size: int, value: Any = 0) -> Array:
    """[B or 1, n] -> [B or 1, size]."""
    return jnp.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=value)


def kernel_inputs(plan: Any, spec: AttentionSpec, operands: Operands, d_out, nlse, ndelta) -> dict:
    """What `backward_sm90.kernel` reads, by name."""
    scores, config = plan.scores, plan.config
    inputs = {"q": operands.query, "k": operands.key, "v": operands.value, "do": d_out}
    inputs |= {"nlse": nlse, "ndelta": ndelta}
    if plan.table:
        need, full = needed_tiles(spec, operands, config.block_q, config.block_kv)
        table = spans(need, full)
        table = jnp.broadcast_to(table, (plan.batch, *table.shape[1:]))
        inputs["spans"] = table
        if plan.deterministic:
            inputs["ranks"] = ranks(table, plan.q_tiles)
    if scores.dead_keys:
        dead = dead_keys(spec, operands)
        inputs["dead"] = jnp.where(_padded(dead, plan.padded_keys, True), -jnp.inf, 0.0)
        inputs["dead"] = inputs["dead"].astype(jnp.float32)
    if scores.segments:
        inputs["kseg"] = _padded(operands.kv_segment_ids, plan.padded_keys)
        inputs["qseg"] = _padded(operands.query_segment_ids, plan.padded_queries)
    if scores.positions:
        q = masks.query_side(spec, operands, 0, spec.query_length).position
        k = masks.key_side(spec, operands, 0, spec.key_length).position
        inputs["kpos"] = _padded(k, plan.padded_keys)
        inputs["qpos"] = _padded(q, plan.padded_queries)
    if scores.mask is not None:
        inputs["mask"] = operands.mask.reshape(-1)
    if scores.bias is not None:
        inputs["bias"] = operands.bias
    if scores.alibi:
        inputs["slopes"] = operands.alibi_slopes.astype(jnp.float32)[..., None]
    if scores.dropout_rate:
        inputs["places"] = dropout_places(operands, plan.batch, plan.query_heads)
    return inputs


def query_factor(spec: AttentionSpec) -> float:
    """dQ is this times the kernel's sum."""
    from jaxcap.pallas.backward_scores import boost

    return spec.scale * 2.0 ** -boost(spec.dtype)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    config: Any = None,
    query_sum: Array | None = None,
) -> Gradients:
    """Gradients of one call on one device; dQ in the sum, if `spec.query_sum` asks. `reasons(spec)` is empty.

    Memory beyond inputs, outputs and lse: dQ in float32 and one float32 row vector, [B, N, T].
    """
    from jax.experimental import pallas as pl

    from jaxcap.pallas import backward_convert, backward_prepare, backward_scores, backward_sm90

    plan = make_plan(spec, config)
    up = backward_scores.boost(plan.dtype)
    pad = plan.padded_queries - plan.query_length
    if plan.partial:  # the same for all parts, so that XLA may do it once
        delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
        ndelta, dq = jnp.pad(-delta, ((0, 0), (0, 0), (0, pad))), query_sum
    else:
        ndelta, dq = map(varying_over((out, d_out)), backward_prepare.prepared(plan, out, d_out))
    nlse, ndelta, d_sinks = backward_prepare.row_vectors(
        spec, operands, lse, ndelta, d_lse, pad, up
    )
    inputs = kernel_inputs(plan, spec, operands, d_out, nlse, ndelta)
    by_row = ("dead", "kseg", "qseg", "kpos", "qpos", "mask", "bias", "slopes")
    shared = tuple(name for name in by_row if name in inputs and inputs[name].shape[0] == 1)
    plan = dataclasses.replace(plan, shared_rows=shared)
    # Zeros that depend on nothing XLA makes for all layers, or all steps of a ring, at once and keeps.
    before = [ndelta, operands.key[0, 0, 0, 0]] if plan.partial else ndelta
    zero, _ = jax.lax.optimization_barrier((jnp.float32(0), before))
    dq = jnp.full(plan.dq_shape, zero) if dq is None else invariant(dq)
    assert (
        query_sum is None or plan.config.block_q == fragments.ROWS
    )  # its rows end where the kernel's do
    results = {
        "dq": dq.reshape(*plan.dq_shape[:2], -1, *plan.dq_shape[3:]),
        "dk": jnp.zeros(operands.key.shape, plan.result_dtype),
        "dv": jnp.zeros(operands.value.shape, plan.result_dtype),
    }
    if plan.scores.bias_gradient:
        results["dbias"] = jnp.full(operands.bias.shape, zero)

    # Inside `run_state` the references cause no effect that a transformation outside would meet.
    def run(refs):
        sums = {name: refs[name] for name in ("dq", "dbias") if name in refs}
        refs["dk"][...], refs["dv"][...] = backward_sm90.kernel(plan, inputs, sums)

    # Under shard_map all come out as replicated, whatever was written to them.
    varying = varying_over(inputs)
    done = jax.tree.map(varying, pl.run_state(run)(results))
    factor = query_factor(spec)
    if query_sum is not None:
        d_query = done["dq"].reshape(query_sum.shape)
    elif plan.partial:
        total = done["dq"].reshape(fragments.sum_shape(spec))
        d_query = fragments.rows_of(total, spec.query_length, spec.head_size) * factor
    else:
        d_query = varying(backward_convert.converted(plan, done["dq"], factor))
    d_bias = None
    if "dbias" in done:
        d_bias = done["dbias"] * 2.0**-up
        d_bias = d_bias if spec.partial else d_bias.astype(operands.bias.dtype)
    return Gradients(query=d_query, key=done["dk"], value=done["dv"], bias=d_bias, sinks=d_sinks)
