"""A JAX function around Pallas kernels as a list of steps that PyTorch can run without JAX.

The function is lowered for CUDA once. Calls are inlined, what depends on no argument is computed here and
uploaded once a device, what no result needs is left out, and each Mosaic GPU kernel becomes one launch.
Arrays that XLA would never make in full (a mask of all queries and keys) are refused: `Unsupported`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch
from jaxlib.mlir.dialects import stablehlo as hlo

from jaxcap.torch_bridge import operations
from jaxcap.torch_bridge.stablehlo import Unsupported, constant, scalar, type_of

KERNEL = "mosaic_gpu_v2"
#: Largest array on the way, as a multiple of the largest argument or result.
ROOM = 2


class Result(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Step:
    """`results` slots from `arguments`: slots, or constants as CPU tensors."""

    name: str
    arguments: tuple[Any, ...]
    results: tuple[int, ...]
    function: Callable[..., Any] | None = None  # of tensors
    factor: float = 1.0  # of "scaled"
    kernel: bytes | None = None  # a serialised Mosaic GPU module
    types: tuple[Result, ...] = ()  # of a kernel's results
    aliases: tuple[tuple[int, int], ...] = ()  # (result, argument) of a kernel that share a buffer


@dataclasses.dataclass(frozen=True)
class Program:
    arguments: int
    slots: int
    steps: tuple[Step, ...]
    results: tuple[Any, ...]  # slots or constants

    @property
    def kernels(self) -> list[bytes]:
        return [step.kernel for step in self.steps if step.kernel is not None]


def build(function: Callable[..., Any], *structs: Any) -> Program:
    """The program of `function(*structs)`, pytrees of `jax.ShapeDtypeStruct`."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        traced = jax.jit(function, keep_unused=True).trace(*structs)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        return _Builder(module).program()


def _scaled(x: torch.Tensor, *, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """x * factor in another precision, in one pass."""
    return torch.mul(x, factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))


