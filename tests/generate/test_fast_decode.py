"""The compiled single-token path is the model, for every setting that changes a layer."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from test_streaming import logprobs, make_model

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

pytestmark = pytest.mark.skipif(bool(kernel_unavailable_reason()), reason=str(kernel_unavailable_reason()))

SETTINGS = [
    *({"position": name} for name in ("alibi", "none", "sinusoidal", "learned")),
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
    *({"position": name, "nope_heads": 2} for name in ("alibi", "fox")),
    {"position": "fox", "position_settings": {"negate_gate": True}, "nope_heads": 3, "kv_heads": 2},
    *({"position": name, "nope_every": 2, "window": 5} for name in ("alibi", "fox", "none")),
    *({"position": name, "length_scaling": "ssmax"} for name in ("alibi", "fox")),
    {"position": "fox", "length_scaling": "llama4", "length_scaling_length": 3, "softmax_scale": 0.2, "nope_heads": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_scores_are_the_models(settings):
    """The block's two copies against each other, in Python and in C."""
    model = make_model(**settings)
    for parameter in model.parameters():  # norms and biases begin at 1 and 0, where a mistake would not show
        parameter.data += 0.1 * torch.randn_like(parameter)
    made, cache = FastDecoder.create(model), Cache()
    assert made is not None
    tokens = torch.randint(model.config.vocab_size, (1, 12))
    with torch.inference_mode():
        expected = model(tokens)[0].log_softmax(-1)
        got = [scores_after(made, int(token), cache) for token in tokens[0]]
    torch.testing.assert_close(torch.cat(got).log_softmax(-1), expected, atol=1e-5, rtol=1e-5)


def scores_after(made, token, cache):
    scores = made.logits(token, cache)
    assert scores is not None
    return scores


def test_results_do_not_depend_on_the_number_of_threads():
    model, before = make_model(width=192, heads=4), torch.get_num_threads()
    texts = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            linear = fast_decode.DecodeLinear(model.layers[0].ffn.wide.weight, None)  # pyright: ignore
            texts.append(linear(torch.linspace(-1, 1, 192).view(1, 1, -1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_a_forked_child_and_a_second_thread_work_too():
    model, before = make_model(width=192, heads=4), torch.get_num_threads()
    x = torch.linspace(-1, 1, 192).view(1, 1, -1)
    try:
        torch.set_num_threads(2)
        linears = [fast_decode.DecodeLinear(model.layers[0].ffn.wide.weight, None) for _ in range(4)]  # pyright: ignore
        expected = linears[0](x)
        child = os.fork()
        if child == 0:
            os._exit(0 if all(torch.equal(linears[0](x), expected) for _ in range(50)) else 1)
        assert os.waitpid(child, 0)[1] == 0
        with ThreadPoolExecutor(4) as threads:
            work = [threads.submit(lambda linear=linear: [linear(x) for _ in range(200)]) for linear in linears]
            assert all(torch.equal(out, expected) for each in work for out in each.result())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["full", "bounded"])
@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_buffers_are_float32_whatever_torch_makes_by_default(position, mode):
    """Compiled code reads and writes floats: buffers of half that size would be written past their ends."""
    model, before = make_model(position=position), torch.get_default_dtype()
    settings = {"tokens": 80, "temperature": 0, "mode": mode}
    expected = [(token.id, token.logprob) for token in trainshort.stream(model, [1, 2, 3], **settings)]
    for default in (torch.float64, torch.bfloat16):
        try:
            torch.set_default_dtype(default)
            assert [(token.id, token.logprob) for token in trainshort.stream(model, [1, 2, 3], **settings)] == expected
        finally:
            torch.set_default_dtype(before)


def test_weights_that_changed_are_seen():
    model = make_model()
    made = trainshort.stream(model, [1, 2, 3], tokens=9, temperature=0)
    first = next(made)
    with torch.no_grad():
        model.final_norm.bias[0] += 3  # in place, where no key or value depends on it  # pyright: ignore
    second = next(made)
    assert second.logprob == pytest.approx(float(logprobs(model, [1, 2, 3, first.id], [top(model, first.id)])))
    model.double().float()  # to other places in memory
    model.final_norm.bias.data[0] -= 5  # pyright: ignore
    third = next(made)
    prompt = [1, 2, 3, first.id, second.id]
    assert third.logprob == pytest.approx(float(logprobs(model, prompt, [third.id])), abs=1e-5)


def top(model, first):
    with torch.no_grad():
        return int(model(torch.tensor([[1, 2, 3, first]]))[0, -1].argmax())


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.bfloat16()], ids=["float64", "bfloat16"])
def test_other_dtypes_go_through_torch(change):
    model = change(make_model())
    assert FastDecoder.create(model) is None
    for mode in ({}, {"mode": "bounded"}):
        assert len(list(trainshort.stream(model, [1, 2, 3], tokens=5, **mode))) == 5


LEFT_TO_TORCH = [
    ({"norm": "rms"}, "RMSNorm"),
    ({"gated_feedforward": True}, "gated feed-forward layers"),
    ({"parallel_blocks": True}, "parallel blocks"),
    ({"activation": "silu"}, "the activation silu"),
    ({"clip_qkv": 0.5}, "clip_qkv"),
    ({"backend": "sdpa"}, "backend sdpa"),
    ({"position": "rotary"}, "turned queries and keys"),
    ({"position": "t5"}, "bias that is not linear"),
    ({"position": "fire"}, "biases that look at the text"),
]


