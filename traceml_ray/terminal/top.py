"""
`traceml-ray top`: shows a live or stored session in the terminal. One thread asks for new data once an
interval. The main thread draws and reads keys, so that a slow aggregator never delays a key.

Also decodes the bytes from the terminal into keys, and applies each key to the selection.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from rich.text import Text

from traceml_ray.document.terminal import fit
from traceml_ray.settings import Settings
from traceml_ray.store.session import NoSessionError, await_session
from traceml_ray.terminal.screen import TerminalWindow, is_window
from traceml_ray.text import exit_now, exit_soon, log, show
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import LocalSource, open_source
from traceml_ray.views.state import OVER

from .panel import line, panel
from .snapshot import PANES, SORTS, Choice, PanelState, take_snapshot

_LETTERS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "Z": "back_tab"}
_NUMBERS = {"1": "home", "4": "end", "5": "page_up", "6": "page_down", "7": "home", "8": "end"}
_SEQUENCES = {**_LETTERS, **_NUMBERS}
"""Key names by the last letter of their escape sequence, or by its number if it ends in `~`."""
_SINGLE = {"\t": "tab", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", " ": "space"}
_SEQUENCE = re.compile(r"\x1b(?:O|\[([0-9;?]*))([A-Za-z~])")
_UNFINISHED = re.compile(r"\x1b(?:O|\[[0-9;?]*)\Z")
_MOST = 64
"""Longest unfinished escape sequence, in characters. A longer one is ignored."""
_DIGITS = 7


class Keys:
    """Decodes bytes from a terminal into keys. The bytes may arrive in pieces of any size."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the typed keys: characters, or names such as `page_up`. Unknown sequences are left out."""
        typed, self._rest = self._rest + data.decode("ascii", "ignore"), ""
        names, position = [], 0
        while position < len(typed):
            sequence = _SEQUENCE.match(typed, position)
            if sequence:
                name = _SEQUENCES.get((sequence[1] or "") if sequence[2] == "~" else sequence[2], "")
                position = sequence.end()
            elif _UNFINISHED.match(typed, position) and len(typed) - position < _MOST:
                self._rest, position, name = typed[position:], len(typed), ""
            else:
                single = typed[position]
                name = "escape" if single == "\x1b" else _SINGLE.get(single, single)
                position += 1
            names += [name] if name and name.isprintable() else []
        return names


@dataclass(frozen=True)
class Control:
    """The present selection, and the rank number being typed."""

    choice: Choice = field(default_factory=Choice)
    typed: str | None = None
    """Digits typed so far for a rank. None: no rank number is being typed."""
    paused: bool = False
    quit: bool = False


def press(control: Control, key: str, page: int) -> Control:
    """Apply a key to the selection; `page` is the height of a page in lines."""
    choice = control.choice
    if control.typed is not None:
        return _type(control, key)
    if key in ("q", "Q"):
        return replace(control, quit=True)
    if key in ("p", "space"):
        return replace(control, paused=not control.paused)
    if key == "r":
        return replace(control, typed="")
    if key == "s":
        following = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
        return replace(control, choice=replace(choice, sort=following, scroll=0))
    if key in ("?", "h"):
        pane = PANES[0] if choice.pane == "help" else "help"
        return replace(control, choice=replace(choice, pane=pane, rank=None, scroll=0))
    return replace(control, choice=_moved(choice, key, page))


def _type(control: Control, key: str) -> Control:
    """Apply a key while a rank number is being typed."""
    typed = control.typed or ""
    if key == "enter":
        rank = int(typed) if typed else None
        return replace(control, typed=None, choice=replace(control.choice, rank=rank, scroll=0))
    if key in ("escape", "q"):
        return replace(control, typed=None)
    if key == "backspace":
        return replace(control, typed=typed[:-1])
    return replace(control, typed=(typed + key)[:_DIGITS]) if key.isdecimal() else control


def _moved(choice: Choice, key: str, page: int) -> Choice:
    """Return the selection after a key that changes the pane or scrolls."""
    lines = {"up": -1, "k": -1, "down": 1, "j": 1, "page_up": -page, "page_down": page}
    if key in lines:
        return replace(choice, scroll=max(0, choice.scroll + lines[key]))
    if key == "home":
        return replace(choice, scroll=0)
    if key == "escape" and (choice.rank is not None or choice.pane == "help"):
        return replace(choice, rank=None, pane=PANES[0] if choice.pane == "help" else choice.pane, scroll=0)
    index = PANES.index(choice.pane) if choice.pane in PANES else 0
    steps = {"tab": 1, "right": 1, "back_tab": -1, "left": -1}
    if key in steps:
        index += steps[key]
    elif key.isdecimal() and 1 <= int(key) <= len(PANES):
        index = int(key) - 1
    else:
        return choice
    return replace(choice, pane=PANES[index % len(PANES)], rank=None, scroll=0)


