"""`torch_bridge.attention` on a CPU: values, gradients, conventions, autograd, dropout, errors."""

import gc
import subprocess
import sys
import weakref

import jax
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import jaxcap
from examples.torch import one_page
from jaxcap import torch_bridge
from jaxcap.torch_bridge import autograd, call, through_jax
from tests import oracle
from tests.torch_reference import check, expected, far, inputs, normal, numpy

TIGHT = 1e-11


@pytest.mark.parametrize(
    "keywords",
    [
        {"softcap": 2.0},
        {"causal": True, "scale": 0.7},
        {"softcap": 2.0, "window_size": (5, 3)},
        {"softcap": 2.0, "causal": True, "window_size": (6, -1)},
        {"softcap": 2.0, "window_size": (-1, 2), "deterministic": True},
        {"softcap": 2.0, "causal": True, "backend": "xla"},
    ],
    ids=lambda keywords: "-".join(keywords),
)
def test_values_and_gradients(keywords):
    check(inputs(), TIGHT, with_lse="causal" in keywords, **keywords)


def test_more_queries_than_keys_leave_empty_rows():
    given = inputs(t=30, s=11)
    check(given, TIGHT, softcap=2.0, causal=True)
    out, lse = torch_bridge.attention(**given, softcap=2.0, causal=True, return_lse=True)
    assert bool((out[:, :19] == 0).all()) and bool(torch.isinf(lse[..., :19]).all())


def test_bias_sinks_alibi_segments():
    ids = torch.arange(21).repeat(2, 1) // 8, torch.arange(37).repeat(2, 1) // 13
    given = inputs() | {"bias": normal(4, 1, 37), "sinks": normal(4)}
    slopes = normal(2, 4, grad=False).abs()
    check(given, TIGHT, softcap=2.0, causal=True, alibi_slopes=slopes.float().double())
    check(given, TIGHT, softcap=2.0, segment_ids=ids)
    same = inputs(s=21) | {"bias": normal(2, 4, 21, 21)}
    check(same, TIGHT, softcap=2.0, segment_ids=ids[0].to(torch.int64))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_precisions(dtype, tolerance):
    given = inputs(dtype=dtype)
    check(given, tolerance, softcap=2.0, causal=True)
    out, lse = torch_bridge.attention(**given, softcap=2.0, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_the_cap_reaches_the_result():
    given = inputs()
    with_cap = torch_bridge.attention(**given, softcap=2.0)
    assert far(with_cap, expected(given).out) > 0.05


def test_layout_bhsd_is_a_transposition():
    q, k, v = inputs().values()
    out, lse = torch_bridge.attention(q, k, v, softcap=2.0, causal=True, return_lse=True)
    other, other_lse = torch_bridge.attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softcap=2.0,
        causal=True,
        return_lse=True,
        layout="bhsd",
    )
    torch.testing.assert_close(other.transpose(1, 2), out)
    torch.testing.assert_close(other_lse, lse)


def test_inputs_need_not_be_contiguous():
    q, k, v = (x.detach() for x in inputs(s=21, k=4).values())
    packed = torch.stack([q, k, v], 3)  # [B, T, N, 3, H]
    wanted = torch_bridge.attention(q, k, v, softcap=2.0)
    torch.testing.assert_close(torch_bridge.attention(*packed.unbind(3), softcap=2.0), wanted)
    torch.testing.assert_close(
        torch_bridge.attention(q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], softcap=2.0),
        wanted[:1, :, :1],
    )
    expanded = k[:1].expand(2, -1, -1, -1)
    torch.testing.assert_close(
        torch_bridge.attention(q, expanded, v, softcap=2.0),
        torch_bridge.attention(q, expanded.contiguous(), v, softcap=2.0),
    )


def test_size_one_axes_with_odd_strides():
    x = torch.randn(1, 1, 1, 16).as_strided((1, 1, 1, 16), (3, 5, 7, 1))
    out = torch_bridge.attention(x, x, x, softcap=2.0)
    torch.testing.assert_close(out, x)


# ---- autograd -----------------------------------------------------------------------------------
def loss(q, k, v, **keywords):
    return torch_bridge.attention(q, k, v, softcap=2.0, causal=True, **keywords).square().sum()


def test_no_grad_and_partial_gradients():
    q, k, v = inputs().values()
    with torch.no_grad():
        assert not torch_bridge.attention(q, k, v, softcap=2.0).requires_grad
    with torch.inference_mode():
        assert torch_bridge.attention(q, k, v, softcap=2.0).is_inference()
    whole = torch.autograd.grad(loss(q, k, v), (q, k, v))
    (only,) = torch.autograd.grad(loss(q.detach(), k, v.detach()), (k,))
    torch.testing.assert_close(only, whole[1])


