"""Reductions, sums that run and sorts of StableHLO, whose regions say what they do, as PyTorch functions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxlib.mlir import ir

from jaxcap.torch_bridge.stablehlo import Unsupported, constant, scalar, type_of

Function = Callable[..., Any]


def _region(op: Any) -> list[Any]:
    return list(op.regions[0].blocks[0].operations)


def _only(op: Any) -> str:
    """The one operation that a reduction's region applies."""
    inside = _region(op)
    if len(inside) != 2 or list(inside[0].operands) != list(op.regions[0].blocks[0].arguments):
        raise Unsupported(f"{op.name} with a region of its own")
    return inside[0].operation.name.removeprefix("stablehlo.")


_FIRST = {"add": 0, "maximum": "min", "minimum": "max", "or": 0, "and": 1}


def _starts_neutral(value: ir.Value, kind: str, dtype: torch.dtype) -> bool:
    """Whether what a reduction begins with changes nothing."""
    owner = value.owner
    if not isinstance(owner, ir.OpView | ir.Operation) or owner.name != "stablehlo.constant":
        return False
    neutral: Any = _FIRST[kind]
    if isinstance(neutral, str):
        ends = {"min": -math.inf, "max": math.inf}
        known = ends[neutral] if dtype.is_floating_point else getattr(torch.iinfo(dtype), neutral)
        neutral = known
    return scalar(constant(owner)) == neutral


def reduce(op: Any) -> Function:
    dims = [int(x) for x in op.attributes["dimensions"]]
    shape, dtype = type_of(op.operands[0])
    kind = _only(op)
    if len(op.operands) != 2 or kind not in _FIRST or not math.prod(shape):
        raise Unsupported(f"a reduction with {kind} of {shape}")
    if not _starts_neutral(op.operands[1], kind, dtype):
        raise Unsupported(f"a reduction with {kind} that begins with a value of its own")
    if kind == "add":
        return lambda x, _: torch.sum(x, dims, dtype=dtype)
    if kind in ("or", "and"):
        if dtype != torch.bool:
            raise Unsupported(f"a reduction with {kind} of integers")
        return lambda x, _: (torch.any if kind == "or" else torch.all)(x, dims)
    return lambda x, _: (torch.amax if kind == "maximum" else torch.amin)(x, dims)


def _neutral_constant(value: ir.Value) -> bool:
    """Zeros, made in one step or two."""
    owner: Any = value.owner
    if owner.name == "stablehlo.broadcast_in_dim":
        return _neutral_constant(owner.operands[0])
    return owner.name == "stablehlo.constant" and scalar(constant(owner)) == 0


def scan(op: Any) -> Function:
    """A cumulative sum: each element and what came before it are added, nothing else."""
    inside = [x.operation.name for x in _region(op)]
    if inside != ["stablehlo.add", "stablehlo.return"] or bool(op.attributes["is_reverse"].value):
        raise Unsupported("a scan that is no cumulative sum")
    if len(op.operands) != 2 or not _neutral_constant(op.operands[1]):
        raise Unsupported("a scan that is no cumulative sum")
    dim, (_, dtype) = int(op.attributes["dimension"]), type_of(op.results[0])

    def running(x, _):
        total = torch.cumsum(x, dim, dtype=dtype)
        return total, total.select(dim, -1)

    return running


def sort(op: Any) -> Function:
    dim = int(op.attributes["dimension"])
    inside = _region(op)
    arguments = list(op.regions[0].blocks[0].arguments)
    simple = len(inside) == 2 and inside[0].operation.name == "stablehlo.compare"
    if not simple or list(inside[0].operands) != arguments[:2] or "LT" not in str(inside[0]):
        raise Unsupported("a sort with an order of its own")

    def in_order(*arrays):
        first, order = torch.sort(arrays[0], dim=dim, stable=True)
        return (first, *(torch.gather(x, dim, order) for x in arrays[1:]))

    return in_order
