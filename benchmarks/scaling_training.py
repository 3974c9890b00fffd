"""The long-context example on meshes of data x context, its losses beside those of one device."""

import time
from typing import Any

from benchmarks.scaling_timing import alone

STEPS = 4


def meshes(devices: int) -> list[list[str]]:
    """Flags of the example, of the meshes that `devices` are tried in."""
    data = 1 if devices == 2 else 2
    found = [["--data", str(data), "--kind", "ring"]]
    found.append(["--data", str(devices // 2), "--kind", "all_to_all"])
    if devices >= 8:
        found.append(["--data", "2", "--kind", "hybrid", "--exchange", "2"])
    return [["--devices", str(devices), "--steps", str(STEPS), *words] for words in found]


def measure(words: list[str], lock: str) -> dict[str, Any]:
    """Losses [steps, 2], on the mesh and on one device, and tokens a second of the former."""
    import numpy as np

    from examples.long_context import train as example
    from examples.long_context.parallel import Layout

    settings, layout, text = example.prepare(example.parser().parse_args(words))
    batches = list(example.batches(settings, layout, text))
    runs = [example.Run(settings, layout), example.Run(settings, Layout())]
    for run in runs:
        run.step = run.step.lower(run.state, *run.arrays(batches[0])).compile()
    losses, seconds = [], []
    with alone(lock, range(layout.devices)):
        for windows in batches:
            begin = time.perf_counter()
            found = [runs[0].train(windows)]
            seconds.append(time.perf_counter() - begin)
            losses.append([*found, runs[1].train(windows)])
    ours, one = np.array(losses).T
    return {
        "mesh": str(layout),
        "kind": layout.kind,
        "layout": layout.load_balance,
        "devices": layout.devices,
        "tokens": settings.length,
        "dtype": settings.config.dtype,
        "attention": runs[0].attention(),
        "losses": losses,
        "difference": float(np.max(np.abs(ours - one) / np.abs(one))),
        "allowed": example.TOLERANCE[settings.config.dtype],
        "tokens_a_second": settings.batch * settings.length / min(seconds[1:]),
    }
