"""The NNX modules: against Flax's, against NumPy, in decoding, and under NNX's transformations."""

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

from jaxcap import flax_adapter
from jaxcap import nnx as capped
from jaxcap.modules import rope
from jaxcap.nnx import attention as nnx_attention
from jaxcap.nnx import layer as nnx_layer
from jaxcap.nnx import multihead as nnx_multihead
from tests import flax_reference as reference

CAP = 5.0
FEATURES, LENGTH = 16, 6
close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def inputs(*shape: int, seed: int = 0, scale: float = 4.0) -> jax.Array:
    """Large enough that logits reach the cap."""
    return scale * jax.random.normal(jax.random.key(seed), shape)


def parameters(module: nnx.Module) -> Any:
    return reference.wide(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def multi_head(**options: Any) -> capped.MultiHeadAttention:
    return capped.MultiHeadAttention(
        **{"num_heads": 4, "in_features": FEATURES, "rngs": nnx.Rngs(0), **options}
    )


def layer(**options: Any) -> capped.TransformerLayer:
    sizes = {"hidden_size": FEATURES, "mlp_hidden_size": 8, "num_attention_heads": 4}
    return capped.TransformerLayer(**{**sizes, "softcap": CAP, "rngs": nnx.Rngs(0), **options})


@pytest.mark.parametrize("module", [flax_adapter, nnx_attention, nnx_multihead, nnx_layer, rope])
def test_examples_run(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


# DotProductAttention


def test_dot_product_attention_is_the_function():
    q, k, v = (inputs(2, LENGTH, 4, 8, seed=i) for i in range(3))
    attention = capped.DotProductAttention(
        softcap=CAP, scale=0.5, is_causal=True, local_window_size=(3, 0)
    )
    want = reference.oracle.Attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        softcap=CAP,
        scale=0.5,
        is_causal=True,
        local_window_size=(3, 0),
    )
    out, residual = attention(q, k, v, return_residual=True)
    close(out, want.out)
    close(residual, want.lse)
    np.testing.assert_array_equal(nnx.jit(attention)(q, k, v), attention(q, k, v))
    uncapped = capped.DotProductAttention(scale=0.5, is_causal=True, local_window_size=(3, 0))
    np.testing.assert_array_equal(attention(q, k, v, softcap=0.0), uncapped(q, k, v))
    assert np.abs(attention(q, k, v) - uncapped(q, k, v)).max() > 0.1
    np.testing.assert_array_equal(
        attention(q, k, v, is_causal=False),
        capped.DotProductAttention(softcap=CAP, scale=0.5, local_window_size=(3, 0))(q, k, v),
    )
    assert jax.tree.leaves(nnx.state(attention)) == []


def test_arrays_are_handed_on():
    q, k, v = (inputs(2, LENGTH, 2, 8, seed=i) for i in range(3))
    arrays: Any = {
        "query_segment_ids": jnp.array([[0, 0, 1, 1, 1, 2]] * 2),
        "key_value_segment_ids": jnp.array([[0, 1, 1, 2, 2, 2]] * 2),
        "key_value_seq_lengths": jnp.array([5, 6]),
        "sinks": jnp.array([0.3, -1.0]),
        "alibi_slopes": jnp.array([0.5, 0.25]),
    }
    want = reference.oracle.Attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        softcap=CAP,
        **{name: np.asarray(x) for name, x in arrays.items()},
    )
    close(capped.DotProductAttention(softcap=CAP)(q, k, v, **arrays), want.out)


class Setup(nn.Module):
    """jaxcap.DotProductAttention as a setup attribute of a Linen module."""

    def setup(self):
        self.attention = capped.DotProductAttention(softcap=CAP, dropout_rate=0.5)

    def __call__(self, q, deterministic):
        rng = None if deterministic else self.make_rng("dropout")
        return self.attention(q, q, q, deterministic=deterministic, dropout_rng=rng)


class Called(nn.Module):
    attention: Any = capped.DotProductAttention(softcap=CAP, dropout_rate=0.5)

    @nn.compact
    def __call__(self, q, deterministic):
        rng = None if deterministic else self.make_rng("dropout")
        return self.attention(q, q, q, deterministic=deterministic, dropout_rng=rng)


