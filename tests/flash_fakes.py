"""Stand-ins for FlashAttention 2, 3 and 4: their signatures and conventions, float32 mathematics, any device.

`install_fa2`, `install_fa3` and `install_fa4` write modules, packages' metadata and build flags into a folder
for `sys.path`, whole or with a fault, as `pip install` would. A fake spreads NaN over all keys of
a call, further than any real kernel's tile.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jaxcap.torch_bridge import probe

FAILURE = "the kernel is having a bad day"
_NAMES = ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "fa3_fwd_interface", "cutlass")


class Failing:
    """Set `on` and the next call of any library raises."""

    on = False

    @classmethod
    def check(cls) -> None:
        if cls.on:
            raise RuntimeError(FAILURE)


def _scores(q, k, scale, causal, left, right, softcap, lengths, slopes, alibi_of_causal=False):
    """[B, N, T, S] after cap, ALiBi and masks, and the derivative of the cap; ends are -1 for none."""
    (t, n), (s, heads) = q.shape[1:3], k.shape[1:3]
    wide = k.float().repeat_interleave(n // heads, dim=2)
    logits = torch.einsum("btnh,bsnh->bnts", q.float(), wide) * scale
    slope = torch.ones_like(logits)
    if softcap:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh**2
    count = torch.tensor([s]) if lengths is None else lengths.cpu()
    row = torch.arange(t)[None, :, None] + (count[:, None, None] - t)
    key = torch.arange(s)[None, None, :]
    if slopes is not None:
        each = slopes.reshape(-1, n, 1, 1)
        distance = key if alibi_of_causal else -(row - key).abs()
        logits = logits + each * distance[:, None]
    kept = key < count[:, None, None]
    if causal or right >= 0:
        kept = kept & (key <= row + (0 if causal else right))
    if left >= 0:
        kept = kept & (key >= row - left)
    return torch.where(kept[:, None], logits, -torch.inf), slope


def _forward(q, k, v, scores):
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    wide = v.float().repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return torch.einsum("bnts,bsnh->btnh", p, wide), lse


def _backward(q, k, v, out, lse, d_out, scale, scores, slope):
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.float().repeat_interleave(group, dim=2) for x in (k, v))
    p = torch.exp(scores - lse[..., None])
    delta = (out.float() * d_out.float()).sum(-1).transpose(1, 2)
    dp = torch.einsum("btnh,bsnh->bnts", d_out.float(), wide_v)
    ds = p * (dp - delta[..., None]) * slope * scale
    dq = torch.einsum("bnts,bsnh->btnh", ds, wide_k)
    dk = torch.einsum("bnts,btnh->bsnh", ds, q.float())
    dv = torch.einsum("bnts,btnh->bsnh", p, d_out.float())
    return dq, *(x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))


def _fa2_window(causal, left, right, t, s, slopes):
    """As `mha_fwd` and `set_params_fprop` of flash-attn 2.8.3 do it."""
    left, right = (-1 if end >= s else end for end in (left, right))
    causal = causal and not (t == 1 and slopes is None)
    right = 0 if causal else right
    if left < 0 and right == 0:
        return True, -1, -1
    if left < 0 and right >= 0:
        left = s
    if left >= 0 and right < 0:
        right = s
    return False, left, right


def fwd(
    q, k, v, out_, alibi_slopes_, p_dropout, softmax_scale, is_causal, window_size_left,
    window_size_right, softcap, return_softmax, gen_,
):  # fmt: skip
    """flash_attn_2_cuda.fwd"""
    Failing.check()
    assert p_dropout == 0.0 and not return_softmax and gen_ is None and q.stride(-1) == 1
    window = _fa2_window(
        is_causal, window_size_left, window_size_right, q.shape[1], k.shape[1], alibi_slopes_
    )
    scores, _ = _scores(
        q, k, softmax_scale, *window, softcap, None, alibi_slopes_, alibi_of_causal=window[0]
    )
    out, lse = _forward(q, k, v, scores)
    out_.copy_(out)
    return [out_, torch.where(lse == -torch.inf, torch.inf, lse), torch.empty(0), torch.empty(2)]


def fwd_kvcache(
    q, kcache, vcache, k_, v_, seqlens_k_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_,
    block_table_, alibi_slopes_, out_, softmax_scale, is_causal, window_size_left,
    window_size_right, softcap, is_rotary_interleaved, num_splits,
):  # fmt: skip
    """flash_attn_2_cuda.fwd_kvcache"""
    del is_rotary_interleaved, num_splits
    absent = (k_, v_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_, block_table_)
    assert all(x is None for x in absent) and alibi_slopes_ is None
    assert seqlens_k_.dtype == torch.int32 and seqlens_k_.shape == (q.shape[0],)
    window = _fa2_window(
        is_causal, window_size_left, window_size_right, q.shape[1], kcache.shape[1], None
    )
    scores, _ = _scores(q, kcache, softmax_scale, *window, softcap, seqlens_k_, None)
    out, lse = _forward(q, kcache, vcache, scores)
    group = q.shape[2] // kcache.shape[2]
    if q.shape[1] == 1 and group > 1:  # it works on [B, G, K, H], and wants an output of that shape
        out = out[:, 0].unflatten(1, (-1, group)).transpose(1, 2)
    assert out_.shape == out.shape and out_.stride(-1) == 1
    out_.copy_(out)
    return [out_, torch.where(lse == -torch.inf, torch.inf, lse)]


def bwd(
    dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, alibi_slopes_, p_dropout, softmax_scale, is_causal,
    window_size_left, window_size_right, softcap, deterministic, gen_, rng_state,
):  # fmt: skip
    """flash_attn_2_cuda.bwd"""
    Failing.check()
    assert p_dropout == 0.0 and gen_ is None and rng_state is None
    assert isinstance(deterministic, bool) and softmax_lse.is_contiguous()
    window = _fa2_window(
        is_causal, window_size_left, window_size_right, q.shape[1], k.shape[1], alibi_slopes_
    )
    scores, slope = _scores(
        q, k, softmax_scale, *window, softcap, None, alibi_slopes_, alibi_of_causal=window[0]
    )
    found = _backward(q, k, v, out, softmax_lse, dout, softmax_scale, scores, slope)
    for given, x in zip((dq_, dk_, dv_), found, strict=True):
        given.copy_(x)
    return [dq_, dk_, dv_, torch.empty(0)]


def varlen_bwd(
    dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, cu_seqlens_q, cu_seqlens_k, alibi_slopes_,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left,
    window_size_right, softcap, deterministic, gen_, rng_state,
):  # fmt: skip
    """flash_attn_2_cuda.varlen_bwd"""
    assert p_dropout == 0.0 and gen_ is None and rng_state is None and zero_tensors is True
    assert isinstance(deterministic, bool) and alibi_slopes_ is None
    assert softmax_lse.shape == (q.shape[1], q.shape[0]) and softmax_lse.is_contiguous()
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert queries[-1] == q.shape[0] and keys[-1] == k.shape[0] and len(queries) == len(keys)
    for x in (dq_, dk_, dv_):
        x.zero_()
    for i in range(len(queries) - 1):
        a, b = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        assert a.stop - a.start <= max_seqlen_q and b.stop - b.start <= max_seqlen_k
        if a.start == a.stop or b.start == b.stop:
            continue
        window = _fa2_window(
            is_causal, window_size_left, window_size_right, max_seqlen_q, max_seqlen_k, None
        )
        scores, slope = _scores(q[None, a], k[None, b], softmax_scale, *window, softcap, None, None)
        one = (x[None] for x in (q[a], k[b], v[b], out[a], softmax_lse[:, a], dout[a]))
        found = _backward(*one, softmax_scale, scores, slope)
        for given, x, place in zip((dq_, dk_, dv_), found, (a, b, b), strict=True):
            given[place] = x[0].to(given.dtype)
    return [dq_, dk_, dv_, torch.empty(0)]


class Operators3:
    """torch.ops.flash_attn_3, by the schemas of its `fwd` and `bwd`."""

    @staticmethod
    def fwd(
        q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        Failing.check()
        window = _fa3_window(is_causal, window_size_left, window_size_right, q, k)
        scores, _ = _scores(q, k, softmax_scale, *window, softcap, seqused_k, None)
        found, lse = _forward(q, k, v, scores)
        out.copy_(found)
        return out, lse, torch.empty(0), torch.empty(0)

    @staticmethod
    def bwd(
        dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None,
        cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # fmt: skip
        Failing.check()
        window = _fa3_window(is_causal, window_size_left, window_size_right, q, k)
        scores, slope = _scores(q, k, softmax_scale, *window, softcap, seqused_k, None)
        found = _backward(q, k, v, out, softmax_lse, dout, softmax_scale, scores, slope)
        for given, x in zip((dq, dk, dv), found, strict=True):
            given.copy_(x)
        if seqused_k is not None:  # what lies past a length is not written
            past = torch.arange(k.shape[1])[None] >= seqused_k[:, None]
            dk[past] = dv[past] = torch.nan
        return dq, dk, dv, torch.empty(0), torch.empty(0)


def _fa3_window(causal, left, right, q, k):
    left = -1 if left >= k.shape[1] - 1 else left
    right = -1 if right >= q.shape[1] - 1 else right
    causal = causal or (left < 0 and right == 0)
    return causal, left, right


def fa4_forward(
    q, k, v, *, softmax_scale, causal, softcap, window_size_left, window_size_right, seqused_k, out, lse
):  # fmt: skip
    """flash_attn.cute.interface._flash_attn_fwd, of its arguments those that are given."""
    Failing.check()
    assert out.stride(-1) == 1 and lse.is_contiguous() and softcap is not None
    left, right = (-1 if end is None else end for end in (window_size_left, window_size_right))
    scores, _ = _scores(q, k, softmax_scale, causal, left, right, softcap, seqused_k, None)
    found, residual = _forward(q, k, v, scores)
    out.copy_(found)
    lse.copy_(residual)
    return out, lse, None, None, None


def fa4_backward(
    q, k, v, out, dout, lse, *, softmax_scale, causal, softcap, window_size_left, window_size_right,
    seqused_k, deterministic, dq, dk, dv,
):  # fmt: skip
    """flash_attn.cute.interface._flash_attn_bwd"""
    left, right = (-1 if end is None else end for end in (window_size_left, window_size_right))
    Operators3.bwd(
        *(dout, q, k, v, out, lse, dq, dk, dv, None, None, None, seqused_k),
        softmax_scale=softmax_scale,
        is_causal=causal,
        window_size_left=left,
        window_size_right=right,
        softcap=softcap,
        deterministic=deterministic,
    )
    return dq, dk, dv


_FA2_INTERFACE = """
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False): ...

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None): ...

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
                            block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False): ...
