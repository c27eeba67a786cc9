"""
Figures as plain dicts, drawn by plotly.js.

Colours of traces are readable on light and dark backgrounds. Text, grid and hover boxes take their colours
from the style sheet, so that a change of theme needs no redraw. Every axis has its unit, and every empty
figure says why it is empty. An axis of steps shows under each step the time at which the step ended, if
known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.document import drawing, timezone
from traceml_ray.document.drawing import BLUE, GREEN, GREY, ORANGE, RED, ROSE, STAGES
from traceml_ray.document.model import Overlay
from traceml_ray.document.step_clock import StepClock, tick_steps
from traceml_ray.signals.nodes.quantities import Quantity
from traceml_ray.views.values import Array, brief, rounded

Series = Array | Sequence[float | None]
"""Values of a line. NaN or None: the value is not known."""
Figure = dict[str, Any]
"""A figure in the form that plotly.js accepts."""
LINES = (BLUE, ORANGE, "#1b9696", "#9a63b8", "#86891c", ROSE, "#6b7785", GREEN)
FONT = (
    "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', Arial, sans-serif"
)
BAND = "p10–p90"
_MARKS = {"critical": RED, "warning": ORANGE, "notice": "#b8930a", "info": GREY}
MARGIN = {"l": 96, "r": 12}
"""Left and right margins in px of every chart with an axis of steps, so that the charts are aligned."""
_FULL_PCT = 102
BOTTOM = 52
"""Margin in px below a chart whose ticks have two lines: a step or a time, and a second line for it."""
_TICKS, _DATED_TICKS, _TICKS_ALONE = 5, 4, 8
"""Largest number of ticks of an axis of steps, of one whose times have dates, and of a stand-alone figure."""
_NAMED_IF_ZOOMED = 1_000
"""Number of steps whose times an axis knows, for a zoom in the browser that requests no new figure."""
CLOCK = "time"
"""Name of the trace that holds the times of steps. It is not drawn."""


def _axis(title: str, **more: Any) -> dict[str, Any]:
    heading = {"text": title, "standoff": 6}
    return {"title": heading, "zeroline": False, "separatethousands": True, **more}


def figure(
    traces: list[dict[str, Any]],
    x: str,
    y: str,
    *,
    revision: str = "",
    frame: Mapping[str, Any] | None = None,
    **layout: Any,
) -> Figure:
    """
    Return a figure. `frame` is the part that all charts of steps share (`frame_of`, `axis.frame`). Traces
    that a person has hidden stay hidden while `revision` stays the same.
    """
    if frame:
        clock = frame.get("clock")
        layout = _framed(layout, **frame)
        x = f"{x}, time ({text.zone()})" if clock else x
        if clock and frame["alone"] and "hovermode" not in layout:
            traces = [*traces, *_clock_trace(clock, traces)]
    two_lines = frame or layout.get("xaxis", {}).get("type") == "date"
    # No `automargin` if labels are numbers: it makes plotly.js lay the chart out twice.
    x_axis = {"showgrid": False, "ticks": "outside", "ticklen": 4, "showspikes": False}
    y_axis = {"rangemode": "tozero", "nticks": 5, "fixedrange": True, "ticklabeloverflow": "allow"}
    base = {
        "margin": {"l": 56, "r": 10, "t": 6, "b": BOTTOM if two_lines else 38},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 11},
        "showlegend": False,
        "hovermode": "x unified",
        "uirevision": revision or "keep",
        "xaxis": _axis(x, **{**x_axis, **layout.pop("xaxis", {})}),
        "yaxis": _axis(y, **{**y_axis, **layout.pop("yaxis", {})}),
    }
    return {"data": traces, "layout": {**base, **layout}}


def frame_of(
    clock: StepClock | None,
    between: Sequence[float] | None = None,
    onset: float | None = None,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """
    Return the part that all charts of steps of a run share: when steps ended, the range of steps, and where
    the current verdict began. `alone`: the figure is not on a page of ours. Our pages show the time of the
    point under the mouse (assets/axis.js), and request a new figure when a person zooms.
    """
    return {"between": between, "onset": onset, "clock": clock, "alone": alone}


def _framed(
    layout: dict[str, Any],
    between: Sequence[float] | None,
    onset: float | None,
    axis: str = "step",
    clock: StepClock | None = None,
    alone: bool = False,
) -> dict[str, Any]:
    """
    Return the layout of a chart of steps, or of a chart over time. Dragging selects other steps
    (assets/axis.js).
    """
    shapes, notes = [*layout.get("shapes", ())], [*layout.get("annotations", ())]
    if onset is not None:
        line = {"x0": onset, "x1": onset, "yref": "paper", "y0": 0, "y1": 1}
        shapes.append({"type": "line", **line, "line": {"color": GREY, "width": 1.5, "dash": "dashdot"}})
        where = {
            "x": onset,
            "xanchor": "right" if between and 5 * onset > between[0] + 4 * between[1] else "left",
            "yref": "paper",
            "y": 1,
            "yanchor": "top",
            "font": {"size": 10},
        }
        notes.append({"text": "onset", "showarrow": False, **where})
    # With a space before it, what is under the mouse has no label of a tick, which has its time as well.
    xaxis = {"hoverformat": " ,.0f", **({"range": [*between]} if between else {}), **layout.get("xaxis", {})}
    if clock:
        xaxis |= step_ticks(clock, between, alone)
    return {**layout, "xaxis": xaxis, "shapes": shapes, "annotations": notes, "meta": {"axis": axis}}


def step_ticks(
    clock: StepClock, between: Sequence[float] | None = None, zoomed: bool = False
) -> dict[str, Any]:
    """
    Return the properties of an axis of steps whose ticks show the time of their step below the step.
    `zoomed`: also include ticks for when a person zooms.
    """
    low, high = between or clock.span
    first, last = max(clock.span[0], math.ceil(low)), min(clock.span[1], math.floor(high))
    dated = timezone.several_days(clock.times((first, last)))
    most = _DATED_TICKS if dated else _TICKS_ALONE if zoomed else _TICKS
    steps: Sequence[int] = tick_steps(first, last, (high - low) / most)
    if zoomed:
        every = max(1, 10 ** math.ceil(math.log10(max(1, last - first) / _NAMED_IF_ZOOMED)))
        steps = sorted({*steps, *range(-(-first // every) * every, last + 1, every)})
    times = clock.texts(steps, brief=True)
    return {
        "tickformat": ",~f",  # "20,000", as in the labels here
        "labelalias": {f"{step:,}": f"{step:,}<br>{time}" for step, time in zip(steps, times, strict=True)},
        "nticks": most,
        "tickangle": 0,
    }


def _clock_trace(clock: StepClock, traces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the trace that shows the time of a step next to the values of lines."""
    steps: Any = next((one["x"] for one in traces if one.get("mode") == "lines"), ())
    quiet = {"mode": "none", "showlegend": False, "hovertemplate": "%{text}<extra></extra>"}
    times = clock.texts(steps)
    return [{"type": "scatter", "name": CLOCK, "x": [*steps], "y": [0] * len(times), "text": times, **quiet}]


