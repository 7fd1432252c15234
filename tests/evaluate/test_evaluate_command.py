"""`trainshort evaluate` as a user runs it: files, resuming, failures that leave the rest going, mistakes in words."""

import json
import re
from pathlib import Path

import pytest
from helpers import evaluations, make_run, prose, save_hugging_face

from trainshort.cli.main import main
from trainshort.errors import InputError
from trainshort.evaluate import evaluation, results, significance, targets
from trainshort.evaluate.evaluation import result_path
from trainshort.evaluate.sweep import Sweep
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
def fresh(tmp_path, run: Path) -> Path:
    """The run with no results yet."""
    import shutil

    return Path(
        shutil.copytree(
            run, tmp_path / "runs" / "tiny", ignore=shutil.ignore_patterns("eval", significance.SUMMARY_FILE)
        )
    )


def evaluate(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, words)])
    return int(ended.value.code or 0)


def test_results_that_go_elsewhere_are_of_the_runs_own_data(fresh: Path, tmp_path, monkeypatch):
    """The note of where that data lies is in the run folder; looked for in --out, other text could be taken for it."""
    asked = []
    monkeypatch.setattr(targets, "open_run_data", lambda run, config: asked.append(run) or open_run_data(run, config))
    assert evaluate(fresh, "--lengths", "1x", "--out", tmp_path / "elsewhere") == 0
    assert asked == [fresh]
    assert list((tmp_path / "elsewhere" / "eval").glob("*.json"))
    assert not (fresh / "eval").exists()


def test_no_length_at_all_is_told_before_anything_is_computed(fresh: Path):
    run = targets.RunTarget(fresh)
    text = targets.open_text(run, ())
    with pytest.raises(InputError, match="give at least one length"):
        evaluation.evaluate(run, text, Sweep(text.tokens, []))


def test_a_sweep_leaves_results_a_picture_and_a_card(fresh: Path, capsys):
    assert evaluate(fresh, "--lengths", "1x", "2x", "4x") == 0
    (one,) = evaluations(fresh)
    assert [row.length for row in one.rows] == [16, 32, 64]
    assert {row.tokens for row in one.rows} == {one.corpus["tokens"]}, "every target once, at every length"
    assert one.protocol["name"] == "non-overlapping"
    assert one.provenance["versions"]["torch"]
    (path,) = (fresh / "eval").glob("*.json")
    assert path.name.startswith("valid-nonoverlapping-")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()
    stored = significance.load_summary(fresh)
    assert stored is not None
    assert stored["source"] == f"eval/{path.name}"
    shown, notes = capsys.readouterr()
    assert stored["summary"] in shown
    assert "16 = L" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "Written" not in line), "fits a terminal"
    assert "3 lengths" in notes
    assert "length 64: 3 of 3 done" in notes


def test_loading_the_model_says_how_far_it_is_good(fresh: Path, caplog):
    caplog.set_level("INFO", logger="trainshort")
    load_model(fresh)
    assert not caplog.messages
    card = {"format": significance.SUMMARY_FORMAT, "summary": "trained at 16, good to 64+"}
    write_with_checksum(fresh / significance.SUMMARY_FILE, card)
    load_model(fresh)
    assert caplog.messages == [f"{fresh}: trained at 16, good to 64+."]
    caplog.clear()
    (fresh / significance.SUMMARY_FILE).write_text("{")
    load_model(fresh)
    assert not caplog.messages, "a damaged card is no reason not to load"


def test_what_was_scored_before_is_kept_and_more_is_added(fresh: Path, capsys):
    evaluate(fresh, "--lengths", "16,32")
    (before,) = evaluations(fresh)
    evaluate(fresh, "--lengths", "32,48")
    (after,) = evaluations(fresh)
    assert [row.length for row in after.rows] == [16, 32, 48]
    assert after.rows[:2] == before.rows, "to the last digit and second: nothing was computed again"
    assert "1 of 2 lengths were scored before" in capsys.readouterr().err
    evaluate(fresh, "--lengths", "16", "--again")
    (again,) = evaluations(fresh)
    assert [row.length for row in again.rows] == [16], "begun anew"
    assert again.rows[0].nll == before.rows[0].nll


def test_other_protocols_texts_and_weights_have_their_own_files(fresh: Path, tmp_path):
    (tmp_path / "story.txt").write_text(prose(60, seed=9))
    evaluate(fresh, "--lengths", "32")
    evaluate(fresh, "--lengths", "32", "--stride", "8")
    evaluate(fresh, "--lengths", "32", "--slopes", "interpolate")
    evaluate(fresh, "--lengths", "32", "--data", tmp_path / "story.txt", "--precision", "bfloat16")
    names = sorted(path.name for path in (fresh / "eval").glob("*.json"))
    assert [name.rpartition("-")[0] for name in names] == [
        "story-nonoverlapping",
        "valid-nonoverlapping",
        "valid-nonoverlapping-interpolate",
        "valid-stride8",
    ]
    (last,) = (fresh / "eval").glob("valid-nonoverlapping-interpolate-*.svg")
    for label in ("tiny, slopes interpolate", "tiny, stride 8", ">tiny<"):
        assert label in last.read_text(), "protocols of one model on one text are drawn together"
    losses = {round(one.rows[0].loss, 6) for one in evaluations(fresh)}
    assert len(losses) == 4


