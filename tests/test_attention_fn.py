"""`jaxcap.attention_fn` in Flax's own modules: their masks, dropout, cache, and what it refuses."""

import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxcap import selection
from jaxcap.flax_adapter import attention_fn
from jaxcap.modules import common as modules_common
from tests import flax_reference as reference

CAP = 5.0
HEADS, FEATURES, LENGTH = 2, 8, 6


def inputs(*shape: int, seed: int = 0, scale: float = 4.0) -> jax.Array:
    """Large enough that logits reach the cap."""
    return scale * jax.random.normal(jax.random.key(seed), shape)


def nnx_layer(function: Any, **options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=function, rngs=nnx.Rngs(0), **{"decode": False, **options}
    )


def linen_layer(function: Any, **options: Any) -> nn.MultiHeadDotProductAttention:
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=function, **options)


def run(flavour: str, function: Any, x: jax.Array, mask: Any = None, **options: Any) -> jax.Array:
    if flavour == "nnx":
        return nnx_layer(function, **options)(x, mask=mask)
    layer = linen_layer(function, **options)
    variables = linen_layer(nn.dot_product_attention, **options).init(jax.random.key(0), x)
    return jnp.asarray(layer.apply(variables, x, mask=mask))


def own(flavour: str) -> Any:
    return nnx.dot_product_attention if flavour == "nnx" else nn.dot_product_attention


def padding(length: int = LENGTH, *lead: int) -> jax.Array:
    """Flax's float mask of `[.., 1, T, S]` for sequences of all but two tokens."""
    valid = jnp.broadcast_to(jnp.arange(length) < length - 2, (*lead, length))
    return nn.make_attention_mask(jnp.ones((*lead, length)), valid.astype(jnp.float32))


def masks() -> dict[str, Any]:
    causal = nn.make_causal_mask(jnp.ones((2, LENGTH)))
    return {
        "none": None,
        "causal": causal,
        "padding": padding(LENGTH, 2),
        "both": nn.combine_masks(causal, padding(LENGTH, 2)),
        "one for all": causal[:1],
        "boolean": causal.astype(bool),
        "integer": causal.astype(jnp.int32),
        "a head each": jnp.broadcast_to(causal, (2, HEADS, LENGTH, LENGTH)),
    }


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
@pytest.mark.parametrize("mask", masks())
def test_without_a_cap_it_is_flax(flavour, mask):
    x = inputs(2, LENGTH, FEATURES)
    got = run(flavour, attention_fn(), x, masks()[mask])
    want = run(flavour, own(flavour), x, masks()[mask])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_leading_dimensions(flavour):
    x = inputs(2, 3, LENGTH, FEATURES)
    mask = padding(LENGTH, 2, 3)
    got = run(flavour, attention_fn(), x, mask)
    want = jnp.stack([run(flavour, own(flavour), x[i], mask[i]) for i in range(2)])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert run(flavour, attention_fn(softcap=CAP), x[0, 0]).shape == (LENGTH, FEATURES)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_with_a_cap_it_is_the_formula(flavour):
    x = inputs(2, LENGTH, FEATURES)
    got = run(flavour, attention_fn(softcap=CAP), x, masks()["causal"])
    if flavour == "nnx":
        params = nnx.to_pure_dict(nnx.state(nnx_layer(attention_fn()), nnx.Param))
    else:
        params = linen_layer(nn.dot_product_attention).init(jax.random.key(0), x)["params"]
    expect = functools.partial(
        reference.multi_head, reference.wide(params), reference.wide(x), is_causal=True
    )
    np.testing.assert_allclose(got, expect(softcap=CAP), rtol=2e-5, atol=2e-5)
    assert np.abs(expect(softcap=CAP) - expect(softcap=None)).max() > 0.1


