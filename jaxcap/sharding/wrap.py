"""Context parallelism of a call on whole arrays: a shard_map around it."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcap import explicit, placement
from jaxcap.placement import Axes, Role
from jaxcap.sharding.all_to_all import taken
from jaxcap.sharding.config import ContextParallel, check_lengths, choose
from jaxcap.sharding.run import Sharded
from jaxcap.spec import Array, AttentionSpec, Operands


class Wrapped:
    """A call resolved on a mesh: what each device does, and how arrays are split for it."""

    def __init__(self, spec: AttentionSpec, operands: Operands | None = None, arrays: Any = ()):
        cp: ContextParallel = spec.context_parallel
        if operands is not None:
            arrays = jax.tree.leaves(operands)
        self.mesh = mesh = cp.resolved_mesh(*arrays)
        self.cp = cp
        if taken_axes := [a for a in cp.axes if a in getattr(mesh, "manual_axes", ())]:
            raise ValueError(
                f"context_parallel over {taken_axes} inside a shard_map over it: call"
                " jaxcap.sharding.ring_attention and its like there"
            )
        spec = spec.replace(context_parallel=None)
        check_lengths(cp, spec, mesh)
        self.batch, self.heads = tuple(cp.batch_axes), cp.head_axis
        if operands is not None and mesh.explicit_axes:
            self._read_types(operands)
        self.local = self._local(spec)
        sizes = tuple(mesh.shape[a] for a in cp.axes)
        kind, self.why = choose(cp, self.local, sizes)
        self.sharded = Sharded(kind, cp.axes, sizes, cp.load_balance)

    @property
    def attended(self) -> AttentionSpec:
        """What selection decides on."""
        return self.sharded.attended(self.local)

    def __str__(self) -> str:
        axes = ", ".join(
            f"{a!r} ({n})" for a, n in zip(self.cp.axes, self.sharded.sizes, strict=True)
        )
        return f"{self.sharded.kind} over {axes}, {self.cp.load_balance}: {self.why}"

    def _read_types(self, operands: Operands) -> None:
        """Explicit axes that split batch and heads, where none are named."""
        batch, _, heads, _ = explicit.axes_of(operands.query)
        self.batch = self.batch or tuple(a for a in batch if a not in self.cp.axes)
        if self.heads is None and len(heads) == 1:
            self.heads = heads[0]

    def _devices(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def _local(self, spec: AttentionSpec) -> AttentionSpec:
        batch, context = self._devices(self.batch), self._devices(self.cp.axes)
        heads = 1 if self.heads is None else self.mesh.shape[self.heads]
        if spec.batch % batch:
            raise ValueError(
                f"context_parallel's batch_axes {self.batch} are {batch} devices, which do not"
                f" divide a batch of {spec.batch}"
            )
        split = spec.kv_heads % heads == 0
        if spec.query_heads % heads or not (split or heads % spec.kv_heads == 0):
            raise ValueError(
                f"context_parallel's head_axis {self.heads!r} is {heads} devices: a device must hold"
                f" whole groups of {spec.query_heads} query heads over {spec.kv_heads} key/value"
                " heads, or an equal part of one"
            )

        def cut(shape):
            if shape is None:
                return None
            b, n, t, s = shape
            sizes = (b, batch), (n, heads), (t, context)
            return (*(x if x == 1 else x // by for x, by in sizes), s)

        return spec.replace(
            batch=spec.batch // batch,
            query_length=spec.query_length // context,
            key_length=spec.key_length // context,
            query_heads=spec.query_heads // heads,
            kv_heads=spec.kv_heads // heads if split else 1,
            bias_shape=cut(spec.bias_shape),
            mask_shape=cut(spec.mask_shape),
        )

    def _spec(self, role: Role, kv_split: bool) -> PartitionSpec:
        heads: Any = self.heads
        columns = None if role.name in ("bias", "mask") else self.cp.axes
        places = {
            "b": self.batch or None,
            "n": heads,
            "k": heads if kv_split else None,
            "t": self.cp.axes,
            "s": columns,
        }
        return PartitionSpec(*(places.get(d) for d in role.dims))

    def attend(self, operands: Operands, requested: str | None) -> tuple[Array, Array]:
        local, mesh = self.local, self.mesh
        kv_heads = operands.key.shape[2]
        heads = 1 if self.heads is None else mesh.shape[self.heads]
        kv_split = kv_heads % heads == 0
        leaves, tree = jax.tree.flatten(operands)
        roles = placement.roles_of(operands, ())
        specs = tuple(self._spec(role, kv_split) for role in roles)

        def body(*leaves):
            mine: Operands = jax.tree.unflatten(tree, leaves)
            if not kv_split:
                start = jax.lax.axis_index(self.heads) * kv_heads // heads
                key, value = (
                    taken(x, start, 1, 2, (self.heads or "",)) for x in (mine.key, mine.value)
                )
                mine = mine._replace(key=key, value=value)
            return self.sharded.attend(local, mine, requested)

        axes = self.batch or None, self.cp.axes, self.heads
        batch, context, head = axes
        named = {*self.cp.axes, *self.batch, *([self.heads] if self.heads else [])}
        # XLA does not tell a backend's partitioning rule of axes of size 1: they are no one's.
        manual = getattr(mesh, "manual_axes", ())
        named |= {a for a, size in mesh.shape.items() if size == 1 and a not in manual}
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=specs,
            out_specs=(PartitionSpec(batch, context, head), PartitionSpec(batch, head, context)),
            axis_names=named | set(getattr(mesh, "explicit_axes", ())),
        )
        if mesh.explicit_axes:
            leaves = [self._resharded(x, spec) for x, spec in zip(leaves, specs, strict=True)]
        # Eager calls too: a shard_map over some of the axes is for jit alone.
        return jax.jit(run, inline=True)(*leaves)

    def _resharded(self, x: Array, spec: PartitionSpec) -> Array:
        explicit_axes = self.mesh.explicit_axes

        def kept(part):
            names = part if isinstance(part, tuple) else () if part is None else (part,)
            return tuple(a for a in names if a in explicit_axes) or None

        wanted = PartitionSpec(*(kept(part) for part in spec))
        return jax.sharding.reshard(x, NamedSharding(self.mesh, wanted))


def attend(spec: AttentionSpec, operands: Operands, requested: str | None) -> tuple[Array, Array]:
    """(out [B, T, N, V], lse [B, N, T]) of a call whose spec has a ContextParallel."""
    return Wrapped(spec, operands).attend(operands, requested)
