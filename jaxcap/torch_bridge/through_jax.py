"""A function of JAX arrays on PyTorch tensors: through DLPack, no copy, and no waiting on a GPU.

Order on a GPU. JAX's stream waits for PyTorch's current one when an argument is handed over, and the current
stream waits for JAX's when a result is handed back; the host waits for neither. A result's memory is JAX's:
when its last tensor dies, kernels that read it may still be queued, so JAX gets it back behind them. On a
CPU the call returns when the results are there, since PyTorch may change an argument right after.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import torch

from jaxcap.torch_bridge import context

#: Results whose last reader may still run: (event behind it, the JAX array).
_leaving: collections.deque[tuple[torch.cuda.Event, jax.Array]] = collections.deque()


def _leave(array: jax.Array, device: torch.device) -> None:
    """Holds the array until what is queued on PyTorch's current stream is done."""
    with contextlib.suppress(RuntimeError):  # at the interpreter's end CUDA may be gone
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _leaving.append((event, array))
    with context.kept():
        while _leaving and _leaving[0][0].query():
            _leaving.popleft()


def to_torch(array: jax.Array) -> torch.Tensor:
    tensor = torch.from_dlpack(array)
    if tensor.is_cuda:
        storage = tensor.untyped_storage()
        weakref.finalize(storage, _leave, array, tensor.device).atexit = False
    return tensor


def missing(device: torch.device) -> str | None:
    """Why JAX cannot run on a PyTorch device, or None."""
    if device.type == "cpu":
        return None
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"JAX has no CUDA device ({str(error).splitlines()[0]})"
    return None


class ThroughJax:
    """`through(*tensors)`: a jitted function whose arguments are contiguous tensors of one device."""

    def __init__(self, function: Callable[..., Any], device: torch.device, x64: bool):
        if why := missing(device):
            raise RuntimeError(
                f"this call on {device} runs through JAX, and {why}; install jax[cuda13] or jax[cuda12], and"
                " leave JAX_PLATFORMS unset"
            )
        self.function = jax.jit(function)
        self.device = device
        self.x64 = x64

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a call that runs through JAX cannot be captured in a CUDA graph")
        guard = torch.cuda.device(self.device) if cuda else contextlib.nullcontext()
        with guard, context.kept(), jax.enable_x64(self.x64):
            return self._run(*tensors)

    def _run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """What it makes of JAX's is gone when it returns."""
        arrays = [jax.dlpack.from_dlpack(x.detach()) for x in tensors]
        results = self.function(*arrays)
        if self.device.type != "cuda":
            jax.block_until_ready(results)
        return [to_torch(x) for x in results]
