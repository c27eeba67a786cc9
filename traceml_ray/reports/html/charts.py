"""
Charts as inline SVG: no script draws them, and no style is needed for their colours.

The rank × time heatmap: an image with a pixel for each row and column, names beside it, and a table.
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, excess, ratio
from traceml_ray.reports import drawing
from traceml_ray.reports.drawing import HeatRow
from traceml_ray.reports.html.elements import NOTHING, Markup, grid, join, tag
from traceml_ray.reports.tiles import Tile
from traceml_ray.stages import STAGES

WIDTH, HEIGHT = 1000, 200
_ROW = 22
"""Height of the boxes of an icicle."""
"""Units of a plot, which is as wide as its page: its text stands outside, where it keeps its size."""
_TICKS = 5
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
Array = np.ndarray[Any, Any]


def exposed(columns: Mapping[str, Any], onset: int | None) -> Markup:
    """Return the stacked area of the exposed time of each stage by step, ms: the sum is the step."""
    exposed_ms = np.nan_to_num(np.asarray(columns["exposed"], dtype=float))
    total = exposed_ms.sum(axis=1)
    end, cut = _end(total)
    x, below = _across(columns), np.zeros(len(total))
    areas = []
    for index, stage in enumerate(STAGES):
        above = below + exposed_ms[:, index]
        edge = [*zip(x, _up(above, end), strict=True), *zip(x[::-1], _up(below, end)[::-1], strict=True)]
        areas.append(tag("path", d=_path(edge) + "z", fill=drawing.STAGES[stage]))
        below = above
    label = "Exposed time of each stage by step, stacked, in ms"
    legend = dict(drawing.STAGES)
    legend |= _key_of(columns, onset)
    return join(_legend(legend, cut), _plot(join(areas, _onset(columns, onset)), label, end, columns))


def timeline(columns: Mapping[str, Any], onset: int | None) -> Markup:
    """Return the busy time of the median and the worst rank by step, and the band from p10 to p90, ms."""
    worst, median, low, high = (
        np.asarray(columns[f"{name}_ms"], dtype=float) for name in ("worst", "median", "p10", "p90")
    )
    end, cut = _end(worst)
    x = _across(columns)
    known = np.isfinite(low) & np.isfinite(high)
    edge = [
        *zip(x[known], _up(high[known], end), strict=True),
        *zip(x[known][::-1], _up(low[known], end)[::-1], strict=True),
    ]
    band = tag("path", d=_path(edge) + "z", fill=drawing.BLUE, fill_opacity=0.25) if edge else NOTHING
    lines = [_line(x, worst, end, drawing.ORANGE), _line(x, median, end, drawing.BLUE)]
    label = "Busy time of the median and the worst rank by step, in ms"
    legend = {
        "worst": drawing.ORANGE,
        "median": drawing.BLUE,
        "p10–p90": "#9dbfe0",
        **_key_of(columns, onset),
    }
    return join(_legend(legend, cut), _plot(join(band, lines, _onset(columns, onset)), label, end, columns))


def waterfall(before: Mapping[str, float], since: Mapping[str, float]) -> Markup:
    """Return what a step took before and takes since, and what each stage has added, ms, with a table."""
    bars = drawing.waterfall(before, since)
    room = max(bar.base + bar.width for bar in bars) or 1.0
    rows = []
    for bar in bars:
        place = {"x": _figure(WIDTH * bar.base / room), "width": _figure(max(2.0, WIDTH * bar.width / room))}
        drawn = tag("rect", y=0, height=16, fill=bar.colour, **place)
        svg = tag("svg", drawn, viewBox=f"0 0 {WIDTH} 16", preserveAspectRatio="none", aria_hidden="true")
        cells = tag("th", bar.name, scope="row"), tag("td", svg, cls="bar"), tag("td", bar.label, cls="num")
        rows.append(tag("tr", cells))
    stages = [{"stage": s, ">before": text.ms(before[s]), ">since": text.ms(since[s])} for s in STAGES]
    title = "Exposed time of a step by stage, before the onset and since"
    drawn = tag("table", tag("caption", title, cls="unseen"), tag("tbody", rows), cls="waterfall")
    return join(drawn, _numbers(grid(title, stages)))


def tiles(all_tiles: Sequence[Tile]) -> Markup:
    """Return the numbers at the top, each with its line."""
    return tag("div", map(_tile, all_tiles), cls="tiles") if all_tiles else NOTHING


def _tile(tile: Tile) -> Markup:
    known = [None if np.isnan(v) else float(v) for v in tile.series]
    path = drawing.spark(known, None, (120, 28))
    line = tag("path", d=path, fill="none", stroke=drawing.BLUE, stroke_width=1.5, **_THIN)
    there = [value for value in known if value is not None]
    alt = f"{tile.label}: {text.number(there[0])} to {text.number(there[-1])} {tile.unit}" if there else ""
    svg = tag("svg", line, viewBox="0 0 120 28", preserveAspectRatio="none", role="img", aria_label=alt)
    unknown = tile.value is None or tile.value != tile.value
    value = tag("span", text.number(tile.value), cls="value"), "" if unknown else f" {tile.unit}"
    shown = svg if path else NOTHING
    return tag("div", tag("h3", tile.label), tag("p", value), tag("p", tile.text, cls="hint"), shown)


_THIN = {"vector_effect": "non-scaling-stroke"}


def _plot(inside: Markup, label: str, end: float, columns: Mapping[str, Any]) -> Markup:
    """Return a plot with its two scales, whose ticks are at even distances."""
    lines = [
        tag("line", x1=0, x2=WIDTH, y1=y, y2=y, stroke=drawing.GREY, stroke_opacity=0.3, **_THIN)
        for y in (HEIGHT * number // (_TICKS - 1) for number in range(_TICKS))
    ]
    box = f"0 0 {WIDTH} {HEIGHT}"
    svg = tag(
        "svg",
        lines,
        inside,
        viewBox=box,
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        cls="drawn",
    )
    ticks = [end * number / (_TICKS - 1) for number in reversed(range(_TICKS))]
    y = tag("div", (tag("span", text.number(tick)) for tick in ticks), cls="y", aria_hidden="true")
    return tag("div", tag("div", "ms", cls="unit"), y, svg, steps_axis(columns), cls="plot")


def steps_axis(columns: Mapping[str, Any]) -> Markup:
    """Return the scale of steps, which are as far apart as the columns are wide."""
    first, last = int(columns["first"][0]), int(columns["last"][-1])
    ticks = [first + round((last - first) * number / (_TICKS - 1)) for number in range(_TICKS)]
    shown = dict.fromkeys(f"{tick:,}" for tick in ticks)
    return tag("div", (tag("span", tick) for tick in shown), tag("b", "step"), cls="x")


def _numbers(rows: Markup) -> Markup:
    return tag("details", tag("summary", "Table"), rows)


def _legend(names: Mapping[str, str], cut: str = "") -> Markup:
    keys = [tag("li", swatch(colour), name) for name, colour in names.items()]
    return tag("ul", keys, tag("li", cut) if cut else None, cls="legend")


def swatch(colour: str) -> Markup:
    """Return a colour as a small square."""
    return tag("svg", tag("rect", width=10, height=10, fill=colour), viewBox="0 0 10 10", aria_hidden="true")


def icicle(layers: Sequence[Mapping[str, Any]], named: Collection[str | None]) -> Markup:
    """Return layers as boxes, each above those that are inside it; what is in a box is said on hover."""
    boxes = drawing.icicle(layers, named)
    if not boxes:
        return NOTHING
    end, rows = max(box.start + box.width for box in boxes), max(box.depth for box in boxes) + 1
    drawn = []
    for box in boxes:
        x, width = WIDTH * box.start / end, WIDTH * box.width / end
        y = _ROW * box.depth
        title = tag("title", f"{box.name}: {text.ms(box.width)}")
        rect = tag("rect", title, x=_figure(x), y=y, width=_figure(width), height=_ROW - 2, fill=box.colour)
        drawn.append(rect)
        if box.label:
            middle = {"x": _figure(x + width / 2), "y": y + _ROW / 2 + 3, "text_anchor": "middle"}
            drawn.append(tag("text", box.label, **middle, font_size=10, fill="currentColor"))
    label = "Time of each layer with the layers inside it"
    svg = tag("svg", drawn, viewBox=f"0 0 {WIDTH} {_ROW * rows}", role="img", aria_label=label)
    return tag("div", svg, cls="icicle")


def _onset(columns: Mapping[str, Any], onset: int | None) -> Markup:
    """Return where the episode of the verdict began."""
    first, last = int(columns["first"][0]), int(columns["last"][-1])
    if onset is None or not first < onset <= last:
        return NOTHING
    x = _figure(WIDTH * (onset - first) / (last + 1 - first))
    line = {"stroke": drawing.RED, "stroke_width": 1.5, "stroke_dasharray": "6 4", **_THIN}
    return tag("line", x1=x, x2=x, y1=0, y2=HEIGHT, **line)


def _key_of(columns: Mapping[str, Any], onset: int | None) -> dict[str, str]:
    """Return what the legend says of that line; nothing where there is none."""
    return {f"onset, step {onset:,}": drawing.RED} if _onset(columns, onset) else {}


def _across(columns: Mapping[str, Any]) -> Array:
    """Return where the middles of columns are, the outer ones drawn to the edges."""
    first, last = columns["first"], columns["last"]
    begin, end = int(first[0]), int(last[-1]) + 1
    x: Array = WIDTH * ((first + last + 1) / 2 - begin) / (end - begin)
    x[0], x[-1] = 0.0, WIDTH if len(x) > 1 else x[-1]
    return x


def _up(values: Array, end: float) -> Array:
    return HEIGHT * (1 - np.minimum(values, end) / end)


def _line(x: Array, values: Array, end: float, colour: str) -> Markup:
    """Return a line with gaps where nothing is known."""
    known = np.isfinite(values)
    pieces = np.split(np.arange(len(x)), np.flatnonzero(np.diff(known)) + 1)
    points = [
        [*zip(x[piece], _up(values[piece], end), strict=True)] for piece in pieces if known[piece].all()
    ]
    return tag("path", d="".join(map(_path, points)), fill="none", stroke=colour, stroke_width=1.8, **_THIN)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_figure(x)} {_figure(y)}" for x, y in points)


def _figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _end(values: Array) -> tuple[float, str]:
    """Return where the scale of ms ends, and what is said of values beyond it."""
    known = values[np.isfinite(values)]
    highest = float(known.max()) if len(known) else 0.0
    capped = drawing.cap(values)
    end = _round(capped or highest)
    return end, f"▲ up to {text.ms(highest)}" if highest > end else ""


def _round(value: float) -> float:
    """Return a round number that is not below `value`."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * factor for factor in _ROUND if size * factor >= 0.999999 * value)


