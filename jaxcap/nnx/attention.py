"""`DotProductAttention`: an NNX module without parameters."""

from typing import Any, Unpack

from flax import nnx

from jaxcap.modules import common
from jaxcap.spec import Alignment, Array

Rngs = nnx.Rngs | nnx.RngStream


class DotProductAttention(nnx.Module):
    """Capped attention as a module without parameters, for NNX and, called or set up, for Linen.

    Its keywords are those of `jaxcap.dot_product_attention`, and Flax's for dropout.

    Args:
      softcap: the cap, a Python number; None or 0.0 is none.
      scale: of the logits; None is `H ** -0.5`.
      is_causal: keep `k_pos <= q_pos`.
      causal_alignment: "top_left" or "bottom_right", where T is not S.
      local_window_size: (left, right) in positions, None unbounded.
      dropout_rate: share of the probabilities dropped, in [0, 1).
      broadcast_dropout: drop the same entries for all batch entries and heads, as Flax does.
      deterministic: Flax's: True switches dropout off; set by `train()` and `eval()`. With a
        dropout_rate either the constructor or the call must say True or False.
      layer_number: from 1; needed by apply_qk_layer_scaling.
      apply_qk_layer_scaling: divide logits and cap by layer_number inside the kernel.
      implementation: a backend's name; None selects.
      deterministic_backward: gradients bitwise equal in every run; None is `JAXCAP_DETERMINISTIC`.
      context_parallel: a `jaxcap.ContextParallel`: how the sequence is split over devices.
      rngs: where dropout keys come from in NNX; inside Linen pass `dropout_rng` to each call.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> import jax.numpy as jnp, jaxcap
      >>> attention = jaxcap.DotProductAttention(softcap=50.0, is_causal=True)
      >>> q = jnp.ones((1, 4, 2, 8))
      >>> attention(q, q, q).shape, attention(q, q, q, softcap=0.0).shape
      ((1, 4, 2, 8), (1, 4, 2, 8))
    """

    def __init__(
        self,
        *,
        softcap: float | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        causal_alignment: Alignment = "top_left",
        local_window_size: common.Window = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool | None = None,
        layer_number: int | None = None,
        apply_qk_layer_scaling: bool = False,
        implementation: str | None = None,
        deterministic_backward: bool | None = None,
        context_parallel: Any = None,
        rngs: Rngs | None = None,
    ):
        self.softcap = softcap
        self.scale = scale
        self.is_causal = is_causal
        self.causal_alignment: Alignment = causal_alignment
        self.local_window_size = (
            tuple(local_window_size) if isinstance(local_window_size, list) else local_window_size
        )
        self.dropout_rate = dropout_rate
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.layer_number = layer_number
        self.apply_qk_layer_scaling = apply_qk_layer_scaling
        self.implementation = implementation
        self.deterministic_backward = deterministic_backward
        self.context_parallel = context_parallel
        common.Settings.of(self)  # raises
        stream = rngs.dropout if isinstance(rngs, nnx.Rngs) and dropout_rate > 0 else rngs
        self.rngs = nnx.data(
            stream.fork() if isinstance(stream, nnx.RngStream) and dropout_rate > 0 else None
        )

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        softcap: float | None = None,
        *,
        is_causal: bool | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | None = None,
        dropout_rng: Array | None = None,
        precision: Any = None,
        return_residual: bool = False,
        **arrays: Unpack[common.Arrays],
    ) -> Any:
        """Attend: `[.., T, N, H]` to `[.., S, K, H]`.

        Args:
          query: `[.., T, N, H]`.
          key: `[.., S, K, H]`, N a multiple of K.
          value: `[.., S, K, V]`.
          bias: broadcastable to `[.., N, T, S]`, added outside the cap.
          mask: broadcastable to `[.., N, T, S]`, of any dtype; zero masks.
          softcap: None is the constructor's, 0.0 none.
          is_causal: None is the constructor's.
          deterministic: True switches dropout off; None is the constructor's.
          rngs: instead of the constructor's.
          dropout_rng: a JAX random key, instead of rngs.
          precision: Flax's; see `attention_fn`.
          return_residual: also return the log-sum-exp `[.., T, N]`.
          **arrays: lengths, segment ids, positions, ALiBi slopes, sinks: see
            `jaxcap.dot_product_attention`.

        Returns:
          `[.., T, N, V]` in the query's dtype.
        """
        settings = common.Settings.of(self)
        if settings.drops(common.inherit(self.deterministic, deterministic)):
            dropout_rng = self._dropout_key(dropout_rng, rngs)
        else:
            dropout_rng = None
        return common.attend(
            settings,
            query,
            key,
            value,
            bias,
            mask,
            softcap,
            is_causal=is_causal,
            dropout_rng=dropout_rng,
            precision=precision,
            return_residual=return_residual,
            arrays=arrays,
        )

    def _dropout_key(self, dropout_rng: Array | None, rngs: Rngs | None) -> Array:
        if dropout_rng is not None:
            return dropout_rng
        stream = common.inherit(self.rngs, rngs)
        if isinstance(stream, nnx.Rngs):
            return stream.dropout()
        if not isinstance(stream, nnx.RngStream):
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs rngs in the constructor, or rngs or"
                f" dropout_rng in the call, got {stream!r}"
            )
        return stream()

    def set_view(self, deterministic: bool | None = None) -> None:
        """For `nnx.view`.

        Args:
          deterministic: True switches dropout off.
        """
        if deterministic is not None:
            self.deterministic = deterministic