@pytest.mark.parametrize("module", [Setup(), Called()])
def test_dot_product_attention_inside_linen(module):
    q = inputs(2, LENGTH, 2, 8)
    want = capped.DotProductAttention(softcap=CAP)(q, q, q)
    variables = module.init(jax.random.key(0), q, True)
    assert jax.tree.leaves(variables) == []
    apply = jax.jit(module.apply, static_argnums=2)
    close(apply(variables, q, True), want)
    rngs = [{"dropout": jax.random.key(i)} for i in (0, 0, 1)]
    first, again, other = (apply(variables, q, False, rngs=r) for r in rngs)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    grad = jax.grad(lambda x: jnp.sum(module.apply({}, x, True)))(q)
    close(grad, jax.grad(lambda x: jnp.sum(capped.DotProductAttention(softcap=CAP)(x, x, x)))(q))


def test_dropout_keys():
    q = inputs(2, LENGTH, 2, 8)
    attention = capped.DotProductAttention(softcap=CAP, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"dropout_rate=0.5 needs deterministic=True"):
        attention(q, q, q)
    attention.train()
    assert (attention(q, q, q) != attention(q, q, q)).any()
    attention.eval()
    still = capped.DotProductAttention(softcap=CAP)(q, q, q)
    np.testing.assert_array_equal(attention(q, q, q), still)
    view = nnx.view(attention, deterministic=False)
    assert (view(q, q, q) != still).any()
    bare = capped.DotProductAttention(softcap=CAP, dropout_rate=0.5, deterministic=False)
    with pytest.raises(ValueError, match="needs rngs in the constructor, or rngs or"):
        bare(q, q, q)
    by_key = bare(q, q, q, dropout_rng=nnx.Rngs(3).dropout())
    np.testing.assert_array_equal(by_key, bare(q, q, q, rngs=nnx.Rngs(3)))
    np.testing.assert_array_equal(by_key, bare(q, q, q, rngs=nnx.Rngs(3).dropout))


# MultiHeadAttention


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "use_bias": False},
        {"normalize_qk": True, "qkv_features": 32, "out_features": 8},
        {"dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16, "normalize_qk": True},
    ],
)
def test_without_a_cap_it_is_flax(options):
    x, y = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    ours = multi_head(**options)
    theirs = nnx.MultiHeadAttention(4, FEATURES, decode=False, rngs=nnx.Rngs(0), **options)
    jax.tree.map(np.testing.assert_array_equal, parameters(ours), parameters(theirs))
    mask = nnx.make_causal_mask(jnp.ones((2, LENGTH)))
    coarse = {"rtol": 2e-2, "atol": 0.2} if "dtype" in options else {}
    calls: Any = [
        ((x,), {}),
        ((x,), {"mask": mask}),
        ((x,), {"is_causal": True}),
        ((x, y), {}),
        ((x, y, 2 * y), {}),
    ]
    for args, kwargs in calls:
        with jax.numpy_dtype_promotion("standard"):  # Flax's own norm mixes dtypes
            want = theirs(*args, **kwargs)
        close(ours(*args, **kwargs), want, **coarse)


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_multi_head_is_the_formula(method, softmax_type):
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
        rotary_pos_emb_group_method=method,
    )
    if attention.sinks is not None:
        attention.sinks[...] = jnp.array([0.5, -1.0, 2.0, 0.0])
    bias = inputs(1, 4, LENGTH, LENGTH, seed=2)
    want = functools.partial(
        reference.multi_head,
        parameters(attention),
        reference.wide(x),
        rotary=((1, 500), method),
        is_causal=True,
        local_window_size=(3, 0),
        bias=reference.wide(bias),
    )
    close(attention(x, bias=bias), want(softcap=CAP))
    close(attention(x, None, None, 2.0, bias=bias), want(softcap=2.0))
    assert np.abs(want(softcap=2.0) - want(softcap=None)).max() > 0.05


def test_off_by_one_is_a_sink_of_zero():
    x = inputs(2, LENGTH, FEATURES)
    attention = multi_head(softcap=CAP, softmax_type="off-by-one")
    want = reference.multi_head(
        parameters(attention), reference.wide(x), softcap=CAP, sinks=np.zeros(4)
    )
    close(attention(x), want)
    with pytest.raises(ValueError, match="sinks come from softmax_type='off-by-one'"):
        attention(x, sinks=jnp.zeros(4))


