"""Tests of the slopes, the bias and the proven windows of ALiBi."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainshort import alibi
from trainshort.errors import InputError


def released_slopes(heads: int) -> list[float]:
    """Return the slopes as the code of the ALiBi authors computes them, written recursively."""
    is_power_of_two = heads & (heads - 1) == 0
    if is_power_of_two:
        ratio = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [ratio ** (i + 1) for i in range(heads)]
    smaller_power = 2 ** (heads.bit_length() - 1)
    remaining_slopes = released_slopes(2 * smaller_power)[0::2]
    return released_slopes(smaller_power) + remaining_slopes[: heads - smaller_power]


@pytest.mark.parametrize("heads", range(1, 65))
def test_slopes_equal_released_slopes(heads):
    torch.testing.assert_close(alibi.slopes(heads), torch.tensor(released_slopes(heads)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [*(2.0**-i for i in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835]),
        (16, [2 ** (-i / 2) for i in range(1, 17)]),
    ],
)
def test_slopes_have_known_values(heads, expected):
    torch.testing.assert_close(alibi.slopes(heads), torch.tensor(expected), rtol=1e-6, atol=0)


def test_max_bias_sets_the_last_slope():
    slopes = alibi.slopes(8, max_bias=16.0)
    assert slopes[-1] == 2.0**-16
    assert slopes[0] == 0.25


@pytest.mark.parametrize(("heads", "max_bias"), [(0, 8.0), (-3, 8.0), (8, 0.0), (8, math.nan)])
def test_slopes_reject_invalid_arguments(heads, max_bias):
    with pytest.raises(InputError, match=r"at least one head|max_bias"):
        alibi.slopes(heads, max_bias)


def test_bias_has_known_values():
    bias = alibi.bias(torch.tensor([1.0, 0.5]), q_len=2, k_len=5)
    assert bias[0].tolist() == [[-3, -2, -1, 0, -math.inf], [-4, -3, -2, -1, 0]]
    assert bias[1, 1].tolist() == [-2, -1.5, -1, -0.5, 0]


def test_bias_is_float32_for_half_precision_slopes():
    assert alibi.bias(alibi.slopes(4).bfloat16(), 3, 3).dtype == torch.float32


def mass_outside_windows(q, k, slopes, windows, block):
    """Return the softmax mass at or beyond the window of each query, computed in float64 from all scores."""
    heads_per_kv_head = q.shape[1] // k.shape[1]
    repeated_k = k.double().repeat_interleave(heads_per_kv_head, 1)
    scores = q.double() @ repeated_k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    distance = alibi.distances(q.shape[2], k.shape[2])
    scores = scores - slopes.double()[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
    window_of_row = windows.repeat_interleave(block, -1)[..., : q.shape[2], None]
    return (weights * (distance >= window_of_row)).sum(-1)


@given(
    kv_heads=st.sampled_from([1, 3, 8]),
    heads_per_kv_head=st.sampled_from([1, 2]),
    q_len=st.integers(1, 90),
    past=st.integers(0, 200),
    query_scale=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-2, 0.5]),
    kind=st.sampled_from(["normal", "huge far key", "constant keys", "equal tokens", "opposite own key"]),
    seed=st.integers(0, 10_000),
)
def test_mass_outside_windows_is_at_most_the_tolerance(
    kv_heads, heads_per_kv_head, q_len, past, query_scale, tolerance, kind, seed
):
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * heads_per_kv_head
    q = torch.randn(2, heads, q_len, 16, generator=generator) * query_scale
    k = torch.randn(2, kv_heads, q_len + past, 16, generator=generator)
    if kind == "huge far key":
        k[:, :, 0] *= 30
    elif kind == "constant keys":
        k = k[:, :, :1].expand_as(k)
    elif kind == "equal tokens":
        q = q[:, :, :1].expand_as(q)
        k = k[:, :, :1].expand_as(k)
    elif kind == "opposite own key":
        # The score of the own key is as small as possible, and the scores of far keys are as large as possible.
        k = q[:, ::heads_per_kv_head, :1].expand_as(k).clone()
        k[:, :, past:] *= -1
    slope_factor = 10.0 if seed % 2 else 1.0
    slopes = alibi.slopes(heads) * slope_factor

    windows = alibi.proven_windows(q, k, slopes, tolerance, block=16)
    assert windows.shape == (2, heads, -(-q_len // 16))
    assert (mass_outside_windows(q, k, slopes, windows, 16) <= tolerance * (1 + 1e-9)).all()


def test_windows_of_steep_heads_are_short():
    q = torch.randn(1, 8, 2048, 64)
    k = torch.randn(1, 8, 2048, 64)
    windows = alibi.proven_windows(q, k, alibi.slopes(8), 1e-6)
    mean_window = windows.double().mean(-1)[0]
    assert mean_window[0] < 100 < mean_window[3] < mean_window[5]
    assert (windows >= 1).all()


def test_windows_contain_all_keys_if_no_bound_exists():
    q = torch.randn(1, 2, 70, 8)
    k = torch.randn(1, 2, 70, 8)
    slopes = torch.ones(2)
    windows = alibi.proven_windows(q, k, slopes, tolerance=1e-3)
    assert (windows < 70).any()

    assert (alibi.proven_windows(q, k, slopes, tolerance=0.0) == 70).all()
    not_positive = torch.tensor([0.0, -1.0])
    assert (alibi.proven_windows(q, k, not_positive, tolerance=1e-3) == 70).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_windows_contain_all_keys_if_a_key_is_not_finite(value):
    q = torch.randn(1, 2, 70, 8)
    k = torch.randn(1, 2, 70, 8)
    slopes = torch.ones(2)
    finite_windows = alibi.proven_windows(q, k, slopes, tolerance=1e-3)
    k[0, 1, 3, 0] = value
    windows = alibi.proven_windows(q, k, slopes, tolerance=1e-3)
    assert (windows[0, 1] == 70).all()
    assert (windows[0, 0] == finite_windows[0, 0]).all()
