"""Methods at the first door: nothing, or vectors added to the embeddings."""

import math

import torch
from torch import Tensor, nn

from trainshort.config.position_config import EmptyPositionConfig, LearnedConfig
from trainshort.config.run_config import ModelConfig
from trainshort.model.positions.base import PositionMethod


class NoPosition(PositionMethod):
    """No positions at all; the causal mask is the only hint of order."""


class Sinusoidal(PositionMethod):
    """Fixed sines and cosines added to the embeddings, as fairseq computes them; any length.

    First half sines, second half cosines, frequencies exp(−i·ln 10000 / (width/2 − 1)), counting from 2 (fairseq's
    padding index + 1), amplitude 1. Computed for the positions at hand: there is no table to outgrow.
    """

    FIRST = 2

    def __init__(self, config: ModelConfig, settings: EmptyPositionConfig) -> None:
        super().__init__(config, settings)
        self.width = config.width

    def embed(self, x: Tensor, where: Tensor) -> Tensor:
        half = self.width // 2
        step = math.log(10_000) / max(half - 1, 1)
        frequency = torch.exp(torch.arange(half, dtype=torch.float32, device=x.device) * -step)
        angle = (where + self.FIRST).float()[..., None] * frequency
        wave = torch.cat([angle.sin(), angle.cos()], dim=-1)
        if self.width % 2:
            wave = nn.functional.pad(wave, (0, 1))  # as fairseq: an odd width ends in a zero
        return x + wave.to(x.dtype)


class Learned(PositionMethod):
    """One trained vector per position added to the embeddings; cannot read past its table."""

    Config = LearnedConfig

    def __init__(self, config: ModelConfig, settings: LearnedConfig) -> None:
        super().__init__(config, settings)
        self.max_length = settings.max_length
        self.table = nn.Embedding(settings.max_length, config.width)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x: Tensor, where: Tensor) -> Tensor:
        return x + self.table(where)
