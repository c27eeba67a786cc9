"""Renders drawings as inline SVG. It needs no script, and no style sheet for its colours."""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from datetime import timezone as utc
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from traceml_ray import text
from traceml_ray.analysis.spread import MISSING, excess, ratio
from traceml_ray.document import drawing
from traceml_ray.document.drawing import HeatRow
from traceml_ray.document.elements import NOTHING, Markup, grid, join, tag
from traceml_ray.document.model import (
    Array,
    Bars,
    Boxes,
    Column,
    Drawing,
    Heat,
    Line,
    Number,
    OverlaidLine,
    Overlay,
    StepChart,
    Strips,
    Table,
)

WIDTH, HEIGHT = 1000, 200
"""
Size of a plot in SVG units. A plot is as wide as its page; its text is outside the SVG, so that its size
stays the same.
"""
_ROW = 22
"""Height of the boxes of an icicle."""
_TICKS = 5
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_BAND = "#9dbfe0"
_THIN = {"vector_effect": "non-scaling-stroke"}


def drawn(block: Drawing) -> Markup:
    """Return a drawing with its scale, its legend and its numbers."""
    if isinstance(block, StepChart):
        return _step_chart(block)
    if isinstance(block, Heat):
        return _heatmap(block)
    if isinstance(block, Overlay):
        return _overlay(block)
    if isinstance(block, Strips):
        return _strips(block)
    return _bars(block) if isinstance(block, Bars) else _icicle(block)


def _step_chart(block: StepChart) -> Markup:
    """Return lines over the steps, or stacked areas."""
    x = _across(block)
    values = [np.asarray(line.values, dtype=float) for line in block.lines]
    if block.stacked:
        below = [np.zeros(len(x)), *np.cumsum(np.nan_to_num(values), axis=0)]
        end, cut = _end(below[-1])
        shapes = [
            tag("path", d=_edge(x, low, high, end), fill=line.colour)
            for line, (low, high) in zip(block.lines, pairwise(below), strict=True)
        ]
    else:
        end, cut = _end(np.max([np.nan_to_num(line) for line in values], axis=0))
        shapes = [_line(x, line, end) for line in zip(block.lines, values, strict=True)]
    legend = {line.name: line.colour for line in block.lines}
    if block.band:
        name, low, high = block.band
        both = np.isfinite(low) & np.isfinite(high)
        edge = _edge(x[both], low[both], high[both], end) if both.any() else ""
        shapes.insert(0, tag("path", d=edge, fill=drawing.BLUE, fill_opacity=0.25) if edge else NOTHING)
        legend[name] = _BAND
    onset = _onset(block)
    legend |= {f"onset, step {block.onset:,}": drawing.RED} if onset else {}
    return join(_legend(legend, cut), _plot(join(shapes, onset), end, block))


def _edge(x: Array, low: Array, high: Array, end: float) -> str:
    """Return the area between two lines as a closed path."""
    points = [*zip(x, _up(high, end), strict=True), *zip(x[::-1], _up(low, end)[::-1], strict=True)]
    return _path(points) + "z"


def _bars(block: Bars) -> Markup:
    """Return bars, each beside its name and text, and their table."""
    room = max(bar.base + bar.width for bar in block.bars) or 1.0
    rows = []
    for bar in block.bars:
        place = {"x": _figure(WIDTH * bar.base / room), "width": _figure(max(2.0, WIDTH * bar.width / room))}
        shape = tag("rect", y=0, height=16, fill=bar.colour, **place)
        svg = tag("svg", shape, viewBox=f"0 0 {WIDTH} 16", preserveAspectRatio="none", aria_hidden="true")
        cells = tag("th", bar.name, scope="row"), tag("td", svg, cls="bar"), tag("td", bar.label, cls="num")
        rows.append(tag("tr", cells))
    shown = tag("table", tag("caption", block.label, cls="unseen"), tag("tbody", rows), cls="waterfall")
    note = tag("p", block.table.note, cls="hint") if block.table.note else None
    return join(note, shown, _numbers(block.table._replace(note="")))


