"""Streams: generated tokens have the probabilities of the model without a cache, in all modes and in batches."""

import itertools

import pytest
import torch

import trainshort
from trainshort import InputError, ModelConfig, TransformerLM
from trainshort.data.tokenizers.builtin import ByteTokenizer
from trainshort.evaluate.overrides import Override, apply_override
from trainshort.generate.streaming import stream_batch
from trainshort.model.cache import BoundedCache
from trainshort.model.positions import positions

# A text of this length is far longer than the training texts of the models that these tests stand for.
LONG_PROMPT_TOKENS = 288


def make_model(position="alibi", **changes):
    """Return a model with large random weights, so that the probabilities differ from token to token."""
    torch.manual_seed(1)
    settings = {"vocab_size": 256, "layers": 2, "width": 48, "heads": 6, "position": position}
    if position == "learned":
        settings["position_settings"] = {"max_length": 400}
    if position == "alibi":
        settings["position_settings"] = {"max_bias": 4.0}
    model = TransformerLM(ModelConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model


def compute_logprobs(model, prompt, generated):
    """Return the log probabilities of generated token ids, computed by one forward pass without a cache."""
    tokens = torch.tensor([[*prompt, *generated]])
    with torch.no_grad():
        logprobs = model(tokens)[0].log_softmax(-1)
    positions_before = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
    return logprobs[positions_before, tokens[0, positions_before + 1]]


def check_logprobs(tokens, expected):
    """Check the log probabilities of generated tokens."""
    actual = torch.tensor([token.logprob for token in tokens])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def token_ids(tokens):
    return [token.id for token in tokens]


@pytest.mark.parametrize("position", positions.names())
@pytest.mark.parametrize("chunk", [7, 512])
def test_logprobs_equal_those_of_a_full_forward_pass(position, chunk):
    model = make_model(position)
    prompt = torch.randint(256, (LONG_PROMPT_TOKENS,)).tolist()
    tokens = list(trainshort.stream(model, prompt, tokens=20, chunk=chunk))
    check_logprobs(tokens, compute_logprobs(model, prompt, token_ids(tokens)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 2},
        {"window": 40},
        {"window": 1},
        {"position_settings": {"max_bias": 4.0, "learned_slopes": True}},
    ],
    ids=str,
)
def test_bounded_mode_stays_within_the_tolerance(changes):
    model = make_model(**changes)
    prompt = torch.randint(256, (300,)).tolist()
    stream = trainshort.stream(model, prompt, tokens=200, mode="bounded", tolerance=1e-6, chunk=64)
    tokens = list(stream)
    check_logprobs(tokens, compute_logprobs(model, prompt, token_ids(tokens)))
    cache = stream.caches[0]
    assert isinstance(cache, BoundedCache)
    assert cache.certificate.mass <= 1e-6
    assert "error certificate" in stream.certificate
    if not changes:
        assert cache.certificate.mass > 0
        assert max(cache.windows[0]) < 300  # all heads of the first layer have evicted keys


@pytest.mark.parametrize("tolerance", [1e-2, 0.0])
def test_certificate_of_full_mode_includes_skipped_keys(tolerance):
    """The attention backend may skip keys of the prompt, up to the tolerance of the model."""
    prompt = torch.randint(256, (1500,)).tolist()
    stream = trainshort.stream(make_model(tolerance=tolerance), prompt, tokens=3)
    list(stream)
    skipped_masses = [layer.max_skipped_mass for layer in stream.caches[0].layers]
    max_skipped_mass = max(float(mass) for mass in skipped_masses if mass is not None)
    assert (max_skipped_mass > 0) == (tolerance > 0)
    assert max_skipped_mass <= tolerance
    number = f"{max_skipped_mass:.1e}" if tolerance else "0"
    assert stream.certificate.startswith(f"error certificate: {number} ")


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "bounded", "tolerance": 0.0},
        {"mode": "window", "window": 500},
        {"mode": "window", "window": 500, "sinks": 4},
    ],
    ids=str,
)
def test_modes_without_evictions_generate_the_same_tokens(settings):
    model = make_model()
    prompt = list(range(50))
    expected = token_ids(trainshort.stream(model, prompt, tokens=60, mode="full"))
    assert token_ids(trainshort.stream(model, prompt, tokens=60, **settings)) == expected


@pytest.mark.parametrize("settings", [{}, {"mode": "bounded"}, {"mode": "window", "window": 20}], ids=str)
def test_samples_of_a_batch_equal_single_samples(settings):
    model = make_model()
    prompts = [list(range(length)) for length in (3, 90, 41)]
    batch_tokens = list(stream_batch(model, prompts, tokens=15, temperature=0, **settings))
    for index, prompt in enumerate(prompts):
        sample_tokens = [token for token in batch_tokens if token.sample == index]
        single_tokens = list(trainshort.stream(model, prompt, tokens=15, temperature=0, **settings))
        assert token_ids(sample_tokens) == token_ids(single_tokens)
        check_logprobs(sample_tokens, torch.tensor([token.logprob for token in single_tokens]))


