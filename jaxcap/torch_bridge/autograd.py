"""Attention as a function that PyTorch differentiates, once."""

from collections.abc import Sequence
from typing import Any

import torch

from jaxcap.torch_bridge.call import Settings, Tensor, Tensors
from jaxcap.torch_bridge.checks import requires_grad
from jaxcap.torch_bridge.launcher import ALIGNMENT
from jaxcap.torch_bridge.plans import Plan, plan_of

PLACES = {name: place for place, name in enumerate(Tensors._fields)}
TWICE = (
    "jaxcap's attention has first derivatives only, and this asks for the derivative of its gradient"
    " (create_graph=True); write the attention in plain PyTorch operations for those"
    " (scaled_dot_product_attention has no cap)"
)
BATCHED = "jaxcap's attention takes one gradient at a time (not is_grads_batched, nor vectorize in jacobian)"
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


def one_at_a_time(*cotangents: Tensor | None) -> None:
    if any(x is not None and _is_batched(x) for x in cotangents):
        raise NotImplementedError(BATCHED)


def packed(x: Tensor) -> Tensor:
    """Contiguous and aligned as the kernels need it; a copy only where it is not."""
    if x.is_neg():  # a view of -x, as of a conjugate's imaginary part
        x = x.resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


class Attention(torch.autograd.Function):
    """(out, lse) of `Tensors`, spread, under a plan; the last ones may be left out."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *spread: Tensor | None) -> tuple[Tensor, Tensor]:
        given = [packed(x) for x in spread if x is not None]
        out, lse = plan.forward(*given)
        ctx.save_for_backward(*given, out, lse)
        ctx.plan, ctx.count = plan, len(spread)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        d_out, d_lse = cotangents
        results: list[Any] = [None] * (ctx.count + 1)
        if d_out is None and d_lse is None:
            return tuple(results)
        one_at_a_time(*cotangents)
        plan = ctx.plan
        # Only with create_graph=True is there a graph of the backward pass, for its derivative to be refused.
        run = Gradients.apply if torch.is_grad_enabled() else gradients
        for name, grad in zip(
            plan.gradients, run(plan, d_out, d_lse, *ctx.saved_tensors), strict=True
        ):
            results[1 + PLACES[name]] = grad
        return tuple(results)


class Gradients(torch.autograd.Function):
    """The backward pass, whose own derivative is an error."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, d_out: Any, d_lse: Any, *saved: Tensor) -> tuple[Tensor, ...]:
        return gradients(plan, d_out, d_lse, *saved)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError(TWICE)


def gradients(
    plan: Plan, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
) -> tuple[Tensor, ...]:
    """What `plan.gradients` names; saved: the operands, output and log-sum-exp."""
    given = [packed(x) for x in saved]  # hooks on saved tensors may have laid them anew
    given.append(torch.zeros_like(given[-2]) if d_out is None else packed(d_out))
    if d_lse is None:
        return tuple(plan.part("backward", given)(*given))
    given.append(packed(d_lse))
    return tuple(plan.part("backward_lse", given)(*given))


# What `Attention.apply` itself adds is for function transforms, which never come here.
_apply = super(torch.autograd.Function, Attention).apply  # pyright: ignore[reportAttributeAccessIssue]


def wanted(tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    """Of `Tensors` (or the first of them) those whose gradient may be asked for."""
    if not torch.is_grad_enabled():
        return ()
    pairs = zip(Tensors._fields, tensors, strict=False)
    return tuple([name for name, x in pairs if x is not None and requires_grad(x)])


def run(plan: Plan, *spread: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) under a plan, whose `gradients` say whether autograd takes part."""
    if not plan.gradients:
        out, lse = plan.forward(*[packed(x) for x in spread if x is not None])
        return out, lse
    return _apply(plan, *spread)


def attend(settings: Settings, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked, canonical tensors, eagerly."""
    return run(plan_of(settings, tensors, wanted(tensors)), *tensors)
