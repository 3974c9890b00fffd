"""What a warm call costs the host, in microseconds, beside PyTorch's own attention and FlashAttention 3.

    python -m benchmarks.torch_overhead

Small tensors, so that the GPU keeps up: the host's time is what a call takes to return. The least of five
rounds is printed: what else the machine does only adds.
"""

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from jaxcap import torch_bridge


def least(function: Callable[[], Any], calls: int, rounds: int = 5) -> float:
    """Microseconds of a call."""
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return min(times)


def implementations() -> dict[str, Callable[..., Any]]:
    def ours(q, k, v):
        return torch_bridge.attention(q, k, v, softcap=50.0, causal=True)

    def operator(q, k, v):
        from jaxcap.torch_bridge import call, operator

        settings = call.Settings(50.0, True)
        gradients = ("query", "key", "value") if q.requires_grad else ()
        spread = operator.spread(call.Tensors(q, k, v), settings, gradients)
        return torch.ops.jaxcap.attention(*spread)[0]

    def sdpa(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)

    found: dict[str, Callable[..., Any]] = {
        "jaxcap": ours,
        "jaxcap as an operator": operator,
        "scaled_dot_product_attention (no cap)": sdpa,
    }
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            fa3 = importlib.import_module(name).flash_attn_func
        except ImportError:
            continue
        found[f"FlashAttention 3 ({name})"] = lambda q, k, v, f=fa3: f(
            q, k, v, softcap=50.0, causal=True
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that PyTorch sees, and there is none")
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    print(f"{'microseconds of a call':40s} no_grad  forward  forward+backward")
    for name, function in implementations().items():
        row = []
        with torch.no_grad():
            row.append(least(lambda: function(q, k, v), options.calls))  # noqa: B023
        try:
            out = function(*leaves)
            d_out = torch.randn_like(out)
            row.append(least(lambda: function(*leaves), options.calls))  # noqa: B023
            both = lambda: torch.autograd.grad(function(*leaves), leaves, d_out)  # noqa: E731, B023
            row.append(least(both, options.calls // 4))
        except Exception as error:  # a forward-only build
            print(f"  {name}: no gradients ({type(error).__name__})")
        print(f"{name:40s} " + "  ".join(f"{x:7.1f}" for x in row))


if __name__ == "__main__":
    main()
