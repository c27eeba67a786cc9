"""
The rank × time heatmap. It has a row for each rank, or, if there are many ranks, a row per node that shows
its worst rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.analysis.spread import MISSING, excess, level, ratio
from traceml_ray.analysis.window import UInt8
from traceml_ray.document import drawing
from traceml_ray.document.drawing import HEAT_COLOURS, HEAT_MARKS, HEIGHT, HeatRow, css
from traceml_ray.document.model import Column, Table
from traceml_ray.store.results import LiveVerdict
from traceml_ray.views.figures import BOTTOM
from traceml_ray.views.heat_figure import TOP

from .elements import table
from .route import Route

_LEAST_HEIGHT, _ROW = 66, 22
"""Least height of all rows together, and height of one row if there are few, in px."""
_LABEL, _TOGGLE = 13, 24
"""Height in px of a label, and of a label that can be clicked."""
_MOST_CHANGED = 8
_TABLE_ROWS, _TABLE_COLUMNS = 100, 10


def rows(heat: StepColumns, verdict: LiveVerdict | None, route: Route) -> list[HeatRow]:
    """
    Return the rows of the heatmap with their links, in the order given by the URL.

    In the URL, `order=cost` puts the worst first; by default rows are sorted by node. `open` and `shut` name
    nodes that a person has opened or closed. Any other node is open if there are few ranks, or if the verdict
    names one of its ranks.
    """
    named = drawing.suspects(heat, verdict)
    if route.get("order") == "cost":
        return [_linked(heat, row, route) for row in drawing.by_cost(heat, named)]
    drawn = drawing.by_node(heat, named, _listed(route, "open"), _listed(route, "shut"))
    several = heat.by != "node" and sum(row.first for row in drawn) > 1
    return [_linked(heat, row, route, several and row.first) for row in drawn]


def _linked(heat: StepColumns, row: HeatRow, route: Route, opens: bool = False) -> HeatRow:
    """Return a row with its links."""
    toggle = _toggle(route, row.node, row.rank is not None) if opens else None
    if row.rank is not None:
        return row._replace(href=route.to("rank", row.rank), toggle=toggle)
    single = heat.by == "node" and len(row.lines) == 1
    return row._replace(href=route.to("node", row.node) if single else toggle, toggle=toggle)


def _listed(route: Route, name: str) -> list[str]:
    return [node for node in (route.get(name) or "").split(",") if node]


def _toggle(route: Route, node: str, is_open: bool) -> str:
    """Return the link that closes an open node, or opens a closed one."""
    lists = {name: [other for other in _listed(route, name) if other != node] for name in ("open", "shut")}
    lists["shut" if is_open else "open"].append(node)
    return route.here(**{name: ",".join(nodes[-_MOST_CHANGED:]) or None for name, nodes in lists.items()})


def gutter(drawn: Sequence[HeatRow]) -> html.Div:
    """Return the row names next to the heatmap, at the same height, as many as fit."""
    lines = sum(row.height for row in drawn)
    px = min(HEIGHT, max(_LEAST_HEIGHT, _ROW * lines))
    edges = [0, *accumulate(row.height for row in drawn)]
    middles = [px * (low + high) / 2 / lines for low, high in pairwise(edges)]
    labels = [_label(drawn[index], TOP + middles[index]) for index in _labelled_rows(drawn, middles)]
    return html.Div(labels, id="heat-rows", style={"height": f"{px + TOP + BOTTOM}px"})


def _label(row: HeatRow, y: float) -> html.Div:
    rank = "" if row.rank is None else f"{row.rank}"
    node: Any = row.node if row.first else ""
    if row.toggle:
        closed = row.rank is None
        sign, does = ("▸", "Open") if closed else ("▾", "Close")
        node = dcc.Link(f"{sign} {row.node}", href=row.toggle, title=f"{does} {row.node}", className="toggle")
    mark = "▶ " if row.named else ""
    inside = [html.Span(node, className="row-node"), html.Span(mark + rank)]
    return html.Div(
        inside, className="row-label named" if row.named else "row-label", style={"top": f"{y:.1f}px"}
    )


def _labelled_rows(drawn: Sequence[HeatRow], middles: Sequence[float]) -> list[int]:
    """Return the indices of the rows that get a label, as many as fit: named and higher rows first."""
    chosen: list[int] = []
    for row in sorted(
        range(len(drawn)),
        key=lambda row: (
            not drawn[row].named,
            -drawn[row].height,
            not drawn[row].toggle,
            not drawn[row].first,
        ),
    ):
        both = [_TOGGLE if drawn[row].toggle and drawn[other].toggle else _LABEL for other in chosen]
        if all(abs(middles[row] - middles[other]) >= room for other, room in zip(chosen, both, strict=True)):
            chosen.append(row)
    return sorted(chosen)


def scale() -> html.Div:
    """Return the legend: the colours, and the ratios to the median that they represent."""
    stops = ", ".join(
        f"{css(colour)} {100 * level(factor) / 254:.0f}%" for factor, colour in HEAT_COLOURS.items()
    )
    marks = [
        html.Span(f"{factor:g}×", style={"left": f"{100 * level(factor) / 254:.0f}%"})
        for factor in HEAT_MARKS
    ]
    return html.Div(
        [html.I(style={"background": f"linear-gradient(90deg, {stops})"}), *marks], className="scale"
    )


def as_table(heat: StepColumns, drawn: Sequence[HeatRow], route: Route) -> Any:
    """Return the newest columns of the heatmap as a table of ratios to the median, the worst rows first."""
    z = drawing.worst(heat, drawn)
    over: list[float] = excess(z).tolist()

    def row(index: int) -> Any:
        name, href = drawn[index].name, drawn[index].href
        return dcc.Link(name, href=href) if href else name

    order = sorted(
        range(len(drawn)), key=lambda index: (-over[index] if over[index] == over[index] else math.inf, index)
    )
    columns = [
        Column("row", lambda index: drawn[index].name),
        Column("mean", lambda index: 1 + over[index], "factor"),
        *(
            Column(f"step {last:,}", functools.partial(_cell, z[:, column]), "figures")
            for column, last in [*enumerate(heat.last.tolist())][-_TABLE_COLUMNS:]
        ),
    ]
    note = f"{min(len(order), _TABLE_ROWS)} of {text.count(len(order), 'row')}, the worst first."
    title = "Busy time over the median, the worst rows first"
    return table(Table(title, columns, order[:_TABLE_ROWS], note), route, cells={"row": row})


def _cell(column: UInt8, index: int) -> str:
    value = int(column[index])
    return (
        "missing"
        if value == MISSING
        else {0: "≤ ", 254: "≥ "}.get(value, "") + text.times(float(ratio(value)))
    )
