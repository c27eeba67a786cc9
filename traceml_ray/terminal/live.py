"""
The live view of `--live`: a process of its own that draws beneath the output of the job that it is told of.

It is in a session of its own, so that Ctrl-C is the job's alone, and ends when its stdin is closed. That is
when the launcher has ended, however it did: so the terminal is always put back as it was.
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

from traceml_ray.monitor import proc_inspect
from traceml_ray.settings import Settings
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import LocalSource

from .beneath import Beneath
from .lines import fit
from .panel import panel
from .top import SLOW_LINE_BPS, Feed, is_slow
from .window import look

_INTERVAL_S = 1.0
_LOOK_S = 0.05
"""How often it looks whether the terminal has another size: then all its lines scroll, also the panel's."""
_WHOLE_S = 15.0
"""All of it is sent anew so often: the job may have cleared the terminal."""
_BLOCKED = 20
"""A terminal that takes long to take a frame is left alone for so many times as long."""
_NOT_YET = "empty", "starting", "unwatched"
_STOPPED = "stopped (SIGSTOP)"


def main(arguments: Sequence[str]) -> NoReturn:
    """Show the session in the folder `arguments[0]` on stdout until stdin is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    seen = look()
    terminal = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):  # a warning of a library would stand in the midst of the panel
        os.dup2(nowhere, fd)
    under = Beneath(terminal, *seen)
    feed = Feed(_session(Path(arguments[0])))
    wake, code = os.pipe(), 1
    try:
        feed.follow(_INTERVAL_S, lambda: os.write(wake[1], b"\0"))
        _show(feed, under, wake[0])
        code = 0
    finally:
        with contextlib.suppress(OSError):  # a terminal that is gone
            under.leave()
        os._exit(code)  # the end of Ray, with its cluster gone, takes minutes


def _session(folder: Path) -> SessionPoll:
    source = LocalSource(str(folder), str(folder.parent))
    return SessionPoll(source, thresholds=Settings.load().thresholds)


def _show(feed: Feed, under: Beneath, wake: int) -> None:
    """Draw what is new until stdin is closed."""
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
        if proc_inspect.state(job) == _STOPPED:  # by Ctrl-Z: the terminal is the shell's
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
