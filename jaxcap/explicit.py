"""Meshes with explicit axes: the sharding of every array is in its type when a call is traced.

The types are read, what cannot be split is refused, and the call runs in a shard_map over the axes.

Not possible: the gradient of a vmap over an axis that is itself sharded (JAX does not tell the backward
of it; an error about the cotangent's type). The vmap of the gradient is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxcap import placement
from jaxcap.placement import Axes, Placement, Role, add_up
from jaxcap.selection import BackendError
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands


def mesh_of(tree: Any) -> Any:
    """The mesh in use, where it has explicit axes, else None."""
    types = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    for mesh in (jax.sharding.get_abstract_mesh(), *types):
        if not mesh.empty:
            return mesh if mesh.explicit_axes else None
    return None


def axes_of(x: Array) -> tuple[Axes, ...]:
    """For each dimension the axes in its type."""
    spec = jax.typeof(x).sharding.spec
    dims = [d if isinstance(d, tuple) else () if d is None else (d,) for d in spec]
    return tuple(dims) + ((),) * (x.ndim - len(dims))


def _automatic(mesh: Any, function: Callable, results: Sequence[tuple[Axes, ...]]) -> Callable:
    """`function` on auto axes; `results` is how what it returns is sharded."""
    specs = [PartitionSpec(*(axes or None for axes in dims)) for dims in results]
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    run: Any = jax.sharding.auto_axes(
        function, axes=tuple(mesh.explicit_axes), out_sharding=shardings
    )
    return run


def native(function: Callable, operands: Operands) -> tuple[Array, Array]:
    """`function(operands)` -> (out, lse), of which XLA partitions every axis."""
    mesh = mesh_of(operands)
    if mesh is None:
        return function(operands)
    roles = placement.roles_of(operands, ())
    found = [axes_of(x) for x in jax.tree.leaves(operands)]
    length = found[0][1]
    batch = tuple(a for a in placement.first("b", roles, found) if a not in length)
    heads = placement.first("n", roles, found) or placement.first("k", roles, found)
    heads = tuple(a for a in heads if a not in batch + length)
    run = _automatic(mesh, function, [(batch, length, heads, ()), (batch, heads, length)])
    return run(operands)


def split(
    function: Callable,
    backend: str,
    part: str,
    spec: AttentionSpec,
    operands: Operands,
    arrays: Sequence[Array | None],
) -> Any:
    """`function(operands, *arrays)`, of which batch and heads can be partitioned."""
    mesh = mesh_of((operands, arrays))
    if mesh is None:
        return function(operands, *arrays)
    roles = placement.roles_of(operands, arrays)
    found = [axes_of(x) for x in jax.tree.leaves((operands, arrays))]
    if mesh.manual_axes and not any(axes for dims in found for axes in dims):
        return function(operands, *arrays)
    placement.refuse_sequence(backend, roles, found)
    batch = placement.first("b", roles, found)
    heads = placement.first("n", roles, found) or placement.first("k", roles, found)
    _refuse_clash(backend, roles, found, {"b": batch, "n": heads, "k": heads})
    shards = math.prod(mesh.shape[a] for a in heads)
    here = spec.query_heads // shards
    if here % spec.group_size and spec.group_size % here:
        placement.refuse_heads(backend, spec, shards)
    outcome = placement.result_roles(part, spec, operands)
    if part == "forward":
        types = [(batch, (), heads, ()), (batch, heads, ())]
    else:
        types = [axes_of(getattr(operands, name)) for name in spec.gradients]
        if spec.query_sum is not None:
            types[0] = found[-1]

    def flat(operands, *arrays):
        return tuple(jax.tree.leaves(function(operands, *arrays)))

    if mesh.auto_axes:  # which only the compiler knows, so the explicit ones go its way
        results = _automatic(mesh, flat, types)(operands, *arrays)
    else:
        kv = placement.first("k", roles, found)
        place = Placement(batch, kv, heads[len(kv) :])
        results = _sharded(flat, mesh, place, spec, (operands, arrays), roles, outcome)
        results = tuple(_reshard(x, mesh, axes) for x, axes in zip(results, types, strict=True))
    if part == "forward":
        return results
    return Gradients(**dict(zip(spec.gradients, results, strict=True)))


def _sharded(
    function: Callable,
    mesh: Any,
    place: Placement,
    spec: AttentionSpec,
    given: Any,
    roles: Sequence[Role],
    outcome: Sequence[Role],
) -> tuple[Array, ...]:
    """A shard_map; unlike in the compiler's hands its axes are whole."""
    leaves, tree = jax.tree.flatten(given)

    def body(*leaves):
        operands, arrays = jax.tree.unflatten(tree, leaves)
        heads = _Heads(spec, operands, place.group)
        results = function(heads.taken(), *arrays)
        if outcome[0].saved:
            return results
        grads = (heads.put_back(role.name, x) for role, x in zip(outcome, results, strict=True))
        return tuple(add_up(x, place.summed(r)) for r, x in zip(outcome, grads, strict=True))

    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(place.spec(role) for role in roles),
        out_specs=tuple(place.spec(role) for role in outcome),
        # None is all axes but those that a vmapped axis has taken.
        axis_names=set(mesh.explicit_axes) if mesh.manual_axes else set(),
        check_vma=False,
    )(*(_reshard(x, mesh, place.axes(role)) for x, role in zip(leaves, roles, strict=True)))


def _reshard(x: Array, mesh: Any, axes: tuple[Axes, ...]) -> Array:
    if axes_of(x) == axes:
        return x
    spec = PartitionSpec(*(a or None for a in axes))
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


class _Heads:
    """The key/value heads that a shard uses, where an axis splits query heads and not those."""

    def __init__(self, spec: AttentionSpec, operands: Operands, group: Axes):
        self.operands, queries = operands, operands.query.shape[2]
        self.count = max(1, queries // spec.group_size)
        self.all = self.count == operands.key.shape[2]
        if not self.all:
            self.start = jax.lax.axis_index(group) * queries // spec.group_size

    def taken(self) -> Operands:
        if self.all:
            return self.operands
        key, value = (
            jax.lax.dynamic_slice_in_dim(x, self.start, self.count, axis=2)
            for x in (self.operands.key, self.operands.value)
        )
        return self.operands._replace(key=key, value=value)

    def put_back(self, name: str, grad: Array) -> Array:
        if self.all or name not in ("key", "value"):
            return grad
        nothing = jnp.zeros_like(getattr(self.operands, name))
        return jax.lax.dynamic_update_slice_in_dim(nothing, grad, self.start, axis=2)


def _refuse_clash(
    backend: str,
    roles: Sequence[Role],
    found: Sequence[tuple[Axes, ...]],
    wanted: dict[str, Axes],
) -> None:
    """What is whole can be cut; what is split otherwise than the rest would have to move."""
    for role, dims in zip(roles, found, strict=True):
        for letter, have in zip(role.dims, dims, strict=True):
            want = wanted.get(letter, have)
            if have and (want[: len(have)] if letter == "k" else want) != have:
                raise BackendError(
                    f"backend {backend!r} needs one sharding of the batch and one of the heads:"
                    f" {role.name} is split over {have} where another operand is over {want};"
                    " use jax.sharding.reshard"
                )
