"""Each claim is supported or not supported as expected, on invented results."""

import json
import math
from pathlib import Path

import pytest
from synthetic_results import LAPTOP, make_demo, make_run, write_evaluation

from benchmarks.update_docs import ROOT
from trainshort.evaluate.results import load, save
from trainshort.experiments.claims.collection import COST_FORMAT, collect
from trainshort.experiments.claims.measured import ScaleView, median_with_interval
from trainshort.experiments.claims.speed_and_memory import time_saved
from trainshort.experiments.claims.verdicts import ORIGINAL_CRITERION, Outcome, claims, evaluate_claims
from trainshort.experiments.experiments import EvalProtocol, Variant
from trainshort.utils.io import write_with_checksum


def find_outcomes(root: Path) -> dict[str, Outcome]:
    """Return the outcomes of all claims for the runs in a folder, by the name of the claim."""
    view = ScaleView(collect([root]), LAPTOP)
    return {claim.name: outcome for claim, outcome in evaluate_claims(view)}


def find_verdicts(root: Path) -> dict[str, str]:
    """Return the verdicts on all claims for the runs in a folder, by the name of the claim."""
    return {name: outcome.verdict for name, outcome in find_outcomes(root).items()}


def read_costs(root: Path) -> dict:
    """Return the content of the cost file as plain data, so that a test can change it."""
    return json.loads((root / "cost.json").read_text())


def test_docs_name_every_claim_without_interval():
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    names = [name for name, claim in claims.items() if claim.criterion == ORIGINAL_CRITERION]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_claim_is_a_sentence():
    for name, claim in claims.items():
        assert claim.statement.endswith("."), name
        assert claims.describe(name) == claim.statement


def test_results_as_in_the_paper_support_the_claims(tmp_path):
    make_demo(tmp_path)
    verdicts = find_verdicts(tmp_path)
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
        assert verdicts[name] == "supported", name
    for name in ("short-beats-long", "sooner", "optimum-near-2l"):
        assert verdicts[name] == "not tested", name


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
def test_results_that_contradict_the_paper_do_not_support_the_claim(tmp_path, position, plain, sliding, name):
    make_run(tmp_path, position, plain, sliding)
    assert find_verdicts(tmp_path)[name] == "not supported"


# ---- the order of the methods


def make_order_runs(root: Path, last_perplexities: dict[str, float], twice_perplexities: dict[str, float]) -> None:
    """Create one run for each method with perplexity 50 at the training length."""
    for position, last in last_perplexities.items():
        make_run(root, position, {128: 50.0, 256: twice_perplexities.get(position, 50.0), 2048: last})


def test_order_is_not_supported_if_two_methods_change_places(tmp_path):
    last_perplexities = {"alibi": 60.0, "t5": 50.0, "rotary": 60.0, "sinusoidal": 90.0}
    make_order_runs(tmp_path, last_perplexities, {"sinusoidal": 70.0})
    outcome = find_outcomes(tmp_path)["extrapolation-order"]
    assert outcome.verdict == "not supported"
    assert outcome.measured == "Sinusoidal 128, Rotary 256, T5 bias 2,048+, ALiBi 256"


def test_order_is_inconclusive_if_two_methods_fail_at_the_same_length(tmp_path):
    last_perplexities = {"alibi": 50.0, "t5": 60.0, "rotary": 90.0, "sinusoidal": 90.0}
    make_order_runs(tmp_path, last_perplexities, {"rotary": 70.0, "sinusoidal": 70.0})
    outcome = find_outcomes(tmp_path)["extrapolation-order"]
    assert outcome.measured == "Sinusoidal 128, Rotary 128, T5 bias 256, ALiBi 2,048+"
    assert outcome.verdict == "inconclusive"


def test_order_is_not_tested_if_methods_were_evaluated_up_to_different_lengths(tmp_path):
    # Table 5 evaluates only ALiBi beyond its training length.
    for position in ("sinusoidal", "rotary", "t5"):
        make_run(tmp_path, position, {128: 50.0})
    make_run(tmp_path, "alibi", {128: 50.0, 768: 49.0})
    outcome = find_outcomes(tmp_path)["extrapolation-order"]
    assert outcome.verdict == "not tested"
    assert "same length" in outcome.reason


