"""What callers hand over now and then: wide ids, lazy views, autocast, other number types, odd tensors."""

import sys
import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

import jaxcap
from jaxcap import torch_bridge
from jaxcap.torch_bridge import call, checks, varlen
from tests.torch_reference import inputs

Q, K, V = (x.detach() for x in inputs(t=8, s=8).values())
WIDE = 2**32


def attend(*given, **keywords):
    return torch_bridge.attention(*(given or (Q, K, V)), **{"softcap": 2.0} | keywords)


def test_ids_that_differ_beyond_32_bits_are_apart():
    few = torch.tensor([0, 0, 0, 1, 1, 2, 2, 0])
    wide = torch.tensor([5, 5 + WIDE, 5 - WIDE])[few]
    wanted = attend(segment_ids=few.int())
    assert torch.equal(attend(segment_ids=wide), wanted)
    pair = wide.repeat(2, 1), wide.clone()
    assert torch.equal(attend(segment_ids=pair), wanted)


def test_narrow_keeps_equality_and_order():
    q = torch.tensor([[WIDE, 0, -1]])
    k = torch.tensor([[0, WIDE], [-7, WIDE]])
    ranks = [x.tolist() for x in checks.narrow(q, k)]
    assert ranks == [[[2, 1, 0], [3, 2, 1]], [[1, 2], [0, 3]]]


def test_bounds_that_are_not_read_are_moved_to_the_tokens_end(monkeypatch):
    """Where causality ends within a sequence depends on how many keys it has."""
    monkeypatch.setattr(varlen, "eager", lambda x: False)  # as if they were on a GPU
    q, k, v = Q[0], K[0], V[0]
    bounds = torch.tensor([0, 3, 8])
    wanted = torch_bridge.varlen_attention(q, k, v, bounds, bounds, softcap=2.0, causal=True)
    for wide in ([-1 - WIDE, 3, WIDE + 4], [-2, 3, 9]):
        for pair in ((bounds, torch.tensor(wide)), (torch.tensor(wide), bounds)):
            found = torch_bridge.varlen_attention(q, k, v, *pair, softcap=2.0, causal=True)
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([0, 5, 3, 8], "must not decrease, got 5 and then 3"),
        ([0, WIDE, 8], f"must not decrease, got {WIDE} and then 8"),
        ([0, 9], "must lie within the 8 tokens, got 0 to 9"),
        ([-1, 8], "must lie within the 8 tokens, got -1 to 8"),
    ],
)
def test_bounds_on_a_cpu_are_checked(bad, match):
    bad, good = torch.tensor(bad), torch.arange(len(bad))
    for name, pair in (("q", (bad,)), ("q", (bad, good)), ("k", (good, bad))):
        with pytest.raises(ValueError, match=f"cu_seqlens_{name} {match}"):
            torch_bridge.varlen_attention(Q[0], K[0], V[0], *pair)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_jax_side_refuses_tensors(place, dtype):
    arrays = [jnp.ones((1, 8, 2, 64)) for _ in range(3)]
    arrays[place] = torch.ones(1, 8, 2, 64, dtype=dtype)
    name = ("query", "key", "value")[place]
    with pytest.raises(
        TypeError, match=f"{name} is a PyTorch tensor; jaxcap.torch_bridge.attention"
    ):
        jaxcap.dot_product_attention(*arrays)
    arrays = [x[0] for x in arrays]
    with pytest.raises(TypeError, match=f"{name} is a PyTorch tensor; .*varlen_attention"):
        jaxcap.varlen_attention(*arrays, np.array([0, 8]))


def test_a_module_that_plays_pytorchs_part_has_no_tensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    x = jnp.ones((1, 8, 2, 64))
    assert jaxcap.dot_product_attention(x, x, x).shape == x.shape


