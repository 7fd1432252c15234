"""`trainshort analyze` as a user runs it, and the cost analysis in its separate processes."""

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
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *map(str, words)])
    return int(ended.value.code or 0)


def test_each_analysis_leaves_a_file_a_table_and_a_sentence(run: Path, capsys):
    names = ("early-tokens", "far-context", "recall", "reach", "slopes")
    assert analyze(run, "--split", "train", "--max-tokens", "2000", "--samples", "4", "--only", *names) == 0
    shown = capsys.readouterr().out
    for name in names:
        content = json.loads((run / "analysis" / f"{name}.json").read_text())
        assert content["analysis"] == name
        assert content["target"]["name"] == "tiny"
        assert content["corpus"]["tokens"] == 2000
        assert content["provenance"]["versions"]["torch"]
        assert content["settings"]["samples"] == 4
        assert content["result"]["rows"]
        assert " ".join(content["result"]["summary"].split()) in " ".join(shown.split())
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("Written"))


def test_a_hugging_face_model_answers_what_needs_no_look_inside(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_hugging_face(tmp_path / "llama-tiny", "llama")
    (tmp_path / "story.txt").write_text(prose(60))
    words = ("llama-tiny", "--data", "story.txt", "--samples", "2", "--trained-at", "32", "--max-tokens", "600")
    assert analyze(*words) == 0
    written = {path.stem for path in (tmp_path / "runs" / "llama-tiny" / "analysis").iterdir()}
    assert written == {"early-tokens", "far-context", "recall"}
    assert "passed over: the reach analysis looks inside trainshort's own models" in capsys.readouterr().out
    assert analyze(*words, "--only", "reach") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "recal"], "Unknown analysis 'recal'. Did you mean 'recall'?"),
        (["--only", "recall", "--lengths", "100000"], "length 100,000 needs at least twice that length"),
        (["--only", "recall", "--lengths", "far"], "got 'far'"),
        (["--samples", "0"], "must be at least 1"),
        (["--methods", "alibbi"], "Unknown position method 'alibbi'. Did you mean 'alibi'?"),
        (["--only", "recall", "--methods", "alibi"], "--methods says what cost measures; give --only cost with it."),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(run: Path, capsys, words: list[str], message: str):
    assert analyze(run, *words) == 2
    assert message in capsys.readouterr().err


def test_the_cost_past_a_table_is_that_of_a_longer_one(tmp_path):
    """The run's own weights stop at 24 tokens; it ended in a traceback."""
    run = make_run(tmp_path, position="learned", position_settings={"max_length": 24})
    words = (
        "--only",
        "cost",
        "--methods",
        "learned",
        "--lengths",
        "16",
        "64",
        "--split",
        "train",
        "--max-tokens",
        "2000",
    )
    assert analyze(run, *words) == 0
    rows = json.loads((run / "analysis" / "cost.json").read_text())["result"]["rows"]
    assert [(row["length"], row["weights"], row["training"]["status"]) for row in rows] == [
        (16, "run", "measured"),
        (64, "random", "measured"),
    ]


def test_the_cost_is_measured_in_a_process_of_its_own():
    found = cost.measure(tiny_model(layers=4, width=64).config, 512)
    training, inference = found["training"], found["inference"]
    assert training["status"] == inference["status"] == "measured"
    assert training["tokens"] == 4096
    assert 0 < training["tokens_per_second"] < inference["tokens_per_second"]
    assert training["memory"] > inference["memory"] + 10_000_000


