"""Tests of the arguments of `alibi_attention`: padding, segments, windows, scale and dropout."""

import pytest
import torch

from trainshort import alibi, alibi_attention
from trainshort.attention import LinearBias, attend
from trainshort.errors import InputError

# The lengths of the three sequences in a padded batch.
LENGTHS = (5, 40, 64)


def make_padded_batch(side):
    """Return three sequences, the same sequences as padded tensors, and the padding mask.

    Args:
        side: The side on which the sequences are padded, "left" or "right". The padding has the value 1000.

    Returns:
        A list with the tensors (q, k, v) of each sequence, the padded tensors [q, k, v], and a mask that is True for
        padding.
    """
    sequences = [[torch.randn(1, 2, length, 8) for _ in range(3)] for length in LENGTHS]
    mask = torch.ones(3, 64, dtype=torch.bool)
    padded_tensors = []
    for tensor_index in range(3):
        padded = torch.full((3, 2, 64, 8), 1e3)
        for i, sequence in enumerate(sequences):
            place = slice(64 - LENGTHS[i], 64) if side == "left" else slice(0, LENGTHS[i])
            padded[i, :, place] = sequence[tensor_index][0]
            mask[i, place] = False
        padded_tensors.append(padded)
    return sequences, padded_tensors, mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequence_equals_sequence_without_padding(side):
    sequences, tensors, mask = make_padded_batch(side)
    leaves = [x.requires_grad_() for x in tensors]
    out = alibi_attention(*leaves, key_padding_mask=mask)
    assert out.isfinite().all()
    for i, sequence in enumerate(sequences):
        torch.testing.assert_close(out[i : i + 1, :, ~mask[i]], alibi_attention(*sequence), rtol=0, atol=2e-6)

    is_token = ~mask[:, None].expand(-1, 2, -1)
    grads = torch.autograd.grad(out[is_token].sum(), leaves)
    for grad in grads:
        assert grad.isfinite().all()
        assert (grad[~is_token] == 0).all()


def test_decode_step_of_left_padded_batch_equals_last_token():
    sequences, (q, k, v), mask = make_padded_batch("left")
    out = alibi_attention(q[:, :, -1:], k, v, key_padding_mask=mask)
    for i, sequence in enumerate(sequences):
        torch.testing.assert_close(out[i], alibi_attention(*sequence)[0, :, -1:], rtol=0, atol=2e-6)


def test_padding_and_segments_together():
    _, (q, k, v), mask = make_padded_batch("right")
    segment_ids = torch.arange(64).expand(3, -1) // 20 - 1
    out = alibi_attention(q, k, v, key_padding_mask=mask, segment_ids=segment_ids)
    ids_with_padding = torch.where(mask, 99, segment_ids)
    expected = attend(q, k, v, bias=LinearBias(alibi.slopes(2)), segment_ids=ids_with_padding, backend="reference")
    torch.testing.assert_close(out[1, :, :40], expected[1, :, :40], rtol=0, atol=2e-6)


def test_window_scale_and_segments():
    q = torch.randn(2, 4, 90, 8)
    k, v = (torch.randn(2, 2, 90, 8) for _ in range(2))
    segment_ids = torch.arange(90).expand(2, -1) // 50
    bias = LinearBias(alibi.slopes(4))
    out = alibi_attention(q, k, v, window=7, scale=0.3, segment_ids=segment_ids, tolerance=0.0)
    expected = attend(q, k, v, bias=bias, window=7, scale=0.3, segment_ids=segment_ids, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_dropout_keeps_the_mean():
    q = torch.randn(2, 4, 90, 8)
    k = torch.randn(2, 2, 90, 8)
    v = torch.ones_like(k)
    outputs = torch.stack([alibi_attention(q, k, v, dropout_p=0.5) for _ in range(50)])
    assert outputs.std() > 0.05
    assert abs(outputs.mean() - 1) < 0.02


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 64), torch.ones(3, 64, dtype=torch.long), torch.ones(3, 63, dtype=torch.bool)]
)
def test_invalid_padding_mask_is_rejected(mask):
    _, tensors, _ = make_padded_batch("left")
    with pytest.raises(InputError, match=r"key_padding_mask must be boolean.* \(batch, k_len\) = \(3, 64\)"):
        alibi_attention(*tensors, key_padding_mask=mask)
