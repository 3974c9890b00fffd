"""Batch and heads of a backend's call split over devices under plain jit.

- Auto mesh axes: `custom_partitioning`. A Shardy rule carries the sharding of batch and heads through;
  what is split otherwise has a factor of its own, so that it comes as it is and can be refused.
- Explicit axes: the types of the arrays tell their sharding, see `explicit.py`.
- Manual axes (a user's shard_map): the call is local already.
- One device: the call itself, nothing around it.

Query heads may be split until a shard holds one whole group, or an equal part of one; key and value
are then cut or kept whole, and gradients of what shards share are summed. All else is an error.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core.primitives import closed_call_p

from jaxcap import explicit, fragments, placement
from jaxcap.fine_mesh import FineMesh
from jaxcap.folding import folds_vmap
from jaxcap.placement import Axes, Placement, Role, add_up
from jaxcap.selection import BackendError
from jaxcap.spec import DIFFERENTIABLE, Array, AttentionSpec, Gradients, Operands


@functools.lru_cache(maxsize=4096)
def partitioned(backend: Any, part: str, spec: AttentionSpec) -> Callable:
    """`function(operands, *arrays)`: the backend's "forward" or "backward", batch and heads split.

    A vmapped axis becomes part of the batch.
    """
    spec = spec.replace(gradients=tuple(n for n in DIFFERENTIABLE if n in spec.gradients))

    def local(operands: Operands, *arrays: Array | None) -> Any:
        """On the shard that a device holds, or on all."""
        here = spec.with_shapes_of(operands)
        if here != spec and (why := backend.reasons(here)):
            raise BackendError(f"backend {backend.name!r} cannot run a shard: {'; '.join(why)}")
        if here.query_sum is not None and not hasattr(backend, "query_factor"):
            result = fragments.add_part(backend, here, operands, arrays)
        else:
            result = getattr(backend, part)(here, operands, *arrays)
        # What a kernel writes comes out as replicated under shard_map, whatever it read.
        varying = varying_axes((operands, arrays))
        result = jax.tree.map(lambda x: vary(x, varying), result)
        if part == "forward":
            return tuple(result)
        return Gradients(**{name: getattr(result, name) for name in spec.gradients})

    def automatic(operands: Operands, *arrays: Array | None) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if _devices(spec) == 1 or (not mesh.empty and not mesh.auto_axes):
            return local(operands, *arrays)
        return _split(local, backend.name, part, spec.with_shapes_of(operands), operands, arrays)

    def whole(operands: Operands, *arrays: Array | None) -> Any:
        here = spec.with_shapes_of(operands)
        return explicit.split(automatic, backend.name, part, here, operands, arrays)

    # Eager calls on sharded arrays must be partitioned too, hence the jit; inlined in another.
    @functools.partial(jax.jit, inline=True)
    def run(operands: Operands, *arrays: Array | None) -> Any:
        varying = varying_axes((operands, arrays))
        alike, others = jax.tree.map(lambda x: vary(x, varying), (operands, arrays))
        # A vmapped axis joins the batch within a shard_map over explicit axes. Where it is split over
        # one itself, JAX keeps that axis out of the shard_map, and `whole` splits it.
        folded = folds_vmap(whole, spec)
        result = explicit.split(folded, backend.name, part, spec, alike, others)
        if part == "forward":
            return result
        narrow = {
            name: add_up(
                getattr(result, name), tuple(varying - varying_axes(getattr(operands, name)))
            )
            for name in spec.gradients
        }
        return Gradients(**narrow)

    return run


def _devices(spec: AttentionSpec) -> int:
    """How many devices a program could be partitioned over."""
    kind = "gpu" if spec.platform.startswith("sm") else spec.platform
    try:
        return max(jax.device_count(), jax.device_count(kind))
    except RuntimeError:
        return jax.device_count()


def varying_axes(tree: Any) -> frozenset[str]:
    """Manual mesh axes that some array varies over, as far as `check_vma=True` tracks it."""
    types = [jax.typeof(x) for x in jax.tree.leaves(tree)]
    # Through getattr: pyright does not know the attribute.
    return frozenset().union(*(getattr(t, "manual_axis_type").varying for t in types))  # noqa: B009


def vary(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _split(
    local: Callable, name: str, part: str, spec: AttentionSpec, operands: Operands, arrays: Any
) -> Any:
    """`local` over the auto axes, which only the compiler knows."""
    leaves, tree = jax.tree.flatten((operands, arrays))
    roles = placement.roles_of(operands, arrays)
    outcome = placement.result_roles(part, spec, operands)
    context = jax.sharding.get_abstract_mesh()

    def flat(*leaves):
        operands, arrays = jax.tree.unflatten(tree, leaves)
        return tuple(jax.tree.leaves(local(operands, *arrays)))

    def partition(mesh, given, results):
        fine = FineMesh(mesh, context, given)
        found = [fine.axes(x.sharding, x.ndim) for x in given]
        placement.refuse_sequence(name, roles, found)
        wanted = [fine.axes(x.sharding, x.ndim) for x in results]
        place = _place(name, spec, fine.sizes, [*roles, *outcome], [*found, *wanted])
        sums = [place.summed(role) if part == "backward" else () for role in outcome]
        total = _gathered_sum if _context_is_explicit() else add_up

        def shard(*leaves):
            return tuple(total(x, axes) for x, axes in zip(flat(*leaves), sums, strict=True))

        return (
            fine.whole,
            _without_mesh(shard),
            tuple(fine.sharding(place.spec(role)) for role in outcome),
            tuple(fine.sharding(place.spec(role)) for role in roles),
        )

    # Under a jit of its own: custom_partitioning refuses constants, such as a kernel's tables.
    call = custom_partitioning(jax.jit(flat))
    rule, sizes = _rule(spec, roles, outcome)
    call.def_partition(partition, sharding_rule=rule, decode_shardings=False, **sizes)
    results = call(*leaves)
    if part == "forward":
        return results
    return Gradients(**dict(zip(spec.gradients, results, strict=True)))


def _without_mesh(function: Callable) -> Callable:
    """`function` traced as if no mesh was set: the compiler's callbacks run in the user's context,
    where operations on an explicit mesh would ask for shardings once more."""
    if not _context_is_explicit():
        return function

    def run(*args):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            traced = jax.make_jaxpr(function)(*shapes)
        return closed_call_p.bind(*args, call_jaxpr=traced)

    return run


def _context_is_explicit() -> bool:
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def _gathered_sum(x: Array, axes: Axes) -> Array:
    """As `add_up`, whose reduction would be lowered with the sharding of an explicit mesh."""
    return jnp.sum(jax.lax.all_gather(x, axes), axis=0, dtype=x.dtype) if axes else x


def _rule(
    spec: AttentionSpec, roles: Sequence[Role], outcome: Sequence[Role]
) -> tuple[str, dict[str, int]]:
    """Shardy's rule, such as `b u0 (k g) u1, b u2 k u3, ... -> b u6 (k g) u7`, and its factor sizes."""
    groups, sizes = {"b": "b", "k": "k", "n": "(k g)"}, {"g": spec.group_size}
    if spec.kv_heads == 1 or spec.group_size == 1:
        groups["n"], sizes = "k" if spec.group_size == 1 else "g", {}
    count = 0

    def factors(role: Role) -> str:
        nonlocal count
        words = []
        for d in role.dims:
            words.append(groups.get(d, f"u{count}"))
            count += 1
        return " ".join(words)

    left, right = (", ".join(factors(role) for role in side) for side in (roles, outcome))
    return f"{left} -> {right}", sizes


def _place(
    name: str,
    spec: AttentionSpec,
    sizes: dict[str, int],
    roles: Sequence[Role],
    found: Sequence[tuple[Axes, ...]],
) -> Placement:
    batch = placement.dividing(placement.first("b", roles, found), sizes, spec.batch)
    heads = placement.first("n", roles, found) or placement.first("k", roles, found)
    heads = tuple(a for a in heads if a not in batch)
    kv = placement.dividing(heads, sizes, spec.kv_heads)
    group = heads[len(kv) :]
    shards = math.prod(sizes[a] for a in group)
    if group and (math.prod(sizes[a] for a in kv) != spec.kv_heads or spec.group_size % shards):
        placement.refuse_heads(name, spec, math.prod(sizes[a] for a in heads))
    return Placement(batch, kv, group)
