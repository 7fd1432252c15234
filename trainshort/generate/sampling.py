"""Choose the next token from the logits, and keep the state of one generated sample."""

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

DECODER_REPLAY_TOKENS = 64
"""The number of tokens at the end of a prompt that are decoded before generation starts.

The text decoder then knows an incomplete character at the end of the prompt. A character has at most four bytes.
"""

REPLACEMENT_CHARACTER = "\ufffd"


def apply_repetition_penalty(logits: Logits, seen: Bool[Tensor, " vocabulary"], penalty: float) -> Logits:
    """Lower the logits of tokens that occurred before, as in CTRL (Keskar et al., 2019).

    Positive logits are divided by the penalty. Negative logits are multiplied by the penalty.

    Args:
        logits: The logits of the next token.
        seen: Whether each token of the vocabulary occurred before.
        penalty: The penalty. Values above 1 make repetitions less likely.

    Returns:
        The new logits.

    Example:
        >>> seen = torch.tensor([True, True, False])
        >>> apply_repetition_penalty(torch.tensor([3.0, -2.0, 1.0]), seen, penalty=2.0)
        tensor([ 1.5000, -4.0000,  1.0000])
    """
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Keep the k most likely tokens. Set the logits of all other tokens to -inf."""
    if k >= len(logits):
        return logits
    top_indices = logits.topk(k).indices
    all_removed = torch.full_like(logits, -torch.inf)
    return all_removed.scatter(0, top_indices, logits[top_indices])


def keep_top_p(logits: Logits, p: float) -> Logits:
    """Keep the smallest set of most likely tokens whose total probability is at least p. Set other logits to -inf.

    Example:
        With the probabilities 0.5, 0.3 and 0.2 and p=0.6, the first two tokens are kept.
    """
    if p >= 1:
        return logits
    sorted_logits, order = logits.sort(descending=True)
    probabilities = sorted_logits.softmax(-1)
    # The total probability of the tokens that are more likely than each token.
    preceding_mass = probabilities.cumsum(-1) - probabilities
    filtered_sorted_logits = sorted_logits.masked_fill(preceding_mass >= p, -torch.inf)
    # Restore the order of the vocabulary.
    return torch.empty_like(logits).scatter(0, order, filtered_sorted_logits)


def keep_min_p(logits: Logits, p: float) -> Logits:
    """Keep the tokens with at least p times the probability of the most likely token. Set all other logits to -inf."""
    min_logit = logits.max() + torch.tensor(p).log()  # The logit of p times the highest probability.
    return logits.masked_fill(logits < min_logit, -torch.inf)


def filter_logits(logits: Logits, config: GenerateConfig, seen: Bool[Tensor, " vocabulary"] | None = None) -> Logits:
    """Apply the sampling settings in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        logits: The logits of the model.
        config: The sampling settings.
        seen: Whether each token of the vocabulary occurred before. None turns the repetition penalty off.

    Returns:
        The logits to sample from. Removed tokens have the logit -inf.
    """
    if seen is not None:
        logits = apply_repetition_penalty(logits, seen, config.repetition_penalty)
    if config.temperature not in (0, 1):
        logits = logits / config.temperature
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    if config.min_p is not None:
        logits = keep_min_p(logits, config.min_p)
    return logits


def sample_token(logits: Logits, temperature: float, generator: torch.Generator) -> int:
    """Sample a token id from the softmax of the logits. With temperature 0, return the most likely token id.

    Args:
        logits: The logits after `filter_logits`, which has applied the temperature.
        temperature: The temperature. Only 0 has an effect.
        generator: The source of random numbers.
    """
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


class Token(NamedTuple):
    """A generated token.

    Attributes:
        id: The token id.
        text: The text that this token completes. The text is empty if no tokenizer is used. It is also empty while a
            character or a possible stop text is incomplete.
        logprob: The log probability of the token under the model, before temperature and filters.
        sample: The index of the sample in the batch.
    """

    id: int
    text: str
    logprob: float
    sample: int = 0


class Sample:
    """A sequence that the model reads and continues.

    Args:
        cache: The KV cache of the sequence.
        vocab_size: The vocabulary size of the model.
        config: The settings of the generation.
        tokenizer: The tokenizer, or None to generate token ids without text.
        index: The index of the sample in the batch.

    Attributes:
        unread: The tokens that the model has not processed yet: the prompt, and later the newest token.
        num_generated: The number of tokens that were generated since the last call of `feed`.
        finished: Why the sample has ended: "length", "end of text" or "stop text". None if it has not ended.
    """

    def __init__(
        self, cache: Cache, vocab_size: int, config: GenerateConfig, tokenizer: Tokenizer | None, index: int
    ) -> None:
        self.cache = cache
        self.vocab_size = vocab_size
        self.config = config
        self.tokenizer = tokenizer
        self.index = index
        self.unread: list[int] = []  # the tokens that the model has not processed yet
        self.num_generated: int = 0
        self.finished: str | None = None  # why the sample has ended, such as "length"
        self.generator: torch.Generator = torch.Generator().manual_seed(config.seed + index)
        self.stop_strings: StopStrings = StopStrings(config.stop)
        self.decoder = None if tokenizer is None else tokenizer.decoder()

        self.end_token: int | None = None
        if tokenizer is not None and config.stop_at_end:
            self.end_token = tokenizer.end

        # Whether each token of the vocabulary occurred before. Needed for the repetition penalty only.
        self.seen: Tensor | None = None
        if config.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)

    @property
    def context(self) -> int:
        """Return the length of the sequence, including tokens that the model has not processed yet."""
        return self.cache.length + len(self.unread)

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens, such as a prompt, that the model continues. A sample that has ended can be continued again.

        Args:
            tokens: The token ids.

        Raises:
            InputError: If there is no token to continue, or if a token is outside the vocabulary of the model.
        """
        tokens = [int(token) for token in tokens]
        if not tokens and not self.unread:
            raise InputError("The prompt is empty. Give at least one token to continue.")
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InputError(
                    f"Token id {token} of the prompt is outside the model's vocabulary of {self.vocab_size} tokens. "
                    "Encode the prompt with the tokenizer of the model."
                )
        self.unread += tokens
        if self.seen is not None:
            # `seen` marks all token ids that occurred in this text, for the repetition penalty.
            self.seen[self.unread] = True
        self.num_generated: int = 0
        self.finished = None
        self.stop_strings = StopStrings(self.config.stop)

        # The prompt may end with an incomplete character. The new decoder must know the first bytes of this character.
        self.decoder = None if self.tokenizer is None else self.tokenizer.decoder()
        for token in tokens[-DECODER_REPLAY_TOKENS:]:
            self._decode(token)  # The returned text is part of the prompt and is not needed.

    def set_num_generated(self, num_generated: int) -> None:
        """Set the number of generated tokens, and end the sample if this number is the requested number of tokens."""
        self.num_generated = num_generated
        if self._has_reached_length():
            self.finished = "length"

    def _has_reached_length(self) -> bool:
        """Return whether the requested number of tokens is generated."""
        return self.config.tokens is not None and self.num_generated >= self.config.tokens

    def accept(self, logits: Logits) -> Token:
        """Choose the next token and append it to the sample (a text that is being generated).

        Args:
            logits: The logits of the model for the next token.

        Returns:
            The chosen token.
        """
        logits = logits.float().cpu()
        filtered_logits = filter_logits(logits, self.config, self.seen)
        token = sample_token(filtered_logits, self.config.temperature, self.generator)
        # The log-probability of the model, before the sampling settings are applied.
        logprob = float(logits[token] - logits.logsumexp(-1))
        self.num_generated += 1
        self.unread.append(token)
        if self.seen is not None:
            self.seen[token] = True

        is_end_token = self.end_token is not None and token == self.end_token
        if is_end_token:
            self.finished = "end of text"
            return Token(token, self._flush_text(), logprob, self.index)

        text = self.stop_strings.push(self._decode(token))
        if self.stop_strings.is_stopped:
            self.finished = "stop text"
        elif self._has_reached_length():
            self.finished = "length"
            text += self._flush_text()
        return Token(token, text, logprob, self.index)

    def _decode(self, token: int) -> str:
        """Return the text that a token completes. The text is empty while a character is incomplete."""
        if self.tokenizer is None or self.decoder is None:
            return ""
        # The vocabulary of an imported model may be larger than that of its tokenizer.
        if token >= self.tokenizer.vocab_size:
            return REPLACEMENT_CHARACTER
        return self.decoder.push(token)

    def _flush_text(self) -> str:
        """Return the text that was held back: an incomplete character, or a possible beginning of a stop text."""
        decoder_text = "" if self.decoder is None else self.decoder.finish()
        return self.stop_strings.push(decoder_text) + self.stop_strings.finish()


