"""Tests of `trainshort tune`: fair trials, continuing a search, failed trials, and the stored result."""

import math
from dataclasses import replace

import pytest

from benchmarks import tune_laptop
from benchmarks.update_docs import RESULTS
from trainshort.cli.main import run_command
from trainshort.config.run_config import RunConfig
from trainshort.errors import InputError
from trainshort.experiments.scales import TUNED_RECIPES, Variant
from trainshort.train.run_folder import RunFolder
from trainshort.utils.io import read_with_checksum


def test_all_methods_have_the_same_trials_with_equally_many_tokens():
    trials = tune_laptop.make_trials()
    token_counts = set()
    for trial in trials:
        train_config = trial.config.train
        token_counts.add(train_config.steps * train_config.batch * train_config.length)
    assert len(token_counts) == 1
    for method in tune_laptop.METHODS:
        method_trials = [trial for trial in trials if trial.method == method]
        assert [trial.settings_name for trial in method_trials] == list(tune_laptop.GRID)
        # Each trial has its own run folder.
        assert len({trial.name for trial in method_trials}) == len(tune_laptop.GRID)


@pytest.fixture
def tiny_config(tmp_path) -> RunConfig:
    from tiny_experiments import tiny_scale

    return tiny_scale(tmp_path).make_config(Variant("wikitext103", "alibi", 512))


@pytest.fixture
def tiny_trials(tiny_config) -> list[tune_laptop.Trial]:
    """Return two trials of a tiny model with a few training steps and different learning rates."""
    first_trial = tune_laptop.Trial("alibi", "first", tiny_config)
    second_config = tiny_config.replace(optim={"lr": 1e-4})
    return [first_trial, replace(first_trial, settings_name="second", config=second_config)]


def test_interrupted_search_is_continued(tiny_trials, tmp_path):
    root = tmp_path / "tune"
    lines: list[str] = []
    path = tune_laptop.run_trials(tiny_trials[:1], root, lines.append)
    first_metrics = root / tiny_trials[0].name / "metrics.jsonl"
    modified_at = first_metrics.stat().st_mtime_ns

    tune_laptop.run_trials(tiny_trials, root, lines.append)
    assert first_metrics.stat().st_mtime_ns == modified_at  # The first trial was not trained again.
    values = read_with_checksum(path)
    assert values["tried"] == 2
    assert values["planned"] == 2
    assert len(lines) == 3
    losses = {result["way"]: result["nll"] / result["count"] for result in values["results"]}
    assert values["best"] == {"alibi": min(losses, key=losses.__getitem__)}
    assert lines[-1] == f"2 of 2: alibi, second: {math.exp(losses['second']):.2f}"


def test_diverged_trial_is_stored_and_not_repeated(tiny_trials, tmp_path):
    root = tmp_path / "tune"
    diverging_config = tiny_trials[0].config.replace(optim={"lr": 1e30, "max_grad_norm": 0.0, "warmup": 0})
    trial = replace(tiny_trials[0], config=diverging_config)
    lines: list[str] = []
    tune_laptop.run_trials([trial], root, lines.append)
    assert any(reason in lines[0] for reason in ("not finite", "is nan", "is inf"))
    values = read_with_checksum(root / tune_laptop.FILE)
    assert values["results"] == []
    assert list(values["failed"]) == [trial.name]

    tune_laptop.run_trials([trial], root, lines.append)
    assert lines[1].endswith("failed before")
    assert RunFolder(root / trial.name).metrics.exists()


def test_recipes_of_the_laptop_scale_are_the_best_of_the_stored_search():
    values = read_with_checksum(RESULTS / tune_laptop.FILE)
    assert values["tried"] == values["planned"] == len(tune_laptop.make_trials())
    assert values["best"] == tune_laptop.choose_best(values["results"])
    best_recipes = {}
    for method, settings_name in values["best"].items():
        best_recipes[method] = tune_laptop.recipe_for_method(tune_laptop.GRID[settings_name], method)
    assert best_recipes == TUNED_RECIPES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 5", "--tokens must be at least 10000, got 5"),
        ("--methods alibbi", "Unknown position method 'alibbi'"),
        ("--methods ,", "--methods requires at least one value"),
        ("alibi", "Unexpected argument 'alibi'"),
    ],
)
def test_invalid_argument_is_rejected_before_the_first_trial(arguments, message):
    with pytest.raises(InputError, match=message):
        run_command(tune_laptop.Tune, arguments.split())
