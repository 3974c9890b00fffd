"""`ContextParallel` from the outside: meshes, other axes, transformations, modules, explain, errors."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import sharding
from jaxcap.marks import forget_reports
from tests import plain, sharded

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
T, SIZE = 16, 2
CAP = 5.0


def mesh_of(kind=AUTO, shape=(2, SIZE, 2)):
    count = int(np.prod(shape))
    names = ("data", "context", "model")
    return jax.make_mesh(shape, names, (kind,) * 3, devices=jax.devices()[:count])


def parallel(mesh=None, **changes):
    given = {"axis": "context", "kind": "ring", "load_balance": "zigzag", "mesh": mesh}
    return jaxcap.ContextParallel(**(given | changes))


def qkv(n=4, k=2, batch=4, size=8):
    heads = ((n, 3.0), (k, 1.0), (k, 1.0))
    return [a * sharded.normal(batch, T, h, size, seed=i) for i, (h, a) in enumerate(heads)]


def reordered(*arrays):
    return [jaxcap.reorder_for_load_balance(x, SIZE) for x in arrays]


def restored(tree):
    return jax.tree.map(lambda x: jaxcap.restore_order(x, SIZE), tree)


def same(got, want, tolerance=2e-5):
    def close(a, b):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)

    jax.tree.map(close, got, want)


def attend(q, k, v, cp=None, **options):
    return jaxcap.dot_product_attention(
        q, k, v, softcap=CAP, is_causal=True, context_parallel=cp, **options
    )


def gradients(q, k, v, cp=None, **options):
    def loss(*arrays):
        return jnp.sum(jnp.sin(attend(*arrays, cp, **options)))

    return jax.grad(loss, (0, 1, 2))(q, k, v)


@functools.cache
def wanted(n=4, k=2):
    return plain.quick_jit(gradients)(*qkv(n, k))


# ---- Beside other axes ----


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("named", [True, False])
def test_beside_data_and_model_axes(kind, named):
    """Named in ContextParallel, or left to the compiler or to the arrays' types."""
    mesh = mesh_of(kind)
    cp = parallel(mesh, **({"batch_axes": "data", "head_axis": "model"} if named else {}))
    place = NamedSharding(mesh, P("data", "context", "model"))
    arrays = [jax.device_put(x, place) for x in reordered(*qkv())]
    run = plain.quick_jit(functools.partial(gradients, cp=cp)).lower(*arrays).compile()
    got = run(*arrays)
    same(restored(got), wanted())
    assert all(x.sharding.is_equivalent_to(place, 4) for x in got)
    assert "all-gather" not in run.as_text()


def test_dropout_counts_over_other_axes():
    mesh, (q, k, v) = mesh_of(), qkv()
    options = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1)}
    want = plain.quick_jit(functools.partial(gradients, **options))(q, k, v)
    axes = {"batch_axes": "data", "head_axis": "model"}
    cp = parallel(mesh, kind="all_gather", load_balance="contiguous", **axes)
    got = plain.quick_jit(functools.partial(gradients, cp=cp, **options))(q, k, v)
    same(got, want)

    def local(q, k, v):
        run = functools.partial(sharding.all_gather_attention, axis_name="context", **axes)
        return run(q, k, v, softcap=CAP, is_causal=True, **options)

    spec = P("data", "context", "model")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    got = plain.quick_jit(mapped)(q, k, v)
    same(got, plain.quick_jit(functools.partial(attend, **options))(q, k, v))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_than_the_head_axis(kv_heads):
    mesh = mesh_of(shape=(1, SIZE, 4))
    cp = parallel(mesh, head_axis="model")
    got = plain.quick_jit(functools.partial(gradients, cp=cp))(*reordered(*qkv(8, kv_heads)))
    same(restored(got), wanted(8, kv_heads))


# ---- Transformations ----


@functools.cache
def one_layer():
    q, k, v = qkv(batch=2)
    return (q, k, v), attend(q, k, v)


def test_eager_and_mesh_in_use():
    (q, k, v), want = one_layer()
    with jax.set_mesh(mesh_of(shape=(1, SIZE, 1))):
        same(restored(attend(*reordered(q, k, v), parallel())), want)


def test_mesh_of_the_arrays():
    (q, k, v), want = one_layer()
    place = NamedSharding(mesh_of(shape=(1, SIZE, 1)), P(None, "context"))
    arrays = [jax.device_put(x, place) for x in reordered(q, k, v)]
    same(restored(attend(*arrays, parallel())), want)
    assert "ring over" in str(jaxcap.explain(*arrays, context_parallel=parallel()))


