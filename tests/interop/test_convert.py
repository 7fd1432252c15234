"""Converted models have ALiBi and otherwise the same weights, and training restores their perplexity."""

import json
from pathlib import Path

import pytest
import torch
from helpers import byte_tokenizer, make_run, prose

from trainshort import InputError
from trainshort.cli.main import run as run_command
from trainshort.config.run_config import RunConfig, TrainConfig, load_config
from trainshort.evaluate import results, significance
from trainshort.interop.convert import STAGES, convert, open_conversion_source
from trainshort.interop.import_model import ImportRequest
from trainshort.model.transformer import TransformerLM
from trainshort.train.checkpoint import load_model

transformers = pytest.importorskip("transformers")

LENGTH = 32
VOCAB_SIZE = 258
VOCABULARY = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": LENGTH}
SHAPE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
GPT2_SETTINGS = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": LENGTH,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MAKE_MODEL = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SETTINGS)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**VOCABULARY, **SHAPE)),
    "gpt_neox sequential": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**VOCABULARY, **SHAPE, use_parallel_residual=False)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**VOCABULARY, **SHAPE, num_key_value_heads=2, attention_bias=True)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**VOCABULARY, **SHAPE, num_key_value_heads=2, sliding_window=20)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**VOCABULARY, **SHAPE, num_key_value_heads=4, tie_word_embeddings=True)
    ),
}
"""The models by name. The first word of a name is the model type."""


