"""Renders blocks as lines of styled text (`rich.text.Text`): cut, wrapped, in columns, in a frame."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from traceml_ray import text
from traceml_ray.document.drawing import time_scale
from traceml_ray.document.model import SIGNS, Bars, Column, Facts, Lines, Number, Section, Table

Cell = Text | str
Scale = tuple[float, float] | None
TONES = {
    "good": "green", "notice": "yellow", "warning": "bold yellow", "critical": "bold red",
    "info": "", "unsure": "",
}  # fmt: skip
"""Style of each tone or severity."""
MARK, QUIET, HEAD = "bold yellow", "dim", "bold"
_GAP = 2


def fit(line: Cell, width: int) -> Text:
    """Return a line of exactly `width` cells: cut with "…", or padded."""
    if width <= 0:
        return Text()
    fitted = line.copy() if isinstance(line, Text) else Text(line)
    fitted.truncate(width, overflow="ellipsis", pad=True)
    return fitted


def wrap(line: str, width: int, style: str = "") -> list[Text]:
    """Return text as lines of at most `width` cells, broken between words."""
    lines: list[str] = []
    for word in text.one_line(line).split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [Text(line, style=style) for line in lines]


def cut(lines: Sequence[Text], most: int) -> list[Text]:
    """Return at most `most` lines; if some are left out, the last one ends with "…"."""
    if len(lines) <= most:
        return [*lines]
    kept = [line.copy() for line in lines[: max(0, most)]]
    if kept:
        kept[-1].append(" …")
    return kept


def table(rows: Sequence[Sequence[Cell]], width: int | None, right: Iterable[int] = ()) -> list[Text]:
    """Return rows of cells as lines (cut at `width`) with columns, those in `right` aligned to the right."""
    cells, numbers = [[_written(cell) for cell in row] for row in rows], {*right}
    sizes = [[cell_len(cell) if isinstance(cell, str) else cell.cell_len for cell in row] for row in cells]
    wide = [max(column) for column in zip(*sizes, strict=True)]
    lines = []
    for row, taken in zip(cells, sizes, strict=True):
        parts: list[Cell] = [""]
        for column, cell in enumerate(row):
            fill = " " * (wide[column] - taken[column])
            _join(
                parts,
                *((fill, cell) if column in numbers else (cell, fill)),
                " " * (_GAP * bool(wide[column])),
            )
        line = Text.assemble(*parts)
        line.rstrip()
        if width is not None:
            line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def _join(parts: list[Cell], *cells: Cell) -> None:
    """
    Append cells to the parts of a line. Cells without a style are merged into one: in long tables these are
    most cells.
    """
    for cell in cells:
        last = parts[-1]
        if isinstance(cell, str) and isinstance(last, str):
            parts[-1] = last + cell
        else:
            parts.append(cell)


def _written(cell: Cell) -> Cell:
    return cell if isinstance(cell, Text) else text.one_line(cell)


def flow(items: Sequence[Text], width: int, gap: int = _GAP) -> list[Text]:
    """Return the items one after the other, on as many lines as needed."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + gap + item.cell_len <= width:
            lines[-1].append(" " * gap).append_text(item)
        else:
            lines.append(item.copy())
    return lines


@dataclass(frozen=True)
class PaneSection:
    """
    A part of the panel. `lines` returns its contents in at most the given number of lines and width. It
    prefers `want` lines; with fewer than `least` it is left out. If there are several parts, the first gets
    lines first.
    """

    title: str
    lines: Callable[[int], Sequence[Text]]
    want: int
    least: int = 1
    note: Cell = ""
    """Note at the right of the section's title."""


LINE = 8
"""Width in characters of a line by step, in a cell beside other cells."""


