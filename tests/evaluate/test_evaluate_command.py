"""Tests of `trainshort evaluate`: result files, resumption, lengths without a result, and error messages."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers import evaluations, make_run, prose, save_hugging_face

from trainshort.cli.main import main
from trainshort.errors import InputError
from trainshort.evaluate import evaluation, results, significance, text
from trainshort.evaluate.evaluation import result_path
from trainshort.evaluate.sweep import Sweep
from trainshort.evaluate.targets import RunTarget
from trainshort.train.checkpoint import load_model
from trainshort.train.run_data import open_run_data
from trainshort.utils.io import write_with_checksum


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    return make_run(root)


@pytest.fixture
def fresh_run(tmp_path, run: Path) -> Path:
    """A copy of the run without results. Its training length is 16."""
    ignored_files = shutil.ignore_patterns("eval", significance.SUMMARY_FILE)
    return Path(shutil.copytree(run, tmp_path / "runs" / "tiny", ignore=ignored_files))


def evaluate(*words: object) -> int:
    """Run `trainshort evaluate` and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(["evaluate", *map(str, words)])
    return int(exit_info.value.code or 0)


def test_results_can_be_written_to_another_folder(fresh_run: Path, tmp_path, monkeypatch):
    """The data of the run is found through the run folder, and not through the folder for results."""
    opened_runs = []

    def record_and_open(run_folder, config):
        opened_runs.append(run_folder)
        return open_run_data(run_folder, config)

    monkeypatch.setattr(text, "open_run_data", record_and_open)
    assert evaluate(fresh_run, "--lengths", "1x", "--out", tmp_path / "elsewhere") == 0
    assert opened_runs == [fresh_run]
    assert list((tmp_path / "elsewhere" / "eval").glob("*.json"))
    assert not (fresh_run / "eval").exists()


def test_evaluation_without_lengths_is_rejected(fresh_run: Path):
    target = RunTarget(fresh_run)
    run_text = text.open_text(target, ())
    with pytest.raises(InputError, match="at least one length"):
        evaluation.evaluate(target, run_text, Sweep(run_text.tokens, []))


def test_evaluation_writes_results_figures_and_summary(fresh_run: Path, capsys):
    assert evaluate(fresh_run, "--lengths", "1x", "2x", "4x") == 0
    (stored,) = evaluations(fresh_run)
    assert [row.length for row in stored.rows] == [16, 32, 64]
    assert {row.tokens for row in stored.rows} == {stored.corpus["tokens"]}, "every target is scored at every length"
    assert stored.protocol["name"] == "non-overlapping"
    assert stored.provenance["versions"]["torch"]

    (path,) = (fresh_run / "eval").glob("*.json")
    assert path.name.startswith("valid-nonoverlapping-")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()
    summary = significance.load_summary(fresh_run)
    assert summary is not None
    assert summary["source"] == f"eval/{path.name}"

    output, status_output = capsys.readouterr()
    assert summary["summary"] in output
    assert "16 = L" in output
    assert all(len(line) <= 80 for line in output.splitlines() if "Written" not in line), "the table fits a terminal"
    assert "3 lengths" in status_output
    assert "length 64: 3 of 3 done" in status_output


def test_loading_a_model_logs_its_summary(fresh_run: Path, caplog):
    caplog.set_level("INFO", logger="trainshort")
    load_model(fresh_run)
    assert not caplog.messages
    summary = {"format": significance.SUMMARY_FORMAT, "summary": "trained at 16, good to 64+"}
    write_with_checksum(fresh_run / significance.SUMMARY_FILE, summary)
    load_model(fresh_run)
    assert caplog.messages == [f"{fresh_run}: trained at 16, good to 64+."]
    caplog.clear()
    (fresh_run / significance.SUMMARY_FILE).write_text("{")
    load_model(fresh_run)
    assert not caplog.messages, "a damaged summary is ignored"


def test_scored_lengths_are_kept(fresh_run: Path, capsys):
    evaluate(fresh_run, "--lengths", "16,32")
    (first,) = evaluations(fresh_run)
    evaluate(fresh_run, "--lengths", "32,48")
    (second,) = evaluations(fresh_run)
    assert [row.length for row in second.rows] == [16, 32, 48]
    assert second.rows[:2] == first.rows, "the first results did not change, not even their time"
    assert "1 of 2 lengths" in capsys.readouterr().err

    evaluate(fresh_run, "--lengths", "16", "--overwrite")
    (third,) = evaluations(fresh_run)
    assert [row.length for row in third.rows] == [16], "--overwrite starts a new result file"
    assert third.rows[0].nll == first.rows[0].nll


def test_other_settings_and_texts_have_other_files(fresh_run: Path, tmp_path):
    (tmp_path / "story.txt").write_text(prose(60, seed=9))
    evaluate(fresh_run, "--lengths", "32")
    evaluate(fresh_run, "--lengths", "32", "--stride", "8")
    evaluate(fresh_run, "--lengths", "32", "--slopes", "interpolate")
    evaluate(fresh_run, "--lengths", "32", "--data", tmp_path / "story.txt", "--precision", "bfloat16")
    names = sorted(path.name for path in (fresh_run / "eval").glob("*.json"))
    names_without_hash = [name.rpartition("-")[0] for name in names]
    assert names_without_hash == [
        "story-nonoverlapping",
        "valid-nonoverlapping",
        "valid-nonoverlapping-interpolate",
        "valid-stride8",
    ]
    (figure_path,) = (fresh_run / "eval").glob("valid-nonoverlapping-interpolate-*.svg")
    for label in ("tiny, slopes interpolate", "tiny, stride 8", ">tiny<"):
        assert label in figure_path.read_text(), "evaluations of the same text are drawn together"
    losses = {round(stored.rows[0].loss, 6) for stored in evaluations(fresh_run)}
    assert len(losses) == 4


