"""The gradient of the queries, summed over parts of a call in the order in which a kernel adds to it.

Tensor cores leave a product in an order of their own. A sum [B, N, T', H'] in float32, T' and H' rounded up
to 64s, keeps it: part after part is added in place, and rows are made of it once, at the end. Tiles of 64
queries follow each other; a tile has its columns by eights, and each of these 128 threads' four values:

    [tile, 8 columns, warp (16 rows), row, lane (2 columns), (row, row + 8), column]
"""

import math
from typing import Any

import jax.numpy as jnp

from jaxcap.spec import Array, AttentionSpec, Gradients, Operands, QuerySum

#: Rows of a tile: where a part may begin.
ROWS = 64


def _up(length: int) -> int:
    return math.ceil(length / ROWS) * ROWS


def sum_shape(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """Of all queries of `spec`."""
    return spec.batch, spec.query_heads, _up(spec.query_length), _up(spec.head_size)


def rows_of(total: Array, length: int, size: int) -> Array:
    """[B, length, N, size] of a sum."""
    b, n, t, h = total.shape
    x = total.reshape(b, n, t // ROWS, h // 8, 4, 8, 4, 2, 2)
    x = x.transpose(0, 2, 4, 7, 5, 1, 3, 6, 8).reshape(b, t, n, h)
    return x[:, :length, :, :size]


def sum_of(rows: Array) -> Array:
    """The inverse of `rows_of`: zeros where there are no rows or columns."""
    b, length, n, size = rows.shape
    t, h = _up(length), _up(size)
    x = jnp.pad(rows, ((0, 0), (0, t - length), (0, 0), (0, h - size)))
    x = x.reshape(b, t // ROWS, 4, 2, 8, n, h // 8, 4, 2)
    return x.transpose(0, 5, 1, 6, 2, 4, 7, 3, 8).reshape(b, n, t, h)


def add_part(backend: Any, spec: AttentionSpec, operands: Operands, arrays: Any) -> Gradients:
    """The backward of a backend that gives rows, as `spec.query_sum` asks for them."""
    *saved, total = arrays
    place: QuerySum = spec.query_sum  # pyright: ignore[reportAssignmentType]
    found = backend.backward(spec.replace(query_sum=None), operands, *saved)
    part = sum_of(found.query.astype(total.dtype) * (1 / (place.factor or 1.0)))
    stop = place.first + part.shape[2]
    return found._replace(query=total.at[:, :, place.first : stop].add(part))