def _strips(block: Strips) -> Markup:
    """Return strips with their legend. Hovering shows the text of a segment."""
    rows = []
    for strip in block.strips:
        room = strip.length or 1.0
        shapes = [
            tag("rect", tag("title", part.title), x=_figure(WIDTH * part.base / room), y=0, height=22,
                width=_figure(WIDTH * part.width / room), fill=part.colour)
            for part in strip.segments
        ]  # fmt: skip
        svg = tag(
            "svg", shapes, viewBox=f"0 0 {WIDTH} 22", preserveAspectRatio="none", role="img",
            aria_label=strip.name, shape_rendering="crispEdges",
        )  # fmt: skip
        ends = tag("div", (tag("span", end) for end in strip.ends), cls="ends") if any(strip.ends) else None
        rows.append(tag("div", tag("h4", strip.name), svg, ends, cls="strip"))
    return join(_legend(block.legend()), tag("div", rows, cls="strips"))


def kpis(numbers: Sequence[Number]) -> Markup:
    """Return numbers, each with its line."""
    return tag("div", map(_kpi, numbers), cls="kpis")


def _kpi(number: Number) -> Markup:
    values = [None if np.isnan(value) else float(value) for value in number.line]
    path = drawing.spark(values, None, (120, 28))
    line = tag("path", d=path, fill="none", stroke=drawing.BLUE, stroke_width=1.5, **_THIN)
    there = [value for value in values if value is not None]
    alt = ""
    if there:
        alt = f"{number.label}: {number.written(there[0])} to {number.written(there[-1])} {number.unit}"
    svg = tag("svg", line, viewBox="0 0 120 28", preserveAspectRatio="none", role="img", aria_label=alt)
    unknown = number.value is None or number.value != number.value
    value = tag("span", number.written(number.value), cls="value"), "" if unknown else f" {number.unit}"
    about = tag("h3", number.label), tag("p", value), tag("p", number.about, cls="hint")
    return tag("div", about, svg if path else NOTHING)


