"""Context parallelism at its edges: shards of one token, odd shards, and names, meshes and advice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcap
from tests import plain, sharded

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

SIZE = 4
CAP = 2.0
ONE: tuple[str, ...] = ("context",)
AXES = {"ring": ONE, "all_gather": ONE, "all_to_all": ONE, "hybrid": ("ring", "heads")}
FUNCTIONS = sharded.FUNCTIONS
ROWS, COLUMNS = P(None, None, "context"), P(None, None, None, "context")


def mesh_of(names=("context",), sizes=(SIZE,), first=0):
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(sizes), devices=devices)


def mesh_for(kind):
    axes = AXES[kind]
    return mesh_of(axes, (2, 2) if len(axes) == 2 else (SIZE,))


def names_for(kind):
    axes = AXES[kind]
    if kind == "hybrid":
        return {"axis_ring": axes[0], "axis_a2a": axes[1]}
    return {"axis_name": axes}


def arrays(queries=SIZE, keys=SIZE):
    return [3 * sharded.normal(1, queries if i == 0 else keys, 4, 16, seed=i) for i in range(3)]


def results(function, arrays, tile):
    """Output, and for a bias its gradient."""
    if tile.dtype == bool:
        return (function(*arrays, None, tile),)
    out, pullback = jax.vjp(lambda tile: function(*arrays, tile, None), tile)
    return out, pullback(jnp.cos(out))[0]


def one_device(q, k, v, bias, mask):
    return jaxcap.dot_product_attention(
        q, k, v, bias=bias, mask=mask, softcap=CAP, implementation="xla"
    )


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def compare(function, arrays, tile):
    run = functools.partial(plain.quick_jit(results, static_argnums=0))
    same(run(function, arrays, tile), run(one_device, arrays, tile))


def tile_of(shape, mask):
    x = sharded.normal(*shape, seed=7)
    return (x > -0.5).at[..., 0].set(True) if mask else 3 * x


# ---- Shards of one token ----


@pytest.mark.parametrize(
    ("kind", "shape", "keys", "mask"),
    [
        ("all_to_all", (1, 1, 4, 4), 4, False),
        ("all_to_all", (1, 4, 1, 8), 8, False),
        ("all_to_all", (1, 1, 4, 4), 4, True),
        ("hybrid", (1, 4, 4, 8), 8, False),
        ("hybrid", (1, 1, 1, 4), 4, False),
        ("hybrid", (1, 4, 4, 4), 4, True),
        ("ring", (1, 1, 4, 4), 4, False),
        ("all_gather", (1, 4, 4, 4), 4, False),
    ],
)
def test_one_query_a_device(kind, shape, keys, mask):
    """A row of the shard is not one of all queries, and a row of all is not the shard's."""
    cp = jaxcap.ContextParallel(axis=AXES[kind], kind=kind, mesh=mesh_for(kind))

    def split(q, k, v, bias, mask):
        return jaxcap.dot_product_attention(
            q, k, v, bias=bias, mask=mask, softcap=CAP, context_parallel=cp, implementation="xla"
        )

    compare(split, arrays(keys=keys), tile_of(shape, mask))


@pytest.mark.parametrize(
    ("kind", "check", "shape", "sizes", "spec"),
    [
        ("all_to_all", True, (1, 4, 4, 8), (4, 8), ROWS),  # the shard's row
        ("all_to_all", False, (1, 1, 4, 8), (4, 8), ROWS),
        ("all_to_all", True, (1, 4, 1, 8), (4, 8), P()),  # a row of all
        ("all_to_all", False, (1, 4, 1, 8), (4, 8), P()),
        ("ring", True, (1, 1, 4, 4), (4, 4), ROWS),
        ("ring", False, (1, 4, 1, 4), (8, 4), COLUMNS),  # the shard's column
        ("all_gather", True, (1, 4, 8, 4), (8, 4), COLUMNS),
        ("all_to_all", True, (1, 1, 4, 4), (4, 4), COLUMNS),
        ("all_gather", True, (1, 1, 8, 1), (8, 4), P()),  # a column of all
        ("ring", False, (1, 1, 1, 1), (8, 4), P()),
        ("all_gather", False, (1, 1, 8, 1), (8, 4), ROWS),
    ],
)
def test_one_token_a_device_in_a_shard_map(kind, check, shape, sizes, spec):
    token = P(None, "context")

    def local(q, k, v, bias):
        return FUNCTIONS[kind](q, k, v, bias, softcap=CAP, implementation="xla", **names_for(kind))

    mapped = jax.shard_map(
        local,
        mesh=mesh_for(kind),
        in_specs=(token, token, token, spec),
        out_specs=token,
        check_vma=check,
    )

    def split(q, k, v, bias, mask):
        return mapped(q, k, v, bias)

    compare(split, arrays(*sizes), tile_of(shape, mask=False))