def test_the_log_sum_exp_alone_has_gradients():
    given = inputs()
    out, lse = torch_bridge.attention(**given, softcap=2.0, causal=True, return_lse=True)
    q, k, v = given.values()
    found = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    zero, one = np.zeros(out.shape), np.ones((2, 21, 4))
    wanted = expected(given, softcap=2.0, causal=True).backward(zero, one)
    assert far(found[0], wanted.query) < TIGHT and far(found[1], wanted.key) < TIGHT


def test_used_twice_and_backward_twice():
    q, k, v = inputs().values()
    (one,) = torch.autograd.grad(loss(q, k, v), q)
    value = loss(q, k, v) + loss(q, k, v)
    (first,) = torch.autograd.grad(value, q, retain_graph=True)
    (again,) = torch.autograd.grad(value, q)
    torch.testing.assert_close(first, 2 * one)
    torch.testing.assert_close(again, first)


def test_a_second_derivative_is_an_error_that_says_so():
    q, k, v = inputs().values()
    (dq,) = torch.autograd.grad(loss(q, k, v), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        dq.sum().backward()


def test_changing_a_saved_input_is_noticed():
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs().values())
    value = loss(q * 1, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_the_same_dropout(reentrant):
    q, k, v = inputs().values()

    def layer(q, k, v):
        return loss(q, k, v, dropout_p=0.4)

    torch.manual_seed(3)
    plain = torch.autograd.grad(layer(q, k, v), (q, k, v))
    torch.manual_seed(3)
    value = checkpoint(layer, q, k, v, use_reentrant=reentrant)
    value.backward()
    for x, wanted in zip((q, k, v), plain, strict=True):
        torch.testing.assert_close(x.grad, wanted)


def test_a_generator_of_its_own_inside_a_checkpoint_is_refused():
    q, k, v = inputs().values()
    own = torch.Generator().manual_seed(1)
    value = checkpoint(
        lambda *x: loss(*x, dropout_p=0.4, generator=own), q, k, v, use_reentrant=False
    )
    with pytest.raises(RuntimeError, match="generator of its own"):
        value.backward()


def test_autocast():
    q, k, v = inputs(dtype=torch.float32).values()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch_bridge.attention(q, k, v, softcap=2.0)
        ours = torch_bridge.attention(*(x.bfloat16() for x in (q, k, v)), softcap=2.0)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, ours)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