def test_in_a_shard_map_over_another_axis():
    """The batch is the user's own affair; the context axis is still automatic."""
    mesh = mesh_of(shape=(2, SIZE, 1))
    token = P("data")

    def local(q, k, v):
        return attend(q, k, v, parallel())

    run = jax.shard_map(local, mesh=mesh, in_specs=token, out_specs=token, axis_names={"data"})
    got = plain.quick_jit(run)(*reordered(*qkv()))
    same(restored(got), plain.quick_jit(attend)(*qkv()))


@pytest.mark.parametrize(
    ("kind", "load_balance", "options"),
    [
        ("ring", "zigzag", {}),
        ("all_gather", "contiguous", {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1)}),
    ],
)
def test_vmap(kind, load_balance, options):
    cp = parallel(mesh_of(shape=(1, SIZE, 1)), kind=kind, load_balance=load_balance)
    q, k, v = (jnp.stack([x, 2 * x]) for x in qkv(batch=2))
    run = jax.vmap(functools.partial(gradients, **options))
    want = plain.quick_jit(run)(q, k, v)
    moved = [jaxcap.reorder_for_load_balance(x, SIZE, load_balance, axis=2) for x in (q, k, v)]
    got = plain.quick_jit(jax.vmap(functools.partial(gradients, cp=cp, **options)))(*moved)
    same(tuple(jaxcap.restore_order(x, SIZE, load_balance, axis=2) for x in got), want)


def test_scan_and_remat():
    cp = parallel(mesh_of(shape=(1, SIZE, 1)))

    def layers(q, k, v, cp):
        layer = jax.checkpoint(lambda x: attend(x, k, v, cp))
        out, _ = jax.lax.scan(lambda x, _: (layer(x), None), q, None, length=2)
        return jnp.sum(jnp.sin(out))

    run = jax.grad(layers, (0, 1, 2))
    want = plain.quick_jit(functools.partial(run, cp=None))(*qkv())
    got = plain.quick_jit(functools.partial(run, cp=cp))(*reordered(*qkv()))
    same(restored(got), want)


def test_forward_mode_says_that_it_cannot():
    cp, (q, k, v) = parallel(mesh_of(shape=(1, SIZE, 1))), qkv(batch=2)
    with pytest.raises(NotImplementedError, match="under context parallelism"):
        jax.jvp(lambda q: attend(q, k, v, cp), (q,), (q,))


@pytest.mark.parametrize("columns", [True, False])
def test_a_bias_by_rows_or_by_columns(columns):
    """In the user's own shard_map; its gradient too, for which the columns are exchanged."""
    mesh, (q, k, v) = mesh_of(shape=(1, SIZE, 1)), qkv(batch=2)
    token = P(None, "context")
    by = P(None, None, None, "context") if columns else P(None, None, "context")
    biases = (sharded.normal(1, 4, T, T, seed=5), sharded.normal(2, 1, 1, T, seed=6))

    def local(q, k, v, bias, keys):
        run = functools.partial(
            sharding.ring_attention, axis_name="context", load_balance="zigzag", softcap=CAP
        )
        return run(q, k, v, bias) + run(q, k, v, keys)

    specs = (token, token, token, by, by if columns else P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=token)

    def one(q, k, v, bias, keys):
        run = functools.partial(jaxcap.dot_product_attention, q, k, v, softcap=CAP)
        return run(bias) + run(keys)

    def grads(function, q, k, v, biases):
        return jax.grad(lambda b: jnp.sum(jnp.sin(function(q, k, v, *b))))(biases)

    def moved(x, move):
        for axis in (2, 3):
            x = move(x, SIZE, axis=axis) if x.shape[axis] > 1 else x
        return x

    arrays = [moved(x, jaxcap.reorder_for_load_balance) for x in biases]
    got = plain.quick_jit(functools.partial(grads, mapped))(*reordered(q, k, v), arrays)
    want = plain.quick_jit(functools.partial(grads, one))(q, k, v, list(biases))
    same([moved(x, jaxcap.restore_order) for x in got], want)


# ---- Modules ----

