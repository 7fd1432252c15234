"""Describe figures as JSON for plotly.js. The script of the page sets the colors of text and grid lines."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from trainshort.utils.figures import MARK, Figure, Series, choose_log_ticks
from trainshort.utils.optional import require_package

# The opacity of the band around a line, from 0 (invisible) to 1.
BAND_OPACITY = 0.14


def read_plotly_script() -> str:
    """Return the code of plotly.js, which is part of the Python package plotly."""
    require_package("plotly", "Writing a report", "trainshort[report]")
    spec = importlib.util.find_spec("plotly")  # Importing plotly is slow, and only its script is needed.
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return path.read_text(encoding="utf-8")


def plotly_specification(figure: Figure) -> dict[str, Any]:
    """Return the traces and the layout of a figure for `Plotly.react`, the JavaScript function that draws it.

    A trace is an object that plotly draws, such as a line, a band or a group of bars.
    """
    traces: list[dict[str, Any]] = []
    for series in figure.series:
        if figure.kind == "bars":
            traces.append(_bar_trace(series))
        else:
            traces += _line_traces(series)
    return {"name": figure.name, "data": traces, "layout": _make_layout(figure)}


def _make_layout(figure: Figure) -> dict[str, Any]:
    """Return the layout of a figure for plotly: the axes, the ticks, the legend and the vertical lines."""
    layout: dict[str, Any] = {
        "xaxis": _make_axis(figure.x_label, figure.x_log, choose_log_ticks(figure, "x")),
        "yaxis": _make_axis(figure.y_label, figure.y_log, choose_log_ticks(figure, "y")),
        "showlegend": figure.kind != "bars" and len(figure.series) > 1,
    }
    if figure.vertical_lines:
        layout["shapes"] = [_vertical_line(x) for x, _ in figure.vertical_lines]
    if figure.ticks:
        layout["xaxis"]["tickvals"] = [x for x, _ in figure.ticks]
        layout["xaxis"]["ticktext"] = [label for _, label in figure.ticks]
    if figure.right_label:
        right_axis = _make_axis(figure.right_label, figure.y_log, choose_log_ticks(figure, "right"))
        layout["yaxis2"] = right_axis | {"overlaying": "y", "side": "right", "showgrid": False}
    return layout


def _make_axis(label: str, is_log: bool, ticks: list[float]) -> dict[str, Any]:
    """Return the plotly settings of an axis.

    Args:
        label: The label of the axis.
        is_log: Whether the axis is logarithmic.
        ticks: The values of the ticks of a logarithmic axis. Plotly chooses the ticks of other axes.
    """
    axis_type = "log" if is_log else "-"  # With "-", plotly chooses the type from the data.
    axis = {"title": {"text": label}, "type": axis_type, "automargin": True}
    if is_log and ticks:
        axis["tickvals"] = ticks
        axis["ticktext"] = [f"{tick:,g}" for tick in ticks]
    return axis


def _vertical_line(x: float) -> dict[str, Any]:
    """Return a dashed vertical line over the full height of the figure.

    Args:
        x: The position of the line on the x-axis.
    """
    # With `yref="paper"`, the height of the figure goes from 0 to 1.
    style = {"width": 1, "dash": "dash", "color": MARK}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": style, "x0": x, "x1": x}


def _bar_trace(series: Series) -> dict[str, Any]:
    """Return the plotly settings of a group of bars with their values as labels."""
    return {
        "type": "bar",
        "name": _remove_markup(series.name),
        "x": [_remove_markup(str(x)) for x in series.x],
        "y": list(series.y),
        "marker": {"color": series.color},
        "text": [f"{value:,.0f}" for value in series.y],
        "textposition": "auto",
        "hovertemplate": "%{x}: %{y:,.0f}<extra></extra>",
    }


def _line_traces(series: Series) -> list[dict[str, Any]]:
    """Return the traces (the objects that plotly draws) of one line of a figure.

    A line with a band has two traces. A line with a single point is drawn as a diamond with an error bar.
    """
    trace = _line_trace(series)
    if len(series.x) == 1:
        trace |= {"mode": "markers", "marker": {"symbol": "diamond", "size": 12, "color": series.color}}
        if series.low:
            above = series.high[0] - series.y[0]
            below = series.y[0] - series.low[0]
            trace["error_y"] = {"array": [above], "arrayminus": [below], "color": series.color}
        return [trace]
    if series.low:
        return [_band_trace(series), trace]
    return [trace]


def _line_trace(series: Series) -> dict[str, Any]:
    """Return the plotly settings of a line with markers. A reference line is thin, dotted and has no markers.

    Args:
        series: The name, the points and the color of the line, and whether it is a reference line.
    """
    if series.is_reference:
        mode = "lines"
        opacity = 0.75
        line_style = {"color": series.color, "width": 1, "dash": "dot"}
    else:
        mode = "lines+markers"
        opacity = 1
        line_style = {"color": series.color, "width": 2.5}
    return {
        "type": "scatter",
        "mode": mode,
        "name": _remove_markup(series.name),
        "x": list(series.x),
        "y": [value if math.isfinite(value) else None for value in series.y],  # JSON has no infinity.
        "line": line_style,
        "opacity": opacity,
        "yaxis": "y2" if series.uses_right_axis else "y",  # "y2" is the right axis.
        "legendgroup": series.name,
        "hovertemplate": "%{y:.2f}<extra>" + _remove_markup(series.name) + "</extra>",
    }


def _band_trace(series: Series) -> dict[str, Any]:
    """Return the filled area between the lower and the upper bounds of a line."""
    return {
        "type": "scatter",
        "mode": "lines",
        # The outline goes along the upper bounds to the right, then along the lower bounds back to the left.
        "x": [*series.x, *reversed(series.x)],
        "y": [*series.high, *reversed(series.low)],
        "fill": "toself",
        "fillcolor": _transparent_color(series.color),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": series.name,
        "meta": "band",  # marks the trace as a band; plotly ignores this value
    }


def _remove_markup(name: str) -> str:
    """Replace the characters of plotly's markup in a label, because the name of a run may contain any characters."""
    return name.replace("<", "(").replace(">", ")").replace("%{", "% {").replace("$", "")


def _transparent_color(color: str) -> str:
    """Convert a color such as "#2f7ed8" to a transparent color such as "rgba(47,126,216,0.14)"."""
    red = int(color[1:3], 16)
    green = int(color[3:5], 16)
    blue = int(color[5:7], 16)
    return f"rgba({red},{green},{blue},{BAND_OPACITY})"
