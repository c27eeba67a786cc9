"""What pages are made of: panels, charts, tables, and words with each colour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html

from traceml_ray import text

from .. import figures
from ..place import Place

CONFIG: Any = {"displayModeBar": False, "responsive": True, "doubleClick": "autosize"}
CLICKED: Any = {**CONFIG, "doubleClick": False, "showTips": False}
SEVERITY = {"critical": "◆", "warning": "▲", "info": "●"}


def aria(**properties: str) -> dict[str, Any]:
    """Return properties for those who do not see the page: `label`, `hidden`, `live`, …"""
    return {f"aria-{name}": value for name, value in properties.items()}


def panel(title: str, *body: Any, note: Any = None) -> html.Section:
    """Return a titled box; `note` is to the right of the title."""
    head = html.Div([html.H2(title), html.Div(note, className="note")], className="panel-head")
    return html.Section([head, *body], className="panel")


def chart(id: str, title: str, label: str, *, note: Any = None, tall: str = "") -> html.Section:
    """Return a panel with one figure; `label` tells those who do not see it what it shows."""
    graph = dcc.Graph(id=id, figure=figures.blank(""), config=CONFIG)
    return panel(
        title, html.Div(graph, className=f"graph {tall}".strip(), role="img", **aria(label=label)), note=note
    )


def legend(entries: Mapping[str, str]) -> list[Any]:
    """Return names with the colours they are drawn in."""
    return [
        html.Span([html.I(style={"background": colour}), text.words(name)], className="key")
        for name, colour in entries.items()
    ]


Columns = Mapping[str, Callable[[Any], Any]]
"""Cells by header; a header that begins with `>` is that of a column of numbers."""


def table(columns: Columns, items: Iterable[Any], *, empty: str = "Nothing yet.", label: str = "") -> Any:
    """Return a table with a row for each item. Without any, `empty`."""
    style = {header: "num" if header.startswith(">") else "" for header in columns}
    head = html.Tr([html.Th(h.lstrip(">"), className=c, scope="col") for h, c in style.items()])
    body = [
        html.Tr([html.Td(cell(item), className=style[header]) for header, cell in columns.items()])
        for item in items
    ]
    made = html.Table([html.Thead(head), html.Tbody(body)], **aria(label=label))
    return html.Div(made, className="scroll", tabIndex=0) if body else html.P(empty, className="empty")


def facts(pairs: Mapping[str, Any]) -> html.Dl:
    """Return names and values in one line that wraps; unknown ones are "n/a"."""
    cells = [html.Div([html.Dt(k), html.Dd(text.plain(v) if _simple(v) else v)]) for k, v in pairs.items()]
    return html.Dl(cells, className="facts")


def _simple(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def spark(values: Sequence[float | None], text: str, between: tuple[float, float] | None = None) -> Any:
    """Return a sparkline, or nothing where there is too little to draw; `between` is a shared scale."""
    uri = figures.spark(values, between=between)
    return html.Img(src=uri, alt=text, className="spark") if uri else html.Span(className="spark")


def rank_link(rank: int | None, place: Place, word: str = "rank ") -> Any:
    """Return a link to a rank's page, or "n/a"."""
    return text.NA if rank is None else dcc.Link(f"{word}{rank}", href=place.to("rank", rank))


def node_link(key: str | None, label: str | None, place: Place) -> Any:
    """Return a link to a node's page, or its bare label."""
    return text.plain(label) if key is None else dcc.Link(label or key, href=place.to("node", key))


def meter(label: str, value: float | None) -> html.Div:
    """Return a share of 0–100 % as a bar with its number."""
    width = 0.0 if value is None else max(0.0, min(100.0, value))
    bar = html.I(html.B(style={"width": f"{width:.0f}%"}))
    return html.Div([html.Span(label), bar, html.Span(text.percent(value))], className="meter")


def event_rows(events: Sequence[Mapping[str, Any]], place: Place) -> list[Any]:
    """Return events as list items: when, how bad (a sign and a word), what, and where."""
    return [
        html.Li(
            [
                html.Span(SEVERITY.get(event["severity"], "●"), className="sign", **aria(hidden="true")),
                html.Div(
                    [
                        html.Span(text.words(event["kind"]), className="kind"),
                        html.Span(_where(event), className="where"),
                        html.Time(text.clock(event["time"]), dateTime=event["time"] or ""),
                    ],
                    className="event-head",
                ),
                html.Div(_told(event, place), className="event-text"),
            ],
            className=f"event {event['severity']}",
            title=f"{event['severity']}, {event['time']}",
        )
        for event in events
    ]


def _where(event: Mapping[str, Any]) -> str:
    step = "" if event.get("step") is None else f"step {event['step']:,}"
    return " · ".join(part for part in (event["severity"] * (event["severity"] != "info"), step) if part)


def _told(event: Mapping[str, Any], place: Place) -> list[Any]:
    sentence = marked(event["text"])
    return sentence if event.get("rank") is None else [*sentence, " ", rank_link(event["rank"], place)]


def marked(sentence: str) -> list[Any]:
    """Return a sentence with what is in backticks as code; a number stays on the line of its unit."""
    kept = re.sub(r"(?<=\d) (?=%|µs|ms|s\b|min\b|h\b|[kMGT]?B\b)", "\u00a0", sentence)
    return [html.Code(part) if i % 2 else part for i, part in enumerate(kept.split("`"))]


def scaled(series: Sequence[float | None] | None, scale: float) -> list[float | None]:
    """Return a series in the unit of an axis."""
    return [None if value is None else value * scale for value in series or ()]
