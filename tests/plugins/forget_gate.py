"""A forget gate (FoX, Lin et al., 2025): score(i, j) += log f(j+1) + ... + log f(i), where f looks at each token."""

import torch
import torch.nn.functional as F
from torch import nn

from trainshort.attention import DenseBias
from trainshort.config.position_config import EmptyPositionConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions import LayerInput, PositionMethod, positions


@positions.register("forget-gate")
class ForgetGate(PositionMethod):
    """How much of the past each token forgets follows from the token itself."""

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.gates = nn.ModuleList(nn.Linear(config.width, config.heads) for _ in range(config.layers))

    def content_bias(self, given: LayerInput) -> DenseBias:
        kept = F.logsigmoid(self.gates[given.layer](given.x)).transpose(1, 2)  # batch heads new
        before = given.method_cache.get("sum", kept.new_zeros(*kept.shape[:2], 0))
        total = torch.cat([before, kept.cumsum(-1) + before[..., -1:].sum(-1, keepdim=True)], dim=-1)
        given.method_cache["sum"] = total
        return DenseBias(total[..., -kept.shape[-1] :, None] - total[..., None, :])
