"""From a canonical call to a backend: gradients, vmapped axes, sharding, and what is logged.

A `custom_vjp` tells inference from training: its primal rule selects without gradients, its forward
rule with those that are wanted. Where JAX would differentiate the chosen backend anyway (`xla`) the
rule is left out, so that forward mode and second derivatives work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jaxcap import partitioning, selection
from jaxcap.marks import executed, reverse_only
from jaxcap.spec import DIFFERENTIABLE, Array, AttentionSpec, Gradients, Operands

#: Names for `jax.checkpoint` policies such as `save_only_these_names("jaxcap_out", "jaxcap_lse")`.
OUT_NAME, LSE_NAME = "jaxcap_out", "jaxcap_lse"


@dataclasses.dataclass(frozen=True)
class Call:
    spec: AttentionSpec  # without gradients
    requested: str | None  # resolved when the call is made: rules are traced later


def describe(spec: AttentionSpec, name: str, what: str) -> str:
    """The line that is logged when backend `name` runs the forward or the backward."""
    shape = f"q [{spec.batch}, {spec.query_length}, {spec.query_heads}, {spec.head_size}]"
    keys = f"kv [{spec.key_length}, {spec.kv_heads}, {spec.value_size}]"
    cap = f"softcap {spec.softcap:g}" if spec.softcap is not None else "no softcap"
    part = "" if spec.context_parallel is None else f", a shard of a {spec.context_parallel}"
    return f"{name} runs the {what}: {shape}, {keys}, {spec.dtype}, {cap}, on {spec.platform}{part}"


def _first_order(function: Callable, name: str) -> Callable:
    """`function`, with an error instead of derivatives of its own."""

    @jax.custom_jvp
    def once(*args):
        return function(*args)

    @once.defjvp
    def rule(primals, tangents):
        del primals, tangents
        raise NotImplementedError(
            f"backend {name!r} has first derivatives in reverse mode only; for forward mode or"
            " second derivatives pass implementation='xla'"
        )

    return once


def _runner(decision: selection.Decision, part: str, operands: Operands) -> Callable:
    """`part` of the chosen backend, ready for sharded and vmapped operands.

    A traced call may yet be compiled for another platform than was guessed. Where the choice runs on
    CUDA only, any other platform gets the backend that selection would pick on a CPU.
    """
    spec, backend = decision.spec, selection.backends()[decision.backend or ""]
    run = partitioning.partitioned(backend, part, spec)
    traced = isinstance(operands.query, Tracer)
    if getattr(backend, "cuda_only", False) and traced and decision.requested is None:
        elsewhere = selection.decide(spec.replace(platform="cpu"))
        other = selection.backends().get(elsewhere.backend or "")
        if other is not None and not getattr(other, "native", False):
            on_cuda, off_cuda = run, partitioning.partitioned(other, part, elsewhere.spec)
            run = lambda *args: jax.lax.platform_dependent(*args, cuda=on_cuda, default=off_cuda)  # noqa: E731
    return _first_order(run, backend.name)


def _forward(decision: selection.Decision, operands: Operands) -> tuple[Array, Array]:
    spec, backend = decision.spec, selection.backends()[decision.backend or ""]
    if spec.context_parallel is not None:
        out, lse = spec.context_parallel.forward(decision, operands, _runner)
    elif getattr(backend, "native", False):
        out, lse = backend.forward(spec, operands)
    else:
        out, lse = _runner(decision, "forward", operands)(operands)
    return executed(out, describe(spec, backend.name, "forward"), str(decision)), lse


def _backward(
    decision: selection.Decision, operands: Operands, out, lse, d_out, d_lse
) -> Gradients:
    spec, backend = decision.spec, selection.backends()[decision.backend or ""]
    if spec.context_parallel is not None:
        saved = (operands, out, lse, d_out, d_lse)
        grads = spec.context_parallel.backward(decision, *saved, _runner)
    else:
        grads = _runner(decision, "backward", operands)(operands, out, lse, d_out, d_lse)
    name = spec.gradients[0]
    marked = executed(getattr(grads, name), describe(spec, backend.name, "backward"))
    return grads._replace(**{name: marked})


def attend(call: Call, operands: Operands) -> tuple[Array, Array]:
    """(out [B, T, N, V], lse [B, N, T]) on the backend that selection picks."""
    every = tuple(name for name in DIFFERENTIABLE if getattr(operands, name) is not None)
    forward = selection.select(call.spec, call.requested)
    trained = selection.decide(call.spec.replace(gradients=every), call.requested)
    known = selection.backends()
    native = getattr(known[forward.backend or ""], "native", False)
    sharded = call.spec.context_parallel is not None
    if native and not sharded and trained.backend in (None, forward.backend):
        return _forward(forward, operands)
    name = f"{forward.backend} under context parallelism" if sharded else forward.backend or ""
    given = {n: reverse_only(getattr(operands, n), name) for n in every}
    return _attend(call, operands._replace(**given))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, operands: Operands) -> tuple[Array, Array]:
    return _forward(selection.select(call.spec, call.requested), operands)


def _attend_fwd(call: Call, primals: Any):
    operands: Operands = custom_vjp_primal_tree_values(primals)
    wanted = tuple(
        name
        for name in DIFFERENTIABLE
        if getattr(operands, name) is not None and getattr(primals, name).perturbed
    )
    decision = selection.select(call.spec.replace(gradients=wanted), call.requested)
    native = getattr(selection.backends()[decision.backend or ""], "native", False)
    if native and call.spec.context_parallel is None:
        arrays = {name: getattr(operands, name) for name in wanted}
        (out, lse), pullback = jax.vjp(
            lambda given: _forward(decision, operands._replace(**given)), arrays
        )
        return (out, lse), (decision, pullback)
    out, lse = _forward(decision, operands)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (decision, (operands, out, lse))


def _dense(cotangent: Any) -> Array | None:
    return None if isinstance(cotangent, SymbolicZero) else cotangent


def _attend_bwd(call: Call, residuals: Any, cotangents: Any):
    del call
    decision, saved = residuals
    d_out, d_lse = (_dense(c) for c in cotangents)
    if not isinstance(saved, tuple):
        if d_out is None or d_lse is None:
            zero_out, zero_lse = (jnp.zeros(c.shape, c.dtype) for c in cotangents)
            d_out = zero_out if d_out is None else d_out
            d_lse = zero_lse if d_lse is None else d_lse
        return (_as_operands(Gradients(**saved((d_out, d_lse))[0])),)
    operands, out, lse = saved
    if d_out is None:
        d_out = jnp.zeros_like(out)
    return (_as_operands(_backward(decision, operands, out, lse, d_out, d_lse)),)


def _as_operands(grads: Gradients) -> Operands:
    cotangents: dict[str, Any] = grads._asdict()  # None is zero, and so is what is left out
    return Operands(**cotangents)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
