"""From a call to what runs it, once a spec: the kernels launched directly, or a backend through JAX."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxcap import selection
from jaxcap.dispatch import describe
from jaxcap.environment import logger
from jaxcap.spec import AttentionSpec, Dropout, Gradients, Operands
from jaxcap.torch_bridge import call, context, launcher
from jaxcap.torch_bridge.call import Settings, Tensor, Tensors, spec_of
from jaxcap.torch_bridge.executable import Executable
from jaxcap.torch_bridge.program import Unsupported, build
from jaxcap.torch_bridge.through_jax import ThroughJax

_lock = threading.RLock()


def operands_of(spec: AttentionSpec, names: Sequence[str], arrays: Sequence[Any]) -> Operands:
    """JAX's operands out of a call's arrays; what dropout is keyed by follows from the shapes."""
    given = dict(zip(names, arrays, strict=True))
    key = given.pop("dropout_key", None)
    if key is not None:
        given["dropout"] = Dropout(
            jax.lax.bitcast_convert_type(key, jnp.uint32),
            jnp.arange(spec.batch, dtype=jnp.int32),
            jnp.arange(spec.query_heads, dtype=jnp.int32),
            jnp.array([0, 1], jnp.int32),
            jnp.array([0, 1], jnp.int32),
        )
    return Operands(**given)


@dataclasses.dataclass(frozen=True)
class Part:
    """One function of a backend on flat lists of arrays: what is lowered or jitted, and found again."""

    kind: str  # "forward", "backward" or "backward_lse"
    backend: str
    spec: AttentionSpec
    names: tuple[str, ...]  # of the operands that are there
    device: torch.device

    def function(self, *arrays: Any) -> Any:
        """[out, lse], or the gradients that `spec.gradients` names.

        Arrays: the operands; for gradients also out, lse, d_out and, in "backward_lse", d_lse.
        """
        backend: Any = selection.backends()[self.backend]
        spec, count = self.spec, len(self.names)
        operands = operands_of(spec, self.names, arrays[:count])
        if self.kind == "forward":
            return list(backend.forward(spec, operands))
        out, lse, d_out, *rest = arrays[count:]
        d_lse = rest[0] if rest else None
        if getattr(backend, "native", False):
            given = {name: getattr(operands, name) for name in spec.gradients}
            _, pullback = jax.vjp(lambda x: backend.forward(spec, operands._replace(**x)), given)
            (found,) = pullback((d_out, jnp.zeros_like(lse) if d_lse is None else d_lse))
            return [found[name] for name in spec.gradients]
        grads: Gradients = backend.backward(spec, operands, out, lse, d_out, d_lse)
        return [getattr(grads, name) for name in spec.gradients]

    def make(self, tensors: Sequence[Tensor]) -> tuple[Any, str]:
        """What runs it, and "direct" or why it goes through JAX."""
        why = f"the backend is {self.backend}" if self.backend != "pallas" else launcher.missing()
        if why is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "attention of these shapes has not run before this CUDA graph capture, and cannot be"
                    " compiled inside it; run it once before, as torch.cuda.graph asks for anyway"
                )
            structs = [
                jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch."))
                for x in tensors
            ]
            try:
                return Executable(build(self.function, *structs), self.device), "direct"
            except Unsupported as error:
                why = f"its program has {error}"
        return ThroughJax(self.function, self.device, self.spec.dtype == "float64"), why


_parts: dict[Part, tuple[Any, str]] = {}


def part_of(part: Part, tensors: Sequence[Tensor]) -> tuple[Any, str]:
    found = _parts.get(part)
    if found is None:
        with _lock, context.kept():
            found = _parts.get(part) or part.make(tensors)
            _parts[part] = found
    return found


class Plan:
    """Runs the calls of one spec on one device; made once."""

    def __init__(self, spec: AttentionSpec, tensors: Tensors, requested: str | None):
        self.names = tuple(
            n for n, x in zip(tensors._fields, tensors, strict=True) if x is not None
        )
        self.decision = selection.select(spec, requested)
        self.gradients = spec.gradients
        self.device = tensors.query.device
        self.parts: dict[str, Any] = {}
        self.routes: dict[str, str] = {}
        self.forward = self.part("forward", [x for x in tensors if x is not None])

    def part(self, kind: str, tensors: Sequence[Tensor]) -> Any:
        """`forward`, `backward` or `backward_lse`, functions of flat lists of tensors."""
        found = self.parts.get(kind)
        if found is None:
            spec = self.decision.spec
            if kind == "forward":  # the same with and without gradients
                spec = spec.replace(gradients=(), return_residual=False)
            part = Part(kind, self.decision.backend or "", spec, self.names, self.device)
            found, route = part_of(part, tensors)
            how = "launched directly" if route == "direct" else f"through JAX ({route})"
            where = "" if self.device.type == "cpu" else f" ({self.device})"
            logger.info("%s%s, %s", describe(spec, part.backend, kind), where, how)
            logger.debug("%s\n%s", spec, self.decision)
            self.routes[kind] = route
            self.parts[kind] = found
        return found


_plans: dict[Any, Plan] = {}


def plan_of(settings: Settings, tensors: Tensors, gradients: tuple[str, ...]) -> Plan:
    """The plan of a call on checked, canonical tensors; the same one for the same shapes."""
    requested = call.requested(settings.backend)
    shapes = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)
    key = (settings, shapes, tensors.query.device, gradients, requested)
    plan = _plans.get(key)
    if plan is None:
        spec = spec_of(settings, tensors, gradients)
        with _lock, context.kept():
            plan = _plans.get(key) or Plan(spec, tensors, requested)
            _plans[key] = plan
    return plan
