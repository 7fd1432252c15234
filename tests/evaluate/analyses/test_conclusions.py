"""Tests of the conclusions that analyses draw from untrained models and from a trained model."""

import math
import re

import numpy as np
import pytest
import torch
from helpers import prose

from trainshort.config.run_config import ModelConfig
from trainshort.evaluate.analyses import AnalysisContext, analyses, early_tokens, far_context, reach, recall, slopes
from trainshort.evaluate.results import bootstrap_interval
from trainshort.evaluate.significance import MIN_EFFECT_NATS, format_range, is_significant_increase, longest_contiguous
from trainshort.evaluate.targets import ModelTarget
from trainshort.model.positions import positions
from trainshort.model.transformer import TransformerLM

LENGTH = 64

# Learned positions do not support inputs beyond the training length.
METHODS = [name for name in positions.names() if name != "learned"]

TEXT = np.frombuffer(prose(3000).encode(), dtype=np.uint8)[:3000]


# ---- significance


def test_significant_effect_is_large_and_its_interval_excludes_zero():
    assert is_significant_increase(MIN_EFFECT_NATS, (0.001, 0.02))
    assert not is_significant_increase(MIN_EFFECT_NATS / 2, (0.004, 0.006)), "too small"
    assert not is_significant_increase(0.0059, (-0.0073, 0.0191))
    assert not is_significant_increase(0.5, (-0.1, 1.1)), "the interval contains zero"
    assert not is_significant_increase(0.5, None), "no interval"


def test_range_ends_at_the_first_negative_result():
    results = [(1024, True), (256, True), (512, False)]
    assert longest_contiguous(results) == 256
    assert longest_contiguous([(64, False), (128, True)]) is None


def test_verdict_of_a_range():
    contradiction = format_range("recall", [(1024, True), (256, True), (512, False)])
    assert contradiction.startswith("recall: supported up to 256 tokens, inconclusive")
    assert "512" in contradiction
    assert "1,024" in contradiction
    assert format_range("recall", [(64, False), (128, True)]).startswith("recall: inconclusive")
    assert format_range("recall", [(64, False)]).startswith("recall: not supported")
    assert format_range("recall", [(64, True), (128, False)]) == (
        "recall: supported up to 64 tokens, not supported at 128"
    )
    assert format_range("recall", [(64, True), (128, True)]).startswith("recall: supported up to 128 tokens")


def test_interval_of_weighted_mean():
    sums = np.array([2.0, 2.0, 30.0])
    counts = np.array([1, 1, 10])
    low, high = bootstrap_interval(sums, counts) or (0, 0)
    assert 2 <= low < 34 / 12 < high <= 3
    assert bootstrap_interval(sums[:1]) is None


# ---- conclusions from given measurements


def make_far_context_rows(*significant: tuple[int, str]) -> list[dict]:
    """Return measurements of `far-context` at the distances 8 and 16.

    Args:
        significant: The pairs of a distance and a corruption that significantly raise the loss.
    """
    rows = []
    for distance in (8, 16):
        for corruption in far_context.CORRUPTIONS:
            if (distance, corruption) in significant:
                measurement = {"rise": 0.02, "interval": (0.01, 0.03)}
            else:
                measurement = {"rise": 1e-4, "interval": (-1e-4, 0.03)}
            rows.append({"near": distance, "way": corruption, **measurement})
    return rows


def test_corruptions_that_disagree_are_inconclusive():
    summary = far_context.summary(make_far_context_rows((16, "replace")), 512)
    assert summary.startswith("At 512 tokens, inconclusive")
    assert "farther away than 16 tokens (only replace raises" in summary
    assert "supported" not in summary


def test_corruptions_that_agree_at_short_distances_only():
    all_at_8 = [(8, corruption) for corruption in far_context.CORRUPTIONS]
    summary = far_context.summary(make_far_context_rows(*all_at_8), 512)
    assert "supported: use of context farther away than 8 tokens" in summary
    assert "at least +0.0200 nats, 95 % interval +0.0100 to +0.0300" in summary
    assert "inconclusive" not in summary

    summary = far_context.summary(make_far_context_rows(*all_at_8, (16, "replace"), (16, "cut")), 512)
    assert "supported: use of context farther away than 8 tokens" in summary
    assert "inconclusive: use of context farther away than 16 tokens (only replace and cut raise" in summary


def test_far_context_without_significant_effect_is_not_supported():
    assert far_context.summary(make_far_context_rows(), 512).startswith("At 512 tokens, not supported")


