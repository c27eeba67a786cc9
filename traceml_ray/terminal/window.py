"""
A terminal that is this process's for a while: other screen, keys without Enter, signals as events. It is left
as it was found, also after an error, at Ctrl-C, SIGTERM, SIGHUP and while this process is stopped (Ctrl-Z).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import termios
from collections.abc import Sequence
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from .screen import ENTER, LEAVE, Screen

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_ENDS, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_READ = 4096
_SMALLEST = 4


def look() -> tuple[ColorSystem | None, bool]:
    """Return which colours the terminal at stdout has, None for none, and whether it has ASCII only."""
    console = Console(file=sys.stdout)
    colours = None if console.no_color or not console.color_system else _system(console.color_system)
    return colours, "utf" not in (sys.stdout.encoding or "").lower()


def is_window() -> bool:
    """Return whether stdout is a terminal that can show more than lines."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Window:
    """
    Used as a context. While it is entered, what this process writes to stdout and stderr (a warning of a
    library) goes nowhere: it would stand in the midst of the panel.
    """

    def __init__(self) -> None:
        self.screen = Screen(self._write, *look())
        self.ended = False
        """A signal has asked for the end."""
        self._out = -1
        self._modes: Any = None
        self._wake = os.pipe()
        self._before: dict[int, Any] = {}
        self._found: set[int] = set()
        self._saved: list[tuple[int, int]] = []

    def __enter__(self) -> Window:
        self._out = os.dup(sys.stdout.fileno())
        self._in = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        for end in self._wake:
            os.set_blocking(end, False)
        self._before = {number: signal.getsignal(number) for number in _HANDLED}
        self._wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self.take_signals()
        self._silence()
        self._learn()
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            self._leave()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        for to, saved in self._saved:
            os.dup2(saved, to)
            os.close(saved)
        os.close(self._out)  # the pipe stays: the thread that asks may still write to it

    def take_signals(self) -> None:
        """Have signals come here: Ray puts handlers of its own there when it attaches."""
        for number in _HANDLED:
            signal.signal(number, lambda number, _frame: self._found.add(number))

    def wake(self) -> None:
        """Have `wait` return; may be called by any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake[1], b"\0")

    def wait(self, seconds: float | None) -> bytes:
        """Wait for keys, a signal or `wake`, at most so long; return what was typed."""
        watched = [self._wake[0], *([] if self._in is None else [self._in])]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], _READ)
        self._heed()
        if self._in is None or self._in not in ready or self.ended:
            return b""
        try:
            typed = os.read(self._in, _READ)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            typed = b""
        self.ended = self.ended or not typed  # it has hung up
        return typed

    def size(self) -> tuple[int, int]:
        """Return its width and height."""
        size = os.get_terminal_size(self._out)
        return max(_SMALLEST, size.columns or 80), max(_SMALLEST, size.lines or 24)

    def draw(self, lines: Sequence[Text]) -> int:
        """Show lines; return how many characters were sent."""
        return self.screen.draw(lines)

    def _heed(self) -> None:
        signals, self._found = self._found, set()
        self.ended = self.ended or bool(signals & {*_ENDS})
        if signal.SIGWINCH in signals:
            self.screen.forget()
        if signal.SIGTSTP in signals and not self.ended:
            self._stop()
        elif signal.SIGCONT in signals and not self.ended:  # it was stopped without being asked
            self._take()

    def _stop(self) -> None:
        """Leave the terminal to the shell until this process goes on."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        self.take_signals()
        self._found.discard(signal.SIGCONT)
        self._learn()
        self._take()

    def _learn(self) -> None:
        """Note the modes that the terminal is left in."""
        if self._in is not None:
            self._modes = termios.tcgetattr(self._in)

    def _take(self) -> None:
        if self._in is not None:
            modes = termios.tcgetattr(self._in)
            modes[3] &= ~(termios.ICANON | termios.ECHO)
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._in, termios.TCSADRAIN, modes)
        self._write(ENTER)
        self.screen.forget()

    def _leave(self) -> None:
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
