"""A figure as plain data, drawn by plotly in a page and by matplotlib into files."""

import colorsys
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainshort.errors import InputError
from trainshort.utils.io import atomic_replace, read_json_object, write_atomic
from trainshort.utils.optional import has_package, require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

log = logging.getLogger("trainshort.plots")

COLORS = {
    "alibi": "#2f7ed8",
    "sinusoidal": "#d9593d",
    "rotary": "#2f9e5b",
    "t5": "#9a63d6",
    "none": "#8a8f98",
    "learned": "#c79a2b",
}
"""Readable on white and on near-black."""
MIN_COLOR_DISTANCE = 25.0
"""How far any other method's colour stays from each of these, in CIE L*a*b*; they are at least 37 from one another."""
XYZ = ((0.434, 0.376, 0.190), (0.213, 0.715, 0.072), (0.018, 0.109, 0.873))
"""Shares of linear red, green and blue in CIE's X, Y and Z, where white is 1, 1, 1."""
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
    is_reference: bool = False
    """Thin and dotted, for orientation: the paper's curve."""
    uses_right_axis: bool = False
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
    vertical_lines: tuple[tuple[float, str], ...] = ()
    """Upright lines with a word at them, such as the training length."""
    shows_single_name: bool = False
    """Whether a single line is named too."""
    missing_points: tuple[tuple[float, str, str], ...] = ()
    """Places where a line has no point: where, which colour, why."""
    note: str = ""
    sources: tuple[Path, ...] = ()


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


def choose_log_ticks(figure: Figure, axis: Literal["x", "y", "right"]) -> list[float]:
    """Round numbers for an axis of a figure; none where it would be one, or where bars have names."""
    upright = (
        y for one in figure.series if one.uses_right_axis == (axis == "right") for y in (*one.y, *one.low, *one.high)
    )
    places = (x for one in figure.series for x in one.x if not isinstance(x, str))
    shown = [at for at in (places if axis == "x" else upright) if math.isfinite(at) and at > 0]
    ticks = round_ticks(min(shown), max(shown)) if shown else []
    return ticks if len(ticks) > 1 else []


def thin_ticks(places: Sequence[float], most: int = 10) -> tuple[tuple[float, str], ...]:
    """Ticks at these places of a log axis, thinned so that their numbers do not run into one another."""
    kept: list[float] = []
    span = math.log(max(places) / min(places)) or 1.0
    for place in sorted(places):
        if not kept or math.log(place / kept[-1]) >= 0.99 * span / (most - 1):
            kept.append(place)
    return tuple((place, f"{place:,.10g}") for place in kept)


def method_color(method: str) -> str:
    """A position method's colour: the paper's have one each, any other one that follows from its name.

    A hue by the name's digest, as dark as the others, so that it is the same in every figure on every machine; by the
    digest's digest, and so on, while it could be taken for one of the paper's.
    """
    if method in COLORS:
        return COLORS[method]
    digest = hashlib.sha256(method.encode()).digest()
    while True:
        hue, lightness = int.from_bytes(digest[:2]) / 65_536, 0.40 + 0.15 * digest[2] / 255
        shade = "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, 0.55))
        if all(math.dist(to_lab(shade), to_lab(named)) >= MIN_COLOR_DISTANCE for named in COLORS.values()):
            return shade
        digest = hashlib.sha256(digest).digest()