def make_early_tokens_row(length: int, gain: float, from_context: float) -> dict:
    """Return a measurement of `early-tokens` whose intervals have a width of 0.002 nats."""
    from_early = gain - from_context
    return {
        "length": length,
        "gain": gain,
        "gain_interval": (gain - 0.001, gain + 0.001),
        "from_context": from_context,
        "context_interval": (from_context - 0.001, from_context + 0.001),
        "from_early": from_early,
        "early_interval": (from_early - 0.001, from_early + 0.001),
        "replaced": {"rise": 0.1, "interval": (0.05, 0.15)},
    }


def test_negative_effect_of_longer_context_is_reported():
    rows = [make_early_tokens_row(64, 0.0, 0.0), make_early_tokens_row(512, 0.015, -0.0114)]
    summary = early_tokens.summary(rows)
    assert summary.startswith("Supported: lower loss at 512 tokens than at 64 tokens (gain +0.0150 nats")
    assert re.search(r"from fewer early tokens: \+0\.0264 nats, [^;]*, supported", summary)
    assert re.search(r"from longer context: -0\.0114 nats, [^;]*, supported, raises the loss", summary)


@pytest.mark.parametrize("gain", [-0.3, -0.003, 0.003])
def test_gain_that_is_not_significant_is_not_supported(gain: float):
    rows = [make_early_tokens_row(64, 0.0, 0.0), make_early_tokens_row(512, gain, 0.0)]
    summary = early_tokens.summary(rows)
    assert summary.startswith(f"Not supported: lower loss at 512 tokens than at 64 tokens (gain {gain:+.4f} nats")


# ---- conclusions from models


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("position", METHODS)
def test_untrained_model_uses_no_context(position: str, seed: int):
    assert set(analyses.names()) == {"recall", "far-context", "early-tokens", "reach", "slopes", "cost"}, (
        "this test must check a new analysis, too"
    )
    torch.manual_seed(seed)
    model = TransformerLM(ModelConfig(vocab_size=256, layers=2, width=32, heads=4, position=position))
    target = ModelTarget(model, trained_at=LENGTH)
    context = AnalysisContext(target, TEXT, LENGTH, lengths=(64, 256), samples=16, seed=seed)
    assert recall.run(context)["summary"] == (
        "copy: not supported at any tested distance; recall: not supported at any tested distance"
    )
    # One corruption can raise the loss of an untrained model by chance. The verdict is then "inconclusive".
    assert not far_context.run(context)["summary"].startswith("At 256 tokens, supported")
    assert early_tokens.run(context)["summary"].startswith("Not supported: use of context")
    reach_summary = reach.run(context)["summary"]
    assert "not supported: use of that context" in reach_summary or "0 of 8 heads look beyond" in reach_summary
    if position == "alibi":
        assert slopes.run(context)["summary"].startswith("Not supported: use of context beyond 64 tokens")


@pytest.fixture(scope="module")
def repeating_model() -> TransformerLM:
    """A model with one layer that was trained to repeat the token 8 tokens ago, on repeated patterns of 8 tokens."""
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(vocab_size=16, layers=1, width=64, heads=2, position="t5"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mean_loss = torch.tensor(math.inf)
    for _ in range(200):
        patterns = torch.randint(16, (16, 8))
        tokens = patterns.repeat(1, 9)[:, : LENGTH + 1]
        total, count = model(tokens[:, :-1], tokens[:, 1:])
        mean_loss = total / count
        mean_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # The first 8 tokens of each sequence cannot be predicted.
    assert mean_loss.item() < 0.3 * math.log(16)
    return model.eval()


def test_trained_model_uses_context(repeating_model: TransformerLM):
    """Each pattern of 8 tokens is repeated 64 times. Only the last 8 tokens of the context are useful."""
    patterns = np.random.default_rng(0).integers(16, size=(24, 8))
    tokens = patterns.repeat(64, axis=0).astype(np.uint8).ravel()
    target = ModelTarget(repeating_model, trained_at=LENGTH)
    context = AnalysisContext(target, tokens, trained_at=LENGTH // 2, lengths=(64,), samples=64)
    summary = far_context.run(context)["summary"]
    assert summary.startswith("At 64 tokens, supported: use of context farther away than 4 tokens")

    context = AnalysisContext(target, tokens, trained_at=LENGTH, lengths=(16, 64), samples=64)
    summary = early_tokens.run(context)["summary"]
    assert re.search(r"from fewer early tokens: \+[^;]*, supported", summary)
    # A context of 64 tokens contains two patterns at some positions, which the training data did not contain.
    assert re.search(r"from longer context: -0\.0\d+ nats", summary)
