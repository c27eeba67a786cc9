r"""
What is printed for a person: results on stdout (`show`), messages on stderr (`say`), and there on a terminal
how far long work is (`progress_bar`). All else of the program prints by these.

Names, messages and lines of output come from files that anybody may have written. What a terminal would take
for an order (a title, a colour, where to write, which way text runs) is written out, as `\u001b`. In a text
that is JSON that is the same character.

The bar shows only once the work has taken a while. Who knows that a person waits opens `progress_bar` around
the work; who does it calls `advance`, in the same thread. Where no bar is shown that costs nothing, so that
the work need not know whether anybody waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TextIO

from traceml_ray.text import one_line, visible

_END_S = 1.0


def show(text: object, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text of any number of lines on stdout, or on `file`. Raises OSError (a pipe that is closed)."""
    print(visible(str(text)), end=end, file=file, flush=True)


def say(message: object) -> None:
    """Print one line on stderr, where there is one."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        if sys.stderr is not None:
            print(f"traceml-ray: {one_line(message)}", file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """
    End this process now, with what was printed written out.

    As Python ends in its usual way it ends threads wherever they are. One that is in C++ code then, as a
    call of Ray, aborts the process: exit code -6 in place of `code`.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)


def exit_soon(code: int) -> None:
    """End this process within a second: the end of Ray, with its cluster gone, takes minutes."""
    timer = threading.Timer(_END_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


AFTER_S = 1.0
"""Work that takes less leaves the terminal as it was."""

Progress = Callable[[str, "float | None"], object]
"""Takes what is being done, and which share of it (0..1) is done; None where that is not known."""


@contextmanager
def progress_bar(what: str, after_s: float = AFTER_S) -> Iterator[Progress]:
    """Show how far `what` is until the block ends; inside another `progress_bar` that one shows it."""
    outer = _BAR.get()
    if outer is not None:
        outer.advance(what, None)
        yield outer.advance
        return
    if not _is_terminal():
        yield lambda *_: None
        return
    bar = _Bar(what)
    timer = threading.Timer(after_s, bar.start)
    timer.daemon = True
    token = _BAR.set(bar)
    timer.start()
    try:
        yield bar.advance
    finally:
        _BAR.reset(token)
        timer.cancel()
        bar.stop()


def advance(what: str, share: float | None) -> None:
    """Say how far the work is that somebody may wait for, see `Progress`."""
    bar = _BAR.get()
    if bar is not None:
        bar.advance(what, share)


def _is_terminal() -> bool:
    stderr = sys.stderr  # None in a process without one
    return stderr is not None and stderr.isatty() and os.environ.get("TERM") != "dumb"


class _Bar:
    """`start` is called by a timer's thread, all else by the one that works."""

    def __init__(self, what: str) -> None:
        self._at: tuple[str, float | None] = one_line(what), None
        self._lock = threading.Lock()
        self._ended = False
        self._drawn: Any = None

    def start(self) -> None:
        """Draw it from here on."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}", markup=False)
        drawn = Progress(
            *(text, BarColumn(), TimeElapsedColumn()),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with self._lock:
            if not self._ended:
                drawn.add_task(self._at[0], total=1.0)
                drawn.start()
                self._drawn = drawn
                self._update()

    def advance(self, what: str, share: float | None) -> None:
        """See `Progress`."""
        with self._lock:
            self._at = one_line(what), share
            self._update()

    def stop(self) -> None:
        """Take it off the terminal."""
        with self._lock:
            self._ended = True
            if self._drawn is not None:
                self._drawn.stop()

    def _update(self) -> None:
        if self._drawn is not None:
            what, share = self._at
            total = None if share is None else 1.0
            self._drawn.update(self._drawn.task_ids[0], description=what, total=total, completed=share or 0.0)


_BAR: ContextVar[_Bar | None] = ContextVar("bar", default=None)
