"""A stream at a terminal: text on standard output as it is made, everything else on standard error."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TextIO

from trainshort.errors import InputError
from trainshort.generate.sampling import Token
from trainshort.generate.streaming import TokenStream
from trainshort.utils.terminal import escape_for_output, print_status

STOPPED = 130
EVERY = 0.2
"""Seconds between two updates: quick enough to follow, too slow to cost anything."""


class StatusLine:
    """Does nothing where `terminal` is none, so that files and pipes get text only.

    The bottom row is taken out of the scrolling region; text that is written meanwhile never meets the line.
    """

    def __init__(self, terminal: TextIO | None) -> None:
        self.terminal = terminal if terminal is not None and terminal.isatty() else None
        self.tokens = 0
        self.seconds = 0.0  # spent inside; a pause between two uses does not count
        self._last = self._shown = 0.0
        self._rows = 0

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        if self.terminal:
            self._rows = os.get_terminal_size(self.terminal.fileno()).lines
            self._write(f"\n\x1b7\x1b[1;{self._rows - 1}r\x1b8\x1b[1A")
        return self

    def __exit__(self, *error: object) -> None:
        self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def reading(self, stream: TokenStream) -> None:
        """Some of a prompt was read, or none yet."""
        unread = sum(len(sample.unread) for sample in stream.samples)
        if unread > 1:
            self._show(f"reading the prompt, {unread:,} tokens left")

    def update(self, context: int) -> None:
        """One more token was made."""
        self.tokens += 1
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now
        if now - self._shown > EVERY:
            self._show(self.line(context))

    def _show(self, line: str) -> None:
        self._shown = time.monotonic()
        self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[2m{line}\x1b[0m\x1b8")

    def line(self, context: int) -> str:
        return f"{self.tokens:,} tokens, {self.tokens / max(self.seconds, 1e-9):.1f} tokens/s, context {context:,}"

    def _write(self, text: str) -> None:
        if self.terminal:
            self.terminal.write(text)
            self.terminal.flush()


@dataclass(frozen=True)
class EvaluatedLength:
    """How far a model is known to be good: tokens, and the words that say so."""

    length: int
    words: str


@dataclass
class Session:
    """One `trainshort generate`."""

    stream: TokenStream
    reach: EvaluatedLength | None = None

    def __post_init__(self) -> None:
        self.live = StatusLine(sys.stderr)
        self.stream.on_read = lambda: self.live.reading(self.stream)

    def run(self) -> int:
        """Make all samples; returns the exit code."""
        if len(self.stream.samples) == 1:
            whole = self._generate_until_done(self._show)
            print(flush=True)
        else:
            texts = [""] * len(self.stream.samples)

            def collect(token: Token) -> None:
                texts[token.sample] += token.text

            whole = self._generate_until_done(collect)
            for number, text in enumerate(texts, start=1):
                print(f"--- sample {number} ---\n{escape_for_output(text)}")
        self.finish(None if whole else "stopped")
        return 0 if whole else STOPPED

    def interact(self) -> int:
        """Read a line, continue it, and so on: what was read or written is never read again."""
        print_status("type a line to have it continued; Ctrl-C ends a text, Ctrl-D leaves.")
        while True:
            try:
                line = input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                break
            if not line:
                continue
            self.stream.feed(line + "\n")
            self._generate_until_done(self._show)
            print(flush=True)
        self.finish()
        return 0

    def _generate_until_done(self, take: Callable[[Token], None]) -> bool:
        """Make tokens until all samples have ended. Return False if Ctrl-C ended them."""
        try:
            with self.live:
                self.live.reading(self.stream)
                for token in self.stream:
                    take(token)
                    self._note()
        except KeyboardInterrupt:
            if self.stream.torn:
                raise InputError("stopped in the middle of a token.") from None
            return False
        return True

    def finish(self, ended: str | None = None) -> None:
        """Print a summary: the number of tokens, why the text ended, and the error certificate."""
        reasons = ended or ", ".join(sorted({sample.finished or "stopped" for sample in self.stream.samples}))
        print_status(f"{self.live.line(self.stream.context)} (ended by: {reasons}); {self.stream.memory}")
        print_status(self.stream.certificate)

    def _show(self, token: Token) -> None:
        sys.stdout.write(escape_for_output(token.text))
        sys.stdout.flush()

    def _note(self) -> None:
        """After each token, update the live line. Print the warning about the context length once."""
        self.live.update(self.stream.context)
        if self.reach is not None and self.stream.context > self.reach.length:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the text stands in the middle of a line
            print_status(f"the context passes {self.reach.length:,} tokens: {self.reach.words}")
            self.reach = None  # said once
