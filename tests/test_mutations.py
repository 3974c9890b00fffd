"""Wrong formulas must fail the comparison that the backends pass.

First in the plain implementation, where every step can be got wrong; then patched into jaxcap's own
functions, so that the same mistakes in `xla` and `blockwise` would be found.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcap import blockwise, dropout, mask, merge, selection, softcap
from jaxcap.spec import AttentionSpec
from tests import cases, conformance, plain

TRUE_CAP = softcap.cap
TRUE_BAND = mask.in_band
TRUE_SINK = merge.with_sink
TRUE_DELTA = blockwise.delta_of


@pytest.fixture(autouse=True, scope="module")
def tiled_blockwise():
    with conformance.registered(conformance.TILED):
        yield


def rejected(measured, wanted, part):
    """The comparison complains, and about that result."""
    found = conformance.complaints(measured, wanted)
    assert any(line.startswith(part + ":") for line in found), found or "accepted"


# In the plain implementation.


def no_cap(logits, cap, layer_scale):
    return logits


def cap_with_factor(logits, cap, layer_scale):
    """The layer factor divided out of the logits alone."""
    return layer_scale * cap * jnp.tanh(logits / layer_scale / cap)


def cap_without_factor_back(logits, cap, layer_scale):
    return plain.tanh_cap(logits, cap, layer_scale) / layer_scale


def hard_cap(logits, cap, layer_scale):
    return jnp.clip(logits, -cap, cap)


def tanh_only(logits, cap, layer_scale):
    return jnp.tanh(logits / cap)


@jax.custom_jvp
def cap_with_slope_one(logits, cap, layer_scale):
    return plain.tanh_cap(logits, cap, layer_scale)


@cap_with_slope_one.defjvp
def _slope_one(primals, tangents):
    return cap_with_slope_one(*primals), tangents[0]


@jax.custom_jvp
def cap_with_wrong_slope(logits, cap, layer_scale):
    return plain.tanh_cap(logits, cap, layer_scale)


@cap_with_wrong_slope.defjvp
def _wrong_slope(primals, tangents):
    """1 - t instead of 1 - t * t."""
    capped = cap_with_wrong_slope(*primals)
    return capped, tangents[0] * (1 - jnp.abs(capped) / primals[1])


CAPS = [
    (no_cap, "capped", "out"),
    (no_cap, "everything", "lse"),
    (hard_cap, "capped", "out"),
    (tanh_only, "capped", "out"),
    (cap_with_factor, "layer_scale", "out"),
    (cap_without_factor_back, "layer_scale", "out"),
    (cap_with_slope_one, "capped", "query"),
    (cap_with_slope_one, "capped", "key"),
    (cap_with_wrong_slope, "capped", "query"),
]
MISTAKES = [
    ("cap before scale", "capped", "out"),
    ("bias inside the cap", "bias", "out"),
    ("ALiBi inside the cap", "alibi", "out"),
    ("mask after softmax", "mask", "out"),
    ("sink not in the residual", "sinks", "lse"),
    ("residual without gradient", "capped", "query"),
]
MASKS = [
    ("gemma_window", {"local_window_size": (8, 0)}),
    ("gemma_window", {"local_window_size": (10, 0)}),
    ("window_right", {"local_window_size": (None, 3)}),
    ("window_causal", {"is_causal": False}),
    ("bottom_right", {"causal_alignment": "top_left"}),
    ("causal_short_query", {"causal_alignment": "bottom_right"}),
    ("causal", {"is_causal": False}),
    ("positions_no_causality", {"is_causal": True}),
    ("positions_shuffled", {"query_positions": None, "key_value_positions": None}),
    ("segments_shuffled", {"query_segment_ids": None, "key_value_segment_ids": None}),
    ("query_lengths", {"query_seq_lengths": None}),
    ("kv_lengths", {"key_value_seq_lengths": np.array([28, 53, 0])}),
    ("alibi_batched", {"causal_alignment": "top_left", "is_causal": False}),
]


@pytest.mark.parametrize(("cap", "name", "part"), CAPS)
def test_wrong_caps(cap, name, part):
    """In bfloat16, where tolerances are widest."""
    wanted = conformance.expected(cases.BY_NAME[name], "bfloat16")
    rejected(plain.results(wanted.inputs, wanted.work, cap=cap), wanted, part)


@pytest.mark.parametrize(("mistake", "name", "part"), MISTAKES)
def test_wrong_orders(mistake, name, part):
    wanted = conformance.expected(cases.BY_NAME[name], "bfloat16")
    rejected(plain.results(wanted.inputs, wanted.work, mistake=mistake), wanted, part)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "changes"), MASKS)
def test_wrong_masks(name, changes, dtype):
    case = cases.BY_NAME[name]
    wanted = conformance.expected(case, dtype)
    wrong = cases.build(case, dtype, poison=False).oracle((0, 0), **changes)
    found = plain.results(wanted.inputs, wanted.work, part=wrong.part)
    rejected(found, wanted, "out")
    rejected(found, wanted, "lse")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda keep: keep * 1.0,  # survivors not rescaled
        lambda keep: np.ones_like(keep) * 1.0,  # nothing dropped
        lambda keep: np.roll(keep, 1, axis=3) / 0.7,  # a key off by one
        lambda keep: np.roll(keep, 1, axis=1) / 0.7,  # another head's
        lambda keep: np.roll(keep, 1, axis=0) / 0.7,  # another batch entry's
    ],
    ids=["not rescaled", "off", "by key", "by head", "by batch"],
)
def test_wrong_dropout(wrong, dtype):
    wanted = conformance.expected(cases.BY_NAME["dropout"], dtype)
    factor = wrong(wanted.work.keep).astype(np.float32)
    rejected(plain.results(wanted.inputs, wanted.work, keep_factor=factor), wanted, "out")


def test_wrong_heads():
    """Query heads served by the other key/value heads: h % K instead of h // G."""
    wanted = conformance.expected(cases.BY_NAME["capped"], "float32")
    k, v = (np.repeat(wanted.inputs.operands[x], 2, axis=2) for x in ("key", "value"))
    order = [0, 2, 1, 3]
    operands = wanted.inputs.operands | {"key": k[:, :, order], "value": v[:, :, order]}
    inputs = wanted.inputs._replace(operands=operands)
    measured = plain.results(inputs, inputs.oracle((0, 0)))
    rejected(measured | {"key": None, "value": None}, wanted, "out")


