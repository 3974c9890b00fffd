"""A keyword that there is not: the error names the one that is meant, and signatures stay as they are."""

import dataclasses
import inspect
import pickle

import jax.numpy as jnp
import pytest
import torch
from flax import nnx as flax_nnx

import jaxcap
from jaxcap import linen, nnx, sharding, torch_bridge
from jaxcap.keywords import hinted

X = jnp.ones((1, 4, 2, 8))
JAX = (jaxcap.dot_product_attention, X, X, X)
VARLEN = (jaxcap.varlen_attention, X[0], X[0], X[0], [0, 4])
T = torch.ones(1, 4, 2, 8)
TORCH = (torch_bridge.attention, T, T, T)
TORCH_VARLEN = (torch_bridge.varlen_attention, T[0], T[0], T[0], torch.tensor([0, 4]))
CAPS = (
    "soft_cap",
    "logits_soft_cap",
    "attn_logits_soft_cap",
    "logit_cap",
    "attn_logit_softcapping",
)
CASES = [
    *((call, name, "here that is softcap") for call in (JAX, TORCH) for name in CAPS),
    *((call, "sm_scale", "here that is scale") for call in (JAX, TORCH)),
    (JAX, "softmax_scale", "here that is scale"),
    (JAX, "causal", "here that is is_causal (from the top left"),
    (JAX, "sliding_window", "here that is local_window_size ((left, right), None unbounded;"),
    (JAX, "attn_mask", "here that is mask (boolean, True takes part) or bias (floating"),
    (JAX, "dropout_p", "here that is dropout_rate"),
    (JAX, "segment_ids", "here that is query_segment_ids and key_value_segment_ids"),
    (JAX, "is_casual", "did you mean is_causal (from the top left"),
    (JAX, "max_seqlen_q", "it is not needed, leave it out"),
    (JAX, "zzz", ""),
    (VARLEN, "causal", "here that is is_causal"),
    ((jaxcap.explain, X, X, X), "causal", "here that is is_causal"),
    (TORCH, "is_causal", "here that is causal (from the bottom right)"),
    (TORCH, "local_window_size", "here that is window_size ((left, right), -1 unbounded;"),
    (TORCH, "mask", "here that is bias (floating, added to the logits)"),
    (TORCH, "query_segment_ids", "here that is segment_ids"),
    (TORCH, "return_residual", "here that is return_lse"),
    (TORCH_VARLEN, "max_seqlen_k", "it is not needed, leave it out"),
    (TORCH, "enable_gqa", "it is not needed, leave it out"),
    *(
        ((flax.TransformerLayer,), "num_kv_heads", "here that is num_gqa_groups")
        for flax in (nnx, linen)
    ),
    *(
        ((flax.TransformerLayer,), "is_causal", "here that is self_attn_mask_type")
        for flax in (nnx, linen)
    ),
    *(
        ((flax.MultiHeadAttention,), "num_gqa_groups", "here that is num_kv_heads")
        for flax in (nnx, linen)
    ),
    ((torch_bridge.explain, T, T, T), "implementation", "here that is backend"),
    ((torch_bridge.DotProductAttention,), "is_causal", "here that is causal"),
    ((jaxcap.attention_fn,), "logit_cap", "here that is softcap"),
    ((jaxcap.ContextParallel,), "axis_name", "here that is axis"),
    *(
        ((make,), "logits_soft_cap", "here that is softcap")
        for flax in (nnx, linen)
        for make in (flax.DotProductAttention, flax.MultiHeadAttention, flax.TransformerLayer)
    ),
    ((nnx.MultiHeadAttention,), "kernel_initializer", "did you mean kernel_init"),  # Flax's own
]


@pytest.mark.parametrize(
    ("call", "name", "said"),
    CASES,
    ids=[f"{i}-{name}" for i, (_, name, _) in enumerate(CASES)],
)
def test_the_keyword_that_is_meant(call, name, said):
    function, *given = call
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument {name!r}") as caught:
        function(*given, **{name: 1})
    assert str(caught.value).partition(f"{name!r}")[2].removeprefix(": ").startswith(said)
    assert said or str(caught.value).endswith("'zzz'")


def linen_call(**keywords):
    return linen.DotProductAttention().apply({}, X, X, X, **keywords)


@pytest.mark.parametrize("call", [lambda **k: nnx.DotProductAttention()(X, X, X, **k), linen_call])
def test_a_modules_call(call):
    """Of what is known it tells whether the call or the constructor takes it."""
    for name, said in (
        ("logit_cap", r"here that is softcap(\n|$)"),
        ("scale", r"here that is scale \(given when the object is made\)"),
        ("window_size", r"here that is local_window_size .*; given when the object is made\)"),
        ("query_seq_length", r"did you mean query_seq_lengths\?"),
    ):
        with pytest.raises(TypeError, match=f"__call__.* argument {name!r}: {said}"):
            call(**{name: 1})
    call(key_value_seq_lengths=jnp.array([3]))


def test_a_torch_modules_call_and_a_shards():
    with pytest.raises(TypeError, match="takes no is_causal, .*: here that is causal"):
        torch_bridge.DotProductAttention()(T, T, T, is_causal=True)
    with pytest.raises(TypeError, match="'soft_cap': here that is softcap"):
        sharding.ring_attention(X, X, X, axis_name="context", soft_cap=3.0)


def test_nothing_else_changes():
    def plain(a: int, *, b: float = 2.0) -> float:
        """Adds."""
        return a + b

    @dataclasses.dataclass(frozen=True)
    class Plain:
        """Fields."""

        a: int = 1

    told, made = hinted(plain), inspect.signature(Plain)
    assert told(1, b=3.0) == 4.0 and told(a=1) == 3.0
    for name in ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__"):
        assert getattr(told, name) == getattr(plain, name)
    assert inspect.signature(told) == inspect.signature(plain)
    assert hinted(Plain) is Plain and inspect.signature(Plain) == made and Plain(a=2).a == 2
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        told()
    assert list(inspect.signature(jaxcap.dot_product_attention).parameters)[5] == "softcap"
    public = (jaxcap.dot_product_attention, jaxcap.attention_fn, torch_bridge.attention)
    for function in public:
        assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.signature(nnx.DotProductAttention) == inspect.signature(flax_nnx.Linear)
