"""Line and bar figures as plain data, and functions that draw them with matplotlib.

The report also draws the same figures with plotly (report/plotly_figures.py).
"""

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
"""The colors of the position methods of the paper. They are readable on white and on black backgrounds."""

OTHERS = ("#c2458b", "#4aa3a2", "#a0752f", "#6f7bd0", "#7d9b2a")
"""Further colors, for lines that belong to no position method, or for the second line of a method."""

MARK = "#5c6670"
"""The color of vertical lines, such as the line at the training length."""

MIN_COLOR_DISTANCE = 25.0
"""The smallest distance (in CIE L*a*b*) of a computed color to the colors in `COLORS`. These differ by at least 37."""

# The rows convert linear red, green and blue to the CIE coordinates X, Y and Z. White is (1, 1, 1).
RGB_TO_XYZ = ((0.434, 0.376, 0.190), (0.213, 0.715, 0.072), (0.018, 0.109, 0.873))


@dataclass(frozen=True)
class Series:
    """One line, or one group of bars.

    Attributes:
        name: The name in the legend.
        x: The x coordinates. Bars can have names instead of numbers.
        y: The y coordinates.
        color: The color, such as "#2f7ed8".
        low: The lower end of a band around the line, such as a confidence interval. Empty for no band.
        high: The upper end of the band.
        is_reference: Whether the line is a reference, such as the paper's curve. It is then thin and dotted.
        uses_right_axis: Whether the y coordinates belong to the axis on the right.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    color: str
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    is_reference: bool = False
    uses_right_axis: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure, as the data that is drawn.

    Attributes:
        name: The name of the image file, without a suffix.
        title: The title above the figure.
        alt: A description of the figure in words, for readers who cannot see it.
        series: The lines or bars.
        x_label: The label of the x axis.
        y_label: The label of the y axis.
        right_label: The label of a second y axis on the right. Empty for no second axis.
        kind: "lines" or "bars".
        x_log: Whether the x axis is logarithmic.
        y_log: Whether the y axes are logarithmic.
        ticks: The positions and labels of ticks on the x axis. Empty for automatic ticks.
        vertical_lines: The positions and labels of vertical lines, such as the training length.
        shows_single_name: Whether the legend is shown for a single line.
        missing_points: Points that a line lacks: the x coordinate, the color of the line and the reason.
        note: A remark below the figure.
        sources: The files that the figure was made from.
    """

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
    shows_single_name: bool = False
    missing_points: tuple[tuple[float, str, str], ...] = ()
    note: str = ""
    sources: tuple[Path, ...] = ()


# ---- ticks


def round_ticks(low: float, high: float) -> list[float]:
    """Choose round numbers for the ticks of a logarithmic axis.

    If the ends are far from each other, the ticks are 1, 2 and 5 times powers of ten. Otherwise the ticks have equal
    distances.

    Args:
        low: The smallest value on the axis.
        high: The largest value on the axis.

    Example:
        The ticks from 67 to 110 are 70, 80, 90, 100, 110 and 120. The ticks from 18 to 400 are 20, 50, 100 and 200.
    """
    if high > 4 * low:
        # The candidates range from 0.001 to 5 million.
        candidates = []
        for exponent in range(-3, 7):
            candidates += [factor * 10.0**exponent for factor in (1, 2, 5)]
    else:
        step = _round_step(low, high)
        first_multiple = max(1, int(low / step))
        last_multiple = int(high / step) + 1
        # `round` removes rounding errors such as 0.30000000000000004.
        candidates = [round(multiple * step, 10) for multiple in range(first_multiple, last_multiple + 1)]
    # Ticks slightly outside of the range are allowed, so that the axis has a label near each end.
    return [tick for tick in candidates if 0.9 * low <= tick <= 1.1 * high]


