"""Imported Hugging Face models compute the right logits, at their training length and at longer inputs.

The reference is transformers if its class is correct. If its class has a bug, the reference is a corrected copy, or the
independent implementation in `foreign.py`.
"""

import json
from functools import partial
from pathlib import Path

import foreign
import pytest
import torch
from foreign import FOREIGN_MODELS, HEADS, LAYERS, LENGTH, WIDTH, WORDS
from safetensors.torch import save_file
from torch import Tensor

import trainshort
from trainshort import InputError
from trainshort.config.run_config import load_config
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model

transformers = pytest.importorskip("transformers")


def enlarge_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Make the weights of a new model larger, so that an error in any part changes the logits visibly.

    With the initial weights, attention is nearly uniform and all biases are zero.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(6)
            elif parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def import_and_load(folder: Path, out: Path) -> torch.nn.Module:
    return load_model(import_model(ImportRequest(str(folder)), out))


def max_difference(model: torch.nn.Module, expected_logits: Tensor, tokens: Tensor) -> float:
    """Return the largest difference of two logits, in standard deviations of the expected logits."""
    deviation = expected_logits.std()
    assert deviation > 0.05
    with torch.no_grad():
        return float((model(tokens) - expected_logits).abs().max() / deviation)


@pytest.mark.parametrize("make_foreign_model", FOREIGN_MODELS.values(), ids=FOREIGN_MODELS)
def test_imported_model_equals_independent_implementation(make_foreign_model, tmp_path):
    torch.manual_seed(0)
    config, weights, decoder = make_foreign_model()
    model = import_and_load(foreign.save(tmp_path / "source", config, weights), tmp_path / "run")
    for multiple in (1, 2, 8):
        tokens = torch.randint(WORDS, (2, multiple * LENGTH))
        assert max_difference(model, foreign.compute(decoder, tokens), tokens) < 1e-4
    assert load_config(tmp_path / "run" / "config.json").train.length == LENGTH


def make_mpt(**attention):
    config = transformers.MptConfig(
        d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, vocab_size=WORDS, max_seq_len=LENGTH, attn_config=attention
    )
    return enlarge_weights(transformers.MptForCausalLM(config))


def make_bloom():
    config = transformers.BloomConfig(hidden_size=WIDTH, n_head=HEADS, n_layer=LAYERS, vocab_size=WORDS)
    return enlarge_weights(transformers.BloomForCausalLM(config))


def make_falcon(*, multi_query=False, bias=True, heads=HEADS):
    config = transformers.FalconConfig(
        hidden_size=WIDTH,
        num_attention_heads=heads,
        num_hidden_layers=LAYERS,
        vocab_size=WORDS,
        alibi=True,
        parallel_attn=False,
        new_decoder_architecture=False,
        multi_query=multi_query,
        bias=bias,
    )
    return enlarge_weights(transformers.FalconForCausalLM(config))


