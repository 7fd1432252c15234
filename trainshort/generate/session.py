"""A stream at a terminal: text on standard output as it is made, everything else on standard error."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainshort.errors import InputError
from trainshort.generate.live import LiveLine
from trainshort.generate.sample import Token
from trainshort.generate.state import save_state
from trainshort.generate.streaming import Stream

STOPPED = 130


def say(message: str) -> None:
    print(f"trainshort: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Reach:
    """How far a model is known to be good: tokens, and the words that say so."""

    length: int
    words: str


@dataclass
class Session:
    """One `trainshort generate`."""

    stream: Stream
    reach: Reach | None = None
    save_to: Path | None = None
    save_every: int = 0
    """Tokens between two saves; 0 saves at the end only."""

    def run(self) -> int:
        """Make all samples; returns the exit code. A stop by Ctrl-C is an end like any other: saved, certified."""
        code = 0
        several = len(self.stream.samples) > 1
        texts = [""] * len(self.stream.samples)
        live = LiveLine(sys.stderr)
        try:
            with live:
                for token in self.stream:
                    if several:
                        texts[token.sample] += token.text
                    else:
                        self._show(token)
                    self._note(live)
        except KeyboardInterrupt:
            code = STOPPED
            if self.stream.torn:
                raise InputError(self._torn()) from None
        if several:
            for number, text in enumerate(texts, start=1):
                print(f"--- sample {number} ---\n{text}")
        else:
            print(flush=True)
        self.finish(live, "stopped" if code else None)
        return code

    def interact(self, ask: Callable[[str], str] = input) -> int:
        """Read a line, continue it, and so on: what was read or written is never read again."""
        live = LiveLine(sys.stderr)
        while True:
            try:
                line = ask("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                break
            if not line:
                continue
            self.stream.feed(line + "\n")
            try:
                with live:
                    for token in self.stream:
                        self._show(token)
                        self._note(live)
            except KeyboardInterrupt:
                if self.stream.torn:
                    raise InputError(self._torn()) from None
            print(flush=True)
        self.finish(live)
        return 0

    def finish(self, live: LiveLine, ended: str | None = None) -> None:
        """Save, and say what was made and what was lost."""
        if self.save_to is not None:
            save_state(self.stream, self.save_to)
            say(f"state saved to {self.save_to}; go on with --resume-state {self.save_to}")
        reasons = ended or ", ".join(sorted({sample.finished or "stopped" for sample in self.stream.samples}))
        say(f"{live.line(self.stream.context)} (ended by: {reasons})")
        say(self.stream.certificate)

    def _show(self, token: Token) -> None:
        sys.stdout.write(token.text)
        sys.stdout.flush()

    def _note(self, live: LiveLine) -> None:
        """After each token: the live line, the warning, the save that is due."""
        live.update(self.stream.context)
        if self.reach is not None and self.stream.context > self.reach.length:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the text stands in the middle of a line
            say(f"the context passes {self.reach.length:,} tokens: {self.reach.words}")
            self.reach = None  # said once
        if self.save_to is not None and self.save_every and live.tokens % self.save_every == 0:
            save_state(self.stream, self.save_to)

    def _torn(self) -> str:
        kept = f" {self.save_to} is as it was saved last." if self.save_to and self.save_to.exists() else ""
        return f"stopped in the middle of a token.{kept}"