_LEAST_PX, _ROW_PX, _LABEL_PX = 88, 22, 14
_GUTTER_PX = 128
_NAME = 17
"""Characters of a row's name that have room."""
_TABLE_ROWS, _TABLE_COLUMNS = 32, 6
_WHAT = "Busy time of each rank by step, over the median of the step"


def heatmap(columns: Mapping[str, Any], verdict: Mapping[str, Any]) -> Markup:
    """Return the heatmap of the columns of a run, with its scale and its table."""
    rows = drawing.by_node(columns, drawing.suspects(columns, verdict))
    levels = drawing.worst(columns, rows)
    picture = png(np.repeat(levels, [row.height for row in rows], axis=0), drawing.heat_palette())
    px = min(drawing.HEIGHT, max(_LEAST_PX, _ROW_PX * sum(row.height for row in rows)))
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


def _names(rows: Sequence[HeatRow], px: int) -> Markup:
    """Return the names of the rows, as many as there is room for: those named by the verdict come first."""
    lines = sum(row.height for row in rows)
    edges = [0, *accumulate(row.height for row in rows)]
    # A label at the edge is moved inside: what is beyond is cut off.
    middles = [min(max(px * (low + high) / 2 / lines, 6), px - 6) for low, high in pairwise(edges)]
    chosen: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: (not rows[index].named, not rows[index].first)):
        if all(abs(middles[index] - middles[other]) >= _LABEL_PX for other in chosen):
            chosen.append(index)
    shown = [
        tag(
            *("text", _name(rows[index])),
            x=_GUTTER_PX - 4,
            y=round(middles[index]) + 4,
            text_anchor="end",
            font_size=11,
            cls="named" if rows[index].named else None,
        )
        for index in sorted(chosen)
    ]
    box = {"viewBox": f"0 0 {_GUTTER_PX} {px}", "preserveAspectRatio": "xMaxYMid slice"}
    return tag("svg", shown, width=_GUTTER_PX, height=px, cls="names", aria_hidden="true", **box)


