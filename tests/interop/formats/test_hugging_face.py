"""Hugging Face's ALiBi models become runs that compute what they should, at and past the length they were made for.

Where transformers runs a model rightly it is the reference; where it has a defect, its repaired self is, and the defect
is measured beside it.
"""

import json
from functools import partial
from pathlib import Path

import foreign
import pytest
import torch
from foreign import BY_HAND, HEADS, LAYERS, LENGTH, WIDTH, WORDS
from safetensors.torch import save_file

import trainshort
from trainshort import InputError
from trainshort.config.run_config import load_config
from trainshort.interop.import_model import ImportRequest, import_model
from trainshort.train.checkpoint import load_model

transformers = pytest.importorskip("transformers")


def loud(model: torch.nn.Module) -> torch.nn.Module:
    """First weights are so small that attention is nearly uniform, and biases are zero; here every part shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(6)
            elif parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def imported(folder: Path, out: Path) -> torch.nn.Module:
    return load_model(import_model(ImportRequest(str(folder)), out))


def off(ours: torch.nn.Module, expected: torch.Tensor, tokens: torch.Tensor) -> float:
    """Largest difference of the logits, in units of their deviation."""
    with torch.no_grad():
        assert expected.std() > 0.05
        return float((ours(tokens) - expected).abs().max() / expected.std())


@pytest.mark.parametrize("make", BY_HAND.values(), ids=BY_HAND)
def test_models_by_hand(make, tmp_path):
    torch.manual_seed(0)
    config, weights, model = make()
    ours = imported(foreign.save(tmp_path / "theirs", config, weights), tmp_path / "run")
    for times in (1, 2, 8):
        tokens = torch.randint(WORDS, (2, times * LENGTH))
        assert off(ours, foreign.compute(model, tokens), tokens) < 1e-4
    assert load_config(tmp_path / "run" / "config.json").train.length == LENGTH


def mpt(**attention):
    config = transformers.MptConfig(
        d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, vocab_size=WORDS, max_seq_len=LENGTH, attn_config=attention
    )
    return loud(transformers.MptForCausalLM(config))


def bloom():
    config = transformers.BloomConfig(hidden_size=WIDTH, n_head=HEADS, n_layer=LAYERS, vocab_size=WORDS)
    return loud(transformers.BloomForCausalLM(config))


def falcon(**settings):
    config = transformers.FalconConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=LAYERS, vocab_size=WORDS, alibi=True,
        parallel_attn=False, new_decoder_architecture=False, **{"multi_query": False, "bias": True, **settings},
    )  # fmt: skip
    return loud(transformers.FalconForCausalLM(config))


def exact_falcon_bias(mask, num_heads, dtype):
    """Falcon's table without its rounding to bfloat16."""
    index = (mask.cumsum(-1) - 1) * mask
    return (foreign.slopes(num_heads)[None, :, None] * index[:, None].float()).reshape(-1, 1, mask.shape[1])


REPAIRS = {
    "mpt": lambda patch, model: setattr(model.config, "max_seq_len", 8 * LENGTH),
    "falcon": lambda patch, model: patch.setattr(
        "transformers.models.falcon.modeling_falcon.build_alibi_tensor", exact_falcon_bias
    ),
}
NATIVE = {
    "mpt": mpt,
    "mpt clipped": partial(mpt, clip_qkv=0.5, softmax_scale=0.3),
    "bloom": bloom,
    "falcon": falcon,
    "falcon with one key head": partial(falcon, multi_query=True, bias=False),
}


@pytest.mark.parametrize("make", NATIVE.values(), ids=NATIVE)
def test_models_of_transformers(make, tmp_path, monkeypatch, capfd):
    torch.manual_seed(0)
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.utils.logging.enable_progress_bar()
    capfd.readouterr()
    ours = imported(tmp_path / "theirs", tmp_path / "run")
    assert "%" not in capfd.readouterr().err  # no bar of theirs
    kind = theirs.config.model_type
    parity = json.loads((tmp_path / "run" / "import.json").read_text())["parity"]
    assert parity["off"] < 1e-4
    for times in (1, 2, 8):
        tokens = torch.randint(WORDS, (2, times * LENGTH))
        with monkeypatch.context() as patch, torch.no_grad():
            if kind in REPAIRS:
                REPAIRS[kind](patch, theirs)
            assert off(ours, theirs(tokens).logits, tokens) < 1e-4


@pytest.mark.parametrize("mode", [{}, {"mode": "bounded"}], ids=["full", "bounded"])
@pytest.mark.parametrize("make", [mpt, bloom], ids=["mpt", "bloom"])
def test_greedy_text_is_that_of_transformers(make, mode, tmp_path):
    torch.manual_seed(0)
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs")
    theirs.config.max_seq_len = 8 * LENGTH
    ours, prompt = imported(tmp_path / "theirs", tmp_path / "run"), torch.randint(WORDS, (1, LENGTH))
    made = [token.id for token in trainshort.stream(ours, prompt[0], tokens=40, temperature=0, **mode)]
    with torch.no_grad():
        expected = theirs.generate(prompt, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0)
    assert made == expected[0, LENGTH:].tolist()


