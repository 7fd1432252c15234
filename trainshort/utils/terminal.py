"""Print messages, show progress, and react to Ctrl-C.

Text from models, files and path names is escaped before it is printed on a terminal. This module does not import torch.
The package rich is imported where it is used, because `trainshort --help` does not need it.
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

# All control characters except tab and newline, and surrogates. Surrogates stand for bytes of path
# names that are not UTF-8.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_control_characters(text: str) -> str:
    r"""Replace control characters by escape sequences, so that text from outside cannot control the terminal.

    For example, the four bytes that clear the screen become the seven characters `\x1b[2J`. Newlines, tabs and all
    printable characters stay.
    """

    def escape(match: re.Match[str]) -> str:
        return match[0].encode("unicode_escape", "surrogatepass").decode()

    return CONTROL_CHARACTERS.sub(escape, text)


def first_sentence_of(error: Exception) -> str:
    """Return the first sentence of an error message without its period, at most 240 characters.

    The result fits into parentheses inside another message. If the error has no message, the result is the name of
    the exception class.
    """
    text = re.sub(r"\s+", " ", str(error)).strip()
    sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
    return sentence[:240] or type(error).__name__


def print_status(message: str) -> None:
    """Print a message on standard error. Standard output is reserved for results."""
    print(f"trainshort: {escape_control_characters(message)}", file=sys.stderr, flush=True)


class _MessageHandler(logging.Handler):
    """Logging handler that prints each log message with `print_status`."""

    def emit(self, record: logging.LogRecord) -> None:
        print_status(record.getMessage())


@contextmanager
def show_log_messages() -> Iterator[None]:
    """Print the log messages of this package on standard error, until the block ends.

    The library only logs. The command line, and the processes that the command line starts, print the messages.
    """
    logger = logging.getLogger("trainshort")
    handler = _MessageHandler()
    original_level = logger.level
    original_propagate = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # A handler of the root logger would print each message a second time.
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(original_level)
        logger.propagate = original_propagate


def show_spinner(description: str | None) -> AbstractContextManager[object]:
    """Return a context manager that shows a spinner while its block runs.

    The spinner disappears when the block ends. No spinner is shown if standard error is not a terminal.

    Args:
        description: The text next to the spinner. None shows no spinner.
    """
    if description is None or not sys.stderr.isatty():
        return nullcontext()
    return new_console(stderr=True).status(escape_control_characters(description))


def escape_for_output(text: str) -> str:
    """Escape control characters if standard output is a terminal. Otherwise return `text` unchanged."""
    if sys.stdout.isatty():
        return escape_control_characters(text)
    return text


def print_line(message: str) -> None:
    """Print a line of a command's result on standard output."""
    print(escape_for_output(message), flush=True)


def new_console(**options: Any) -> "Console":
    """Create a rich console that prints square brackets literally.

    The console does not escape control characters. Escape text from outside with `escape_control_characters` first.

    Args:
        options: Arguments of `rich.console.Console`.
    """
    require_package("rich", "Showing progress and tables", "trainshort[train]")
    from rich.console import Console  # `trainshort --help` does not need rich.

    return Console(markup=False, **options)


# ---- stop on Ctrl-C and SIGTERM: a signal sets a flag, and loops read the flag between two steps

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised when a signal stopped the work and everything was saved.

    Attributes:
        code: The exit code that shells expect for the signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.code = 128 + signal_number


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Context manager: restore the handlers of SIGINT and SIGTERM when the block ends.

    A Python program can call a command of trainshort as a function. Afterwards, the program has its own signal handlers
    again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python does not allow other threads to set signal handlers.
        return
    original_handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in original_handlers.items():
            signal.signal(number, handler)


