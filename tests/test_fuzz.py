"""Random specs over all features at once, on every backend, against the oracle.

Some 200 draws in CI, the same in every run; thousands with `make fuzz`. Shapes come from a few buckets, so
that the plain implementation compiles seldom; the features are free. Compiling takes most of the time, so
each spec is run on several draws of its data, and on many with the kernels of `pallas` (`-m "gpu and fuzz"`).
"""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from tests import cases, conformance

# Batch, T, S, N, K, H, V. In tiles of 16 by 8: one or several, whole or not, T above and below S.
SHAPES = (
    (2, 19, 27, 4, 2, 8, 8),
    (2, 33, 21, 3, 1, 8, 16),
    (3, 24, 24, 2, 2, 16, 8),
    (2, 1, 37, 4, 2, 8, 8),
    (1, 41, 9, 6, 3, 8, 8),
)
#: The same on a GPU: tiles of 64 to 192 queries by 48 to 192 keys, head sizes tuned and not.
GPU_SHAPES = (
    (2, 200, 264, 4, 2, 64, 64),
    (1, 131, 389, 3, 1, 64, 64),
    (2, 256, 256, 4, 2, 128, 128),
    (2, 257, 129, 4, 2, 128, 128),
    (1, 130, 330, 4, 1, 128, 128),
    (2, 192, 192, 2, 1, 256, 256),
    (1, 143, 201, 2, 2, 256, 256),
    (2, 136, 200, 2, 1, 192, 192),
    (2, 100, 221, 2, 1, 96, 96),
    (2, 150, 97, 2, 2, 40, 72),
    (1, 77, 210, 2, 1, 8, 248),
    (3, 1, 300, 4, 2, 128, 128),
)
#: Specs, of the examples of the active profile, 200 in CI.
SHARES = {"xla": 0.1, "blockwise": 0.05, conformance.TILED.name: 0.15}
DATA_DRAWS = {"xla": 3, "blockwise": 3, conformance.TILED.name: 4, "pallas": 20}


@pytest.fixture(autouse=True, scope="module")
def tiled_blockwise():
    with conformance.registered(conformance.TILED):
        yield


def maybe(strategy: st.SearchStrategy, odds: int = 2) -> st.SearchStrategy:
    """None as often as not: with everything on at once nothing is left to attend to."""
    return st.one_of(*[st.none()] * odds, strategy)


def fractions() -> st.SearchStrategy:
    return st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0]), min_size=1, max_size=3).map(tuple)


def letters() -> st.SearchStrategy:
    """Any of the dimensions that a bias or mask may have."""
    return st.sets(st.sampled_from("BNTS")).map(lambda found: "".join(sorted(found)))


@st.composite
def any_case(draw, shapes=SHAPES) -> cases.Case:
    batch, t, s, n, k, h, v = draw(st.sampled_from(shapes))
    side = st.one_of(st.none(), st.integers(0, s + 18))
    styles = st.sampled_from(["reversed", "shuffled", "offset"])
    query_positions, kv_positions = draw(maybe(styles, 3)), draw(maybe(styles, 3))
    factor = draw(st.sampled_from([None, None, 0.8, 3.0, -1.5]))
    alignments = ["top_left"]
    if query_positions is None and kv_positions is None:
        alignments.append("bottom_right")
    return cases.Case(
        name="random",
        batch=batch,
        query_length=t,
        key_length=s,
        query_heads=n,
        kv_heads=k,
        head_size=h,
        value_size=v,
        softcap=draw(st.sampled_from([50.0, 50.0, 30.0, 4.0, 70.0, 500.0, None, 0.0])),
        scale=None if factor is None else factor * h**-0.5,
        layer_scale=draw(st.sampled_from([1.0, 1.0, 3.0])),
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(alignments)),
        window=draw(maybe(st.one_of(st.integers(0, s), st.tuples(side, side)))),
        query_lengths=draw(maybe(fractions(), 3)),
        kv_lengths=draw(maybe(fractions(), 3)),
        segments=draw(maybe(st.sampled_from(["packed", "shuffled", "strangers"]))),
        query_positions=query_positions,
        kv_positions=kv_positions,
        bias=draw(maybe(letters())),
        bias_hides=draw(st.sampled_from([0.0, 0.0, 0.3])),
        bias_dtype=draw(st.sampled_from([None, None, "float32"])),
        mask=draw(maybe(letters(), 3)),
        mask_keeps=draw(st.sampled_from([0.5, 0.9])),
        alibi=draw(maybe(st.sampled_from(["N", "BN"]), 3)),
        sinks=draw(st.booleans()),
        dropout_rate=draw(st.sampled_from([0.0, 0.0, 0.3])),
        amplitude=draw(st.sampled_from([None, None, 1.0])),
    )


@st.composite
def other_data(draw, case: cases.Case) -> cases.Case:
    """The same static spec with other lengths, segments, positions, masks and magnitudes."""
    segments = st.sampled_from(["packed", "shuffled", "strangers"])
    positions = st.sampled_from(["reversed", "shuffled", "offset"])
    strategies = {
        "query_lengths": fractions(),
        "kv_lengths": fractions(),
        "segments": segments,
        "query_positions": positions,
        "kv_positions": positions,
    }
    changes = {
        name: draw(strategy)
        for name, strategy in strategies.items()
        if getattr(case, name) is not None
    }
    # Beside a sink of 0.6 caps, small scores have probabilities that 16 bits do not hold.
    amplitudes = [None] if case.sinks else [None, None, 1.0]
    return dataclasses.replace(
        case,
        bias_hides=draw(st.sampled_from([0.0, 0.3])),
        mask_keeps=draw(st.sampled_from([0.1, 0.5, 0.9])),
        amplitude=draw(st.sampled_from(amplitudes)),
        **changes,
    )


def fuzz(backend: str, dtypes: list[str]):
    """A test of `backend` on its share of the specs."""
    count = max(1, int(hypothesis.settings.default.max_examples * SHARES[backend]))

    @pytest.mark.fuzz
    @hypothesis.settings(max_examples=count)
    @hypothesis.given(
        data=st.data(),
        case=any_case(),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**16),
        inference=st.booleans(),
    )
    def test(data, case, dtype, seed, inference):
        for draw in range(DATA_DRAWS[backend]):
            now = data.draw(other_data(case)) if draw else case
            conformance.check(
                backend, now, dtype, seed + draw, inference=inference, must_move=False
            )

    return test


test_xla = fuzz("xla", ["float32", "bfloat16"])
test_blockwise = fuzz("blockwise", ["float32", "bfloat16", "float16"])
test_blockwise_tiled = fuzz(conformance.TILED.name, ["float32", "bfloat16"])


SPECS = max(1, int(0.6 * hypothesis.settings.default.max_examples))


@pytest.mark.gpu
@pytest.mark.fuzz
@pytest.mark.parametrize("number", range(SPECS))
def test_pallas(number):
    """One static spec a number, so that processes share the work; the same specs in every run."""

    @hypothesis.seed(number)
    @hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
    @hypothesis.given(
        data=st.data(),
        case=any_case(GPU_SHAPES),
        dtype=st.sampled_from(["bfloat16", "bfloat16", "float16"]),
        seed=st.integers(0, 2**16),
    )
    def check(data, case, dtype, seed):
        hypothesis.assume(seed)  # the simplest example comes first, in every number
        for draw in range(DATA_DRAWS["pallas"]):
            now = data.draw(other_data(case))
            conformance.check("pallas", now, dtype, seed + draw, must_move=False)

    check()
