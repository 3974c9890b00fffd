"""What makes machine code of the kernels, where their speed depends on it. Imports no Mosaic."""

import functools
import re
import warnings

import jaxlib.version

#: Mosaic GPU of JAX 0.12.0 compiles with libnvJitLink in place of ptxas where a process has it, as CUDA from
#: pip always does. It takes a kernel for one unit of several and ignores `setmaxnreg`: products are
#: serialised, registers spilled (C7504, C7511, C7512). Measured with 0.12.0.1, see docs/kernels.md.
SLOW = r"0\.12\.0(\.|$)"


def _mapped(library: str) -> bool:
    try:
        with open("/proc/self/maps") as file:
            return library in file.read()
    except OSError:
        return False


def slow() -> str | None:
    """Why the kernels are slower in this process than they need be; None if they are not."""
    version = jaxlib.version.__version__
    if not re.match(SLOW, version) or not _mapped("libnvJitLink"):
        return None
    return (
        f"JAX {version} compiles the pallas kernels by libnvJitLink, which ignores setmaxnreg: right, but"
        " up to 2.6 times as slow as with JAX 0.11.2 (pip install 'jax[cuda13]==0.11.2')"
    )


@functools.cache
def warn() -> None:
    """A UserWarning, once, where `slow` says why."""
    if why := slow():
        warnings.warn(why, stacklevel=2)