@pytest.mark.parametrize("name", ["capped", "everything", "sinks_empty_rows", "dropout"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_formula_passes(name, dtype):
    """The host of the mutants is accepted without them: also by half of its own error's tolerance."""
    wanted = conformance.expected(cases.BY_NAME[name], dtype)
    assert not conformance.complaints(plain.results(wanted.inputs, wanted.work), wanted, 0.5)


# In jaxcap.


def band_off_by_one(spec, q_pos, k_pos):
    left, right = spec.window
    return TRUE_BAND(spec.replace(window=(left + 1, right)), q_pos, k_pos)


def sink_only_in_out(part, sink):
    return merge.Part(TRUE_SINK(part, sink).out, part.lse)


def delta_without_residual(out, lse, d_out, d_lse):
    return TRUE_DELTA(out, lse, d_out, None)


def delta_with_wrong_sign(out, lse, d_out, d_lse):
    return TRUE_DELTA(out, lse, d_out, -d_lse)


def patched(owner, name, replacement):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, replacement)


ALL = ("xla", conformance.TILED.name)
OURS = ALL[1:]
PATCHES = [
    ("cap dropped", patched(softcap, "cap", no_cap), "capped", "out", ALL),
    (
        "cap before scale",
        patched(softcap, "cap", lambda x, cap, layer: TRUE_CAP(x * 4.0, cap, layer) / 4.0),
        "capped",  # its scale is 1 / 4
        "out",
        ALL,
    ),
    ("layer factor", patched(softcap, "cap", cap_with_factor), "layer_scale", "out", ALL),
    ("slope dropped", patched(softcap, "derivative", lambda *_: 1.0), "capped", "query", OURS),
    ("slope dropped", patched(softcap, "cap", cap_with_slope_one), "capped", "query", ALL[:1]),
    ("window off by one", patched(mask, "in_band", band_off_by_one), "gemma_window", "out", ALL),
    (
        "bottom-right as top-left",
        patched(AttentionSpec, "query_offset", property(lambda spec: 0)),
        "bottom_right",
        "out",
        ALL,
    ),
    ("sink not in lse", patched(merge, "with_sink", sink_only_in_out), "sinks", "lse", OURS),
    (
        "delta without d_lse",
        patched(blockwise, "delta_of", delta_without_residual),
        "capped",
        "query",
        OURS,
    ),
    (
        "d_lse with the wrong sign",
        patched(blockwise, "delta_of", delta_with_wrong_sign),
        "capped",
        "query",
        OURS,
    ),
    (
        "dropout at another rate",
        patched(dropout, "threshold", lambda rate: int(rate / 2 * 2**32)),
        "dropout",
        "out",
        ALL,
    ),
]
RUNS = [
    pytest.param(patch, case, part, backend, id=f"{backend}-{what}")
    for what, patch, case, part, backends in PATCHES
    for backend in backends
]


@pytest.mark.parametrize(("patch", "name", "part", "backend"), RUNS)
def test_patched_backends(patch, name, part, backend, monkeypatch):
    wanted = conformance.expected(cases.BY_NAME[name], "float32")
    patch(monkeypatch)
    with conformance.registered(conformance.Fresh(selection.backends()[backend])):
        measured = conformance.attend(wanted.inputs, backend)
    rejected(measured, wanted, part)


def test_bias_inside_the_cap_of_xla(monkeypatch):
    wanted = conformance.expected(cases.BY_NAME["bias"], "float32")
    bias = jnp.asarray(wanted.inputs.operands["bias"])
    monkeypatch.setattr(softcap, "cap", lambda x, *rest: TRUE_CAP(x + bias.reshape(x.shape), *rest))
    monkeypatch.setattr("jaxcap.reference.scores_bias", lambda spec, operands: None)
    rejected(conformance.attend(wanted.inputs, "xla", inference=True), wanted, "out")
