"""Predicts time and memory of context-parallel attention on 1 to 1,024 GPUs.

Letters: T tokens, P devices, t = T / P, N query heads, K key/value heads, D head size. Arrays are 16 bit,
sums and gradients under way 32 bit, the batch is 1. docs/scaling.md has the equations in words, and says
which numbers are measured and which are assumed.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from benchmarks import scaling_hardware as hardware_
from benchmarks.scaling_hardware import Hardware, exchange, features, gather, permute
from benchmarks.scaling_work import Work, gathered, work

KINDS = ("ring", "all_gather", "all_to_all", "hybrid")
PASSES = ("forward", "forward+backward")
NARROW, WIDE = 2, 4  # bytes of arrays; of sums and gradients under way
#: Bytes read and written an element, out of profiles: a part joins the sums of the forward; a gradient's.
MERGE, ADD_GRADIENT = 12, 17


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention on `devices` GPUs; `window` counts keys before the query's own."""

    tokens: int
    devices: int
    kind: str = "ring"
    load_balance: str = "zigzag"
    causal: bool = True
    window: int | None = None
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    exchange: int | None = None  # devices of hybrid's all-to-all; None: as many as fit


class Prediction(NamedTuple):
    seconds: float
    compute: float  # of the same hops without communication
    communication: float  # all of it, hidden or not
    memory: int  # bytes a device, with inputs and outputs

    @property
    def exposed(self) -> float:
        return self.seconds - self.compute

    @property
    def hidden(self) -> float:
        """Share of the communication that costs no time."""
        return 1.0 - self.exposed / self.communication if self.communication else 1.0


class Sizes(NamedTuple):
    """Of what one device works on between exchanges: its share of tokens and heads."""

    tokens: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def query(self) -> int:
        return self.tokens * self.heads * self.head_size

    @property
    def key(self) -> int:
        """Elements of keys and values together."""
        return 2 * self.tokens * self.kv_heads * self.head_size


