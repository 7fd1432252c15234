"""Token embeddings, and the output layer that turns hidden states into a loss or into scores of the next token.

There are two kinds: `Vocabulary` uses one embedding matrix, and `AdaptiveVocabulary` uses the adaptive input and
softmax of Baevski & Auli (2019), in which rare words have short vectors.

Losses are computed for a slice of tokens at a time. The logits of all tokens may not fit into memory: for 16,384
tokens and 267,744 words they would take 17 GB.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainshort.config.run_config import IGNORED, AdaptiveConfig, ModelConfig
from trainshort.model.linear import linear

PADDING = 1
"""The id of the padding token in fairseq. fairseq's adaptive input initializes this row of every band with zeros."""

SLICE_ELEMENTS = 1 << 22
"""The number of logits that are computed at once. They take 16 MB in float32.

Larger slices do not fit into the processor's cache. Smaller slices make the matrix products less efficient.
"""


class Vocabulary(nn.Module):
    """Token embeddings with one embedding matrix and one output matrix.

    With `config.tie_embeddings`, the embedding matrix is also the output matrix.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding: nn.Embedding = nn.Embedding(config.vocab_size, config.width)
        self.output: nn.Linear | None = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        std = 0.02 if config.init == "gpt2" else config.width**-0.5
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    @property
    def output_weight(self) -> Float[Tensor, "vocabulary width"]:
        """Return the matrix that turns hidden states into logits."""
        return self.embedding.weight if self.output is None else self.output.weight

    def embed(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        """Return the embedding vector of each token."""
        return self.embedding(tokens)

    def log_scores(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocabulary"]:
        """Compute the logits of all tokens of the vocabulary."""
        return linear(hidden, self.output_weight)

    def total_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, ""]:
        """Compute the sum of the negative log-likelihoods of the targets, for training."""
        return linear_nll(hidden, self.output_weight, targets)

    def token_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Compute the negative log-likelihood of each target, for evaluation."""
        return _sliced_nll(hidden, self.output_weight, targets)