def test_file_name_depends_on_weights_text_and_settings():
    def path_for(**changes: object) -> Path:
        values = {"weights": "w", "sha256": "s", "stride": None, "slopes": None, "precision": "float32", **changes}
        stored = results.Evaluation(
            target={"weights": values["weights"]},
            corpus={"name": "text", "split": "valid", "sha256": values["sha256"]},
            protocol={key: values[key] for key in ("stride", "slopes", "precision")},
            provenance={},
        )
        return result_path(Path("runs/x"), stored)

    assert path_for() == path_for()
    changed_paths = [
        path_for(weights="v"),
        path_for(sha256="t"),
        path_for(stride=4),
        path_for(slopes="window=4"),
        path_for(precision="bfloat16"),
    ]
    assert len({path_for(), *changed_paths}) == 6


def test_stride_1_uses_one_pass_per_target(fresh_run: Path):
    evaluate(fresh_run, "--lengths", "32", "--stride", "1", "--max-tokens", "200")
    (stored,) = evaluations(fresh_run)
    (row,) = stored.rows
    assert (row.tokens, row.passes, row.tokens_read) == (200, 169, 169 * 32)


def test_evaluation_of_checkpoint_writes_no_summary(fresh_run: Path):
    evaluate(fresh_run / "checkpoints" / "step-000000005", "--lengths", "1x,2x")
    (stored,) = evaluations(fresh_run)
    assert stored.target["kind"] == "checkpoint"
    assert significance.load_summary(fresh_run) is None


def test_evaluation_continues_after_unsupported_length(root: Path, capsys):
    folder = make_run(root, "learned", position="learned")
    assert evaluate(folder, "--lengths", "8,16,17,32") == 0
    (stored,) = evaluations(folder)
    assert [row.status for row in stored.rows] == ["scored", "scored", "cannot", "cannot"]
    assert "trained at 16, cannot read past 16" in capsys.readouterr().out


def test_hugging_face_model_is_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_hugging_face(tmp_path / "gpt2-tiny", "gpt2")
    (tmp_path / "story.txt").write_text(prose(60))
    assert evaluate("gpt2-tiny", "--data", "story.txt", "--lengths", "32,64,128") == 0
    (stored,) = evaluations(tmp_path / "runs" / "gpt2-tiny")
    assert [row.status for row in stored.rows] == ["scored", "scored", "cannot"]
    assert stored.bits_per_byte(stored.rows[0]) is not None
    assert "trained at 64, cannot read past 64" in capsys.readouterr().out
    evaluate("gpt2-tiny", "--data", "story.txt", "--lengths", "32", "--out", "elsewhere")
    assert len(evaluations(tmp_path / "elsewhere")) == 1


def test_length_without_enough_memory_is_tried_again(root: Path, capsys):
    """The attention scores of 2,048 tokens need 4 heads x 2,048 x 2,048 x 4 bytes = 67 MB. The limit is 40 MB."""
    folder = make_run(root, "t5", position="t5", backend="reference", layers=1)
    words = (folder, "--split", "train", "--max-tokens", "2048", "--lengths", "16,2048")
    assert evaluate(*words, "--memory", "0.04") == 0
    (limited,) = evaluations(folder)
    assert [row.status for row in limited.rows] == ["scored", "out of memory"]
    assert "out of memory" in capsys.readouterr().out
    evaluate(*words)
    (unlimited,) = evaluations(folder)
    assert [row.status for row in unlimited.rows] == ["scored", "scored"]
    assert unlimited.rows[0] == limited.rows[0]


def test_text_shorter_than_the_length_is_scored_in_one_pass(fresh_run: Path):
    assert evaluate(fresh_run, "--lengths", "64", "--max-tokens", "10") == 0
    assert evaluate(fresh_run, "--lengths", "10", "--max-tokens", "10") == 0
    (path,) = (fresh_run / "eval").glob("*.json")
    row_at_10, row_at_64 = json.loads(path.read_text())["rows"]
    assert (row_at_10["length"], row_at_64["length"]) == (10, 64)
    for row in (row_at_10, row_at_64):
        assert row["tokens"] == row["tokens_read"] == 10
    assert row_at_10["nll"] == pytest.approx(row_at_64["nll"], rel=1e-6)


@pytest.mark.parametrize("text_options", [["--max-tokens", "40"], ["--data", "short.txt"]], ids=["truncated", "short"])
def test_summary_leaves_out_lengths_beyond_the_text(fresh_run: Path, text_options, capsys, monkeypatch):
    monkeypatch.chdir(fresh_run)
    (fresh_run / "short.txt").write_text("the same forty bytes of text, once again")
    assert evaluate(fresh_run, "--lengths", "16", "32", "500", *text_options) == 0
    assert re.search(r"only 4\d tokens.* length 500 ", capsys.readouterr().err)
    summary = json.loads((fresh_run / "extrapolation.json").read_text())
    assert [row["length"] for row in summary["lengths"]] == [16, 32]
    assert "500" not in summary["summary"]


def test_dry_run_prints_the_cost_only(fresh_run: Path, capsys):
    assert evaluate(fresh_run, "--lengths", "64", "--stride", "1", "--max-tokens", "100", "--dry-run") == 0
    status_output = " ".join(capsys.readouterr().err.split())
    assert "100 targets at length 64, 37 passes over 2,368 tokens, about" in status_output
    assert not (fresh_run / "eval").exists()


def test_slopes_require_alibi(root: Path, capsys):
    folder = make_run(root, "plain", position="none")
    assert evaluate(folder, "--lengths", "32", "--slopes", "interpolate") == 2
    message = capsys.readouterr().err
    assert "--slopes" in message
    assert "position='none'" in message
