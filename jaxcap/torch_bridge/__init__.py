"""jaxcap on PyTorch tensors: attention with autograd, and its place in Hugging Face models.

PyTorch is imported when one of the names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcap.torch_bridge.explanation import explain
    from jaxcap.torch_bridge.functional import attention
    from jaxcap.torch_bridge.huggingface import register_with_transformers
    from jaxcap.torch_bridge.module import DotProductAttention
    from jaxcap.torch_bridge.varlen import varlen_attention

__all__ = [
    "DotProductAttention",
    "attention",
    "explain",
    "register_with_transformers",
    "varlen_attention",
]

_MODULES = {
    "DotProductAttention": "module",
    "attention": "functional",
    "explain": "explanation",
    "register_with_transformers": "huggingface",
    "varlen_attention": "varlen",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # this is asked once
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
