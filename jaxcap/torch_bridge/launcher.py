"""Mosaic GPU kernels on PyTorch's streams: compiled by jaxlib's CUDA plugin, launched without JAX's runtime.

A serialised kernel becomes a host function that encodes the TMA descriptors, which travel as arguments of
the kernel, and launches it: no copy, no allocation, no synchronisation, so it can be captured in a graph.
"""

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jaxcap.pallas import compiler
from jaxcap.torch_bridge import context

#: What TMA and vector loads need of every buffer, in bytes.
ALIGNMENT = 16

_lock = threading.Lock()
Launch = Callable[[int, ctypes.Array], None]  # (stream, addresses)


class Interface(NamedTuple):
    """The library with Mosaic GPU's compiler, and whether its kernels are launched as since JAX 0.12."""

    library: Any
    by_library: bool


@functools.cache
def _plugin() -> Interface | None:
    """The interface of the CUDA plugin; loading it starts no JAX backend."""
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            path = importlib.import_module(name)._get_library_path()
            version = importlib.import_module(f"{name}.version").__version_info__
        except ImportError:
            continue
        if path is not None:
            import jax.experimental.mosaic.gpu  # noqa: F401  (tells the compiler where ptxas is)

            library = ctypes.CDLL(str(path))
            library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
            library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
            return Interface(library, tuple(version[:2]) >= (0, 12))
    return None


def missing() -> str | None:
    """Why kernels cannot be launched from here, or None."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if _plugin() is None:
        return "JAX's CUDA plugin is not installed (jax[cuda13] or jax[cuda12])"
    return None


@functools.cache  # programs that differ around a kernel share it
def load(module: bytes, device: int) -> Launch:
    """`launch(stream, addresses)` of a kernel on a device; it stays loaded as long as the process."""
    interface = _plugin()
    if interface is None:
        raise RuntimeError(str(missing()))
    compiler.warn(compiler.slow())
    with _lock, context.on_device(device):
        compiled = interface.library.MosaicGpuCompile(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic GPU could not compile a kernel; its log is on stderr")
    function, address = compiled[:2]
    pointer = ctypes.c_void_p
    if interface.by_library:  # of any kernel
        kernel = compiled[2]
        host = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, pointer, ctypes.c_int)(address)
        return lambda stream, addresses: host(kernel, function, stream, addresses, device)
    host = ctypes.CFUNCTYPE(None, pointer, pointer, pointer)(address)  # of this kernel
    return lambda stream, addresses: host(function, stream, addresses)


def current_stream(device: int) -> int:
    """The address of PyTorch's current stream on a device."""
    return torch._C._cuda_getCurrentRawStream(device)
