"""
A panel in the lowest lines of a terminal, beneath what other processes write to it.

What they write goes there as ever, through no pipe: the terminal itself scrolls it in the lines above the
panel (DECSTBM). A frame is one write that saves the cursor, draws, and puts the cursor back where it was. The
kernel lets no other write come in between, so neither tears the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.color import ColorSystem
from rich.text import Text

from .codes import LEAVE, RESTORE, SAVE
from .screen import Screen

_LEAST = 12, 40
"""Lines and cells of a terminal that has room for a panel."""
_SHARE = 2 / 5
"""Of the lines of a terminal,"""
_MOST_LINES = 20
"""and at most so many."""


class Beneath:
    """
    Args:
        fd: the terminal.
        colours: which ones it has; None: none.
        plain: it has ASCII only.
    """

    def __init__(self, fd: int, colours: ColorSystem | None, plain: bool = False) -> None:
        self._fd = fd
        self._frame = ""
        self._screen = Screen(self._add, colours, plain)
        self._size = (0, 0)
        self._height = 0
        """Of the panel, where it is on the terminal."""

    @property
    def resized(self) -> bool:
        """Whether the terminal has another size than when `room` was asked."""
        size = os.get_terminal_size(self._fd)
        return self._size != (size.lines, size.columns)

    def room(self) -> tuple[int, int] | None:
        """Return width and height that the panel has now; None where the terminal is too small for one."""
        size = os.get_terminal_size(self._fd)
        if self.resized:
            self._leave()
            self._size = size.lines, size.columns
        if size.lines < _LEAST[0] or size.columns < _LEAST[1]:
            return None
        return size.columns, min(int(size.lines * _SHARE), _MOST_LINES)

    def draw(self, lines: Sequence[Text], *, whole: bool = False) -> int:
        """Show lines, as many as `room` has; `whole`: all of them. Return how many bytes were sent."""
        rows, top = self._size[0], self._size[0] - len(lines)
        self._frame = ""
        if self._height != len(lines):
            self._leave()
            self._height = len(lines)
            # The cursor's line, and what is above, move up until the panel has room below it.
            self._frame = "\x1bD" * len(lines) + f"\x1b[{len(lines)}A"
        region = f"\x1b[1;{rows - len(lines)}r" if self._frame else ""
        before, self._frame = self._frame, ""
        if whole or region:
            self._screen.forget()
        self._screen.top = top
        self._screen.draw(lines)
        if not (before or self._frame):
            return 0
        return self._write(f"{before}{SAVE}{region}{self._frame}{RESTORE}")

    def leave(self) -> None:
        """Give the panel's lines back."""
        self._leave()

    def _leave(self) -> None:
        if self._height:
            self._height = 0
            self._write(LEAVE)

    def _add(self, text: str) -> None:
        self._frame += text

    def _write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        sent = 0
        while sent < len(data):
            sent += os.write(self._fd, data[sent:])
        return sent
