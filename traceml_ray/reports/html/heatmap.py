"""The rank × time heatmap: an image with a pixel for each row and column, names beside it, and a table."""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, excess, ratio
from traceml_ray.reports import drawing, heat_rows
from traceml_ray.reports.heat_rows import Row
from traceml_ray.reports.html.charts import steps_axis, swatch
from traceml_ray.reports.html.elements import Markup, grid, join, tag

_LEAST_PX, _ROW_PX, _LABEL_PX = 88, 22, 14
_GUTTER_PX = 128
_NAME = 17
"""Characters of a row's name that have room."""
_TABLE_ROWS, _TABLE_COLUMNS = 32, 6
_WHAT = "Busy time of each rank by step, over the median of the step"


def heatmap(columns: Mapping[str, Any], verdict: Mapping[str, Any]) -> Markup:
    """Return the heatmap of the columns of a run, with its scale and its table."""
    rows = heat_rows.by_node(columns, heat_rows.suspects(columns, verdict))
    levels = heat_rows.worst(columns, rows)
    picture = png(np.repeat(levels, [row.height for row in rows], axis=0), drawing.heat_palette())
    px = min(heat_rows.HEIGHT, max(_LEAST_PX, _ROW_PX * sum(row.height for row in rows)))
    source = "data:image/png;base64," + b64encode(picture).decode()
    # Both the size in the file and the style sheet's: a reader without styles sees it as high as its names.
    image = tag("img", src=source, alt=f"{_WHAT}; the table has the numbers", width=600, height=px)
    drawn = tag("div", _names(rows, px), image, steps_axis(columns), cls="plot heat")
    return join(_scale(), drawn, _table(columns, rows, levels))


def png(levels: np.ndarray[Any, Any], palette: np.ndarray[Any, Any]) -> bytes:
    """Return `levels` (rows, C) uint8 as an image in the colours of `palette` (256, 4): a byte a pixel."""
    height, width = levels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), levels], axis=1)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": palette[:, :3].tobytes(),
        b"tRNS": palette[:, 3].tobytes(),
        b"IDAT": zlib.compress(lines.tobytes(), 9),
        b"IEND": b"",
    }
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _names(rows: Sequence[Row], px: int) -> Markup:
    """Return the names of the rows, as many as there is room for: those named by the verdict come first."""
    lines = sum(row.height for row in rows)
    edges = [0, *accumulate(row.height for row in rows)]
    # A label at the edge is moved inside: what is beyond is cut off.
    middles = [min(max(px * (low + high) / 2 / lines, 6), px - 6) for low, high in pairwise(edges)]
    chosen: list[int] = []
    for at in sorted(range(len(rows)), key=lambda at: (not rows[at].named, not rows[at].first)):
        if all(abs(middles[at] - middles[other]) >= _LABEL_PX for other in chosen):
            chosen.append(at)
    shown = [
        tag(
            *("text", _name(rows[at])),
            x=_GUTTER_PX - 4,
            y=round(middles[at]) + 4,
            text_anchor="end",
            font_size=11,
            cls="named" if rows[at].named else None,
        )
        for at in sorted(chosen)
    ]
    box = {"viewBox": f"0 0 {_GUTTER_PX} {px}", "preserveAspectRatio": "xMaxYMid slice"}
    return tag("svg", shown, width=_GUTTER_PX, height=px, cls="names", aria_hidden="true", **box)


def _name(row: Row) -> str:
    rank = "" if row.rank is None else f"{row.rank}"
    node = row.node if row.first or not rank else ""
    room = _NAME - len(rank) - 2 * row.named
    short = node if len(node) <= room else f"…{node[len(node) - room + 1 :]}"
    return " ".join(filter(None, ["▶" if row.named else "", short, rank]))


def _scale() -> Markup:
    marks = [
        tag("li", swatch(drawing.css(colour)), text.times(at).replace(".00", ""))
        for at, colour in drawing.HEAT_COLOURS.items()
    ]
    missing = tag("li", swatch(drawing.css(drawing.HEAT_MISSING)), "missing")
    return tag("ul", marks, missing, cls="legend")


def _table(columns: Mapping[str, Any], rows: Sequence[Row], levels: np.ndarray[Any, Any]) -> Markup:
    """Return the newest columns in numbers, the worst rows first."""
    over = excess(levels).tolist()
    order = sorted(range(len(rows)), key=lambda at: (-over[at] if over[at] == over[at] else math.inf, at))
    newest = [*enumerate(columns["last"].tolist())][-_TABLE_COLUMNS:]
    shown = [
        {
            "row": rows[at].name,
            ">mean": text.times(1 + over[at]),
            **{f">step {last:,}": _cell(int(levels[at, column])) for column, last in newest},
        }
        for at in order[:_TABLE_ROWS]
    ]
    count = f"{len(shown)} of {text.count(len(rows), 'row')}, the worst first; 1× is the median."
    return tag("details", tag("summary", "Table"), grid(_WHAT, shown), tag("p", count, cls="hint"))


def _cell(value: int) -> str:
    if value == MISSING:
        return "missing"
    return {0: "≤ ", 254: "≥ "}.get(value, "") + text.times(float(ratio(value)))
