"""Calls of the case table under context parallelism: sharded, reordered, and put back in order."""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcap
from jaxcap import sharding
from tests import cases, conformance, plain

#: Axes of each argument along which the tokens lie.
TOKENS = {
    **dict.fromkeys(("query", "key", "value"), (1,)),
    **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), (1,)),
    **dict.fromkeys(("query_positions", "key_value_positions"), (1,)),
    **dict.fromkeys(("bias", "mask"), (2, 3)),
    **dict.fromkeys(("out", "lse"), (1,)),
}
FUNCTIONS = {
    "ring": sharding.ring_attention,
    "all_gather": sharding.all_gather_attention,
    "all_to_all": sharding.all_to_all_attention,
    "hybrid": sharding.hybrid_attention,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a call is sharded. Routes: "auto" and "explicit" meshes under jit, and "shard_map", the user's
    own, with "unchecked" (check_vma=False) as its other kind."""

    kind: str = "ring"
    load_balance: str = "zigzag"
    sizes: tuple[int, ...] = (4,)
    route: str = "auto"
    backend: str | None = "blockwise"

    @property
    def axes(self) -> tuple[str, ...]:
        return ("context", "heads")[: len(self.sizes)]

    @property
    def names(self) -> dict[str, Any]:
        """The axes, for the functions inside a shard_map."""
        if self.kind == "hybrid":
            return {"axis_ring": self.axes[0], "axis_a2a": self.axes[1]}
        return {"axis_name": self.axes}

    @property
    def mesh(self) -> Any:
        kind = AxisType.Explicit if self.route == "explicit" else AxisType.Auto
        devices = jax.devices()[: math.prod(self.sizes)]
        return jax.make_mesh(self.sizes, self.axes, (kind,) * len(self.sizes), devices=devices)

    @property
    def layout_size(self) -> int:
        """What the layout is over: of "hybrid" the ring's axis."""
        return self.sizes[0] if self.kind == "hybrid" else math.prod(self.sizes)

    def context_parallel(self, **changes: Any) -> jaxcap.ContextParallel:
        given = {"axis": self.axes, "kind": self.kind, "load_balance": self.load_balance}
        return jaxcap.ContextParallel(**(given | {"mesh": self.mesh} | changes))

    def _moved(self, move: Any, name: str, x: Any) -> Any:
        for axis in TOKENS.get(name, ()):
            if x is not None and x.shape[axis] != 1:
                x = move(x, self.layout_size, self.load_balance, axis)
        return x

    def reordered(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {n: self._moved(jaxcap.reorder_for_load_balance, n, x) for n, x in arrays.items()}

    def restored(self, arrays: dict[str, Any]) -> dict[str, Any]:
        whole = {n: None if x is None else np.asarray(x) for n, x in arrays.items()}
        return {n: self._moved(jaxcap.restore_order, n, x) for n, x in whole.items()}

    def spec(self, name: str, x: Any, columns: bool = False) -> P:
        """How an argument comes to the call: a bias by its rows, or by its columns."""
        axes = TOKENS.get(name, ())
        if name in ("bias", "mask"):
            axes = axes[1:] if columns or x.shape[2] == 1 else axes[:1]
        places: list[Any] = [None] * np.ndim(x)
        for axis in axes:
            if x.shape[axis] != 1:
                places[axis] = self.axes
        return P(*places)


@functools.cache
def program(setting: Setting, static: tuple[Any, ...], residual: bool, columns: bool) -> Any:
    """jit of (out, lse, gradients) on arrays in the setting's order."""
    options = dict(static) | {"return_residual": residual, "implementation": setting.backend}

    def whole(given, arrays):
        cp = setting.context_parallel()
        return jaxcap.dot_product_attention(**given, **arrays, **options, context_parallel=cp)

    def shards(given, arrays):
        specs = {n: setting.spec(n, x, columns) for n, x in (given | arrays).items()}

        def local(both):
            return FUNCTIONS[setting.kind](
                **both, **options, **setting.names, load_balance=setting.load_balance
            )

        token = P(None, setting.axes)
        mapped = jax.shard_map(
            local,
            mesh=setting.mesh,
            in_specs=(specs,),
            out_specs=(token, token) if residual else token,
            check_vma=setting.route != "unchecked",
        )
        return mapped(given | arrays)

    def run(given, arrays, d_out, d_lse):
        function = whole if setting.route in ("auto", "explicit") else shards

        def call(given):
            result = function(given, arrays)
            return result if residual else (result, None)

        (out, lse), pullback = jax.vjp(call, given)
        grads = pullback((d_out, d_lse if residual else None))[0]
        return {"out": out, "lse": lse, **grads}

    return plain.quick_jit(run)


def attend(
    inputs: cases.Inputs, setting: Setting, *, residual: bool = True, columns: bool = False
) -> dict[str, Any]:
    """Out, lse and gradients in the original order."""
    mesh = setting.mesh
    arguments = conformance.arguments(inputs)
    static = tuple(sorted((n, x) for n, x in arguments.items() if n in inputs.static))
    dynamic = {n: x for n, x in arguments.items() if n not in inputs.static and x is not None}
    rng = {n: dynamic.pop(n) for n in list(dynamic) if n == "dropout_rng"}
    moved = setting.reordered(dynamic)
    cotangents = setting.reordered({"out": inputs.d_out, "lse": inputs.d_lse})
    placed = {
        n: jax.device_put(x, NamedSharding(mesh, setting.spec(n, x, columns)))
        for n, x in (moved | cotangents).items()
    }
    d_out, d_lse = placed.pop("out"), placed.pop("lse")
    given = {n: placed.pop(n) for n in inputs.operands}
    run = program(setting, static, residual, columns)
    explicit = setting.route == "explicit"
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        results = run(given, placed | rng, d_out, d_lse)
    return setting.restored(results)


def check(case: cases.Case, setting: Setting, dtype: str = "float32", **options: Any) -> None:
    """The case's results are within the tolerances of one device, which a lost cap is not."""
    wanted = conformance.expected(case, dtype)
    assert not conformance.cap_moves_too_little(case, wanted), "would pass without the cap"
    inputs = wanted.inputs
    if not options.get("residual", True):  # nothing to compare, and no cotangent of it
        inputs = inputs._replace(d_lse=np.zeros_like(inputs.d_lse))
        wanted = wanted._replace(exact=conformance.exact_results(inputs, wanted.work))
    if setting.backend:
        wanted = conformance.allowed_of(wanted, setting.backend, dtype)
    measured = attend(inputs, setting, **options)
    found = conformance.wrong_dtypes(measured, inputs)
    found += conformance.complaints(measured, wanted)
    places = whereabouts(found, measured, wanted)
    assert not found, "\n".join([f"{setting}, {dtype}", *found, *places])


def whereabouts(
    found: list[str], measured: dict[str, Any], wanted: conformance.Expected, parts: int = 8
) -> list[str]:
    """Of the results complained of the worst entry and, along the tokens, norms of `parts` stretches of the
    error."""
    lines = []
    for name in dict.fromkeys(complaint.split(":")[0] for complaint in found):
        exact = wanted.exact[name]
        if np.shape(measured[name]) != exact.shape:
            continue
        error = np.abs(conformance.error_of(measured[name], exact))
        worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        value = np.asarray(measured[name])[worst].astype(np.float64)
        line = f"{name}{list(map(int, worst))}: got {value:.6g}, expected {exact[worst]:.6g}"
        if bad := np.isnan(error).sum():
            line += f"; {bad} of {error.size} not comparable"
        for axis in TOKENS.get(name, ()):
            if exact.shape[axis] >= parts:
                norms = [np.linalg.norm(x) for x in np.array_split(error, parts, axis)]
                line += f"; along axis {axis}: {' '.join(f'{x:.2g}' for x in norms)}"
        lines.append(line)
    return lines


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
