"""A figure as plain data, drawn by plotly in a page and by matplotlib into files."""

import colorsys
import hashlib
import math
from collections.abc import Sequence
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
"""For lines that are no method's, such as engines, or the second line of one."""


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
    marks: tuple[tuple[float, str], ...] = ()
    """Upright lines with a word at them, such as the training length."""
    named: bool = False
    """Whether a single line is named too."""
    absent: tuple[tuple[float, str, str], ...] = ()
    """Places where a line has no point: where, which colour, why."""
    note: str = ""
    sources: tuple[Path, ...] = field(default=())


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers for a log axis: even steps where the ends are near, 1-2-5 steps where they are far.

    67 … 110 → 70 80 90 100 110 120        18 … 400 → 20 50 100 200
    """
    if high > 4 * low:
        kept = [m * 10.0**k for k in range(-3, 7) for m in (1, 2, 5)]
    else:
        rough = (high - low) / 5 or low / 10
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= rough)
        kept = [round(k * step, 10) for k in range(max(1, int(low / step)), int(high / step) + 2)]
    return [tick for tick in kept if 0.9 * low <= tick <= 1.1 * high]


def extent(figure: "Figure", *, right: bool) -> tuple[float, float] | None:
    """Smallest and largest value on one of the two vertical axes."""
    values = [y for one in figure.series if one.right == right for y in (*one.y, *one.low, *one.high)]
    finite = [value for value in values if math.isfinite(value) and value > 0]
    return (min(finite), max(finite)) if finite else None


def breadth(figure: "Figure") -> tuple[float, float] | None:
    """Smallest and largest place on the horizontal axis."""
    places = [x for one in figure.series for x in one.x if isinstance(x, int | float) and x > 0]
    return (min(places), max(places)) if places else None


def spaced(places: Sequence[float], most: int = 10) -> tuple[tuple[float, str], ...]:
    """Ticks at these places of a log axis, thinned so that their numbers do not run into one another."""
    kept: list[float] = []
    span = math.log(max(places) / min(places)) or 1.0
    for place in sorted(places):
        if not kept or math.log(place / kept[-1]) >= 0.99 * span / (most - 1):
            kept.append(place)
    return tuple((place, f"{place:,.10g}") for place in kept)


def color(method: str) -> str:
    """A position method's colour: the paper's have one each, any other one that follows from its name.

    A hue by the name's digest, as dark as the others, so that it is the same in every figure on every machine.
    """
    if method in COLORS:
        return COLORS[method]
    digest = hashlib.sha256(method.encode()).digest()
    hue, lightness = int.from_bytes(digest[:2]) / 65_536, 0.40 + 0.15 * digest[2] / 255
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, 0.55))
