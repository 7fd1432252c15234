"""Tokens as they are made, from Python:

    for token in trainshort.stream(model, "Once upon", tokenizer=tokenizer, tokens=100, temperature=0.8):
        print(token.text, end="")

A stream can be fed more text and asked for its certificate at any time. The prompt is read in chunks,
the samples of a batch side by side; every token is read exactly once.
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
from trainshort.model.cache import BatchedCache, BoundedCache, Cache, WindowCache
from trainshort.model.transformer import TransformerLM

Prompt = str | Sequence[int] | np.ndarray | Tensor


class TokenStream:
    """Iterates over tokens of one or several samples, in turn; ends when all have ended."""

    def __init__(self, model: TransformerLM, config: GenerateConfig, tokenizer: Tokenizer | None = None) -> None:
        model.config.require_causal("Text generation")
        if config.stop and tokenizer is None:
            raise InputError("stop texts need a tokenizer, because they are looked for in the text; give one.")
        if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model only {model.config.vocab_size:,}; "
                "use the tokenizer the model was trained with."
            )
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.one_row = FastDecoder.create(model)
        self.samples: list[Sample] = []
        self.torn = False
        self.waiting: list[Token] = []  # made in the last step, not yet handed out
        self.on_read: Callable[[], None] | None = None  # called after each chunk of a prompt

    def begin(self) -> Sample:
        """One more sample, with its own seed; it wants to be fed before it is continued."""
        cache, vocabulary = new_cache(self.model, self.config), self.model.config.vocab_size
        sample = Sample(cache, vocabulary, self.config, self.tokenizer, len(self.samples))
        self.samples.append(sample)
        return sample

    def add(self, prompt: Prompt) -> Sample:
        """One more sample, with its own prompt and seed."""
        tokens = self.encode_prompt(prompt)
        sample = self.begin()
        sample.feed(tokens)
        return sample

    def feed(self, prompt: Prompt, sample: int = 0) -> None:
        """More text for a sample to continue; what it has read or made stays read."""
        self.samples[sample].feed(self.encode_prompt(prompt))
        made = sum(token.sample == sample for token in self.waiting)
        self.samples[sample].count(made)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("a prompt in words needs a tokenizer; give one, or give token numbers.")
            return self.tokenizer.encode(prompt).tolist()
        tokens = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else list(prompt)
        if any(not isinstance(token, int) for token in tokens):
            raise InputError("a prompt is a text or a flat list of token numbers.")
        return tokens

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if not self.waiting:
            active = [sample for sample in self.samples if sample.finished is None]
            if not active:
                raise StopIteration
            self._step(active)
        return self.waiting.pop(0)

    def _step(self, active: list[Sample]) -> None:
        """Make the next token of every sample that goes on. An interrupt that waited finds them handed over already."""
        for sample in active:
            while len(sample.unread) > 1:
                size = min(self.config.chunk, len(sample.unread) - 1)
                with self._defer_interrupt():
                    self._prefill([sample], size)
                if self.on_read is not None:
                    self.on_read()
        with self._defer_interrupt():
            scores = self._next_logits(active)
            self.waiting = [sample.accept(row) for sample, row in zip(active, scores, strict=True)]

    def _next_logits(self, active: list[Sample]) -> Float[Tensor, "samples vocabulary"]:
        """Scores of each sample's next token, after its newest."""
        if self.one_row is not None and not self.one_row.is_current():
            self.one_row = FastDecoder.create(self.model)
        if len(active) == 1 and self.one_row is not None:
            scores = self.one_row.logits(active[0].unread[0], active[0].cache)
            if scores is not None:
                active[0].unread.clear()
                return scores
        return self.model.vocabulary.log_scores(self._prefill(active, 1))

    def _prefill(self, samples: list[Sample], size: int) -> Float[Tensor, "samples width"]:
        """Read the next `size` tokens of each sample; the hidden state after the last."""
        device = next(self.model.parameters()).device
        tokens = torch.tensor([sample.unread[:size] for sample in samples], device=device)
        caches = [sample.cache for sample in samples]
        hidden = self.model.hidden(tokens, cache=caches[0] if len(caches) == 1 else BatchedCache(caches))
        for sample in samples:
            del sample.unread[:size]
        return hidden[:, -1]

    @contextmanager
    def _defer_interrupt(self) -> Iterator[None]:
        """Inside, the first Ctrl-C waits until the end; the second comes through at once.

        A cache that has read half a token is of no use to anybody: whatever stops it all the same leaves the stream
        marked as torn. Python delivers signals to the main thread only; elsewhere there is nothing to hold back.
        """
        if self.torn:
            raise InputError(
                "this stream was interrupted in the middle of a token and cannot continue. Create a new stream."
            )
        main, waiting = threading.current_thread() is threading.main_thread(), False

        def hold(number: int, frame: FrameType | None) -> None:
            nonlocal waiting
            if waiting:
                raise KeyboardInterrupt
            waiting = True

        before = signal.signal(signal.SIGINT, hold) if main else None
        self.torn = True
        try:
            with torch.inference_mode():
                yield
            self.torn = False
        except InputError:  # refused before anything was read
            self.torn = False
            raise
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
        if waiting:
            raise KeyboardInterrupt

    @property
    def caches(self) -> list[Cache]:
        return [sample.cache for sample in self.samples]

    @property
    def context(self) -> int:
        """Tokens read, of the longest sample."""
        return max((sample.context for sample in self.samples), default=0)

    @property
    def memory(self) -> str:
        """What the caches hold, and how much that is of what all that was read would take."""
        held, config = sum(cache.bytes for cache in self.caches), self.model.config
        token = 2 * config.layers * config.key_heads * config.head_width * next(self.model.parameters()).element_size()
        whole = token * sum(cache.length for cache in self.caches)
        share = f", {held / whole:.1%} of a full one" if whole > held else ""
        return f"cache {held / 1e6:,.1f} MB{share}"

    @property
    def certificate(self) -> str:
        """One line on what was forgotten or left out so far, over all samples."""
        bounded = [cache.certificate for cache in self.caches if isinstance(cache, BoundedCache)]
        if bounded:
            return str(sum(bounded[1:], bounded[0]))
        if self.config.mode == "window":
            return "error certificate: none, a window forgets without proof (mode bounded proves)"
        left_out = [layer.left_out for cache in self.caches for layer in cache.layers if layer.left_out is not None]
        mass = float(torch.stack(left_out).max()) if left_out else 0.0
        if mass == 0:
            return "error certificate: 0, nothing was forgotten or left out"
        of = f"(tolerance {self.model.config.tolerance:.0e})"
        return f"error certificate: {mass:.1e}, left out while reading {of}; nothing was forgotten"


