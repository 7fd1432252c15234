"""Tests of the backend `flex` on the CPU, where FlexAttention supports only the forward pass."""

import pytest
import torch

from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias, LinearBias, attend
from trainshort.errors import InputError


@pytest.mark.parametrize("case", ["linear", "distance with window and segments"])
def test_flex_equals_reference(case):
    q = torch.randn(2, 4, 16, 16)
    k = torch.randn(2, 2, 128, 16)
    v = torch.randn(2, 2, 128, 16)
    if case == "linear":
        options = {"bias": LinearBias(alibi.slopes(4))}
    else:
        segment_ids = torch.tensor([[0] * 118 + [1] * 10, [0] * 128])
        options = {"bias": DistanceBias(torch.randn(4, 9)), "window": 20, "segment_ids": segment_ids}
    expected = attend(q, k, v, backend="reference", **options)
    out = attend(q, k, v, backend="flex", **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_stats": True}, "no log-sum-exp on the CPU; use 'windowed' or 'sdpa'"),
        ({"dropout_p": 0.1}, "no dropout; use 'sdpa'"),
        ({"bias": DenseBias(torch.zeros(2, 4, 4))}, "dense bias"),
    ],
)
def test_unsupported_calls_are_rejected_with_a_reason(options, reason):
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(InputError, match=reason):
        attend(q, q, q, backend="flex", **options)


def test_training_on_the_cpu_is_rejected():
    q = torch.randn(1, 2, 4, 16, requires_grad=True)
    with pytest.raises(InputError, match="no backward on the CPU"):
        attend(q, q, q, bias=LinearBias(alibi.slopes(2)), backend="flex")
