"""The extrapolation card: what it concludes from a sweep, and when it says nothing."""

import json
import math

import pytest

from trainshort.evaluate import significance
from trainshort.evaluate.results import Evaluation, LengthScore


def sweep(perplexities: dict[int, float | str], trained_at: int | None = 128, **changes) -> Evaluation:
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


def made(evaluation: Evaluation) -> dict:
    result = significance.make_summary(evaluation, "eval/x.json")
    assert result is not None
    return result


def test_a_model_that_keeps_improving_is_good_as_far_as_was_tried():
    one = made(sweep({128: 20.0, 256: 18.0, 4096: 18.1}))
    assert one["summary"] == "trained at 128, good to 4,096+"
    assert one["best"]["length"] == 256
    assert one["gain"]["loss"] == pytest.approx(math.log(20 / 18))
    assert one["gain"]["perplexity"] == pytest.approx(2.0)
    assert one["base"]["tokens_per_second"] == 3200


def test_a_model_that_gets_worse_is_good_up_to_there():
    one = made(sweep({128: 20.0, 144: 19.9, 160: 20.3, 256: 80.0}))
    assert one["summary"] == "trained at 128, good to 144"
    assert one["no_worse"] == {"length": 144, "open": False}
    assert one["within_2_percent"] == {"length": 160, "open": False}


def test_one_noisy_point_in_between_does_not_end_it():
    """The paper's Table 3 has 18.66 at 1,024 and 18.67 at 1,025, then improves to 15,000 past it."""
    assert made(sweep({1024: 18.66, 1025: 18.67, 2024: 18.05}, trained_at=1024))["no_worse"]["length"] == 2024


def test_what_is_good_has_no_holes():
    one = made(sweep({128: 20.0, 256: 24.0, 512: 19.0}))
    assert one["summary"] == "trained at 128, good to 128"
    assert one["no_worse"] == one["within_2_percent"] == {"length": 128, "open": False}


def test_too_little_text_is_told():
    """Two stretches, of which one gets better and one worse: neither good nor surely worse."""
    evaluation = sweep({128: 20.0, 256: 20.6})
    halves = zip(evaluation.rows, (9000, 9400), strict=True)
    rows = [row.replace(blocks=((3200, nll), (3200, row.nll - nll))) for row, nll in halves]
    one = made(evaluation.replace(rows=tuple(rows)))
    assert one["summary"] == "trained at 128, good to 128, cannot tell at 256 (too little text)"


def test_tables_that_end_and_memory_that_runs_out():
    one = made(sweep({128: 20.0, 256: "cannot"}, target={"max_length": 128}))
    assert one["summary"] == "trained at 128, cannot read past 128"
    one = made(sweep({128: 20.0, 256: 18.0, 512: "out of memory"}))
    assert one["summary"] == "trained at 128, good to 256"
    assert one["lengths"][2] == {"length": 512, "status": "out of memory", "reason": "out of memory"}


def test_without_a_known_training_length_the_shortest_is_compared_with():
    assert made(sweep({64: 20.0, 128: 19.0}, trained_at=None))["summary"] == "compared with 64, good to 128+"


def test_shorter_lengths_do_not_count():
    assert made(sweep({64: 15.0, 128: 20.0, 256: 19.0}))["best"]["length"] == 256


@pytest.mark.parametrize(
    "silent",
    [
        sweep({256: 20.0, 512: 19.0}),  # not the training length
        sweep({128: 20.0}),  # nothing longer
        sweep({128: "out of memory", 256: 19.0}),
        sweep({}),
        sweep({128: 20.0, 256: 18.0}, protocol={"stride": 1}),
        sweep({128: 20.0, 256: 18.0}, protocol={"slopes": "interpolate"}),
    ],
)
def test_a_sweep_that_says_nothing_about_extrapolation_makes_no_card(silent: Evaluation):
    assert significance.make_summary(silent, "eval/x.json") is None


def test_a_quick_look_does_not_replace_a_thorough_card(tmp_path):
    thorough = made(sweep({128: 20.0, 256: 18.0}))
    quick = json.loads(json.dumps(thorough))
    quick["base"]["tokens"] = 100
    assert significance.save_summary(thorough, tmp_path)
    assert not significance.save_summary(quick, tmp_path)
    assert significance.load_summary(tmp_path)["base"]["tokens"] == 6400
    quick["target"]["weights"] = "others"
    assert significance.save_summary(quick, tmp_path), "another model's card is out of date"


def test_a_missing_or_damaged_card_is_none(tmp_path):
    assert significance.load_summary(tmp_path) is None
    (tmp_path / significance.CARD).write_text("{")
    assert significance.load_summary(tmp_path) is None