"""
_FA3_INTERFACE = """
def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None,
                        cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None,
                        max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
                        leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
                        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                        causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
                        softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
                        num_splits=1, pack_gqa=None, sm_margin=0): ...

def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None,
                         sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None,
                         dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                         window_size_left=-1, window_size_right=-1, softcap=0.0,
                         deterministic=False, sm_margin=0): ...

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
                    k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                    return_attn_probs=False): ...

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None,
                           q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                           attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, sm_margin=0, return_attn_probs=False): ...

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None,
                            rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                            cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                            cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                            q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
                            pack_gqa=None, sm_margin=0, return_softmax_lse=False): ...

from tests.flash_fakes import Operators3 as {operators}
"""
_FA4_INTERFACE = """
from tests.flash_fakes import fa4_backward, fa4_forward

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None),
                    learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False): ...

def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softcap=0.0): ...

def _flash_attn_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
                    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
                    page_table=None, softmax_scale=None, causal=False, softcap=None,
                    window_size_left=None, window_size_right=None, learnable_sink=None, out=None,
                    lse=None, return_lse=False):
    return fa4_forward(q, k, v, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
                       window_size_left=window_size_left, window_size_right=window_size_right,
                       seqused_k=seqused_k, out=out, lse=lse)

def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
                    window_size_left=None, window_size_right=None, cu_seqlens_q=None,
                    cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
                    max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, dlse=None,
                    learnable_sink=None):
    return fa4_backward(q, k, v, out, dout, lse, softmax_scale=softmax_scale, causal=causal,
                        softcap=softcap, window_size_left=window_size_left,
                        window_size_right=window_size_right, seqused_k=seqused_k,
                        deterministic=deterministic, dq=dq, dk=dk, dv=dv)
