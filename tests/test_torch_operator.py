"""`torch.ops.jaxcap`: schema, fake, autograd registration; whole graphs under torch.compile and export."""

import pytest
import torch

from jaxcap import torch_bridge
from jaxcap.torch_bridge import operator
from jaxcap.torch_bridge.call import Settings, Tensors
from tests.torch_reference import inputs, normal

CALL = {"softcap": 2.0, "causal": True}


def spread(given, gradients=("query", "key", "value"), **extra):
    return operator.spread(Tensors(*given.values(), **extra), Settings(**CALL), gradients)


def test_operator_check():
    """PyTorch's own checks of schema, fake tensors and autograd, with static and dynamic shapes."""
    torch.library.opcheck(torch.ops.jaxcap.attention.default, spread(inputs(dtype=torch.float32)))


def test_operator_check_of_the_backward():
    given = {name: x.detach() for name, x in inputs(dtype=torch.float32).items()}
    arguments = spread(given)
    out, lse = torch.ops.jaxcap.attention(*arguments)
    torch.library.opcheck(
        torch.ops.jaxcap.attention_backward.default,
        (*arguments, out, lse, out, None),
        test_utils=("test_schema", "test_faketensor"),
    )


class Watch:
    """A compiler backend that notes the operators of each graph and runs it as it is."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, _):
        self.graphs.append([node.target for node in module.graph.nodes])
        return module.forward


def test_compile_keeps_it_whole():
    given = inputs(dtype=torch.float32)
    watch = Watch()

    def layer(q, k, v):
        return torch_bridge.attention(q * 1, k, v, **CALL).square().sum()

    wanted = torch.autograd.grad(layer(*given.values()), list(given.values()))
    compiled = torch.compile(layer, fullgraph=True, backend=watch)
    compiled(*given.values())
    assert len(watch.graphs) == 1
    assert watch.graphs[0].count(torch.ops.jaxcap.attention) == 1
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given.values()), list(given.values()))
    torch.testing.assert_close(found, wanted)

    def mapped(q, k, v):  # whose tensors deny that they require gradients
        attend = torch.func.vmap(lambda q: torch_bridge.attention(q, k, v, **CALL))
        return attend(q[None]).square().sum()

    compiled = torch.compile(mapped, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given.values()), list(given.values()))
    torch.testing.assert_close(found, wanted)


def test_compile_with_everything_and_dynamic_lengths():
    """One graph for all lengths, dropout that moves on, and gradients of bias and sinks."""

    def layer(q, k, v, bias, sinks, slopes, ids):
        out, lse = torch_bridge.attention(
            q,
            k,
            v,
            bias=bias,
            sinks=sinks,
            alibi_slopes=slopes,
            segment_ids=ids,
            dropout_p=0.25,
            return_lse=True,
            layout="bhsd",
            **CALL,
        )
        return out.square().sum() + lse.clamp(min=-9).sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (16, 24):
        given = inputs(t=length, s=length, dtype=torch.float32)
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in given.values())
        extra = (
            normal(4, 1, length, dtype=torch.float32),
            normal(4, dtype=torch.float32),
            normal(4, dtype=torch.float32, grad=False).abs(),
            torch.arange(length).repeat(2, 1) // 9,
        )
        leaves = (q, k, v, *extra[:2])
        torch.manual_seed(0)
        wanted = torch.autograd.grad(layer(q, k, v, *extra), leaves)
        torch.manual_seed(0)
        torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v, *extra), leaves), wanted)
        assert compiled(q, k, v, *extra) != compiled(q, k, v, *extra)


def test_compile_says_what_is_wrong_with_the_input():
    given = {name: x.detach() for name, x in inputs(dtype=torch.float32).items()}
    compiled = torch.compile(
        lambda q, k, v: torch_bridge.attention(q, k[..., :8], v), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="k must be"):
        compiled(*given.values())
    compiled = torch.compile(
        lambda q, k, v: torch_bridge.attention(q, k, v, softcap=-1.0),
        fullgraph=True,
        backend="eager",
    )
    with pytest.raises(Exception, match="softcap must not be negative"):
        compiled(*given.values())


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return torch_bridge.attention(q, k, v, **CALL)

    given = tuple(x.detach() for x in inputs(dtype=torch.float32).values())
    program = torch.export.export(Layer(), given)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.jaxcap.attention.default) == 1
    torch.testing.assert_close(program.module()(*given), Layer()(*given))


def test_a_second_derivative_is_an_error_that_says_so():
    given = inputs(dtype=torch.float32)
    out, _ = torch.ops.jaxcap.attention(*spread(given))
    (dq,) = torch.autograd.grad(out.square().sum(), given["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        dq.sum().backward()


def test_a_dispatch_mode_sees_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Log():
        torch_bridge.attention(*inputs(dtype=torch.float32).values(), **CALL)
    assert torch.ops.jaxcap.attention.default in seen
