"""Tests of progress displays: a progress bar on a terminal, lines of text elsewhere, and nothing if quiet."""

import io
import math

import pytest
from rich.console import Console

from trainshort.utils import terminal
from trainshort.utils.terminal import ProgressMeter, TrainingDisplay, format_duration, perplexity

STEP_RECORD = {"step": 50, "loss": 2.0, "lr": 1e-3, "tokens_per_second": 12345.6}
VALIDATION_RECORD = {"step": 50, "valid_loss": 1.0}


def display_records(records, *, terminal: bool, quiet: bool = False, step: int = 0) -> str:
    """Return what a `TrainingDisplay` prints for some records."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with TrainingDisplay(step, 100, quiet=quiet, console=console) as display:
        for record in records:
            display.show(record)
    return console.file.getvalue()


def test_terminal_shows_step_loss_perplexity_speed_and_learning_rate():
    text = display_records([STEP_RECORD], terminal=True)
    for part in ("50/100", "loss 2.000", "ppl 7.389", "12,346 tokens/s", "lr 1.00e-03", "--:--"):
        assert part in text


def test_lines_are_printed_periodically_if_output_is_not_a_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with TrainingDisplay(0, 100, console=console) as display:
        for step in (10, 20, 30, 40, 100):
            now[0] += 4.0
            display.show(STEP_RECORD | {"step": step})
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["0/100", "10/100", "40/100", "100/100"]
    assert lines[1] == "step 10/100  loss 2.000  ppl 7.389  12,346 tokens/s  lr 1.00e-03  36 s left"
    assert "\x1b" not in console.file.getvalue()


def test_validation_loss_is_always_shown():
    assert "step 50/100  valid loss 1.0000  ppl 2.718" in display_records([VALIDATION_RECORD], terminal=False)
    assert "valid loss 1.0000" in display_records([VALIDATION_RECORD], terminal=True)


def test_quiet_display_shows_only_notes():
    assert display_records([STEP_RECORD, VALIDATION_RECORD], terminal=True, quiet=True) == ""
    console = Console(file=io.StringIO(), force_terminal=False)
    TrainingDisplay(0, 100, quiet=True, console=console).note("[saved]")
    assert console.file.getvalue() == "trainshort: [saved]\n"


def test_perplexity_does_not_overflow():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == math.inf


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1, "1 s"), (89, "89 s"), (400, "7 min"), (40_000, "11.1 h"), (4_000_000, "1,111.1 h")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_remaining_time_is_based_on_the_current_speed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with ProgressMeter(console) as meter:
        meter.start(1.0, 0.4)
        for amount in (0.0, 0.1, 0.1, 0.4):
            now[0] += 43_200.0
            meter.advance(amount, "1 of 2 models")
    assert console.file.getvalue().splitlines() == [
        "  1 of 2 models: 40% done",
        "  1 of 2 models: 50% done, about 120.0 h left",
        "  1 of 2 models: 60% done, about 72.0 h left",
    ]
