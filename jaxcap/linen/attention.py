"""`DotProductAttention` as a Linen module, which takes dropout keys from Linen's `dropout` stream."""

from typing import Any, Unpack

from flax import linen as nn

from jaxcap.modules import common
from jaxcap.spec import Alignment, Array


class DotProductAttention(nn.Module):
    """Capped attention as a Linen module without parameters.

    `jaxcap.DotProductAttention` works inside Linen too; this one draws its dropout keys itself.

    Attributes:
      softcap: the cap, a Python number; None or 0.0 is none.
      scale: of the logits; None is `H ** -0.5`.
      is_causal: keep `k_pos <= q_pos`.
      causal_alignment: "top_left" or "bottom_right", where T is not S.
      local_window_size: (left, right) in positions, None unbounded.
      dropout_rate: share of the probabilities dropped, in [0, 1).
      broadcast_dropout: drop the same entries for all batch entries and heads, as Flax does.
      deterministic: Flax's: True switches dropout off.
      layer_number: from 1; needed by apply_qk_layer_scaling.
      apply_qk_layer_scaling: divide logits and cap by layer_number inside the kernel.
      implementation: a backend's name; None selects.
      deterministic_backward: gradients bitwise equal in every run; None is `JAXCAP_DETERMINISTIC`.
      context_parallel: a `jaxcap.ContextParallel`: how the sequence is split over devices.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.

    Example:
      >>> import jax.numpy as jnp, jaxcap.linen
      >>> attention = jaxcap.linen.DotProductAttention(softcap=50.0, is_causal=True)
      >>> q = jnp.ones((1, 4, 2, 8))
      >>> attention.apply({}, q, q, q).shape
      (1, 4, 2, 8)
    """

    softcap: float | None = None
    scale: float | None = None
    is_causal: bool = False
    causal_alignment: Alignment = "top_left"
    local_window_size: common.Window = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    deterministic: bool | None = None
    layer_number: int | None = None
    apply_qk_layer_scaling: bool = False
    implementation: str | None = None
    deterministic_backward: bool | None = None
    context_parallel: Any = None

    def __post_init__(self) -> None:
        common.Settings.of(self)  # raises
        super().__post_init__()

    @nn.compact
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
          dropout_rng: a JAX random key, instead of one from the stream `dropout`.
          precision: Flax's; see `jaxcap.attention_fn`.
          return_residual: also return the log-sum-exp `[.., T, N]`.
          **arrays: lengths, segment ids, positions, ALiBi slopes, sinks: see
            `jaxcap.dot_product_attention`.

        Returns:
          `[.., T, N, V]` in the query's dtype.
        """
        settings = common.Settings.of(self)
        if not settings.drops(common.inherit(self.deterministic, deterministic)):
            dropout_rng = None
        elif dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
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
