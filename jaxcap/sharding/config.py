"""`ContextParallel`: how the sequence of a call is split over a mesh, and which kind to use."""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh

from jaxcap.keywords import hinted
from jaxcap.sharding import all_to_all
from jaxcap.sharding.layout import LoadBalance, check_length, check_load_balance, positions
from jaxcap.sharding.ring import Ring
from jaxcap.spec import AttentionSpec

Kind = Literal["ring", "all_gather", "all_to_all", "hybrid", "auto"]
KINDS = ("ring", "all_gather", "all_to_all", "hybrid", "auto")

# Of one of two H200 on NVLink, transfers of 256 MB: bytes a second, ppermute. The kernel's rate is that
# of a causal forward, head size 128.
LINK_RATE = 288e9
KERNEL_RATE = 600e12


def names_of(name: str, axes: Any) -> tuple[str, ...]:
    found = (axes,) if isinstance(axes, str) else axes
    if not isinstance(found, tuple | list) or not all(isinstance(a, str) for a in found):
        raise TypeError(f"{name} must be a mesh axis name or a tuple of them, got {axes!r}")
    if len(set(found)) != len(found):
        raise ValueError(f"{name} names an axis twice: {axes!r}")
    return tuple(found)


def check_axes(
    name: str, axes: tuple[str, ...], batch_axes: Any, head_axis: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of `batch_axes` and of `head_axis`; all differ from each other and from `axes`.

    Raises:
      ValueError, TypeError: they do not, or are no names; `name` is what `axes` came as.
    """
    batch = names_of("batch_axes", batch_axes)
    head = () if head_axis is None else names_of("head_axis", head_axis)
    if not isinstance(head_axis, str | None):
        raise ValueError(f"head_axis must be one mesh axis, a string, or None, got {head_axis!r}")
    if not axes:
        raise ValueError(f"{name} must name at least one mesh axis, got {axes!r}")
    every = axes + batch + head
    if len(set(every)) != len(every):
        raise ValueError(
            f"{name} {axes!r}, batch_axes {batch_axes!r} and head_axis {head_axis!r} must be"
            " different mesh axes"
        )
    return batch, head


@hinted
@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Sequence (context) parallelism of one call over mesh axes: queries, keys and values alike.

    Every device holds T / P queries and S / P keys. With a layout other than contiguous the arrays
    arrive in its order, see `jaxcap.reorder_for_load_balance`: causality, windows, lengths and
    dropout nonetheless refer to the original order; masks and biases are in the new one.

    Args:
      axis: the mesh axis that splits the sequence, or several, major first; of "hybrid" the ring's and
        then the all-to-all's.
      kind: "ring" (keys travel while others are computed with), "all_gather" (all keys at once),
        "all_to_all" (heads for sequence), "hybrid" (both, over two axes) or "auto".
      load_balance: "contiguous", "zigzag" or "striped". Of "hybrid" it is the ring's layout.
      batch_axes: mesh axes that split the batch.
      head_axis: the mesh axis that splits heads, if one does.
      mesh: None is the mesh in use (`jax.set_mesh`) or that of the arrays. Axes of it that are not
        named here are left to the compiler; explicit ones are read from the arrays' types.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> import jaxcap
      >>> jaxcap.ContextParallel(axis="context", kind="ring", load_balance="zigzag").kind
      'ring'
    """

    axis: str | tuple[str, ...] = "context"
    kind: Kind = "auto"
    load_balance: LoadBalance = "contiguous"
    batch_axes: str | tuple[str, ...] = ()
    head_axis: str | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {self.kind!r}")
        check_load_balance(self.load_balance)
        axes = names_of("axis", self.axis)
        batch, _ = check_axes("axis", axes, self.batch_axes, self.head_axis)
        if not isinstance(self.mesh, Mesh | AbstractMesh | None):
            raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {self.mesh!r}")
        if self.kind == "hybrid" and len(axes) != 2:
            raise ValueError(
                "kind='hybrid' needs two axes, axis=(ring axis, all-to-all axis), got"
                f" {self.axis!r}"
            )
        for name, value in (("axis", axes), ("batch_axes", batch)):  # lists would not hash
            object.__setattr__(
                self, name, value[0] if name == "axis" and len(value) == 1 else value
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return names_of("axis", self.axis)

    def resolved_mesh(self, *arrays: Any) -> Any:
        """The mesh of the call.

        Raises:
          ValueError: there is none, it lacks an axis, or it is not `mesh` if that is given.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty and self.mesh is not None:
            mesh = self.mesh
        shardings = (getattr(x, "sharding", None) for x in arrays if not _traced(x))
        types = (jax.typeof(x).sharding for x in arrays if hasattr(x, "dtype"))
        for sharding in (*shardings, *types):
            found = getattr(sharding, "mesh", None)
            if mesh.empty and found is not None and not found.empty:
                mesh = found
        if mesh.empty:
            raise ValueError(
                f"context_parallel over {self.axis!r} needs a mesh: call inside"
                " jax.set_mesh(mesh), or pass ContextParallel(..., mesh=mesh)"
            )
        if self.mesh is not None and dict(self.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f"context_parallel's mesh {dict(self.mesh.shape)} is not the mesh in use,"
                f" {dict(mesh.shape)}"
            )
        if isinstance(self.mesh, Mesh) and self.mesh.abstract_mesh == mesh:
            self._check_devices()
            mesh = self.mesh  # in a jit JAX compares its devices with those in use
        head = () if self.head_axis is None else (self.head_axis,)
        for name in (*self.axes, *self.batch_axes, *head):
            if name not in mesh.shape:
                raise ValueError(
                    f"context_parallel names the axis {name!r}, but the mesh has"
                    f" {tuple(mesh.shape)}"
                )
        return mesh

    def _check_devices(self) -> None:
        try:
            used = jax.sharding.get_mesh()
        except ValueError:  # inside a jit, where it is not to be had
            return
        if not used.empty and used != self.mesh:
            raise ValueError(
                f"context_parallel's mesh is over the devices {_ids(self.mesh)}, the mesh in use over"
                f" {_ids(used)}: pass mesh=None, or call inside jax.set_mesh of the same"
            )

    def ring_size(self, mesh: Any = None, *arrays: Any) -> int:
        """Over how many devices `load_balance` lays the tokens out: the `size` of
        `reorder_for_load_balance`."""
        mesh = self.resolved_mesh(*arrays) if mesh is None else mesh
        hybrid = self.kind == "hybrid" or (self.kind == "auto" and len(self.axes) == 2)
        axes = self.axes[:1] if hybrid else self.axes
        return math.prod(mesh.shape[a] for a in axes)

    def positions(self, length: int, *arrays: Any) -> np.ndarray:
        """`[length]` int32: the original position of each token; the mesh may be that of `arrays`."""
        return positions(length, self.ring_size(None, *arrays), self.load_balance)


def _ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def _traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def check_lengths(cp: ContextParallel, spec: AttentionSpec, mesh: Any) -> None:
    """Of a whole call; ValueError where a length does not divide."""
    total = math.prod(mesh.shape[a] for a in cp.axes)
    ring = cp.ring_size(mesh)
    for name, length in (("query", spec.query_length), ("key", spec.key_length)):
        check_length(name, length, ring, cp.load_balance)
        check_length(name, length, total, "contiguous")


def choose(cp: ContextParallel, spec: AttentionSpec, sizes: tuple[int, ...]) -> tuple[str, str]:
    """(kind, why) for a call on shards as `spec`, over axes of `sizes`."""
    if cp.kind != "auto":
        return cp.kind, "asked for"
    size = math.prod(sizes)
    if len(sizes) == 2:
        why = all_to_all.refusal(spec, sizes[1])
        if why is None or cp.load_balance != "contiguous":  # the layout is the ring axis's
            return "hybrid", "two axes: all-to-all over the second, ring over the first"
        return "ring", f"over both axes, for {why}"
    if size == 1:
        return "ring", "one device"
    why = all_to_all.refusal(spec, size)
    ring = Ring(cp.axes, size, cp.load_balance).plan(spec)
    low, high = spec.band
    if low is not None or spec.window is not None:
        hops = len(ring.active_hops)
        if not ring.given and 2 * hops <= size:
            return "ring", f"the window needs {hops} of {size} hops"
    if why is None and spec.kv_heads % size == 0:
        return "all_to_all", f"{size} divides the heads: one exchange, the least bytes, no hops"
    # A hop's products take longer than its transfer where a shard has this many queries.
    causal = 2 if high == 0 and cp.load_balance != "contiguous" else 1
    flops_a_key = 2 * spec.query_heads * (spec.head_size + spec.value_size) / causal
    bytes_a_key = (
        spec.kv_heads * (spec.head_size + spec.value_size) * (4 if "32" in spec.dtype else 2)
    )
    enough = (bytes_a_key / LINK_RATE) / (flops_a_key / KERNEL_RATE)
    if spec.query_length >= enough:
        return (
            "ring",
            f"{spec.query_length} queries a device hide a transfer (from {enough:.0f} on)",
        )
    return "all_gather", f"{spec.query_length} queries a device hide no transfer: one gather"