class StopRequest:
    """Context manager: record the first signal instead of stopping the process.

    A loop reads `number` after each step and saves its work if a signal has arrived. A second signal stops the process
    immediately. This is safe, because a checkpoint gets its final name only when it is complete.

    Args:
        process_ends: Whether the process ends after the block. If True, signals after the block are ignored, because
            everything is saved.

    Attributes:
        number: The number of the first signal, or 0 if no signal has arrived.
    """

    def __init__(self, *, process_ends: bool = False) -> None:
        self.number = 0
        self.process_ends = process_ends
        self._original_handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python does not allow other threads to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._original_handlers = {number: signal.signal(number, self._handle_signal) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, original_handler in self._original_handlers.items():
            handler = signal.SIG_IGN if self.process_ends else original_handler
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the number of the first signal, so that the run can be saved. Exit at once at the second signal."""
        if self.number:
            os._exit(128 + number)
        self.number = number
        # `print` is not allowed here, because the signal may have interrupted another call of `print`.
        message = f"\ntrainshort: {signal.Signals(number).name}: saving, then stopping. Repeat to stop immediately.\n"
        os.write(2, message.encode())


# ---- numbers and lists as text


def join_words(words: list[str]) -> str:
    """Join words with commas and "and": ["a", "b", "c"] becomes "a, b and c"."""
    if len(words) <= 1:
        return "".join(words)
    return ", ".join(words[:-1]) + " and " + words[-1]


def perplexity(loss: float) -> float:
    """Return the perplexity, which is e to the power of the loss. The result is infinite if it exceeds a float."""
    # e to the power of 710 is larger than the largest float.
    return math.exp(loss) if loss < 700 else math.inf


def format_duration(seconds: float) -> str:
    """Return a duration with a suitable unit.

    Example:
        >>> [format_duration(seconds) for seconds in (40, 400, 40_000)]
        ['40 s', '7 min', '11.1 h']
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:,.1f} h"


# ---- progress: a progress bar on a terminal, and a line of text every few seconds elsewhere

# Seconds between two lines if the output is not a terminal.
LOG_INTERVAL_SECONDS = 10.0


class ProgressMeter:
    """Show how much of a known amount of work is done.

    The unit of the work is chosen by the caller, for example tokens or bytes. On a terminal the meter shows a progress
    bar. Otherwise it prints a line every `LOG_INTERVAL_SECONDS` seconds.

    Args:
        console: The console for the output. None shows nothing.

    Attributes:
        line_prefix: Text at the start of each printed line.
        keeps_bar: Whether the progress bar stays on the screen after the work is done.
        total: The amount of work.
        first: The amount of work that was done before the meter was started.
        done: The amount of work that is done, including `first`.
        description: The part of the work that is being done.
    """

    line_prefix = "  "
    keeps_bar = False

    def __init__(self, console: "Console | None" = None) -> None:
        """Create a progress meter without work. Without a console, nothing is shown."""
        self.console = console or new_console(stderr=True, quiet=True)
        self.total = 0.0  # the amount of work
        self.first = 0.0  # the part of the work that was done before the start
        self.done = 0.0  # the part of the work that is done, including `first`
        self.description = "starting"
        self.start_time = time.monotonic()
        self.last_line_time = self.start_time
        self._bar: Progress | None = None  # None if the output is not a terminal.

    def columns(self) -> "tuple[ProgressColumn, ...]":
        """Return the columns of the progress bar."""
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        return (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )

    def __enter__(self) -> Self:
        """Show the progress bar, if the output is a terminal. Otherwise, lines are printed later."""
        if self.console.is_terminal and not self.console.quiet:
            from rich.progress import Progress

            self._bar = Progress(*self.columns(), console=self.console, transient=not self.keeps_bar)
            self._bar.start()
            total = self.total or None
            self._bar.add_task(self.description, total=total, completed=self.done)  # pyright: ignore[reportArgumentType]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def start(self, total: float, done: float = 0) -> None:
        """Start to count a new amount of work.

        Args:
            total: The amount of work.
            done: How much of `total` was done before.
        """
        self.total = total
        self.first = done
        self.done = done
        self.start_time = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._bar.task_ids[0], total=total, completed=done)  # pyright: ignore[reportArgumentType]

    def advance(self, amount: float, description: str | None = None) -> None:
        """Report that more work is done.

        Args:
            amount: The amount of work since the last call.
            description: The part of the work that is being done. None keeps the last description.
        """
        self.done += amount
        self.description = description or self.description
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, description=self.description)
        elif self.is_line_due():
            self.line(self.status_line())
            self.last_line_time = time.monotonic()

    def is_line_due(self) -> bool:
        """Return whether enough time has passed to print the next line."""
        is_unfinished = self.done < self.total
        seconds_since_last_line = time.monotonic() - self.last_line_time
        return is_unfinished and seconds_since_last_line >= LOG_INTERVAL_SECONDS

    def status_line(self) -> str:
        """Return a line such as "evaluating: 40% done, about 2 min left"."""
        line = f"{self.description}: {self.done / self.total:.0%} done"
        remaining = self.time_remaining()
        if remaining:
            line += f", about {remaining}"
        return line

    def time_remaining(self) -> str:
        """Return the estimated remaining time, such as "2 min left".

        The estimate is based on the speed since the meter was started. The result is an empty string if no work was
        done since then, or if all work is done.
        """
        # `first` is the amount of work that was done before the meter was started.
        if not self.first < self.done < self.total:
            return ""
        elapsed = time.monotonic() - self.start_time
        seconds_per_unit = elapsed / (self.done - self.first)
        return f"{format_duration(seconds_per_unit * (self.total - self.done))} left"

    def line(self, text: str) -> None:
        """Print a line. On a terminal the line appears above the progress bar."""
        self.console.print(self.line_prefix + text, highlight=False, markup=False, soft_wrap=True)


