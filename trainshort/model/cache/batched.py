"""A batch of caches with different lengths.

Each sequence attends only to its own past. Its results therefore equal those of the sequence alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainshort.attention import Bias
from trainshort.errors import InputError
from trainshort.model.cache.full import Cache, ContentBiasFunction, LayerCache


class BatchedCache(Cache):
    """Several caches as one batch. Row i of the batch continues the sequence of cache i.

    Args:
        rows: One cache per row of the batch. The caches may have different lengths.

    Raises:
        InputError: If `rows` is empty.

    Example:
        >>> cache = BatchedCache([short_cache, long_cache])
        >>> logits = model(tokens, cache=cache)  # `tokens` has two rows.
    """

    def __init__(self, rows: Sequence[Cache]) -> None:
        super().__init__()
        if not rows:
            raise InputError("BatchedCache requires at least one cache, got none.")
        self.rows = list(rows)

    @property
    def length(self) -> int:
        """Return the length of the longest sequence."""
        return max(row.length for row in self.rows)

    def offset(self, batch: int) -> Int[Tensor, "batch 1"]:
        """Return the position of the next token of each sequence.

        Args:
            batch: The number of sequences in the input.

        Raises:
            InputError: If `batch` is not the number of caches.
        """
        if batch != len(self.rows):
            raise InputError(f"Expected a batch of {len(self.rows)} sequences, as in the cache, got {batch}.")
        return torch.tensor([[row.length] for row in self.rows])

    @property
    def bytes(self) -> int:
        """Return the size of all stored tensors in bytes."""
        return sum(row.bytes for row in self.rows)

    def layer(self, index: int) -> LayerCache:
        """Return the caches of one transformer layer, one for each sequence."""
        return _BatchedLayer([row.layer(index) for row in self.rows])


class _BatchedLayer(LayerCache):
    """One layer of several caches."""

    def __init__(self, rows: list[LayerCache]) -> None:
        super().__init__()
        self.rows = rows

    def decode_args(self, slopes: Tensor, kv_shape: tuple[int, int], window: int | None) -> None:
        """Return None, because the compiled decoder supports a single sequence only."""

    def content_bias(self, compute_bias: ContentBiasFunction, rows: slice = slice(None)) -> list[Bias | None]:
        """Return one bias per sequence, because the sequences contain different texts.

        Args:
            compute_bias: The function that computes the bias for some rows (sequences) of the input batch.
            rows: Not used. Each sequence uses its own row of the input batch.
        """
        biases = []
        for row_index, row_cache in enumerate(self.rows):
            input_row = slice(row_index, row_index + 1)
            biases.append(row_cache.content_bias(compute_bias, input_row))
        return biases

    def attend(
        self,
        q: Float[Tensor, "batch heads new dim"],
        k: Float[Tensor, "batch kv_heads new dim"],
        v: Float[Tensor, "batch kv_heads new dim"],
        **options: Any,
    ) -> Float[Tensor, "batch heads new dim"]:
        """Compute the attention of each sequence with its own cache. The arguments are those of `LayerCache.attend`.

        The option `bias` is one bias for all sequences, or the list that `content_bias` returned.
        """
        bias = options.pop("bias", None)
        biases = bias if isinstance(bias, list) else [bias] * len(self.rows)
        outputs = []
        for row_cache, row_bias, row_q, row_k, row_v in zip(
            self.rows, biases, q.split(1), k.split(1), v.split(1), strict=True
        ):
            outputs.append(row_cache.attend(row_q, row_k, row_v, bias=row_bias, **options))
        return torch.cat(outputs)