def _exactly(**limits: float) -> dict[str, Any]:
    """
    Return limits of an axis. Changing `range` would discard the user's zoom; changing these
    limits does not.
    """
    return {"autorangeoptions": limits}


def blank(text: str) -> Figure:
    """Return an empty figure that says why there is nothing to show."""
    note = {"text": text, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}
    hidden = {"visible": False, "fixedrange": True}
    return figure([], "", "", annotations=[note], xaxis=hidden, yaxis=hidden, hovermode=False)


def _array(values: Series) -> Array:
    return np.asarray(values, dtype=float)


def scale(values: Array, unit: str) -> dict[str, Any]:
    """
    Limit the axis so that one slow first step does not flatten all others; the label says that it
    is cut off.
    """
    end = drawing.cap(values)
    if end is None:
        return {}
    note = {
        "text": f"▲ up to {text.unit(float(values[np.isfinite(values)].max()), unit)}",
        "showarrow": False,
        "xanchor": "right",
    }
    note |= {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "yanchor": "top"}
    return {"yaxis": _exactly(maxallowed=end), "annotations": [note]}


def _line(name: str, x: Sequence[Any], y: Series, width: float, colour: str, **more: Any) -> dict[str, Any]:
    line = {"width": width, "color": colour, **more.pop("line", {})}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, **more}


