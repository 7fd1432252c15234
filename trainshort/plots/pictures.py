"""Figures as PNG and SVG files, by matplotlib."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainshort.errors import InputError
from trainshort.files import read_object, replacing, write_whole
from trainshort.plots.figures import Figure, breadth, extent, round_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

KINDS = ("png", "svg")
MARK = "#5c6670"
SIZES = {"headline": (9.0, 4.8)}


DIGESTS = "pictures.json"
"""What the pictures in a folder were drawn from, so that only changed ones are drawn again."""


def draw_all(figures: list[Figure], folder: Path) -> None:
    """Write <name>.png and <name>.svg of each figure that is not there yet as it should be."""
    path = folder / DIGESTS
    try:
        known = read_object(path)
    except InputError:
        known = {}
    code = Path(__file__).read_bytes()
    wanted = {figure.name: hashlib.sha256(repr(figure).encode() + code).hexdigest() for figure in figures}
    for figure in figures:
        there = all((folder / f"{figure.name}.{kind}").exists() for kind in KINDS)
        if not there or known.get(figure.name) != wanted[figure.name]:
            draw([figure], folder / figure.name, SIZES.get(figure.name, (7.0, 4.2)))
    write_whole(path, json.dumps(wanted, indent=1) + "\n")


def draw(figures: Sequence[Figure], path: Path, size: tuple[float, float] = (7.0, 4.2)) -> list[Path]:
    """Write `path`.png and `path`.svg, several figures beside one another."""
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
        written = [path.with_name(f"{path.name}.{kind}") for kind in KINDS]
        for file in written:
            with replacing(file) as partial:
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
        at = right if series.right and right else axes
        style = (
            {"linewidth": 0.9, "linestyle": ":"} if series.faint else {"linewidth": 2, "marker": "o", "markersize": 4}
        )
        if len(series.x) == 1:
            style |= {"marker": "D", "markersize": 8, "linestyle": "none"}
        at.plot(series.x, series.y, color=series.color, label=_label(series.name), **style)
        if series.low:
            at.fill_between(series.x, series.low, series.high, color=series.color, alpha=0.13, linewidth=0)
    for one in [axes, right] if right else [axes]:
        if figure.y_log:
            one.set_yscale("log")
            _plain_log(one.yaxis, extent(figure, right=one is right))
    axes.spines["right"].set_visible(right is not None)
    if right is not None:
        right.set_ylabel(figure.right_label, fontsize=9, color="#666666")
        right.tick_params(colors="#666666", labelsize=9)
        right.spines["top"].set_visible(False)
    if figure.x_log:
        axes.set_xscale("log", base=2)
        _plain_log(axes.xaxis, breadth(figure))
    if figure.ticks:
        axes.set_xticks([at for at, _ in figure.ticks], [text.replace("<br>", "\n") for _, text in figure.ticks])
        axes.set_xticks([], minor=True)
    for at, word in figure.marks:
        axes.axvline(at, color=MARK, linestyle="--", linewidth=1)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -2), "textcoords": "offset points", "va": "top"}
        axes.annotate(word, (at, 1.0), fontsize=9, color=MARK, **place)
    for at, shade, why in figure.absent:
        axes.plot([at], [0.96], "x", color=shade, transform=axes.get_xaxis_transform())
        axes.annotate(why, (at, 0.92), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    shown = axes.get_legend_handles_labels()[0]
    if len(shown) > 1 or (shown and figure.named):
        axes.legend(handles=shown, frameon=False, fontsize=9)


def _plain_log(axis: "Axis", ends: tuple[float, float] | None) -> None:
    """Plain numbers on a log axis, at round places between `ends` if they are given."""
    from matplotlib.ticker import FuncFormatter

    if ends and len(ticks := round_ticks(*ends)) > 1:
        axis.set_ticks(ticks)
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _label(name: str) -> str:
    """matplotlib hides labels that begin with an underscore."""
    return re.sub(r"^_+", "", name) or "run"