WIDTH, HEADS = 16, 2
LAYER = {
    "hidden_size": WIDTH,
    "mlp_hidden_size": 8,
    "num_attention_heads": HEADS,
    "softcap": CAP,
    "enable_rotary_pos_emb": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def test_nnx_layer():
    """Rotary positions follow the layout; the rest of the layer is none of its business."""
    x = sharded.normal(2, T, WIDTH)
    mesh = mesh_of(EXPLICIT, (2, SIZE, 1))
    one, split = (
        jaxcap.nnx.TransformerLayer(**LAYER, context_parallel=cp, rngs=nnx.Rngs(0))
        for cp in (None, parallel())
    )
    want = nnx.jit(lambda layer, x: layer(x))(one, x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(*reordered(x), NamedSharding(mesh, P("data", "context")))
        got = nnx.jit(lambda layer, x: layer(x))(split, placed)
        same(restored(jax.device_get(got)), want)
    with jax.set_mesh(mesh_of(shape=(1, SIZE, 1))):
        attention = jaxcap.DotProductAttention(softcap=CAP, context_parallel=parallel())
        q, k, v = qkv(batch=2)
        same(restored(attention(*reordered(q, k, v), is_causal=True)), attend(q, k, v))


def test_linen_layer():
    x = sharded.normal(2, T, WIDTH)
    with jax.set_mesh(mesh_of(shape=(1, SIZE, 1))):
        one, split = (
            jaxcap.linen.TransformerLayer(**LAYER, context_parallel=cp, deterministic=True)
            for cp in (None, parallel(kind="all_to_all"))
        )
        weights = jax.jit(one.init)(jax.random.key(0), x)
        got = jax.jit(split.apply)(weights, *reordered(x))
        same(restored(got), jax.jit(one.apply)(weights, x))
        attention = jaxcap.linen.DotProductAttention(softcap=CAP, context_parallel=parallel())
        q, k, v = qkv(batch=2)
        same(restored(attention.apply({}, *reordered(q, k, v), is_causal=True)), attend(q, k, v))


def decode_with_nnx(x):
    options = {"context_parallel": parallel(), "rngs": nnx.Rngs(0)}
    jaxcap.nnx.MultiHeadAttention(HEADS, WIDTH, **options)(x, decode=True)


def decode_with_linen(x):
    module = jaxcap.linen.MultiHeadAttention(HEADS, context_parallel=parallel())
    module.init(jax.random.key(0), x, decode=True)


@pytest.mark.parametrize("decode", [decode_with_nnx, decode_with_linen])
def test_a_decoding_module_is_made_without_it(decode):
    with pytest.raises(ValueError, match="make the module that decodes without it"):
        decode(sharded.normal(1, 1, WIDTH))


def test_attention_fn():
    q, k, v = qkv(batch=2, k=4)
    cp = parallel(mesh_of(shape=(1, SIZE, 1)))
    attention = jaxcap.attention_fn(softcap=CAP, is_causal=True, context_parallel=cp)
    same(restored(attention(*reordered(q, k, v))), attend(q, k, v))
    assert linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention)


# ---- Explain and log ----

BF16 = jnp.bfloat16


def explained(n=32, k=8, length=8192, mesh=None, **options):
    keywords = {"softcap": 50.0, "platform": "sm90"}
    cp = {"mesh": mesh_of(shape=(1, 8, 1)) if mesh is None else mesh, "kind": "auto"}
    cp |= {name: options.pop(name) for name in ("load_balance", "axis") if name in options}
    q, kv = (jax.ShapeDtypeStruct((1, length, h, 128), BF16) for h in (n, k))
    return jaxcap.explain(q, kv, kv, context_parallel=parallel(**cp), **keywords, **options)


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        ({"length": 65536, "is_causal": True}, "all_to_all over 'context' (8), zigzag: 8 divides"),
        (
            {"length": 65536, "k": 4, "is_causal": True},
            "ring over 'context' (8), zigzag: 8192 queries",
        ),
        (
            {"is_causal": True, "local_window_size": (100, 0)},
            "ring over 'context' (8), zigzag: the",
        ),
        ({"is_causal": True, "load_balance": "contiguous"}, "all_to_all over 'context' (8)"),
        ({"length": 1024, "k": 4, "is_causal": True}, "all_gather over 'context' (8), zigzag: 128"),
        ({"axis": ("data", "context"), "mesh": (2, 4, 1)}, "hybrid over 'data' (2), 'context' (4)"),
        ({"axis": ("data", "context"), "mesh": (2, 4, 1), "n": 6, "k": 6}, None),
        ({"mesh": (1, 1, 1)}, "ring over 'context' (1), zigzag: one device"),
    ],
)
def test_auto_says_why(options, beginning):
    if "mesh" in options:
        options = options | {"mesh": mesh_of(shape=options["mesh"])}
    if beginning is None:
        with pytest.raises(ValueError, match="needs a multiple of 4 query heads, got 6"):
            explained(**options)
        options = options | {"load_balance": "contiguous"}
        beginning = "ring over 'data' (2), 'context' (4), contiguous: over both axes"
    found = explained(**options)
    assert found.context.startswith(beginning)
    assert (found.forward.backend, found.training.backend) == ("pallas", "pallas")
    assert f"context parallel: {found.context}" in str(found)


def test_a_backend_that_cannot_compute_parts_is_not_used():
    q = jax.ShapeDtypeStruct((1, 8192, 8, 64), BF16)
    cp = parallel(mesh_of(shape=(1, 8, 1)))
    found = jaxcap.explain(q, q, q, is_causal=True, context_parallel=cp, platform="sm80")
    assert "no part of a context-parallel call" in "; ".join(found.forward.reasons["cudnn"])
    assert found.training.backend == "blockwise"
    with pytest.raises(jaxcap.BackendError, match="'cudnn' cannot"):
        attend(*reordered(*qkv(batch=2)), cp, implementation="cudnn")


