"""Dropout keyed by position: known answers, one mask for all backends and shardings, statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcap
from jaxcap import dropout
from jaxcap.spec import Dropout
from tests import conformance, oracle, plain

OURS = ("xla", "blockwise", conformance.TILED.name)
RATE = 0.3
KEY = 5


@pytest.fixture(autouse=True, scope="module")
def tiled_blockwise():
    with conformance.registered(conformance.TILED):
        yield


def words(seed=KEY):
    return np.asarray(jax.random.bits(jax.random.key(seed), (2,), jnp.uint32))


def uniform(batch, heads, t, s, kv_heads=None, dtype="float32"):
    """Queries of zeros, whose probabilities are all 1 / S, and values that tell which keys survive."""
    q = jnp.zeros((batch, t, heads, 8), dtype)
    k = jnp.zeros((batch, s, kv_heads or heads, 8), dtype)
    v = jnp.broadcast_to(jnp.eye(s, dtype=dtype)[None, :, None], (batch, s, kv_heads or heads, s))
    return q, k, v


def survivors(out):
    """[B, N, T, S] bool, from the output for `uniform` inputs."""
    return np.swapaxes(np.asarray(out, np.float32) != 0, 1, 2)


def expected_mask(batch, heads, t, s, seed=KEY, rate=RATE):
    sizes = (np.arange(size) for size in (batch, heads, t, s))
    return oracle.survivors(rate, words(seed), *sizes)


def call(q, k, v, rate=RATE, rng=None, **keywords):
    rng = jax.random.key(KEY) if rng is None else rng
    return jaxcap.dot_product_attention(
        q, k, v, softcap=50.0, dropout_rate=rate, dropout_rng=rng, **keywords
    )


def attend(q, k, v, **keywords):
    return plain.quick_jit(lambda q, k, v: call(q, k, v, **keywords))(q, k, v)


# Known answers.


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(key, counter, answer):
    """As Random123 publishes them for philox4x32-10."""
    found = dropout.philox(tuple(jnp.uint32(k) for k in key), tuple(jnp.uint32(c) for c in counter))
    assert " ".join(f"{int(x):08x}" for x in found) == answer


def test_bits_are_the_documented_word():
    """Word 2 * bit3(q) + bit3(k) of the counter (drop3(k), drop3(q), n, b), one entry at a time."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, 2**31 - 1, (64, 4))
    index[:8] %= 32
    key = words()
    b, n, q, k = (jnp.asarray(x, jnp.int32) for x in index.T)
    found = np.asarray(dropout.bits(jnp.asarray(key), b, n, q, k))

    def drop3(i):
        return int(f"{i:032b}"[:-4] + f"{i:032b}"[-3:], 2)

    for (b, n, q, k), word in zip(index.tolist(), found, strict=True):
        block = oracle.philox(key, (drop3(k), drop3(q), n, b))
        assert word == block[2 * (q >> 3 & 1) + (k >> 3 & 1)]


def test_tiles_are_cut_from_the_whole():
    """Offsets and strides place a tile of a shard in the whole array."""
    batch, head = np.array([3, 0, 70000]), np.array([5, 1])
    place = Dropout(
        jnp.asarray(words())[None],
        jnp.asarray(batch, jnp.int32),
        jnp.asarray(head, jnp.int32),
        jnp.array([7, 2], jnp.int32),
        jnp.array([100000, 3], jnp.int32),
    )
    tile = dropout.keep_tile(RATE, place, 4, 17, 9, 20)
    query, key = 7 + 2 * np.arange(4, 21), 100000 + 3 * np.arange(9, 29)
    expected = oracle.survivors(RATE, words(), batch, head, query, key)
    np.testing.assert_array_equal(tile, expected)


# One mask.


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_every_backend_drops_the_same(backend, kv_heads):
    q, k, v = uniform(2, 4, 21, 37, kv_heads)
    out = attend(q, k, v, implementation=backend)
    np.testing.assert_array_equal(survivors(out), expected_mask(2, 4, 21, 37))
    kept = np.asarray(out)[np.asarray(out) != 0]
    np.testing.assert_allclose(kept, 1 / 37 / (1 - RATE), rtol=1e-5)


@pytest.mark.parametrize("backend", OURS)
def test_masks_leave_the_bits_alone(backend):
    """A causal mask or a length hides entries and moves none."""
    q, k, v = uniform(2, 2, 37, 37)
    out = attend(q, k, v, is_causal=True, implementation=backend)
    visible = np.tril(np.ones((37, 37), bool))
    np.testing.assert_array_equal(survivors(out), expected_mask(2, 2, 37, 37) & visible)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_leaves_the_bits_alone(dtype):
    q, k, v = uniform(1, 2, 21, 37, dtype=dtype)
    for backend in ("xla", "blockwise"):
        out = attend(q, k, v, implementation=backend)
        np.testing.assert_array_equal(survivors(out), expected_mask(1, 2, 21, 37))