def cell_of(column: Column, item: object, scale: Scale = None) -> Cell:
    """Return the cell of an item, with its sign and colour. `scale` is the scale of a line."""
    if column.unit == "line":
        return text.sparkline(column.value(item) or (), LINE, scale)
    tone = column.tone(item) if column.tone else ""
    gap = " " * (column.unit != "aligned")  # there are many columns of these in a window
    shown = text.clock(column.value(item)) if column.unit == "date" else column.cell(item)
    sign = f"{SIGNS[tone]}{gap}" if tone in SIGNS else ""
    return Text(sign + shown, TONES[tone]) if tone else shown


def listed(block: Table, first: int, width: int, *, worst: bool = False) -> PaneSection:
    """
    Return a long table from its row `first` on. Columns of `spare` that do not fit are left out. With
    `worst`, the worst items come first, if the table can sort them.
    """
    items = block.worst_first() if worst else block.items

    def lines(most: int) -> Sequence[Text]:
        room = max(0, most - 1)
        begin = min(first, max(0, len(items) - room))
        return _rows(block, items[begin : begin + room], width, heads=True)

    order = "the worst first, " if worst and block.badness is not None else ""
    note = f"{order}from {first + 1:,} of {len(items):,}" if first else f"{order}{len(items):,}"
    return PaneSection(heading(block.title), lines, len(items) + 1, 2, note)


_MANY, _FEW = 16, 8
"""A table without heads shows `_FEW` items if it has more than `_MANY`."""


def brief_table(
    block: Table, width: int, left: Callable[[int], str] | None = None, *, least: int = 1, named: str = ""
) -> PaneSection:
    """
    Return a table without a head line. If not all items fit, it has the worst ones, and the text that `left`
    returns for the number of the others; with `left` None, it has the first ones.

    `named` is written between the name of a column and its cell. The first column, and a column with a blank
    name, have none.
    """
    items = block.items

    def lines(most: int) -> Sequence[Text]:
        if len(items) <= most or left is None:
            return _rows(block, items[:most], width, named=named)
        shown = _rows(block, block.worst_first()[: max(0, most - 1)], width, named=named)
        return [*shown, Text(f"… {left(len(items) - len(shown))}", QUIET)]

    want = len(items) if len(items) <= _MANY or left is None else _FEW + 1
    note = Text(block.note, QUIET)
    return PaneSection(heading(block.title), lines, want, min(least, len(items)), note)


def _rows(
    block: Table, items: Sequence[Any], width: int, *, heads: bool = False, named: str = ""
) -> list[Text]:
    """
    Return a line for each item, without the spare columns that do not fit. `heads` adds a
    line of heads.
    """
    columns = [*block.columns]
    scales = [_scale(column, items) for column in columns]
    cells = [
        [cell_of(column, item, scale) for column, scale in zip(columns, scales, strict=True)]
        for item in items
    ]
    if named:
        cells = [[row[0], *map(_named(named), columns[1:], row[1:])] for row in cells]
    left = [name for name in block.spare if name in {column.name for column in columns}]
    while True:
        head: list[list[Cell]] = [[Text(column.name, QUIET) for column in columns]] if heads else []
        right = [index for index, column in enumerate(columns) if column.number and not named]
        drawn = table([*head, *cells], None, right) if head or cells else []
        if not left or max((line.cell_len for line in drawn), default=0) <= width:
            return drawn if heads else [fit(line, width) for line in drawn]
        index = [column.name for column in columns].index(left.pop(0))
        columns.pop(index)
        cells = [[*row[:index], *row[index + 1 :]] for row in cells]


def _named(sign: str) -> Callable[[Column, Cell], Cell]:
    """Return a function that puts the name of a column before a cell that is not empty."""

    def with_name(column: Column, cell: Cell) -> Cell:
        if not column.name.strip() or not cell:
            return cell
        before = f"{column.name}{sign}"
        return Text(before, cell.style).append_text(cell) if isinstance(cell, Text) else before + cell

    return with_name


