"""A figure as plain data, drawn twice: by plotly in the page, by matplotlib into files."""

from dataclasses import dataclass, field
from pathlib import Path

COLORS = {
    "alibi": "#2f7ed8",
    "sinusoidal": "#d9593d",
    "rotary": "#2f9e5b",
    "t5": "#9a63d6",
    "none": "#8a8f98",
    "learned": "#c79a2b",
}
"""Readable on white and on near-black."""
OTHERS = ("#c2458b", "#4aa3a2", "#a0752f", "#6f7bd0", "#7d9b2a")


@dataclass(frozen=True)
class Series:
    """One line, or one group of bars."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    color: str
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """A band around the line, such as a confidence interval; empty for none."""
    faint: bool = False
    """Thin and dotted, for orientation: the paper's curve."""
    right: bool = False
    """Measured on the right axis."""


@dataclass(frozen=True)
class Figure:
    """What is drawn, and the same in words."""

    name: str
    title: str
    alt: str
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    right_label: str = ""
    kind: str = "lines"
    x_log: bool = False
    y_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    note: str = ""
    sources: tuple[Path, ...] = field(default=())


def color(position: str, index: int = 0) -> str:
    return COLORS.get(position, OTHERS[index % len(OTHERS)])
