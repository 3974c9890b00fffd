"""The state of a run, and the folder that keeps it; a kill costs what came after its checkpoint.

settings.json          what the run is
checkpoints/STEP/      parameters, and what training needs beside them (orbax)
losses.csv, loss.png   written at the end
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from .config import Config
from .model import Gemma2
from .settings import Settings

Array = jax.Array
WRITTEN = ("settings.json", "losses.csv", "loss.png", "sample.txt")


class State(NamedTuple):
    """`step` batches are done; losses lie in arrays of their final size, NaN where none is yet."""

    parameters: Any
    optimizer: Any
    step: Array
    losses: Array  # [steps]
    validation: Array  # [steps], at the steps that were validated


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with a warm-up and a cosine to zero; norms are not decayed."""
    steps, peak = settings.steps, settings.learning_rate
    warmup = min(50, max(1, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))

    def decayed(parameters):
        return jax.tree.map_with_path(
            lambda path, _: "scale" not in jax.tree_util.keystr(path), parameters
        )

    adamw = optax.adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def initial(settings: Settings) -> State:
    """Freshly drawn from the seed."""

    @jax.jit
    def draw() -> State:
        model = Gemma2(settings.config, rngs=nnx.Rngs(settings.seed))
        parameters = nnx.state(model, nnx.Param)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            moments = optimizer(settings).init(parameters)
        none = jnp.full(settings.steps, jnp.nan, jnp.float32)
        return State(parameters, moments, jnp.zeros((), jnp.int32), none, none)

    return draw()


def abstract(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """The model without arrays: `nnx.merge(graph, parameters)` is whole again; and their shapes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Gemma2(config, rngs=nnx.Rngs(0))))
    return graph, state


def _here(shapes: Any) -> Any:
    """Restores to this process's first device, whatever device wrote the checkpoint."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)


class Run:
    """A folder with the checkpoints of one run."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder).absolute()

    @property
    def settings(self) -> Settings | None:
        path = self.folder / "settings.json"
        return Settings.read(path) if path.exists() else None

    @property
    def config(self) -> Config:
        """Of the trained or converted model."""
        path = self.folder / "settings.json"
        if not path.exists():
            raise ValueError(f"{self.folder} holds no model; `make demo` trains one")
        return Config(**json.loads(path.read_text())["config"])

    def manager(self) -> ocp.CheckpointManager:
        # Not in the background: the next step writes over the arrays that a save would still read.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def start(self, settings: Settings) -> None:
        """Makes the folder a new run's; only what an earlier run wrote there is deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in WRITTEN:
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        settings.write(self.folder / "settings.json")

    def save(self, manager: ocp.CheckpointManager, state: State) -> None:
        rest = state._replace(parameters=None)._asdict()
        manager.save(
            int(state.step),
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(state.parameters),
                training=ocp.args.StandardSave(rest),
            ),
        )

    def restore(self, manager: ocp.CheckpointManager, settings: Settings) -> State:
        """The state of the newest checkpoint, or a fresh one if there is none."""
        step = manager.latest_step()
        if step is None:
            return initial(settings)
        like = _here(jax.eval_shape(lambda: initial(settings)))
        items = manager.restore(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardRestore(like.parameters),
                training=ocp.args.StandardRestore(like._replace(parameters=None)._asdict()),
            ),
        )
        return State(**{**items["training"], "parameters": items["parameters"]})

    def parameters(self, config: Config) -> Any:
        """Of the newest checkpoint, without the optimizer's state."""
        with self.manager() as manager:
            step = manager.latest_step()
            if step is None:
                raise ValueError(f"{self.folder} has no checkpoint yet; train first")
            like = ocp.args.StandardRestore(_here(abstract(config)[1]))
            return manager.restore(step, args=ocp.args.Composite(parameters=like))["parameters"]

    def import_weights(self, config: Config, parameters: dict[str, Any]) -> None:
        """Makes the folder that of a model trained elsewhere, from nested dicts of arrays."""
        if (self.folder / "settings.json").exists():
            raise ValueError(f"{self.folder} holds a model already; choose another folder")
        state = abstract(config)[1]
        nnx.replace_by_pure_dict(state, parameters)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.manager() as manager:
            weights = ocp.args.StandardSave(state)
            manager.save(0, args=ocp.args.Composite(parameters=weights))
        text = json.dumps({"config": dataclasses.asdict(config)}, indent=2)
        (self.folder / "settings.json").write_text(text + "\n")
