"""
The first screen: the step time, which rank is late and since when, where the time goes, nodes, events. Each
number at the top has a sparkline and its scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.shapes import ChangedParts, StepColumns, StepTimes
from traceml_ray.analysis.step_numbers import MAX_LINES
from traceml_ray.analysis.window import missing_of
from traceml_ray.document import drawing
from traceml_ray.document.drawing import ordered
from traceml_ray.document.model import Column, Number, Table
from traceml_ray.reports.headlines import change
from traceml_ray.reports.kpis import kpis
from traceml_ray.signals.views import POLLED, signal_numbers
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.views import figures
from traceml_ray.views.events import events_of
from traceml_ray.views.heat_figure import heat_figure
from traceml_ray.views.ranks import badness, nodes
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import by_stage, number, rounded
from traceml_ray.wire.codec import ready

from .. import axis, heatmap
from ..charts import CLICKED, Chart, chart, numbers
from ..elements import Content, aria, link, meter, node_link, panel, part, spark, table
from ..route import Route
from ..session_cache import SessionCache
from .events import event_table


def kpi_data(times: StepTimes, columns: StepColumns, signals: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers at the top with their units, texts and sparklines."""
    return [
        {
            "key": kpi.key,
            "label": kpi.label,
            "value": number(kpi.value),
            "shown": kpi.written(kpi.value),
            "unit": kpi.unit,
            "text": kpi.about,
            **_drawn(kpi),
            "title": kpi.title,
        }
        for kpi in kpis(times, columns, signal_numbers(signals))
    ]


def _drawn(kpi: Number) -> dict[str, Any]:
    """
    Return the sparkline of a number, scaled to 0..1, with its first and last value and its scale
    as text.
    """
    finite = kpi.line[np.isfinite(kpi.line)]
    if not len(finite):
        return {"series": [], "ends": None}
    low, high = float(finite.min()), float(finite.max())
    ends = [kpi.written(float(value)) for value in (finite[0], finite[-1], high, low)]
    return {"series": rounded((kpi.line - low) / ((high - low) or 1.0)), "ends": ends}


def kpi_box(kpi: Mapping[str, Any]) -> html.Div:
    """Return the box of one number of `kpi_data`."""
    value = [html.Span(kpi["shown"], className="value")]
    if kpi["value"] is not None:
        value.append(html.Span(kpi["unit"], className="unit"))
    first, last, high, low = kpi["ends"] or [""] * 4
    alt = f"{kpi['label']}: {first} to {last} {kpi['unit']}"
    label, under = html.Div(kpi["label"], className="label"), html.Div(kpi["text"], className="text")
    several = sum(value is not None for value in kpi["series"]) > 1
    drawn = [spark(kpi["series"], alt), *_ends(high, low)] if several else []
    line = html.Div(drawn, className="spark-box")
    return html.Div([label, html.Div(value), line, under], className="kpi", title=kpi["title"] or None)


def _ends(high: str, low: str) -> list[html.Span]:
    """Return the scale of a sparkline: its highest and its lowest value."""
    return [html.Span(high, className="high"), *([html.Span(low, className="low")] if low != high else [])]


_CARDS, _FEW_CARDS = 24, 12
_EVENTS, _LISTED = 200, 40
_UNPLACED = "no report"
"""Shown in place of the node of a rank that has not reported yet."""
_ORDERS: dict[str, str | None] = {"by node": None, "by cost": "cost"}
_STAGES = {"total": None, **{name: name for name in STAGES if name != "sync_wait"}}


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return what the first screen shows.

    In the URL, `stage` and `order` belong to the heatmap, and the range of steps is defined by `axis`. The
    numbers at the top cover all steps if the whole run is selected or the run is over.
    """
    asked = _columns(cache, run, route)
    whole = asked.whole and not asked.first and asked.last is None if route.get("from") else None
    times = run.times if whole is None else cache.ask(query.GetTimes(run.id, whole))
    signals = run.signals if whole is None else _signals(cache, run, whole)
    columns = cache.ask(asked)
    spine, asked_change = axis.data(cache, run, route), change(run.id, run.verdict, run.episodes)
    view: dict[str, Any] = {
        "nodes": nodes(run, times),
        "events": events_of(cache, run)[:_EVENTS],
        "axis": spine,
        "stage": asked.stage,
    }
    view["change"] = cache.ask(asked_change) if asked_change else None
    if not times or not columns or not len(columns.first):
        return {**view, "kpis": [], "heat": None, "columns": None}
    return {
        **view,
        "kpis": kpi_data(times, columns, signals),
        "heat": _heatmap(run, columns),
        "columns": columns,
    }


def _signals(cache: SessionCache, run: RunState, whole: bool) -> dict[str, Any]:
    """Return the answers of signals over the whole run, or over its newest steps, as far as they exist."""
    answers = dict(run.signals)
    for view in POLLED:
        if "whole" in view.question.__struct_fields__:
            answers[view.name] = cache.ask(msgspec.structs.replace(view.question(run.id), whole=whole))
    return {name: answer for name, answer in answers.items() if answer is not None}


def _columns(cache: SessionCache, run: RunState, route: Route) -> query.GetColumns:
    """Return the question for what is drawn step by step."""
    stage, shown = route.get("stage"), axis.chosen(cache, run, route)
    return query.GetColumns(
        run.id, stage if stage in STAGES else "total", not shown.newest, first=shown.first, last=shown.last
    )


def _heatmap(run: RunState, columns: StepColumns) -> StepColumns:
    """Return the heatmap, with a row for each rank that has not reported yet, unless rows are nodes."""
    missing = missing_of(run.world, columns.ranks, MAX_LINES)
    return ordered(columns, {rank: run.node_of(rank) or _UNPLACED for rank in missing})


class _Cell(msgspec.Struct):
    ranks: Annotated[list[int], msgspec.Meta(min_length=1, max_length=2)]
    """The rank of the cell's row, or the first and the last rank if the row has several."""
    first: int
    last: int
    """Last step of the cell."""


