"""Imported fairseq checkpoints compute the log-probabilities that the authors' decoder computed.

The authors' decoder made the files in the folder `fairseq/`, with random weights.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from trainshort import InputError
from trainshort.cli.main import run as run_command
from trainshort.config.presets import presets
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.base import load_tokenizer
from trainshort.interop import safe_unpickle
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import UNSHARDED_FILE, load_model

FOLDER = Path(__file__).parents[1] / "fairseq"
CHECKPOINTS = sorted(FOLDER.glob("*.pt"))


def write_dictionary(path: Path, num_words: int) -> Path:
    """Write a `dict.txt` of fairseq, whose first word is "the"."""
    words = ["the", *(f"word{i}" for i in range(1, num_words))]
    path.write_text("".join(f"{word} {1000 - i}\n" for i, word in enumerate(words)), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CHECKPOINTS, ids=[path.stem for path in CHECKPOINTS])
def test_log_probabilities_equal_the_authors_decoder(path, tmp_path):
    assert len(CHECKPOINTS) == 6
    run = import_model(ImportRequest(str(path)), tmp_path / "run")
    model_name = path.stem.partition("-")[0]
    expected = load_file(FOLDER / f"{model_name}-expected.safetensors")
    with torch.no_grad():
        log_probabilities = load_model(run)(expected["tokens"]).log_softmax(-1)
    assert expected["log_probabilities"].std() > 1
    torch.testing.assert_close(log_probabilities, expected["log_probabilities"], rtol=0, atol=1e-5)
    assert load_config(run / "config.json").train.length == 64


def test_import_writes_a_complete_run_folder(tmp_path, capsys):
    out = tmp_path / "runs" / "authors"
    dictionary = write_dictionary(tmp_path / "dict.txt", 100)
    checkpoint = str(FOLDER / "adaptive-cfg.pt")
    assert run_command(["import", checkpoint, "--dictionary", str(dictionary), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    record = json.loads((out / "import.json").read_text())
    assert record["format"] == "fairseq"
    assert len(record["files"]["adaptive-cfg.pt"]) == 64
    assert "decoder.adaptive_softmax.head.word_proj.weight" in record["dropped"]
    tokenizer = load_tokenizer(out)
    assert tokenizer.encode("the word2 \n<unk> never").tolist() == [4, 6, 2, 3, 3]
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(InputError, match="already exists and is not empty"):
        import_model(ImportRequest(checkpoint), out)


def test_invalid_dictionary_is_rejected(tmp_path):
    path = write_dictionary(tmp_path / "dict.txt", 99)
    request = ImportRequest(str(CHECKPOINTS[0]), dictionary=path)
    with pytest.raises(InputError, match="103 tokens, but the model has 104"):
        import_model(request, tmp_path / "run")
    path.write_text("the 3\nthe 2\n")
    with pytest.raises(InputError, match="line 2: the word 'the' is listed twice"):
        import_model(request, tmp_path / "run")
    path.write_text("the 3\na word\n")
    with pytest.raises(InputError, match="line 2: expected a word and its count"):
        import_model(request, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def save_changed_checkpoint(tmp_path: Path, change) -> str:
    """Change the content of a valid checkpoint, save the result, and return its path."""
    checkpoint = safe_unpickle.read(FOLDER / "plain-cfg.pt")
    checkpoint = {"model": dict(checkpoint["model"]), "cfg": checkpoint["cfg"]}
    change(checkpoint)
    path = tmp_path / "changed.pt"
    torch.save(checkpoint, path)
    return str(path)


def change_settings(**changes):
    """Return a function that changes model settings of a checkpoint."""
    return lambda checkpoint: checkpoint["cfg"]["model"].update(changes)


def change_tensors(changes: dict[str, Tensor]):
    """Return a function that replaces or adds tensors of a checkpoint."""
    return lambda checkpoint: checkpoint["model"].update(changes)


# Each entry has a change of a valid checkpoint, and a pattern of the error message.
INVALID_CHECKPOINTS = {
    "post-norm": (change_settings(decoder_normalize_before=False), "decoder_normalize_before=False"),
    "expert layers": (change_settings(base_layers=2), "base_layers=2"),
    "activation": (change_settings(activation_fn="swish"), "activation_fn='swish'"),
    "missing setting": (
        lambda checkpoint: checkpoint["cfg"]["model"].pop("decoder_attention_heads"),
        "decoder_attention_heads must be a positive integer, got None",
    ),
    "heads do not fit": (change_settings(decoder_attention_heads=5), "width 32 is not a multiple of heads 5"),
    "wrong width": (change_settings(decoder_ffn_embed_dim=60), "Shape mismatch: decoder.layers.0.fc1.weight"),
    "missing tensor": (
        lambda checkpoint: checkpoint["model"].pop("decoder.layers.1.fc2.bias"),
        "no tensor decoder.layers.1.fc2.bias",
    ),
    "unknown tensor": (change_tensors({"decoder.extra": torch.ones(1)}), "Unexpected tensor decoder.extra"),
    "untied": (
        change_tensors({"decoder.output_projection.weight": torch.ones(104, 32)}),
        "decoder.output_projection.weight differs from decoder.embed_tokens.weight",
    ),
    "nan": (
        lambda checkpoint: checkpoint["model"]["decoder.layers.0.fc1.weight"].fill_(torch.nan),
        "decoder.layers.0.fc1.weight contains NaN",
    ),
    "integers": (
        change_tensors({"decoder.layers.0.fc1.bias": torch.ones(64, dtype=torch.int64)}),
        "decoder.layers.0.fc1.bias, got torch.int64",
    ),
    "no settings": (lambda checkpoint: checkpoint.pop("cfg"), "'cfg' or 'args'"),
    "no model": (lambda checkpoint: checkpoint.pop("model"), "under the key 'model'"),
    "old version": (change_tensors({"decoder.version": torch.tensor([2.0])}), "decoder version 2"),
}


@pytest.mark.parametrize(("change", "pattern"), INVALID_CHECKPOINTS.values(), ids=INVALID_CHECKPOINTS)
def test_invalid_checkpoint_is_rejected(change, pattern, tmp_path):
    with pytest.raises(InputError, match=pattern):
        import_model(ImportRequest(save_changed_checkpoint(tmp_path, change)), tmp_path / "run")
    assert not list(tmp_path.rglob("run*")), "no file is left behind"


def test_float32_weights_are_imported_exactly(tmp_path):
    def convert_to_float32(checkpoint: dict) -> None:
        # The added number cannot be represented in half precision.
        checkpoint["model"] = {name: weight.float() + 2**-20 for name, weight in checkpoint["model"].items()}

    path = save_changed_checkpoint(tmp_path, convert_to_float32)
    run = import_model(ImportRequest(path), tmp_path / "run")
    source_weights = torch.load(path, weights_only=True)["model"]
    weights = dict(load_model(run).named_parameters())
    assert torch.equal(weights["layers.1.ffn.wide.weight"], source_weights["decoder.layers.1.fc1.weight"])
    qkv_biases = [source_weights[f"decoder.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(weights["layers.0.attention.qkv.bias"], torch.cat(qkv_biases))


def save_full_size_checkpoint(path: Path) -> None:
    """Save a checkpoint with the settings, tensor names and shapes of the released WikiText-103 models.

    All numbers are the same. The weights are in half precision. The optimizer state is included, as in the released
    checkpoints.
    """
    weights = {"decoder.version": torch.tensor([3.0]), "decoder.adaptive_softmax.version": torch.tensor([1])}
    for name in ("embed_tokens", "embed_positions", "adaptive_softmax.head"):
        weights[f"decoder.{name}._float_tensor"] = torch.zeros(1)

    def add(name: str, *shape: int) -> Tensor:
        weights["decoder." + name] = torch.full(shape, 0.01, dtype=torch.float16)
        return weights["decoder." + name]

    for band, (num_words, width) in enumerate([(20_000, 1024), (40_000, 256), (207_744, 64)]):
        table = add(f"embed_tokens.embeddings.{band}.0.weight", num_words, width)
        projection = add(f"embed_tokens.embeddings.{band}.1.weight", 1024, width)
        if band == 0:
            weights["decoder.adaptive_softmax.head.word_proj.weight"] = table
        else:
            weights[f"decoder.adaptive_softmax.tail.{band - 1}.0.weight"] = projection
            weights[f"decoder.adaptive_softmax.tail.{band - 1}.2.weight"] = table
    add("adaptive_softmax.head.class_proj.weight", 2, 1024)
    for layer in range(16):
        linear_shapes = {f"self_attn.{part}_proj": (1024, 1024) for part in ("k", "v", "q", "out")}
        linear_shapes |= {"fc1": (4096, 1024), "fc2": (1024, 4096)}
        for name, shape in linear_shapes.items():
            add(f"layers.{layer}.{name}.weight", *shape)
            add(f"layers.{layer}.{name}.bias", shape[0])
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            add(f"layers.{layer}.{name}.weight", 1024)
            add(f"layers.{layer}.{name}.bias", 1024)
    assert len(weights) == 273
    model_settings = {
        "decoder_layers": 16,
        "decoder_embed_dim": 1024,
        "decoder_attention_heads": 8,
        "decoder_ffn_embed_dim": 4096,
        "activation_fn": "relu",
        "no_decoder_final_norm": True,
        "adaptive_input": True,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "adaptive_input_cutoff": "20000,60000",
        "adaptive_softmax_cutoff": "20000,60000",
        "adaptive_input_factor": 4,
        "adaptive_softmax_factor": 4,
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "adaptive_softmax_dropout": 0.2,
    }
    optimizer_state = {"state": {0: {"momentum_buffer": torch.zeros(246_933_504)}}}
    cfg = {"model": model_settings, "task": {"tokens_per_sample": 512}}
    torch.save({"args": None, "cfg": cfg, "model": weights, "last_optimizer_state": optimizer_state}, path)


# Prints the peak memory of an import in MB. `ru_maxrss` would include the memory of the parent process, so the peak is
# measured with `PeakMemory`.
MEASURE_IMPORT = """
import sys
from pathlib import Path
import torch
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.utils.machine import PeakMemory
peak = PeakMemory(torch.device("cpu"))
import_model(ImportRequest(sys.argv[1]), Path(sys.argv[2]))
print(peak.bytes() // 2**20)
"""


@pytest.mark.slow
def test_full_size_checkpoint_is_imported_in_limited_memory(tmp_path):
    source = tmp_path / "alibi_wt103_L512.pt"
    save_full_size_checkpoint(source)
    command = [sys.executable, "-c", MEASURE_IMPORT, str(source), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) <= 3000, "MB"
    config = load_config(tmp_path / "run" / "config.json")
    assert config.model == presets.get("wikitext103")()
    assert config.train.length == 512
    weights_path = next((tmp_path / "run").rglob(UNSHARDED_FILE))
    with safe_open(weights_path, framework="pt") as stored:
        sizes = [torch.Size(stored.get_slice(name).get_shape()).numel() for name in stored.keys()]  # noqa: SIM118
    assert sum(sizes) == 246_933_504
