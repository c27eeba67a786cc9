"""
Lines on a terminal: of each frame only the cells are sent that differ from what is there. `rich.live` sends
all lines of each frame: 10 times as much, and a slow line cannot keep up with it.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from traceml_ray.text import in_ascii

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The other screen, without a cursor; lines do not wrap."""
LEAVE = "\x1b[m\x1b[?7h\x1b[?25h\x1b[?1049l"
_NEAR = 6
"""So few cells between two that differ are sent, too: as much as to move the cursor."""
_NOT_SHOWN = "\ufffd"
_Cell = tuple[str, str]
"""A character with those that combine with it ("" in the second half of a wide one), and its SGR codes."""
_BLANK: _Cell = (" ", "")
"""Of a cleared screen."""


class Screen:
    """
    A terminal's cells.

    Args:
        write: sends text to it.
        colours: which ones it has; None: none.
        plain: it has ASCII only.
    """

    def __init__(
        self, write: Callable[[str], object], colours: ColorSystem | None, plain: bool = False
    ) -> None:
        self._write = write
        self._colours, self._plain = colours, plain
        self._console = Console(file=io.StringIO(), _environ={})
        self.top = 0
        """Lines of the terminal above, which are not ours."""
        self._texts: list[Text] = []
        self._cells: list[list[_Cell]] = []

    def forget(self) -> None:
        """Take the terminal as empty: it has been cleared, or its size has changed."""
        self._texts, self._cells = [], []

    def draw(self, lines: Sequence[Text]) -> int:
        """Show lines, the first at the top; return how many characters were sent."""
        frame = "" if len(lines) == len(self._texts) else self._cleared(len(lines))
        if frame:
            self.forget()
        texts, rows = [*lines], []
        for row, line in enumerate(texts):
            if self._texts and line == self._texts[row]:
                rows.append(self._cells[row])
                continue
            cells = self._split(line)
            before = self._cells[row] if self._cells else [_BLANK] * len(cells)
            frame += _changes(before, cells, self.top + row)
            rows.append(cells)
        self._texts, self._cells = texts, rows
        if frame:
            self._write(frame)
        return len(frame)

    def _cleared(self, lines: int) -> str:
        """Return what empties the terminal, or our lines of it."""
        if not self.top:
            return "\x1b[m\x1b[2J"
        return "\x1b[m" + "".join(f"\x1b[{self.top + row + 1}H\x1b[2K" for row in range(lines))

    def _split(self, line: Text) -> list[_Cell]:
        cells: list[_Cell] = []
        for segment in line.render(self._console):
            codes = _codes(segment.style, self._colours)
            text = _harmless(segment.text)
            for char in in_ascii(text) if self._plain else text:
                wide = 1 if char.isascii() else cell_len(char)
                if wide:
                    cells += [(char, codes), *[("", codes)] * (wide - 1)]
                elif cells:
                    cells[-1] = cells[-1][0] + char, cells[-1][1]
        return cells


def _harmless(text: str) -> str:
    """Return text, as long as it is, without what a terminal would take for an order: it is from files."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _NOT_SHOWN for c in text)


@functools.lru_cache(256)
def _codes(style: Style | None, colours: ColorSystem | None) -> str:
    """Return the codes of a style; without colours, what is left of it (bold)."""
    if not style:
        return ""
    shown = style if colours else style.without_color
    return shown.render("x", color_system=colours or ColorSystem.STANDARD).partition("x")[0][2:-1]


def _changes(before: Sequence[_Cell], cells: Sequence[_Cell], row: int) -> str:
    """Return what turns a line that is `before` into `cells`."""
    output, cursor, codes = "", None, ""
    for first, last in _runs(before, cells):
        output += f"\x1b[{row + 1};{first + 1}H" if cursor is None else f"\x1b[{first - cursor}C"
        for char, style in cells[first:last]:
            if style != codes:
                output += f"\x1b[0;{style}m" if style else "\x1b[m"
                codes = style
            output += char
        cursor = last
    return output + "\x1b[m" * bool(codes)


def _runs(before: Sequence[_Cell], cells: Sequence[_Cell]) -> list[tuple[int, int]]:
    """Return where cells differ: from which on, up to which."""
    n_before, runs = len(before), list[tuple[int, int]]()
    column = 0
    while column < len(cells):
        if column < n_before and before[column] == cells[column]:
            column += 1
            continue
        first = column
        while first and not cells[first][0]:
            first -= 1
        column += 1
        while column < len(cells) and (
            not cells[column][0] or column >= n_before or before[column] != cells[column]
        ):
            column += 1
        if runs and first - runs[-1][1] <= _NEAR:
            runs[-1] = runs[-1][0], column
        else:
            runs.append((first, column))
    return runs
