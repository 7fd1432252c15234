"""Generate tokens one by one.

Example:
    for token in trainshort.stream(model, "Once upon", tokenizer=tokenizer, tokens=100, temperature=0.8):
        print(token.text, end="")

Prompts are processed in chunks, and several samples form one batch. The model processes each token once.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from trainshort.data.tokenizers.base import Tokenizer
from trainshort.errors import InputError
from trainshort.generate.config import GenerateConfig
from trainshort.generate.fast_decode import FastDecoder
from trainshort.generate.sampling import Sample, Token
from trainshort.model.cache import BatchedCache, BoundedCache, Cache, Certificate, WindowCache
from trainshort.model.transformer import TransformerLM

Prompt = str | Sequence[int] | np.ndarray | Tensor
"""A prompt: a text, or the token ids of a text."""


class TokenStream:
    """An iterator over the generated tokens of one or several samples.

    In every step, each sample that has not ended generates one token. The iterator ends when all samples have ended.
    `feed` can then add text, after which the iterator continues.

    Args:
        model: The model. It must be a causal model.
        config: The settings of the generation.
        tokenizer: The tokenizer of the model. Without a tokenizer, prompts must be token ids.

    Attributes:
        samples: The samples, in the order in which they were added.
        pending_tokens: Tokens that are generated but not returned yet.
        is_broken: Whether the stream was interrupted while a token was processed. The stream cannot continue then.
        on_prompt_chunk: A function that is called after each processed chunk of a prompt.

    Raises:
        InputError: If the model is not causal, or if the tokenizer is missing or does not fit to the model.
    """

    def __init__(self, model: TransformerLM, config: GenerateConfig, tokenizer: Tokenizer | None = None) -> None:
        model.config.require_causal("Text generation")
        if config.stop and tokenizer is None:
            raise InputError("Stop texts require a tokenizer, because they are searched in the generated text.")
        if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
            raise InputError(
                f"Expected a tokenizer with at most {model.config.vocab_size:,} tokens, the vocabulary size of the "
                f"model, got {tokenizer.vocab_size:,}. Use the tokenizer of the model."
            )
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.samples: list[Sample] = []
        self.pending_tokens: list[Token] = []
        self.is_broken: bool = False
        self.on_prompt_chunk: Callable[[], None] | None = None
        self._fast_decoder = FastDecoder.create(model)

    def begin(self) -> Sample:
        """Add an empty sample (a text that the model continues). Call `feed` before the sample is continued.

        Returns:
            The sample. Its seed is the seed of the settings plus the index of the sample.
        """
        cache = new_cache(self.model, self.config)
        vocab_size = self.model.config.vocab_size
        sample = Sample(cache, vocab_size, self.config, self.tokenizer, index=len(self.samples))
        self.samples.append(sample)
        return sample

    def add(self, prompt: Prompt) -> Sample:
        """Add a sample that continues a prompt.

        Raises:
            InputError: If the prompt is invalid (see `encode_prompt`).
        """
        tokens = self.encode_prompt(prompt)
        sample = self.begin()
        sample.feed(tokens)
        return sample

    def feed(self, prompt: Prompt, sample: int = 0) -> None:
        """Append text to a sample. The model does not process the previous text again.

        Args:
            prompt: The text or the token ids.
            sample: The index of the sample.
        """
        self.samples[sample].feed(self.encode_prompt(prompt))
        # Tokens that are generated but not returned yet are part of the requested number of tokens.
        num_pending = sum(token.sample == sample for token in self.pending_tokens)
        self.samples[sample].set_num_generated(num_pending)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            InputError: If the prompt is a text and there is no tokenizer, or if the token ids are not a flat list.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("A text prompt requires a tokenizer. Give a tokenizer, or give token ids.")
            return self.tokenizer.encode(prompt).tolist()
        if isinstance(prompt, Tensor | np.ndarray):
            tokens = prompt.tolist()
        else:
            tokens = list(prompt)
        if any(not isinstance(token, int) for token in tokens):
            raise InputError("Expected a prompt that is a text or a flat list of token ids, got other values.")
        return tokens

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        """Return the next generated token.

        If all generated tokens are returned, first generate one token for each sample that has not ended.
        """
        if not self.pending_tokens:
            active_samples = [sample for sample in self.samples if sample.finished is None]
            if not active_samples:
                raise StopIteration
            self._step(active_samples)
        return self.pending_tokens.pop(0)

    def _step(self, active_samples: list[Sample]) -> None:
        """Process the prompts of the samples, and generate the next token of each sample.

        Ctrl-C takes effect after the tokens are added to `pending_tokens`, so no token is lost.
        """
        for sample in active_samples:
            self._read_prompt(sample)
        with self._defer_interrupt():
            logits = self._next_logits(active_samples)  # (samples, vocabulary)
            self.pending_tokens = [
                sample.accept(sample_logits) for sample, sample_logits in zip(active_samples, logits, strict=True)
            ]

    def _read_prompt(self, sample: Sample) -> None:
        """Process all unread tokens of a sample except the last unread token, chunk by chunk.

        `_next_logits` processes the last unread token.
        """
        while len(sample.unread) > 1:
            chunk_size = min(self.config.chunk, len(sample.unread) - 1)
            with self._defer_interrupt():  # Ctrl-C takes effect after the chunk.
                self._process_tokens([sample], chunk_size)
            if self.on_prompt_chunk is not None:
                self.on_prompt_chunk()

    def _next_logits(self, active_samples: list[Sample]) -> Float[Tensor, "samples vocabulary"]:
        """Process the last unread token of each sample, and return the logits of the next token of each sample."""
        # The decoder contains addresses of the weights. If the weights were moved, a new decoder is needed.
        if self._fast_decoder is not None and not self._fast_decoder.is_current():
            self._fast_decoder = FastDecoder.create(self.model)

        if len(active_samples) == 1 and self._fast_decoder is not None:
            sample = active_samples[0]
            logits = self._fast_decoder.logits(sample.unread[0], sample.cache)
            if logits is not None:
                sample.unread.clear()
                return logits

        # The fast decoder supports a single sample, and not all models and caches.
        hidden = self._process_tokens(active_samples, 1)
        return self.model.vocabulary.log_scores(hidden)

    def _process_tokens(self, samples: list[Sample], count: int) -> Float[Tensor, "samples width"]:
        """Run the model on the next unread tokens of each sample.

        Args:
            samples: The samples, as one batch.
            count: The number of tokens of each sample.

        Returns:
            The hidden state of the last token of each sample.
        """
        device = next(self.model.parameters()).device
        tokens = torch.tensor([sample.unread[:count] for sample in samples], device=device)
        caches = [sample.cache for sample in samples]
        cache = caches[0] if len(caches) == 1 else BatchedCache(caches)
        hidden = self.model.hidden(tokens, cache=cache)
        for sample in samples:
            del sample.unread[:count]
        return hidden[:, -1]

    @contextmanager
    def _defer_interrupt(self) -> Iterator[None]:
        """Context manager: delay Ctrl-C until the end of the `with` block. A second Ctrl-C interrupts the block.

        The block processes tokens. If the block is interrupted or fails, some layers may have processed a token that
        other layers have not processed. The stream is then marked as broken. An `InputError` does not break the stream,
        because an `InputError` is raised before a token is processed.

        Raises:
            KeyboardInterrupt: At the end of the block, if Ctrl-C was pressed once.
            InputError: If the stream is broken.
        """
        if self.is_broken:
            raise InputError(
                "The stream was interrupted while a token was processed, and cannot continue. Create a new stream."
            )
        was_interrupted = False

        def handle_interrupt(signal_number: int, frame: FrameType | None) -> None:
            nonlocal was_interrupted
            if was_interrupted:
                raise KeyboardInterrupt
            was_interrupted = True

        # Python runs signal handlers in the main thread only. In other threads, Ctrl-C cannot interrupt the block.
        is_main_thread = threading.current_thread() is threading.main_thread()
        previous_handler = signal.signal(signal.SIGINT, handle_interrupt) if is_main_thread else None
        self.is_broken = True
        try:
            with torch.inference_mode():
                yield
            self.is_broken = False
        except InputError:
            self.is_broken = False
            raise
        finally:
            if is_main_thread:
                signal.signal(signal.SIGINT, previous_handler)
        if was_interrupted:
            raise KeyboardInterrupt

    @property
    def caches(self) -> list[Cache]:
        """Return the KV cache of each sample."""
        return [sample.cache for sample in self.samples]

    @property
    def context(self) -> int:
        """Return the length of the longest sample in tokens."""
        return max((sample.context for sample in self.samples), default=0)

    @property
    def memory(self) -> str:
        """Return a text with the size of the caches, such as "cache 5.3 MB, 8.4% of a full cache"."""
        config = self.model.config
        element_size = next(self.model.parameters()).element_size()
        # Each layer stores one key and one value per key-value head.
        bytes_per_token = 2 * config.layers * config.key_heads * config.head_width * element_size
        full_size = bytes_per_token * sum(cache.length for cache in self.caches)
        size = sum(cache.bytes for cache in self.caches)
        text = f"cache {size / 1e6:,.1f} MB"
        if size < full_size:
            text += f", {size / full_size:.1%} of a full cache"
        return text

    @property
    def certificate(self) -> str:
        """Return one line with the error certificate of all samples.

        The certificate is an upper bound on the softmax mass (sum of attention weights) that was dropped from any
        query, because keys were evicted from the cache or skipped by an attention backend.
        """
        bounded_caches = [cache for cache in self.caches if isinstance(cache, BoundedCache)]
        if bounded_caches:
            return str(_total_certificate(bounded_caches))
        if self.config.mode == "window":
            return "error certificate: none (mode 'window' gives no bound on the error, mode 'bounded' does)"

        skipped_mass = self._max_skipped_mass()
        if skipped_mass == 0:
            return "error certificate: 0 (no key was evicted or skipped)"
        tolerance = self.model.config.tolerance
        return f"error certificate: {skipped_mass:.1e} for the prompt (tolerance {tolerance:.0e}, no key was evicted)"

    def _max_skipped_mass(self) -> float:
        """Return an upper bound on the softmax mass that an attention backend skipped for any query."""
        skipped_masses = []
        for cache in self.caches:
            for layer in cache.layers:
                if layer.max_skipped_mass is not None:
                    skipped_masses.append(layer.max_skipped_mass)
        if not skipped_masses:
            return 0.0
        return float(torch.stack(skipped_masses).max())


def _total_certificate(caches: Sequence[BoundedCache]) -> Certificate:
    """Return the certificate of all bounded caches together.

    A bounded cache evicts distant keys. Its certificate is an upper bound on the softmax mass (sum of attention
    weights) of the evicted keys.
    """
    total = caches[0].certificate
    for cache in caches[1:]:
        total += cache.certificate
    return total


def stream(model: TransformerLM, prompt: Prompt, *, tokenizer: Tokenizer | None = None, **settings: Any) -> TokenStream:
    """Continue a prompt with a model.

    Args:
        model: The model. It is switched to evaluation mode.
        prompt: A text or token ids.
        tokenizer: The tokenizer of the model. It is required if the prompt is a text.
        settings: The settings of `GenerateConfig`, such as `tokens`, `temperature` and `mode`.

    Returns:
        An iterator over the generated tokens.

    Raises:
        InputError: If a setting or the prompt is invalid, or if the model does not support the mode.

    Example:
        >>> for token in stream(model, "Once upon", tokenizer=tokenizer, tokens=100, temperature=0.8):
        ...     print(token.text, end="")
    """
    return stream_batch(model, [prompt], tokenizer=tokenizer, **settings)


def stream_batch(
    model: TransformerLM, prompts: Sequence[Prompt], *, tokenizer: Tokenizer | None = None, **settings: Any
) -> TokenStream:
    """Continue several prompts as one batch. The prompts may have different lengths.

    Args:
        model: The model. It is switched to evaluation mode.
        prompts: The prompts, each a text or token ids.
        tokenizer: The tokenizer of the model. It is required if a prompt is a text.
        settings: The settings of `GenerateConfig`, such as `tokens`, `temperature` and `mode`.

    Returns:
        An iterator over the generated tokens. The field `sample` of a token is the index of its prompt.

    Raises:
        InputError: If there is no prompt, if a setting or a prompt is invalid, or if the model does not support the
            mode.
    """
    if not prompts:
        raise InputError("Expected at least one prompt, got none.")
    token_stream = TokenStream(model.eval(), GenerateConfig.parse(settings), tokenizer)
    for prompt in prompts:
        token_stream.add(prompt)
    return token_stream


def new_cache(model: TransformerLM, config: GenerateConfig) -> Cache:
    """Create the empty KV cache of one sequence.

    The mode "full" keeps the keys of all tokens. "bounded" evicts distant keys, and bounds the error of the attention.
    "window" keeps the last `window` tokens, and the first `sinks` tokens of the text.

    Raises:
        InputError: If the model does not support the mode of the settings.
    """
    check_mode(model, config)
    match config.mode:
        case "full":
            return Cache()
        case "bounded":
            return BoundedCache(tolerance=config.tolerance, has_decay_bias=model.position.uses_cumulative_decay)
        case "window":
            assert config.window is not None
            return WindowCache(window=config.window, sinks=config.sinks)


def check_mode(model: TransformerLM, config: GenerateConfig) -> None:
    """Check that a model supports the mode of the KV cache.

    Raises:
        InputError: If the model does not support the mode.
    """
    position = model.position
    position_name = model.config.position

    if config.mode == "bounded" and not position.has_error_bound():
        raise InputError(
            f"Mode 'bounded' requires ALiBi without clamped distances, or FoX. The {position_name} positions of this "
            "model give no upper bound on the attention to distant tokens. "
            "Use mode 'full', or mode 'window' with a window."
        )
    if config.mode == "bounded" and model.config.nope_every is not None:
        raise InputError(
            "Mode 'bounded' requires ALiBi or FoX in every layer, but this model has layers without positions "
            "(nope_every). Use mode 'full', or mode 'window' with a window."
        )
    if config.mode == "window" and position.is_content_dependent():
        raise InputError(
            f"Mode 'window' does not support {position_name} positions, because their bias depends on the whole text. "
            "Use mode 'full'."
        )
    if config.sinks and position.rotates():
        raise InputError(
            f"Sinks do not support {position_name} positions, because the cached keys are rotated by their true "
            "positions. Use mode 'window' without sinks, or mode 'full'."
        )
    if config.sinks and model.config.window is not None:
        raise InputError(
            f"Sinks do not support this model. It was trained with a window of {model.config.window} tokens and never "
            "attends to the first tokens of a long text. Use mode 'window' without sinks."
        )
