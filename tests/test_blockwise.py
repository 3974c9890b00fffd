"""What is particular to `blockwise`: small tiles, memory, which tiles it visits, shard_map.

The conformance suite runs all its cases in tiles of 16 by 8 too.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import blockwise, reference
from jaxcap.blockwise import Blockwise
from jaxcap.chunks import Chunks, tile_size
from jaxcap.spec import AttentionSpec, Gradients, Operands
from jaxcap.tile_tables import pairs
from jaxcap.tiles import Grid
from tests import cases, conformance, plain

SMALL = Blockwise("blockwise_small", lambda spec: (16, 24))  # wider than it is high
GIB = 2**30


@pytest.fixture(scope="module", autouse=True)
def _small_tiles():
    with conformance.registered(SMALL):
        yield


@pytest.mark.parametrize(
    "name", ["everything", "window_both", "both_lengths", "segments_packed", "bias_shared", "mask"]
)
def test_wide_tiles(name):
    conformance.check(SMALL.name, cases.BY_NAME[name], "float32")


@pytest.mark.parametrize("name", ["everything", "causal_uncapped"])
def test_float64(name):
    with jax.enable_x64(True):
        conformance.check(SMALL.name, cases.BY_NAME[name], "float64")


def _spec(operands: Operands, **changes) -> AttentionSpec:
    size = operands.query.shape[-1]
    spec = AttentionSpec(
        1, 1, 1, 1, 1, size, size, operands.query.dtype.name, size**-0.5, **changes
    )
    return spec.with_shapes_of(operands)


def _training(backend, spec):
    def step(operands, d_out):
        here = spec.with_shapes_of(operands)
        out, lse = backend.forward(here, operands)
        return out, lse, backend.backward(here, operands, out, lse, d_out, None)

    return step


def _xla_training(spec):
    def step(operands, d_out):
        def run(q, k, v):
            return reference.BACKEND.forward(spec, operands._replace(query=q, key=k, value=v))[0]

        out, pullback = jax.vjp(run, *operands[:3])
        return out, pullback(d_out)

    return step


def _abstract(b, t, s, n, kv_heads, size, dtype="float32") -> tuple[Operands, jax.ShapeDtypeStruct]:
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    kv = array(b, s, kv_heads, size)
    return Operands(array(b, t, n, size), kv, kv), array(b, t, n, size)


def _compiled(step, *args):
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(step, compiler_options=options).lower(*args).compile()


def _shapes(compiled) -> set[tuple[int, ...]]:
    found = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", compiled.as_text())
    return {tuple(map(int, shape.split(","))) for shape in found}


def _quadratic(shapes, t, s) -> list[tuple[int, ...]]:
    return [shape for shape in shapes if np.prod(shape) >= t * s]


GRADIENTS = ("query", "key", "value")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_no_buffer_of_all_logits(dtype, softcap):
    t, s = 4099, 4101  # of no tile a multiple
    operands, d_out = _abstract(1, t, s, 2, 1, 8, dtype)
    ids = [jax.ShapeDtypeStruct((1, size), jnp.int32) for size in (t, s)]
    operands = operands._replace(query_segment_ids=ids[0], kv_segment_ids=ids[1])
    spec = _spec(operands, softcap=softcap, is_causal=True, segment_ids=True, gradients=GRADIENTS)
    compiled = _compiled(_training(blockwise.BACKEND, spec), operands, d_out)
    shapes = _shapes(compiled)
    assert not _quadratic(shapes, t, s)
    # Nor a copy of q, k or v padded to whole tiles.
    padded = [shape for shape in shapes if any(size in shape for size in range(4102, 4700))]
    assert all(np.prod(shape) < 2 * t for shape in padded)  # segment ids alone
    uncut = _compiled(_xla_training(spec), operands, d_out)
    assert _quadratic(_shapes(uncut), t, s)


def test_memory_at_32768():
    length = 32768
    operands, d_out = _abstract(1, length, length, 4, 4, 64)
    spec = _spec(operands, softcap=50.0, is_causal=True, gradients=GRADIENTS)
    compiled = _compiled(_training(blockwise.BACKEND, spec), operands, d_out)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * GIB
    assert not _quadratic(_shapes(compiled), length, length)
    uncut = _compiled(_xla_training(spec), operands, d_out)
    assert uncut.memory_analysis().temp_size_in_bytes > 16 * GIB


def test_a_bias_gradient_takes_no_more_than_the_bias():
    t = s = 4096
    operands, d_out = _abstract(2, t, s, 2, 2, 8)
    for shape in ((1, 2, 1, s), (2, 1, t, 1), (1, 1, 1, 1)):
        given = operands._replace(bias=jax.ShapeDtypeStruct(shape, jnp.float32))
        spec = _spec(given, softcap=50.0, gradients=(*GRADIENTS, "bias"))
        compiled = _compiled(_training(blockwise.BACKEND, spec), given, d_out)
        assert not _quadratic(_shapes(compiled), t, s)


def _random(b, t, s, n=2, kv_heads=1, size=8, seed=0) -> tuple[Operands, jax.Array]:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    kv = (b, s, kv_heads, size)
    return Operands(normal(b, t, n, size) * 9, normal(*kv), normal(*kv)), normal(b, t, n, size)


@pytest.mark.parametrize("masks", ["all", "causal", "window", "lengths", "segments", "mask"])
def test_only_needed_tiles_are_visited(masks, monkeypatch):
    visited = collections.Counter()
    keys = Chunks.keys

    def counted(self, j):
        jax.debug.callback(lambda j: visited.update([int(j)]), j)
        return keys(self, j)

    monkeypatch.setattr(Chunks, "keys", counted)
    operands, _ = _random(2, 64, 96)
    changes = {}
    if masks in ("causal", "window"):
        changes = {"is_causal": True, "window": (20, None) if masks == "window" else None}
    elif masks == "lengths":
        lengths = [jnp.asarray(x, jnp.int32) for x in ((30, 7), (10, 50))]
        operands = operands._replace(query_lengths=lengths[0], kv_lengths=lengths[1])
        changes = {"query_lengths": True, "kv_lengths": True}
    elif masks == "segments":
        ids = [jnp.arange(size, dtype=jnp.int32)[None] // 20 for size in (64, 96)]
        operands = operands._replace(query_segment_ids=ids[0], kv_segment_ids=ids[1])
        changes = {"segment_ids": True}
    elif masks == "mask":
        blocks = np.random.default_rng(0).random((1, 1, 8, 12)) < 0.3
        operands = operands._replace(mask=jnp.asarray(np.kron(blocks, np.ones((8, 8), bool))))
    spec = _spec(operands, softcap=50.0, **changes)
    jax.block_until_ready(blockwise.forward(spec, operands, (8, 8)))
    jax.effects_barrier()

    some, _ = pairs(spec, operands, Grid.of(spec, 8, 8))
    want = np.sum(np.any(np.asarray(some), axis=(0, 1)), axis=0)
    if masks == "lengths":  # there the tiles of an entry are bounded by the longest of the batch
        want = np.array([4] * 7 + [0] * 5)
    assert [visited[j] for j in range(12)] == list(want)
    assert (sum(want) == 96) == (masks == "all")


@pytest.mark.parametrize("masks", ["band", "everything"])
def test_shard_map_with_checked_types(masks):
    """Loop carries must vary over the mesh like the operands; batch and heads are split."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    operands, d_out = _random(4, 40, 56, 4, 2)
    split, whole = P("b", None, "h", None), P()
    specs = Operands(split, split, split)
    changes = {"is_causal": True}
    if masks == "everything":
        ids = [jnp.arange(size, dtype=jnp.int32)[None] // 15 for size in (40, 56)]
        rng = np.random.default_rng(1)
        more = {
            "bias": jnp.asarray(rng.standard_normal((1, 4, 1, 56)), jnp.float32),
            "kv_lengths": jnp.asarray([10, 56, 0, 30], jnp.int32),
            "sinks": jnp.asarray(rng.standard_normal((1, 4)), jnp.float32),
            "query_segment_ids": ids[0],
            "kv_segment_ids": ids[1],
        }
        operands = operands._replace(**more)
        head = P(None, "h")
        specs = specs._replace(
            bias=head, kv_lengths=P("b"), sinks=head, query_segment_ids=whole, kv_segment_ids=whole
        )
        changes |= {"kv_lengths": True, "segment_ids": True, "sinks": True}
    names = tuple(n for n in Gradients._fields if getattr(operands, n) is not None)
    spec = _spec(operands, softcap=20.0, gradients=names, **changes)
    step = _training(SMALL, spec)
    grads = Gradients(split, split, split)
    if masks == "everything":  # sums over the batch: one part a device
        grads = grads._replace(bias=P("b", "h"), sinks=P("b", "h"))
    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, split),
            out_specs=(split, P("b", "h"), grads),
            check_vma=True,
        )
    )
    for got, want in zip(
        jax.tree.leaves(sharded(operands, d_out)),
        jax.tree.leaves(jax.jit(step)(operands, d_out)),
        strict=True,
    ):
        if got.shape != want.shape:
            got = jnp.sum(got, axis=0, keepdims=True)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_plain_jit_splits_batch_and_heads_without_gathering():
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    operands, d_out = _random(4, 40, 56, 4, 2)
    spec = _spec(operands, softcap=20.0, is_causal=True, gradients=GRADIENTS)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("b", None, "h", None)))
    split = jax.tree.map(put, (operands, d_out))
    compiled = jax.jit(_training(SMALL, spec)).lower(*split).compile()
    assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert compiled.output_shardings[0].spec == P("b", None, "h", None)


