"""What the NNX modules, the Linen modules and `attention_fn` share: no Flax in here.

Every call of `dot_product_attention` by a module goes through `attend`, so that there is one place
where a cap could get lost.
"""

import dataclasses
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from jaxcap import arguments, selection
from jaxcap.attention import dot_product_attention
from jaxcap.sharding.config import ContextParallel
from jaxcap.spec import Alignment, Array

Window = int | tuple[int | None, int | None] | None

#: Backends whose products of float32 are exact to float32, whatever the device's default.
EXACT = ("xla", "blockwise")

_PRECISIONS = {
    "default": jax.lax.Precision.DEFAULT,
    "fastest": jax.lax.Precision.DEFAULT,
    "bfloat16": jax.lax.Precision.DEFAULT,
    "high": jax.lax.Precision.HIGH,
    "bfloat16_3x": jax.lax.Precision.HIGH,
    "tensorfloat32": jax.lax.Precision.HIGH,
    "highest": jax.lax.Precision.HIGHEST,
    "float32": jax.lax.Precision.HIGHEST,
}


class Arrays(TypedDict, total=False):
    """Array arguments that modules hand on to `dot_product_attention` as they are."""

    query_seq_lengths: Any
    key_value_seq_lengths: Any
    query_segment_ids: Any
    key_value_segment_ids: Any
    query_positions: Any
    key_value_positions: Any
    alibi_slopes: Any
    sinks: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The static half of a module's attention; checked when it is made."""

    softcap: float | None = None
    scale: float | None = None
    is_causal: bool = False
    causal_alignment: Alignment = "top_left"
    local_window_size: Window = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    layer_number: int | None = None
    apply_qk_layer_scaling: bool = False
    implementation: str | None = None
    deterministic_backward: bool | None = None
    context_parallel: ContextParallel | None = None

    def __post_init__(self) -> None:
        arguments.soft_cap(self.softcap)
        if self.scale is not None:
            arguments.static_number("scale", self.scale, "pass a float, or None for H ** -0.5")
        for name in ("is_causal", "broadcast_dropout", "apply_qk_layer_scaling"):
            arguments.flag(name, getattr(self, name))
        if self.deterministic_backward is not None:
            arguments.flag("deterministic_backward", self.deterministic_backward)
        if not isinstance(self.context_parallel, ContextParallel | None):
            raise TypeError(
                f"context_parallel must be a jaxcap.ContextParallel, got {self.context_parallel!r}"
            )
        if self.causal_alignment not in ("top_left", "bottom_right"):
            raise ValueError(
                "causal_alignment must be 'top_left' or 'bottom_right',"
                f" got {self.causal_alignment!r}"
            )
        window = arguments.window(self.local_window_size)  # hashable, also where a list came
        object.__setattr__(self, "local_window_size", window)
        check_rate("dropout_rate", self.dropout_rate)
        selection.check_name(self.implementation, "implementation")
        if self.layer_number is not None and (
            not isinstance(self.layer_number, int) or self.layer_number < 1
        ):
            raise ValueError(f"layer_number must be an int from 1, got {self.layer_number!r}")
        if self.apply_qk_layer_scaling and self.layer_number is None:
            raise ValueError("apply_qk_layer_scaling=True divides by layer_number: pass it too")

    @classmethod
    def of(cls, module: Any) -> "Settings":
        """The settings that a module has as attributes of the same names."""
        return cls(**{f.name: getattr(module, f.name) for f in dataclasses.fields(cls)})

    @property
    def layer_scale(self) -> float:
        return float(self.layer_number or 1) if self.apply_qk_layer_scaling else 1.0

    def drops(self, deterministic: bool | None) -> bool:
        """Whether dropout is on; `deterministic` (Flax's) must be known where there is a rate."""
        if self.dropout_rate == 0.0:
            return False
        if deterministic is None:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs deterministic=True (no dropout) or False,"
                " in the constructor or in the call"
            )
        return not deterministic


def inherit(constructor: Any, override: Any) -> Any:
    """The override, also where it is 0.0 or False, or, where it is None, the constructor's value."""
    return constructor if override is None else override


