"""Several sequences of different lengths, read side by side: the weights are read once for all, each row attends to
its own past only, so that a sample's probabilities are those it has alone."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from trainshort.attention import Bias
from trainshort.errors import InputError
from trainshort.model.cache.full import Ask, Cache, LayerCache


class BatchedCache(Cache):
    """One cache per row of the batch.

    model(tokens, cache=Rows([short, long]))        # tokens: two rows, of which each continues its own cache
    """

    def __init__(self, rows: Sequence[Cache]) -> None:
        super().__init__()
        if not rows:
            raise InputError("a batch needs at least one row.")
        self.rows = list(rows)

    @property
    def length(self) -> int:
        """Of the longest row."""
        return max(row.length for row in self.rows)

    def offset(self, batch: int) -> Int[Tensor, "batch 1"]:
        if batch != len(self.rows):
            raise InputError(f"this cache holds {len(self.rows)} sequences, but the input has {batch}.")
        return torch.tensor([[row.length] for row in self.rows])

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def layer(self, index: int) -> LayerCache:
        return _BatchedLayer([row.layer(index) for row in self.rows])


class _BatchedLayer(LayerCache):
    def __init__(self, rows: list[LayerCache]) -> None:
        super().__init__()
        self.rows = rows

    def decode_args(self, slopes: Tensor, shape: tuple[int, int], window: int | None) -> None:
        return None

    def content_bias(self, ask: Ask, rows: slice = slice(None)) -> list[Bias | None]:
        """One for each row: they have read different texts."""
        return [row.content_bias(ask, slice(index, index + 1)) for index, row in enumerate(self.rows)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        bias = options.pop("bias", None)
        biases = bias if isinstance(bias, list) else [bias] * len(self.rows)
        parts = zip(self.rows, biases, q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([row.attend(*part, bias=own, **options) for row, own, *part in parts])
