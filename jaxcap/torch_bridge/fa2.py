"""Backend `fa2`: the package `flash-attn`, 2.6.0 and newer, through its extension `flash_attn_2_cuda`.

The entry points take `out` and the three gradients, so the kernels write where XLA wants them. The
log-sum-exp is the exception: they allocate it, and it is copied on the device, 4 bytes a row.
"""

import dataclasses
from typing import Any

from jaxcap.spec import AttentionSpec
from jaxcap.torch_bridge import probe
from jaxcap.torch_bridge.arguments import Call, Mask
from jaxcap.torch_bridge.backend import FlashAttention
from jaxcap.torch_bridge.providers import Build, Provider

_OLDEST = (2, 6, 0)
_LEFTPAD = (2, 6, 3)  # the entry for lengths has its present parameters since then
_EXTENSION = "flash_attn_2_cuda"
_ENTRIES = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
_MESSAGES: dict[str, str] = {
    "softcap": "softcap",
    "backward": "backward",
    "local attention": "window",
}


def head_sizes(version: tuple[int, ...]) -> tuple[int, ...]:
    """What head sizes are rounded up to: one kernel each."""
    sizes = (32, 64, 96, 128, 192, 256)
    if version < (2, 8):
        sizes += (160,)
    if version < (2, 7, 3):
        sizes += (224,)
    return tuple(sorted(sizes))


@probe.once
def _installed() -> Build:
    version = probe.version_of("flash-attn")
    if version is None:
        raise probe.Unusable("not installed")
    if not _OLDEST <= probe.numbers(version) < (3,):
        raise probe.Unusable(f"version 2.6.0 or newer, below 3, is needed, found {version}")
    folders, binary = probe.folders_of("flash_attn"), probe.file_of(_EXTENSION)
    if not folders or binary is None:
        raise probe.Unusable(f"version {version} is installed without its kernels, {_EXTENSION}")
    probe.require(folders[0] / "flash_attn_interface.py", dict.fromkeys(_ENTRIES, ("softcap",)))
    # A build with a part switched off says so in a message that its binary contains.
    without = {_MESSAGES.get(part) or part for part in probe.left_out(binary)}
    return Build(version, frozenset(without), probe.kernels(binary))


@dataclasses.dataclass(frozen=True)
class FlashAttention2(Provider):
    title = "flash-attn"
    packs = True

    def probe(self) -> Build:
        return _installed()

    def supported(self, build: Build) -> tuple[str, ...]:
        return ("sm80", "sm86", "sm87", "sm89", "sm90")

    def limits(self, spec: AttentionSpec, mask: Mask, build: Build) -> list[str]:
        found = []
        version = probe.numbers(build.version or "2.8.3")
        rounded = min((s for s in head_sizes(version) if s >= spec.head_size), default=None)
        ways = ("fwd", "bwd") if spec.gradients else ("fwd",)
        if build.details and any((w, spec.dtype, rounded) not in build.details for w in ways):
            found.append(
                f"this build has no kernels for {spec.dtype} and head size {spec.head_size}"
            )
        queries, keys = mask.sizes
        # Its kernels take a right end of S or more for none, and none beside a left end for S.
        if mask.right >= keys or (mask.left >= 0 and mask.right < 0 and keys < queries - 1):
            found.append("takes a window for unbounded that reaches further than there are keys")
        if spec.alibi and mask.shift:
            found.append("its ALiBi counts positions from the bottom right")
        if spec.alibi and spec.kv_lengths:
            found.append("its ALiBi counts positions from the end of the length")
        if spec.kv_lengths and version < _LEFTPAD:
            found.append(f"lengths need version 2.6.3, found {build.version}")
        return found

    def load(self) -> None:
        if not hasattr(probe.load(_EXTENSION), "fwd"):
            raise probe.Unusable(f"{_EXTENSION} has no entry point fwd")

    def forward(self, call: Call, out: Any, lse: Any, *, q, k, v, lengths, slopes) -> None:
        library = probe.load(_EXTENSION)
        window = _window(call.mask, slopes)
        if lengths is None:
            # q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
            # window_size_right, softcap, return_softmax, generator
            results = library.fwd(
                q, k, v, out, slopes, 0.0, call.scale, *window, call.softcap, False, None
            )
            found = results[5 if len(results) == 8 else 1]  # eight before 2.7
        else:
            # q, kcache, vcache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx,
            # leftpad_k, block_table, alibi_slopes, out, softmax_scale, is_causal,
            # window_size_left, window_size_right, softcap, is_rotary_interleaved, num_splits
            absent = (None,) * 5
            scale = (call.scale, *window, call.softcap, True, 0)
            _, found = library.fwd_kvcache(
                *(q, k, v, None, None, lengths, *absent, slopes, _as_it_decodes(out, k), *scale)
            )
        lse.copy_(found)

    def backward(
        self,
        call: Call,
        dq: Any,
        dk: Any,
        dv: Any,
        *,
        q,
        k,
        v,
        out,
        lse,
        d_out,
        slopes,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        **_,
    ) -> None:
        library = probe.load(_EXTENSION)
        window = _window(call.mask, slopes)
        if cu_seqlens_q is None:
            # dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale,
            # is_causal, window_size_left, window_size_right, softcap, deterministic, generator,
            # rng_state
            library.bwd(
                *(d_out, q, k, v, out, lse, dq, dk, dv, slopes, 0.0, call.scale, *window),
                *(call.softcap, call.deterministic, None, None),
            )
            return
        # The same, packed, with cu_seqlens_q, cu_seqlens_k before alibi_slopes, max_seqlen_q,
        # max_seqlen_k after, and zero_tensors after softmax_scale; lse [N, B * T].
        packed = [x.flatten(0, 1) for x in (d_out, q, k, v, out)]
        # Contiguous: flattening one query an entry gives a view in another order.
        rows = lse.transpose(0, 1).flatten(1).contiguous()
        grads = [x.flatten(0, 1) for x in (dq, dk, dv)]
        lengths = (cu_seqlens_q, cu_seqlens_k, slopes, q.shape[1], k.shape[1])
        library.varlen_bwd(
            *(*packed, rows, *grads, *lengths, 0.0, call.scale, True, *window),
            *(call.softcap, call.deterministic, None, None),
        )
        for x, grad in zip((dq, dk, dv), grads, strict=True):
            if grad.data_ptr() != x.data_ptr():  # part of a sequence cannot be flattened in place
                x.copy_(grad.unflatten(0, x.shape[:2]))


def _as_it_decodes(out: Any, k: Any) -> Any:
    """`out` as the entry for lengths wants it: of one query, the heads of a group as queries."""
    groups = out.shape[2] // k.shape[2]
    if out.shape[1] > 1 or groups == 1:
        return out
    return out.unflatten(2, (k.shape[2], groups)).squeeze(1).transpose(1, 2)


def _window(mask: Mask, slopes: Any) -> tuple[bool, int, int]:
    """is_causal, window_size_left, window_size_right.

    The causal kernels add slope * k_pos, which moves the log-sum-exp by slope * q_pos. A left end that
    excludes nothing selects the kernels for windows, which add -slope * |q_pos - k_pos|.
    """
    if slopes is not None and mask.causal:
        return False, mask.sizes[1] - 1, 0
    return mask.causal, mask.left, mask.right


BACKEND = FlashAttention("fa2", (FlashAttention2(),))