def test_explain_of_the_other_librarys_arrays_names_the_other_explain():
    with pytest.raises(TypeError, match="key is a PyTorch tensor; jaxcap.torch_bridge.explain"):
        jaxcap.explain(np.ones(Q.shape, "float32"), torch.nn.Parameter(K), V)
    meta = [x.to("meta") for x in (Q, K, V)]
    with pytest.raises(ValueError, match="q is on meta.*for explain.*platform='sm90'"):
        torch_bridge.explain(*meta)
    assert torch_bridge.explain(*meta, platform="cpu").forward.backend == "blockwise"


def test_heads_and_length_that_have_changed_places():
    q, k = torch.zeros(1, 4, 1024, 8), torch.zeros(1, 2, 1024, 8)
    with pytest.warns(UserWarning, match="q is taken for 1024 heads of length 4.*layout='bhsd'"):
        checks.check_inputs(q, k, k, "bshd")
    checks.check_inputs(q, k, k, "bhsd")


def test_a_negated_view_is_its_values():
    lazy = torch._neg_view(Q)
    assert lazy.is_neg()
    torch.testing.assert_close(attend(lazy, K, V), attend(-Q, K, V))
    torch.testing.assert_close(
        attend(lazy, K, V, sinks=torch.zeros(4)), attend(-Q, K, V, sinks=torch.zeros(4))
    )


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": [3, 0]},
        {"window_size": (np.int64(3), np.int32(0))},
        {"softcap": np.float32(2.0)},
        {"softcap": 2},
        {"scale": np.float64(0.5)},
        {"causal": np.True_},
    ],
)
def test_other_types_of_the_same_numbers(change):
    given = {"softcap": 2.0, "causal": True, "scale": 0.5, "window_size": (3, 0)}
    torch.testing.assert_close(attend(**given | change), attend(**given), rtol=0, atol=0)


def test_what_ran_before_does_not_change_what_is_accepted():
    attend(softcap=1.0, causal=True)
    attend(window_size=(1, 0))
    for change in ({"softcap": True}, {"causal": 1}, {"window_size": (True, 0)}, {"scale": True}):
        with pytest.raises(TypeError, match=next(iter(change))):
            attend(**{"softcap": 1.0, "causal": True} | change)


def test_autocast_joins_precisions_before_they_are_compared():
    q, k, v = Q.float(), K.bfloat16(), V.float()
    extra = {"bias": torch.zeros(8, 8)}
    with torch.autocast("cpu", torch.bfloat16):
        plain = attend(q, k, v)
        torch.testing.assert_close(attend(q, k, v, **extra), plain, rtol=2e-2, atol=2e-2)
        assert attend(q, k, v, dropout_p=0.5).dtype == torch.bfloat16
        packed = torch_bridge.varlen_attention(q[0], k[0], v[0], torch.tensor([0, 8]), softcap=2.0)
        torch.testing.assert_close(packed, plain[0], rtol=2e-2, atol=2e-2)
        with pytest.raises(TypeError, match="q must be bfloat16"):
            attend(q.int(), k, v)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 16), torch.zeros(5, 4, 16)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")}, "q is on meta"),
        ({"q": Q.to_sparse()}, "q must be a dense tensor"),
        ({"q": NESTED, "k": NESTED, "v": NESTED}, "q is a nested tensor"),
        ({"bias": torch.zeros(8, 8).to_sparse()}, "bias must be a dense tensor"),
        ({"sinks": torch.zeros(4).to_sparse()}, "sinks must be a dense tensor"),
        ({"dropout_p": torch.tensor([0.1, 0.2])}, "dropout_p must be a Python number"),
        ({"generator": 3}, "generator must be a torch.Generator"),
        ({"layout": ["bshd"]}, "layout must be 'bshd' or 'bhsd'"),
        ({"backend": "foo"}, "backend: no backend 'foo'"),
        ({"backend": ["xla"]}, "backend: no backend"),
        ({"softcap": np.ones(2)}, "softcap must be a number"),
    ],
)
def test_odd_input_names_the_argument(change, message):
    given = {"q": Q, "k": K, "v": V, "softcap": 2.0} | change
    attend()
    for autocast in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            pytest.raises((ValueError, TypeError), match=message),
        ):
            torch_bridge.attention(**given)