def exposed(
    steps: Sequence[int],
    stages: Mapping[str, Series],
    revision: str = "",
    frame: Mapping[str, Any] | None = None,
) -> Figure:
    """Return the exposed time of each stage as stacked areas, in ms per step. Their sum is the step time."""
    if not steps:
        return blank("No closed step yet.")
    stacked = {"stackgroup": "one", "hovertemplate": "%{y:.1f} ms"}
    traces = [
        _line(name, steps, rounded(stages[name]), 0.5, colour, fillcolor=colour, **stacked)
        for name, colour in STAGES.items()
        if name in stages
    ]
    total = np.nansum([_array(values) for values in stages.values()], axis=0)
    more = _aligned(scale(total, "ms"))
    return figure(traces, "step", "exposed ms", revision=revision, frame=frame, **more)


def timeline(
    columns: StepColumns | None,
    events: Sequence[Mapping[str, Any]],
    frame: Mapping[str, Any] | None = None,
) -> Figure:
    """
    Return the busy time per step: median rank, worst rank, a p10–p90 band, and events as marks on the axis.
    `columns` is None before the first step.
    """
    if columns is None:
        return blank("No closed step yet.")
    steps = middles(columns)
    ranks = {"customdata": columns.worst_rank, "hovertemplate": "%{y:.1f} ms (rank %{customdata})"}
    band = {"fill": "tonexty", "fillcolor": "rgba(59,130,196,.25)", "hoverinfo": "skip"}
    low, high = rounded(columns.p10_ms), rounded(columns.p90_ms)
    traces = [
        _line("p10", steps, low, 0, BLUE, hoverinfo="skip", legendgroup=BAND),
        _line("p90", steps, high, 0, BLUE, **band, legendgroup=BAND),
        _line("worst", steps, rounded(columns.worst_ms), 1.2, ORANGE, **ranks),
        _line("median", steps, rounded(columns.median_ms), 1.8, BLUE, hovertemplate="%{y:.1f} ms"),
    ]
    if marked := [e for e in events if e["step"] is not None and steps[0] <= e["step"] <= steps[-1]][:60]:
        traces.append(_event_marks(marked))
    return figure(traces, "step", "busy ms", frame=frame, **_aligned(scale(columns.worst_ms, "ms")))


def _aligned(layout: dict[str, Any]) -> dict[str, Any]:
    """Return the layout of a chart whose plot area is as wide as the heatmap's."""
    return {**layout, "margin": {**MARGIN, "t": 6, "b": BOTTOM}}


