"""The cap reaches both attentions of a decoder layer, and no pass-through can be deleted unnoticed.

`dot_product_attention`, as the modules see it, is replaced by a recorder. Then every line that hands
a cap on is deleted in turn from a copy of its module, and the same check must fail.
"""

import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxcap import flax_adapter
from jaxcap.linen import attention as linen_attention
from jaxcap.linen import layer as linen_layer
from jaxcap.linen import multihead as linen_multihead
from jaxcap.modules import common as modules_common
from jaxcap.nnx import attention as nnx_attention
from jaxcap.nnx import layer as nnx_layer
from jaxcap.nnx import multihead as nnx_multihead

SIZES: dict[str, Any] = {"hidden_size": 8, "mlp_hidden_size": 8, "num_attention_heads": 2}

#: (constructor, override of the call, what both attentions receive)
CAPS = [
    (50.0, None, 50.0),
    (50.0, 30.0, 30.0),
    (50.0, 0.0, 0.0),
    (None, None, None),
    (None, 30.0, 30.0),
    (0.0, None, 0.0),
]


@pytest.fixture
def received(monkeypatch) -> list[tuple[str, Any]]:
    """("self" or "cross", cap) of each call of dot_product_attention by a module."""
    calls = []

    def recorder(query, key, value, bias=None, mask=None, *, softcap, is_causal, **rest):
        del key, bias, mask, rest
        calls.append(("self" if is_causal else "cross", softcap))
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)

    monkeypatch.setattr(modules_common, "dot_product_attention", recorder)
    return calls


def run_nnx(layer_class: Any, constructor: Any, override: Any, *, positional: bool) -> None:
    layer = layer_class(**SIZES, layer_type="decoder", softcap=constructor, rngs=nnx.Rngs(0))
    x, encoded = jnp.ones((1, 4, 8)), jnp.ones((1, 6, 8))
    if positional:
        layer(x, encoded, None, None, True, False, None, override)
    else:
        layer(x, encoded, softcap=override)


def run_linen(layer_class: Any, constructor: Any, override: Any, *, positional: bool) -> None:
    layer = layer_class(**SIZES, layer_type="decoder", softcap=constructor, deterministic=True)
    x, encoded = jnp.ones((1, 4, 8)), jnp.ones((1, 6, 8))
    if positional:
        layer.init(jax.random.key(0), x, encoded, None, None, True, False, None, override)
    else:
        layer.init(jax.random.key(0), x, encoded, softcap=override)


FLAVOURS: dict[str, tuple[Callable[..., None], types.ModuleType]] = {
    "nnx": (run_nnx, nnx_layer),
    "linen": (run_linen, linen_layer),
}


def check(run: Callable[..., None], layer_class: Any, received: list[tuple[str, Any]]) -> None:
    for constructor, override, expected in CAPS:
        for positional in (False, True):
            received.clear()
            run(layer_class, constructor, override, positional=positional)
            assert received == [("self", expected), ("cross", expected)]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_both_attentions_of_a_decoder_receive_the_cap(flavour, received):
    run, module = FLAVOURS[flavour]
    check(run, module.TransformerLayer, received)


def handovers(module: types.ModuleType) -> list[int]:
    """Numbers of the lines that do nothing but hand a cap on."""
    wanted = ("softcap=softcap,", "softcap=self.softcap,", "softcap,")
    lines = pathlib.Path(str(module.__file__)).read_text().splitlines()
    return [i for i, line in enumerate(lines) if line.strip() in wanted]


def without_line(module: types.ModuleType, number: int) -> types.ModuleType:
    path = pathlib.Path(str(module.__file__))
    lines = path.read_text().splitlines()
    del lines[number]
    mutant = types.ModuleType(module.__name__)
    mutant.__file__ = module.__file__
    exec(compile("\n".join(lines), str(path), "exec"), vars(mutant))
    return mutant


@pytest.mark.parametrize(("flavour", "count"), [("nnx", 3), ("linen", 3)])
def test_no_line_of_the_layer_can_go(flavour, count, received):
    """Three a flavour: into the constructor of the attentions, and into the call of each."""
    run, module = FLAVOURS[flavour]
    lines = handovers(module)
    assert len(lines) == count
    for number in lines:
        with pytest.raises(AssertionError):
            check(run, without_line(module, number).TransformerLayer, received)


@pytest.mark.parametrize(
    ("flavour", "attention", "name", "count"),
    [
        ("nnx", nnx_multihead, "MultiHeadAttention", 2),
        ("linen", linen_multihead, "MultiHeadAttention", 1),
        ("nnx", nnx_attention, "DotProductAttention", 1),
        ("linen", linen_attention, "DotProductAttention", 1),
    ],
)
def test_no_line_of_the_attentions_can_go(monkeypatch, flavour, attention, name, count, received):
    run, module = FLAVOURS[flavour]
    user = (
        module
        if name == "MultiHeadAttention"
        else {"nnx": nnx_multihead, "linen": linen_multihead}[flavour]
    )
    lines = handovers(attention)
    assert len(lines) == count
    for number in lines:
        mutant = getattr(without_line(attention, number), name)
        monkeypatch.setattr(user, name, mutant)
        with pytest.raises((AssertionError, TypeError)):
            check(run, module.TransformerLayer, received)


@pytest.mark.parametrize("constructor", [None, 50.0])
@pytest.mark.parametrize("override", [None, 30.0, 0.0])
def test_attention_fn_and_bare_attention(constructor, override, received):
    expected = constructor if override is None else override
    q = jnp.ones((1, 4, 2, 4))
    flax_adapter.attention_fn(softcap=constructor)(q, q, q, softcap=override)
    nnx_attention.DotProductAttention(softcap=constructor)(q, q, q, None, None, override)
    linen_attention.DotProductAttention(softcap=constructor).apply({}, q, q, q, softcap=override)
    assert [cap for _, cap in received] == [expected] * 3
