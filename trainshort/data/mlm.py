"""Masked language models: which tokens an encoder has to guess, as pure functions of numbers. No torch.

One token in seven is hidden (BERT hides 15 %), each by the mask token, the last of the model's vocabulary; the loss is
over those alone. In training the choice is one of seed, step and row. In evaluation every token of a text is hidden
exactly once, in one of seven rounds that depends on its place in the text alone: so every token is scored exactly once,
and all lengths are asked the same questions.

    tokens    5 6 7 8 9      rounds 2 0 1 0 2      round 0:   inputs 5 M 7 M 9   targets - 6 - 8 -
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64, Integer

from trainshort.config.run_config import IGNORED, ModelConfig

MASK_ROUNDS = 7
"""One token in so many is hidden."""


def mask_token(model: ModelConfig) -> int:
    """What stands in place of a hidden token in an encoder: one more than the data has."""
    return model.vocab_size - 1


def mask_tokens(
    tokens: Integer[np.ndarray, "batch length"], hidden: Bool[np.ndarray, "batch length"], mask: int
) -> tuple[Int64[np.ndarray, "batch length"], Int64[np.ndarray, "batch length"]]:
    """Inputs and targets of an encoder."""
    whole = tokens.astype(np.int64)
    return np.where(hidden, mask, whole), np.where(hidden, whole, IGNORED)


def training_mask(seed: int, rows: Sequence[int], length: int) -> Bool[np.ndarray, "batch length"]:
    """What is hidden of some rows of training, each counted from the first of all steps."""
    draws = [np.random.default_rng((seed, row)).random(length) for row in rows]
    return np.stack(draws) < 1 / MASK_ROUNDS


def evaluation_rounds(starts: Sequence[int], length: int) -> Int64[np.ndarray, "batch length"]:
    """In which round each token of some blocks of a text is hidden: its place in the text, well mixed (splitmix64)."""
    place = np.array(starts, dtype=np.uint64)[:, None] + np.arange(length, dtype=np.uint64)
    mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(MASK_ROUNDS)).astype(np.int64)
