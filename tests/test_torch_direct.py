"""Programs around kernels, replayed by PyTorch: on a CPU, with the kernels played by NumPy.

The attention kernels are lowered as on a GPU; whether they are right is tests/test_torch_gpu.py's.
"""

import contextlib
import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcap.torch_bridge import context, executable, launcher, plans, program
from jaxcap.torch_bridge.call import Settings, Tensors, spec_of
from tests import oracle

CPU = torch.device("cpu")


def replayed(function, *arrays):
    """`function` of NumPy arrays: what PyTorch makes of its program."""
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    run = executable.Executable(program.build(function, *structs), CPU)
    found = run(*map(torch.from_numpy, arrays))
    return [x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in found]


INTEGERS = np.random.default_rng(0).integers(-50, 50, (3, 24)).astype(np.int32)
FLOATS = np.random.default_rng(1).standard_normal((3, 24)).astype(np.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.pad(x, ((0, 0), (1, 7)), constant_values=-3).reshape(3, 4, 8).max(-1),
        lambda x: jnp.pad(x, ((0, 0), (0, 8)), mode="edge").reshape(3, 4, 8).min(-1),
        lambda x: jnp.argsort(x, axis=1, stable=True),
        lambda x: jnp.cumsum(x[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1] - x,
        lambda x: jnp.where(x > 3, x, jnp.arange(24, dtype=jnp.int32)[None]).sum(1),
        lambda x: ((x >= 0) & (jnp.arange(24) < 9)[None]).any(1),
        lambda x: ((x > -49) | ~(x < 5)).all(1).astype(jnp.int8),
        lambda x: jnp.stack([jnp.maximum(x, 2), jnp.minimum(x, 1) >> 1, abs(x)], -1),
        lambda x: x[:, 3:20:2].T[None] * jnp.int32(7),
        lambda x: jax.lax.dynamic_slice_in_dim(x, 5, 9, axis=1) ^ 3,
        lambda x: jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(x, jnp.uint32)[None], jnp.int32
        ),
    ],
)
def test_integer_tables(function):
    (found,) = replayed(lambda x: [function(x)], INTEGERS)
    np.testing.assert_array_equal(found, function(jnp.asarray(INTEGERS)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jnp.einsum("ab,ab->a", x, y) - jnp.exp(x).sum(1),
        lambda x, y: (x.reshape(3, 4, 6).transpose(0, 2, 1).reshape(3, 24) * 0.5).astype(
            jnp.bfloat16
        ),
        lambda x, y: (x * -1.5).astype(jnp.float16).astype(jnp.float32) + y,
        lambda x, y: jnp.where(x == -jnp.inf, 0.0, -y),
        lambda x, y: jnp.einsum(
            "abc,abc->ba", *(z.astype(jnp.bfloat16).reshape(3, 4, 6) for z in (x, y))
        ),
    ],
)
def test_arithmetic(function):
    arrays = FLOATS, INTEGERS.astype(np.float32)
    (found,) = replayed(lambda *a: [function(*a)], *arrays)
    wanted = np.asarray(jax.jit(function)(*arrays).astype(jnp.float32))
    tolerance = 1e-2 if found.shape == (4, 3) else 1e-5  # sums in bfloat16
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (jnp.sin, "sine"),
        (lambda x: x @ x.T, "matrix product"),
        (lambda x: (x[:, :, None] < x[:, None]).any(2), "XLA would not make"),
        (lambda x: jax.lax.dynamic_slice_in_dim(x, x[0, 0].astype(jnp.int32), 2), "an array says"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + x, x), "while"),
        (lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(1), "unsigned"),
    ],
)
def test_what_cannot_be_replayed_is_refused(function, reason):
    struct = jax.ShapeDtypeStruct(FLOATS.shape, jnp.float32)
    with pytest.raises(program.Unsupported, match=reason):
        program.build(lambda x: [function(x)], struct)


