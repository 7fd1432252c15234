"""The authors' checkpoints become runs of ours that compute what their decoder computed.

The files in fairseq/ were made by the authors' own decoder with random weights: data, no code.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trainshort import InputError
from trainshort.cli.main import run as command
from trainshort.config.presets import presets
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.base import load_tokenizer
from trainshort.interop import safe_unpickle
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model

HERE = Path(__file__).parents[1] / "fairseq"
FILES = sorted(HERE.glob("*.pt"))


def dictionary(path: Path, words: int, first: str = "the") -> Path:
    path.write_text("".join(f"{first if i == 0 else f'word{i}'} {1000 - i}\n" for i in range(words)), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_log_probabilities_are_the_authors_decoders(path, tmp_path):
    assert len(FILES) == 6
    run = import_model(ImportRequest(str(path)), tmp_path / "run")
    expected = load_file(HERE / f"{path.stem.partition('-')[0]}-expected.safetensors")
    with torch.no_grad():
        ours = load_model(run)(expected["tokens"]).log_softmax(-1)
    assert expected["log_probabilities"].std() > 1
    torch.testing.assert_close(ours, expected["log_probabilities"], rtol=0, atol=1e-5)
    assert load_config(run / "config.json").train.length == 64


def test_a_run_folder_is_made_whole(tmp_path, capsys):
    out = tmp_path / "runs" / "authors"
    words = dictionary(tmp_path / "dict.txt", 100)
    assert command(["import", str(HERE / "adaptive-cfg.pt"), "--dictionary", str(words), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: try trainshort generate")
    record = json.loads((out / "import.json").read_text())
    assert record["format"] == "fairseq"
    assert len(record["files"]["adaptive-cfg.pt"]) == 64
    assert "decoder.adaptive_softmax.head.word_proj.weight" in record["dropped"]
    tokenizer = load_tokenizer(out)
    assert tokenizer.encode("the word2 \n<unk> never").tolist() == [4, 6, 2, 3, 3]
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(InputError, match="already exists and is not empty"):
        import_model(ImportRequest(str(HERE / "adaptive-cfg.pt")), out)


def test_a_dictionary_that_does_not_match(tmp_path):
    path = dictionary(tmp_path / "dict.txt", 99)
    with pytest.raises(InputError, match="makes 103 tokens, four of them fairseq's own, and the model has 104"):
        import_model(ImportRequest(str(FILES[0]), dictionary=path), tmp_path / "run")
    path.write_text("the 3\nthe 2\n")
    with pytest.raises(InputError, match="line 2: the word 'the' is there twice"):
        import_model(ImportRequest(str(FILES[0]), dictionary=path), tmp_path / "run")
    path.write_text("the 3\na word\n")
    with pytest.raises(InputError, match="line 2, should be a word and its count"):
        import_model(ImportRequest(str(FILES[0]), dictionary=path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def changed(tmp_path: Path, change) -> str:
    """A checkpoint of the plain model with something else in it."""
    saved = safe_unpickle.read(HERE / "plain-cfg.pt")
    saved = {"model": dict(saved["model"]), "cfg": saved["cfg"]}
    change(saved)
    torch.save(saved, tmp_path / "changed.pt")
    return str(tmp_path / "changed.pt")


REFUSED = {
    "post-norm": (lambda s: s["cfg"]["model"].update(decoder_normalize_before=False), "normalises before each layer"),
    "experts": (lambda s: s["cfg"]["model"].update(base_layers=2), "base_layers 2, and ours has no expert layers"),
    "activation": (lambda s: s["cfg"]["model"].update(activation_fn="swish"), "activation_fn 'swish'"),
    "heads": (lambda s: s["cfg"]["model"].pop("decoder_attention_heads"), "say decoder_attention_heads"),
    "heads fit": (
        lambda s: s["cfg"]["model"].update(decoder_attention_heads=5),
        "width 32 is not a multiple of heads 5",
    ),
    "width": (
        lambda s: s["cfg"]["model"].update(decoder_ffn_embed_dim=60),
        "config and weights are of different models",
    ),
    "missing": (lambda s: s["model"].pop("decoder.layers.1.fc2.bias"), "no tensor decoder.layers.1.fc2.bias"),
    "unknown": (lambda s: s["model"].update({"decoder.extra": torch.ones(1)}), "decoder.extra has no place"),
    "untied": (
        lambda s: s["model"].update({"decoder.output_projection.weight": torch.ones(104, 32)}),
        "decoder.output_projection.weight differs from decoder.embed_tokens.weight",
    ),
    "nan": (lambda s: s["model"]["decoder.layers.0.fc1.weight"].fill_(torch.nan), "not finite"),
    "whole numbers": (
        lambda s: s["model"].update({"decoder.layers.0.fc1.bias": torch.ones(64, dtype=torch.int64)}),
        "weights are floating-point numbers",
    ),
    "no settings": (lambda s: s.pop("cfg"), "neither args nor cfg"),
    "no model": (lambda s: s.pop("model"), "holds no model"),
    "old": (lambda s: s["model"].update({"decoder.version": torch.tensor([2.0])}), "layout of before 2019"),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(change, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        import_model(ImportRequest(changed(tmp_path, change)), tmp_path / "run")
    assert not list(tmp_path.rglob("run*")), "nothing is left behind"


def test_a_single_precision_checkpoint_comes_over_to_the_bit(tmp_path):
    def as_float(saved):
        saved["model"] = {name: weight.float() + 2**-20 for name, weight in saved["model"].items()}

    path = changed(tmp_path, as_float)
    run = import_model(ImportRequest(path), tmp_path / "run")
    theirs = torch.load(path, weights_only=True)["model"]
    ours = dict(load_model(run).named_parameters())
    assert torch.equal(ours["layers.1.ffn.wide.weight"], theirs["decoder.layers.1.fc1.weight"])
    rows = [theirs[f"decoder.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(ours["layers.0.attention.qkv.bias"], torch.cat(rows))


def full_size(path: Path) -> None:
    """The released models' layout with made-up numbers: every name and shape of interop's table, in half precision."""
    weights = {"decoder.version": torch.tensor([3.0]), "decoder.adaptive_softmax.version": torch.tensor([1])}
    for name in ("embed_tokens", "embed_positions", "adaptive_softmax.head"):
        weights[f"decoder.{name}._float_tensor"] = torch.zeros(1)

    def add(name: str, *shape: int) -> torch.Tensor:
        weights["decoder." + name] = torch.full(shape, 0.01, dtype=torch.float16)
        return weights["decoder." + name]

    for band, (words, width) in enumerate([(20_000, 1024), (40_000, 256), (207_744, 64)]):
        table = add(f"embed_tokens.embeddings.{band}.0.weight", words, width)
        projection = add(f"embed_tokens.embeddings.{band}.1.weight", 1024, width)
        if band:
            weights[f"decoder.adaptive_softmax.tail.{band - 1}.0.weight"] = projection
            weights[f"decoder.adaptive_softmax.tail.{band - 1}.2.weight"] = table
        else:
            weights["decoder.adaptive_softmax.head.word_proj.weight"] = table
    add("adaptive_softmax.head.class_proj.weight", 2, 1024)
    for layer in range(16):
        shapes = {f"self_attn.{part}_proj": (1024, 1024) for part in ("k", "v", "q", "out")}
        shapes |= {"fc1": (4096, 1024), "fc2": (1024, 4096)}
        for name, shape in shapes.items():
            add(f"layers.{layer}.{name}.weight", *shape)
            add(f"layers.{layer}.{name}.bias", shape[0])
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            add(f"layers.{layer}.{name}.weight", 1024)
            add(f"layers.{layer}.{name}.bias", 1024)
    assert len(weights) == 273
    model = {
        "decoder_layers": 16, "decoder_embed_dim": 1024, "decoder_attention_heads": 8, "decoder_ffn_embed_dim": 4096,
        "activation_fn": "relu", "no_decoder_final_norm": True, "adaptive_input": True, "tie_adaptive_weights": True,
        "tie_adaptive_proj": True, "adaptive_input_cutoff": "20000,60000", "adaptive_softmax_cutoff": "20000,60000",
        "adaptive_input_factor": 4, "adaptive_softmax_factor": 4, "dropout": 0.3, "attention_dropout": 0.1,
        "activation_dropout": 0.1, "adaptive_softmax_dropout": 0.2,
    }  # fmt: skip
    momentum = {"state": {0: {"momentum_buffer": torch.zeros(246_933_504)}}}
    cfg = {"model": model, "task": {"tokens_per_sample": 512}}
    torch.save({"args": None, "cfg": cfg, "model": weights, "last_optimizer_state": momentum}, path)


@pytest.mark.slow
def test_the_released_layout_at_full_size(tmp_path):
    full_size(tmp_path / "alibi_wt103_L512.pt")
    script = f"""
import torch
from pathlib import Path
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.machine import Peak
peak = Peak(torch.device("cpu"))  # ru_maxrss is taken over from the process that started this one
import_model(ImportRequest({str(tmp_path / "alibi_wt103_L512.pt")!r}), Path({str(tmp_path / "run")!r}))
print(peak.bytes() // 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 3000, "MB"
    config = load_config(tmp_path / "run" / "config.json")
    assert config.model == presets.get("wikitext103")()
    assert config.train.length == 512
    with safe_open(next((tmp_path / "run").rglob("whole.safetensors")), framework="pt") as stored:
        sizes = [torch.Size(stored.get_slice(name).get_shape()).numel() for name in stored.keys()]  # noqa: SIM118
    assert sum(sizes) == 246_933_504
