"""The promise of proven windows where queries are measured from centres of their own: long texts, wide heads.

Exact weights of rows here and there in float64; whatever the queries, keys and biases are like.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_helpers import Problem, needs_kernel, operate, read_and_promised

ENOUGH_KEYS = 2048
"""As in centres.h."""
pytestmark = needs_kernel


def clustered(x, kinds=12):
    """As in a trained model: a few kinds of token, in a plane, far apart, with a little of their own each."""
    centres = 3 * torch.randn(kinds, 2) @ torch.randn(2, x.shape[-1])
    return centres[torch.randint(kinds, x.shape[:-1])] + x / 4


def bent(x, kind):
    """Random vectors, bent the way an adversary would; `x` is (batch, heads, tokens, dim)."""
    length = x.shape[2]
    match kind:
        case "clustered":
            return clustered(x)
        case "one huge":
            x[:, :, length // 3] *= 40
        case "zero":
            x.zero_()
        case "identical":
            return x[:, :, :1].expand_as(x).clone()
        case "late cluster":  # a sample may miss it
            x[:, :, -3:] = 10 + x[:, :, -3:] / 100
        case "shifted":
            return x + 8 * torch.randn(x.shape[-1])
    return x


def biases(name, heads, length):
    """Slopes, a clock or a table, as the operator takes them; and the bias of some rows, written out."""
    match name:
        case "slopes":
            return torch.tensor([1.0, 0.05])
        case "rising":
            return torch.tensor([-0.01, 0.0])
        case "clock":
            return -(torch.rand(1, heads, length, dtype=torch.float64) * 0.2 - 0.02).cumsum(-1)
        case "forgetful":
            return -(torch.rand(1, heads, length, dtype=torch.float64) + 0.3).cumsum(-1)
    return -0.3 * torch.arange(float(length)).expand(heads, -1) + torch.rand(heads, length)


def written_out(bias, rows, length):
    distance = (rows[:, None] - torch.arange(length)).clamp(min=0)
    if bias.dim() == 1:
        return -bias.double()[:, None, None] * distance
    if bias.dim() == 2:
        return bias.double()[:, distance]
    return bias[0][:, rows, None] - bias[0][:, None]


KINDS = ["normal", "clustered", "one huge", "zero", "identical", "late cluster", "shifted"]


@given(
    queries=st.sampled_from(KINDS),
    keys=st.sampled_from(KINDS),
    bias=st.sampled_from(["slopes", "rising", "clock", "forgetful", "table"]),
    length=st.integers(ENOUGH_KEYS - 1, ENOUGH_KEYS + 200),
    dim=st.sampled_from([48, 64, 77]),
    tolerance=st.sampled_from([1e-12, 1e-6, 1e-2]),
    seed=st.integers(0, 10_000),
)
@example(queries="clustered", keys="clustered", bias="slopes", length=2100, dim=64, tolerance=1e-6, seed=0)
@example(queries="one huge", keys="one huge", bias="clock", length=2101, dim=64, tolerance=1e-2, seed=0)
@example(queries="clustered", keys="late cluster", bias="forgetful", length=2102, dim=48, tolerance=1e-6, seed=1)
@settings(max_examples=20)
def test_no_row_leaves_out_more_than_promised(queries, keys, bias, length, dim, tolerance, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    q, k = bent(q, queries), bent(k, keys)
    added = biases(bias, 2, length)
    _, first, promised = read_and_promised(Problem(q, k, v, added), tolerance, "compiled")
    rows = torch.arange(length - 1, 0, -67)
    scores = q[:, :, rows].double() @ k.double().transpose(-1, -2) / math.sqrt(dim) + written_out(added, rows, length)
    weights = scores.masked_fill(torch.arange(length) > rows[:, None], -math.inf).softmax(-1)
    left_out = (weights * (torch.arange(length) < first[..., rows, None])).sum(-1)
    assert (left_out <= promised[..., rows].double() + 1e-15).all()
    assert promised.max() <= tolerance * (1 + 1e-6)
    assert ((first == 0) | (promised > 0)).all()  # whoever leaves something out says so
    assert (promised[first == 0] == 0).all()


def test_clusters_of_queries_count_by_their_own_size():
    """Queries far from zero and from each other, keys in no clusters: by the queries' norms four times what is needed
    would be read."""
    length = 4096
    q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
    q, slopes = clustered(q), torch.full((2,), 1 / 32)
    _, first, _ = read_and_promised(Problem(q, k, v, slopes), 1e-6, "compiled")
    positions = torch.arange(length)
    share = (positions - first + 1).sum() / (2 * (positions + 1).sum())
    rows = torch.arange(7, length, 250)
    scores = q[:, :, rows].double() @ k.double().transpose(-1, -2) / 8 + written_out(slopes, rows, length)
    masses = scores.masked_fill(positions > rows[:, None], -math.inf).softmax(-1).cumsum(-1)
    needed = ((masses > 1e-6) & (positions <= rows[:, None])).sum() / (2 * (rows + 1).sum())
    assert share < 2 * needed


def test_a_window_ends_inside_a_block_and_backward_knows():
    """Panels leave out four keys at a time, and the keys that they leave out get no gradient from them."""
    length = 2200
    tensors = [torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)]
    problem = Problem(*tensors, torch.tensor([0.5]))
    out, _, first, _ = operate(problem, 1e-6, "compiled")
    assert (first % 4 == 0).all()
    assert (first % 64 != 0).any()
    panel = 80
    grad_out = torch.zeros_like(out)
    grad_out[:, :, panel * 24 : panel * 24 + 24] = 1
    grad_k, grad_v = torch.autograd.grad(out, tensors[1:], grad_out)
    begin = int(first[0, 0, panel])
    assert (grad_k[:, :, :begin] == 0).all()
    assert (grad_v[:, :, :begin] == 0).all()
    assert (grad_v[:, :, begin : begin + 4] != 0).any()


@pytest.mark.parametrize("fault", [math.nan, math.inf, 3e38])
def test_a_query_that_is_not_finite_is_no_centre(fault):
    """It spoils its own row; the others leave out what they left out without it, to a block."""
    length = 2200
    q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
    q, slopes = clustered(q), torch.tensor([0.5])
    _, whole, _ = read_and_promised(Problem(q, k, v, slopes), 1e-6, "compiled")
    q[0, 0, 1000] = fault
    out, first, _ = read_and_promised(Problem(q, k, v, slopes), 1e-6, "compiled")
    others = torch.arange(length) // 24 != 1000 // 24
    assert out[:, :, others].isfinite().all()
    assert (whole - first)[..., others].abs().max() <= 128


def test_certificate_covers_keys_of_the_last_block_that_are_not_finite():
    """A value that is not finite matters at any weight: rows that see it read it."""
    length = 2200
    q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
    v[0, 0, 1500, 3] = math.inf
    _, first, _ = read_and_promised(Problem(q, k, v, torch.tensor([1.0])), 1e-6, "compiled")
    assert (first[0, 0, 1500:] <= 1500).all()
    assert (first[0, 0, 1488:1500] > 0).all()
