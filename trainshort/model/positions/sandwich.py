"""Sandwich: the inner product of sinusoidal positions as attention bias."""

import torch
from torch import Tensor

from trainshort.attention import DistanceBias
from trainshort.config.position_config import SandwichConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import PositionMethod, exact_float_dtype


class Sandwich(PositionMethod):
    """Sandwich: adds the inner product of two sinusoidal position vectors to the attention scores.

    The inner product depends on the distance only. It tends to fall with the distance, but not monotonically. The
    inner product is shifted such that the bias is 0 at distance 0. Head h (counted from 1) multiplies the result by
    `heads / (8 * h)`. The bias has no trained parameters.
    """

    Config = SandwichConfig
    float32 = ("ratios",)
    ratios: Tensor

    def __init__(self, config: ModelConfig, settings: SandwichConfig) -> None:
        super().__init__(config, settings)
        self.width = settings.width
        self.register_buffer("ratios", torch.empty(config.heads), persistent=False)
        self.init_float32_tensors()

    def init_float32_tensors(self) -> None:
        """Set the factor of each head: heads / (8 * h) for head h, counted from 1."""
        heads = len(self.ratios)
        self.ratios.data.copy_(heads / (8 * torch.arange(1.0, heads + 1)))

    def score_bias(self, length: int) -> DistanceBias:
        """Return the bias of each head at the distances 0 to `length - 1`.

        The bias is computed from the inner product of two sinusoidal position vectors. The inner product depends only
        on the distance between both positions. Its value at distance 0 is subtracted, and the result is multiplied by
        a constant of the head (`self.ratios`).
        """
        device = self.ratios.device
        # At large distances, angles in float32 would be inaccurate.
        dtype = exact_float_dtype(device)
        num_pairs = self.width // 2
        pairs = torch.arange(1, num_pairs + 1, dtype=dtype, device=device)
        distances = torch.arange(length, dtype=dtype, device=device)
        angles = distances[:, None] * 10_000 ** (-2 * pairs / self.width)
        # Each pair of dimensions contributes sin(x) sin(y) + cos(x) cos(y) = cos(x - y). At distance 0, each pair
        # contributes 1. The subtraction of `num_pairs` makes the bias 0 at distance 0.
        inner_products = torch.cos(angles).sum(-1) - num_pairs
        return DistanceBias(self.ratios[:, None] * inner_products.float())