class TrainingDisplay(ProgressMeter):
    """Show the progress of training: the step, the loss and the speed.

    Args:
        step: The number of training steps that were done before.
        steps: The number of training steps at the end of training.
        quiet: Whether to print no numbers. Messages of `note` are printed in any case.
        board: A TensorBoard writer that gets all numbers, or None.
        console: The console for the output. The default is standard error.
    """

    line_prefix = ""
    keeps_bar = True

    def __init__(
        self, step: int, steps: int, *, quiet: bool = False, board: Any = None, console: "Console | None" = None
    ) -> None:
        super().__init__(console or new_console(stderr=True))
        self.start(total=steps, done=step)
        self.quiet = quiet
        self.board = board  # A TensorBoard writer, or None.
        self.description = ""
        self.last_line_time = -math.inf  # Print the first numbers as soon as they are known.

    def columns(self) -> "tuple[ProgressColumn, ...]":
        """Return the columns of the progress bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )

    def __enter__(self) -> Self:
        """Show the progress bar, if the output is a terminal. Otherwise, print a first line."""
        if not self.quiet:
            super().__enter__()
            if self._bar is None:
                # The first line with a loss may take minutes, so print a line without a loss now.
                self.line(f"step {self.done}/{self.total}  training")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self.board:
            self.board.close()

    def show(self, record: dict[str, float]) -> None:
        """Show one record of the metrics log.

        Args:
            record: The numbers of a training step or of a validation, as in `metrics.jsonl`.
        """
        step = int(record["step"])
        if self.board:  # The TensorBoard writer, if there is one.
            for name, value in record.items():
                if name not in ("step", "seconds"):
                    self.board.add_scalar(name, value, step)
        if self.quiet:
            return

        if "valid_loss" in record:
            loss = record["valid_loss"]
            self.line(f"step {step}/{self.total}  valid loss {loss:.4f}  ppl {perplexity(loss):.4g}")
            return

        loss = record["loss"]
        loss_text = f"loss {loss:.3f}  ppl {perplexity(loss):.4g}"
        speed_text = f"{record['tokens_per_second']:,.0f} tokens/s  lr {record['lr']:.2e}"
        self.advance(step - self.done, f"{loss_text}  {speed_text}")

    def is_line_due(self) -> bool:
        """Return whether to print a line now. The last step is always printed."""
        is_last_step = self.done == self.total
        return super().is_line_due() or is_last_step

    def status_line(self) -> str:
        """Return a line such as "step 10/600  loss 5.120  ppl 167.3  9,000 tokens/s  lr 2.00e-03  2 min left"."""
        return f"step {self.done}/{self.total}  {self.description}  {self.time_remaining()}".rstrip()

    def note(self, message: str) -> None:
        """Print a message. The message is also printed if `quiet` is True."""
        self.line(f"trainshort: {message}")
