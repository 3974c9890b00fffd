"""Backend `pallas`: what it cannot do, and the way to its kernels. Mosaic is imported on first use."""

from jaxcap.softcap import LARGE_CAP, TANH_APPROX_ERROR, TANH_ERROR
from jaxcap.spec import Array, AttentionSpec, Gradients, Operands

MAX_HEAD_SIZE = 256
MAX_CAP = 4096.0  # its scores are off by 0.001
DTYPES = ("bfloat16", "float16")
#: Of rounding to bfloat16 as `scores.exp2_packed` does, in the mean square.
ROUNDING = 1.68e-3


class Pallas:
    name = "pallas"
    cuda_only = True  # a call that is traced here and compiled for a CPU needs another backend
    wide = True  # partial results in float32

    def tanh_error(self, softcap: float) -> float:
        """Relative error of tanh."""
        return TANH_APPROX_ERROR if softcap <= LARGE_CAP else 0.0

    def slope_error(self, softcap: float, dtype: str, sizes: tuple[int, int]) -> float:
        """Absolute error of 1 - tanh^2, beside that of `tanh_error`: of tanh rounded to float16.

        sizes: of the heads of query and value.
        """
        from jaxcap.pallas.backward_config import config_for

        return 2.0**-11 if config_for(*sizes).pairs(dtype, softcap) else 0.0

    def score_error(self, softcap: float) -> float:
        """Absolute error of a capped score, beside that of `tanh_error`."""
        return TANH_ERROR * softcap if softcap > LARGE_CAP else 0.0

    def sum_error(self, softcap: float | None, dtype: str) -> float:
        """Relative error, in the mean square, of a probability in the sums behind the residual."""
        return ROUNDING if softcap and dtype == "bfloat16" else 0.0

    def reasons(self, spec: AttentionSpec) -> list[str]:
        found = []
        if spec.platform != "sm90":
            found.append(f"the kernels are for sm90 (Hopper), this call runs on {spec.platform}")
        if spec.dtype not in DTYPES:
            found.append(f"bfloat16 and float16 only, got {spec.dtype}: `blockwise` takes it")
        for what, size in (("head", spec.head_size), ("value", spec.value_size)):
            if size % 8 or not 8 <= size <= MAX_HEAD_SIZE:
                found.append(
                    f"{what} sizes are multiples of 8 up to {MAX_HEAD_SIZE}, got {size}: pad with zeros"
                )
        if spec.softcap is not None and spec.softcap > MAX_CAP:
            found.append(
                f"softcap up to {MAX_CAP:g}, got {spec.softcap:g}: scores would be off by"
                f" {self.score_error(spec.softcap):.1g}"
            )
        sizes = (spec.batch, spec.query_length, spec.key_length, spec.query_heads)
        if min(sizes) < 1:
            found.append("an axis of length 0")
        if spec.bias_dtype not in (None, "float32", "bfloat16", "float16"):
            found.append(f"a bias in float32, bfloat16 or float16, got {spec.bias_dtype}")
        if spec.gradients and not found:
            from jaxcap.pallas import backward

            found += backward.reasons(spec)
        return found

    def forward(self, spec: AttentionSpec, operands: Operands) -> tuple[Array, Array]:
        from jaxcap.pallas import compiler, config, forward_sm90

        compiler.warn(compiler.slow_here())
        return forward_sm90.forward(spec, operands, config.forward_config(spec))

    def backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
        query_sum: Array | None = None,
    ) -> Gradients:
        from jaxcap.pallas import backward, compiler

        compiler.warn(compiler.slow_here())
        return backward.backward(spec, operands, out, lse, d_out, d_lse, query_sum=query_sum)

    def query_factor(self, spec: AttentionSpec) -> float:
        """What makes a gradient of the queries of the sum that the kernel adds to, see `spec.query_sum`."""
        from jaxcap.pallas import backward

        return backward.query_factor(spec)


BACKEND = Pallas()