# ---- speed and memory


def test_slower_training_and_more_memory_do_not_support_the_claims(tmp_path):
    make_demo(tmp_path)
    costs = read_costs(tmp_path)
    for entry in costs["entries"].values():
        is_alibi = entry["position"] == "alibi"
        entry["train_seconds"] = [1.02 if is_alibi else 1.0] * 3
        entry["train_memory"] = 600 if is_alibi else 500
        entry["train_memories"] = [entry["train_memory"]]
    write_with_checksum(tmp_path / "cost.json", costs)
    verdicts = find_verdicts(tmp_path)
    assert verdicts["same-speed"] == "not supported"
    assert verdicts["same-memory"] == "not supported"
    assert verdicts["others-slower"] == "not supported"


def test_memory_is_inconclusive_if_measurements_of_one_model_differ(tmp_path):
    make_demo(tmp_path)
    costs = read_costs(tmp_path)
    for entry in costs["entries"].values():
        entry["train_memories"] = [500, 600]
    write_with_checksum(tmp_path / "cost.json", costs)
    assert find_verdicts(tmp_path)["same-memory"] == "inconclusive"


@pytest.mark.parametrize(("factor", "expected"), [(1.04, "inconclusive"), (1.5, "not supported")])
def test_small_slowdown_is_inconclusive_on_a_noisy_machine(tmp_path, factor, expected):
    make_demo(tmp_path)
    costs = read_costs(tmp_path)
    noise = {"alibi": (0.9, 1.1, 0.95, 1.05, 1.0, 0.92, 1.08), "sinusoidal": (1.1, 0.92, 1.0, 1.08, 0.95, 0.9, 1.05)}
    for entry in costs["entries"].values():
        slowdown = factor if entry["position"] == "alibi" else 1.0
        entry["train_seconds"] = [slowdown * seconds for seconds in noise.get(entry["position"], [1.0] * 7)]
    write_with_checksum(tmp_path / "cost.json", costs)
    outcome = find_outcomes(tmp_path)["same-speed"]
    assert outcome.verdict == expected
    assert outcome.smallest_detectable.startswith("differences of ")


@pytest.mark.parametrize("slowdown", [0.96, 1.0, 1.02, 1.04, 1.2])
def test_same_criterion_for_alibi_and_other_methods(tmp_path, slowdown):
    # ALiBi, rotary and T5 have the same timings, so "as fast" and "slower" must have opposite verdicts.
    make_demo(tmp_path)
    costs = read_costs(tmp_path)
    noise = (0.97, 1.03, 0.99, 1.01, 1.0, 0.98, 1.02)
    for entry in costs["entries"].values():
        if entry["position"] == "sinusoidal":
            entry["train_seconds"] = list(noise[::-1])
        else:
            entry["train_seconds"] = [slowdown * seconds for seconds in noise]
    write_with_checksum(tmp_path / "cost.json", costs)
    verdicts = find_verdicts(tmp_path)
    opposite = {"supported": "not supported", "not supported": "supported", "inconclusive": "inconclusive"}
    assert verdicts["others-slower"] == opposite[verdicts["same-speed"]]


def test_costs_of_different_sessions_are_not_compared(tmp_path):
    make_demo(tmp_path)
    costs = read_costs(tmp_path)
    for entry in costs["entries"].values():
        entry["session"] = entry["position"]
    write_with_checksum(tmp_path / "cost.json", costs)
    assert find_verdicts(tmp_path)["same-speed"] == "not tested"