def test_positions_do_not_key():
    """Indices key the bits, not positions that a caller gives."""
    q, k, v = uniform(1, 2, 21, 37)
    out = attend(q, k, v, query_positions=jnp.arange(21)[::-1], implementation="xla")
    np.testing.assert_array_equal(survivors(out), expected_mask(1, 2, 21, 37))


@pytest.mark.parametrize("backend", OURS)
def test_broadcast_drops_alike_everywhere(backend):
    """Flax's broadcast_dropout: batch entry and head 0 key all."""
    q, k, v = uniform(3, 4, 21, 37, 2)
    out = attend(q, k, v, dropout_broadcast=True, implementation=backend)
    first = expected_mask(1, 1, 21, 37)
    np.testing.assert_array_equal(survivors(out), np.broadcast_to(first, (3, 4, 21, 37)))


@pytest.mark.parametrize("backend", OURS[:2])
def test_vmapped_axes_count_as_batch(backend):
    """vmap over two axes drops what one batch of all would, whichever operands are mapped."""
    q, k, v = uniform(12, 2, 21, 37)
    expected = expected_mask(12, 2, 21, 37)
    apart = [x.reshape(2, 3, 2, *x.shape[1:]) for x in (q, k, v)]

    def run(q, k, v):
        return call(q, k, v, implementation=backend)

    out = plain.quick_jit(jax.vmap(jax.vmap(run)))(*apart)
    np.testing.assert_array_equal(survivors(out.reshape(12, *out.shape[3:])), expected)
    some = plain.quick_jit(jax.vmap(run, in_axes=(None, None, 0)))
    only_values = some(q[:2], k[:2], v.reshape(6, 2, *v.shape[1:]))
    found = survivors(only_values.reshape(12, *only_values.shape[2:]))
    np.testing.assert_array_equal(found, expected)


def test_leading_axes_count_as_batch():
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in uniform(6, 2, 21, 37))
    out = attend(q, k, v, implementation="xla")
    expected = expected_mask(6, 2, 21, 37)
    np.testing.assert_array_equal(survivors(out.reshape(6, *out.shape[2:])), expected)


@pytest.mark.parametrize("backend", OURS[:2])
@pytest.mark.parametrize("axes", [("data", "heads"), (("data", "heads"), None), (None, "heads")])
def test_sharded_drops_the_same(backend, axes):
    """On 8 devices under plain jit each shard drops its part of the whole array's mask."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "heads"))
    batch, heads = axes
    sharding = NamedSharding(mesh, PartitionSpec(batch, None, heads))
    q, k, v = (jax.device_put(x, sharding) for x in uniform(8, 4, 21, 37))
    out = attend(q, k, v, implementation=backend)
    assert not out.sharding.is_fully_replicated
    np.testing.assert_array_equal(survivors(out), expected_mask(8, 4, 21, 37))


# Keys and rates.


def test_key_types():
    """Typed keys and raw ones of the same seed are the same; other implementations have a say too."""
    q, k, v = uniform(1, 1, 21, 37)

    def run(rng):
        return survivors(attend(q, k, v, rng=rng, implementation="xla"))

    np.testing.assert_array_equal(run(jax.random.PRNGKey(KEY)), run(jax.random.key(KEY)))
    assert (run(jax.random.key(KEY, impl="rbg")) != run(jax.random.key(KEY))).any()
    assert (run(jax.random.key(KEY + 1)) != run(jax.random.key(KEY))).any()


@pytest.mark.parametrize("backend", OURS[:2])
def test_rate_zero_is_off(backend):
    """Neither key nor bits are needed, and the result is bitwise that without the arguments."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 21, 2, 8)) for i in range(3))

    def run(**keywords):
        return plain.quick_jit(
            lambda: jaxcap.dot_product_attention(
                q, k, v, softcap=50.0, implementation=backend, **keywords
            )
        )()

    off = run()
    np.testing.assert_array_equal(run(dropout_rate=0.0), off)
    with_key = run(dropout_rate=0.0, dropout_rng=jax.random.key(0))
    np.testing.assert_array_equal(with_key, off)