class _Builder:
    def __init__(self, module: Any):
        self.functions = {op.name.value: op for op in module.body.operations}
        main = self.functions["main"].body.blocks[0]
        self.count = self.arguments = len(main.arguments)
        ends = [*main.arguments, *main.operations[len(main.operations) - 1].operands]
        self.limit = ROOM * max(math.prod(type_of(x)[0]) for x in ends)
        self.steps: list[Step] = []
        self.made: dict[Any, Step] = {}  # by slot
        self.dtypes = {slot: type_of(x)[1] for slot, x in enumerate(main.arguments)}

    def program(self) -> Program:
        results = self.inline(self.functions["main"], list(range(self.arguments)))
        needed = {x for x in results if isinstance(x, int)}
        kept = []
        for step in reversed(self.steps):
            if needed & set(step.results):
                kept.append(step)
                needed |= {x for x in step.arguments if isinstance(x, int)}
        return Program(self.arguments, self.count, tuple(reversed(kept)), tuple(results))

    def inline(self, function: Any, arguments: Sequence[Any]) -> list[Any]:
        block = function.body.blocks[0]
        values = dict(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operands = [values[x] for x in op.operands]
            name = op.operation.name
            if name == "func.return":
                return operands
            if name == "func.call":
                results = self.inline(self.functions[op.callee.value], operands)
            elif name == "stablehlo.optimization_barrier":  # orders XLA's work, computes nothing
                results = operands
            elif name == "stablehlo.constant":
                results = [constant(op)]
            elif name == "stablehlo.custom_call":
                results = self.kernel(op, operands)
            else:
                results = self.plain(op, operands)
            values |= zip(op.results, results, strict=True)
        raise Unsupported("a function without a return")

    def add(
        self, name: str, operands: Sequence[Any], dtypes: Sequence[torch.dtype], **rest: Any
    ) -> list[int]:
        slots = list(range(self.count, self.count + len(dtypes)))
        self.count += len(dtypes)
        self.dtypes |= zip(slots, dtypes, strict=True)
        step = Step(name, tuple(operands), tuple(slots), **rest)
        self.steps.append(step)
        self.made |= dict.fromkeys(slots, step)
        return slots

    def kernel(self, op: Any, operands: list[Any]) -> list[Any]:
        if op.call_target_name.value != KERNEL:
            raise Unsupported(f"the call of {op.call_target_name.value}")
        types = tuple(Result(*type_of(x)) for x in op.results)
        aliases = []
        for attribute in op.output_operand_aliases or ():
            alias = hlo.OutputOperandAlias(attribute)
            (result,) = alias.output_tuple_indices or (0,)
            aliases.append((result, alias.operand_index))
        module = op.attributes["mhlo.backend_config"]["module"].value_bytes
        rest = {"kernel": module, "types": types, "aliases": tuple(aliases)}
        return self.add(KERNEL, operands, [x.dtype for x in types], **rest)

    def plain(self, op: Any, operands: list[Any]) -> list[Any]:
        name = op.operation.name.removeprefix("stablehlo.")
        types = [type_of(x) for x in op.results]
        function = operations.function_of(op)
        largest = max(math.prod(shape) for shape, _ in types)
        if largest > self.limit and name not in ("broadcast_in_dim", "iota"):  # these are views
            raise Unsupported(f"{name} with {largest} elements, which XLA would not make")
        if not any(isinstance(x, int) for x in operands):
            done = function(*operands)
            return list(done) if isinstance(done, tuple) else [done]
        if name == "dynamic_slice" and any(isinstance(x, int) for x in operands[1:]):
            raise Unsupported("a slice that begins where an array says")
        if len(types) == 1 and (slot := self.shortened(name, operands, function, types[0][1])):
            return [slot]
        if name in operations.ELEMENTWISE:
            operands = [_narrowed(x) for x in operands]
        return self.add(name, operands, [dtype for _, dtype in types], function=function)

    def shortened(self, name: str, operands: list[Any], function: Any, dtype: Any) -> int | None:
        """The slot of an operation that goes over memory less often; XLA would have fused it."""
        if name == "dot_general":  # its rows are converted as they are read
            sources = [self.unconverted(x) for x in operands]
            return self.add(name, sources, [dtype], function=function)[0]
        if not dtype.is_floating_point:
            return None
        if name == "multiply" and not isinstance(operands[1], int):
            factor = scalar(operands[1])
            return None if factor is None else self.scaled(operands[0], factor, dtype)
        before = self.made.get(operands[0]) if name == "convert" else None
        if before is not None and before.name in ("scaled", "reshape"):
            return self.scaled(operands[0], 1.0, dtype)
        return None

    def unconverted(self, x: Any) -> Any:
        """What was widened to `x`, if it was."""
        step = self.made.get(x) if isinstance(x, int) else None
        if step is None or step.name != "convert":
            return x
        source = step.arguments[0]
        return source if self.dtypes[source].itemsize < self.dtypes[x].itemsize else x

    def scaled(self, x: Any, factor: float, dtype: torch.dtype) -> int:
        """x * factor as `dtype`: before a change of shape, where it reads what is contiguous."""
        step = self.made.get(x)
        if step is not None and step.name == "reshape":
            inner = self.scaled(step.arguments[0], factor, dtype)
            return self.add("reshape", [inner], [dtype], function=step.function)[0]
        wide = self.dtypes[x].itemsize >= dtype.itemsize
        if step is not None and step.name == "scaled" and factor == 1 and wide:
            x, factor = step.arguments[0], step.factor
        function = functools.partial(_scaled, factor=factor, dtype=dtype)
        return self.add("scaled", [x], [dtype], function=function, factor=factor)[0]


def _narrowed(x: Any) -> Any:
    """A constant of one value as a tensor without axes, which goes with those of any device."""
    if isinstance(x, int) or (value := scalar(x)) is None:
        return x
    return torch.tensor(value, dtype=x.dtype)
