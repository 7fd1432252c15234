"""The analyses on models whose answers are known: a model that cannot see far must be found not to."""

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


class Repeater(Target):
    """Expects what stood `back` tokens ago, and sees no farther than `sight`; else all tokens are equally likely to it.

    Its losses are known: log(vocabulary) where it does not know, and nearly nothing where it is right.
    """

    name, kind, trained_at, vocab_size, bos = "repeater", "test", 64, 32, 0

    def __init__(self, back: int, sight: int) -> None:
        self.back, self.sight = back, sight
        self.module = torch.nn.Linear(1, 1)

    def token_nll(self, tokens, targets, first):
        losses = torch.full(targets.shape, math.log(self.vocab_size))
        if self.back <= self.sight and self.back < targets.shape[1] + 1:
            # The input at i is the target before i, so what stood `back` before target i is the input at i − back + 1.
            past = tokens[:, : targets.shape[1] - self.back + 1]
            right = past == targets[:, self.back - 1 :]
            losses[:, self.back - 1 :] = torch.where(right, 0.01, 8.0)
        return losses[:, first:]

    def tokenizer(self):
        raise NotImplementedError

    def extra_description(self):
        return {}


def periodic(period: int, count: int) -> np.ndarray:
    return np.resize(random_tokens(period), count)


def lab(target: Target, tokens: np.ndarray, **changes) -> AnalysisContext:
    return AnalysisContext(target, tokens, trained_at=64, **{"samples": 16, **changes})


def test_probes_are_the_same_targets_after_any_context():
    one = lab(tiny_target(), np.arange(3000) % 32)
    ends = one.sample_ends(512)
    short, long = one.sample_windows(ends, 64), one.sample_windows(ends, 512)
    assert short.shape == (16, 65)
    assert (short == long[:, -65:]).all()
    assert ends[0] >= 513
    assert ends[-1] == 3000


def test_scored_rows_are_the_models_own_losses():
    target, rows = tiny_target(), random_tokens(5 * 41).reshape(5, 41)
    found = lab(target, rows.ravel(), batch_tokens=100).score(rows, 7)
    tokens = torch.from_numpy(rows.astype(np.int64))
    expected = target.model.token_nll(tokens[:, :-1], tokens[:, 1:])[:, -7:]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_differences_are_taken_probe_by_probe():
    losses = np.random.default_rng(0).normal(3, 1, (50, 4))
    found = compare(losses, losses + 0.25)
    assert found["rise"] == pytest.approx(0.25)
    assert found["interval"] == pytest.approx((0.25, 0.25))
    assert compare(losses[:1], losses[:1])["interval"] is None


@pytest.mark.parametrize(("back", "noticed"), [(40, True), (200, True), (200, False)])
def test_far_context_is_found_to_matter_exactly_where_the_model_looks(back: int, noticed: bool):
    """The model looks `back` tokens behind; spoiling what lies beyond d is felt for d below that, and never above."""
    target = Repeater(back, sight=1000 if noticed else 100)
    result = far_context.run(lab(target, periodic(back, 8000)))
    assert result["length"] == 512
    for row in result["rows"]:
        felt = row["rise"] > 0.5
        assert felt == (noticed and row["near"] < back - SCORED_TOKENS) or back - SCORED_TOKENS <= row["near"] < back
        if row["near"] >= back:
            assert row["rise"] == 0
    if noticed:
        farthest = max(d for d in (8, 16, 32, 64, 128, 256) if d < back)
        assert result["summary"] == f"at 512 tokens the model uses context farther away than {farthest} tokens"
    else:
        assert "no use of far context shows" in result["summary"]


def test_spoiling_changes_the_far_part_only():
    one = lab(tiny_target(), random_tokens(8000))
    rows = one.sample_windows(one.sample_ends(512), 512)
    for way in ("shuffle", "replace"):
        spoiled = far_context.corrupt_far_context(rows, 64, way, one)
        far = 513 - SCORED_TOKENS - 64
        assert (spoiled[:, far:] == rows[:, far:]).all()
        assert (spoiled[:, :far] != rows[:, :far]).mean() > 0.5
    shuffled = far_context.corrupt_far_context(rows, 64, "shuffle", one)
    assert (np.sort(shuffled, axis=1) == np.sort(rows, axis=1)).all()
    assert (far_context.corrupt_far_context(rows, 64, "cut", one) == rows[:, far:]).all()


def test_near_distances_double():
    assert far_context.near_distances(128, 1024) == [16, 32, 64, 128, 256, 512]
    assert far_context.near_distances(16, 40) == [2, 4, 8]
    assert far_context.near_distances(16, 32) == []


