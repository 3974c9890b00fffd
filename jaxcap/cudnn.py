"""Backend `cudnn`: `jax.nn.dot_product_attention`'s cuDNN, where it gives the same answer.

cuDNN knows no soft cap. It answers differently wherever a row may be empty or a key unattended (a
masked score there is a large negative number, not -inf, and 0 * NaN is NaN), so it serves full and
square causal attention, with a left window or without, and nothing else.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcap.spec import Array, AttentionSpec, Operands


class CuDNN:
    name = "cudnn"
    native = True

    def reasons(self, spec: AttentionSpec) -> list[str]:
        why = []

        def refuse(condition: Any, reason: str) -> None:
            if condition:
                why.append(reason)

        sm = int(spec.platform[2:]) if spec.platform[2:].isdigit() else 0
        largest = 256 if sm >= 90 else 128
        low, high = spec.band
        refuse(spec.softcap is not None, "cuDNN has no soft cap")
        refuse(sm < 80, f"needs an NVIDIA GPU of sm80 or newer, this is {spec.platform}")
        refuse(spec.dtype not in ("bfloat16", "float16"), f"no {spec.dtype}, 16-bit only")
        refuse(
            spec.head_size > largest or spec.head_size % 8,
            f"head size must be a multiple of 8 up to {largest}, got {spec.head_size}",
        )
        refuse(spec.head_size != spec.value_size, "head sizes of key and value must be equal")
        for present, what in (
            (spec.bias_shape is not None, "bias"),
            (spec.mask_shape is not None, "mask"),
            (spec.query_lengths or spec.kv_lengths, "sequence lengths"),
            (spec.segment_ids, "segment ids"),
            (spec.query_positions or spec.kv_positions, "positions"),
            (spec.alibi, "ALiBi slopes"),
            (spec.sinks, "sinks"),
        ):
            refuse(present, f"no {what}: absent there, or empty rows come out differently")
        refuse(spec.dropout_rate > 0, "cannot drop the entries that the key names")
        refuse(low is not None and high != 0, "a window must have right end 0")
        refuse(low is None and high not in (None, 0), "a window must have right end 0")
        refuse(
            (low, high) != (None, None) and spec.query_length != spec.key_length,
            "causality or a window needs equal query and key length",
        )
        refuse(spec.return_residual, "rounds the residual to 16 bits")
        refuse(spec.deterministic and spec.gradients, "its backward is not deterministic")
        refuse(spec.partial, "no part of a context-parallel call, which needs the residual")
        return why

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        low, high = spec.band
        out = jax.nn.dot_product_attention(
            operands.query,
            operands.key,
            operands.value,
            scale=spec.scale,
            is_causal=high == 0,
            local_window_size=None if low is None else (-low, 0),
            implementation="cudnn",
        )
        # Nobody asked for the residual, see `reasons`.
        return out, jnp.zeros((spec.batch, spec.query_heads, spec.query_length), spec.accumulator)


BACKEND = CuDNN()