# ---- dropout ------------------------------------------------------------------------------------
def key_from(state: torch.Tensor) -> torch.Tensor:
    """What the call draws from a generator in this state."""
    generator = torch.Generator()
    generator.set_state(state)
    return torch.randint(-(2**31), 2**31, (1, 2), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("own", [True, False])
def test_dropout_drops_what_the_definition_says_and_moves_the_generator(own):
    generator = torch.Generator().manual_seed(5) if own else torch.default_generator
    given = inputs()
    results = []
    for _ in range(2):
        key = key_from(generator.get_state())
        out = torch_bridge.attention(
            **given, softcap=2.0, dropout_p=0.3, generator=generator if own else None
        )
        wanted = expected(
            given, softcap=2.0, dropout_p=0.3, dropout_key=key[0].to(torch.int64) % 2**32
        )
        assert far(out, wanted.out) < TIGHT
        d_out = normal(*out.shape, grad=False)
        grads = torch.autograd.grad(out, list(given.values()), d_out)
        for grad, name in zip(grads, ("query", "key", "value"), strict=True):
            assert far(grad, getattr(wanted.backward(numpy(d_out)), name)) < TIGHT
        results.append(out.detach())
    assert not torch.equal(*results)


def test_without_dropout_the_generator_stays():
    before = torch.get_rng_state()
    torch_bridge.attention(*inputs().values(), softcap=2.0)
    assert torch.equal(before, torch.get_rng_state())


# ---- packed sequences, module -------------------------------------------------------------------
@pytest.mark.parametrize("cross", [True, False])
def test_varlen(cross):
    bounds_q, bounds_k = torch.tensor([0, 5, 5, 17]), torch.tensor([0, 9, 11, 25])
    if not cross:
        bounds_k = bounds_q
    given = inputs(b=1, t=20, s=27 if cross else 20)
    q, k, v = (x[0] for x in given.values())
    settings = {"softcap": 2.0, "causal": True, "window_size": (4, -1)}
    out, lse = torch_bridge.varlen_attention(
        q, k, v, bounds_q, bounds_k if cross else None, **settings, return_lse=True
    )
    assert out.shape == q.shape and lse.shape == (4, 20)
    wanted = torch.zeros_like(out)
    for i in range(3):
        a, b, c, d = *bounds_q[i : i + 2].tolist(), *bounds_k[i : i + 2].tolist()
        if b > a:
            one = torch_bridge.attention(q[None, a:b], k[None, c:d], v[None, c:d], **settings)
            wanted[a:b] = one[0].detach()
    torch.testing.assert_close(out.detach(), wanted, rtol=1e-9, atol=1e-11)
    assert bool((out[17:] == 0).all()) and bool(torch.isinf(lse[:, 17:]).all())
    (grad,) = torch.autograd.grad(out.sum(), given["v"])
    assert bool((grad[0, bounds_k[-1] :] == 0).all()) and bool((grad[0] != 0).any())


def test_module():
    q, k, v = inputs(s=21).values()
    module = torch_bridge.DotProductAttention(softcap=2.0, causal=True, dropout_p=0.5)
    assert "softcap=2.0" in repr(module)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    wanted = torch_bridge.attention(q, k, v, softcap=2.0, causal=True)
    torch.testing.assert_close(module(q, k, v), wanted)
    wanted = torch_bridge.attention(q, k, v, causal=True)
    torch.testing.assert_close(module(q, k, v, softcap=0.0), wanted)


# ---- choosing a backend -------------------------------------------------------------------------
def test_a_named_backend_runs_or_raises():
    q, k, v = inputs().values()
    with pytest.raises(jaxcap.BackendError, match="'pallas'.*sm90"):
        torch_bridge.attention(q, k, v, softcap=2.0, backend="pallas")
    with jaxcap.use_backend("cudnn"), pytest.raises(jaxcap.BackendError, match="cudnn"):
        torch_bridge.attention(q, k, v, softcap=2.0)
    with pytest.raises(ValueError, match="no backend 'nonsense'"):
        torch_bridge.attention(q, k, v, backend="nonsense")


def test_use_deterministic_algorithms_is_a_request(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    seen = []
    spec_of = call.spec_of
    monkeypatch.setattr(
        "jaxcap.torch_bridge.plans.spec_of", lambda *a: seen.append(spec_of(*a)) or seen[-1]
    )
    torch_bridge.attention(*inputs(t=13).values(), softcap=2.125)
    assert seen[0].deterministic


# ---- errors -------------------------------------------------------------------------------------
Q, K, V = inputs().values()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": numpy(Q)}, "q must be a torch.Tensor, got ndarray"),
        ({"q": Q[0]}, r"q must be \[batch, length, heads, size\]"),
        ({"q": Q.int()}, "q must be bfloat16"),
        ({"k": K.float()}, "k has dtype torch.float32, q torch.float64"),
        ({"k": K[..., :8]}, r"k must be \[2, S, K, 16\]"),
        ({"v": V[:, :9]}, r"v must be \[2, 37, 2, V\]"),
        ({"q": Q[:, :, :3]}, "3 heads must be a multiple of the 2"),
        ({"q": Q[:, :0]}, "no axis of length 0"),
        ({"k": K.to("meta")}, "k is on meta, q on cpu"),
        ({"softcap": -1.0}, "softcap must not be negative"),
        ({"softcap": float("nan")}, "softcap must be finite"),
        ({"softcap": torch.tensor(50.0)}, "softcap must be a Python number"),
        ({"scale": "big"}, "scale must be a number"),
        ({"causal": 1}, "causal must be True or False"),
        ({"window_size": 5}, "window_size must have two sides"),
        ({"window_size": (-2, 0)}, "window_size must not be below -1"),
        ({"window_size": (None, 0)}, "window_size must be of ints"),
        ({"bias": torch.zeros(3, 21, 37)}, "bias must broadcast to"),
        ({"bias": torch.zeros(21, 37, dtype=torch.bool)}, "bias must be a floating tensor"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must be"),
        ({"sinks": torch.ones(2, 4)}, "sinks must be"),
        ({"segment_ids": torch.zeros(2, 21)}, "must be a pair"),
        ({"segment_ids": (torch.zeros(2, 21), torch.zeros(2, 37))}, "tensor of integers"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"layout": "sbhd"}, "layout must be"),
        ({"deterministic": None}, "deterministic must be True or False"),
    ],
)
def test_bad_input_names_the_argument(change, message):
    given = {"q": Q, "k": K, "v": V} | change
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=message):
            torch_bridge.attention(**given)


def test_bad_packed_input():
    q, k, v = (x[0] for x in (Q, K, V))
    with pytest.raises(ValueError, match=r"q must be \[total, heads, size\]"):
        torch_bridge.varlen_attention(Q, K, V, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="cu_seqlens_q must be"):
        torch_bridge.varlen_attention(q, k, v, torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match="cu_seqlens_k must be as long"):
        torch_bridge.varlen_attention(q, k, v, torch.tensor([0, 3]), torch.tensor([0, 3, 4]))


