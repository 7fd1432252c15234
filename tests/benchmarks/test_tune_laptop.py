"""The search: the same trials for every method, resumable, and its choice is what the recipe is."""

import math
from dataclasses import replace

import pytest

from benchmarks import tune_laptop as tune
from benchmarks.update_docs import RESULTS
from trainshort.cli.main import run_command
from trainshort.errors import InputError
from trainshort.experiments.scales import TUNED_RECIPES, Variant
from trainshort.train.run_folder import RunFolder
from trainshort.utils.io import read_with_checksum


def test_every_method_has_the_same_trials_with_equally_many_tokens():
    made = tune.trials()
    ways = {method: [trial.way for trial in made if trial.method == method] for method in tune.METHODS}
    assert all(one == list(tune.GRID) for one in ways.values())
    assert len({one.config.train.steps * one.config.train.batch * one.config.train.length for one in made}) == 1
    runs = {method: {one.name for one in made if one.method == method} for method in tune.METHODS}
    assert all(len(one) == len(tune.GRID) for one in runs.values())


@pytest.fixture
def small(tiny_run):
    """Two trials of a few updates of a tiny model."""
    base = tune.Trial("alibi", "first", tiny_run)
    return [base, replace(base, way="second", config=tiny_run.replace(optim={"lr": 1e-4}))]


@pytest.fixture
def tiny_run(tmp_path):
    from tiny_experiments import tiny_scale

    return tiny_scale(tmp_path).make_config(Variant("wikitext103", "alibi", 512))


def test_a_search_that_was_stopped_goes_on(small, tmp_path):
    told: list[str] = []
    path = tune.tune(small[:1], tmp_path / "tune", told.append)
    first = (tmp_path / "tune" / small[0].name / "metrics.jsonl").stat().st_mtime_ns
    tune.tune(small, tmp_path / "tune", told.append)
    assert (tmp_path / "tune" / small[0].name / "metrics.jsonl").stat().st_mtime_ns == first
    values = read_with_checksum(path)
    assert (values["tried"], values["planned"], len(told)) == (2, 2, 3)
    losses = {one["way"]: one["nll"] / one["count"] for one in values["results"]}
    assert values["best"] == {"alibi": min(losses, key=losses.__getitem__)}
    assert told[-1] == f"2 of 2: alibi, second: {math.exp(losses['second']):.2f}"


def test_a_trial_that_diverges_is_a_result(small, tmp_path, monkeypatch):
    wild = replace(small[0], config=small[0].config.replace(optim={"lr": 1e30, "max_grad_norm": 0.0, "warmup": 0}))
    told: list[str] = []
    tune.tune([wild], tmp_path / "tune", told.append)
    assert "not finite" in told[0] or "is nan" in told[0] or "is inf" in told[0]
    stored = read_with_checksum(tmp_path / "tune" / tune.FILE)
    assert stored["results"] == []
    assert list(stored["failed"]) == [wild.name]
    tune.tune([wild], tmp_path / "tune", told.append)
    assert told[1].endswith("failed before")
    assert RunFolder(tmp_path / "tune" / wild.name).metrics.exists()


def test_the_recipe_is_what_the_stored_search_chose():
    stored = read_with_checksum(RESULTS / tune.FILE)
    assert stored["tried"] == stored["planned"] == len(tune.trials())
    assert stored["best"] == tune.best(stored["results"])
    chosen = {method: tune.GRID[way] for method, way in stored["best"].items()}
    own = {method: way if method in tune.WITH_TABLE else way.replace(position_lr=1.0) for method, way in chosen.items()}
    assert own == TUNED_RECIPES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 5", "--tokens is what a trial is trained on, at least 10000; got 5"),
        ("--methods alibbi", "Unknown position method 'alibbi'"),
        ("--methods ,", "--methods requires at least one value"),
        ("alibi", "Unexpected argument 'alibi'"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_first_trial(words, message):
    with pytest.raises(InputError, match=message):
        run_command(tune.Tune, words.split())
