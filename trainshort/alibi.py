"""The mathematics of ALiBi as pure functions: slopes, distances, the bias, and windows for skipping distant keys.

ALiBi adds a bias to the attention scores that falls linearly with the distance between query i and key j:

    score(i, j) = q_i·k_j / √d − slope · (i − j)

All functions work with distances and compute in float32 or float64. A product of a slope and an absolute position would
lose precision in half-precision dtypes.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Real
from torch import Tensor

from trainshort.errors import InputError


def slopes(heads: int, max_bias: float = 8.0) -> Float[Tensor, " heads"]:
    """Return the ALiBi slope of each attention head, as in the code that the authors of ALiBi released.

    If the number of heads is a power of two, the slopes are a geometric sequence. Otherwise, the first slopes are those
    of the next smaller power of two. The remaining slopes are every second slope of the next larger power of two.

    Args:
        heads: The number of attention heads.
        max_bias: Defines the last slope of the geometric sequence, which is 2^(-max_bias). The ALiBi paper uses 8.

    Returns:
        The slopes in float32.

    Raises:
        InputError: If `heads` is less than 1, or if `max_bias` is not positive.

    Example:
        >>> slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
        >>> slopes(6)
        tensor([0.2500, 0.0625, 0.0156, 0.0039, 0.5000, 0.1250])
    """
    if heads < 1:
        raise InputError(f"ALiBi requires at least one head, got {heads}.")
    if not max_bias > 0:
        raise InputError(f"max_bias must be positive, got {max_bias}. The ALiBi paper uses 8.")
    # The largest power of two that is not larger than the number of heads.
    power_of_two = 2 ** int(math.log2(heads))
    first_slopes = _geometric_slopes(power_of_two, max_bias)
    # The slice [::2] selects every second slope, starting with the first slope.
    additional_slopes = _geometric_slopes(2 * power_of_two, max_bias)[::2]
    # There are more additional slopes than necessary, so the list is cut to the number of heads.
    all_slopes = (first_slopes + additional_slopes)[:heads]
    return torch.tensor(all_slopes, dtype=torch.float32)


def _geometric_slopes(heads: int, max_bias: float) -> list[float]:
    """Return the slopes for a number of heads that is a power of two. The last slope is 2^(-max_bias)."""
    return [2.0 ** (-max_bias * (head + 1) / heads) for head in range(heads)]


def distances(q_len: int, k_len: int, device: torch.device | None = None) -> Int[Tensor, "q_len k_len"]:
    """Return the distance of each query to each key, where the last query is aligned with the last key.

    Args:
        q_len: The number of queries.
        k_len: The number of keys.
        device: The device of the result. The default is the CPU.

    Returns:
        The position of the query minus the position of the key. Keys in the future of a query have negative distances.

    Example:
        >>> distances(2, 5)
        tensor([[ 3,  2,  1,  0, -1],
                [ 4,  3,  2,  1,  0]])
    """
    query_positions = torch.arange(k_len - q_len, k_len, device=device)
    key_positions = torch.arange(k_len, device=device)
    return query_positions[:, None] - key_positions


def bias(slopes: Float[Tensor, " heads"], q_len: int, k_len: int) -> Float[Tensor, "heads q_len k_len"]:
    """Return the ALiBi bias as a tensor that can be added to the attention scores.

    Use this function for tests and short inputs. The function `trainshort.alibi_attention` computes the bias together
    with the scores and does not store the bias in memory.

    Args:
        slopes: One slope per head.
        q_len: The number of queries. The last query is aligned with the last key.
        k_len: The number of keys.

    Returns:
        `-slope * distance` in float32. The bias of keys in the future of a query is minus infinity.

    Example:
        >>> bias(torch.tensor([0.5]), q_len=2, k_len=3)
        tensor([[[-0.5000, -0.0000,    -inf],
                 [-1.0000, -0.5000, -0.0000]]])
    """
    distance = distances(q_len, k_len, slopes.device)
    linear_bias = -slopes.float()[:, None, None] * distance
    return linear_bias.masked_fill(distance < 0, -math.inf)


def mass_beyond(
    excess: Float[Tensor, "..."], slope: Float[Tensor, "..."], distance: Real[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Compute an upper bound on the softmax mass of all keys at `distance` and farther.

    The softmax mass is the sum of the attention weights of these keys. With U = `excess`, m = `slope` and
    w = `distance`, the bound is a geometric series over the distances t:

        Σ_{t ≥ w} exp(U − m·t)  =  exp(U − m·w) / (1 − e^(−m))

    Args:
        excess: The largest difference between the score of a key (without the bias) and the log-sum-exp of the query.
        slope: The ALiBi slope. The bound is valid only for positive slopes.
        distance: The distance of the nearest key that is counted.

    Returns:
        The upper bound. The bound can be larger than 1.
    """
    # 1 - exp(-slope), computed without a loss of precision for small slopes.
    one_minus_ratio = -torch.expm1(-slope)
    return torch.exp(excess - slope * distance) / one_minus_ratio


