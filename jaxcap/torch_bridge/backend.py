"""A backend that calls FlashAttention: refusals, what XLA does around the call, and the views inside it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import blockwise, merge
from jaxcap.selection import BackendError
from jaxcap.softcap import TANH_APPROX_ERROR
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands
from jaxcap.torch_bridge import arguments, custom_call
from jaxcap.torch_bridge.arguments import Call, cleared, kept_lse
from jaxcap.torch_bridge.providers import Build, Provider


@dataclasses.dataclass(frozen=True)
class FlashAttention:
    """The first of `providers` that can run a call runs it, forward and backward."""

    name: str
    providers: tuple[Provider, ...]

    cuda_only = True  # a call that is traced here and compiled for a CPU needs another backend

    def tanh_error(self, softcap: float) -> float:
        """Relative error of tanh: every FlashAttention takes the special-function unit's."""
        del softcap
        return TANH_APPROX_ERROR

    @property
    def full_build(self) -> "FlashAttention":
        """As if a complete build were installed, for tables of features."""
        complete = Build("", details=getattr(self.providers[0], "complete", None))
        return FlashAttention(self.name, (dataclasses.replace(self.providers[0], build=complete),))

    def reasons(self, spec: AttentionSpec) -> list[str]:
        found = arguments.inexpressible(spec)
        mask = arguments.mask_of(spec)
        own = {p.title: p.reasons(spec, mask) for p in self.providers}
        if all(own.values()):
            found += [f"{title}: {'; '.join(why)}" for title, why in own.items()]
        return found

    def provider(self, spec: AttentionSpec) -> Provider:
        mask = arguments.mask_of(spec)
        for provider in self.providers:
            if not provider.reasons(spec, mask):
                return provider
        raise BackendError(f"backend {self.name!r} cannot run: {'; '.join(self.reasons(spec))}")

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        provider = self.provider(spec)
        _, keys = arguments.used(spec, operands)
        batch, length, heads, _ = operands.query.shape
        results = (
            jax.ShapeDtypeStruct(operands.query.shape, operands.query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        )
        found = []
        for piece in arguments.pieces(spec, operands):
            arrays = {
                "q": operands.query,
                "k": cleared(operands.key, keys),
                "v": cleared(operands.value, keys),
                "lengths": piece.lengths,
                "slopes": _slopes(operands),
            }
            run = functools.partial(_forward, provider, piece.call)
            out, lse = custom_call.launch(self._name("forward", provider), run, results, arrays)
            found.append((cleared(out, piece.rows), kept_lse(lse, piece.rows, -math.inf)))
        out, lse = functools.reduce(lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), found)
        if operands.sinks is None:
            return out.astype(spec.result_dtype), lse
        part = merge.Part(out, jnp.swapaxes(lse, 1, 2))
        part = merge.with_sink(part, operands.sinks[:, None, :])
        return part.out.astype(spec.result_dtype), jnp.swapaxes(part.lse, 1, 2)

    def backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
    ) -> Gradients:
        """With sinks too: p = exp(score - lse) and delta = out . d_out hold with the sink in lse and out."""
        provider = self.provider(spec)
        rows, keys = arguments.used(spec, operands)
        # Of a part of a call both are wider than what the kernels take.
        out, d_out = (x.astype(spec.dtype) for x in (out, d_out))
        value = cleared(operands.value, keys)
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3]]
        found = []
        for piece in arguments.pieces(spec, operands):
            given = {
                "q": cleared(operands.query, rows),
                "k": cleared(operands.key, keys),
                "lse": kept_lse(lse, piece.rows, math.inf),
                "lengths": piece.lengths,
                "slopes": _slopes(operands),
            }
            if provider.packs:
                given |= arguments.packed_bounds(spec, piece.lengths)
            run = functools.partial(_backward, provider, piece.call)
            launch = functools.partial(
                custom_call.launch, self._name("backward", provider), run, results
            )
            d_rows = cleared(d_out, piece.rows)
            sides = (piece.rows, piece.keys, piece.keys)
            grads = launch(given | {"v": value, "out": out, "d_out": d_rows})
            found.append([cleared(x, kept) for x, kept in zip(grads, sides, strict=True)])
            if d_lse is not None:
                kept = kept_lse(d_lse, piece.rows, 0.0)
                v_ones, d_rows = arguments.lse_as_value(kept, value, out.dtype)
                none = {"out": jnp.zeros_like(out)}
                dq, dk, _ = launch(given | {"v": v_ones, "d_out": d_rows} | none)
                found.append([cleared(dq, piece.rows), cleared(dk, piece.keys), None])
        d_sinks = None
        if operands.sinks is not None and "sinks" in spec.gradients:
            call = arguments.call_of(spec)
            delta = _delta(cleared(out, rows), cleared(d_out, rows), slice(*call.mask.rows))
            delta = delta if d_lse is None else delta - d_lse
            d_sinks = blockwise.sink_gradient(operands.sinks, lse, delta)
        dq, dk, dv = (_sum(x, spec.result_dtype) for x in zip(*found, strict=True))
        return Gradients(dq, dk, dv, sinks=d_sinks)

    def _name(self, part: str, provider: Provider) -> str:
        return f"backend {self.name!r}: the {part} of {provider.title}"


