"""The rank × time heatmap: a row for each rank, or where there are many for each node, as its worst rank."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from . import figures
from .route import Route

_HEIGHT = 270
"""px of all rows: `.heat-box` in assets/app.css without its axis."""
_LABEL, _LINE = 13, 14
"""px that a label, and a line between nodes, needs."""
_MOST_ROWS = 128
"""Of ranks: with more, a row of one rank is too thin to be seen."""
_MOST_GROUPS, _MOST_NAMED = 200, 8
# A median shows the ground, so that the colours hold on light and on dark.
_COLOURS = (
    (0.0, "rgb(29,95,163)"),
    (0.3, "rgba(59,130,196,.75)"),
    (0.5, "rgba(139,147,156,.08)"),
    (0.66, "rgba(232,140,50,.7)"),
    (1.0, "rgb(217,95,10)"),
)
_MISSING = "rgba(139,147,156,.6)"


class Row(NamedTuple):
    """What is drawn as one row."""

    lines: slice
    """Of the data's `z`: one, or those of a node, of which the worst is drawn."""
    name: str
    """What the tooltip calls it."""
    label: str
    """On the axis."""
    href: str
    """Where a click leads."""
    rank: int | None = None
    """Of a row that is one rank."""
    first: bool = False
    """Whether it is the first rank of a node."""
    named: bool = False
    """Whether the verdict names it."""
    height: int = 1


def rows(heat: Mapping[str, Any], verdict: Mapping[str, Any], route: Route) -> list[Row]:
    """Return what is drawn; nodes that `verdict` names, or that a person opened, are drawn rank by rank."""
    nodes, count = heat["nodes"], len(heat["nodes"])
    kind = "nodes" if heat["by"] == "node" else "ranks"
    suspects = () if verdict.get("label") == "healthy" else (verdict.get(kind) or ())[:_MOST_NAMED]
    named = {at for at in range(count) if heat[kind][at] in suspects}
    few = count <= _MOST_ROWS
    starts = [at for at in range(count) if at == 0 or nodes[at] != nodes[at - 1]]
    groups = starts if few else starts[:: -(-len(starts) // _MOST_GROUPS)]
    spans = [range(*both) for both in pairwise([*groups, count])]
    opened = [span for span in spans if few or route.get("open") == nodes[span[0]] or named & {*span}]
    many = max(1, sum(map(len, opened)))
    height = 1 if few else max(1, min(round(12 * len(spans) / _HEIGHT), round(0.7 * len(spans) / many)))
    found = []
    for span in spans:
        node = nodes[span[0]]
        if span in opened:
            singles = [_single(heat, at, at == span[0], route) for at in span]
            found += [row._replace(named=row.lines.start in named, height=height) for row in singles]
        else:
            lines = slice(span[0], span[-1] + 1)
            found.append(Row(lines, f"worst of {node}", _short(node), route.here(open=node)))
    return found


def _single(heat: Mapping[str, Any], at: int, first: bool, route: Route) -> Row:
    rank, node, line = heat["ranks"][at], heat["nodes"][at], slice(at, at + 1)
    if heat["by"] == "node":
        return Row(line, node, _short(node), route.to("node", node), first=first)
    label = f"{_short(node)}  {rank}" if first else str(rank)
    return Row(line, f"rank {rank} ({node})", label, route.to("rank", rank), rank, first)


def _short(node: str) -> str:
    return node if len(node) <= 16 else f"{node[:8]}…{node[-7:]}"


def figure(heat: Mapping[str, Any], drawn: Sequence[Row], revision: str) -> figures.Figure:
    """Return the heatmap; assets/app.js has what a click and the mouse do from the trace's `meta`."""
    heights = [row.height for row in drawn]
    edges = [0, *accumulate(heights)]
    ends = [heat["first"][0] - 0.5, *(last + 0.5 for last in heat["last"])]
    z = heat["z"] + np.uint8(1)  # what is missing is 255, and now 0: less than any other
    z = np.array([z[row.lines].max(axis=0) for row in drawn]) - np.uint8(1)
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
        "colorscale": [*((at * 254 / 255, c) for at, c in _COLOURS), (grey, _MISSING), (1, _MISSING)],
        "showscale": False,
        "hoverinfo": "none",
        "meta": {
            "rows": [_about(heat, row, at) for row, at in zip(drawn, edges, strict=False)],
            "first": heat["first"],
            "last": heat["last"],
        },
    }
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    ticks = _ticks(drawn, middles)
    lines = [edge for edge, row in zip(edges, drawn, strict=False) if edge and row.first]
    yaxis = {"tickvals": [middles[row] for row in ticks], "ticktext": [drawn[row].label for row in ticks]}
    return figures.figure(
        [trace],
        "step",
        "node" if drawn[0].rank is None else "rank",
        revision=f"{revision} {heat['stage']} {len(drawn)}",
        hovermode="closest",
        margin={"l": 48, "r": 40, "t": 6, "b": 42},
        yaxis={**yaxis, "autorange": "reversed", "showgrid": False},
        shapes=[_line(edge) for edge in lines] if _LINE * len(lines) <= _HEIGHT else [],
        annotations=[_pointer(row.rank, at) for row, at in zip(drawn, middles, strict=True) if row.named],
    )


def _about(heat: Mapping[str, Any], row: Row, at: int) -> dict[str, Any]:
    """Return what a browser has of a row: where it begins, and its rank, or its first and its last."""
    ranks = [row.rank]
    if row.rank is None:
        ranks = [heat["ranks"][line] for line in (row.lines.start, row.lines.stop - 1)]
    return {"name": row.name, "href": row.href, "ranks": ranks, "at": at}


def _line(y: float) -> dict[str, Any]:
    line = {"width": 1.5, "color": figures.GREY}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _pointer(rank: int | None, y: float) -> dict[str, Any]:
    text = "◀" if rank is None else f"◀ {rank}"
    font = {"color": figures.ORANGE, "size": 12}
    return {
        "text": text,
        "showarrow": False,
        "xref": "paper",
        "x": 1,
        "xanchor": "left",
        "y": y,
        "font": font,
    }


def _ticks(drawn: Sequence[Row], at: Sequence[float]) -> list[int]:
    """Return the rows that have a label, as many as there is room for: higher ones and first ranks first."""
    room = _LABEL * sum(row.height for row in drawn) / _HEIGHT
    chosen: list[int] = []
    for row in sorted(range(len(drawn)), key=lambda row: (-drawn[row].height, not drawn[row].first)):
        if all(abs(at[row] - at[other]) >= room for other in chosen):
            chosen.append(row)
    return chosen