def test_options_are_those_of_the_function():
    q, k, v = (inputs(1, LENGTH, HEADS, 4, seed=i) for i in range(3))
    function = attention_fn(softcap=CAP, scale=0.7, local_window_size=(2, 1))
    want = reference.oracle.Attention(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        softcap=CAP,
        scale=0.7,
        local_window_size=(2, 1),
    )
    np.testing.assert_allclose(function(q, k, v), want.out, rtol=2e-5, atol=2e-5)
    layered = attention_fn(softcap=CAP, layer_number=3, apply_qk_layer_scaling=True)
    np.testing.assert_allclose(
        layered(q, k, v), attention_fn(softcap=CAP)(q, k, v), rtol=2e-5, atol=2e-5
    )
    bias = inputs(1, HEADS, LENGTH, LENGTH, seed=3)
    np.testing.assert_allclose(
        attention_fn()(q, k, v, bias),
        nnx.dot_product_attention(q, k, v, bias),
        rtol=2e-5,
        atol=2e-5,
    )


def test_causal_from_either_side():
    q = inputs(1, LENGTH, HEADS, 4)
    from_flax = attention_fn(softcap=CAP)(q, q, q, is_causal=True)
    np.testing.assert_array_equal(attention_fn(softcap=CAP, is_causal=True)(q, q, q), from_flax)
    x = inputs(2, LENGTH, FEATURES)
    masked = run("nnx", attention_fn(softcap=CAP), x, masks()["causal"])
    by_flag = nnx_layer(attention_fn(softcap=CAP))(x, is_causal=True)
    np.testing.assert_allclose(by_flag, masked, rtol=2e-5, atol=2e-5)


def test_grouped_heads_of_nnx():
    x = inputs(2, LENGTH, FEATURES)
    layers = [
        nnx.MultiHeadAttention(
            4, FEATURES, num_kv_heads=2, decode=False, attention_fn=f, rngs=nnx.Rngs(0)
        )
        for f in (attention_fn(), nnx.dot_product_attention)
    ]
    np.testing.assert_allclose(layers[0](x), layers[1](x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_decode_cache(flavour):
    x = inputs(2, LENGTH, FEATURES)
    function = attention_fn(softcap=CAP)
    want = run(flavour, function, x, masks()["causal"])
    if flavour == "nnx":
        layer = nnx_layer(function, decode=True)
        layer.init_cache(x.shape)
        steps = [layer(x[:, i : i + 1]) for i in range(LENGTH)]
    else:
        variables = linen_layer(function).init(jax.random.key(0), x)
        layer = linen_layer(function, decode=True)
        cache = layer.init(jax.random.key(0), x)["cache"]
        steps = []
        for i in range(LENGTH):
            out, changed = layer.apply(
                {**variables, "cache": cache}, x[:, i : i + 1], mutable=["cache"]
            )
            cache = changed["cache"]
            steps.append(out)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["local_window_size", "is_causal"])
def test_decode_cache_does_not_say_where_the_query_is(name):
    options: Any = {"local_window_size": (1, 0)} if name != "is_causal" else {"is_causal": True}
    layer = nnx_layer(attention_fn(softcap=CAP, **options), decode=True)
    layer.init_cache((2, LENGTH, FEATURES))
    with pytest.raises(ValueError, match=f"{name} of attention_fn needs as many queries as keys"):
        layer(inputs(2, 1, FEATURES))


def test_self_attention_of_linen():
    x = inputs(2, LENGTH, FEATURES)
    layer = nn.SelfAttention(HEADS, attention_fn=attention_fn(softcap=CAP))
    with pytest.warns(DeprecationWarning, match="SelfAttention"):
        got, _ = layer.init_with_output(jax.random.key(0), x, masks()["causal"])
    want = run("linen", attention_fn(softcap=CAP), x, masks()["causal"])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def dropped(broadcast: bool, **options: Any) -> np.ndarray:
    """`[B, N, T, S]` of what dropout leaves of uniform probabilities."""
    zeros = jnp.zeros((2, 16, HEADS, 4))
    identity = jnp.broadcast_to(jnp.eye(16)[None, :, None, :], (2, 16, HEADS, 16))
    call = {
        "dropout_rate": 0.5,
        "dropout_rng": jax.random.key(7),
        "deterministic": False,
        "broadcast_dropout": broadcast,
        **options,
    }
    out = attention_fn(softcap=CAP)(zeros, zeros, identity, **call)
    return np.asarray(jnp.swapaxes(out, 1, 2)) * 16


def test_dropout_follows_flax_switches():
    shared, apart = dropped(True), dropped(False)
    assert set(np.unique(shared)) == set(np.unique(apart)) == {0.0, 2.0}
    assert (shared == shared[:1, :1]).all()
    np.testing.assert_array_equal(apart[0, 0], shared[0, 0])
    assert (apart[1, 0] != apart[0, 0]).any()
    assert (apart[0, 1] != apart[0, 0]).any()
    assert (dropped(True, deterministic=True) == 1).all()
    assert (dropped(True, dropout_rate=0.0, dropout_rng=None) == 1).all()
    with pytest.raises(ValueError, match="dropout_rate=0.5 needs dropout_rng"):
        dropped(True, dropout_rng=None)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\)"):
        dropped(True, dropout_rate=1.0)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_in_modules(flavour, broadcast):
    x = inputs(2, LENGTH, FEATURES)
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    if flavour == "nnx":
        layer = nnx_layer(attention_fn(softcap=CAP), **options)
        first, second = (layer(x, deterministic=False) for _ in range(2))
        still = layer(x, deterministic=True)
    else:
        layer = linen_layer(attention_fn(softcap=CAP), **options)
        variables = layer.init(jax.random.key(0), x, deterministic=True)
        first, second = (
            layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(i)})
            for i in range(2)
        )
        still = layer.apply(variables, x, deterministic=True)
    assert np.any(first != second)
    np.testing.assert_allclose(still, run(flavour, attention_fn(softcap=CAP), x), rtol=2e-5)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_sowing_is_refused(flavour):
    x = inputs(2, LENGTH, FEATURES)
    if flavour == "nnx":
        call = nnx_layer(attention_fn(softcap=CAP))
    else:
        call = functools.partial(linen_layer(attention_fn()).init, jax.random.key(0))
    with pytest.raises(ValueError, match="sow_weights: a fused kernel never forms"):
        call(x, sow_weights=True)


