"""Tests of the analyses with models whose losses are known in advance."""

import math

import numpy as np
import pytest
import torch
from helpers import random_tokens, tiny_target

from trainshort.data.passes import Passes
from trainshort.errors import InputError
from trainshort.evaluate.analyses import early_tokens, far_context, recall
from trainshort.evaluate.analyses import slopes as slopes_analysis
from trainshort.evaluate.analyses.base import SCORED_TOKENS, AnalysisContext, analyses, compare
from trainshort.evaluate.overrides import Override, apply_override, compute_override_slopes
from trainshort.evaluate.results import summarize
from trainshort.evaluate.sweep import score
from trainshort.evaluate.targets import Target

# The losses of `RepeatingTarget`.
UNKNOWN_LOSS = math.log(32)  # All 32 token types are equally likely.
RIGHT_LOSS = 0.01
WRONG_LOSS = 8.0


class RepeatingTarget(Target):
    """A model that predicts the token that appeared `distance` tokens before the target.

    Args:
        distance: The distance from the target to the token that is predicted.
        max_distance: The largest distance that the model can see. If `distance` is larger, or if the input is too
            short, all tokens are equally likely.
    """

    name = "repeater"
    kind = "test"
    trained_at = 64
    vocab_size = 32
    bos = 0

    def __init__(self, distance: int, max_distance: int) -> None:
        self.distance = distance
        self.max_distance = max_distance
        self.module = torch.nn.Linear(1, 1)

    def token_nll(self, tokens, targets, first):
        length = targets.shape[1]
        losses = torch.full(targets.shape, UNKNOWN_LOSS)
        if self.distance <= min(self.max_distance, length):
            # The input at position i is the target at position i - 1. The token `distance` before target i is therefore
            # the input at position i - distance + 1.
            predictions = tokens[:, : length - self.distance + 1]
            is_right = predictions == targets[:, self.distance - 1 :]
            losses[:, self.distance - 1 :] = torch.where(is_right, RIGHT_LOSS, WRONG_LOSS)
        return losses[:, first:]

    def tokenizer(self):
        raise NotImplementedError

    def extra_description(self):
        return {}


def periodic_tokens(period: int, count: int) -> np.ndarray:
    """Return a text that repeats the same random tokens."""
    return np.resize(random_tokens(period), count)


def make_context(target: Target, tokens: np.ndarray, **settings) -> AnalysisContext:
    """Return a context with 16 samples and the training length 64."""
    return AnalysisContext(target, tokens, trained_at=64, **{"samples": 16, **settings})


# ---- samples and losses


def test_samples_have_the_same_targets_at_all_lengths():
    context = make_context(tiny_target(), np.arange(3000) % 32)
    ends = context.sample_ends(512)
    short_windows = context.sample_windows(ends, 64)
    long_windows = context.sample_windows(ends, 512)
    assert short_windows.shape == (16, 65)
    assert (short_windows == long_windows[:, -65:]).all()
    assert ends[0] >= 513
    assert ends[-1] == 3000


def test_scored_losses_equal_losses_of_the_model():
    target = tiny_target()
    windows = random_tokens(5 * 41).reshape(5, 41)
    losses = make_context(target, windows.ravel(), batch_tokens=100).score(windows, 7)
    tokens = torch.from_numpy(windows.astype(np.int64))
    expected = target.model.token_nll(tokens[:, :-1], tokens[:, 1:])[:, -7:]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)


def test_losses_are_compared_sample_by_sample():
    losses = np.random.default_rng(0).normal(3, 1, (50, 4))
    comparison = compare(losses, losses + 0.25)
    assert comparison["rise"] == pytest.approx(0.25)
    assert comparison["interval"] == pytest.approx((0.25, 0.25))
    assert compare(losses[:1], losses[:1])["interval"] is None, "one sample has no interval"


