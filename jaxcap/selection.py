"""Choosing a backend at trace time: each lists why it cannot, the first without a reason wins.

A backend is an object with a `name`, `reasons(spec) -> list[str]`, `forward(spec, operands)` that
returns output and log-sum-exp, and `backward(spec, operands, out, lse, d_out, d_lse)`, or
`native = True` where JAX differentiates the forward itself. `wide = True` says that it honours
`spec.partial`, a method `query_factor(spec)` that its backward takes the sum that `spec.query_sum`
speaks of. A new one is a file with `BACKEND` in it and its line in `MODULES`, or, from outside this
package, a call of `register`.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any, Protocol

import jax

from jaxcap.environment import ENVIRONMENT
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands

MODULES = {
    "pallas": "jaxcap.pallas.backend",
    "fa3": "jaxcap.torch_bridge.fa3",
    "fa2": "jaxcap.torch_bridge.fa2",
    "fa4": "jaxcap.torch_bridge.fa4",
    "cudnn": "jaxcap.cudnn",
    "blockwise": "jaxcap.blockwise",
    "xla": "jaxcap.reference",
}

#: Order of preference. Without a cap cuDNN joins at the place that benchmarks/RESULTS.md gives it.
CAPPED = ("pallas", "fa3", "fa2", "fa4", "triton", "blockwise", "xla")
PLAIN = ("pallas", "fa3", "fa4", "cudnn", "fa2", "triton", "blockwise", "xla")


class Backend(Protocol):
    name: str

    def reasons(self, spec: AttentionSpec) -> list[str]: ...

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]: ...


class Differentiated(Backend, Protocol):
    def backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
    ) -> Gradients:
        """`out` and `lse` are to be used as given: of a part of the keys they are those of all."""
        ...


class BackendError(ValueError):
    """No backend can run a call, or the one that was named cannot; the message has every reason."""


_registry: dict[str, Backend] = {}
_before: dict[str, str] = {}


def register(backend: Backend, *, before: str = "xla") -> None:
    """Add a backend, or replace the one of the same name, at a place in the order of preference."""
    if not all(callable(getattr(backend, part, None)) for part in ("reasons", "forward")):
        raise ValueError(f"a backend needs name, reasons and forward, got {backend!r}")
    _registry[backend.name] = backend
    if backend.name not in CAPPED and backend.name not in PLAIN:
        _before[backend.name] = before


def unregister(name: str) -> None:
    _registry.pop(name, None)
    _before.pop(name, None)


def backends() -> dict[str, Backend]:
    """Every backend of this installation by name, whether or not it can run here."""
    for name, module in MODULES.items():
        if name not in _registry:
            _registry[name] = importlib.import_module(module).BACKEND
    return dict(_registry)


def preference(spec: AttentionSpec) -> list[str]:
    order: list[str] = list(CAPPED if spec.softcap is not None else PLAIN)
    for name, before in _before.items():
        order.insert(order.index(before) if before in order else len(order), name)
    known = backends()
    order += [name for name in known if name not in order]
    return [name for name in order if name in known]


def check_name(name: Any, where: str) -> str | None:
    if name is None or name == "auto":
        return None
    if not isinstance(name, str) or name not in backends():
        raise ValueError(f"{where}: no backend {name!r}; there are {', '.join(backends())}")
    return name


_forced = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Make every call inside run on `name`, or raise if it cannot; None is automatic again.

    jit sees it: a function traced outside is traced anew inside. The `implementation` argument of a
    call wins over it, and it wins over `JAXCAP_BACKEND`.
    """
    checked = check_name(name, "use_backend")
    with _forced("auto" if checked is None else checked):
        yield


def requested(implementation: str | None) -> str | None:
    """The backend that argument, context or environment names, in this order; None is automatic."""
    if implementation is not None:
        return check_name(implementation, "implementation")
    if _forced.value is not None:
        return check_name(_forced.value, "use_backend")
    return check_name(ENVIRONMENT.backend, "JAXCAP_BACKEND")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Decision:
    """What was chosen for a spec and why not the others; `backend` is None where none can run."""

    spec: AttentionSpec
    backend: str | None
    requested: str | None
    reasons: dict[str, tuple[str, ...]]  # in order of preference; empty tuples for those that can

    def __hash__(self) -> int:
        return hash((self.spec, self.backend, self.requested))

    def __str__(self) -> str:
        width = max(len(name) for name in self.reasons)
        lines = []
        for name, why in self.reasons.items():
            if name == self.backend:
                text = "chosen" + (" (asked for by name)" if self.requested else "")
            elif why:
                text = "cannot: " + "; ".join(why)
            else:
                text = "can; not asked for" if self.requested else "can; comes later"
            lines.append(f"  {name:<{width}}  {text}")
        return "\n".join(lines)


def reasons_of(backend: Backend, spec: AttentionSpec) -> list[str]:
    """Why not; of a shard of a context-parallel call, for any of the pieces that it is computed in."""
    if spec.context_parallel is None:
        return list(backend.reasons(spec))
    found = [why for piece in spec.context_parallel.specs(spec) for why in backend.reasons(piece)]
    return list(dict.fromkeys(found))


def decide(spec: AttentionSpec, name: str | None = None) -> Decision:
    """The decision for `spec`; with a `name`, whether that backend can. Never raises."""
    known = backends()
    reasons = {}
    for candidate in preference(spec):
        why = reasons_of(known[candidate], spec)
        if candidate in ENVIRONMENT.steered_off and name != candidate:
            why.append(f"switched off by JAXCAP_FLASH_ATTN_V{candidate[-1]}=0")
        reasons[candidate] = tuple(why)
    able = [candidate for candidate, why in reasons.items() if not why]
    if name is not None:
        able = [name] if name in able else []
    return Decision(spec, able[0] if able else None, name, reasons)


def select(spec: AttentionSpec, name: str | None = None) -> Decision:
    """The decision for `spec`, or BackendError with every reason."""
    decision = decide(spec, name)
    if decision.backend is None:
        purpose = f"gradients of {', '.join(spec.gradients)}" if spec.gradients else "the forward"
        if name is not None:
            why = "; ".join(decision.reasons[name])
            raise BackendError(f"backend {name!r} cannot run {purpose} of this call: {why}")
        listed = "\n".join(f"  {n}: {'; '.join(why)}" for n, why in decision.reasons.items())
        raise BackendError(f"no backend can run {purpose} of this call:\n{listed}")
    return decision