def stream(model: TransformerLM, prompt: Prompt, *, tokenizer: Tokenizer | None = None, **settings: Any) -> TokenStream:
    """Continue a prompt; `settings` are those of GenerateConfig (tokens, temperature, mode, ...)."""
    return stream_batch(model, [prompt], tokenizer=tokenizer, **settings)


def stream_batch(
    model: TransformerLM, prompts: Sequence[Prompt], *, tokenizer: Tokenizer | None = None, **settings: Any
) -> TokenStream:
    """Continue several prompts side by side, of any lengths; `token.sample` says whose a token is."""
    if not prompts:
        raise InputError("there is no prompt; give at least one.")
    made = TokenStream(model.eval(), GenerateConfig.parse(settings), tokenizer)
    for prompt in prompts:
        made.add(prompt)
    return made


# ---- which cache a mode means, and which models it fits: one that cannot keep its promise is refused, with why


def new_cache(model: TransformerLM, config: GenerateConfig) -> Cache:
    """An empty cache for one sequence."""
    check_mode(model, config)
    match config.mode:
        case "full":
            return Cache()
        case "bounded":
            return BoundedCache(tolerance=config.tolerance, clocked=model.position.uses_cumulative_decay)
        case "window":
            assert config.window is not None
            return WindowCache(window=config.window, sinks=config.sinks)


def check_mode(model: TransformerLM, config: GenerateConfig) -> None:
    position, name = model.position, model.config.position
    if config.mode == "bounded" and not position.has_error_bound():
        raise InputError(
            f"mode 'bounded' needs ALiBi, not clamped, or FoX: {name} gives no bound here on what far tokens can "
            "weigh, so nothing can be forgotten with a promise. Use mode 'full', or mode 'window' with a window."
        )
    if config.mode == "bounded" and model.config.nope_every is not None:
        raise InputError(
            "mode 'bounded' needs ALiBi or FoX in every layer: layers without positions (nope_every) look back "
            "without end. Use mode 'full', or mode 'window' with a window."
        )
    if config.mode == "window" and position.is_content_dependent():
        raise InputError(f"mode 'window' forgets keys that {name} goes on counting. Use mode 'full'.")
    if config.sinks and position.rotates():
        raise InputError(
            f"sinks count distances inside the cache, and {name} keys are stored turned by their true position. "
            "Use mode 'window' without sinks, or mode 'full'."
        )
    if config.sinks and model.config.window is not None:
        raise InputError(
            f"this model was trained with a window of {model.config.window}, and never looks back to the first tokens; "
            "use mode 'window' without sinks."
        )
