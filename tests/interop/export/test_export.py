"""Exports load in the real engines and compute what our model computes; what does not fit is refused by its setting."""

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
from trainshort.cli.main import run as command
from trainshort.config.presets import presets
from trainshort.data.tokenizers.builtin import WordTokenizer
from trainshort.evaluate import significance
from trainshort.evaluate.hf_target import HuggingFaceTarget
from trainshort.interop.export import export
from trainshort.interop.export.verify import verify
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model
from trainshort.utils.io import write_with_checksum

pytest.importorskip("transformers")

ROUND_TRIPS = [
    ("hf-mpt", {"biases": False}),
    ("hf-bloom", {"activation": "gelu_tanh", "embedding_norm": True}),
    ("hf", {"kv_heads": 2, "clip_qkv": 0.5, "learned_slopes": True}),
    ("hf", {"adaptive": {"cutoffs": (50, 120), "factor": 2}, "activation": "relu", "final_norm": False}),
    ("hf", {"position": "t5", "norm": "rms", "gated_feedforward": True, "activation": "silu", "parallel_blocks": True}),
]
"""Every target that can also be imported."""


@pytest.mark.parametrize(("to", "settings"), ROUND_TRIPS, ids=[f"{to} {' '.join(s)}" for to, s in ROUND_TRIPS])
def test_round_trips_are_equal_to_the_bit(to, settings, tmp_path):
    run = make_run(tmp_path / "run", **settings)
    export(run, to, tmp_path / "out")
    again = import_model(ImportRequest(str(tmp_path / "out")), tmp_path / "again")
    export(again, to, tmp_path / "out2")
    before, after = load_model(run).state_dict(), load_model(again).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "out2"))
    assert first == second


@pytest.mark.parametrize("to", ["hf", "hf-mpt"])
def test_evaluate_and_harness_know_the_training_length_of_an_export(to, tmp_path):
    """An MPT's config has room for 16 times as much, and our class has no table that would tell."""
    export(make_run(tmp_path / "run", biases=False), to, tmp_path / "out")
    assert HuggingFaceTarget(str(tmp_path / "out")).trained_at == 32


GELU = {"biases": False}
TANH = {"activation": "gelu_tanh", "embedding_norm": True}
EXPORTS = [
    ("hf-mpt", GELU),
    ("hf-mpt", {**GELU, "kv_heads": 2, "feedforward_width": 80, "embedding_scale": True, "logit_scale": 0.5}),
    ("hf-mpt", {**GELU, "tie_embeddings": False, "clip_qkv": 0.4, "softmax_scale": 0.1, "norm_eps": 1e-3}),
    ("hf-mpt", {**GELU, "embedding_norm": True, "embedding_scale": True}),
    ("hf-mpt", {**GELU, "embedding_norm": True, "tie_embeddings": False, "logit_scale": 0.5}),
    ("hf-bloom", TANH),
    ("hf-bloom", {**TANH, "biases": False, "kv_heads": 1, "softmax_scale": 0.1, "feedforward_width": 100}),
    ("gguf", {}),
    ("gguf", {**GELU, "kv_heads": 2, "max_bias": 12.0, "tie_embeddings": False}),
    ("gguf", {"clip_qkv": 0.5, "embedding_scale": True, "feedforward_width": 96}),
    ("gguf", {"softmax_scale": 0.2, "logit_scale": 0.5}),
    ("gguf", {**TANH, "biases": False}),
    ("gguf", {**TANH, "max_bias": 12.0}),
    ("gguf", {**TANH, "clip_qkv": 0.5, "embedding_scale": True}),
    ("ctranslate2", {}),
    ("ctranslate2", {"activation": "relu", "embedding_scale": True, "final_norm": False, "kv_heads": 2}),
    ("ctranslate2", {**TANH, "biases": False, "feedforward_width": 100, "softmax_scale": 0.2, "tie_embeddings": False}),
    ("hf", {}),
    ("hf", {"adaptive": {"cutoffs": (50, 120), "factor": 2}, "activation": "relu", "final_norm": False}),
    ("hf", {"position": "rotary", "norm": "rms", "gated_feedforward": True, "activation": "silu", "kv_heads": 2}),
    ("hf", {"position": "t5", "window": 40}),
    ("hf", {"learned_slopes": True, "clip_qkv": 0.5}),
]