"""
#: Build flags of a complete FlashAttention 3.
FLAGS = {
    f"FLASHATTENTION_DISABLE_{name}": False
    for name in (
        *("BACKWARD", "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA", "FP16", "FP8"),
        *("VARLEN", "CLUSTER", "HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256", "SM8x"),
    )
}
FA2_SIZES = (32, 64, 96, 128, 192, 256)


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _metadata(folder: Path, name: str, version: str) -> None:
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    _write(folder, f"{name.replace('-', '_')}-{version}.dist-info/METADATA", text)


def install_fa2(
    folder: Path,
    version: str = "2.8.3",
    left_out: tuple[str, ...] = (),
    sizes: tuple[int, ...] = FA2_SIZES,
    interface: str = _FA2_INTERFACE,
) -> None:
    """`left_out` as in the messages of a build: "softcap", "backward", "local attention", "alibi"."""
    _metadata(folder, "flash-attn", version)
    _write(folder, "flash_attn/__init__.py", "raise ImportError('nobody should import this')\n")
    _write(folder, "flash_attn/flash_attn_interface.py", interface)
    messages = [f"This flash attention build does not support {part}." for part in left_out]
    kernels = [
        f"_ZN5flash11run_mha_{way}_IN7cutlass{kind}ELi{size}ELb0EEEvRNS_"
        for way in ("fwd", "bwd")
        for kind in ("10bfloat16_t", "6half_t")
        for size in sizes
    ]
    names = "bwd, fwd, fwd_kvcache, varlen_bwd"
    text = "\n".join(["# " + line for line in (*messages, *kernels)])
    _write(folder, "flash_attn_2_cuda.py", f"{text}\nfrom tests.flash_fakes import {names}\n")


def install_fa3(
    folder: Path,
    name: str = "flash_attn",
    without: tuple[str, ...] = (),
    flags: dict[str, Any] = FLAGS,
    interface: str = _FA3_INTERFACE,
) -> None:
    """`name` is "flash_attn" or "fa3_fwd"; `without` as in the flags: "SOFTCAP", "LOCAL", ..."""
    operators = "flash_attn_3_gpu" if name == "flash_attn" else "fa3_fwd_cuda"
    text = interface.replace("{operators}", operators)
    _write(folder, f"{name}_interface.py", text)
    switched = flags | {f"FLASHATTENTION_DISABLE_{part}": True for part in without}
    _write(folder, f"{name}_config.py", f"CONFIG = {{'build_flags': {switched!r}}}\n")


def install_fa4(
    folder: Path, version: str = "4.0.0b36", interface: str = _FA4_INTERFACE, dsl: bool = True
) -> None:
    _metadata(folder, "flash-attn-4", version)
    _write(folder, "flash_attn/cute/__init__.py", "")
    _write(folder, "flash_attn/cute/interface.py", interface)
    if dsl:
        _write(folder, "cutlass/__init__.py", "")


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """What is installed in `folder` can be found, and nothing of it stays."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.split(".")[0] in _NAMES]:
            del sys.modules[name]
        importlib.invalidate_caches()
        probe.forget()

    sys.path.insert(0, str(folder))
    forget()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()
