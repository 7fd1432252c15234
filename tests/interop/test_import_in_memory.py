"""Hugging Face folders that `generate` loads without a run folder compute the same logits as transformers."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hugging import LENGTH, WORDS, max_logit_difference  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from trainshort.cli.main import main  # noqa: E402
from trainshort.interop.import_model import ImportRequest, load_in_memory  # noqa: E402
from trainshort.model.cache import Cache  # noqa: E402

LONG_LENGTH = 4 * LENGTH


def random_tokens(length: int = LONG_LENGTH) -> torch.Tensor:
    return torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(length))


def make_rotary_model(model_type: str, **rope_settings):
    """Make a tiny rotary model with large random weights."""
    torch.manual_seed(2)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0} | rope_settings
    if model_type == "gpt_neox":
        rope_parameters.setdefault("partial_rotary_factor", 0.5)
    else:
        shape["num_key_value_heads"] = 1
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        rope_parameters=rope_parameters,
        **shape,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gpt_neox"])
def test_rotary_model_in_memory_equals_transformers(model_type, tmp_path):
    source_model = make_rotary_model(model_type)
    source_model.save_pretrained(tmp_path)
    model, source = load_in_memory(ImportRequest(str(tmp_path)))
    assert source.format_name == model_type
    tokens = random_tokens()
    expected = source_model(tokens).logits
    assert max_logit_difference(model(tokens), expected) < 1e-4

    cache = Cache()
    parts = tokens.split([50, 1, LONG_LENGTH - 51], dim=1)
    cached_logits = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    assert max_logit_difference(cached_logits, expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"rotary_pct": 0.5, "rotary_emb_base": 500}], ids=["default", "old names"])
def test_gpt_neox_with_older_configs(settings, tmp_path):
    """Older configs have no rope_parameters. They use other setting names, or rely on the defaults of transformers."""
    model = make_rotary_model(
        "gpt_neox",
        partial_rotary_factor=settings.get("rotary_pct", 0.25),
        rope_theta=settings.get("rotary_emb_base", 1e4),
    )
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    source_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    loaded_model, _ = load_in_memory(ImportRequest(str(tmp_path)))
    tokens = random_tokens()
    assert max_logit_difference(loaded_model(tokens), source_model(tokens).logits) < 1e-4


def run_command(*words: str) -> int:
    """Run a command of trainshort, and return its exit code."""
    with pytest.raises(SystemExit) as system_exit:
        main(list(words))
    return system_exit.value.code


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_overrides_of_a_hugging_face_folder(model_type, tmp_path, capsys, monkeypatch):
    """`generate` can change the rotary embeddings of a Hugging Face folder. `evaluate` rejects all overrides."""
    monkeypatch.chdir(tmp_path)
    make_rotary_model(model_type).save_pretrained(tmp_path / "model")
    token_ids = {chr(ord("a") + n): n for n in range(26)} | {" ": 26, "[UNK]": 27}
    tokenizer = Tokenizer(models.BPE(token_ids, [], unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not " * 10)

    evaluate = ["evaluate", "model", "--data", "text.txt", "--lengths", "1x", "2x", "--max-tokens", "256"]
    for option, value in (("--slopes", "ntk=2"), ("--rotary", "yarn=2"), ("--attention-scale", "1.2")):
        assert run_command(*evaluate, option, value) == 2
        assert option in capsys.readouterr().err

    generate = ["generate", "model", "the cat", "--tokens", "40", "--temperature", "0"]
    assert run_command(*generate) == 0
    unchanged_text = capsys.readouterr().out
    assert run_command(*generate, "--rotary", "linear=8") == 0
    assert capsys.readouterr().out != unchanged_text
