"""What every analysis gets and returns, and how it scores: given tokens in, losses of the last few out.

Most questions here are of one kind: how does the loss of the same targets change when only their context changes? So
losses are compared target by target, and the intervals are those of the differences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainshort.errors import InputError
from trainshort.evaluate.sweep import BATCH_TOKENS
from trainshort.evaluate.target import ModelTarget, Target
from trainshort.model import TransformerLM
from trainshort.registry import Registry

SCORED = 32
"""Tokens at the end of a probe whose losses are measured."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Lab:
    """A model, a text, and how thoroughly to look."""

    target: Target
    tokens: np.ndarray
    trained_at: int
    lengths: tuple[int, ...] = ()
    """Lengths asked for; an analysis has its own when there are none."""
    samples: int = 64
    seed: int = 0
    batch_tokens: int = BATCH_TOKENS

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def multiples(self, *factors: int) -> list[int]:
        """The lengths asked for, else these multiples of the training length as far as text and model go."""
        wanted = self.lengths or tuple(self.trained_at * factor for factor in factors)
        longest = min(len(self.tokens) // 2, self.target.longest or len(self.tokens))
        fitting = sorted({length for length in wanted if length <= longest})
        if not fitting or (self.lengths and len(fitting) < len(set(wanted))):
            raise InputError(
                f"the text has {len(self.tokens):,} tokens and the model reads "
                f"{'any length' if self.target.longest is None else f'up to {self.target.longest:,}'}; an analysis at "
                f"length {max(wanted):,} needs at least twice as many. Give a longer text or shorter --lengths."
            )
        return fitting

    def model(self, what: str) -> TransformerLM:
        """The model itself, for analyses that look inside."""
        if not isinstance(self.target, ModelTarget):
            raise InputError(f"{what} looks inside trainshort's own models, and {self.target.name} is none of them.")
        return self.target.model


@dataclass(frozen=True)
class Analysis:
    """A question: what it is called, how it is answered, how the answer is shown."""

    question: str
    run: Callable[[Lab], dict[str, Any]]
    """The answer as plain JSON; "summary" is its one sentence."""
    table: Callable[[dict[str, Any]], Group]


analyses: Registry[Analysis] = Registry("analysis")


def score_rows(target: Target, rows: np.ndarray, scored: int, batch_tokens: int = BATCH_TOKENS) -> np.ndarray:
    """Losses of the last `scored` tokens of each row, (rows, scored); a row's first token is context only."""
    inputs, targets = (
        torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in (rows[:, :-1], rows[:, 1:])
    )
    size = max(1, batch_tokens // inputs.shape[1])
    found = []
    with target.at(None, inputs.shape[1]):
        for start in range(0, len(rows), size):
            some, wanted = (x[start : start + size].to(target.device) for x in (inputs, targets))
            found.append(target.token_nll(some, wanted, inputs.shape[1] - scored).double().cpu().numpy())
    return np.concatenate(found)


def probe_ends(lab: Lab, longest: int) -> np.ndarray:
    """Where probes end: evenly spread over the text, each with `longest` tokens and one more before it."""
    room = len(lab.tokens) - (longest + 1)
    count = max(1, min(lab.samples, room // SCORED))
    return longest + 1 + np.linspace(0, room, count).astype(np.int64)


def probes(lab: Lab, ends: np.ndarray, length: int) -> np.ndarray:
    """For each end the `length` + 1 tokens before it: one row per probe, as `score_rows` reads them."""
    return np.stack([np.asarray(lab.tokens[end - length - 1 : end]) for end in ends]).astype(np.int64)


def mean_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float] | None:
    """Bootstrap interval of the mean of one number per probe; None for fewer than two probes."""
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def compare(losses: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """How much higher the others' losses are, probe by probe."""
    difference = others.mean(axis=1) - losses.mean(axis=1)
    return {"loss": float(others.mean()), "rise": float(difference.mean()), "interval": mean_interval(difference)}


def interval_text(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def titled(title: str, table: Table) -> Group:
    """A table under its title, which may be wider than the table."""
    return Group(Text(title, style="italic"), table)
