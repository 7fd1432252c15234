"""Tests of overrides: changes of how a trained model uses positions."""

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


def run_command(*words: str) -> object:
    """Run a command of trainshort and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(words))
    return exit_info.value.code


@pytest.mark.parametrize("method", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize("dim", [16, 64])
def test_rotary_frequencies_equal_those_of_transformers(method, dim):
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    import transformers

    base, trained_at, length, factor = 10_000.0, 2048, 8192, 4.0
    frequencies, scale = scaled_frequencies(RotaryScaling(method, factor, trained_at, length), base, dim)
    rope_parameters = {
        "rope_type": method,
        "factor": factor,
        "rope_theta": base,
        "original_max_position_embeddings": trained_at,
    }
    config = transformers.LlamaConfig(
        hidden_size=dim * 2, num_attention_heads=2, max_position_embeddings=trained_at, rope_parameters=rope_parameters
    )
    init_function = rope.ROPE_INIT_FUNCTIONS[method]
    expected_frequencies, expected_scale = init_function(config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(frequencies.float(), expected_frequencies, rtol=1e-5, atol=1e-9)
    assert scale == pytest.approx(expected_scale)


@pytest.mark.parametrize("dim", [16, 64])
def test_ntk_frequencies_equal_formula(dim):
    """transformers has the method "ntk" only as a special case of "dynamic", so the formula is written out here."""
    base, factor = 10_000.0, 4.0
    frequencies, _ = scaled_frequencies(RotaryScaling("ntk", factor, 2048, 8192), base, dim)
    larger_base = base * factor ** (dim / (dim - 2))
    expected = larger_base ** (-torch.arange(0, dim, 2).double() / dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-12, atol=0)


def test_rotary_factor_1_changes_nothing():
    unscaled = 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    for method in ("linear", "ntk", "yarn"):
        frequencies, scale = scaled_frequencies(RotaryScaling(method, 1.0, 128, 512), 10_000.0, 32)
        torch.testing.assert_close(frequencies, unscaled)
        assert scale == 1


def test_dynamic_scaling_changes_nothing_below_training_length():
    frequencies, _ = scaled_frequencies(RotaryScaling("dynamic", 2.0, 128, 64), 10_000.0, 32)
    torch.testing.assert_close(frequencies, 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32))


def test_ntk_keeps_the_steepest_slope():
    trained_slopes = alibi.slopes(4)
    slopes = compute_override_slopes(trained_slopes, Override.parse("slopes", "ntk=8"), 128, 512)
    torch.testing.assert_close(slopes, trained_slopes / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_clamp_limits_the_distance():
    model = tiny_model()
    tokens = torch.randint(32, (1, 50))
    with apply_override(model, Override.parse("slopes", "clamp=7"), 16, 50):
        bias = model.position.score_bias(50)
        clamped_logits = model(tokens)
    torch.testing.assert_close(bias.table, -alibi.slopes(4)[:, None] * torch.arange(8))

    # No distance in the text exceeds 49, so this override changes nothing.
    with apply_override(model, Override.parse("slopes", "clamp=49"), 16, 50):
        unclamped_logits = model(tokens)
    torch.testing.assert_close(unclamped_logits, model(tokens), rtol=0, atol=1e-5)
    assert (clamped_logits - unclamped_logits).abs().max() > 1e-3


class AlibiWithComputedSlopes(Alibi):
    """ALiBi whose slopes are computed in each call, as a plug-in may do."""

    def score_bias(self, length):
        return LinearBias(self.slopes * 1)


def test_overrides_can_be_nested():
    model = tiny_model()
    tokens = torch.randint(32, (1, 40))
    original_logits = model(tokens)
    with apply_override(model, Override.parse("slopes", "max_bias=2"), 16, 40):
        outer_logits = model(tokens)
        with apply_override(model, Override.parse("slopes", "ntk=4"), 16, 40):
            assert not torch.equal(model(tokens), outer_logits)
        assert torch.equal(model(tokens), outer_logits)
    assert torch.equal(model(tokens), original_logits)
    assert "score_bias" not in vars(model.position)


@pytest.mark.parametrize("text", ["max_bias=2", "ntk=4", "interpolate", "clamp=9"])
def test_computed_slopes_are_overridden_like_stored_slopes(text):
    model = tiny_model()
    model_with_computed_slopes = tiny_model()
    tokens = torch.randint(32, (1, 40))
    model_with_computed_slopes.position = AlibiWithComputedSlopes(model.config, model.config.position_settings)
    model_with_computed_slopes.load_state_dict(model.state_dict())
    original_logits = model(tokens)
    override = Override.parse("slopes", text)
    with apply_override(model, override, 16, 40), apply_override(model_with_computed_slopes, override, 16, 40):
        assert torch.equal(model_with_computed_slopes(tokens), model(tokens))
        assert (model(tokens) - original_logits).abs().max() > 1e-4
    assert torch.equal(model_with_computed_slopes(tokens), original_logits)


@pytest.mark.parametrize(
    ("position", "option", "text"),
    [
        ("rotary", "rotary", "yarn=4"),
        ("rotary", "rotary", "linear=2"),
        ("fox", "attention-scale", "1.5"),
        ("t5", "attention-scale", "2"),
    ],
)
def test_model_is_restored_after_override(position, option, text):
    model = tiny_model(position)
    tokens = torch.randint(32, (1, 40))
    original_logits = model(tokens)
    with apply_override(model, Override.parse(option, text), 16, 40):
        assert (model(tokens) - original_logits).abs().max() > 1e-4
    assert torch.equal(model(tokens), original_logits)


def test_factor_of_scores_equals_factor_of_queries():
    model = tiny_model("none")
    tokens = torch.randint(32, (1, 20))
    with apply_override(model, Override.parse("attention-scale", "1.5"), 16, 20):
        logits = model(tokens)
    with torch.no_grad():
        for layer in model.layers:
            # The first 32 rows of the matrix compute the queries.
            layer.attention.qkv.weight[:32] *= 1.5
            layer.attention.qkv.bias[:32] *= 1.5
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("rotary", "steep"),
        ("rotary", "yarn=0.5"),
        ("rotary", "yarn"),
        ("slopes", "clamp=1.5"),
        ("slopes", "ntk=nan"),
        ("attention-scale", "0"),
        ("attention-scale", "-1"),
        ("attention-scale", "inf"),
        ("attention-scale", "nan"),
    ],
)
def test_invalid_value_is_rejected(option, text):
    with pytest.raises(InputError) as caught:
        Override.parse(option, text)
    assert f"--{option}" in str(caught.value)
    assert f"got '{text}'" in str(caught.value)


def test_impossible_overrides_are_rejected(tmp_path, capsys):
    run = make_run(tmp_path, position="alibi")
    assert run_command("evaluate", str(run), "--lengths", "32", "--rotary", "yarn=2") == 2
    message = capsys.readouterr().err
    assert "--rotary" in message
    assert "position='alibi'" in message

    assert run_command("evaluate", str(run), "--lengths", "32", "--slopes", "ntk=2", "--attention-scale", "2") == 2
    assert "--slopes and --attention-scale" in capsys.readouterr().err

    assert run_command("generate", str(run), "the cat", "--endless", "--slopes", "ntk=2") == 2
    assert "--slopes" in capsys.readouterr().err


def test_evaluate_and_generate_accept_overrides(tmp_path, capsys):
    run = make_run(tmp_path, position="rotary")
    assert run_command("evaluate", str(run), "--lengths", "32", "--max-tokens", "200", "--rotary", "yarn=2") == 0
    assert "rotary-yarn=2" in capsys.readouterr().out
    assert run_command("generate", str(run), "the cat", "--tokens", "3", "--rotary", "dynamic=1") == 0


def test_blocks_restrict_attention_to_two_blocks():
    """The output is compared with a dense mask in float64, for one forward pass and for decoding in chunks."""
    length, block_size = 37, 8
    model = tiny_model("xpos").double()
    tokens = torch.randint(32, (1, length))
    positions = torch.arange(length)
    is_past = positions[:, None] >= positions
    is_same_or_next_block = positions[:, None] // block_size - positions // block_size <= 1
    is_visible = is_past & is_same_or_next_block

    layer = model.layers[0]
    x = layer.attention_norm(model.embed(tokens, positions[None]))
    q, k, v = layer.attention.project(x, model.position, positions[None])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~is_visible, -torch.inf)
    expected = layer.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    attention_outputs = []
    layer.attention.register_forward_hook(lambda module, inputs, output: attention_outputs.append(output))
    override = Override.parse("rotary", f"blocks={block_size}")
    with torch.no_grad(), apply_override(model, override, 16, length):
        logits = model(tokens)
        torch.testing.assert_close(attention_outputs[0], expected, rtol=0, atol=1e-12)
        cache = Cache()
        chunk_logits = [model(chunk, cache=cache) for chunk in tokens.split([11, 1, 1, 20, 4], dim=1)]
    torch.testing.assert_close(torch.cat(chunk_logits, dim=1), logits, rtol=0, atol=1e-10)
    assert (model(tokens) - logits).abs().max() > 1e-4


def test_generate_supports_blocks_without_sliding_window(tmp_path, capsys):
    run = make_run(tmp_path, position="xpos")
    arguments = ["generate", str(run), "the cat", "the cat sat on", "--tokens", "20", "--temperature", "0"]
    assert run_command(*arguments) == 0
    output_without_blocks = capsys.readouterr().out
    assert run_command(*arguments, "--rotary", "blocks=2") == 0
    assert capsys.readouterr().out != output_without_blocks
    assert run_command(*arguments, "--rotary", "blocks=2", "--mode", "window", "--window", "8") == 2
    assert "--rotary blocks" in capsys.readouterr().err
