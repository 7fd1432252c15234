"""Tests of the evaluation summary, which says up to which length a model works well."""

import json
import math

import pytest

from trainshort.evaluate import significance
from trainshort.evaluate.results import Evaluation, LengthScore


def make_evaluation(perplexities: dict[int, float | str], trained_at: int | None = 128, **changes) -> Evaluation:
    """Return an evaluation of 6400 targets.

    Args:
        perplexities: The perplexity at each length, or the status of a length without a result.
        trained_at: The training length.
        changes: Changed entries of the fields `target` and `protocol`.
    """
    rows = []
    for length, value in perplexities.items():
        if isinstance(value, str):
            rows.append(LengthScore.parse({"length": length, "stride": length, "status": value, "reason": value}))
            continue
        nll = 6400 * math.log(value)
        blocks = tuple((64, nll / 100) for _ in range(100))
        rows.append(
            LengthScore(
                length=length,
                stride=length,
                status="scored",
                tokens=6400,
                nll=nll,
                blocks=blocks,
                seconds=2.0,
                timed=6400,
            )
        )
    target = {"name": "m", "kind": "run", "weights": "w", "step": 3, "trained_at": trained_at, "max_length": None}
    protocol = {"name": "non-overlapping", "stride": None, "slopes": None}
    return Evaluation(
        target={**target, **changes.get("target", {})},
        corpus={"name": "text", "split": "valid", "sha256": "s"},
        protocol={**protocol, **changes.get("protocol", {})},
        provenance={},
        rows=tuple(rows),
    )


def make_summary(evaluation: Evaluation) -> dict:
    """Return the summary of an evaluation that allows a summary."""
    summary = significance.make_summary(evaluation, "eval/x.json")
    assert summary is not None
    return summary


def test_model_that_improves_at_all_lengths():
    summary = make_summary(make_evaluation({128: 20.0, 256: 18.0, 4096: 18.1}))
    assert summary["summary"] == "trained at 128, good to 4,096+"
    assert summary["best"]["length"] == 256
    assert summary["gain"]["loss"] == pytest.approx(math.log(20 / 18))
    assert summary["gain"]["perplexity"] == pytest.approx(2.0)
    assert summary["base"]["tokens_per_second"] == 3200


def test_model_that_becomes_worse():
    summary = make_summary(make_evaluation({128: 20.0, 144: 19.9, 160: 20.3, 256: 80.0}))
    assert summary["summary"] == "trained at 128, good to 144"
    assert summary["no_worse"] == {"length": 144, "open": False}
    assert summary["within_2_percent"] == {"length": 160, "open": False}


def test_small_increase_between_good_lengths_is_ignored():
    """Table 3 of the paper has perplexity 18.66 at 1,024 and 18.67 at 1,025. At longer lengths it decreases."""
    evaluation = make_evaluation({1024: 18.66, 1025: 18.67, 2024: 18.05}, trained_at=1024)
    assert make_summary(evaluation)["no_worse"]["length"] == 2024


def test_good_length_requires_all_shorter_lengths_to_be_good():
    summary = make_summary(make_evaluation({128: 20.0, 256: 24.0, 512: 19.0}))
    assert summary["summary"] == "trained at 128, good to 128"
    assert summary["no_worse"] == summary["within_2_percent"] == {"length": 128, "open": False}


def test_too_little_text_is_inconclusive():
    """The text has two spans. The loss rises in one span and falls in the other, so the interval contains zero."""
    evaluation = make_evaluation({128: 20.0, 256: 20.6})
    rows = []
    for row, first_span_nll in zip(evaluation.rows, (9000, 9400), strict=True):
        spans = ((3200, first_span_nll), (3200, row.nll - first_span_nll))
        rows.append(row.replace(blocks=spans))
    summary = make_summary(evaluation.replace(rows=tuple(rows)))
    assert summary["summary"].startswith("trained at 128, good to 128, inconclusive at 256")


def test_length_limit_and_missing_memory():
    summary = make_summary(make_evaluation({128: 20.0, 256: "cannot"}, target={"max_length": 128}))
    assert summary["summary"] == "trained at 128, cannot read past 128"
    summary = make_summary(make_evaluation({128: 20.0, 256: 18.0, 512: "out of memory"}))
    assert summary["summary"] == "trained at 128, good to 256"
    assert summary["lengths"][2] == {"length": 512, "status": "out of memory", "reason": "out of memory"}


def test_shortest_length_is_the_base_if_training_length_is_unknown():
    summary = make_summary(make_evaluation({64: 20.0, 128: 19.0}, trained_at=None))
    assert summary["summary"] == "compared with 64, good to 128+"


def test_lengths_below_training_length_are_ignored():
    assert make_summary(make_evaluation({64: 15.0, 128: 20.0, 256: 19.0}))["best"]["length"] == 256


@pytest.mark.parametrize(
    "evaluation",
    [
        make_evaluation({256: 20.0, 512: 19.0}),  # without the training length
        make_evaluation({128: 20.0}),  # without a longer length
        make_evaluation({128: "out of memory", 256: 19.0}),
        make_evaluation({}),
        make_evaluation({128: 20.0, 256: 18.0}, protocol={"stride": 1}),
        make_evaluation({128: 20.0, 256: 18.0}, protocol={"slopes": "interpolate"}),
    ],
)
def test_evaluation_that_allows_no_summary(evaluation: Evaluation):
    assert significance.make_summary(evaluation, "eval/x.json") is None


def test_summary_of_less_text_does_not_replace_summary_of_more_text(tmp_path):
    summary = make_summary(make_evaluation({128: 20.0, 256: 18.0}))
    summary_of_less_text = json.loads(json.dumps(summary))
    summary_of_less_text["base"]["tokens"] = 100
    assert significance.save_summary(summary, tmp_path)
    assert not significance.save_summary(summary_of_less_text, tmp_path)
    stored_summary = significance.load_summary(tmp_path)
    assert stored_summary is not None
    assert stored_summary["base"]["tokens"] == 6400

    summary_of_less_text["target"]["weights"] = "other weights"
    assert significance.save_summary(summary_of_less_text, tmp_path), "the summary of old weights is replaced"


def test_missing_or_damaged_summary_is_none(tmp_path):
    assert significance.load_summary(tmp_path) is None
    (tmp_path / significance.SUMMARY_FILE).write_text("{")
    assert significance.load_summary(tmp_path) is None
