"""What may be concluded: nothing of a model that was never trained, and of a trained one what it was trained to do."""

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
METHODS = [name for name in positions.names() if name != "learned"]  # its table ends at the training length
TEXT = np.frombuffer(prose(3000).encode(), dtype=np.uint8)[:3000]


def test_an_effect_must_matter_and_be_sure():
    assert is_significant_increase(MIN_EFFECT_NATS, (0.001, 0.02))
    assert not is_significant_increase(MIN_EFFECT_NATS / 2, (0.004, 0.006))  # sure, but nothing
    assert not is_significant_increase(0.0059, (-0.0073, 0.0191))
    assert not is_significant_increase(0.5, (-0.1, 1.1))
    assert not is_significant_increase(0.5, None)


def test_ranges_have_no_holes():
    """The table of a 3-layer model: 256 good, 512 not, 1,024 good."""
    found = [(1024, True), (256, True), (512, False)]
    assert longest_contiguous(found) == 256
    assert format_range("recall", found) == "recall up to 256 tokens (at 1,024 again, but not at 512)"
    assert format_range("recall", [(64, False), (128, True)]) == "recall at 128 tokens, but not at 64"
    assert format_range("recall", [(64, False)]) == "no recall at any distance tried"
    assert longest_contiguous([(64, False), (128, True)]) is None


def test_intervals_are_of_the_weighted_mean():
    values, counts = np.array([2.0, 2.0, 30.0]), np.array([1, 1, 10])
    low, high = bootstrap_interval(values, counts)
    assert 2 <= low < 34 / 12 < high <= 3
    assert bootstrap_interval(values[:1]) is None


def far_rows(*found: tuple[int, str]) -> list[dict]:
    """Far-context rows of two distances in which these probes notice something."""
    return [
        {"near": near, "way": way, "rise": 0.02 if felt else 1e-4, "interval": (0.01 if felt else -1e-4, 0.03)}
        for near in (8, 16)
        for way in far_context.CORRUPTIONS
        for felt in [(near, way) in found]
    ]


def test_probes_agree_or_the_sentence_says_that_they_do_not():
    all_near = [(8, way) for way in far_context.CORRUPTIONS]
    assert far_context.summary(far_rows((16, "replace")), 512) == (
        "at 512 tokens no use of far context shows, and the probes do not agree: "
        "farther away than 16 only replace notices"
    )
    assert far_context.summary(far_rows(*all_near, (16, "replace"), (16, "cut")), 512) == (
        "at 512 tokens the model uses context farther away than 8 tokens, and the probes do not agree: "
        "farther away than 16 only replace and cut notice"
    )
    assert far_context.summary(far_rows(*all_near), 512).endswith("uses context farther away than 8 tokens")


def early_row(length: int, gain: float, context: float) -> dict:
    """A row of the early-token analysis whose two gains are sure to within a thousandth."""
    parts = {"gain": gain, "context": context, "early": gain - context}
    intervals = {f"{name}_interval": (part - 0.001, part + 0.001) for name, part in parts.items()}
    felt = {"rise": 0.1, "interval": (0.05, 0.15)}
    return {"length": length, **intervals, "gain": gain, "from_context": context, "from_early": gain - context} | {
        "replaced": felt
    }


def test_what_longer_context_costs_is_not_told_as_nothing():
    first = early_row(64, 0.0, 0.0)
    assert early_tokens.summary([first, early_row(512, 0.015, -0.0114)]) == (
        "of the gain of 0.0150 nats from 64 to 512 tokens, +0.0264 comes from fewer early tokens and "
        "-0.0114 comes from longer context"
    )
    assert early_tokens.summary([first, early_row(512, -0.3, -0.31)]) == (
        "reading at 512 tokens is 0.3000 nats worse than at 64"
    )
    assert early_tokens.summary([first, early_row(512, -0.003, 0.0)]) == (
        "reading at 512 tokens gains nothing over 64 that can be told from none"
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("position", METHODS)
def test_a_model_that_was_never_trained_is_told_to_use_nothing(position: str, seed: int):
    torch.manual_seed(seed)
    model = TransformerLM(ModelConfig(vocab_size=256, layers=2, width=32, heads=4, position=position))
    lab = AnalysisContext(ModelTarget(model, trained_at=LENGTH), TEXT, LENGTH, lengths=(64, 256), samples=16, seed=seed)
    assert recall.run(lab)["summary"] == "no copy at any distance tried; no recall at any distance tried"
    assert "no use of far context shows" in far_context.run(lab)["summary"]
    assert early_tokens.run(lab)["summary"].startswith("no use of context shows")
    told = reach.run(lab)["summary"]
    assert "no use of what lies there shows" in told or f"0 of 8 heads look beyond the {LENGTH}" in told
    if position == "alibi":
        assert slopes.run(lab)["summary"] == "no slopes use context beyond 64 tokens"
    assert set(analyses.names()) == {"recall", "far-context", "early-tokens", "reach", "slopes", "cost"}, "judge it too"


@pytest.fixture(scope="module")
def echoing() -> TransformerLM:
    """One layer that has learned to say what stood 8 tokens ago: text of random patterns of 8, repeated."""
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(vocab_size=16, layers=1, width=64, heads=2, position="t5"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        rows = torch.randint(16, (16, 8)).repeat(1, 9)[:, : LENGTH + 1]
        total, count = model(rows[:, :-1], rows[:, 1:])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (total / count).item() < 0.3 * math.log(16)  # the first eighth of a row cannot be known
    return model.eval()


def test_what_a_trained_model_does_use_is_still_told(echoing: TransformerLM):
    """The text: each pattern of 8 stands for 512 tokens. What lies farther than 8 tokens away says nothing new."""
    patterns = np.random.default_rng(0).integers(16, size=(24, 8)).repeat(64, axis=0).astype(np.uint8).ravel()
    lab = AnalysisContext(
        ModelTarget(echoing, trained_at=LENGTH), patterns, trained_at=LENGTH // 2, lengths=(64,), samples=64
    )
    result = far_context.run(lab)
    assert result["summary"].startswith("at 64 tokens the model uses context farther away than 4 tokens")
    curse = early_tokens.run(AnalysisContext(lab.target, patterns, trained_at=LENGTH, lengths=(16, 64), samples=64))
    assert "comes from fewer early tokens" in curse["summary"]
    assert re.search(r"and -0\.0\d+ comes from longer context$", curse["summary"]), "which the model was not trained on"
