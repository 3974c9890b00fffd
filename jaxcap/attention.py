"""`dot_product_attention`: validate, select, dispatch."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import arguments, device, dispatch, selection
from jaxcap.environment import ENVIRONMENT
from jaxcap.keywords import hinted
from jaxcap.sharding import wrap
from jaxcap.sharding.config import ContextParallel
from jaxcap.spec import Alignment, AttentionSpec, Operands, shape_of


@hinted
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    query_positions: Any = None,
    key_value_positions: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    dropout_broadcast: bool = False,
    layer_scale: float = 1.0,
    return_residual: bool = False,
    implementation: str | None = None,
    deterministic: bool | None = None,
    context_parallel: ContextParallel | None = None,
) -> Any:
    """Softmax attention whose logits are capped: `jax.nn.dot_product_attention` and a `softcap`.

    score = softcap * tanh(scale * q.k / softcap) + bias - slope * |q_pos - k_pos|, in float32, then
    masks, softmax, dropout and the product with the values.

    B batch, T and S query and key length, N query heads, K key/value heads (N a multiple of K), H
    and V head sizes. No batch axis or several are fine: `[T, N, H]`, `[B1, B2, T, N, H]`.

    Args:
      query: `[B, T, N, H]`, bfloat16, float16, float32 or float64.
      key: `[B, S, K, H]`, the query's dtype.
      value: `[B, S, K, V]`, the query's dtype.
      bias: floating, broadcastable to `[B, N, T, S]`; added outside the cap; has a gradient.
      mask: boolean, broadcastable to `[B, N, T, S]`; True takes part.
      softcap: the cap, a Python number; None or 0.0 is none.
      scale: of the logits; None is `H ** -0.5`.
      is_causal: keep `k_pos <= q_pos`.
      causal_alignment: "top_left" (query i is at position i) or "bottom_right" (at i + S - T).
      local_window_size: (left, right) keeps `q_pos - left <= k_pos <= q_pos + right`; int: both.
      query_seq_lengths: `[B]` int; queries past it are empty rows.
      key_value_seq_lengths: `[B]` int; keys past it take no part.
      query_segment_ids: `[B, T]` int; a query attends keys of equal id.
      key_value_segment_ids: `[B, S]` int.
      query_positions: `[B, T]` or `[T]` int, below 2**30 in magnitude, instead of indices in
        causality, window and ALiBi.
      key_value_positions: `[B, S]` or `[S]` int.
      alibi_slopes: `[N]` or `[B, N]`, without gradient.
      sinks: `[N]`, one more logit a head that has no value; has a gradient.
      dropout_rate: share of probabilities dropped, in [0, 1).
      dropout_rng: one JAX random key; the same entries fall on every backend and sharding.
      dropout_broadcast: drop the same entries for all batch entries and heads, as Flax does.
      layer_scale: a factor divided out of logits and cap, to keep low precision in range.
      return_residual: also return the log-sum-exp.
      implementation: a backend's name; None selects.
      deterministic: gradients bitwise the same in every run; None is `JAXCAP_DETERMINISTIC`.
      context_parallel: a `jaxcap.ContextParallel`: how the sequence is split over devices.

    Returns:
      `[B, T, N, V]` in the query's dtype, and with `return_residual` the natural log-sum-exp
      `[B, T, N]`, float32 (float64 for float64), differentiable. A row with nothing to attend to
      is 0, its residual -inf (or its sink).

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.
      BackendError: no backend, or not the named one, can do this; the message has every reason.

    Example:
      >>> import jax, jaxcap
      >>> q = jax.random.normal(jax.random.key(0), (1, 8, 4, 16))
      >>> jaxcap.dot_product_attention(q, q, q, softcap=50.0, is_causal=True).shape
      (1, 8, 4, 16)

    Sources: Bello et al. 2016 (arXiv:1611.09940, the cap), Gemma 2 (arXiv:2408.00118),
    FlashAttention-2 (arXiv:2307.08691, the residual).
    """
    given = {k: v for k, v in locals().items() if k != "given"}
    requested = selection.requested(given.pop("implementation"))
    spec, operands, lead = prepare(given)
    if spec.context_parallel is None:
        out, lse = dispatch.attend(dispatch.Call(spec, requested), operands)
    else:
        out, lse = wrap.attend(spec, operands, requested)
    out = out.reshape(*lead, *out.shape[1:])
    if not return_residual:
        return out
    lse = jnp.swapaxes(lse, 1, 2)
    return out, lse.reshape(*lead, *lse.shape[1:])


def prepare(given: dict[str, Any]) -> tuple[AttentionSpec, Operands, tuple[int, ...]]:
    """Spec, canonical operands and leading axes of a call, from its arguments by name."""
    arguments.no_tensors(given, "jaxcap.torch_bridge.attention")
    q = arguments.floating("query", given["query"])
    k = arguments.floating("key", given["key"])
    v = arguments.floating("value", given["value"])
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3:
            raise ValueError(f"{name} must be [.., length, heads, size], got {list(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype.name}, query {q.dtype.name}; cast one to the other"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} must have no axis of length 0, got {list(x.shape)}")
    if k.ndim == v.ndim != q.ndim:
        raise ValueError(
            f"query must have the leading axes of key and value, {list(k.shape[:-3])}, got {list(q.shape)}"
        )
    lead = tuple(q.shape[:-3])
    (length, heads, size), (key_length, kv_heads) = q.shape[-3:], k.shape[-3:-1]
    arguments.expect("key", k, (*lead, key_length, kv_heads, size))
    arguments.expect("value", v, (*lead, key_length, kv_heads, v.shape[-1]))
    if heads % kv_heads:
        raise ValueError(
            f"query's {heads} heads must be a multiple of the {kv_heads} heads of key and value"
        )
    arguments.hint_at_layout("query", (length, heads), (key_length, kv_heads))
    q, k, v = (x.reshape(-1, *x.shape[-3:]) if lead else x[None] for x in (q, k, v))
    batch = q.shape[0]
    full = (batch, heads, length, key_length)

    bias, mask = given["bias"], given["mask"]
    if bias is not None:
        if jnp.ndim(bias) == 0:
            raise ValueError(
                "bias must have axes, got a number: added to every logit it does nothing; a cap is softcap="
            )
        bias = arguments.four("bias", arguments.floating("bias", bias), full, lead)
    if mask is not None:
        mask = arguments.four("mask", arguments.boolean("mask", mask), full, lead)

    alignment = given["causal_alignment"]
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"causal_alignment must be 'top_left' or 'bottom_right', got {alignment!r}"
        )
    q_pos, k_pos = given["query_positions"], given["key_value_positions"]
    if alignment == "bottom_right" and (q_pos is not None or k_pos is not None):
        raise ValueError(
            "causal_alignment='bottom_right' places queries by index, so query_positions and"
            " key_value_positions exclude it; leave it 'top_left'"
        )
    q_seg, k_seg = given["query_segment_ids"], given["key_value_segment_ids"]
    if (q_seg is None) != (k_seg is None):
        missing = "query_segment_ids" if q_seg is None else "key_value_segment_ids"
        raise ValueError(f"segment ids came for one side only; pass {missing} too")

    def optional(convert, name, *rest, **options):
        x = given[name]
        return None if x is None else convert(name, x, lead, *rest, **options)

    deterministic = given["deterministic"]
    if deterministic is None:
        deterministic = ENVIRONMENT.deterministic
    context_parallel = given["context_parallel"]
    if not isinstance(context_parallel, ContextParallel | None):
        raise TypeError(
            f"context_parallel must be a jaxcap.ContextParallel or None, got {context_parallel!r}"
        )
    if given["dropout_rng"] is None:
        markers = []
    else:
        markers = [x for x in jax.tree.leaves(given) if isinstance(x, jax.Array)]
        markers = [x for x in markers if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    rate, dropout = arguments.drop(
        given["dropout_rate"],
        given["dropout_rng"],
        arguments.flag("dropout_broadcast", given["dropout_broadcast"]),
        batch,
        heads,
        markers,
    )
    operands = Operands(
        q,
        k,
        v,
        bias,
        mask,
        optional(arguments.integers, "query_seq_lengths", None),
        optional(arguments.integers, "key_value_seq_lengths", None),
        optional(arguments.integers, "query_segment_ids", length),
        optional(arguments.integers, "key_value_segment_ids", key_length),
        optional(arguments.integers, "query_positions", length),
        optional(arguments.integers, "key_value_positions", key_length),
        jax.lax.stop_gradient(optional(arguments.per_head, "alibi_slopes", heads, batched=True)),
        optional(arguments.per_head, "sinks", heads, batched=False),
        dropout,
    )
    scale = given["scale"]
    if scale is None:
        scale = size**-0.5
    spec = AttentionSpec(
        batch=batch,
        query_length=length,
        key_length=key_length,
        query_heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        value_size=v.shape[-1],
        dtype=q.dtype.name,
        scale=arguments.static_number("scale", scale, "pass a float, or None for H ** -0.5"),
        softcap=arguments.soft_cap(given["softcap"]),
        layer_scale=arguments.positive("layer_scale", given["layer_scale"]),
        is_causal=arguments.flag("is_causal", given["is_causal"]),
        causal_alignment=alignment,
        window=arguments.window(given["local_window_size"]),
        bias_shape=None if bias is None else shape_of(bias),
        bias_dtype=None if bias is None else bias.dtype.name,
        mask_shape=None if mask is None else shape_of(mask),
        query_lengths=operands.query_lengths is not None,
        kv_lengths=operands.kv_lengths is not None,
        segment_ids=operands.query_segment_ids is not None,
        query_positions=operands.query_positions is not None,
        kv_positions=operands.kv_positions is not None,
        alibi=operands.alibi_slopes is not None,
        sinks=operands.sinks is not None,
        dropout_rate=rate,
        deterministic=arguments.flag("deterministic", deterministic),
        return_residual=arguments.flag("return_residual", given["return_residual"]),
        platform=device.platform(given["query"], given["key"], given["value"]),
        context_parallel=context_parallel,
    )
    return spec, operands, lead
