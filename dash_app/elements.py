"""
Elements of pages: parts, panels, links, coloured words, and the blocks of a document (tables, facts, lines
and sections).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from traceml_ray import text
from traceml_ray.document import drawing
from traceml_ray.document.model import SIGNS, Column, Facts, Lines, Section, Strips, Table
from traceml_ray.reports.deaths import place_words
from traceml_ray.reports.run_facts import moment
from traceml_ray.store.step_shapes import DeathInfo

from .route import Route


class Content(Component):
    """
    One element with its content, as plain data that React draws, see assets/app.js.

    Dash components would cost the browser half a millisecond each per refresh: with Dash 4.4, 360 of them
    took 188 ms. In this form they take 12 ms.
    """

    _namespace, _type = "traceml_ray", "Content"
    _prop_names = ["id", "content"]
    _children_props: list[str] = []
    _valid_wildcard_attributes: list[str] = []

    def __init__(self, id: str, content: Any = None) -> None:
        self.id, self.content = id, content


def part(element: Any) -> Content:
    """Return an element as a part of a page: it is sent when a page opens, and again when it changes."""
    return Content(element.id, plain(element))


def plain(content: Any) -> Any:
    """Return a Dash component as `[tag, properties, *children]` for `Content`; a text as it is."""
    if not isinstance(content, Component):
        return content
    if isinstance(content, Content):
        return content.content
    given: Any = content.to_plotly_json  # Dash has no types
    props = {name: value for name, value in given()["props"].items() if value is not None}
    children = props.pop("children", ())
    inside = children if isinstance(children, (list, tuple)) else [children]
    tag = content._type.lower()
    return ["a" if tag == "link" else tag, props, *(plain(child) for child in inside if child is not None)]


def aria(**properties: str) -> dict[str, Any]:
    """
    Return properties for assistive technology by their names without "aria-": `label`, `hidden`,
    `live`.
    """
    return {f"aria-{name}": value for name, value in properties.items()}


def panel(title: str, *body: Any, note: Any = None) -> html.Section:
    """Return a titled box with elements; `note` is shown at the right of the title."""
    return html.Section([panel_head(title, note), *body], className="panel")


def panel_head(title: str, note: Any, id: str = "") -> html.Div:
    """Return the title of a box, and at its right a `note`, which can have an `id`."""
    attributes: dict[str, Any] = {"id": id} if id else {}
    beside = html.Div(note, className="note", **attributes)
    return html.Div([html.H2(title), beside], className="panel-head")


def facts(id: str, pairs: Mapping[str, Any]) -> Content:
    """Return names and values in a line that wraps, as a part of a page; values that are None are "n/a"."""
    cells = [html.Div([html.Dt(name), html.Dd(text.plain(value))]) for name, value in pairs.items()]
    return part(html.Dl(cells, id=id, className="facts"))


def link(label: str, href: str, style: str, *, on: bool = False, title: str | None = None) -> html.A:
    """Return a link in the style of a tab, chip or segment; `on` marks the chosen one."""
    current = aria(current="page" if style == "tab" else "true") if on else {}
    return html.A(label, href=href, className=f"{style} on" if on else style, title=title, **current)


def copying(label: str, copied: str, href: str, title: str | None = None) -> html.Button:
    """
    Return a button that copies a text, see assets/app.js. "{link}" in the text becomes the whole URL of
    `href`, with the part of the page that the address bar names.
    """
    data: dict[str, Any] = {"data-copy": copied, "data-link": href}
    return html.Button(label, type="button", className="chip", title=title, **data)


def form_field(tag: str, **properties: Any) -> Content:
    """Return an element of a form. Dash has no element that a browser submits by itself."""
    return Content("", [tag, properties])


def spark(values: Sequence[float | None], text: str, between: tuple[float, float] | None = None) -> Any:
    """
    Return a sparkline, or nothing if there is too little to draw. `between` is a shared scale. It is not an
    image, because the browser makes a whole document for each image, 2 ms of its main thread.
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
    """Return the path from the cluster to this page: names, with links to all except this page."""
    ways = [html.Span(dcc.Link("Cluster", href=route.to("overview")))]
    for name, href in names:
        ways.append(
            html.Span(name, **aria(current="page")) if href is None else html.Span(dcc.Link(name, href=href))
        )
    return part(html.Nav(ways, id="trail", className="trail", **aria(label="Breadcrumb")))


