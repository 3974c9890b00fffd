"""One of two processes of `test_sharding_program.test_two_processes`: port and rank are its arguments."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def main(port: str, rank: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    import jaxcap

    assert jax.device_count() == 4 and jax.local_device_count() == 2
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 32, n, 8)).astype(np.float32) for n in (4, 2, 2))
    q = 12 * q
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,))
    cp = jaxcap.ContextParallel("context", "ring", "zigzag", mesh=mesh)

    def loss(q, k, v, cp):
        options = {"softcap": 50.0, "is_causal": True, "context_parallel": cp}
        return jnp.sum(jnp.sin(jaxcap.dot_product_attention(q, k, v, **options)))

    gradients = functools.partial(jax.grad(loss, (0, 1, 2)), cp=cp)
    place = NamedSharding(mesh, P(None, "context"))

    def placed(x):
        x = jaxcap.reorder_for_load_balance(x, 4)
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    found = jax.jit(gradients)(*map(placed, (q, k, v)))
    wanted = jax.jit(functools.partial(jax.grad(loss, (0, 1, 2)), cp=None))(q, k, v)
    for x, y in zip(found, wanted, strict=True):
        y = jaxcap.reorder_for_load_balance(np.asarray(y), 4)
        for shard in x.addressable_shards:
            np.testing.assert_allclose(shard.data, y[shard.index], rtol=1e-4, atol=1e-5)
    print("agrees")


if __name__ == "__main__":
    main(*sys.argv[1:])
