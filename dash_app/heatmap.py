"""The rank × time heatmap: a row for each rank, or where there are many for each node, as its worst rank."""

from __future__ import annotations

import functools
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from dash import dcc, html

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, excess, level, ratio
from traceml_ray.analysis.window import UInt8

from . import figures
from .components import Columns, table
from .route import Route

TOP, BOTTOM = 6, 38
_LEAST_HEIGHT, _HEIGHT, _ROW = 66, 278, 22
"""px of all rows, and of one where there are few."""
_LABEL, _TOGGLE, _LINE = 13, 24, 14
"""px that a label, one that is clicked on, and a line between nodes need."""
_MOST_ROWS = 128
"""Of ranks: with more, a row of one rank is too thin to be seen."""
_WORST = 40
"""Ranks of more that have a row of their own, the costliest first."""
_MOST_GROUPS, _MOST_NAMED, _MOST_CHANGED = 200, 8, 8
_TABLE_ROWS, _TABLE_COLUMNS = 100, 10
# A median shows the ground, so that the colours hold on light and on dark.
_COLOURS = {
    0.25: "rgb(20,70,150)",
    0.5: "rgb(59,130,196)",
    0.85: "rgba(59,130,196,.35)",
    1.0: "rgba(139,147,156,.08)",
    1.12: "rgba(232,150,50,.35)",
    1.5: "rgb(232,140,50)",
    2.0: "rgb(212,85,20)",
    4.0: "rgb(150,15,85)",
}
_MISSING = "rgba(139,147,156,.6)"
MARKS = (0.25, 0.5, 1, 2, 4)
"""Under the scale."""


class Row(NamedTuple):
    """What is drawn as one row."""

    lines: Sequence[int]
    """Of the data's `z`: one, or several, of which the worst is drawn."""
    name: str
    """What the tooltip calls it."""
    node: str
    href: str | None
    """Where a click leads."""
    rank: int | None = None
    """Of a row that is one rank."""
    first: bool = False
    """Whether it is the first of its node."""
    named: bool = False
    """Whether the verdict names it."""
    height: int = 1
    toggle: str | None = None
    """Link that opens or closes its node."""


def rows(heat: Mapping[str, Any], verdict: Mapping[str, Any], route: Route) -> list[Row]:
    """
    Return what is drawn. In the URL `order` is `cost`, or by default by node; `open` and `shut` are nodes
    that a person has opened or closed. By itself one is open where ranks are few, or the verdict names it.
    """
    kind = "nodes" if heat["by"] == "node" else "ranks"
    suspects = () if verdict.get("label") == "healthy" else (verdict.get(kind) or ())[:_MOST_NAMED]
    named = {at for at, line in enumerate(heat[kind]) if line in suspects}
    found = _by_cost(heat, route) if route.get("order") == "cost" else _by_node(heat, named, route)
    return [row._replace(named=len(row.lines) == 1 and row.lines[0] in named) for row in found]


