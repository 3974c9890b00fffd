"""Training a stack of Hugging Face Gemma 2 layers: jaxcap, FlexAttention and eager attention in one run.

    python -m benchmarks.torch_training --layers 4 --length 8192

The shape is Gemma 2 2B's (8 heads of 256, 4 key/value heads, cap 50, every other layer with a window of
4096) with a small vocabulary, bfloat16 weights, forward, backward and SGD. FlexAttention is Transformers'
own integration, compiled by torch.compile. By turns, a round each; the median round is printed, with its
spread, the loss of the first step and the peak of memory.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import transformers

from jaxcap import torch_bridge

IMPLEMENTATIONS = ("jaxcap", "flex_attention", "eager")


class Trained:
    """A model under training with one attention implementation."""

    def __init__(self, implementation: str, options: argparse.Namespace):
        torch.manual_seed(0)
        self.before = torch.cuda.memory_allocated()
        config = transformers.Gemma2Config(
            vocab_size=1024,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=options.head_dim,
            layer_types=["full_attention"] * options.layers if options.full else None,
            query_pre_attn_scalar=options.head_dim,
            attn_logit_softcapping=50.0,
            sliding_window=4096,
            max_position_embeddings=options.length,
            use_cache=False,
        )
        with torch.device("cuda"):
            self.model = transformers.Gemma2ForCausalLM._from_config(
                config, attn_implementation=implementation, dtype=torch.bfloat16
            ).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        ids = torch.randint(0, 1024, (options.batch, options.length), device="cuda")
        self.batch = {"input_ids": ids, "labels": ids}
        self.rounds: list[float] = []
        self.loss = float("nan")
        self.memory = self.compiled = 0.0

    def step(self) -> torch.Tensor:
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def warm(self) -> None:
        """The first steps, which compile."""
        start = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        self.loss = self.step().item()
        self.step().item()
        self.memory = (torch.cuda.max_memory_allocated() - self.before) / 2**30
        self.compiled = time.perf_counter() - start

    def round(self, steps: int) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        self.rounds.append((time.perf_counter() - start) / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--full", action="store_true", help="no windows: half the kernels to compile"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU that PyTorch sees, and there is none")
    if "jaxcap" in options.only:
        torch_bridge.register_with_transformers()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers"
        f" {transformers.__version__}: {options.layers} layers, head size {options.head_dim},"
        f" {options.batch} x {options.length} tokens"
    )
    trained: dict[str, Any] = {}
    for name in options.only:
        try:
            trained[name] = Trained(name, options)
            trained[name].warm()
        except Exception as error:
            trained.pop(name, None)
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    for _ in range(options.rounds):
        for run in trained.values():
            run.round(options.steps)
    tokens = options.batch * options.length
    print(f"{'':16s}  ms/step  (rounds)         tokens/s  peak GiB  first loss  first steps s")
    for name, run in trained.items():
        median = statistics.median(run.rounds)
        spread = f"{min(run.rounds) * 1e3:.1f}-{max(run.rounds) * 1e3:.1f}"
        print(
            f"{name:16s}  {median * 1e3:7.1f}  {spread:14s}  {tokens / median:10.0f}"
            f"  {run.memory:8.1f}  {run.loss:10.4f}  {run.compiled:13.1f}"
        )


if __name__ == "__main__":
    main()
