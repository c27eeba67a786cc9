"""Tables and wrapped lines of the text faces, laid out by rich: plain text, the same on every terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from traceml_ray.text import one_line

WIDTH = 100
LABEL = 11
_INDENT = 2
_CELL = 256
"""Characters of a cell: a file's name is not cut."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|min|h|[kMGT]?B)(?![\w-]))")
_KEPT = "\ue000"
"""Stands for a space at which no line ends: rich breaks lines at no-break spaces."""


def page(blocks: Iterable[Sequence[str]]) -> str:
    """
    Return `blocks` of lines, the empty ones left out, with an empty line between two. It may be written to a
    file that is shown on a terminal, so what is not printable is written out.
    """
    return "\n\n".join("\n".join(map(one_line, block)) for block in blocks if block) + "\n"


def facts(*pairs: tuple[str, str]) -> list[str]:
    """Return (label, text) pairs as lines, the text wrapped in its own column; none for an empty text."""
    from rich.table import Table  # imported where a report is written: a training process never does

    grid = Table.grid()
    grid.add_column(width=LABEL)
    grid.add_column()
    for pair in pairs:
        if pair[1]:
            grid.add_row(*map(_written, pair))
    return _lines(grid, WIDTH) if grid.row_count else []


Columns = Mapping[str, Callable[[Any], str]]
"""Cells by header; a header that begins with `>` is that of a column of numbers."""


def table(title: str, columns: Columns, items: Iterable[Any], *, wrapped: bool = True) -> list[str]:
    """
    Return a titled table with a row for each item, without columns that stay empty; [] for no items. Cells
    are `wrapped` to fit into `WIDTH`; if not, each item is one line, as wide as its cells.
    """
    from rich.table import Table as Grid

    rows = Table(title, columns, [*items]).cells()
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in rows[0] if rows else ():
        number = header.startswith(">")
        alone = number or not wrapped
        grid.add_column(header.lstrip(">"), justify="right" if number else "left", no_wrap=alone)
    for row in rows:
        grid.add_row(*(_written(shortened(row[header], _CELL)) for header in row))
    width = WIDTH - _INDENT if wrapped else _CELL * len(columns)
    return [title, *(" " * _INDENT + line for line in _lines(grid, width))] if rows else []


class Facts:
    """(label, text) pairs, those without a text left out. One without a label goes on with that before."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = [pair for pair in pairs if pair[1]]


class Table(NamedTuple):
    """A titled table with a row for each item, and a note below it."""

    title: str
    columns: Columns
    items: Sequence[Any]
    note: str = ""

    def cells(self) -> list[dict[str, str]]:
        """Return the cells of each row by header, without columns that stay empty."""
        rows = [{header: cell(item) for header, cell in self.columns.items()} for item in self.items]
        kept = [header for header in self.columns if any(row[header] for row in rows)]
        return [{header: row[header] for header in kept} for row in rows]


class Lines(NamedTuple):
    """Lines as they were printed, with a title, and with a mark before each."""

    title: str
    lines: Sequence[tuple[str, str]]
    """Mark and text."""


Block = Facts | Table | Lines


def laid_out(block: Block) -> list[str]:
    """Return a block as lines; none where it is empty."""
    if isinstance(block, Facts):
        return facts(*block.pairs)
    if isinstance(block, Lines):
        return _marked(block)
    lines = table(block.title, block.columns, block.items)
    return lines + [f"{' ' * _INDENT}{block.note}"] * bool(block.note)


def _marked(block: Lines) -> list[str]:
    """Return the title, and each line behind its mark, as much of it as there is room for."""
    wide = max((len(mark) for mark, _ in block.lines), default=0)
    room = WIDTH - wide - 2 * _INDENT
    return [block.title, *(f"  {mark:{wide}}  {shortened(line, room)}" for mark, line in block.lines)]


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
