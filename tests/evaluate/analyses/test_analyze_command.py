"""Tests of `trainshort analyze`, and of the analysis `cost`, which measures in new processes."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from helpers import make_run, prose, save_hugging_face, tiny_model

from trainshort.cli.main import main
from trainshort.config.position_config import PAPER_METHODS
from trainshort.evaluate.analyses import analyses, cost
from trainshort.model.positions import positions


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("analyses"))


def analyze(*words: object) -> int:
    """Run `trainshort analyze` and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(["analyze", *map(str, words)])
    return int(exit_info.value.code or 0)


def read_analysis(run_folder: Path, name: str) -> dict:
    """Return the content of a result file."""
    return json.loads((run_folder / "analysis" / f"{name}.json").read_text())


def test_each_analysis_writes_a_file_and_prints_a_table(run: Path, capsys):
    names = ("early-tokens", "far-context", "recall", "reach", "slopes")
    assert analyze(run, "--split", "train", "--max-tokens", "2000", "--samples", "4", "--only", *names) == 0
    output = capsys.readouterr().out
    output_words = " ".join(output.split())  # without line breaks
    for name in names:
        content = read_analysis(run, name)
        assert content["analysis"] == name
        assert content["target"]["name"] == "tiny"
        assert content["corpus"]["tokens"] == 2000
        assert content["provenance"]["versions"]["torch"]
        assert content["settings"]["samples"] == 4
        assert content["result"]["rows"]
        assert content["result"]["summary"] in output_words
    assert all(len(line) <= 80 for line in output.splitlines() if not line.startswith("Written"))


def test_analyses_of_a_hugging_face_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_hugging_face(tmp_path / "llama-tiny", "llama")
    (tmp_path / "story.txt").write_text(prose(60))
    words = ("llama-tiny", "--data", "story.txt", "--samples", "2", "--trained-at", "32", "--max-tokens", "600")
    assert analyze(*words) == 0
    written_names = {path.stem for path in (tmp_path / "runs" / "llama-tiny" / "analysis").iterdir()}
    assert written_names == {"early-tokens", "far-context", "recall"}
    assert "Skipped: The analysis 'reach'" in capsys.readouterr().out
    assert analyze(*words, "--only", "reach") == 2


@pytest.mark.parametrize(
    ("words", "message_part"),
    [
        (["--only", "recal"], "Did you mean 'recall'?"),
        (["--only", "recall", "--lengths", "100000"], "length 100,000"),
        (["--only", "recall", "--lengths", "far"], "'far'"),
        (["--samples", "0"], "at least 1"),
        (["--methods", "alibbi"], "Did you mean 'alibi'?"),
        (["--only", "recall", "--methods", "alibi"], "--methods"),
    ],
)
def test_invalid_options_are_rejected(run: Path, capsys, words: list[str], message_part: str):
    assert analyze(run, *words) == 2
    message = capsys.readouterr().err
    assert message_part in message
    assert len(message.splitlines()) == 1


def test_folder_without_run_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert analyze(".") == 2
    assert "'.'" in capsys.readouterr().err


def test_slow_analyses_run_last():
    names = sorted(analyses.names(), key=lambda name: analyses.get(name).slow)
    assert names[-1] == "cost"
    assert all(analyses.get(name).question for name in names)


def test_interrupted_analysis_resumes(run: Path, capsys, monkeypatch):
    """The fourth measurement of `cost` is interrupted. The first three measurements are not repeated."""
    words = (run, "--split", "train", "--max-tokens", "2000", "--samples", "3", "--only", "recall", "cost")
    measured_configurations = []
    max_measurements = 3

    def measure(model, length, device="cpu", checkpoint=None):
        if len(measured_configurations) == max_measurements:
            raise KeyboardInterrupt
        measured_configurations.append((model.position, length))
        measurement = {
            "status": "measured",
            "tokens_per_second": 100.0 + length,
            "spread": 0.01,
            "memory": 1,
            "tokens": 64,
        }
        return {"training": measurement, "inference": measurement}

    monkeypatch.setattr(cost, "measure", measure)
    assert analyze(*words) != 0
    assert (run / "analysis" / "recall.json").is_file()
    assert not (run / "analysis" / "cost.json").exists()
    capsys.readouterr()

    max_measurements = 100
    assert analyze(*words) == 0
    assert "--overwrite" in capsys.readouterr().out, "the result of `recall` is reused"
    assert len(measured_configurations) == len(set(measured_configurations)), "no measurement was repeated"
    rows = read_analysis(run, "cost")["result"]["rows"]
    assert len(measured_configurations) == len(rows)
    assert [row["position"] for row in rows] == 3 * list(PAPER_METHODS)
    assert not list((run / "analysis").glob("*.partial"))


