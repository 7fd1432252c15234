"""`alibi_attention` takes what users of torch's attention pass: padding, documents, windows, scale, dropout, groups."""

import pytest
import torch

from trainshort import alibi, alibi_attention
from trainshort.attention import LinearBias, attend
from trainshort.errors import InputError

LENGTHS = (5, 40, 64)


def batch(side):
    """Three texts in one tensor, padded in front or behind with numbers that must not matter; their mask."""
    texts = [[torch.randn(1, 2, n, 8) for _ in range(3)] for n in LENGTHS]
    tensors, mask = [], torch.ones(3, 64, dtype=torch.bool)
    for which in range(3):
        joined = torch.full((3, 2, 64, 8), 1e3)
        for i, text in enumerate(texts):
            place = slice(64 - LENGTHS[i], 64) if side == "left" else slice(0, LENGTHS[i])
            joined[i, :, place], mask[i, place] = text[which][0], False
        tensors.append(joined)
    return texts, tensors, mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_text_equals_itself_alone(side):
    texts, tensors, mask = batch(side)
    leaves = [x.requires_grad_() for x in tensors]
    out = alibi_attention(*leaves, key_padding_mask=mask)
    assert out.isfinite().all()
    for i, text in enumerate(texts):
        torch.testing.assert_close(out[i : i + 1, :, ~mask[i]], alibi_attention(*text), rtol=0, atol=2e-6)
    grads = torch.autograd.grad(out[~mask[:, None].expand(-1, 2, -1)].sum(), leaves)
    for grad in grads:
        assert grad.isfinite().all()
        assert (grad[mask[:, None].expand(-1, 2, -1)] == 0).all()


def test_the_last_tokens_of_padded_texts():
    """Decoding a batch, padded in front: one query each."""
    texts, (q, k, v), mask = batch("left")
    out = alibi_attention(q[:, :, -1:], k, v, key_padding_mask=mask)
    for i, text in enumerate(texts):
        torch.testing.assert_close(out[i], alibi_attention(*text)[0, :, -1:], rtol=0, atol=2e-6)


def test_padding_and_documents_together():
    _, (q, k, v), mask = batch("right")
    segment_ids = torch.arange(64).expand(3, -1) // 20 - 1
    out = alibi_attention(q, k, v, key_padding_mask=mask, segment_ids=segment_ids)
    with_padding_apart = torch.where(mask, 99, segment_ids)
    expected = attend(q, k, v, bias=LinearBias(alibi.slopes(2)), segment_ids=with_padding_apart, backend="reference")
    torch.testing.assert_close(out[1, :, :40], expected[1, :, :40], rtol=0, atol=2e-6)


def test_what_else_users_pass():
    q, (k, v) = torch.randn(2, 4, 90, 8), (torch.randn(2, 2, 90, 8) for _ in range(2))
    segment_ids, bias = torch.arange(90).expand(2, -1) // 50, LinearBias(alibi.slopes(4))
    out = alibi_attention(q, k, v, window=7, scale=0.3, segment_ids=segment_ids, tolerance=0.0)
    expected = attend(q, k, v, bias=bias, window=7, scale=0.3, segment_ids=segment_ids, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    ones = torch.ones_like(v)
    dropped = torch.stack([alibi_attention(q, k, ones, dropout_p=0.5) for _ in range(50)])
    assert dropped.std() > 0.05
    assert abs(dropped.mean() - 1) < 0.02


@pytest.mark.parametrize(
    "mask", [torch.ones(3, 64), torch.ones(3, 64, dtype=torch.long), torch.ones(3, 63, dtype=torch.bool)]
)
def test_a_mask_of_the_other_kind_is_told(mask):
    _, tensors, _ = batch("left")
    with pytest.raises(
        InputError, match=r"True where a key is padding, of shape \(batch, k_len\) = \(3, 64\); got .*== 0"
    ):
        alibi_attention(*tensors, key_padding_mask=mask)