def test_a_gpu_that_jax_has_no_runtime_for_is_an_error_that_says_what_to_install():
    if torch.cuda.is_available():
        pytest.skip("JAX may have one here")
    with pytest.raises(RuntimeError, match=r"JAX has no CUDA device.*install jax\[cuda13\]"):
        through_jax.ThroughJax(lambda x: [x], torch.device("cuda", 0), False)


# ---- memory -------------------------------------------------------------------------------------
def test_results_are_handed_over_without_a_copy_and_given_back():
    """A result lives in JAX's memory; with its last view JAX gets it back."""
    x = jax.numpy.ones(1000)
    address = x.unsafe_buffer_pointer()
    tensor = through_jax.to_torch(x)
    assert tensor.data_ptr() == address

    q, k, v = (x.detach() for x in inputs().values())
    torch_bridge.attention(q, k, v, softcap=2.0)
    gc.collect()
    out = torch_bridge.attention(q, k, v, softcap=2.0)
    storage = weakref.ref(out.untyped_storage())
    del out
    assert storage() is None


def test_explain_decides_as_the_call_does(caplog):
    q, k = torch.randn(1, 3, 11, 8, requires_grad=True), torch.randn(1, 1, 13, 8)
    given: dict = {"softcap": 2.0, "causal": True, "window_size": (5, -1), "layout": "bhsd"}
    given |= {
        "sinks": torch.zeros(3),
        "segment_ids": (torch.ones(1, 11).int(), torch.ones(13).int()),
    }
    for backend in (None, "xla"):
        found = torch_bridge.explain(q, k, k, **given, backend=backend)
        caplog.clear()
        with caplog.at_level("INFO", "jaxcap"):
            torch_bridge.attention(q, k, k, **given, backend=backend).sum().backward()
        name, spec = found.forward.backend, found.spec
        assert name == (backend or "blockwise") == found.training.backend
        assert (spec.query_length, spec.kv_heads, spec.window) == (11, 1, (5, None))
        assert spec.sinks and spec.segment_ids and spec.causal_alignment == "bottom_right"
        assert found.training.spec.gradients == ("query", "key", "value", "sinks")
        assert [r.getMessage() for r in caplog.records] == [
            f"{name} runs the {kind}: q [1, 11, 3, 8], kv [13, 1, 8], float32, softcap 2, on cpu,"
            f" through JAX (the backend is {name})"
            for kind in ("forward", "backward")
        ]
    assert "softcap 2, on cpu\nforward: xla\n" in str(found)


def test_explain_of_another_device_and_of_a_wrong_call():
    q = torch.empty(1, 8192, 16, 128, device="meta", dtype=torch.bfloat16)
    found = torch_bridge.explain(q, q, q, softcap=50.0, platform="sm90", gradients=("query",))
    assert found.training.backend == "pallas"
    assert found.training.spec.gradients == ("query",)
    with pytest.raises(ValueError, match="q is on meta"):
        torch_bridge.explain(q, q, q, softcap=50.0)
    with pytest.raises(ValueError, match="softcap must not be negative"):
        torch_bridge.explain(q, q, q, softcap=-1.0)
    with pytest.raises(TypeError, match="softmax_scale"):
        torch_bridge.explain(q, q, q, softmax_scale=1.0)


def test_the_one_page_example_learns():
    assert one_page.train(15) < 3.2


def test_importing_the_package_leaves_pytorch_alone():
    code = (
        "import sys, jaxcap.torch_bridge as b; assert 'torch' not in sys.modules;"
        "assert 'attention' in dir(b); b.attention; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    with pytest.raises(AttributeError, match="nonsense"):
        torch_bridge.nonsense  # noqa: B018


def test_the_oracles_words_are_the_library_s():
    """The key reaches Philox as two unsigned words."""
    kept = oracle.survivors(0.5, np.array([1, 2**31 + 5]), *(np.arange(n) for n in (1, 2, 9, 17)))
    key = torch.tensor([[1, 5 - 2**31]], dtype=torch.int32)
    tensors = call.Tensors(
        torch.zeros(1, 9, 2, 17),
        torch.zeros(1, 17, 2, 17),
        torch.eye(17)[None, :, None].repeat(1, 1, 2, 1),
    )._replace(dropout_key=key)
    settings = call.Settings(dropout_p=0.5)
    out, _ = autograd.attend(settings, tensors)
    assert np.array_equal(numpy(out)[0].swapaxes(0, 1) > 0, kept[0])
