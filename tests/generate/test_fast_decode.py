"""The compiled decoder returns the same logits as the model, for every setting that changes a layer."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from test_streaming import compute_logprobs, make_model

import trainshort
from trainshort import Cache, InputError
from trainshort.attention import LinearBias
from trainshort.config.run_config import AdaptiveConfig
from trainshort.evaluate.overrides import Override, apply_override
from trainshort.generate import fast_decode
from trainshort.generate.fast_decode import FastDecoder
from trainshort.model.cache import BoundedCache, WindowCache
from trainshort.model.cache.ring_buffer import kernel_unavailable_reason
from trainshort.model.positions import PositionMethod

pytestmark = pytest.mark.skipif(kernel_unavailable_reason() is not None, reason=str(kernel_unavailable_reason()))

SUPPORTED_SETTINGS = [
    {"position": "alibi"},
    {"position": "none"},
    {"position": "sinusoidal"},
    {"position": "learned"},
    {"activation": "relu"},
    {"activation": "gelu_tanh"},
    {"biases": False},
    {"final_norm": False},
    {"embedding_norm": True},
    {"embedding_scale": True},
    {"embedding_factor": 2.5, "logit_scale": 0.3},
    {"norm_biases": False},
    {"biases": False, "feedforward_biases": True},
    {"tie_embeddings": False},
    {"kv_heads": 2},
    {"window": 5},
    {"width": 48, "feedforward_width": 101, "vocab_size": 97},
    {"adaptive": AdaptiveConfig(cutoffs=(50, 120), factor=2)},
    {"width": 192, "heads": 4},
    {"position": "fox"},
    {"position": "fox", "position_settings": {"init": "alibi", "negate_gate": True}, "kv_heads": 2},
    {"position": "fox", "position_settings": {"gate": "bias_only"}, "window": 5},
    {"position": "fox", "position_settings": {"gate": "fixed"}, "width": 64, "heads": 4},
    {"softmax_scale": 0.2},
    {"position": "alibi", "nope_heads": 2},
    {"position": "fox", "nope_heads": 2},
    {"position": "fox", "position_settings": {"negate_gate": True}, "nope_heads": 3, "kv_heads": 2},
    {"position": "alibi", "nope_every": 2, "window": 5},
    {"position": "fox", "nope_every": 2, "window": 5},
    {"position": "none", "nope_every": 2, "window": 5},
    {"position": "alibi", "length_scaling": "ssmax"},
    {"position": "fox", "length_scaling": "ssmax"},
    {"position": "fox", "length_scaling": "llama4", "length_scaling_length": 3, "softmax_scale": 0.2, "nope_heads": 2},
]


def decode_token(decoder, token, cache):
    """Process one token with the compiled decoder, and return the logits of the next token."""
    logits = decoder.logits(int(token), cache)
    assert logits is not None
    return logits


def check_logprobs(model, prompt, generated):
    """Check that the log probabilities of generated tokens equal those of the model without a cache."""
    tokens = list(prompt)
    for token in generated:
        expected = float(compute_logprobs(model, tokens, [token.id]))
        assert token.logprob == pytest.approx(expected, abs=1e-5)
        tokens.append(token.id)


@pytest.mark.parametrize("settings", SUPPORTED_SETTINGS, ids=str)
def test_compiled_decoder_equals_the_model(settings):
    model = make_model(**settings)
    # Norm weights start at 1 and biases at 0. Random values show whether they are used correctly.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    decoder = FastDecoder.create(model)
    assert decoder is not None
    cache = Cache()
    tokens = torch.randint(model.config.vocab_size, (1, 12))
    with torch.inference_mode():
        expected = model(tokens)[0].log_softmax(-1)
        logits = torch.cat([decode_token(decoder, token, cache) for token in tokens[0]])
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def restore_num_threads():
    """Restore the number of PyTorch threads after the test."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_results_do_not_depend_on_the_number_of_threads(restore_num_threads):
    model = make_model(width=192, heads=4)
    x = torch.linspace(-1, 1, 192).view(1, 1, -1)
    outputs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        linear = fast_decode.DecodeLinear(model.layers[0].ffn.wide.weight, None)  # pyright: ignore
        outputs.append(linear(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_linear_layer_works_in_forked_processes_and_in_threads(restore_num_threads):
    model = make_model(width=192, heads=4)
    x = torch.linspace(-1, 1, 192).view(1, 1, -1)
    torch.set_num_threads(2)
    linears = [fast_decode.DecodeLinear(model.layers[0].ffn.wide.weight, None) for _ in range(4)]  # pyright: ignore
    expected = linears[0](x)

    child = os.fork()
    if child == 0:
        is_equal = all(torch.equal(linears[0](x), expected) for _ in range(50))
        os._exit(0 if is_equal else 1)
    _, child_status = os.waitpid(child, 0)
    assert child_status == 0

    def apply_repeatedly(linear):
        return [linear(x) for _ in range(200)]

    with ThreadPoolExecutor(4) as executor:
        for outputs in executor.map(apply_repeatedly, linears):
            assert all(torch.equal(out, expected) for out in outputs)


@pytest.mark.parametrize("mode", ["full", "bounded"])
@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_buffers_do_not_depend_on_the_default_dtype(position, mode):
    """The compiled code writes float32. It would write past the end of buffers with a smaller dtype."""
    model = make_model(position=position)
    previous_dtype = torch.get_default_dtype()

    def generate():
        stream = trainshort.stream(model, [1, 2, 3], tokens=80, temperature=0, mode=mode)
        return [(token.id, token.logprob) for token in stream]

    expected = generate()
    for dtype in (torch.float64, torch.bfloat16):
        try:
            torch.set_default_dtype(dtype)
            assert generate() == expected
        finally:
            torch.set_default_dtype(previous_dtype)


def test_changed_weights_take_effect():
    model = make_model()
    stream = trainshort.stream(model, [1, 2, 3], tokens=9, temperature=0)
    first = next(stream)
    # Change a weight in place. The final norm has no influence on the cached keys and values.
    with torch.no_grad():
        model.final_norm.bias[0] += 3  # pyright: ignore
    second = next(stream)
    check_logprobs(model, [1, 2, 3, first.id], [second])
    # Move all weights to other memory.
    model.double().float()
    model.final_norm.bias.data[0] -= 5  # pyright: ignore
    third = next(stream)
    check_logprobs(model, [1, 2, 3, first.id, second.id], [third])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_use_pytorch(dtype):
    model = make_model().to(dtype)
    assert FastDecoder.create(model) is None
    for mode in ("full", "bounded"):
        assert len(list(trainshort.stream(model, [1, 2, 3], tokens=5, mode=mode))) == 5


UNSUPPORTED_SETTINGS = [
    ({"norm": "rms"}, "RMSNorm"),
    ({"gated_feedforward": True}, "gated feed-forward layers"),
    ({"parallel_blocks": True}, "parallel blocks"),
    ({"activation": "silu"}, "activation silu"),
    ({"clip_qkv": 0.5}, "clip_qkv"),
    ({"backend": "sdpa"}, "backend sdpa"),
    ({"position": "rotary"}, "rotated queries and keys"),
    ({"position": "t5"}, "biases that are not linear"),
    ({"position": "fire"}, "biases that depend on the text"),
]


@pytest.mark.parametrize(
    ("settings", "feature"), UNSUPPORTED_SETTINGS, ids=[feature for _, feature in UNSUPPORTED_SETTINGS]
)
def test_unsupported_models_use_pytorch(settings, feature):
    model = make_model(**settings)
    assert feature in (fast_decode.unsupported_reason(model) or "")
    assert FastDecoder.create(model) is None
    check_logprobs(model, [1, 2, 3], trainshort.stream(model, [1, 2, 3], tokens=5, temperature=0))


@pytest.mark.parametrize(
    "changes",
    [{"kv_heads": 6}, {"kv_heads": 2}, {"nope_heads": 3, "kv_heads": 2}, {"length_scaling": "ssmax"}],
    ids=str,
)
@pytest.mark.parametrize("position", ["alibi", "fox"])
@pytest.mark.parametrize("mode", ["full", "bounded"])
def test_compiled_decoder_and_model_share_a_cache(mode, position, changes):
    """Some parts of a sequence are processed by the compiled decoder, the other parts by the model."""
    model = make_model(**changes, position=position)
    cache = Cache() if mode == "full" else BoundedCache(has_decay_bias=position == "fox")
    decoder = FastDecoder.create(model)
    assert decoder is not None
    tokens = torch.randint(model.config.vocab_size, (1, 400))
    parts = [(0, 70, "compiled"), (70, 75, "model"), (75, 200, "compiled"), (200, 261, "model"), (261, 400, "compiled")]
    logits = []
    with torch.inference_mode():
        expected = model(tokens)[0].log_softmax(-1)
        for start, end, implementation in parts:
            if implementation == "compiled":
                logits += [decode_token(decoder, token, cache) for token in tokens[0, start:end]]
            else:
                logits.append(model(tokens[:, start:end], cache=cache)[0])
    torch.testing.assert_close(torch.cat(logits).log_softmax(-1), expected, atol=1e-5, rtol=1e-5)
    assert cache.length == 400


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 4}, {"kv_heads": 2}, {"nope_heads": 1}, {"length_scaling": "ssmax"}], ids=str
)
@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_certificates_are_equal_if_ring_buffers_grow_while_decoding(position, changes):
    """The weights are enlarged after every 150 tokens, so that the ring buffers of all layers must grow."""
    settings = {"init": "alibi"} if position == "fox" else {}
    model = make_model(width=64, heads=4, position=position, position_settings=settings, **changes)
    decoder = FastDecoder.create(model)
    assert decoder is not None
    new_cache = partial(BoundedCache, tolerance=1e-4, has_decay_bias=position == "fox")
    compiled_cache = new_cache(compiled=True)
    torch_cache = new_cache(compiled=False)
    tokens = torch.randint(model.config.vocab_size, (1, 600))
    with torch.inference_mode():
        for i in range(600):
            if i % 150 == 149:
                for block in model.layers:
                    block.attention.qkv.weight *= 1.5  # pyright: ignore
            token = tokens[:, i : i + 1]
            logits = decode_token(decoder, token, compiled_cache)
            expected = model(token, cache=torch_cache)[:, 0]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert compiled_cache.windows == torch_cache.windows
    assert compiled_cache.certificate.grow_count == torch_cache.certificate.grow_count > 0
    assert compiled_cache.certificate.mass == pytest.approx(torch_cache.certificate.mass, rel=1e-3)


