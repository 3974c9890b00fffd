"""Mosaic GPU kernels on PyTorch's streams: compiled by jaxlib's CUDA plugin, launched without JAX's runtime.

A serialised kernel becomes a host function that encodes the TMA descriptors, which travel as arguments of
the kernel, and launches it: no copy, no allocation, no synchronisation, so it can be captured in a graph.
"""

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable

import torch

from jaxcap.torch_bridge import context

#: What TMA and vector loads need of every buffer, in bytes.
ALIGNMENT = 16

_lock = threading.Lock()
_Launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@functools.cache
def _plugin() -> ctypes.CDLL | None:
    """The library with Mosaic GPU's compiler; loading it starts no JAX backend."""
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            path = importlib.import_module(name)._get_library_path()
        except ImportError:
            continue
        if path is not None:
            import jax.experimental.mosaic.gpu  # noqa: F401  (tells the compiler where ptxas is)

            library = ctypes.CDLL(str(path))
            library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
            library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
            return library
    return None


def missing() -> str | None:
    """Why kernels cannot be launched from here, or None."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if _plugin() is None:
        return "JAX's CUDA plugin is not installed (jax[cuda13] or jax[cuda12])"
    return None


@functools.cache  # programs that differ around a kernel share it
def load(module: bytes, device: int) -> Callable[[int, ctypes.Array], None]:
    """`launch(stream, addresses)` of a kernel on a device; it stays loaded as long as the process."""
    library = _plugin()
    if library is None:
        raise RuntimeError(str(missing()))
    with _lock, context.on_device(device):
        compiled = library.MosaicGpuCompile(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic GPU could not compile a kernel; its log is on stderr")
    function, host = compiled[0], _Launch(compiled[1])
    return lambda stream, addresses: host(function, stream, addresses)


def current_stream(device: int) -> int:
    """The address of PyTorch's current stream on a device."""
    return torch._C._cuda_getCurrentRawStream(device)