def attend(
    settings: Settings,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    softcap: float | None,
    *,
    is_causal: bool | None = None,
    dropout_rng: Array | None = None,
    precision: Any = None,
    return_residual: bool = False,
    arrays: Arrays | None = None,
) -> Any:
    """`dot_product_attention` with settings and a call's overrides; a dropout key means dropout."""
    return dot_product_attention(
        query,
        key,
        value,
        bias,
        boolean_mask(mask),
        softcap=inherit(settings.softcap, softcap),
        scale=settings.scale,
        is_causal=inherit(settings.is_causal, is_causal),
        causal_alignment=settings.causal_alignment,
        local_window_size=settings.local_window_size,
        dropout_rate=0.0 if dropout_rng is None else settings.dropout_rate,
        dropout_rng=dropout_rng,
        dropout_broadcast=settings.broadcast_dropout,
        layer_scale=settings.layer_scale,
        return_residual=return_residual,
        implementation=honour_precision(precision, query.dtype, settings.implementation),
        deterministic=settings.deterministic_backward,
        context_parallel=settings.context_parallel,
        **(arrays or {}),
    )


def boolean_mask(mask: Array | None) -> Array | None:
    """Flax's mask of any dtype, where everything but zero keeps, as booleans."""
    if mask is None or mask.dtype == jnp.bool_:
        return mask
    return mask != jnp.zeros((), mask.dtype)


def honour_precision(precision: Any, dtype: Any, implementation: str | None) -> str | None:
    """The `implementation` whose products are at least as exact as Flax's `precision` asks for.

    Products of 16-bit floats are exact in the float32 that every backend accumulates in, so there,
    and for the default precision, any backend will do.
    """
    sides = precision if isinstance(precision, tuple | list) else (precision,)
    wanted = []
    for side in sides:
        known = _PRECISIONS.get(side.lower()) if isinstance(side, str) else side
        if side is not None and not isinstance(known, jax.lax.Precision):
            raise ValueError(
                f"precision must be None, a jax.lax.Precision or its name, or a pair of them;"
                f" attention cannot honour {side!r}"
            )
        wanted.append(known)
    ordinary = all(w in (None, jax.lax.Precision.DEFAULT) for w in wanted)
    if ordinary or jnp.dtype(dtype).itemsize <= 2:
        return implementation
    named = selection.requested(implementation)
    if named is None:
        able = [name for name in ("blockwise", "xla") if name in selection.backends()]
        return able[0]
    if named not in EXACT:
        raise ValueError(
            f"precision={precision!r}: backend {named!r} does not compute float32 products that"
            f" exactly; leave precision None, or use implementation={' or '.join(EXACT)}"
        )
    return implementation


def check_rate(name: str, rate: Any) -> None:
    if not 0 <= arguments.static_number(name, rate, "pass a float in [0, 1)") < 1:
        raise ValueError(f"{name} must be in [0, 1), got {rate!r}")


def refuse_sowing(sow_weights: Any) -> None:
    if sow_weights:
        raise ValueError(
            "sow_weights: a fused kernel never forms the attention weights, so there are none to"
            " sow; leave it False, or use Flax's own attention to look at them"
        )


def add_sinks(arrays: Arrays, softmax_type: str, sinks: Any, num_heads: int) -> Arrays:
    """`arrays` with the sinks `[N]` of a module's softmax_type, of which `sinks` is the parameter."""
    if softmax_type == "vanilla":
        return arrays
    if arrays.get("sinks") is not None:
        raise ValueError(f"sinks come from softmax_type={softmax_type!r}; do not pass them too")
    return {**arrays, "sinks": jnp.zeros(num_heads) if sinks is None else sinks[...]}


def check_softmax_type(softmax_type: str) -> None:
    kinds = ("vanilla", "off-by-one", "learnable")
    if softmax_type not in kinds:
        raise ValueError(f"softmax_type must be one of {kinds}, got {softmax_type!r}")


def norm_dtype(*dtypes: Any) -> Any:
    """Where norms compute: Flax mixes float32 statistics with 16-bit inputs, strictly an error."""
    return jnp.float64 if any(d is not None and d == jnp.float64 for d in dtypes) else jnp.float32


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
        )


def check_features(name: str, x: Array, size: int) -> None:
    if x.ndim < 2 or x.shape[-1] != size:
        raise ValueError(f"{name} must be [.., length, {size}], got {list(x.shape)}")


def keys_and_values(
    inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None
) -> tuple[Array, Array]:
    """Flax's defaults: keys from the queries' inputs, values from the keys'."""
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("inputs_v came without inputs_k; pass it as inputs_k alone")
        inputs_k = inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v
