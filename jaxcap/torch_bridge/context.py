"""Which CUDA context is a thread's current one, asked of and told to the driver.

A kernel launch needs the context of its device, and Mosaic GPU ends the process where there is none: a new
thread has none before its first call of CUDA's runtime, and PyTorch makes no such call to say which device
is current. XLA leaves the context of the GPU that it used last behind, which PyTorch then takes for the
current device.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

#: CUDA_ERROR_NOT_INITIALIZED: before cuInit, or in a fork of a process that uses CUDA.
_NOT_INITIALISED = 3


@functools.cache
def _driver() -> Any:
    """CUDA's driver library, or None; its calls are too short to let other threads run."""
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None


def _check(code: int) -> None:
    if code:
        fork = ", as after a fork of a process that uses CUDA" if code == _NOT_INITIALISED else ""
        raise RuntimeError(f"CUDA's driver fails with error {code}{fork}")


def current() -> int | None:
    """The address of this thread's context; None is none."""
    found = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(found)))
    return found.value


@functools.cache
def _of_device(index: int) -> int:
    """The context that PyTorch, JAX and CUDA's runtime share on a device; kernels keep it alive."""
    device, found = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(device), index))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(found), device))
    assert found.value is not None
    return found.value


def is_current(index: int) -> bool:
    """Whether a kernel can be launched on a device as this thread is."""
    return torch._C._cuda_getDevice() == index and current() == _of_device(index)


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """With a device and its context current, and PyTorch's device as before afterwards."""
    with torch.cuda.device(index):
        if current() != _of_device(index):
            _check(_driver().cuCtxSetCurrent(ctypes.c_void_p(_of_device(index))))
        yield


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Around calls of JAX: the thread's context is afterwards what it was."""
    if _driver() is None:
        yield
        return
    before = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(before))  # before CUDA is initialised it stays none
    try:
        yield
    finally:
        after = ctypes.c_void_p()
        failed = _driver().cuCtxGetCurrent(ctypes.byref(after))
        if not failed and after.value != before.value:
            _check(_driver().cuCtxSetCurrent(before))