@pytest.mark.parametrize(("prefill", "length"), [(1, 8), (4, 11)])
def test_decoding_is_the_causal_forward(prefill, length):
    x = inputs(2, 8, FEATURES)
    attention = multi_head(
        num_kv_heads=2, softcap=CAP, local_window_size=(2, 0), enable_rotary_pos_emb=True
    )
    bias = inputs(1, 4, 8, length, seed=2)
    want = attention(x, is_causal=True, bias=bias[..., :8])
    attention.init_cache((2, length, FEATURES))
    step = nnx.jit(lambda module, x, bias: module(x, decode=True, bias=bias))
    cuts = [0, prefill, *range(prefill + 1, 9)]
    got = [step(attention, x[:, a:b], bias[:, :, a:b]) for a, b in itertools.pairwise(cuts)]
    close(jnp.concatenate(got, 1), want)
    assert attention.cache_index is not None
    assert attention.cache_index[...] == 8


def test_a_full_cache_is_an_error_or_nan():
    attention = multi_head(softcap=CAP, decode=True)
    with pytest.raises(ValueError, match="decode needs a cache: call init_cache or pass"):
        attention(inputs(2, 1, FEATURES))
    attention(inputs(2, 3, FEATURES), max_decode_length=4)
    with pytest.raises(ValueError, match="the cache holds 4 tokens; 3 are taken, 2 do not fit"):
        attention(inputs(2, 2, FEATURES))
    with pytest.raises(ValueError, match="max_decode_length=5, but the cache that exists holds 4"):
        attention(inputs(2, 1, FEATURES), max_decode_length=5)
    with pytest.raises(ValueError, match="query_positions comes from the cache"):
        attention(inputs(2, 1, FEATURES), query_positions=jnp.zeros((1,), jnp.int32))
    with pytest.raises(ValueError, match="leave inputs_k None"):
        attention(inputs(2, 1, FEATURES), inputs(2, 1, FEATURES))
    step = nnx.jit(lambda module, x: module(x))
    assert jnp.isfinite(step(attention, inputs(2, 1, FEATURES))).all()
    assert jnp.isnan(step(attention, inputs(2, 1, FEATURES))).all()


def test_a_view_makes_a_cache():
    attention = multi_head(softcap=CAP, is_causal=True)
    x = inputs(2, LENGTH, FEATURES)
    view = nnx.view(attention, decode=True, batch_size=2, max_length=8)
    close(view(x), attention(x))
    assert attention.cached_key is None
    half = multi_head(softcap=CAP, dtype=jnp.bfloat16)
    half.init_cache((2, 8, FEATURES))  # float32, as Flax has it
    assert half(x, decode=True).dtype == jnp.bfloat16


def test_positions_of_the_rotary_embedding():
    x, y = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    attention = multi_head(softcap=CAP, enable_rotary_pos_emb=True)
    close(attention(x, input_positions=7 + jnp.arange(LENGTH)), attention(x))  # relative
    here = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    close(attention(x, y, input_positions=here), attention(x, y))
    moved = attention(x, y, kv_input_positions=2 + jnp.arange(4))
    assert np.abs(moved - attention(x, y)).max() > 0.01
    close(attention(x, y, input_positions=2 + here, kv_input_positions=4 + jnp.arange(4)), moved)
    for name in ("input_positions", "kv_input_positions"):
        positions: Any = {name: here}
        with pytest.raises(ValueError, match=f"{name} are angles of a rotary embedding"):
            multi_head()(x, **positions)


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
def test_rotary_embedding(method):
    x, positions = inputs(2, LENGTH, 3, 8), jnp.array([[0, 1, 2, 3, 4, 5], [9, 8, 2000, 0, 0, 1]])
    got = rope.rotary_embedding(x, positions, (1, 10000), method)
    np.testing.assert_allclose(
        got, reference.rope(reference.wide(x), positions, (1, 10000), method), atol=2e-3
    )
    close(got[0], rope.rotary_embedding(x[0], positions[0], (1, 10000), method))
    half = rope.rotary_embedding(x.astype(jnp.bfloat16), positions, (1, 10000), method)
    assert half.dtype == jnp.bfloat16
    if method == "alternate":  # Flax's
        flax = jax.vmap(nnx.RoPE(), in_axes=-2, out_axes=-2)
        with jax.numpy_rank_promotion("allow"):
            close(got[0], flax(x)[0])
    for bad in (positions[0, :4], positions.astype(jnp.float32)):
        with pytest.raises(ValueError, match="positions must"):
            rope.rotary_embedding(x, bad)


