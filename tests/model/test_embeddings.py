"""The adaptive softmax against torch's own and against plain probabilities; sliced losses against whole ones."""

import pytest
import torch
import torch.nn.functional as F

from trainshort.config.run_config import IGNORED, AdaptiveConfig, ModelConfig
from trainshort.model import embeddings
from trainshort.model.embeddings import AdaptiveVocabulary, Vocabulary, linear_nll


def adaptive(**settings):
    config = ModelConfig(vocab_size=100, width=16, heads=2, adaptive=AdaptiveConfig(cutoffs=(10, 40)), **settings)
    assert config.adaptive is not None
    return AdaptiveVocabulary(config, config.adaptive)


@pytest.fixture(params=[1 << 22, 300], ids=["one slice", "many slices"])
def _slices(request, monkeypatch):
    monkeypatch.setattr(embeddings, "SLICE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_slices")
def test_linear_nll_and_its_gradients_are_cross_entropys():
    hidden = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(31, (50,))
    targets[[3, 17]] = IGNORED
    ours = linear_nll(hidden, weight, targets)
    theirs = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-6, atol=0)
    for a, b in zip(
        torch.autograd.grad(3 * ours, (hidden, weight)), torch.autograd.grad(3 * theirs, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(linear_nll(hidden, weight, targets), theirs.float(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("_slices")
@pytest.mark.parametrize("kind", ["plain", "untied", "adaptive"])
def test_the_three_ways_to_score_agree(kind):
    if kind == "adaptive":
        words = adaptive()
    else:
        words = Vocabulary(ModelConfig(vocab_size=100, width=16, heads=2, tie_embeddings=kind == "plain"))
    hidden, targets = torch.randn(30, 16), torch.randint(100, (30,))
    targets[5] = IGNORED
    log_probabilities = words.log_scores(hidden).log_softmax(-1)
    expected = -log_probabilities.gather(1, targets.clamp(0)[:, None])[:, 0] * (targets != IGNORED)
    torch.testing.assert_close(words.token_nll(hidden, targets), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(words.total_nll(hidden, targets), expected.sum(), rtol=1e-6, atol=0)


def test_adaptive_probabilities_sum_to_one():
    total = adaptive().log_scores(torch.randn(7, 16)).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones(7), rtol=0, atol=1e-5)


def test_adaptive_is_torchs_adaptive_softmax_with_tied_weights():
    words = adaptive()
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 40], div_value=4)
    with torch.no_grad():
        theirs.head.weight.copy_(torch.cat([words.embeddings[0].weight, words.clusters.weight]))
        for i, (project, out) in enumerate(theirs.tail, 1):
            project.weight.copy_(words.projections[i].weight.T)
            out.weight.copy_(words.embeddings[i].weight)
    hidden = torch.randn(9, 16)
    torch.testing.assert_close(words.log_scores(hidden), theirs.log_prob(hidden), rtol=0, atol=1e-5)


def test_adaptive_embeddings_come_from_the_tokens_own_band():
    words = adaptive()
    tokens = torch.tensor([[0, 9, 10, 39, 40, 99]])
    out = words.embed(tokens)[0]
    for row, (token, band, start) in zip(
        out, [(0, 0, 0), (9, 0, 0), (10, 1, 10), (39, 1, 10), (40, 2, 40), (99, 2, 40)], strict=True
    ):
        expected = words.projections[band](words.embeddings[band].weight[token - start])
        torch.testing.assert_close(row, expected)
    assert [e.weight.shape[1] for e in words.embeddings] == [16, 4, 1]


def test_adaptive_trains_every_weight_of_every_band():
    words = adaptive()
    targets = torch.arange(100)
    words.total_nll(words.embed(targets[None])[0], targets).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in words.parameters())


def test_head_dropout_acts_in_training_only():
    words = adaptive(head_dropout=0.5)
    hidden, targets = torch.randn(30, 16), torch.randint(100, (30,))
    noisy = {round(words.total_nll(hidden, targets).item(), 3) for _ in range(4)}
    words.eval()
    still = {round(words.total_nll(hidden, targets).item(), 3) for _ in range(4)}
    assert len(noisy) == 4
    assert len(still) == 1


def test_the_padding_row_of_every_band_begins_at_zero():
    """As in the authors' fork, whose adaptive input takes id 1 for padding in each band."""
    zero = [band.weight.detach().abs().sum(1) == 0 for band in adaptive().embeddings]
    assert [row.nonzero().flatten().tolist() for row in zero] == [[1], [1], [1]]
    assert (adaptive().embed(torch.tensor([[1, 11, 41]])) == 0).all()
