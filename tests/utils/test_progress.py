"""What a person sees: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

import io
import math

import pytest
from rich.console import Console

from trainshort.utils import terminal
from trainshort.utils.terminal import ProgressMeter, TrainingDisplay, format_duration, perplexity

UPDATE = {"step": 50, "loss": 2.0, "lr": 1e-3, "tokens_per_second": 12345.6}
VALID = {"step": 50, "valid_loss": 1.0}


def shown(records, *, terminal: bool, quiet: bool = False, step: int = 0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with TrainingDisplay(step, 100, quiet=quiet, console=console) as display:
        for record in records:
            display.show(record)
    return console.file.getvalue()


def test_a_terminal_shows_step_loss_perplexity_speed_rate_and_time_left():
    text = shown([UPDATE], terminal=True)
    for part in ("50/100", "loss 2.000", "ppl 7.389", "12,346 tokens/s", "lr 1.00e-03", "--:--"):
        assert part in text


def test_elsewhere_a_plain_line_comes_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with TrainingDisplay(0, 100, console=console) as display:
        for step in (10, 20, 30, 40, 100):
            now[0] += 4.0
            display.show(UPDATE | {"step": step})
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["0/100", "10/100", "40/100", "100/100"]
    assert lines[1] == "step 10/100  loss 2.000  ppl 7.389  12,346 tokens/s  lr 1.00e-03  36 s left"
    assert "\x1b" not in console.file.getvalue()


def test_validation_is_always_told():
    assert "step 50/100  valid loss 1.0000  ppl 2.718" in shown([VALID], terminal=False)
    assert "valid loss 1.0000" in shown([VALID], terminal=True)


def test_quiet_shows_nothing_but_notes():
    assert shown([UPDATE, VALID], terminal=True, quiet=True) == ""
    console = Console(file=io.StringIO(), force_terminal=False)
    TrainingDisplay(0, 100, quiet=True, console=console).note("[saved]")
    assert console.file.getvalue() == "trainshort: [saved]\n"


def test_perplexity_does_not_overflow():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == math.inf


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.1, "1 s"), (89, "89 s"), (400, "7 min"), (40_000, "11.1 h"), (4_000_000, "1,111.1 h")]
)
def test_a_time_is_told_in_one_form_however_long_it_is(seconds, told):
    assert format_duration(seconds) == told


def test_time_left_goes_by_the_pace_of_this_session(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with ProgressMeter(console) as meter:
        meter.start(1.0, 0.4)
        for amount in (0.0, 0.1, 0.1, 0.4):
            now[0] += 43_200.0
            meter.advance(amount, "1 of 2 models")
    told = ("40% done", "50% done, about 120.0 h left", "60% done, about 72.0 h left")
    assert console.file.getvalue().splitlines() == [f"  1 of 2 models: {one}" for one in told]