def test_chosen_lengths_must_fit_the_text_and_the_model():
    context = make_context(tiny_target(), random_tokens(300))
    assert context.choose_lengths(1, 2, 4) == [64, 128]
    with pytest.raises(InputError, match="length 256 requires a text of at least 512 tokens"):
        make_context(tiny_target(), random_tokens(300), lengths=(64, 256)).choose_lengths(1)
    with pytest.raises(InputError, match=r"at most 16 tokens.* length 64"):
        make_context(tiny_target("learned"), random_tokens(300)).choose_lengths(1, 2)


# ---- far-context


def test_use_of_far_context_is_found():
    """The model looks 200 tokens back, so it needs all context up to a distance of 200."""
    result = far_context.run(make_context(RepeatingTarget(200, max_distance=1000), periodic_tokens(200, 8000)))
    assert result["length"] == 512
    for row in result["rows"]:
        if row["near"] < 200 - SCORED_TOKENS:
            assert row["rise"] > 0.5
        if row["near"] >= 200:
            assert row["rise"] == 0
    assert "supported: use of context farther away than 128 tokens" in result["summary"]
    assert "not supported" not in result["summary"]


def test_use_of_near_context_only_is_found():
    """The model looks 40 tokens back, so it needs no context beyond a distance of 40."""
    result = far_context.run(make_context(RepeatingTarget(40, max_distance=1000), periodic_tokens(40, 8000)))
    for row in result["rows"]:
        if row["near"] < 40 - SCORED_TOKENS:
            assert row["rise"] > 0.5
        if row["near"] >= 40:
            assert row["rise"] == 0
    assert "supported: use of context farther away than 32 tokens" in result["summary"]
    assert "not supported" not in result["summary"]


def test_model_without_far_context_is_found():
    """The model would look 200 tokens back, but can only see 100 tokens. Its losses do not depend on the context."""
    result = far_context.run(make_context(RepeatingTarget(200, max_distance=100), periodic_tokens(200, 8000)))
    assert all(row["rise"] == 0 for row in result["rows"])
    assert "not supported" in result["summary"]


def test_corruption_changes_far_context_only():
    context = make_context(tiny_target(), random_tokens(8000))
    windows = context.sample_windows(context.sample_ends(512), 512)
    num_far_tokens = 513 - SCORED_TOKENS - 64
    corrupted = {
        corruption: far_context.corrupt_far_context(windows, 64, corruption, context)
        for corruption in far_context.CORRUPTIONS
    }
    for corruption in ("shuffle", "replace"):
        assert (corrupted[corruption][:, num_far_tokens:] == windows[:, num_far_tokens:]).all()
        assert (corrupted[corruption][:, :num_far_tokens] != windows[:, :num_far_tokens]).mean() > 0.5
    assert (np.sort(corrupted["shuffle"], axis=1) == np.sort(windows, axis=1)).all()
    assert (corrupted["cut"] == windows[:, num_far_tokens:]).all()


def test_tested_distances_are_doubled():
    assert far_context.near_distances(128, 1024) == [16, 32, 64, 128, 256, 512]
    assert far_context.near_distances(16, 40) == [2, 4, 8]
    assert far_context.near_distances(16, 32) == []


@pytest.mark.parametrize("length", range(34, 80))
def test_corruption_keeps_near_context_at_every_length(length: int):
    context = AnalysisContext(tiny_target(), random_tokens(400), trained_at=16, samples=4, lengths=(length,))
    windows = context.sample_windows(context.sample_ends(length), length)
    _, distances = far_context.choose_length_and_distances(context)
    for distance in distances:
        num_kept_tokens = SCORED_TOKENS + distance
        for corruption in far_context.CORRUPTIONS:
            corrupted = far_context.corrupt_far_context(windows, distance, corruption, context)
            assert num_kept_tokens <= corrupted.shape[1] <= length + 1
            assert (corrupted[:, -num_kept_tokens:] == windows[:, -num_kept_tokens:]).all()


# ---- recall


def test_recall_is_found_at_the_distance_of_the_model_only():
    context = make_context(RepeatingTarget(128, max_distance=1000), random_tokens(8000), lengths=(64, 128, 256))
    result = recall.run(context)
    gains = {(row["kind"], row["distance"]): row["gain"] for row in result["rows"]}
    for task in ("copy", "recall"):
        assert gains[task, 128] > 5
        assert gains[task, 64] == gains[task, 256] == 0
    assert result["summary"].count("inconclusive") == 2, "the model fails at the shorter distance 64"