def test_dropout_of_multi_head():
    x = inputs(2, LENGTH, FEATURES)
    attention = multi_head(softcap=CAP, dropout_rate=0.5)
    with pytest.raises(ValueError, match="needs deterministic"):
        attention(x)
    still = multi_head(softcap=CAP)(x)
    np.testing.assert_array_equal(attention(x, deterministic=True), still)
    assert (attention(x, deterministic=False) != attention(x, deterministic=False)).any()
    attention.eval()
    np.testing.assert_array_equal(attention(x), still)
    fixed = [attention(x, deterministic=False, rngs=nnx.Rngs(1)) for _ in range(2)]
    np.testing.assert_array_equal(*fixed)


# TransformerLayer


@pytest.mark.parametrize("softcap", [None, CAP])
def test_decoder_is_the_formula(softcap):
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(layer_type="decoder", softcap=softcap, scale=20.0, use_bias=True)
    module.eval()
    want = functools.partial(
        reference.decoder, parameters(module), reference.wide(x), reference.wide(encoded)
    )
    close(module(x, encoded), want(softcap, 20.0), rtol=2e-4, atol=2e-4)
    assert np.abs(want(None, 20.0) - want(CAP, 20.0)).max() > 0.1


def test_options_of_the_layer():
    x = inputs(2, LENGTH, FEATURES)
    module = layer(
        layernorm_type="rmsnorm",
        output_layernorm=True,
        mlp_activations=("silu", "linear"),
        self_attn_mask_type="no_mask",
        num_gqa_groups=2,
        head_dim=8,
        window_size=(2, -1),
        deterministic=True,
    )
    p, wide = parameters(module), reference.wide(x)
    y = wide + reference.multi_head(
        p["self_attention"], wide, softcap=CAP, local_window_size=(2, None)
    )
    hidden = reference.linear(p["mlp"]["wi"], reference.rms_norm(p["mlp_norm"], y))
    silu, gate = hidden[..., 0, :] / (1 + np.exp(-hidden[..., 0, :])), hidden[..., 1, :]
    y = y + reference.linear(p["mlp"]["wo"], silu * gate)
    close(module(x), reference.rms_norm(p["output_norm"], y), rtol=2e-4, atol=2e-4)


def test_residual_after_the_norm():
    x = inputs(2, LENGTH, FEATURES)
    module = layer(apply_residual_connection_post_layernorm=True, deterministic=True)
    p = parameters(module)
    normed = reference.layer_norm(p["self_attention_norm"], reference.wide(x))
    y = normed + reference.multi_head(p["self_attention"], normed, softcap=CAP, is_causal=True)
    normed = reference.layer_norm(p["mlp_norm"], y)
    hidden = reference.gelu(reference.linear(p["mlp"]["wi"], normed)[..., 0, :])
    close(module(x), normed + reference.linear(p["mlp"]["wo"], hidden), rtol=2e-4, atol=2e-4)


def test_masks_of_the_layer():
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(
        layer_type="decoder", self_attn_mask_type="padding_causal", deterministic=True, decode=False
    )
    ids = jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
    crossing = jnp.array([[0, 0, 1, 1]] * 2)
    by_ids = module(x, encoded, segment_ids=ids, encoded_segment_ids=crossing)
    by_mask = module(
        x,
        encoded,
        attention_mask=nnx.make_attention_mask(ids, ids, jnp.equal),  # float
        encoder_decoder_mask=nnx.make_attention_mask(ids, crossing, jnp.equal),
    )
    close(by_ids, by_mask)
    first = layer(layer_type="decoder", deterministic=True)(x[:, :3], encoded[:, :2])
    close(by_ids[:, :3], first)


def test_decoding_of_the_layer():
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(
        layer_type="decoder", enable_rotary_pos_emb=True, window_size=(2, 0), deterministic=True
    )
    want = module(x, encoded)
    got = [module(x[:, :3], encoded, decode=True, max_decode_length=LENGTH)]
    step = nnx.jit(lambda module, x: module(x, encoded, decode=True))
    got += [step(module, x[:, i : i + 1]) for i in range(3, LENGTH)]
    close(jnp.concatenate(got, 1), want, rtol=1e-4, atol=1e-4)


def test_a_view_of_a_decoder_decodes():
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    module = layer(layer_type="decoder", deterministic=True)
    view = nnx.view(module, decode=True, batch_size=2, max_length=LENGTH)
    close(view(x, encoded), module(x, encoded))