def to_lab(shade: str) -> tuple[float, float, float]:
    """A colour in CIE L*a*b*, where equal distances look equally different."""
    linear = [(int(shade[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    x, y, z = (sum(w * part for w, part in zip(row, linear, strict=True)) ** (1 / 3) for row in XYZ)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


IMAGE_FORMATS = ("png", "svg")
MARK = "#5c6670"
SIZES = {"headline": (9.0, 4.8)}
DIGESTS = "pictures.json"
"""What the pictures in a folder were drawn from, so that only changed ones are drawn again."""


def draw_changed_figures(figures: list[Figure], folder: Path) -> None:
    """Write <name>.png and <name>.svg of each figure that is not there yet as it should be."""
    path = folder / DIGESTS
    try:
        known = read_json_object(path)
    except InputError:
        known = {}
    code = Path(__file__).read_bytes()
    wanted = {figure.name: hashlib.sha256(repr(figure).encode() + code).hexdigest() for figure in figures}
    for figure in figures:
        there = all((folder / f"{figure.name}.{kind}").exists() for kind in IMAGE_FORMATS)
        if not there or known.get(figure.name) != wanted[figure.name]:
            draw_figures([figure], folder / figure.name, SIZES.get(figure.name, (7.0, 4.2)))
    write_atomic(path, json.dumps(wanted, indent=1) + "\n")


def can_draw_figures() -> bool:
    """Return whether figures can be drawn. If matplotlib is missing, log that the figure is skipped."""
    if has_package("matplotlib"):
        return True
    log.warning(
        "The figure was skipped, because drawing it requires matplotlib. "
        "Install it with: pip install 'trainshort[report]'"
    )
    return False


def draw_figures(figures: Sequence[Figure], path: Path, size: tuple[float, float] = (7.0, 4.2)) -> list[Path]:
    """Write `path`.png and `path`.svg, several figures beside one another."""
    require_package("matplotlib", "Drawing a figure", "trainshort[report]")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 10, "axes.spines.top": False, "svg.fonttype": "none", "text.parse_math": False}
    with plt.rc_context(style):
        canvas, panels = plt.subplots(1, len(figures), figsize=size, layout="constrained", squeeze=False)
        for axes, figure in zip(panels[0], figures, strict=True):
            (_bars if figure.kind == "bars" else _lines)(axes, figure)
            axes.set_title(figure.title, loc="left", fontsize=11, fontweight="bold")
            axes.set_xlabel(figure.x_label)
            axes.set_ylabel(figure.y_label)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # the places are found; the second file need not look for them again
        written = [path.with_name(f"{path.name}.{kind}") for kind in IMAGE_FORMATS]
        for file in written:
            with atomic_replace(file) as partial:
                canvas.savefig(partial, format=file.suffix[1:], dpi=160)
        plt.close(canvas)
    return written


def _bars(axes: "Axes", figure: Figure) -> None:
    for series in figure.series:
        bars = axes.bar([str(x) for x in series.x], series.y, color=series.color)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=9)
    axes.spines["right"].set_visible(False)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _lines(axes: "Axes", figure: Figure) -> None:
    right = axes.twinx() if figure.right_label else None
    for series in figure.series:
        at = right if series.uses_right_axis and right else axes
        style = (
            {"linewidth": 0.9, "linestyle": ":"}
            if series.is_reference
            else {"linewidth": 2, "marker": "o", "markersize": 4}
        )
        if len(series.x) == 1:
            style |= {"marker": "D", "markersize": 8, "linestyle": "none"}
        label = series.name.lstrip("_") or "run"  # matplotlib hides labels that begin with an underscore
        at.plot(series.x, series.y, color=series.color, label=label, **style)
        if series.low and len(series.x) == 1:
            reach = [[series.y[0] - series.low[0]], [series.high[0] - series.y[0]]]
            at.errorbar(series.x, series.y, yerr=reach, color=series.color, capsize=4, linestyle="none")
        elif series.low:
            at.fill_between(series.x, series.low, series.high, color=series.color, alpha=0.13, linewidth=0)
    for one in [axes, right] if right else [axes]:
        if figure.y_log:
            one.set_yscale("log")
            _plain_log(one.yaxis, choose_log_ticks(figure, "right" if one is right else "y"))
    axes.spines["right"].set_visible(right is not None)
    if right is not None:
        right.set_ylabel(figure.right_label, fontsize=9, color="#666666")
        right.tick_params(colors="#666666", labelsize=9)
        right.spines["top"].set_visible(False)
    if figure.x_log:
        axes.set_xscale("log", base=2)
        _plain_log(axes.xaxis, choose_log_ticks(figure, "x"))
    if figure.ticks:
        axes.set_xticks([at for at, _ in figure.ticks], [text.replace("<br>", "\n") for _, text in figure.ticks])
        axes.set_xticks([], minor=True)
    for at, word in figure.vertical_lines:
        axes.axvline(at, color=MARK, linestyle="--", linewidth=1)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -2), "textcoords": "offset points", "va": "top"}
        axes.annotate(word, (at, 1.0), fontsize=9, color=MARK, **place)
    for at, shade, why in figure.missing_points:
        axes.plot([at], [0.96], "x", color=shade, transform=axes.get_xaxis_transform())
        axes.annotate(why, (at, 0.92), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    shown = axes.get_legend_handles_labels()[0]
    if len(shown) > 1 or (shown and figure.shows_single_name):
        axes.legend(handles=shown, frameon=False, fontsize=9)


def _plain_log(axis: "Axis", ticks: list[float]) -> None:
    """Plain numbers on a log axis, at these places if there are some."""
    from matplotlib.ticker import FuncFormatter

    if ticks:
        axis.set_ticks(ticks)
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
