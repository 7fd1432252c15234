"""Methods whose bias is a clock that runs as the text says: the Forgetting Transformer, and its relative CABLE."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from trainshort import alibi
from trainshort.attention import DecayBias
from trainshort.config.position_config import FoxConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import Gate, LayerInput, PositionMethod


class Fox(PositionMethod):
    """Forgetting Transformer: a gate at each token says how much of all that came before is kept.

    score(i, j) += log f(j+1) + … + log f(i), f(t) = σ(w·x(t) + b) for each layer and head: a clock that falls by
    −log f(t) at token t. A gate that does not look at the text is ALiBi, with slope −log σ(b).
    """

    Config = FoxConfig
    uses_cumulative_decay = True
    float32 = ("shift",)
    shift: Tensor

    def __init__(self, config: ModelConfig, settings: FoxConfig) -> None:
        super().__init__(config, settings)
        self.settings = settings
        self.heads, self.nope_heads = config.heads, config.nope_heads
        shift = torch.empty(config.layers * config.heads)  # not a matrix, which would be decayed
        if settings.gate == "fixed":
            self.register_buffer("shift", shift, persistent=False)
        else:
            self.shift = nn.Parameter(shift)
        self.weight = None
        if settings.gate == "full":
            self.weight = nn.Parameter(torch.zeros(config.layers, config.heads, config.width))
            nn.init.normal_(self.weight, std=0.02)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        gated = self.heads - self.nope_heads
        self.shift.data.zero_().view(-1, self.heads)[:, :gated].copy_(self._first_shifts(gated))

    def _first_shifts(self, heads: int) -> Float[Tensor, " heads"]:
        """Where σ(b) = e^(−slope): b = −log(e^slope − 1)."""
        match self.settings.init or ("half" if self.settings.gate == "full" else "decay_times"):
            case "half":
                return torch.zeros(heads)
            case "alibi":
                slopes = alibi.slopes(heads).double()
            case "decay_times":
                first, last = math.log(self.settings.min_decay_time), math.log(self.settings.max_decay_time)
                slopes = torch.linspace(first, last, heads, dtype=torch.float64).neg().exp()
        shifts = -torch.log(torch.expm1(slopes)).float()
        return -shifts if self.settings.negate_gate else shifts

    def gate(self, layer: int) -> Gate:
        gated = self.heads - self.nope_heads
        weight = None if self.weight is None else self.weight[layer, :gated]
        return Gate(weight, self.shift.view(-1, self.heads)[layer, :gated], -1.0 if self.settings.negate_gate else 1.0)

    def content_bias(self, given: LayerInput) -> DecayBias:
        weight, shift, sign = self.gate(given.layer)
        gate = shift.expand(*given.x.shape[:2], -1)
        if weight is not None:
            gate = gate + F.linear(given.x, weight.to(given.x.dtype)).float()
        ticks = F.logsigmoid(sign * gate).transpose(1, 2).double()  # batch heads new
        clock = F.pad(ticks.cumsum(-1), (0, 0, 0, self.nope_heads))
        if (before := given.method_cache.get("clock")) is not None:
            clock = torch.cat([before, before[..., -1:] + clock], dim=-1)
        given.method_cache["clock"] = clock
        return DecayBias(clock)
