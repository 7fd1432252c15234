"""ALiBi's mathematics, in pure functions: slopes, bias, and the windows outside of which nothing can matter.

    score(i, j) = q_i·k_j / √d  −  slope · (i − j)

No positions enter the model anywhere else. Everything here is written in distances and computed in float32 or better:
slope × absolute position, rounded to half precision, is the best-known fault of other implementations.
"""

import math

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from trainshort.errors import InputError


def slopes(heads: int, max_bias: float = 8.0) -> Float[Tensor, " heads"]:
    """One slope per head, as the released code computes them.

    A power of two gets the paper's geometric sequence; other counts take the sequence of the power of two below and
    fill up with every second slope of the power above. (The paper's closed form differs there; no released model
    uses it.)

        slopes(4)   1/4  1/16  1/64  1/256
        slopes(6)   1/4  1/16  1/64  1/256   1/2  1/8
    """
    if heads < 1:
        raise InputError(f"ALiBi needs at least one head, got {heads}.")
    if not max_bias > 0:
        raise InputError(f"max_bias must be positive, got {max_bias}; the paper uses 8.")
    below = 2 ** int(math.log2(heads))
    values = _geometric(below, max_bias) + _geometric(2 * below, max_bias)[::2]
    return torch.tensor(values[:heads], dtype=torch.float32)


def _geometric(heads: int, max_bias: float) -> list[float]:
    return [2.0 ** (-max_bias * (head + 1) / heads) for head in range(heads)]


def distances(q_len: int, k_len: int, device: torch.device | None = None) -> Int[Tensor, "q_len k_len"]:
    """How far each key lies behind each query; negative in the future. The last query stands on the last key.

    distances(2, 5):   3 2 1 0 -1
                       4 3 2 1  0
    """
    queries = torch.arange(k_len - q_len, k_len, device=device)
    return queries[:, None] - torch.arange(k_len, device=device)


def bias(slopes: Float[Tensor, " heads"], q_len: int, k_len: int) -> Float[Tensor, "heads q_len k_len"]:
    """The written-out bias, −slope·distance, with −inf on the future. For tests and small inputs: backends compute it
    on the fly."""
    distance = distances(q_len, k_len, slopes.device)
    linear = -slopes.float()[:, None, None] * distance
    return linear.masked_fill(distance < 0, -math.inf)


def mass_beyond(
    excess: Float[Tensor, "..."], slope: Float[Tensor, "..."], distance: Real[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """The most softmax mass that keys at `distance` and farther can have together, where no score of theirs passes the
    row's log-sum-exp by more than `excess` before the bias: Σ_{t ≥ w} exp(U − m·t) = exp(U − m·w) / (1 − e^(−m))."""
    return torch.exp(excess - slope * distance) / -torch.expm1(-slope)


def window_for(
    excess: Float[Tensor, "*rows"], slope: Float[Tensor, "*slopes"], tolerance: float
) -> Float[Tensor, "*rows"]:
    """The smallest whole distance beyond which the mass is at most `tolerance`; infinite where there is none."""
    if tolerance <= 0:
        return torch.full_like(excess, math.inf)
    window = torch.ceil((excess - math.log(tolerance) - torch.log(-torch.expm1(-slope))) / slope)
    return torch.where(torch.isfinite(window) & (slope > 0), window, math.inf)


def proven_windows(
    q: Float[Tensor, "batch heads q_len dim"],
    k: Float[Tensor, "batch kv_heads k_len dim"],
    slopes: Float[Tensor, " heads"],
    tolerance: float,
    block: int = 64,
    scale: float | None = None,
) -> Int[Tensor, "batch heads blocks"]:
    """For each head and block of queries, a window w such that all keys at distance ≥ w together carry at most
    `tolerance` of any row's softmax mass.

    With U = ‖q_i‖·K/√d − s_ii (K the largest key norm up to i, s_ii the score of the row's own key, whose bias is 0):

        dropped mass  ≤  mass_beyond(U, m, w)

    since each far score is at most ‖q_i‖·K/√d − m·t (Cauchy–Schwarz) and the row's denominator at least exp(s_ii).
    `scale` stands in place of 1/√d. A window of k_len or more means "everything": slope 0 or below, tolerance 0, or
    inputs that are not finite. The arithmetic is float64, so that rounding cannot eat the promise; the cost is
    O(length · dim).
    """
    window = window_for(most_excess(q, k, scale), slopes.double()[:, None], tolerance)
    window = window.clamp(1, k.shape[2])  # the row's own key is always read
    padded = torch.nn.functional.pad(window, (0, -q.shape[2] % block), value=1)
    return padded.unflatten(2, (-1, block)).amax(-1).long()


def most_excess(
    q: Float[Tensor, "batch heads q_len dim"], k: Float[Tensor, "batch kv_heads k_len dim"], scale: float | None = None
) -> Float[Tensor, "batch heads q_len"]:
    """The U of `proven_windows`: the most by which a score of each row can pass its log-sum-exp, before the bias."""
    dim, k_len, q_len, group = q.shape[3], k.shape[2], q.shape[2], q.shape[1] // k.shape[1]
    key_norm = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float64).cummax(dim=-1).values[..., k_len - q_len :]
    query_norm = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float64)
    own_key = k[..., k_len - q_len :, :].repeat_interleave(group, dim=1)
    factor = 1 / math.sqrt(dim) if scale is None else scale
    own_score = (q.double() * own_key.double()).sum(-1) * factor
    return query_norm * key_norm.repeat_interleave(group, dim=1) * factor - own_score
