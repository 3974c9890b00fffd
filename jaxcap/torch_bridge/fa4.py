"""Backend `fa4`: the package `flash-attn-4`, through `flash_attn.cute.interface`.

Forward, log-sum-exp and gradients are written into XLA's buffers. The kernels are compiled by the library
at the first call of a kind, which takes seconds.
"""

import dataclasses
from typing import Any

from jaxcap.spec import AttentionSpec
from jaxcap.torch_bridge import probe
from jaxcap.torch_bridge.arguments import Call, Mask
from jaxcap.torch_bridge.backend import FlashAttention
from jaxcap.torch_bridge.providers import Build, Provider

_OLDEST_BETA = 36  # of 4.0.0; earlier ones have other parameters
_MODULE = "flash_attn.cute.interface"
_SHARED = (
    "softmax_scale",
    "causal",
    "softcap",
    "window_size_left",
    "window_size_right",
    "seqused_k",
)
_ENTRIES = {
    "flash_attn_func": ("softcap",),
    "flash_attn_varlen_func": ("softcap",),
    "_flash_attn_fwd": (*_SHARED, "out", "lse"),
    "_flash_attn_bwd": (*_SHARED, "dq", "dk", "dv", "deterministic"),
}


@probe.once
def _installed() -> Build:
    version = probe.version_of("flash-attn-4")
    if version is None:
        raise probe.Unusable("not installed")
    numbers = probe.numbers(version)
    if numbers[:1] != (4,) or (numbers == (4, 0, 0) and probe.beta(version) < _OLDEST_BETA):
        raise probe.Unusable(f"version 4.0.0b{_OLDEST_BETA} or newer is needed, found {version}")
    sources = [f / "cute" / "interface.py" for f in probe.folders_of("flash_attn")]
    source = next((s for s in sources if s.exists()), None)
    if source is None:
        raise probe.Unusable(f"version {version} is hidden by another package named flash_attn")
    probe.require(source, _ENTRIES)  # flash-attn 2 brings an older `cute`, which may lie over it
    if probe.file_of("cutlass") is None and not probe.folders_of("cutlass"):
        raise probe.Unusable("needs nvidia-cutlass-dsl, which is not installed")
    return Build(version)


@dataclasses.dataclass(frozen=True)
class FlashAttention4(Provider):
    title = "flash-attn-4"

    def probe(self) -> Build:
        return _installed()

    def supported(self, build: Build) -> tuple[str, ...]:
        return ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")

    def limits(self, spec: AttentionSpec, mask: Mask, build: Build) -> list[str]:
        found = []
        family = spec.platform[2:-1] if spec.platform.startswith("sm") else ""
        if spec.alibi:
            found.append("has no ALiBi")
        if family in ("10", "12") and spec.head_size > 128:
            found.append(f"head size {spec.head_size} is not complete on {spec.platform}")
        if family == "8" and spec.gradients:
            found.append(f"no backward on {spec.platform}")
        if family == "12" and spec.gradients and spec.softcap is not None:
            found.append(f"no backward with a softcap on {spec.platform}")
        if family == "12" and spec.gradients and spec.deterministic:
            found.append(f"no deterministic backward on {spec.platform}")
        return found

    def load(self) -> None:
        probe.load(_MODULE)

    def forward(self, call: Call, out: Any, lse: Any, *, q, k, v, lengths, slopes) -> None:
        del slopes
        whole = lse if lse.is_contiguous() else lse.new_empty(lse.shape)
        keywords = _keywords(call)
        library = probe.load(_MODULE)
        library._flash_attn_fwd(q, k, v, seqused_k=lengths, out=out, lse=whole, **keywords)
        if whole is not lse:
            lse.copy_(whole)

    def backward(
        self, call: Call, dq: Any, dk: Any, dv: Any, *, q, k, v, out, lse, d_out, lengths, **_
    ) -> None:
        probe.load(_MODULE)._flash_attn_bwd(
            *(q, k, v, out, d_out, lse),
            dq=dq,
            dk=dk,
            dv=dv,
            seqused_k=lengths,
            deterministic=call.deterministic,
            **_keywords(call),
        )


def _keywords(call: Call) -> dict[str, Any]:
    def end(size: int) -> int | None:
        return None if size < 0 else size

    return {
        "softmax_scale": call.scale,
        "causal": call.mask.causal,
        "softcap": call.softcap,
        # Its causality is a right end of 0 that the flag alone stands for.
        "window_size_left": end(call.mask.left),
        "window_size_right": None if call.mask.causal else end(call.mask.right),
    }


BACKEND = FlashAttention("fa4", (FlashAttention4(),))
