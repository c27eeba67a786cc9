"""
Figures as plain dicts, drawn by plotly.js.

Colours of traces hold on light and on dark; text, grid and hover boxes take theirs from the style
sheet, so that a theme needs no redraw. Every axis has its unit, every empty figure says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from traceml_ray import text

from .values import brief

Series = Sequence[float | None]
Figure = dict[str, Any]

STAGES = {
    "post_sync": "#9a63b8",
    "data": "#c77c11",
    "prepare": "#86891c",
    "forward": "#1b9696",
    "backward": "#3b6fc4",
    "sync_wait": "#8b939c",
}
BLUE, ORANGE, RED, GREY, ROSE = "#3b82c4", "#d9731a", "#d03b3b", "#8b939c", "#c2568f"
LINES = (BLUE, ORANGE, "#1b9696", "#9a63b8", "#86891c", ROSE, "#6b7785", "#5a9e3c")
FONT = (
    "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', Arial, sans-serif"
)
_MARKS = {"critical": RED, "warning": ORANGE, "info": GREY}
_SPIKE = 3.0
"""A value this many times over the 98th percentile does not set the scale."""


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 6},
        "automargin": True,
        "zeroline": False,
        "separatethousands": True,
        **more,
    }


def _figure(traces: list[dict[str, Any]], x: str, y: str, *, revision: str = "", **layout: Any) -> Figure:
    """Return a figure; `revision` is that of the user's zoom: while it stays, so does the zoom."""
    axes = {
        "xaxis": _axis(x, showgrid=False, ticks="outside", ticklen=4, **layout.pop("xaxis", {})),
        "yaxis": _axis(y, rangemode="tozero", nticks=5, **layout.pop("yaxis", {})),
    }
    base = {
        "margin": {"l": 48, "r": 10, "t": 6, "b": 34},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 11},
        "showlegend": False,
        "hovermode": "x unified",
        "uirevision": revision or "keep",
        **axes,
    }
    return {"data": traces, "layout": {**base, **layout}}


def _exactly(**limits: float) -> dict[str, Any]:
    """Return limits of an axis. A `range` that changes would throw away the user's zoom; these do not."""
    return {"autorangeoptions": limits}


def blank(text: str) -> Figure:
    """Return a figure that says why there is nothing to see."""
    note = {"text": text, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
    hidden = {"visible": False, "fixedrange": True}
    return _figure([], "", "", annotations=[note], xaxis=hidden, yaxis=hidden, hovermode=False)


def _known(*series: Series) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([v for one in series for v in one if v is not None], dtype=float)


def _scale(values: np.ndarray[Any, np.dtype[np.float64]], unit: str) -> dict[str, Any]:
    """Keep one slow first step from pressing all others flat, and say that it is cut off."""
    if not len(values) or values.max() <= _SPIKE * (usual := float(np.percentile(values, 98))) or usual <= 0:
        return {}
    note = {
        "text": f"▲ up to {text.unit(float(values.max()), unit)}",
        "showarrow": False,
        "xanchor": "right",
    }
    note |= {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "yanchor": "top"}
    return {"yaxis": _exactly(maxallowed=1.25 * usual), "annotations": [note]}


def exposed(steps: Sequence[int], stages: Mapping[str, Series], revision: str = "") -> Figure:
    """Return the stacked area of the exposed time of each stage, ms per step: the sum is the step."""
    if not steps:
        return blank("No closed step yet.")
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": text.words(name),
            "x": steps,
            "y": stages[name],
            "stackgroup": "one",
            "line": {"width": 0.5, "color": colour},
            "fillcolor": colour,
            "hovertemplate": "%{y:.1f} ms",
        }
        for name, colour in STAGES.items()
        if name in stages
    ]
    total = np.nansum(np.array([stages[name] for name in stages], dtype=float), axis=0)
    return _figure(traces, "step", "exposed ms", revision=revision, **_scale(total, "ms"))


