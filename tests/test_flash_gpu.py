"""The FlashAttention that is installed, on the GPU: no copy, no waiting, no growth, streams, two GPUs."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcap
from tests import cases, conformance

pytestmark = pytest.mark.gpu
BACKENDS = ("fa2", "fa3", "fa4")
#: Where the libraries differ; the conformance suite has every case, with gradients.
FORWARD = (
    "capped",
    "decode_lengths",
    "both_lengths",
    "lengths_causal",
    "bottom_right_empty_rows",
    "mqa",
)


def qkv(batch=2, length=512, heads=8):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, n, 128) for n in (heads, heads // 2, heads // 2)]
    arrays = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    return [(4 * x).astype(jnp.bfloat16) for x in arrays]


def attend(backend, q, k, v):
    return jaxcap.dot_product_attention(
        q, k, v, softcap=50.0, is_causal=True, implementation=backend
    )


def squares(backend, q, k, v):
    return jnp.sum(attend(backend, q, k, v).astype(jnp.float32) ** 2)


@pytest.fixture(params=BACKENDS)
def backend(request):
    plan = jaxcap.explain(*qkv(), softcap=50.0, is_causal=True, implementation=request.param)
    if why := plan.forward.reasons[request.param]:
        pytest.skip("; ".join(why))
    return request.param


def alike(found, wanted):
    """Up to the order of sums, which a kernel need not keep."""
    found, wanted = np.float32(found), np.float32(wanted)
    assert np.linalg.norm(found - wanted) <= 0.01 * np.linalg.norm(wanted)


def trains(backend):
    plan = jaxcap.explain(*qkv(), softcap=50.0, is_causal=True, implementation=backend)
    return not plan.training.reasons[backend]


@pytest.mark.parametrize("case", FORWARD)
def test_inference(backend, case):
    """`fa3-fwd` has no backward, and the conformance suite asks for one."""
    conformance.check(backend, cases.BY_NAME[case].larger(), "bfloat16", inference=True)


def test_only_the_log_sum_exp_is_copied(backend):
    arrays = qkv()
    compiled = jax.jit(functools.partial(attend, backend)).lower(*arrays).compile()
    batch, length, heads, _ = arrays[0].shape
    lse = 4 * batch * length * heads
    assert compiled.memory_analysis().temp_size_in_bytes <= lse + 1024


def test_host_does_not_wait(backend):
    arrays = qkv(batch=4, length=16384, heads=16)
    run = jax.jit(functools.partial(attend, backend))
    run(*arrays).block_until_ready()
    start = time.perf_counter()
    out = run(*arrays)
    returned = time.perf_counter() - start
    out.block_until_ready()
    assert returned < 0.5 * (time.perf_counter() - start)


def test_many_calls_on_busy_streams(backend):
    """Memory stays as it is, and PyTorch's work on streams of its own does no harm."""
    import torch

    arrays = qkv()
    loss = functools.partial(squares, backend)
    run = jax.jit(jax.grad(loss) if trains(backend) else loss)
    wanted = run(*arrays)
    device = next(iter(arrays[0].devices()))
    x = torch.randn(1024, 1024, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]

    def calls(count):
        for i in range(count):
            if i % 10 == 0:
                with torch.cuda.stream(streams[i // 10 % 3]):
                    _ = x @ x
            out = run(*arrays)
        torch.cuda.synchronize()
        return jax.block_until_ready(out)

    calls(100)  # each stream's workspace is there then
    before = device.memory_stats()["bytes_in_use"], torch.cuda.memory_reserved()
    out = calls(1000)
    assert device.memory_stats()["bytes_in_use"] <= before[0] + out.nbytes
    assert torch.cuda.memory_reserved() <= before[1]
    alike(out, wanted)


@pytest.mark.multigpu
def test_two_gpus(backend):
    """Batch under plain jit and in a shard_map: each GPU's library call runs on its own stream."""
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("b"))
    sharded = [jax.device_put(x, sharding) for x in qkv()]
    run = functools.partial(attend, backend)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=PartitionSpec("b"), out_specs=PartitionSpec("b")
    )
    alike(jax.jit(run)(*sharded), run(*qkv()))
    alike(jax.jit(mapped)(*sharded), run(*qkv()))
    if trains(backend):
        gradient = jax.jit(jax.grad(functools.partial(squares, backend), argnums=1))
        alike(gradient(*sharded), gradient(*qkv()))
