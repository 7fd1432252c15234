"""Slopes, bias and proven windows against the paper, the released rule and brute force."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import alibi
from trainshort.errors import InputError


def released_rule(heads: int) -> list[float]:
    """The released rule, written a second time and recursively, as facts about it are stated."""
    if heads & (heads - 1) == 0:
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [start ** (i + 1) for i in range(heads)]
    below = 2 ** (heads.bit_length() - 1)
    return released_rule(below) + released_rule(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", range(1, 65))
def test_slopes_follow_the_released_rule(heads):
    torch.testing.assert_close(alibi.slopes(heads), torch.tensor(released_rule(heads)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("heads", "golden"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [*(2.0**-i for i in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835]),
        (16, [2 ** (-i / 2) for i in range(1, 17)]),
    ],
)
def test_golden_slopes(heads, golden):
    torch.testing.assert_close(alibi.slopes(heads), torch.tensor(golden), rtol=1e-6, atol=0)


def test_max_bias_sets_the_flattest_slope():
    assert alibi.slopes(8, max_bias=16.0)[-1] == 2.0**-16
    assert alibi.slopes(8, max_bias=16.0)[0] == 0.25


@pytest.mark.parametrize(("heads", "max_bias"), [(0, 8.0), (-3, 8.0), (8, 0.0), (8, math.nan)])
def test_slopes_refuse_nonsense(heads, max_bias):
    with pytest.raises(InputError, match=r"at least one head|must be positive"):
        alibi.slopes(heads, max_bias)


def test_bias_in_small_integers():
    expected = [[-3, -2, -1, 0, -math.inf], [-4, -3, -2, -1, 0]]
    assert alibi.bias(torch.tensor([1.0, 0.5]), 2, 5)[0].tolist() == expected
    assert alibi.bias(torch.tensor([1.0, 0.5]), 2, 5)[1, 1].tolist() == [-2, -1.5, -1, -0.5, 0]


def test_bias_is_float32_whatever_the_slopes():
    assert alibi.bias(alibi.slopes(4).bfloat16(), 3, 3).dtype == torch.float32


def dropped_mass(q, k, slopes, windows, block):
    """The softmax mass that lies at or past each row's window, by brute force in float64."""
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    distance = alibi.distances(q.shape[2], k.shape[2])
    scores = scores - slopes.double()[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
    rows = windows.repeat_interleave(block, -1)[..., : q.shape[2], None]
    return (weights * (distance >= rows)).sum(-1)


@given(
    heads=st.sampled_from([1, 3, 8]),
    group=st.sampled_from([1, 2]),
    q_len=st.integers(1, 90),
    past=st.integers(0, 200),
    loudness=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-2, 0.5]),
    adversary=st.sampled_from(["none", "huge far key", "constant keys", "equal tokens", "opposed"]),
    seed=st.integers(0, 10_000),
)
def test_no_more_than_the_promised_mass_is_dropped(heads, group, q_len, past, loudness, tolerance, adversary, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads * group, q_len, 16, generator=generator) * loudness
    k = torch.randn(2, heads, q_len + past, 16, generator=generator)
    if adversary == "huge far key":
        k[:, :, 0] *= 30
    elif adversary == "constant keys":
        k = k[:, :, :1].expand_as(k)
    elif adversary == "equal tokens":
        q, k = q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)
    elif adversary == "opposed":  # the own key scores as badly, and the far keys as well, as norms allow
        k = q.repeat_interleave(1, 1)[:, ::group, :1].expand_as(k).clone()
        k[:, :, past:] *= -1
    slopes = alibi.slopes(heads * group) * (10.0 if seed % 2 else 1.0)
    windows = alibi.proven_windows(q, k, slopes, tolerance, block=16)
    assert windows.shape == (2, heads * group, -(-q_len // 16))
    assert (dropped_mass(q, k, slopes, windows, 16) <= tolerance * (1 + 1e-9)).all()


def test_windows_do_skip():
    """The bound is worth something: steep heads read a fraction of the keys."""
    q, k = torch.randn(1, 8, 2048, 64), torch.randn(1, 8, 2048, 64)
    windows = alibi.proven_windows(q, k, alibi.slopes(8), 1e-6)
    mean = windows.double().mean(-1)[0]
    assert mean[0] < 100 < mean[3] < mean[5]
    assert (windows >= 1).all()


def test_windows_are_everything_when_nothing_can_be_promised():
    q, k = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    steep = torch.ones(2)

    def windows(q=q, k=k, slopes=steep, tolerance=1e-3):
        return alibi.proven_windows(q, k, slopes, tolerance)

    assert (windows() < 70).any()
    assert (windows(tolerance=0.0) == 70).all()
    assert (windows(slopes=torch.tensor([0.0, -1.0])) == 70).all()
    for bad in (math.nan, math.inf):
        broken = k.clone()
        broken[0, 1, 3, 0] = bad
        assert (windows(k=broken)[0, 1] == 70).all()
        assert (windows(k=broken)[0, 0] == windows()[0, 0]).all()
