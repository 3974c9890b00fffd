"""`torch_bridge.attention` beside the float64 oracle, on a CPU or a GPU."""

from typing import Any

import numpy as np
import torch

from jaxcap import torch_bridge
from tests import oracle

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def inputs(
    b=2, t=21, s=37, n=4, k=2, h=16, v=None, *, dtype=torch.float64, device="cpu", seed=0, scale=3.0
) -> dict[str, torch.Tensor]:
    """q, k, v as bshd, whose logits reach a cap of a few units."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale**0.5
        return x.to(device=device, dtype=dtype).requires_grad_()

    return {"q": normal(b, t, n, h), "k": normal(b, s, k, h), "v": normal(b, s, k, v or h)}


def normal(*shape, dtype=torch.float64, device="cpu", seed=9, grad=True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(device=device, dtype=dtype).requires_grad_(grad)


def numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return x.to(torch.float64).numpy() if x.is_floating_point() else x.numpy()


def expected(
    given: dict[str, torch.Tensor],
    *,
    softcap=0.0,
    causal=False,
    window_size=(-1, -1),
    scale=None,
    segment_ids=None,
    alibi_slopes=None,
    dropout_p=0.0,
    dropout_key=None,
) -> oracle.Attention:
    """The same call for the oracle, in its own words."""
    arrays = {name: numpy(x) for name, x in given.items()}
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        q_ids, k_ids = (numpy(x) for x in pair)
    else:
        q_ids = k_ids = None
    window = tuple(None if side < 0 else side for side in window_size)
    return oracle.Attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        arrays.get("bias"),
        softcap=softcap,
        scale=scale,
        is_causal=causal,
        causal_alignment="bottom_right",
        local_window_size=window,
        query_segment_ids=q_ids,
        key_value_segment_ids=k_ids,
        alibi_slopes=None if alibi_slopes is None else numpy(alibi_slopes),
        sinks=arrays.get("sinks"),
        dropout_rate=dropout_p,
        dropout_key=None if dropout_key is None else numpy(dropout_key),
    )


def far(found: Any, wanted: np.ndarray) -> float:
    """The largest difference, in units of the largest wanted value; infinities must agree."""
    found = numpy(found)
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite]):
        return np.inf
    largest = np.abs(wanted[finite]).max(initial=1e-30)
    return float(np.abs(found[finite] - wanted[finite]).max(initial=0.0) / largest)


def check(given: dict[str, torch.Tensor], tolerance: float, *, with_lse=True, **keywords) -> None:
    """Output, log-sum-exp and gradients, one with the log-sum-exp's cotangent."""
    out, lse = torch_bridge.attention(**given, return_lse=True, **keywords)
    keywords = {n: x for n, x in keywords.items() if n not in ("deterministic", "backend")}
    wanted = expected(given, **keywords)
    assert far(out, wanted.out) < tolerance
    assert far(lse, np.swapaxes(wanted.lse, 1, 2)) < tolerance
    d_out = normal(*out.shape, dtype=out.dtype, device=out.device, seed=5, grad=False)
    d_lse = normal(*lse.shape, dtype=lse.dtype, device=lse.device, seed=6, grad=False)
    leaves = [x for x in given.values() if x.requires_grad]
    if with_lse:
        found = torch.autograd.grad([out, lse], leaves, [d_out, d_lse])
        grads = wanted.backward(numpy(d_out), np.swapaxes(numpy(d_lse), 1, 2))
    else:
        found = torch.autograd.grad(out, leaves, d_out)
        grads = wanted.backward(numpy(d_out))
    names = {"q": "query", "k": "key", "v": "value"}
    for name, grad in zip([n for n, x in given.items() if x.requires_grad], found, strict=True):
        assert far(grad, getattr(grads, names.get(name, name))) < tolerance, name