def save_model(folder: Path, name: str, training_steps: int = 0) -> torch.nn.Module:
    """Save a tiny Hugging Face model and its tokenizer, and return the model.

    Args:
        folder: The folder to write.
        name: A key of `MAKE_MODEL`.
        training_steps: The number of training steps. A model that is not trained gets large random weights, so that an
            error in any part changes the logits visibly.
    """
    torch.manual_seed(0)
    model = MAKE_MODEL[name]()
    tokenizer = byte_tokenizer()
    text = torch.tensor(tokenizer(prose(3000), add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(training_steps):
        starts = torch.randint(len(text) - LENGTH, (8,))
        rows = torch.stack([text[start : start + LENGTH] for start in starts])
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if training_steps == 0:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()


def convert_without_training(source: Path, out: Path) -> TransformerLM:
    """Convert a model, and load the converted model."""
    request = ImportRequest(str(source))
    conversion = open_conversion_source(request)
    model = conversion.source.weight_map.model
    config = RunConfig(model=model.config, train=TrainConfig(length=model.training_length))
    convert(conversion, request, config, out)
    return load_model(out)


def remove_positions(model: torch.nn.Module, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the positions of a Hugging Face model: average learned positions, or skip the rotation."""
    if model_type == "gpt2":
        table = model.transformer.wpe.weight.data
        table.copy_(table.mean(0).expand_as(table))
    else:
        module = f"transformers.models.{model_type}.modeling_{model_type}"
        monkeypatch.setattr(f"{module}.apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k))


@pytest.mark.parametrize("name", MAKE_MODEL)
def test_conversion_keeps_all_other_weights(name, tmp_path, monkeypatch):
    """Without their positions, the original and the converted model compute the same logits."""
    original = save_model(tmp_path / "original", name)
    converted = convert_without_training(tmp_path / "original", tmp_path / "run")
    assert converted.config.position == "alibi"
    converted_without_alibi = TransformerLM(converted.config.replace(position="none")).eval()
    converted_without_alibi.load_state_dict(converted.state_dict())
    model_type = name.split()[0]
    remove_positions(original, model_type, monkeypatch)

    tokens = torch.randint(VOCAB_SIZE, (2, LENGTH))
    with torch.no_grad():
        expected = original(tokens).logits.log_softmax(-1)
        log_probabilities = converted_without_alibi(tokens).log_softmax(-1)
    deviation = float(expected.std())
    assert deviation > 0.1
    torch.testing.assert_close(log_probabilities, expected, rtol=0, atol=1e-4 * deviation)

    record = json.loads((tmp_path / "run" / "import.json").read_text())
    old_position = "learned" if model_type == "gpt2" else "rotary"
    assert record["converted"] == {"from": old_position, "to": "alibi"}
    assert len(record["files"]["model.safetensors"]) == 64


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "gpt_neox", "llama"])
def test_convert_command(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(Path("original"), name, training_steps=80)
    Path("book.txt").write_text(prose(3000, seed=5))
    command = ["convert", "original", "--to", "alibi", "--out", "runs/it", "--corpus", "book.txt", "--quiet"]
    command += ["--steps", "60", "--optim.lr", "0.003", "--max-tokens", "4000"]
    assert run_command(command) == 0
    output = capsys.readouterr().out
    # The terminal is too narrow for the descriptions of the stages, so a description can be split over two lines.
    for word in (*" ".join(STAGES.values()).split(), "32 = L", "256"):
        assert word in output

    evaluations = [results.load(Path(f"runs/it/conversion/{stage}.json")) for stage in STAGES]
    before, after, trained = ({row.length: row for row in evaluation.rows} for evaluation in evaluations)
    assert list(before) == list(after) == list(trained) == [LENGTH, 2 * LENGTH, 4 * LENGTH, 8 * LENGTH]
    assert before[LENGTH].perplexity < 20, "the original model was trained"
    assert trained[LENGTH].perplexity < after[LENGTH].perplexity
    assert trained[LENGTH].perplexity < 1.02 * before[LENGTH].perplexity, "training restores the perplexity"
    assert trained[8 * LENGTH].perplexity < 1.05 * trained[LENGTH].perplexity, "also for long inputs"
    assert before[2 * LENGTH].status == ("cannot" if name == "gpt2" else "scored")
    assert significance.load_summary(Path("runs/it"))["summary"].startswith("trained at 32, good to ")
    assert {path.suffix for path in Path("runs/it/conversion").iterdir()} == {".json", ".png", ".svg"}
    with pytest.raises(InputError, match="runs/it already exists"):
        run_command(command)

    if name == "llama":
        assert load_config(Path("runs/it/config.json")).model.kv_heads == 2
        assert run_command([*command, "--resume"]) == 0
        assert capsys.readouterr().out.splitlines()[-8:] == output.splitlines()[-8:], "nothing is computed twice"
        assert run_command(["generate", "runs/it", "the cat", "--tokens", "20", "--mode", "bounded"]) == 0


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "t5", "learned", "none"])
def test_conversion_of_a_run(position, tmp_path):
    run = make_run(tmp_path, position=position, width=32)
    original = load_model(run)
    converted_weights = dict(convert_without_training(run, tmp_path / "out").named_parameters())
    positions_are_added = position in ("sinusoidal", "learned")
    for name, weight in original.named_parameters():
        if name.startswith("position."):
            assert name not in converted_weights
        elif positions_are_added and name == "vocabulary.embedding.weight":
            # The mean of the positions is added to each row.
            added = converted_weights[name] - weight
            positions = torch.arange(16)[None]
            mean_position = original.position.embed(torch.zeros(1, 16, 32), positions)[0].mean(0)
            torch.testing.assert_close(added, mean_position.expand_as(added), rtol=0, atol=1e-5)
        else:
            assert torch.equal(weight, converted_weights[name])


def change_settings(**changes):
    """Return a function that changes the config of a model folder."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def delete_file(name: str):
    """Return a function that deletes a file of a model folder."""
    return lambda folder: (folder / name).unlink()


# Each entry has a change of a valid Llama folder, and a pattern of the error message.
INVALID_FOLDERS = {
    "already ALiBi": (change_settings(model_type="mpt"), "'mpt', which is already an ALiBi model"),
    "unknown type": (change_settings(model_type="mamba"), "'mamba', .* can be converted: gpt2, gpt_neox, llama"),
    "head width": (change_settings(head_dim=20), "head_dim=20"),
    "activation": (change_settings(hidden_act="mish"), "hidden_act='mish'"),
    "too many layers": (change_settings(num_hidden_layers=3), r"no tensor model\.layers\.2"),
    "key-value heads": (change_settings(num_key_value_heads=4), "Shape mismatch: model.layers.0.self_attn"),
    "no training length": (change_settings(max_position_embeddings=None), "max_position_embeddings must be"),
    "no tokenizer": (delete_file("tokenizer.json"), r"no tokenizer\.json.*--tokenizer FILE"),
    "no weights": (delete_file("model.safetensors"), "has no model.safetensors"),
}


@pytest.mark.parametrize(("change", "pattern"), INVALID_FOLDERS.values(), ids=INVALID_FOLDERS)
def test_invalid_folder_is_rejected(change, pattern, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(Path("original"), "llama")
    Path("book.txt").write_text("a text")
    change(Path("original"))
    with pytest.raises(InputError, match=pattern):
        run_command(["convert", "original", "--to", "alibi", "--out", "run", "--corpus", "book.txt"])
    assert not Path("run").exists()


def test_invalid_options_are_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alibi_run = str(make_run(tmp_path))
    to_alibi = ["--to", "alibi", "--out", "out"]
    corpus = ["--corpus", "tiny.txt"]
    invalid_commands = {
        "already has ALiBi": [alibi_run, *to_alibi, *corpus],
        "--to: expected 'alibi', got 'rotary'": [alibi_run, "--to", "rotary", "--out", "out", *corpus],
        "--data.corpus": [alibi_run, *to_alibi],
        "'nothing.txt'": [alibi_run, *to_alibi, "--corpus", "nothing.txt"],
        "tiny.txt is a file": ["tiny.txt", *to_alibi, *corpus],
        "--train.steps: .*'few'": [alibi_run, *to_alibi, *corpus, "--steps", "few"],
    }
    for pattern, words in invalid_commands.items():
        with pytest.raises(InputError, match=pattern):
            run_command(["convert", *words])
    assert not Path("out").exists()


def test_options_that_do_not_apply_to_a_run_are_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rotary_run = make_run(tmp_path, position="rotary")
    command = ["convert", str(rotary_run), "--to", "alibi", "--corpus", "tiny.txt"]
    with pytest.raises(InputError, match="--tokenizer requires a Hugging Face model"):
        run_command([*command, "--out", "out", "--tokenizer", "gone.json"])
    with pytest.raises(InputError, match="not a conversion"):
        run_command([*command, "--out", str(rotary_run), "--resume"])

    save_model(Path("gpt2"), "gpt2")
    convert_without_training(Path("gpt2"), Path("out"))
    with pytest.raises(InputError, match=r"out is a conversion of gpt2, not of .*tiny"):
        run_command([*command, "--out", "out", "--resume"])
    assert not Path("out/conversion").exists(), "no evaluation was started"


def test_unusable_text_leaves_no_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(Path("gpt2"), "gpt2")
    Path("one.txt").write_text("only one line")
    Path("some.txt").write_text(prose(400))
    capsys.readouterr()  # Discard the output of transformers.
    command = ["convert", "gpt2", "--to", "alibi", "--out", "out", "--quiet"]
    invalid_options = {
        "one.txt": ["--corpus", "one.txt"],
        "length 100000": ["--corpus", "some.txt", "--length", "100000"],
    }
    for pattern, options in invalid_options.items():
        with pytest.raises(InputError, match=pattern):
            run_command([*command, *options])
        assert capsys.readouterr() == ("", "")
        assert not Path("out").exists()


def test_note_about_scaled_rotary_positions(tmp_path):
    save_model(tmp_path / "original", "llama")
    change_settings(rope_scaling={"rope_type": "yarn", "factor": 4.0})(tmp_path / "original")
    conversion = open_conversion_source(ImportRequest(str(tmp_path / "original")))
    (note,) = conversion.source.weight_map.model.notes
    assert "yarn" in note


def test_import_of_a_convertible_model_suggests_convert(tmp_path):
    save_model(tmp_path / "original", "gpt2")
    with pytest.raises(InputError, match="type 'gpt2', with learned positions; trainshort convert makes"):
        run_command(["import", str(tmp_path / "original"), "--out", str(tmp_path / "run")])
