"""Blocks as plain text, laid out by rich: the same on every terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from traceml_ray.document.model import (
    Bars,
    Block,
    Boxes,
    Column,
    Facts,
    Heat,
    Lines,
    Overlay,
    Section,
    StepChart,
    Table,
)
from traceml_ray.text import one_line

WIDTH = 100
LABEL = 11
_INDENT = 2
_CELL = 256
"""Characters of a cell: a file's name is not cut."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|min|h|[kMGT]?B)(?![\w-]))")
_KEPT = "\ue000"
"""Stands for a space at which no line ends: rich breaks lines at no-break spaces."""


def page(blocks: Iterable[Block | Sequence[str]], *, wrapped: bool = True) -> str:
    """
    Return `blocks`, or lines, the empty ones left out, with an empty line between two. It may be written to a
    file that is shown on a terminal, so what is not printable is written out. See `laid_out` for `wrapped`.
    """
    parts = (laid_out(block, wrapped=wrapped) for block in blocks)
    return "\n\n".join("\n".join(map(one_line, lines)) for lines in parts if lines) + "\n"


def load() -> None:
    """Load what `page` needs, also beyond ASCII: the first page takes 80 ms of a core longer without it."""
    page([Facts(("label", "text")), Table("", [Column("name", str)], ["漢"])])


def laid_out(block: Block | Sequence[str], *, wrapped: bool = True) -> Sequence[str]:
    """
    Return a block as lines; none where it is empty. Cells of a table are `wrapped` to fit into `WIDTH`; if
    not, each item is one line, as wide as its cells.
    """
    if isinstance(block, Facts):
        return _facts(block)
    if isinstance(block, Lines):
        return _marked(block)
    if isinstance(block, Table):
        return _table(block, wrapped)
    return [] if isinstance(block, StepChart | Heat | Bars | Boxes | Overlay) else block


def blocks_of(section: Section) -> list[Block | Sequence[str]]:
    """Return what can be written of a section. Its title is written above lines, which have titles, too."""
    blocks: list[Block | Sequence[str]] = [b for b in section.blocks if isinstance(b, Facts | Table | Lines)]
    if not section.title or not any(isinstance(block, Lines) for block in blocks):
        return blocks
    return [[section.title, *(f"  {line}" for block in blocks for line in laid_out(block))]]


def _facts(block: Facts) -> list[str]:
    """Return labels with their texts, these wrapped in a column of their own."""
    from rich.table import Table as Grid  # imported where a report is written: a training process never does

    grid = Grid.grid()
    grid.add_column(width=LABEL)
    grid.add_column()
    for pair in block.pairs:
        grid.add_row(*map(_written, pair))
    return _lines(grid, WIDTH) if grid.row_count else []


def _table(block: Table, wrapped: bool) -> list[str]:
    """Return the title, a row for each item, and the note."""
    from rich.table import Table as Grid

    columns, rows = block.cells()
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        number = column.number
        grid.add_column(column.head(), justify="right" if number else "left", no_wrap=number or not wrapped)
    for row in rows:
        grid.add_row(*(_written(shortened(cell, _CELL)) for cell in row))
    width = WIDTH - _INDENT if wrapped else _CELL * len(columns)
    drawn = [block.title, *(" " * _INDENT + line for line in _lines(grid, width))] if rows else []
    return drawn + [f"{' ' * _INDENT}{block.note}"] * bool(block.note)


def _marked(block: Lines) -> list[str]:
    """Return the title, and each line behind its mark, as much of it as there is room for."""
    wide = max((len(mark) for mark, _ in block.lines), default=0)
    if not wide:
        return [block.title, *(f"  {_end(line, WIDTH - 2 * _INDENT)}" for _, line in block.lines)]
    room = WIDTH - wide - 2 * _INDENT
    return [block.title, *(f"  {mark:{wide}}  {shortened(line, room)}" for mark, line in block.lines)]


def _end(line: str, most: int) -> str:
    """Return the end of a line without a mark, as of a stack: it is specific, the beginning is a path."""
    return line if len(line) <= most else f"  …{line[3 - most :]}"


def shortened(line: str, most: int = WIDTH) -> str:
    """Return a line of at most so many characters."""
    return line if len(line) <= most else line[: most - 1] + "…"


def _written(text: str) -> Any:
    from rich.text import Text

    return Text(_BEFORE_UNIT.sub(_KEPT, one_line(text)))


def _lines(grid: Any, width: int) -> list[str]:
    from rich.console import Console

    file = io.StringIO()
    # Nothing is taken from the environment or from the terminal that this process may have.
    console = Console(
        file=file, width=width, height=100, color_system=None, force_terminal=False, _environ={}
    )
    console.print(grid)
    return [line.rstrip().replace(_KEPT, " ") for line in file.getvalue().splitlines()]