@pytest.mark.parametrize("length", range(34, 80))
def test_every_way_of_spoiling_leaves_the_near_part_and_something_far(length: int):
    one = AnalysisContext(tiny_target(), random_tokens(400), trained_at=16, samples=4, lengths=(length,))
    rows = one.sample_windows(one.sample_ends(length), length)
    _, distances = far_context.choose_length_and_distances(one)
    for near in distances:
        for way in far_context.CORRUPTIONS:
            spoiled = far_context.corrupt_far_context(rows, near, way, one)
            assert SCORED_TOKENS + near <= spoiled.shape[1] <= length + 1
            assert (spoiled[:, -SCORED_TOKENS - near :] == rows[:, -SCORED_TOKENS - near :]).all()


def test_recall_is_found_up_to_the_distance_the_model_sees():
    """A model that looks exactly 128 tokens back finds what stood there, and nothing at other distances."""
    result = recall.run(lab(Repeater(128, sight=1000), random_tokens(8000), lengths=(64, 128, 256)))
    gains = {(row["kind"], row["distance"]): row["gain"] for row in result["rows"]}
    assert gains["copy", 128] > 5
    assert gains["recall", 128] > 5
    assert max(abs(gains[kind, distance]) for kind in ("copy", "recall") for distance in (64, 256)) == 0
    assert result["summary"] == "copy at 128 tokens, but not at 64; recall at 128 tokens, but not at 64"
    nearest = recall.run(lab(Repeater(64, sight=1000), random_tokens(8000), lengths=(64, 128, 256)))
    assert nearest["summary"] == "copy up to 64 tokens; recall up to 64 tokens"
    blind = recall.run(lab(Repeater(128, sight=100), random_tokens(8000), lengths=(64, 128)))
    assert blind["summary"] == "no copy at any distance tried; no recall at any distance tried"


def test_recall_probes_differ_in_the_first_place_only():
    one = lab(tiny_target(), random_tokens(8000))
    size = recall.CUE + recall.VALUE
    for kind in ("copy", "recall"):
        present, absent = recall.make_samples(one, kind, 100)
        assert present.shape == (16, 32 + 100 + size)
        assert (present[:, 32 : 32 + size] == present[:, -size:]).all()
        assert (present[:, 32 + size :] == absent[:, 32 + size :]).all()
        same = 32 + (recall.CUE if kind == "recall" else 0)
        assert (present[:, :same] == absent[:, :same]).all()
        assert (present[:, 32 : 32 + size] != absent[:, 32 : 32 + size]).any(axis=1).all()


def test_with_all_targets_the_early_token_numbers_are_exactly_stride_1():
    target, tokens = tiny_target(), random_tokens(300)
    result = early_tokens.run(lab(target, tokens, lengths=(16, 32), samples=300))
    assert result["samples"] == 300
    for row in result["rows"]:
        exact = [
            summarize(windows, np.concatenate(list(score(target, tokens, windows)))).loss
            for windows in (Passes(300, row["length"], row["length"]), Passes(300, row["length"], 1))
        ]
        assert row["non_overlapping"] == pytest.approx(exact[0], abs=1e-5)
        assert row["stride_1"] == pytest.approx(exact[1], abs=1e-5)
        assert row["from_context"] + row["from_early"] == pytest.approx(row["gain"], abs=1e-12)


def test_a_model_that_sees_40_tokens_gains_by_fewer_early_tokens_alone():
    """In a periodic text it is right wherever it sees 40 back; a longer block has fewer tokens that cannot."""
    result = early_tokens.run(lab(Repeater(40, sight=1000), periodic(40, 8192), lengths=(64, 256)))
    last = result["rows"][-1]
    assert last["gain"] > 0.5
    assert last["from_context"] == pytest.approx(0, abs=0.06), "only the text's own beginning differs"
    assert last["from_early"] == pytest.approx(last["gain"] - last["from_context"])
    assert f"{last['from_early']:+.4f} comes from fewer early tokens" in result["summary"]


def test_a_model_that_looks_200_back_gains_by_context():
    result = early_tokens.run(lab(Repeater(200, sight=1000), periodic(200, 8192), lengths=(64, 256)))
    last = result["rows"][-1]
    assert last["from_context"] > 2.5
    assert last["context_interval"][0] > 2
    assert f"{last['from_context']:+.4f} comes from longer context" in result["summary"]
    assert f"{last['from_early']:+.4f} comes from fewer early tokens" in result["summary"], "the two add up"


