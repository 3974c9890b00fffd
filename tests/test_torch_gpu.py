"""`torch_bridge` on a GPU: the kernels launched directly, streams, threads, graphs, memory, Hugging Face."""

import gc
import resource
import threading

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from jaxcap import torch_bridge
from jaxcap.torch_bridge import autograd, call, functional
from tests.torch_reference import check, expected, far, inputs, numpy

# PyTorch's compiler and Transformers warn of what their users may want to know.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
CALL = {"softcap": 5.0, "causal": True}
HALF = {"dtype": torch.bfloat16, "device": "cuda"}
TOLERANCE = 2e-2


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif(not hopper(), reason="the direct path is for Hopper")


def small(t=256, s=256, n=4, k=2, h=64, **rest):
    return inputs(b=2, t=t, s=s, n=n, k=k, h=h, **(HALF | rest))


def loss(q, k, v, **keywords):
    return torch_bridge.attention(q, k, v, **CALL, **keywords).float().square().sum()


def routes(given, **keywords) -> set[str]:
    """How the parts of a call that has run were launched."""
    tensors = call.canonical(
        *(given[name] for name in ("q", "k", "v")),
        given.get("bias"),
        keywords.pop("alibi_slopes", None),
        None,
        given.get("sinks"),
    )
    settings = call.Settings(**keywords, return_lse=True)
    return set(autograd.plan_of(settings, tensors, autograd.wanted(tensors)).routes.values())


@needs_hopper
@pytest.mark.parametrize(
    ("shape", "keywords"),
    [
        ({}, CALL),
        ({"t": 200, "s": 333}, {"softcap": 5.0, "window_size": (64, 32)}),
        (
            {"h": 256, "t": 300, "s": 300},
            {"softcap": 5.0, "causal": True, "window_size": (128, -1)},
        ),
        ({"h": 128, "dtype": torch.float16}, {"causal": True, "deterministic": True}),
    ],
)
def test_the_direct_path_is_right(shape, keywords):
    given = small(**shape)
    check(given, TOLERANCE, with_lse=bool(shape), **keywords)
    assert routes(given, **keywords) == {"direct"}


@needs_hopper
def test_bias_sinks_alibi_and_dropout_run_directly():
    given = small(t=192, s=192)
    given["bias"] = torch.randn(4, 192, 192, device="cuda", requires_grad=True)
    given["sinks"] = torch.randn(4, device="cuda", requires_grad=True)
    slopes = torch.rand(4, device="cuda")
    check(given, TOLERANCE, alibi_slopes=slopes, **CALL)
    assert routes(given, alibi_slopes=slopes, **CALL) == {"direct"}


@needs_hopper
def test_dropout_drops_what_the_definition_says():
    given = small()
    generator = torch.Generator("cuda").manual_seed(4)
    state = generator.get_state()
    out = torch_bridge.attention(**given, dropout_p=0.3, generator=generator, **CALL)
    generator.set_state(state)
    key = torch.randint(
        -(2**31), 2**31, (1, 2), dtype=torch.int32, device="cuda", generator=generator
    )
    words = key[0].to(torch.int64) % 2**32
    wanted = expected(given, dropout_p=0.3, dropout_key=words, **CALL)
    assert far(out, wanted.out) < TOLERANCE


def test_through_jax_with_packed_sequences_of_any_length():
    """Too large to replay op by op: the same kernels, through JAX; work queued before is waited for."""
    given = small(t=2048, s=2048, n=2, k=1)
    q, k, v = given.values()
    bounds = torch.tensor([0, 700, 1500, 2048], device="cuda")
    ids = torch.searchsorted(bounds, torch.arange(2048, device="cuda"), right=True)
    wanted = expected(given, segment_ids=ids.expand(2, -1), **CALL)
    torch_bridge.varlen_attention(q[0], k[0], v[0], bounds, **CALL)
    torch.cuda._sleep(100_000_000)
    late = [x * 0.5 for x in (q, k, v)]
    late = [(x + x).detach().requires_grad_() for x in late]
    parts = [torch_bridge.varlen_attention(*(x[i] for x in late), bounds, **CALL) for i in (0, 1)]
    out = torch.stack(parts)
    grads = torch.autograd.grad(out.sum(), late)
    assert far(out, wanted.out) < TOLERANCE
    found = wanted.backward(np.ones(out.shape))
    for grad, name in zip(grads, ("query", "key", "value"), strict=True):
        assert far(grad, getattr(found, name)) < TOLERANCE
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        torch_bridge.varlen_attention(*(x[0].detach() for x in late), bounds, **CALL)
    assert torch.cuda.memory_allocated() <= before + 2**20