def rank_link(rank: int | None, route: Route, word: str = "") -> Any:
    """Return a link to the page of a rank, `word` before its number; None where `rank` is None."""
    return None if rank is None else dcc.Link(f"{word}{rank}", href=route.to("rank", rank))


def step_link(step: int | None, route: Route) -> Any:
    """Return a link to the page of a step; None where `step` is None."""
    return None if step is None else dcc.Link(f"{step:,}", href=route.to("step", step))


def node_link(key: str | None, label: str | None, route: Route) -> Any:
    """Return a link to the page of a node by its id (`key`); its label alone where the id is None."""
    return text.plain(label) if key is None else dcc.Link(label or key, href=route.to("node", key))


def died(death: DeathInfo) -> list[Any]:
    """Return how a rank died: "Killed by SIGKILL at 03:33:59 UTC, after step 110, in `data`"."""
    when = f"{'at' if death.exact else 'about'} {moment(death.t_ns)}"
    how = death.how[:1].upper() + death.how[1:]
    where = place_words(death.step, death.stage)
    return marked(", ".join(filter(None, (f"{how} {when}", where))))


def meter(label: str, value: float | None) -> html.Div:
    """Return a labelled bar for a share of 0 to 100 % with its number; None is "n/a"."""
    width = 0.0 if value is None else max(0.0, min(100.0, value))
    bar = html.I(html.B(style={"width": f"{width:.0f}%"}))
    return html.Div([html.Span(label), bar, html.Span(text.percent(value))], className="meter")


def marked(sentence: str) -> list[Any]:
    """
    Return a sentence as elements. Text in backticks becomes code, and times (ISO 8601) are shown in the
    reader's timezone. A number stays on the same line as its unit.
    """
    kept = re.sub(r"(?<=\d) (?=%|µs|ms|s\b|min\b|h\b|[kMGT]?B\b)", "\u00a0", sentence)
    shown: list[Any] = []
    for i, words in enumerate(kept.split("`")):
        shown += [html.Code(words)] if i % 2 else dated(words)
    return shown


def dated(sentence: str) -> list[Any]:
    """Return a sentence with its times (ISO 8601) in the reader's timezone."""
    pieces = enumerate(text.MOMENT.split(sentence))
    return [when(piece, text.with_clocks(piece)) if i % 2 else piece for i, piece in pieces if piece]


def when(moment: str | None, shown: str = "") -> Any:
    """
    Return a time (ISO 8601, UTC) in the reader's timezone, by default as day and time. On hover,
    in UTC.
    """
    if moment is None:
        return text.NA
    return html.Time(
        shown or text.date(moment), dateTime=moment, title=f"{moment[:19].replace('T', ' ')} UTC"
    )


Cell = Callable[[Any], Any]


def table(
    block: Table,
    route: Route,
    *,
    heads: Mapping[str, Any] | None = None,
    cells: Mapping[str, Cell] | None = None,
) -> Any:
    """
    Return a table with a row for each item of `block`, and its note below; without any item its `empty`
    text.

    Columns that stay empty are left out. `heads` has, by the name of a column, an element in place of the
    name (`listing.heads`); `cells` a function that makes the element of an item in place of what the column
    writes. Such columns always stay.
    """
    note = [html.P(marked(block.note), className="hint")] if block.note else []
    items = [*block.items]
    if not items:
        return html.Div([html.P(block.empty or "Nothing yet.", className="empty"), *note])
    given, known_heads = cells or {}, heads or {}
    shown = [
        column
        for column in block.columns
        if column.name in {*given, *known_heads} or column.unit == "line" or any(map(column.cell, items))
    ]
    draw = [given.get(column.name) or _drawn(column, block, route) for column in shown]
    style = ["num" if column.number else "" for column in shown]
    head = [
        html.Th(known_heads.get(column.name) or column.head(), className=css, scope="col")
        for column, css in zip(shown, style, strict=True)
    ]
    body = [
        html.Tr([html.Td(cell(item), className=css) for cell, css in zip(draw, style, strict=True)])
        for item in items
    ]
    named = aria(label=block.title)
    rows = html.Table([html.Thead(html.Tr(head)), html.Tbody(body)], **named)
    scrolls: dict[str, Any] = {"className": "scroll", "tabIndex": 0, "role": "region", **named}
    return html.Div([html.Div(rows, **scrolls), *note]) if note else html.Div(rows, **scrolls)


