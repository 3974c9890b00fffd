"""Batch and heads of a backend's call split over devices under plain jit."""

from collections.abc import Callable

from jaxcap.spec import AttentionSpec


def partitioned(backend, part: str, spec: AttentionSpec) -> Callable:
    function = getattr(backend, part)

    def run(operands, *arrays):
        return function(spec.with_shapes_of(operands), operands, *arrays)

    return run
