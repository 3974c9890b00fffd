"""What a shard of a context-parallel call is to the rest of the package: an entry of its spec.

`AttentionSpec.context_parallel` holds one of these inside a shard_map; the spec's lengths are the
shard's. It says which specs a backend is asked for, and runs them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import blockwise, selection
from jaxcap.partitioning import vary, varying_axes
from jaxcap.placement import add_up
from jaxcap.sharding import pieces
from jaxcap.sharding.layout import LoadBalance
from jaxcap.sharding.pieces import Results
from jaxcap.sharding.plan import Plan
from jaxcap.sharding.shard import Shard
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands


@dataclasses.dataclass(frozen=True)
class Local:
    """A shard of the sequence on each of `size` devices along mesh `axes`, major first."""

    axes: tuple[str, ...]
    size: int
    load_balance: LoadBalance

    name = "context parallelism"

    def __str__(self) -> str:
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"{self.name} over {axes!r}, {self.size} devices, {self.load_balance}"

    def plan(self, spec: AttentionSpec) -> Plan:
        return Plan(spec.replace(context_parallel=None), self.size, self.load_balance)

    def specs(self, spec: AttentionSpec) -> list[AttentionSpec]:
        """What a backend must be able to do."""
        return pieces.specs(self.plan(spec))

    def _shard(self, decision: selection.Decision, operands: Operands, run: Callable) -> Shard:
        rank = jax.lax.axis_index(self.axes)
        axes = varying_axes((operands, rank))
        operands = jax.tree.map(lambda x: vary(x, axes), operands)

        def mark(x):
            return vary(x, axes)

        return Shard(self.plan(decision.spec), decision, operands, mark(rank), run, mark)

    def forward(
        self, decision: selection.Decision, operands: Operands, run: Callable
    ) -> tuple[Array, Array]:
        """(out [B, T / P, N, V], lse [B, N, T / P]); `run(decision, part, operands)` is a backend's part."""
        shard = self._shard(decision, operands, run)
        out, lse = self._forward(shard)
        return out.astype(operands.query.dtype), lse

    def backward(
        self,
        decision: selection.Decision,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
        run: Callable,
    ) -> Gradients:
        """In the dtypes of the operands, summed over the axes that an operand does not vary over."""
        # Or else the compiler would keep what arrived in the forward, instead of having it sent again; or
        # send it while the forward's last hop computes, which expects no transfer beside it.
        held, d_out, lse = jax.lax.optimization_barrier((operands, d_out, lse))
        shard = self._shard(decision, held, run)
        last = None if d_lse is None else shard.mark(d_lse)
        results = Results(shard.mark(out), shard.mark(lse), shard.mark(d_out), last)
        names = decision.spec.gradients
        grads: dict[str, Any] = {}
        if any(name != "sinks" for name in names):
            grads = self._backward(shard, results)._asdict()
        if "sinks" in names:
            delta = blockwise.delta_of(*results)
            sinks: Any = shard.operands.sinks
            grads["sinks"] = blockwise.sink_gradient(sinks, results.lse, delta)
        found = {}
        for name in names:
            operand = getattr(operands, name)
            extra = varying_axes(grads[name]) - varying_axes(operand)
            wide = grads[name].astype(decision.spec.accumulator)
            found[name] = add_up(wide, tuple(extra)).astype(operand.dtype)
        return Gradients(**found)

    def _forward(self, shard: Shard) -> tuple[Array, Array]:
        raise NotImplementedError

    def _backward(self, shard: Shard, results: Results) -> Gradients:
        raise NotImplementedError


def join_rows(parts: list[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
