"""Ctrl-C and SIGTERM as a request that the training loop answers between two steps."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Training was told to stop by a signal, and everything is saved. `code` is the exit code shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


@contextmanager
def handlers_kept() -> Iterator[None]:
    """The handlers of both signals are afterwards what they were: for commands called by a program that goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """While entered, the first signal is remembered, the second ends the process at once.

    At once is safe: a checkpoint that is being written has no name yet. With `last`, nothing follows but the end of the
    process: signals that come after leaving find everything saved, and change nothing any more.
    """

    def __init__(self, *, last: bool = False) -> None:
        self.number = 0
        self.last = last
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.last else handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        # Not print: the signal may have come in the middle of one.
        text = f"\ntrainshort: {signal.Signals(number).name}: saving, then stopping; once more stops at once.\n"
        os.write(2, text.encode())
