"""More functions of distance at the third door: what came after ALiBi and T5. Formulas and claims: docs/positions.md.

All but FIRE are one row of numbers by distance, so they train through the compiled kernel, which sums their gradients
along the diagonals; parameters are shared by all layers.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from trainshort import alibi
from trainshort.attention import DenseBias, DistanceBias
from trainshort.config.position_config import EmptyPositionConfig, FireConfig, KerpleConfig, SandwichConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import LayerInput, PositionMethod, collapse_equal_rows

MIN_PARAMETER = 0.01
"""KERPLE's parameters are kept at this at the least, as in the authors' code."""
NEAR_ZERO = 1e-5
"""BAM adds it to every distance, so that 0 has powers of every exponent."""


class Kerple(PositionMethod):
    """KERPLE: a penalty p·ln(1 + a·d) or a·d^p, with a and p trained for each head."""

    Config = KerpleConfig
    float32 = ("a", "p")

    def __init__(self, config: ModelConfig, settings: KerpleConfig) -> None:
        super().__init__(config, settings)
        self.form = settings.form
        self.a = nn.Parameter(torch.empty(config.heads))
        self.p = nn.Parameter(torch.empty(config.heads))
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        self.a.data.uniform_(0, 1)
        self.p.data.uniform_(0, 2)

    def score_bias(self, length: int) -> DistanceBias:
        most = math.inf if self.form == "log" else 2.0
        a, p = _clamp_keep_grad(self.a, MIN_PARAMETER)[:, None], _clamp_keep_grad(self.p, MIN_PARAMETER, most)[:, None]
        distance = _distances(length, a)
        return DistanceBias(-p * torch.log1p(a * distance) if self.form == "log" else -a * distance**p)


class LogAlibi(PositionMethod):
    """ALiBi of the logarithm: a penalty slope·ln(1 + d), with ALiBi's slopes, fixed."""

    float32 = ("slopes",)
    slopes: Tensor

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.register_buffer("slopes", torch.empty(config.heads), persistent=False)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        self.slopes.data.copy_(alibi.slopes(len(self.slopes)))

    def score_bias(self, length: int) -> DistanceBias:
        return DistanceBias(-self.slopes[:, None] * torch.log1p(_distances(length, self.slopes)))


class Bam(PositionMethod):
    """BAM: a penalty e^g·|d − μ|^β with g, μ and β trained for each head; ALiBi at first."""

    float32 = ("scale", "centre", "power")

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.scale, self.centre, self.power = (nn.Parameter(torch.empty(config.heads)) for _ in range(3))
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        self.scale.data.copy_(alibi.slopes(len(self.scale)).log())
        self.centre.data.zero_()
        self.power.data.fill_(1)

    def score_bias(self, length: int) -> DistanceBias:
        away = (_distances(length, self.scale) - self.centre[:, None]).abs() + NEAR_ZERO
        return DistanceBias(-self.scale.exp()[:, None] * away ** self.power[:, None])


class Sandwich(PositionMethod):
    """Sandwich: the inner product of sinusoidal positions as a bias, heads/(8·head) times; fixed, not monotone."""

    Config = SandwichConfig
    float32 = ("ratios",)
    ratios: Tensor

    def __init__(self, config: ModelConfig, settings: SandwichConfig) -> None:
        super().__init__(config, settings)
        self.width = settings.width
        self.register_buffer("ratios", torch.empty(config.heads), persistent=False)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        heads = len(self.ratios)
        self.ratios.data.copy_(heads / (8 * torch.arange(1.0, heads + 1)))

    def score_bias(self, length: int) -> DistanceBias:
        exact = torch.float64 if self.ratios.device.type != "mps" else torch.float32  # as rotary's angles
        pair = torch.arange(1, self.width // 2 + 1, dtype=exact, device=self.ratios.device)
        distance = torch.arange(length, dtype=exact, device=self.ratios.device)
        wave = torch.cos(distance[:, None] * 10_000 ** (-2 * pair / self.width)).sum(-1) - self.width // 2
        return DistanceBias(self.ratios[:, None] * wave.float())


class Fire(PositionMethod):
    """FIRE: a small network of ln(1 + c·d) / ln(1 + c·max(i, L)), the distance as a share of what there is to see.

    It depends on the query's position as well as on the distance, so it is written out, anew for each layer.
    """

    Config = FireConfig
    causal_only = True

    def __init__(self, config: ModelConfig, settings: FireConfig) -> None:
        super().__init__(config, settings)
        self.threshold = settings.threshold
        self.c, self.multiplier = nn.Parameter(torch.tensor([0.1])), nn.Parameter(torch.ones(1))
        self.wide = nn.Linear(1, settings.hidden)
        self.narrow = nn.Linear(settings.hidden, config.heads, bias=False)  # what is added to a whole row does nothing

    def content_bias(self, given: LayerInput) -> DenseBias:
        where = collapse_equal_rows(given.position_ids)
        keys = torch.arange(given.length, device=where.device)
        new = where.shape[1]
        distance = (keys[-new:, None] - keys).clamp(min=0).float()
        reach = torch.maximum(where.float(), self.threshold * self.multiplier.float().abs())
        c = self.c.float().abs()
        share = torch.log1p(c * distance) / torch.log1p(c * reach)[..., None]  # (1 or batch, new, length)
        hidden = F.relu(F.linear(share[..., None], self.wide.weight.float(), self.wide.bias.float()))
        values = F.linear(hidden, self.narrow.weight.float()).movedim(-1, 1)
        return DenseBias(values[0] if len(values) == 1 else values)


class _ClampKeepGrad(torch.autograd.Function):
    """`clamp` whose gradient leads back in: that of `clamp` is 0 past a bound, so what begins there, or was carried
    there by a step, would never be trained again. The authors move the parameter itself; this leaves it alone.

        at least 0.01, x 0.005:     gradient −3 stays, as the step goes up     gradient 3 becomes 0
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, least: float, most: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clamp(least, most)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        x, ctx.least, ctx.most = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        outwards = ((x < ctx.least) & (grad > 0)) | ((x > ctx.most) & (grad < 0))
        return grad.masked_fill(outwards, 0), None, None


def _clamp_keep_grad(x: Float[Tensor, " heads"], least: float, most: float = math.inf) -> Float[Tensor, " heads"]:
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(Tensor, _ClampKeepGrad.apply(x, least, most))
    return x.clamp(least, most)  # a graph for elsewhere holds torch's own operators


def _distances(length: int, like: Tensor) -> Float[Tensor, " length"]:
    return torch.arange(length, device=like.device, dtype=torch.float32)


def log_window(p: float, a: float, excess: float, tolerance: float) -> float:
    """Keys that a bias −p ln(1 + a d) needs, so that all farther ones carry at most `tolerance` of the mass, where no
    score passes its row's log-sum-exp by more than `excess`; infinite where p ≤ 1, as the sum does not converge.

    Σ_{d≥W} (1 + a d)^−p  ≤  (1 + a (W − 1))^(1−p) / (a (p − 1))        the integral above the sum
    """
    if p <= 1:
        return math.inf
    return 1 + (math.exp((excess - math.log(tolerance * a * (p - 1))) / (p - 1)) - 1) / a
