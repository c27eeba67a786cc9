"""Components of pages: parts, panels, charts, tables, and words with each colour."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from traceml_ray import text
from traceml_ray.document import drawing
from traceml_ray.document.model import SIGNS, Column
from traceml_ray.reports.deaths import place_words
from traceml_ray.reports.run_facts import moment
from traceml_ray.store.step_shapes import DeathInfo
from traceml_ray.views import figures, timezone

from .route import Route

_MOST_OFF = 8
"""Largest number of series switched off at a time."""

_TABLE_ROWS = 100
CONFIG: Any = {"displayModeBar": False, "responsive": True, "doubleClick": "autosize"}
CLICKED: Any = {**CONFIG, "doubleClick": False, "showTips": False}


class Content(Component):
    """
    One element with all that is inside it, as plain data that React draws, see assets/app.js.

    As Dash components they would cost the browser half a millisecond each per refresh: with Dash 4.4 360 of
    them took 188 ms, and take 12 ms so.
    """

    _namespace, _type = "traceml_ray", "Content"
    _prop_names = ["id", "content"]
    _children_props: list[str] = []
    _valid_wildcard_attributes: list[str] = []

    def __init__(self, id: str, content: Any = None) -> None:
        self.id, self.content = id, content


class Chart(Component):
    """
    A panel with a graph, made when it comes into sight, and its table (`children`); `head` is above it, `box`
    has the properties of what is around it. One component, see assets/app.js, where Dash has seven.
    """

    _namespace, _type = "traceml_ray", "Chart"
    _prop_names = ["id", "head", "box", "children"]
    _children_props: list[str] = []
    _valid_wildcard_attributes: list[str] = []

    def __init__(self, id: str, head: Any, box: Any, children: list[Component]) -> None:
        self.id, self.head, self.box, self.children = id, head, box, children


def part(element: Any) -> Content:
    """Return an element as a part of a page: sent whole when a page opens, and again when it changes."""
    return Content(element.id, _plain(element))


def _plain(content: Any) -> Any:
    """Return a component as `[tag, properties, *children]`, and text as it is."""
    if not isinstance(content, Component):
        return content
    if isinstance(content, Content):
        return content.content
    given: Any = content.to_plotly_json  # it has no types
    props = {name: value for name, value in given()["props"].items() if value is not None}
    children = props.pop("children", ())
    inside = children if isinstance(children, (list, tuple)) else [children]
    tag = content._type.lower()
    return ["a" if tag == "link" else tag, props, *(_plain(child) for child in inside if child is not None)]


def aria(**properties: str) -> dict[str, Any]:
    """Return properties for assistive technology: `label`, `hidden`, `live`, …"""
    return {f"aria-{name}": value for name, value in properties.items()}


def panel(title: str, *body: Any, note: Any = None) -> html.Section:
    """Return a titled box; `note` is to the right of the title."""
    return html.Section([_head(title, note), *body], className="panel")


def _head(title: str, note: Any, id: str = "") -> html.Div:
    attributes: dict[str, Any] = {"id": id} if id else {}
    beside = html.Div(note, className="note", **attributes)
    return html.Div([html.H2(title), beside], className="panel-head")


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
) -> Chart:
    """
    Return a panel with one figure, `height` px high, and its table where `route` asks for it: `rows`, or the
    values of the figure; `label` says what it shows. `series` has the names of its traces (or groups of them)
    with their colours: each can be switched off. `colours` are others that are in it.
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
    head = _plain(_head(title, keys, f"{id}-legend"))
    return Chart(f"{id}-panel", head, box, [graph, numbers(id, label, figure, route, rows)])


def numbers(id: str, label: str, figure: figures.Figure, route: Route, rows: Any = None) -> Content:
    """
    Return the link to what a figure shows as a table, and that table where `route` asks for it; and the
    button that makes a picture of it, see assets/picture.js.
    """
    on = route.get("table") == id
    choose = link("Table", route.here(table=None if on else id), "segment", on=on, title=label)
    data: dict[str, Any] = {"data-png": id, "title": f"Download as PNG: {label}"}
    png = html.Button("PNG", type="button", className="segment", **data)
    shown = [rows or figure_table(figure, label)] if on else []
    return part(html.Div([choose, png, *shown], id=f"{id}-table", className="numbers"))


