"""The backend `windowed`, which skips keys whose softmax mass is proven to be at most the tolerance.

An ALiBi bias lowers the scores of distant keys, and no score can exceed the product of the norms of query and key. The
backend therefore finds, for each head and each group of query rows, a first key. All keys before the first key together
have at most `tolerance` of the softmax mass (the sum of attention weights). The forward and the backward pass read only
the other keys. docs/windows.md contains the proof and measurements.

The attention is computed by a compiled C kernel (kernels/windowed). Without a C compiler, the attention is computed in
plain PyTorch (windowed_torch.py). Both implementations are one PyTorch operator (custom_op.py), so that torch.compile
does not break the graph.
"""

import torch

from trainshort.attention import decay
from trainshort.attention.backends import ctypes_call, custom_op, windowed_torch
from trainshort.attention.backends.bidirectional import MASKING_SLOPE
from trainshort.attention.call import AttentionCall, BiasKind, DecayBias, LinearBias, bias_kind_of, unknown_bias_error
from trainshort.attention.functional import AttentionOutput, log_once


class Windowed:
    """ALiBi and decay biases on the CPU. This backend skips keys whose softmax mass is proven to be negligible.

    The class attribute `compiled` says whether the compiled C kernel is used if it is available.
    """

    rank = 50
    compiled = True

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Return why this backend does not support a call, or None if the backend supports the call."""
        if not isinstance(call.bias, LinearBias | DecayBias):
            return "it supports only linear biases (ALiBi) and decay biases (FoX); use 'sdpa'"
        reason = custom_op.unsupported_reason(call)
        if reason:
            return reason
        if not self._uses_kernel(call):
            return windowed_torch.unsupported_reason()
        return None

    def _uses_kernel(self, call: AttentionCall) -> bool:
        """Return whether the compiled kernel computes a call. The log reports once if the kernel cannot be built."""
        if not self.compiled:
            return False
        kernel_reason = ctypes_call.traceable_kernel_unavailable_reason(call.q.dtype)
        if kernel_reason:
            log_once(f"windowed attention runs in plain PyTorch, which is slower: {kernel_reason}")
            return False
        return call.q.shape[3] <= ctypes_call.MAX_HEAD_DIM

    def run(self, call: AttentionCall) -> AttentionOutput:
        """Compute attention and skip keys within the tolerance of the call.

        Args:
            call: The arguments of the call.

        Returns:
            The attention output, the log-sum-exp, and the certificate (an upper bound on the softmax mass that was
            skipped).
        """
        bias = call.bias
        if not isinstance(bias, LinearBias | DecayBias):
            raise unknown_bias_error(bias)
        left_bias = bias.values
        right_bias = bias.values if bias.right is None else bias.right
        kind = bias_kind_of(bias)
        if isinstance(bias, LinearBias):
            is_trained = torch.is_grad_enabled() and (left_bias.requires_grad or right_bias.requires_grad)
            if is_trained:
                # The operator computes no gradient of slopes. A decay bias with the same values has a gradient.
                left_bias = _slopes_to_decay(call, left_bias)
                right_bias = _slopes_to_decay(call, right_bias)
                kind = BiasKind.DECAY
            else:
                left_bias = left_bias.detach()
                right_bias = right_bias.detach()

        out, lse, _, dropped_mass = torch.ops.trainshort.attention(
            call.q,
            call.k,
            call.v,
            left_bias,
            kind.value,
            call.segment_ids,
            call.window,
            call.softmax_scale,
            call.tolerance,
            self.compiled,
            None if call.causal else right_bias,
        )
        # `dropped_mass` has one value per query tile. The certificate is the largest value of each head.
        return AttentionOutput(out, lse, certificate=dropped_mass.amax(-1))


def _slopes_to_decay(call: AttentionCall, slopes: torch.Tensor) -> torch.Tensor:
    """Return the cumulative log decay that gives the same bias as ALiBi slopes. The result has a gradient."""
    finite_slopes = slopes.clamp(max=MASKING_SLOPE)
    return decay.decay_from_slopes(finite_slopes, length=call.k.shape[2], batch=call.q.shape[0])


class WindowedTorch(Windowed):
    """The backend `windowed` without the compiled kernel. It is used only if the caller names it, for comparisons."""

    rank = 0
    compiled = False


WINDOWED = Windowed()
WINDOWED_TORCH = WindowedTorch()