class AdaptiveVocabulary(nn.Module):
    """The adaptive input and softmax of Baevski & Auli (2019).

    Token ids are sorted by frequency and split into bands. The embedding vectors of a band are shorter than the vectors
    of the band before. A projection matrix per band maps them to the width of the model.

    The output layer has two steps. The head is a softmax over the tokens of the first band (the shortlist) and one
    additional entry for each further band. The tail of a further band is a softmax over the tokens of that band. The
    probability of such a token is the product of the probability of the band and its probability in the tail.

    Input and output share the embedding matrices and the projection matrices. The output does not use the projection
    matrix of the first band.

    Attributes:
        bands: The first token id of each band, and the id after the last token of the band.
        embeddings: The embedding matrix of each band.
        projections: The projection matrix of each band.
        clusters: The rows of the head for the bands after the first band.
    """

    def __init__(self, config: ModelConfig, adaptive: AdaptiveConfig) -> None:
        super().__init__()
        # The vocabulary is sorted by frequency and split into bands. Bands of rare words have narrower embeddings. For
        # example, the cutoffs 20000 and 60000 give the bands (0, 20000), (20000, 60000) and (60000, vocab_size).
        cutoffs = [cutoff for cutoff in adaptive.cutoffs if cutoff < config.vocab_size]
        self.bands: list[tuple[int, int]] = list(pairwise([0, *cutoffs, config.vocab_size]))
        band_widths = [max(1, config.width // adaptive.factor**band) for band in range(len(self.bands))]

        self.embeddings: nn.ModuleList = nn.ModuleList()
        for (band_start, band_stop), band_width in zip(self.bands, band_widths, strict=True):
            self.embeddings.append(nn.Embedding(band_stop - band_start, band_width))
        self.projections: nn.ModuleList = nn.ModuleList(
            nn.Linear(band_width, config.width, bias=False) for band_width in band_widths
        )
        # The output scores of all bands except for the first band.
        self.clusters: nn.Linear = nn.Linear(config.width, len(self.bands) - 1, bias=False)
        self.dropout: nn.Dropout = nn.Dropout(config.head_dropout)
        self.width: int = config.width

        for band, band_width in enumerate(band_widths):
            embedding_weight = self._embedding_weight(band)
            nn.init.normal_(embedding_weight, std=band_width**-0.5)
            with torch.no_grad():
                # fairseq initializes this row with zeros. The slice is empty if the band has only one row.
                embedding_weight[PADDING : PADDING + 1] = 0
        for projection in (*self.projections, self.clusters):
            nn.init.xavier_uniform_(projection.weight)  # pyright: ignore[reportArgumentType]

    def embed(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        """Return the embedding vector of each token, projected to the width of the model.

        The vocabulary is split into bands by frequency. Each band has its own embedding and projection matrices.
        """
        out = self._projection_weight(0).new_zeros((*tokens.shape, self.width))
        for band, (band_start, _) in enumerate(self.bands):
            in_band = self._is_in_band(tokens, band)  # (batch, length), boolean
            ids_in_band = tokens[in_band] - band_start
            vectors = self.projections[band](self.embeddings[band](ids_in_band))
            # Under autocast, the vectors have another dtype than the weights.
            out = out.to(vectors.dtype).index_put((in_band,), vectors)
        return out

    def log_scores(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocabulary"]:
        """Compute the log-probabilities of all tokens of the vocabulary. They can be used as logits.

        The vocabulary is split into bands by frequency. The head is a softmax over the tokens of the first band and one
        entry for each further band. The tail of a further band is a softmax over the tokens of that band. The
        log-probability of a token in a further band is the sum of the log-probabilities of the band and in the tail.
        """
        head_log_probs = linear(hidden, self._head_weight()).float().log_softmax(-1)
        shortlist_size = self.bands[0][1]
        log_probs = [head_log_probs[..., :shortlist_size]]
        for band in range(1, len(self.bands)):
            tail_logits = linear(self._tail_hidden(hidden, band), self._embedding_weight(band))
            tail_log_probs = tail_logits.float().log_softmax(-1)
            # In the head, the entries of the further bands follow the tokens of the first band.
            band_log_prob = head_log_probs[..., shortlist_size + band - 1, None]
            log_probs.append(band_log_prob + tail_log_probs)
        return torch.cat(log_probs, dim=-1)

    def total_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, ""]:
        """Compute the sum of the negative log-likelihoods of the targets, for training.

        The vocabulary is split into bands by frequency. The head is a softmax over the tokens of the first band and one
        entry for each further band. The tail of a further band is a softmax over the tokens of that band. A target in a
        further band adds two losses: the loss of its band in the head, and the loss of the token in the tail.
        """
        hidden = self.dropout(hidden)
        total = linear_nll(hidden, self._head_weight(), self._head_targets(targets))
        for band in range(1, len(self.bands)):
            band_start = self.bands[band][0]
            in_band = self._is_in_band(targets, band)
            tail_hidden = self.dropout(self._tail_hidden(hidden[in_band], band))
            tail_targets = targets[in_band] - band_start
            total = total + linear_nll(tail_hidden, self._embedding_weight(band), tail_targets)
        return total

    def token_nll(self, hidden: Float[Tensor, "rows width"], targets: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Compute the negative log-likelihood of each target, for evaluation.

        The vocabulary is split into bands by frequency. The head is a softmax over the tokens of the first band and one
        entry for each further band. The tail of a further band is a softmax over the tokens of that band. The value of
        a target in a further band is the sum of two losses: the loss of its band in the head, and the loss of the token
        in the tail.
        """
        nll = _sliced_nll(hidden, self._head_weight(), self._head_targets(targets))
        for band in range(1, len(self.bands)):
            band_start = self.bands[band][0]
            in_band = self._is_in_band(targets, band)
            tail_hidden = self._tail_hidden(hidden[in_band], band)
            tail_targets = targets[in_band] - band_start
            nll[in_band] += _sliced_nll(tail_hidden, self._embedding_weight(band), tail_targets)
        return nll

    def _embedding_weight(self, band: int) -> Float[Tensor, "band_size band_width"]:
        """Return the embedding matrix of a band."""
        return self.embeddings[band].weight  # pyright: ignore[reportReturnType]

    def _projection_weight(self, band: int) -> Float[Tensor, "width band_width"]:
        """Return the matrix that maps the embedding vectors of a band to the width of the model."""
        return self.projections[band].weight  # pyright: ignore[reportReturnType]

    def _head_weight(self) -> Float[Tensor, "head_size width"]:
        """Return the output matrix of the head: one row per shortlist token, then one row per further band."""
        return torch.cat([self._embedding_weight(0), self.clusters.weight])

    def _head_targets(self, targets: Int[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """Replace each target outside of the first band by the index of its band in the head.

        The head is a softmax over the tokens of the first band (the shortlist), followed by one entry for each further
        band.

        Args:
            targets: The target token ids.

        Returns:
            The targets of the head. Tokens of the first band are unchanged.
        """
        shortlist_size = self.bands[0][1]
        head_targets = targets.clone()
        for band in range(1, len(self.bands)):
            head_targets[self._is_in_band(targets, band)] = shortlist_size + band - 1
        return head_targets

    def _is_in_band(self, tokens: Int[Tensor, "*shape"], band: int) -> Bool[Tensor, "*shape"]:
        """Return for each token whether it belongs to the band."""
        band_start, band_stop = self.bands[band]
        return (tokens >= band_start) & (tokens < band_stop)

    def _tail_hidden(self, hidden: Float[Tensor, "*rows width"], band: int) -> Float[Tensor, "*rows band_width"]:
        """Map hidden states to the vector width of a band with the transposed projection matrix."""
        return hidden @ self._projection_weight(band)


def build_vocabulary(config: ModelConfig) -> Vocabulary | AdaptiveVocabulary:
    """Create the token embeddings and the output layer that the settings of a model describe."""
    if config.adaptive is None:
        return Vocabulary(config)
    return AdaptiveVocabulary(config, config.adaptive)


def linear_nll(
    hidden: Float[Tensor, "rows width"], weight: Float[Tensor, "vocabulary width"], targets: Int[Tensor, " rows"]
) -> Float[Tensor, ""]:
    """Compute the summed cross entropy of a linear output layer: `-log_softmax(hidden @ weight.T)[target]`.

    The logits are computed for one slice of rows at a time, so the logits of all rows are never in memory together. In
    training, the gradients of a slice are computed together with its logits.

    Args:
        hidden: The hidden states.
        weight: The output matrix.
        targets: The target of each row. Rows with the target `IGNORED` do not count.

    Returns:
        The sum over all rows in float32.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearNll.apply(hidden, weight, targets)  # pyright: ignore[reportReturnType]
    return _sliced_nll(hidden, weight, targets).sum()


def _row_slices(num_rows: int, vocab_size: int) -> list[slice]:
    """Split rows into slices whose logits have at most `SLICE_ELEMENTS` elements, with at least one row per slice."""
    rows_per_slice = max(1, SLICE_ELEMENTS // vocab_size)
    starts = range(0, num_rows, rows_per_slice)
    return [slice(start, min(start + rows_per_slice, num_rows)) for start in starts]


def _sliced_nll(
    hidden: Float[Tensor, "rows width"], weight: Float[Tensor, "vocabulary width"], targets: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Compute the cross entropy of each row of a linear output layer.

    The logits are computed for one slice of rows at a time, to save memory.

    Args:
        hidden: The hidden states.
        weight: The output matrix.
        targets: The target of each row. The loss of a row with the target `IGNORED` is 0.
    """
    losses = []
    for rows in _row_slices(len(targets), len(weight)):
        logits = linear(hidden[rows], weight).float()
        losses.append(F.cross_entropy(logits, targets[rows], ignore_index=IGNORED, reduction="none"))
    if not losses:
        return hidden.new_zeros(0, dtype=torch.float32)
    return torch.cat(losses)


class _LinearNll(torch.autograd.Function):
    """The summed cross entropy of a linear output layer, with gradients that are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross entropy, and store its gradients for `backward`.

        The logits are computed for one slice of rows at a time, to save memory.
        """
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows in _row_slices(len(targets), len(weight)):
            slice_hidden = hidden[rows]
            slice_targets = targets[rows, None]
            is_scored = slice_targets != IGNORED
            slice_targets = slice_targets.where(is_scored, 0)

            logits = linear(slice_hidden, weight).float()
            max_logit = logits.amax(-1, keepdim=True)
            target_logit = logits.gather(1, slice_targets) - max_logit
            # The following operations overwrite the logits, to save memory.
            exp_logits = logits.sub_(max_logit).exp_()
            sum_exp = exp_logits.sum(-1, keepdim=True)
            total += ((sum_exp.log() - target_logit) * is_scored).sum()

            # The gradient of the loss with respect to the logits is softmax(logits) - one_hot(target).
            probabilities = exp_logits.mul_(is_scored / sum_exp)
            grad_logits = probabilities.scatter_add_(1, slice_targets, -is_scored.to(logits.dtype))
            grad_logits = grad_logits.to(slice_hidden.dtype)
            grad_hidden[rows] = linear(grad_logits, weight.T)
            grad_weight += linear(grad_logits.T, slice_hidden.T)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Multiply the gradients that `forward` stored by the gradient of the loss. The targets have no gradient."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None
