"""A mesh with axes of prime size, in which any sharding of its devices can be written."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcap.placement import Axes


class FineMesh:
    """The devices as a mesh whose axes have prime sizes, in which any sharding can be written.

    Shardy splits an axis of 8 over 4 key/value heads and 2 query heads of each: no axis of the
    user's mesh, but a part of one. All is by position, not by device. In a shard_map over some of
    the axes the compiler shows the others alone (`part`), while sums name devices of the `whole`.
    """

    def __init__(self, mesh: Any, context: Any, arrays: Sequence[jax.ShapeDtypeStruct]):
        tiled = [math.prod(d) for x in arrays if (d := _tiles(x.sharding, x.ndim)[0])]
        count = tiled[0] if tiled else 1
        if context.manual_axes:
            known = zip(context.axis_sizes, context.axis_names, strict=True)
            axes = [(size, name in context.manual_axes) for size, name in known]
        else:
            axes = [(size, False) for size in (mesh.axis_sizes if not mesh.empty else (count,))]
        if tiled and math.prod(size for size, manual in axes if not manual) != count:
            raise NotImplementedError(f"a sharding over {count} devices on a mesh {axes}")
        primes = [(p, manual) for size, manual in axes for p in _primes(size)]
        named = [(f"jaxcap_{i}", p, manual) for i, (p, manual) in enumerate(primes)]
        self.sizes = {name: p for name, p, manual in named if not manual}
        devices = sorted(arrays[0].sharding.device_set, key=lambda d: d.id)

        def build(sizes: dict[str, int]) -> Mesh:
            chosen = np.array(devices[: math.prod(sizes.values())])
            return Mesh(chosen.reshape(tuple(sizes.values())), tuple(sizes))

        self.part = build(self.sizes)
        self.whole = build({name: p for name, p, _ in named})

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.part, spec)

    def axes(self, sharding: Any, ndim: int) -> tuple[Axes, ...]:
        """For each dimension the axes that split it, major first."""
        tiles, order = _tiles(sharding, ndim)
        steps: list[list[tuple[int, str]]] = [[] for _ in range(ndim)]
        stride = math.prod(self.sizes.values())
        for name, size in self.sizes.items() if tiles else ():
            stride //= size
            place = np.argwhere(order.reshape(tiles) == stride)[0]
            for dim in range(ndim):
                if place[dim]:
                    steps[dim].append((int(place[dim]), name))
        return tuple(tuple(name for _, name in sorted(s, reverse=True)) for s in steps)


def _tiles(sharding: Any, ndim: int) -> tuple[list[int], np.ndarray]:
    """Tiles a dimension (the last may count replicas) and the devices by position; [] if whole."""
    hlo = sharding._to_xla_hlo_sharding(ndim)  # the public surface shows no parts of axes
    if not hlo.is_tiled():
        return [], np.zeros(0)
    return list(hlo.tile_assignment_dimensions()), np.array(hlo.tile_assignment_devices())


def _primes(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found
