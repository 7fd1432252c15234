"""Imported runs support all commands: evaluate, analyze, generate, train and export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import foreign
import pytest
import torch

from trainshort import InputError
from trainshort.cli.main import run as run_command
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.interop import safetensors_io
from trainshort.interop.export import export
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model

TEXT = "The state of the Union is strong. " * 400
FAIRSEQ = Path(__file__).parent / "fairseq"
DICTIONARY_WORDS = ["the", "state", "of", "union", "is", "strong", *(f"word{i}" for i in range(94))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text, a tiny MPT model `source`, and the imported run `runs/mpt`.

    The tokenizer of the model is the byte tokenizer. The vocabulary is larger than the tokenizer.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign, "WORDS", 300)
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt(clip=2.0, scale=0.2, kv_heads=2)
    foreign.save(Path("source"), config, weights)
    Path("source/tokenizer.json").write_text(ByteTokenizer().to_json())
    Path("text.txt").write_text(TEXT)
    assert run_command(["import", "source", "--out", "runs/mpt"]) == 0
    return tmp_path


def import_fairseq_checkpoint() -> None:
    """Import a fairseq checkpoint as `runs/fairseq`, and write a text with the words of its dictionary."""
    dictionary_lines = [f"{word} {1000 - i}\n" for i, word in enumerate(DICTIONARY_WORDS)]
    text_lines = [f"the state of the union is strong word{i % 90} .\n" for i in range(4000)]
    Path("dict.txt").write_text("".join(dictionary_lines))
    Path("text.txt").write_text("".join(text_lines))
    checkpoint = str(FAIRSEQ / "adaptive-cfg.pt")
    assert run_command(["import", checkpoint, "--dictionary", "dict.txt", "--out", "runs/fairseq"]) == 0


@pytest.mark.parametrize("name", ["mpt", "fairseq"])
def test_imported_run_supports_all_commands(folder, name, capsys):
    if name == "fairseq":
        import_fairseq_checkpoint()
    run = f"{folder}/runs/{name}"
    text = f"{folder}/text.txt"
    os.chdir("/")  # The commands must not depend on the working folder.
    assert run_command(["evaluate", run, "--data", text, "--lengths", "1x", "4x"]) == 0
    assert "good to" in capsys.readouterr().out
    assert run_command(["analyze", run, "--only", "reach", "--data", text, "--max-tokens", "1000"]) == 0
    generate_options = ["--tokens", "40", "--mode", "bounded", "--temperature", "0"]
    assert run_command(["generate", run, "the state", *generate_options]) == 0

    os.chdir(folder)
    before = load_model(Path(run)).state_dict()
    train_options = ["--data.corpus", "text.txt", "--steps", "4", "--batch", "2", "--optim.lr", "0.01", "--quiet"]
    assert run_command(["train", run, "--resume", *train_options]) == 0
    trained = load_model(Path(run)).state_dict()
    assert not torch.equal(before["layers.0.attention.qkv.weight"], trained["layers.0.attention.qkv.weight"])

    assert run_command(["export", run, "--to", "hf", "--out", "exported"]) == 0
    assert "Verified in transformers" in capsys.readouterr().out
    imported_again = load_model(import_model(ImportRequest("exported"), Path("runs/again"))).state_dict()
    assert all(torch.equal(weight, imported_again[weight_name]) for weight_name, weight in trained.items())


@pytest.mark.parametrize("name", [*foreign.FOREIGN_MODELS, "fairseq"])
def test_import_export_import_is_bit_identical(name, tmp_path):
    torch.manual_seed(0)
    if name == "fairseq":
        source = FAIRSEQ / "adaptive-args.pt"
    else:
        config, weights, _ = foreign.FOREIGN_MODELS[name]()
        source = foreign.save(tmp_path / "source", config, weights)
    first_run = import_model(ImportRequest(str(source)), tmp_path / "first")
    export(first_run, "hf", tmp_path / "out")
    second_run = import_model(ImportRequest(str(tmp_path / "out")), tmp_path / "second")
    first = load_model(first_run)
    second = load_model(second_run)
    assert first.config == second.config
    second_weights = second.state_dict()
    assert all(torch.equal(weight, second_weights[name]) for name, weight in first.state_dict().items())


def test_generate_loads_a_hugging_face_folder_without_a_run(folder, capsys):
    options = ["The state", "--tokens", "20", "--temperature", "0"]
    assert run_command(["generate", "runs/mpt", *options]) == 0
    expected_text = capsys.readouterr().out
    assert run_command(["generate", "source", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text
    assert "trainshort import source" in captured.err
    assert [path.name for path in Path("runs").iterdir()] == ["mpt"], "no run folder is written"

    export(Path("runs/mpt"), "hf", Path("exported"))
    assert run_command(["generate", "exported", *options]) == 0
    assert capsys.readouterr().out == expected_text


def test_generate_prints_replacement_characters_for_unknown_tokens(folder, capsys):
    """The vocabulary of the model has tokens that the tokenizer cannot decode."""
    options = ["--tokens", "200", "--temperature", "9", "--seed", "1"]
    assert run_command(["generate", "source", "The state", *options]) == 0
    assert "\ufffd" in capsys.readouterr().out


def test_generate_with_a_convertible_folder_suggests_convert(folder):
    Path("source/config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InputError, match="trainshort convert makes an ALiBi model of it"):
        run_command(["generate", "source", "The state"])


def test_imported_run_can_be_trained(folder):
    before = load_model(Path("runs/mpt")).state_dict()
    command = ["train", "runs/mpt", "--resume", "--data.corpus", "text.txt", "--steps", "4", "--batch", "2"]
    command += ["--optim.lr", "0.01", "--quiet"]
    with pytest.raises(InputError, match=r"model\.layers=2.*model\.layers=3"):
        run_command([*command, "--model.layers", "3"])
    assert run_command(command) == 0
    after = load_model(Path("runs/mpt")).state_dict()
    assert all(after[name].shape == weight.shape for name, weight in before.items())
    assert not torch.equal(after["layers.0.attention.qkv.weight"], before["layers.0.attention.qkv.weight"])
    with pytest.raises(InputError, match="was started with"):
        run_command([*command, "--batch", "1"])


def test_run_without_tokenizer_is_rejected_by_text_commands(folder):
    Path("source/tokenizer.json").unlink()
    import_model(ImportRequest("source"), Path("runs/no-tokenizer"))
    with pytest.raises(InputError, match="no tokenizer"):
        run_command(["generate", "runs/no-tokenizer", "a"])
    with pytest.raises(InputError, match=r"source has no tokenizer\.json. Give --tokenizer FILE"):
        run_command(["generate", "source", "a"])
    with pytest.raises(InputError, match="no tokenizer"):
        run_command(["evaluate", "runs/no-tokenizer", "--data", "text.txt"])


# Prints the peak memory of an import in bytes. `ru_maxrss` would include the memory of the parent process, so the peak
# is measured with `PeakMemory`.
MEASURE_IMPORT = """
import sys, torch
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.utils.machine import PeakMemory
from pathlib import Path
peak = PeakMemory(torch.device("cpu"))
import_model(ImportRequest(sys.argv[1]), Path(sys.argv[2]))
print(peak.bytes())
"""


@pytest.mark.slow
def test_import_needs_little_memory(tmp_path):
    """The peak memory of an import, with Python and PyTorch, is the size of the weights plus at most one gigabyte."""
    width = 1024
    vocab_size = 20_000
    num_layers = 5
    shapes = {"transformer.wte.weight": (vocab_size, width)}
    for i in range(num_layers):
        prefix = f"transformer.blocks.{i}."
        shapes[prefix + "norm_1.weight"] = (width,)
        shapes[prefix + "attn.Wqkv.weight"] = (3 * width, width)
        shapes[prefix + "attn.out_proj.weight"] = (width, width)
        shapes[prefix + "norm_2.weight"] = (width,)
        shapes[prefix + "ffn.up_proj.weight"] = (4 * width, width)
        shapes[prefix + "ffn.down_proj.weight"] = (width, 4 * width)
    shapes["transformer.norm_f.weight"] = (width,)
    config = {
        "model_type": "mpt",
        "d_model": width,
        "n_heads": 16,
        "n_layers": num_layers,
        "vocab_size": vocab_size,
        "max_seq_len": 64,
        "attn_config": {"alibi": True},
    }
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    weights_path = source / "model.safetensors"
    safetensors_io.write(weights_path, shapes, lambda name: torch.full(shapes[name], 0.01))
    weights_size = weights_path.stat().st_size
    assert weights_size > 300e6

    command = [sys.executable, "-c", MEASURE_IMPORT, str(source), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout)
    assert peak < weights_size + 1e9, f"{peak / 1e6:.0f} MB for {weights_size / 1e6:.0f} MB of weights"
    assert load_config(tmp_path / "run" / "config.json").model.layers == num_layers
