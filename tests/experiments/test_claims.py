"""Each claim's check holds and fails where it should, on made-up results."""

import json
import math

import pytest
from synthetic_results import LAPTOP, make_demo, make_run, write_evaluation

from benchmarks.update_docs import ROOT
from trainshort.evaluate.results import load, save
from trainshort.experiments.claims.collection import COST_FORMAT, collect
from trainshort.experiments.claims.measured import ScaleView, median_with_interval
from trainshort.experiments.claims.speed_and_memory import time_saved
from trainshort.experiments.claims.verdicts import ORIGINAL_RULE, claims, evaluate_claims
from trainshort.experiments.experiments import EvalProtocol, Variant
from trainshort.utils.io import write_with_checksum


def verdicts(root) -> dict[str, str]:
    return {claim.name: outcome.verdict for claim, outcome in evaluate_claims(ScaleView(collect([root]), LAPTOP))}


def outcome(root, name):
    return next(outcome for claim, outcome in evaluate_claims(ScaleView(collect([root]), LAPTOP)) if claim.name == name)


def test_the_document_names_every_claim_without_an_interval():
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    names = [name for name, claim in claims.items() if claim.rule == ORIGINAL_RULE]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_results_like_the_papers_hold(tmp_path):
    make_demo(tmp_path)
    found = verdicts(tmp_path)
    for name in (
        "extrapolation-order",
        "alibi-holds",
        "sinusoidal-fails",
        "recency-helps",
        "flat-sliding",
        "sliding-no-rescue",
        "early-tokens",
        "same-speed",
        "same-memory",
        "others-slower",
    ):
        assert found[name] == "holds", name
    for name in ("short-beats-long", "sooner", "optimum-near-2l"):
        assert found[name] == "not testable at this scale", name


@pytest.mark.parametrize(
    ("position", "plain", "sliding", "name"),
    [
        ("alibi", {128: 50, 256: 50, 2048: 51}, {}, "alibi-holds"),
        ("sinusoidal", {128: 50, 256: 54, 2048: 90}, {}, "sinusoidal-fails"),
        ("alibi", {128: 50, 256: 49}, {128: 45, 256: 43, 512: 43}, "flat-sliding"),
        ("sinusoidal", {128: 50, 256: 90}, {128: 45, 256: 46, 512: 50}, "sliding-no-rescue"),
        ("alibi", {128: 50, 256: 48}, {128: 46, 256: 44, 512: 44}, "early-tokens"),
    ],
)
def test_results_unlike_the_papers_fail(tmp_path, position, plain, sliding, name):
    make_run(tmp_path, position, plain, sliding)
    assert verdicts(tmp_path)[name] == "does not hold"


def test_order_fails_when_two_methods_change_places(tmp_path):
    make_demo(tmp_path / "a")
    for position, last in (("alibi", 60.0), ("t5", 50.0), ("rotary", 60.0), ("sinusoidal", 90.0)):
        make_run(tmp_path / "b", position, {128: 50.0, 256: 50.0 if position != "sinusoidal" else 70.0, 2048: last})
    found = outcome(tmp_path / "b", "extrapolation-order")
    assert found.verdict == "does not hold"
    assert found.obtained == "Sinusoidal 128, Rotary 256, T5 bias 2,048+, ALiBi 256"


def test_two_methods_that_stop_together_are_not_ordered(tmp_path):
    for position, last in (("alibi", 50.0), ("t5", 60.0), ("rotary", 90.0), ("sinusoidal", 90.0)):
        make_run(tmp_path, position, {128: 50.0, 256: 50.0 if last < 90 else 70.0, 2048: last})
    found = outcome(tmp_path, "extrapolation-order")
    assert found.obtained == "Sinusoidal 128, Rotary 128, T5 bias 256, ALiBi 2,048+"
    assert found.verdict == "cannot tell"


