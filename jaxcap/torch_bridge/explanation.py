"""`explain` of PyTorch's tensors: which backend a call would run on, and why not the others."""

from typing import Any

import torch

from jaxcap import device
from jaxcap.explain import Explanation, of_spec
from jaxcap.keywords import bind
from jaxcap.torch_bridge import call, checks, functional


def explain(
    *tensors: Any,
    gradients: tuple[str, ...] | None = None,
    platform: str | None = None,
    **keywords: Any,
) -> Explanation:
    """The decision for a call of `torch_bridge.attention` with the same arguments, which does not run.

    `gradients` names the operands differentiated in training, of "query", "key", "value", "bias" and
    "sinks" (all that can be, if None); `platform` asks for another device ("cpu", "sm80", "sm90", ...),
    for which the tensors may be of PyTorch's device "meta": shapes without memory. Whether a backend is
    launched directly or through JAX is known when it has been built: `JAXCAP_LOG=info` says so.

    Raises:
      ValueError, TypeError: as `attention` for wrong arguments.

    Example:
      >>> import torch
      >>> from jaxcap import torch_bridge
      >>> q = torch.empty(1, 8192, 16, 128, device="meta", dtype=torch.bfloat16)
      >>> torch_bridge.explain(q, q, q, softcap=50.0, platform="sm90").training.backend
      'pallas'
    """
    given = bind(functional.attention, tensors, keywords)
    if torch.are_deterministic_algorithms_enabled():
        given["deterministic"] = True
    settings = call.settings_of(*(given[name] for name in call.Settings._fields))
    checks.generator(given["generator"])
    q, k, v = functional.autocast(given["q"], given["k"], given["v"])
    checks.check_inputs(q, k, v, given["layout"])
    if given["layout"] == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    extras = (given[name] for name in ("bias", "alibi_slopes", "segment_ids", "sinks"))
    found = call.canonical(q, k, v, *extras)
    call.check_devices(found)
    elsewhere = None if platform is None else device.named(platform)
    spec = call.spec_of(settings, found, elsewhere=elsewhere)
    return of_spec(spec, call.requested(settings.backend), gradients)