def test_defects_of_transformers_are_not_imported(tmp_path, monkeypatch):
    torch.manual_seed(0)
    theirs, tokens = mpt(alibi_bias_max=16), torch.randint(WORDS, (2, LENGTH))
    theirs.save_pretrained(tmp_path / "mpt")
    ours = imported(tmp_path / "mpt", tmp_path / "run")
    assert off(ours, theirs(tokens).logits, tokens) > 0.1, "alibi_bias_max is ignored there"
    note = "followed here, ignored by Hugging Face's class: alibi_bias_max"
    assert json.loads((tmp_path / "run" / "import.json").read_text())["notes"] == [note]
    module = "transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor"
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    monkeypatch.setattr(module, lambda heads, length, most, device: build_mpt_alibi_tensor(heads, length, 16, device))
    assert off(ours, theirs(tokens).logits, tokens) < 1e-4

    theirs, tokens = falcon(), torch.randint(WORDS, (1, 600))
    theirs.save_pretrained(tmp_path / "falcon")
    ours = imported(tmp_path / "falcon", tmp_path / "falcon-run")
    assert off(ours, theirs(tokens).logits, tokens) > 0.01, "slope times position is rounded to bfloat16 there"


def test_shards_and_half_precision(tmp_path):
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt(bias=True)
    whole = imported(foreign.save(tmp_path / "a", config, weights, dtype=torch.bfloat16), tmp_path / "run")
    parts = imported(foreign.save(tmp_path / "b", config, weights, 3, torch.bfloat16), tmp_path / "run2")
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, dict(parts.named_parameters())[name])
        assert weight.dtype == torch.float32


def body_alone(weights):
    return {name.removeprefix("transformer."): weight for name, weight in weights.items()}


def test_bloom_saved_without_its_head(tmp_path):
    torch.manual_seed(0)
    theirs, tokens = bloom(), torch.randint(WORDS, (1, LENGTH))
    foreign.save(tmp_path / "theirs", theirs.config.to_dict(), body_alone(theirs.transformer.state_dict()))
    assert off(imported(tmp_path / "theirs", tmp_path / "run"), theirs(tokens).logits, tokens) < 1e-4


def without(name):
    return lambda folder: (folder / name).unlink()


def setting(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            at, _, inner = name.partition("__")
            (config[at] if inner else config)[inner or at] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


BAD = {
    "a missing shard": (without("model-00002-of-00003.safetensors"), "lacks model-00002-of-00003.safetensors"),
    "no weights": (without("model.safetensors.index.json"), "has no model.safetensors and no"),
    "no config": (without("config.json"), "no file .*config.json"),
    "not alibi": (setting(attn_config__alibi=False), "has alibi False, and only ALiBi models can be imported"),
    "rotary": (setting(model_type="llama"), "type 'llama', with rotary positions; trainshort convert makes"),
    "qk norm": (setting(attn_config__qk_ln=True), "has qk_ln True, and our attention has no such part"),
    "prefix": (setting(attn_config__prefix_lm=True), "has prefix_lm True"),
    "rms": (setting(norm_type="rmsnorm"), "has norm_type 'rmsnorm'"),
    "gated": (setting(ffn_config={"ffn_type": "mptglu"}), "has ffn_type 'mptglu'"),
    "width": (setting(d_model=60), "config and weights are of different models"),
    "layers": (setting(n_layers=3), "no tensor transformer.blocks.2"),
    "fewer layers": (setting(n_layers=1), "transformer.blocks.1.*has no place in a mpt model"),
    "no biases": (setting(no_bias=True), "bias has no place in a mpt model"),
    "words": (setting(n_heads="six"), "should say n_heads, a positive whole number; it says 'six'"),
    "zero": (setting(n_heads=0), "should say n_heads"),
    "scale": (setting(logit_scale="large"), "logit_scale 'large'"),
    "list": (setting(attn_config=[1]), "attn_config should be an object"),
    "length": (setting(max_seq_len=None), "does not say at which length it was trained. Give --trained-at"),
    "path": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
        "only safetensors beside it are read",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
def test_bad_folders_are_refused_in_a_sentence(change, sentence, tmp_path):
    torch.manual_seed(0)
    config, weights, _ = foreign.mpt(bias=True)
    folder = foreign.save(tmp_path / "theirs", config, weights, 3)
    change(folder)
    with pytest.raises(InputError, match=sentence):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "nothing is left behind"


WRONG_NUMBERS = {
    "whole": (
        lambda weight: weight.to(torch.int32),
        "holds torch.int32 numbers, and weights are floating-point numbers",
    ),
    "true and false": (lambda weight: weight > 0, "holds torch.bool numbers, and weights are floating-point numbers"),
    "nan": (lambda weight: weight / 0 * 0, "hold numbers that are not finite"),
}


@pytest.mark.parametrize(("change", "sentence"), WRONG_NUMBERS.values(), ids=WRONG_NUMBERS)
def test_weights_of_another_dtype(change, sentence, tmp_path):
    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, weights)
    name = "transformer.blocks.1.attn.Wqkv.weight"
    save_file({**weights, name: change(weights[name])}, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} {sentence}"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    from trainshort.data.tokenizers.builtin import ByteTokenizer

    config, weights, _ = foreign.mpt()
    folder = foreign.save(tmp_path / "theirs", config, weights)
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    with pytest.raises(InputError, match="makes 256 tokens and the model knows 131"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")


def test_baichuan_7b_and_pickled_weights_are_refused(tmp_path):
    config, weights, _ = foreign.baichuan()
    folder = foreign.save(tmp_path / "7b", {**config, "max_position_embeddings": 4096}, weights)
    with pytest.raises(InputError, match="a Baichuan with rotary positions"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="a pickle, which can execute code and is not opened"):
        import_model(ImportRequest(str(folder)), tmp_path / "run")