class StopStrings:
    """Search generated text for stop texts, and cut the text off at the first stop text.

    Text that could be the beginning of a stop text is held back until more text is known.

    Args:
        stop_texts: The texts at which the generated text ends.

    Attributes:
        is_stopped: Whether a stop text was found.

    Example:
        >>> stop_strings = StopStrings(["END"])
        >>> [stop_strings.push(text) for text in ("the E", "N", "T", " END.")]
        ['the ', '', 'ENT', ' ']
        >>> stop_strings.is_stopped
        True
    """

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self.stop_texts: tuple[str, ...] = tuple(stop_texts)
        self.is_stopped: bool = False
        self._held_back = ""

    def push(self, text: str) -> str:
        """Add generated text, and return the text that can be printed because it is not part of a stop text.

        Text that could be the beginning of a stop text is held back until the next call. Text after a stop text is
        dropped.
        """
        if self.is_stopped:
            return ""
        if not self.stop_texts:
            return text

        text = self._held_back + text
        stop_positions = [text.find(stop_text) for stop_text in self.stop_texts if stop_text in text]
        if stop_positions:
            self._held_back = ""
            self.is_stopped = True
            return text[: min(stop_positions)]

        # The end of the text may be the beginning of a stop text.
        max_overlap = max(_overlap_length(text, stop_text) for stop_text in self.stop_texts)
        safe_length = len(text) - max_overlap
        self._held_back = text[safe_length:]
        return text[:safe_length]

    def finish(self) -> str:
        """Return the text that was held back. Call this method when no more text follows."""
        text = self._held_back
        self._held_back = ""
        return text


def _overlap_length(text: str, stop_text: str) -> int:
    """Return how many characters at the end of `text` are an incomplete beginning of `stop_text`.

    Example:
        >>> _overlap_length("the E", "END")
        1
    """
    max_length = min(len(stop_text) - 1, len(text))
    for length in range(max_length, 0, -1):
        if text.endswith(stop_text[:length]):
            return length
    return 0
