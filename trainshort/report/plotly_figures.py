"""Figures for plotly, as the plain JSON its script reads; colours of text and grid are the page's affair."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from trainshort.utils.figures import MARK, Figure, Series, choose_log_ticks
from trainshort.utils.optional import require_package


def plotly_script() -> str:
    """The text of plotly.js, which comes with the Python package."""
    require_package("plotly", "Writing a report", "trainshort[report]")
    spec = importlib.util.find_spec("plotly")  # Importing plotly takes a second, and only its script is needed.
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return path.read_text(encoding="utf-8")


def specification(figure: Figure) -> dict[str, Any]:
    """Traces and layout."""
    traces: list[dict[str, Any]] = []
    for series in figure.series:
        if figure.kind == "bars":
            traces.append(_bars(series))
        else:
            traces += _lines(series)
    layout: dict[str, Any] = {
        "xaxis": _axis(figure.x_label, figure.x_log, choose_log_ticks(figure, "x")),
        "yaxis": _axis(figure.y_label, figure.y_log, choose_log_ticks(figure, "y")),
        "showlegend": figure.kind != "bars" and len(figure.series) > 1,
    }
    if figure.vertical_lines:
        line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dash", "color": MARK}}
        layout["shapes"] = [line | {"x0": at, "x1": at} for at, _ in figure.vertical_lines]
    if figure.ticks:
        layout["xaxis"] |= {"tickvals": [at for at, _ in figure.ticks], "ticktext": [text for _, text in figure.ticks]}
    if figure.right_label:
        right = _axis(figure.right_label, figure.y_log, choose_log_ticks(figure, "right"))
        layout["yaxis2"] = right | {"overlaying": "y", "side": "right", "showgrid": False}
    return {"name": figure.name, "data": traces, "layout": layout}


def _axis(label: str, log: bool, ticks: list[float]) -> dict[str, Any]:
    axis = {"title": {"text": label}, "type": "log" if log else "-", "automargin": True}
    if log and ticks:
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks]}
    return axis


def _bars(series: Series) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": _plain(series.name),
        "x": [_plain(str(x)) for x in series.x],
        "y": list(series.y),
        "marker": {"color": series.color},
        "text": [f"{value:,.0f}" for value in series.y],
        "textposition": "auto",
        "hovertemplate": "%{x}: %{y:,.0f}<extra></extra>",
    }


def _lines(series: Series) -> list[dict[str, Any]]:
    trace = {
        "type": "scatter",
        "mode": "lines" if series.is_reference else "lines+markers",
        "name": _plain(series.name),
        "x": list(series.x),
        "y": [value if math.isfinite(value) else None for value in series.y],
        "line": {"color": series.color} | ({"width": 1, "dash": "dot"} if series.is_reference else {"width": 2.5}),
        "opacity": 0.75 if series.is_reference else 1,
        "yaxis": "y2" if series.uses_right_axis else "y",
        "legendgroup": series.name,
        "hovertemplate": "%{y:.2f}<extra>" + _plain(series.name) + "</extra>",
    }
    if len(series.x) == 1:
        trace |= {"mode": "markers", "marker": {"symbol": "diamond", "size": 12, "color": series.color}}
    if series.low and len(series.x) == 1:
        above, below = series.high[0] - series.y[0], series.y[0] - series.low[0]
        trace["error_y"] = {"array": [above], "arrayminus": [below], "color": series.color}
    if not series.low or len(series.x) == 1:
        return [trace]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": [*series.x, *reversed(series.x)],
        "y": [*series.high, *reversed(series.low)],
        "fill": "toself",
        "fillcolor": _lighten(series.color),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": series.name,
        "meta": "band",
    }
    return [band, trace]


def _plain(name: str) -> str:
    """plotly reads a small mark-up in labels; a run's name must not be able to use it."""
    return name.replace("<", "(").replace(">", ")").replace("%{", "% {").replace("$", "")


def _lighten(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"
