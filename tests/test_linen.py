"""The Linen modules: against Flax's, against NumPy, in decoding, and under Linen's transformations."""

import doctest
import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcap import linen as capped
from jaxcap import nnx as nnx_twin
from jaxcap.linen import attention as linen_attention
from jaxcap.linen import layer as linen_layer
from jaxcap.linen import multihead as linen_multihead
from tests import flax_reference as reference

CAP = 5.0
FEATURES, LENGTH = 16, 6
KEY = jax.random.key(0)
close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def inputs(*shape: int, seed: int = 0, scale: float = 4.0) -> jax.Array:
    """Large enough that logits reach the cap."""
    return scale * jax.random.normal(jax.random.key(seed), shape)


def multi_head(**options: Any) -> capped.MultiHeadAttention:
    return capped.MultiHeadAttention(**{"num_heads": 4, **options})


def layer(**options: Any) -> capped.TransformerLayer:
    sizes = {"hidden_size": FEATURES, "mlp_hidden_size": 8, "num_attention_heads": 4}
    return capped.TransformerLayer(**{**sizes, "softcap": CAP, "deterministic": True, **options})


def started(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(variables, their parameters in float64)."""
    variables = module.init(KEY, *args, **kwargs)
    return variables, reference.wide(variables["params"])


@pytest.mark.parametrize("module", [linen_attention, linen_multihead, linen_layer])
def test_examples_run(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# DotProductAttention


def test_dot_product_attention_is_the_function():
    q, k, v = (inputs(2, LENGTH, 4, 8, seed=i) for i in range(3))
    options: Any = {"scale": 0.5, "is_causal": True, "local_window_size": (3, 0)}
    attention = capped.DotProductAttention(softcap=CAP, **options)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    out, residual = attention.apply({}, q, k, v, return_residual=True)
    want = reference.oracle.Attention(*wide, softcap=CAP, **options)
    close(out, want.out)
    close(residual, want.lse)
    want = reference.oracle.Attention(*wide, **options)
    close(attention.apply({}, q, k, v, softcap=0.0), want.out)
    lengths = jnp.array([3, 5])
    want = reference.oracle.Attention(
        *wide, softcap=2.0, key_value_seq_lengths=np.asarray(lengths), **options
    )
    got = attention.apply({}, q, k, v, None, None, 2.0, key_value_seq_lengths=lengths)
    close(got, want.out)


def test_dropout_keys():
    q = inputs(2, LENGTH, 2, 8)
    attention = capped.DotProductAttention(softcap=CAP, dropout_rate=0.5)
    with pytest.raises(ValueError, match="dropout_rate=0.5 needs deterministic=True"):
        attention.apply({}, q, q, q)
    apply = functools.partial(attention.apply, {}, q, q, q)
    still = capped.DotProductAttention(softcap=CAP).apply({}, q, q, q)
    np.testing.assert_array_equal(apply(deterministic=True), still)
    first, again, other = (
        apply(deterministic=False, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    by_key = apply(deterministic=False, dropout_rng=jax.random.key(5))
    assert np.any(by_key != still)


# MultiHeadAttention


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize_qk": True, "qkv_features": 32, "out_features": 8}, {"use_bias": False}],
)
def test_without_a_cap_it_is_flax(options):
    x, y = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    ours, theirs = multi_head(**options), nn.MultiHeadDotProductAttention(4, **options)
    variables = theirs.init(KEY, x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(KEY, x), variables)
    mask = nn.make_causal_mask(jnp.ones((2, LENGTH)))
    close(ours.apply(variables, x), theirs.apply(variables, x))
    close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=mask))
    close(ours.apply(variables, x, y), theirs.apply(variables, x, y))
    close(ours.apply(variables, x, y, 2 * y), theirs.apply(variables, x, y, 2 * y))


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_multi_head_is_the_formula(softmax_type):
    x = inputs(2, LENGTH, FEATURES)
    attention = multi_head(
        num_kv_heads=2,
        softcap=CAP,
        is_causal=True,
        local_window_size=(3, 0),
        softmax_type=softmax_type,
        normalize_qk=True,
        enable_rotary_pos_emb=True,
        rotary_pos_emb_windows=(1, 500),
        rotary_pos_emb_group_method="alternate",
    )
    variables, params = started(attention, x)
    if softmax_type == "learnable":
        params["sinks"] = np.array([0.5, -1.0, 2.0, 0.0])
        variables["params"]["sinks"] = jnp.asarray(params["sinks"], jnp.float32)
    bias = inputs(1, 4, LENGTH, LENGTH, seed=2)
    want = functools.partial(
        reference.multi_head,
        params,
        reference.wide(x),
        rotary=((1, 500), "alternate"),
        is_causal=True,
        local_window_size=(3, 0),
        bias=reference.wide(bias),
    )
    apply = functools.partial(attention.apply, variables, x)
    close(apply(bias=bias), want(softcap=CAP))
    close(apply(None, None, 2.0, bias=bias), want(softcap=2.0))
    assert np.abs(want(softcap=2.0) - want(softcap=None)).max() > 0.05


@pytest.mark.parametrize(("prefill", "length"), [(1, 8), (4, 11)])
def test_decoding_is_the_causal_forward(prefill, length):
    x = inputs(2, 8, FEATURES)
    attention = multi_head(
        num_kv_heads=2, softcap=CAP, local_window_size=(2, 0), enable_rotary_pos_emb=True
    )
    variables, _ = started(attention, x)
    want = attention.apply(variables, x, is_causal=True)
    made = attention.init(KEY, inputs(2, length, FEATURES), decode=True)["cache"]  # as in Flax
    assert made["cache_index"] == 0

    @jax.jit
    def step(cache, x):
        cached = {**variables, **cache}
        return attention.apply(cached, x, decode=True, max_decode_length=length, mutable=["cache"])

    for cache in ({"cache": made}, {}):
        got, cuts = [], [0, prefill, *range(prefill + 1, 9)]
        for start, end in itertools.pairwise(cuts):
            out, cache = step(cache, x[:, start:end])
            got.append(out)
        close(jnp.concatenate(got, 1), want)
        assert cache["cache"]["cache_index"] == 8


def test_a_full_cache_is_an_error_or_nan():
    attention = multi_head(softcap=CAP, decode=True)
    one = inputs(2, 1, FEATURES)
    variables, _ = started(attention, one)
    step = functools.partial(attention.apply, mutable=["cache"])
    with pytest.raises(ValueError, match="decode needs a cache: from init with decode"):
        step({"params": variables["params"]}, one)
    _, cache = step(variables, one)
    full = {**variables, **cache}
    with pytest.raises(ValueError, match="the cache holds 1 tokens; 1 are taken, 1 do not fit"):
        step(full, one)
    assert jnp.isnan(jax.jit(step)(full, one)[0]).all()
    with pytest.raises(ValueError, match="max_decode_length=5, but the cache that exists holds 1"):
        step(variables, one, max_decode_length=5)
    with pytest.raises(ValueError, match="leave inputs_k None"):
        step(variables, one, one)


def test_dropout_of_multi_head():
    x = inputs(2, LENGTH, FEATURES)
    attention = multi_head(softcap=CAP, dropout_rate=0.5)
    variables, _ = started(attention, x, deterministic=True)
    apply = functools.partial(attention.apply, variables, x)
    still = multi_head(softcap=CAP).apply(variables, x)
    np.testing.assert_array_equal(apply(deterministic=True), still)
    one, two = (apply(deterministic=False, rngs={"dropout": jax.random.key(i)}) for i in range(2))
    assert np.any(one != two)


# TransformerLayer


@pytest.mark.parametrize("softcap", [None, CAP])
def test_decoder_is_the_formula(softcap):
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(layer_type="decoder", softcap=softcap, scale=20.0, use_bias=True)
    variables, params = started(module, x, encoded)
    want = functools.partial(reference.decoder, params, reference.wide(x), reference.wide(encoded))
    got = jax.jit(module.apply)(variables, x, encoded)
    close(got, want(softcap, 20.0), rtol=2e-4, atol=2e-4)
    assert np.abs(want(None, 20.0) - want(CAP, 20.0)).max() > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"layernorm_type": "rmsnorm", "output_layernorm": True, "self_attn_mask_type": "no_mask"},
        {"mlp_activations": ("silu", "linear"), "num_gqa_groups": 2, "head_dim": 8},
        {"apply_residual_connection_post_layernorm": True, "window_size": (2, -1)},
        {"enable_rotary_pos_emb": True, "normalize_qk": True, "softmax_type": "off-by-one"},
        {"layer_number": 3, "apply_qk_layer_scaling": True, "use_bias": True},
    ],
)
def test_layer_is_its_nnx_twin(options):
    x = inputs(2, LENGTH, FEATURES)
    module = layer(**options)
    variables, _ = started(module, x)
    sizes = {"hidden_size": FEATURES, "mlp_hidden_size": 8, "num_attention_heads": 4}
    twin = nnx_twin.TransformerLayer(
        **sizes, softcap=CAP, deterministic=True, rngs=nnx.Rngs(1), **options
    )
    params = dict(variables["params"])
    params["mlp"] = {name: params.pop(name) for name in ("wi", "wo")}
    state = nnx.state(twin, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(twin, state)
    close(module.apply(variables, x), twin(x), rtol=1e-4, atol=1e-4)


def test_masks_of_the_layer():
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(layer_type="decoder", self_attn_mask_type="padding_causal")
    ids, crossing = jnp.array([[0, 0, 0, 1, 1, 1]] * 2), jnp.array([[0, 0, 1, 1]] * 2)
    variables, _ = started(module, x, encoded, segment_ids=ids)
    apply = functools.partial(module.apply, variables, x, encoded)
    by_ids = apply(segment_ids=ids, encoded_segment_ids=crossing)
    by_mask = apply(
        attention_mask=nn.make_attention_mask(ids, ids, jnp.equal),  # float
        encoder_decoder_mask=nn.make_attention_mask(ids, crossing, jnp.equal),
    )
    close(by_ids, by_mask)


def test_decoding_of_the_layer():
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(layer_type="decoder", enable_rotary_pos_emb=True, window_size=(2, 0))
    variables, _ = started(module, x, encoded)
    want = module.apply(variables, x, encoded)

    @jax.jit
    def step(cache, x):
        return module.apply(
            {**variables, **cache},
            x,
            encoded,
            decode=True,
            max_decode_length=LENGTH,
            mutable=["cache"],
        )

    out, cache = step({}, x[:, :3])
    got = [out]
    for i in range(3, LENGTH):
        out, cache = step(cache, x[:, i : i + 1])
        got.append(out)
    close(jnp.concatenate(got, 1), want, rtol=1e-4, atol=1e-4)


def test_dropout_of_the_layer():
    x = inputs(2, LENGTH, FEATURES)
    rngs = [{"dropout": jax.random.key(i)} for i in range(2)]
    for name in ("hidden_dropout", "attention_dropout", "intermediate_dropout"):
        rates: Any = {"hidden_dropout": 0.0, "attention_dropout": 0.0, name: 0.5}
        module = layer(**rates)
        variables, _ = started(module, x)
        one, two = (module.apply(variables, x, deterministic=False, rngs=r) for r in rngs)
        assert np.any(one != two)
        np.testing.assert_array_equal(
            module.apply(variables, x, rngs=rngs[0]), module.apply(variables, x)
        )


def test_computation_in_bfloat16():
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(dtype=jnp.bfloat16, layer_type="decoder", normalize_qk=True)
    out, variables = module.init_with_output(KEY, x, encoded)
    assert jnp.asarray(out).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


# Transformations


class Stack(nn.Module):
    """Three layers, scanned; `remat` recomputes each in the backward pass."""

    remat: bool = False
    decode: bool = False

    @nn.compact
    def __call__(self, x, softcap=None, deterministic=True):
        kind = capped.TransformerLayer
        if self.remat:
            kind = nn.remat(kind, static_argnums=(5, 6, 7, 8), prevent_cse=False)

        class Body(nn.Module):
            decode: bool

            @nn.compact
            def __call__(self, x, _):
                block = kind(FEATURES, 8, 4, softcap=CAP, name="block")
                length = LENGTH if self.decode else None
                out = block(x, None, None, None, deterministic, self.decode, length, softcap)
                return out, None

        scan = nn.scan(
            Body,
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return scan(decode=self.decode, name="layers")(x, None)[0]


def test_scan_and_remat():
    x = inputs(2, LENGTH, FEATURES)
    variables = jax.jit(Stack().init)(KEY, x)
    y, one = x, jax.jit(layer().apply)
    stacked = variables["params"]["layers"]["block"]
    for i in range(3):
        y = one({"params": jax.tree.map(lambda leaf, i=i: leaf[i], stacked)}, y)
    scanned = jax.jit(Stack().apply, static_argnums=2)
    close(scanned(variables, x, None), y, rtol=1e-4, atol=1e-4)
    assert not np.allclose(scanned(variables, x, None), scanned(variables, x, 0.0), atol=1e-3)

    again = Stack(remat=True)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(module, variables, rngs):
        loss = lambda v: jnp.sum(module.apply(v, x, CAP, False, rngs=rngs) ** 2)  # noqa: E731
        return jax.tree.leaves(jax.grad(loss)(variables))

    keys = [{"dropout": jax.random.key(i)} for i in range(2)]
    want, other = (gradient(Stack(), variables, k) for k in keys)
    for got, expected, different in zip(
        gradient(again, variables, keys[0]), want, other, strict=True
    ):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * scale)
        assert np.any(expected != different)


def test_decoding_under_scan():
    x = inputs(2, LENGTH, FEATURES)
    variables = jax.jit(Stack().init)(KEY, x)
    step = jax.jit(functools.partial(Stack(decode=True).apply, mutable=["cache"]))
    out, cache = step(variables, x[:, :4])
    got = [out]
    for i in range(4, LENGTH):
        out, cache = step({**variables, **cache}, x[:, i : i + 1])
        got.append(out)
    close(jnp.concatenate(got, 1), jax.jit(Stack().apply)(variables, x), rtol=1e-4, atol=1e-4)


def test_sharded_parameters():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    kernel = nn.initializers.lecun_normal()
    module = layer(
        mha_kernel_init=nn.with_partitioning(kernel, (None, "model", None)),
        mha_out_kernel_init=nn.with_partitioning(kernel, ("model", None, None)),
        mlp_kernel_init=nn.with_partitioning(kernel, (None, None, "model")),
        mlp_out_kernel_init=nn.with_partitioning(kernel, ("model", None)),
    )
    x = inputs(2, LENGTH, FEATURES)
    specs = nn.get_partition_spec(jax.eval_shape(module.init, KEY, x))
    assert specs["params"]["self_attention"]["query"]["kernel"] == P(None, "model", None)
    placed = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P)
    )
    variables = jax.jit(lambda: nn.unbox(module.init(KEY, x)), out_shardings=placed)()
    put = jax.device_put(x, NamedSharding(mesh, P("data")))
    got = jax.jit(module.apply)(variables, put)
    close(got, module.apply(jax.device_get(variables), x), rtol=1e-4, atol=1e-4)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap must not be negative"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"softmax_type": "hard"}, "softmax_type must be one of"),
        ({"qkv_features": 18}, r"qkv_features \(18\) must be a multiple of num_heads \(4\)"),
        ({"enable_rotary_pos_emb": True, "qkv_features": 12}, "needs an even head size, got 3"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\)"),
        ({"apply_qk_layer_scaling": True}, "apply_qk_layer_scaling=True divides by layer_number"),
    ],
)
def test_bad_options_of_multi_head(options, message):
    with pytest.raises(ValueError, match=message):
        multi_head(**options).init(KEY, inputs(2, LENGTH, FEATURES))


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"layer_type": "both"}, {}, "layer_type must be 'encoder' or 'decoder'"),
        ({"self_attn_mask_type": "future"}, {}, "self_attn_mask_type must be one of"),
        ({"mlp_activations": ()}, {}, "mlp_activations must be a tuple"),
        ({"num_attention_heads": 3}, {}, "must be a multiple of num_attention_heads"),
        ({"attention_dropout": 2}, {}, "attention_dropout must be in"),
        ({"layer_type": "decoder"}, {}, "encoded must be given"),
        ({}, {"encoder_decoder_mask": jnp.ones((1, 1, 1, 4))}, "encoder_decoder_mask must be None"),
        ({}, {"attention_mask": jnp.ones((2, 1, LENGTH, LENGTH))}, "use 'padding_causal'"),
        ({"self_attn_mask_type": "padding"}, {}, "needs attention_mask or segment_ids"),
        ({"self_attn_mask_type": "no_mask"}, {"decode": True}, "decode=True attends causally"),
        ({}, {"max_decode_length": 8}, "max_decode_length needs decode=True"),
    ],
)
def test_bad_use_of_the_layer(options, call, message):
    with pytest.raises(ValueError, match=message):
        layer(**options).init(KEY, inputs(2, LENGTH, FEATURES), **call)


def test_sowing_is_refused():
    with pytest.raises(ValueError, match="sow_weights: a fused kernel"):
        multi_head().init(KEY, inputs(2, LENGTH, FEATURES), sow_weights=True)
