"""One text in the making: its cache, its randomness, its words, and why it ended."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer
from trainshort.errors import InputError
from trainshort.generate.config import GenerateConfig
from trainshort.model.cache import Cache

Logits = Float[Tensor, " vocabulary"]


def apply_repetition_penalty(scores: Logits, seen: Bool[Tensor, " vocabulary"], penalty: float) -> Logits:
    """Tokens seen before: positive scores are divided by the penalty, negative ones multiplied (CTRL's rule).

    scores 3 −2 1, the first two seen, penalty 2:   1.5 −4 1
    """
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def keep_top_k(scores: Logits, k: int) -> Logits:
    """The k likeliest; of equal ones at the edge as many as fit."""
    if k >= len(scores):
        return scores
    best = scores.topk(k).indices
    return torch.full_like(scores, -torch.inf).scatter(0, best, scores[best])


def keep_top_p(scores: Logits, p: float) -> Logits:
    """The likeliest tokens, as few as have probability p together.

    probabilities 0.5 0.3 0.2:   p = 0.5 keeps one, p = 0.6 two, p = 0.9 all
    """
    if p >= 1:
        return scores
    ordered, order = scores.sort(descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # of the tokens that come first
    return torch.full_like(scores, -torch.inf).scatter(0, order, ordered.masked_fill(before >= p, -torch.inf))


def keep_min_p(scores: Logits, p: float) -> Logits:
    """Tokens with at least p times the likeliest one's probability."""
    return scores.masked_fill(scores < scores.max() + torch.tensor(p).log(), -torch.inf)


def filter_logits(scores: Logits, config: GenerateConfig, seen: Bool[Tensor, " vocabulary"] | None = None) -> Logits:
    """The scores to draw from, in the order: penalty, temperature, top-k, top-p, min-p."""
    if seen is not None:
        scores = apply_repetition_penalty(scores, seen, config.repetition_penalty)
    if config.temperature not in (0, 1):
        scores = scores / config.temperature
    if config.top_k is not None:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p is not None:
        scores = keep_top_p(scores, config.top_p)
    if config.min_p is not None:
        scores = keep_min_p(scores, config.min_p)
    return scores


def sample_token(scores: Logits, temperature: float, generator: torch.Generator) -> int:
    """A token by its probability; at temperature 0 the likeliest, the first of equal ones."""
    if temperature == 0:
        return int(scores.argmax())
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


DECODER_REPLAY_TOKENS = 64
"""Tokens at the end of a prompt that a new decoder reads. A character has at most four bytes."""


class Token(NamedTuple):
    """What a stream yields."""

    id: int
    text: str
    """Text that this token completes; empty without a tokenizer, or while a character or a stop text may go on."""
    logprob: float
    """Of the token under the model itself, before temperature and filters."""
    sample: int = 0
    """Which sample of the batch."""


class Sample:
    """A sequence that is read and continued. `unread`: what the cache has not seen, the prompt and later the newest."""

    def __init__(self, cache: Cache, vocab_size: int, config: GenerateConfig, tokenizer: Tokenizer | None, number: int):
        self.cache, self.vocabulary, self.config, self.number = cache, vocab_size, config, number
        self.end = tokenizer.end if tokenizer is not None and config.stop_at_end else None
        self.unread: list[int] = []
        self.made = 0
        self.finished: str | None = None
        self.generator = torch.Generator().manual_seed(config.seed + number)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool) if config.repetition_penalty != 1 else None
        self.stops = StopStrings(config.stop)
        self.tokenizer = tokenizer
        self.decoder = tokenizer.decoder() if tokenizer is not None else None

    @property
    def context(self) -> int:
        """Tokens read or waiting to be."""
        return self.cache.length + len(self.unread)

    def feed(self, tokens: Sequence[int]) -> None:
        """More text to continue; a sample that had ended goes on."""
        tokens = [int(token) for token in tokens]
        if not tokens and not self.unread:
            raise InputError("the prompt is empty; a model continues something, so give at least one token.")
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise InputError(
                    f"token {token} of the prompt is outside the model's vocabulary of {self.vocabulary}; "
                    "is the text tokenized with the model's own tokenizer?"
                )
        self.unread += tokens
        if self.seen is not None:
            self.seen[self.unread] = True
        self.made, self.finished = 0, None
        self.stops = StopStrings(self.config.stop)
        self.decoder = self.tokenizer.decoder() if self.tokenizer is not None else None
        for token in tokens[-DECODER_REPLAY_TOKENS:]:
            self._decode(token)  # its text is the caller's own; what matters is where the decoder then stands

    def count(self, made: int) -> None:
        """Tokens that were made before and are still to be shown are among those asked for."""
        self.made = made
        if self.config.tokens is not None and made >= self.config.tokens:
            self.finished = "length"

    def accept(self, scores: Logits) -> Token:
        """Choose the next token from the scores after the last one read; with the text that can be shown by then."""
        scores = scores.float().cpu()
        token = sample_token(filter_logits(scores, self.config, self.seen), self.config.temperature, self.generator)
        logprob = float(scores[token] - scores.logsumexp(-1))
        self.made += 1
        self.unread.append(token)
        if self.seen is not None:
            self.seen[token] = True
        if self.end is not None and token == self.end:
            self.finished = "end of text"
            return Token(token, self._end_of_text(), logprob, self.number)
        text = self.stops.push(self._decode(token))
        if self.stops.stopped:
            self.finished = "stop text"
        elif self.config.tokens is not None and self.made >= self.config.tokens:
            self.finished = "length"
            text += self._end_of_text()
        return Token(token, text, logprob, self.number)

    def _decode(self, token: int) -> str:
        if self.tokenizer is None or self.decoder is None:
            return ""
        known = token < self.tokenizer.vocab_size  # models from elsewhere have room for more tokens
        return self.decoder.push(token) if known else "\ufffd"

    def _end_of_text(self) -> str:
        """What decoder and stop texts still hold back."""
        rest = "" if self.decoder is None else self.decoder.finish()
        return self.stops.push(rest) + self.stops.finish()


class StopStrings:
    """Passes text on until one of the stop texts is complete; what follows it is dropped.

    Text is held back as long as it could be the beginning of one:

        stop "END":   push "the E" -> "the "    push "N" -> ""    push "T" -> "ENT"    push " END." -> " ", and stopped
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop text."""
        if not self.stops or self.stopped:
            return "" if self.stopped else text
        text = self.held + text
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.held, self.stopped = "", True
            return text[: min(found)]
        safe = len(text) - max(_overlap(text, stop) for stop in self.stops)
        self.held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that begins `stop`: "the E", "END" gives 1."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
