"""Scaling of the attention scores with the number of visible tokens.

The softmax over more keys gives each key less attention. Larger scores compensate for this. With n, the number of
tokens that a query sees in its document (the query itself included), there are two formulas:

    ssmax     score * s * ln(n), with a trained s for each head and layer (Nakanishi, 2025)
    llama4    score * (1 + 0.1 * ln(1 + floor(n / 8192))), without trained parameters (Llama 4)

The queries are multiplied instead of the scores, so that attention backends and caches need no special case. The
attention bias is not scaled.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import collapse_equal_rows

INITIAL_SCALE = 0.1686
"""The initial s of ssmax. It is 1 / mean of ln(n) for n up to 1,024, so that the mean factor is 1 at first."""


class LengthScaling(nn.Module):
    """Multiply queries by a factor that grows with the number of tokens that they see.

    Args:
        config: The settings of the model. `config.length_scaling` selects the formula ("ssmax" or "llama4").
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.length = config.length_scaling_length
        self.s = None
        if config.length_scaling == "ssmax":
            self.s = nn.Parameter(torch.full((config.heads,), INITIAL_SCALE))

    def forward(
        self, q: Float[Tensor, "batch heads length dim"], position_ids: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch heads length dim"]:
        """Return the scaled queries.

        Args:
            q: The queries.
            position_ids: The position of each query in its own document.
        """
        # Rows with equal positions need only one factor per position. The shape is (1 or batch, 1 or heads, length, 1).
        factor = self.factor(collapse_equal_rows(position_ids))[..., None]
        compute_dtype = torch.promote_types(q.dtype, torch.float32)
        return (q.to(compute_dtype) * factor).to(q.dtype)

    def factor(self, position_ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch one_or_heads length"]:
        """Return the factor that the query of each position is multiplied by.

        Args:
            position_ids: The position of each query in its own document.

        Returns:
            The factors. Let n be the number of tokens that a query sees. With "ssmax", a head has the factor s * ln(n)
            with a trained s. With "llama4", the factor of all heads is 1 + 0.1 * ln(1 + floor(n / length)).
        """
        num_visible = position_ids.float() + 1
        if self.s is not None:
            return self.s.float()[:, None] * num_visible.log()[:, None]
        return (1 + 0.1 * torch.log1p(torch.floor(num_visible / self.length)))[:, None]
