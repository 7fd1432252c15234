"""Hugging Face folders that `generate` imports for one use: rotary models compute what transformers computes."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hugging import LENGTH, WORDS, off  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from trainshort.cli.main import main  # noqa: E402
from trainshort.interop.import_model import ImportRequest, load_in_memory  # noqa: E402
from trainshort.model.cache import Cache  # noqa: E402

LONG = 4 * LENGTH


def tokens(length=LONG):
    return torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(length))


def make_rotary_model(kind, **rope):
    """Make a tiny rotary model with large random weights."""
    torch.manual_seed(2)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0} | rope}
    if kind == "gpt_neox":
        settings["rope_parameters"].setdefault("partial_rotary_factor", 0.5)
    else:
        shape["num_key_value_heads"] = 1
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=WORDS, max_position_embeddings=LENGTH, tie_word_embeddings=False, **shape, **settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt_neox"])
def test_rotary_model_in_memory_equals_transformers(kind, tmp_path):
    model = make_rotary_model(kind)
    model.save_pretrained(tmp_path)
    ours, source = load_in_memory(ImportRequest(str(tmp_path)))
    assert source.format_name == kind
    expected = model(tokens()).logits
    assert off(ours(tokens()), expected) < 1e-4
    cache = Cache()
    parts = [ours(part, cache=cache) for part in tokens().split([50, 1, LONG - 51], dim=1)]
    assert off(torch.cat(parts, 1), expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"rotary_pct": 0.5, "rotary_emb_base": 500}])
def test_gpt_neox_with_older_configs(how, tmp_path):
    """Older configs have no rope_parameters. They use other setting names, or rely on the defaults of transformers."""
    model = make_rotary_model(
        "gpt_neox", partial_rotary_factor=how.get("rotary_pct", 0.25), rope_theta=how.get("rotary_emb_base", 1e4)
    )
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"):
        settings.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(settings | how))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, _ = load_in_memory(ImportRequest(str(tmp_path)))
    assert off(ours(tokens()), theirs(tokens()).logits) < 1e-4


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_generate_changes_a_hugging_face_folder_and_evaluate_refuses(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    letters = {chr(97 + n): n for n in range(26)} | {" ": 26, "[UNK]": 27}
    make_rotary_model(kind).save_pretrained(tmp_path / "model")
    Tokenizer(models.BPE(letters, [], unk_token="[UNK]")).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not " * 10)
    asked = ["evaluate", "model", "--data", "text.txt", "--lengths", "1x", "2x", "--max-tokens", "256"]
    for option, text in (("--slopes", "ntk=2"), ("--rotary", "yarn=2"), ("--scores", "1.2")):
        assert command(*asked, option, text) == 2
        assert f"{option} supports runs of trainshort only" in capsys.readouterr().err
    making = ["generate", "model", "the cat", "--tokens", "40", "--temperature", "0"]
    assert command(*making) == 0
    plain = capsys.readouterr().out
    assert command(*making, "--rotary", "linear=8") == 0
    assert capsys.readouterr().out != plain
