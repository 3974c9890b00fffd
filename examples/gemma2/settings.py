"""`Settings`: all that decides a training run, from flags, kept beside its checkpoints."""

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path

import jax

from .config import DTYPES, PRESETS, Config
from .data import Text

SIZES = ("layers", "width", "mlp_width", "heads", "kv_heads", "head_size", "window")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Two runs with equal settings on one kind of machine have equal losses, step by step."""

    config: Config
    steps: int
    batch: int
    length: int
    learning_rate: float
    seed: int
    checkpoint_every: int
    data: str | None  # path of the text; None is Python's documentation
    text: str  # digest of its bytes

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @classmethod
    def read(cls, path: Path) -> "Settings":
        try:
            values = json.loads(path.read_text())
            return cls(**{**values, "config": Config(**values["config"])})
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a run's settings: {error}") from error

    def write(self, path: Path) -> None:
        """In one go, so that a kill leaves the old file or the new one."""
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        unfinished.replace(path)

    def differences(self, other: "Settings") -> list[str]:
        """What differs, for people: "steps: 600 and 800"."""
        mine, others = flat(self), flat(other)
        return [f"{k}: {mine[k]} and {others[k]}" for k in mine if mine[k] != others[k]]


def flat(settings: Settings) -> dict:
    values = dataclasses.asdict(settings)
    return {**values.pop("config"), **values}


def digest(text: Text) -> str:
    return hashlib.sha256(text.train.tobytes() + text.validation.tobytes()).hexdigest()[:16]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag's default is None, "not given": then the run's own value or the preset's holds."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="model and training (default: tiny, on a GPU small)")
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=argparse.SUPPRESS)
    add("--steps", type=int, metavar="N", help="how many batches to train on")
    add("--batch", type=int, metavar="N", help="windows of text a batch")
    add("--length", type=int, metavar="N", help="bytes a window")
    add("--learning-rate", type=float, metavar="X", help="at its peak")
    add("--checkpoint-every", type=int, metavar="N", help="steps between checkpoints")
    add("--seed", type=int, metavar="N", help="of the weights and the order of the data")
    add("--data", metavar="FILE", help="any text (default: Python's documentation topics)")
    add("--dtype", choices=DTYPES, help="of activations")
    add("--backend", metavar="NAME", help="of attention (default: jaxcap chooses)")
    on_off = argparse.BooleanOptionalAction
    add("--scan-layers", action=on_off, default=None, help="compile one pair of layers, not all")
    add("--remat", action=on_off, default=None, help="recompute activations in the backward pass")


def given(flags: argparse.Namespace) -> dict:
    """The flags of `add_flags` that were on the command line, by the settings' names."""
    return {
        name: value
        for name, value in vars(flags).items()
        if value is not None and name in (*flat_names(), "preset")
    }


def flat_names() -> list[str]:
    fields = [f.name for cls in (Config, Settings) for f in dataclasses.fields(cls)]
    return [name for name in fields if name not in ("config", "text")]


# Batch, length, steps, learning rate. Where a preset has none, it is for converted weights.
TRAINING = {
    "tiny": {"batch": 16, "length": 128, "steps": 550, "learning_rate": 3e-3},
    "small": {"batch": 32, "length": 512, "steps": 1000, "learning_rate": 1.5e-3},
}
LARGE = {"batch": 1, "length": 8192, "steps": 1000, "learning_rate": 1e-4}


def from_flags(flags: dict, text: Text) -> Settings:
    """The settings of a new run: the preset's, changed by the other flags."""
    values = dict(flags)
    preset = values.pop("preset", "small" if jax.default_backend() == "gpu" else "tiny")
    training = TRAINING.get(preset, LARGE)
    sizes = {f.name for f in dataclasses.fields(Config)}
    config = PRESETS[preset].replace(**{k: v for k, v in values.items() if k in sizes})
    values = {**training, **{k: v for k, v in values.items() if k not in sizes}}
    values.setdefault("checkpoint_every", max(1, values["steps"] // 10))
    values.setdefault("seed", 0)
    values.setdefault("data", None)
    return Settings(config=config, text=digest(text), **values)


def resumed(saved: Settings, flags: dict, text: Text) -> Settings:
    """`saved`, or ValueError if a flag or the text asks for another run."""
    changes = {k: v for k, v in flags.items() if k != "preset"}
    wanted = {f"{k}: {flat(saved)[k]} and {v}" for k, v in changes.items() if flat(saved)[k] != v}
    if "preset" in flags:
        asked = from_flags({**changes, "preset": flags["preset"]}, text)
        wanted |= set(saved.differences(asked))
    if saved.text != digest(text):
        wanted.add("the text")
    if wanted:
        raise ValueError(
            f"the folder holds a run with other settings ({', '.join(sorted(wanted))});"
            " --fresh starts anew there, --out FOLDER elsewhere"
        )
    return saved
