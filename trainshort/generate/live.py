"""The live line: tokens per second and context length, at the bottom of a terminal while text scrolls above it."""

import os
import time
from types import TracebackType
from typing import Self, TextIO

EVERY = 0.2
"""Seconds between two updates: quick enough to follow, too slow to cost anything."""


class LiveLine:
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

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def update(self, context: int) -> None:
        """One more token was made."""
        self.tokens += 1
        now = time.monotonic()
        self.seconds += now - self._last
        self._last = now
        if self.terminal and now - self._shown > EVERY:
            self._shown = now
            self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[2m{self.line(context)}\x1b[0m\x1b8")

    def line(self, context: int) -> str:
        return f"{self.tokens:,} tokens, {self.tokens / max(self.seconds, 1e-9):.1f} tokens/s, context {context:,}"

    def _write(self, text: str) -> None:
        if self.terminal:
            self.terminal.write(text)
            self.terminal.flush()
