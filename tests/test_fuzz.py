"""Random specs over all features at once, on every backend, against the oracle.

A few hundred in CI, the same in every run; thousands with `make fuzz`. Shapes come from a few buckets, so
that the plain implementation compiles seldom; the features are free.
"""

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
#: Of the examples of the active profile: 200 in CI.
SHARES = {"xla": 0.4, "blockwise": 0.2, conformance.TILED.name: 0.4}


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
def any_case(draw) -> cases.Case:
    batch, t, s, n, k, h, v = draw(st.sampled_from(SHAPES))
    side = st.one_of(st.none(), st.integers(0, 45))
    styles = st.sampled_from(["reversed", "shuffled", "offset"])
    query_positions, kv_positions = draw(maybe(styles, 3)), draw(maybe(styles, 3))
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
        scale=draw(st.sampled_from([None, None, 0.3, 1.0, -0.5])),
        layer_scale=draw(st.sampled_from([1.0, 1.0, 3.0])),
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(alignments)),
        window=draw(maybe(st.one_of(st.integers(0, 30), st.tuples(side, side)))),
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


def fuzz(backend: str, dtypes: list[str]):
    """A test of `backend` on its share of the examples."""
    count = max(1, int(hypothesis.settings.default.max_examples * SHARES[backend]))

    @pytest.mark.fuzz
    @hypothesis.settings(max_examples=count)
    @hypothesis.given(
        case=any_case(),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**16),
        inference=st.booleans(),
    )
    def test(case, dtype, seed, inference):
        conformance.check(backend, case, dtype, seed, inference=inference, must_move=False)

    return test


test_xla = fuzz("xla", ["float32", "bfloat16"])
test_blockwise = fuzz("blockwise", ["float32", "bfloat16", "float16"])
test_blockwise_tiled = fuzz(conformance.TILED.name, ["float32", "bfloat16"])
