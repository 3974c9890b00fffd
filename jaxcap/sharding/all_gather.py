"""All-gather: every device has all keys and values for as long as it computes with them.

One exchange, nothing to add up: rows are computed as on one device. Memory is O(S) for keys, values
and their gradients (float32), a device, while a call runs; nothing of it is kept for the backward, which
gathers again and scatters the sums.
"""

import dataclasses
from typing import Any

import jax

from jaxcap.sharding import pieces
from jaxcap.sharding.layout import reorder_for_load_balance, restore_order
from jaxcap.sharding.local import Local, join_rows
from jaxcap.sharding.pieces import Results
from jaxcap.sharding.plan import Plan
from jaxcap.sharding.ring import Accumulator, add_up_all
from jaxcap.sharding.shard import Shard
from jaxcap.spec import Array, AttentionSpec, Gradients


@dataclasses.dataclass(frozen=True)
class AllGather(Local):
    name = "all-gather"

    def plan(self, spec: AttentionSpec) -> Plan:
        whole = spec.replace(key_length=spec.key_length * self.size, context_parallel=None)
        return Plan(whole, self.size, self.load_balance, gathered=True)

    def _restored(self, x: Array, axis: int) -> Array:
        return restore_order(x, self.size, self.load_balance, axis)

    def _gathered(self, shard: Shard) -> Any:
        """The keys of all devices in their original order, and the columns of bias and mask alike."""

        def gather(x):
            return self._restored(jax.lax.all_gather(x, self.axes, axis=1, tiled=True), 1)

        def columns(x):
            return x if x is None or x.shape[3] == 1 else self._restored(x, 3)

        operands = shard.operands
        keys = jax.tree.map(gather, pieces.keys_of(operands))
        shard.operands = operands._replace(bias=columns(operands.bias), mask=columns(operands.mask))
        return keys

    def _forward(self, shard: Shard) -> tuple[Array, Array]:
        keys, steps = self._gathered(shard), shard.plan.steps([0])
        if shard.operands.sinks is None:  # one step a group, and nothing that joins it
            found = dict(shard.forward(step, keys, 0, alone=True) for step in steps)
            groups = enumerate(shard.plan.groups)
            parts = [found[i] if i in found else shard.nothing(g, False) for i, g in groups]
            return join_rows([p.out for p in parts], 1), join_rows([p.lse for p in parts], 2)
        total, sums = Accumulator(shard, 1), {}
        for step in steps:
            sums = total.add(sums, *shard.forward(step, keys, 0))
        return total.finish(total.filled(sums))

    def _backward(self, shard: Shard, results: Results) -> Gradients:
        keys = self._gathered(shard)
        steps, none = shard.plan.steps([0]), shard.no_queries(results)
        found, d_query = shard.backward(steps, keys, 0, results, none)
        wide = shard.plan.spec.accumulator
        grads = add_up_all([jax.tree.map(lambda x: x.astype(wide), g) for g in found])

        def scatter(x):
            x = reorder_for_load_balance(x, self.size, self.load_balance, 1)
            return jax.lax.psum_scatter(x, self.axes, scatter_dimension=1, tiled=True)

        bias = grads.bias
        if bias is not None and bias.shape[3] != 1:
            bias = reorder_for_load_balance(bias, self.size, self.load_balance, 3)
        key, value = (None if x is None else scatter(x) for x in (grads.key, grads.value))
        query = grads.query if d_query is None else shard.all_queries(d_query)
        return Gradients(query, key, value, bias)