def _by_node(heat: Mapping[str, Any], named: set[int], route: Route) -> list[Row]:
    nodes, count = heat["nodes"], len(heat["nodes"])
    few, open_, shut = count <= _MOST_ROWS, _listed(route, "open"), _listed(route, "shut")
    starts = [at for at in range(count) if at == 0 or nodes[at] != nodes[at - 1]]
    groups = starts if few else starts[:: -(-len(starts) // _MOST_GROUPS)]
    spans = [range(*both) for both in pairwise([*groups, count])]
    opened = [
        span
        for span in spans
        if nodes[span[0]] in open_ or ((few or named & {*span}) and nodes[span[0]] not in shut)
    ]
    many = max(1, sum(map(len, opened)))
    high = 1 if few else max(1, min(round(12 * len(spans) / _HEIGHT), round(0.7 * len(spans) / many)))
    found = []
    for span in spans:
        node, is_open = nodes[span[0]], span in opened
        toggle = None if heat["by"] == "node" or len(spans) == 1 else _toggle(route, node, is_open)
        if is_open:
            found += [_single(heat, at, route)._replace(first=at == span[0], height=high) for at in span]
            found[-len(span)] = found[-len(span)]._replace(toggle=toggle)
        else:
            found.append(Row(span, f"worst of {node}", node, toggle, first=True, toggle=toggle))
    return found


def _by_cost(heat: Mapping[str, Any], route: Route) -> list[Row]:
    order = np.argsort(-np.nan_to_num(excess(heat["z"]), nan=-1.0), kind="stable").tolist()
    if len(order) <= _MOST_ROWS:
        return [_single(heat, at, route)._replace(first=True) for at in order]
    found = [_single(heat, at, route)._replace(first=True) for at in order[:_WORST]]
    rest = order[_WORST:]
    of = "node" if heat["by"] == "node" else "rank"
    return [
        *found,
        Row(sorted(rest), f"worst of {text.count(len(rest), f'other {of}')}", "others", None, first=True),
    ]


def _listed(route: Route, name: str) -> list[str]:
    return [node for node in (route.get(name) or "").split(",") if node]


def _toggle(route: Route, node: str, is_open: bool) -> str:
    """Return the link that closes a node that is open, or opens one that is closed."""
    lists = {name: [other for other in _listed(route, name) if other != node] for name in ("open", "shut")}
    lists["shut" if is_open else "open"].append(node)
    return route.here(**{name: ",".join(nodes[-_MOST_CHANGED:]) or None for name, nodes in lists.items()})


def _single(heat: Mapping[str, Any], at: int, route: Route) -> Row:
    rank, node = heat["ranks"][at], heat["nodes"][at]
    if heat["by"] == "node":
        return Row((at,), node, node, route.to("node", node))
    return Row((at,), f"rank {rank} ({node})", node, route.to("rank", rank), rank)


def figure(
    heat: Mapping[str, Any], drawn: Sequence[Row], revision: str, frame: Mapping[str, Any]
) -> figures.Figure:
    """Return the heatmap; assets/heatmap.js has what a click and the mouse do from the trace's `meta`."""
    heights = [row.height for row in drawn]
    edges = [0, *accumulate(heights)]
    ends = [heat["first"][0] - 0.5, *(last + 0.5 for last in heat["last"])]
    z = _worst(heat, drawn)
    # Lines of one height: plotly.js paints others cell by cell, in twice the time.
    z = np.repeat(z, heights, axis=0)
    grey = 254.01 / 255
    trace = {
        "type": "heatmap",
        "x": ends,
        "y0": 0.5,
        "z": {"dtype": "u1", "bdata": b64encode(z.tobytes()).decode(), "shape": f"{len(z)}, {z.shape[1]}"},
        "zmin": 0,
        "zmax": 255,
        "colorscale": [
            *((level(at) / 255, c) for at, c in _COLOURS.items()),
            (grey, _MISSING),
            (1, _MISSING),
        ],
        "showscale": False,
        "hoverinfo": "none",
        "meta": {
            "rows": [_about(heat, row, at) for row, at in zip(drawn, edges, strict=False)],
            "first": heat["first"],
            "last": heat["last"],
        },
    }
    lines = [edge for edge, row in zip(edges, drawn, strict=False) if edge and row.toggle]
    room = _LINE * len(lines) <= _HEIGHT
    return figures.figure(
        [trace],
        "step",
        "",
        revision=f"{revision} {heat['stage']} {len(drawn)}",
        frame=frame,
        hovermode="closest",
        margin={**figures.MARGIN, "t": TOP, "b": BOTTOM},
        yaxis={"visible": False, "autorange": "reversed"},
        shapes=[_line(edge) for edge in lines] if room else [],
    )


def _worst(heat: Mapping[str, Any], drawn: Sequence[Row]) -> UInt8:
    z = heat["z"] + np.uint8(1)  # what is missing is 255, and now 0: less than any other
    worst: UInt8 = np.array([z[np.asarray(row.lines)].max(axis=0) for row in drawn]) - np.uint8(1)
    return worst


def _about(heat: Mapping[str, Any], row: Row, at: int) -> dict[str, Any]:
    """Return what a browser has of a row: where it begins, and its rank, or its first and its last."""
    ranks = [row.rank]
    if row.rank is None:
        ranks = [heat["ranks"][line] for line in (row.lines[0], row.lines[-1])] if row.href else []
    return {"name": row.name, "href": row.href, "ranks": ranks, "at": at}


def _line(y: float) -> dict[str, Any]:
    line = {"width": 1.5, "color": figures.GREY}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def gutter(drawn: Sequence[Row]) -> html.Div:
    """Return the names of the rows, as many as there is room for; it is as high as the heatmap."""
    lines = sum(row.height for row in drawn)
    px = min(_HEIGHT, max(_LEAST_HEIGHT, _ROW * lines))
    edges = [0, *accumulate(row.height for row in drawn)]
    middles = [px * (low + high) / 2 / lines for low, high in pairwise(edges)]
    labels = [_label(drawn[at], TOP + middles[at]) for at in _shown(drawn, middles)]
    return html.Div(labels, id="heat-rows", style={"height": f"{px + TOP + BOTTOM}px"})


def _label(row: Row, y: float) -> html.Div:
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


def _shown(drawn: Sequence[Row], at: Sequence[float]) -> list[int]:
    """Return the rows that have a label, as many as there is room for: named and higher ones come first."""
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
        if all(abs(at[row] - at[other]) >= room for other, room in zip(chosen, both, strict=True)):
            chosen.append(row)
    return sorted(chosen)


def scale() -> html.Div:
    """Return the colours with what they mean."""
    stops = ", ".join(f"{colour} {100 * level(at) / 254:.0f}%" for at, colour in _COLOURS.items())
    marks = [html.Span(f"{at:g}×", style={"left": f"{100 * level(at) / 254:.0f}%"}) for at in MARKS]
    return html.Div(
        [html.I(style={"background": f"linear-gradient(90deg, {stops})"}), *marks], className="scale"
    )


def as_table(heat: Mapping[str, Any], drawn: Sequence[Row]) -> html.Div:
    """Return the newest columns in numbers, the worst rows first."""
    z = _worst(heat, drawn)
    over: list[float] = excess(z).tolist()
    order = sorted(range(len(drawn)), key=lambda at: (-over[at] if over[at] == over[at] else math.inf, at))
    columns: Columns = {
        "row": lambda at: dcc.Link(drawn[at].name, href=drawn[at].href) if drawn[at].href else drawn[at].name,
        ">mean": lambda at: text.times(1 + over[at]),
        **{
            f">step {last:,}": functools.partial(_cell, z[:, column])
            for column, last in [*enumerate(heat["last"])][-_TABLE_COLUMNS:]
        },
    }
    rows = table(columns, order[:_TABLE_ROWS], label="Busy time over the median, the worst rows first")
    shown = f"{min(len(order), _TABLE_ROWS)} of {text.count(len(order), 'row')}, the worst first."
    return html.Div([rows, html.P(shown, className="hint")])


def _cell(column: UInt8, at: int) -> str:
    value = int(column[at])
    return (
        "missing"
        if value == MISSING
        else {0: "≤ ", 254: "≥ "}.get(value, "") + text.times(float(ratio(value)))
    )