def _sum(parts: Sequence[Array | None], dtype: Any) -> Array:
    """In float32, unless there is one alone."""
    first, *rest = (x for x in parts if x is not None)
    for x in rest:
        first = first.astype(jnp.float32) + x.astype(jnp.float32)
    return first.astype(dtype)


def _delta(out: Array, d_out: Array, rows: slice) -> Array:
    """[B, N, T] sum(out * d_out), 0 in the rows that a mask leaves out."""
    part = out[:, rows].astype(jnp.float32) * d_out[:, rows].astype(jnp.float32)
    outside = (rows.start, out.shape[1] - rows.stop)
    return jnp.pad(jnp.swapaxes(jnp.sum(part, axis=-1), 1, 2), ((0, 0), (0, 0), outside))


def _slopes(operands: Operands) -> Array | None:
    """[N] or [B, N] float32."""
    if operands.alibi_slopes is None:
        return None
    slopes = operands.alibi_slopes.astype(jnp.float32)
    return slopes[0] if slopes.shape[0] == 1 else slopes


def _forward(provider: Provider, call: Call, results: Any, *, q, k, v, lengths, slopes) -> None:
    out, lse = results
    rows, keys = slice(*call.mask.rows), slice(*call.mask.keys)
    _fill_outside(out, 1, rows, 0.0)
    _fill_outside(lse, 2, rows, -math.inf)
    if call.mask.empty:
        return
    provider.forward(
        call,
        out[:, rows],
        lse[:, :, rows],
        q=q[:, rows],
        k=k[:, keys],
        v=v[:, keys],
        lengths=lengths,
        slopes=slopes,
    )


def _backward(
    provider: Provider, call: Call, results: Any, *, q, k, v, out, lse, d_out, **others
) -> None:
    dq, dk, dv = results
    rows, keys = slice(*call.mask.rows), slice(*call.mask.keys)
    _fill_outside(dq, 1, rows, 0.0)
    _fill_outside(dk, 1, keys, 0.0)
    _fill_outside(dv, 1, keys, 0.0)
    if call.mask.empty:
        return
    provider.backward(
        call,
        dq[:, rows],
        dk[:, keys],
        dv[:, keys],
        q=q[:, rows],
        k=k[:, keys],
        v=v[:, keys],
        out=out[:, rows],
        lse=lse[:, :, rows].contiguous(),  # the kernels take a pointer
        d_out=d_out[:, rows],
        **others,
    )


def _fill_outside(x: Any, dim: int, kept: slice, value: float) -> None:
    if kept.start > 0:
        x.narrow(dim, 0, kept.start).fill_(value)
    if kept.stop < x.shape[dim]:
        x.narrow(dim, kept.stop, x.shape[dim] - kept.stop).fill_(value)
