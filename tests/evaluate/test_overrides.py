"""Changes of a trained model at inference, against Hugging Face's rope scaling and against their formulas."""

import pytest
import torch
from helpers import make_run, tiny_model

from trainshort import alibi
from trainshort.attention import LinearBias
from trainshort.cli.main import main
from trainshort.errors import InputError
from trainshort.evaluate.overrides import Override, apply_override, compute_override_slopes
from trainshort.model.cache import Cache
from trainshort.model.positions.alibi import Alibi
from trainshort.model.positions.rotary import RotaryScaling, scaled_frequencies


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


@pytest.mark.parametrize(
    ("kind", "theirs"), [("linear", "linear"), ("ntk", None), ("dynamic", "dynamic"), ("yarn", "yarn")]
)
@pytest.mark.parametrize("dim", [16, 64])
def test_rotary_speeds_are_those_of_transformers(kind, theirs, dim):
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    import transformers

    base, trained_at, length, factor = 10_000.0, 2048, 8192, 4.0
    ours, size = scaled_frequencies(RotaryScaling(kind, factor, trained_at, length), base, dim)
    if theirs is None:  # its own formula: transformers has it as the dynamic one at the training length times factor
        theirs, length = "dynamic", trained_at
        expected = (base * factor ** (dim / (dim - 2))) ** (-torch.arange(0, dim, 2).double() / dim)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
        return
    settings = {
        "rope_type": theirs,
        "factor": factor,
        "rope_theta": base,
        "original_max_position_embeddings": trained_at,
    }
    config = transformers.LlamaConfig(
        hidden_size=dim * 2, num_attention_heads=2, max_position_embeddings=trained_at, rope_parameters=settings
    )
    found, attention = rope.ROPE_INIT_FUNCTIONS[theirs](config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(ours.float(), found, rtol=1e-5, atol=1e-9)
    assert size == pytest.approx(attention)


def test_a_factor_of_one_changes_nothing():
    for kind in ("linear", "ntk", "yarn"):
        speed, size = scaled_frequencies(RotaryScaling(kind, 1.0, 128, 512), 10_000.0, 32)
        torch.testing.assert_close(speed, 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32))
        assert size == 1
    speed, _ = scaled_frequencies(RotaryScaling("dynamic", 2.0, 128, 64), 10_000.0, 32)
    torch.testing.assert_close(speed, 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32))


def test_ntk_leaves_the_steepest_slope():
    trained = alibi.slopes(4)
    found = compute_override_slopes(trained, Override.parse("slopes", "ntk=8"), 128, 512)
    torch.testing.assert_close(found, trained / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_clamped_slopes_are_the_formula():
    model, tokens = tiny_model(), torch.randint(32, (1, 50))
    with apply_override(model, Override.parse("slopes", "clamp=7"), 16, 50):
        bias = model.position.score_bias(50)
        found = model(tokens)
    distance = torch.arange(8)
    torch.testing.assert_close(bias.table, -alibi.slopes(4)[:, None] * distance)
    with apply_override(model, Override.parse("slopes", "clamp=49"), 16, 50):
        whole = model(tokens)
    torch.testing.assert_close(whole, model(tokens), rtol=0, atol=1e-5)
    assert (found - whole).abs().max() > 1e-3


class Computed(Alibi):
    """A method that keeps no tensor of slopes, as a plug-in may."""

    def score_bias(self, length):
        return LinearBias(self.slopes * 1)


def test_changes_of_slopes_nest():
    model, tokens = tiny_model(), torch.randint(32, (1, 40))
    before = model(tokens)
    with apply_override(model, Override.parse("slopes", "max_bias=2"), 16, 40):
        outer = model(tokens)
        with apply_override(model, Override.parse("slopes", "ntk=4"), 16, 40):
            assert not torch.equal(model(tokens), outer)
        assert torch.equal(model(tokens), outer)
    assert torch.equal(model(tokens), before)
    assert "score_bias" not in vars(model.position)


@pytest.mark.parametrize("text", ["max_bias=2", "ntk=4", "interpolate", "clamp=9"])
def test_slopes_that_are_computed_change_like_those_that_are_kept(text):
    """They were left as they are, and the result was stored as changed."""
    kept, computed, tokens = tiny_model(), tiny_model(), torch.randint(32, (1, 40))
    computed.position = Computed(kept.config, kept.config.position_settings)
    computed.load_state_dict(kept.state_dict())
    before = kept(tokens)
    with (
        apply_override(kept, Override.parse("slopes", text), 16, 40),
        apply_override(computed, Override.parse("slopes", text), 16, 40),
    ):
        assert torch.equal(computed(tokens), kept(tokens))
        assert (kept(tokens) - before).abs().max() > 1e-4
    assert torch.equal(computed(tokens), before)


@pytest.mark.parametrize(
    ("position", "option", "text"),
    [("rotary", "rotary", "yarn=4"), ("rotary", "rotary", "linear=2"), ("fox", "scores", "1.5"), ("t5", "scores", "2")],
)
def test_changes_end_with_their_context(position, option, text):
    model, tokens = tiny_model(position), torch.randint(32, (1, 40))
    before = model(tokens)
    with apply_override(model, Override.parse(option, text), 16, 40):
        assert (model(tokens) - before).abs().max() > 1e-4
    assert torch.equal(model(tokens), before)


def test_scores_times_a_factor_are_queries_times_it():
    model, tokens = tiny_model("none"), torch.randint(32, (1, 20))
    with apply_override(model, Override.parse("scores", "1.5"), 16, 20):
        found = model(tokens)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.qkv.weight[:32] *= 1.5
            layer.attention.qkv.bias[:32] *= 1.5
    torch.testing.assert_close(found, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        (
            "rotary",
            "steep",
            "rotary is linear=4, ntk=4, dynamic=1, yarn=4 or blocks=256, with a number of at least 1; got 'steep'",
        ),
        ("rotary", "yarn=0.5", "at least 1; got 'yarn=0.5'"),
        ("rotary", "yarn", "at least 1; got 'yarn'"),
        ("slopes", "clamp=1.5", "slopes are interpolate, ntk=4, clamp=512, max_bias=16 or window=512; got 'clamp=1.5'"),
        ("slopes", "ntk=nan", "got 'ntk=nan'"),
        ("scores", "0", "--scores is a factor above 0, such as 1.2; got '0'"),
        ("scores", "-1", "a factor above 0"),
        ("scores", "inf", "a factor above 0"),
    ],
)
def test_a_change_that_is_none_is_one_sentence(option, text, said):
    with pytest.raises(InputError) as told:
        Override.parse(option, text)
    assert said in str(told.value)


