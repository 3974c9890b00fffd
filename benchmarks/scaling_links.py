"""What the collectives take by themselves."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.scaling_timing import alone, timed

#: Bytes a device, of the collectives' table.
SIZES = tuple(2**n for n in (20, 22, 24, 26, 28))


def measure(devices: int, lock: str, sizes: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Seconds of each collective on arrays of `bytes` a device; a gather's is the shard."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    around = [(i, (i + 1) % devices) for i in range(devices)]
    one = functools.partial
    known = {
        "permute": one(jax.lax.ppermute, axis_name="x", perm=around),
        "gather": one(jax.lax.all_gather, axis_name="x", tiled=True),
        "scatter": one(jax.lax.psum_scatter, axis_name="x", tiled=True),
        "exchange": one(jax.lax.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True),
    }
    for name, collective in known.items():
        whole = PartitionSpec() if name == "gather" else PartitionSpec("x")
        run = jax.jit(
            jax.shard_map(
                collective, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=whole, check_vma=False
            )
        )
        for size in sizes:
            # A reduce-scatter starts from arrays of all shards.
            local = size // 4 * (devices if name == "scatter" else 1)
            with alone(lock, range(devices)):
                x = jax.device_put(
                    jnp.ones(local * devices, jnp.float32), NamedSharding(mesh, PartitionSpec("x"))
                )
                seconds = timed(functools.partial(run, x), 0.02).seconds
            yield {"collective": name, "devices": devices, "bytes": size, "us": seconds * 1e6}
