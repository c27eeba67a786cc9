"""Blocks of a document as components of a page: tables, facts, lines, and sections of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dash import dcc, html

from traceml_ray.document.model import SIGNS, Column, Facts, Lines, Section, Table
from traceml_ray.views import timezone

from .components import aria, marked, spark, when
from .route import Route

Cell = Callable[[Any], Any]


def table(
    block: Table,
    route: Route,
    *,
    heads: Mapping[str, Any] | None = None,
    cells: Mapping[str, Cell] | None = None,
) -> Any:
    """
    Return a table with a row for each item and the note below it; without any item, what it says then.

    Columns that stay empty are left out, unless they have one of `heads`: what is in the place of a name, as
    `listing.heads`. So have `cells`, by name of the column, in the place of what it writes of an item.
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
        html.Th(
            known_heads.get(column.name) or column.head(timezone.abbreviation()), className=css, scope="col"
        )
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
    """Return what is written of an item, in the elements of its unit."""
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
    between = (min(values), max(values)) if values else None
    first = block.columns[0]
    return lambda item: spark(column.value(item), f"{column.name}, {first.name} {first.cell(item)}", between)


def facts_list(block: Facts) -> Any:
    """Return names with what is to be said of each."""
    named: list[tuple[str, list[Any]]] = []
    for name, value in block.pairs:
        if name or not named:
            named.append((name, []))
        named[-1][1].append(html.Dd(marked(value)))
    return html.Dl([html.Div([html.Dt(name), *values]) for name, values in named], className="said-facts")


def blocks(content: Section, route: Route) -> list[Any]:
    """Return what a page can show of a section without a script: facts, lines and tables."""
    shown: list[Any] = []
    for block in content.blocks:
        if isinstance(block, Facts) and block.pairs:
            shown.append(facts_list(block))
        elif isinstance(block, Lines) and block.lines:
            shown += [
                html.H3(block.title),
                html.Pre("\n".join(f"{mark}  {line}" for mark, line in block.lines)),
            ]
        elif isinstance(block, Table) and (block.items or block.note):
            shown += [html.H3(block.title), table(block, route)]
    return shown