def test_a_stopped_analysis_goes_on(run: Path, capsys, monkeypatch):
    """Interrupted in the fourth measurement of `cost`: three are kept, and what was answered is not asked again."""
    words = (run, "--split", "train", "--max-tokens", "2000", "--samples", "3", "--only", "recall", "cost")
    seen = []

    def measure(model, length, device="cpu", weights=None):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append((model.position, length))
        measured = {
            "status": "measured",
            "tokens_per_second": 100.0 + length,
            "spread": 0.01,
            "memory": 1,
            "tokens": 64,
        }
        return {"training": measured, "inference": measured}

    monkeypatch.setattr(cost, "measure", measure)
    assert analyze(*words) != 0
    assert (run / "analysis" / "recall.json").is_file()
    assert not (run / "analysis" / "cost.json").exists()
    capsys.readouterr()
    first, seen[:] = list(seen), [0] * 100  # from now on it is not interrupted
    assert analyze(*words) == 0
    assert "known from before; --again asks anew." in capsys.readouterr().out
    assert not set(first) & set(seen)
    rows = json.loads((run / "analysis" / "cost.json").read_text())["result"]["rows"]
    assert [row["position"] for row in rows] == 3 * list(PAPER_METHODS)  # the run's own is among them
    assert not list((run / "analysis").glob("*.partial"))


PLUGIN = """
from trainshort.analyze import Analysis, Lab, analyses
from trainshort.analyze.lab import new_table, titled

def run(lab: Lab):
    lab.meter.start(1)
    return {"summary": f"{len(set(lab.tokens.tolist()))} kinds of tokens", "rows": []}

analyses.register("kinds")(Analysis("how many kinds of tokens are there?", run, lambda result: titled("", new_table())))
"""


def test_an_analysis_from_a_file_of_the_users_own(run: Path, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    words = ["analyze", str(run), "--only", "kinds", "--plugin", str(tmp_path / "mine.py"), "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "trainshort", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "how many kinds of tokens are there?" in done.stdout
    assert json.loads((tmp_path / "analysis" / "kinds.json").read_text())["result"]["summary"].endswith("of tokens")


def test_a_folder_that_is_no_run_is_named_in_quotes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert analyze(".") == 2
    assert "There is no run at '.'. Give a run folder" in capsys.readouterr().err


def test_what_takes_minutes_is_asked_last():
    order = sorted(analyses.names(), key=lambda name: analyses.get(name).slow)
    assert order[-1] == "cost"
    assert all(analyses.get(name).question for name in order)  # what `trainshort list` shows


def test_a_costs_row_says_oom_and_numbers():
    measured = {"status": "measured", "tokens_per_second": 1234.5, "spread": 0.02, "memory": 2_000_000}
    rows = [
        {"position": "alibi", "length": 8, "training": measured, "inference": measured},
        {"position": "t5", "length": 8, "training": {"status": "out of memory"}, "inference": measured},
    ]
    shown = cost.table({"batch_tokens": 4096, "rows": rows})
    cells = [list(column.cells) for column in shown.renderables[1].columns]
    assert cells[2] == ["1,234", "OOM"]
    assert cells[5] == ["2", "2"]


def test_the_cost_concludes_about_every_method_that_was_measured():
    def row(position, length, speed):
        found = {"status": "measured", "tokens_per_second": speed, "spread": 0.02}
        return {"position": position, "length": length, "inference": found if speed else {"status": "out of memory"}}

    rows = [row("alibi", 8, 1234.5), row("t5", 8, 1240.0), row("mine", 8, None), row("sinusoidal", 4, 1.0)]
    assert cost.summary([*rows, row("sinusoidal", 8, 2469.0)]) == (
        "at 8 tokens, inference against sinusoidal's: alibi at 50% (±4%) of its speed; t5 at 50% (±4%) of its speed; "
        "mine out of memory"
    )
    assert cost.summary(rows) == (
        "at 8 tokens, inference against alibi's: t5 as fast, as far as these rounds can tell (±4%); mine out of memory"
    )
    assert cost.summary(rows[:1]) == cost.summary(rows[2:3]) == "measured up to 8 tokens"


@pytest.mark.slow
def test_the_cost_of_every_method_at_each_length(run: Path):
    assert analyze(run, "--only", "cost", "--lengths", "32,128", "--methods", *positions.names()) == 0
    rows = json.loads((run / "analysis" / "cost.json").read_text())["result"]["rows"]
    assert {(row["position"], row["length"]) for row in rows} == set(product(positions.names(), (32, 128)))
    assert all(row[kind]["status"] == "measured" for row in rows for kind in ("training", "inference"))
    assert {row["weights"] for row in rows if row["position"] == "alibi"} == {"run"}