def cell(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return a text about one cell of the heatmap: the means over its steps for the worst rank of its row. The
    key of `route` is a `_Cell` as JSON, its query that of the overview.
    """
    asked = msgspec.json.decode(route.key, type=ready(_Cell))
    rank, several = asked.ranks[0], len(asked.ranks) > 1
    if several and (columns := cache.ask(_columns(cache, run, route))):
        rank = _worst(_heatmap(run, columns), rank, asked.ranks[1], asked.first)
    answer = cache.ask(query.GetCell(run.id, rank, asked.first, asked.last))
    if answer is None or answer.busy_ms is None or np.isnan(answer.busy_ms):
        return {"text": "no row of this rank here"}
    whose = f"rank {answer.rank}: " if several else ""
    over = "" if answer.over is None else f"{text.times(answer.over)} the median: "
    first_line = f"{whose}{over}busy {text.ms(answer.busy_ms)}, the median rank {text.ms(answer.median_ms)}"
    far = sorted(answer.stages.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:2]
    stages = [f"{name} {text.ms(ms)} (median {text.ms(median)})" for name, (ms, median) in far]
    return {"text": "\n".join([first_line, *stages])}


def _worst(heat: StepColumns, first: int, last: int, step: int) -> int:
    """Return the slowest rank of a row of the heatmap (in a large job the first of its node) at a step."""
    steps = heat.first.tolist()
    if first not in heat.ranks or last not in heat.ranks or step not in steps:
        return first
    lines = slice(heat.ranks.index(first), heat.ranks.index(last) + 1)
    levels = heat.z[lines, steps.index(step)] + np.uint8(1)  # what is missing is 255, and now 0
    return heat.ranks[lines][levels.argmax()]


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    shown = part(html.Div([kpi_box(kpi) for kpi in view["kpis"]], id="kpis", className="kpis"))
    cards = part(html.Div(_cards(view["nodes"], route), id="node-cards", className="cards"))
    rows = event_table(view["events"][:_LISTED], route, "time", "severity", "kind", "rank", "what")
    listed = part(html.Div(rows, id="event-list"))
    every = part(dcc.Link("all", id="events-all", href=route.to("events")))
    exposed, timeline, skew = _charts(view, route)
    left = [_heatmap_panel(view, route), timeline, exposed]
    right = [*_change(view, route), skew, panel("Events", listed, note=every)]
    split = [html.Div(left, className="column"), html.Div(right, className="column")]
    charts = html.Div(split, className="split")
    title = html.H1("Overview", className="unseen")
    return html.Div([title, axis.panel(view, route), shown, charts, panel("Nodes", cards)])


def _charts(view: Mapping[str, Any], route: Route) -> list[Chart]:
    revision, frame = str(view["session"]["run"]), axis.frame(view["axis"])
    columns: StepColumns | None = view["columns"]
    clock = frame.get("clock")
    steps, stages, skew = [], {}, {}
    if columns is not None:
        steps, stages = figures.middles(columns), by_stage(columns.exposed)
        skew = {"ranks": columns.global_pct, "nodes": columns.node_pct}
    return [
        chart(
            "exposed",
            "Where a step's time goes",
            figures.exposed(steps, stages, revision, frame),
            "Exposed time of each stage by step, stacked",
            route,
            series=drawing.STAGES,
            clock=clock,
        ),
        chart(
            "timeline",
            "Step timeline",
            figures.timeline(columns, view["events"], frame),
            "Busy time of the median and the worst rank by step",
            route,
            series={"worst": drawing.ORANGE, "median": drawing.BLUE, figures.BAND: "#3b82c466"},
            clock=clock,
        ),
        chart(
            "skew",
            "Skew of ranks and nodes",
            figures.lines(
                steps,
                skew,
                "skew %",
                unit="%",
                colours=(drawing.ORANGE, drawing.BLUE),
                revision=revision,
                frame=frame,
            ),
            "How far the worst rank and the slowest node are over the others, by step",
            route,
            series={"ranks": drawing.ORANGE, "nodes": drawing.BLUE},
            tall="low",
            clock=clock,
        ),
    ]


def _change(view: Mapping[str, Any], route: Route) -> list[Chart]:
    """
    Return what each stage has added to a step since the onset. Empty if the times before or after are
    unknown.
    """
    change: ChangedParts | None = view["change"]
    if change is None or not (before := change.before.stages) or not (since := change.since.stages):
        return []
    figure = figures.waterfall(before, since)
    title = "A step before the onset, and since"
    steps = f"{text.count(change.before.steps, 'step')} before, {change.since.steps:,} since"
    label = f"Exposed time of a step by stage, {steps}"
    columns = [
        Column("stage", str),
        Column("before", lambda stage: before[stage], "ms"),
        Column("since", lambda stage: since[stage], "ms"),
    ]
    return [chart("change", title, figure, label, route, rows=table(Table(label, columns, STAGES), route))]


def _heatmap_panel(view: Mapping[str, Any], route: Route) -> html.Section:
    """Return the heatmap with its choices and legend, and as a table."""
    heat, names = view["heat"], html.Div(id="heat-rows")
    figure = figures.blank("No closed step yet.")
    rows: Any = html.P("No closed step yet.", className="empty")
    if heat is not None:
        drawn = heatmap.rows(heat, view["verdict"], route)
        frame, revision = axis.frame(view["axis"]), f"{view['session']['run']} {view['stage']}"
        figure, names = heat_figure(heat, drawn, revision, frame), heatmap.gutter(drawn)
        if route.get("table") == "heat":
            rows = heatmap.as_table(heat, drawn, route)
    missing = html.Span([html.I(className="missing"), "missing"], className="key")
    graph = dcc.Graph(id="heat", figure=figure, config=CLICKED, clear_on_unhover=True)
    colours: dict[str, Any] = {"border_color": "var(--soft)", "background_color": "var(--surface)"}
    keys = (
        "Busy time of each rank by step, over the median. Arrow keys move the cursor, Enter opens the rank."
    )
    return panel(
        "Busy time by rank, against the median of the step",
        html.Div(
            [
                part(names),
                html.Div(graph, **aria(hidden="true")),
                html.I(id="heat-cursor"),
                html.Div(dcc.Tooltip(id="heat-tip", className="tip", **colours), **aria(live="polite")),
            ],
            className="graph heat-box",
            role="application",
            tabIndex=0,
            **aria(label=keys),
        ),
        html.Div([heatmap.scale(), missing], className="heat-legend"),
        numbers("heat", keys, figure, route, rows),
        note=[
            _choice("order", "Order of the rows", _ORDERS, route.get("order") or "by node", route),
            _choice("stage", "Stage of the heatmap", _STAGES, route.get("stage") or "total", route),
        ],
    )


def _choice(name: str, label: str, values: Mapping[str, str | None], chosen: str, route: Route) -> Content:
    """Return links to the values of one part of the selection."""
    links = [
        link(shown, route.here(**{name: value}), "segment", on=chosen in (shown, value))
        for shown, value in values.items()
    ]
    return part(html.Nav(links, id=f"heat-{name}", className="segments", **aria(label=label)))


def _cards(nodes: list[Mapping[str, Any]], route: Route) -> list[Any]:
    """Return a card for each node. If there are very many, the worst nodes, and the names of the others."""
    shown = nodes if len(nodes) <= _CARDS else sorted(nodes, key=badness, reverse=True)[:_FEW_CARDS]
    cards: list[Any] = [_card(node, route) for node in shown]
    if rest := [node for node in nodes if node not in shown]:
        links = [node_link(node["node_id"], node["label"], route) for node in rest]
        more = [html.Summary(text.count(len(rest), "more node")), html.Div(links, className="links")]
        cards.append(html.Details(more, className="rest"))
    return cards or [html.P("No node yet.", className="empty")]


def _card(node: Mapping[str, Any], route: Route) -> dcc.Link:
    over, alive = node["slower_pct"], node["alive"]
    slower = f"{text.percent(over, sign=True)} over the fastest" if (over or 0) >= 0.05 else "the fastest"
    size = html.Span(
        text.count(len(node["ranks"]), "rank") if alive else "lost", className="" if alive else "gone-word"
    )
    median = [
        html.Span(text.number(node["median_ms"]), className="value"),
        html.Span("ms median", className="unit"),
        html.Span("" if over is None else slower, className="over"),
    ]
    worst = [
        html.Span(f"worst rank {node['worst_rank']}, {text.ms(node['worst_ms'])}"),
        html.Span(f"skew {text.percent(node['skew_pct'])}"),
    ]
    used = (("CPU", "cpu_pct"), ("RAM", "mem_pct"), ("GPU", "gpu_util_pct"), ("VRAM", "gpu_mem_pct"))
    meters = [meter(name, node[key]) for name, key in used if node[key] is not None]
    body = [
        html.Div([html.Strong(node["label"]), size], className="card-head"),
        html.Div(median, className="card-value"),
        html.Div(worst if node["worst_rank"] is not None else None, className="text"),
        html.Div(meters, className="meters"),
    ]
    return dcc.Link(body, href=route.to("node", node["node_id"]), className="card" if alive else "card gone")