def falcon_bias_without_rounding(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Replace `build_alibi_tensor` of Falcon, which rounds the bias to bfloat16."""
    positions = (attention_mask.cumsum(-1) - 1) * attention_mask
    bias = foreign.slopes(num_heads)[None, :, None] * positions[:, None].float()
    return bias.reshape(-1, 1, attention_mask.shape[1])


def correct_known_bug(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    """Correct the bug of transformers that changes the logits of long inputs."""
    match model.config.model_type:
        case "mpt":
            model.config.max_seq_len = 8 * LENGTH
        case "falcon":
            name = "transformers.models.falcon.modeling_falcon.build_alibi_tensor"
            monkeypatch.setattr(name, falcon_bias_without_rounding)


TRANSFORMERS_MODELS = {
    "mpt": make_mpt,
    "mpt with clipping": partial(make_mpt, clip_qkv=0.5, softmax_scale=0.3),
    "bloom": make_bloom,
    "falcon": make_falcon,
    "falcon with multi-query attention": partial(make_falcon, multi_query=True, bias=False),
}


@pytest.mark.parametrize("make", TRANSFORMERS_MODELS.values(), ids=TRANSFORMERS_MODELS)
def test_imported_model_equals_transformers(make, tmp_path, monkeypatch, capfd):
    torch.manual_seed(0)
    source_model = make()
    source_model.save_pretrained(tmp_path / "source")
    transformers.utils.logging.enable_progress_bar()
    capfd.readouterr()
    model = import_and_load(tmp_path / "source", tmp_path / "run")
    assert "%" not in capfd.readouterr().err, "transformers must not show a progress bar"
    parity = json.loads((tmp_path / "run" / "import.json").read_text())["parity"]
    assert parity["off"] < 1e-4
    for multiple in (1, 2, 8):
        tokens = torch.randint(WORDS, (2, multiple * LENGTH))
        with monkeypatch.context() as patch, torch.no_grad():
            correct_known_bug(patch, source_model)
            assert max_difference(model, source_model(tokens).logits, tokens) < 1e-4


@pytest.mark.parametrize("mode", [{}, {"mode": "bounded"}], ids=["full", "bounded"])
@pytest.mark.parametrize("make", [make_mpt, make_bloom], ids=["mpt", "bloom"])
def test_greedy_text_equals_transformers(make, mode, tmp_path):
    torch.manual_seed(0)
    source_model = make()
    source_model.save_pretrained(tmp_path / "source")
    source_model.config.max_seq_len = 8 * LENGTH
    model = import_and_load(tmp_path / "source", tmp_path / "run")
    prompt = torch.randint(WORDS, (1, LENGTH))
    generated = [token.id for token in trainshort.stream(model, prompt[0], tokens=40, temperature=0, **mode)]
    with torch.no_grad():
        expected = source_model.generate(prompt, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0)
    assert generated == expected[0, LENGTH:].tolist()


def test_mpt_setting_that_transformers_ignores_is_imported(tmp_path, monkeypatch):
    torch.manual_seed(0)
    source_model = make_mpt(alibi_bias_max=16)
    tokens = torch.randint(WORDS, (2, LENGTH))
    source_model.save_pretrained(tmp_path / "mpt")
    model = import_and_load(tmp_path / "mpt", tmp_path / "run")
    assert max_difference(model, source_model(tokens).logits, tokens) > 0.1

    record = json.loads((tmp_path / "run" / "import.json").read_text())
    (note,) = record["notes"]
    assert note.endswith(": alibi_bias_max")
    assert record["parity"] == f"not measured: {note}"

    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    monkeypatch.setattr(
        "transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor",
        lambda heads, length, max_bias, device: build_mpt_alibi_tensor(heads, length, 16, device),
    )
    assert max_difference(model, source_model(tokens).logits, tokens) < 1e-4


def test_rounding_of_falcon_is_not_imported(tmp_path):
    torch.manual_seed(0)
    source_model = make_falcon()
    source_model.save_pretrained(tmp_path / "falcon")
    model = import_and_load(tmp_path / "falcon", tmp_path / "run")
    tokens = torch.randint(WORDS, (1, 600))
    assert max_difference(model, source_model(tokens).logits, tokens) > 0.01


@pytest.mark.parametrize(("heads", "rounds_slopes"), [(2, False), (8, False), (16, True)])
def test_note_about_falcon_states_from_which_length_rounding_matters(heads, rounds_slopes, tmp_path):
    torch.manual_seed(0)
    source_model = make_falcon(heads=heads)
    source_model.save_pretrained(tmp_path / "falcon")
    model = import_and_load(tmp_path / "falcon", tmp_path / "run")
    (note,) = json.loads((tmp_path / "run" / "import.json").read_text())["notes"]
    assert ("rounds the ALiBi slopes" in note) == rounds_slopes
    assert ("more than about 260 tokens" in note) != rounds_slopes
    tokens = torch.randint(WORDS, (1, 200))
    has_difference = max_difference(model, source_model(tokens).logits, tokens) > 1e-3
    assert has_difference == rounds_slopes


def test_several_weight_files_in_half_precision(tmp_path):
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt(bias=True)
    one_file = foreign.save(tmp_path / "one", config, weights, dtype=torch.bfloat16)
    three_files = foreign.save(tmp_path / "three", config, weights, shards=3, dtype=torch.bfloat16)
    model = import_and_load(one_file, tmp_path / "run")
    other_weights = dict(import_and_load(three_files, tmp_path / "run2").named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, other_weights[name])
        assert weight.dtype == torch.float32


def test_bloom_saved_without_output_head(tmp_path):
    torch.manual_seed(0)
    source_model = make_bloom()
    weights = source_model.transformer.state_dict()
    weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    foreign.save(tmp_path / "source", source_model.config.to_dict(), weights)
    model = import_and_load(tmp_path / "source", tmp_path / "run")
    tokens = torch.randint(WORDS, (1, LENGTH))
    assert max_difference(model, source_model(tokens).logits, tokens) < 1e-4


def delete_file(name: str):
    """Return a function that deletes a file of a model folder."""
    return lambda folder: (folder / name).unlink()


def change_settings(**changes):
    """Return a function that changes the config of a model folder. `section__name` is a setting in a section."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            section, separator, inner_name = name.partition("__")
            if separator:
                config[section][inner_name] = value
            else:
                config[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def write_index_with_outside_path(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')


# Each entry has a change of a valid model folder, and a pattern of the error message.
INVALID_FOLDERS = {
    "missing weight file": (delete_file("model-00002-of-00003.safetensors"), "model-00002-of-00003.safetensors"),
    "missing index": (delete_file("model.safetensors.index.json"), "has no model.safetensors and no"),
    "missing config": (delete_file("config.json"), r"not found.*config\.json"),
    "no ALiBi": (change_settings(attn_config__alibi=False), "alibi=False: only ALiBi models can be imported"),
    "rotary": (change_settings(model_type="llama"), "'llama', with rotary positions; trainshort convert makes"),
    "qk_ln": (change_settings(attn_config__qk_ln=True), "qk_ln=True"),
    "prefix_lm": (change_settings(attn_config__prefix_lm=True), "prefix_lm=True"),
    "norm_type": (change_settings(norm_type="rmsnorm"), "norm_type='rmsnorm'"),
    "ffn_type": (change_settings(ffn_config={"ffn_type": "mptglu"}), "ffn_type='mptglu'"),
    "wrong width": (change_settings(d_model=60), "Shape mismatch: transformer.wte.weight"),
    "too many layers": (change_settings(n_layers=3), "no tensor transformer.blocks.2"),
    "too few layers": (change_settings(n_layers=1), "Unexpected tensor transformer.blocks.1"),
    "no biases": (change_settings(no_bias=True), "Unexpected tensor .*bias"),
    "text for a number": (change_settings(n_heads="six"), "n_heads must be a positive integer, got 'six'"),
    "zero heads": (change_settings(n_heads=0), "n_heads must be a positive integer, got 0"),
    "invalid logit_scale": (change_settings(logit_scale="large"), "logit_scale .*'large'"),
    "list for a section": (change_settings(attn_config=[1]), r"attn_config, got \[1\]"),
    "no training length": (change_settings(max_seq_len=None), "training length. Give --trained-at"),
    "path outside the folder": (write_index_with_outside_path, r"'\.\./x\.safetensors'"),
}


@pytest.mark.parametrize(("change", "pattern"), INVALID_FOLDERS.values(), ids=INVALID_FOLDERS)
def test_invalid_folder_is_rejected(change, pattern, tmp_path):
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt(bias=True)
    folder = foreign.save(tmp_path / "source", config, weights, shards=3)
    change(folder)
    with pytest.raises(InputError, match=pattern):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "no file is left behind"


# Each entry has a change of a tensor, and a pattern of the error message.
INVALID_WEIGHTS = {
    "int32": (lambda weight: weight.to(torch.int32), "{name}, got torch.int32"),
    "bool": (lambda weight: weight > 0, "{name}, got torch.bool"),
    "nan": (lambda weight: weight / 0 * 0, "{name} contains NaN or infinity"),
}


@pytest.mark.parametrize(("change", "pattern"), INVALID_WEIGHTS.values(), ids=INVALID_WEIGHTS)
def test_invalid_weights_are_rejected(change, pattern, tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "source", config, weights)
    name = "transformer.blocks.1.attn.Wqkv.weight"
    save_file({**weights, name: change(weights[name])}, folder / "model.safetensors")
    with pytest.raises(InputError, match=pattern.format(name=name)):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tokenizer_of_another_model_is_rejected(tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "source", config, weights)
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    with pytest.raises(InputError, match=r"tokenizer .* has 256 tokens, .* has 131"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")


def test_rotary_baichuan_is_rejected(tmp_path):
    config, weights, _ = foreign.baichuan()
    folder = foreign.save(tmp_path / "source", {**config, "max_position_embeddings": 4096}, weights)
    with pytest.raises(InputError, match="Baichuan model has rotary positions"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")


def test_pickled_weights_are_rejected(tmp_path):
    config, weights, _ = foreign.baichuan()
    folder = foreign.save(tmp_path / "source", config, weights)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle, which can execute code"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
