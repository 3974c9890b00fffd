"""PyTorch's FlexAttention with a cap, as somebody would write it who wants it fast."""

import functools
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.nn.attention import flex_attention as flex  # pyright: ignore[reportMissingImports]

from jaxcap.bench.cases import Case


@functools.cache
def fast_tanh() -> Callable:
    """tanh on the special-function unit (tanh.approx.f32) with its derivative, for use in a score_mod."""
    library = torch.library.Library("jaxcap_bench", "DEF")
    library.define("tanh(Tensor x) -> Tensor")
    for key in ("CPU", "CUDA", "Meta"):
        library.impl("tanh", torch.tanh, key)
    operator = torch.ops.jaxcap_bench.tanh

    from torch._inductor.lowering import (  # pyright: ignore[reportMissingImports]
        make_pointwise,
        register_lowering,
    )
    from torch._inductor.virtualized import ops  # pyright: ignore[reportMissingImports]

    def scalar(x: Any) -> Any:
        asm, kinds = "tanh.approx.f32 $0, $1;", "=f,f"
        return ops.inline_asm_elementwise(
            x, asm=asm, constraints=kinds, dtype=torch.float32, is_pure=True, pack=1
        )

    register_lowering(operator.default)(lambda x: make_pointwise(scalar)(x))

    class Tanh(torch.autograd.Function):
        generate_vmap_rule = True
        library_kept = library  # its operators go with it

        @staticmethod
        def forward(x: Any) -> Any:
            return operator(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (t,) = ctx.saved_tensors
            return grad - grad * t * t

    return Tanh.apply


def make(case: Case, capped: bool) -> Callable:
    """A function of (q, k, v) in the layout of jaxcap."""
    tanh = fast_tanh() if capped else None

    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        inside = i >= j
        return inside if case.window_left is None else inside & (i - j <= case.window_left)

    def cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        assert tanh is not None
        return case.softcap * tanh(score / case.softcap)

    block = None
    if case.causal:
        shape = (None, None, case.query_length, case.key_length)
        block = flex.create_block_mask(keep, *shape, device="cuda")
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def run(q: Any, k: Any, v: Any) -> Any:
        out: Any = compiled(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=cap if capped else None,
            block_mask=block,
            enable_gqa=case.query_heads != case.kv_heads,
        )
        return out.transpose(1, 2)

    return run