def timeline(steps: Sequence[int], line: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the step's time: median rank, worst rank, a p10–p90 band, and events as marks on the axis."""
    if not steps:
        return blank("No closed step yet.")
    flat = {"type": "scatter", "mode": "lines", "x": steps}
    edge = {**flat, "line": {"width": 0}, "hoverinfo": "skip"}
    traces: list[dict[str, Any]] = [
        {**edge, "y": line["p10_ms"]},
        {**edge, "y": line["p90_ms"], "fill": "tonexty", "fillcolor": "rgba(59,130,196,.25)"},
        {
            **flat,
            "name": "worst",
            "y": line["worst_ms"],
            "line": {"width": 1.2, "color": ORANGE},
            "customdata": line["worst_rank"],
            "hovertemplate": "%{y:.1f} ms (rank %{customdata})",
        },
        {
            **flat,
            "name": "median",
            "y": line["median_ms"],
            "line": {"width": 1.8, "color": BLUE},
            "hovertemplate": "%{y:.1f} ms",
        },
    ]
    marked = [e for e in events if e.get("step") is not None and steps[0] <= e["step"] <= steps[-1]][:60]
    if marked:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "event",
                "x": [e["step"] for e in marked],
                "y": [0] * len(marked),
                "text": [e["text"][:90] for e in marked],
                "cliponaxis": False,
                "marker": {
                    "symbol": ["diamond" if e["severity"] == "critical" else "triangle-up" for e in marked],
                    "size": 9,
                    "color": [_MARKS.get(e["severity"], _MARKS["info"]) for e in marked],
                },
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    between = _exactly(minallowed=steps[0], maxallowed=max(steps[-1], steps[0] + 1))
    return _figure(traces, "step", "busy ms", xaxis=between, **_scale(_known(line["worst_ms"]), "ms"))


def lines(
    x: Sequence[Any],
    series: Mapping[str, Series],
    y: str,
    *,
    unit: str = "",
    kind: str = "step",
    top: float | None = None,
    colours: Sequence[str] = LINES,
    dashed: str = "",
    revision: str = "",
) -> Figure:
    """Return lines over `x`: steps, or with kind "time" ns since the epoch; `y` is the name of the axis."""
    shown = {name: values for name, values in series.items() if any(v is not None for v in values)}
    if not len(x) or not shown:
        return blank("Not measured here." if len(x) else "No sample yet.")
    at = [t // 1_000_000 for t in x] if kind == "time" else list(x)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": at,
            "y": brief(values),
            "line": {
                "width": 1.5,
                "color": colours[i % len(colours)],
                "dash": "dot" if name == dashed else "solid",
            },
            "hovertemplate": "%{y:,} " + unit,
        }
        for i, (name, values) in enumerate(shown.items())
    ]
    layout: dict[str, Any] = _scale(_known(*shown.values()), unit) if kind == "step" else {}
    if top is not None:
        layout["yaxis"] = _exactly(minallowed=0, maxallowed=top)
    xaxis = _clock(x) if kind == "time" else {"nticks": 6}
    return _figure(
        traces, "time, UTC" if kind == "time" else "step", y, revision=revision, xaxis=xaxis, **layout
    )


def _clock(t_ns: Sequence[int]) -> dict[str, Any]:
    short = t_ns[-1] - t_ns[0] < 600e9
    ticks = {"nticks": 4, "tickformat": "%H:%M:%S"} if short else {"nticks": 5, "tickformat": "%H:%M"}
    return {"type": "date", "hoverformat": "%d %b %H:%M:%S", **ticks}


def spark(values: Series, colour: str = BLUE, between: tuple[float, float] | None = None) -> str | None:
    """Return a sparkline as an image's data URI; None where fewer than two values are known."""
    width, height = 120, 28
    known = _known(values)
    if len(known) < 2:
        return None
    low, high = between or (float(known.min()), float(known.max()))
    span = (high - low) or 1.0
    across = width / max(1, len(values) - 1)
    path, gap = "", True
    for i, value in enumerate(values):
        if value is None:
            gap = True
            continue
        y = height - 2 - (height - 4) * (value - low) / span
        path += f"{'M' if gap else 'L'}{i * across:.1f} {y:.1f}"
        gap = False
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' preserveAspectRatio='none'>"
        f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.5' "
        "vector-effect='non-scaling-stroke'/></svg>"
    )
    return "data:image/svg+xml," + svg.replace("#", "%23").replace("<", "%3C").replace(">", "%3E")