def test_dropout_of_the_layer():
    x = inputs(2, LENGTH, FEATURES)
    for name in ("hidden_dropout", "attention_dropout", "intermediate_dropout"):
        rates: Any = {"hidden_dropout": 0.0, "attention_dropout": 0.0, name: 0.5}
        module = layer(**rates)
        assert (module(x) != module(x)).any()
        module.eval()
        np.testing.assert_array_equal(module(x), module(x))
        assert (module(x) != module(x, deterministic=False)).any()
    shared = layer(attention_dropout=0.0, hidden_dropout=0.5, hidden_dropout_dims=(0, 1))
    dropped = shared.dropout(jnp.ones((2, LENGTH, FEATURES)))
    assert (dropped == dropped[:1, :1]).all()


def test_computation_in_bfloat16():
    module = layer(dtype=jnp.bfloat16, layer_type="decoder", normalize_qk=True, deterministic=True)
    x, encoded = inputs(2, LENGTH, FEATURES), inputs(2, 4, FEATURES, seed=1)
    assert module(x, encoded).dtype == jnp.bfloat16
    assert module.mlp.wo.kernel.dtype == jnp.float32


# Transformations


class Stack(nnx.Module):
    """Layers of one shape, scanned; `remat` recomputes each in the backward pass."""

    def __init__(self, depth: int, *, remat: bool, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return layer(rngs=rngs, hidden_dropout=0.1, attention_dropout=0.1)

        self.layers = create(rngs)
        self.remat = remat

    def __call__(self, x: jax.Array, softcap: float | None = None) -> jax.Array:
        def call(module, x):
            return module(x, None, None, None, None, None, None, softcap)

        call = nnx.remat(call) if self.remat else call

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, module):
            return call(module, x)

        return run(x, self.layers)


def test_scan_and_remat():
    x = inputs(2, LENGTH, FEATURES)
    stack = Stack(3, remat=False, rngs=nnx.Rngs(0))
    stack.eval()
    forward = nnx.jit(lambda module, x: module(x))
    uncapped = nnx.jit(lambda module, x: module(x, 0.0))
    y = x
    graph, state = nnx.split(stack.layers)
    for i in range(3):
        y = forward(nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state)), y)
    scanned = forward(stack, x)
    close(scanned, y, rtol=1e-4, atol=1e-4)
    assert np.abs(scanned - uncapped(stack, x)).max() > 1e-3

    again = Stack(3, remat=True, rngs=nnx.Rngs(0))
    again.eval()
    loss = nnx.jit(nnx.grad(lambda module: jnp.sum(module(x) ** 2)))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3),
        nnx.to_pure_dict(nnx.state(loss(stack))),
        nnx.to_pure_dict(nnx.state(loss(again))),
    )
    again.train()
    assert (forward(again, x) != forward(again, x)).any()


def test_remat_with_a_static_cap():
    x = inputs(2, LENGTH, FEATURES)
    module = layer(deterministic=True)
    remat = nnx.remat(capped.TransformerLayer.__call__, static_argnums=(5, 6, 7, 8))
    got = remat(module, x, None, None, None, True, False, None, 2.0)
    np.testing.assert_array_equal(got, module(x, softcap=2.0))