def test_recall_up_to_a_distance_is_found():
    context = make_context(RepeatingTarget(64, max_distance=1000), random_tokens(8000), lengths=(64, 128, 256))
    summary = recall.run(context)["summary"]
    assert "copy: supported up to 64 tokens, not supported at 128" in summary
    assert "recall: supported up to 64 tokens, not supported at 128" in summary


def test_missing_recall_is_found():
    context = make_context(RepeatingTarget(128, max_distance=100), random_tokens(8000), lengths=(64, 128))
    summary = recall.run(context)["summary"]
    assert "copy: not supported" in summary
    assert "recall: not supported" in summary


def test_recall_samples_and_controls_differ_in_the_first_sequence_only():
    context = make_context(tiny_target(), random_tokens(8000))
    sequence_length = recall.CUE + recall.VALUE
    lead = 32  # half of the training length
    first_sequence = slice(lead, lead + sequence_length)
    for task in recall.RECALL_TASKS:
        windows, controls = recall.make_samples(context, task, 100)
        assert windows.shape == (16, lead + 100 + sequence_length)
        assert (windows[:, first_sequence] == windows[:, -sequence_length:]).all()
        assert (windows[:, lead + sequence_length :] == controls[:, lead + sequence_length :]).all()
        num_equal_tokens = lead + (recall.CUE if task == "recall" else 0)
        assert (windows[:, :num_equal_tokens] == controls[:, :num_equal_tokens]).all()
        assert (windows[:, first_sequence] != controls[:, first_sequence]).any(axis=1).all()


# ---- early-tokens


def test_early_token_losses_are_exact_if_all_targets_are_sampled():
    target = tiny_target()
    tokens = random_tokens(300)
    result = early_tokens.run(make_context(target, tokens, lengths=(16, 32), samples=300))
    assert result["samples"] == 300
    for row in result["rows"]:
        expected_losses = []
        for stride in (row["length"], 1):
            passes = Passes(300, row["length"], stride)
            losses = np.concatenate(list(score(target, tokens, passes)))
            expected_losses.append(summarize(passes, losses).loss)
        assert row["non_overlapping"] == pytest.approx(expected_losses[0], abs=1e-5)
        assert row["stride_1"] == pytest.approx(expected_losses[1], abs=1e-5)
        assert row["from_context"] + row["from_early"] == pytest.approx(row["gain"], abs=1e-12)


def test_gain_from_fewer_early_tokens_is_found():
    """The model looks 40 tokens back. Longer windows have fewer tokens with less than 40 tokens of context."""
    context = make_context(RepeatingTarget(40, max_distance=1000), periodic_tokens(40, 8192), lengths=(64, 256))
    result = early_tokens.run(context)
    longest = result["rows"][-1]
    assert longest["gain"] > 0.5
    assert longest["from_context"] == pytest.approx(0, abs=0.06), "only the start of the text differs"
    assert longest["from_early"] == pytest.approx(longest["gain"] - longest["from_context"])
    assert result["summary"].startswith("Supported")
    assert f"from fewer early tokens: {longest['from_early']:+.4f} nats" in result["summary"]


def test_gain_from_longer_context_is_found():
    """The model looks 200 tokens back, which is only possible at the longer length."""
    context = make_context(RepeatingTarget(200, max_distance=1000), periodic_tokens(200, 8192), lengths=(64, 256))
    result = early_tokens.run(context)
    longest = result["rows"][-1]
    assert longest["from_context"] > 2.5
    assert longest["context_interval"][0] > 2
    assert f"from longer context: {longest['from_context']:+.4f} nats" in result["summary"]
    assert f"from fewer early tokens: {longest['from_early']:+.4f} nats" in result["summary"]


# ---- slopes


