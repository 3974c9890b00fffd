"""What makes machine code of the kernels, where their speed depends on it. Imports no Mosaic."""

import functools
import os
import re
import warnings

import jax
import jaxlib.version

from jaxcap import device

#: Mosaic GPU of JAX 0.12.0 compiles with libnvJitLink in place of ptxas where a process can load it, as CUDA
#: from pip always brings it. It takes a kernel for one unit of several and ignores `setmaxnreg`: products are
#: serialised, registers spilled (C7504, C7511, C7512). Measured with 0.12.0.1, see docs/kernels.md.
SLOW = r"0\.12\.0(\.|$)"


def _mapped(library: str) -> bool:
    """Whether this process has a library; False where that cannot be told (no Linux)."""
    try:
        with open("/proc/self/maps") as file:
            return library in file.read()
    except OSError:
        return False


def _hopper() -> bool:
    try:
        return any(device.name_of(x) == "sm90" for x in jax.devices("gpu"))
    except RuntimeError:  # no GPU, or JAX_PLATFORMS leaves it out
        return False


def slow() -> str | None:
    """Why the kernels are slower in this process than they need be; None if they are not.

    The plugin maps the library when it starts, before JAX knows a GPU; PyTorch for CUDA, when imported.
    """
    version = jaxlib.version.__version__
    if not re.match(SLOW, version) or not _mapped("libnvJitLink"):
        return None
    return (
        f"JAX {version} compiles the pallas kernels by libnvJitLink, which ignores setmaxnreg: right, but"
        " up to 2.6 times as slow as with JAX 0.11.2 (pip install 'jax[cuda13]==0.11.2', until a later"
        " JAX has mended it)"
    )


def slow_here() -> str | None:
    """`slow`, where JAX has a GPU that runs them: elsewhere a call is traced for another machine."""
    why = slow()
    return why if why and _hopper() else None


@functools.cache
def warn(why: str | None) -> None:
    """A UserWarning, once a process, where there is a reason."""
    if why:
        package = os.path.dirname(os.path.dirname(__file__))
        warnings.warn(why, skip_file_prefixes=(package, os.path.dirname(jax.__file__)))
