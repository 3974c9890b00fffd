"""What a caller can get wrong, and that the error says which argument, what came and what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcap
from jaxcap import selection
from jaxcap.environment import Environment

B, T, S, N, K, H = 2, 6, 9, 4, 2, 8


def floats(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


def ints(*shape):
    return jnp.ones(shape, "int32")


def arguments(**changes):
    """Of a good call, changed."""
    good = {
        "query": floats(B, T, N, H),
        "key": floats(B, S, K, H),
        "value": floats(B, S, K, H),
        "softcap": 50.0,
    }
    return good | changes


BAD = [
    # The cap and other static numbers
    ("softcap", -1.0, ValueError, r"softcap.*-1\.0"),
    ("softcap", float("nan"), ValueError, r"softcap.*nan"),
    ("softcap", float("inf"), ValueError, r"softcap.*inf"),
    ("softcap", "50", TypeError, r"softcap.*'50'"),
    ("softcap", True, TypeError, r"softcap.*True"),
    ("softcap", jnp.float32(50), TypeError, r"softcap.*50"),
    ("softcap", [50.0], TypeError, r"softcap.*\[50\.0\]"),
    ("scale", float("nan"), ValueError, r"scale.*nan"),
    ("scale", "1", TypeError, r"scale.*'1'"),
    ("scale", jnp.float32(0.1), TypeError, r"scale.*0\.1"),
    ("layer_scale", 0.0, ValueError, r"layer_scale.*0\.0"),
    ("layer_scale", -2.0, ValueError, r"layer_scale.*-2\.0"),
    ("layer_scale", None, TypeError, r"layer_scale.*None"),
    # What is meant as a cap and lands in the fourth place.
    ("bias", 50.0, ValueError, r"bias must have axes, got a number.*softcap"),
    ("bias", jnp.float32(50), ValueError, r"bias must have axes, got a number.*softcap"),
    # Shapes
    ("query", floats(B + 1, T, N, H), ValueError, r"key.*\[3, 9, 2, 8\].*\[2, 9, 2, 8\]"),
    ("query", floats(B, T, N, H + 1), ValueError, r"key.*\[2, 9, 2, 9\].*\[2, 9, 2, 8\]"),
    ("query", floats(B, T, 5, H), ValueError, r"5.*multiple.*2"),
    ("query", floats(B, T, 0, H), ValueError, r"query.*\[2, 6, 0, 8\]"),
    ("query", floats(B, 0, N, H), ValueError, r"query.*\[2, 0, 4, 8\]"),
    ("key", floats(B, 0, K, H), ValueError, r"key.*\[2, 0, 2, 8\]"),
    ("value", floats(B, S, K, 0), ValueError, r"value.*\[2, 9, 2, 0\]"),
    ("query", floats(T, H), ValueError, r"query.*\[6, 8\]"),
    ("query", floats(T, N, H), ValueError, r"query.*leading axes.*\[2\], got \[6, 4, 8\]"),
    ("key", floats(S, K, H), ValueError, r"key.*\[2, 9, 2, 8\].*\[9, 2, 8\]"),
    ("key", floats(B, S, K, H, 1), ValueError, r"key.*\[2, 9, 2, 8, 1\]"),
    ("value", floats(B, S + 1, K, H), ValueError, r"value.*\[2, 9, 2, 8\].*\[2, 10, 2, 8\]"),
    ("value", floats(B, S, K * 2, H), ValueError, r"value.*\[2, 9, 2, 8\].*\[2, 9, 4, 8\]"),
    ("bias", floats(B, N, T, S + 1), ValueError, r"bias.*\[2, 4, 6, 9\].*\[2, 4, 6, 10\]"),
    ("bias", floats(3, N, T, S), ValueError, r"bias.*\[2, 4, 6, 9\].*\[3, 4, 6, 9\]"),
    ("bias", floats(B, K, T, S), ValueError, r"bias.*\[2, 4, 6, 9\].*\[2, 2, 6, 9\]"),
    ("bias", floats(1, B, N, T, S), ValueError, r"bias.*\[1, 2, 4, 6, 9\]"),
    ("mask", floats(B, N, T, S + 1) > 0, ValueError, r"mask.*\[2, 4, 6, 9\].*\[2, 4, 6, 10\]"),
    ("alibi_slopes", floats(K), ValueError, r"alibi_slopes.*\[4\].*\[2\]"),
    ("alibi_slopes", floats(3, N), ValueError, r"alibi_slopes.*\[2, 4\].*\[3, 4\]"),
    ("sinks", floats(N + 1), ValueError, r"sinks.*\[4\].*\[5\]"),
    ("sinks", floats(B, N), ValueError, r"sinks.*\[4\].*\[2, 4\]"),
    ("query_seq_lengths", ints(B + 1), ValueError, r"query_seq_lengths.*\[2\].*\[3\]"),
    ("query_seq_lengths", ints(), ValueError, r"query_seq_lengths.*\[2\].*\[\]"),
    ("key_value_seq_lengths", ints(B, 1), ValueError, r"key_value_seq_lengths.*\[2\].*\[2, 1\]"),
    ("query_positions", ints(S), ValueError, r"query_positions.*6.*\[9\]"),
    ("key_value_positions", ints(B, T), ValueError, r"key_value_positions.*9.*\[2, 6\]"),
    # Dtypes
    ("query", ints(B, T, N, H), TypeError, r"query.*int32"),
    ("query", floats(B, T, N, H) > 0, TypeError, r"query.*bool"),
    ("query", floats(B, T, N, H, dtype="complex64"), TypeError, r"query.*complex64"),
    ("key", floats(B, S, K, H, dtype="bfloat16"), TypeError, r"key.*bfloat16.*float32"),
    ("value", floats(B, S, K, H, dtype="float16"), TypeError, r"value.*float16.*float32"),
    ("bias", ints(B, N, T, S), TypeError, r"bias.*int32"),
    ("bias", floats(B, N, T, S) > 0, TypeError, r"bias.*bool"),
    ("mask", floats(B, N, T, S), TypeError, r"mask.*bool.*float32"),
    ("mask", ints(B, N, T, S), TypeError, r"mask.*bool.*int32"),
    ("query_seq_lengths", floats(B), TypeError, r"query_seq_lengths.*float32"),
    ("key_value_positions", floats(B, S), TypeError, r"key_value_positions.*float32"),
    ("alibi_slopes", ints(N), TypeError, r"alibi_slopes.*int32"),
    ("sinks", ints(N), TypeError, r"sinks.*int32"),
    # Windows
    ("local_window_size", -1, ValueError, r"local_window_size.*-1"),
    ("local_window_size", (3, -1), ValueError, r"local_window_size.*\(3, -1\)"),
    ("local_window_size", (-1, None), ValueError, r"local_window_size.*\(-1, None\)"),
    ("local_window_size", (1, 2, 3), ValueError, r"local_window_size.*\(1, 2, 3\)"),
    ("local_window_size", 2.5, TypeError, r"local_window_size.*2\.5"),
    ("local_window_size", (True, 1), TypeError, r"local_window_size.*True"),
    ("local_window_size", "4", (TypeError, ValueError), r"local_window_size.*4"),
    # Choices
    ("causal_alignment", "bottom-right", ValueError, r"causal_alignment.*'bottom-right'"),
    ("causal_alignment", None, ValueError, r"causal_alignment.*None"),
    ("is_causal", 1, TypeError, r"is_causal.*1"),
    ("is_causal", "yes", TypeError, r"is_causal.*'yes'"),
    ("return_residual", None, TypeError, r"return_residual.*None"),
    ("deterministic", "no", TypeError, r"deterministic.*'no'"),
    ("implementation", "flash", ValueError, r"implementation.*'flash'.*xla"),
    ("implementation", 3, ValueError, r"implementation.*3.*xla"),
    ("context_parallel", "ring", (TypeError, ValueError), r"context_parallel.*'ring'"),
    # Dropout
    ("dropout_rate", 1.0, ValueError, r"dropout_rate.*1\.0"),
    ("dropout_rate", -0.1, ValueError, r"dropout_rate.*-0\.1"),
    ("dropout_rate", float("nan"), ValueError, r"dropout_rate.*nan"),
    ("dropout_rate", jnp.float32(0.1), TypeError, r"dropout_rate.*0\.1"),
    ("dropout_rate", 0.1, ValueError, r"dropout_rng"),
    ("dropout_broadcast", 1, TypeError, r"dropout_broadcast.*1"),
]


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    BAD,
    ids=[f"{i}-{name}" for i, (name, *_) in enumerate(BAD)],
)
def test_bad_argument(name, value, kind, message):
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)) as caught:
        jaxcap.dot_product_attention(**arguments(**{name: value}))
    assert not isinstance(caught.value, selection.BackendError)
    about = message.split(".*")[0]
    with pytest.raises(
        kind, match=about
    ):  # which traces arrays, so that their values are not shown
        jaxcap.explain(**arguments(**{name: value}))


def test_good_arguments():
    """What the table changes is good before."""
    assert jaxcap.dot_product_attention(**arguments()).shape == (B, T, N, H)


def test_heads_and_lengths_that_have_changed_places():
    """Said where it is certain, with the caller's line, and nowhere else."""

    def run(heads, kv_heads, length, kv_length):
        q, k = floats(1, length, heads, 2), floats(1, kv_length, kv_heads, 2)
        jax.eval_shape(jaxcap.dot_product_attention, q, k, k)

    with pytest.warns(UserWarning, match="taken for 1024 heads of length 16") as caught:
        jaxcap.dot_product_attention(*[floats(1, 16, 1024, 2)] * 3)
    assert [x.filename for x in caught] == [__file__]
    with pytest.warns(UserWarning, match="taken for 513 heads of length 128"):
        run(513, 513, 128, 8)
    for sizes in ((512, 512, 8, 8), (1024, 8, 8, 8), (1024, 1024, 129, 8), (1024, 1024, 1, 4096)):
        run(*sizes)  # a warning is an error


