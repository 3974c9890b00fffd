"""Ring: keys and values go around, every device computes with what it has while the next arrives.

Hop h of a device is what it does with the keys of the device h ranks below. The forward adds up
partial sums; in the backward the gradients of keys and values travel behind them, in float32, and
come home in the end. Memory is that of two shards.

- The transfer for hop n + 1 needs nothing of hop n, and no hop needs the sum that the hop before it
  goes into: only an earlier one, or else the compiler would be free to keep all parts.
- Hops that no device has a use for (outside a window) are not made, nor the transfers for them.
- Up to `UNROLLED` hops are written out, more of them in a loop.

Source: Liu et al., "Ring attention with blockwise transformers", 2023 (arXiv:2310.01889).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcap import merge, softcap
from jaxcap.chunks import put_sum
from jaxcap.merge import Part, Sums
from jaxcap.sharding import pieces, transfer
from jaxcap.sharding.local import Local, join_rows
from jaxcap.sharding.pieces import Keys, Results
from jaxcap.sharding.shard import Shard
from jaxcap.spec import Array, Gradients

#: Longest sequence of hops that is not made a loop; compiled code grows with it.
UNROLLED = 16


def _after(tree: Any, *waited_for: Any) -> Any:
    """`tree`, not before the others are there."""
    return jax.lax.optimization_barrier((tree, waited_for))[0]


def _second(hops: range, sums: Any) -> Any:
    """What there is to wait for of sums: every other time, so that two parts are added to them at once."""
    return sums if hops[-1] % 2 else None


def stretches(hops: list[int]) -> list[tuple[int, int]]:
    """(first, count): consecutive hops together where there are many, single ones else."""
    found: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(hops) + 1):
        if i < len(hops) and hops[i] == hops[i - 1] + 1:
            continue
        first, count = hops[start], i - start
        if first == 0:  # it is like no other
            found.append((0, 1))
            first, count = 1, count - 1
        if count > UNROLLED:
            found.append((first, count))
        else:
            found += [(h, 1) for h in range(first, first + count)]
        start = i
    return found


class Accumulator:
    """Sums of parts by group of the queries.

    Where a cap bounds the scores, all are relative to one constant and simply add up; not in float32,
    whose values nothing bounds.
    """

    def __init__(self, shard: Shard, size: int):
        spec = shard.plan.spec
        whole = spec.replace(key_length=spec.key_length * size)
        narrow = spec.dtype in ("bfloat16", "float16")
        bound = softcap.bounded_shift(whole, "float32") if narrow else None
        self.top = None if bound is None else merge.shift_to_top(bound)
        self.join = merge.add if bound is None else merge.add_bounded
        self.shard = shard

    def term(self, part: Part) -> Sums:
        rows = jnp.moveaxis(part.lse, 1, 2)  # [B, T, N]
        if self.top is None:
            return Sums(part.out.astype(rows.dtype), rows, (rows > -jnp.inf).astype(rows.dtype))
        weight = jnp.exp(rows - self.top)
        top = self.shard.mark(jnp.full_like(rows, self.top))
        return Sums(part.out.astype(rows.dtype) * weight[..., None], top, weight)

    def add(self, sums: dict[int, Sums], group: int, part: Part) -> dict[int, Sums]:
        term = self.term(part)
        return {**sums, group: self.join(sums[group], term) if group in sums else term}

    def nothing(self) -> dict[int, Sums]:
        operands = self.shard.operands
        batch, _, heads, _ = operands.query.shape
        wide, found = self.shard.plan.spec.accumulator, {}
        for i, group in enumerate(self.shard.plan.groups):
            places = self.shard.rows_of(group)
            rows = (batch, places.stop - places.start, heads)
            top = jnp.full(rows, -jnp.inf if self.top is None else self.top, wide)
            numerator = jnp.zeros((*rows, operands.value.shape[3]), wide)
            empty = Sums(numerator, top, jnp.zeros(rows, wide))
            found[i] = jax.tree.map(self.shard.mark, empty)
        return found

    def filled(self, sums: dict[int, Sums]) -> dict[int, Sums]:
        """With nothing for groups that are not there yet."""
        if len(sums) == len(self.shard.plan.groups):
            return sums
        return {**self.nothing(), **sums}

    def finish(self, sums: dict[int, Sums]) -> tuple[Array, Array]:
        """(out, lse) of all rows, the sinks joined."""
        sinks = self.shard.operands.sinks
        sink = None if sinks is None else sinks[:, None]  # [B or 1, 1, N]
        parts = [merge.finish(sums[i], sink) for i in sorted(sums)]
        out = join_rows([p.out for p in parts], 1)
        return out, join_rows([jnp.moveaxis(p.lse, 2, 1) for p in parts], 2)


@dataclasses.dataclass(frozen=True)
class Ring(Local):
    name = "ring"

    def _shift(self, tree: Any, by: int) -> Any:
        return transfer.shift(tree, self.axes, self.size, by)

    def _travel(self, keys: Keys, by: int, riding: Any, behind: int) -> tuple[Any, Callable, Any]:
        """Sends keys `by` ranks on and what rides with them `behind`: (what comes, its keys, what rode).

        Nothing is sent where a distance is 0. What goes as far as the keys goes with them.
        """
        leaves, tree = jax.tree.flatten(riding)
        loads: dict[int, list[Array]] = {}
        for distance, arrays in ((by, [keys.key, keys.value]), (behind, leaves)):
            if distance and arrays:
                loads.setdefault(distance, []).extend(arrays)
        sent = {d: self._shift(transfer.joined(load), d) for d, load in loads.items()}
        if behind and leaves:
            arrived = transfer.parted(sent[behind], loads[behind])[-len(leaves) :]
            riding = jax.tree.unflatten(tree, arrived)
        ids = self._shift((keys.segment_ids, keys.positions), by)

        def unpack(coming):
            both, ids = coming
            return Keys(*transfer.parted(both, loads[by])[:2], *ids)

        return (sent.get(by), ids), unpack, riding

    def _hops(self, shard: Shard, step: Callable, carry: Any) -> tuple[Any, Any]:
        """`riding, carry, done = step(hops, source, keys, riding, carry, more)` for each hop.

        `riding` travels with the keys, one hop later, and comes home in the end. The keys for the next
        hop, if there are `more`, are on their way during a step; those after them wait for what is `done`.
        """
        hops = shard.plan.active_hops
        keys, rank = pieces.keys_of(shard.operands), shard.rank

        def one(hop, members, keys, riding, behind, carry):
            after = [h for h in hops if h > hop]
            by = after[0] - hop if after else 0
            coming, unpack, riding = self._travel(keys, by, riding, behind)
            source = rank if hop == 0 else (rank - hop) % self.size
            riding, now, done = step(members, source, keys, riding, carry, bool(after))
            if after and not jax.tree.leaves(done):
                # Only the queries' sum: through the barrier, for XLA would copy it if only named there.
                coming, now = _after((coming, now))
                keys = unpack(coming)
            elif after:
                keys = unpack(_after(coming, done))
            return keys, riding, by, now

        riding, behind = None, 0
        for first, count in stretches(hops):
            members = range(first, first + count)
            stop = members[-1]  # by itself: not followed by the transfer that follows the others

            def body(i, state, members=members):
                keys, riding, carry = state
                coming, unpack, riding = self._travel(keys, 1, riding, 1)
                source = (rank - i) % self.size
                riding, carry, _ = step(members, source, keys, riding, carry, True)
                return unpack(coming), riding, carry

            if count > 1:
                riding, behind = self._shift(riding, behind - 1), 1
                bounds = jnp.int32(first), jnp.int32(stop)
                keys, riding, carry = jax.lax.fori_loop(*bounds, body, (keys, riding, carry))
            keys, riding, behind, carry = one(stop, members, keys, riding, behind, carry)
        return self._shift(riding, -hops[-1]), carry

    def _forward(self, shard: Shard) -> tuple[Array, Array]:
        total = Accumulator(shard, self.size)

        def step(hops, source, keys, riding, sums, more):
            found = [shard.forward(s, keys, source, more) for s in shard.plan.steps(hops)]
            now = sums
            for group, part in found:
                now = total.add(now, group, part)
            return riding, total.filled(now), (found, _second(hops, sums))

        _, sums = self._hops(shard, step, {})
        return total.finish(sums)

    def _backward(self, shard: Shard, results: Results) -> Gradients:
        spec, operands = shard.plan.spec, shard.operands
        columns, wide = spec.key_length, spec.accumulator

        def step(hops, source, keys, riding, carry, more):
            del more  # gradients are on their way beside the last hop, too
            d_query, d_bias = carry
            # A sum that the next hop adds to is nothing to wait for: XLA would copy it.
            sums = d_bias if shard.adds else carry
            steps = shard.plan.steps(hops)
            found, d_query = shard.backward(steps, keys, source, results, d_query)
            found = [jax.tree.map(lambda x: x.astype(wide), g) for g in found]
            riding = add_up_all([riding, *((g.key, g.value) for g in found)])
            d_query = add_up_all([d_query, *(g.query for g in found)])
            if d_bias is not None:
                start = source * columns if d_bias.shape[3] != 1 else 0
                for g in found:
                    part: Any = g.bias
                    d_bias = put_sum(d_bias, part, (0, 0, 0, start))
            return riding, (d_query, d_bias), (found, _second(hops, sums))

        d_bias = None
        if "bias" in spec.gradients:
            d_bias = shard.mark(jnp.zeros(operands.bias.shape, wide))
        none = shard.no_queries(results)
        (d_key, d_value), (d_query, d_bias) = self._hops(shard, step, (none, d_bias))
        return Gradients(shard.all_queries(d_query), d_key, d_value, d_bias)


def add_up_all(trees: list[Any]) -> Any:
    """The sum of those that are not None."""
    first, *rest = [tree for tree in trees if tree is not None] or [None]
    for tree in rest:
        first = jax.tree.map(jnp.add, first, tree)
    return first
