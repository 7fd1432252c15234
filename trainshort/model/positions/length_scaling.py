"""Scores that grow with what there is to see: a softmax over more keys spreads thinner, and this sharpens it again.

    ssmax     score · s_h · ln n                               s_h trained for each head and layer (Nakanishi, 2025)
    llama4    score · (1 + 0.1 · ln(1 + ⌊n / 8192⌋))           fixed (Llama 4)

n is how many tokens of its document a query sees, itself included. It is one number a row, so it multiplies the query,
and the bias is left as it is. What reads queries (kernels, bounds, caches) then needs to know nothing of it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import collapse_equal_rows

INITIAL_SCALE = 0.1686
"""SSMax's first s: one over the mean of ln n up to 1,024 tokens, so that scores begin at their usual size."""


class LengthScaling(nn.Module):
    """Multiplies queries by a factor that grows with the number of tokens they see."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.length = config.length_scaling_length
        self.s = nn.Parameter(torch.full((config.heads,), INITIAL_SCALE)) if config.length_scaling == "ssmax" else None

    def forward(
        self, q: Float[Tensor, "batch heads length dim"], where: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch heads length dim"]:
        factor = self.factor(collapse_equal_rows(where))[..., None]
        return (q.to(torch.promote_types(q.dtype, torch.float32)) * factor).to(q.dtype)

    def factor(self, where: Int[Tensor, "batch length"]) -> Float[Tensor, "batch one_or_heads length"]:
        """Of tokens at these places of their documents."""
        seen = where.float() + 1
        if self.s is not None:
            return self.s.float()[:, None] * seen.log()[:, None]
        return (1 + 0.1 * torch.log1p(torch.floor(seen / self.length)))[:, None]