def exchange_size(case: Case, hardware: Hardware) -> int:
    """Devices of the all-to-all: 1 for a ring, P for "all_to_all".

    Raises:
      ValueError: the heads do not allow it; the message says which kind does.
    """
    devices, heads, kv_heads = case.devices, case.heads, case.kv_heads
    if case.kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {case.kind!r}")
    if case.kind in ("ring", "all_gather") or devices == 1:
        return 1
    if case.kind == "all_to_all":
        if heads % devices or (kv_heads % devices and devices % kv_heads):
            raise ValueError(
                f"all_to_all over {devices} devices needs heads that divide, got {heads} and"
                f" {kv_heads}: use 'hybrid' or 'ring'"
            )
        return devices
    if case.exchange == 1:
        return 1
    fits = [
        n
        for n in range(2, min(hardware.domain, kv_heads, devices // 2) + 1)
        if devices % n == 0 and kv_heads % n == 0 and heads % n == 0
    ]
    size = case.exchange or (max(fits) if fits else 0)
    if size not in fits:
        raise ValueError(
            f"hybrid on {devices} devices has no all-to-all of {case.exchange or 'several'} devices"
            f" within {kv_heads} key heads and domains of {hardware.domain}: use 'ring'"
        )
    return size


def _compute(hardware: Hardware, name: str, jobs: Work, sizes: Sizes, parts: bool) -> np.ndarray:
    """Seconds [devices, hops] of kernels and, where there are `parts`, of joining results."""
    counts = features(
        name,
        pairs=jobs.pairs,
        calls=jobs.calls,
        rows=jobs.rows,
        keys=jobs.keys,
        diagonal=jobs.diagonal,
        sizes=(sizes.heads, sizes.kv_heads, sizes.head_size),
    )
    call, hop = getattr(hardware, name), getattr(hardware, f"hop_{name}")
    if name == "backward":
        seconds = (call if jobs.hops == 1 else hop).seconds(counts)
    else:  # beside the last hop nothing travels; without a mask that does not make a part faster
        seconds = hop.seconds(counts)
        alone = np.array(not parts) | (jobs.diagonal[:, -1] > 0)
        seconds[:, -1] = np.where(alone, call.seconds(counts[:, -1]), seconds[:, -1])
    seconds = hardware.sustained * seconds
    if not parts:
        return seconds
    if name == "forward":
        moved = MERGE * jobs.rows * sizes.heads * sizes.head_size
    else:
        moved = np.full(jobs.rows.shape, ADD_GRADIENT * (sizes.query + sizes.key))
    return seconds + moved / hardware.memory_rate + hardware.hop


def _hops(hardware: Hardware, compute: np.ndarray, travel: np.ndarray) -> float:
    """Seconds of the slowest device: each hop takes the larger of computing and what travels [hops]."""
    busy = compute + hardware.stolen * travel
    return float(np.maximum(busy, travel).sum(1).max())


def _ring(case: Case, hardware: Hardware, sizes: Sizes, ring: int, name: str) -> tuple:
    """(seconds, seconds without communication, communication) of a pass."""
    jobs = work(case.load_balance, case.tokens, ring, causal=case.causal, window=case.window)
    compute = _compute(hardware, name, jobs, sizes, parts=ring > 1)
    hops = jobs.hops
    # What travels in a hop travels as one: the keys of the next, and the gradients of the one before.
    sent, home = np.zeros(hops), 0.0
    sent[:-1] = NARROW * sizes.key
    if name == "backward" and hops > 1:
        sent[1:] += WIDE * sizes.key
        home = permute(hardware, WIDE * sizes.key, case.devices)
    travel = np.array([permute(hardware, size, case.devices) for size in sent])
    seconds = _hops(hardware, compute, travel) + home
    return seconds, _hops(hardware, compute, np.zeros(hops)), travel.sum() + home


def _gather(case: Case, hardware: Hardware, sizes: Sizes, name: str) -> tuple:
    devices = case.devices
    jobs = gathered(case.load_balance, case.tokens, devices, causal=case.causal, window=case.window)
    compute = _compute(hardware, name, jobs, sizes, parts=True).max()
    moved, travel = 2 * NARROW * sizes.key * devices, gather(hardware, NARROW * sizes.key, devices)
    if name == "backward":
        moved += 2 * WIDE * sizes.key * devices
        travel += gather(hardware, WIDE * sizes.key, devices)
    compute += moved / hardware.memory_rate  # into the original order, and out of it
    return compute + travel, compute, travel


def _exchanged(case: Case, hardware: Hardware, size: int) -> tuple[float, float]:
    """(communication, copies) of a pass's all-to-alls: two arrays of queries, keys and values."""
    t = case.tokens // case.devices
    kv_heads = max(case.kv_heads, size)
    each = NARROW * t * case.head_size
    travel = 2 * exchange(hardware, each * case.heads, size)
    travel += 2 * exchange(hardware, each * kv_heads, size)
    return travel, 4 * each * 2 * (case.heads + kv_heads) / hardware.memory_rate


def predict(case: Case, passes: str, hardware: Hardware) -> Prediction:
    """Time and memory of a call.

    Raises:
      ValueError: the kind, layout or sizes do not go together; the message says what does.
    """
    if passes not in PASSES:
        raise ValueError(f"passes must be one of {PASSES}, got {passes!r}")
    size = exchange_size(case, hardware)
    ring = case.devices // size
    sizes = Sizes(
        case.tokens // ring, case.heads // size, max(1, case.kv_heads // size), case.head_size
    )
    names = hardware_.PASSES if passes == PASSES[1] else hardware_.PASSES[:1]
    total = np.zeros(3)
    for name in names:
        if case.kind == "all_gather" and case.devices > 1:
            total += _gather(case, hardware, sizes, name)
        else:
            total += _ring(case, hardware, sizes, ring, name)
        if size > 1:
            travel, copies = _exchanged(case, hardware, size)
            total += (travel + copies, copies, travel)
    seconds, compute, travel = (float(x) for x in total)
    return Prediction(seconds, compute, travel, memory(case, passes, sizes, ring))


def memory(case: Case, passes: str, sizes: Sizes, ring: int) -> int:
    """Bytes a device: inputs, outputs, what is kept for the backward, and the largest pass's arrays."""
    t = case.tokens // case.devices
    query, key = t * case.heads * case.head_size, 2 * t * case.kv_heads * case.head_size
    backward = passes == PASSES[1]
    # q, k, v and out; in training d_out, dq, dk and dv too.
    held = NARROW * (2 * query + key) * (2 if backward else 1)
    if case.devices == 1:
        return held + (WIDE * sizes.query if backward else 0)
    if (
        ring < case.devices and case.kind != "all_gather"
    ):  # the all-to-all's: other arrays than those
        held += NARROW * (2 * sizes.query + sizes.key if backward else sizes.query + sizes.key)
    if case.kind == "all_gather":
        whole = sizes.key * case.devices
        under_way = NARROW * whole + WIDE * sizes.query
        if backward:
            under_way += (NARROW + 2 * WIDE) * whole + WIDE * sizes.query
    elif ring == 1:
        under_way = WIDE * sizes.query if backward else 0
    else:
        under_way = 2 * NARROW * sizes.key + 2 * WIDE * sizes.query
        if backward:
            under_way += 3 * WIDE * sizes.key + WIDE * sizes.query
    return held + under_way


def alone(case: Case, passes: str, hardware: Hardware) -> Prediction:
    """The same call on one GPU."""
    return predict(dataclasses.replace(case, devices=1), passes, hardware)


def efficiency(case: Case, passes: str, hardware: Hardware) -> float:
    """Of strong scaling: time on one GPU over P times the time on P."""
    ideal = alone(case, passes, hardware).seconds / case.devices
    return ideal / predict(case, passes, hardware).seconds
