"""Exports compute the same results as their run in the programs that they are made for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_runs import make_run
from safetensors.torch import load_file, save_file

from trainshort import InputError
from trainshort.cli.main import run as run_command
from trainshort.config.presets import presets
from trainshort.data.tokenizers.builtin import BytePairTokenizer, WordTokenizer
from trainshort.evaluate import significance
from trainshort.evaluate.hf_target import HuggingFaceTarget
from trainshort.interop.export import export
from trainshort.interop.export.verify import verify
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model
from trainshort.utils.io import write_with_checksum

pytest.importorskip("transformers")

TEXT = "The state of the Union is strong. "

# Settings that `hf-mpt` and `hf-bloom` require.
FOR_MPT = {"biases": False}
FOR_BLOOM = {"activation": "gelu_tanh", "embedding_norm": True}

LEARNED_SLOPES = {"position_settings": {"learned_slopes": True}}
ADAPTIVE = {"adaptive": {"cutoffs": (50, 120), "factor": 2}, "activation": "relu", "final_norm": False}
GATED = {"norm": "rms", "gated_feedforward": True, "activation": "silu"}


def max_bias(value: float) -> dict:
    """Return the model settings for ALiBi slopes with another exponent than 8."""
    return {"position_settings": {"max_bias": value}}


def name_cases(cases: list[tuple]) -> list[str]:
    """Return a test id for each case: the export target and the names of the settings."""
    return [f"{case[0]} {' '.join(case[1])}".strip() for case in cases]


# Targets that can be imported again.
ROUND_TRIPS = [
    ("hf-mpt", FOR_MPT),
    ("hf-bloom", FOR_BLOOM),
    ("hf", {"kv_heads": 2, "clip_qkv": 0.5, **LEARNED_SLOPES}),
    ("hf", ADAPTIVE),
    ("hf", {"position": "t5", "parallel_blocks": True, **GATED}),
]


@pytest.mark.parametrize(("to", "settings"), ROUND_TRIPS, ids=name_cases(ROUND_TRIPS))
def test_export_import_export_is_bit_identical(to, settings, tmp_path):
    run = make_run(tmp_path / "run", **settings)
    export(run, to, tmp_path / "out")
    imported_run = import_model(ImportRequest(str(tmp_path / "out")), tmp_path / "imported")
    export(imported_run, to, tmp_path / "out2")
    weights = load_model(run).state_dict()
    imported_weights = load_model(imported_run).state_dict()
    assert weights.keys() == imported_weights.keys()
    assert all(torch.equal(weights[name], imported_weights[name]) for name in weights)
    first_file = (tmp_path / "out" / "model.safetensors").read_bytes()
    second_file = (tmp_path / "out2" / "model.safetensors").read_bytes()
    assert first_file == second_file


@pytest.mark.parametrize("to", ["hf", "hf-mpt"])
def test_export_states_the_training_length(to, tmp_path):
    """`max_seq_len` of an exported MPT is larger than the training length."""
    export(make_run(tmp_path / "run", **FOR_MPT), to, tmp_path / "out")
    assert HuggingFaceTarget(str(tmp_path / "out")).trained_at == 32


EXPORTS = [
    ("hf-mpt", FOR_MPT),
    ("hf-mpt", {**FOR_MPT, "kv_heads": 2, "feedforward_width": 80, "embedding_scale": True, "logit_scale": 0.5}),
    ("hf-mpt", {**FOR_MPT, "tie_embeddings": False, "clip_qkv": 0.4, "softmax_scale": 0.1, "norm_eps": 1e-3}),
    ("hf-mpt", {**FOR_MPT, "embedding_norm": True, "embedding_scale": True}),
    ("hf-mpt", {**FOR_MPT, "embedding_norm": True, "tie_embeddings": False, "logit_scale": 0.5}),
    ("hf-bloom", FOR_BLOOM),
    ("hf-bloom", {**FOR_BLOOM, "biases": False, "kv_heads": 1, "softmax_scale": 0.1, "feedforward_width": 100}),
    ("gguf", {}),
    ("gguf", {"biases": False, "kv_heads": 2, "tie_embeddings": False, **max_bias(12.0)}),
    ("gguf", {"clip_qkv": 0.5, "embedding_scale": True, "feedforward_width": 96}),
    ("gguf", {"softmax_scale": 0.2, "logit_scale": 0.5}),
    ("gguf", {**FOR_BLOOM, "biases": False}),
    ("gguf", {**FOR_BLOOM, **max_bias(12.0)}),
    ("gguf", {**FOR_BLOOM, "clip_qkv": 0.5, "embedding_scale": True}),
    ("ctranslate2", {}),
    ("ctranslate2", {"activation": "relu", "embedding_scale": True, "final_norm": False, "kv_heads": 2}),
    (
        "ctranslate2",
        {**FOR_BLOOM, "biases": False, "feedforward_width": 100, "softmax_scale": 0.2, "tie_embeddings": False},
    ),
    ("hf", {}),
    ("hf", ADAPTIVE),
    ("hf", {"position": "rotary", "kv_heads": 2, **GATED}),
    ("hf", {"position": "t5", "window": 40}),
    ("hf", {"clip_qkv": 0.5, **LEARNED_SLOPES}),
]


@pytest.mark.parametrize(("to", "settings"), EXPORTS, ids=name_cases(EXPORTS))
def test_export_equals_run_in_its_program(to, settings, tmp_path):
    run = make_run(tmp_path / "run", **settings)
    export(run, to, tmp_path / "out")
    verification = verify(tmp_path / "out")
    assert verification.problems == [], verification
    assert [row.length for row in verification.rows] == [32, 64, 256]
    num_compared_at_8x = 64 if to == "gguf" else 256
    assert [row.compared for row in verification.rows] == [32, 64, num_compared_at_8x]
    assert verification.tokenization is not False
    assert verification.greedy is True


def test_verify_detects_another_model(tmp_path):
    """A small difference of the ALiBi slopes is enough."""
    run = make_run(tmp_path / "run", biases=False)
    export(run, "ctranslate2", tmp_path / "out")
    other_run = make_run(tmp_path / "other", biases=False, **max_bias(7.9))
    record_path = tmp_path / "out" / "trainshort.json"
    record = json.loads(record_path.read_text())
    record_path.write_text(json.dumps(record | {"run": str(other_run)}))
    assert verify(tmp_path / "out").problems


def test_verify_rejects_a_run_that_does_not_match(tmp_path):
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    other_runs = {
        "256 tokens in the vocabulary, the run has 300": {"vocab_size": 300},
        "training length 32, the run has 64": {"length": 64},
        "requires a causal model": {"causal": False},
    }
    for number, (pattern, settings) in enumerate(other_runs.items()):
        with pytest.raises(InputError, match=pattern):
            verify(out, make_run(tmp_path / str(number), **settings))
    with pytest.raises(InputError, match=r"There is no run at '.*gone'"):
        verify(out, tmp_path / "gone")
    assert not (out / "verify.json").exists()


def test_verify_rejects_an_invalid_export_record(tmp_path):
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    record_path = out / "trainshort.json"
    record = json.loads(record_path.read_text())
    for length in (-5, 0, True, "32", None):
        record_path.write_text(json.dumps(record | {"trained_at": length}))
        with pytest.raises(InputError, match=r"trainshort\.json: .*training length"):
            verify(out)
    record_path.write_text(json.dumps(record | {"run": None}))
    with pytest.raises(InputError, match=r"trainshort\.json does not name the run .*--run-folder RUN"):
        verify(out)
    assert not (out / "verify.json").exists()


def test_verify_rejects_an_export_with_missing_weights(tmp_path, capfd):
    """transformers would replace missing weights by random numbers."""
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    weights = load_file(out / "model.safetensors")
    del weights[min(weights)]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="lacks weights"):
        verify(out)
    assert capfd.readouterr() == ("", "")


def test_ctranslate2_with_inputs_beyond_its_initial_alibi_table(tmp_path):
    """CTranslate2 reads past the end of its ALiBi table, if the first input has more than 2,048 tokens."""
    run = make_run(tmp_path / "run", biases=False, length=300, layers=1)
    export(run, "ctranslate2", tmp_path / "out")
    verification = verify(tmp_path / "out")
    assert [row.length for row in verification.rows] == [300, 600, 2400]
    assert verification.problems == [], verification


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_gguf_with_small_dtypes(dtype, tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    export(run, "gguf", tmp_path / "small", dtype)
    export(run, "gguf", tmp_path / "f32", "f32")
    small_size = (tmp_path / "small" / "model.gguf").stat().st_size
    f32_size = (tmp_path / "f32" / "model.gguf").stat().st_size
    assert small_size < 0.75 * f32_size
    verification = verify(tmp_path / "small")
    assert verification.problems == [], verification
    assert max(row.kl for row in verification.rows) > 0


# Each entry has an export target, model settings, and a pattern of the error message.
UNSUPPORTED_SETTINGS = [
    ("hf-mpt", {}, "hf-mpt does not support biases. Train with biases=False"),
    ("hf-mpt", {**FOR_MPT, "activation": "relu"}, "activation relu"),
    ("hf-mpt", {**FOR_MPT, "feedforward_width": 300}, "feedforward_width 300"),
    ("hf-mpt", {**FOR_MPT, **max_bias(16.0)}, "max_bias 16.0. Only 8"),
    ("hf-mpt", {**FOR_MPT, "position": "rotary"}, "position rotary. Only alibi"),
    ("hf-mpt", {**FOR_MPT, "position_settings": {"slopes": (0.5, 0.4, 0.3, 0.2)}}, "custom slopes"),
    ("hf-bloom", {"activation": "gelu_tanh"}, "embedding_norm=False. Train with embedding_norm=True"),
    ("hf-bloom", {**FOR_BLOOM, "final_norm": False}, "final_norm=False"),
    ("gguf", {"activation": "relu"}, "gguf does not support activation relu"),
    ("gguf", {"clip_qkv": 0.5, "softmax_scale": 0.2}, "softmax_scale together with clip_qkv"),
    ("gguf", {"window": 9}, "window 9. Train without a window"),
    ("gguf", {"gated_feedforward": True}, "gated_feedforward"),
    ("ctranslate2", max_bias(4.0), "max_bias 4.0. Only 8"),
    ("ctranslate2", {"norm": "rms"}, "norm rms. Only layer is supported. `--to hf` supports every model"),
    ("ctranslate2", {"adaptive": {"cutoffs": (50,), "factor": 2}}, "adaptive embeddings"),
]


@pytest.mark.parametrize(("to", "settings", "pattern"), UNSUPPORTED_SETTINGS, ids=name_cases(UNSUPPORTED_SETTINGS))
def test_unsupported_setting_is_rejected(to, settings, pattern, tmp_path):
    run = make_run(tmp_path / "run", **settings)
    with pytest.raises(InputError, match=pattern):
        export(run, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_invalid_arguments_are_rejected(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match="Unknown export target 'ggml'"):
        export(run, "ggml", tmp_path / "out")
    with pytest.raises(InputError, match="f32, f16, q8_0, got 'q4'"):
        export(run, "gguf", tmp_path / "out", "q4")
    with pytest.raises(InputError, match="There is no run at"):
        export(tmp_path / "nothing", "gguf", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other-file").write_text("")
    with pytest.raises(InputError, match="already exists and is not empty"):
        export(run, "hf", tmp_path / "out")
    with pytest.raises(InputError, match=r"not found: .*trainshort\.json"):
        verify(tmp_path / "out")


def test_run_that_lost_its_tokenizer_is_rejected(tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    # A run that was trained here has data.json. An imported run without a tokenizer has no data.json.
    write_with_checksum(run / "data.json", {"folder": "/gone", "meta": {"tokenizer": "bytes"}})
    (run / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        export(run, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def make_bpe_run(path: Path) -> Path:
    """Make a run with a BPE tokenizer. The vocabulary of the model has one more token than the tokenizer."""
    text = "The state of the Union is strong, and naïve café. " * 50
    tokenizer = BytePairTokenizer.build(iter([text]), 300, None)
    run = make_run(path, biases=False, vocab_size=tokenizer.vocab_size + 1)
    (run / "tokenizer.json").write_text(tokenizer.to_json())
    return run


def make_words_run(path: Path) -> Path:
    """Make a run with a word tokenizer."""
    words = [*WordTokenizer.SPECIAL, "The", "state", "<|endoftext|>", *(f"w{i}" for i in range(249))]
    run = make_run(path, biases=False)
    (run / "tokenizer.json").write_text(WordTokenizer(words).to_json())
    return run


def make_run_without_tokenizer(path: Path) -> Path:
    run = make_run(path, biases=False)
    (run / "tokenizer.json").unlink()
    return run


@pytest.mark.parametrize("to", ["hf-mpt", "hf", "gguf", "ctranslate2"])
def test_bpe_tokenizer_is_exported(to, tmp_path):
    export(make_bpe_run(tmp_path / "run"), to, tmp_path / "out")
    verification = verify(tmp_path / "out")
    assert verification.problems == [], verification
    # CTranslate2 has no tokenizer.
    assert verification.tokenization is (None if to == "ctranslate2" else True)


@pytest.mark.parametrize("to", ["hf-mpt", "hf", "ctranslate2"])
def test_word_tokenizer_is_exported(to, tmp_path):
    export(make_words_run(tmp_path / "run"), to, tmp_path / "out")
    verification = verify(tmp_path / "out")
    assert verification.problems == [], verification
    assert verification.tokenization is (None if to == "ctranslate2" else True)


@pytest.mark.parametrize("to", ["hf-mpt", "hf", "ctranslate2"])
def test_run_without_tokenizer_is_exported(to, tmp_path):
    export(make_run_without_tokenizer(tmp_path / "run"), to, tmp_path / "out")
    verification = verify(tmp_path / "out")
    assert verification.problems == [], verification
    assert verification.tokenization is None


def test_gguf_rejects_unsupported_tokenizers(tmp_path):
    with pytest.raises(InputError, match=r"the tokenizer '.*'\. Only byte-level BPE"):
        export(make_words_run(tmp_path / "words"), "gguf", tmp_path / "out")
    with pytest.raises(InputError, match="a run without a tokenizer"):
        export(make_run_without_tokenizer(tmp_path / "none"), "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_and_verify_commands(tmp_path, capsys):
    run = make_run(tmp_path / "run", kv_heads=2, biases=False)
    out = tmp_path / "out"
    assert run_command(["export", str(run), "--to", "hf-mpt", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "the 2 key-value heads were repeated to 4" in captured.err
    assert "Verified in transformers" in captured.out
    assert "Longer inputs were not evaluated." in (out / "README.md").read_text()
    assert run_command(["verify", str(out)]) == 0

    moved_run = run.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"exported from .*run, which does not exist\. .*--run-folder"):
        run_command(["verify", str(out)])
    assert run_command(["verify", str(out), "--run-folder", str(moved_run)]) == 0
    other_run = make_run(tmp_path / "other", biases=False, **max_bias(7.0))
    assert run_command(["verify", str(out), "--run-folder", str(other_run)]) == 1
    assert "at 32 tokens the logits differ by" in capsys.readouterr().out


def test_portable_recipe_needs_no_transforms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The state of the Union is strong, and so is this. " * 300)
    command = ["train", "portable-128", "--data.corpus", "text.txt", "--out", "run", "--quiet"]
    command += ["--model.layers", "1", "--data.tokenizer", "bytes", "--train.length", "32"]
    command += ["--steps", "20", "--batch", "4"]
    assert run_command(command) == 0
    config = load_model(Path("run")).config
    preset = presets.get("portable")().replace(vocab_size=config.vocab_size, layers=1)
    assert config.model_dump() == preset.model_dump(), "the recipe uses the preset"
    for to in ("hf-mpt", "gguf", "ctranslate2", "hf"):
        applied_transforms = export(Path("run"), to, Path(to))
        assert applied_transforms == ()
        assert verify(Path(to)).problems == []


def test_model_card_has_the_evaluation_of_longer_inputs(tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    text_path = tmp_path / "book.txt"
    text_path.write_text(TEXT * 60)
    assert run_command(["evaluate", str(run), "--data", str(text_path), "--lengths", "1x", "2x", "8x"]) == 0
    export(run, "hf-mpt", tmp_path / "out")
    model_card = (tmp_path / "out" / "README.md").read_text()
    extrapolation_card = significance.load_summary(run)
    assert extrapolation_card["summary"] in model_card
    for entry in extrapolation_card["lengths"]:
        assert f"| {entry['length']} | {entry['perplexity']:.2f} |" in model_card
    assert "| 32 | " in model_card
    assert "2,040 tokens" in model_card


def test_evaluation_of_other_weights_is_not_in_the_model_card(tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    other_run = make_run(tmp_path / "other", biases=False, layers=1)
    text_path = tmp_path / "book.txt"
    text_path.write_text(TEXT * 60)
    assert run_command(["evaluate", str(run), "--data", str(text_path), "--lengths", "1x", "2x"]) == 0
    (other_run / significance.SUMMARY_FILE).write_bytes((run / significance.SUMMARY_FILE).read_bytes())
    export(other_run, "hf-mpt", tmp_path / "out")
    assert "Longer inputs were not evaluated." in (tmp_path / "out" / "README.md").read_text()


def test_missing_package_is_reported(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    export(run, "ctranslate2", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(InputError, match=r"requires ctranslate2\. .*pip install 'trainshort\[interop\]'"):
        verify(tmp_path / "out")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system with 128 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system requires root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a file system: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("to", ["hf-mpt", "hf", "gguf", "ctranslate2"])
def test_failed_export_leaves_no_files_on_a_full_disk(to, tmp_path, small_disk):
    run = make_run(tmp_path / "run", biases=False)
    with pytest.raises(InputError, match=r"Cannot write .*: the disk is full"):
        export(run, to, small_disk / "out")
    assert list(small_disk.iterdir()) == []


def test_failed_import_leaves_no_files_on_a_full_disk(tmp_path, small_disk):
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", tmp_path / "out")
    with pytest.raises(InputError, match=r"Cannot write .*: the disk is full"):
        import_model(ImportRequest(str(tmp_path / "out")), small_disk / "run")
    assert list(small_disk.iterdir()) == []


def test_verify_rejects_truncated_weights(tmp_path):
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    weights_path = out / "model.safetensors"
    content = weights_path.read_bytes()
    weights_path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"transformers cannot open .*out \(.+\)\. Export the run again"):
        verify(out)


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make_special_file", [Path.mkdir, os.mkfifo, make_link_to_itself])
def test_verify_rejects_a_config_that_is_not_a_regular_file(make_special_file, tmp_path):
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    config_path = out / "config.json"
    config_path.unlink()
    make_special_file(config_path)
    with pytest.raises(InputError, match=r"Cannot read .*config\.json: .*Export the run again"):
        verify(out)
