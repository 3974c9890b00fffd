"""What surrounds a kernel, op by op: from a StableHLO operation to a function of PyTorch tensors.

Only what jaxcap's own programs hold. An operation that is not here raises `Unsupported`, and the call goes
through JAX instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from jaxcap.torch_bridge import reductions
from jaxcap.torch_bridge.stablehlo import Unsupported, scalar, type_of

Function = Callable[..., Any]
_BLIND = ("broadcast_in_dim", "reshape", "bitcast_convert", "slice", "concatenate", "transpose")


def _ints(op: Any, name: str) -> list[int]:
    if name not in op.attributes:
        return []
    return [int(x) for x in op.attributes[name]]


def _dims(op: Any, name: str) -> list[int]:
    """Of the dot's dimension numbers, which have no binding of their own in every release."""
    from jaxlib.mlir.dialects import stablehlo

    return list(
        getattr(stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"]), name)
    )


def _broadcast(op: Any) -> Function:
    shape, _ = type_of(op.result)
    places = _ints(op, "broadcast_dimensions")
    known, _ = type_of(op.operands[0])
    view = [1] * len(shape)
    for place, size in zip(places, known, strict=True):
        view[place] = size
    order = sorted(range(len(places)), key=places.__getitem__)
    plain = order == list(range(len(places)))
    return lambda x: (x if plain else x.permute(order)).reshape(view).expand(shape)


def _compare(op: Any) -> Function:
    direction = str(op.attributes["comparison_direction"]).split()[-1].rstrip(">")
    return getattr(torch, direction.lower())


def _slice(op: Any) -> Function:
    bounds = zip(
        _ints(op, "start_indices"), _ints(op, "limit_indices"), _ints(op, "strides"), strict=True
    )
    index = tuple(slice(*b) for b in bounds)
    return lambda x: x[index]


def _dynamic_slice(op: Any) -> Function:
    sizes = _ints(op, "slice_sizes")

    def cut(x, *starts):
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            first = min(max(int(scalar(start)), 0), x.shape[dim] - size)
            x = x.narrow(dim, first, size)
        return x

    return cut


def _pad(op: Any) -> Function:
    low, high, inner = (
        _ints(op, f"edge_padding_{side}") if side != "inner" else _ints(op, "interior_padding")
        for side in ("low", "high", "inner")
    )
    if any(inner) or min([*low, *high, 0]) < 0:
        raise Unsupported("padding between elements")
    shape, dtype = type_of(op.result)
    place = tuple(slice(a, n - b) for a, b, n in zip(low, high, shape, strict=True))

    def pad(x, value):
        if not any(low) and not any(high):
            return x
        out = torch.empty(shape, dtype=dtype, device=x.device)
        out.copy_(value.to(x.device).expand(shape))
        out[place] = x
        return out

    return pad


def _iota(op: Any) -> Function:
    shape, dtype = type_of(op.result)
    dim = int(op.attributes["iota_dimension"])
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return lambda: torch.arange(shape[dim], dtype=dtype).reshape(view).expand(shape)


def _bitcast(op: Any) -> Function:
    _, dtype = type_of(op.result)
    return lambda x: x.view(dtype)


def _dot(op: Any) -> Function:
    """Row by row: everything but the last axis is batch."""
    left, right = (type_of(x)[0] for x in op.operands)
    batches = _dims(op, "lhs_batching_dimensions"), _dims(op, "rhs_batching_dimensions")
    last = _dims(op, "lhs_contracting_dimensions"), _dims(op, "rhs_contracting_dimensions")
    rank = len(left)
    if left != right or batches[0] != batches[1] or last != ([rank - 1], [rank - 1]):
        raise Unsupported("a matrix product")
    if sorted(batches[0]) != list(range(rank - 1)):
        raise Unsupported("a matrix product")
    _, dtype = type_of(op.result)
    order = batches[0]
    wide = dtype if dtype.itemsize > 4 else torch.float32
    fused = _row_sums() if order == [0, 2, 1] and dtype == torch.float32 else None

    def dot(x, y):
        if fused is not None and x.is_cuda and x.is_contiguous() and y.is_contiguous():
            return fused(x, y)
        return (x.to(wide) * y.to(wide)).sum(-1).permute(order).to(dtype)

    return dot


@functools.cache
def _row_sums() -> Function | None:
    """In one pass, where there is Triton (it comes with PyTorch for CUDA)."""
    try:
        from jaxcap.torch_bridge.row_sums import row_sums
    except ImportError:
        return None
    return row_sums


_BINARY = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "shift_right_arithmetic": torch.bitwise_right_shift,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
_UNARY = {
    "negate": torch.neg,
    "exponential": torch.exp,
    "abs": torch.abs,
    "not": torch.bitwise_not,
}


ELEMENTWISE = {*_BINARY, *_UNARY, "compare", "select"}


@functools.cache
def _builders() -> dict[str, Callable[[Any], Function]]:
    found: dict[str, Callable[[Any], Function]] = {
        "broadcast_in_dim": _broadcast,
        "compare": _compare,
        "reduce": reductions.reduce,
        "sort": reductions.sort,
        "chlo.scan": reductions.scan,
        "slice": _slice,
        "dynamic_slice": _dynamic_slice,
        "pad": _pad,
        "iota": _iota,
        "bitcast_convert": _bitcast,
        "dot_general": _dot,
        "select": lambda op: torch.where,
        "reshape": lambda op: functools.partial(_reshape, shape=type_of(op.result)[0]),
        "transpose": lambda op: functools.partial(torch.permute, dims=_ints(op, "permutation")),
        "convert": lambda op: functools.partial(torch.Tensor.to, dtype=type_of(op.result)[1]),
        "reverse": lambda op: functools.partial(torch.flip, dims=_ints(op, "dimensions")),
        "concatenate": lambda op: functools.partial(
            _concatenate, dim=int(op.attributes["dimension"])
        ),
    }
    found |= {name: lambda op, f=f: f for name, f in (_BINARY | _UNARY).items()}
    return found


def _reshape(x: torch.Tensor, *, shape: tuple[int, ...]) -> torch.Tensor:
    return x.reshape(shape)


def _concatenate(*parts: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x for x in parts if x.shape[dim]], dim)


def function_of(op: Any) -> Function:
    """What `op` computes, of tensors in the order of its operands."""
    name = op.operation.name.removeprefix("stablehlo.")
    if name not in _builders():
        raise Unsupported(f"the operation {op.operation.name}")
    unsigned = any("xui" in str(x.type) or "<ui" in str(x.type) for x in op.operands)
    if unsigned and name not in _BLIND:
        raise Unsupported(f"{name} of unsigned integers")
    return _builders()[name](op)
