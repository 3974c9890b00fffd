"""Sums of the queries' gradients in the order of tensor cores, alone and under context parallelism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import device, fragments
from jaxcap.spec import AttentionSpec
from tests import cases, plain, sharded


def place(row, column, width):
    """Where a kernel adds an element, see the head of `backward_scores.py`."""
    tile, m = divmod(row, 64)
    warp, half, lane = m // 16, m // 8 % 2, m % 8 * 4 + column % 8 // 2
    thread = 32 * warp + lane
    return ((tile * width // 8 + column // 8) * 128 + thread) * 4 + 2 * half + column % 2


@pytest.mark.parametrize(("length", "size"), [(64, 64), (130, 72), (1, 8)])
def test_places(length, size):
    spec = AttentionSpec(2, length, 1, 3, 3, size, size, "bfloat16", 1.0)
    rows = jax.random.normal(jax.random.key(0), (2, length, 3, size), jnp.float32)
    total = fragments.sum_of(rows)
    assert total.shape == fragments.sum_shape(spec)
    np.testing.assert_array_equal(fragments.rows_of(total, length, size), rows)
    flat = np.asarray(total).reshape(2, 3, -1)
    at = np.array([[place(t, h, total.shape[3]) for h in range(size)] for t in range(length)])
    np.testing.assert_array_equal(flat[:, :, at], np.moveaxis(rows, 1, 2))
    assert np.count_nonzero(flat) == rows.size


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize(
    ("length", "sums"), [(256, True), (200, False)], ids=["tiles", "half a tile"]
)
@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_parts_add_up(kind, length, sums, monkeypatch):
    """Where the kernels are chosen and the program yet runs on a CPU, another backend's parts are added."""
    added, add_part = [], fragments.add_part
    monkeypatch.setattr(device, "platform", lambda *arrays: "sm90")
    monkeypatch.setattr(fragments, "add_part", lambda *x: added.append(x[1]) or add_part(*x))
    sizes = {"query_length": length, "key_length": length, "head_size": 24, "value_size": 8}
    case = cases.Case("sums", **sizes, batch=1, query_heads=2, kv_heads=1, is_causal=True)
    plain.forget_programs()
    sharded.program.cache_clear()
    sharded.check(case, sharded.Setting(kind, "zigzag", (2,), backend=None), "bfloat16")
    plain.forget_programs()
    sharded.program.cache_clear()
    assert bool(added) == sums
    # Of the second half of the queries, too.
    assert {spec.query_sum.first for spec in added} == ({0, 64} if sums else set())
