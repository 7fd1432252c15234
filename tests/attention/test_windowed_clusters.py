"""Tests of the certificate of the compiled kernel with query centroids, which are used for long texts and wide heads.

The dropped softmax mass of some queries is computed from all scores in float64.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, needs_kernel, run_operator, run_operator_by_row

from trainshort.attention.backends.windowed_torch import QUERY_TILE

# The constant MIN_KEYS_FOR_QUERY_CENTROIDS of centroids.h.
MIN_KEYS_FOR_QUERY_CENTROIDS = 2048

pytestmark = needs_kernel

INPUT_KINDS = ["normal", "clustered", "one huge", "zero", "identical", "late cluster", "shifted"]


def make_clusters(x, clusters=12):
    """Return vectors in clusters, as in a trained model. `x` are random numbers for the deviations."""
    centers = 3 * torch.randn(clusters, 2) @ torch.randn(2, x.shape[-1])
    return centers[torch.randint(clusters, x.shape[:-1])] + x / 4


def change_inputs(x, kind):
    """Change random queries or keys (batch, heads, tokens, dim), so that they are difficult for the bound."""
    length = x.shape[2]
    match kind:
        case "clustered":
            return make_clusters(x)
        case "one huge":
            x[:, :, length // 3] *= 40
        case "zero":
            x.zero_()
        case "identical":
            return x[:, :, :1].expand_as(x).clone()
        case "late cluster":
            # The sample from which the kernel computes the centroids may not contain these tokens.
            x[:, :, -3:] = 10 + x[:, :, -3:] / 100
        case "shifted":
            return x + 8 * torch.randn(x.shape[-1])
    return x


def make_bias(kind, heads, length):
    """Return slopes, a cumulative log decay or a distance table, as the operator takes them."""
    match kind:
        case "slopes":
            return torch.tensor([1.0, 0.05])
        case "rising":
            return torch.tensor([-0.01, 0.0])
        case "slow decay":
            return -(torch.rand(1, heads, length, dtype=torch.float64) * 0.2 - 0.02).cumsum(-1)
        case "fast decay":
            return -(torch.rand(1, heads, length, dtype=torch.float64) + 0.3).cumsum(-1)
        case "table":
            return -0.3 * torch.arange(float(length)).expand(heads, -1) + torch.rand(heads, length)
    raise ValueError(kind)


def exact_weights(q, k, bias, rows):
    """Return the attention weights of some queries in float64."""
    length = k.shape[2]
    distance = (rows[:, None] - torch.arange(length)).clamp(min=0)
    if bias.dim() == 1:  # slopes
        bias_values = -bias.double()[:, None, None] * distance
    elif bias.dim() == 2:  # distance table
        bias_values = bias.double()[:, distance]
    else:  # cumulative log decay
        bias_values = bias[0][:, rows, None] - bias[0][:, None]
    scores = q[:, :, rows].double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias_values
    is_future = torch.arange(length) > rows[:, None]
    return scores.masked_fill(is_future, -math.inf).softmax(-1)


@given(
    query_kind=st.sampled_from(INPUT_KINDS),
    key_kind=st.sampled_from(INPUT_KINDS),
    bias_kind=st.sampled_from(["slopes", "rising", "slow decay", "fast decay", "table"]),
    length=st.integers(MIN_KEYS_FOR_QUERY_CENTROIDS - 1, MIN_KEYS_FOR_QUERY_CENTROIDS + 200),
    dim=st.sampled_from([48, 64, 77]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-2]),
    seed=st.integers(0, 10_000),
)
@example("clustered", "clustered", "slopes", 2100, 64, 1e-6, 0)
@example("one huge", "one huge", "slow decay", 2101, 64, 1e-2, 0)
@example("clustered", "late cluster", "fast decay", 2102, 48, 1e-6, 1)
@settings(max_examples=20)
def test_certificate_bounds_the_dropped_mass(query_kind, key_kind, bias_kind, length, dim, tolerance, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    q = change_inputs(q, query_kind)
    k = change_inputs(k, key_kind)
    bias = make_bias(bias_kind, 2, length)
    _, first_keys, dropped_bound = run_operator_by_row(Problem(q, k, v, bias), tolerance, "compiled")

    rows = torch.arange(length - 1, 0, -67)
    is_skipped = torch.arange(length) < first_keys[..., rows, None]
    dropped_mass = (exact_weights(q, k, bias, rows) * is_skipped).sum(-1)
    assert (dropped_mass <= dropped_bound[..., rows].double() + 1e-15).all()
    assert dropped_bound.max() <= tolerance * (1 + 1e-6)
    # The bound is 0 if and only if no key was skipped.
    assert torch.equal(dropped_bound > 0, first_keys > 0)


def test_clustered_queries_are_skipped_almost_optimally():
    """The bound must depend on the size of the clusters. With the norms of the queries, four times as much is read."""
    length = 4096
    q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
    q = make_clusters(q)
    slopes = torch.full((2,), 1 / 32)
    _, first_keys, _ = run_operator_by_row(Problem(q, k, v, slopes), 1e-6, "compiled")
    positions = torch.arange(length)
    share = (positions - first_keys + 1).sum() / (2 * (positions + 1).sum())

    # The smallest share of keys that contains all of the softmax mass except for the tolerance.
    rows = torch.arange(7, length, 250)
    is_needed = (exact_weights(q, k, slopes, rows).cumsum(-1) > 1e-6) & (positions <= rows[:, None])
    needed_share = is_needed.sum() / (2 * (rows + 1).sum())
    assert share < 2 * needed_share


def test_skipped_keys_within_a_block_get_no_gradient():
    """The kernel skips keys in groups of four, so a window can end within a block of 64 keys."""
    length = 2200
    inputs = [torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)]
    q, k, v = inputs
    out, _, first_keys, _ = run_operator(Problem(q, k, v, torch.tensor([0.5])), 1e-6, "compiled")
    assert (first_keys % 4 == 0).all()
    assert (first_keys % 64 != 0).any()

    tile = 80
    grad_out = torch.zeros_like(out)
    grad_out[:, :, tile * QUERY_TILE : (tile + 1) * QUERY_TILE] = 1
    grad_k, grad_v = torch.autograd.grad(out, (k, v), grad_out)
    first_key = int(first_keys[0, 0, tile])
    assert (grad_k[:, :, :first_key] == 0).all()
    assert (grad_v[:, :, :first_key] == 0).all()
    assert (grad_v[:, :, first_key : first_key + 4] != 0).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_query_that_is_not_finite_does_not_affect_other_query_tiles(value):
    length = 2200
    q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
    q = make_clusters(q)
    slopes = torch.tensor([0.5])
    _, finite_first_keys, _ = run_operator_by_row(Problem(q, k, v, slopes), 1e-6, "compiled")
    q[0, 0, 1000] = value
    out, first_keys, _ = run_operator_by_row(Problem(q, k, v, slopes), 1e-6, "compiled")
    is_other_tile = torch.arange(length) // QUERY_TILE != 1000 // QUERY_TILE
    assert out[:, :, is_other_tile].isfinite().all()
    # The centroids change slightly, so the windows may change by up to two blocks.
    assert (finite_first_keys - first_keys)[..., is_other_tile].abs().max() <= 128


def test_value_that_is_not_finite_is_read_by_all_queries_that_see_it():
    length = 2200
    q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
    v[0, 0, 1500, 3] = math.inf
    _, first_keys, _ = run_operator_by_row(Problem(q, k, v, torch.tensor([1.0])), 1e-6, "compiled")
    assert (first_keys[0, 0, 1500:] <= 1500).all()
    assert (first_keys[0, 0, 1488:1500] > 0).all()