def keys_of(columns: Iterable[Column]) -> dict[str, Cell]:
    """Return the sort key of each column: name of the column → function of an item."""
    return {column.name: column.value for column in columns}


def _drawn(column: Column, block: Table, route: Route) -> Cell:
    """Return the function that makes the cells of a column."""
    if column.unit == "line":
        return _lines(column, block)

    def cell(item: Any) -> Any:
        shown: Any = _written(column, item)
        if tone := column.tone(item) if column.tone else "":
            sign = f"{SIGNS[tone]} " if tone in SIGNS else ""
            shown = html.Span([sign, shown], className=f"sev {tone}") if shown else shown
        target = column.link(item) if column.link else None
        return shown if target is None else dcc.Link(shown, href=route.to(*target))

    return cell


def _written(column: Column, item: Any) -> Any:
    """Return the text of an item, with its unit as a separate element."""
    value = column.value(item)
    if column.written or not value:
        return column.cell(item)
    if column.unit == "date":
        return when(value)
    if column.unit == "sentence":
        return html.Span(marked(value))
    return html.Code(column.cell(item)) if column.unit == "code" else column.cell(item)


def _lines(column: Column, block: Table) -> Cell:
    """Return the function that draws the sparkline of an item; all items share one scale."""
    values = [value for item in block.items for value in column.value(item) if value is not None]
    between = column.scale or ((min(values), max(values)) if values else None)
    first = block.columns[0]
    return lambda item: spark(column.value(item), f"{column.name}, {first.name} {first.cell(item)}", between)


def facts_list(block: Facts) -> Any:
    """Return facts as a list of names, each with one or more sentences."""
    named: list[tuple[str, list[Any]]] = []
    for name, value in block.pairs:
        if name or not named:
            named.append((name, []))
        named[-1][1].append(html.Dd(marked(value)))
    return html.Dl([html.Div([html.Dt(name), *values]) for name, values in named], className="said-facts")


def strips(block: Strips) -> Any:
    """Return strips with their legend. Pointing at a segment shows its text."""
    keys = [
        html.Span([html.I(style={"background": colour}), name], className="key")
        for name, colour in block.legend().items()
    ]
    rows: list[Any] = []
    for strip in block.strips:
        room = strip.length or 1.0
        parts = [
            html.I(
                title=part.title,
                style={
                    "left": f"{100 * part.base / room:.3f}%",
                    "width": f"{100 * part.width / room:.3f}%",
                    "background": part.colour,
                },
            )
            for part in strip.segments
        ]
        ends = [html.Div([html.Span(end) for end in strip.ends], className="ends")] * any(strip.ends)
        rows.append(html.Div([html.H4(strip.name), html.Div(parts, className="bar"), *ends]))
    return html.Div([html.Div(keys, className="strip-keys"), *rows], className="strips")


def blocks(content: Section, route: Route) -> list[Any]:
    """Return the facts, lines, strips and tables of a section as elements. Other drawings are left out."""
    shown: list[Any] = []
    for block in content.blocks:
        if isinstance(block, Facts) and block.pairs:
            shown.append(facts_list(block))
        elif isinstance(block, Lines) and block.lines:
            shown += [
                html.H3(block.title),
                html.Pre("\n".join(f"{mark}  {line}" for mark, line in block.lines)),
            ]
        elif isinstance(block, Strips):
            shown.append(strips(block))
        elif isinstance(block, Table) and (block.items or block.note):
            shown += [html.H3(block.title), table(block, route)]
    return shown