def test_einsums_and_positions_are_refused():
    q = inputs(1, LENGTH, HEADS, 4)
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        arguments: Any = {name: jnp.einsum}
        with pytest.raises(ValueError, match=f"{name}: a fused kernel"):
            attention_fn()(q, q, q, **arguments)
    layer = nnx_layer(attention_fn(softcap=CAP))
    with pytest.raises(ValueError, match="input_positions: attention_fn applies no rotary"):
        layer(inputs(2, LENGTH, FEATURES), input_positions=jnp.zeros((2, LENGTH), jnp.int32))


class Inexact:
    """A backend that could run anything, in whatever precision it likes."""

    name = "inexact"

    def reasons(self, spec):
        del spec
        return []

    def forward(self, spec, operands):
        raise AssertionError((spec, operands))


@pytest.fixture
def inexact():
    selection.register(Inexact(), before="xla")
    yield "inexact"
    selection.unregister("inexact")


@pytest.mark.parametrize("precision", ["highest", "float32", jax.lax.Precision.HIGH, ("high",) * 2])
def test_precision_is_honoured_or_refused(monkeypatch, inexact, precision):
    q = inputs(1, LENGTH, HEADS, 4)
    with pytest.raises(ValueError, match="precision=.* backend 'inexact' does not compute float32"):
        attention_fn(implementation=inexact)(q, q, q, precision=precision)
    with (
        selection.use_backend(inexact),
        pytest.raises(ValueError, match="does not compute float32 products that exactly"),
    ):
        attention_fn()(q, q, q, precision=precision)
    seen = []
    monkeypatch.setattr(
        modules_common,
        "dot_product_attention",
        lambda *args, implementation, **rest: seen.append(implementation),
    )
    attention_fn()(q, q, q, precision=precision)
    attention_fn(implementation="xla")(q, q, q, precision=precision)
    assert seen[0] in modules_common.EXACT
    assert seen[1] == "xla"
    half = q.astype(jnp.bfloat16)  # whose products are exact everywhere
    attention_fn(implementation=inexact)(half, half, half, precision=precision)
    attention_fn(implementation=inexact)(q, q, q, precision="default")
    attention_fn()(q, q, q, precision=jax.lax.Precision.DEFAULT)
    assert seen[2:] == [inexact, inexact, None]


