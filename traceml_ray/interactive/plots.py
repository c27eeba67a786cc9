"""Charts of a run as Plotly figures, the same as in the web app."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.analysis.spread import MISSING, ratio
from traceml_ray.document import drawing, timezone
from traceml_ray.document.step_clock import StepClock
from traceml_ray.reports.comparison import read_whole
from traceml_ray.reports.headlines import change
from traceml_ray.signals.layers.view import GetLayers
from traceml_ray.signals.memory.view import GetMemory
from traceml_ray.store import query
from traceml_ray.views import figures
from traceml_ray.views.figures import Figure
from traceml_ray.views.heat_figure import heat_figure
from traceml_ray.views.memory_curves import COUNTERS, memory_curves
from traceml_ray.views.values import by_stage

Ask = Callable[[query.Request[Any]], Any]
_INK, _GRID = "#7a828c", "rgba(128,136,146,.25)"
"""Colours of text and of grid lines. Both are readable on light and dark backgrounds."""
_DRAWN, _SAMPLES = 6, 240
"""Largest number of ranks whose memory is drawn, and of samples of each."""
_TALL, _USUAL = 380, 300


def _columns(ask: Ask, run: str | None) -> StepColumns | None:
    """Return the data of charts by step, after all steps of the run have been read; None without any step."""
    read_whole(ask, run, live=True)
    columns: StepColumns = ask(query.GetColumns(run, whole=True))
    return columns if len(columns.first) else None


def _frame(ask: Ask, run: str | None) -> dict[str, Any]:
    """Return what all charts by step share: the times at which steps were over."""
    return figures.frame_of(StepClock.of(ask(query.GetTimeline(run))), alone=True)


def _ranks(ask: Ask, run: str | None) -> Figure:
    columns = _columns(ask, run)
    if columns is None:
        return figures.blank("No closed step yet.")
    heat = drawing.ordered(columns, {})
    verdict = ask(query.GetVerdict(run))
    rows = drawing.by_node(heat, drawing.suspects(heat, verdict))
    frame = _frame(ask, run)
    figure = heat_figure(heat, rows, "", frame)
    times = frame["clock"].texts(heat.last) if frame["clock"] else [""] * len(heat.last)
    edges = [0, *accumulate(row.height for row in rows)]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    names = [("▶ " if row.named else "") + row.name for row in rows]
    figure["layout"]["yaxis"] |= {
        "visible": True,
        "title": {"text": ""},
        "tickvals": middles,
        "ticktext": names,
        "automargin": True,
    }
    levels = drawing.worst(heat, rows)
    figure["data"][0] |= {
        "hoverinfo": "text",
        "text": [
            [
                f"{row.name}, to step {last:,}{time and f' ({time})'}: {_over(level)}"
                for last, time, level in zip(heat.last.tolist(), times, line, strict=True)
            ]
            for row, line in zip(rows, levels, strict=True)
            for _ in range(row.height)
        ],
    }
    return figure


def _over(level: int) -> str:
    return "missing" if level == MISSING else f"{text.times(float(ratio(int(level))))} the median"


def _steps(ask: Ask, run: str | None) -> Figure:
    return figures.timeline(_columns(ask, run), [], _frame(ask, run))


def _stages(ask: Ask, run: str | None) -> Figure:
    columns = _columns(ask, run)
    if columns is None:
        return figures.exposed([], {})
    return figures.exposed(figures.middles(columns), by_stage(columns.exposed), frame=_frame(ask, run))


def _skew(ask: Ask, run: str | None) -> Figure:
    columns = _columns(ask, run)
    if columns is None:
        return figures.blank("No closed step yet.")
    series = {"ranks": columns.global_pct, "nodes": columns.node_pct}
    more: dict[str, Any] = {"colours": (drawing.ORANGE, drawing.BLUE), "frame": _frame(ask, run)}
    return figures.lines(figures.middles(columns), series, "skew %", unit="%", **more)


def _change(ask: Ask, run: str | None) -> Figure:
    verdict = ask(query.GetVerdict(run))
    asked = change(run, verdict, verdict.episodes) if verdict else None
    if asked is not None:
        read_whole(ask, run, live=True)
        parts = ask(asked)
        if parts.before.stages and parts.since.stages:
            return figures.waterfall(parts.before.stages, parts.since.stages)
    return figures.blank("The verdict names no change.")


def _memory(ask: Ask, run: str | None) -> Figure:
    memory, ranks = ask(GetMemory(run, peaks=False)), ask(query.GetRanks(run))
    first = [memory.first_cause.rank] if memory.first_cause else []
    named = [*first, *(finding.rank for finding in memory.findings), *sorted(ranks)]
    drawn = {rank: ranks[rank].id for rank in [*dict.fromkeys(named)][:_DRAWN] if rank in ranks}
    samples = ask(query.GetMemorySamples(tuple(drawn.values()), _SAMPLES))
    curves = memory_curves(drawn, samples)
    if not curves:
        return figures.blank("No rank has sent a sample of its memory.")
    counter = next(iter(curves))
    colours = dict(zip(curves[counter], figures.LINES, strict=False))
    shown = {name: (*curve, colours.get(name, drawing.GREY)) for name, curve in curves[counter].items()}
    figure = figures.sizes(shown)
    for trace in figure["data"]:  # of a number plotly.js shows the clock of the browser, which is elsewhere
        trace["x"] = [timezone.on_the_wall(1_000_000 * t_ms) for t_ms in trace["x"]]
    title = figure["layout"]["yaxis"]["title"]
    figure["layout"]["yaxis"]["title"] = {**title, "text": f"{COUNTERS[counter]}, {title['text']}"}
    return figure


def _layers(ask: Ask, run: str | None) -> Figure:
    layers = ask(GetLayers(run))
    if not layers.layers:
        return figures.blank("No layer was measured.")
    named = {one.layer for one in layers.findings}
    boxes = drawing.icicle(layers.layers, named)
    return figures.icicle(boxes)


PLOTS: Mapping[str, tuple[str, Callable[[Ask, str | None], Figure]]] = {
    "ranks": ("busy time by rank, against the median of the step", _ranks),
    "steps": ("step timeline", _steps),
    "stages": ("where a step's time goes", _stages),
    "skew": ("skew", _skew),
    "change": ("a step before the onset, and since", _change),
    "memory": ("memory", _memory),
    "layers": ("forward and backward of each layer", _layers),
}
"""By name: title, and what makes the figure."""


def figure_of(ask: Ask, name: str, run: str | None, session: str) -> Any:
    """Return the figure `name`. Raises ValueError, ImportError."""
    if name not in PLOTS:
        raise ValueError(f"no plot is called {str(name)[:40]!r}; plots: {', '.join(PLOTS)}")
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ImportError(f"plot() needs plotly: pip install plotly ({error})") from error
    title, make = PLOTS[name]
    made = make(ask, run)
    return graph_objects.Figure(
        {"data": made["data"], "layout": _laid_out(made["layout"], f"{session}: {title}", name, made["data"])}
    )


def _laid_out(layout: Mapping[str, Any], title: str, name: str, data: Sequence[Any]) -> dict[str, Any]:
    """Return a layout for another program's page: with a title, a legend, and colours for any background."""
    axes = {axis: {"gridcolor": _GRID, **layout.get(axis, {})} for axis in ("xaxis", "yaxis")}
    axes["yaxis"]["fixedrange"] = False
    return {
        **layout,
        **axes,
        "template": "none",
        "title": {"text": title, "font": {"size": 14}, "x": 0.01},
        "font": {**layout["font"], "color": _INK},
        "margin": {**layout["margin"], "t": 44},
        "height": _TALL if name in ("ranks", "layers") else _USUAL,
        "showlegend": len(data) > 1,
    }
