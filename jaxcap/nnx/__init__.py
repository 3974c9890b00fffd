"""Flax NNX modules with capped attention; see `jaxcap.attention_fn` for capping Flax's own.

B batch, T and S query and key length, N query heads, K key/value heads, H head size; masks keep
where they are True.
"""

from jaxcap.keywords import hinted
from jaxcap.modules.layer import TransformerLayerType
from jaxcap.nnx.attention import DotProductAttention
from jaxcap.nnx.layer import TransformerLayer
from jaxcap.nnx.multihead import MultiHeadAttention

__all__ = ["DotProductAttention", "MultiHeadAttention", "TransformerLayer", "TransformerLayerType"]

for _class in (DotProductAttention, MultiHeadAttention, TransformerLayer):
    hinted(_class)