@needs_hopper
def test_it_returns_before_the_gpu_is_done_and_follows_the_current_stream():
    q, k, v = (x.detach() for x in small().values())
    wanted = torch_bridge.attention(q, k, v, **CALL)
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        late = q.clone()
        out = torch_bridge.attention(late, k, v, **CALL)
        done.record()
    assert not done.query()
    stream.synchronize()
    assert torch.equal(out, wanted)


@needs_hopper
def test_threads_each_on_a_stream_of_its_own():
    sets = [small(seed=i) for i in range(4)]
    wanted = [torch.autograd.grad(loss(*x.values()), list(x.values())) for x in sets]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(25):
                found = torch.autograd.grad(loss(*sets[i].values()), list(sets[i].values()))
                torch.cuda.current_stream().synchronize()
                # dQ is summed in no fixed order.
                if (
                    not torch.equal(found[1], wanted[i][1])
                    or far(found[0], numpy(wanted[i][0])) > 1e-2
                ):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_hopper
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cuda_graph_capture_and_replay(dropout):
    given = [x.detach().requires_grad_() for x in small().values()]
    d_out = torch.randn_like(given[0])

    def step():
        out = torch_bridge.attention(*given, dropout_p=dropout, **CALL)
        return (out, *torch.autograd.grad(out, given, d_out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    seen = []
    for seed in (1, 2):
        with torch.no_grad():
            for x in given:
                x.copy_(torch.randn_like(x))
        before = torch.cuda.get_rng_state()
        graph.replay()
        replayed = [x.clone() for x in results]
        if not dropout:
            for found, wanted in zip(replayed, step(), strict=True):
                assert far(found, numpy(wanted)) < 1e-2, seed
        else:
            graph.replay()
            assert not torch.equal(results[0], replayed[0])  # the key moved on
            assert not torch.equal(before, torch.cuda.get_rng_state())
            # Forward and backward of a replay drop the same: dV says what the forward kept.
            d_v, out = replayed[3].float(), replayed[0].float()
            inner = (out * d_out.float()).sum()
            apart = (d_v * given[2].float()).sum() - inner
            assert apart.abs() < 0.05 * (out * d_out.float()).norm()
        seen.append(replayed[0])
    assert not torch.equal(*seen)


@needs_hopper
def test_capture_of_shapes_that_never_ran_says_what_to_do():
    given = [x.detach() for x in small(t=104, s=104).values()]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run it once before"), torch.cuda.graph(graph):
        torch_bridge.attention(*given, **CALL)


@needs_hopper
def test_checkpoint_recomputes_the_same_dropout():
    given = list(small().values())
    torch.manual_seed(3)
    wanted = torch.autograd.grad(loss(*given, dropout_p=0.5), given)
    torch.manual_seed(3)
    value = checkpoint(lambda *x: loss(*x, dropout_p=0.5), *given, use_reentrant=False)
    found = torch.autograd.grad(value, given)
    assert torch.equal(found[2], wanted[2])
    assert far(found[0], numpy(wanted[0])) < 1e-2


@needs_hopper
def test_compile_and_autocast():
    given = [x.detach().float().requires_grad_() for x in small().values()]

    def layer(q, k, v):
        with torch.autocast("cuda", torch.bfloat16):
            return (torch_bridge.attention(q * 2, k, v, **CALL) * 0.5).float().square().sum()

    wanted = torch.autograd.grad(layer(*given), given)
    found = torch.autograd.grad(torch.compile(layer, fullgraph=True)(*given), given)
    for a, b in zip(found, wanted, strict=True):
        assert far(a, numpy(b)) < 1e-2


@needs_hopper
def test_a_thousand_calls_leave_nothing_behind():
    given = list(small().values())
    for _ in range(50):
        torch.autograd.grad(loss(*given), given)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        torch.autograd.grad(loss(*given), given)
    torch.cuda.synchronize()
    gc.collect()
    after = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 20_000  # KiB


@needs_hopper
def test_other_memory_than_the_kernels_want():
    """Views that are not contiguous or not aligned are copied; the result is the same."""
    q, k, v = (x.detach() for x in small().values())
    wanted = torch_bridge.attention(q, k, v, **CALL)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view_as(q).copy_(q)
    assert shifted.data_ptr() % 16
    assert torch.equal(torch_bridge.attention(shifted, k, v, **CALL), wanted)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = torch_bridge.attention(*heads_first, layout="bhsd", **CALL)
    assert torch.equal(out.transpose(1, 2), wanted)
    one = torch.randn(64, device="cuda", dtype=q.dtype).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    torch.testing.assert_close(torch_bridge.attention(one, one, one, **CALL), one)


@needs_hopper
def test_a_thread_whose_first_call_of_cuda_this_is():
    given = [x.detach() for x in small().values()]
    wanted = torch_bridge.attention(*given, **CALL)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(torch_bridge.attention(*given, **CALL)), daemon=True
    )
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


@pytest.mark.multigpu
@needs_hopper
@pytest.mark.parametrize("backend", [None, "blockwise"])
def test_a_device_that_is_not_the_current_one(backend):
    """Launched directly and through JAX, which leaves the GPU behind that it used last."""
    torch.cuda.set_device(0)
    q, k, v = small(device="cuda:0").values()
    wanted = torch.autograd.grad(loss(q, k, v, backend=backend), v)[0]
    other = [x.detach().to("cuda:1").requires_grad_() for x in (q, k, v)]
    (found,) = torch.autograd.grad(loss(*other, backend=backend), other[2])
    assert found.device.index == 1 and torch.cuda.current_device() == 0
    assert far(found.cpu(), numpy(wanted)) < 1e-2
    with pytest.raises(ValueError, match="k is on cuda:1, q on cuda:0"):
        loss(q, other[1], v, backend=backend)


@pytest.mark.multigpu
@needs_hopper
def test_both_gpus_at_once():
    """A thread a device, both between calls of the main one, through the direct path and JAX by turns."""
    torch.cuda.set_device(0)
    sets = {i: [x.detach().to(f"cuda:{i}") for x in small().values()] for i in (0, 1)}
    wanted = numpy(torch_bridge.attention(*sets[0], **CALL))
    wrong = []

    def work(device, count):
        for i in range(count):
            name = "blockwise" if i % 2 else None
            out = torch_bridge.attention(*sets[device], backend=name, **CALL)
            if out.device.index != device or far(out, wanted) > TOLERANCE:
                wrong.append((device, i))

    threads = [threading.Thread(target=work, args=(i, 30)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        work(0, 2)
        work(1, 2)
    for thread in threads:
        thread.join()
    assert not wrong and torch.cuda.current_device() == 0


def test_gemma_2_as_transformers_runs_it():
    from tests.test_torch_huggingface import compare_to_eager

    compare_to_eager("cuda", torch.bfloat16, head_dim=64, num_hidden_layers=2)


@pytest.mark.parametrize("padding", ["no padding", "left"])
def test_gemma_2_generates_with_a_cache(padding):
    """Each step's logits: no further from float32 than twice what eager attention is in bfloat16."""
    from tests import test_torch_huggingface as gemma

    ids, mask, new = gemma.tokens("cuda"), gemma.MASKS[padding], 12
    mask = torch.ones_like(ids) if mask is None else mask.cuda()
    options = {
        "attention_mask": mask,
        "min_new_tokens": new,
        "max_new_tokens": new,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    size = {"head_dim": 64, "num_hidden_layers": 2}
    exact = gemma.model("eager", "cuda", **size).generate(ids, **options)

    def distances(name):
        """Up to the first token that differs, which all that follows depends on."""
        found = gemma.model(name, "cuda", torch.bfloat16, **size).generate(ids, **options)
        same = (found.sequences == exact.sequences)[:, ids.shape[1] :].cumprod(1)
        counted = [torch.ones_like(same[:, 0]), *same.unbind(1)[:-1]]
        rows = zip(found.logits, exact.logits, counted, strict=True)
        return [far(a[n > 0].float(), numpy(b[n > 0])) for a, b, n in rows if n.any()]

    eager, ours = distances("eager"), distances("jaxcap")
    assert len(ours) >= 0.5 * len(eager) and np.mean(ours) <= 2 * np.mean(eager)


def test_the_two_paths_agree():
    """The same plan through the operator and eagerly."""
    given = [x.detach() for x in small().values()]
    out, lse = torch_bridge.attention(*given, return_lse=True, **CALL)
    tensors = functional.Tensors(*given)
    settings = functional.Settings(5.0, True, return_lse=True)
    again, lse_again = torch.ops.jaxcap.attention(
        *functional.operator.spread(tensors, settings, ())
    )
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    assert not autograd.wanted(tensors)
