"""Backends that tests register: what is asked of them is kept, their mathematics are `xla`'s."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcap import fragments, selection
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands


def _xla() -> Any:
    return selection.backends()["xla"]


def no_reasons(spec: AttentionSpec) -> list[str]:
    del spec
    return []


class Recorder:
    """Its kernels are calls in a jaxpr, named `<name>_forward` and `<name>_backward`."""

    def __init__(self, name: str = "recorder", reasons: Callable = no_reasons):
        self.name, self.reasons = name, reasons
        self.calls: list[tuple[str, AttentionSpec]] = []

    def gradients(self) -> list[tuple[str, ...]]:
        """Of every forward and backward traced, in order."""
        return [spec.gradients for _, spec in self.calls]

    def _kernel(self, part: str, function: Callable) -> Callable:
        function.__name__ = function.__qualname__ = f"{self.name}_{part}"
        return jax.jit(function)

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        self.calls.append(("forward", spec))
        return self._kernel("forward", lambda x: _xla().forward(spec, x))(operands)

    def backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
    ) -> Gradients:
        self.calls.append(("backward", spec))
        if d_lse is None:
            d_lse = jnp.zeros_like(lse)

        def kernel(operands, out, lse, d_out, d_lse):
            # A kernel needs the forward's results; this one must not look as if it did not.
            used = 0 * jnp.sum(out).astype(d_lse.dtype) + 0 * jnp.sum(
                jnp.isfinite(lse), dtype=d_lse.dtype
            )
            arrays = {name: getattr(operands, name) for name in spec.gradients}
            _, pullback = jax.vjp(
                lambda given: _xla().forward(spec, operands._replace(**given)), arrays
            )
            return Gradients(**pullback((d_out, d_lse + used))[0])

        return self._kernel("backward", kernel)(operands, out, lse, d_out, d_lse)


class Adder(Recorder):
    """Its backward adds to a sum of the queries' gradients, as kernels do."""

    def query_factor(self, spec: AttentionSpec) -> float:
        del spec
        return 0.5

    def backward(self, spec: AttentionSpec, operands: Operands, *arrays: Any) -> Gradients:
        if spec.query_sum is None:
            return super().backward(spec, operands, *arrays)
        return fragments.add_part(self, spec, operands, arrays)


class Tabled(Recorder):
    """Its calls read constant tables, as kernels read their schedules; `xla` itself has none."""

    def _kernel(self, part: str, function: Callable) -> Callable:
        def looked_up(operands, *arrays):
            table = jnp.asarray(np.arange(operands.query.shape[1])[::-1].copy(), jnp.int32)
            order = jnp.asarray(np.arange(table.size)[::-1].copy(), jnp.int32)[
                table
            ]  # 0, 1, 2, ...
            return function(operands._replace(query=operands.query[:, order]), *arrays)

        return looked_up


@contextlib.contextmanager
def registered(backend: Any, before: str = "pallas") -> Iterator[Any]:
    selection.register(backend, before=before)
    try:
        yield backend
    finally:
        selection.unregister(backend.name)
