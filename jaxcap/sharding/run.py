"""A call on a shard, of each kind: what `shard_map` bodies have in common."""

import dataclasses
from collections.abc import Callable

from jaxcap import dispatch
from jaxcap.sharding import all_to_all
from jaxcap.sharding.all_gather import AllGather
from jaxcap.sharding.layout import LoadBalance
from jaxcap.sharding.ring import Ring
from jaxcap.spec import Array, AttentionSpec, Operands


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A kind and the axes it runs over, resolved: `axes` with their `sizes`, major first."""

    kind: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    load_balance: LoadBalance

    @property
    def size(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total

    def _reordered(self) -> str:
        """What another kind than this one asks of the arrays."""
        if self.kind != "hybrid" or self.load_balance == "contiguous":
            return ""
        return (
            f", whose layout is over all {self.size} devices: reorder the arrays for"
            f" size={self.size} then, not {self.sizes[0]}, or use load_balance='contiguous'"
        )

    def attended(self, spec: AttentionSpec) -> AttentionSpec:
        """The spec that selection decides on, from that of the shard; ValueError where it cannot be."""
        if self.kind in ("ring", "all_gather"):
            local = (Ring if self.kind == "ring" else AllGather)(
                self.axes, self.size, self.load_balance
            )
            return spec.replace(context_parallel=local)
        size = self.sizes[1] if self.kind == "hybrid" else self.size
        if size > 1 and (why := all_to_all.refusal(spec, size)):
            raise ValueError(f"{why}; use kind='ring' or kind='all_gather'{self._reordered()}")
        inside = all_to_all.exchanged(spec, size)
        if self.kind == "hybrid":
            ring = Ring(self.axes[:1], self.sizes[0], self.load_balance)
            inside = inside.replace(context_parallel=ring)
        return inside

    def attend(
        self, spec: AttentionSpec, operands: Operands, requested: str | None
    ) -> tuple[Array, Array]:
        """(out [B, T / P, N, V], lse [B, N, T / P]) of a shard; `spec` is its own, `requested` a backend."""
        wanted = self.attended(spec)

        def run(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
            del spec
            return dispatch.attend(dispatch.Call(wanted, requested), operands)

        inner: Callable = run
        if self.kind in ("ring", "all_gather"):
            return inner(spec, operands)
        if self.kind == "hybrid":  # its second axis splits what the layout gives the first
            return all_to_all.attend(
                self.axes[1:], self.sizes[1], "contiguous", spec, operands, inner
            )
        return all_to_all.attend(self.axes, self.size, self.load_balance, spec, operands, inner)
