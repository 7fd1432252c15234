"""lm-evaluation-harness runs on runs and exports, and its results agree with `trainshort evaluate`."""

import json
import math
import sys
from pathlib import Path

import pytest
from helpers import prose
from random_runs import make_run

from trainshort import InputError
from trainshort.cli.main import run as run_command
from trainshort.evaluate.results import load
from trainshort.interop.export import export
from trainshort.utils.io import read_with_checksum

LENGTH = 32
NUM_BYTES = LENGTH * 20

ROLLING_TASK = """
task: book
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
CHOICE_TASK = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: [" the cat", " a dog"]
doc_to_target: 0
metric_list:
  - metric: acc
"""
GENERATION_TASK = """
task: write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list:
  - metric: exact_match
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """A working folder with the run `run`, which reads bytes, a text, and three tasks on the text.

    The length of the text is a multiple of the training length.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    text = prose(60)[:NUM_BYTES]
    Path("book.txt").write_text(text)
    Path("book.json").write_text(json.dumps({"text": text}) + "\n")
    short_texts = [text[start : start + 20] for start in (0, 40, 80)]
    Path("short.json").write_text("".join(json.dumps({"text": short_text}) + "\n" for short_text in short_texts))
    Path("tasks").mkdir()
    Path("tasks/book.yaml").write_text(ROLLING_TASK.format(file=tmp_path / "book.json"))
    Path("tasks/choice.yaml").write_text(CHOICE_TASK.format(file=tmp_path / "short.json"))
    Path("tasks/write.yaml").write_text(GENERATION_TASK.format(file=tmp_path / "short.json"))
    make_run(tmp_path / "run", length=LENGTH, biases=False)


def test_rolling_log_likelihood_equals_evaluate(capsys):
    assert run_command(["evaluate", "run", "--data", "book.txt", "--lengths", "1x"]) == 0
    (evaluation_path,) = Path("run/eval").glob("*.json")
    expected_nll = load(evaluation_path).scored[0].nll
    export(Path("run"), "hf", Path("hf"))
    export(Path("run"), "hf-mpt", Path("hf-mpt"))

    options_of_model = {
        "run": [],
        "hf": ["--out", "hf-results", "--length", str(LENGTH)],
        "hf-mpt": ["--out", "hf-mpt-results", "--length", str(LENGTH)],
    }
    for model, options in options_of_model.items():
        assert run_command(["harness", model, "--tasks", "book", "--include-path", "tasks", *options]) == 0
        result_folder = Path("run") if model == "run" else Path(f"{model}-results")
        stored = read_with_checksum(result_folder / "harness" / "book.json")
        bits_per_byte = stored["results"]["book"]["bits_per_byte,none"]
        nll = bits_per_byte * math.log(2) * NUM_BYTES
        assert nll == pytest.approx(expected_nll, rel=1e-5), model
        assert stored["asked"] == {"tasks": ["book"], "length": LENGTH, "limit": None, "shots": None}
        assert stored["target"]["weights"]
    assert "bits_per_byte" in capsys.readouterr().out


def test_choice_and_generation_tasks():
    assert run_command(["harness", "run", "--tasks", "choice,write", "--include-path", "tasks", "--limit", "2"]) == 0
    stored = read_with_checksum(Path("run/harness/choice-write.json"))
    assert stored["results"]["choice"]["acc,none"] in (0, 0.5, 1)
    assert "exact_match,none" in stored["results"]["write"]
    assert stored["n-samples"]["choice"]["effective"] == 2


def test_invalid_options_are_rejected():
    with pytest.raises(InputError, match="--include-path"):
        run_command(["harness", "run", "--tasks", "book", "--include-path", "nowhere"])
    with pytest.raises(InputError, match="--limit must be at least 1, got 0"):
        run_command(["harness", "run", "--tasks", "book", "--limit", "0"])
    with pytest.raises(InputError, match="--tasks"):
        run_command(["harness", "run", "--tasks"])
    with pytest.raises(InputError, match="There is no run"):
        run_command(["harness", "runs/none", "--tasks", "book", "--include-path", "tasks"])
    assert not Path("run/harness").exists()


def test_export_for_another_program_is_rejected():
    export(Path("run"), "ctranslate2", Path("ct2"))
    commands = (
        ["harness", "ct2", "--tasks", "book", "--include-path", "tasks"],
        ["evaluate", "ct2", "--data", "book.txt"],
        ["generate", "ct2", "x"],
        ["import", "ct2", "--out", "y"],
    )
    for command in commands:
        with pytest.raises(InputError, match=r"^ct2 is an export for another program"):
            run_command(command)


def test_invalid_tasks_are_rejected():
    definition = GENERATION_TASK.format(file=Path("short.json").resolve())
    definition = definition.replace("text}", "story}").replace("task: write", "task: unknown-field")
    Path("tasks/unknown-field.yaml").write_text(definition)
    with pytest.raises(InputError, match=r"^lm-evaluation-harness cannot run unknown-field: UndefinedError"):
        run_command(["harness", "run", "--tasks", "unknown-field", "--include-path", "tasks"])
    Path("short.json").unlink()
    with pytest.raises(InputError, match=r"^lm-evaluation-harness cannot run write"):
        run_command(["harness", "run", "--tasks", "write", "--include-path", "tasks"])
    assert not Path("run/harness").exists()


def test_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"requires lm_eval\. .*'lm-eval\[hf\]'"):
        run_command(["harness", "run", "--tasks", "book"])


@pytest.mark.slow
def test_unknown_task_is_rejected():
    """The test is slow, because the harness reads all of its own task definitions."""
    with pytest.raises(InputError, match=r"^lm-evaluation-harness cannot run lambada_opena:"):
        run_command(["harness", "run", "--tasks", "lambada_opena", "--include-path", "tasks"])
