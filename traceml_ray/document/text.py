"""Renders blocks as plain text, laid out by rich. The result is the same on every terminal."""

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
    Strips,
    Table,
)
from traceml_ray.text import one_line

WIDTH = 100
LABEL = 11
_INDENT = 2
_CELL = 256
"""Largest number of characters of a cell. The name of a file is not cut."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|min|h|[kMGT]?B)(?![\w-]))")
_KEPT = "\ue000"
"""Placeholder for a space at which a line must not be broken: rich breaks lines at no-break spaces."""


def page(blocks: Iterable[Block | Sequence[str]], *, wrapped: bool = True) -> str:
    """
    Return `blocks` (or lines) as text, with an empty line between two. Empty blocks are left out. Characters
    that cannot be printed are escaped, because the text may be written to a file that is shown on a terminal.
    See `laid_out` for `wrapped`.
    """
    parts = (laid_out(block, wrapped=wrapped) for block in blocks)
    return "\n\n".join("\n".join(map(one_line, lines)) for lines in parts if lines) + "\n"


def load() -> None:
    """
    Load everything that `page` needs, including its data beyond ASCII. Without this call, the first page
    takes 80 ms of CPU time longer.
    """
    page([Facts(("label", "text")), Table("", [Column("name", str)], ["漢"])])


def laid_out(block: Block | Sequence[str], *, wrapped: bool = True) -> Sequence[str]:
    """
    Return a block as lines; empty if the block is empty. With `wrapped`, the cells of a table are wrapped to
    fit into `WIDTH`; otherwise each item is one line of any width.
    """
    if isinstance(block, Facts):
        return _facts(block)
    if isinstance(block, Lines):
        return _marked(block)
    if isinstance(block, Table):
        return _table(block, wrapped)
    return [] if isinstance(block, StepChart | Heat | Bars | Strips | Boxes | Overlay) else block


def blocks_of(section: Section) -> list[Block | Sequence[str]]:
    """
    Return the blocks of a section that can be written as text. The section's title is above lines, which have
    titles too.
    """
    blocks: list[Block | Sequence[str]] = [b for b in section.blocks if isinstance(b, Facts | Table | Lines)]
    if not section.title or not any(isinstance(block, Lines) for block in blocks):
        return blocks
    return [[section.title, *(f"  {line}" for block in blocks for line in laid_out(block))]]


def _facts(block: Facts) -> list[str]:
    """Return labels with their texts, wrapped in their own column."""
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
    """Return the title, and each line after its mark, cut to the available width."""
    wide = max((len(mark) for mark, _ in block.lines), default=0)
    if not wide:
        return [block.title, *(f"  {_end(line, WIDTH - 2 * _INDENT)}" for _, line in block.lines)]
    room = WIDTH - wide - 2 * _INDENT
    return [block.title, *(f"  {mark:{wide}}  {shortened(line, room)}" for mark, line in block.lines)]


def _end(line: str, most: int) -> str:
    """
    Return the end of a line without a mark, such as a line of a stack. The end is specific; the beginning is
    a path.
    """
    return line if len(line) <= most else f"  …{line[3 - most :]}"


def shortened(line: str, most: int = WIDTH) -> str:
    """Return a line cut to at most `most` characters."""
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