def grid(block: Table, width: int, per_line: Callable[[int], int]) -> PaneSection:
    """
    Return the items of a table side by side, each with the sign of its first column after its cells. If not
    all fit, the worst ones are shown. `per_line` returns the number of items on a line, given the largest
    number that fits.
    """
    tiles = [_tile(block, item) for item in block.items]
    wide = max((tile.cell_len for tile in tiles), default=1) + _GAP
    on_line = per_line(max(1, (width + _GAP) // wide))

    def lines(most: int) -> Sequence[Text]:
        room = most * on_line
        items = block.items if len(block.items) <= room else block.worst_first()[:room]
        return flow([fit(_tile(block, item), wide - _GAP) for item in items], on_line * wide - _GAP)

    want = -(-len(tiles) // on_line)
    return PaneSection(heading(block.title), lines, want, min(want, 4) if block.note else want, block.note)


def _tile(block: Table, item: object) -> Text:
    """Return the cells of an item as one text, with the sign at the end."""
    first = block.columns[0]
    tone = first.tone(item) if first.tone else ""
    cells = "  ".join(column.cell(item) for column in block.columns)
    return Text(f"{cells} {SIGNS.get(tone, ' ')}", TONES.get(tone, ""))


_STAGE_FORMS = {
    "post_sync": ("▒", "magenta"),
    "data": ("█", "yellow"),
    "prepare": ("▚", "green"),
    "forward": ("▓", "cyan"),
    "backward": ("░", "blue"),
    "sync_wait": ("·", QUIET),
}
"""How a stage is drawn: by form and by colour."""
_LEAST_SHARE = 0.005
"""Smallest share of all bars for which a bar is listed."""


def stacked(block: Bars, width: int, least: int = 1) -> PaneSection:
    """
    Return the bars of stages on one line, and below it the numbers of the visible ones,
    the longest first.
    """
    total, line, until = sum(bar.width for bar in block.bars), Text(), 0.0
    if not total:
        return PaneSection("", lambda _: [], 0)
    for bar in block.bars:
        until += bar.width
        sign, style = _STAGE_FORMS[bar.name]
        line.append(sign * (round(width * until / total) - line.cell_len), style)
    parts = []
    for bar in sorted(block.bars, key=lambda bar: -bar.width):
        if bar.width >= _LEAST_SHARE * total:
            sign, style = _STAGE_FORMS[bar.name]
            part = Text().append(f"{sign} ", style).append(f"{bar.name} {bar.label} ")
            parts.append(part.append(text.share(bar.width / total), HEAD))
    lines = [line, *flow(parts, width)]
    return PaneSection(heading(block.label), lambda most: lines[:most], len(lines), least)


def printed(block: Lines, width: int, note: Cell = "") -> PaneSection:
    """Return lines after their marks. If there are many, the last ones."""
    wide = max((cell_len(mark) for mark, _ in block.lines), default=0)
    lines = [
        Text().append(f"{mark:<{wide}} " if wide else "", MARK).append(text.one_line(line))
        for mark, line in block.lines
    ]
    return PaneSection(
        heading(block.title),
        lambda most: [fit(line, width) for line in lines[-most:]],
        len(lines),
        min(3, len(lines)),
        note,
    )


def _scale(column: Column, items: Sequence[object]) -> Scale:
    """Return the common scale of the lines in a column; None for any other column."""
    if column.unit != "line" or column.scale:
        return column.scale
    return time_scale(np.array([one for item in items for one in column.value(item) or ()], dtype=float))


def heading(title: str) -> str:
    """Return a title in capitals, as a pane shows it. Text in brackets or after a comma stays unchanged."""
    before = re.split(r"[,(]", title, maxsplit=1)[0]
    return before.upper() + title[len(before) :]


def paragraphs(facts: Facts, width: int) -> list[Text]:
    """Return facts as paragraphs, each sentence with its label."""
    written = (f"{label}: {sentence}" if label else sentence for label, sentence in facts.pairs)
    return [line for one in written for line in wrap(one.replace("`", ""), width)]


def section_panes(
    title: str, before: Sequence[Text], sections: Sequence[Section], width: int, first: int, worst: bool
) -> list[PaneSection]:
    """
    Return the contents of a window for sections that belong together: the text `before`, numbers and facts
    under one title, then each table. The longest table starts at its row `first`. See `listed` for `worst`.
    """
    blocks = [block for section in sections for block in section.blocks]
    facts = [line for block in blocks if isinstance(block, Facts) for line in paragraphs(block, width)]
    numbers = table([_number(one) for section in sections for one in section.numbers], width)
    lines = [*before, *numbers, *facts]
    panes = [PaneSection(heading(title), lambda most: cut(lines, most), len(lines), min(3, len(lines)))]
    panes = panes if lines else []
    tables = [block for block in blocks if isinstance(block, Table) and block.items]
    longest = max(tables, key=lambda block: len(block.items), default=None)
    for block in tables:
        panes.append(listed(block, first if block is longest else 0, width, worst=worst))
    return panes


def _number(one: Number) -> list[Cell]:
    """Return the cells of a number: its name, its value, its line, and what it covers."""
    value = f"{one.written(one.value)} {one.unit}".strip()
    return [one.label, Text(value, HEAD), text.sparkline(one.line.tolist()), Text(one.about, QUIET)]


def framed(
    title: str,
    head: Sequence[Text],
    sections: Sequence[PaneSection],
    foot: Cell,
    width: int,
    height: int | None,
) -> list[Text]:
    """Return a panel of `width` cells with `height` lines; None: as many as its sections want."""
    inner = max(0, width - 4)
    if height is None:
        height = 2 + len(head) + sum(1 + section.want for section in sections if section.want)
    sizes = _sizes(sections, height - 2 - len(head))
    lines = [_rule("┌─ ", title, "", "─┐", width), *(_boxed(line, inner) for line in head)]
    for section, size in zip(sections, sizes, strict=True):
        if size:
            lines.append(_rule("├─ ", section.title, section.note, "─┤", width))
            body = [_boxed(line, inner) for line in section.lines(size)]
            lines += body + [_boxed("", inner)] * (size - len(body))
    lines = lines[: max(0, height - 1)]
    lines += [_boxed("", inner)] * (height - 1 - len(lines))
    return [*lines, _rule("└─", "", foot, "─┘", width)][-height:] if height else []


def _sizes(sections: Sequence[PaneSection], room: int) -> list[int]:
    """Return the number of lines of each section, without its title; 0: the section is left out."""
    sizes = [0] * len(sections)
    for index, section in enumerate(sections):
        least = min(section.least, section.want)
        if not any(sizes):  # the first is cut rather than left out
            least = min(least, max(1, room - 1))
        if section.want and least + 1 <= room:
            sizes[index] = least
            room -= sizes[index] + 1
    growing = True
    while growing and room > 0:  # one line each, in turn
        growing = False
        for index, section in enumerate(sections):
            if 0 < sizes[index] < section.want and room > 0:
                sizes[index], room, growing = sizes[index] + 1, room - 1, True
    return sizes


def _rule(left: str, title: str, note: Cell, right: str, width: int) -> Text:
    """Return a line of the frame, with a title at the left and a note at the right."""
    about, beside = (
        Text().append(left, QUIET),
        Text().append_text(note) if isinstance(note, Text) else Text(note),
    )
    if title:
        about.append(f"{title} ", HEAD)
    if beside.cell_len:
        beside = Text(" ") + beside
    room = width - len(right) - len(left)
    about.truncate(max(0, room + len(left)), overflow="ellipsis")
    if beside.cell_len and beside.cell_len < width - len(right) - about.cell_len:
        beside.append(" ")
    beside = fit(beside, min(beside.cell_len, width - len(right) - about.cell_len))
    about.append("─" * (width - len(right) - about.cell_len - beside.cell_len), QUIET)
    return fit(about.append_text(beside).append(right, QUIET), width)


def _boxed(line: Cell, inner: int) -> Text:
    return Text().append("│ ", QUIET).append_text(fit(line, inner)).append(" │", QUIET)