def test_samples_of_one_prompt_have_their_own_seed_and_end():
    model = make_model()
    settings = {"tokenizer": ByteTokenizer(), "tokens": 40, "stop": ("\n",)}
    stream = stream_batch(model, ["abc"] * 3, seed=5, **settings)
    tokens = list(stream)
    samples = [token_ids(token for token in tokens if token.sample == index) for index in range(3)]
    assert len({tuple(sample) for sample in samples}) == 3
    # The second sample uses the next seed.
    single_tokens = trainshort.stream(model, "abc", seed=6, **settings)
    assert token_ids(single_tokens) == samples[1]
    assert all(sample.finished for sample in stream.samples)


def test_feed_does_not_process_the_previous_text_again():
    model = make_model()
    stream = trainshort.stream(model, [1, 2, 3], tokens=5, temperature=0)
    first_ids = token_ids(stream)
    length = stream.caches[0].length
    stream.feed([9, 8, 7])
    tokens = list(stream)
    # The last generated token, the three tokens that were fed, and all new tokens except the last one.
    assert stream.caches[0].length == length + 1 + 3 + 4
    check_logprobs(tokens, compute_logprobs(model, [1, 2, 3, *first_ids, 9, 8, 7], token_ids(tokens)))


def test_end_of_text_token_ends_a_sample_unless_it_is_turned_off():
    model = make_model()
    settings = {"tokenizer": ByteTokenizer(), "tokens": 3000, "temperature": 3.0}
    stream = trainshort.stream(model, "a", **settings)
    ids = token_ids(stream)
    assert ids[-1] == 0
    assert stream.samples[0].finished == "end of text"

    continuing_stream = trainshort.stream(model, "a", **settings, stop_at_end=False)
    continued_ids = token_ids(itertools.islice(continuing_stream, len(ids) + 5))
    assert continued_ids[: len(ids)] == ids
    assert len(continued_ids) == len(ids) + 5


def test_text_contains_complete_characters_only():
    stream = trainshort.stream(make_model(), "a", tokenizer=ByteTokenizer(), tokens=200, stop_at_end=False)
    tokens = list(stream)
    text = "".join(token.text for token in tokens)
    assert text == bytes(token_ids(tokens)).decode(errors="replace")


def test_repetition_penalty_includes_the_prompt():
    model = make_model()
    most_likely = next(trainshort.stream(model, [5, 6], temperature=0)).id
    stream = trainshort.stream(model, [5, 6, most_likely, 5, 6], temperature=0, repetition_penalty=1e6, tokens=30)
    ids = token_ids(stream)
    assert most_likely not in ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("position", "settings", "message"),
    [
        ("rotary", {"mode": "bounded"}, "Mode 'bounded' requires ALiBi .* rotary positions"),
        ("t5", {"mode": "bounded"}, "Mode 'bounded' requires ALiBi .* t5 positions"),
        ("rotary", {"mode": "window", "window": 8, "sinks": 2}, "Sinks do not support rotary positions"),
        ("alibi", {"stop": ("x",)}, "Stop texts require a tokenizer"),
    ],
)
def test_unsupported_modes_are_rejected(position, settings, message):
    with pytest.raises(InputError, match=message):
        trainshort.stream(make_model(position), [1], **settings)


def test_bounded_mode_rejects_clamped_distances():
    model = make_model()
    override = Override.parse("slopes", "clamp=64")
    with apply_override(model, override, 32, 32), pytest.raises(InputError, match="without clamped distances"):
        trainshort.stream(model, [1], mode="bounded")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "The prompt is empty"),
        ([1, 256], "Token id 256 .* vocabulary of 256"),
        ("words", "requires a tokenizer"),
        ([[1, 2]], "flat list"),
    ],
)
def test_invalid_prompts_are_rejected(prompt, message):
    with pytest.raises(InputError, match=message):
        trainshort.stream(make_model(), prompt)


def test_too_large_tokenizer_is_rejected():
    with pytest.raises(InputError, match=r"at most 100 tokens, .* got 256"):
        trainshort.stream(make_model(vocab_size=100), "words", tokenizer=ByteTokenizer())


def test_stream_is_intact_after_the_largest_length_is_reached():
    """The error is raised before a token is processed."""
    model = make_model("learned", position_settings={"max_length": 8})
    stream = trainshort.stream(model, [1] * 6, tokens=9)
    with pytest.raises(InputError, match=r"learned.* 8"):
        list(stream)
    assert not stream.is_broken


@pytest.mark.slow
def test_memory_stays_constant_for_100_000_tokens():
    model = make_model(width=32, heads=4, layers=1)
    stream = trainshort.stream(model, [1], tokens=100_000, mode="bounded")
    bytes_after_20_000 = 0
    for count, _ in enumerate(stream, start=1):
        if count == 20_000:
            bytes_after_20_000 = stream.caches[0].bytes
    cache = stream.caches[0]
    assert isinstance(cache, BoundedCache)
    assert cache.length == 100_000
    assert cache.bytes <= 1.02 * bytes_after_20_000
    assert 0 < cache.certificate.mass < 1e-4  # Single queries may exceed the tolerance slightly.
    assert (cache.certificate.mass > 1e-6) == (cache.certificate.rows_above_tolerance > 0)
