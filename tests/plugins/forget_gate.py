"""A plug-in for tests: the forget gate of the Forgetting Transformer (Lin et al., 2025), as a dense bias.

The score of query i and key j changes by log f(j + 1) + ... + log f(i). The gate f(i) is computed from token i.
"""

import torch
import torch.nn.functional as F
from torch import nn

from trainshort.attention import DenseBias
from trainshort.config.position_config import EmptyPositionConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions import LayerInput, PositionMethod, positions


@positions.register("forget-gate")
class ForgetGate(PositionMethod):
    """A gate at each token reduces the attention to earlier tokens."""

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.gates = nn.ModuleList(nn.Linear(config.width, config.heads) for _ in range(config.layers))

    def content_bias(self, layer_input: LayerInput) -> DenseBias:
        gate_logits = self.gates[layer_input.layer](layer_input.x)
        log_gates = F.logsigmoid(gate_logits).transpose(1, 2)  # (batch, heads, new tokens)

        # The cumulative sums of the cached tokens. There are none at the start of a text.
        cached = layer_input.method_cache.get("sum", log_gates.new_zeros(*log_gates.shape[:2], 0))
        last_cached = cached[..., -1:].sum(-1, keepdim=True)  # 0 if nothing is cached
        cumulative = torch.cat([cached, log_gates.cumsum(-1) + last_cached], dim=-1)
        layer_input.method_cache["sum"] = cumulative

        num_new = log_gates.shape[-1]
        return DenseBias(cumulative[..., -num_new:, None] - cumulative[..., None, :])