# ---- kernels ------------------------------------------------------------------------------------
def floats(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(launcher, "current_stream", lambda device: 77)


def test_a_kernel_that_adds_to_a_buffer(stream):
    """Arguments, results and shared buffers are where the kernel expects them, anew in each launch."""

    def body(x, total, out):
        total[0, 0] = x[0, 0]
        out[0, 0] = x[0, 0]

    struct = jax.ShapeDtypeStruct((3, 24), jnp.float32)
    kernel = plgpu.kernel(body, out_type=[struct], grid=(1,), grid_names=("i",))

    def function(x):
        table = jnp.asarray(np.arange(6, dtype=np.float32))

        def run(refs):
            (refs["out"][...],) = kernel(x * 2.0 + table.sum(), refs["total"])

        zeros = jnp.zeros((3, 24), jnp.float32)
        done = pl.run_state(run)({"out": zeros, "total": zeros + 5.0})
        return [done["total"] + 1.0, done["out"]]

    built = program.build(function, struct)
    launches = []

    def load(module, device):
        assert module == built.kernels[0] and device == 0

        def launch(stream, addresses):
            assert stream == 77
            x, total, *_ = (floats(a, 72) for a in addresses)
            assert addresses[1] in addresses[2:]
            out = floats(next(a for a in addresses[2:] if a != addresses[1]), 72)
            launches.append(total.copy())
            out[:] = x + total
            total += 10 * x

        return launch

    run = executable.Executable(built, CPU, load)
    for scale in (1.0, 2.0):
        x = torch.from_numpy(FLOATS) * scale
        total, out = run(x)
        inside = x * 2 + 15
        torch.testing.assert_close(out, inside + 5)
        torch.testing.assert_close(total, inside * 10 + 6)
    assert len(launches) == 2 and all((x == 5).all() for x in launches)


@pytest.mark.parametrize("read", [0, 1, 2])
def test_a_kernel_adds_to_what_another_made(stream, read):
    """Without a copy, unless somebody else reads that, whole or reshaped."""

    def make(x, out):
        out[0, 0] = x[0, 0]

    def add(x, total, out):
        total[0] = x[0, 0]
        out[0, 0] = x[0, 0]

    struct = jax.ShapeDtypeStruct((3, 24), jnp.float32)
    calls = [
        plgpu.kernel(x, out_type=[struct], grid=(1,), grid_names=("i",), kernel_name=x.__name__)
        for x in (make, add)
    ]

    def function(x):
        (made,) = calls[0](x)
        flat = made.reshape(72)

        def run(refs):
            (refs["out"][...],) = calls[1](x, refs["total"])

        done = pl.run_state(run)({"out": jnp.zeros((3, 24), jnp.float32), "total": flat})
        return [done["total"], done["out"], made * 2.0, flat + 1.0][: 2 + read]

    built = program.build(function, struct)
    places = []

    def load(module, device):
        first = module == built.kernels[0]

        def launch(stream, addresses):
            if first:
                places.append(addresses[1])
                floats(addresses[1], 72)[:] = 5
            else:
                places.append(addresses[1])
                assert addresses[1] in addresses[2:]
                floats(addresses[1], 72)[:] += 10

        return launch

    total, _, *others = executable.Executable(built, CPU, load)(torch.from_numpy(FLOATS))
    assert (total == 15).all() and (places[0] == places[1]) == (not read)
    assert all((x == wanted).all() for x, wanted in zip(others, (10, 6), strict=False))


def tensors_of(b=1, t=256, s=256, n=4, k=2, h=64, dtype=torch.bfloat16, **extra):
    q, k_, v = (
        torch.zeros(shape, dtype=dtype) for shape in ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    )
    return Tensors(q, k_, v, **extra)


@functools.cache
def programs(settings, shape, gradients=("query", "key", "value")):
    tensors = tensors_of(**dict(shape))
    spec = spec_of(settings, tensors, gradients).replace(platform="sm90")
    names = tuple(n for n, x in zip(Tensors._fields, tensors, strict=True) if x is not None)
    found = []
    for kind in ("forward", "backward"):
        given = [x for x in tensors if x is not None]
        if kind != "forward":
            lse = torch.zeros(spec.batch, spec.query_heads, spec.query_length)
            given += [tensors.query, lse, tensors.query]
        structs = [
            jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in given
        ]
        part = plans.Part(kind, "pallas", spec, names, CPU)
        found.append(program.build(part.function, *structs))
    return found


CORE = {
    "causal": (Settings(50.0, True), {}),
    "no-cap": (Settings(0.0, True), {}),
    "window": (Settings(50.0, True, (100, -1)), {}),
    "full-odd": (Settings(50.0), {"t": 200, "s": 333}),
    "size-128": (Settings(30.0, True), {"h": 128, "t": 4096, "s": 4096}),
    "size-256": (Settings(50.0, True), {"h": 256}),
    "size-72": (Settings(50.0, True), {"h": 72, "dtype": torch.float16}),
}


@pytest.mark.parametrize("name", list(CORE))
def test_the_core_path_is_one_launch_forward_and_few_steps_backward(name):
    settings, shape = CORE[name]
    forward, backward = programs(settings, tuple(shape.items()))
    assert [step.name for step in forward.steps] == [program.KERNEL]
    assert forward.steps[0].arguments[:3] == (0, 1, 2)
    assert len(backward.kernels) >= 1
    assert len(backward.steps) <= 16, [step.name for step in backward.steps]
    (adds,) = (step for step in backward.steps if step.aliases)
    for _, argument in adds.aliases:  # dQ's accumulator takes no copy
        assert executable._spare(backward, adds.arguments[argument])


def test_a_forward_launch_reads_and_writes_the_right_memory(stream):
    """NumPy in the kernel's place: queries, keys and values in, output and log-sum-exp out."""
    forward, _ = programs(Settings(2.0, True), ())
    b, t, n, k, h = 1, 256, 4, 2, 64

    def load(module, device):
        def launch(stream, addresses):
            def read(address, heads):
                bits = (ctypes.c_uint16 * (b * t * heads * h)).from_address(address)
                x = torch.frombuffer(bits, dtype=torch.bfloat16).reshape(b, t, heads, h)
                return x.double().numpy()

            q, key, value = (read(a, m) for a, m in zip(addresses[:3], (n, k, k), strict=True))
            done = oracle.Attention(q, key, value, softcap=2.0, is_causal=True)
            out = (ctypes.c_uint16 * q.size).from_address(addresses[-2])
            torch.frombuffer(out, dtype=torch.bfloat16)[:] = torch.from_numpy(done.out).flatten()
            floats(addresses[-1], b * n * t)[:] = np.swapaxes(done.lse, 1, 2).ravel()

        return launch

    run = executable.Executable(forward, CPU, load)
    q, key, value = (torch.randn(b, t, heads, h).bfloat16() for heads in (n, k, k))
    out, lse = run(q, key, value)
    wanted = oracle.Attention(
        *(x.double().numpy() for x in (q, key, value)), softcap=2.0, is_causal=True
    )
    np.testing.assert_allclose(out.double().numpy(), wanted.out, atol=2e-2)
    np.testing.assert_allclose(lse.numpy(), np.swapaxes(wanted.lse, 1, 2), atol=1e-4)


def test_masks_of_all_queries_and_keys_are_left_to_xla():
    ids = torch.zeros(1, 4096, dtype=torch.int32)
    tensors = tensors_of(t=4096, s=4096, query_segment_ids=ids, kv_segment_ids=ids)
    spec = spec_of(Settings(50.0, True), tensors).replace(platform="sm90")
    names = tuple(n for n, x in zip(Tensors._fields, tensors, strict=True) if x is not None)
    structs = [
        jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for x in tensors
        if x is not None
    ]
    with pytest.raises(program.Unsupported, match="XLA would not make"):
        program.build(plans.Part("forward", "pallas", spec, names, CPU).function, *structs)


def test_why_there_is_no_direct_path_here():
    assert launcher.missing() == "PyTorch sees no CUDA device"
    if torch.cuda.is_available():
        pytest.skip("there is one")


# ---- the thread's context -----------------------------------------------------------------------
class Driver:
    """CUDA's driver of a machine with two GPUs, for one thread; contexts are 100 and 101."""

    def __init__(self, now=None):
        self.now, self.code = now, 0

    def cuCtxGetCurrent(self, found):
        found._obj.value = self.now
        return self.code

    def cuCtxSetCurrent(self, given):
        self.now = given.value
        return self.code

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return self.code

    def cuDevicePrimaryCtxRetain(self, found, device):
        found._obj.value = 100 + device.value
        return self.code


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    context._of_device.cache_clear()
    monkeypatch.setattr(context, "_driver", lambda: made)
    device = lambda: 0 if made.now is None else made.now - 100  # as CUDA's runtime sees it  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getDevice", device, raising=False)

    @contextlib.contextmanager
    def on(index):
        before = device()
        if before != index:
            made.now = 100 + index
        yield
        if device() != before:
            made.now = 100 + before

    monkeypatch.setattr(torch.cuda, "device", on)
    yield made
    context._of_device.cache_clear()


def test_a_thread_without_a_context_gets_that_of_the_device(driver):
    """PyTorch calls device 0 current there and sets nothing; a launch would end the process."""
    run = executable.Executable(program.Program(1, 1, (), (0,)), CPU)
    run.cuda = True
    seen = []
    run.run = lambda tensors: seen.append(driver.now) or [*tensors]
    for run.index in (0, 1, 0):
        run(torch.zeros(1))
    assert seen == [100, 101, 100] and driver.now == 100


def test_jax_leaves_the_context_as_it_was(driver):
    for before in (None, 100):
        driver.now = before
        with contextlib.suppress(KeyError), context.kept():
            driver.now = 101  # as XLA leaves the GPU that it used last
            raise KeyError
        assert driver.now == before


def test_a_fork_of_a_process_that_uses_cuda_is_an_error(driver):
    driver.code = 3
    with pytest.raises(RuntimeError, match="error 3, as after a fork"):
        context.is_current(0)
