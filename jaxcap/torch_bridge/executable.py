"""A program on one device: constants uploaded, kernels compiled, steps ready to run."""

import collections
import ctypes
from collections.abc import Callable
from typing import Any

import torch

from jaxcap.torch_bridge import context, launcher
from jaxcap.torch_bridge.program import Program, Result, Step
from jaxcap.torch_bridge.stablehlo import scalar

Environment = list[Any]  # by slot
Runner = Callable[[Environment], None]
Load = Callable[[bytes, int], Callable[[int, Any], None]]


class Executable:
    """`executable(*tensors)`: launches on the current stream of `device`, returns without waiting.

    The tensors are contiguous, on that device, and as the program's arguments say.
    """

    def __init__(self, program: Program, device: torch.device, load: Load = launcher.load):
        self.device = device
        self.cuda = device.type == "cuda"
        self.index = device.index if device.index is not None else 0
        self.arguments = program.arguments
        self.room = (None,) * (program.slots - program.arguments)
        self.constants: list[torch.Tensor] = []
        self.first_constant = program.slots
        with torch.inference_mode(False), torch.no_grad():
            self.steps = [self.runner(program, step, load) for step in program.steps]
            self.results = [self.place(x) for x in program.results]

    def place(self, x: Any) -> int:
        """The slot of an argument; constants are behind the program's own."""
        if isinstance(x, int):
            return x
        self.constants.append(x.contiguous().to(self.device))
        return self.first_constant + len(self.constants) - 1

    def runner(self, program: Program, step: Step, load: Load) -> Runner:
        if step.kernel is not None:
            return self.launch(program, step, load)
        function, results = step.function, step.results
        assert function is not None
        # A constant without axes stays on the host: it becomes an argument of PyTorch's kernel.
        places = [
            x if not isinstance(x, int) and not x.dim() else self.place(x) for x in step.arguments
        ]
        first = results[0]
        if len(results) > 1:

            def several(env):
                values = function(*(env[x] if isinstance(x, int) else x for x in places))
                for slot, value in zip(results, values, strict=True):
                    env[slot] = value

            return several
        if len(places) == 1:
            (only,) = places

            def unary(env):
                env[first] = function(env[only])

            return unary

        def one(env):
            env[first] = function(*(env[x] if isinstance(x, int) else x for x in places))

        return one

    def launch(self, program: Program, step: Step, load: Load) -> Runner:
        assert step.kernel is not None
        kernel, index, device = load(step.kernel, self.index), self.index, self.device
        shared = {argument: result for result, argument in step.aliases}
        made = {r: t for r, t in enumerate(step.types) if r not in dict(step.aliases)}
        fresh: dict[int, Callable[[Environment], torch.Tensor]] = {}
        places: list[int] = []
        for n, x in enumerate(step.arguments):
            if n in shared:
                fresh[n] = _buffer(program, x, step.types[shared[n]], device)
                places.append(-1)
            else:
                places.append(self.place(x))
        first, count = step.results[0], len(places)
        outputs = [(first + r, made[r].shape, made[r].dtype) for r in made]
        plain = not shared and all(x < self.arguments or x >= self.first_constant for x in places)
        Addresses = ctypes.c_void_p * (count + len(step.types))
        stream_of, empty = launcher.current_stream, torch.empty

        def straight(env):
            addresses = [env[x].data_ptr() for x in places]
            for slot, shape, dtype in outputs:
                x = env[slot] = empty(shape, dtype=dtype, device=device)
                addresses.append(x.data_ptr())
            kernel(stream_of(index), Addresses(*addresses))

        def run(env):
            addresses = Addresses()
            for n, place in enumerate(places):
                if place >= 0:
                    x = env[place]
                    if not x.is_contiguous():
                        x = env[place] = x.contiguous()
                else:
                    x = env[first + shared[n]] = fresh[n](env)
                    addresses[count + shared[n]] = x.data_ptr()
                addresses[n] = x.data_ptr()
            for slot, shape, dtype in outputs:
                x = env[slot] = empty(shape, dtype=dtype, device=device)
                addresses[count + slot - first] = x.data_ptr()
            kernel(stream_of(index), addresses)

        return straight if plain else run

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if self.cuda and not context.is_current(self.index):
            with context.on_device(self.index):
                return self.run(tensors)
        return self.run(tensors)

    def run(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        env = [*tensors, *self.room, *self.constants]
        for step in self.steps:
            step(env)
        return [env[x] for x in self.results]


def _spare(program: Program, slot: int) -> bool:
    """Whether a kernel made what lies in a slot for a single reader, who may then write over it."""
    makers = {made: step for step in program.steps for made in step.results}
    read = [x for step in program.steps for x in step.arguments] + [*program.results]
    counts = collections.Counter(x for x in read if isinstance(x, int))
    while counts[slot] == 1 and slot in makers:
        maker = makers[slot]
        if maker.kernel is not None:
            return True
        if maker.name != "reshape" or not isinstance(maker.arguments[0], int):
            return False
        (slot,) = maker.arguments
    return False


def _buffer(
    program: Program, x: Any, result: Result, device: torch.device
) -> Callable[[Environment], torch.Tensor]:
    """What a kernel adds to in place: filled anew for each launch, where others may read the original."""
    if isinstance(x, int):
        if _spare(program, x):
            return lambda env: env[x].contiguous()
        return lambda env: env[x].clone(memory_format=torch.contiguous_format)
    value = scalar(x)
    if value is None:
        original = x.contiguous().to(device)
        return lambda env: original.clone()
    shape, dtype = result
    if value == 0:
        return lambda env: torch.zeros(shape, dtype=dtype, device=device)
    return lambda env: torch.full(shape, value, dtype=dtype, device=device)
