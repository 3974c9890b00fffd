"""Backend `xla`: unfused attention in plain JAX, the executable specification.

It materialises the `[B, N, T, S]` logits. JAX differentiates it by itself, forward mode and second
derivatives included, partitions it over any axis and exports it to any platform.
"""

import functools

import jax
import jax.numpy as jnp

from jaxcap import dropout, explicit, mask, softcap
from jaxcap.spec import Array, AttentionSpec, Operands


def precision_of(spec: AttentionSpec) -> jax.lax.Precision | None:
    """Full precision for float32 and float64, which some devices would round to fewer bits."""
    return jax.lax.Precision.HIGHEST if spec.dtype in ("float32", "float64") else None


def scores_bias(spec: AttentionSpec, operands: Operands) -> Array | None:
    """[B or 1, N or 1, T or 1, S or 1]: what is added outside the cap, bias and ALiBi."""
    total = None
    if operands.bias is not None:
        total = operands.bias.astype(spec.accumulator)
    if operands.alibi_slopes is not None:
        q = mask.query_side(spec, operands, 0, spec.query_length).position
        k = mask.key_side(spec, operands, 0, spec.key_length).position
        distance = jnp.abs(q[:, None, :, None] - k[:, None, None, :]).astype(spec.accumulator)
        slopes = jax.lax.stop_gradient(operands.alibi_slopes).astype(spec.accumulator)
        alibi = -slopes[:, :, None, None] * distance
        total = alibi if total is None else total + alibi
    return total


class XLA:
    name = "xla"
    wide = True  # partial results in the accumulator's dtype
    native = True  # JAX differentiates and batches it; there is no backward of our own

    def reasons(self, spec: AttentionSpec) -> list[str]:
        del spec
        return []

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        return explicit.native(functools.partial(self._forward, spec), operands)

    def _forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        kv_heads, group, acc = spec.kv_heads, spec.group_size, spec.accumulator
        exact = precision_of(spec)
        q, k, v = operands.query, operands.key, operands.value

        # 1. What takes part. Rows and keys that nothing attends are cleared: they may hold NaN.
        kept = mask.keep_tile(spec, operands, 0, spec.query_length, 0, spec.key_length)
        shape = (spec.batch, spec.query_heads, spec.query_length, spec.key_length)
        row_used = None
        if kept is not None:
            kept = jnp.broadcast_to(kept, shape)
            row_used = jnp.any(kept, axis=3)  # [B, N, T]
            key_used = jnp.any(kept, axis=2)  # [B, N, S]
            key_used = jnp.any(key_used.reshape(spec.batch, kv_heads, group, -1), axis=2)
            key_used = jnp.swapaxes(key_used, 1, 2)[..., None]  # [B, S, K, 1]
            q = jnp.where(jnp.swapaxes(row_used, 1, 2)[..., None], q, jnp.zeros_like(q))
            k = jnp.where(key_used, k, jnp.zeros_like(k))
            v = jnp.where(key_used, v, jnp.zeros_like(v))

        # 2. score = cap(scale * q.k) + bias - slope * distance, in float32.
        grouped = q.reshape(*q.shape[:2], kv_heads, group, spec.head_size)
        products = jnp.einsum(
            "btkgh,bskh->bkgts", grouped, k, precision=exact, preferred_element_type=acc
        )
        scores = softcap.cap(products * spec.scale, spec.softcap, spec.layer_scale)
        scores = scores.reshape(shape)
        extra = scores_bias(spec, operands)
        if extra is not None:
            scores = scores + extra

        # 3. Softmax with its log-sum-exp; an empty row has neither maximum nor sum.
        if kept is not None:
            scores = jnp.where(kept, scores, -jnp.inf)
        top = jnp.max(scores, axis=3, initial=-jnp.inf)
        sink = None
        if operands.sinks is not None:
            sink = jnp.broadcast_to(operands.sinks.astype(acc)[:, :, None], top.shape)
            top = jnp.maximum(top, sink)
        top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, axis=3)
        if sink is not None:
            total = total + jnp.exp(sink - top)
        some = total != 0  # NaN is not nothing
        safe = jnp.where(some, total, 1.0)
        lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
        weights = weights / safe[..., None]

        # 4. Dropout on the normalised probabilities, then their product with the values.
        if operands.dropout is not None:
            survives = dropout.keep_tile(
                spec.dropout_rate, operands.dropout, 0, spec.query_length, 0, spec.key_length
            )
            weights = jnp.where(survives, weights / (1.0 - spec.dropout_rate), 0.0)
        weights = weights.astype(v.dtype).reshape(spec.batch, kv_heads, group, *shape[2:])
        out = jnp.einsum(
            "bkgts,bskv->btkgv", weights, v, precision=exact, preferred_element_type=acc
        )
        out = out.reshape(spec.batch, spec.query_length, spec.query_heads, spec.value_size)
        if row_used is not None:
            out = jnp.where(jnp.swapaxes(row_used, 1, 2)[..., None], out, 0.0)
        return out.astype(spec.result_dtype), lse


BACKEND = XLA()
