"""The compiled kernel for no bias and for any bias by distance, trained or not.

Torch's fast kernel on the CPU takes a bias but gives it no gradient, so a trained one (T5's table, ALiBi with trained
slopes) would be written out, with all scores, weights and their gradients. Here the bias is a row of numbers by
distance, read and summed along the diagonals where the scores are: at 768 tokens a ninth of the time. Without a bias
the same kernel takes between 0.38 and 0.89 of the time of torch's on a processor with AVX2 (measured once, not
stored), so position methods that differ in nothing else are also computed alike.

It leaves keys out where a table by distance falls so far that this is proven (KERPLE's powers, BAM), and nowhere else:
slopes and clocks that shall skip are `windowed`'s.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.attention.backends import custom_op
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
    """The compiled CPU kernel; skips only by tables that fall. No bias, T5, KERPLE, slopes, clocks; trains the bias."""

    rank = 30

    def skip_reason(self, call: AttentionCall) -> str | None:
        """Our kernel's vectors are those of AVX2. Where torch's are wider, plain attention is left to it (not measured;
        where they could be and are not, ours takes 0.5 to 0.78 of the time)."""
        wider = call.bias is None and _torch_is_wider()
        return "without a bias torch's own kernel has the wider vectors" if wider else None

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        if not (call.bias is None or isinstance(call.bias, DistanceBias | LinearBias | DecayBias)):
            return "it computes biases by distance (T5, ALiBi), clocks (FoX) or none; use 'sdpa'"
        if call.q.shape[3] > custom_op.MAX_HEAD_DIM:
            return f"its heads are at most {custom_op.MAX_HEAD_DIM} wide, these are {call.q.shape[3]}; use 'sdpa'"
        if reason := custom_op.unsupported_reason(call):
            return reason
        fault = custom_op.traceable_kernel_unavailable_reason(call.q.dtype)
        return f"it needs the compiled kernel, and {fault}; use 'sdpa'" if fault else None

    def run(self, call: AttentionCall) -> AttentionOutput:
        match call.bias:
            case None:
                kind = BiasKind.SLOPES
                values = [torch.zeros(call.q.shape[1])]
            case DecayBias():
                kind = BiasKind.DECAY
                values = call.bias_tensors
            case _:
                kind = BiasKind.TABLE
                values = [table_by_distance(call, side) for side in call.bias_tensors]
        allowed = call.tolerance if isinstance(call.bias, DistanceBias) else 0.0
        out, lse, _, dropped = torch.ops.trainshort.attention(
            call.q,
            call.k,
            call.v,
            values[0],
            kind.value,
            call.segment_ids,
            call.window,
            call.softmax_scale,
            allowed,
            True,  # use the compiled kernel
            None if call.causal else values[-1],
        )
        return AttentionOutput(out, lse, dropped.amax(-1))


def table_by_distance(call: AttentionCall, values: Tensor) -> Float[Tensor, "heads k_len"]:
    """The bias of one side's slopes or table at every distance that can occur."""
    distance = torch.arange(call.k.shape[2])
    match call.bias:
        case LinearBias():
            return -values.to(accumulation_dtype(call.q)).clamp(max=MASKING_SLOPE)[:, None] * distance
        case DistanceBias():
            known = values[:, : len(distance)]
            beyond = len(distance) - known.shape[1]
            return torch.cat([known, known[:, -1:].expand(-1, beyond)], dim=1) if beyond else known
        case unknown:
            raise unknown_bias_error(unknown)


@torch.compiler.assume_constant_result
def _torch_is_wider() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and not mkl_lacks_avx512()


COMPILED = Compiled()
