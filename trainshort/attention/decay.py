"""Biases that are differences of a clock: score(i, j) += c_i − c_j, one clock per text, head and token.

ALiBi's clock runs evenly, c_t = −slope · t. That of the Forgetting Transformer runs as fast as the text says. Nothing
here asks which: a clock may also stand still or run backwards. One that falls lets far keys be left out, because

    mass of the keys before w  ≤  Σ_{j<w} exp(‖q_i‖·K/√d + c_i − c_j − lse_i)  =  exp(‖q_i‖·K/√d − lse_i + c_i + E_w)

with E_w = log Σ_{j<w} exp(−c_j), which is one running sum for all rows: ALiBi's geometric series is its special case.

Clocks are float64. They grow with the text, and what counts are small differences between readings far from zero.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

BOUND_ROUNDING_MARGIN = 1e-6
"""Covers the rounding of the bound, far above what float64 loses over any text."""


def decay_from_slopes(
    slopes: Float[Tensor, " heads"], length: int, batch: int = 1
) -> Float[Tensor, "batch heads length"]:
    """ALiBi as a clock; slopes may be trained through it."""
    ticks = torch.arange(length, device=slopes.device, dtype=torch.float64)
    return (-slopes.double()[:, None] * ticks).expand(batch, -1, -1)


def log_mass_before(clock: Float[Tensor, "batch heads k_len"]) -> Float[Tensor, "batch heads boundaries"]:
    """E_w for w = 0 … k_len: the log of what all keys before w can weigh, seen from where the clock shows 0."""
    return torch.nn.functional.pad((-clock.double()).logcumsumexp(-1), (1, 0), value=-math.inf) + BOUND_ROUNDING_MARGIN


def proven_first_keys(
    excess: Float[Tensor, "batch heads q_len"], clock: Float[Tensor, "batch heads k_len"], tolerance: float
) -> Int[Tensor, "batch heads q_len"]:
    """For each query the last boundary such that all keys before it carry at most `tolerance` of its softmax mass; 0
    where there is none. `excess` is the most by which a score of its row can pass its log-sum-exp, before the bias.

        c = −t, excess 0, tolerance e^−3:     query 0 1 2 3 4 5 6
                                              start 0 0 0 0 1 2 3      (Σ_{t≥4} e^−t = e^−3.54, Σ_{t≥3} = e^−2.54)
    """
    k_len, q_len = clock.shape[2], excess.shape[2]
    if tolerance <= 0:
        return torch.zeros_like(excess, dtype=torch.int64)
    own = clock.double()[..., k_len - q_len :]
    room = math.log(tolerance) - excess - own
    starts = torch.searchsorted(log_mass_before(clock), room.contiguous(), right=True) - 1
    positions = torch.arange(k_len - q_len, k_len, device=clock.device)
    return torch.where(room.isfinite(), starts, 0).clamp(min=0).minimum(positions)  # a row's own key is always read
