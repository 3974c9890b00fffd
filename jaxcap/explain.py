"""`explain`: which backend a call would run on, and why not the others, without running it."""

import dataclasses
from typing import Any

import jax

from jaxcap import arguments, attention, device, selection
from jaxcap.keywords import bind
from jaxcap.sharding.wrap import Wrapped
from jaxcap.spec import DIFFERENTIABLE, AttentionSpec

#: What `explain` takes the shape of; the other arguments are looked at as they are.
_ARRAYS = (
    *("query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths"),
    *("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions"),
    *("alibi_slopes", "sinks", "dropout_rng"),
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """`forward` is the decision for inference, `training` the one where gradients are wanted.

    Of a context-parallel call both are about what a device computes, and `context` says how.
    """

    spec: AttentionSpec
    forward: selection.Decision
    training: selection.Decision
    context: str | None = None

    def __str__(self) -> str:
        s = self.spec
        cap = f"softcap {s.softcap:g}" if s.softcap is not None else "no softcap"
        head = (
            f"query [{s.batch}, {s.query_length}, {s.query_heads}, {s.head_size}], value"
            f" [{s.batch}, {s.key_length}, {s.kv_heads}, {s.value_size}], {s.dtype}, {cap}, on"
            f" {s.platform}"
        )
        parts = [head] if self.context is None else [head, f"context parallel: {self.context}"]
        parts += [f"forward: {self.forward.backend or 'none can'}", str(self.forward)]
        parts += [f"with gradients: {self.training.backend or 'none can'}", str(self.training)]
        if "pallas" in (self.forward.backend, self.training.backend):
            from jaxcap.pallas import compiler

            if why := compiler.slow_here():
                parts.append(f"note: {why}")
        return "\n".join(parts)


def explain(
    *arrays: Any,
    gradients: tuple[str, ...] | None = None,
    platform: str | None = None,
    **keywords: Any,
) -> Explanation:
    """The decision for a call of `dot_product_attention` with the same arguments.

    Arrays may be `jax.ShapeDtypeStruct`s. `gradients` names the operands differentiated in training
    (all that can be, if None); `platform` asks for another device ("cpu", "sm80", "sm90", ...).

    Raises:
      ValueError, TypeError: as `dot_product_attention` for wrong arguments.

    Example:
      >>> q = jax.ShapeDtypeStruct((1, 128, 4, 64), "bfloat16")
      >>> jaxcap.explain(q, q, q, softcap=50.0, platform="cpu").forward.backend
      'blockwise'
    """
    given = bind(attention.dot_product_attention, arrays, keywords)
    arguments.no_tensors(given, "jaxcap.torch_bridge.explain")
    name = selection.requested(given.pop("implementation"))
    spec = _spec_of(given)
    if platform is not None:
        spec = spec.replace(platform=device.named(platform))
    if spec.context_parallel is None:
        return of_spec(spec, name, gradients)
    wrapped = Wrapped(spec, arrays=[x for x in given.values() if isinstance(x, jax.Array)])
    found = of_spec(wrapped.attended, name, gradients)
    return dataclasses.replace(found, spec=spec, context=str(wrapped))


def of_spec(
    spec: AttentionSpec, name: str | None, gradients: tuple[str, ...] | None = None
) -> Explanation:
    """Of a call whose spec has no gradients, with backend `name` if there is one."""
    if gradients is None:
        present = {"bias": spec.bias_shape is not None, "sinks": spec.sinks}
        gradients = tuple(n for n in DIFFERENTIABLE if present.get(n, True))
    elif isinstance(gradients, str):
        raise TypeError(f"gradients must be a tuple of names, got {gradients!r}: ({gradients!r},)")
    elif unknown := [n for n in gradients if n not in DIFFERENTIABLE]:
        raise ValueError(f"gradients must be of {DIFFERENTIABLE}, got {unknown}")
    trained = selection.decide(spec.replace(gradients=tuple(gradients)), name)
    return Explanation(spec, selection.decide(spec, name), trained)


def _spec_of(given: dict[str, Any]) -> AttentionSpec:
    found = []
    traced = {k: v for k, v in given.items() if k in _ARRAYS and hasattr(v, "shape")}
    static = {k: v for k, v in given.items() if k not in traced}

    def run(arrays):
        spec, _, _ = attention.prepare({**static, **arrays})
        found.append(spec)

    jax.eval_shape(run, traced)
    concrete = [x for x in traced.values() if isinstance(x, jax.Array)]
    if concrete:
        return found[0].replace(platform=device.platform(*concrete))
    return found[0]
