"""Changes at inference for Hugging Face models: against transformers' own rope scaling, and against our imports."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hugging import LENGTH, WORDS, make, off, unrounded  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from trainshort.cache import Cache  # noqa: E402
from trainshort.cli import main  # noqa: E402
from trainshort.config import ModelConfig  # noqa: E402
from trainshort.errors import InputError  # noqa: E402
from trainshort.evaluate.changes import Change, changed  # noqa: E402
from trainshort.interop.changing import changed_elsewhere  # noqa: E402
from trainshort.interop.importing import ImportRequest, load_here  # noqa: E402
from trainshort.model import TransformerLM  # noqa: E402

LONG = 4 * LENGTH


def tokens(length=LONG):
    return torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(length))


def turning(kind, **rope):
    """A tiny rotary model with loud weights."""
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
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("text", ["linear=4", "dynamic=2", "yarn=4", "ntk=4"])
def test_rotary_changes_are_transformers_own_settings(kind, text):
    model, given = turning(kind), tokens()
    before = model(given).logits
    name, _, factor = text.partition("=")
    if name == "ntk":
        dim = 16 if kind == "llama" else 8
        theirs = turning(kind, rope_theta=10_000.0 * float(factor) ** (dim / (dim - 2)))
    else:
        theirs = turning(
            kind, rope_type=name, factor=float(factor), original_max_position_embeddings=LENGTH, rope_theta=10_000.0
        )
    theirs.load_state_dict(model.state_dict())
    with changed_elsewhere(model, Change.read("rotary", text), LENGTH, LONG):
        found = model(given).logits
    assert off(found, theirs(given).logits) < 1e-5
    assert off(found, before) > 0.05
    assert torch.equal(model(given).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mpt", "bloom", "falcon"])
@pytest.mark.parametrize(
    ("option", "text"),
    [("slopes", x) for x in ("interpolate", "ntk=4", "clamp=20", "window=24")] + [("scores", "1.5")],
)
def test_slopes_and_scores_are_those_of_the_imported_model(kind, option, text, tmp_path, monkeypatch):
    unrounded(monkeypatch)
    model, given, change = make(kind), tokens(), Change.read(option, text)
    model.save_pretrained(tmp_path / "theirs")
    model.config.max_seq_len = LONG
    ours, _ = load_here(ImportRequest(str(tmp_path / "theirs")))
    before = model(given).logits
    with changed(ours, change, LENGTH, LONG), changed_elsewhere(model, change, LENGTH, LONG):
        expected, found = ours(given), model(given).logits
        weights = model(given, output_attentions=True).logits  # written out by the formula itself
    assert off(found, expected) < 1e-4
    assert off(weights, expected) < 1e-4
    assert off(found, before) > 0.01
    assert torch.equal(model(given).logits, before)


@torch.no_grad()
def test_falcons_maximum_bias_keeps_its_root(monkeypatch):
    unrounded(monkeypatch)
    model, given = make("falcon"), tokens()
    before = model(given).logits
    with changed_elsewhere(model, Change.read("slopes", "max_bias=8"), LENGTH, LONG):
        assert off(model(given).logits, before) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt_neox"])
def test_a_rotary_model_imported_for_generate_is_itself_under_every_change(kind, tmp_path):
    model = turning(kind)
    model.save_pretrained(tmp_path)
    ours, source = load_here(ImportRequest(str(tmp_path)))
    assert source.kind == kind
    plain = model(tokens()).logits
    assert off(ours(tokens()), plain) < 1e-4
    for option, text in [("rotary", x) for x in ("linear=4", "ntk=4", "dynamic=2", "yarn=4")] + [("scores", "1.5")]:
        change = Change.read(option, text)
        with changed(ours, change, LENGTH, LONG), changed_elsewhere(model, change, LENGTH, LONG):
            expected = model(tokens()).logits
            assert off(ours(tokens()), expected) < 1e-4
            assert off(expected, plain) > 0.01
            cache = Cache()
            parts = [ours(part, cache=cache) for part in tokens().split([50, 1, LONG - 51], dim=1)]
            assert off(torch.cat(parts, 1), expected) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"rotary_pct": 0.5, "rotary_emb_base": 500}])
def test_gpt_neox_as_its_older_configs_say_it(how, tmp_path):
    """Without rope_parameters: transformers' defaults, or the names of before."""
    model = turning(
        "gpt_neox", partial_rotary_factor=how.get("rotary_pct", 0.25), rope_theta=how.get("rotary_emb_base", 1e4)
    )
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"):
        settings.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(settings | how))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, _ = load_here(ImportRequest(str(tmp_path)))
    assert off(ours(tokens()), theirs(tokens()).logits) < 1e-4


@torch.no_grad()
def test_our_own_class_of_transformers_is_changed_as_its_run():
    hf = pytest.importorskip("trainshort.hf")
    torch.manual_seed(0)
    ours = TransformerLM(ModelConfig(vocabulary=WORDS, layers=1, width=32, heads=2, position="rotary"))
    model, change = hf.TrainshortForCausalLM.of(ours), Change.read("rotary", "blocks=8")
    with changed(ours, change, LENGTH, LONG):
        expected = ours(tokens())
    with changed_elsewhere(model, change, LENGTH, LONG):
        assert torch.equal(model(tokens(), use_cache=False).logits, expected)


@torch.no_grad()
def test_scores_of_another_model_are_queries_times_the_factor():
    model, given = turning("llama"), tokens(LENGTH)
    with changed_elsewhere(model, Change.read("scores", "1.5"), LENGTH, LENGTH):
        found = model(given).logits
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 1.5
    assert off(found, model(given).logits) < 1e-5


@pytest.mark.parametrize(
    ("kind", "option", "text", "said"),
    [
        ("mpt", "rotary", "yarn=4", "--rotary needs a model that turns by one rope_parameters of transformers"),
        ("llama", "slopes", "ntk=4", "--slopes needs a model with ALiBi positions"),
        ("llama", "rotary", "blocks=8", "--rotary blocks is for runs of trainshort's own"),
    ],
)
def test_a_change_that_a_model_does_not_know_is_one_sentence(kind, option, text, said):
    model = make(kind) if kind == "mpt" else turning(kind)
    with pytest.raises(InputError, match=said), changed_elsewhere(model, Change.read(option, text), LENGTH, LONG):
        pass


def test_a_model_that_is_stretched_already_is_not_stretched_again():
    model = turning("llama", rope_type="linear", factor=2.0)
    with (
        pytest.raises(InputError, match="stretched already, by rope_type 'linear' of its config"),
        changed_elsewhere(model, Change.read("rotary", "yarn=4"), LENGTH, LONG),
    ):
        pass


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_evaluate_and_generate_change_a_hugging_face_folder(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    letters = {chr(97 + n): n for n in range(26)} | {" ": 26, "[UNK]": 27}
    turning(kind).save_pretrained(tmp_path / "model")
    Tokenizer(models.BPE(letters, [], unk_token="[UNK]")).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not " * 10)
    asked = ["evaluate", "model", "--data", "text.txt", "--lengths", "1x", "2x", "--max-tokens", "256"]
    assert command(*asked, "--rotary", "yarn=2") == 0
    assert "rotary-yarn=2" in capsys.readouterr().out
    assert command(*asked, "--slopes", "ntk=2") == 2
    assert "--slopes needs a model with ALiBi positions" in capsys.readouterr().err
    making = ["generate", "model", "the cat", "--tokens", "40", "--temperature", "0"]
    assert command(*making) == 0
    plain = capsys.readouterr().out
    assert command(*making, "--rotary", "linear=8") == 0
    assert capsys.readouterr().out != plain
