"""`torch.ops.jaxcap`: attention as an operator that torch.compile, export and dispatch modes keep whole.

The eager path calls `jaxcap.torch_bridge.autograd` itself, which costs the host less.
"""

from typing import Any

import torch

from jaxcap.spec import DIFFERENTIABLE
from jaxcap.torch_bridge import autograd
from jaxcap.torch_bridge.call import Settings, Tensor, Tensors
from jaxcap.torch_bridge.plans import plan_of

_TENSORS = "Tensor query, Tensor key, Tensor value, " + ", ".join(
    f"Tensor? {name}" for name in Tensors._fields[3:]
)
_SETTINGS = (
    "float softcap, bool causal, int left, int right, float? scale, float dropout_p, bool deterministic,"
    " bool return_lse, str? backend, str[] gradients"
)
_COUNT = len(Tensors._fields)

_library = torch.library.Library("jaxcap", "DEF")
_library.define(f"attention({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward({_TENSORS}, {_SETTINGS}, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse)"
    " -> Tensor[]"
)


def _split(
    arguments: tuple[Any, ...],
) -> tuple[Tensors, Settings, tuple[str, ...], tuple[Any, ...]]:
    tensors = Tensors(*arguments[:_COUNT])
    softcap, causal, left, right, *rest, gradients = arguments[_COUNT : _COUNT + 10]
    settings = Settings(softcap, causal, (left, right), *rest)
    return tensors, settings, tuple(gradients), arguments[_COUNT + 10 :]


def spread(tensors: Tensors, settings: Settings, gradients: tuple[str, ...]) -> tuple[Any, ...]:
    """The arguments of `torch.ops.jaxcap.attention`."""
    left, right = settings.window_size
    return (
        *tensors,
        *settings[:2],
        left,
        right,
        *settings[3:],
        list(gradients),
    )


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, settings, gradients, _ = _split(arguments)
    out, lse = plan_of(settings, tensors, gradients).forward(
        *[autograd.packed(x) for x in tensors if x is not None]
    )
    return out, lse


def _attention_backward(*arguments: Any) -> list[Tensor]:
    tensors, settings, gradients, (out, lse, d_out, d_lse) = _split(arguments)
    given = [x for x in tensors if x is not None]
    plan = plan_of(settings, tensors, gradients)
    found = autograd.gradients(plan, d_out, d_lse, *given, out, lse)
    return [x.contiguous() for x in found]  # as the fake has them


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)
    _library.impl("attention_backward", _attention_backward, _device)


@torch.library.register_fake("jaxcap::attention", lib=_library)
def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, *_ = _split(arguments)
    q, v = tensors.query, tensors.value
    batch, length, heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, length, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, length), dtype=wide)


@torch.library.register_fake("jaxcap::attention_backward", lib=_library)
def _attention_backward_fake(*arguments: Any) -> list[Tensor]:
    tensors, _, gradients, _ = _split(arguments)
    found = [getattr(tensors, name) for name in gradients]
    return [x.new_empty(x.shape) for x in found]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.save_for_backward(*inputs[:_COUNT], out, lse)
    ctx.rest = inputs[_COUNT:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    autograd.one_at_a_time(d_out, d_lse)
    *tensors, out, lse = ctx.saved_tensors
    results: list[Any] = [None] * (_COUNT + len(ctx.rest))
    if d_out is None and d_lse is None:
        return tuple(results)
    # Under a compiled vmap the forward did not know which are wanted.
    names = [x for x in DIFFERENTIABLE if ctx.needs_input_grad[autograd.PLACES[x]]]
    given = (*tensors, *ctx.rest[:-1], names, out, lse, d_out, d_lse)
    found = torch.ops.jaxcap.attention_backward(*given)
    for name, grad in zip(names, found, strict=True):
        results[autograd.PLACES[name]] = grad
    return tuple(results)


def _twice(ctx: Any, *cotangents: Any) -> Any:
    raise NotImplementedError(autograd.TWICE)


torch.library.register_autograd(
    "jaxcap::attention", _differentiate, setup_context=_keep, lib=_library
)
torch.library.register_autograd("jaxcap::attention_backward", _twice, lib=_library)
