"""Trains on long sequences split over devices, and says whether one device would have done the same.

    python -m examples.long_context.train --devices 8 --data 2 --context 4

On a machine without GPUs the devices are virtual ones of the CPU. The loss of every step is printed beside
that of the same step on one device; --no-compare leaves that out, where one device has no room for it.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcap
from examples.gemma2 import data
from examples.gemma2.checkpoint import initial, optimizer
from examples.gemma2.model import Gemma2
from examples.gemma2.settings import Settings

from .flags import parser, prepare
from .parallel import Layout, shardings

Array = jax.Array
#: How far apart the losses of a step may be, relatively: sums are taken in another order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}


class State(NamedTuple):
    parameters: Any
    moments: Any


class Run:
    """One model on one mesh."""

    def __init__(self, settings: Settings, layout: Layout):
        self.settings, self.layout = settings, layout
        self.mesh = layout.mesh()
        self.parallel = layout.context_parallel(self.mesh)
        self.split = layout.batch_sharding(self.mesh)
        config, parallel = settings.config, self.parallel
        self.graph, _ = nnx.split(
            nnx.eval_shape(lambda: Gemma2(config, rngs=nnx.Rngs(0), context_parallel=parallel))
        )
        begin = lambda: State(*initial(settings)[:2])  # noqa: E731
        places = shardings(self.mesh, jax.eval_shape(begin))
        self.state = jax.jit(begin, out_shardings=places)()
        self.step: Any = jax.jit(self._step, donate_argnums=0, out_shardings=(places, None))

    def _loss(self, parameters: Any, inputs: Array, targets: Array) -> Array:
        """Mean cross-entropy in nats; the same in every order of the tokens."""
        logits, _ = nnx.merge(self.graph, parameters)(inputs)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def _step(self, state: State, inputs: Array, targets: Array) -> tuple[State, Array]:
        """The state after a batch [A, B, T], and its loss."""

        def add(total: Any, batch: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(self._loss)(state.parameters, *batch)
            return jax.tree.map(jnp.add, total, found), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), state.parameters))
        total, _ = jax.lax.scan(add, zero, (inputs, targets))
        loss, gradients = jax.tree.map(lambda x: x / len(inputs), total)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            adamw = optimizer(self.settings)
            updates, moments = adamw.update(gradients, state.moments, state.parameters)
            parameters = optax.apply_updates(state.parameters, updates)
        return State(parameters, moments), loss

    def arrays(self, windows: np.ndarray) -> list[Array]:
        """Inputs and targets on their devices, out of windows [A, B, T + 1] in the text's order."""
        both = (windows[..., :-1], windows[..., 1:])
        return [jax.device_put(self.layout.ordered(x), self.split) for x in both]

    def train(self, windows: np.ndarray) -> float:
        """One step."""
        self.state, loss = self.step(self.state, *self.arrays(windows))
        return float(loss)

    def attention(self) -> str:
        """The backends of the two kinds of layer, and how their sequence is split."""
        c, lines = self.settings.config, []
        rows = self.layout.data
        for window in ((c.window - 1, 0), None):
            q, k = (
                jax.ShapeDtypeStruct((rows, self.settings.length, n, c.head_size), c.dtype)
                for n in (c.heads, c.kv_heads)
            )
            found = jaxcap.explain(
                *(q, k, k),
                softcap=c.attention_softcap,
                scale=c.attention_scale,
                is_causal=True,
                local_window_size=window,
                implementation=c.backend,
                context_parallel=self.parallel,
            )
            if found.training.backend is None:
                raise ValueError(f"no backend can train this model:\n{found}")
            how = "" if found.context is None else f" ({found.context})"
            lines.append(f"{found.training.backend}{how}")
        return "; ".join(dict.fromkeys(lines))


def batches(settings: Settings, layout: Layout, text: data.Text) -> Iterator[np.ndarray]:
    """[A, B, T + 1] for each step."""
    s = settings
    for step in range(s.steps):
        windows = data.batch(text.train, s.seed, step, s.batch, s.length)
        yield windows.reshape(-1, layout.data, s.length + 1)


def train(
    settings: Settings,
    layout: Layout,
    text: data.Text,
    *,
    compare: bool,
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """Losses [steps, 1], or [steps, 2] with those of one device."""
    run = Run(settings, layout)
    say(f"attention: {run.attention()}")
    runs = [run, *([Run(settings, Layout())] if compare else [])]
    losses, tokens, seconds = [], settings.batch * settings.length, 0.0
    for step, windows in enumerate(batches(settings, layout, text), 1):
        begin = time.monotonic()
        found = [run.train(windows)]
        if step > 1:  # the first one compiles
            seconds += time.monotonic() - begin
        found += [other.train(windows) for other in runs[1:]]
        losses.append(found)
        one = f" (one device {found[1]:.5f})" if compare else ""
        rate = f"  {tokens * (step - 1) / seconds:,.0f} tokens/s" if seconds else ""
        say(f"step {step}/{settings.steps}  loss {found[0]:.5f}{one}{rate}")
    return np.array(losses)


def main(arguments: list[str] | None = None) -> int:
    made = parser()
    flags = made.parse_args(arguments)
    try:
        settings, layout, text = prepare(flags)
        c = settings.config
        print(
            f"{layout}: {layout.devices} x {jax.devices()[0].device_kind}; {settings.batch} sequences"
            f" of {settings.length:,} tokens a step, {layout.load_balance}\n{c.layers} layers of width"
            f" {c.width}, {c.parameters:,} parameters, {c.dtype}; attention capped at"
            f" {c.attention_softcap:g}",
            flush=True,
        )
        losses = train(
            settings, layout, text, compare=flags.compare, say=lambda x: print(x, flush=True)
        )
    except ValueError as error:
        made.error(str(error))
    if not flags.compare:
        return 0
    worst = float(np.max(np.abs(losses[:, 0] - losses[:, 1]) / np.abs(losses[:, 1])))
    print(
        f"loss after {settings.steps} steps: {losses[-1, 0]:.5f} on {layout}, {losses[-1, 1]:.5f} on one"
        f" device; largest relative difference of a step {worst:.1e}"
    )
    if not math.isfinite(worst) or worst > TOLERANCE[settings.config.dtype]:
        print(f"that is more than {TOLERANCE[settings.config.dtype]:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
