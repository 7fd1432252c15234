"""Sampling: each filter keeps the right tokens, and samples follow the probabilities."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import InputError
from trainshort.generate import sampling
from trainshort.generate.config import GenerateConfig

# The logits of the probabilities 0.5, 0.3 and 0.2.
LOGITS = torch.tensor([0.5, 0.3, 0.2]).log()


def kept_tokens(logits):
    """Return the ids of the tokens that a filter has kept."""
    return logits.isfinite().nonzero().flatten().tolist()


def test_top_k_keeps_the_most_likely_tokens():
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert kept_tokens(sampling.keep_top_k(logits, 2)) == [1, 3]
    assert kept_tokens(sampling.keep_top_k(logits, 9)) == [0, 1, 2, 3]


def test_top_k_keeps_k_of_equally_likely_tokens():
    assert len(kept_tokens(sampling.keep_top_k(torch.zeros(5), 2))) == 2


@pytest.mark.parametrize(("p", "count"), [(0.1, 1), (0.5, 1), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_top_p_keeps_the_fewest_tokens_with_probability_p(p, count):
    assert len(kept_tokens(sampling.keep_top_p(LOGITS, p))) == count


@pytest.mark.parametrize(("p", "count"), [(0.0, 3), (0.3, 3), (0.5, 2), (0.7, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_most_likely_token(p, count):
    assert len(kept_tokens(sampling.keep_min_p(LOGITS, p))) == count


def test_repetition_penalty_lowers_positive_and_negative_logits():
    seen = torch.tensor([True, True, False])
    penalized = sampling.apply_repetition_penalty(torch.tensor([3.0, -2.0, 1.0]), seen, 2.0)
    assert penalized.tolist() == [1.5, -4.0, 1.0]


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=30),
    st.integers(1, 40),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.1, 3),
)
def test_filters_keep_the_most_likely_token_and_the_logits(values, top_k, top_p, min_p, temperature):
    logits = torch.tensor(values)
    config = GenerateConfig(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    filtered = sampling.filter_logits(logits, config)
    assert filtered.max() == (logits / temperature).max()
    is_kept = filtered.isfinite()
    torch.testing.assert_close(filtered[is_kept], logits[is_kept] / temperature)
    assert len(kept_tokens(filtered)) <= top_k


def test_samples_follow_the_probabilities_and_the_seed():
    def sample_tokens(seed):
        generator = torch.Generator().manual_seed(seed)
        return [sampling.sample_token(LOGITS, 1.0, generator) for _ in range(2000)]

    frequencies = torch.bincount(torch.tensor(sample_tokens(1)), minlength=3) / 2000
    torch.testing.assert_close(frequencies, LOGITS.exp(), atol=0.04, rtol=0)
    assert sample_tokens(1) == sample_tokens(1)
    assert sample_tokens(1) != sample_tokens(2)


def test_temperature_zero_chooses_the_most_likely_token():
    generator = torch.Generator().manual_seed(0)
    assert {sampling.sample_token(LOGITS, 0, generator) for _ in range(20)} == {0}


def test_temperature_divides_the_logits():
    filtered = sampling.filter_logits(LOGITS, GenerateConfig(temperature=2.0))
    assert math.isclose(float(filtered[0] - filtered[1]), float(LOGITS[0] - LOGITS[1]) / 2, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "'temperature' cannot be -1.0"),
        ({"temperature": float("nan")}, "'temperature' cannot be nan"),
        ({"top_p": 0.0}, "'top_p' cannot be 0.0"),
        ({"top_p": 1.5}, "'top_p' cannot be 1.5"),
        ({"min_p": 2.0}, "'min_p' cannot be 2.0"),
        ({"top_k": 0}, "'top_k' cannot be 0"),
        ({"repetition_penalty": 0.0}, "'repetition_penalty' cannot be 0.0"),
        ({"tokens": 0}, "'tokens' cannot be 0"),
        ({"tolerance": 1.0}, "'tolerance' cannot be 1.0"),
        ({"mode": "window"}, "mode 'window' requires a window"),
        ({"window": 8}, "window requires mode 'window'"),
        ({"sinks": 4}, "sinks require mode 'window'"),
        ({"stop": ("",)}, "a stop text is empty"),
        ({"temprature": 1.0}, "Did you mean 'temperature'"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        GenerateConfig.parse(settings)