def test_costs_of_two_folders_name_their_own_file(tmp_path):
    make_demo(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_with_checksum(tmp_path / "b" / "cost.json", {"format": COST_FORMAT, "entries": {}})
    view = ScaleView(collect([tmp_path / "a", tmp_path / "b"]), LAPTOP)
    memory = view.find_cost(Variant("wikitext103", "alibi", 512), "train memory")
    assert memory is not None
    assert memory.sources == (tmp_path / "a" / "cost.json",)


def test_interval_of_the_median():
    # With 9 values, the interval from the second smallest to the second largest has a coverage of 96 %.
    nine_values = [float(value) for value in range(9)]
    assert median_with_interval(nine_values) == (4.0, 1.0, 7.0)
    assert median_with_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


# ---- several seeds


def test_difference_within_the_spread_of_seeds_is_inconclusive(tmp_path):
    for seed, perplexity in ((1, 49.0), (2, 50.0), (3, 51.0)):
        make_run(tmp_path, "alibi", {128: 50.0, 768: perplexity - 0.2}, seed=seed)
        make_run(tmp_path, "sinusoidal", {768: perplexity}, length=3072, seed=seed)
    assert find_verdicts(tmp_path)["short-beats-long"] == "inconclusive"


def test_short_beats_long(tmp_path):
    make_run(tmp_path, "alibi", {128: 50.0, 768: 47.0})
    for seed, perplexity in ((1, 49.0), (2, 50.0), (3, 51.0)):
        make_run(tmp_path, "sinusoidal", {768: perplexity}, length=3072, seed=seed)
    assert find_verdicts(tmp_path)["short-beats-long"] == "supported"


def test_seeds_are_averaged(tmp_path):
    for seed, perplexity in ((1, 40.0), (2, 44.0)):
        make_run(tmp_path, "alibi", {128: perplexity}, seed=seed)
    view = ScaleView(collect([tmp_path]), LAPTOP)
    cell = view.find_evaluation(Variant("wikitext103", "alibi", 512), EvalProtocol(512))
    assert cell is not None
    assert cell.value == pytest.approx(42.0)
    assert cell.std == pytest.approx(math.sqrt(8))
    assert len(cell.sources) == 2


def test_interval_over_the_text_uses_a_seed_that_was_evaluated_at_the_length(tmp_path):
    # The first seed of ALiBi was not evaluated at 768 tokens. The interval comes from the second seed.
    make_run(tmp_path, "alibi", {128: 50.0})
    folder = make_run(tmp_path, "alibi", {768: 47.0}, seed=2)
    make_run(tmp_path, "sinusoidal", {768: 47.1}, length=3072)

    # Make the two halves of the text differ, so that the interval is wide.
    path = next((folder / "eval").glob("*.json"))
    evaluation = load(path)
    row = evaluation.rows[0]
    (count, first_nll), (_, second_nll) = row.blocks
    unequal_blocks = ((count, first_nll - 9), (count, second_nll + 9))
    save(evaluation.with_row(row.replace(blocks=unequal_blocks)), path)
    assert find_verdicts(tmp_path)["short-beats-long"] == "inconclusive"


# ---- time to a perplexity


def test_time_saved_between_two_curves():
    assert time_saved([(1, 20), (2, 10)], [(2, 20), (4, 10)]) == pytest.approx(0.5)
    assert time_saved([(1, 20), (2, 10)], [(1, 20), (2, 10)]) == pytest.approx(0.0)
    assert time_saved([(1, 9), (2, 8)], [(2, 20), (4, 10)]) is None


def test_time_to_perplexity_is_read_from_checkpoints(tmp_path):
    make_demo(tmp_path)
    entries = read_costs(tmp_path)["entries"]
    template_entry = next(iter(entries.values()))
    for position, length, seconds in (("alibi", 1024, 1.0), ("sinusoidal", 2048, 1.25)):
        folder = make_run(tmp_path, position, {512: 40.0}, length=length)
        config = LAPTOP.make_config(Variant("cc100", position, length))
        tokens_per_step = config.train.batch * config.train.length
        for tokens, perplexity in ((92_160, 60.0), (184_320, 50.0), (368_640, 40.0)):
            step = tokens // tokens_per_step
            write_evaluation(folder, config, {512: perplexity}, tokens=4096, step=step)
        changes = {"position": position, "length": length // 4, "train_seconds": [seconds] * 3}
        entries[folder.name] = template_entry | changes
    write_with_checksum(tmp_path / "cost.json", {"format": COST_FORMAT, "entries": entries})

    outcome = find_outcomes(tmp_path)["sooner"]
    assert outcome.verdict == "supported"
    assert outcome.measured == "+20.0% (+20.0% to +20.0%) time saved (trained at 256 against 512)"
