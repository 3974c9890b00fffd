"""Blocks of the NNX TransformerLayer around its attentions: norm and MLP."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jaxcap.modules import layer as common
from jaxcap.modules.common import norm_dtype
from jaxcap.nnx.attention import Rngs
from jaxcap.spec import Array

Norm = nnx.LayerNorm | nnx.RMSNorm


def norm(
    kind: str, size: int, epsilon: float, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
) -> Norm:
    make = nnx.LayerNorm if kind == "layernorm" else nnx.RMSNorm
    wide = norm_dtype(dtype, param_dtype)
    return make(size, epsilon=epsilon, dtype=wide, param_dtype=param_dtype, rngs=rngs)


def normalise(norm: Norm | None, x: Array) -> Array:
    """The norm in its own, wide dtype, and its result in the input's; no norm is the identity."""
    return x if norm is None else norm(x.astype(norm.dtype)).astype(x.dtype)


def dropout(rate: float, rngs: nnx.Rngs, broadcast_dims: Sequence[int] = ()) -> nnx.Dropout:
    """Flax's, which keeps a random stream only where it needs one."""
    stream = rngs if rate > 0 else None
    return nnx.Dropout(rate, broadcast_dims=tuple(broadcast_dims), rngs=stream)


class MLP(nnx.Module):
    """`wo(product of activation_i(wi_i(x)))`: one input matrix an activation, as in GeGLU."""

    def __init__(
        self,
        size: int,
        hidden: int,
        mlp_activations: Sequence[common.Activation],
        *,
        dropout: nnx.Dropout,
        kernel_init: Any,
        out_kernel_init: Any,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        self.activations = tuple(common.activations(mlp_activations))
        parts = len(self.activations)
        self.wi = nnx.LinearGeneral(
            size, (parts, hidden), kernel_init=kernel_init, rngs=rngs, **linear
        )
        self.wo = nnx.Linear(hidden, size, kernel_init=out_kernel_init, rngs=rngs, **linear)
        self.dropout = dropout

    def __call__(
        self, x: Array, *, deterministic: bool | None = None, rngs: Rngs | None = None
    ) -> Array:
        parts = self.wi(x)
        product = self.activations[0](parts[..., 0, :])
        for i, function in enumerate(self.activations[1:], 1):
            product = product * function(parts[..., i, :])
        return self.wo(self.dropout(product, deterministic=deterministic, rngs=rngs))
