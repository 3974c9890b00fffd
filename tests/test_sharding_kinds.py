"""Context parallelism gives one device's results: kinds, layouts, masks and features against the oracle.

Each case runs with hops (ring or hybrid) and with an exchange of all (all-gather or all-to-all); layouts,
sizes, routes, inner backends and dtypes go around with it, so that every two of them meet somewhere.
`make fuzz` runs each case in all four kinds, and many more combinations.
"""

import os

import jax
import numpy as np
import pytest

from tests import cases, sharded

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

CROSS = {"key_length": 96}
LONG_QUERY = {"query_length": 96}


def case(name, **changes):
    sizes = {"query_length": 48, "key_length": 48, "head_size": 8, "value_size": 8}
    return cases.Case(name, **(sizes | changes))


CASES = (
    case("full"),
    case("causal", is_causal=True),
    case("causal_uncapped", is_causal=True, softcap=None),
    case("cross", **CROSS),
    case("cross_causal", is_causal=True, **CROSS),
    case("bottom_right", is_causal=True, causal_alignment="bottom_right", **CROSS),
    case("bottom_right_empty_rows", is_causal=True, causal_alignment="bottom_right", **LONG_QUERY),
    case("window", is_causal=True, window=(9, 0)),
    case("window_both", window=(15, 4)),
    case("window_right", window=(None, 5), softcap=None),
    case("lengths", is_causal=True, query_lengths=(0.9, 0.6), kv_lengths=(0.7, 0.8)),
    case("kv_lengths", kv_lengths=(0.0, 0.6)),
    case("segments", is_causal=True, segments="packed"),
    case("segments_shuffled", segments="shuffled", window=(20, 9)),
    case("positions", query_positions="shuffled", kv_positions="shuffled", window=(8, 5)),
    case("positions_of_queries", query_positions="offset", is_causal=True),
    case("alibi", alibi="N", is_causal=True),
    case("alibi_batched", alibi="BN"),
    case("sinks", sinks=True, is_causal=True, window=(7, 0)),
    case("sinks_empty_rows", sinks=True, is_causal=True, query_lengths=(0.4, 1.0)),
    case("bias", bias="BNTS", is_causal=True),
    case("bias_hides_keys", bias="BS", bias_hides=0.4),
    case("bias_of_rows", bias="NT", bias_dtype="float32"),
    case("mask", mask="BTS"),
    case("mask_of_heads", mask="NS"),
    case("dropout", dropout_rate=0.3, is_causal=True),
    case(
        "everything",
        is_causal=True,
        window=(31, None),
        query_lengths=(0.9, 1.0),
        kv_lengths=(1.0, 0.8),
        segments="shuffled",
        query_positions="offset",
        kv_positions="shuffled",
        bias="NTS",
        bias_hides=0.1,
        mask="BS",
        mask_keeps=0.8,
        alibi="BN",
        sinks=True,
        dropout_rate=0.2,
        layer_scale=2.0,
    ),
    case("value_wider", value_size=24, kv_heads=4, scale=0.7, amplitude=5.0),
)
BY_NAME = {c.name: c for c in CASES}
KINDS = ("ring", "all_gather", "all_to_all", "hybrid")
LAYOUTS = ("zigzag", "contiguous", "striped")
ROUTES = ("auto", "shard_map", "explicit", "unchecked")
BACKENDS = ("blockwise", "xla")
SIZES = {
    "ring": ((2,), (3,)),
    "all_gather": ((2,), (4,), (3,)),
    "all_to_all": ((4,), (2,)),
    "hybrid": ((2, 2), (3, 2), (2, 4)),
}


def combination(i: int, kind: str):
    """The setting and dtype in which case number `i` runs in `kind`."""
    j = i + 2 * KINDS.index(kind)
    setting = sharded.Setting(
        kind,
        LAYOUTS[j % 3],
        SIZES[kind][(j // 3) % len(SIZES[kind])],
        ROUTES[j % 4],
        BACKENDS[(j // 2) % 2],
    )
    return setting, ("float32", "bfloat16")[(j // 5) % 2]


MANY = os.environ.get("HYPOTHESIS_PROFILE") == "thousands"


def kinds_of(i: int) -> tuple[str, ...]:
    """In which case number `i` runs; four in a row alike, so that layouts and routes go around."""
    hops = ("ring", "hybrid")[i // 4 % 2]
    return KINDS if MANY else (hops, ("all_gather", "all_to_all")[i // 8 % 2])


COMBINATIONS = [
    pytest.param(
        c, *combination(i, kind), id=f"{kind}-{c.name}", marks=[pytest.mark.fuzz] if MANY else []
    )
    for i, c in enumerate(CASES)
    for kind in kinds_of(i)
]


@pytest.mark.parametrize(("case", "setting", "dtype"), COMBINATIONS)
def test_equals_one_device(case, setting, dtype):
    sharded.check(case, setting, dtype)


# ---- Random combinations ----

RANDOM = 500 if MANY else 6


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(RANDOM))
def test_random_combinations(seed):
    """Any case in any setting; the lengths are multiples of all layouts."""
    rng = np.random.default_rng(seed)

    def pick(options):
        return options[rng.integers(len(options))]

    kind, dtype = pick(KINDS), pick(("float32", "bfloat16"))
    sizes = {**SIZES, "ring": ((4,), (2,), (3,), (6,), (8,), (2, 2)), "all_gather": ((8,), (2, 3))}
    setting = sharded.Setting(kind, pick(LAYOUTS), pick(sizes[kind]), pick(ROUTES), pick(BACKENDS))
    chosen = pick([c for c in CASES if c.name != "everything"])
    if RANDOM > 100:
        chosen = pick(CASES)
    sharded.check(
        chosen, setting, dtype, residual=bool(rng.integers(2)), columns=pick([False, True])
    )