def test_log(caplog):
    forget_reports()
    q, k, v = qkv(batch=2)
    with caplog.at_level(logging.INFO, "jaxcap"):
        attend(*reordered(q, k, v), parallel(mesh_of(shape=(1, SIZE, 1))))
    assert "a shard of a ring over 'context', 2 devices, zigzag" in caplog.text


# ---- Errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "star"}, "kind must be one of"),
        ({"load_balance": "spiral"}, "load_balance must be one of"),
        ({"axis": ()}, "axis must name at least one"),
        ({"axis": ("a", "a")}, "names an axis twice"),
        ({"kind": "hybrid"}, "needs two axes"),
        ({"batch_axes": "context"}, "must be different mesh axes"),
        ({"head_axis": ("a", "b")}, "head_axis must be one mesh axis"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        parallel(**options)


def test_bad_types():
    with pytest.raises(TypeError, match="axis must be a mesh axis name"):
        parallel(axis=3)
    for module in (jaxcap.DotProductAttention, jaxcap.linen.DotProductAttention):
        with pytest.raises(TypeError, match="context_parallel must be a jaxcap.ContextParallel"):
            module(context_parallel="ring")


def test_hashable():
    assert hash(parallel(axis=["a", "b"])) == hash(parallel(axis=("a", "b")))
    assert parallel() == parallel()
    assert parallel(axis=("context",)).axis == "context"


def call(shape=(2, 2, 2), length=T, n=4, k=2, batch=4, options=None, **changes):
    q, kv = (jnp.ones((batch, length, h, 8)) for h in (n, k))
    return attend(q, kv, kv, parallel(mesh_of(shape=shape), **changes), **(options or {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"length": 18},
            r"query has length 18.*multiple of 4: pad to 20 with jaxcap.pad_to_multiple",
        ),
        ({"axis": "sequence"}, r"names the axis 'sequence', but the mesh has"),
        ({"batch": 3, "batch_axes": "data"}, r"batch_axes \('data',\) are 2 devices.*batch of 3"),
        ({"n": 6, "k": 3, "head_axis": "model"}, r"head_axis 'model' is 2 devices"),
        (
            {"kind": "all_to_all", "n": 3, "k": 3},
            r"needs a multiple of 2 query heads, got 3; use kind='ring'",
        ),
        (
            {"kind": "all_to_all", "n": 12, "k": 3, "shape": (1, 4, 1)},
            r"a multiple of 4, or repeats those that divide 4; got 3",
        ),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)


def test_no_mesh():
    q, k, v = qkv(batch=2)
    with pytest.raises(ValueError, match="needs a mesh: call inside jax.set_mesh"):
        jax.jit(functools.partial(attend, cp=parallel()))(q, k, v)


def test_another_mesh():
    with (
        jax.set_mesh(mesh_of(shape=(1, 4, 1))),
        pytest.raises(ValueError, match="is not the mesh in use"),
    ):
        call(shape=(1, 2, 1))


def test_inside_and_outside_a_shard_map():
    mesh, (q, k, v) = mesh_of(shape=(1, SIZE, 1)), qkv(batch=2)
    token = P(None, "context")
    inside = jax.shard_map(
        lambda q, k, v: attend(q, k, v, parallel()), mesh=mesh, in_specs=token, out_specs=token
    )
    with pytest.raises(ValueError, match="call jaxcap.sharding.ring_attention"):
        inside(q, k, v)
    with pytest.raises(ValueError, match="is not one of a shard_map around this call"):
        sharding.ring_attention(q, k, v, axis_name="context")


@pytest.mark.parametrize("shape", [(1, 4, T // SIZE, T // SIZE), (1, 4, 3, T)])
def test_bad_bias_on_a_shard(shape):
    mesh, (q, k, v) = mesh_of(shape=(1, SIZE, 1)), qkv(batch=2)
    token = P(None, "context")
    run = functools.partial(sharding.ring_attention, axis_name="context")
    mapped = jax.shard_map(
        lambda q, k, v: run(q, k, v, jnp.zeros(shape)), mesh=mesh, in_specs=token, out_specs=token
    )
    with pytest.raises(ValueError, match="bias on a shard must broadcast to"):
        mapped(q, k, v)


def test_keywords_of_the_functions():
    with pytest.raises(ValueError, match="outside of a shard_map"):
        sharding.ring_attention(*qkv(), axis_name="context", context_parallel=parallel())
    with pytest.raises(TypeError, match="unexpected keyword"):
        sharding.all_gather_attention(*qkv(), axis_name="context", soft_cap=3.0)
