"""
`traceml-ray top`: a session in the terminal, live or stored. One thread asks for what is new, once an
interval; this one draws it and takes keys, so that a slow aggregator never holds up a key.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import datetime, timezone

from rich.text import Text

from traceml_ray.printing import leave, leave_in_time, say, show
from traceml_ray.settings import Settings
from traceml_ray.store.session import NoSessionError, await_session
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import LocalSource, open_source
from traceml_ray.views.state import OVER

from .keys import Control, Keys, press
from .lines import fit
from .panel import line, panel
from .snapshot import Choice, Snapshot, take
from .window import Window, is_window

SLOW_LINE_BPS = 2000
"""Over ssh a frame waits until the line has taken the one before: else keys would wait behind frames."""
_WAIT_S = 30.0
"""How long it waits for a session to begin."""
_WIDTH = 100
"""Of the overview that is written once, where stdout is no terminal."""


def run(arguments: Namespace) -> int:
    """
    Show the session that `traceml-ray top` was given until it is ended, or line by line where stdout is no
    terminal. This process ends with it; only where nothing was shown yet the exit code is returned.

    Raises SessionError, SourceError or QueryError where there is nothing to show, and SettingError.
    """
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # which handlers it did not set
    settings = Settings.load(out=arguments.out)
    source = open_source(arguments.session, settings.out, arguments.ray_address)
    wait_s = _WAIT_S if arguments.wait is None else arguments.wait
    if isinstance(source, LocalSource) and not _begins(source, arguments.session, wait_s):
        return 0
    feed = Feed(SessionPoll(source, thresholds=settings.thresholds), arguments.run)
    code = 2
    try:
        if arguments.once:
            code = _once(feed)
        else:
            code = _windowed(feed, arguments.interval) if is_window() else _lines(feed, arguments.interval)
    except KeyboardInterrupt:
        code = 0
    finally:
        feed.end()
        source.close()
        if "ray" in sys.modules:
            leave_in_time(code)
    return leave(code)


def _begins(source: LocalSource, session: str | None, wait_s: float) -> bool:
    """
    Wait until there is a session, which may be starting: it may have been launched a moment ago. Return False
    at Ctrl-C. Raises SessionError where there is none by then.
    """
    try:
        await_session(session, source.out, wait_s, (NoSessionError,), say, starting=True)
    except KeyboardInterrupt:
        return False
    return True


def is_slow() -> bool:
    """Return whether what is shown goes over ssh, maybe over a slow line."""
    return bool(os.environ.get("SSH_CONNECTION") or os.environ.get("SSH_TTY"))


class Feed:
    """
    Snapshots of a session as it goes on.

    Args:
        poll: the session.
        run: id or name of the run; None: the newest.
    """

    def __init__(self, poll: SessionPoll, run: str | None = None) -> None:
        self.poll = poll
        self.choice = Choice()
        self.held = False
        """Nothing new is shown, and nothing is on its way."""
        self.newest: Snapshot | None = None
        self.error: Exception | None = None
        """Why there is nothing more to show."""
        self._run = run
        self._paused = False
        self._ending = threading.Event()
        self._asked = threading.Event()

    def renew(self) -> Snapshot:
        """Ask for what is new; return what is known then."""
        self.poll.poll()
        self.newest = self._take()
        return self.newest

    def choose(self, choice: Choice) -> None:
        """Show something else: at once what is known of it, and what is asked for as soon as it comes."""
        self.choice = choice
        if self.newest is not None:
            run = self.poll.selected(self._run)
            with self.poll.lock:
                self.newest = take(self.poll, run, choice)
        self._asked.set()

    def pause(self, on: bool) -> None:
        """Show nothing new, or go on; see `held`."""
        if on != self._paused:
            self._paused = on
            self._asked.set()

    def follow(self, interval_s: float, renewed: Callable[[], object]) -> None:
        """Renew once an interval until `end`, in a thread of its own; `renewed` is called after each time."""
        thread = threading.Thread(
            target=self._follow, args=(interval_s, renewed), name="traceml-top", daemon=True
        )
        thread.start()

    def end(self) -> None:
        """Ask no more."""
        self._ending.set()
        self._asked.set()

    def _follow(self, interval_s: float, renewed: Callable[[], object]) -> None:
        due, first = time.monotonic(), True
        while not self._ending.is_set():
            try:
                if time.monotonic() >= due and not self._paused:
                    self.held = False
                    self.poll.poll()
                    due = time.monotonic() + interval_s
                self.newest = self._take()
                self.held = self._paused
            except Exception as error:
                self.poll.errors.note("top", error)
                self.error = error  # for the thread that draws, which raises it
            renewed()
            if first:
                gc.collect()
                gc.freeze()  # modules, mostly, through which each full collection would go
                first = False
            self._asked.wait(interval_s if self._paused else max(0.0, due - time.monotonic()))
            self._asked.clear()

    def _take(self) -> Snapshot:
        run = self.poll.selected(self._run)
        return self.poll.made(lambda: take(self.poll, run, self.choice))[1]


def _lines(feed: Feed, interval_s: float) -> int:
    """Write one line an interval, until the session is over."""
    while True:
        began = time.monotonic()
        snapshot = feed.renew()
        now = datetime.fromtimestamp(feed.poll.clock() / 1e9, timezone.utc)
        show(line(snapshot, f"{now:%H:%M:%S}"))
        if snapshot.state in OVER:
            return 0
        time.sleep(max(0.0, began + interval_s - time.monotonic()))


def _once(feed: Feed) -> int:
    """Write the overview, with as many lines as it needs."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    for row in panel(feed.renew(), feed.choice, width, None, ""):
        show(row.plain.rstrip())
    return 0


def _windowed(feed: Feed, interval_s: float) -> int:
    """Show the panel until a key or a signal ends it."""
    slow = is_slow()
    with Window() as window:
        feed.follow(interval_s, window.wake)
        control, keys, shown, free_at = Control(), Keys(), None, 0.0
        while not (control.quit or window.ended) and feed.error is None:
            wait_s = free_at - time.monotonic()
            if wait_s <= 0 or shown != control:
                sent = window.draw(_frame(feed, control, window))
                free_at, shown = time.monotonic() + slow * sent / SLOW_LINE_BPS, control
                wait_s = 0.0
            for key in keys.feed(window.wait(wait_s if wait_s > 0 else None)):
                control = press(control, key, window.size()[1])
            window.take_signals()
            feed.pause(control.paused)
            if control.choice != feed.choice:
                feed.choose(control.choice)
    if feed.error is not None:
        raise feed.error
    return 0


def _frame(feed: Feed, control: Control, window: Window) -> list[Text]:
    width, height = window.size()
    if feed.newest is None:
        return [fit(line, width) for line in ["Asking the session …", *[""] * (height - 1)]]
    foot = "paused: p goes on" if control.paused and feed.held else None
    if control.typed is not None:
        foot = f"rank {control.typed}_  Enter shows it, Esc goes back"
    return panel(feed.newest, control.choice, width, height, foot)
