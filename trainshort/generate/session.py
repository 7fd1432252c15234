"""The command `trainshort generate`: write text to standard output, and all other messages to standard error."""

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

INTERRUPTED_EXIT_CODE = 130
"""The exit code of a command that Ctrl-C has stopped."""

UPDATE_SECONDS = 0.2
"""The time between two updates of the status line."""

# Control sequences of terminals.
SAVE_CURSOR = "\x1b7"
RESTORE_CURSOR = "\x1b8"
CURSOR_UP = "\x1b[1A"
CLEAR_LINE = "\x1b[2K"
DIM = "\x1b[2m"
RESET_STYLE = "\x1b[0m"
RESET_SCROLL_REGION = "\x1b[r"


class StatusLine:
    """Context manager: show the progress in the last row of a terminal.

    The last row is excluded from scrolling, so the generated text never overwrites it.

    Args:
        terminal: The output stream. If the stream is not a terminal, nothing is shown.

    Attributes:
        tokens: The number of generated tokens.
        seconds: The time that was spent on generating tokens.
    """

    def __init__(self, terminal: TextIO | None) -> None:
        is_terminal = terminal is not None and terminal.isatty()
        self.terminal = terminal if is_terminal else None  # None hides the status line.
        self.tokens = 0
        self.seconds = 0.0
        self._last_token_time = 0.0
        self._last_update_time = 0.0
        self._rows = 0  # the height of the terminal

    def __enter__(self) -> Self:
        """Reserve the last row of the terminal for the status line."""
        self._last_token_time = time.monotonic()
        if self.terminal:
            self._rows = os.get_terminal_size(self.terminal.fileno()).lines
            # The newline makes room: if the cursor is in the last row, the text scrolls up by one row.
            # The escape sequence limits scrolling to the rows above the last row.
            scroll_above_last_row = f"\x1b[1;{self._rows - 1}r"
            self._write("\n" + SAVE_CURSOR + scroll_above_last_row + RESTORE_CURSOR + CURSOR_UP)
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the status line, and let the complete terminal scroll again."""
        self._write(SAVE_CURSOR + RESET_SCROLL_REGION + self._move_to_last_row() + CLEAR_LINE + RESTORE_CURSOR)

    def show_prompt_progress(self, stream: TokenStream) -> None:
        """Show how many tokens of the prompts are not processed yet. Several samples are generated as one batch."""
        unread = sum(len(sample.unread) for sample in stream.samples)
        # A single unread token needs no progress: it is processed in the step that generates the first token.
        if unread > 1:
            self._show(f"reading the prompt, {unread:,} tokens left")

    def update(self, context: int) -> None:
        """Count a generated token, and update the status line if enough time has passed.

        Args:
            context: The length of the text in tokens: the prompt and the generated tokens.
        """
        self.tokens += 1
        now = time.monotonic()
        self.seconds += now - self._last_token_time
        self._last_token_time = now
        if now - self._last_update_time > UPDATE_SECONDS:
            self._show(self.format_progress(context))

    def format_progress(self, context: int) -> str:
        """Return a text such as "30 tokens, 181.2 tokens/s, context 37"."""
        tokens_per_second = self.tokens / max(self.seconds, 1e-9)
        return f"{self.tokens:,} tokens, {tokens_per_second:.1f} tokens/s, context {context:,}"

    def _show(self, text: str) -> None:
        """Replace the text of the status line."""
        self._last_update_time = time.monotonic()
        dimmed_text = DIM + text + RESET_STYLE
        self._write(SAVE_CURSOR + self._move_to_last_row() + CLEAR_LINE + dimmed_text + RESTORE_CURSOR)

    def _move_to_last_row(self) -> str:
        """Return the control sequence that moves the cursor to the last row."""
        return f"\x1b[{self._rows};1H"

    def _write(self, text: str) -> None:
        """Write text to the terminal at once. Do nothing if there is no terminal."""
        if self.terminal:
            self.terminal.write(text)
            self.terminal.flush()


@dataclass(frozen=True)
class EvaluatedLength:
    """The largest length at which a model is known to work well.

    Attributes:
        length: The length in tokens.
        explanation: A text that explains where the length comes from. It is part of a warning.
    """

    length: int
    explanation: str


@dataclass
class Session:
    """One run of the command `trainshort generate`.

    Args:
        stream: The token stream to which the prompts were added.
        evaluated_length: The largest length at which the model is known to work well. A warning is printed when the
            text becomes longer. None turns the warning off.
    """

    stream: TokenStream
    evaluated_length: EvaluatedLength | None = None

    def __post_init__(self) -> None:
        """Create the status line, which shows the progress of the prompt and of the generation."""
        self.status_line = StatusLine(sys.stderr)
        self.stream.on_prompt_chunk = lambda: self.status_line.show_prompt_progress(self.stream)

    def run(self) -> int:
        """Generate all samples and print them.

        Returns:
            The exit code of the command.
        """
        if len(self.stream.samples) == 1:
            is_complete = self._generate_until_done(self._print_token)
            print(flush=True)
        else:
            is_complete = self._generate_batch()
        if is_complete:
            self.finish()
            return 0
        self.finish("stopped")
        return INTERRUPTED_EXIT_CODE

    def _generate_batch(self) -> bool:
        """Generate several samples, and print all samples at the end.

        Returns:
            Whether all samples have ended. False if Ctrl-C stopped the generation.
        """
        texts = [""] * len(self.stream.samples)

        def collect_text(token: Token) -> None:
            texts[token.sample] += token.text

        is_complete = self._generate_until_done(collect_text)
        for number, text in enumerate(texts, start=1):
            print(f"--- sample {number} ---\n{escape_for_output(text)}")
        return is_complete

    def interact(self) -> int:
        """Read lines from standard input and continue each line, until Ctrl-D or Ctrl-C is pressed at the input.

        All lines and their continuations form one text. The model does not process previous text again.

        Returns:
            The exit code of the command.
        """
        print_status("Type a line to continue it. Ctrl-C stops the generated text, Ctrl-D exits.")
        while True:
            try:
                line = input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                break
            if not line:
                continue
            self.stream.feed(line + "\n")
            self._generate_until_done(self._print_token)
            print(flush=True)
        self.finish()
        return 0

    def _generate_until_done(self, handle_token: Callable[[Token], None]) -> bool:
        """Generate tokens until all samples have ended.

        Args:
            handle_token: A function that is called with each token.

        Returns:
            Whether all samples have ended. False if Ctrl-C stopped the generation.

        Raises:
            InputError: If Ctrl-C was pressed twice and the stream cannot continue.
        """
        try:
            with self.status_line:
                self.status_line.show_prompt_progress(self.stream)
                for token in self.stream:
                    handle_token(token)
                    self.status_line.update(self.stream.context)
                    self._warn_about_length()
        except KeyboardInterrupt:
            if self.stream.is_broken:
                raise InputError("Stopped while a token was processed.") from None
            return False
        return True

    def finish(self, reason: str | None = None) -> None:
        """Print a summary: the number of tokens, why the text ended, the cache size, and the error certificate.

        Args:
            reason: Why the text ended. None uses the reason of each sample, such as "length".
        """
        if reason is None:
            sample_reasons = {sample.finished or "stopped" for sample in self.stream.samples}
            reason = ", ".join(sorted(sample_reasons))
        progress = self.status_line.format_progress(self.stream.context)
        print_status(f"{progress} (ended by: {reason}); {self.stream.memory}")
        print_status(self.stream.certificate)

    def _print_token(self, token: Token) -> None:
        """Print the text of a token without waiting for further tokens."""
        sys.stdout.write(escape_for_output(token.text))
        sys.stdout.flush()

    def _warn_about_length(self) -> None:
        """Print a warning once if the text is longer than the lengths at which the model was evaluated."""
        evaluated_length = self.evaluated_length  # None if no evaluation is known, or after the warning
        if evaluated_length is None or self.stream.context <= evaluated_length.length:
            return
        if sys.stderr.isatty():
            # The cursor may be in the middle of a line of generated text. The warning starts on a new line.
            print(file=sys.stderr)
        print_status(f"the context passes {evaluated_length.length:,} tokens: {evaluated_length.explanation}")
        self.evaluated_length = None
