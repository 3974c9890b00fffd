"""Short calls for tests of single rules: small inputs, jitted once for all calls of the same kind."""

import functools

import jax
import numpy as np
import pytest

import jaxcap
from tests import plain

BOTH = pytest.mark.parametrize("backend", ["xla", "blockwise"])


def normal(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(scale)


def qkv(t=21, s=37, n=2, k=1, batch=2):
    return (
        normal(batch, t, n, 8, scale=12.0),
        normal(batch, s, k, 8, seed=1),
        normal(batch, s, k, 8, seed=2),
    )


@functools.cache
def program(differentiated, items):
    """One compiled program for all calls with the same static arguments (and shapes)."""
    static = {"softcap": 50.0, "return_residual": True} | dict(items)

    def call(operands, arrays):
        return jaxcap.dot_product_attention(*operands, **arrays, **static)

    def with_gradients(operands, arrays, cotangents):
        results, pullback = jax.vjp(lambda *given: call(given, arrays), *operands)
        return results, pullback(cotangents)

    return plain.quick_jit(with_gradients if differentiated else call)


def split(keywords):
    arrays = {k: v for k, v in keywords.items() if isinstance(v, np.ndarray | jax.Array)}
    static = {k: v for k, v in keywords.items() if k not in arrays and k != "dropout_rng"}
    if "dropout_rng" in keywords:
        arrays["dropout_rng"] = keywords["dropout_rng"]
    return arrays, tuple(sorted(static.items()))


def attend(*operands, **keywords):
    """(out, lse) under jit; arrays among the keywords are traced."""
    arrays, static = split(keywords)
    return jax.tree.map(np.asarray, program(False, static)(operands, arrays))


def attend_and_gradients(operands, cotangents, **keywords):
    """((out, lse), gradients of query, key, value and of bias where it is given)."""
    arrays, static = split(keywords)
    found = program(True, static)(tuple(operands), arrays, cotangents)
    return jax.tree.map(np.asarray, found)


def same(a, b, **tolerance):
    tolerance = tolerance or {"rtol": 2e-5, "atol": 2e-6}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def seen(backend, t=7, s=9, **keywords):
    """[T, S] bool: which keys a query attends, from values that name their key."""
    q, k = normal(1, t, 1, 8), normal(1, s, 1, 8, seed=1)
    v = np.eye(s, dtype=np.float32)[None, :, None]
    return attend(q, k, v, implementation=backend, **keywords)[0][0, :, 0] > 0


def picture(kept):
    return ["".join(".#"[int(x)] for x in row) for row in kept]