def test_a_change_that_the_method_does_not_know_is_one_sentence(tmp_path, capsys):
    run = make_run(tmp_path, position="alibi")
    assert command("evaluate", str(run), "--lengths", "32", "--rotary", "yarn=2") == 2
    assert (
        "--rotary needs a model with rotary or xpos positions; this one has position='alibi'" in capsys.readouterr().err
    )
    assert command("evaluate", str(run), "--lengths", "32", "--slopes", "ntk=2", "--scores", "2") == 2
    assert "give one of --slopes and --scores, so that its effect is seen" in capsys.readouterr().err
    assert command("generate", str(run), "the cat", "--endless", "--slopes", "ntk=2") == 2
    assert "--slopes is for one text of a known length" in capsys.readouterr().err


def test_evaluate_and_generate_take_them(tmp_path, capsys):
    run = make_run(tmp_path, position="rotary")
    assert command("evaluate", str(run), "--lengths", "32", "--max-tokens", "200", "--rotary", "yarn=2") == 0
    assert "rotary-yarn=2" in capsys.readouterr().out
    assert command("generate", str(run), "the cat", "--tokens", "3", "--rotary", "dynamic=1") == 0


def test_blocks_are_a_mask_of_two_blocks():
    """Against the formula in float64 with the mask written out, in one go, in chunks and token by token."""
    model, tokens, size = tiny_model("xpos").double(), torch.randint(32, (1, 37)), 8
    place = torch.arange(37)
    seen = (place[:, None] >= place) & (place[:, None] // size - place // size <= 1)
    layer = model.layers[0]
    x = layer.attention_norm(model.embed(tokens, place[None]))
    q, k, v = layer.attention.project(x, model.position, place[None])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    expected = layer.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    found = []
    layer.attention.register_forward_hook(lambda *given: found.append(given[-1]))
    with torch.no_grad(), apply_override(model, Override.parse("rotary", f"blocks={size}"), 16, 37):
        whole, cache = model(tokens), Cache()
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
        parts = [model(part, cache=cache) for part in tokens.split([11, 1, 1, 20, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)
    assert (model(tokens) - whole).abs().max() > 1e-4


def test_generate_takes_blocks_and_refuses_them_with_a_window(tmp_path, capsys):
    run = make_run(tmp_path, position="xpos")
    asked = ["generate", str(run), "the cat", "the cat sat on", "--tokens", "20", "--temperature", "0"]
    assert command(*asked) == 0
    before = capsys.readouterr().out
    assert command(*asked, "--rotary", "blocks=2") == 0
    assert capsys.readouterr().out != before
    assert command(*asked, "--rotary", "blocks=2", "--mode", "window", "--window", "8") == 2
    assert "--rotary blocks goes with --mode full" in capsys.readouterr().err
