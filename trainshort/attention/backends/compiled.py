"""The backend `compiled`, which uses the compiled CPU kernel for calls without a bias and for biases by distance.

PyTorch's fast CPU kernel accepts a bias but does not compute its gradient. With a trained bias, such as a T5 table,
PyTorch stores the scores, the weights and their gradients in memory. The kernel of this package reads the bias from a
table with one value per distance, and sums the gradient of each distance while the scores are computed.

This backend skips keys only if a distance table decreases fast enough. The backend `windowed` skips keys for slopes and
decay biases.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention.backends import ctypes_call, custom_op
from trainshort.attention.backends.bidirectional import MASKING_SLOPE
from trainshort.attention.call import (
    AttentionCall,
    BiasKind,
    DecayBias,
    DistanceBias,
    LinearBias,
    accumulation_dtype,
    unknown_bias_error,
)
from trainshort.attention.functional import AttentionOutput
from trainshort.utils.machine import mkl_lacks_avx512


class Compiled:
    """The compiled CPU kernel for no bias, linear biases, distance tables and decay biases. Biases can be trained."""

    rank = 30

    def skip_reason(self, call: AttentionCall) -> str | None:
        """Return why `backend="auto"` should prefer another backend for a call, or None.

        The compiled kernel uses AVX2. Without a bias, PyTorch's kernel is preferred if it uses AVX-512.
        """
        if call.bias is None and _torch_uses_avx512():
            return "without a bias, PyTorch's own kernel is preferred because it uses AVX-512"
        return None

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why this backend does not support a call, or None if the backend supports the call."""
        has_supported_bias = call.bias is None or isinstance(call.bias, DistanceBias | LinearBias | DecayBias)
        if not has_supported_bias:
            return "it supports linear biases (ALiBi), distance tables (T5), decay biases (FoX) or no bias; use 'sdpa'"
        head_dim = call.q.shape[3]
        if head_dim > ctypes_call.MAX_HEAD_DIM:
            return f"it supports heads of at most {ctypes_call.MAX_HEAD_DIM} dimensions, got {head_dim}; use 'sdpa'"
        reason = custom_op.unsupported_reason(call)
        if reason:
            return reason
        kernel_reason = ctypes_call.traceable_kernel_unavailable_reason(call.q.dtype)
        if kernel_reason:
            return f"it needs the compiled kernel, and {kernel_reason}; use 'sdpa'"
        return None

    def run(self, call: AttentionCall) -> AttentionOutput:
        """Compute attention with the compiled kernel.

        Args:
            call: The arguments of the call.

        Returns:
            The attention output, the log-sum-exp, and the certificate (an upper bound on the softmax mass that was
            skipped). The certificate is 0 unless the bias is a distance table.
        """
        match call.bias:
            case None:
                kind = BiasKind.SLOPES
                bias_tensors = [torch.zeros(call.q.shape[1])]
            case DecayBias():
                kind = BiasKind.DECAY
                bias_tensors = list(call.bias_tensors)
            case _:
                kind = BiasKind.TABLE
                bias_tensors = [table_by_distance(call, values) for values in call.bias_tensors]
        left_bias = bias_tensors[0]
        # Without a separate tensor for the right side, both sides use the same tensor.
        right_bias = None if call.causal else bias_tensors[-1]
        tolerance = call.tolerance if isinstance(call.bias, DistanceBias) else 0.0

        out, lse, _, dropped_mass = torch.ops.trainshort.attention(
            call.q,
            call.k,
            call.v,
            left_bias,
            kind.value,
            call.segment_ids,
            call.window,
            call.softmax_scale,
            tolerance,
            True,  # use the compiled kernel
            right_bias,
        )
        # `dropped_mass` has one value per query tile. The certificate is the largest value of each head.
        return AttentionOutput(out, lse, certificate=dropped_mass.amax(-1))


def table_by_distance(call: AttentionCall, values: Tensor) -> Float[Tensor, "heads k_len"]:
    """Return a table with the bias at every distance from 0 to k_len - 1.

    Args:
        call: The arguments of the call. `call.bias` must be a `LinearBias` or a `DistanceBias`.
        values: The slopes, or the distance table, of one side of the text (the keys before or after a query). A longer
            table is cut, and a shorter table is extended with its last column.
    """
    k_len = call.k.shape[2]
    match call.bias:
        case LinearBias():
            # MASKING_SLOPE is large and finite. An infinite slope would give infinity * 0 = NaN at distance 0.
            slopes = values.to(accumulation_dtype(call.q)).clamp(max=MASKING_SLOPE)
            return -slopes[:, None] * torch.arange(k_len)
        case DistanceBias():
            table = values[:, :k_len]
            missing_columns = k_len - table.shape[1]
            if missing_columns == 0:
                return table
            last_column = table[:, -1:]
            return torch.cat([table, last_column.expand(-1, missing_columns)], dim=1)
        case unknown:
            raise unknown_bias_error(unknown)


@torch.compiler.assume_constant_result
def _torch_uses_avx512() -> bool:
    """Return whether PyTorch's CPU kernels use AVX-512 vectors, which are wider than AVX2 vectors."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and not mkl_lacks_avx512()


COMPILED = Compiled()