def test_slopes_are_compared_on_the_same_targets():
    context = make_context(tiny_target(trained_at=64), random_tokens(4000), lengths=(64, 128), samples=4)
    result = slopes_analysis.run(context)
    losses = {(row["slopes"], row["context"]): row["loss"] for row in result["rows"]}
    variants = ("trained", "interpolate", "max_bias=16", "window=64")
    assert set(losses) == {(variant, length) for variant in variants for length in (64, 128)}
    assert losses["interpolate", 64] == losses["trained", 64], "64 is the training length"
    assert losses["window=64", 64] == pytest.approx(losses["trained", 64], abs=1e-4)
    assert losses["interpolate", 128] != pytest.approx(losses["trained", 128], abs=1e-4)
    assert losses["max_bias=16", 64] != pytest.approx(losses["trained", 64], abs=1e-4)


def test_short_context_limits_the_number_of_scored_tokens():
    """A context of 16 tokens has only 16 targets. Therefore 16 targets are scored at longer contexts, too."""
    context = AnalysisContext(tiny_target(), random_tokens(2000), trained_at=16, lengths=(16, 64), samples=4)
    result = slopes_analysis.run(context)
    losses = {(row["slopes"], row["context"]): row["loss"] for row in result["rows"]}
    windows = context.sample_windows(context.sample_ends(64), 64)
    assert result["scored"] == 4 * 16
    assert losses["trained", 64] == pytest.approx(context.score(windows, 16).mean())


def test_override_of_slopes_ends_with_its_context():
    model = tiny_target().model
    original_slopes = model.position.slopes.clone()
    tokens = torch.arange(40)[None] % 32
    original_hidden = model.hidden(tokens)
    with apply_override(model, Override.parse("slopes", "interpolate"), trained_at=16, length=64):
        torch.testing.assert_close(model.position.linear_slopes(), original_slopes / 4)
        assert not torch.equal(model.hidden(tokens), original_hidden)
    with apply_override(model, Override.parse("slopes", "window=3"), trained_at=16, length=64):
        assert all(layer.attention.window == 3 for layer in model.layers)
    assert torch.equal(model.position.slopes, original_slopes)
    assert torch.equal(model.hidden(tokens), original_hidden)


def test_override_slopes_equal_formula():
    trained_slopes = torch.tensor([0.25, 0.0625])
    interpolate = Override.parse("slopes", "interpolate")
    max_bias = Override.parse("slopes", "max_bias=16")
    assert torch.equal(compute_override_slopes(trained_slopes, interpolate, 128, 64), trained_slopes)
    assert torch.equal(compute_override_slopes(trained_slopes, interpolate, 128, 512), trained_slopes / 4)
    assert compute_override_slopes(trained_slopes, max_bias, 128, 512).tolist() == [2**-8, 2**-16]


@pytest.mark.parametrize("text", ["interpolate", "max_bias=16", "window=512"])
def test_override_is_printed_as_it_was_given(text: str):
    assert str(Override.parse("slopes", text)) == text


@pytest.mark.parametrize("text", ["", "window", "window=1.5", "max_bias=0", "interpolate=2", "window=x"])
def test_invalid_slopes_are_rejected(text: str):
    with pytest.raises(InputError, match=f"--slopes.* got '{text}'"):
        Override.parse("slopes", text)


# ---- analyses that do not fit


def test_analysis_that_does_not_fit_is_rejected_before_it_starts():
    target = tiny_target("rotary")
    with pytest.raises(InputError, match=r"'slopes'.* ALiBi.* position='rotary'"):
        analyses.get("slopes").check(make_context(target, random_tokens(2000)))
    with pytest.raises(InputError, match="'recall' requires a distance of at least 32 tokens"):
        analyses.get("recall").check(AnalysisContext(target, random_tokens(60), trained_at=16))
    with pytest.raises(InputError, match="'far-context'"):
        analyses.get("far-context").check(AnalysisContext(target, random_tokens(40), trained_at=16))


def test_analysis_of_slopes_requires_a_trainshort_model():
    with pytest.raises(InputError, match=r"'slopes'.* repeater"):
        slopes_analysis.run(make_context(RepeatingTarget(4, 4), random_tokens(1000)))
