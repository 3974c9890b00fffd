"""Softcapped attention for JAX and Flax on NVIDIA GPUs."""

from jaxcap import linen, nnx
from jaxcap.attention import dot_product_attention
from jaxcap.explain import explain
from jaxcap.flax_adapter import attention_fn
from jaxcap.nnx import DotProductAttention
from jaxcap.selection import BackendError, use_backend
from jaxcap.spec import AttentionSpec
from jaxcap.varlen import varlen_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BackendError",
    "DotProductAttention",
    "attention_fn",
    "dot_product_attention",
    "explain",
    "linen",
    "nnx",
    "use_backend",
    "varlen_attention",
]