def test_order_is_not_told_from_methods_that_were_not_read_far(tmp_path):
    """Table 5 evaluates only ALiBi past its length; where the others would have stopped, nobody knows."""
    for position in ("sinusoidal", "rotary", "t5"):
        make_run(tmp_path, position, {128: 50.0})
    make_run(tmp_path, "alibi", {128: 50.0, 768: 49.0})
    found = outcome(tmp_path, "extrapolation-order")
    assert found.verdict == "not testable at this scale"
    assert "evaluated equally far" in found.reason


def test_costs_fail(tmp_path):
    make_demo(tmp_path)
    path = tmp_path / "cost.json"
    costs = json.loads(path.read_text())
    for entry in costs["entries"].values():
        slow = entry["position"] == "alibi"
        entry["train_seconds"] = [1.02 if slow else 1.0] * 3
        entry["train_memory"] = 600 if slow else 500
    write_with_checksum(path, costs)
    found = verdicts(tmp_path)
    assert (found["same-speed"], found["same-memory"], found["others-slower"]) == ("does not hold",) * 3
    for entry in costs["entries"].values():  # two weighings of one model differ by more than the two models
        entry["train_memories"] = [500, 600]
    write_with_checksum(path, costs)
    assert verdicts(tmp_path)["same-memory"] == "cannot tell"


@pytest.mark.parametrize(("slower", "expected"), [(1.04, "cannot tell"), (1.5, "does not hold")])
def test_a_noisy_machine_cannot_tell_one_per_cent(tmp_path, slower, expected):
    make_demo(tmp_path)
    path = tmp_path / "cost.json"
    costs = json.loads(path.read_text())
    noise = {"alibi": (0.9, 1.1, 0.95, 1.05, 1.0, 0.92, 1.08), "sinusoidal": (1.1, 0.92, 1.0, 1.08, 0.95, 0.9, 1.05)}
    for entry in costs["entries"].values():
        factor = slower if entry["position"] == "alibi" else 1.0
        entry["train_seconds"] = [factor * seconds for seconds in noise.get(entry["position"], [1.0] * 7)]
    write_with_checksum(path, costs)
    found = outcome(tmp_path, "same-speed")
    assert found.verdict == expected
    assert found.smallest_detectable.startswith("differences of ")


@pytest.mark.parametrize("slower", [0.96, 1.0, 1.02, 1.04, 1.2])
def test_one_rule_about_noise_for_alibi_and_against_it(tmp_path, slower):
    """With the same timings for ALiBi, rotary and T5: what is told of one is told of the others."""
    make_demo(tmp_path)
    path = tmp_path / "cost.json"
    costs = json.loads(path.read_text())
    noise = (0.97, 1.03, 0.99, 1.01, 1.0, 0.98, 1.02)
    for entry in costs["entries"].values():
        own = noise[::-1] if entry["position"] == "sinusoidal" else [slower * one for one in noise]
        entry["train_seconds"] = list(own)
    write_with_checksum(path, costs)
    found = verdicts(tmp_path)
    opposite = {"holds": "does not hold", "does not hold": "holds", "cannot tell": "cannot tell"}
    assert found["others-slower"] == opposite[found["same-speed"]]


def test_costs_that_were_not_measured_in_turns_are_not_compared(tmp_path):
    make_demo(tmp_path)
    path = tmp_path / "cost.json"
    costs = json.loads(path.read_text())
    for entry in costs["entries"].values():
        entry["session"] = entry["position"]
    write_with_checksum(path, costs)
    assert verdicts(tmp_path)["same-speed"] == "not testable at this scale"


def test_the_interval_of_a_median_by_counting():
    assert median_with_interval([float(one) for one in range(9)]) == (
        4.0,
        1.0,
        7.0,
    )  # 96 % of the time, by the binomial
    assert median_with_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_a_difference_within_the_spread_of_seeds_cannot_be_told(tmp_path):
    for seed, value in ((1, 49.0), (2, 50.0), (3, 51.0)):
        make_run(tmp_path, "alibi", {128: 50.0, 768: value - 0.2}, seed=seed)
        make_run(tmp_path, "sinusoidal", {768: value}, length=3072, seed=seed)
    assert outcome(tmp_path, "short-beats-long").verdict == "cannot tell"