def inside(kind, *given, mesh=None, **options):
    """The function of a kind on shards of arrays."""
    tokens = P(None, AXES[kind])
    run = functools.partial(FUNCTIONS[kind], softcap=CAP, **(names_for(kind) | options))
    mapped = jax.shard_map(
        run,
        mesh=mesh or mesh_for(kind),
        in_specs=(*[tokens] * 3, *[P()] * (len(given) - 3)),
        out_specs=tokens,
    )
    return jax.eval_shape(mapped, *given)


@pytest.mark.parametrize("kind", AXES)
def test_one_entry_on_a_shard_of_one_token(kind):
    with pytest.raises(ValueError, match="bias of one row and one column .*pass all 4 columns"):
        inside(kind, *arrays(), jnp.ones((1, 4, 1, 1)))


# ---- Lengths ----


@pytest.mark.parametrize(
    ("kind", "queries", "keys", "message"),
    [
        ("ring", 12, 16, "query has length 12, which 4 devices .*multiple of 8: pad to 16"),
        ("all_gather", 16, 12, "key has length 12, which 4 devices"),
        ("all_to_all", 12, 12, "query has length 12, which 4 devices"),
    ],
)
def test_odd_shards_in_zigzag(kind, queries, keys, message):
    with pytest.raises(ValueError, match=message):
        inside(kind, *arrays(queries, keys), load_balance="zigzag")


def test_an_odd_shard_of_the_second_axis_is_none_of_the_ring():
    assert inside("hybrid", *arrays(12, 12), load_balance="zigzag").shape == (1, 12, 4, 16)


# ---- Names ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_axes": "context"}, "axis_name .*batch_axes 'context' .*must be different"),
        ({"head_axis": "context"}, "head_axis 'context' must be different"),
        ({"batch_axes": "data", "head_axis": "data"}, "must be different mesh axes"),
        ({"axis_name": ()}, "axis_name must name at least one mesh axis"),
        ({"axis_name": "nope"}, r"axis_name: the axis 'nope' .*\('context',\)"),
        ({"batch_axes": "nope"}, r"batch_axes: the axis 'nope' .*which has \('context',\)"),
        ({"head_axis": "nope"}, r"head_axis: the axis 'nope' .*which has \('context',\)"),
        ({"head_axis": ("model",)}, "head_axis must be one mesh axis, a string"),
    ],
)
def test_names_in_a_shard_map(options, message):
    with pytest.raises(ValueError, match=message):
        inside("ring", *arrays(), **options)


def test_names_of_the_hybrid():
    with pytest.raises(ValueError, match="axis_ring, axis_a2a .*batch_axes 'heads' .*different"):
        inside("hybrid", *arrays(), batch_axes="heads")
    with pytest.raises(ValueError, match="axis_ring, axis_a2a: the axis 'nope' .*'ring', 'heads'"):
        inside("hybrid", *arrays(), axis_a2a="nope")


def test_options_of_context_parallel():
    with pytest.raises(ValueError, match="head_axis must be one mesh axis"):
        jaxcap.ContextParallel(head_axis=("model",))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh or None, got 'x'"):
        jaxcap.ContextParallel(mesh="x")


# ---- Meshes and advice ----


@pytest.mark.parametrize("jit", [True, False])
def test_a_mesh_of_other_devices(jit):
    cp = jaxcap.ContextParallel(kind="ring", mesh=mesh_of())
    call = functools.partial(jaxcap.dot_product_attention, softcap=CAP, context_parallel=cp)
    call = jax.jit(call) if jit else call
    message = "device ids" if jit else r"over the devices \[0, 1, 2, 3\], the mesh in use over"
    with jax.set_mesh(mesh_of(first=4)), pytest.raises(ValueError, match=message):
        call(*arrays())


@pytest.mark.parametrize("kind", ["hybrid", "auto"])
def test_another_kind_than_hybrid_needs_another_order(kind):
    mesh = mesh_of(("ring", "heads"), (4, 2))
    options = {"axis": ("ring", "heads"), "kind": kind, "mesh": mesh}
    q = jnp.ones((1, 16, 3, 8))
    for load_balance in ("zigzag", "striped"):
        cp = jaxcap.ContextParallel(**options, load_balance=load_balance)
        with pytest.raises(ValueError, match=r"reorder the arrays for size=8 then, not 4, or use"):
            jaxcap.explain(q, q, q, context_parallel=cp)


def test_the_order_that_the_advice_asks_for():
    mesh = mesh_of(("ring", "heads"), (4, 2))
    x = [jaxcap.reorder_for_load_balance(a, 8) for a in arrays(16, 16)]
    cp = jaxcap.ContextParallel(("ring", "heads"), "ring", "zigzag", mesh=mesh)
    run = functools.partial(
        jaxcap.dot_product_attention, softcap=CAP, is_causal=True, implementation="xla"
    )
    got = plain.quick_jit(functools.partial(run, context_parallel=cp))(*x)
    same([jaxcap.restore_order(got, 8)], [plain.quick_jit(run)(*arrays(16, 16))])
