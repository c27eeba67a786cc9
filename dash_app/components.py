"""Components of pages: parts, panels, charts, tables, and words with each colour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS, Severity
from traceml_ray.reports.summary import moment
from traceml_ray.step_shapes import DeathInfo

from . import figures
from .route import Route

CONFIG: Any = {"displayModeBar": False, "responsive": True, "doubleClick": "autosize"}
CLICKED: Any = {**CONFIG, "doubleClick": False, "showTips": False}
SIGNS = {"critical": "◆", "warning": "▲", "info": "●"}
_SEVERITY: dict[str, Severity] = {
    **{label: meaning.severity for label, meaning in LABELS.items()},
    **dict.fromkeys(("node_lost", "exception", "xid"), "critical"),
    **dict.fromkeys(("restart", "note", "swallowed"), "warning"),
}


def severity(kind: str) -> Severity:
    """Return how bad a kind of event, or the label of a verdict, is."""
    return _SEVERITY.get(kind, "info")


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


def part(element: Any) -> Content:
    """Return an element as a part of a page: sent whole when a page opens, and again when it changes."""
    return Content(element.id, _plain(element))


def _plain(content: Any) -> Any:
    """Return a component as `[tag, properties, *children]`, and text as it is."""
    if not isinstance(content, Component):
        return content
    given: Any = content.to_plotly_json  # it has no types
    props = {name: value for name, value in given()["props"].items() if value is not None}
    children = props.pop("children", ())
    inside = children if isinstance(children, (list, tuple)) else [children]
    return [content._type.lower(), props, *(_plain(each) for each in inside if each is not None)]


def aria(**properties: str) -> dict[str, Any]:
    """Return properties for assistive technology: `label`, `hidden`, `live`, …"""
    return {f"aria-{name}": value for name, value in properties.items()}


def panel(title: str, *body: Any, note: Any = None) -> html.Section:
    """Return a titled box; `note` is to the right of the title."""
    head = html.Div([html.H2(title), html.Div(note, className="note")], className="panel-head")
    return html.Section([head, *body], className="panel")


def chart(
    id: str, title: str, figure: figures.Figure, label: str, *, note: Any = None, tall: str = ""
) -> html.Section:
    """Return a panel with one figure; `label` describes it for assistive technology."""
    graph = dcc.Graph(id=id, figure=figure, config=CONFIG)
    box = html.Div(graph, className=f"graph {tall}".strip(), role="img", **aria(label=label))
    return panel(title, box, note=note)


def legend(entries: Mapping[str, str]) -> list[Any]:
    """Return names with the colours they are drawn in."""
    return [
        html.Span([html.I(style={"background": colour}), text.words(name)], className="key")
        for name, colour in entries.items()
    ]


Columns = Mapping[str, Callable[[Any], Any]]
"""Cells by header; a header that begins with `>` is that of a column of numbers."""


def table(columns: Columns, items: Iterable[Any], *, empty: str = "Nothing yet.", label: str = "") -> Any:
    """
    Return a table with a row for each item. Without any, `empty`.

    Not dash-ag-grid: 2.2 MB more for every browser, to draw a few rows; not DataTable: Dash will remove it.
    """
    style = {header: "num" if header.startswith(">") else "" for header in columns}
    head = html.Tr([html.Th(h.lstrip(">"), className=c, scope="col") for h, c in style.items()])
    body = [
        html.Tr([html.Td(cell(item), className=style[header]) for header, cell in columns.items()])
        for item in items
    ]
    rows = html.Table([html.Thead(head), html.Tbody(body)], **aria(label=label))
    return html.Div(rows, className="scroll", tabIndex=0) if body else html.P(empty, className="empty")


def facts(id: str, pairs: Mapping[str, Any]) -> Content:
    """Return names and values in one line that wraps, as a part; unknown ones are "n/a"."""
    cells = [html.Div([html.Dt(name), html.Dd(text.plain(value))]) for name, value in pairs.items()]
    return part(html.Dl(cells, id=id, className="facts"))


def link(label: str, href: str, style: str, *, on: bool = False, title: str | None = None) -> dcc.Link:
    """Return a link in the style of a tab, chip or segment; `on` marks the chosen one."""
    return dcc.Link(label, href=href, className=f"{style} on" if on else style, title=title)


def copying(label: str, copied: str, href: str) -> html.Button:
    """Return a button that copies a text, see assets/app.js; "{link}" in it becomes the whole of `href`."""
    data: dict[str, Any] = {"data-copy": copied, "data-link": href}
    return html.Button(label, type="button", className="chip", **data)


def spark(values: Sequence[float | None], text: str, between: tuple[float, float] | None = None) -> Any:
    """Return a sparkline, or nothing where there is too little to draw; `between` is a shared scale."""
    uri = figures.spark(values, between=between)
    return html.Img(src=uri, alt=text, className="spark") if uri else html.Span(className="spark")


def rank_link(rank: int | None, route: Route, word: str = "") -> Any:
    """Return a link to the page of a rank; nothing for None."""
    return None if rank is None else dcc.Link(f"{word}{rank}", href=route.to("rank", rank))


def node_link(key: str | None, label: str | None, route: Route) -> Any:
    """Return a link to the page of a node, or its bare label."""
    return text.plain(label) if key is None else dcc.Link(label or key, href=route.to("node", key))


def died(death: DeathInfo) -> str:
    """Return how a rank died: "Killed by SIGKILL at 03:33:59, in step 110, in data"."""
    when = f"{'at' if death['exact'] else 'about'} {text.clock(moment(death['t_ns']))} UTC"
    where = f"in step {death['step']:,}" if death["step"] is not None else ""
    stage = f"in {text.words(death['stage'])}" if death["stage"] else ""
    how = death["how"][:1].upper() + death["how"][1:]
    return ", ".join(filter(None, (f"{how} {when}", where, stage)))


def meter(label: str, value: float | None) -> html.Div:
    """Return a share of 0–100 % as a bar with its number."""
    width = 0.0 if value is None else max(0.0, min(100.0, value))
    bar = html.I(html.B(style={"width": f"{width:.0f}%"}))
    return html.Div([html.Span(label), bar, html.Span(text.percent(value))], className="meter")


def marked(sentence: str) -> list[Any]:
    """Return a sentence with what is in backticks as code; a number stays on the line of its unit."""
    kept = re.sub(r"(?<=\d) (?=%|µs|ms|s\b|min\b|h\b|[kMGT]?B\b)", "\u00a0", sentence)
    return [html.Code(part) if i % 2 else part for i, part in enumerate(kept.split("`"))]
