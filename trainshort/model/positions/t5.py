"""T5's relative position bias."""

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn

from trainshort.attention import Bias, DistanceBias
from trainshort.config.position_config import T5Config
from trainshort.config.run_config import ModelConfig
from trainshort.errors import InputError
from trainshort.model.positions.base import PositionMethod


class T5(PositionMethod):
    """T5's relative position bias: adds one trained number per head and distance bucket to the attention scores.

    All layers share the numbers. In an encoder, half of the buckets belong to keys to the left of the query, and the
    other half to keys to the right of the query.
    """

    Config = T5Config

    def __init__(self, config: ModelConfig, settings: T5Config) -> None:
        super().__init__(config, settings)
        self.table = nn.Parameter(torch.zeros(config.heads, settings.buckets))  # the bias of each head and bucket
        self.buckets = settings.buckets
        self.max_distance = settings.max_distance
        self.causal = config.causal
        if not config.causal and settings.buckets % 2 == 1:
            raise InputError(
                f"t5 in an encoder requires an even number of buckets, got {settings.buckets}. "
                "Each side of the query uses half of the buckets."
            )
        nn.init.normal_(self.table, std=0.02)

    def score_bias(self, length: int) -> Bias:
        """Return the bias of each head and distance. The bias does not depend on `length`, the number of keys."""
        # The last column of the table is the bias at `max_distance`. DistanceBias uses the last column for all larger
        # distances, which are in the same bucket.
        distances = torch.arange(self.max_distance + 1, device=self.table.device)
        if self.causal:
            return DistanceBias(self.table[:, bucket_ids(distances, self.buckets, self.max_distance)])
        # In an encoder, keys to the right of the query use the second half of the buckets.
        buckets_per_side = self.buckets // 2
        ids = bucket_ids(distances, buckets_per_side, self.max_distance)
        return DistanceBias(self.table[:, ids], right=self.table[:, buckets_per_side + ids])


def bucket_ids(distances: Int[Tensor, " n"], num_buckets: int, max_distance: int) -> Int[Tensor, " n"]:
    """Return the bucket of each distance, as in the causal attention of T5.

    Each bucket of the first half contains one distance. The boundaries of the other buckets are spaced logarithmically.

    Args:
        distances: The distances between query and key.
        num_buckets: The number of buckets.
        max_distance: Distances of this size and larger are in the last bucket.

    Example:
        `num_buckets=8` and `max_distance=32` give these buckets:

            distance    0 1 2 3 4 5 6 8 11 12 16 20 32 99
            bucket      0 1 2 3 4 4 4 5  5  6  6  7  7  7
    """
    num_exact = num_buckets // 2
    # The fraction is 0 at distance `num_exact` and 1 at distance `max_distance`.
    log_fraction = torch.log(distances.clamp(min=num_exact).float() / num_exact) / math.log(max_distance / num_exact)
    log_buckets = num_exact + (log_fraction * (num_buckets - num_exact)).long()
    return torch.where(distances < num_exact, distances, log_buckets.clamp(max=num_buckets - 1))
