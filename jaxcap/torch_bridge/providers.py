"""What every way to FlashAttention has in common: its build, what that lacks, and two calls."""

import dataclasses
from typing import Any, NamedTuple

from jaxcap.spec import AttentionSpec
from jaxcap.torch_bridge import probe
from jaxcap.torch_bridge.arguments import Call, Mask

#: Parts that a build may be without, and what a refusal says.
PARTS = {
    "softcap": "built without softcap",
    "backward": "built without a backward",
    "window": "built without windows, and this mask is one bottom-right",
    "float16": "built without float16",
    "lengths": "built without variable lengths",
    "alibi": "built without ALiBi",
}


class Build(NamedTuple):
    """An installed build: its version, the `PARTS` it lacks, and kernels or flags to judge sizes by."""

    version: str
    without: frozenset[str] = frozenset()
    details: Any = None


@dataclasses.dataclass(frozen=True)
class Provider:
    """A module that FlashAttention comes in. Subclasses probe for it and call it.

    `platforms` are those that the subclass knows to work, unless given. `build` stands for an
    installed one: with it nothing is looked for, and nothing can be called.
    """

    platforms: tuple[str, ...] = ()
    build: Build | None = None

    title = ""  # as in an error message
    packs = False  # whether its backward wants lengths as packed sequences

    def probe(self) -> Build:
        """Raises Unusable, with the reason, where there is none."""
        raise NotImplementedError

    def limits(self, spec: AttentionSpec, mask: Mask, build: Build) -> list[str]:
        """What this library cannot do beside what its build lacks."""
        raise NotImplementedError

    def supported(self, build: Build) -> tuple[str, ...]:
        """Platforms that a build runs on."""
        raise NotImplementedError

    def load(self) -> None:
        """Imports the library. Raises Unusable."""
        raise NotImplementedError

    def forward(self, call: Call, out: Any, lse: Any, **arrays: Any) -> None:
        """Fills `out` [B, T, N, H] and `lse` [B, N, T] from q, k, v, lengths [B], slopes.

        All are tensors, or None. `lse` of a row without keys may be anything.
        """
        raise NotImplementedError

    def backward(self, call: Call, dq: Any, dk: Any, dv: Any, **arrays: Any) -> None:
        """Fills the gradients from q, k, v, out, lse, d_out, lengths, slopes, and where it `packs` bounds.

        `lse` of a row without keys is infinity. dk and dv past a length may be anything.
        """
        raise NotImplementedError

    def reasons(self, spec: AttentionSpec, mask: Mask) -> list[str]:
        try:
            build = self.probe() if self.build is None else self.build
        except probe.Unusable as error:
            return [str(error)]
        platforms = self.platforms or self.supported(build)
        needed = {
            "softcap": spec.softcap is not None,
            "backward": bool(spec.gradients),
            "window": mask.local,
            "float16": spec.dtype == "float16",
            "lengths": spec.kv_lengths,
            "alibi": spec.alibi,
        }
        found = []
        if spec.platform not in platforms:
            found.append(f"is for {', '.join(platforms)}, this call runs on {spec.platform}")
        found += [PARTS[part] for part, use in needed.items() if use and part in build.without]
        found += self.limits(spec, mask, build)
        if not found and self.build is None:
            try:
                self.load()
                if spec.platform.startswith("sm") and not probe.sees_gpu():
                    found.append("PyTorch sees no GPU")
            except probe.Unusable as error:
                found.append(str(error))
        return found
