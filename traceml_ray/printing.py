r"""
What is printed for a person: results on stdout (`show`), messages on stderr (`say`). All else of the program
prints by these two.

Names, messages and lines of output come from files that anybody may have written. What a terminal would take
for an order (a title, a colour, where to write, which way text runs) is written out, as `\u001b`. In a text
that is JSON that is the same character.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn, TextIO

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


def leave(code: int) -> NoReturn:
    """
    End this process now, with what was printed written out.

    As Python ends in its usual way it ends threads wherever they are. One that is in C++ code then, as a
    call of Ray, aborts the process: exit code -6 in place of `code`.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)


def leave_in_time(code: int) -> None:
    """End this process within a second: the end of Ray, with its cluster gone, takes minutes."""
    timer = threading.Timer(_END_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
