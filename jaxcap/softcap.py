"""The soft cap `cap * tanh(logits / cap)`, its derivative, and when it spares a running maximum."""

import math

import jax.numpy as jnp

from jaxcap.spec import Array, AttentionSpec

LOG2E = math.log2(math.e)

#: Relative error of the tanh of a GPU's special-function unit (`tanh.approx.f32`), so also of a score:
#: kernels take an accurate tanh for caps above `LARGE_CAP`, of which a score is off by 0.05.
TANH_APPROX_ERROR, LARGE_CAP = 2.0**-11, 100.0
#: Absolute error of that accurate tanh.
TANH_ERROR = 2.0**-22

#: Magnitudes of values that no running maximum is needed for; see `bounded_shift`.
LOG2_LEAST_VALUE, LOG2_LARGEST_VALUE = -36, 48


def cap(logits: Array, softcap: float | None, layer_scale: float = 1.0) -> Array:
    """`L * (softcap / L) * tanh((logits / L) / (softcap / L))`; the identity where it is None.

    The layer factor L is divided out of logits and cap alike: it changes rounding, nothing else.
    """
    if layer_scale != 1.0:
        logits = logits / layer_scale
    if softcap is not None:
        layer_cap = softcap / layer_scale
        logits = layer_cap * jnp.tanh(logits / layer_cap)
    return logits if layer_scale == 1.0 else logits * layer_scale


def derivative(capped: Array, softcap: float | None) -> Array | float:
    """d cap(x) / dx = 1 - tanh(x / softcap)**2, from the capped value; 1.0 where `softcap` is None.

    Take it before masking: on a masked -inf it is infinite, and infinity times zero is NaN.
    """
    if softcap is None:
        return 1.0
    tanh = capped * (1.0 / softcap)
    return 1.0 - tanh * tanh


def bounded_shift(spec: AttentionSpec, probabilities: str) -> int | None:
    """The power of two to take off every exponent where no running maximum is needed, else None.

    A cap bounds the scores: |score| * log2(e) <= c. Then exp2(score * log2(e) - shift) lies in
    [2**(-c - shift), 2**(c - shift)] for every row, and one shift for all rows keeps
    - the least probability normal in `probabilities` ("bfloat16", "float16" or "float32"; float16
      may go two bits below, where it still has as many bits as bfloat16);
    - the largest finite in it;
    - probability times value normal in float32 for |value| >= 2**-36, and what is less is lost
      beside 2**-36 only;
    - the sum over S keys of probability times value finite in float32 for |value| <= 2**48.
    A bias or ALiBi is unbounded: None. Sinks join after the sum, by logarithm, and do no harm.
    """
    if spec.softcap is None or spec.bias_shape is not None or spec.alibi:
        return None
    c = spec.softcap * LOG2E
    if probabilities == "float16":
        shift, least, largest = 0, -16, 15.99
    else:
        least, largest = -126 - LOG2_LEAST_VALUE, 127
        shift = min(math.ceil(c), math.floor(-least - c))
    high = c - shift
    sums = high + math.log2(max(spec.key_length, 1)) + LOG2_LARGEST_VALUE
    return shift if -c - shift >= least and high <= largest and sums <= 127 else None
