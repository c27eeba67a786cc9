"""
Draws lines on a terminal. For each frame, only the cells that differ from the terminal's are sent.
`rich.live` sends all lines of each frame: 10 times as much, which is too much for a slow connection.

Also takes over a terminal for a while: alternate screen, keys without Enter, signals as events. The terminal
is restored afterwards, also after an error, at Ctrl-C, SIGTERM and SIGHUP, and while this process is stopped
(Ctrl-Z).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from traceml_ray.text import in_ascii

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Switch to the alternate screen, hide the cursor, turn line wrapping off."""
LEAVE = "\x1b[m\x1b[?7h\x1b[?25h\x1b[?1049l"
_NEAR = 6
"""Gaps of unchanged cells up to this width are also sent, because moving the cursor costs as much."""
_NOT_SHOWN = "\ufffd"
_Cell = tuple[str, str]
"""
A character with the characters that combine with it ("" in the second half of a wide one), and
its SGR codes.
"""
_BLANK: _Cell = (" ", "")
"""Cell of a cleared screen."""


class Screen:
    """
    The cells of a terminal.

    Args:
        write: sends text to the terminal.
        colours: the colours that the terminal supports; None: no colours.
        plain: whether the terminal shows only ASCII.
    """

    def __init__(
        self, write: Callable[[str], object], colours: ColorSystem | None, plain: bool = False
    ) -> None:
        self._write = write
        self._colours, self._plain = colours, plain
        self._console = Console(file=io.StringIO(), _environ={})
        self.top = 0
        """Number of the terminal's lines above ours."""
        self._texts: list[Text] = []
        self._cells: list[list[_Cell]] = []

    def forget(self) -> None:
        """Assume an empty terminal, because it was cleared or its size has changed."""
        self._texts, self._cells = [], []

    def draw(self, lines: Sequence[Text]) -> int:
        """Show lines, the first one at the top. Return the number of characters sent."""
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
        """Return the text that clears the terminal, or our lines of it."""
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
    """
    Replace control characters in text, keeping its length. Text from files may contain terminal
    commands.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _NOT_SHOWN for c in text)


@functools.lru_cache(256)
def _codes(style: Style | None, colours: ColorSystem | None) -> str:
    """Return the codes of a style. Without colours, only attributes such as bold are left."""
    if not style:
        return ""
    shown = style if colours else style.without_color
    return shown.render("x", color_system=colours or ColorSystem.STANDARD).partition("x")[0][2:-1]


def _changes(before: Sequence[_Cell], cells: Sequence[_Cell], row: int) -> str:
    """Return the text that turns the line `before` into `cells`."""
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
    """Return the ranges of cells that differ, as (begin, end)."""
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


_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_ENDS, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_READ = 4096
_SMALLEST = 4


def terminal_colours() -> tuple[ColorSystem | None, bool]:
    """
    Return the colours that the terminal at stdout supports (None: none), and whether it shows
    only ASCII.
    """
    console = Console(file=sys.stdout)
    colours = None if console.no_color or not console.color_system else _system(console.color_system)
    return colours, "utf" not in (sys.stdout.encoding or "").lower()


def is_window() -> bool:
    """Return whether stdout is a terminal that can show more than lines."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class TerminalWindow:
    """
    The terminal as a window, used as a context manager. Inside it, what this process writes to stdout and
    stderr (such as a warning of a library) is discarded, because it would appear inside the panel.
    """

    def __init__(self) -> None:
        self.screen = Screen(self._write, *terminal_colours())
        self.ended = False
        """Whether a signal has requested the end."""
        self._out = -1
        self._modes: Any = None
        self._wake = os.pipe()
        self._before: dict[int, Any] = {}
        self._signals: set[int] = set()
        self._saved: list[tuple[int, int]] = []

    def __enter__(self) -> TerminalWindow:
        self._out = os.dup(sys.stdout.fileno())
        self._in = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        for end in self._wake:
            os.set_blocking(end, False)
        self._before = {number: signal.getsignal(number) for number in _HANDLED}
        self._wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self.catch_signals()
        self._silence()
        self._save_modes()
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            self._restore()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        for to, saved in self._saved:
            os.dup2(saved, to)
            os.close(saved)
        os.close(self._out)  # the pipe stays: the thread that asks may still write to it

    def catch_signals(self) -> None:
        """
        Install this window's signal handlers. Called again after attaching to Ray, which installs its own
        handlers.
        """
        for number in _HANDLED:
            signal.signal(number, lambda number, _frame: self._signals.add(number))

    def wake(self) -> None:
        """Make `wait` return. Any thread may call this."""
        with contextlib.suppress(OSError):
            os.write(self._wake[1], b"\0")

    def wait(self, seconds: float | None) -> bytes:
        """Wait for keys, a signal or `wake`, at most `seconds`. Return the bytes typed."""
        watched = [self._wake[0], *([] if self._in is None else [self._in])]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], _READ)
        self._handle_signals()
        if self._in is None or self._in not in ready or self.ended:
            return b""
        try:
            typed = os.read(self._in, _READ)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            typed = b""
        self.ended = self.ended or not typed  # the terminal has hung up
        return typed

    def size(self) -> tuple[int, int]:
        """Return the width and height of the terminal."""
        size = os.get_terminal_size(self._out)
        return max(_SMALLEST, size.columns or 80), max(_SMALLEST, size.lines or 24)

    def draw(self, lines: Sequence[Text]) -> int:
        """Show lines; return the number of characters sent."""
        return self.screen.draw(lines)

    def _handle_signals(self) -> None:
        signals, self._signals = self._signals, set()
        self.ended = self.ended or bool(signals & {*_ENDS})
        if signal.SIGWINCH in signals:
            self.screen.forget()
        if signal.SIGTSTP in signals and not self.ended:
            self._stop()
        elif signal.SIGCONT in signals and not self.ended:  # it was stopped without being asked
            self._enter()

    def _stop(self) -> None:
        """Give the terminal to the shell until this process continues."""
        self._restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        self.catch_signals()
        self._signals.discard(signal.SIGCONT)
        self._save_modes()
        self._enter()

    def _save_modes(self) -> None:
        """Save the modes of the terminal, to be restored at the end."""
        if self._in is not None:
            self._modes = termios.tcgetattr(self._in)

    def _enter(self) -> None:
        if self._in is not None:
            modes = termios.tcgetattr(self._in)
            modes[3] &= ~(termios.ICANON | termios.ECHO)
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._in, termios.TCSADRAIN, modes)
        self._write(ENTER)
        self.screen.forget()

    def _restore(self) -> None:
        try:
            self._write(LEAVE)
        finally:
            if self._in is not None and self._modes is not None:
                termios.tcsetattr(self._in, termios.TCSAFLUSH, self._modes)

    def _silence(self) -> None:
        sys.stdout.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            if os.isatty(fd):
                self._saved.append((fd, os.dup(fd)))
                os.dup2(nowhere, fd)
        os.close(nowhere)

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._out, data) :]


def _system(name: str) -> ColorSystem:
    return {"256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}.get(name, ColorSystem.STANDARD)
