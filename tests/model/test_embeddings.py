"""Tests of the output layers: losses in slices, and the adaptive softmax compared with PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from trainshort.config.run_config import IGNORED, AdaptiveConfig, ModelConfig
from trainshort.model import embeddings
from trainshort.model.embeddings import AdaptiveVocabulary, Vocabulary, linear_nll


def make_adaptive_vocabulary(**settings) -> AdaptiveVocabulary:
    """Create an adaptive vocabulary of 100 tokens with the bands 0 to 9, 10 to 39 and 40 to 99."""
    config = ModelConfig(vocab_size=100, width=16, heads=2, adaptive=AdaptiveConfig(cutoffs=(10, 40)), **settings)
    assert config.adaptive is not None
    return AdaptiveVocabulary(config, config.adaptive)


@pytest.fixture(params=[1 << 22, 300], ids=["one slice", "many slices"])
def _slices(request, monkeypatch):
    """Compute the logits in one slice or in many slices."""
    monkeypatch.setattr(embeddings, "SLICE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_slices")
def test_linear_nll_equals_cross_entropy_with_gradients():
    hidden = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(31, (50,))
    targets[[3, 17]] = IGNORED

    loss = linear_nll(hidden, weight, targets)
    expected_loss = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, expected_loss.float(), rtol=1e-6, atol=0)

    # The factor 3 tests that `backward` uses the gradient of the loss.
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    expected_grads = torch.autograd.grad(3 * expected_loss, (hidden, weight))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-6)

    with torch.no_grad():
        torch.testing.assert_close(linear_nll(hidden, weight, targets), expected_loss.float(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("kind", ["tied", "untied", "adaptive"])
def test_losses_agree_with_log_scores(kind):
    if kind == "adaptive":
        vocabulary = make_adaptive_vocabulary()
    else:
        vocabulary = Vocabulary(ModelConfig(vocab_size=100, width=16, heads=2, tie_embeddings=kind == "tied"))
    hidden = torch.randn(30, 16)
    targets = torch.randint(100, (30,))
    targets[5] = IGNORED

    log_probs = vocabulary.log_scores(hidden).log_softmax(-1)
    target_log_probs = log_probs.gather(1, targets.clamp(0)[:, None])[:, 0]
    expected_nll = -target_log_probs * (targets != IGNORED)
    torch.testing.assert_close(vocabulary.token_nll(hidden, targets), expected_nll, rtol=0, atol=2e-6)
    torch.testing.assert_close(vocabulary.total_nll(hidden, targets), expected_nll.sum(), rtol=1e-6, atol=0)


def test_adaptive_probabilities_sum_to_one():
    total = make_adaptive_vocabulary().log_scores(torch.randn(7, 16)).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones(7), rtol=0, atol=1e-5)


def test_adaptive_softmax_equals_pytorch_with_tied_weights():
    vocabulary = make_adaptive_vocabulary()
    reference = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 40], div_value=4)
    with torch.no_grad():
        reference.head.weight.copy_(torch.cat([vocabulary.embeddings[0].weight, vocabulary.clusters.weight]))
        for band, (projection, output) in enumerate(reference.tail, start=1):
            projection.weight.copy_(vocabulary.projections[band].weight.T)
            output.weight.copy_(vocabulary.embeddings[band].weight)
    hidden = torch.randn(9, 16)
    torch.testing.assert_close(vocabulary.log_scores(hidden), reference.log_prob(hidden), rtol=0, atol=1e-5)


def test_adaptive_embedding_uses_matrices_of_the_token_band():
    vocabulary = make_adaptive_vocabulary()
    tokens = torch.tensor([[0, 9, 10, 39, 40, 99]])
    # The band of each token, and the first token id of the band.
    bands_and_starts = [(0, 0), (0, 0), (1, 10), (1, 10), (2, 40), (2, 40)]
    vectors = vocabulary.embed(tokens)[0]
    for vector, token, (band, band_start) in zip(vectors, tokens[0].tolist(), bands_and_starts, strict=True):
        narrow_vector = vocabulary.embeddings[band].weight[token - band_start]
        torch.testing.assert_close(vector, vocabulary.projections[band](narrow_vector))
    assert [embedding.weight.shape[1] for embedding in vocabulary.embeddings] == [16, 4, 1]


def test_adaptive_loss_trains_every_parameter():
    vocabulary = make_adaptive_vocabulary()
    all_tokens = torch.arange(100)
    vocabulary.total_nll(vocabulary.embed(all_tokens[None])[0], all_tokens).backward()
    for parameter in vocabulary.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_head_dropout_is_used_in_training_only():
    vocabulary = make_adaptive_vocabulary(head_dropout=0.5)
    hidden = torch.randn(30, 16)
    targets = torch.randint(100, (30,))
    training_losses = {round(vocabulary.total_nll(hidden, targets).item(), 3) for _ in range(4)}
    vocabulary.eval()
    evaluation_losses = {round(vocabulary.total_nll(hidden, targets).item(), 3) for _ in range(4)}
    assert len(training_losses) == 4
    assert len(evaluation_losses) == 1


def test_padding_row_of_every_band_is_initialized_with_zeros():
    """fairseq's adaptive input uses row 1 of every band as the padding row."""
    vocabulary = make_adaptive_vocabulary()
    for embedding in vocabulary.embeddings:
        is_zero_row = embedding.weight.detach().abs().sum(1) == 0
        assert is_zero_row.nonzero().flatten().tolist() == [1]
    padding_tokens = torch.tensor([[1, 11, 41]])
    assert (vocabulary.embed(padding_tokens) == 0).all()
