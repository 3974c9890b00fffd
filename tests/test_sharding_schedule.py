"""A ring with the kernels inside, compiled for several H200s without one: its memory, and what is hidden."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import device
from tests import compile_sm90

SHARD, HEADS, SIZE = 4096, 4, 64
RINGS = {"eight": 8, "twelve": 12}


def compiled(name: str):
    """For `compile_sm90`: out and gradients of a full ring."""
    device.platform = lambda *arrays: "sm90"
    mesh = Mesh(compile_sm90.devices(RINGS[name]), ("context",))
    cp = jaxcap.ContextParallel(axis="context", kind="ring", mesh=mesh)
    attend = functools.partial(
        jaxcap.dot_product_attention, softcap=50.0, context_parallel=cp, implementation="pallas"
    )

    def run(q, k, v, d_out):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(d_out)

    shape = (1, SHARD * mesh.size, HEADS, SIZE)
    sharding = NamedSharding(mesh, P(None, "context"))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    return run, (x, x, x, x)


@pytest.fixture(scope="module")
def reports():
    compile_sm90.required()
    return dict(compile_sm90.reports("tests.test_sharding_schedule", list(RINGS)))


@pytest.mark.slow
def test_memory_is_that_of_a_shard(reports):
    """The same on 8 and on 12 devices with shards of one size: some float32 parts of the results."""
    eight, twelve = (reports[name].temporary / (SHARD * HEADS * SIZE * 4) for name in RINGS)
    assert twelve <= 1.02 * eight
    assert twelve < 12.5


@pytest.mark.slow
def test_gradients_of_queries_are_rearranged_once(reports):
    """Every hop of the backward adds to the same memory: no copies, and rows are made in the end, by a loop
    (XLA has a slower way to transpose, "input", which float32 would take)."""
    steps = [step[:2] for step in reports["eight"].steps]
    kernels = [i for i, (_, instruction) in enumerate(steps) if instruction == "custom-call"]
    after = steps[kernels[8] :]
    assert not [name for name, instruction in after if instruction == "copy"]
    moved = [name for name, _ in after if "transpose" in name]
    assert len(moved) == 1
    assert moved[0].startswith("loop")


@pytest.mark.slow
def test_transfers_are_beside_kernels(reports):
    """XLA starts every transfer before a kernel and ends it after, but for dK's and dV's way home."""
    steps = reports["eight"].steps
    place = {name: i for i, (name, _, _) in enumerate(steps)}
    kernels = [place[name] for name, instruction, _ in steps if instruction == "custom-call"]
    assert len(kernels) == 8 + 8
    assert not [name for name, instruction, _ in steps if instruction == "collective-permute"]
    transfers = [
        (place[operands[0]], place[name])
        for name, instruction, operands in steps
        if instruction == "collective-permute-done"
    ]
    on_the_way = [(start, done) for start, done in transfers if start < kernels[-1]]
    assert len(on_the_way) >= 2 * 7
    assert all(any(start < k < done for k in kernels) for start, done in on_the_way)
