"""One device's part of a context-parallel call: steps of its plan on a backend."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import explicit, fragments, merge, selection
from jaxcap.merge import Part
from jaxcap.sharding import pieces
from jaxcap.sharding.pieces import Keys, Results, span, spec_of
from jaxcap.sharding.plan import Plan
from jaxcap.sharding.steps import Piece, Runs, Step
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands, QuerySum


class Shard:
    """One device's part of a call.

    `run(decision, part, operands)` is a backend's "forward" or "backward", a function of operands and
    arrays; `mark` makes a constant vary as the operands do. Results are in the accumulator's dtype if
    the backend is `wide`.
    """

    def __init__(
        self,
        plan: Plan,
        decision: selection.Decision,
        operands: Operands,
        rank: Any,
        run: Callable,
        mark: Callable,
    ):
        self.plan, self.decision, self.operands, self.rank = plan, decision, operands, rank
        self.run, self.mark = run, mark
        self.backend = selection.backends()[decision.backend or ""]
        self.native = getattr(self.backend, "native", False)
        self.wide = getattr(self.backend, "wide", False)
        self.queries = plan.query_runs(rank)
        self.names = tuple(name for name in plan.spec.gradients if name != "sinks")
        even = all(run.offset % fragments.ROWS == 0 for run in plan.query_runs(0))
        # In a user's `shard_map` that left axes explicit the sum would be whole on each of their devices.
        even = even and explicit.mesh_of(operands) is None
        factor = getattr(self.backend, "query_factor", None) if even else None
        self.adds = factor is not None and "query" in self.names
        self.factor = factor(plan.spec) if factor and self.adds else 1.0

    def _operands(self, piece: Piece, keys: Keys, source: Any) -> Operands:
        return pieces.operands_of(self.plan, piece, self.operands, self.rank, keys, source)

    def asked(self, piece: Piece, beside_transfers: bool) -> AttentionSpec:
        return spec_of(self.plan, piece).replace(
            partial=self.wide, beside_transfers=beside_transfers
        )

    def _run(self, spec: AttentionSpec, part: str) -> Callable:
        decision = dataclasses.replace(self.decision, spec=spec)
        return _called(self.run, self.backend, decision, part)

    # Steps.

    def choose(self, step: Step, keys: Keys, source: Any, compute: Callable, nothing: Any) -> Any:
        """`compute(piece)` of the option that this device takes; `nothing` has its shape."""
        branches = [
            (lambda: nothing) if piece is None else (lambda piece=piece: compute(piece))
            for piece in step.options
        ]
        if len(branches) == 1:
            return branches[0]()
        found = None
        if self.plan.given:
            found = pieces.bounds(self.plan, self.operands, self.rank, keys, source)
        return jax.lax.switch(step.choose(self.rank, source, found), branches)

    def rows_of(self, group: tuple[int, int]) -> slice:
        """The places of the queries of some runs."""
        return span(self.queries[slice(*group)])

    def nothing(self, group: Runs, wide: bool) -> Part:
        """Of queries that attend no key; the output in the accumulator's dtype or the call's."""
        spec, operands, rows = self.plan.spec, self.operands, self.rows_of(group)
        batch, _, heads, _ = operands.query.shape
        shape = (batch, rows.stop - rows.start, heads, operands.value.shape[3])
        out = jnp.zeros(shape, spec.accumulator if wide else spec.dtype)
        lse = jnp.full((batch, heads, shape[1]), -jnp.inf, spec.accumulator)
        return Part(self.mark(out), self.mark(lse))

    def forward(
        self,
        step: Step,
        keys: Keys,
        source: Any,
        beside_transfers: bool = False,
        alone: bool = False,
    ) -> tuple[int, Part]:
        """Which of the plan's groups of queries; output and log-sum-exp over the keys of the step.

        `alone`: nothing is added to it.
        """
        groups = self.plan.groups
        number = next(i for i, (_, stop) in enumerate(groups) if step.queries[0] < stop)
        rows = self.rows_of(groups[number])
        wide = self.wide and not alone
        nothing = self.nothing(groups[number], wide)

        def compute(piece):
            asked = self.asked(piece, beside_transfers).replace(sinks=False, partial=wide)
            given = self._operands(piece, keys, source)._replace(sinks=None)
            out, lse = self._run(asked, "forward")(given)
            start = self.rows_of(piece.queries).start - rows.start
            return Part(
                _put(nothing.out, out, {1: start}), _put(nothing.lse, lse, {2: start}, -jnp.inf)
            )

        return number, self.choose(step, keys, source, compute, nothing)

    def _zero(self, name: str, keys: Keys) -> Array:
        """A gradient in full; of a bias the columns of these keys."""
        of = {"key": keys.key, "value": keys.value}.get(name, getattr(self.operands, name))
        shape = of.shape
        if name == "bias":
            shape = (*shape[:3], min(shape[3], keys.key.shape[1]))
        wide = self.wide and not self.native
        return self.mark(jnp.zeros(shape, self.plan.spec.accumulator if wide else of.dtype))

    # The gradient of the queries: parts in full, or with `adds` one sum that the backend adds to.

    def no_queries(self, results: Results) -> Array | None:
        """The sum of none."""
        if not self.adds:
            return None
        zero, _ = jax.lax.optimization_barrier((jnp.float32(0), results.lse))  # not made beforehand
        return self.mark(jnp.full(fragments.sum_shape(self.plan.spec), zero))

    def all_queries(self, d_query: Array | None) -> Array | None:
        """[B, T / P, N, H] of what all parts were added to."""
        if not self.adds or d_query is None:
            return d_query
        spec = self.plan.spec
        rows = fragments.rows_of(d_query, spec.query_length, spec.head_size)
        return rows * self.factor

    def backward(
        self, steps: list[Step], keys: Keys, source: Any, results: Results, d_query: Array | None
    ) -> tuple[list[Gradients], Array | None]:
        """Of each step query, key and value in full, the bias where it is seen; and the sum `d_query`.

        With `adds` query is None, and in the sum instead.
        """
        found = []
        for step in steps:
            part = self._backward(step, keys, source, results, d_query)
            if self.adds:
                d_query, part = part.query, part._replace(query=None)
            found.append(part)
        return found or [self._no_gradients(keys, None)], d_query

    def _no_gradients(self, keys: Keys, d_query: Array | None) -> Gradients:
        found = Gradients(**{name: self._zero(name, keys) for name in self.names})
        return found._replace(query=d_query) if self.adds else found

    def _backward(
        self, step: Step, keys: Keys, source: Any, results: Results, d_query: Array | None
    ) -> Gradients:
        def compute(piece):
            given = self._operands(piece, keys, source)
            place = self.rows_of(piece.queries)
            saved = Results(
                results.out[:, place],
                results.lse[:, :, place],
                results.d_out[:, place],
                None if results.d_lse is None else results.d_lse[:, :, place],
            )
            asked = self.asked(piece, len(self.plan.active_hops) > 1)
            if self.adds:
                asked = asked.replace(query_sum=QuerySum(place.start, self.factor))
                found = self._run(asked, "backward")(given, *saved, d_query)
            else:
                found = self.gradients(asked, given, saved)
            k_runs = self.plan.key_runs(source)[slice(*piece.keys)]
            starts = {"query": place.start, "key": k_runs[0].offset, "value": k_runs[0].offset}

            def full(name):
                x, zero = getattr(found, name), self._zero(name, keys)
                if name == "query" and self.adds:
                    return x
                if name == "bias":
                    return _put(zero, x, {2: place.start, 3: k_runs[0].offset})
                return _put(zero, x, {1: starts[name]})

            return Gradients(**{name: full(name) for name in self.names})

        return self.choose(step, keys, source, compute, self._no_gradients(keys, d_query))

    def gradients(self, spec: AttentionSpec, operands: Operands, results: Results) -> Gradients:
        if not self.native:
            return self._run(spec, "backward")(operands, *results)

        # 1. JAX's pullback of the piece's own output and log-sum-exp.
        arrays = {name: getattr(operands, name) for name in spec.gradients}
        alone = spec.replace(sinks=False, gradients=())

        def forward(given):
            return self.backend.forward(alone, operands._replace(**given, sinks=None))

        (out, lse), pullback = jax.vjp(forward, arrays)

        # 2. All of it is a mean of the parts, weighted by exp(lse of the part - lse of all).
        weight = jnp.exp(lse - merge.finite_or_zero(results.lse))  # [B, N, T]
        wide = results.d_out.astype(out.dtype)
        d_out = wide * jnp.swapaxes(weight, 1, 2)[..., None]
        change = jnp.einsum("btnv,btnv->bnt", wide, out - results.out.astype(out.dtype))
        if results.d_lse is not None:
            change = change + results.d_lse
        return Gradients(**pullback((d_out, (change * weight).astype(lse.dtype)))[0])


@functools.lru_cache(maxsize=4096)
def _called(run: Callable, backend: Any, decision: selection.Decision, part: str) -> Callable:
    """Many hops call the same kernel: one function in the program, lowered once."""
    del backend  # tells decisions apart when another of its name is registered

    def piece(operands: Operands, *arrays: Array | None) -> Any:
        return run(decision, part, operands)(operands, *arrays)

    piece.__name__ = piece.__qualname__ = f"hop_{part}"  # in profiles
    return jax.jit(piece)


def _put(zeros: Array, part: Array, starts: dict[int, int], value: float = 0.0) -> Array:
    """`part` in an array like `zeros`, `value` around it."""
    if zeros.shape == part.shape:
        return part
    widths = [(0, 0, 0)] * part.ndim
    for axis, start in starts.items():
        if part.shape[axis] != zeros.shape[axis]:
            widths[axis] = (start, zeros.shape[axis] - part.shape[axis] - start, 0)
    return jax.lax.pad(part, jnp.full((), value, part.dtype), widths)
