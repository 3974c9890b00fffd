"""A PyTorch library called by XLA, on XLA's stream, on XLA's buffers.

`buffer_callback` hands over the device buffers and the stream. They become PyTorch views by DLPack;
what is written into the result views is XLA's result: nothing is copied and nobody waits for the GPU.
Temporaries come from PyTorch's allocator while XLA's stream is its current one: a freed block is used
again only by later work on that stream. The buffers themselves are XLA's, which keeps them until
work submitted to that stream is done.

The calls stay out of CUDA graphs (`command_buffer_compatible=False`): in a graph the library's Python would
run once, and its temporaries would be given away while replays still use their addresses.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.buffer_callback import buffer_callback

_CUDA = 2  # kDLCUDA, in DLPack


class LibraryError(RuntimeError):
    """A library that a backend calls raised; the message names the backend and the call."""


def launch(
    name: str, function: Callable, results: Sequence[jax.ShapeDtypeStruct], arrays: dict[str, Any]
) -> tuple[Any, ...]:
    """Arrays that `function(results, **arrays)`, given PyTorch views of all, has filled.

    Args:
      name: what is called, for the error message.
      function: fills the result tensors in place, without waiting for the device.
      results: shapes and dtypes.
      arrays: the operands; None stays None.
    """
    present = {key: x for key, x in arrays.items() if x is not None}
    absent = dict.fromkeys(arrays.keys() - present.keys())
    shapes = ", ".join(f"{key} {x.dtype.name}{list(x.shape)}" for key, x in present.items())

    def callback(context: Any, out: tuple[Any, ...], given: dict[str, Any]) -> None:
        with _readable(name, shapes), _on_stream_of(context, out[0]):
            views = {key: _view(x) for key, x in given.items()}
            function(tuple(_view(x) for x in out), **views, **absent)

    return buffer_callback(callback, tuple(results))(present)


def _view(buffer: Any) -> Any:
    import torch

    # The capsule, not the buffer: PyTorch would order streams that are one and the same.
    return torch.from_dlpack(buffer.__dlpack__())


def _on_stream_of(context: Any, buffer: Any) -> Any:
    import torch

    kind, index = buffer.__dlpack_device__()
    if kind != _CUDA:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device=index))


@contextlib.contextmanager
def _readable(name: str, shapes: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise LibraryError(
            f"{name} failed with {type(error).__name__}: {error} (called with {shapes})"
        ) from None
