"""Exports load in the real engines and compute what our model computes; what does not fit is refused by its setting."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from runs_here import make_run

from trainshort import InputError
from trainshort.checkpoint import load_model
from trainshort.cli import run as command
from trainshort.data.tokenizer import WordTokenizer
from trainshort.interop.exporting import export
from trainshort.interop.importing import ImportRequest, import_model
from trainshort.interop.verifying import verify
from trainshort.presets import presets

pytest.importorskip("transformers")

ROUND_TRIPS = {
    "hf-mpt": {"biases": False},
    "hf-bloom": {"activation": "gelu_tanh", "embedding_norm": True},
}


@pytest.mark.parametrize("to", ROUND_TRIPS)
def test_round_trips_are_equal_to_the_bit(to, tmp_path):
    run = make_run(tmp_path / "run", **ROUND_TRIPS[to])
    export(run, to, tmp_path / "out")
    again = import_model(ImportRequest(str(tmp_path / "out")), tmp_path / "again")
    export(again, to, tmp_path / "out2")
    before, after = load_model(run).state_dict(), load_model(again).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "out2"))
    assert first == second


GELU = {"biases": False}
TANH = {"activation": "gelu_tanh", "embedding_norm": True}
EXPORTS = [
    ("hf-mpt", GELU),
    ("hf-mpt", {**GELU, "kv_heads": 2, "ffn": 80, "embedding_scale": True, "logit_scale": 0.5}),
    ("hf-mpt", {**GELU, "tie_embeddings": False, "clip_qkv": 0.4, "softmax_scale": 0.1, "norm_eps": 1e-3}),
    ("hf-bloom", TANH),
    ("hf-bloom", {**TANH, "biases": False, "kv_heads": 1, "softmax_scale": 0.1, "ffn": 100}),
    ("gguf", {}),
    ("gguf", {**GELU, "kv_heads": 2, "max_bias": 12.0, "tie_embeddings": False}),
    ("gguf", {"clip_qkv": 0.5, "embedding_scale": True, "ffn": 96}),
    ("gguf", {"softmax_scale": 0.2, "logit_scale": 0.5}),
    ("gguf", {**TANH, "biases": False}),
    ("ctranslate2", {}),
    ("ctranslate2", {"activation": "relu", "embedding_scale": True, "final_norm": False, "kv_heads": 2}),
    ("ctranslate2", {**TANH, "biases": False, "ffn": 100, "softmax_scale": 0.2, "tie_embeddings": False}),
    ("hf", {}),
    ("hf", {"adaptive": {"cutoffs": (50, 120), "factor": 2}, "activation": "relu", "final_norm": False}),
    ("hf", {"position": "rotary", "norm": "rms", "gated": True, "activation": "silu", "kv_heads": 2}),
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
    ("hf-mpt", {}, "hf-mpt cannot carry a model with biases; train with biases=False, as the preset portable does"),
    ("hf-mpt", {**GELU, "activation": "relu"}, "with activation relu; train with gelu"),
    ("hf-mpt", {**GELU, "ffn": 300}, "with ffn 300; train with ffn at most four times width"),
    ("hf-mpt", {**GELU, "max_bias": 16.0}, "with max_bias 16.0; that class follows 8 alone"),
    ("hf-mpt", {**GELU, "position": "rotary"}, "with position rotary; it knows ALiBi alone"),
    ("hf-mpt", {**GELU, "position_settings": {"slopes": (0.5, 0.4, 0.3, 0.2)}}, "with slopes of its own"),
    ("hf-bloom", {"activation": "gelu_tanh"}, "with embedding_norm=False; train with embedding_norm=True"),
    ("hf-bloom", {**TANH, "final_norm": False}, "with final_norm=False"),
    ("gguf", {"activation": "relu"}, "gguf cannot carry a model with activation relu"),
    ("gguf", {"clip_qkv": 0.5, "softmax_scale": 0.2}, "softmax_scale together with clip_qkv"),
    ("gguf", {"window": 9}, "with window 9; train without a window"),
    ("gguf", {"gated": True}, "gated feed-forward layers"),
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


def bpe_run(path: Path) -> Path:
    """A run with a BPE trained on a little text, and one token more in the model than it makes."""
    from trainshort.data.tokenizer import train_bpe

    tokenizer = train_bpe(iter(["The state of the Union is strong, and naïve café. " * 50]), 300)
    run = make_run(path, biases=False, vocabulary=tokenizer.vocabulary + 1)
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
    export(run, to, tmp_path / "out")
    if to == "gguf" and kind != "bpe":
        with pytest.raises(InputError, match="holds token numbers without their text"):
            verify(tmp_path / "out")
        return
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


def test_the_portable_preset_goes_everywhere_as_it_is(tmp_path):
    settings = presets.get("portable")().model_dump()
    run = make_run(tmp_path / "run", **{**settings, "vocabulary": 256, "layers": 1})
    for to in ("hf-mpt", "gguf", "ctranslate2"):
        assert export(run, to, tmp_path / to) == (), "nothing is rewritten"


def test_an_engine_that_is_not_installed_is_named(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    export(run, "ctranslate2", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(InputError, match="ctranslate2 is not installed"):
        verify(tmp_path / "out")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", biases=False)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainshort.interop.weight_files.write", full)
    with pytest.raises(InputError, match=r"Cannot write .*out: the disk is full"):
        export(run, "hf-mpt", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_damaged_export_is_one_sentence(tmp_path):
    run, out = make_run(tmp_path / "run", **ROUND_TRIPS["hf-mpt"]), tmp_path / "out"
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