@pytest.mark.parametrize(("settings", "named"), LEFT_TO_TORCH, ids=[name for _, name in LEFT_TO_TORCH])
def test_what_compiled_layers_lack_goes_through_torch(settings, named):
    model = make_model(**settings)
    assert fast_decode.unsupported_reason(model) == f"compiled layers have no {named}"
    assert FastDecoder.create(model) is None
    made = list(trainshort.stream(model, [1, 2, 3], tokens=5, temperature=0))
    read = [1, 2, 3]
    for token in made:
        assert token.logprob == pytest.approx(float(logprobs(model, read, [token.id])), abs=1e-5)
        read.append(token.id)


MIXED = [{"kv_heads": 6}, {"kv_heads": 2}, {"nope_heads": 3, "kv_heads": 2}, {"length_scaling": "ssmax"}]


@pytest.mark.parametrize("changes", MIXED, ids=str)
@pytest.mark.parametrize("position", ["alibi", "fox"])
@pytest.mark.parametrize("make_cache", [Cache, BoundedCache], ids=["full", "bounded"])
def test_all_layers_in_one_call_are_the_model(make_cache, position, changes):
    """Tokens one by one, a stretch through the model in between, and one by one again, past several doublings."""
    model = make_model(**changes, position=position)
    make_cache = partial(make_cache, clocked=True) if (position, make_cache) == ("fox", BoundedCache) else make_cache
    made = FastDecoder.create(model)
    assert made is not None
    tokens, cache, got = torch.randint(model.config.vocab_size, (1, 400)), make_cache(), []
    with torch.inference_mode():
        expected = model(tokens)[0].log_softmax(-1)
        for start, end in ((0, 70), (70, 75), (75, 200), (200, 261), (261, 400)):
            if end - start in (5, 61):
                got.append(model(tokens[:, start:end], cache=cache)[0])
            else:
                got += [scores_after(made, int(tokens[0, i]), cache) for i in range(start, end)]
    torch.testing.assert_close(torch.cat(got).log_softmax(-1), expected, atol=1e-5, rtol=1e-5)
    assert cache.length == 400


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 4}, {"kv_heads": 2}, {"nope_heads": 1}, {"length_scaling": "ssmax"}], ids=str
)
@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_rings_that_grow_inside_the_one_call_keep_the_certificate(position, changes):
    """Sharper and sharper tokens, so that rings of every layer must grow while a token passes through."""
    settings = {"init": "alibi"} if position == "fox" else {}
    model = make_model(width=64, heads=4, position=position, position_settings=settings, **changes)
    clocked = position == "fox"
    made, tokens = FastDecoder.create(model), torch.randint(model.config.vocab_size, (1, 600))
    assert made is not None
    fast, slow = (BoundedCache(tolerance=1e-4, clocked=clocked, compiled=compiled) for compiled in (True, False))
    with torch.inference_mode():
        for i in range(600):
            if i % 150 == 149:
                for block in model.layers:
                    block.attention.qkv.weight *= 1.5  # pyright: ignore
            one = tokens[:, i : i + 1]
            got, expected = scores_after(made, int(one), fast), model(one, cache=slow)[:, 0]
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert fast.windows == slow.windows
    assert fast.certificate.grow_count == slow.certificate.grow_count > 0
    assert fast.certificate.mass == pytest.approx(slow.certificate.mass, rel=1e-3)


@pytest.mark.parametrize(("option", "text"), [("slopes", "window=4"), ("slopes", "ntk=4"), ("scores", "1.7")])
@pytest.mark.parametrize("mode", ["full", "bounded"])
def test_a_change_at_inference_reaches_the_compiled_step(option, text, mode):
    model, read = make_model(), [1, 2, 3]
    with apply_override(model, Override.parse(option, text), 16, 32):
        assert FastDecoder.create(model) is not None
        for token in trainshort.stream(model, read.copy(), tokens=12, temperature=0, mode=mode):
            assert token.logprob == pytest.approx(float(logprobs(model, read, [token.id])), abs=1e-5)
            read.append(token.id)


def test_a_cache_that_only_attends_is_left_to_the_model():
    model = make_model()
    made, cache = FastDecoder.create(model), WindowCache(window=3)
    assert made is not None
    with torch.inference_mode():
        assert made.logits(5, cache) is None
    assert cache.length == 0


class FromTheThirdKeyOn(PositionMethod):
    """No bias while there are two keys."""

    def score_bias(self, length):
        return None if length < 3 else LinearBias(torch.ones(6))


class FlatterWithLength(PositionMethod):
    """Linear at every length, by other slopes."""

    def score_bias(self, length):
        return LinearBias(torch.ones(6) / length)


class FlatterFromFarOn(PositionMethod):
    """ALiBi's as far as most texts go."""

    def score_bias(self, length):
        return LinearBias(torch.ones(6) * min(1.0, 8192 / length))


def test_slopes_of_a_method_that_knows_its_longest_are_not_asked_beyond():
    model = make_model()
    model.position = FlatterFromFarOn(model.config, None)
    model.position.max_length = 1024
    assert model.position.has_error_bound()


@pytest.mark.parametrize("method", [FromTheThirdKeyOn, FlatterWithLength, FlatterFromFarOn])
def test_a_bias_that_depends_on_the_length_is_the_models_at_every_token(method):
    """Asked at one token alone, the first seemed to have no bias and the second to be ALiBi."""
    model = make_model()
    model.position = method(model.config, None)
    assert "compiled layers have no bias that is not linear" in (fast_decode.unsupported_reason(model) or "")
    assert not model.position.has_error_bound()
    read = [3, 1, 4, 1, 5]
    made = list(trainshort.stream(model, read, tokens=12, temperature=0))
    for token in made:
        assert token.id == int(model(torch.tensor([read]))[0, -1].argmax())
        read.append(token.id)
    with pytest.raises(InputError, match="bounded"):
        next(trainshort.stream(model, read, tokens=3, mode="bounded"))
