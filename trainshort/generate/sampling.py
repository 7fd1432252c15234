"""From scores to the next token, in pure functions. Each filter sets the scores it rules out to −inf; at least one
token always remains."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trainshort.generate.settings import GenerateConfig


def penalize(
    scores: Float[Tensor, " vocabulary"], seen: Bool[Tensor, " vocabulary"], penalty: float
) -> Float[Tensor, " vocabulary"]:
    """Tokens seen before: positive scores are divided by the penalty, negative ones multiplied (CTRL's rule).

    scores 3 −2 1, the first two seen, penalty 2:   1.5 −4 1
    """
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def keep_top_k(scores: Float[Tensor, " vocabulary"], k: int) -> Float[Tensor, " vocabulary"]:
    """The k likeliest; of equal ones at the edge as many as fit."""
    if k >= len(scores):
        return scores
    best = scores.topk(k).indices
    return torch.full_like(scores, -torch.inf).scatter(0, best, scores[best])


def keep_top_p(scores: Float[Tensor, " vocabulary"], p: float) -> Float[Tensor, " vocabulary"]:
    """The likeliest tokens, as few as have probability p together.

    probabilities 0.5 0.3 0.2:   p = 0.5 keeps one, p = 0.6 two, p = 0.9 all
    """
    if p >= 1:
        return scores
    ordered, order = scores.sort(descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # of the tokens that come first
    return torch.full_like(scores, -torch.inf).scatter(0, order, ordered.masked_fill(before >= p, -torch.inf))


def keep_min_p(scores: Float[Tensor, " vocabulary"], p: float) -> Float[Tensor, " vocabulary"]:
    """Tokens with at least p times the likeliest one's probability."""
    if p <= 0:
        return scores
    return scores.masked_fill(scores < scores.max() + torch.tensor(p).log(), -torch.inf)


def filtered(
    scores: Float[Tensor, " vocabulary"], config: GenerateConfig, seen: Bool[Tensor, " vocabulary"] | None = None
) -> Float[Tensor, " vocabulary"]:
    """The scores to draw from, in the order: penalty, temperature, top-k, top-p, min-p."""
    if seen is not None:
        scores = penalize(scores, seen, config.repetition_penalty)
    if config.temperature not in (0, 1):
        scores = scores / config.temperature
    if config.top_k is not None:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p is not None:
        scores = keep_top_p(scores, config.top_p)
    if config.min_p is not None:
        scores = keep_min_p(scores, config.min_p)
    return scores


def draw(scores: Float[Tensor, " vocabulary"], temperature: float, generator: torch.Generator) -> int:
    """A token by its probability; at temperature 0 the likeliest, the first of equal ones."""
    if temperature == 0:
        return int(scores.argmax())
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
