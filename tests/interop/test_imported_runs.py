"""An imported run is a run: it evaluates, is analyzed, generates in bounded memory and trains on."""

import os
from pathlib import Path

import foreign
import pytest
import torch

from trainshort import InputError
from trainshort.checkpoint import load_model
from trainshort.cli import run as command
from trainshort.data.tokenizer import ByteTokenizer
from trainshort.interop.importing import ImportRequest, import_model

TEXT = "The state of the Union is strong. " * 400


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, with a text and a tiny MPT over bytes that leaves room for more tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign, "WORDS", 300)
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt(clip=2.0, scale=0.2, kv=2)
    foreign.save(Path("theirs"), config, weights)
    Path("theirs/tokenizer.json").write_text(ByteTokenizer().to_json())
    Path("text.txt").write_text(TEXT)
    assert command(["import", "theirs", "--out", "runs/it"]) == 0
    return tmp_path


def test_evaluate_analyze_generate(place, capsys):
    os.chdir("/")  # from any working directory
    assert command(["evaluate", f"{place}/runs/it", "--data", f"{place}/text.txt", "--lengths", "1x", "4x"]) == 0
    assert "128" in capsys.readouterr().out
    assert (
        command(
            ["analyze", f"{place}/runs/it", "--only", "reach", "--data", f"{place}/text.txt", "--max-tokens", "2000"]
        )
        == 0
    )
    asked = ["The state", "--tokens", "40", "--mode", "bounded", "--temperature", "0"]
    assert command(["generate", f"{place}/runs/it", *asked]) == 0


def test_training_on(place):
    before = load_model(Path("runs/it")).state_dict()
    asked = ["--data.corpus", "text.txt", "--steps", "4", "--batch", "2", "--optim.lr", "0.01", "--quiet"]
    with pytest.raises(InputError, match=r"was started with model\.layers=2, but model\.layers=3 was asked for"):
        command(["train", "runs/it", "--resume", *asked, "--model.layers", "3"])
    assert command(["train", "runs/it", "--resume", *asked]) == 0
    after = load_model(Path("runs/it")).state_dict()
    assert all(after[name].shape == weight.shape for name, weight in before.items())
    assert not torch.equal(after["layers.0.attention.qkv.weight"], before["layers.0.attention.qkv.weight"])
    with pytest.raises(InputError, match="was started with"):
        command(["train", "runs/it", "--resume", *asked, "--batch", "1"])


def test_a_run_without_tokenizer_says_so(place):
    Path("theirs/tokenizer.json").unlink()
    import_model(ImportRequest("theirs"), Path("runs/dumb"))
    with pytest.raises(InputError, match="no tokenizer"):
        command(["generate", "runs/dumb", "a"])
    with pytest.raises(InputError, match=r"theirs is a Hugging Face model\. Bring it in first: trainshort import"):
        command(["generate", "theirs", "a"])
    with pytest.raises(InputError, match="no tokenizer"):
        command(["evaluate", "runs/dumb", "--data", "text.txt"])
