"""Where everything lies: the mesh, the layout of the sequence, the shards of the parameters.

A batch is [A, B, T]: A micro-batches, one after the other, of B sequences of T tokens, one sequence a
group of `context * exchange` devices. The residual stream of the model is [B * T, D], and with one
sequence a group B * T splits over both axes without moving a token.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcap
from examples.gemma2.config import Config
from jaxcap import sharding

AXES = ("data", "context", "exchange", "tensor")

#: Which axis of a kernel is split over "tensor": columns of the first matrices, rows of the last.
_TENSOR = {"query": -1, "key": -1, "value": -1, "gate": -1, "up": -1, "out": -2, "down": -2}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many devices along each axis of the mesh, and how a sequence lies on its group.

    `exchange` above 1 is the all-to-all of kind "hybrid", within the ring over `context`.
    """

    data: int = 1
    context: int = 1
    exchange: int = 1
    tensor: int = 1
    kind: Any = "ring"
    load_balance: Any = "zigzag"

    def __post_init__(self) -> None:
        for name in AXES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.exchange > 1) != (self.kind == "hybrid"):
            raise ValueError(
                f"kind 'hybrid' and an exchange above 1 go together, got {self.kind!r} and"
                f" {self.exchange}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data, self.context, self.exchange, self.tensor

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        sizes = zip(self.shape, AXES, strict=True)
        return " x ".join(f"{size} {axis}" for size, axis in sizes if size > 1) or "one device"

    def mesh(self) -> Mesh:
        """Of the first devices."""
        automatic = (AxisType.Auto,) * len(AXES)
        return jax.make_mesh(self.shape, AXES, automatic, devices=jax.devices()[: self.devices])

    def context_parallel(self, mesh: Mesh) -> Any:
        """None where every sequence is whole on one device."""
        if self.context * self.exchange == 1:
            return None
        return jaxcap.ContextParallel(
            axis="context" if self.exchange == 1 else ("context", "exchange"),
            kind=self.kind,
            load_balance=self.load_balance,
            batch_axes=("data",),
            head_axis="tensor" if self.tensor > 1 else None,
            mesh=mesh,
        )

    def check(self, config: Config, length: int) -> None:
        """Raises ValueError, with what to do, where model or length do not divide."""
        for name, size in (("heads", config.heads), ("kv_heads", config.kv_heads)):
            if size % self.tensor:
                raise ValueError(f"tensor must divide the model's {size} {name}, got {self.tensor}")
        ring = sharding.length_multiple(self.context, self.load_balance)
        multiple = math.lcm(ring, self.context * self.exchange)
        if length % multiple:
            raise ValueError(f"length must be a multiple of {multiple} on {self}, got {length}")

    def batch_sharding(self, mesh: Mesh) -> NamedSharding:
        """Of tokens [A, B, T]."""
        return NamedSharding(mesh, PartitionSpec(None, "data", ("context", "exchange")))

    def ordered(self, x: np.ndarray) -> np.ndarray:
        """[.., T] from the text's order to the layout's: in the data pipeline, so never an activation."""
        return jaxcap.reorder_for_load_balance(x, self.context, self.load_balance, axis=-1)


def parameter_sharding(mesh: Mesh, path: Any, shape: tuple[int, ...]) -> NamedSharding:
    """Kernels and the embedding over "tensor", everything else whole on every device."""
    name = jax.tree_util.keystr(path)
    spec: list[str | None] = [None] * len(shape)
    for part, axis in _TENSOR.items():
        if f"'{part}'" in name and "kernel" in name:
            spec[axis] = "tensor"
    if "embedding" in name:
        spec[0] = "tensor"
    return NamedSharding(mesh, PartitionSpec(*spec))


def shardings(mesh: Mesh, shapes: Any) -> Any:
    """Of parameters, and of what an optimizer keeps in their shapes."""
    return jax.tree.map_with_path(lambda path, x: parameter_sharding(mesh, path, x.shape), shapes)