@pytest.mark.parametrize(("to", "settings"), EXPORTS, ids=[f"{to} {' '.join(s)}" for to, s in EXPORTS])
def test_the_real_engines_compute_what_ours_computes(to, settings, tmp_path):
    run = make_run(tmp_path / "run", **settings)
    export(run, to, tmp_path / "out")
    report = verify(tmp_path / "out")
    assert report.problems == [], report
    assert [row.length for row in report.rows] == [32, 64, 256]
    assert [row.compared for row in report.rows] == [32, 64, 64 if to == "gguf" else 256]
    assert report.tokenization is not False
    assert report.greedy is True


def test_verify_notices_a_wrong_model(tmp_path):
    """The check itself can fail: one slope's worth of difference, and other weights."""
    run = make_run(tmp_path / "run", biases=False)
    export(run, "ctranslate2", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "trainshort.json").read_text())
    other = make_run(tmp_path / "other", biases=False, max_bias=7.9)
    (tmp_path / "out" / "trainshort.json").write_text(json.dumps(record | {"run": str(other)}))
    assert verify(tmp_path / "out").problems


def test_verify_with_what_is_another_run_is_told(tmp_path):
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    others = {
        "knows 256 token types, and .* has 300: they are not one model": {"vocab_size": 300},
        "says it was trained at 32 tokens, and .* has 64: they are not one model": {"length": 64},
        "requires a causal model": {"causal": False},
    }
    for number, (told, settings) in enumerate(others.items()):
        with pytest.raises(InputError, match=told):
            verify(out, make_run(tmp_path / str(number), **settings))
    with pytest.raises(InputError, match=r"There is no run at '.*gone'"):  # and not: was made of it
        verify(out, tmp_path / "gone")
    record = json.loads((out / "trainshort.json").read_text())
    for length in (-5, 0, True, "32", None):
        (out / "trainshort.json").write_text(json.dumps(record | {"trained_at": length}))
        with pytest.raises(InputError, match="does not say what was exported"):
            verify(out)
    (out / "trainshort.json").write_text(json.dumps(record | {"run": None}))
    with pytest.raises(InputError, match=r"does not say of which run it was made\. Say it: --run-folder RUN\."):
        verify(out)
    assert not (out / "verify.json").exists()


