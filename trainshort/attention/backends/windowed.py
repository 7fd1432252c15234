"""Proven windows: ALiBi attention that skips every key which provably cannot matter, forward and backward.

Far keys lose slope · distance from their scores, and no score can exceed the product of two norms. So for every head
and every few query rows there is a first key such that all keys before it together carry less than `tolerance` of the
softmax mass; only the rest is computed. docs/windows.md has the proof and what was measured.

A compiled kernel does the work where a C compiler is at hand (kernels/attention), plain PyTorch elsewhere
(windowed_torch.py); both are one operator (operator.py), so that torch.compile keeps the graph whole.
"""

import torch

from trainshort.attention import decay
from trainshort.attention.backends import custom_op, windowed_torch
from trainshort.attention.backends.bidirectional import MASKING_SLOPE
from trainshort.attention.call import AttentionCall, BiasKind, DecayBias, LinearBias, bias_kind_of, unknown_bias_error
from trainshort.attention.functional import AttentionOutput, log_once


class Windowed:
    """ALiBi and clocks on the CPU, skipping keys that provably cannot matter; cheaper than no positions at all."""

    rank = 50
    compiled = True

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        if not isinstance(call.bias, LinearBias | DecayBias):
            return "it computes linear biases (ALiBi) and clocks (FoX) only; use 'sdpa'"
        if reason := custom_op.unsupported_reason(call):
            return reason
        fault = custom_op.traceable_kernel_unavailable_reason(call.q.dtype) if self.compiled else None
        if fault:
            log_once(f"windowed attention runs in plain PyTorch, which is slower: {fault}")
        wide_heads = call.q.shape[3] > custom_op.MAX_HEAD_DIM
        return windowed_torch.unsupported_reason() if fault or wide_heads or not self.compiled else None

    def run(self, call: AttentionCall) -> AttentionOutput:
        bias, length, batch = call.bias, call.k.shape[2], len(call.q)
        if not isinstance(bias, LinearBias | DecayBias):
            raise unknown_bias_error(bias)
        sides = [bias.values, bias.values if bias.right is None else bias.right]
        kind = bias_kind_of(bias)
        if isinstance(bias, LinearBias):
            trained = torch.is_grad_enabled() and any(x.requires_grad for x in sides)
            if trained:
                # The operator has no gradient of slopes. Equal decays give the same bias, and they have a gradient.
                sides = [decay.decay_from_slopes(slopes.clamp(max=MASKING_SLOPE), length, batch) for slopes in sides]
                kind = BiasKind.DECAY
            else:
                sides = [slopes.detach() for slopes in sides]
        out, lse, _, dropped = torch.ops.trainshort.attention(
            call.q,
            call.k,
            call.v,
            sides[0],
            kind.value,
            call.segment_ids,
            call.window,
            call.softmax_scale,
            call.tolerance,
            self.compiled,
            None if call.causal else sides[1],
        )
        return AttentionOutput(out, lse, dropped.amax(-1))


class WindowedTorch(Windowed):
    """The windows of 'windowed' in plain PyTorch, which is what it takes itself where no kernel can be built."""

    rank = 0  # by name only: for comparison
    compiled = False


WINDOWED = Windowed()
WINDOWED_TORCH = WindowedTorch()
