"""KERPLE: a trained logarithm or power of the distance as attention bias."""

import math
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trainshort.attention import DistanceBias
from trainshort.config.position_config import KerpleConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import PositionMethod, distance_range

MIN_PARAMETER = 0.01
"""The minimum of KERPLE's parameters, as in the authors' code."""

MAX_POWER = 2.0
"""The maximum of the exponent p in the form "power"."""


class Kerple(PositionMethod):
    """KERPLE: subtracts `p * ln(1 + a * distance)` or `a * distance**p` from the attention scores.

    `settings.form` selects the formula ("log" or "power"). `a` and `p` are trained for each head. All layers share
    these parameters.
    """

    Config = KerpleConfig
    float32 = ("a", "p")

    def __init__(self, config: ModelConfig, settings: KerpleConfig) -> None:
        super().__init__(config, settings)
        self.form = settings.form  # "log" for the bias -p * ln(1 + a * distance), "power" for -a * distance**p
        self.a = nn.Parameter(torch.empty(config.heads))
        self.p = nn.Parameter(torch.empty(config.heads))
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        """Draw `a` from the interval [0, 1] and `p` from [0, 2], as in the authors' code."""
        self.a.data.uniform_(0, 1)
        self.p.data.uniform_(0, 2)

    def score_bias(self, length: int) -> DistanceBias:
        """Return the bias of each head at the distances 0 to `length - 1`.

        The bias is `-p * ln(1 + a * distance)` in the form "log", and `-a * distance**p` in the form "power".
        """
        max_p = math.inf if self.form == "log" else MAX_POWER
        # Both have shape (heads, 1). With positive parameters, the bias falls with the distance.
        a = _clamp_keep_grad(self.a, MIN_PARAMETER, math.inf)[:, None]
        p = _clamp_keep_grad(self.p, MIN_PARAMETER, max_p)[:, None]
        distances = distance_range(length, a.device)
        if self.form == "log":
            return DistanceBias(-p * torch.log1p(a * distances))
        return DistanceBias(-a * distances**p)


def _clamp_keep_grad(x: Float[Tensor, " heads"], minimum: float, maximum: float) -> Float[Tensor, " heads"]:
    """Clamp a parameter like `torch.clamp`, but with other gradients.

    A value outside of the range keeps its gradient if a gradient step moves the value back into the range.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(Tensor, _ClampKeepGrad.apply(x, minimum, maximum))
    # Without gradients, the plain operation gives the same values. Exported graphs can contain plain operations only.
    return x.clamp(minimum, maximum)


class _ClampKeepGrad(torch.autograd.Function):
    """`torch.clamp` whose gradient is zero only if a gradient step would move the value further out of range.

    The gradient of `torch.clamp` is zero for all values out of range. A parameter that is initialized out of range, or
    that leaves the range in a training step, would then never be trained again.

    Example with a minimum of 0.01 and x = 0.005:

        gradient -3 stays -3, because a step increases x
        gradient 3 becomes 0, because a step would decrease x
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, minimum: float, maximum: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clamp(minimum, maximum)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        """Save the arguments of the clamp for the backward pass. PyTorch calls this method after the forward pass."""
        x, minimum, maximum = inputs
        ctx.save_for_backward(x)
        ctx.minimum = minimum
        ctx.maximum = maximum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the clamped tensor `x`. It is 0 where a gradient step would move `x` out of range."""
        (x,) = ctx.saved_tensors
        # A gradient step subtracts the gradient, so a positive gradient decreases x. Values outside of the range must
        # not move further away.
        leaves_at_minimum = (x < ctx.minimum) & (grad > 0)
        leaves_at_maximum = (x > ctx.maximum) & (grad < 0)
        return grad.masked_fill(leaves_at_minimum | leaves_at_maximum, 0), None, None


def log_bias_window(p: float, a: float, excess: float, tolerance: float) -> float:
    """Return how many of the nearest keys a query needs under the bias `-p * ln(1 + a * distance)`.

    The result is a number of keys W. All keys at distances of at least W together have at most `tolerance` of the
    softmax mass (the sum of the attention weights). Their weights are bounded by an integral:

        sum over d >= W of (1 + a d)^-p  <=  (1 + a (W - 1))^(1 - p) / (a (p - 1))

    Args:
        p: The factor of the logarithm.
        a: The factor of the distance.
        excess: An upper bound on `score - lse` for all keys. `score` is the product of query and key, to which no bias
            has been added. `lse` is the log-sum-exp of all scores of the query.
        tolerance: The softmax mass that may be dropped.

    Returns:
        The number of keys W. W is infinite for `p <= 1`, because the sum does not converge.
    """
    if p <= 1:
        return math.inf
    # Set exp(excess) times the right side of the inequality equal to the tolerance, and solve for 1 + a (W - 1).
    log_base = (excess - math.log(tolerance * a * (p - 1))) / (p - 1)
    return 1 + (math.exp(log_base) - 1) / a