def _plot(inside: Markup, end: float, block: StepChart) -> Markup:
    """Return a plot with its two scales. Their ticks have equal distances."""
    lines = [
        tag("line", x1=0, x2=WIDTH, y1=y, y2=y, stroke=drawing.GREY, stroke_opacity=0.3, **_THIN)
        for y in (HEIGHT * number // (_TICKS - 1) for number in range(_TICKS))
    ]
    box = f"0 0 {WIDTH} {HEIGHT}"
    about = {"role": "img", "aria_label": block.label, "cls": "drawn"}
    svg = tag("svg", lines, inside, viewBox=box, preserveAspectRatio="none", **about)
    ticks = [end * number / (_TICKS - 1) for number in reversed(range(_TICKS))]
    y = tag("div", (tag("span", text.number(tick)) for tick in ticks), cls="y", aria_hidden="true")
    return tag("div", tag("div", "ms", cls="unit"), y, svg, _steps_axis(block), cls="plot")


def _steps_axis(block: StepChart | Heat) -> Markup:
    """
    Return the axis of steps, spaced by the widths of the columns, with the times at which the steps were
    over.
    """
    first, last = int(block.first[0]), int(block.last[-1])
    ticks = [
        *dict.fromkeys(first + round((last - first) * number / (_TICKS - 1)) for number in range(_TICKS))
    ]
    if block.clock is None:
        return tag("div", (tag("span", f"{tick:,}") for tick in ticks), tag("b", "step"), cls="x")
    times, words = block.clock.times(ticks), block.clock.texts(ticks, brief=True)
    shown = (
        tag("span", f"{tick:,}", _time(t_ns, word) if t_ns is not None else None)
        for tick, t_ns, word in zip(ticks, times, words, strict=True)
    )
    named = tag("b", "step, time (", tag("span", text.zone(), cls="zone"), ")")
    seconds = any(word.count(":") > 1 for word in words)
    return tag("div", shown, named, cls="x", data_seconds="" if seconds else None)


def _time(t_ns: int, word: str) -> Markup:
    """Return a time as an element that report.js shows in the timezone of the reader."""
    moment = datetime.fromtimestamp(t_ns / 1e9, utc.utc).isoformat(timespec="milliseconds")
    return tag("time", word, datetime=moment)


_X_NAMES = {"step": "step", "time": "time since the first step"}


def _overlay(block: Overlay) -> Markup:
    """Return the lines of several runs, once for each x axis; a reader selects one."""
    drawn = {name: lines for name, lines in block.lines.items() if lines}
    several = len(drawn) > 1
    parts: list[Markup] = []
    for number, name in enumerate(drawn):
        if several:
            key = f"x-{zlib.crc32(block.label.encode()):x}"
            about = {"type": "radio", "name_": key, "checked": number == 0, "cls": f"over-{name}"}
            parts.append(tag("label", tag("input", **about), f" {_X_NAMES[name]} "))
    plots = (
        tag("div", _overlaid(block, name, lines), cls=f"over over-{name}") for name, lines in drawn.items()
    )
    first = next(iter(drawn.values()), ())
    keys = [tag("li", _dash(line), line.name) for line in first]
    return tag("div", tag("ul", keys, cls="legend"), parts, plots, cls="overlay" if several else None)


def _overlaid(block: Overlay, name: str, lines: Sequence[OverlaidLine]) -> Markup:
    """Return lines with their scales over one x axis."""
    every = np.concatenate([line.values for line in lines])
    low, high = (0.0, _end(every)[0]) if block.from_zero else _ends(every)
    left, right = min(float(line.x[0]) for line in lines), max(float(line.x[-1]) for line in lines)
    wide = (right - left) or 1.0
    shapes = [
        tag("line", x1=0, x2=WIDTH, y1=y, y2=y, stroke=drawing.GREY, stroke_opacity=0.3, **_THIN)
        for y in (HEIGHT * number // (_TICKS - 1) for number in range(_TICKS))
    ]
    for line in lines:
        x, up = (
            WIDTH * (line.x - left) / wide,
            HEIGHT * (1 - (np.minimum(line.values, high) - low) / (high - low)),
        )
        style = {
            "stroke": line.colour,
            "stroke_width": 1.8,
            "stroke_dasharray": drawing.DASHES[line.dash] or None,
        }
        shapes.append(tag("path", d=_path([*zip(x, up, strict=True)]), fill="none", **style, **_THIN))
    about = {"role": "img", "aria_label": f"{block.label} by {_X_NAMES[name]}", "cls": "drawn"}
    svg = tag("svg", shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", **about)
    shares = [number / (_TICKS - 1) for number in range(_TICKS)]
    ticks = [low + (high - low) * share for share in reversed(shares)]
    written = (text.number(tick) if block.from_zero else text.value(tick) for tick in ticks)
    y = tag("div", (tag("span", tick) for tick in written), cls="y", aria_hidden="true")
    places = dict.fromkeys(_place(name, left + wide * share) for share in shares)
    below = tag("div", (tag("span", place) for place in places), tag("b", _X_NAMES[name]), cls="x")
    return tag("div", tag("div", block.unit, cls="unit") if block.unit else None, y, svg, below, cls="plot")


def _place(name: str, x: float) -> str:
    return f"{round(x):,}" if name == "step" else text.duration(x)


def _ends(values: Array) -> tuple[float, float]:
    """Return the ends of a scale with round ticks. It need not include 0."""
    low, high = float(values.min()), float(values.max())
    apart = _round((high - low or abs(high) or 1.0) / (_TICKS - 1))
    while (begin := apart * math.floor(low / apart)) + (_TICKS - 1) * apart < high:
        apart = _round(1.01 * apart)
    return begin, begin + (_TICKS - 1) * apart


def _dash(line: OverlaidLine) -> Markup:
    """Return the sample of a line for a legend."""
    style = {"stroke": line.colour, "stroke_width": 3, "stroke_dasharray": drawing.DASHES[line.dash] or None}
    return tag("svg", tag("line", x1=0, x2=34, y1=5, y2=5, **style), viewBox="0 0 34 10", cls="dash")


def _numbers(table: Table) -> Markup:
    note = tag("p", table.note, cls="hint") if table.note else None
    return tag("details", tag("summary", "Table"), grid(table), note)


def _legend(names: Mapping[str, str], cut: str = "") -> Markup:
    keys = [tag("li", _swatch(colour), name) for name, colour in names.items()]
    return tag("ul", keys, tag("li", cut) if cut else None, cls="legend")


def _swatch(colour: str) -> Markup:
    """Return a small square of a colour."""
    return tag("svg", tag("rect", width=10, height=10, fill=colour), viewBox="0 0 10 10", aria_hidden="true")


def _icicle(block: Boxes) -> Markup:
    """Return nested boxes, each above the boxes inside it. Hovering shows the text of a box."""
    boxes = block.boxes
    if not boxes:
        return NOTHING
    end, rows = max(box.start + box.width for box in boxes), max(box.depth for box in boxes) + 1
    shapes = []
    for box in boxes:
        x, width = WIDTH * box.start / end, WIDTH * box.width / end
        y = _ROW * box.depth
        title = tag("title", f"{box.name}: {text.ms(box.width)}")
        rect = tag("rect", title, x=_figure(x), y=y, width=_figure(width), height=_ROW - 2, fill=box.colour)
        shapes.append(rect)
        if box.label:
            middle = {"x": _figure(x + width / 2), "y": y + _ROW / 2 + 3, "text_anchor": "middle"}
            shapes.append(tag("text", box.label, **middle, font_size=10, fill="currentColor"))
    size = f"0 0 {WIDTH} {_ROW * rows}"
    svg = tag("svg", shapes, viewBox=size, role="img", aria_label=block.label)
    return tag("div", svg, cls="icicle")


def _onset(block: StepChart) -> Markup:
    """Return the mark at the beginning of the verdict's episode."""
    first, last = int(block.first[0]), int(block.last[-1])
    if block.onset is None or not first < block.onset <= last:
        return NOTHING
    x = _figure(WIDTH * (block.onset - first) / (last + 1 - first))
    line = {"stroke": drawing.RED, "stroke_width": 1.5, "stroke_dasharray": "6 4", **_THIN}
    return tag("line", x1=x, x2=x, y1=0, y2=HEIGHT, **line)


def _across(block: StepChart) -> Array:
    """Return the positions of the middles of columns. The outer columns extend to the edges."""
    first, last = block.first, block.last
    begin, end = int(first[0]), int(last[-1]) + 1
    x: Array = WIDTH * ((first + last + 1) / 2 - begin) / (end - begin)
    x[0], x[-1] = 0.0, WIDTH if len(x) > 1 else x[-1]
    return x


def _up(values: Array, end: float) -> Array:
    return HEIGHT * (1 - np.minimum(values, end) / end)


def _line(x: Array, line: tuple[Line, Array], end: float) -> Markup:
    """Return a line with gaps at unknown values."""
    (_, _, colour), values = line
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
    """Return the end of a scale in ms, and the note about values beyond it."""
    known = values[np.isfinite(values)]
    highest = float(known.max()) if len(known) else 0.0
    capped = drawing.cap(values)
    end = _round(capped or highest)
    return end, f"▲ up to {text.ms(highest)}" if highest > end else ""


def _round(value: float) -> float:
    """Return the next round number that is not below `value`."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * factor for factor in _ROUND if size * factor >= 0.999999 * value)


_LEAST_PX, _ROW_PX, _LABEL_PX = 88, 22, 14
_GUTTER_PX = 128
_NAME = 17
"""Largest number of characters of a row's name."""
_TABLE_ROWS, _TABLE_COLUMNS = 32, 6


def _heatmap(block: Heat) -> Markup:
    """Return the heatmap, with its scale and its table."""
    rows = block.rows
    picture = png(np.repeat(block.levels, [row.height for row in rows], axis=0), drawing.heat_palette())
    px = min(drawing.HEIGHT, max(_LEAST_PX, _ROW_PX * sum(row.height for row in rows)))
    source = "data:image/png;base64," + b64encode(picture).decode()
    # Both the size in the file and the style sheet's: a reader without styles sees it as high as its names.
    image = tag("img", src=source, alt=f"{block.label}; the table has the numbers", width=600, height=px)
    shown = tag("div", _names(rows, px), image, _steps_axis(block), cls="plot heat")
    return join(_scale(), shown, _numbers(_newest(block)))


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
    """Return the names of the rows, as many as fit. Those that the verdict names have priority."""
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
        tag("li", _swatch(drawing.css(colour)), text.times(factor).replace(".00", ""))
        for factor, colour in drawing.HEAT_COLOURS.items()
    ]
    missing = tag("li", _swatch(drawing.css(drawing.HEAT_MISSING)), "missing")
    return tag("ul", marks, missing, cls="legend")


def _newest(block: Heat) -> Table:
    """Return the table of the newest columns, the worst rows first."""
    over = excess(block.levels).tolist()
    order = sorted(
        range(len(over)), key=lambda index: (-over[index] if over[index] == over[index] else math.inf, index)
    )
    shown = order[:_TABLE_ROWS]
    newest = [*enumerate(block.last.tolist())][-_TABLE_COLUMNS:]
    columns = [
        Column("row", lambda index: block.rows[index].name),
        Column("mean", lambda index: 1 + over[index], "factor"),
        *(
            Column(f"step {last:,}", partial(_level, block.levels[:, column]), "figures")
            for column, last in newest
        ),
    ]
    count = f"{len(shown)} of {text.count(len(over), 'row')}, the worst first; 1× is the median."
    return Table(block.label, columns, shown, count)


def _level(levels: Array, index: int) -> str:
    value = int(levels[index])
    if value == MISSING:
        return "missing"
    return {0: "≤ ", 254: "≥ "}.get(value, "") + text.times(float(ratio(value)))
