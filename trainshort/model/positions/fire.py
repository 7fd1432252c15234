"""FIRE: a small network that computes the attention bias from a normalized distance."""

import torch
import torch.nn.functional as F
from torch import nn

from trainshort.attention import DenseBias
from trainshort.config.position_config import FireConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import LayerInput, PositionMethod, collapse_equal_rows


class Fire(PositionMethod):
    """FIRE: a network with one hidden layer computes the attention bias from the normalized distance.

    For a query at position i and a distance d, the input of the network is

        ln(1 + c * d) / ln(1 + c * max(i, L))

    `c` is trained. L is `settings.threshold` times a trained factor. The absolute values of both trained numbers are
    used. The bias depends on the position of the query, so each layer computes a dense bias.
    """

    Config = FireConfig
    causal_only = True

    def __init__(self, config: ModelConfig, settings: FireConfig) -> None:
        super().__init__(config, settings)
        # A small network computes the bias from the distance and the position of the query. See `content_bias`.
        self.threshold = settings.threshold
        self.c = nn.Parameter(torch.tensor([0.1]))
        self.multiplier = nn.Parameter(torch.ones(1))
        self.wide = nn.Linear(1, settings.hidden)
        # The output layer has no bias, because a constant added to all scores of a row does not change the softmax.
        self.narrow = nn.Linear(settings.hidden, config.heads, bias=False)

    def content_bias(self, layer_input: LayerInput) -> DenseBias:
        """Return the bias of each head, new query and key.

        A network with one hidden layer computes the bias. Its input is the number
        ln(1 + c * distance) / ln(1 + c * max(position of the query, L)). `c` and L are computed from trained
        parameters.
        """
        position_ids = collapse_equal_rows(layer_input.position_ids)
        num_queries = position_ids.shape[1]
        key_indices = torch.arange(layer_input.length, device=position_ids.device)
        query_indices = key_indices[-num_queries:]  # The new tokens are the last keys.
        distances = (query_indices[:, None] - key_indices).clamp(min=0).float()

        c = self.c.float().abs()
        min_scale = self.threshold * self.multiplier.float().abs()
        scales = torch.maximum(position_ids.float(), min_scale)  # max(position of the query, L)
        # Shape (rows, queries, keys), with one row if all rows of the batch have the same positions.
        normalized = torch.log1p(c * distances) / torch.log1p(c * scales)[..., None]

        hidden = F.relu(F.linear(normalized[..., None], self.wide.weight.float(), self.wide.bias.float()))
        values = F.linear(hidden, self.narrow.weight.float()).movedim(-1, 1)  # (rows, heads, queries, keys)
        if len(values) == 1:
            return DenseBias(values[0])
        return DenseBias(values)
