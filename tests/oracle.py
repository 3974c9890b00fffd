"""Attention in float64 NumPy, forward and backward written out by hand: what every backend is judged by.

It imports nothing of jaxcap and nothing of JAX, loops over nothing and saves no memory. Letters: B batch,
T query length, S key length, N query heads, K key/value heads, H and V head size of key and value.
"""

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


def philox(key: tuple[Any, Any], counter: tuple[Any, Any, Any, Any]) -> tuple[Array, ...]:
    """Philox4x32-10 of Salmon et al. (SC 2011): four uint32 words for each counter."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, np.uint64) for word in counter]
    k = [np.asarray(word, np.uint64) for word in key]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ k[0],
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ k[1],
            first & low,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return tuple(word.astype(np.uint32) for word in c)


def survivors(rate: float, key: Any, batch: Any, head: Any, query: Any, kv: Any) -> Array:
    """[B, N, T, S] bool: what dropout keeps, from four vectors of indices and a key [2] or [B, 2].

    Bit 3 of the query's and the key's index picks one of Philox's four words; the other bits, the
    head and the batch are the counter.
    """

    def column(x, axis):
        shape = [1] * 4
        shape[axis] = -1
        return np.asarray(x, np.uint64).reshape(shape)

    def without_bit_3(x):
        return x % np.uint64(8) + np.uint64(8) * (x // np.uint64(16))

    b, n, q, k = column(batch, 0), column(head, 1), column(query, 2), column(kv, 3)
    key = np.asarray(key, np.uint64).reshape(-1, 2)
    words = philox(
        (column(key[:, 0], 0), column(key[:, 1], 0)), (without_bit_3(k), without_bit_3(q), n, b)
    )
    which = 2 * (q // np.uint64(8) % np.uint64(2)) + k // np.uint64(8) % np.uint64(2)
    shape = np.broadcast_shapes(words[0].shape, which.shape)
    word = np.choose(np.broadcast_to(which, shape).astype(int), words)
    return word >= np.uint32(int(rate * 2**32))


def heads_of(x: Array, heads: int) -> Array:
    """[B, S, K, D] to [B, N, S, D]: each key/value head serves N / K neighbouring query heads."""
    return np.repeat(np.swapaxes(x, 1, 2), heads // x.shape[2], axis=1)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Adds up the axes that broadcasting from `shape` made."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    grown = tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1)
    return x.sum(axis=grown, keepdims=True)


class Gradients(NamedTuple):
    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None


class Attention:
    """One call, worked out: `out` [B, T, N, V] and `lse` [B, T, N], natural logarithm, then `backward`.

    The arguments are `jaxcap.dot_product_attention`'s, on 4-D arrays; `dropout_key` is the two
    words behind `dropout_rng`, `dropout_indices` (batch, head, query, key) default to 0, 1, 2, ...
    """

    def __init__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        *,
        softcap: float | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        causal_alignment: str = "top_left",
        local_window_size: int | tuple[int | None, int | None] | None = None,
        query_seq_lengths: Array | None = None,
        key_value_seq_lengths: Array | None = None,
        query_segment_ids: Array | None = None,
        key_value_segment_ids: Array | None = None,
        query_positions: Array | None = None,
        key_value_positions: Array | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        dropout_rate: float = 0.0,
        dropout_key: Any = None,
        dropout_indices: tuple[Any, Any, Any, Any] | None = None,
        layer_scale: float = 1.0,
    ):
        (b, t, n, h), (s, kv_heads) = query.shape, key.shape[1:3]
        shape = (b, n, t, s)
        self.scale = h**-0.5 if scale is None else scale
        self.layer_scale = layer_scale
        self.softcap = softcap or 0.0
        self.kv_heads = kv_heads
        self.bias_shape = None if bias is None else bias.shape
        self.sinks_shape = None if sinks is None else sinks.shape

        # 1. Positions, and which entries take part.
        q_pos = np.arange(t)[None] + (s - t if causal_alignment == "bottom_right" else 0)
        k_pos = np.arange(s)[None]
        if query_positions is not None:
            q_pos = np.asarray(query_positions, np.int64)
        if key_value_positions is not None:
            k_pos = np.asarray(key_value_positions, np.int64)
        ahead = k_pos[:, None, :] - q_pos[:, :, None]  # [B or 1, T, S]: how far the key is ahead
        part = np.ones((b, t, s), bool)
        if is_causal:
            part &= ahead <= 0
        if local_window_size is not None:
            if isinstance(local_window_size, int):
                local_window_size = (local_window_size, local_window_size)
            left, right = local_window_size
            part &= (-ahead <= left) if left is not None else True
            part &= (ahead <= right) if right is not None else True
        if query_seq_lengths is not None:
            part &= (np.arange(t) < np.asarray(query_seq_lengths)[:, None])[:, :, None]
        if key_value_seq_lengths is not None:
            part &= (np.arange(s) < np.asarray(key_value_seq_lengths)[:, None])[:, None, :]
        if query_segment_ids is not None:
            part &= query_segment_ids[:, :, None] == key_value_segment_ids[:, None, :]
        part = np.broadcast_to(part[:, None], shape).copy()
        if mask is not None:
            part &= mask
        if bias is not None:
            part &= bias != -np.inf
        self.part = part
        self.row = part.any(axis=3)  # [B, N, T]: rows with something to attend to
        self.attended = part.any(axis=(1, 2))  # [B, S]: keys that some query attends

        # 2. Without effect, whatever it holds: q of empty rows, k and v of unattended keys.
        row = np.swapaxes(self.row, 1, 2)[..., None]
        self.q = np.where(row, query, np.zeros_like(query)).astype(np.float64)
        keys = self.attended[:, :, None, None]
        self.k = np.where(keys, key, np.zeros_like(key)).astype(np.float64)
        self.v = np.where(keys, value, np.zeros_like(value)).astype(np.float64)

        # 3. Scores: capped, then bias and ALiBi, then masked.
        q = np.swapaxes(self.q, 1, 2)
        logits = self.scale * np.einsum("bnth,bnsh->bnts", q, heads_of(self.k, n)) / layer_scale
        self.tanh = np.zeros(shape)
        if softcap:
            cap = softcap / layer_scale
            self.tanh = np.tanh(logits / cap)
            logits = cap * self.tanh
        # What is added outside the cap, apart, for the plain implementation: [B or 1, N, T, S]
        self.alibi = None
        scores = layer_scale * logits
        if bias is not None:
            scores = scores + np.where(part, np.broadcast_to(bias, shape), 0).astype(np.float64)
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes, np.float64).reshape(-1, n, 1, 1)
            self.alibi = -slopes * np.abs(ahead)[:, None]
            scores = scores + self.alibi
        self.scores = np.where(part, scores, 0.0)

        # 4. Softmax and its log-sum-exp; a sink is one more entry without a value.
        top = np.where(part, scores, -np.inf).max(axis=3, initial=-np.inf)
        sink = np.full((1, n, 1), -np.inf)
        if sinks is not None:
            sink = np.asarray(sinks, np.float64)[None, :, None]
        top = np.maximum(top, sink)
        top = np.where(np.isfinite(top), top, 0.0)
        weights = np.where(part, np.exp(np.where(part, scores - top[..., None], 0.0)), 0.0)
        total = weights.sum(axis=3) + np.exp(sink - top)
        some = total > 0
        total = np.where(some, total, 1.0)
        self.p = weights / total[..., None]
        self.p_sink = np.exp(sink - top) / total
        self.lse = np.swapaxes(np.where(some, top + np.log(total), -np.inf), 1, 2)

        # 5. Dropout on the normalised probabilities, then the values.
        self.keep = np.ones(shape, bool)
        if dropout_rate:
            indices = dropout_indices or tuple(np.arange(size) for size in shape)
            self.keep = survivors(dropout_rate, dropout_key, *indices)
        self.keep_factor = self.keep / (1.0 - dropout_rate)
        self.out = np.einsum("bnts,bnsv->btnv", self.p * self.keep_factor, heads_of(self.v, n))

    def _cotangents(self, d_out: Array, d_lse: Array | None) -> tuple[Array, Array]:
        """As [B, N, T, V] and [B, N, T], without what cannot matter."""
        d_out = np.where(self.row[..., None], np.swapaxes(d_out, 1, 2), 0).astype(np.float64)
        if d_lse is None:
            return d_out, np.zeros(self.row.shape)
        known = self.row | (np.zeros_like(self.row) if self.sinks_shape is None else True)
        return d_out, np.where(known, np.swapaxes(d_lse, 1, 2), 0).astype(np.float64)

    def _chain(self, d_out, d_lse, dp, delta, q, k) -> Gradients:
        """From d_out, d loss / d probability and delta to the operands."""
        n = self.p.shape[1]
        ds = self.p * (dp - delta[..., None] + d_lse[..., None])
        dz = self.scale * ds * (1.0 - self.tanh**2)
        dv = np.einsum("bnts,bntv->bsnv", self.p * self.keep_factor, d_out)
        dk = np.einsum("bnts,bnth->bsnh", dz, np.swapaxes(q, 1, 2))

        def group(x):  # [B, S, N, D] to [B, S, K, D]
            return x.reshape(*x.shape[:2], self.kv_heads, n // self.kv_heads, -1).sum(axis=3)

        d_sink = self.p_sink * (d_lse - delta)
        return Gradients(
            np.einsum("bnts,bnsh->btnh", dz, heads_of(k, n)),
            group(dk),
            group(dv),
            None if self.bias_shape is None else sum_to(ds, self.bias_shape),
            None if self.sinks_shape is None else d_sink.sum(axis=(0, 2)),
        )

    def backward(self, d_out: Array, d_lse: Array | None = None) -> Gradients:
        """The gradients of <out, d_out> + <lse, d_lse>."""
        d_out, d_lse = self._cotangents(d_out, d_lse)
        dp = np.einsum("bntv,bnsv->bnts", d_out, heads_of(self.v, self.p.shape[1]))
        delta = np.einsum("bntv,btnv->bnt", d_out, self.out)
        return self._chain(d_out, d_lse, dp * self.keep_factor, delta, self.q, self.k)

    def magnitudes(self, d_out: Array, d_lse: Array | None = None) -> dict[str, Array]:
        """The same sums over absolute values: rounding errors are in proportion to these."""
        d_out, d_lse = (np.abs(x) for x in self._cotangents(d_out, d_lse))
        v = np.abs(heads_of(self.v, self.p.shape[1]))
        out = np.einsum("bnts,bnsv->btnv", self.p * self.keep_factor, v)
        dp = np.einsum("bntv,bnsv->bnts", d_out, v) * self.keep_factor
        delta = -np.einsum("bntv,btnv->bnt", d_out, out)
        grads = self._chain(d_out, d_lse, dp, delta, np.abs(self.q), np.abs(self.k))
        sums = {k: np.abs(x) for k, x in grads._asdict().items() if x is not None}
        lse = np.where(np.isfinite(self.lse), 1.0 + np.abs(self.lse), 0.0)
        return {"out": out, "lse": lse, **sums}
