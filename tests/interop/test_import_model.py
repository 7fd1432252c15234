"""An imported run is a run: it evaluates, is analyzed, generates in bounded memory and trains on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import foreign
import pytest
import torch

from trainshort import InputError
from trainshort.cli.main import run as command
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.interop.export import export
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model

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


FAIRSEQ = Path(__file__).parent / "fairseq"
WORDS = ["the", "state", "of", "union", "is", "strong", *(f"word{i}" for i in range(94))]


def from_fairseq():
    Path("dict.txt").write_text("".join(f"{word} {1000 - i}\n" for i, word in enumerate(WORDS)))
    Path("text.txt").write_text("".join(f"the state of the union is strong word{i % 90} .\n" for i in range(4000)))
    checkpoint = str(FAIRSEQ / "adaptive-cfg.pt")
    assert command(["import", checkpoint, "--dictionary", "dict.txt", "--out", "runs/authors"]) == 0


@pytest.mark.parametrize("name", ["it", "authors"], ids=["mpt", "fairseq"])
def test_everything_that_runs_can_do(place, name, capsys):
    """Evaluated, analyzed, continued in bounded memory, trained on, exported and verified, and imported again."""
    if name == "authors":
        from_fairseq()
    run, text = f"{place}/runs/{name}", f"{place}/text.txt"
    os.chdir("/")  # from any working directory
    assert command(["evaluate", run, "--data", text, "--lengths", "1x", "4x"]) == 0
    assert "good to" in capsys.readouterr().out
    assert command(["analyze", run, "--only", "reach", "--data", text, "--max-tokens", "1000"]) == 0
    asked = ["the state", "--tokens", "40", "--mode", "bounded", "--temperature", "0"]
    assert command(["generate", run, *asked]) == 0
    os.chdir(place)
    before = load_model(Path(run)).state_dict()
    train = ["--data.corpus", "text.txt", "--steps", "4", "--batch", "2", "--optim.lr", "0.01", "--quiet"]
    assert command(["train", run, "--resume", *train]) == 0
    after = load_model(Path(run)).state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert "layers.0.attention.qkv.weight" in moved
    assert command(["export", run, "--to", "hf", "--out", "exported"]) == 0
    assert "Verified in transformers" in capsys.readouterr().out
    again = load_model(import_model(ImportRequest("exported"), Path("runs/again"))).state_dict()
    assert all(torch.equal(after[key], again[key]) for key in after)


BACK = {**foreign.BY_HAND, "fairseq": None}


@pytest.mark.parametrize("make", BACK.values(), ids=BACK)
def test_in_out_and_in_again_is_equal_to_the_bit(make, tmp_path):
    torch.manual_seed(0)
    source = FAIRSEQ / "adaptive-args.pt" if make is None else tmp_path / "theirs"
    if make is not None:
        config, weights, _ = make()
        foreign.save(source, config, weights)
    first = import_model(ImportRequest(str(source)), tmp_path / "first")
    export(first, "hf", tmp_path / "out")
    second = import_model(ImportRequest(str(tmp_path / "out")), tmp_path / "second")
    before, after = load_model(first), load_model(second)
    assert before.config == after.config
    weights = after.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in before.state_dict().items())


def test_a_folder_is_imported_for_one_use(place, capsys):
    asked = ["The state", "--tokens", "20", "--temperature", "0"]
    assert command(["generate", "runs/it", *asked]) == 0
    expected = capsys.readouterr().out
    assert command(["generate", "theirs", *asked]) == 0
    told = capsys.readouterr()
    assert told.out == expected
    assert "theirs is a Hugging Face model. It was imported into memory." in told.err
    assert "trainshort import theirs" in told.err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["it"]
    export(Path("runs/it"), "hf", Path("exported"))
    assert command(["generate", "exported", *asked]) == 0
    assert capsys.readouterr().out == expected
    assert command(["generate", "exported", "The state", "--tokens", "200", "--temperature", "9", "--seed", "1"]) == 0
    assert "\ufffd" in capsys.readouterr().out, "tokens that the tokenizer has no text for"
    Path("exported/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InputError, match="trainshort convert makes an ALiBi model of it"):
        command(["generate", "exported", *asked])


def test_training_on(place):
    before = load_model(Path("runs/it")).state_dict()
    asked = ["--data.corpus", "text.txt", "--steps", "4", "--batch", "2", "--optim.lr", "0.01", "--quiet"]
    with pytest.raises(InputError, match=r"was started with model\.layers=2, but got model\.layers=3"):
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
    with pytest.raises(InputError, match=r"theirs has no tokenizer\.json. Give --tokenizer FILE"):
        command(["generate", "theirs", "a"])
    with pytest.raises(InputError, match="no tokenizer"):
        command(["evaluate", "runs/dumb", "--data", "text.txt"])


PEAK = """
import sys, torch
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.machine import Peak
from pathlib import Path
peak = Peak(torch.device("cpu"))
import_model(ImportRequest(sys.argv[1]), Path(sys.argv[2]))
print(peak.bytes())
"""
"""Not by `ru_maxrss`, which a process takes over from the one that started it."""


@pytest.mark.slow
def test_a_model_passes_through_in_little_memory(tmp_path):
    """Peak memory of an import, torch and the interpreter included: the weights and a gigabyte at most."""
    from trainshort.interop import safetensors_io

    shapes, (width, words) = {}, (1024, 20_000)
    shapes["transformer.wte.weight"] = (words, width)
    for i in range(5):
        at = f"transformer.blocks.{i}."
        shapes |= {at + "norm_1.weight": (width,), at + "attn.Wqkv.weight": (3 * width, width)}
        shapes |= {at + "attn.out_proj.weight": (width, width), at + "norm_2.weight": (width,)}
        shapes |= {at + "ffn.up_proj.weight": (4 * width, width), at + "ffn.down_proj.weight": (width, 4 * width)}
    shapes["transformer.norm_f.weight"] = (width,)
    config = {"model_type": "mpt", "d_model": width, "n_heads": 16, "n_layers": 5, "vocab_size": words,
              "max_seq_len": 64, "attn_config": {"alibi": True}}  # fmt: skip
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    safetensors_io.write(tmp_path / "theirs" / "model.safetensors", shapes, lambda name: torch.full(shapes[name], 0.01))
    size = (tmp_path / "theirs" / "model.safetensors").stat().st_size
    assert size > 300e6
    words = [sys.executable, "-c", PEAK, str(tmp_path / "theirs"), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < size + 1e9, f"{int(done.stdout) / 1e6:.0f} MB for {size / 1e6:.0f} MB of weights"
    assert load_config(tmp_path / "run" / "config.json").model.layers == 5
