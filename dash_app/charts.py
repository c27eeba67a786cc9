"""Charts of pages: a panel with a figure, a legend that switches its lines, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from traceml_ray import text
from traceml_ray.document.model import Column, Table
from traceml_ray.document.step_clock import StepClock
from traceml_ray.reports.run_facts import moment
from traceml_ray.views import figures

from .elements import Content, aria, link, panel_head, part, plain, table
from .route import Route

_MOST_OFF = 8
"""Largest number of series switched off at a time."""
_TABLE_ROWS = 100
CONFIG: Any = {"displayModeBar": False, "responsive": True, "doubleClick": "autosize"}
CLICKED: Any = {**CONFIG, "doubleClick": False, "showTips": False}


class Chart(Component):
    """
    A panel with a graph, drawn when it becomes visible, and its table (`children`). `head` is above the
    graph, and `box` has the properties of the surrounding element. This is one component (assets/app.js),
    where Dash would need seven.
    """

    _namespace, _type = "traceml_ray", "Chart"
    _prop_names = ["id", "head", "box", "children"]
    _children_props: list[str] = []
    _valid_wildcard_attributes: list[str] = []

    def __init__(self, id: str, head: Any, box: Any, children: list[Component]) -> None:
        self.id, self.head, self.box, self.children = id, head, box, children


def chart(
    id: str,
    title: str,
    figure: figures.Figure,
    label: str,
    route: Route,
    *,
    series: Mapping[str, str] | None = None,
    colours: Mapping[str, str] | None = None,
    tall: str = "",
    height: int = 0,
    rows: Any = None,
    clock: StepClock | None = None,
) -> Chart:
    """
    Return a panel with one figure, `height` px high, and its table if `route` asks for it: `rows`, or the
    values of the figure. `label` says what the figure shows. `series` has the names of its traces (or groups
    of traces) with their colours; each can be switched off. `colours` has the other colours in the figure.
    `clock` has the times at which the steps of its axis ended.
    """
    off = _switched_off(id, route)
    for trace in figure["data"]:
        if trace.get("legendgroup", trace.get("name")) in off:
            trace["visible"] = False
    keys: list[Any] = [
        *_legend(id, series or {}, off, route),
        *(_key(*entry) for entry in (colours or {}).items()),
    ]
    style: Any = {"style": {"height": f"{height}px"}} if height else {}
    box = {"className": f"graph {tall}".strip(), "role": "img", **style, **aria(label=label)}
    graph = dcc.Graph(id=id, figure=figure, config=CONFIG)
    head = plain(panel_head(title, keys, f"{id}-legend"))
    return Chart(f"{id}-panel", head, box, [graph, numbers(id, label, figure, route, rows, clock)])


def numbers(
    id: str,
    label: str,
    figure: figures.Figure,
    route: Route,
    rows: Any = None,
    clock: StepClock | None = None,
) -> Content:
    """
    Return the link that shows a figure as a table, the table itself if `route` asks for it, and the button
    that makes a picture of the figure (assets/picture.js).
    """
    on = route.get("table") == id
    choose = link("Table", route.here(table=None if on else id), "segment", on=on, title=label)
    data: dict[str, Any] = {"data-png": id, "title": f"Download as PNG: {label}"}
    png = html.Button("PNG", type="button", className="segment", **data)
    shown = [rows or figure_table(figure, label, route, clock)] if on else []
    return part(html.Div([choose, png, *shown], id=f"{id}-table", className="numbers"))


def figure_table(figure: figures.Figure, label: str, route: Route, clock: StepClock | None = None) -> Any:
    """
    Return the values of lines or bars as a table, for lines the newest first. `clock` has when
    steps ended.
    """
    traces = [t for t in figure["data"] if t.get("hoverinfo") != "skip" and t.get("mode") != "markers"]
    flat = any(trace.get("orientation") == "h" for trace in traces)
    axis = figure["layout"]["yaxis" if flat else "xaxis"]
    names: Sequence[Any] = traces[0]["y" if flat else "x"][::-1] if traces else ()
    timed = axis.get("type") == "date"

    def value_of(trace: Mapping[str, Any]) -> Callable[[int], Any]:
        values = trace["x" if flat else "y"][::-1]
        return lambda index: values[index]

    def place(index: int) -> Any:
        return moment(1_000_000 * names[index]) if timed else names[index]

    head = "time" if timed else axis["title"]["text"].partition(", time")[0]
    columns = [Column(head, place, "date" if timed else "name")]
    if clock:
        times = clock.texts(names)
        columns.append(Column(f"time ({text.zone()})", lambda index: times[index], "clock", str))
    columns += [Column(trace["name"], value_of(trace), "number") for trace in traces]
    return table(Table(label, columns, range(min(len(names), _TABLE_ROWS))), route)


def _switched_off(id: str, route: Route) -> set[str]:
    """Return the series of a chart that are switched off in the URL (`off=chart.series,…`)."""
    chosen = (entry.partition(".") for entry in (route.get("off") or "").split(","))
    return {series for chart, _, series in chosen if chart == id}


def _key(name: str, colour: str) -> html.Span:
    return html.Span([html.I(style={"background": colour}), name], className="key")


def _legend(id: str, series: Mapping[str, str], off: set[str], route: Route) -> list[html.A]:
    """Return the names of series with their colours, as links that switch them on and off."""
    others = [entry for entry in (route.get("off") or "").split(",") if entry]
    entries = []
    for name, colour in series.items():
        key = f"{id}.{name}"
        after = [entry for entry in others if entry != key] + ([] if name in off else [key])
        does = f"{'Show' if name in off else 'Hide'} {name}"
        entries.append(
            html.A(
                [html.I(style={"background": colour}), name.removeprefix("GPU ")],
                href=route.here(off=",".join(after[-_MOST_OFF:]) or None),
                className="key off" if name in off else "key",
                title=does,
            )
        )
    return entries
