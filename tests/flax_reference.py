"""The Flax modules' arithmetic in float64 NumPy, on their own parameters: RoPE, projections, a layer.

Attention itself is `tests.oracle`'s. It imports nothing of jaxcap; parameters are nested dicts of arrays.
"""

from typing import Any

import numpy as np

from tests import oracle

Array = np.ndarray


def wide(tree: Any) -> Any:
    """Nested mappings of arrays as dicts of float64."""
    if hasattr(tree, "items"):
        return {name: wide(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)


def rope(x: Array, positions: Array, windows: tuple[float, float], method: str) -> Array:
    """`[B, T, N, H]`, pair by pair as a product of complex numbers."""
    half = x.shape[-1] // 2
    scale = windows[0] * (windows[1] / windows[0]) ** (np.arange(half) / half)
    turn = np.exp(1j * np.asarray(positions)[..., None, None] / scale)
    out = np.empty_like(x)
    if method == "alternate":
        real, imaginary = slice(None, half), slice(half, None)
    else:
        real, imaginary = slice(0, None, 2), slice(1, None, 2)
    turned = (x[..., real] + 1j * x[..., imaginary]) * turn
    out[..., real], out[..., imaginary] = turned.real, turned.imag
    return out


def layer_norm(p: Any, x: Array, epsilon: float = 1e-6) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return normed * p["scale"] + p.get("bias", 0.0)


def rms_norm(p: Any, x: Array, epsilon: float = 1e-6) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"]


def gelu(x: Array) -> Array:
    """The tanh approximation, `jax.nn.gelu`'s default."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def linear(p: Any, x: Array, axes: int = 1) -> Array:
    return np.tensordot(x, p["kernel"], axes) + p.get("bias", 0.0)


def multi_head(
    p: Any,
    x: Array,
    encoded: Array | None = None,
    *,
    rotary: tuple[tuple[float, float], str] | None = None,
    **attention: Any,
) -> Array:
    """Multi-head attention of `[B, T, F]`; keywords are `oracle.Attention`'s."""
    keys = x if encoded is None else encoded
    q, k, v = linear(p["query"], x), linear(p["key"], keys), linear(p["value"], keys)
    if "query_ln" in p:
        q, k = layer_norm(p["query_ln"], q), layer_norm(p["key_ln"], k)
    if rotary is not None:
        q, k = (rope(y, np.arange(y.shape[1]), *rotary) for y in (q, k))
    if "sinks" in p:
        attention["sinks"] = p["sinks"]
    return linear(p["out"], oracle.Attention(q, k, v, **attention).out, 2)


def decoder(
    p: Any, x: Array, encoded: Array, softcap: float | None, scale: float | None = None
) -> Array:
    """A pre-norm decoder layer with causal self-attention, cross-attention and a gelu MLP.

    The Linen module keeps the MLP's matrices beside its attentions, the NNX one in `mlp`.
    """
    mlp = p.get("mlp", p)
    options = {"softcap": softcap, "scale": scale}
    normed = layer_norm(p["self_attention_norm"], x)
    x = x + multi_head(p["self_attention"], normed, is_causal=True, **options)
    normed = layer_norm(p["cross_attention_norm"], x)
    x = x + multi_head(p["encoder_decoder_attention"], normed, encoded, **options)
    normed = layer_norm(p["mlp_norm"], x)
    return x + linear(mlp["wo"], gelu(linear(mlp["wi"], normed)[..., 0, :]))