TOGETHER = [
    (
        {"causal_alignment": "bottom_right", "query_positions": ints(B, T)},
        r"bottom_right.*query_positions",
    ),
    (
        {"causal_alignment": "bottom_right", "key_value_positions": ints(B, S)},
        r"bottom_right.*key_value_positions",
    ),
    ({"query_segment_ids": ints(B, T)}, r"segment.*key_value_segment_ids"),
    ({"key_value_segment_ids": ints(B, S)}, r"segment.*query_segment_ids"),
    (
        {"query_segment_ids": ints(B, T), "key_value_segment_ids": ints(B, T)},
        r"key_value_segment_ids.*9.*\[2, 6\]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TOGETHER)
def test_bad_together(changes, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        jaxcap.dot_product_attention(**arguments(**changes))


@pytest.mark.parametrize("name", ["softcap", "scale", "layer_scale", "dropout_rate"])
def test_traced_number(name):
    """It would have to be known when the kernel is compiled: the error says so, not JAX's."""

    def call(x):
        return jaxcap.dot_product_attention(**arguments(**{name: x}))

    for transformed in (jax.jit(call), jax.grad(lambda x: call(x).sum())):
        with pytest.raises(TypeError, match=rf"{name}.*Python number.*trace"):
            transformed(0.5)


def test_advice_about_the_cap():
    with pytest.raises(ValueError, match=r"softcap=50\.0.*None or 0\.0"):
        jaxcap.dot_product_attention(**arguments(softcap=-3))


def test_advice_about_float_masks():
    with pytest.raises(TypeError, match=r"astype\(bool\).*bias"):
        jaxcap.dot_product_attention(**arguments(mask=floats(1, 1, T, S)))


@pytest.mark.parametrize("rng", [5, "key", floats(2), jnp.zeros((3, 2), "uint32")], ids=str)
def test_bad_dropout_key(rng):
    with pytest.raises((TypeError, ValueError), match="dropout_rng"):
        jaxcap.dot_product_attention(**arguments(dropout_rate=0.5, dropout_rng=rng))


def test_several_dropout_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises((TypeError, ValueError), match="dropout_rng"):
        jaxcap.dot_product_attention(**arguments(dropout_rate=0.5, dropout_rng=keys))


def test_unknown_arguments():
    with pytest.raises(TypeError, match="softcaps"):
        jaxcap.dot_product_attention(**arguments(), softcaps=50.0)


def test_unknown_backend_in_context():
    with pytest.raises(ValueError, match=r"use_backend.*'flash'.*xla"), jaxcap.use_backend("flash"):
        pass


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JAXCAP_DETERMINISTIC", "maybe", r"JAXCAP_DETERMINISTIC.*0 or 1.*'maybe'"),
        ("JAXCAP_FLASH_ATTN_V3", "off", r"JAXCAP_FLASH_ATTN_V3.*0 or 1.*'off'"),
        ("JAXCAP_FLASH_ATTN_V2", "2", r"JAXCAP_FLASH_ATTN_V2.*0 or 1.*'2'"),
        ("JAXCAP_LOG", "verbose", r"JAXCAP_LOG.*'info' or 'debug'.*'verbose'"),
    ],
)
def test_unknown_environment_value(variable, value, message):
    with pytest.raises(ValueError, match=message):
        Environment.read({variable: value})


def test_unknown_backend_in_environment(monkeypatch):
    monkeypatch.setattr(selection, "ENVIRONMENT", Environment.read({"JAXCAP_BACKEND": "flash"}))
    with pytest.raises(ValueError, match=r"JAXCAP_BACKEND.*'flash'.*xla"):
        jaxcap.dot_product_attention(**arguments())


class Limited:
    """A backend with a limit of its own."""

    name = "limited"

    def reasons(self, spec):
        return ["no sinks", "no dropout"] if spec.sinks else []

    def forward(self, spec, operands):
        raise AssertionError("must not run")


def test_what_a_backend_cannot_honour():
    """It refuses with every reason, and never runs without the argument."""
    selection.register(Limited())
    try:
        with pytest.raises(jaxcap.BackendError, match=r"'limited'.*no sinks; no dropout"):
            jaxcap.dot_product_attention(**arguments(sinks=floats(N)), implementation="limited")
    finally:
        selection.unregister("limited")


@pytest.mark.parametrize("value", [50, np.float32(50), np.float64(50), np.int64(50)], ids=repr)
def test_numbers_of_any_kind_are_numbers(value):
    """A NumPy scalar or an int is as good as a float."""
    plan = jaxcap.explain(**arguments(softcap=value))
    assert plan.spec.softcap == 50.0
    assert type(plan.spec.softcap) is float


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, np.float32(0), None])
def test_every_zero_is_off(zero):
    assert jaxcap.explain(**arguments(softcap=zero)).spec.softcap is None


@pytest.mark.parametrize("name", ["h100", "cuda", "sm9000", "SM90", ""])
def test_platforms_that_are_none(name):
    q = floats(B, S, N, H)
    with pytest.raises(ValueError, match=rf"platform must be 'cpu'.*'sm90' .*got '{name}'"):
        jaxcap.explain(q, q, q, softcap=50.0, platform=name)