def figure_table(figure: figures.Figure, label: str) -> Any:
    """Return the values of lines or bars, those of lines newest first."""
    traces = [t for t in figure["data"] if t.get("hoverinfo") != "skip" and t.get("mode") != "markers"]
    flat = any(trace.get("orientation") == "h" for trace in traces)
    axis = figure["layout"]["yaxis" if flat else "xaxis"]
    names = traces[0]["y" if flat else "x"][::-1] if traces else ()
    timed = axis.get("type") == "date"
    columns = {axis["title"]["text"]: lambda index: _axis_text(names[index], timed)}
    for trace in traces:
        columns[f">{trace['name']}"] = functools.partial(_value, trace["x" if flat else "y"][::-1])
    return table(columns, range(min(len(names), _TABLE_ROWS)), label=label)


def _value(values: Sequence[float | None], index: int) -> str:
    return text.number(values[index])


def _axis_text(value: Any, timed: bool) -> Any:
    """Format a value of an axis: a time if `timed`, else a number."""
    return when(moment(1_000_000 * value)) if timed else text.plain(value)


def _switched_off(id: str, route: Route) -> set[str]:
    """Return the series of a chart that are switched off in the URL (`off=chart.series,…`)."""
    chosen = (entry.partition(".") for entry in (route.get("off") or "").split(","))
    return {series for chart, _, series in chosen if chart == id}


def _key(name: str, colour: str) -> html.Span:
    return html.Span([html.I(style={"background": colour}), name], className="key")


def _legend(id: str, series: Mapping[str, str], off: set[str], route: Route) -> list[html.A]:
    """Return names with the colours they are drawn in, as links that switch them."""
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


Columns = Mapping[str, Callable[[Any], Any]]
"""Cells by header; a header that begins with `>` is that of a column of numbers."""


def cells_of(columns: Iterable[Column], route: Route, **replaced: Callable[[Any], Any]) -> Columns:
    """Return the cells of a table of a document, some of them `replaced`, by name."""

    def cell(column: Column, item: Any) -> Any:
        shown: Any = column.cell(item)
        if tone := column.tone(item) if column.tone else "":
            shown = html.Span(f"{SIGNS[tone]} {shown}", className=f"sev {tone}")
        target = column.link(item) if column.link else None
        return shown if target is None else dcc.Link(shown, href=route.to(*target))

    return {
        ">" * column.number + column.name: replaced.get(column.name, functools.partial(cell, column))
        for column in columns
    }


def keys_of(columns: Iterable[Column]) -> dict[str, Callable[[Any], Any]]:
    """Return the sort keys of a table of a document."""
    return {column.name: column.value for column in columns}


def table(
    columns: Columns,
    items: Iterable[Any],
    *,
    heads: Mapping[str, Any] | None = None,
    empty: str = "Nothing yet.",
    label: str,
) -> Any:
    """
    Return a table with a row for each item; `heads` replace some headers; `label` says what it shows. Without
    any item, `empty`.
    """
    style = {header: "num" if header.startswith(">") else "" for header in columns}
    shown = {header: header.lstrip(">") for header in columns} | dict(heads or {})
    head = html.Tr([html.Th(shown[h], className=c, scope="col") for h, c in style.items()])
    body = [
        html.Tr([html.Td(cell(item), className=style[header]) for header, cell in columns.items()])
        for item in items
    ]
    named = aria(label=label)
    rows = html.Table([html.Thead(head), html.Tbody(body)], **named)
    scrolls: dict[str, Any] = {"className": "scroll", "tabIndex": 0, "role": "region", **named}
    return html.Div(rows, **scrolls) if body else html.P(empty, className="empty")


def facts(id: str, pairs: Mapping[str, Any]) -> Content:
    """Return names and values in one line that wraps, as a part; unknown ones are "n/a"."""
    cells = [html.Div([html.Dt(name), html.Dd(text.plain(value))]) for name, value in pairs.items()]
    return part(html.Dl(cells, id=id, className="facts"))


def link(label: str, href: str, style: str, *, on: bool = False, title: str | None = None) -> html.A:
    """Return a link in the style of a tab, chip or segment; `on` marks the chosen one."""
    current = aria(current="page" if style == "tab" else "true") if on else {}
    return html.A(label, href=href, className=f"{style} on" if on else style, title=title, **current)


