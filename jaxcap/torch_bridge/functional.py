"""`attention` on PyTorch tensors."""

from typing import Any

import torch
from torch.autograd import forward_ad

from jaxcap.keywords import hinted
from jaxcap.torch_bridge import autograd, call, checks, operator
from jaxcap.torch_bridge.call import Settings, Tensor, Tensors

_PLAIN = (Tensor, torch.nn.Parameter)
_plans: dict[Any, autograd.Plan] = {}


@hinted
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    layout: str = "bshd",
) -> Any:
    """Softmax attention whose logits are capped, on PyTorch tensors, differentiable.

    score = softcap * tanh(scale * q.k / softcap) + bias - slope * |q_pos - k_pos|, in float32, then masks,
    softmax, dropout and the product with the values.

    **The conventions are FlashAttention's, not `jaxcap.dot_product_attention`'s: causality is bottom-right
    aligned (query i is at position i + S - T), -1 in a window is unbounded, the log-sum-exp is [B, N, T].**

    B batch, T and S query and key length, N query heads, K key/value heads (N a multiple of K), H and V
    head sizes. Tensors that are not contiguous as bshd are copied once.

    Args:
      q: `[B, T, N, H]` bfloat16, float16, float32 or float64; CUDA or CPU.
      k: `[B, S, K, H]`, of q's dtype and device.
      v: `[B, S, K, V]`, likewise.
      softcap: the cap, a Python number; 0.0 is none.
      causal: keep `k_pos <= q_pos`.
      window_size: (left, right) keeps `q_pos - left <= k_pos <= q_pos + right`.
      scale: of the logits; None is `H ** -0.5`.
      bias: floating, broadcastable to `[B, N, T, S]`; added outside the cap; has a gradient.
      alibi_slopes: `[N]` or `[B, N]`, without gradient.
      segment_ids: `[B, T]` int where T = S, or a pair `[B, T]`, `[B, S]`; equal ids attend. Those of int64
        are sorted first, to be told apart in int32, which is what costs nothing.
      dropout_p: share of probabilities dropped, in [0, 1). Off in evaluation is the caller's to say.
      generator: draws the dropout's key, and moves on; None is the default generator of q's device.
      sinks: `[N]`, one more logit a head that has no value; has a gradient.
      deterministic: gradients bitwise the same in every run; also where
        `torch.use_deterministic_algorithms` says so.
      return_lse: also return the log-sum-exp.
      backend: a backend of jaxcap by name; None selects.
      layout: "bshd", or "bhsd" for `[B, N, T, H]` and so on, also of the output.

    Returns:
      `[B, T, N, V]` in q's dtype, and with `return_lse` the natural log-sum-exp `[B, N, T]`, float32 (float64
      for float64), differentiable. A row with nothing to attend to is 0, its log-sum-exp -inf (or its sink).

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.
      jaxcap.BackendError: no backend, or not the named one, can do this; the message has every reason.
      NotImplementedError: the derivative of a gradient, or one by torch.func, was asked for.

    Example:
      >>> import torch
      >>> from jaxcap import torch_bridge
      >>> q = torch.randn(1, 8, 4, 16)
      >>> torch_bridge.attention(q, q, q, softcap=50.0, causal=True).shape
      torch.Size([1, 8, 4, 16])

    Sources: Gemma 2 (arXiv:2408.00118), FlashAttention-2 (arXiv:2307.08691, names and conventions).
    """
    if torch.are_deterministic_algorithms_enabled():
        deterministic = True
    settings = call.settings_of(
        softcap, causal, window_size, scale, dropout_p, deterministic, return_lse, backend
    )
    checks.layout(layout)
    checks.generator(generator)
    extras = bias is None and alibi_slopes is None and segment_ids is None and sinks is None
    if extras and not settings.dropout_p and eager(q, k, v):
        out, lse = _again(q, k, v, settings, layout)
        return (out, lse) if return_lse else out
    q, k, v = autocast(q, k, v)
    checks.check_inputs(q, k, v, layout)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    tensors = call.canonical(q, k, v, bias, alibi_slopes, segment_ids, sinks)
    out, lse = attend(settings, tensors, generator)
    if layout == "bhsd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def eager(*tensors: Any) -> bool:
    """Whether nothing watches: no compiler, tracer, subclass, mode or transform, and nothing sparse."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.is_nested:
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def _again(q: Tensor, k: Tensor, v: Tensor, settings: Settings, layout: str) -> Any:
    """(out, lse) of the common case: what was checked once for these shapes is not checked again."""
    device = q.device
    q, k, v = autocast(q, k, v)
    gradients = ()
    if torch.is_grad_enabled():
        gradients = (q.requires_grad, k.requires_grad, v.requires_grad)
    key = (
        *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, device, k.device, v.device),
        *(gradients, layout, call.requested(settings.backend), settings),
    )
    plan = _plans.get(key)
    heads_first = layout == "bhsd"
    if plan is None:
        checks.check_inputs(q, k, v, layout)
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if plan is None:
        tensors = Tensors(q, k, v)
        plan = autograd.plan_of(settings, tensors, autograd.wanted(tensors))
        _plans[key] = plan
    out, lse = autograd.run(plan, q, k, v)
    return (out.transpose(1, 2) if heads_first else out), lse


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """q, k and v in the precision of `torch.autocast`, as PyTorch's own attention takes them."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "none"
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if _cast(x) else x for x in tensors)


def _cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def attend(
    settings: Settings, tensors: Tensors, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical tensors, with any of jaxcap's masks; draws the dropout's key."""
    call.check_devices(tensors)
    if settings.dropout_p:
        checks.generator(generator, tensors.query.device)
        if generator is not None and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a checkpoint computes attention again with a generator of its own, whose state it does not"
                " restore: other entries would be dropped; leave generator=None there"
            )
        key = torch.randint(
            -(2**31),
            2**31,
            (1, 2),
            dtype=torch.int32,
            device=tensors.query.device,
            generator=generator,
        )
        tensors = tensors._replace(dropout_key=key)
    if eager(*(x for x in tensors if x is not None)):
        return autograd.attend(settings, tensors)
    if not torch.compiler.is_compiling():
        _refuse_watchers(tensors)
    gradients = autograd.wanted(tensors)
    return torch.ops.jaxcap.attention(*operator.spread(tensors, settings, gradients))


def _refuse_watchers(tensors: Tensors) -> None:
    """Raises NotImplementedError where a result would lack a derivative, or be a constant."""
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            "torch.jit.trace cannot record jaxcap's attention; use torch.compile or torch.export"
        )
    forward = forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None
    )
    if torch._C._are_functorch_transforms_active():
        top: Any = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
        forward = forward or top.key().name in ("Grad", "Jvp")
    if forward:
        raise NotImplementedError(
            "jaxcap's attention has no derivative by torch.func or forward mode; use backward() or"
            " torch.autograd.grad"
        )
