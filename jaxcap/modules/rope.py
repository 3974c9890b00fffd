"""Rotary position embedding, as the modules apply it to queries and keys.

Source: Su et al., "RoFormer", arXiv:2104.09864.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcap.sharding.config import ContextParallel
from jaxcap.spec import Array

#: How the coordinates of a head are paired: i with i + 1, or i with i + H/2 (Gemma, Llama, Flax).
GROUP_METHODS = ("consecutive", "alternate")


def check_rotary(size: int, windows: tuple[float, float], group_method: str) -> None:
    """Raise ValueError where a head size, time scales or pairing cannot be rotated with."""
    if size % 2:
        raise ValueError(f"a rotary embedding needs an even head size, got {size}")
    if len(windows) != 2 or not 0 < windows[0] < windows[1]:
        raise ValueError(
            "rotary_pos_emb_windows must be (smallest, largest) time scale,"
            f" 0 < smallest < largest, got {windows!r}"
        )
    if group_method not in GROUP_METHODS:
        raise ValueError(
            f"rotary_pos_emb_group_method must be one of {GROUP_METHODS}, got {group_method!r}"
        )


def rotary_embedding(
    x: Array,
    positions: Array,
    windows: tuple[float, float] = (1, 10000),
    group_method: str = "consecutive",
) -> Array:
    """Rotate pairs of coordinates by an angle that grows with the position.

    Pair i of a head is turned by `position / (w0 * (w1 / w0) ** (2 i / H))` radians; with windows
    (1, theta) these are the usual frequencies `theta ** (-2 i / H)`. Angles and rotation are
    computed in float32 (float64 for float64).

    Args:
      x: `[.., T, N, H]` queries or keys, H even.
      positions: `[T]` or `[.., T]` integers.
      windows: (w0, w1), the smallest and largest time scale in positions.
      group_method: "consecutive" pairs coordinates 2 i and 2 i + 1, "alternate" i and i + H/2.

    Returns:
      `[.., T, N, H]` in the dtype of `x`.

    Raises:
      ValueError: an odd H, wrong windows or group_method, positions that do not fit `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcap.modules.rope import rotary_embedding
      >>> rotary_embedding(jnp.ones((2, 3, 4, 8)), jnp.arange(3)).shape
      (2, 3, 4, 8)
    """
    size = x.shape[-1]
    check_rotary(size, windows, group_method)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be of integers, got {positions.dtype.name}")
    if positions.shape not in (x.shape[-3:-2], x.shape[:-2]):
        raise ValueError(
            f"positions must have shape {list(x.shape[-3:-2])} or {list(x.shape[:-2])},"
            f" got {list(positions.shape)}"
        )
    accumulator = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    exponent = 2 * np.arange(size // 2) / size
    frequency = 1 / (windows[0] * (windows[1] / windows[0]) ** exponent)

    place = positions.astype(accumulator)
    place = place.reshape((1,) * (x.ndim - 2 - place.ndim) + place.shape + (1, 1))
    angle = place * jnp.asarray(frequency, accumulator).reshape((1,) * (x.ndim - 1) + (-1,))
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    wide = x.astype(accumulator)
    if group_method == "alternate":
        first, second = wide[..., : size // 2], wide[..., size // 2 :]
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if group_method == "alternate":
        result = jnp.concatenate(turned, axis=-1)
    else:
        result = jnp.stack(turned, axis=-1).reshape(x.shape)
    return result.astype(x.dtype)


def rotate_pair(
    module: Any,
    query: Array,
    key: Array,
    start: Array | None,
    itself: bool,
    positions: tuple[Array | None, Array | None],
    context_parallel: ContextParallel | None,
) -> tuple[Array, Array]:
    """Query and key `[.., T, N, H]` rotated as a module's rotary_pos_emb fields say.

    `positions` are input_positions and kv_input_positions. None counts from `start`, or 0, in the
    layout that `context_parallel` names; or, of keys in attention to `itself`, is those of queries.
    """
    input_positions, kv_input_positions = positions
    if not module.enable_rotary_pos_emb:
        given = {"input_positions": input_positions, "kv_input_positions": kv_input_positions}
        for name, x in given.items():
            if x is not None:
                raise ValueError(
                    f"{name} are angles of a rotary embedding: set enable_rotary_pos_emb=True;"
                    " causality and windows take query_positions and key_value_positions"
                )
        return query, key

    def count(x: Array) -> Array:
        length = x.shape[-3]
        if context_parallel is not None and context_parallel.load_balance != "contiguous":
            return jnp.asarray(context_parallel.positions(length, x))
        index = jnp.arange(length, dtype=jnp.int32)
        return index if start is None else index + start

    if kv_input_positions is None:
        kv_input_positions = input_positions if itself else None
    windows, method = module.rotary_pos_emb_windows, module.rotary_pos_emb_group_method
    pairs = ((query, input_positions), (key, kv_input_positions))
    rotated = [
        rotary_embedding(x, count(x) if given is None else given, windows, method)
        for x, given in pairs
    ]
    return rotated[0], rotated[1]
