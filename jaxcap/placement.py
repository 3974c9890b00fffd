"""Which dimension of which array of a call is split over which mesh axes.

A dimension has a letter: b batch, n query heads, k key/value heads (n = k * g), t and s lengths, h and
v head sizes, `.` what is not split (a dimension of size 1 among others). Batch and heads can be split;
an array without the letter is then whole on every shard, and its gradient a sum over them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcap.selection import BackendError
from jaxcap.spec import Array, AttentionSpec, Operands

Axes = tuple[str, ...]

#: Name that users know and dimensions, for each field of `Operands`.
_OPERANDS = {
    "query": ("query", "btnh"),
    "key": ("key", "bskh"),
    "value": ("value", "bskv"),
    "bias": ("bias", "bnts"),
    "mask": ("mask", "bnts"),
    "query_lengths": ("query_seq_lengths", "b"),
    "kv_lengths": ("key_value_seq_lengths", "b"),
    "query_segment_ids": ("query_segment_ids", "bt"),
    "kv_segment_ids": ("key_value_segment_ids", "bs"),
    "query_positions": ("query_positions", "bt"),
    "kv_positions": ("key_value_positions", "bs"),
    "alibi_slopes": ("alibi_slopes", "bn"),
    "sinks": ("sinks", "bn"),
}
_DROPOUT = {"rng": "b.", "batch": "b", "head": "n", "query": ".", "key": "."}
_SAVED = (
    ("out", "btnv"),
    ("lse", "bnt"),
    ("d_out", "btnv"),
    ("d_lse", "bnt"),
    ("query_sum", "bn.."),
)

_MEANING = {
    "t": "its length (T)",
    "s": "its length (S)",
    "h": "its head size (H)",
    "v": "its head size (V)",
}


class Role(NamedTuple):
    name: str
    dims: str  # a letter a dimension
    saved: bool = False  # of the forward's results and their cotangents

    def fit(self, x: Any) -> "Role":
        """With `.` for dimensions of size 1."""
        dims = zip(self.dims, x.shape, strict=True)
        return self._replace(dims="".join("." if size == 1 else d for d, size in dims))


def roles_of(operands: Operands, arrays: Iterable[Array | None]) -> list[Role]:
    """In the order of `jax.tree.leaves((operands, arrays))`."""
    found = [
        Role(*_OPERANDS[name]).fit(x)
        for name, x in operands._replace(dropout=None)._asdict().items()
        if x is not None
    ]
    if operands.dropout is not None:
        pairs = zip(_DROPOUT.values(), operands.dropout, strict=True)
        found += [Role("dropout_rng", dims).fit(x) for dims, x in pairs]
    for (name, dims), x in zip(_SAVED, arrays, strict=False):
        if x is not None:
            found.append(Role(name, dims, saved=True).fit(x))
    return found


def result_roles(part: str, spec: AttentionSpec, operands: Operands) -> list[Role]:
    """Of the forward's (out, lse), or of the gradients that the spec names."""
    sizes = {
        "b": spec.batch,
        "t": spec.query_length,
        "n": spec.query_heads,
        "v": spec.value_size,
    }
    if part == "forward":
        shapes = [[sizes[d] for d in dims] for _, dims in _SAVED[:2]]
        pairs = zip(_SAVED, shapes, strict=False)
        return [
            Role(name, dims, True).fit(jax.ShapeDtypeStruct(shape, "float32"))
            for (name, dims), shape in pairs
        ]
    roles = [Role(*_OPERANDS[name]).fit(getattr(operands, name)) for name in spec.gradients]
    if spec.query_sum is not None:
        rows = roles[0].dims  # btnh
        roles[0] = Role("query", f"{rows[0]}{rows[2]}..")
    return roles


class Placement(NamedTuple):
    """Mesh axes, major first. Query heads are split over `kv` and then, within groups, over `group`."""

    batch: Axes = ()
    kv: Axes = ()
    group: Axes = ()

    def axes(self, role: Role) -> tuple[Axes, ...]:
        known = {"b": self.batch, "n": self.kv + self.group, "k": self.kv}
        return tuple(known.get(d, ()) for d in role.dims)

    def spec(self, role: Role) -> PartitionSpec:
        return PartitionSpec(*(axes or None for axes in self.axes(role)))

    def summed(self, role: Role) -> Axes:
        """Axes whose shards each hold a part of the sum that is the gradient of `role`'s array."""
        axes = () if "b" in role.dims else self.batch
        if "n" in role.dims:
            return axes
        return axes + self.group + (() if "k" in role.dims else self.kv)


def first(letter: str, roles: Iterable[Role], found: Iterable[tuple[Axes, ...]]) -> Axes:
    """Axes of the first array that is split over the dimension `letter`."""
    for role, dims in zip(roles, found, strict=True):
        axes = dims[role.dims.index(letter)] if letter in role.dims else ()
        if axes:
            return axes
    return ()


def dividing(axes: Axes, sizes: Mapping[str, int], length: int) -> Axes:
    """As many of `axes`, from the front, as split `length` evenly."""
    count = len(axes)
    while length % math.prod(sizes[a] for a in axes[:count]):
        count -= 1
    return axes[:count]


def add_up(x: Array, axes: Axes) -> Array:
    """The sum over mesh axes, taken in float32 at least."""
    if not axes:
        return x
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    return jax.lax.psum(wide, axes).astype(x.dtype)


def refuse_sequence(backend: str, roles: Iterable[Role], found: Iterable[tuple[Axes, ...]]) -> None:
    """BackendError where an operand is split over something other than batch and heads."""
    for role, dims in zip(roles, found, strict=True):
        for letter, axes in zip(role.dims, dims, strict=True):
            if axes and letter in _MEANING and not role.saved:
                raise BackendError(
                    f"backend {backend!r} cannot split {role.name} over {_MEANING[letter]}, as it is"
                    " sharded here: it splits batch and heads only. Pass context_parallel=... to"
                    " split a sequence, or implementation='xla' to leave it to XLA, or gather first:"
                    f" jax.lax.with_sharding_constraint({role.name}, ...) on an auto mesh,"
                    " jax.sharding.reshard on an explicit one"
                )


def refuse_heads(backend: str, spec: AttentionSpec, shards: int) -> NoReturn:
    raise BackendError(
        f"backend {backend!r} cannot split {spec.query_heads} query heads over {shards} shards: a"
        f" shard must hold whole groups of {spec.group_size} query heads (there are"
        f" {spec.kv_heads} key/value heads) or an equal part of one; shard the heads otherwise,"
        " or pass implementation='xla'"
    )