SLOW_LINE_BPS = 2000
"""
Bytes per second of a slow line. Over ssh, the next frame waits until the line has sent the last one, because
keys would otherwise wait behind frames.
"""
_WAIT_S = 30.0
"""Time to wait for a session to begin, in s."""
_WIDTH = 100
"""Width of the overview that is printed once if stdout is not a terminal."""


def run(arguments: Namespace) -> int:
    """
    Show the session given to `traceml-ray top` until the person quits. If stdout is not a terminal, print it
    line by line. This process ends at the end of the view. The exit code is returned only if nothing was
    shown yet.

    Raises SessionError, SourceError or QueryError if there is nothing to show, and SettingError.
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
            exit_soon(code)
    return exit_now(code)


def _begins(source: LocalSource, session: str | None, wait_s: float) -> bool:
    """
    Wait until the session exists: it may have been launched a moment ago and still be starting. Return False
    at Ctrl-C. Raises SessionError if there is no session after `wait_s` seconds.
    """
    try:
        await_session(session, source.out, wait_s, (NoSessionError,), log, starting=True)
    except KeyboardInterrupt:
        return False
    return True


def is_slow() -> bool:
    """Return whether the output goes over ssh, and so possibly over a slow line."""
    return bool(os.environ.get("SSH_CONNECTION") or os.environ.get("SSH_TTY"))


class Feed:
    """
    Makes snapshots of a session repeatedly.

    Args:
        poll: the session.
        run: id or name of the run; None: the newest.
    """

    def __init__(self, poll: SessionPoll, run: str | None = None) -> None:
        self.poll = poll
        self.choice = Choice()
        self.held = False
        """Whether the display is paused."""
        self.newest: PanelState | None = None
        self.error: Exception | None = None
        """Error that ended the feed. The drawing thread raises it."""
        self._run = run
        self._paused = False
        self._ending = threading.Event()
        self._asked = threading.Event()

    def renew(self) -> PanelState:
        """Ask for new answers; return the snapshot."""
        self.poll.poll()
        self.newest = self._snapshot()
        return self.newest

    def choose(self, choice: Choice) -> None:
        """Change the selection. Known answers are shown immediately, new ones when they arrive."""
        self.choice = choice
        if self.newest is not None:
            run = self.poll.selected(self._run)
            with self.poll.lock:
                self.newest = take_snapshot(self.poll, run, choice)
        self._asked.set()

    def pause(self, on: bool) -> None:
        """Pause or resume the display, see `held`."""
        if on != self._paused:
            self._paused = on
            self._asked.set()

    def follow(self, interval_s: float, renewed: Callable[[], object]) -> None:
        """Renew once an interval until `end`, in a new thread. `renewed` is called after each renewal."""
        thread = threading.Thread(
            target=self._follow, args=(interval_s, renewed), name="traceml-top", daemon=True
        )
        thread.start()

    def end(self) -> None:
        """Stop asking."""
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
                self.newest = self._snapshot()
                self.held = self._paused
            except Exception as error:
                self.poll.errors.note("top", error)
                self.error = error  # the drawing thread raises it
            renewed()
            if first:
                gc.collect()
                gc.freeze()  # mostly modules, which every full collection would otherwise scan
                first = False
            self._asked.wait(interval_s if self._paused else max(0.0, due - time.monotonic()))
            self._asked.clear()

    def _snapshot(self) -> PanelState:
        run = self.poll.selected(self._run)
        return self.poll.make(lambda: take_snapshot(self.poll, run, self.choice))[1]


def _lines(feed: Feed, interval_s: float) -> int:
    """Print one line per interval until the session is over."""
    while True:
        began = time.monotonic()
        snapshot = feed.renew()
        now = datetime.fromtimestamp(feed.poll.clock() / 1e9, timezone.utc)
        show(line(snapshot, f"{now:%H:%M:%S}"))
        if snapshot.state in OVER:
            return 0
        time.sleep(max(0.0, began + interval_s - time.monotonic()))


def _once(feed: Feed) -> int:
    """Print the overview once, with as many lines as it needs."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    for row in panel(feed.renew(), feed.choice, width, None, ""):
        show(row.plain.rstrip())
    return 0


def _windowed(feed: Feed, interval_s: float) -> int:
    """Show the panel until a key or a signal ends it."""
    slow = is_slow()
    with TerminalWindow() as window:
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
            window.catch_signals()
            feed.pause(control.paused)
            if control.choice != feed.choice:
                feed.choose(control.choice)
    if feed.error is not None:
        raise feed.error
    return 0


def _frame(feed: Feed, control: Control, window: TerminalWindow) -> list[Text]:
    width, height = window.size()
    if feed.newest is None:
        return [fit(line, width) for line in ["Asking the session …", *[""] * (height - 1)]]
    foot = "paused: p goes on" if control.paused and feed.held else None
    if control.typed is not None:
        foot = f"rank {control.typed}_  Enter shows it, Esc goes back"
    return panel(feed.newest, control.choice, width, height, foot)