def window_for(
    excess: Float[Tensor, "*rows"], slope: Float[Tensor, "*slopes"], tolerance: float
) -> Float[Tensor, "*rows"]:
    """Return the smallest integer distance w for which `mass_beyond(excess, slope, w)` is at most `tolerance`.

    Args:
        excess: The largest difference between the score of a key (without the bias) and the log-sum-exp of the query.
        slope: The ALiBi slope. The shape must be broadcastable to the shape of `excess`.
        tolerance: The largest accepted softmax mass (the sum of attention weights) of all keys outside of the window.

    Returns:
        The distance as a floating-point number. The distance is infinite if the slope is not positive, if `tolerance`
        is 0, or if `excess` is infinite or NaN.
    """
    if tolerance <= 0:
        return torch.full_like(excess, math.inf)
    # The bound is exp(excess - slope * w) / (1 - exp(-slope)). Solve bound = tolerance for the distance w.
    # -expm1(-slope) is 1 - exp(-slope), computed without a loss of precision for small slopes.
    log_geometric_sum = -torch.log(-torch.expm1(-slope))
    window = torch.ceil((excess - math.log(tolerance) + log_geometric_sum) / slope)
    has_bound = torch.isfinite(window) & (slope > 0)
    return torch.where(has_bound, window, math.inf)


def proven_windows(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    slopes: Float[Tensor, " heads"],
    tolerance: float,
    block: int = 64,
    scale: float | None = None,
) -> Int[Tensor, "batch heads blocks"]:
    """Compute windows outside of which the keys of ALiBi attention can be skipped.

    For each head and each block of queries, the function returns a distance w. All keys at distance w or farther
    together have at most `tolerance` of the softmax mass (the sum of attention weights) of any query in the block.

    The proof uses two facts. First, by the Cauchy–Schwarz inequality, the score of a key at distance t is at most
    ‖q_i‖·K/√d − m·t, where K is the largest norm of the keys up to position i. Second, the softmax denominator of query
    i is at least exp(s_ii), where s_ii is the score of the query's own key. The bias of the own key is 0. With
    U = ‖q_i‖·K/√d − s_ii follows:

        softmax mass at distance w and farther  ≤  mass_beyond(U, m, w)

    Args:
        q: The queries. The last query is aligned with the last key.
        k: The keys. The number of query heads must be a multiple of the number of key heads.
        slopes: One slope m per query head.
        tolerance: The softmax mass that may be skipped for each query.
        block: The number of consecutive queries that share one window.
        scale: The factor applied to the product of query and key. The default is 1 / sqrt(dim).

    Returns:
        The windows, at least 1 and at most k_len. A window of k_len means that no key can be skipped. This is the case
        for slopes that are not positive, for `tolerance=0`, and for inputs that are infinite or NaN.

    Example:
        >>> q, k = torch.zeros(1, 1, 128, 8), torch.zeros(1, 1, 128, 8)
        >>> proven_windows(q, k, torch.tensor([0.5]), tolerance=1e-3)
        tensor([[[16, 16]]])
    """
    k_len = k.shape[2]
    # The computation uses float64, so that rounding errors cannot make a window too small.
    window = window_for(max_excess(q, k, scale), slopes.double()[:, None], tolerance)
    # The minimum is 1, because every query reads its own key.
    window = window.clamp(1, k_len)
    # Queries are added such that all blocks are complete. Their window of 1 does not change the maximum of a block.
    missing_queries = -q.shape[2] % block
    padded_window = F.pad(window, (0, missing_queries), value=1)
    return padded_window.unflatten(2, (-1, block)).amax(-1).long()


def max_excess(
    q: Float[Tensor, "batch heads q_len dim"], k: Float[Tensor, "batch kv_heads k_len dim"], scale: float | None = None
) -> Float[Tensor, "batch heads q_len"]:
    """Compute an upper bound on the score of any visible key minus the log-sum-exp of the query.

    The score does not include the bias. The upper bound is the U of `proven_windows`: the largest possible score, minus
    the score of the query's own key. The score of the own key is a lower bound on the log-sum-exp.

    Args:
        q: The queries. The last query is aligned with the last key.
        k: The keys. The number of query heads must be a multiple of the number of key heads.
        scale: The factor applied to the product of query and key. The default is 1 / sqrt(dim).

    Returns:
        The upper bound for each query in float64.
    """
    heads, q_len, dim = q.shape[1:]
    kv_heads, k_len = k.shape[1:3]
    heads_per_kv_head = heads // kv_heads
    query_start = k_len - q_len  # the position of the first query
    softmax_scale = 1 / math.sqrt(dim) if scale is None else scale

    query_norm = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float64)
    key_norm = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float64)
    # |q·k| is at most |q|·|k|, so the largest norm among the keys that each query sees bounds all of its scores.
    max_key_norm = key_norm.cummax(dim=-1).values[..., query_start:]
    max_key_norm = max_key_norm.repeat_interleave(heads_per_kv_head, dim=1)

    own_key = k[..., query_start:, :].repeat_interleave(heads_per_kv_head, dim=1)
    own_score = (q.double() * own_key.double()).sum(-1) * softmax_scale
    return query_norm * max_key_norm * softmax_scale - own_score
