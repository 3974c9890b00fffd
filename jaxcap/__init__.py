"""Softcapped attention for JAX and Flax on NVIDIA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxcap import sharding
from jaxcap.attention import dot_product_attention
from jaxcap.explain import explain
from jaxcap.flax_adapter import attention_fn
from jaxcap.selection import BackendError, use_backend
from jaxcap.sharding import (
    ContextParallel,
    pad_to_multiple,
    reorder_for_load_balance,
    restore_order,
)
from jaxcap.spec import AttentionSpec
from jaxcap.varlen import varlen_attention

if TYPE_CHECKING:
    from jaxcap import linen, nnx
    from jaxcap.nnx import DotProductAttention

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BackendError",
    "ContextParallel",
    "DotProductAttention",
    "attention_fn",
    "dot_product_attention",
    "explain",
    "linen",
    "nnx",
    "pad_to_multiple",
    "reorder_for_load_balance",
    "restore_order",
    "sharding",
    "use_backend",
    "varlen_attention",
]


def __getattr__(name: str) -> Any:
    # flax.nnx and flax.linen take longer to import than all of jaxcap: on first use.
    if name in ("linen", "nnx"):
        return importlib.import_module(f"jaxcap.{name}")
    if name == "DotProductAttention":
        return importlib.import_module("jaxcap.nnx").DotProductAttention
    raise AttributeError(f"module 'jaxcap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
