"""Types and constants of StableHLO as PyTorch's.

Integers that JAX has unsigned are kept as signed of the same width, which only operations that do not look
at their values may see.
"""

from typing import Any

import numpy as np
import torch
from jaxlib.mlir import ir


class Unsupported(Exception):
    """A program holds something that cannot be replayed with PyTorch."""


_DTYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "ui8": torch.uint8,
    "ui16": torch.int16,
    "ui32": torch.int32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
}


def type_of(value: ir.Value) -> tuple[tuple[int, ...], torch.dtype]:
    shaped = ir.RankedTensorType(value.type)
    name = str(shaped.element_type)
    if name not in _DTYPES:
        raise Unsupported(f"elements of type {name}")
    return tuple(shaped.shape), _DTYPES[name]


def constant(op: Any) -> torch.Tensor:
    """A CPU tensor; one value for all elements is an expanded view of it."""
    shape, dtype = type_of(op.result)
    attribute = op.attributes["value"]
    if ir.DenseElementsAttr(attribute).is_splat:
        value: Any = ir.DenseElementsAttr(attribute).get_splat_value()
        return torch.tensor(value.value, dtype=dtype).expand(shape)
    array = np.array(attribute)  # 16-bit floats have no NumPy type of their own: never dense here
    return torch.from_numpy(array.reshape(shape)).to(dtype)


def scalar(x: torch.Tensor) -> Any:
    """The one value that all elements of a constant share, or None."""
    if x.numel() and all(s == 0 or n == 1 for s, n in zip(x.stride(), x.shape, strict=True)):
        return x[(0,) * x.dim()].item()
    return None