@pytest.mark.parametrize(("option", "text"), [("slopes", "window=4"), ("slopes", "ntk=4"), ("attention-scale", "1.7")])
@pytest.mark.parametrize("mode", ["full", "bounded"])
def test_overrides_of_a_trained_model_take_effect(option, text, mode):
    model = make_model()
    with apply_override(model, Override.parse(option, text), 16, 32):
        assert FastDecoder.create(model) is not None
        check_logprobs(model, [1, 2, 3], trainshort.stream(model, [1, 2, 3], tokens=12, temperature=0, mode=mode))


def test_unsupported_cache_stays_empty():
    decoder = FastDecoder.create(make_model())
    assert decoder is not None
    cache = WindowCache(window=3)
    with torch.inference_mode():
        assert decoder.logits(5, cache) is None
    assert cache.length == 0


class BiasFromThreeKeysOn(PositionMethod):
    """There is no bias for fewer than three keys."""

    def score_bias(self, length):
        return None if length < 3 else LinearBias(torch.ones(6))


class SlopesThatDecreaseWithLength(PositionMethod):
    """The bias is linear for every length, but the slopes depend on the length."""

    def score_bias(self, length):
        return LinearBias(torch.ones(6) / length)


class SlopesThatDecreaseFrom8192On(PositionMethod):
    """The slopes are constant up to a length of 8,192."""

    def score_bias(self, length):
        return LinearBias(torch.ones(6) * min(1.0, 8192 / length))


def test_slopes_beyond_the_largest_length_do_not_matter():
    model = make_model()
    model.position = SlopesThatDecreaseFrom8192On(model.config, None)
    model.position.max_length = 1024
    assert model.position.has_error_bound()


@pytest.mark.parametrize("method", [BiasFromThreeKeysOn, SlopesThatDecreaseWithLength, SlopesThatDecreaseFrom8192On])
def test_bias_that_depends_on_the_length_uses_pytorch(method):
    """For a length of 1, the first method seems to have no bias, and the second method seems to be ALiBi."""
    model = make_model()
    model.position = method(model.config, None)
    assert "biases that are not linear" in (fast_decode.unsupported_reason(model) or "")
    assert not model.position.has_error_bound()
    tokens = [3, 1, 4, 1, 5]
    for token in list(trainshort.stream(model, tokens, tokens=12, temperature=0)):
        assert token.id == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token.id)
    with pytest.raises(InputError, match="bounded"):
        trainshort.stream(model, tokens, tokens=3, mode="bounded")
