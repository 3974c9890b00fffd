"""What kernels and links take: lines fitted to measurements, and a few stated assumptions."""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

HOPS = pathlib.Path(__file__).parent / "results" / "hops_h200.json"
PASSES = ("forward", "backward")
LAUNCH_MS = 0.2  # measured calls shorter than this tell of the host's launches, not of kernels
PRODUCTS = {"forward": 2, "backward": 5}  # matrix products a tile
#: What a block works on: queries of a head against all keys; keys of a key head against all queries.
BLOCKS = {"forward": 192, "backward": 128}
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Seconds a call, a floating-point operation, and an element of what is read and written."""

    call: float
    flop: float
    row: float  # of [rows, N, D]: prologue, output; in the backward delta and the float32 dQ
    diagonal: float  # of those rows along a causal diagonal: tiles that are half masked
    key: float  # of [keys, K, D]
    open: float = 0.0  # of the operations of calls without a mask: what they take longer, each

    def seconds(self, work: np.ndarray) -> np.ndarray:
        """Of `features`."""
        return work @ np.array(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Link:
    """`step * steps + bytes / rate` seconds."""

    rate: float  # bytes a second and device, on the wire, one way
    step: float = 5e-6


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of GPU, its links within an NVLink domain, and the network between domains."""

    forward: Kernel
    backward: Kernel
    hop_forward: Kernel  # of a ring: beside transfers, results in float32
    hop_backward: Kernel
    permute: Link = Link(272e9)  # measured at 256 MB on two H200s
    gather: Link = Link(229e9)  # likewise, and its reverse
    # Measured 502e9 of the array, half of which stays where it is on two devices.
    exchange: Link = Link(251e9)
    network: Link = Link(50e9, 10e-6)  # assumed: an adapter of 400 Gbit/s a GPU
    domain: int = 8  # GPUs that NVLink joins
    # What kernels take in calls of a tenth of a second and more, over what the lines say: fitted to the
    # undisturbed times of one GPU, and of nothing else.
    sustained: float = 1.012
    memory_rate: float = 4.3e12  # measured: bytes a second, read and written
    stolen: float = 0.1  # assumed: share of the multiprocessors that a transfer occupies
    hop: float = 30e-6  # assumed: what a hop costs beyond kernels: choosing a branch, launches


def no_sooner(
    name: str, pairs: Any, calls: Any, rows: Any, keys: Any, heads: tuple[int, int]
) -> np.ndarray:
    """Pairs a head: `pairs`, or those that all multiprocessors could do while the longest block runs.

    Under a mask that block is up to twice as long as the mean.
    """
    pairs, calls, rows, keys = (np.asarray(x, np.float64) for x in (pairs, calls, rows, keys))
    calls = np.maximum(calls, 1)
    across, along, count = (rows, keys, heads[0]) if name == "forward" else (keys, rows, heads[1])
    longest = np.minimum(along / calls, 2 * pairs / np.maximum(across, 1)) * BLOCKS[name]
    return np.maximum(pairs, calls * longest * MULTIPROCESSORS / count)


def features(
    name: str, *, pairs: Any, calls: Any, rows: Any, keys: Any, diagonal: Any, sizes: Any
) -> np.ndarray:
    """[..., 6], by which the fields of `Kernel` are multiplied; `sizes` are (N, K, D)."""
    n, k, d = sizes
    flops = 2.0 * PRODUCTS[name] * n * d * no_sooner(name, pairs, calls, rows, keys, (n, k))
    columns = (calls, flops, n * d * rows, n * d * diagonal, k * d * keys)
    columns = (*columns, np.where(np.asarray(diagonal) > 0, 0.0, flops))
    return np.stack(np.broadcast_arrays(*(np.asarray(c, np.float64) for c in columns)), -1)


def row_features(row: Mapping[str, Any]) -> np.ndarray:
    """Of a measured hop, a `scaling_rates.Row` as a dict."""
    t, s = row["queries"], row["keys"]
    return features(
        row["passes"],
        pairs=t * (t + 1) // 2 if row["causal"] else t * s,
        calls=1,
        rows=t,
        keys=s,
        diagonal=t if row["causal"] else 0,
        sizes=(row["heads"], row["kv_heads"], row["head_size"]),
    )


def fit(rows: Iterable[Mapping[str, Any]], name: str) -> Kernel:
    """The kernel with the least squares of relative errors and no coefficient below 0.

    Raises ValueError if no row is of this pass.
    """
    rows = [row for row in rows if row["passes"] == name]
    if not rows:
        raise ValueError(f"no measured {name}: run `python -m benchmarks.scaling --hops`")
    seconds = np.array([row["ms"] for row in rows]) / 1e3
    a = np.stack([row_features(row) for row in rows]) / seconds[:, None]
    norm = np.maximum(np.abs(a).max(0), 1e-300)
    best, least = np.zeros(a.shape[1]), np.inf
    every = range(a.shape[1])
    for chosen in itertools.chain(*(itertools.combinations(every, n + 1) for n in every)):
        part, target = a[:, chosen] / norm[list(chosen)], np.ones(len(rows))
        found = np.linalg.lstsq(part, target, rcond=None)[0]
        error = float(((part @ found - target) ** 2).sum())
        if (found >= 0).all() and error < least * (1 - 1e-9):
            least, best = error, np.zeros(a.shape[1])
            best[list(chosen)] = found / norm[list(chosen)]
    return Kernel(*(float(value) for value in best))


@functools.cache
def h200(domain: int = 8) -> Hardware:
    """An H200, its kernels fitted to benchmarks/results/hops_h200.json."""
    rows = [row for row in json.loads(HOPS.read_text())["rows"] if row["ms"] > LAUNCH_MS]
    calls, hops = ([row for row in rows if row["hop"] == hop] for hop in (False, True))
    return Hardware(
        fit(calls, "forward"),
        fit(calls, "backward"),
        fit(hops, "forward"),
        fit(hops, "backward"),
        domain=domain,
    )


# Collectives. A device sends and receives `size` bytes.


def permute(hardware: Hardware, size: float, devices: int) -> float:
    """To a neighbour; between domains one adapter carries it, and every device waits for that."""
    if devices == 1 or not size:
        return 0.0
    link = hardware.permute if devices <= hardware.domain else hardware.network
    return link.step + size / link.rate


def gather(hardware: Hardware, size: float, devices: int) -> float:
    """All-gather or reduce-scatter of shards of `size` bytes.

    Every shard enters each domain once, over the adapters of all its GPUs together.
    """
    if devices == 1:
        return 0.0
    near, far, inside = hardware.gather, hardware.network, min(devices, hardware.domain)
    seconds = near.step * (devices - 1) + size * (devices - 1) / near.rate
    if devices == inside:
        return seconds
    steps, entering = devices // inside - 1, size * (devices - inside)
    return max(seconds, far.step * steps + entering / inside / far.rate)


def exchange(hardware: Hardware, size: float, devices: int) -> float:
    """All-to-all of arrays of `size` bytes, of which every device keeps a share."""
    if devices == 1:
        return 0.0
    near, far, inside = hardware.exchange, hardware.network, min(devices, hardware.domain)
    seconds = near.step + size * (inside - 1) / devices / near.rate
    if devices == inside:
        return seconds
    return max(seconds, far.step + size * (devices - inside) / devices / far.rate)
