"""`DotProductAttention`: `attention` with its settings, as a PyTorch module."""

from typing import Any

import torch

from jaxcap.keywords import hint, hinted
from jaxcap.torch_bridge import call, checks
from jaxcap.torch_bridge.functional import attention

OF_A_CALL = ("bias", "alibi_slopes", "segment_ids", "generator", "sinks", "return_lse")


@hinted
class DotProductAttention(torch.nn.Module):
    """`jaxcap.torch_bridge.attention` with what stays the same from call to call; no parameters.

    Args:
      softcap: the cap; 0.0 is none.
      causal, window_size, scale, deterministic, backend, layout: as in `attention`.
      dropout_p: of the probabilities, in training only.

    Example:
      >>> attend = torch_bridge.DotProductAttention(softcap=50.0, causal=True)
      >>> attend(q, k, v).shape == q.shape
      True
    """

    def __init__(
        self,
        softcap: float = 0.0,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        scale: float | None = None,
        dropout_p: float = 0.0,
        deterministic: bool = False,
        backend: str | None = None,
        layout: str = "bshd",
    ):
        super().__init__()
        call.check_settings(
            call.Settings(
                softcap, causal, window_size, scale, dropout_p, deterministic, backend=backend
            )
        )
        checks.layout(layout)
        self.softcap = softcap
        self.causal = causal
        self.window_size = window_size
        self.scale = scale
        self.dropout_p = dropout_p
        self.deterministic = deterministic
        self.backend = backend
        self.layout = layout

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softcap: float | None = None,
        causal: bool | None = None,
        **keywords: Any,
    ) -> Any:
        """`attention(q, k, v)`; None inherits, `softcap=0.0` switches the cap off.

        `keywords` are `bias`, `alibi_slopes`, `segment_ids`, `generator`, `sinks` and `return_lse`.
        """
        if others := [name for name in keywords if name not in OF_A_CALL]:
            raise TypeError(
                f"a call of DotProductAttention takes no {', '.join(others)}, only softcap, causal,"
                f" {', '.join(OF_A_CALL)}; settings are given when the module is made"
                + hint(others[0], ("softcap", "causal", *OF_A_CALL))
            )
        return attention(
            q,
            k,
            v,
            softcap=self.softcap if softcap is None else softcap,
            causal=self.causal if causal is None else causal,
            window_size=self.window_size,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            deterministic=self.deterministic,
            backend=self.backend,
            layout=self.layout,
            **keywords,
        )

    def extra_repr(self) -> str:
        return f"softcap={self.softcap}, causal={self.causal}, window_size={self.window_size}"
