"""Streams: the probabilities of a full pass, at any length, in any mode that forgets nothing, alone or in a batch."""

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

TRAINED_AT = 16
"""Weights are random, so no length means anything to them; this stands for the training length of a real model."""


def make_model(position="alibi", **changes):
    torch.manual_seed(1)
    settings = {"vocab_size": 256, "layers": 2, "width": 48, "heads": 6, "position": position}
    settings["position_settings"] = {"learned": {"max_length": 400}, "alibi": {"max_bias": 4.0}}.get(position, {})
    model = TransformerLM(ModelConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model


def logprobs(model, prompt, made):
    """Of the made tokens, by one pass over everything."""
    tokens = torch.tensor([[*prompt, *made]])
    with torch.no_grad():
        scores = model(tokens)[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
    return scores[at, tokens[0, at + 1]]


def close(tokens, expected):
    torch.testing.assert_close(torch.tensor([token.logprob for token in tokens]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", positions.names())
@pytest.mark.parametrize("chunk", [7, 512])
def test_probabilities_are_those_of_a_full_pass_far_past_the_training_length(position, chunk):
    model = make_model(position)
    prompt = torch.randint(256, (18 * TRAINED_AT,)).tolist()
    tokens = list(trainshort.stream(model, prompt, tokens=20, chunk=chunk))
    close(tokens, logprobs(model, prompt, [token.id for token in tokens]))


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
def test_bounded_keeps_its_promise(changes):
    model = make_model(**changes)
    prompt = torch.randint(256, (300,)).tolist()
    made = trainshort.stream(model, prompt, tokens=200, mode="bounded", tolerance=1e-6, chunk=64)
    tokens = list(made)
    close(tokens, logprobs(model, prompt, [token.id for token in tokens]))
    cache = made.caches[0]
    assert isinstance(cache, BoundedCache)
    assert cache.certificate.mass <= 1e-6
    assert "error certificate" in made.certificate
    if not changes:
        assert cache.certificate.mass > 0
        assert max(cache.windows[0]) < 300  # it did forget


def test_mode_full_says_what_was_left_out_while_reading():
    """The prompt goes through the model's tolerance, which is not nothing."""
    prompt = torch.randint(256, (1500,)).tolist()
    for tolerance in (1e-2, 0.0):
        made = trainshort.stream(make_model(tolerance=tolerance), prompt, tokens=3)
        list(made)
        left_out = max(float(layer.left_out) for layer in made.caches[0].layers)
        assert (left_out > 0) == (tolerance > 0)
        assert left_out <= tolerance
        said = f"{left_out:.1e}, left out while reading (tolerance 1e-02); nothing" if tolerance else "0, nothing was"
        assert made.certificate.startswith(f"error certificate: {said}")


def test_modes_that_forget_nothing_make_the_same_text():
    model, prompt = make_model(), list(range(50))
    settings = [{"mode": "full"}, {"mode": "bounded", "tolerance": 0.0}, {"mode": "window", "window": 500}]
    settings.append({"mode": "window", "window": 500, "sinks": 4})
    texts = [[token.id for token in trainshort.stream(model, prompt, tokens=60, **each)] for each in settings]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_a_batch_of_different_lengths_is_each_sample_alone():
    model = make_model()
    prompts = [list(range(n)) for n in (3, 90, 41)]
    for mode in ({}, {"mode": "bounded"}, {"mode": "window", "window": 20}):
        together = list(stream_batch(model, prompts, tokens=15, temperature=0, **mode))
        for number, prompt in enumerate(prompts):
            mine = [token for token in together if token.sample == number]
            alone = list(trainshort.stream(model, prompt, tokens=15, temperature=0, **mode))
            assert [token.id for token in mine] == [token.id for token in alone]
            close(mine, torch.tensor([token.logprob for token in alone]))


def test_samples_of_one_prompt_differ_by_their_seed_and_end_each_for_itself():
    model = make_model()
    made = stream_batch(model, ["abc"] * 3, tokenizer=ByteTokenizer(), tokens=40, seed=5, stop=("\n",))
    tokens = list(made)
    texts = [[t.id for t in tokens if t.sample == number] for number in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    alone = trainshort.stream(model, "abc", tokenizer=ByteTokenizer(), tokens=40, seed=6, stop=("\n",))
    assert [token.id for token in alone] == texts[1]
    assert all(sample.finished for sample in made.samples)


def test_feeding_goes_on_without_reading_again():
    model = make_model()
    made = trainshort.stream(model, [1, 2, 3], tokens=5, temperature=0)
    first = [token.id for token in made]
    read = made.caches[0].length
    made.feed([9, 8, 7])
    second = list(made)
    assert made.caches[0].length == read + 1 + 3 + 4  # the last made token, the fed ones, all but the newest
    close(second, logprobs(model, [1, 2, 3, *first, 9, 8, 7], [token.id for token in second]))


def test_end_of_text_stops_unless_told_otherwise():
    model = make_model()
    settings = {"tokenizer": ByteTokenizer(), "tokens": 3000, "temperature": 3.0}
    made = trainshort.stream(model, "a", **settings)
    tokens = list(made)
    assert tokens[-1].id == 0
    assert made.samples[0].finished == "end of text"
    on = trainshort.stream(model, "a", **settings, stop_at_end=False)
    ids = [token.id for token in itertools.islice(on, len(tokens) + 5)]
    assert ids[: len(tokens)] == [token.id for token in tokens]
    assert len(ids) == len(tokens) + 5


def test_text_waits_for_whole_characters():
    model = make_model()
    made = list(trainshort.stream(model, "a", tokenizer=ByteTokenizer(), tokens=200, stop_at_end=False))
    text = "".join(token.text for token in made)
    assert text == bytes(token.id for token in made).decode(errors="replace")


def test_repetition_penalty_counts_the_prompt_too():
    model = make_model()
    plain = next(trainshort.stream(model, [5, 6], temperature=0)).id
    penalized = trainshort.stream(model, [5, 6, plain, 5, 6], temperature=0, repetition_penalty=1e6, tokens=30)
    ids = [token.id for token in penalized]
    assert plain not in ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("position", "settings", "message"),
    [
        ("rotary", {"mode": "bounded"}, "'bounded' needs ALiBi, not clamped, or FoX: rotary gives no bound"),
        ("t5", {"mode": "bounded"}, "'bounded' needs ALiBi, not clamped, or FoX: t5 gives no bound"),
        ("rotary", {"mode": "window", "window": 8, "sinks": 2}, "rotary keys are stored turned"),
        ("alibi", {"stop": ("x",)}, "stop texts need a tokenizer"),
    ],
)
def test_modes_that_cannot_are_refused_with_the_reason(position, settings, message):
    with pytest.raises(InputError, match=message):
        trainshort.stream(make_model(position), [1], **settings)


def test_bounded_memory_of_a_clamped_model_is_refused_as_that():
    model = make_model()
    refused = pytest.raises(InputError, match="needs ALiBi, not clamped, or FoX: alibi gives no bound here")
    with apply_override(model, Override.parse("slopes", "clamp=64"), 32, 32), refused:
        trainshort.stream(model, [1], mode="bounded")


def test_prompts_that_cannot_be_are_refused():
    model = make_model()
    with pytest.raises(InputError, match="the prompt is empty"):
        trainshort.stream(model, [])
    with pytest.raises(InputError, match="token 256 of the prompt is outside the model's vocabulary of 256"):
        trainshort.stream(model, [1, 256])
    with pytest.raises(InputError, match="needs a tokenizer"):
        trainshort.stream(model, "words")
    with pytest.raises(InputError, match="flat list"):
        trainshort.stream(model, [[1, 2]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="the tokenizer has 256 tokens, the model only 100"):
        trainshort.stream(make_model(vocab_size=100), "words", tokenizer=ByteTokenizer())
    learned = trainshort.stream(make_model("learned", position_settings={"max_length": 8}), [1] * 6, tokens=9)
    with pytest.raises(InputError, match="learned positions stop at 8"):
        list(learned)
    assert not learned.torn  # refused before anything was read


@pytest.mark.slow
def test_a_hundred_thousand_tokens_in_constant_memory():
    model = make_model(width=32, heads=4, layers=1)
    made = trainshort.stream(model, [1], tokens=100_000, mode="bounded")
    for count, _ in enumerate(made, start=1):
        if count == 20_000:
            early = made.caches[0].bytes
    cache = made.caches[0]
    assert isinstance(cache, BoundedCache)
    assert cache.length == 100_000
    assert cache.bytes <= 1.02 * early
    assert 0 < cache.certificate.mass < 1e-4  # a query may reach farther than all before it, but not by much
    assert (cache.certificate.mass > 1e-6) == (cache.certificate.rows_above_tolerance > 0)
