"""Backend `fa3`: FlashAttention 3, which comes under more than one name.

| module | comes with | |
|---|---|---|
| `flash_attn_interface` | the repository's `hopper` folder, `tokenspeed-fa3`, others | as built |
| `fa3_fwd_interface` | `fa3-fwd` | forward, softcap, no windows |

Each is a provider with its own abilities: of several that are installed, the first that can run a call
runs it. `JAXCAP_FA3_PROVIDER` names one to the exclusion of the others.

The forward writes into XLA's output; its log-sum-exp is copied on the device, 4 bytes a row.
"""

import dataclasses
from typing import Any

from jaxcap.environment import ENVIRONMENT
from jaxcap.spec import AttentionSpec
from jaxcap.torch_bridge import probe
from jaxcap.torch_bridge.arguments import Call, Mask
from jaxcap.torch_bridge.backend import FlashAttention
from jaxcap.torch_bridge.providers import Build, Provider

_ENTRIES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
_FORWARD = (
    "out_",
    "seqused_k",
    "softmax_scale",
    "window_size_left",
    "window_size_right",
    "softcap",
)
_BACKWARD = ("dq", "dk", "dv", "softmax_scale", "window_size_left", "softcap", "deterministic")
_FLAGS = {"SOFTCAP": "softcap", "BACKWARD": "backward", "LOCAL": "window", "FP16": "float16"}
_FLAGS |= {"VARLEN": "lengths"}
_SIZES = (64, 96, 128, 192, 256)
#: Under which of these an interface keeps its operators.
_OPERATORS = ("flash_attn_3_gpu", "flash_attn_3_cuda", "fa3_fwd_cuda")


@probe.once
def _installed(interface: str, config: str) -> Build:
    source, settings = probe.file_of(interface), probe.file_of(config)
    if source is None:
        raise probe.Unusable("not installed")
    if settings is None:
        raise probe.Unusable(f"has no {config}, so what it was built with is not known")
    probe.require(source, dict.fromkeys(_ENTRIES, ("softcap",)))
    probe.require(source, {"_flash_attn_forward": _FORWARD, "_flash_attn_backward": _BACKWARD})
    flags = probe.build_flags(settings)
    names = [*_FLAGS, "SM8x", *(f"HDIM{size}" for size in _SIZES)]
    switched = {name: flags.get(f"FLASHATTENTION_DISABLE_{name}") for name in names}
    if unknown := [name for name, off in switched.items() if off is None]:
        raise probe.Unusable(f"{config} does not say whether it has {', '.join(unknown)}")
    without = {part for name, part in _FLAGS.items() if switched[name]}
    return Build(interface, frozenset(without), {name for name, off in switched.items() if off})


@probe.once
def _operators(interface: str) -> Any:
    module = probe.load(interface)
    for name in _OPERATORS:
        if hasattr(module, name):
            return getattr(module, name)
    raise probe.Unusable(f"{interface} has none of {', '.join(_OPERATORS)}")


@dataclasses.dataclass(frozen=True)
class FlashAttention3(Provider):
    interface: str = "flash_attn_interface"
    config: str = "flash_attn_config"
    pinned: str | None = None  # the interface that alone may be used

    complete = frozenset()  # no head size and no architecture is missing

    @property
    def title(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.interface

    def probe(self) -> Build:
        if self.pinned not in (None, self.interface):
            raise probe.Unusable(f"JAXCAP_FA3_PROVIDER={self.pinned} excludes it")
        return _installed(self.interface, self.config)

    def supported(self, build: Build) -> tuple[str, ...]:
        older = () if "SM8x" in build.details else ("sm80", "sm86", "sm87", "sm89")
        return (*older, "sm90")

    def limits(self, spec: AttentionSpec, mask: Mask, build: Build) -> list[str]:
        found = []
        sizes = [size for size in _SIZES if f"HDIM{size}" not in build.details]
        if spec.head_size > max(sizes, default=0):
            found.append(f"this build has head sizes up to {max(sizes, default=0)}")
        if spec.alibi:
            found.append("has no ALiBi")
        if spec.deterministic and spec.gradients and spec.head_size > 192:
            found.append("no deterministic backward at head sizes above 192")
        return found

    def load(self) -> None:
        _operators(self.interface)

    def forward(self, call: Call, out: Any, lse: Any, *, q, k, v, lengths, slopes) -> None:
        del slopes
        _, found, *_ = _operators(self.interface).fwd(
            q, k, v, out=out, seqused_k=lengths, **_keywords(call)
        )
        lse.copy_(found)

    def backward(
        self, call: Call, dq: Any, dk: Any, dv: Any, *, q, k, v, out, lse, d_out, lengths, **_
    ) -> None:
        _operators(self.interface).bwd(
            *(d_out, q, k, v, out, lse),
            dq=dq,
            dk=dk,
            dv=dv,
            seqused_k=lengths,
            deterministic=call.deterministic,
            **_keywords(call),
        )


def _keywords(call: Call) -> dict[str, Any]:
    return {
        "softmax_scale": call.scale,
        "is_causal": call.mask.causal,
        "window_size_left": call.mask.left,
        "window_size_right": call.mask.right,
        "softcap": call.softcap,
    }


def providers(pinned: str | None = None) -> tuple[FlashAttention3, ...]:
    return (
        FlashAttention3(pinned=pinned),
        FlashAttention3(interface="fa3_fwd_interface", config="fa3_fwd_config", pinned=pinned),
    )


BACKEND = FlashAttention("fa3", providers(ENVIRONMENT.fa3_provider))
