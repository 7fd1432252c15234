"""What 0.1.0 wrote is read by every version: a run, prepared data, generation states, stored results."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from trainshort.checkpoint import load_model
from trainshort.cli import main
from trainshort.config import load_config
from trainshort.evaluate.results import load
from trainshort.files import read_checked as read_result
from trainshort.files import read_sealed
from trainshort.model import TransformerLM
from trainshort.runs import checked_lines

STORED = Path(__file__).parent / "data_of_0_1_0"
RUN = "runs/tiny"
WEIGHTS = 42.5229416332113
"""Sum of the run's weights."""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A copy to work in, as 0.1.0 left it."""
    shutil.copytree(STORED, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as done:
        main(list(words))
    assert not done.value.code


def test_a_run_is_loaded_and_evaluated_to_the_same_losses(place):
    (stored,) = (place / RUN / "eval").glob("*.json")
    before = json.loads(stored.read_text())
    command("evaluate", RUN, "--lengths", "1x", "2x", "--out", "again")
    (found,) = (place / "again" / "eval").glob("*.json")
    after = json.loads(found.read_text())
    assert [row["length"] for row in after["rows"]] == [row["length"] for row in before["rows"]] == [16, 32]
    for old, new in zip(before["rows"], after["rows"], strict=True):
        assert new["nll"] == pytest.approx(old["nll"], rel=1e-6)


def test_stored_results_are_read_and_marked_as_unsealed(place):
    (stored,) = (place / RUN / "eval").glob("*.json")
    assert not read_result(stored)[1]
    assert {checksum for _, checksum in checked_lines(place / RUN / "metrics.jsonl")} == {None}
    before = load(stored).rows
    command("evaluate", RUN, "--lengths", "1x", "2x")
    assert [load(path).rows for path in (place / RUN / "eval").glob("*.json")] == [before]  # nothing is scored again
    command("report", "runs")


def test_a_run_goes_on(place):
    command("train", RUN, "--resume", "--train.steps", "12", "--quiet")
    steps = [record["step"] for record, _ in checked_lines(place / RUN / "metrics.jsonl") if "nll" in record]
    assert steps == [2, 4, 6, 8, 10, 12]


def test_a_run_is_analyzed(place):
    stored = place / RUN / "analysis" / "reach.json"
    before = stored.read_text()
    command("analyze", RUN, "--only", "reach", "--samples", "8", "--lengths", "1x", "2x")
    assert stored.read_text() != before
    assert read_sealed(stored)


@pytest.mark.parametrize("mode", ["full", "bounded", "window"])
def test_a_generation_goes_on_with_the_same_text(place, mode, capsysbinary):
    command("generate", RUN, "--resume-state", f"states/{mode}.state", "--tokens", "12")
    assert capsysbinary.readouterr().out == (place / "states" / f"{mode}.txt").read_bytes()


@pytest.mark.parametrize("method", ["none", "sinusoidal", "learned", "rotary", "t5", "alibi"])
def test_a_config_of_every_position_method_is_read(method):
    config = load_config(Path("configs") / f"{method}.json")
    assert config.model.position == method
    model = TransformerLM(config.model)
    assert model(torch.zeros(1, 20, dtype=torch.long)).shape == (1, 20, 280)




def test_the_weights_are_the_same_numbers():
    weights = (weight.detach().double().sum() for weight in load_model(Path(RUN)).parameters())
    assert sum(map(float, weights)) == pytest.approx(WEIGHTS, abs=1e-9)
