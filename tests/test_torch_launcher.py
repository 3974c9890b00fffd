"""Kernels compiled by the CUDA plugin and launched from here, over a CUDA driver that only writes down.

What the plugin launches with takes other arguments since JAX 0.12; wrong ones end the process.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxcap.torch_bridge import context, launcher, program
from tests import compile_sm90

STREAM, BLOCKS = 0xABC0, 7
INPUT, OUTPUT = 0x10000, 0x20000

#: What compiling and launching ask of CUDA's driver, here one of an H200 (75: the major capability).
DRIVER = r"""
#include <stdio.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
int cuModuleLoadData(void** module, const void* data) { *module = (void*)0x200; return 0; }
int cuModuleGetFunction(void** f, void* module, const char* name) { *f = (void*)0x300; return 0; }
int cuFuncSetAttribute(void* f, int which, int value) { return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuCtxGetCurrent(void** now) { *now = (void*)0x100; return 0; }
struct Config { unsigned grid[3], block[3], bytes; void* stream; };
int cuLaunchKernelEx(const struct Config* c, void* f, void** parameters, void** extra) {
  void **first = parameters[0], **second = parameters[1];
  printf("%p of %p and %p on stream %p, %u blocks\n", f, *first, *second, c->stream, c->grid[0]);
  fflush(stdout);
  return 0;
}
"""


def kernel() -> bytes:
    """One number in, a tile out by TMA."""

    def body(x, out, tile):
        tile[...] = jnp.full((64, 64), x[0, 0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0)

    struct = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    made = plgpu.kernel(
        body,
        out_type=[struct],
        grid=(BLOCKS,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32)],
    )
    (module,) = program.build(lambda x: made(x), struct).kernels
    return module


def test_the_installed_plugin_launches(tmp_path):
    compile_sm90.required()
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a driver that plays along")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    driver = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", source, "-o", driver], check=True)
    environment = compile_sm90.environment()
    libraries = environment.get("LD_LIBRARY_PATH", "")
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_torch_launcher"],
        env=environment | {"LD_LIBRARY_PATH": f"{tmp_path}{os.pathsep}{libraries}"},
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    launch = f"0x300 of {INPUT:#x} and {OUTPUT:#x} on stream {STREAM:#x}, {BLOCKS} blocks"
    assert done.stdout.splitlines()[-1] == launch


@pytest.mark.parametrize(
    ("by_library", "wanted"), [(False, (0x300, STREAM)), (True, (0x400, 0x300, STREAM))]
)
def test_arguments_of_a_launch(by_library, wanted, monkeypatch):
    """Before JAX 0.12 and since: a function of this kernel, and one for all."""
    seen = []
    pointers = [ctypes.c_void_p] * (len(wanted) + 1)
    last = [ctypes.c_int] if by_library else []
    host = ctypes.CFUNCTYPE(None, *pointers, *last)(lambda *given: seen.append(given))
    handed = (ctypes.c_void_p * 3)(0x300, ctypes.cast(host, ctypes.c_void_p), 0x400)

    class Library:
        def MosaicGpuCompile(self, module, size):
            assert (module, size) == (b"kernel", 6)
            return ctypes.cast(handed, ctypes.POINTER(ctypes.c_void_p))

    monkeypatch.setattr(launcher, "_plugin", lambda: launcher.Interface(Library(), by_library))
    monkeypatch.setattr(context, "on_device", lambda device: contextlib.nullcontext())
    addresses = (ctypes.c_void_p * 2)(INPUT, OUTPUT)
    launcher.load.__wrapped__(b"kernel", 5)(STREAM, addresses)
    assert seen == [(*wanted, ctypes.addressof(addresses), *[5] * by_library)]


def main() -> None:
    context.on_device = lambda device: contextlib.nullcontext()
    launch = launcher.load(kernel(), 0)
    launch(STREAM, (ctypes.c_void_p * 2)(INPUT, OUTPUT))


if __name__ == "__main__":
    main()