def copying(label: str, copied: str, href: str) -> html.Button:
    """Return a button that copies a text, see assets/app.js; "{link}" in it becomes the whole of `href`."""
    data: dict[str, Any] = {"data-copy": copied, "data-link": href}
    return html.Button(label, type="button", className="chip", **data)


def spark(values: Sequence[float | None], text: str, between: tuple[float, float] | None = None) -> Any:
    """
    Return a sparkline, or nothing where there is too little to draw; `between` is a shared scale. Not an
    image: the browser takes a whole document for each, 2 ms of its main thread.
    """
    width, height = 120, 28
    path = drawing.spark(values, between, (width, height))
    if not path:
        return html.Span(className="spark")
    around = {"viewBox": f"0 0 {width} {height}", "preserveAspectRatio": "none", "className": "spark"}
    line = {"d": path, "fill": "none", "stroke": drawing.BLUE, "strokeWidth": 1.5}
    drawn = ["path", {**line, "vectorEffect": "non-scaling-stroke"}]
    return Content("", ["svg", {**around, "role": "img", **aria(label=text)}, drawn])


def trail(route: Route, *names: tuple[str, str | None]) -> Content:
    """Return the way from the cluster to this page: names, and links to all but this page itself."""
    ways = [html.Span(dcc.Link("Cluster", href=route.to("overview")))]
    for name, href in names:
        ways.append(
            html.Span(name, **aria(current="page")) if href is None else html.Span(dcc.Link(name, href=href))
        )
    return part(html.Nav(ways, id="trail", className="trail", **aria(label="Breadcrumb")))


def rank_link(rank: int | None, route: Route, word: str = "") -> Any:
    """Return a link to the page of a rank; nothing for None."""
    return None if rank is None else dcc.Link(f"{word}{rank}", href=route.to("rank", rank))


def step_link(step: int | None, route: Route) -> Any:
    """Return a link to the page of a step; nothing for None."""
    return None if step is None else dcc.Link(f"{step:,}", href=route.to("step", step))


def node_link(key: str | None, label: str | None, route: Route) -> Any:
    """Return a link to the page of a node, or its bare label."""
    return text.plain(label) if key is None else dcc.Link(label or key, href=route.to("node", key))


def died(death: DeathInfo) -> list[Any]:
    """Return how a rank died: "Killed by SIGKILL at 03:33:59 UTC, after step 110, in `data`"."""
    when = f"{'at' if death['exact'] else 'about'} {moment(death['t_ns'])}"
    how = death["how"][:1].upper() + death["how"][1:]
    where = place_words(death["step"], death["stage"])
    return marked(", ".join(filter(None, (f"{how} {when}", where))))


def meter(label: str, value: float | None) -> html.Div:
    """Return a share of 0–100 % as a bar with its number."""
    width = 0.0 if value is None else max(0.0, min(100.0, value))
    bar = html.I(html.B(style={"width": f"{width:.0f}%"}))
    return html.Div([html.Span(label), bar, html.Span(text.percent(value))], className="meter")


def marked(sentence: str) -> list[Any]:
    """
    Return a sentence with what is in backticks as code, and moments (ISO 8601) in the reader's timezone; a
    number stays on the line of its unit.
    """
    kept = re.sub(r"(?<=\d) (?=%|µs|ms|s\b|min\b|h\b|[kMGT]?B\b)", "\u00a0", sentence)
    shown: list[Any] = []
    for i, words in enumerate(kept.split("`")):
        shown += [html.Code(words)] if i % 2 else dated(words)
    return shown


def dated(sentence: str) -> list[Any]:
    """Return a sentence with its moments (ISO 8601) in the reader's timezone."""
    pieces = enumerate(text.MOMENT.split(sentence))
    return [when(piece, timezone.clock(piece)) if i % 2 else piece for i, piece in pieces if piece]


def when(moment: str | None, shown: str = "") -> Any:
    """Return a moment (ISO 8601, UTC) in the reader's timezone, by default day and time; in UTC on hover."""
    if moment is None:
        return text.NA
    return html.Time(shown or timezone.date(moment), dateTime=moment, title=f"{text.date(moment)} UTC")
