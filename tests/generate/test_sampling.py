"""Sampling: each filter keeps exactly what it says, and draws follow the probabilities."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import InputError
from trainshort.generate import sampling
from trainshort.generate.config import GenerateConfig

SCORES = torch.tensor([0.5, 0.3, 0.2]).log()


def kept(scores):
    return scores.isfinite().nonzero().flatten().tolist()


def test_top_k_keeps_the_likeliest():
    scores = torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert kept(sampling.keep_top_k(scores, 2)) == [1, 3]
    assert kept(sampling.keep_top_k(scores, 9)) == [0, 1, 2, 3]
    assert len(kept(sampling.keep_top_k(torch.zeros(5), 2))) == 2


@pytest.mark.parametrize(("p", "count"), [(0.1, 1), (0.5, 1), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_top_p_keeps_as_few_as_reach_it(p, count):
    assert len(kept(sampling.keep_top_p(SCORES, p))) == count


@pytest.mark.parametrize(("p", "count"), [(0.0, 3), (0.3, 3), (0.5, 2), (0.7, 1), (1.0, 1)])
def test_min_p_is_a_share_of_the_likeliest(p, count):
    assert len(kept(sampling.keep_min_p(SCORES, p))) == count


def test_penalty_lowers_what_was_seen_whatever_its_sign():
    seen = torch.tensor([True, True, False])
    assert sampling.apply_repetition_penalty(torch.tensor([3.0, -2.0, 1.0]), seen, 2.0).tolist() == [1.5, -4.0, 1.0]


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=30),
    st.integers(1, 40),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.1, 3),
)
def test_filters_leave_something_and_change_no_order(values, k, p, share, temperature):
    scores = torch.tensor(values)
    config = GenerateConfig(top_k=k, top_p=p, min_p=share, temperature=temperature)
    left = sampling.filter_logits(scores, config)
    assert left.max() == (scores / temperature).max()  # one of the likeliest is kept
    torch.testing.assert_close(left[left.isfinite()], scores[left.isfinite()] / temperature)
    assert len(kept(left)) <= k


def test_draws_follow_the_probabilities_and_the_seed():
    def draws(seed):
        generator = torch.Generator().manual_seed(seed)
        return [sampling.sample_token(SCORES, 1.0, generator) for _ in range(2000)]

    counts = torch.bincount(torch.tensor(draws(1)), minlength=3) / 2000
    torch.testing.assert_close(counts, SCORES.exp(), atol=0.04, rtol=0)
    assert draws(1) == draws(1) != draws(2)


def test_temperature():
    generator = torch.Generator().manual_seed(0)
    assert {sampling.sample_token(SCORES, 0, generator) for _ in range(20)} == {0}
    hot = sampling.filter_logits(SCORES, GenerateConfig(temperature=2.0))
    assert math.isclose(float(hot[0] - hot[1]), float(SCORES[0] - SCORES[1]) / 2, rel_tol=1e-5)


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
        ({"mode": "window"}, "mode 'window' and a window go together"),
        ({"window": 8}, "mode 'window' and a window go together"),
        ({"sinks": 4}, "sinks belong to mode 'window'"),
        ({"stop": ("",)}, "a stop text is empty"),
        ({"temprature": 1.0}, "Did you mean 'temperature'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        GenerateConfig.parse(settings)
