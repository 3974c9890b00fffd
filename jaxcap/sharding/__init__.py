"""Context parallelism: attention over a sequence that is split over devices.

Outside of a shard_map pass `context_parallel=jaxcap.ContextParallel(...)` to
`jaxcap.dot_product_attention`; inside one use the functions here.
"""

from jaxcap.sharding.config import ContextParallel
from jaxcap.sharding.functions import (
    all_gather_attention,
    all_to_all_attention,
    hybrid_attention,
    ring_attention,
)
from jaxcap.sharding.layout import (
    length_multiple,
    pad_to_multiple,
    positions,
    reorder_for_load_balance,
    restore_order,
)

__all__ = [
    "ContextParallel",
    "all_gather_attention",
    "all_to_all_attention",
    "hybrid_attention",
    "length_multiple",
    "pad_to_multiple",
    "positions",
    "reorder_for_load_balance",
    "restore_order",
    "ring_attention",
]