def _event_marks(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return events as marks on the axis of steps."""
    marker = {
        "symbol": ["diamond" if event["severity"] == "critical" else "triangle-up" for event in events],
        "size": 9,
        "color": [_MARKS[event["severity"]] for event in events],
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "event",
        "x": [event["step"] for event in events],
        "y": [0] * len(events),
        "text": [event["text"][:90] for event in events],
        "cliponaxis": False,
        "marker": marker,
        "hovertemplate": "%{text}<extra></extra>",
    }


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
    frame: Mapping[str, Any] | None = None,
) -> Figure:
    """
    Return lines over `x`: steps, or with kind "time" times in ns since the epoch. `y` is the name of the
    y-axis.
    """
    colour = dict(zip(series, itertools.cycle(colours), strict=False))  # fixed per name
    arrays = {name: _array(values) for name, values in series.items()}
    shown = {name: values for name, values in arrays.items() if np.isfinite(values).any()}
    if not len(x) or not shown:
        return blank("Not measured here." if len(x) else "No sample yet.")
    timed = kind == "time"
    x_values = [t // 1_000_000 for t in x] if timed else list(x)
    style = {name: {"dash": "dot" if name == dashed else "solid"} for name in shown}
    hover = "%{y:,} " + unit
    traces = [
        _line(name, x_values, brief(values), 1.5, colour[name], line=style[name], hovertemplate=hover)
        for name, values in shown.items()
    ]
    layout: dict[str, Any] = {} if timed else scale(np.concatenate([*shown.values()]), unit)
    if top is not None:
        layout["yaxis"] = _exactly(minallowed=0, maxallowed=top)
    layout["xaxis"] = _clock(x) if timed else {"nticks": _TICKS}
    if timed and frame:
        frame = _on_clock(frame, x_values[0], x_values[-1])
    return figure(traces, _time() if timed else "step", y, revision=revision, frame=frame, **layout)


def _time() -> str:
    return f"time ({text.zone()})"


def _on_clock(frame: Mapping[str, Any], first: int, last: int) -> Mapping[str, Any]:
    """
    Return the shared part of charts (see `frame_of`) for a chart from `first` to `last`, in ms since the
    epoch.
    """
    onset = frame["onset"]
    if onset and not first <= onset <= last:
        onset = None  # its label would make the chart wider, even without `between`
    return {**frame, "onset": onset, "between": frame["between"] or (first, last)}


def overlaid(chart: Overlay, axis: str, revision: str = "") -> Figure:
    """Return lines of several runs in one chart. `axis` is `step`, or `time` since the first step."""
    lines = chart.lines[axis]
    longest = max(float(line.x[-1]) for line in lines)
    size, unit = (
        (1, "s") if axis == "step" or longest < 300 else (60, "min") if longest < 3 * 3600 else (3600, "h")
    )
    hover = f"%{{y:,}} {chart.unit}"
    traces = [
        _line(
            line.name,
            line.x.tolist() if axis == "step" else rounded(line.x / size),
            brief(line.values),
            1.5,
            line.colour,
            line={"dash": line.dash},
            hovertemplate=hover,
        )
        for line in lines
    ]
    layout = scale(np.concatenate([line.values for line in lines]), chart.unit) if chart.from_zero else {}
    if not chart.from_zero:
        layout["yaxis"] = {"rangemode": "normal"}
    title = "step" if axis == "step" else f"time since the first step ({unit})"
    xaxis = {"nticks": _TICKS, "hoverformat": " ,.0f" if axis == "step" else " ,.2~f"}
    return figure(traces, title, chart.unit, xaxis=xaxis, revision=revision, **layout)


def sizes(
    series: Mapping[str, tuple[Sequence[int], Sequence[float], str]], frame: Mapping[str, Any] | None = None
) -> Figure:
    """Return bytes over time as lines: name → its own times (ns since the epoch), values and colour."""
    unit, factor = ("GB", 1e-9) if max(max(curve[1]) for curve in series.values()) >= 1e9 else ("MB", 1e-6)
    traces = [
        _line(
            name,
            [t // 1_000_000 for t in t_ns],
            brief(factor * _array(values)),
            1.5,
            colour,
            hovertemplate=f"%{{y:,}} {unit}",
        )
        for name, (t_ns, values, colour) in series.items()
    ]
    every = sorted(t for curve in series.values() for t in curve[0])
    common = _on_clock(frame, every[0] // 1_000_000, every[-1] // 1_000_000) if frame else None
    return figure(traces, _time(), unit, frame=common, xaxis=_clock(every))


def waterfall(before: Mapping[str, float], since: Mapping[str, float]) -> Figure:
    """Return a waterfall chart: step time before and since a change, and what each stage has added, in ms."""
    bars = drawing.waterfall(before, since)[::-1]  # the first is on top
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": "ms",
        "y": [bar.name for bar in bars],
        "x": rounded([bar.width for bar in bars]),
        "base": rounded([bar.base for bar in bars]),
        "text": [bar.label for bar in bars],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [bar.colour for bar in bars]},
        "hoverinfo": "skip",
    }
    room = 1.18 * max(bar.base + bar.width for bar in bars)
    axes: dict[str, Any] = {
        "xaxis": {"range": [0, room], "fixedrange": True},
        "yaxis": {"nticks": 0, "dtick": 1, "automargin": True},
    }
    return figure([trace], "ms", "", hovermode=False, bargap=0.25, **axes)


def icicle(boxes: Sequence[drawing.Box]) -> Figure:
    """Return layers as boxes, in ms, each above the layers that it contains. The model is on top."""
    depth = max((box.depth for box in boxes), default=0)
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": "ms",
        "y": [-box.depth for box in boxes],
        "x": rounded([box.width for box in boxes]),
        "base": rounded([box.start for box in boxes]),
        "text": [box.label for box in boxes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "constraintext": "none",
        "textangle": 0,
        "textfont": {"size": 10},
        "customdata": [box.name for box in boxes],
        "width": 0.92,
        "marker": {
            "color": [box.colour for box in boxes],
            "line": {"color": "rgba(139,147,156,.6)", "width": 0.5},
        },
        "hovertemplate": "%{customdata}: %{x:,} ms<extra></extra>",
    }
    axes: dict[str, Any] = {
        "xaxis": {"fixedrange": True},
        "yaxis": {"visible": False, "fixedrange": True, "range": [-depth - 0.5, 0.5], "rangemode": "normal"},
        "margin": {"l": 8, "r": 8, "t": 6, "b": 38},
    }
    return figure([trace], "ms of a step, forward and backward", "", hovermode="closest", bargap=0, **axes)


def rows(times: Mapping[str, Mapping[str, float]], revision: str = "") -> Figure:
    """Return horizontal bars below each other, by name. Each has the ms of each stage."""
    names = [*times][::-1]  # the first is on top
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": stage,
            "y": names,
            "x": rounded([times[name][stage] for name in names]),
            "marker": {"color": colour},
            "hovertemplate": "%{x:,} ms",
        }
        for stage, colour in STAGES.items()
    ]
    axis = {"automargin": True}
    return figure(traces, "ms", "", barmode="stack", hovermode="y unified", yaxis=axis, revision=revision)


def quantities(
    t_ns: Sequence[int],
    named: Mapping[str, tuple[Quantity, Sequence[float | None] | None]],
    revision: str,
    frame: Mapping[str, Any] | None = None,
) -> Figure:
    """
    Return lines over time of quantities with one unit, by name. Quantities without any value are
    left out.
    """
    unit = next(iter(named.values()))[0].unit
    series = {name: _array(values or ()) * unit.scale for name, (_, values) in named.items()}
    top = _FULL_PCT if unit.axis == "%" else None
    more: dict[str, Any] = {"top": top, "dashed": "installed", "revision": revision, "frame": frame}
    return lines(t_ns, series, unit.axis, unit=unit.axis, kind="time", **more)


def _clock(t_ns: Sequence[int]) -> dict[str, Any]:
    short = t_ns[-1] - t_ns[0] < 600e9
    # The text after the line break appears under the first tick of each day.
    ticks = (
        {"nticks": 4, "tickformat": "%H:%M:%S\n%d %b"}
        if short
        else {"nticks": 5, "tickformat": "%H:%M\n%d %b"}
    )
    return {"type": "date", "hoverformat": "%d %b %H:%M:%S", **ticks}


def middles(columns: StepColumns) -> list[int]:
    """Return, for each column, the step at which it is drawn as a point of a line."""
    both: Array = (columns.first + columns.last) // 2
    steps: list[int] = both.tolist()
    return steps