PLUGIN = """
from trainshort.evaluate.analyses import Analysis, AnalysisContext, analyses
from trainshort.evaluate.analyses.base import new_table, with_title

def run(context: AnalysisContext):
    context.meter.start(1)
    return {"summary": f"{len(set(context.tokens.tolist()))} token types", "rows": []}

def table(result: dict):
    return with_title("", new_table())

analyses.register("token-types")(Analysis("How many token types are there?", run, table))
"""


def test_plugin_can_add_an_analysis(run: Path, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    options = ["--only", "token-types", "--plugin", str(tmp_path / "mine.py"), "--out", str(tmp_path)]
    process = subprocess.run(
        [sys.executable, "-m", "trainshort", "analyze", str(run), *options], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "How many token types are there?" in process.stdout
    assert read_analysis(tmp_path, "token-types")["result"]["summary"].endswith("token types")


# ---- the analysis `cost`


def test_cost_uses_random_weights_beyond_the_position_table(tmp_path):
    """The position table of the run has 24 rows, so the weights of the run support length 16 but not length 64."""
    run = make_run(tmp_path, position="learned", position_settings={"max_length": 24})
    words = ("--only", "cost", "--methods", "learned", "--lengths", "16", "64")
    assert analyze(run, *words, "--split", "train", "--max-tokens", "2000") == 0
    rows = read_analysis(run, "cost")["result"]["rows"]
    assert [(row["length"], row["weights"], row["training"]["status"]) for row in rows] == [
        (16, "run", "measured"),
        (64, "random", "measured"),
    ]


def test_cost_is_measured_in_a_new_process():
    results = cost.measure(tiny_model(layers=4, width=64).config, 512)
    training = results["training"]
    inference = results["inference"]
    assert training["status"] == inference["status"] == "measured"
    assert training["tokens"] == 4096
    assert 0 < training["tokens_per_second"] < inference["tokens_per_second"]
    assert training["memory"] > inference["memory"] + 10_000_000


def test_cost_table_shows_numbers_and_missing_memory():
    measured = {"status": "measured", "tokens_per_second": 1234.5, "spread": 0.02, "memory": 2_000_000}
    rows = [
        {"position": "alibi", "length": 8, "training": measured, "inference": measured},
        {"position": "t5", "length": 8, "training": {"status": "out of memory"}, "inference": measured},
    ]
    _, table = cost.table({"batch_tokens": 4096, "rows": rows}).renderables
    cells = [list(column.cells) for column in table.columns]
    assert cells[2] == ["1,234", "OOM"]  # training speed
    assert cells[5] == ["2", "2"]  # memory of inference


def make_cost_row(position: str, length: int, speed: float | None) -> dict:
    """Return a measurement of inference. A speed of None means that memory was missing."""
    if speed is None:
        inference = {"status": "out of memory"}
    else:
        inference = {"status": "measured", "tokens_per_second": speed, "spread": 0.02}
    return {"position": position, "length": length, "inference": inference}


def test_cost_summary_compares_all_methods_with_sinusoidal():
    rows = [
        make_cost_row("alibi", 8, 1234.5),
        make_cost_row("t5", 8, 1240.0),
        make_cost_row("mine", 8, None),
        make_cost_row("sinusoidal", 8, 2469.0),
    ]
    summary = cost.summary(rows)
    assert summary.endswith("compared with sinusoidal: alibi 50% (±4%); t5 50% (±4%); mine out of memory")


def test_cost_summary_compares_with_the_first_method_without_sinusoidal():
    rows = [
        make_cost_row("alibi", 8, 1234.5),
        make_cost_row("t5", 8, 1240.0),
        make_cost_row("mine", 8, None),
        make_cost_row("sinusoidal", 4, 1.0),  # The summary compares methods at the longest length only.
    ]
    summary = cost.summary(rows)
    assert "compared with alibi: t5 100% (±4%), no significant difference; mine out of memory" in summary


def test_cost_summary_without_two_methods():
    assert cost.summary([make_cost_row("alibi", 8, 1234.5)]).startswith("Not tested")
    assert cost.summary([make_cost_row("mine", 8, None)]).startswith("Not tested")


@pytest.mark.slow
def test_cost_of_every_method_at_each_length(run: Path):
    assert analyze(run, "--only", "cost", "--lengths", "32,128", "--methods", *positions.names()) == 0
    rows = read_analysis(run, "cost")["result"]["rows"]
    assert {(row["position"], row["length"]) for row in rows} == set(product(positions.names(), (32, 128)))
    for row in rows:
        assert row["training"]["status"] == row["inference"]["status"] == "measured"
    assert {row["weights"] for row in rows if row["position"] == "alibi"} == {"run"}
