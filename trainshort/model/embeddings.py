"""From token numbers to vectors, and from vectors to probabilities of the next token.

Two kinds: one plain matrix, tied or not, and the adaptive input and softmax of Baevski & Auli, where rare words have
narrow vectors. Both turn hidden states into negative log-likelihoods a slice at a time: the full logits of 16,384
tokens over 267,744 words would be 17 GB, and nobody needs them at once.

Nearly all of that is one matrix product, and so is nearly all of a layer: how those are made stands here for both.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainshort.config.run_config import IGNORED, AdaptiveConfig, ModelConfig
from trainshort.model.linear import linear

PADDING = 1
"""fairseq's number for padding. Its adaptive input takes it for padding in every band, and begins that row at zero."""

SLICE_ELEMENTS = 1 << 22
"""Logits computed at once: 16 MB in float32 stays near the cache and keeps the matrix products large."""


class Vocabulary(nn.Module):
    """One embedding matrix and one output matrix, which may be the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.output = None if config.tie_embeddings else nn.Linear(config.width, config.vocab_size, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02 if config.init == "gpt2" else config.width**-0.5)

    @property
    def output_weight(self) -> Float[Tensor, "vocabulary width"]:
        return self.embedding.weight if self.output is None else self.output.weight

    def embed(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        return self.embedding(tokens)

    def log_scores(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocabulary"]:
        """Scores whose softmax is the prediction."""
        return linear(hidden, self.output_weight)

    def total_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, ""]:
        return linear_nll(hidden, self.output_weight, targets)

    def token_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        return _sliced_nll(hidden, self.output_weight, targets)


class AdaptiveVocabulary(nn.Module):
    """Bands of words by rank, each narrower than the one before; the first is scored together with one entry per
    further band, and a word of such a band gets the product of both probabilities.

    Input and output share the bands' matrices and, turned round, their projections. The first band's projection serves
    the input alone.
    """

    def __init__(self, config: ModelConfig, adaptive: AdaptiveConfig) -> None:
        super().__init__()
        edges = [0, *(c for c in adaptive.cutoffs if c < config.vocab_size), config.vocab_size]
        self.bands = list(pairwise(edges))
        widths = [max(1, config.width // adaptive.factor**i) for i in range(len(self.bands))]
        self.embeddings = nn.ModuleList(nn.Embedding(b - a, w) for (a, b), w in zip(self.bands, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(w, config.width, bias=False) for w in widths)
        self.clusters = nn.Linear(config.width, len(self.bands) - 1, bias=False)
        self.dropout = nn.Dropout(config.head_dropout)
        self.width = config.width
        for embedding, width in zip(self.embeddings, widths, strict=True):
            nn.init.normal_(embedding.weight, std=width**-0.5)  # pyright: ignore[reportArgumentType]
            with torch.no_grad():
                embedding.weight[PADDING : PADDING + 1] = 0  # pyright: ignore[reportIndexIssue]
        for projection in (*self.projections, self.clusters):
            nn.init.xavier_uniform_(projection.weight)  # pyright: ignore[reportArgumentType]

    def embed(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        out = self._weight(self.projections, 0).new_zeros((*tokens.shape, self.width))
        for i, (start, stop) in enumerate(self.bands):
            here = (tokens >= start) & (tokens < stop)
            vectors = self.projections[i](self.embeddings[i](tokens[here] - start))
            out = out.to(vectors.dtype).index_put((here,), vectors)
        return out

    def log_scores(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocabulary"]:
        """Log-probabilities of every word."""
        head = linear(hidden, self._head_weight()).float().log_softmax(-1)
        shortlist = self.bands[0][1]
        pieces = [head[..., :shortlist]]
        for i in range(1, len(self.bands)):
            tail = linear(self._tail_hidden(hidden, i), self._weight(self.embeddings, i)).float().log_softmax(-1)
            pieces.append(head[..., shortlist + i - 1, None] + tail)
        return torch.cat(pieces, dim=-1)

    def total_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, ""]:
        hidden = self.dropout(hidden)
        total = linear_nll(hidden, self._head_weight(), self._head_targets(targets))
        for i, (start, stop) in enumerate(self.bands[1:], 1):
            here = (targets >= start) & (targets < stop)
            inside = self.dropout(self._tail_hidden(hidden[here], i))
            total = total + linear_nll(inside, self._weight(self.embeddings, i), targets[here] - start)
        return total

    def token_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        nll = _sliced_nll(hidden, self._head_weight(), self._head_targets(targets))
        for i, (start, stop) in enumerate(self.bands[1:], 1):
            here = (targets >= start) & (targets < stop)
            inside = self._tail_hidden(hidden[here], i)
            nll[here] += _sliced_nll(inside, self._weight(self.embeddings, i), targets[here] - start)
        return nll

    def _weight(self, modules: nn.ModuleList, i: int) -> Tensor:
        return modules[i].weight  # pyright: ignore[reportReturnType]

    def _head_weight(self) -> Float[Tensor, "shortlist_and_clusters width"]:
        return torch.cat([self._weight(self.embeddings, 0), self.clusters.weight])

    def _head_targets(self, targets: Tensor) -> Tensor:
        """Words of the first band stay; a word of band i becomes that band's cluster entry."""
        shortlist = self.bands[0][1]
        head = targets.clone()
        for i, (start, stop) in enumerate(self.bands[1:], 1):
            head[(targets >= start) & (targets < stop)] = shortlist + i - 1
        return head

    def _tail_hidden(self, hidden: Tensor, i: int) -> Tensor:
        return hidden @ self._weight(self.projections, i)


def build_vocabulary(config: ModelConfig) -> Vocabulary | AdaptiveVocabulary:
    return Vocabulary(config) if config.adaptive is None else AdaptiveVocabulary(config, config.adaptive)


def linear_nll(
    hidden: Float[Tensor, "rows width"], weight: Float[Tensor, "vocabulary width"], targets: Int[Tensor, " rows"]
) -> Float[Tensor, ""]:
    """Sum of −log softmax(hidden · weightᵀ)[target] over the targets that are not IGNORED.

    While training, the gradients are computed together with the loss, slice by slice, so that the logits are never
    all in memory and never computed twice.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearNll.apply(hidden, weight, targets)  # pyright: ignore[reportReturnType]
    return _sliced_nll(hidden, weight, targets).sum()


def _row_slices(rows: int, vocab_size: int) -> list[slice]:
    size = max(1, SLICE_ELEMENTS // vocab_size)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _sliced_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    pieces = [
        F.cross_entropy(linear(hidden[rows], weight).float(), targets[rows], ignore_index=IGNORED, reduction="none")
        for rows in _row_slices(len(targets), len(weight))
    ]
    return torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)


class _LinearNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows in _row_slices(len(targets), len(weight)):
            inside, wanted = hidden[rows], targets[rows, None]
            scored = wanted != IGNORED
            wanted = wanted.where(scored, 0)
            # In place from here on, one exponential a logit: logits, e^(logit − largest), probabilities minus truth.
            logits = linear(inside, weight).float()
            largest = logits.amax(-1, keepdim=True)
            picked = logits.gather(1, wanted) - largest
            mass = logits.sub_(largest).exp_().sum(-1, keepdim=True)
            total += ((mass.log() - picked) * scored).sum()
            error = logits.mul_(scored / mass).scatter_add_(1, wanted, -scored.to(logits.dtype)).to(inside.dtype)
            grad_hidden[rows] = linear(error, weight.T)
            grad_weight += linear(error.T, inside.T)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None