def _round_step(low: float, high: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that divides the range into at most five parts."""
    if high > low:
        min_step = (high - low) / 5
    else:
        min_step = low / 10  # The range is empty, so any small step is suitable.
    power_of_ten = 10.0 ** math.floor(math.log10(min_step))
    for factor in (1, 2, 5):
        if factor * power_of_ten >= min_step:
            return factor * power_of_ten
    return 10 * power_of_ten


def choose_log_ticks(figure: Figure, axis: Literal["x", "y", "right"]) -> list[float]:
    """Choose round ticks for a logarithmic axis of a figure.

    Args:
        figure: The figure.
        axis: The x axis, the y axis on the left or the y axis on the right.

    Returns:
        The ticks. The list is empty if there would be fewer than two ticks.
    """
    values: list[float] = []
    for series in figure.series:
        series_axis = "right" if series.uses_right_axis else "y"
        if axis == "x":
            values += [x for x in series.x if not isinstance(x, str)]
        elif axis == series_axis:
            values += [*series.y, *series.low, *series.high]
    positive_values = [value for value in values if math.isfinite(value) and value > 0]
    if not positive_values:
        return []
    ticks = round_ticks(min(positive_values), max(positive_values))
    return ticks if len(ticks) > 1 else []


def thin_ticks(positions: Sequence[float], max_ticks: int = 10) -> tuple[tuple[float, str], ...]:
    """Select ticks for a logarithmic axis such that their labels do not overlap.

    Args:
        positions: The candidates.
        max_ticks: The largest number of ticks.

    Returns:
        The position and the label of each tick.
    """
    log_range = math.log(max(positions) / min(positions))
    if log_range == 0:
        log_range = 1.0  # All positions are equal. Any positive distance then selects one tick.
    # 0.99 keeps ticks whose distance is too small only because of rounding errors.
    min_distance = 0.99 * log_range / (max_ticks - 1)  # a difference of logarithms
    ticks: list[float] = []
    for position in sorted(positions):
        if not ticks or math.log(position / ticks[-1]) >= min_distance:
            ticks.append(position)
    return tuple((tick, f"{tick:,.10g}") for tick in ticks)


# ---- colors


def method_color(method: str) -> str:
    """Return the color of a position method.

    The methods of the paper have fixed colors. The color of any other method is computed from a hash of its name, so
    the method has the same color in all figures. The hash is hashed again until the color differs clearly from the
    fixed colors.
    """
    if method in COLORS:
        return COLORS[method]
    digest = hashlib.sha256(method.encode()).digest()
    while True:
        color = _color_from_digest(digest)
        lab_color = to_lab(color)
        distances = [math.dist(lab_color, to_lab(fixed_color)) for fixed_color in COLORS.values()]
        if min(distances) >= MIN_COLOR_DISTANCE:
            return color
        digest = hashlib.sha256(digest).digest()


def _color_from_digest(digest: bytes) -> str:
    """Return a color whose hue and lightness depend on the first bytes of a hash."""
    hue = int.from_bytes(digest[:2]) / 65_536  # from 0 to 1
    # With a medium lightness, the color is readable on white and on black backgrounds.
    lightness = 0.40 + 0.15 * digest[2] / 255
    saturation = 0.55
    red_green_blue = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in red_green_blue)


def to_lab(color: str) -> tuple[float, float, float]:
    """Convert a color such as "#2f7ed8" to CIE L*a*b*. Equal distances in this space look equally different."""
    linear_rgb = []
    for start in (1, 3, 5):  # The digits of red, green and blue follow the character "#".
        channel = int(color[start : start + 2], 16) / 255
        linear_rgb.append(channel**2.2)  # 2.2 is the approximate gamma of sRGB.
    cube_roots = []
    for row in RGB_TO_XYZ:
        coordinate = sum(weight * channel for weight, channel in zip(row, linear_rgb, strict=True))
        cube_roots.append(coordinate ** (1 / 3))
    # The standard formulas of L*, a* and b*, without the special case for very dark colors.
    x, y, z = cube_roots
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


# ---- drawing with matplotlib

IMAGE_FORMATS = ("png", "svg")
DEFAULT_SIZE = (7.0, 4.2)
"""The width and height of a figure in inches."""

SIZES = {"headline": (9.0, 4.8)}
"""The sizes of figures that do not have the default size, by name."""

DIGESTS_FILE = "pictures.json"
"""The file with a hash of each drawn figure. Figures whose hash has not changed are not drawn again."""


def draw_changed_figures(figures: list[Figure], folder: Path) -> None:
    """Write the images of all figures that have changed, or that do not exist yet.

    Args:
        figures: The figures.
        folder: The folder of the images. The images of a figure are called NAME.png and NAME.svg.
    """
    digests_path = folder / DIGESTS_FILE
    try:
        stored_digests = read_json_object(digests_path)
    except InputError:
        stored_digests = {}  # The file is missing or damaged, so all figures are drawn.

    # The code of this module is part of the hash, so that all figures are drawn again when the module changes.
    code = Path(__file__).read_bytes()
    digests = {}
    for figure in figures:
        digest = hashlib.sha256(repr(figure).encode() + code).hexdigest()
        digests[figure.name] = digest
        images_exist = all((folder / f"{figure.name}.{image_format}").exists() for image_format in IMAGE_FORMATS)
        if not images_exist or stored_digests.get(figure.name) != digest:
            draw_figures([figure], folder / figure.name, SIZES.get(figure.name, DEFAULT_SIZE))
    write_atomic(digests_path, json.dumps(digests, indent=1) + "\n")


def can_draw_figures() -> bool:
    """Return whether figures can be drawn. If matplotlib is missing, log that the figure is skipped."""
    if has_package("matplotlib"):
        return True
    log.warning(
        "The figure was skipped, because drawing it requires matplotlib. "
        "Install it with: pip install 'trainshort[report]'"
    )
    return False


def draw_figures(figures: Sequence[Figure], path: Path, size: tuple[float, float] = DEFAULT_SIZE) -> list[Path]:
    """Draw figures side by side into one image, and write the image in all formats.

    Args:
        figures: The figures.
        path: The path of the image without a suffix.
        size: The width and height in inches.

    Returns:
        The paths of the written files.

    Raises:
        InputError: If matplotlib is not installed, or if the files cannot be written.
    """
    require_package("matplotlib", "Drawing a figure", "trainshort[report]")
    import matplotlib

    matplotlib.use("Agg")  # This backend needs no display.
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 10, "axes.spines.top": False, "svg.fonttype": "none", "text.parse_math": False}
    with plt.rc_context(style):
        canvas, axes_grid = plt.subplots(1, len(figures), figsize=size, layout="constrained", squeeze=False)
        for axes, figure in zip(axes_grid[0], figures, strict=True):
            _draw_figure(axes, figure)
        # The layout is computed once, and not again for each file.
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        image_paths = [path.with_name(f"{path.name}.{image_format}") for image_format in IMAGE_FORMATS]
        for image_path in image_paths:
            with atomic_replace(image_path) as partial_path:
                canvas.savefig(partial_path, format=image_path.suffix[1:], dpi=160)
        plt.close(canvas)
    return image_paths


def _draw_figure(axes: "Axes", figure: Figure) -> None:
    """Draw one figure with its title and its axis labels."""
    if figure.kind == "bars":
        _draw_bars(axes, figure)
    else:
        _draw_lines(axes, figure)
    axes.set_title(figure.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)


def _draw_bars(axes: "Axes", figure: Figure) -> None:
    """Draw a bar figure. Each bar is labelled with its value."""
    for series in figure.series:
        bar_names = [str(x) for x in series.x]
        bars = axes.bar(bar_names, series.y, color=series.color)
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=9)
    axes.spines["right"].set_visible(False)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_lines(axes: "Axes", figure: Figure) -> None:
    """Draw a line figure with its axes, vertical lines and legend. `axes` are the axes of matplotlib."""
    right_axes = axes.twinx() if figure.right_label else None
    for series in figure.series:
        series_axes = axes
        if series.uses_right_axis and right_axes is not None:
            series_axes = right_axes
        _draw_series(series_axes, series)

    _format_axes(axes, right_axes, figure)
    for x, label in figure.vertical_lines:
        axes.axvline(x, color=MARK, linestyle="--", linewidth=1)
        # The label is 4 points to the right of the line and 2 points below the upper end of the line.
        label_style = {
            "xycoords": ("data", "axes fraction"),
            "xytext": (4, -2),
            "textcoords": "offset points",
            "va": "top",
        }
        axes.annotate(label, (x, 1.0), fontsize=9, color=MARK, **label_style)
    # A missing point is shown as a cross near the upper end of the figure, with the reason below the cross.
    for x, color, reason in figure.missing_points:
        axes.plot([x], [0.96], "x", color=color, transform=axes.get_xaxis_transform())
        axes.annotate(reason, (x, 0.92), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)

    legend_handles, _ = axes.get_legend_handles_labels()
    needs_legend = len(legend_handles) > 1 or (legend_handles and figure.shows_single_name)
    if needs_legend:
        axes.legend(handles=legend_handles, frameon=False, fontsize=9)


def _draw_series(axes: "Axes", series: Series) -> None:
    """Draw one line with its band, such as a confidence interval, which reaches from `series.low` to `series.high`.

    A line with a single point is drawn as a large marker with an error bar.
    """
    is_single_point = len(series.x) == 1
    style: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4}
    if series.is_reference:
        style = {"linewidth": 0.9, "linestyle": ":"}
    if is_single_point:
        style |= {"marker": "D", "markersize": 8, "linestyle": "none"}
    label = series.name.lstrip("_") or "run"  # matplotlib hides labels that begin with an underscore.
    axes.plot(series.x, series.y, color=series.color, label=label, **style)

    if not series.low:
        return
    if is_single_point:
        # The lengths of the error bar below and above the point.
        error = [[series.y[0] - series.low[0]], [series.high[0] - series.y[0]]]
        axes.errorbar(series.x, series.y, yerr=error, color=series.color, capsize=4, linestyle="none")
    else:
        axes.fill_between(series.x, series.low, series.high, color=series.color, alpha=0.13, linewidth=0)


def _format_axes(axes: "Axes", right_axes: "Axes | None", figure: Figure) -> None:
    """Set the scales, ticks and labels of the axes of a line figure."""
    if figure.y_log:
        axes.set_yscale("log")
        _use_plain_numbers(axes.yaxis, choose_log_ticks(figure, "y"))
    axes.spines["right"].set_visible(right_axes is not None)
    if right_axes is not None:
        if figure.y_log:
            right_axes.set_yscale("log")
            _use_plain_numbers(right_axes.yaxis, choose_log_ticks(figure, "right"))
        right_axes.set_ylabel(figure.right_label, fontsize=9, color="#666666")
        right_axes.tick_params(colors="#666666", labelsize=9)
        right_axes.spines["top"].set_visible(False)
    if figure.x_log:
        axes.set_xscale("log", base=2)
        _use_plain_numbers(axes.xaxis, choose_log_ticks(figure, "x"))
    if figure.ticks:
        # plotly uses <br> for a new line.
        positions = [position for position, _ in figure.ticks]
        labels = [label.replace("<br>", "\n") for _, label in figure.ticks]
        axes.set_xticks(positions, labels)
        axes.set_xticks([], minor=True)


def _use_plain_numbers(axis: "Axis", ticks: list[float]) -> None:
    """Label a logarithmic axis with plain numbers instead of powers.

    Args:
        axis: The axis.
        ticks: The positions of the ticks. If the list is empty, matplotlib chooses the positions.
    """
    from matplotlib.ticker import FuncFormatter

    if ticks:
        axis.set_ticks(ticks)
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
