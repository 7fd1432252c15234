"""lm-evaluation-harness runs on runs and exports, and its rolling log-likelihood is our non-overlapping loss."""

import json
import math
import sys
from pathlib import Path

import pytest
from helpers import prose
from random_runs import make_run

from trainshort import InputError
from trainshort.cli.main import run as command
from trainshort.evaluate.results import load
from trainshort.interop.export import export
from trainshort.utils.io import read_with_checksum

ROLLING = """
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
CHOICE = """
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
WRITE = """
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A run over bytes trained at 32, a text of a whole number of blocks, and three tasks over it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    text = prose(60)[: 32 * 20]
    Path("book.txt").write_text(text)
    Path("book.json").write_text(json.dumps({"text": text}) + "\n")
    Path("short.json").write_text("".join(json.dumps({"text": text[i : i + 20]}) + "\n" for i in (0, 40, 80)))
    Path("tasks").mkdir()
    for name, task, file in (("book", ROLLING, "book"), ("choice", CHOICE, "short"), ("write", WRITE, "short")):
        Path(f"tasks/{name}.yaml").write_text(task.format(file=tmp_path / f"{file}.json"))
    return make_run(tmp_path / "run", biases=False)


def test_runs_and_exports_agree_with_our_own_evaluation(place, capsys):
    assert command(["evaluate", "run", "--data", "book.txt", "--lengths", "1x"]) == 0
    (path,) = Path("run/eval").glob("*.json")
    ours = load(path).scored[0]
    for to in ("hf", "hf-mpt"):
        export(Path("run"), to, Path(to))
    for model, out in (("run", "run"), ("hf", "of-hf"), ("hf-mpt", "of-mpt")):
        more = [] if model == "run" else ["--out", out, "--length", "32"]
        assert command(["harness", model, "--tasks", "book", "--include", "tasks", *more]) == 0
        stored = read_with_checksum(Path(out) / "harness" / "book.json")
        nats = stored["results"]["book"]["bits_per_byte,none"] * math.log(2) * 32 * 20
        assert nats == pytest.approx(ours.nll, rel=1e-5), model
        assert stored["asked"] == {"tasks": ["book"], "length": 32, "limit": None, "shots": None}
        assert stored["target"]["weights"]
    assert "bits_per_byte" in capsys.readouterr().out


def test_other_kinds_of_tasks(place):
    assert command(["harness", "run", "--tasks", "choice,write", "--include", "tasks", "--limit", "2"]) == 0
    found = read_with_checksum(Path("run/harness/choice-write.json"))
    assert found["results"]["choice"]["acc,none"] in (0, 0.5, 1)
    assert "exact_match,none" in found["results"]["write"]
    assert found["n-samples"]["choice"]["effective"] == 2


def test_bad_requests(place, monkeypatch):
    with pytest.raises(InputError, match="--include is a folder of task definitions"):
        command(["harness", "run", "--tasks", "book", "--include", "nowhere"])
    with pytest.raises(InputError, match="--limit must be at least 1, got 0"):
        command(["harness", "run", "--tasks", "book", "--limit", "0"])
    with pytest.raises(InputError, match="--tasks needs a value"):
        command(["harness", "run", "--tasks"])
    with pytest.raises(InputError, match="There is no run"):
        command(["harness", "runs/none", "--tasks", "book", "--include", "tasks"])
    export(Path("run"), "ctranslate2", Path("ct2"))
    with pytest.raises(InputError, match=r"^ct2 is an export for another program.*--to hf"):
        command(["harness", "ct2", "--tasks", "book", "--include", "tasks"])
    for other in (["evaluate", "ct2", "--data", "book.txt"], ["generate", "ct2", "x"], ["import", "ct2", "--out", "y"]):
        with pytest.raises(InputError, match=r"^ct2 is an export for another program"):
            command(other)
    definition = WRITE.format(file=Path("short.json").resolve()).replace("text}", "story}")
    Path("tasks/field.yaml").write_text(definition.replace("task: write", "task: field"))
    with pytest.raises(InputError, match=r"^lm-evaluation-harness cannot run field: UndefinedError"):
        command(["harness", "run", "--tasks", "field", "--include", "tasks"])
    Path("short.json").unlink()
    with pytest.raises(InputError, match=r"^lm-evaluation-harness cannot run write"):
        command(["harness", "run", "--tasks", "write", "--include", "tasks"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"tasks requires lm_eval\. Install it with: pip install 'lm-eval\[hf\]'"):
        command(["harness", "run", "--tasks", "book"])
    assert not Path("run/harness").exists()


@pytest.mark.slow
def test_unknown_task(place):
    """The harness reads its own fourteen thousand task definitions, which takes half a minute."""
    with pytest.raises(InputError, match=r"^lm-evaluation-harness cannot run lambada_opena:"):
        command(["harness", "run", "--tasks", "lambada_opena", "--include", "tasks"])