def test_other_slopes_are_measured_on_the_same_targets():
    result = slopes_analysis.run(lab(tiny_target(trained_at=64), random_tokens(4000), lengths=(64, 128), samples=4))
    losses = {(row["slopes"], row["context"]): row["loss"] for row in result["rows"]}
    assert set(losses) == {(s, c) for s in ("trained", "interpolate", "max_bias=16", "window=64") for c in (64, 128)}
    assert losses["interpolate", 64] == losses["trained", 64], "nothing to interpolate up to the training length"
    assert losses["window=64", 64] == pytest.approx(losses["trained", 64], abs=1e-4)
    assert losses["interpolate", 128] != pytest.approx(losses["trained", 128], abs=1e-4)
    assert losses["max_bias=16", 64] != pytest.approx(losses["trained", 64], abs=1e-4)


def test_contexts_shorter_than_what_is_scored_have_the_same_targets_too():
    """At a context of 16 there are 16 targets; of longer ones the last 16 count, not 32."""
    one = AnalysisContext(tiny_target(), random_tokens(2000), trained_at=16, lengths=(16, 64), samples=4)
    result = slopes_analysis.run(one)
    losses = {(row["slopes"], row["context"]): row["loss"] for row in result["rows"]}
    rows = one.sample_windows(one.sample_ends(64), 64)
    assert result["scored"] == 4 * 16
    assert losses["trained", 64] == pytest.approx(one.score(rows, 16).mean())


def test_an_analysis_that_does_not_fit_is_told_before_any_begins():
    target = tiny_target("rotary")
    one = lab(target, random_tokens(2000))
    with pytest.raises(
        InputError, match="the slopes analysis needs a model with ALiBi's slopes; this one has position="
    ):
        analyses.get("slopes").check(one)
    for text, told in ((60, "recall wants a distance of at least 32 tokens"), (40, "there is nothing to spoil")):
        name = "recall" if text == 60 else "far-context"
        with pytest.raises(InputError, match=told):
            analyses.get(name).check(AnalysisContext(target, random_tokens(text), trained_at=16))


def test_slopes_change_only_inside():
    model = tiny_target().model
    before = model.position.slopes.clone()
    tokens = torch.arange(40)[None] % 32
    plain = model.hidden(tokens)
    with apply_override(model, Override.parse("slopes", "interpolate"), trained_at=16, length=64):
        torch.testing.assert_close(model.position.linear_slopes(), before / 4)
        assert not torch.equal(model.hidden(tokens), plain)
    with apply_override(model, Override.parse("slopes", "window=3"), trained_at=16, length=64):
        assert all(layer.attention.window == 3 for layer in model.layers)
    assert torch.equal(model.position.slopes, before)
    assert torch.equal(model.hidden(tokens), plain)


def test_slopes_by_name():
    trained = torch.tensor([0.25, 0.0625])
    assert torch.equal(compute_override_slopes(trained, Override.parse("slopes", "interpolate"), 128, 64), trained)
    assert torch.equal(compute_override_slopes(trained, Override.parse("slopes", "interpolate"), 128, 512), trained / 4)
    assert compute_override_slopes(trained, Override.parse("slopes", "max_bias=16"), 128, 512).tolist() == [
        2**-8,
        2**-16,
    ]
    assert [str(Override.parse("slopes", text)) for text in ("interpolate", "max_bias=16", "window=512")] == [
        "interpolate",
        "max_bias=16",
        "window=512",
    ]
    for wrong in ("", "window", "window=1.5", "max_bias=0", "interpolate=2", "window=x"):
        with pytest.raises(InputError, match="slopes are interpolate, ntk=4, clamp=512, max_bias=16 or window=512"):
            Override.parse("slopes", wrong)


def test_lengths_must_fit_the_text_twice():
    one = lab(tiny_target(), random_tokens(300))
    assert one.choose_lengths(1, 2, 4) == [64, 128]
    with pytest.raises(InputError, match="an analysis at length 256 needs at least twice that length"):
        lab(tiny_target(), random_tokens(300), lengths=(64, 256)).choose_lengths(1)
    with pytest.raises(InputError, match="reads up to 16 tokens, so it cannot be analyzed at length 64"):
        lab(tiny_target("learned"), random_tokens(300)).choose_lengths(1, 2)


def test_looking_inside_needs_a_model_of_ours():
    with pytest.raises(
        InputError, match="the slopes analysis looks inside trainshort's own models, and repeater is none"
    ):
        slopes_analysis.run(lab(Repeater(4, 4), random_tokens(1000)))