def test_short_beats_long(tmp_path):
    make_run(tmp_path, "alibi", {128: 50.0, 768: 47.0})
    for seed, value in ((1, 49.0), (2, 50.0), (3, 51.0)):
        make_run(tmp_path, "sinusoidal", {768: value}, length=3072, seed=seed)
    assert outcome(tmp_path, "short-beats-long").verdict == "holds"


def test_seeds_are_averaged(tmp_path):
    for seed, value in ((1, 40.0), (2, 44.0)):
        make_run(tmp_path, "alibi", {128: value}, seed=seed)
    found = ScaleView(collect([tmp_path]), LAPTOP).find_evaluation(
        Variant("wikitext103", "alibi", 512), EvalProtocol(512)
    )
    assert found is not None
    assert found.value == pytest.approx(42.0)
    assert found.std == pytest.approx(math.sqrt(8))
    assert len(found.sources) == 2


def test_time_saved_between_two_curves():
    assert time_saved([(1, 20), (2, 10)], [(2, 20), (4, 10)]) == pytest.approx(0.5)
    assert time_saved([(1, 20), (2, 10)], [(1, 20), (2, 10)]) == pytest.approx(0.0)
    assert time_saved([(1, 9), (2, 8)], [(2, 20), (4, 10)]) is None


def test_sooner_is_read_from_checkpoints(tmp_path):
    make_demo(tmp_path)
    entries = json.loads((tmp_path / "cost.json").read_text())["entries"]
    for position, length in (("alibi", 1024), ("sinusoidal", 2048)):
        folder = make_run(tmp_path, position, {512: 40.0}, length=length)
        config = LAPTOP.make_config(Variant("cc100", position, length))
        tokens = config.train.batch * config.train.length
        for step, value in ((92_160, 60.0), (184_320, 50.0), (368_640, 40.0)):
            write_evaluation(folder, config, {512: value}, tokens=4096, step=step // tokens)
        seconds = 1.0 if position == "alibi" else 1.25
        entries[folder.name] = {
            **next(iter(entries.values())),
            "position": position,
            "length": length // 4,
            "train_seconds": [seconds] * 3,
        }
    write_with_checksum(tmp_path / "cost.json", {"format": COST_FORMAT, "entries": entries})
    found = outcome(tmp_path, "sooner")
    assert found.verdict == "holds"
    assert found.obtained == "+20.0% (+20.0% to +20.0%) time saved (trained at 256 against 512)"


def test_costs_of_two_folders_are_told_with_the_file_of_each(tmp_path):
    make_demo(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_with_checksum(tmp_path / "b" / "cost.json", {"format": COST_FORMAT, "entries": {}})
    view = ScaleView(collect([tmp_path / "a", tmp_path / "b"]), LAPTOP)
    found = view.find_cost(Variant("wikitext103", "alibi", 512), "train memory")
    assert found is not None
    assert found.sources == (tmp_path / "a" / "cost.json",)


def test_the_interval_over_text_is_of_seeds_that_were_read_so_far(tmp_path):
    """With the first seed's run evaluated less far there was none, and any difference counted as told."""
    make_run(tmp_path, "alibi", {128: 50.0})
    folder = make_run(tmp_path, "alibi", {768: 47.0}, seed=2)
    make_run(tmp_path, "sinusoidal", {768: 47.1}, length=3072)
    path = next((folder / "eval").glob("*.json"))
    evaluation = load(path)
    row = evaluation.rows[0]
    (count, first), (_, second) = row.blocks
    save(evaluation.with_row(row.replace(blocks=((count, first - 9), (count, second + 9)))), path)
    assert outcome(tmp_path, "short-beats-long").verdict == "cannot tell"
