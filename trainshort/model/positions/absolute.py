"""Position methods that add a vector to each token embedding, and the method without positions."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from trainshort.config.position_config import EmptyPositionConfig, LearnedConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import PositionMethod


class NoPosition(PositionMethod):
    """No positions (NoPE). The model can infer the order of tokens from the causal mask only."""


class Sinusoidal(PositionMethod):
    """Sinusoidal positions: fixed sines and cosines that are added to the token embeddings.

    The vectors are those of fairseq, the code of the ALiBi paper. The first half of each vector contains sines, and
    the second half contains cosines. The frequency of dimension i of each half is
    exp(-i * ln(10000) / (width / 2 - 1)). The vectors are computed for the given positions, so any length is possible.
    """

    FIRST_POSITION = 2
    """The number of the first position. fairseq counts from its padding id + 1."""

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.width = config.width

    def embed(
        self, x: Float[Tensor, "batch length width"], position_ids: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """Add the sinusoidal vectors to the token embeddings."""
        half_width = self.width // 2
        # The frequencies are 1 at index 0 of each half, and 1 / 10,000 at the last index.
        log_step = math.log(10_000) / max(half_width - 1, 1)
        frequencies = torch.exp(torch.arange(half_width, dtype=torch.float32, device=x.device) * -log_step)
        angles = (position_ids + self.FIRST_POSITION).float()[..., None] * frequencies
        vectors = torch.cat([angles.sin(), angles.cos()], dim=-1)
        if self.width % 2 == 1:
            vectors = nn.functional.pad(vectors, (0, 1))  # As in fairseq, the last dimension is zero.
        return x + vectors.to(x.dtype)


class Learned(PositionMethod):
    """Learned positions: one trained vector per position that is added to the token embeddings.

    Inputs must not be longer than the table of vectors.
    """

    Config = LearnedConfig

    def __init__(self, config: ModelConfig, settings: LearnedConfig) -> None:
        super().__init__(config, settings)
        self.max_length = settings.max_length
        self.table = nn.Embedding(settings.max_length, config.width)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(
        self, x: Float[Tensor, "batch length width"], position_ids: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length width"]:
        """Add the trained vectors to the token embeddings."""
        return x + self.table(position_ids)
