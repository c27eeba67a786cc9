"""The rank × time heatmap as a figure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.analysis.spread import level
from traceml_ray.document import drawing
from traceml_ray.document.drawing import HEAT_COLOURS, HEAT_MISSING, HEIGHT, HeatRow, css
from traceml_ray.views.figures import BOTTOM, MARGIN, Figure, figure

TOP = 6
"""Margin in px above the rows. The margin below them is `figures.BOTTOM`."""
_LINE = 14
"""Height in px that a line between nodes needs."""


def heat_figure(
    heat: StepColumns, drawn: Sequence[HeatRow], revision: str, frame: Mapping[str, Any]
) -> Figure:
    """
    Return the heatmap. A person's zoom is kept while `revision` stays the same. assets/heatmap.js reads from
    the trace's `meta` what a click and a hover do.
    """
    heights = [row.height for row in drawn]
    edges = [0, *accumulate(heights)]
    first, last = heat.first.tolist(), heat.last.tolist()
    z = drawing.worst(heat, drawn)
    # Lines of equal height: plotly.js paints others cell by cell, which takes twice as long.
    z = np.repeat(z, heights, axis=0)
    grey = 254.01 / 255
    trace = {
        "type": "heatmap",
        "x": [first[0] - 0.5, *(step + 0.5 for step in last)],
        "y0": 0.5,
        "z": {"dtype": "u1", "bdata": b64encode(z.tobytes()).decode(), "shape": f"{len(z)}, {z.shape[1]}"},
        "zmin": 0,
        "zmax": 255,
        "colorscale": [
            *((level(factor) / 255, css(c)) for factor, c in HEAT_COLOURS.items()),
            (grey, css(HEAT_MISSING)),
            (1, css(HEAT_MISSING)),
        ],
        "showscale": False,
        "hoverinfo": "none",
        "meta": {
            "rows": [_row_details(heat, row, edge) for row, edge in zip(drawn, edges, strict=False)],
            "first": first,
            "last": last,
        },
    }
    lines = [edge for edge, row in zip(edges, drawn, strict=False) if edge and row.toggle]
    room = _LINE * len(lines) <= HEIGHT
    return figure(
        [trace],
        "step",
        "",
        revision=f"{revision} {len(drawn)}",
        frame=frame,
        hovermode="closest",
        margin={**MARGIN, "t": TOP, "b": BOTTOM},
        yaxis={"visible": False, "autorange": "reversed"},
        shapes=[_line(edge) for edge in lines] if room else [],
    )


def _row_details(heat: StepColumns, row: HeatRow, edge: int) -> dict[str, Any]:
    """Return what the browser needs for a row: name, link, position, and its rank or first and last rank."""
    ranks = [row.rank]
    if row.rank is None:
        ranks = [heat.ranks[line] for line in (row.lines[0], row.lines[-1])] if row.href else []
    return {"name": row.name, "href": row.href, "ranks": ranks, "at": edge}


def _line(y: float) -> dict[str, Any]:
    line = {"width": 1.5, "color": drawing.GREY}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}
