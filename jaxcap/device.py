"""Which device a call will run on, as far as can be told when it is traced."""

import re
from typing import Any

import jax
from jax.core import Tracer


def name_of(device: Any) -> str:
    """ "cpu", "tpu", or "sm90" and the like for an NVIDIA GPU."""
    if device.platform != "gpu":
        return device.platform
    capability = getattr(device, "compute_capability", None)
    return "sm" + str(capability).replace(".", "") if capability else "gpu"


def named(name: str) -> str:
    """`name`, if `name_of` could have given it.

    Raises:
      ValueError: it could not.
    """
    if not re.fullmatch(r"cpu|tpu|gpu|sm\d{2,3}", name):
        raise ValueError(
            "platform must be 'cpu', 'tpu' or an NVIDIA architecture like 'sm80' (A100), 'sm90' (H100, H200)"
            f" or 'sm100' (B200), got {name!r}"
        )
    return name


def _of_mesh(mesh: Any) -> str | None:
    kind = getattr(mesh.abstract_device, "device_kind", None)
    for device in jax.devices() + (jax.devices("cpu") if kind == "cpu" else []):
        if device.device_kind == kind:
            return name_of(device)
    return None


def platform(*arrays: Any) -> str:
    """From concrete arrays, else the mesh, else `jax.default_device`, else the first device."""
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            return name_of(next(iter(x.devices())))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and (found := _of_mesh(mesh)):
        return found
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return name_of(jax.devices(default)[0])
    return name_of(default if default is not None else jax.devices()[0])
