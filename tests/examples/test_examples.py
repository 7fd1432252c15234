"""The examples run, and each one shows what its text says: ALiBi keeps its perplexity on longer inputs."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


def check_extrapolation(perplexities: dict[int, float]) -> None:
    """Check that a model has learned something, and that longer inputs are not worse by more than a tenth."""
    at_training_length = perplexities[min(perplexities)]
    assert at_training_length < 40  # An untrained model has 256.
    assert max(perplexities.values()) < 1.1 * at_training_length


def test_train_loop_on_the_built_in_text(capsys):
    example = runpy.run_path(str(EXAMPLES / "train_loop.py"))
    check_extrapolation(example["main"]([]))
    assert "step  300  loss" in capsys.readouterr().out


def test_train_loop_on_a_text_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 500)
    example = runpy.run_path(str(EXAMPLES / "train_loop.py"))
    perplexities = example["main"]([str(path), "--steps", "60", "--length", "32"])
    assert list(perplexities) == [32, 128, 512]
    assert perplexities[32] < 10


def test_hugging_face_trainer(tmp_path, capsys):
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))
    check_extrapolation(example["main"](["--out", str(tmp_path)]))
    assert (tmp_path / "model.safetensors").exists()
    assert "def __init__(self" in capsys.readouterr().out


def test_notebook():
    """The cells are executed in order, in one namespace."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "extrapolation.ipynb").read_text())
    namespace: dict = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), f"cell {number} of extrapolation.ipynb", "exec")
            exec(code, namespace)
    alibi = dict(zip(namespace["LENGTHS"], namespace["results"]["alibi"], strict=True))
    sinusoidal = dict(zip(namespace["LENGTHS"], namespace["results"]["sinusoidal"], strict=True))
    check_extrapolation(alibi)
    assert sinusoidal[1024] > 1.5 * sinusoidal[64]