def test_weights_that_an_export_lacks_are_told_and_not_made_up(tmp_path, capfd):
    out = tmp_path / "out"
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", out)
    weights = load_file(out / "model.safetensors")
    save_file({name: weights[name] for name in sorted(weights)[1:]}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights \(.*\)"):
        verify(out)
    assert capfd.readouterr() == ("", "")


def test_ctranslate2_past_its_table(tmp_path):
    """Its table of biases grows by 2,048 keys a call, and a first call past it reads what is not its own: the check
    warms it up."""
    run = make_run(tmp_path / "run", biases=False, length=300, layers=1)
    export(run, "ctranslate2", tmp_path / "out")
    report = verify(tmp_path / "out")
    assert [row.length for row in report.rows] == [300, 600, 2400]
    assert report.problems == [], report


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_gguf_in_fewer_bits(kind, tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    export(run, "gguf", tmp_path / "out", kind)
    export(run, "gguf", tmp_path / "whole", "f32")
    sizes = [(tmp_path / name / "model.gguf").stat().st_size for name in ("out", "whole")]
    assert sizes[0] < 0.75 * sizes[1]
    report = verify(tmp_path / "out")
    assert report.problems == [], report
    assert max(row.kl for row in report.rows) > 0


REFUSED = [
    ("hf-mpt", {}, "hf-mpt cannot carry a model with biases; train with biases=False, as the recipe portable-128 does"),
    ("hf-mpt", {**GELU, "activation": "relu"}, "with activation relu; train with gelu"),
    ("hf-mpt", {**GELU, "feedforward_width": 300}, "with ffn 300; train with ffn at most four times width"),
    ("hf-mpt", {**GELU, "max_bias": 16.0}, "with max_bias 16.0; that class follows 8 alone"),
    ("hf-mpt", {**GELU, "position": "rotary"}, "with position rotary; it knows ALiBi alone"),
    ("hf-mpt", {**GELU, "position_settings": {"slopes": (0.5, 0.4, 0.3, 0.2)}}, "with slopes of its own"),
    ("hf-bloom", {"activation": "gelu_tanh"}, "with embedding_norm=False; train with embedding_norm=True"),
    ("hf-bloom", {**TANH, "final_norm": False}, "with final_norm=False"),
    ("gguf", {"activation": "relu"}, "gguf cannot carry a model with activation relu"),
    ("gguf", {"clip_qkv": 0.5, "softmax_scale": 0.2}, "softmax_scale together with clip_qkv"),
    ("gguf", {"window": 9}, "with window 9; train without a window"),
    ("gguf", {"gated_feedforward": True}, "gated feed-forward layers"),
    ("ctranslate2", {"max_bias": 4.0}, "with max_bias 4.0; it follows 8 alone"),
    ("ctranslate2", {"norm": "rms"}, "with norm rms; it has LayerNorm. --to hf carries every model"),
    ("ctranslate2", {"adaptive": {"cutoffs": (50,), "factor": 2}}, "with an adaptive vocabulary"),
]


@pytest.mark.parametrize(("to", "settings", "sentence"), REFUSED, ids=[f"{to} {s}" for to, s, _ in REFUSED])
def test_what_does_not_fit_is_refused_by_its_setting(to, settings, sentence, tmp_path):
    run = make_run(tmp_path / "run", **settings)
    with pytest.raises(InputError, match=sentence):
        export(run, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_requests(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match="Unknown export target 'ggml'"):
        export(run, "ggml", tmp_path / "out")
    with pytest.raises(InputError, match="--to gguf writes f32, f16, q8_0, not 'q4'"):
        export(run, "gguf", tmp_path / "out", "q4")
    with pytest.raises(InputError, match="There is no run at"):
        export(tmp_path / "nothing", "gguf", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(InputError, match="already exists and is not empty"):
        export(run, "hf", tmp_path / "out")
    with pytest.raises(InputError, match=r"no file .*trainshort\.json"):
        verify(Path(tmp_path / "out"))


def test_a_run_copied_without_its_tokenizer_is_not_exported_without_one(tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    write_with_checksum(run / "data.json", {"folder": "/gone", "meta": {"tokenizer": "bytes"}})
    (run / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"was copied without its tokenizer\.json"):
        export(run, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def bpe_run(path: Path) -> Path:
    """A run with a BPE trained on a little text, and one token more in the model than it makes."""
    from trainshort.data.tokenizers.builtin import BytePairTokenizer

    tokenizer = BytePairTokenizer.build(iter(["The state of the Union is strong, and naïve café. " * 50]), 300, None)
    run = make_run(path, biases=False, vocab_size=tokenizer.vocab_size + 1)
    (run / "tokenizer.json").write_text(tokenizer.to_json())
    return run


@pytest.mark.parametrize("to", ["hf-mpt", "hf", "gguf", "ctranslate2"])
@pytest.mark.parametrize("kind", ["bpe", "words", "none"])
def test_tokenizers(to, kind, tmp_path):
    if kind == "bpe":
        run = bpe_run(tmp_path / "run")
    else:
        run = make_run(tmp_path / "run", biases=False)
        words = WordTokenizer([*WordTokenizer.SPECIAL, "The", "state", "<|endoftext|>", *(f"w{i}" for i in range(249))])
        (run / "tokenizer.json").unlink()
        if kind == "words":
            (run / "tokenizer.json").write_text(words.to_json())
    if to == "gguf" and kind != "bpe":
        what = {"words": "the tokenizer '.*', which is no byte-level BPE; train with --data.tokenizer bpe or bytes"}
        with pytest.raises(InputError, match=f"gguf cannot carry {what.get(kind, 'a run without a tokenizer')}"):
            export(run, to, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    export(run, to, tmp_path / "out")
    report = verify(tmp_path / "out")
    assert report.problems == [], report
    text = kind == "bpe" or (kind == "words" and to.startswith("hf"))
    assert report.tokenization is (True if text and to != "ctranslate2" else None)


def test_the_commands(tmp_path, capsys):
    run, out = make_run(tmp_path / "run", kv_heads=2, biases=False), tmp_path / "out"
    assert command(["export", str(run), "--to", "hf-mpt", "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert "2 key heads repeated to 4" in told.err
    assert "Verified in transformers" in told.out
    assert "Trained at 32 tokens. Longer inputs: not measured." in (out / "README.md").read_text()
    assert command(["verify", str(out)]) == 0
    run.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"was made of .*run, which is not there\. Say where it is: --run-folder"):
        command(["verify", str(out)])
    assert command(["verify", str(out), "--run-folder", str(tmp_path / "moved")]) == 0
    other = make_run(tmp_path / "other", biases=False, max_bias=7.0)
    assert command(["verify", str(out), "--run-folder", str(other)]) == 1
    assert "Differs: at 32 tokens the logits differ by" in capsys.readouterr().out


def test_the_portable_recipe_goes_everywhere_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The state of the Union is strong, and so is this. " * 300)
    small = [
        "--model.layers",
        "1",
        "--data.tokenizer",
        "bytes",
        "--train.length",
        "32",
        "--steps",
        "20",
        "--batch",
        "4",
        "--quiet",
    ]
    assert command(["train", "portable-128", "--data.corpus", "text.txt", "--out", "run", *small]) == 0
    model, preset = load_model(Path("run")).config, presets.get("portable")()
    same = {"vocab_size": model.vocab_size, "layers": 1}
    assert model.model_dump() == preset.replace(**same).model_dump(), "the recipe's model is the preset's"
    for to in ("hf-mpt", "gguf", "ctranslate2", "hf"):
        assert export(Path("run"), to, Path(to)) == (), "nothing is rewritten"
        assert verify(Path(to)).problems == []


def test_the_model_card_holds_the_extrapolation_card(tmp_path):
    run = make_run(tmp_path / "run", biases=False)
    (tmp_path / "book.txt").write_text("The state of the Union is strong. " * 60)
    lengths = ["--lengths", "1x", "2x", "8x"]
    assert command(["evaluate", str(run), "--data", str(tmp_path / "book.txt"), *lengths]) == 0
    export(run, "hf-mpt", tmp_path / "out")
    text, reach = (tmp_path / "out" / "README.md").read_text(), significance.load_summary(run)
    assert "## How far it is good" in text
    assert f"Measured: {reach['summary']}; no worse than at the training length to" in text
    for one in reach["lengths"]:
        assert f"| {one['length']} | {one['perplexity']:.2f} |" in text
    assert "| 32 | " in text
    assert "2,040 tokens, each scored once at every length" in text


def test_a_card_of_other_weights_is_not_passed_on(tmp_path):
    run, other = make_run(tmp_path / "run", biases=False), make_run(tmp_path / "other", biases=False, layers=1)
    (tmp_path / "book.txt").write_text("The state of the Union is strong. " * 60)
    assert command(["evaluate", str(run), "--data", str(tmp_path / "book.txt"), "--lengths", "1x", "2x"]) == 0
    (other / significance.SUMMARY_FILE).write_bytes((run / significance.SUMMARY_FILE).read_bytes())
    export(other, "hf-mpt", tmp_path / "out")
    assert "Longer inputs: not measured." in (tmp_path / "out" / "README.md").read_text()


def test_an_engine_that_is_not_installed_is_named(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    export(run, "ctranslate2", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(
        InputError, match=r"requires ctranslate2\. Install it with: pip install 'trainshort\[interop\]'"
    ):
        verify(tmp_path / "out")


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("to", ["hf-mpt", "hf", "gguf", "ctranslate2"])
def test_a_full_disk_leaves_nothing(to, tmp_path, disk):
    run = make_run(tmp_path / "run", biases=False)
    with pytest.raises(InputError, match=r"Cannot write .*: the disk is full"):
        export(run, to, disk / "out")
    assert list(disk.iterdir()) == []


def test_a_full_disk_during_import_leaves_nothing(tmp_path, disk):
    export(make_run(tmp_path / "run", biases=False), "hf-mpt", tmp_path / "out")
    with pytest.raises(InputError, match=r"Cannot write .*: the disk is full"):
        import_model(ImportRequest(str(tmp_path / "out")), disk / "run")
    assert list(disk.iterdir()) == []


def test_a_damaged_export_is_one_sentence(tmp_path):
    run, out = make_run(tmp_path / "run", biases=False), tmp_path / "out"
    export(run, "hf-mpt", out)
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"transformers cannot open .*out \(.+\)\. Export the run again"):
        verify(out)
    weights.write_bytes(whole)
    settings = out / "config.json"
    for put in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)):
        (settings.rmdir if settings.is_dir() else settings.unlink)()
        put(settings)
        with pytest.raises(InputError, match=r"Cannot read .*config\.json: it is a .*Export the run again"):
            verify(out)
