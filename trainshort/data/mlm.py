"""Masks for masked language models: choose which tokens an encoder must predict. This module does not import torch.

About one token in seven is replaced by the mask token (BERT masks 15 %). The loss is computed for the masked tokens
only.

- In training, the masked tokens are chosen at random. The choice depends on the seed, the step and the row.
- In evaluation, there are seven rounds. The position of a token in the text determines in which round it is masked.
  Each token is therefore scored exactly once, and the choice is the same for all input lengths.

For example, if the tokens 5 6 7 8 9 are masked in the rounds 2 0 1 0 2, then M is the mask token in round 0:

    inputs     5 M 7 M 9
    targets    - 6 - 8 -
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64, Integer

from trainshort.config.run_config import IGNORED, ModelConfig

MASK_ROUNDS = 7
"""The number of evaluation rounds. One token in `MASK_ROUNDS` is masked in each round."""


def mask_token(model: ModelConfig) -> int:
    """Return the id of the mask token of an encoder. It is the last id of the vocabulary, which no text contains."""
    return model.vocab_size - 1


def mask_tokens(
    tokens: Integer[np.ndarray, "batch length"], is_masked: Bool[np.ndarray, "batch length"], mask: int
) -> tuple[Int64[np.ndarray, "batch length"], Int64[np.ndarray, "batch length"]]:
    """Return the inputs and the targets of an encoder.

    Args:
        tokens: The tokens of the text.
        is_masked: Which tokens the encoder must predict.
        mask: The id of the mask token.

    Returns:
        The inputs, in which the mask token replaces masked tokens, and the targets, in which `IGNORED` replaces all
        other tokens.
    """
    token_ids = tokens.astype(np.int64)
    inputs = np.where(is_masked, mask, token_ids)
    targets = np.where(is_masked, token_ids, IGNORED)
    return inputs, targets


def training_mask(seed: int, rows: Sequence[int], length: int) -> Bool[np.ndarray, "batch length"]:
    """Choose at random which tokens are masked in training.

    Args:
        seed: The seed of the training run.
        rows: The numbers of the rows of a batch, counted from the first row of the first training step.
        length: The number of tokens in each row.

    Returns:
        Which tokens are masked. Each token is masked with the probability 1 / `MASK_ROUNDS`.
    """
    # Each row has its own random generator, so its mask does not depend on the other rows of the batch.
    random_numbers = [np.random.default_rng((seed, row)).random(length) for row in rows]
    return np.stack(random_numbers) < 1 / MASK_ROUNDS


def evaluation_rounds(starts: Sequence[int], length: int) -> Int64[np.ndarray, "batch length"]:
    """Return in which evaluation round each token of some text blocks is masked.

    An encoder predicts masked tokens. It reads the text in `MASK_ROUNDS` rounds, and each token is masked in one of
    them. The round is a hash of the position of the token in the text. The hash function is splitmix64.

    Args:
        starts: The position in the text where each block starts.
        length: The number of tokens in each block.

    Returns:
        Numbers from 0 to `MASK_ROUNDS` - 1.
    """
    positions = np.array(starts, dtype=np.uint64)[:, None] + np.arange(length, dtype=np.uint64)  # shape (batch, length)
    # The constants and shifts are those of splitmix64.
    hashes = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes = hashes ^ (hashes >> np.uint64(31))
    return (hashes % np.uint64(MASK_ROUNDS)).astype(np.int64)
