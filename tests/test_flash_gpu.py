"""The FlashAttention that is installed, on the GPU: no copy, no waiting, no growth, streams, two GPUs.

Two modules of FlashAttention 3 side by side, one of them built without softcap: `pip install --no-deps
tokenspeed-fa3 fa3-fwd`.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcap
from jaxcap import selection
from jaxcap.torch_bridge import custom_call, fa3, probe
from jaxcap.torch_bridge.backend import FlashAttention
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


def test_operands_and_result_are_xla_s_own_buffers(backend, monkeypatch):
    arrays, seen = qkv(), set()
    view = custom_call._view

    def spy(buffer):
        found = view(buffer)
        seen.add(found.data_ptr())
        return found

    monkeypatch.setattr(custom_call, "_view", spy)
    out = jax.block_until_ready(jax.jit(functools.partial(attend, backend))(*arrays))
    assert {x.unsafe_buffer_pointer() for x in (*arrays, out)} <= seen


def test_transformations(backend):
    """vmap with shared keys, and a scan over a rematerialised layer; gradients where there are any."""
    q, k, v = qkv(batch=1)

    def mapped(backend, q):
        out = jax.vmap(lambda x: attend(backend, x, k, v))(jnp.stack([q, 2 * q]))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def scanned(backend, q):
        layer = jax.checkpoint(lambda x, _: (attend(backend, x, k, v), None))
        return jnp.sum(jax.lax.scan(layer, q, None, length=2)[0].astype(jnp.float32) ** 2)

    for function in (mapped, scanned):
        run = jax.grad(function, argnums=1) if trains(backend) else function
        run = jax.jit(run, static_argnums=0)
        found, wanted = np.float32(run(backend, q)), np.float32(run("blockwise", q))
        # Rounded once more in each layer.
        assert np.linalg.norm(found - wanted) <= 0.05 * np.linalg.norm(wanted), function


@pytest.mark.filterwarnings("ignore")
def test_the_library_s_own_error_is_one_that_can_be_read(backend, monkeypatch):
    """Seven query heads for four of the keys: each library refuses them itself; the next call works."""
    arrays = qkv()
    run = jax.jit(functools.partial(attend, backend))
    wanted = run(*arrays)
    plan = jaxcap.explain(*arrays, softcap=50.0, is_causal=True, implementation=backend)
    flash: Any = selection.backends()[backend]
    provider = flash.provider(plan.forward.spec)
    forward = type(provider).forward

    def seven(self, call, out, lse, *, q, **arrays):
        forward(self, call, out[:, :, :7], lse[:, :7], q=q[:, :, :7], **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(type(provider), "forward", seven)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
            jax.block_until_ready(run(*arrays))
    message = str(caught.value)
    assert f"backend {backend!r}: the forward of {provider.title} failed with" in message
    print(message[-500:])
    alike(run(*arrays), wanted)


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
    assert device.memory_stats()["bytes_in_use"] <= before[0] + max(out.nbytes, 256)  # XLA's step
    assert torch.cuda.memory_reserved() <= before[1]
    alike(out, wanted)


#: By module, as FlashAttention 3's packages on PyPI are built: a capped call, a plain one, a plain window.
ABLE = {"flash_attn_interface": (False, True, True), "fa3_fwd_interface": (True, True, False)}
MASKS = ({"softcap": 50.0, "is_causal": True}, {"is_causal": True}, {"local_window_size": (64, 0)})


@pytest.mark.parametrize("module", ABLE)
@pytest.mark.parametrize("kind", range(3))
def test_a_build_without_softcap_runs_what_has_none(module, kind):
    """`tokenspeed-fa3` has softcap in its signatures and not in its kernels; a cap is never lost on it."""
    provider = {p.interface: p for p in fa3.providers()}[module]
    if (found := probe.file_of(module)) is None:
        pytest.skip(f"{module} is not installed")
    if module == "flash_attn_interface" and "softcap" not in provider.probe().without:
        pytest.skip(f"{found} was built with softcap")
    arrays, keywords = qkv(), MASKS[kind]
    with conformance.registered(FlashAttention("fa3", (provider,))):
        run = functools.partial(
            jaxcap.dot_product_attention, *arrays, **keywords, implementation="fa3"
        )
        if not ABLE[module][kind]:
            with pytest.raises(jaxcap.BackendError, match=f"{module}: built without"):
                run()
            return
        alike(run(), run(implementation="blockwise"))


def test_two_builds_side_by_side(monkeypatch):
    """The first that can runs a call; a pinned one runs it or nothing does."""
    if any(probe.file_of(module) is None for module in ABLE):
        pytest.skip(f"needs {' and '.join(ABLE)}")
    used = []
    for provider in {type(p) for p in fa3.providers()}:
        forward = provider.forward
        monkeypatch.setattr(
            provider,
            "forward",
            lambda self, *a, f=forward, **k: (used.append(self.interface), f(self, *a, **k)),
        )
    first, second = ABLE
    with conformance.registered(FlashAttention("fa3", fa3.providers())):
        for keywords in MASKS:
            run = functools.partial(jaxcap.dot_product_attention, *qkv(), **keywords)
            alike(run(implementation="fa3"), run(implementation="blockwise"))
    assert used == [second, first, first]
    with conformance.registered(FlashAttention("fa3", fa3.providers(pinned=second))):
        jaxcap.dot_product_attention(*qkv(), **MASKS[1], implementation="fa3")
        with pytest.raises(jaxcap.BackendError, match=f"JAXCAP_FA3_PROVIDER={second} excludes it"):
            jaxcap.dot_product_attention(*qkv(), **MASKS[2], implementation="fa3")
    assert used[3:] == [second]


def test_dropout_is_refused_by_us_and_by_the_library():
    """With a cap `flash-attn` would raise; jaxcap says why before it is asked."""
    flash_attn = pytest.importorskip("flash_attn")
    import torch

    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dropout"):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.1, softcap=50.0)
    rng = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    with pytest.raises(jaxcap.BackendError, match="cannot drop the entries that the key names"):
        jaxcap.dot_product_attention(*qkv(), softcap=50.0, **rng, implementation="fa2")


@pytest.mark.multigpu
def test_arrays_and_tensors_on_the_second_gpu(backend):
    """While PyTorch's current device is the first one."""
    import torch

    from jaxcap import torch_bridge

    torch.cuda.set_device(0)
    arrays = qkv()
    wanted = attend(backend, *arrays)
    there = [jax.device_put(x, jax.devices()[1]) for x in arrays]
    found = jax.jit(functools.partial(attend, backend))(*there)
    assert found.devices() == {jax.devices()[1]}
    alike(found, wanted)
    given = [torch.from_dlpack(x) for x in there]
    both = [
        torch_bridge.attention(
            *(x.to(f"cuda:{i}") for x in given), softcap=50.0, causal=True, backend=backend
        )
        for i in (0, 1, 0, 1)
    ]
    assert [x.device.index for x in both] == [0, 1, 0, 1] and torch.cuda.current_device() == 0
    for x in both:
        alike(x.float().cpu().numpy(), wanted)


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