@pytest.mark.parametrize("backend", OURS[:2])
@pytest.mark.parametrize("rate", [2.0**-40, 1 - 2.0**-30])
def test_rates_near_the_ends(backend, rate):
    """Almost nothing and almost everything: finite, and still the mask of the definition."""
    q, k, v = uniform(2, 2, 21, 37)
    out = attend(q, k, v, rate=rate, implementation=backend)
    np.testing.assert_array_equal(survivors(out), expected_mask(2, 2, 21, 37, rate=rate))
    assert np.isfinite(np.asarray(out)).all()


def test_threshold():
    assert [dropout.threshold(rate) for rate in (0.0, 0.5, 0.25)] == [0, 2**31, 2**30]
    assert dropout.threshold(np.nextafter(1.0, 0.0)) == 2**32 - 1


@pytest.mark.parametrize("backend", OURS[:2])
def test_gradients_pass_survivors_only(backend):
    """The gradient of a value is the sum of the probabilities that survived, rescaled."""
    q, k, v = uniform(2, 2, 21, 37)
    d_v = plain.quick_jit(jax.grad(lambda v: call(q, k, v, implementation=backend).sum()))(v)
    expected = expected_mask(2, 2, 21, 37).sum(axis=2) / 37 / (1 - RATE)  # [B, N, S]
    np.testing.assert_allclose(d_v, np.swapaxes(expected, 1, 2)[..., None] + 0 * v, rtol=1e-5)


def test_who_cannot_drop_these_entries_says_so():
    """cuDNN and FlashAttention drop others, so they refuse; who does not is tested in conformance."""
    q, k, v = uniform(1, 2, 64, 64, dtype="bfloat16")
    for platform in ("sm80", "sm90", "sm100"):
        plan = jaxcap.explain(
            q, k, v, dropout_rate=RATE, dropout_rng=jax.random.key(0), platform=platform
        )
        for name in {"cudnn", "fa2", "fa3", "fa4"} & set(plan.forward.reasons):
            assert any("drop" in why for why in plan.forward.reasons[name]), name


# Statistics, of a key fixed once and for all: these pass or fail for ever.

LARGE = (4, 8, 128, 128)


@pytest.fixture(scope="module")
def sample():
    sizes = (np.arange(size, dtype=np.int32) for size in LARGE)
    b, n, q, k = np.ix_(*sizes)
    return np.asarray(plain.quick_jit(dropout.bits)(words(), b, n, q, k))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_share_dropped(sample, rate):
    """Within five standard deviations, over all entries and over each head."""
    dropped = sample < dropout.threshold(rate)
    for axes, count in ((None, dropped.size), ((0, 2, 3), dropped.size // LARGE[1])):
        deviation = np.sqrt(rate * (1 - rate) / count)
        assert (np.abs(dropped.mean(axis=axes) - rate) < 5 * deviation).all()


def test_words_are_uniform(sample):
    """Every bit is set half the time, and 256 bins fill evenly."""
    for bit in range(32):
        share = (sample >> np.uint32(bit) & np.uint32(1)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(sample.size)
    counts = np.bincount(sample.ravel() >> np.uint32(24), minlength=256)
    mean = sample.size / 256
    chi_square = ((counts - mean) ** 2 / mean).sum()
    assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size)


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batch", "head", "query", "key"])
@pytest.mark.parametrize("distance", [1, 2, 8, 16])
def test_entries_are_independent(sample, axis, distance):
    """Neighbours, and entries 8 and 16 apart, which share a call of Philox or a lane."""
    distance = min(distance, LARGE[axis] - 1)
    kept = sample >= dropout.threshold(0.5)
    size = LARGE[axis]
    near = np.take(kept, range(size - distance), axis)
    far = np.take(kept, range(distance, size), axis)
    assert abs(correlation(near, far)) < 5


def test_diagonals_and_transposes_are_independent(sample):
    """(q, k) and (k, q), and (q, k) and (q + 8, k + 8), are different entries."""
    kept = sample >= dropout.threshold(0.5)
    off_diagonal = ~np.eye(128, dtype=bool)
    transposed = np.swapaxes(kept, 2, 3)
    assert abs(correlation(kept[:, :, off_diagonal], transposed[:, :, off_diagonal])) < 5 * np.sqrt(
        2
    )
    assert abs(correlation(kept[:, :, :-8, :-8], kept[:, :, 8:, 8:])) < 5


def test_keys_are_independent(sample):
    """Neighbouring seeds have unrelated masks."""
    other = expected_mask(*LARGE, seed=KEY + 1, rate=0.5)
    assert abs(correlation(sample >= dropout.threshold(0.5), other)) < 5
