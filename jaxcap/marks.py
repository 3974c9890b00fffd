"""`executed` logs what a program holds, `batch_index` counts vmapped axes; `reverse_only`, `invariant`.

jit, remat and scan trace functions that never run, so a log at trace time would lie. `executed` is
an identity that survives into the program and reports when it is lowered, once a message.

A vmapped axis counts as batch for dropout, although the function under vmap cannot see it.
`batch_index` is `arange(B)`; its batching rule continues the count over the vmapped axis.

JAX differentiates a `custom_vjp` forwards until it runs, or compiles, the result, and then names no
reason. Before it stands `reverse_only`, an identity whose tangent can be transposed but not computed.

Pallas takes no reference whose type varies over a mesh's axes: `invariant` is an identity that forgets them.
"""

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcap.environment import logger
from jaxcap.spec import Array

_reported: set[str] = set()


def _report(message: str, detail: str) -> None:
    if message not in _reported:
        _reported.add(message)
        logger.info(message)
        logger.debug("%s\n%s", message, detail)


def forget_reports() -> None:
    """Report every message again (for tests)."""
    _reported.clear()


_executed_p = Primitive("jaxcap_executed")


@_executed_p.def_impl
def _executed_impl(x, *, message, detail):
    _report(message, detail)
    return x


def _executed_lowering(ctx, x, *, message, detail):
    del ctx
    _report(message, detail)
    return [x]


def _executed_jvp(primals, tangents, **parameters):
    return _executed_p.bind(*primals, **parameters), tangents[0]


_executed_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_executed_p, _executed_lowering)
batching.defvectorized(_executed_p)
ad.primitive_jvps[_executed_p] = _executed_jvp


def executed(x: Array, message: str, detail: str = "") -> Array:
    """`x`, and `message` in the log once the program that computes it is compiled or run."""
    return _executed_p.bind(x, message=message, detail=detail)


_batch_index_p = Primitive("jaxcap_batch_index")


def _iota(*markers, size):
    del markers
    return jnp.arange(size, dtype=jnp.int32)


@_batch_index_p.def_abstract_eval
def _batch_index_abstract(*markers, size):
    del markers
    return ShapedArray((size,), jnp.dtype("int32"))


def _batch_index_batching(markers, dims, *, size):
    axis_size = next(m.shape[d] for m, d in zip(markers, dims, strict=True) if d is not None)
    index = _batch_index_p.bind(*markers, size=axis_size * size)
    return index.reshape(axis_size, size), 0


def _batch_index_jvp(primals, tangents, **parameters):
    del tangents
    index = _batch_index_p.bind(*primals, **parameters)
    return index, ad.Zero(ShapedArray(index.shape, jax.dtypes.float0))


_batch_index_p.def_impl(_iota)
mlir.register_lowering(_batch_index_p, mlir.lower_fun(_iota, multiple_results=False))
batching.primitive_batchers[_batch_index_p] = _batch_index_batching
ad.primitive_jvps[_batch_index_p] = _batch_index_jvp


def batch_index(size: int, *markers: Array) -> Array:
    """[size] int32 indices of batch entries, counting on over vmapped axes of any of `markers`."""
    return _batch_index_p.bind(*markers, size=size)


_reverse_only_p = Primitive("jaxcap_reverse_only")
_tangent_p = Primitive("jaxcap_reverse_only_tangent")


def _no_tangent(*args, backend):
    del args
    raise NotImplementedError(
        f"backend {backend!r} has no forward-mode derivatives; pass implementation='xla'"
    )


def _reverse_only_jvp(primals, tangents, *, backend):
    primal = _reverse_only_p.bind(*primals, backend=backend)
    return primal, _tangent_p.bind(ad.instantiate_zeros(tangents[0]), backend=backend)


_reverse_only_p.def_impl(lambda x, *, backend: x)
mlir.register_lowering(_reverse_only_p, lambda ctx, x, *, backend: [x])
ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp
_tangent_p.def_impl(_no_tangent)
mlir.register_lowering(_tangent_p, _no_tangent)
ad.deflinear2(_tangent_p, lambda cotangent, x, *, backend: [cotangent])
for _p in (_reverse_only_p, _tangent_p):
    _p.def_abstract_eval(lambda x, *, backend: x)
    batching.defvectorized(_p)


def reverse_only(x: Array, backend: str) -> Array:
    """`x`, of which forward-mode derivatives raise an error that names the backend."""
    return _reverse_only_p.bind(x, backend=backend)


_invariant_p = Primitive("jaxcap_invariant")
_invariant_p.def_impl(lambda x: x)
_invariant_p.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_invariant_p, lambda ctx, x: [x])
batching.defvectorized(_invariant_p)


def invariant(x: Array) -> Array:
    """`x`, which may differ from device to device although its type no longer says so."""
    return _invariant_p.bind(x)
