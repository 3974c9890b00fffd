"""From flags to settings: the model, the mesh, the text."""

import argparse
import os

import jax

from examples.gemma2 import data
from examples.gemma2.config import DTYPES, PRESETS, Config
from examples.gemma2.settings import Settings, digest

from .parallel import AXES, Layout

VIRTUAL_DEVICES = 8
MODELS = {"long": PRESETS["tiny"].replace(heads=4, kv_heads=2, head_size=32), **PRESETS}

DESCRIPTION = """Trains on long sequences split over devices, beside the same run on one device.

Without GPUs the devices are virtual ones of the CPU."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m examples.long_context.train",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--devices", type=int, metavar="N", help=f"default: all GPUs, or {VIRTUAL_DEVICES}")
    add("--data", type=int, default=1, metavar="N", help="groups, each with sequences of its own")
    add("--context", type=int, metavar="N", help="devices a sequence is split over (default: rest)")
    add("--exchange", type=int, default=1, metavar="N", help="all-to-all of --kind hybrid")
    add("--tensor", type=int, default=1, metavar="N", help="devices heads and MLP are split over")
    add("--kind", default="ring", choices=("ring", "all_gather", "all_to_all", "hybrid", "auto"))
    add("--load-balance", default="zigzag", choices=("contiguous", "zigzag", "striped"))
    add("--preset", default="long", choices=MODELS, help="the model")
    add("--dtype", choices=DTYPES, help="of activations")
    add("--backend", metavar="NAME", help="of attention (default: jaxcap chooses)")
    add("--length", type=int, metavar="N", help="bytes a sequence (default: 1024, on GPUs 65536)")
    add("--steps", type=int, default=20, metavar="N")
    add("--accumulate", type=int, default=1, metavar="N", help="sequences a group and step")
    add("--learning-rate", type=float, default=3e-4, metavar="X")
    add("--seed", type=int, default=0, metavar="N")
    add("--text", metavar="FILE", help="any text (default: Python's documentation topics)")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="with one device")
    return made


def make_devices(wanted: int) -> None:
    """Virtual devices for a CPU; without effect on GPUs, and once JAX has its devices."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", wanted)
        except RuntimeError:
            return


def prepare(flags: argparse.Namespace) -> tuple[Settings, Layout, data.Text]:
    """What the flags mean on this machine. Raises ValueError where they do not go together."""
    make_devices(flags.devices or VIRTUAL_DEVICES)
    on_gpu = jax.default_backend() == "gpu"
    devices = flags.devices or jax.device_count()
    if not 1 <= devices <= jax.device_count():
        raise ValueError(f"--devices must be at most {jax.device_count()} here, got {devices}")
    others = flags.data * flags.exchange * flags.tensor
    sizes = {name: getattr(flags, name) for name in AXES}
    if flags.context is None:
        sizes["context"] = max(1, devices // others)
    layout = Layout(**sizes, kind=flags.kind, load_balance=flags.load_balance)
    if layout.devices != devices:
        raise ValueError(f"--devices is {devices}, but {layout} are {layout.devices}")
    config: Config = MODELS[flags.preset]
    dtype = flags.dtype or ("bfloat16" if on_gpu else config.dtype)
    config = config.replace(dtype=dtype, backend=flags.backend, scan_layers=True, remat=on_gpu)
    text = data.load(flags.text)
    settings = Settings(
        config=config,
        steps=flags.steps,
        batch=flags.data * flags.accumulate,
        length=flags.length or (65536 if on_gpu else 1024),
        learning_rate=flags.learning_rate,
        seed=flags.seed,
        checkpoint_every=flags.steps,
        data=flags.text,
        text=digest(text),
    )
    layout.check(config, settings.length)
    data.batch(text.train, 0, 0, 1, settings.length)
    return settings, layout, text
