"""
The live view of `--live`: a separate process that draws beneath the output of a job.

It runs in its own process session, so that Ctrl-C reaches only the job. It ends when its stdin is closed,
which happens when the launcher ends in any way. So the terminal is always restored.

The output of other processes goes directly to the terminal, not through a pipe. The terminal itself scrolls
it in the lines above the panel (DECSTBM). A frame is one write that saves the cursor, draws, and restores the
cursor. The kernel does not interleave another write, so neither output garbles the other.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.color import ColorSystem
from rich.text import Text

from traceml_ray.document.terminal import fit
from traceml_ray.monitor import rank_connections
from traceml_ray.settings import Settings
from traceml_ray.terminal.screen import Screen, terminal_colours
from traceml_ray.text import LEAVE_PANEL, RESTORE_CURSOR, SAVE_CURSOR
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import LocalSource

from .panel import panel
from .top import SLOW_LINE_BPS, Feed, is_slow

_LEAST = 12, 40
"""Smallest size of a terminal, in lines and cells, that gets a panel."""
_SHARE = 2 / 5
"""Largest share of the terminal's lines that the panel may take."""
_MOST_LINES = 20
"""Largest height of the panel, in lines."""


class Beneath:
    """
    Draws the panel beneath the output of the job.

    Args:
        fd: file descriptor of the terminal.
        colours: the colours that the terminal supports; None: no colours.
        plain: whether the terminal shows only ASCII.
    """

    def __init__(self, fd: int, colours: ColorSystem | None, plain: bool = False) -> None:
        self._fd = fd
        self._frame = ""
        self._screen = Screen(self._add, colours, plain)
        self._size = (0, 0)
        self._height = 0
        """Height of the panel on the terminal, in lines. 0: it is not shown."""

    @property
    def resized(self) -> bool:
        """Whether the size of the terminal has changed since `room` was called."""
        size = os.get_terminal_size(self._fd)
        return self._size != (size.lines, size.columns)

    def room(self) -> tuple[int, int] | None:
        """Return the width and height available to the panel; None if the terminal is too small."""
        size = os.get_terminal_size(self._fd)
        if self.resized:
            self._leave()
            self._size = size.lines, size.columns
        if size.lines < _LEAST[0] or size.columns < _LEAST[1]:
            return None
        return size.columns, min(int(size.lines * _SHARE), _MOST_LINES)

    def draw(self, lines: Sequence[Text], *, whole: bool = False) -> int:
        """
        Draw the lines, at most as many as `room` returns. `whole`: redraw all lines. Return the number of
        bytes sent.
        """
        rows, top = self._size[0], self._size[0] - len(lines)
        self._frame = ""
        if self._height != len(lines):
            self._leave()
            self._height = len(lines)
            # The cursor's line and the lines above it move up until the panel has room below the cursor.
            self._frame = "\x1bD" * len(lines) + f"\x1b[{len(lines)}A"
        region = f"\x1b[1;{rows - len(lines)}r" if self._frame else ""
        before, self._frame = self._frame, ""
        if whole or region:
            self._screen.forget()
        self._screen.top = top
        self._screen.draw(lines)
        if not (before or self._frame):
            return 0
        return self._write(f"{before}{SAVE_CURSOR}{region}{self._frame}{RESTORE_CURSOR}")

    def leave(self) -> None:
        """Clear the panel and return its lines to the job's output."""
        self._leave()

    def _leave(self) -> None:
        if self._height:
            self._height = 0
            self._write(LEAVE_PANEL)

    def _add(self, text: str) -> None:
        self._frame += text

    def _write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        sent = 0
        while sent < len(data):
            sent += os.write(self._fd, data[sent:])
        return sent


_INTERVAL_S = 1.0
_LOOK_S = 0.05
"""
Interval at which the size of the terminal is checked, in s. A change scrolls all lines, also the
panel's.
"""
_WHOLE_S = 15.0
"""Interval at which everything is redrawn, in s: the job may have cleared the terminal."""
_BLOCKED = 20
"""After a frame that took long to send, drawing pauses this many times as long."""
_NOT_YET = "empty", "starting", "unwatched"
_STOPPED = "stopped (SIGSTOP)"


def main(arguments: Sequence[str]) -> NoReturn:
    """Show the session in the folder `arguments[0]` on stdout until stdin is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    seen = terminal_colours()
    terminal = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):  # a warning of a library would appear inside the panel
        os.dup2(nowhere, fd)
    under = Beneath(terminal, *seen)
    feed = Feed(_session(Path(arguments[0])))
    wake, code = os.pipe(), 1
    try:
        feed.follow(_INTERVAL_S, lambda: os.write(wake[1], b"\0"))
        _draw_until_ended(feed, under, wake[0])
        code = 0
    finally:
        with contextlib.suppress(OSError):  # a terminal that is gone
            under.leave()
        os._exit(code)  # with its cluster gone, shutting Ray down takes minutes


def _session(folder: Path) -> SessionPoll:
    source = LocalSource(str(folder), str(folder.parent))
    return SessionPoll(source, thresholds=Settings.load().thresholds)


def _draw_until_ended(feed: Feed, under: Beneath, wake: int) -> None:
    """Draw every change until stdin is closed."""
    job, free_at, whole_at, new = os.getppid(), 0.0, 0.0, True
    while True:
        ready, _, _ = select.select([0, wake], [], [], _LOOK_S)
        if 0 in ready:
            return
        if wake in ready:
            os.read(wake, 4096)
            new = True
        now = time.monotonic()
        if not under.resized and (now < free_at or not (new or now >= whole_at)):
            continue
        new, free_at = False, now + _INTERVAL_S
        if rank_connections.state(job) == _STOPPED:  # stopped by Ctrl-Z: the shell uses the terminal
            under.leave()
            continue
        whole = now >= whole_at
        whole_at = now + _WHOLE_S if whole else whole_at
        sent = _draw(feed, under, whole)
        took_s = time.monotonic() - now
        free_at = now + max(_INTERVAL_S, _BLOCKED * took_s, is_slow() * sent / SLOW_LINE_BPS)


def _draw(feed: Feed, under: Beneath, whole: bool) -> int:
    room = under.room()
    if room is None:
        return 0
    newest, (width, height) = feed.newest, room
    if newest is None or newest.state in _NOT_YET:
        state = (
            newest.state_text if newest is not None and newest.state != "empty" else "waiting for the ranks …"
        )
        lines = [fit(f"traceml-ray: {state}", width)]
    else:
        lines = panel(newest, feed.choice, width, height, "")
    return under.draw(lines, whole=whole)


if __name__ == "__main__":
    main(sys.argv[1:])