def test_a_module_checks_its_settings_when_it_is_made():
    make = torch_bridge.DotProductAttention
    with pytest.raises(ValueError, match="softcap must not be negative"):
        make(softcap=-5.0)
    with pytest.raises(ValueError, match="layout must be"):
        make(layout="x")
    with pytest.raises(ValueError, match="backend: no backend 'foo'"):
        make(backend="foo")
    with pytest.raises(TypeError, match="takes no window_size"):
        make()(Q, K, V, window_size=(3, 0))


def test_bounds_need_not_begin_with_0_and_no_message_says_so():
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be \[sequences \+ 1\] integers, got"):
        torch_bridge.varlen_attention(Q[0], K[0], V[0], torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match="cu_seqlens_q is on meta, q on cpu"):
        torch_bridge.varlen_attention(Q[0], K[0], V[0], torch.tensor([0, 3], device="meta"))


def test_settings_of_plain_values_are_kept_as_they_are():
    plain = (2.0, True, (3, 0), None, 0.0, False, False, None)
    assert call.settings_of(*plain) == call.Settings(*plain)
    assert list(map(type, call.settings_of(2, True, [3, 0], 1, 0, False, False, None)))[:5] == [
        *(float, bool, tuple, float, float)
    ]


def dual(function):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(Q, Q))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: torch.func.grad(lambda q: attend(q, K, V).sum())(Q),
            "no derivative by torch.func",
        ),
        (lambda: torch.func.jacrev(lambda q: attend(q, K, V))(Q), "no derivative by torch.func"),
        (lambda: dual(lambda q: attend(q, K, V)), "or forward mode"),
        (lambda: torch.jit.trace(attend, (Q, K, V)), "torch.jit.trace cannot record"),
        (
            lambda: jacobian(lambda q: attend(q, K[:1], V[:1]), Q[:1, :1], vectorize=True),
            "one gradient at a time",
        ),
    ],
)
def test_derivatives_and_recordings_that_would_be_wrong_are_errors(run, message):
    with pytest.raises(NotImplementedError, match=message):
        run()


def test_a_generator_of_another_device_is_an_error():
    with pytest.raises(ValueError, match=r"generator is of cpu, q on cuda:1; make it"):
        checks.generator(torch.Generator(), torch.device("cuda:1"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_reach_a_mapped_tensor():
    """Within `torch.func.vmap` a tensor denies that it requires a gradient; the keys say that they do."""
    q, k = torch.stack([Q, 2 * Q]).requires_grad_(), K.clone().requires_grad_()

    out = torch.func.vmap(lambda q: attend(q, k, V))(q)
    found = torch.autograd.grad(out.square().sum(), (q, k))
    wanted = torch.autograd.grad(torch.stack([attend(x, k, V) for x in q]).square().sum(), (q, k))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    slopes = torch.rand(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        torch.func.vmap(lambda x: attend(alibi_slopes=x))(slopes)


def test_nan_is_seen():
    """An attended NaN is one in the result, as those look for who scale losses or stop a run."""
    for at in range(3):
        given = [Q, K, V]
        given[at] = given[at].clone()
        given[at][0, 3] = torch.nan
        out, lse = attend(*given, return_lse=True)
        seen = torch.ones(8, dtype=torch.bool) if at else torch.arange(8) == 3
        assert torch.equal(out[0].isnan().all((1, 2)), seen) and not out[1].isnan().any()
        assert torch.equal(lse[0].isnan().all(0), seen & (at < 2))


def test_a_gradient_that_there_is_not_is_an_error():
    slopes = torch.rand(4, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient and has none"):
        attend(alibi_slopes=slopes)
    with torch.no_grad():
        attend(alibi_slopes=slopes)