def test_precision_that_attention_does_not_know():
    q = inputs(1, LENGTH, HEADS, 4)
    for precision in ("enormous", jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, 3):
        with pytest.raises(ValueError, match="precision must be None, a jax.lax.Precision"):
            attention_fn()(q, q, q, precision=precision)


def test_precision_reaches_it_from_modules(monkeypatch, inexact):
    x = inputs(2, LENGTH, FEATURES)
    for flavour in ("nnx", "linen"):
        with pytest.raises(ValueError, match="backend 'inexact' does not compute float32"):
            run(flavour, attention_fn(implementation=inexact), x, precision="highest")


def test_dtypes():
    q = inputs(1, LENGTH, HEADS, 4)
    function = attention_fn(softcap=CAP)
    assert function(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    half = q.astype(jnp.bfloat16)
    assert function(half, half, half).dtype == jnp.bfloat16
    seen = []

    def promote(arrays, dtype):
        seen.append(dtype)
        return tuple(x.astype(jnp.float16) for x in arrays)

    assert function(q, q, q, promote_dtype=promote).dtype == jnp.float16
    assert seen == [None]
    for force in (True, False):  # it is always so
        out = function(half, half, half, force_fp32_for_softmax=force)
        np.testing.assert_array_equal(out, function(half, half, half))
    x = inputs(2, LENGTH, FEATURES)
    assert run("nnx", function, x, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert run("linen", function, x, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("theirs", [nnx.dot_product_attention, nn.dot_product_attention])
def test_every_argument_of_flax_is_named(theirs):
    """Linen leaves out what the signature does not name, so nothing may hide in **kwargs."""
    ours = inspect.signature(attention_fn()).parameters
    assert set(inspect.signature(theirs).parameters) <= set(ours)
    kinds = {p.kind for p in ours.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    positional = list(inspect.signature(theirs).parameters)[:12]
    assert list(ours)[:12] == positional


def test_equal_settings_are_equal_functions():
    assert attention_fn(softcap=CAP) == attention_fn(softcap=CAP)
    assert hash(attention_fn(softcap=CAP)) == hash(attention_fn(softcap=CAP))
    assert attention_fn(softcap=CAP) != attention_fn(softcap=2 * CAP)


def test_override_of_a_call():
    q = inputs(1, LENGTH, HEADS, 4)
    np.testing.assert_array_equal(
        attention_fn(softcap=CAP)(q, q, q, softcap=0.0), attention_fn()(q, q, q)
    )
    np.testing.assert_array_equal(
        attention_fn()(q, q, q, softcap=CAP), attention_fn(softcap=CAP)(q, q, q)
    )


def test_gradients_under_jit():
    x = inputs(2, LENGTH, FEATURES)
    mask = masks()["causal"]

    @nnx.jit
    def gradient(layer):
        return nnx.grad(lambda module: jnp.sum(module(x, mask=mask) ** 2))(layer)

    capped = gradient(nnx_layer(attention_fn(softcap=CAP)))
    spec = gradient(nnx_layer(attention_fn(softcap=CAP, implementation="xla")))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3),
        nnx.to_pure_dict(nnx.state(capped)),
        nnx.to_pure_dict(nnx.state(spec)),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap must not be negative"),
        ({"softcap": float("nan")}, "softcap must be finite"),
        ({"scale": float("inf")}, "scale must be finite"),
        ({"causal_alignment": "left"}, "causal_alignment must be"),
        ({"local_window_size": (1, -1)}, "local_window_size must not be negative"),
        ({"implementation": "imaginary"}, "implementation: no backend 'imaginary'"),
        ({"apply_qk_layer_scaling": True}, "apply_qk_layer_scaling=True divides by layer_number"),
        ({"layer_number": 0}, "layer_number must be an int from 1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        attention_fn(**options)