@pytest.mark.parametrize("stacked", [False, True])
def test_sharded_parameters(stacked):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    kernel = nnx.initializers.lecun_normal()
    x = inputs(2, LENGTH, FEATURES)

    def build(rngs):
        return layer(
            rngs=rngs,
            layer_type="encoder",
            deterministic=True,
            mha_kernel_init=nnx.with_partitioning(kernel, (None, "model", None)),
            mha_out_kernel_init=nnx.with_partitioning(kernel, ("model", None, None)),
            mlp_kernel_init=nnx.with_partitioning(kernel, (None, None, "model")),
            mlp_out_kernel_init=nnx.with_partitioning(kernel, ("model", None)),
        )

    if stacked:
        single, depth = build, 2

        def build(rngs):
            metadata = {nnx.PARTITION_NAME: None}
            create = nnx.vmap(single, in_axes=0, out_axes=0, transform_metadata=metadata)
            return create(rngs.split(depth))

    with jax.set_mesh(mesh):
        module = nnx.jit(lambda: build(nnx.Rngs(0)))()
        specs = nnx.get_partition_spec(nnx.state(module, nnx.Param))
        kernel_spec = specs["self_attention"]["query"]["kernel"].get_value()
        assert kernel_spec == (P(None, None, "model", None) if stacked else P(None, "model", None))
        kernel = module.self_attention.query.kernel[...]
        placed = NamedSharding(mesh, kernel_spec)
        assert kernel.sharding.is_equivalent_to(placed, kernel.ndim)
        put = jax.device_put(x, NamedSharding(mesh, P("data")))

        def run(module, x):
            if not stacked:
                return module(x)
            scan = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(x, module)

        got = nnx.jit(run)(module, put)
    local = nnx.merge(nnx.graphdef(module), jax.device_get(nnx.state(module)))
    close(got, run(local, x), rtol=1e-4, atol=1e-4)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap must not be negative"),
        ({"softcap": float("inf")}, "softcap must be finite"),
        ({"num_kv_heads": 3}, "must be divisible by num_kv_heads"),
        ({"attention_fn": nnx.dot_product_attention}, "attention_fn: this module always runs"),
        ({"softmax_type": "hard"}, "softmax_type must be one of"),
        ({"enable_rotary_pos_emb": True, "qkv_features": 12}, "needs an even head size, got 3"),
        (
            {"enable_rotary_pos_emb": True, "rotary_pos_emb_windows": (2, 1)},
            "rotary_pos_emb_windows must be",
        ),
        (
            {"enable_rotary_pos_emb": True, "rotary_pos_emb_group_method": "mixed"},
            "rotary_pos_emb_group_method must be one of",
        ),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\)"),
        ({"apply_qk_layer_scaling": True}, "apply_qk_layer_scaling=True divides by layer_number"),
        ({"implementation": "imaginary"}, "implementation: no backend 'imaginary'"),
    ],
)
def test_bad_options_of_multi_head(options, message):
    with pytest.raises(ValueError, match=message):
        multi_head(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_type": "both"}, "layer_type must be 'encoder' or 'decoder'"),
        ({"self_attn_mask_type": "future"}, "self_attn_mask_type must be one of"),
        ({"layernorm_type": "batchnorm"}, "layernorm_type must be"),
        ({"mlp_activations": ("gelu", "cosine")}, "mlp_activations must be of"),
        ({"mlp_activations": "gelu"}, "mlp_activations must be a tuple"),
        ({"num_attention_heads": 3}, "hidden_size .16. must be a multiple of num_attention_heads"),
        ({"hidden_dropout": -0.1}, "hidden_dropout must be in"),
        ({"window_size": 3}, "window_size must be .left, right. or None"),
        (
            {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
            "set one of them",
        ),
    ],
)
def test_bad_options_of_the_layer(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"layer_type": "decoder"}, {}, "encoded must be given"),
        ({}, {"encoded": jnp.ones((2, 4, FEATURES))}, "encoded must be None"),
        ({}, {"attention_mask": jnp.ones((2, 1, LENGTH, LENGTH))}, "use 'padding_causal'"),
        ({"self_attn_mask_type": "padding"}, {}, "needs attention_mask or segment_ids"),
        ({"self_attn_mask_type": "no_mask"}, {"decode": True}, "decode=True attends causally"),
        ({}, {"max_decode_length": 8}, "max_decode_length needs decode=True"),
        ({}, {"input_positions": jnp.arange(LENGTH)}, "set enable_rotary_pos_emb=True"),
        ({}, {"softcap": -2.0}, "softcap must not be negative"),
    ],
)
def test_bad_calls_of_the_layer(options, call, message):
    module = layer(deterministic=True, **options)
    with pytest.raises(ValueError, match=message):
        module(inputs(2, LENGTH, FEATURES), **call)


def test_bad_calls_of_multi_head():
    x = inputs(2, LENGTH, FEATURES)
    attention = multi_head()
    with pytest.raises(ValueError, match="inputs_v came without inputs_k"):
        attention(x, inputs_v=x)
    with pytest.raises(ValueError, match=r"inputs_q must be \[.., length, 16\]"):
        attention(x[..., :8])
    with pytest.raises(ValueError, match="sow_weights: a fused kernel"):
        attention(x, sow_weights=True)
    with pytest.raises(TypeError, match="softcap must be a Python number"):
        attention(x, softcap=jnp.ones(()))
    with pytest.raises(TypeError, match="unexpected keyword"):
        attention(x, dropout=0.5)
