"""The person at the terminal: what they are told, how far the work is, and how they stop it. No torch.

Text that comes from anywhere can do nothing here but be read. rich is imported where it is used: --help needs none.
"""

import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from trainshort.utils.optional import require_package

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except tab and line end, and surrogates (bytes of path names that are not UTF-8)."""


def escape_control_characters(text: str) -> str:
    r"""Text from a model, a file or a path name with everything that a terminal would obey shown escaped.

    A clear-screen of four bytes becomes the seven characters \x1b[2J; line ends, tabs and every script stay.
    """
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def first_sentence(error: Exception) -> str:
    """What a library says of an error, as far as its first full stop, to stand in parentheses."""
    line = re.sub(r"\s+", " ", str(error)).strip()
    return re.split(r"\.(?: |$)", line, maxsplit=1)[0][:240] or type(error).__name__


def print_status(message: str) -> None:
    """Tell the user something beside the result, on standard error."""
    print(f"trainshort: {escape_control_characters(message)}", file=sys.stderr, flush=True)


class _MessageHandler(logging.Handler):
    """Print each log message as `say` does, on what is standard error at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print_status(record.getMessage())


@contextmanager
def show_log_messages() -> Iterator[None]:
    """Print the log messages of this package on standard error, until the block ends.

    The library only logs. The command line, and the processes that the command line starts, print the messages.
    """
    logger = logging.getLogger("trainshort")
    handler = _MessageHandler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # A handler of the root logger would print each message a second time.
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def show_spinner(what: str | None) -> AbstractContextManager[object]:
    """Show at a terminal what is waited for, if anything is, until it is over: nothing of it stays, so a refusal is one
    sentence."""
    return (
        new_console(stderr=True).status(escape_control_characters(what))
        if what and sys.stderr.isatty()
        else nullcontext()
    )


def escape_for_output(text: str) -> str:
    """Text as standard output gets it: as it is, but harmless at a terminal."""
    return escape_control_characters(text) if sys.stdout.isatty() else text


def print_line(message: str) -> None:
    """A line of a command's result, on standard output."""
    print(escape_for_output(message), flush=True)


def new_console(**options: Any) -> "Console":
    """Create a rich console that prints square brackets as they are.

    The console does not escape control characters. Pass names from outside through `shown` or `printable` first.
    """
    require_package("rich", "Showing progress and tables", "trainshort[train]")
    from rich.console import Console  # `trainshort --help` does not need rich.

    return Console(markup=False, **options)


# ---- stopping: Ctrl-C and SIGTERM as a request that a loop answers between two steps

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Training was told to stop by a signal, and everything is saved. `code` is the exit code shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.code = 128 + number


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
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


# ---- numbers as people read them


def join_words(words: list[str]) -> str:
    """a, b and c"""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def perplexity(loss: float) -> float:
    """e to the loss; infinity where that is larger than any float."""
    return math.exp(loss) if loss < 700 else math.inf


def format_duration(seconds: float) -> str:
    """A time as people say it.

    40 → 40 s      400 → 7 min      40000 → 11.1 h      100000 → 27.8 h
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:,.1f} h"


# ---- progress: a live line at a terminal, an occasional plain line elsewhere. Nothing is read back from here

LOG_INTERVAL_SECONDS = 10.0
"""Time between two lines when the output is not a terminal."""


class ProgressMeter:
    """Counts work that is done against work that is expected, in any unit, and says so on `console`."""

    margin, stays = "  ", False
    """What plain lines begin with, and whether the live line is still seen when the work is done."""

    def __init__(self, console: "Console | None" = None) -> None:
        self.console = console or new_console(stderr=True, quiet=True)
        self.total = self.first = self.done = 0.0
        self.what = "starting"
        self.began = self.told = time.monotonic()
        self._bar: Progress | None = None

    def columns(self) -> "tuple[ProgressColumn, ...]":
        """What the live line is made of."""
        from rich import progress as rich

        word = rich.TextColumn
        work = (rich.SpinnerColumn(), word("{task.description}"), rich.BarColumn(bar_width=30))
        gone = (word("{task.percentage:>3.0f} %"), rich.TimeElapsedColumn(), word("gone,"))
        return (*work, *gone, rich.TimeRemainingColumn(compact=True), word("left"))

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            from rich import progress as rich

            self._bar = rich.Progress(*self.columns(), console=self.console, transient=not self.stays)
            self._bar.start()
            self._bar.add_task(self.what, total=self.total or None, completed=self.done)  # pyright: ignore[reportArgumentType]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def start(self, total: float, done: float = 0) -> None:
        """Forget what was counted; so much is to be done, of which some was done before."""
        self.total, self.first, self.done, self.began = total, done, done, time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0], total=total, completed=done)  # pyright: ignore[reportArgumentType]

    def advance(self, amount: float, what: str | None = None) -> None:
        """So much more is done; `what` names the part that it belonged to."""
        self.done += amount
        self.what = what or self.what
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, description=self.what)
        elif self.is_due():
            self.line(self.status_line())
            self.told = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time for a plain line."""
        return self.done < self.total and time.monotonic() - self.told >= LOG_INTERVAL_SECONDS

    def status_line(self) -> str:
        """What a plain line says."""
        left = self.time_remaining()
        return f"{self.what}: {self.done / self.total:.0%} done{left and f', about {left}'}"

    def time_remaining(self) -> str:
        """Time left, from the pace since `expect`; empty when there is none yet, or nothing is left."""
        if not self.first < self.done < self.total:
            return ""
        pace = (time.monotonic() - self.began) / (self.done - self.first)
        return f"{format_duration(pace * (self.total - self.done))} left"

    def line(self, text: str) -> None:
        self.console.print(self.margin + text, highlight=False, markup=False, soft_wrap=True)


class TrainingDisplay(ProgressMeter):
    """What a person sees of training: the records of metrics.jsonl as they come, on the console unless `quiet`, on a
    TensorBoard writer if given."""

    margin, stays = "", True

    def __init__(
        self, step: int, steps: int, *, quiet: bool = False, board: Any = None, console: "Console | None" = None
    ) -> None:
        super().__init__(console or new_console(stderr=True))
        self.start(steps, step)
        self.quiet, self.board = quiet, board
        self.what, self.told = "", -math.inf  # the first numbers are told at once

    def columns(self) -> "tuple[ProgressColumn, ...]":
        from rich import progress as rich

        steps = (rich.TextColumn("step"), rich.MofNCompleteColumn(), rich.BarColumn(bar_width=20))
        return (*steps, rich.TextColumn("{task.description}"), rich.TimeRemainingColumn(compact=True))

    def __enter__(self) -> Self:
        if not self.quiet:
            super().__enter__()
            if self._bar is None:  # the first line of numbers may be minutes away
                self.line(f"step {self.done}/{self.total}  training")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self.board:
            self.board.close()

    def show(self, record: dict[str, float]) -> None:
        """One record of metrics.jsonl."""
        step, valid = int(record["step"]), "valid_loss" in record
        if self.board:
            for name, value in record.items():
                if name not in ("step", "seconds"):
                    self.board.add_scalar(name, value, step)
        if self.quiet:
            return
        loss = record["valid_loss" if valid else "loss"]
        told = f"loss {loss:.{4 if valid else 3}f}  ppl {perplexity(loss):.4g}"
        if valid:
            self.line(f"step {step}/{self.total}  valid {told}")
        else:
            pace = f"{record['tokens_per_second']:,.0f} tokens/s  lr {record['lr']:.2e}"
            self.advance(step - self.done, f"{told}  {pace}")

    def is_due(self) -> bool:
        return super().is_due() or self.done == self.total

    def status_line(self) -> str:
        return f"step {self.done}/{self.total}  {self.what}  {self.time_remaining()}".rstrip()

    def note(self, message: str) -> None:
        """What is not a number; shown even when quiet."""
        self.line(f"trainshort: {message}")