def test_a_digest_keeps_weights_texts_and_protocols_apart():
    def path(**changes: object) -> Path:
        values = {"weights": "w", "sha256": "s", "stride": None, "slopes": None, "precision": "float32", **changes}
        one = results.Evaluation(
            target={"weights": values["weights"]},
            corpus={"name": "text", "split": "valid", "sha256": values["sha256"]},
            protocol={key: values[key] for key in ("stride", "slopes", "precision")},
            provenance={},
        )
        return result_path(Path("runs/x"), one)

    assert path() == path()
    changed = [path(weights="v"), path(sha256="t"), path(stride=4), path(slopes="window=4"), path(precision="bfloat16")]
    assert len({path(), *changed}) == 6


def test_a_stride_of_one_reads_each_window_for_one_token(fresh: Path):
    evaluate(fresh, "--lengths", "32", "--stride", "1", "--max-tokens", "200")
    (one,) = evaluations(fresh)
    (row,) = one.rows
    assert (row.tokens, row.passes, row.tokens_read) == (200, 169, 169 * 32)


def test_a_checkpoint_is_evaluated_without_touching_the_runs_card(fresh: Path):
    evaluate(fresh / "checkpoints" / "step-000000005", "--lengths", "1x,2x")
    (one,) = evaluations(fresh)
    assert one.target["kind"] == "checkpoint"
    assert significance.load_summary(fresh) is None


def test_a_table_that_ends_does_not_end_the_sweep(root: Path, capsys):
    folder = make_run(root, "learned", position="learned")
    assert evaluate(folder, "--lengths", "8,16,17,32") == 0
    (one,) = evaluations(folder)
    assert [row.status for row in one.rows] == ["scored", "scored", "cannot", "cannot"]
    assert "trained at 16, cannot read past 16" in capsys.readouterr().out


def test_a_hugging_face_model_gets_a_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_hugging_face(tmp_path / "gpt2-tiny", "gpt2")
    (tmp_path / "story.txt").write_text(prose(60))
    assert evaluate("gpt2-tiny", "--data", "story.txt", "--lengths", "32,64,128") == 0
    (one,) = evaluations(tmp_path / "runs" / "gpt2-tiny")
    assert [row.status for row in one.rows] == ["scored", "scored", "cannot"]
    assert one.bits_per_byte(one.rows[0]) is not None
    assert "trained at 64, cannot read past 64" in capsys.readouterr().out
    evaluate("gpt2-tiny", "--data", "story.txt", "--lengths", "32", "--out", "elsewhere")
    assert len(evaluations(tmp_path / "elsewhere")) == 1


def test_memory_that_does_not_suffice_is_reported_and_tried_again(root: Path, capsys):
    """The scores of 2,048 tokens written out are 4 × 2,048² × 4 bytes = 67 MB."""
    folder = make_run(root, "t5", position="t5", backend="reference", layers=1)
    words = (folder, "--split", "train", "--max-tokens", "2048", "--lengths", "16,2048")
    assert evaluate(*words, "--memory", "0.04") == 0
    (one,) = evaluations(folder)
    assert [row.status for row in one.rows] == ["scored", "out of memory"]
    assert "out of memory" in capsys.readouterr().out
    evaluate(*words)
    (two,) = evaluations(folder)
    assert [row.status for row in two.rows] == ["scored", "scored"]
    assert two.rows[0] == one.rows[0]


def test_a_text_shorter_than_the_length_is_scored_whole(fresh: Path):
    assert evaluate(fresh, "--lengths", "64", "--max-tokens", "10") == 0
    assert evaluate(fresh, "--lengths", "10", "--max-tokens", "10") == 0
    (stored,) = (json.loads(path.read_text()) for path in (fresh / "eval").glob("*.json"))
    short, whole = stored["rows"]
    assert (short["length"], whole["length"]) == (10, 64)
    assert short["tokens"] == whole["tokens"] == short["tokens_read"] == whole["tokens_read"] == 10
    assert short["nll"] == pytest.approx(whole["nll"], rel=1e-6)


@pytest.mark.parametrize("words", [["--max-tokens", "40"], ["--data", "short.txt"]], ids=["cut", "short"])
def test_lengths_beyond_the_text_are_told_and_never_claimed(fresh: Path, words, capsys, monkeypatch):
    """The model's training length is 16, and an honest card of 40 tokens ends at 32."""
    monkeypatch.chdir(fresh)
    (fresh / "short.txt").write_text("the same forty bytes of text, once again")
    assert evaluate(fresh, "--lengths", "16", "32", "500", *words) == 0
    told = capsys.readouterr()
    assert re.search(r"The text has 4\d tokens: at length 500 it is read whole, which says nothing about", told.err)
    card = json.loads((fresh / "extrapolation.json").read_text())
    assert [row["length"] for row in card["lengths"]] == [16, 32]
    assert "500" not in card["summary"]


def test_a_dry_run_says_the_cost_and_does_nothing(fresh: Path, capsys):
    assert evaluate(fresh, "--lengths", "64", "--stride", "1", "--max-tokens", "100", "--dry-run") == 0
    assert "100 targets at length 64, 37 passes over 2,368 tokens, about" in " ".join(capsys.readouterr().err.split())
    assert not (fresh / "eval").exists()


def test_slopes_need_alibi(root: Path, capsys):
    folder = make_run(root, "plain", position="none")
    assert evaluate(folder, "--lengths", "32", "--slopes", "interpolate") == 2
    assert "--slopes needs a model with ALiBi positions; this one has position='none'" in capsys.readouterr().err
