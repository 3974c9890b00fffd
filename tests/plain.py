"""Attention as one would first write it in JAX: the yardstick of rounding errors, and the mutants' host.

Products of the input's dtype summed in float32, softmax in float32, probabilities back in the input's
dtype, no tiles, JAX's own gradients. It shares nothing with jaxcap: what takes part, ALiBi and
dropout arrive as arrays from the oracle, and the cap is a parameter, so that a test can pass a wrong one.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests import cases, oracle

Cap = Callable[[jax.Array, Any, Any], jax.Array]


class Extra(NamedTuple):
    """What has no gradient; ALiBi is [B or 1, N or 1, T or 1, S or 1], part and keep_factor [B, N, T, S]."""

    part: Any
    alibi: Any
    keep_factor: Any
    scale: Any
    softcap: Any  # 0: off
    layer_scale: Any


def tanh_cap(logits: jax.Array, softcap: Any, layer_scale: Any) -> jax.Array:
    cap = jnp.where(softcap > 0, softcap, 1) / layer_scale
    logits = logits / layer_scale
    return layer_scale * jnp.where(softcap > 0, cap * jnp.tanh(logits / cap), logits)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array,
    sinks: jax.Array,
    extra: Extra,
    *,
    cap: Cap = tanh_cap,
    mistake: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out, lse); `bias` is [B, N, T, S], and the sinks -inf where there are none.

    All features are always on, so that calls of one shape share a program. `mistake` makes one that
    somebody has made.
    """
    n = q.shape[2]
    k, v = (jnp.repeat(x, n // x.shape[2], axis=2) for x in (k, v))
    products = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=bias.dtype)
    if mistake == "cap before scale":
        scores = extra.scale * cap(products, extra.softcap, extra.layer_scale) + bias + extra.alibi
    elif mistake == "bias inside the cap":
        scores = cap(extra.scale * products + bias, extra.softcap, extra.layer_scale) + extra.alibi
    elif mistake == "ALiBi inside the cap":
        scores = cap(extra.scale * products + extra.alibi, extra.softcap, extra.layer_scale) + bias
    else:
        scores = cap(extra.scale * products, extra.softcap, extra.layer_scale) + bias + extra.alibi
    part = jnp.ones_like(extra.part) if mistake == "mask after softmax" else extra.part
    scores = jnp.where(part, scores, -jnp.inf)
    sink = sinks[None, :, None]
    top = jnp.maximum(jnp.max(scores, axis=3, initial=-jnp.inf), sink)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top[..., None])
    values = jnp.sum(weights, axis=3)
    total = values + jnp.exp(sink - top)
    counted = values if mistake == "sink not in the residual" else total
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(counted > 0, counted, 1)), -jnp.inf)
    if mistake == "residual without gradient":
        lse = jax.lax.stop_gradient(lse)
    weights = weights / jnp.where(total > 0, total, 1)[..., None] * extra.keep_factor
    weights = jnp.where(extra.part, weights, 0)
    return jnp.einsum("bnts,bsnv->btnv", weights.astype(q.dtype), v), jnp.swapaxes(lse, 1, 2)


def quick_jit(function: Callable, **options: Any) -> Callable:
    """`jax.jit`; on CPU LLVM, half of a test's time, optimises nothing. The program stays the same."""
    if jax.default_backend() == "cpu":
        options["compiler_options"] = {"xla_backend_optimization_level": 0}
    return jax.jit(function, **options)


def run(operands, extra: Extra, d_out, d_lse, cap: Cap = tanh_cap, mistake: str | None = None):
    """(out, lse, gradients of the five operands)."""
    function = functools.partial(attention, extra=extra, cap=cap, mistake=mistake)
    (out, lse), pullback = jax.vjp(function, *operands)
    return out, lse, pullback((d_out, d_lse))


def forget_programs() -> None:
    """Unmaps what was compiled: a process may have 65530 mappings, and each program takes dozens."""
    jax.clear_caches()
    gc.collect()


@functools.cache
def _compiled() -> Callable:
    return quick_jit(run, static_argnames=("cap", "mistake"))


def results(
    inputs: cases.Inputs,
    work: oracle.Attention,
    cap: Cap = tanh_cap,
    mistake: str | None = None,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Out, lse and the gradients of the case's operands by name; `changes` replace parts of `Extra`."""
    given, shape = inputs.operands, work.part.shape
    dtype = given["query"].dtype
    acc = np.float64 if dtype == np.float64 else np.float32
    bias = given.get("bias", np.zeros((1, 1, 1, 1)))
    bias = np.broadcast_to(np.where(np.isfinite(bias), bias, 0).astype(acc), shape)
    sinks = given.get("sinks", np.full(shape[1], -np.inf)).astype(acc)
    extra = Extra(
        work.part,
        np.zeros((1, 1, 1, 1), acc) if work.alibi is None else work.alibi.astype(acc),
        work.keep_factor.astype(acc),
        *(acc(x or 0) for x in (work.scale, inputs.static["softcap"], work.layer_scale)),
    )
    operands = (*(x.astype(dtype) for x in (work.q, work.k, work.v)), bias, sinks)
    row = np.swapaxes(work.row, 1, 2)[..., None]
    d_out = np.where(row, inputs.d_out, np.zeros_like(inputs.d_out))
    given_extra = extra._replace(**changes)
    out, lse, grads = _compiled()(
        operands, given_extra, d_out, inputs.d_lse, cap=cap, mistake=mistake
    )
    named = dict(zip(("query", "key", "value", "bias", "sinks"), grads, strict=True))
    if "bias" in given:
        whole = np.asarray(named["bias"], np.float64)
        named["bias"] = oracle.sum_to(whole, given["bias"].shape).astype(given["bias"].dtype)
    return {"out": out, "lse": lse, **{name: named[name] for name in given}}
