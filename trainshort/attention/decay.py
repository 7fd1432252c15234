"""Bounds for decay biases: the score bias c_i − c_j, where c is the cumulative log decay of a head.

ALiBi is the special case c_t = −slope · t. In the Forgetting Transformer (FoX), c depends on the text. The functions in
this module accept every c, including a c that increases. Keys can be skipped where c decreases, because

    mass of the keys before w  ≤  Σ_{j<w} exp(‖q_i‖·K/√d + c_i − c_j − lse_i)  =  exp(‖q_i‖·K/√d − lse_i + c_i + E_w)

with E_w = log Σ_{j<w} exp(−c_j). All queries share E_w, so one cumulative sum is enough. For ALiBi, the sum is a
geometric series. The values of c are float64, because they grow with the length of the text, while only small
differences between the values matter.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# This margin is added to the logarithm of each bound. The rounding errors of float64 are much smaller than the margin.
BOUND_ROUNDING_MARGIN = 1e-6


def decay_from_slopes(
    slopes: Float[Tensor, " heads"], length: int, batch: int = 1
) -> Float[Tensor, "batch heads length"]:
    """Return the cumulative log decay that gives the same bias as ALiBi slopes.

    With a cumulative log decay c, the bias of query i and key j is c[i] - c[j]. For ALiBi, this is -slope * (i - j).

    The result is differentiable with respect to `slopes`.

    Args:
        slopes: One ALiBi slope per head.
        length: The number of key positions.
        batch: The batch size of the result.

    Returns:
        `-slope * position` in float64. All batch entries share the same memory.
    """
    positions = torch.arange(length, device=slopes.device, dtype=torch.float64)
    cumulative = -slopes.double()[:, None] * positions
    return cumulative.expand(batch, -1, -1)


def log_mass_before(cumulative: Float[Tensor, "batch heads k_len"]) -> Float[Tensor, "batch heads boundaries"]:
    """Compute E_w = log Σ_{j<w} exp(−c_j) for every boundary w from 0 to k_len.

    E_w bounds the softmax mass (sum of attention weights) of all keys before position w. With the decay bias c_i − c_j,
    this mass is at most exp(excess_i + c_i + E_w), where excess_i bounds the scores of query i minus its log-sum-exp.

    Args:
        cumulative: The cumulative log decay c at each key position.

    Returns:
        E_w plus a margin for rounding errors, in float64. The first value (w = 0) is minus infinity.
    """
    log_sums = (-cumulative.double()).logcumsumexp(-1)
    return F.pad(log_sums, (1, 0), value=-math.inf) + BOUND_ROUNDING_MARGIN


def proven_first_keys(
    excess: Float[Tensor, "batch heads q_len"], cumulative: Float[Tensor, "batch heads k_len"], tolerance: float
) -> Int[Tensor, "batch heads q_len"]:
    """Return the first key that each query must read with a decay bias.

    All keys before the returned position together have at most `tolerance` of the softmax mass (the sum of the
    attention weights) of the query.

    Args:
        excess: The largest difference between the score of a key (without the bias) and the log-sum-exp of the query,
            as returned by `trainshort.alibi.max_excess`.
        cumulative: The cumulative log decay at each key position. The last query is aligned with the last key.
        tolerance: The softmax mass that may be skipped for each query.

    Returns:
        The position of the first key, at most the position of the query itself. The position is 0 if no key can be
        skipped.

    Example:
        With c_t = −t, the keys at distance 4 and farther have at most e^(−3.54) of the softmax mass.

        >>> cumulative = -torch.arange(7, dtype=torch.float64)[None, None]
        >>> proven_first_keys(torch.zeros(1, 1, 7), cumulative, tolerance=math.exp(-3))
        tensor([[[0, 0, 0, 0, 1, 2, 3]]])
    """
    q_len = excess.shape[2]
    k_len = cumulative.shape[2]
    query_start = k_len - q_len  # the position of the first query
    if tolerance <= 0:
        return torch.zeros_like(excess, dtype=torch.int64)

    # A query may skip the keys before w if E_w (see `log_mass_before`) is at most this limit.
    query_cumulative = cumulative.double()[..., query_start:]
    limit = math.log(tolerance) - excess - query_cumulative
    # E_w grows with w, so `searchsorted` returns the number of positions w that satisfy the condition, starting with 0.
    # The largest of these positions is the first key.
    log_mass = log_mass_before(cumulative)
    allowed_count = torch.searchsorted(log_mass, limit.contiguous(), right=True)
    first_keys = torch.where(limit.isfinite(), allowed_count - 1, 0).clamp(min=0)

    # Every query reads its own key.
    query_positions = torch.arange(query_start, k_len, device=cumulative.device)
    return first_keys.minimum(query_positions)