def _name(row: HeatRow) -> str:
    rank = "" if row.rank is None else f"{row.rank}"
    node = row.node if row.first or not rank else ""
    room = _NAME - len(rank) - 2 * row.named
    short = node if len(node) <= room else f"…{node[len(node) - room + 1 :]}"
    return " ".join(filter(None, ["▶" if row.named else "", short, rank]))


def _scale() -> Markup:
    marks = [
        tag("li", swatch(drawing.css(colour)), text.times(factor).replace(".00", ""))
        for factor, colour in drawing.HEAT_COLOURS.items()
    ]
    missing = tag("li", swatch(drawing.css(drawing.HEAT_MISSING)), "missing")
    return tag("ul", marks, missing, cls="legend")


def _table(columns: Mapping[str, Any], rows: Sequence[HeatRow], levels: np.ndarray[Any, Any]) -> Markup:
    """Return the newest columns in numbers, the worst rows first."""
    over = excess(levels).tolist()
    order = sorted(
        range(len(rows)), key=lambda index: (-over[index] if over[index] == over[index] else math.inf, index)
    )
    newest = [*enumerate(columns["last"].tolist())][-_TABLE_COLUMNS:]
    shown = [
        {
            "row": rows[index].name,
            ">mean": text.times(1 + over[index]),
            **{f">step {last:,}": _cell(int(levels[index, column])) for column, last in newest},
        }
        for index in order[:_TABLE_ROWS]
    ]
    count = f"{len(shown)} of {text.count(len(rows), 'row')}, the worst first; 1× is the median."
    return tag("details", tag("summary", "Table"), grid(_WHAT, shown), tag("p", count, cls="hint"))


def _cell(value: int) -> str:
    if value == MISSING:
        return "missing"
    return {0: "≤ ", 254: "≥ "}.get(value, "") + text.times(float(ratio(value)))