def test_dropout_does_not_depend_on_the_tiles():
    case = cases.BY_NAME["dropout"]
    inputs = cases.build(case, "float32")
    small, uncut = (conformance.attend(inputs, name) for name in (SMALL.name, "xla"))
    for name, value in uncut.items():
        np.testing.assert_allclose(small[name], value, rtol=2e-4, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("t", [0, 5])
@pytest.mark.parametrize("s", [0, 5])
def test_lengths_of_zero(t, s):
    operands, d_out = _random(2, t, s)
    sinks = jnp.asarray([[1.0, -2.0]])
    operands = operands._replace(sinks=sinks)
    spec = _spec(operands, softcap=9.0, sinks=True, gradients=(*GRADIENTS, "sinks"))
    out, lse, grads = _training(SMALL, spec)(operands, d_out)
    assert out.shape == (2, t, 2, 8)
    assert lse.shape == (2, 2, t)
    if s == 0:
        assert not np.any(out)
        np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, :, None], lse.shape))
    for name in GRADIENTS:
        assert getattr(grads, name).shape == getattr(operands, name).shape
        assert np.all(np.isfinite(getattr(grads, name)))


def test_scan_and_remat():
    case = cases.BY_NAME["gemma_window"]
    inputs = cases.build(case, "float32", poison=False)

    def loss(backend, q, k, v):
        @jax.checkpoint
        def layer(x, _):
            y = jaxcap.dot_product_attention(
                x, k, v, softcap=50.0, is_causal=True, implementation=backend
            )
            return x + y, None

        x, _ = jax.lax.scan(layer, q, None, length=3)
        return jnp.sum(jnp.square(x))

    operands = tuple(jnp.asarray(inputs.operands[n]) for n in GRADIENTS)
    results = [
        plain.quick_jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2)))(*operands)
        for name in (SMALL.name, "xla")
    ]
    for got, want in zip(*results, strict=True):
        scale = float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(got / scale, want / scale, atol=3e-5)


def test_sizes_of_tiles():
    operands, _ = _abstract(8, 512, 512, 4, 2, 64)
    assert blockwise.tile_sizes(_spec(operands)) == (128, 128)
    assert blockwise.tile_sizes(_spec(operands, platform="sm80")) == (512, 1024)
    decode, _ = _abstract(8, 1, 65536, 4, 2, 64)
    assert blockwise.tile_sizes(_spec(decode)) == (128, 8192)
    assert [tile_size(n, 512) for n in (0, 1, 512, 513, 1024, 1100)] == [1, 1, 512, 264, 512, 368]
    for length in range(1, 3000, 7):
        tile = tile_size(length, 512)
        assert tile <= min(length, 512)
        # No tile is empty, and the last one lies inside the array.
        assert (-(-length // tile) - 1) * tile < length
