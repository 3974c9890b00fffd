"""`dot_product_attention` on the Pallas kernels lowers for CUDA under JAX's transformations, without a GPU.

The kernels have tests of their own; this one is about what stands around them: the custom rules,
vmap's folding, partitioning, the log.
"""

import functools
import gzip
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import device, selection

Q = jax.ShapeDtypeStruct((8, 256, 8, 64), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((8, 256, 8, 64), jnp.bfloat16)
BIAS = jax.ShapeDtypeStruct((1, 8, 256, 256), jnp.bfloat16)
CALL = "mosaic_gpu_v2"


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda *arrays: "sm90")


def loss(q, k, v, **keywords):
    out = jaxcap.dot_product_attention(q, k, v, softcap=50.0, is_causal=True, **keywords)
    return (out.astype(jnp.float32) ** 2).sum()


gradient = jax.grad(loss, (0, 1, 2))


#: Forward; what the backward starts from, the backward, and what makes dQ of its float32 sums.
BOTH = 4


def kernels(function, *arguments) -> int:
    """How often the program calls a kernel: a function of its own counts as often as it is called."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    parts = re.split(r"func\.func \w+ @", lowered.as_text())[1:]
    bodies = {part[: part.index("(")]: part for part in parts}

    def inside(name: str) -> int:
        body = bodies[name]
        called = [x for x in re.findall(r"\bcall @([\w.]+)\(", body) if x in bodies]
        return body.count(f"@{CALL}") + sum(map(inside, called))

    return inside("main")


def wider(x, *lead):
    return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)


@pytest.mark.parametrize("name", [None, "pallas"])
def test_forward_and_gradients(name):
    named = functools.partial(loss, implementation=name)
    assert kernels(named, Q, KV, KV) == 1
    assert kernels(jax.grad(named, (0, 1, 2)), Q, KV, KV) == BOTH


def test_without_a_named_backend_a_cpu_gets_another():
    """A call that was traced for a GPU and is compiled for a CPU must not meet Mosaic."""
    lowered = jax.jit(gradient).trace(Q, KV, KV).lower(lowering_platforms=("cpu",))
    assert CALL not in lowered.as_text()


def test_bias_gradient_and_residual():
    def with_both(q, k, v, bias):
        out, lse = jaxcap.dot_product_attention(
            q, k, v, bias, softcap=50.0, return_residual=True, implementation="pallas"
        )
        return out.astype(jnp.float32).sum() + lse.sum()

    assert kernels(jax.grad(with_both, (0, 3)), Q, KV, KV, BIAS) == BOTH


def test_vmap_both_ways():
    stacked = wider(Q, 2), wider(KV, 2), wider(KV, 2)
    assert kernels(jax.vmap(gradient), *stacked) == BOTH
    assert kernels(jax.vmap(gradient, (0, None, None)), wider(Q, 2), KV, KV) == BOTH

    def summed(q, k, v):
        return jax.vmap(loss)(q, k, v).sum()

    assert kernels(jax.grad(summed, (0, 1, 2)), *stacked) == BOTH


def scanned(q, k, v):
    def layer(x, _):
        return jaxcap.dot_product_attention(x, k, v, softcap=50.0, is_causal=True), None

    return jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32).sum()


def test_scan_and_remat():
    assert kernels(jax.grad(scanned, (0, 1, 2)), Q, KV, KV) == BOTH
    again = jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2))
    assert kernels(again, Q, KV, KV) == BOTH + 1  # the forward twice


def test_remat_that_saves_the_named_results_runs_no_second_forward():
    policy = jax.checkpoint_policies.save_only_these_names("jaxcap_out", "jaxcap_lse")
    saved = jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
    assert kernels(saved, Q, KV, KV) == BOTH


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        gradient, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )
    assert kernels(mapped, Q, KV, KV) == BOTH


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [(P("x"), Q.shape), (P(None, None, "x"), Q.shape), (P("x"), (8, 2048, 8, 128))],
    ids=["batch", "heads", "with a table of work"],
)
def test_plain_jit_with_batch_or_heads_sharded(kind, spec, shape):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    x = jax.ShapeDtypeStruct(shape, Q.dtype, sharding=NamedSharding(mesh, spec))
    arguments = (x, x, x)
    lowered = jax.jit(gradient).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "all_gather" not in text
    # On an auto mesh the kernels appear when XLA partitions the call.
    assert CALL in text or "CustomSPMDPartitioning" in text


def test_second_derivatives_say_that_they_cannot():
    for differentiate in (jax.hessian(loss), jax.grad(lambda q, *r: gradient(q, *r)[0].sum())):
        with pytest.raises(NotImplementedError, match="implementation='xla'"):
            jax.jit(differentiate).trace(Q, KV, KV)


def test_the_selector_takes_it_for_training_on_hopper():
    found = jaxcap.explain(Q, KV, KV, softcap=50.0, is_causal=True, platform="sm90")
    assert (found.forward.backend, found.training.backend) == ("pallas", "pallas")
    assert "pallas" in selection.backends()


@pytest.mark.gpu
def test_a_trace_names_what_ran(tmp_path):
    """The forward's kernel and the three of the backward, and none of another library."""
    x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
    run = jax.jit(gradient)
    jax.block_until_ready(run(x, x, x))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(run(x, x, x))
    (path,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
    }
    names = {e["name"] for e in events if e.get("ph") == "X" and e["pid"] in devices}
    found = sorted(name for name in names if "mosaic" in name)
    assert len(found) == BOTH, names
    backward = [name for name in found if "backward" in name]
    for name in ("prepare", "convert"):
        assert any(name in x for x in backward), names
    assert not any(re.search("cudnn|flash|triton|gemm", name) for name in names), names
