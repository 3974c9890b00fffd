"""What can be measured: jaxcap's backends and the peers that are installed.

Each maker takes a case and whether to cap, and returns a function of (q, k, v), or raises to say that
it cannot. `framework` tells how to make its arrays, differentiate and wait for it.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

from jaxcap.bench.cases import Case


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    framework: str  # "jax" or "torch"
    capped: bool
    make: Callable[[Case, bool], Callable]
    backward: bool = True


def _jaxcap(backend: str | None, case: Case, capped: bool) -> Callable:
    import jaxcap

    return functools.partial(
        jaxcap.dot_product_attention,
        softcap=case.softcap if capped else None,
        is_causal=case.causal,
        local_window_size=None if case.window_left is None else (case.window_left, 0),
        implementation=backend,
    )


def _cudnn(case: Case, capped: bool) -> Callable:
    import jax

    del capped
    return functools.partial(
        jax.nn.dot_product_attention,
        is_causal=case.causal,
        local_window_size=None if case.window_left is None else (case.window_left, 0),
        implementation="cudnn",
    )


def _tokamax(case: Case, capped: bool) -> Callable:
    import tokamax  # pyright: ignore[reportMissingImports]

    return functools.partial(
        tokamax.dot_product_attention,
        scale=case.head_size**-0.5,
        logits_soft_cap=case.softcap if capped else None,
        is_causal=case.causal,
        local_window_size=None if case.window_left is None else (case.window_left, 0),
        implementation="mosaic",
    )


def _flash(module: str, unbounded: int | None, case: Case, capped: bool) -> Callable:
    function = importlib.import_module(module).flash_attn_func
    window = (unbounded, unbounded) if case.window_left is None else (case.window_left, 0)
    call = functools.partial(
        function,
        softmax_scale=case.head_size**-0.5,
        causal=case.causal,
        window_size=window,
        softcap=case.softcap if capped else 0.0,
    )

    def run(q, k, v):
        out = call(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    return run


def _flex(case: Case, capped: bool) -> Callable:
    from jaxcap.bench import flex

    return flex.make(case, capped)


_FLASH = {
    "fa2": ("flash_attn", "flash_attn", -1, True),
    "fa3": ("flash_attn_interface", "flash_attn_interface", -1, True),
    "fa3-fwd": ("fa3_fwd_interface", "fa3_fwd_interface", -1, False),
    "fa4": ("flash_attn.cute", "flash_attn.cute.interface", None, True),
}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def available() -> dict[str, Implementation]:
    """By name, "+cap" or "plain" at the end; jaxcap first."""
    import jaxcap.selection

    found: list[tuple[str, str, Callable, bool, bool]] = [
        ("jaxcap", "jax", functools.partial(_jaxcap, None), True, True)
    ]
    for backend in jaxcap.selection.backends():
        maker = functools.partial(_jaxcap, backend)
        found.append((f"jaxcap-{backend}", "jax", maker, backend != "cudnn", True))
    found.append(("jax-cudnn", "jax", _cudnn, False, True))
    if _installed("tokamax"):
        found.append(("tokamax", "jax", _tokamax, True, True))
    if _installed("torch"):
        for name, (probe, module, unbounded, backward) in _FLASH.items():
            if _installed(probe):
                maker = functools.partial(_flash, module, unbounded)
                found.append((name, "torch", maker, True, backward))
        found.append(("flex", "torch", _flex, True, True))
    result = {}
    for name, framework, make, can_cap, backward in found:
        for capped in (True, False) if can_cap else (False,):
            full = f"{name}{'+cap' if capped else ' plain'}"
            result[full] = Implementation(full, framework, capped, make, backward)
    return result
