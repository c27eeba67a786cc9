"""A session's cache, brought up to date once a tick, and the data of the pages made of it."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.errors import error_text
from traceml_ray.store import query
from traceml_ray.store.query import QueryError, Request

from . import shell
from .pages import DATA, has_nothing, sessions
from .route import Route
from .run_state import SLOW_RANKS, SLOW_S, RunState
from .session_cache import SessionCache, keep
from .source import Source, SourceError, StoredSource

_MAX_RUNS = 3
"""Runs that are polled at the same time: the newest, and those that were viewed"""
_VIEWED_S = 60.0
"""this recently."""
_MAX_OTHERS = 2
"""Past sessions that are open at the same time."""
_SLICE_S = 0.5
"""How long one tick reads on in a long run."""
_QUICK_S, _SHARE = 0.25, 5
"""A source that takes longer to answer is not asked for so many times as long."""

_OF_STEPS = query.Cell, query.Spans, query.Step
"""Questions about certain steps: the next tick's are of others."""

_Key = tuple[Route, str | None]
"""Of a page: with its run."""


class SessionPages(SessionCache):
    """
    The data that all browsers see. Any thread may call `poll` and `view`; none holds `lock` while the source
    is asked, so a slow source delays only those who need its answer.

    Args:
        source: the session.
        clock: wall clock in ns.
        timer: measures how long the source takes, s.
        thresholds: of the session's steps (warm-up, first window, coverage).
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], int] = time.time_ns,
        timer: Callable[[], float] = time.perf_counter,
        thresholds: Thresholds | None = None,
    ) -> None:
        super().__init__(source, clock)
        self.timer = timer
        self._limits = thresholds or Thresholds()
        self._polled: dict[str, RunState] = {}
        self._views: OrderedDict[_Key, tuple[int, dict[str, Any]]] = OrderedDict()
        self._viewed: set[_Key] = set()
        self._headed: tuple[Any, dict[str, Any]] = None, {}
        """The newest header, and as of what it was made."""
        self._polling = threading.Lock()
        self._others: OrderedDict[str, SessionPages] = OrderedDict()
        self._asked_runs = self._rest_until = 0.0
        self._watched_at = float("-inf")
        self._over = False
        """Everything of a session that is over has been read."""

    def note_watched(self) -> None:
        """Note that a browser asks."""
        self._watched_at = self.timer()

    def watched_within(self, seconds: float) -> bool:
        """Return whether a browser has asked in the last `seconds`."""
        return self.timer() - self._watched_at <= seconds

    def poll(self) -> bool:
        """Bring everything up to date; return whether anything changed. Never raises."""
        with self._polling:
            return self._poll()

    def _poll(self) -> bool:
        began = self.timer()
        if began < self._rest_until or (self._over and self._caught_up()):
            return False
        try:
            over = self.source.stored
            changed = self._ask(began)
            self._over = over and self._caught_up()
            if self.stale_since_ns is not None or self.trouble:
                self.stale_since_ns, self.trouble, changed = None, "", True
        except QueryError as error:
            changed = self._failed(error)
        except Exception as error:
            self.errors.note("poll", error)
            changed = self._failed(QueryError(error_text(error)))
        took = self.timer() - began
        before = self.poll_ms[-1] / 1e3 if self.poll_ms else 0.0
        slow = min(took, before) - _QUICK_S  # twice: the first time there is more to read
        self._rest_until = began + took + (_SHARE * slow if slow > 0 and self._caught_up() else 0)
        self.poll_ms.append(1e3 * took)
        if changed:
            with self.lock:
                self.version += 1
            self._prepare()
        return changed

    def header(self, route: Route) -> dict[str, Any]:
        """
        Return the header that all pages have. In the URL `run` is one of the session (id or name), `session`
        another stored one in the same folder (name).
        """
        return self._shown(route)[-1]

    def of(self, name: str | None) -> SessionPages:
        """Return the pages of the session of that name, None: of this one. Raises QueryError."""
        return self._other(name) or self

    def run_of(self, route: Route) -> RunState | None:
        """Return the run that a URL names."""
        return self._shown(route)[1]

    def view(self, route: Route) -> dict[str, Any]:
        """Return what a page shows, with its header. Raises KeyError for an unknown page."""
        pages, run, header = self._shown(route)
        if has_nothing(route.page, header):
            return header
        key = route, run.id if run else None
        with pages.lock:
            pages._viewed.add(key)
        body = pages._made(key, run)
        header = pages._header(run)  # what it asks may be answered with what the page asks
        if route.page == "sessions" and all(names := [route.get(side) for side in sessions.SIDES]):
            sides = [Route("side", "", (("session", str(name)),)) for name in names]
            body = {**body, "sides": [self.view(side) for side in sides]}
        return {**header, **body}

    def _shown(self, route: Route) -> tuple[SessionPages, RunState | None, dict[str, Any]]:
        """Return the session and the run that a URL names, and their header."""
        pages, what = self, "session"
        try:
            pages, what = self._other(route.get("session")) or self, "run"
            run = pages._selected(route.get("run"))
        except QueryError as error:
            runs = [entry["name"] for entry in reversed(pages.runs)]
            name, names = str(route.get(what)), runs if what == "run" else sessions.names(self.source.out)
            others = (other for other in names if other != name)
            return pages, None, shell.missing(pages, what, name, str(error), others)
        return pages, run, pages._header(run)

    def _header(self, run: RunState | None) -> dict[str, Any]:
        """Return the header, made once for all until there is an answer, or another second: it has ages."""
        with self.lock:
            as_of = run and run.id, self.version, self.answered, self.clock() // 1_000_000_000
            if as_of != self._headed[0]:
                self._headed = as_of, shell.data(self, run)
            return self._headed[1]

    def _other(self, name: str | None) -> SessionPages | None:
        """
        Return the pages of a stored session of that name, read so far; None if it is this one. The file is
        closed once the session is no longer kept and no thread reads it.

        Raises QueryError for one that is not there, or cannot be read.
        """
        if name is None or name in (self.status.get("session"), self.source.target):
            return None
        if name not in sessions.names(self.source.out):
            with self.lock:
                self._others.pop(name, None)
            raise SourceError(f"there is none of that name under {self.source.out}")
        with self.lock:
            other = self._others.get(name)
        if other is None:
            source = StoredSource(Path(self.source.out) / name)
            opened = SessionPages(source, clock=self.clock, thresholds=self._limits)
            weakref.finalize(opened, source.close)
            with self.lock:
                other = self._others.setdefault(name, opened)  # another thread may have been quicker
                while len(self._others) > _MAX_OTHERS:
                    self._others.popitem(last=False)
        other.poll()
        if not other.status:
            raise SourceError(other.trouble)
        return other

    def _made(self, key: _Key, run: RunState | None) -> dict[str, Any]:
        """Return a page as of now: made of what is known, and again once its questions are answered."""
        route, _ = key
        for _ in range(3):  # what is asked may depend on an answer
            with self.lock:
                version, body = self._views.get(key, (-1, {}))
                if version == self.version:
                    return body
                body = DATA[route.page](self, run, route)
                wanted, self._wanted = self._wanted, {}
                version = self.version
            if not self._fetch(wanted):
                break
        with self.lock:  # not before: another browser would be sent a page whose answers are under way
            keep(self._views, key, (version, body))
        return body

    def _prepare(self) -> None:
        """Make the pages anew that were viewed since the last time, before a browser waits for them."""
        with self.lock:
            viewed, self._viewed = self._viewed, set()
            self._used = {}
        for key in viewed:
            try:
                self._made(key, self._polled.get(key[1] or ""))
            except Exception as error:
                self.errors.note("page", error, key[0].page)

    @property
    def newest(self) -> RunState | None:
        """The run that is shown where none is chosen."""
        return self._polled.get(self.status.get("run") or "")

    def _ask(self, now: float) -> bool:
        """Ask for what is new; several questions go in one message."""
        with self.lock:
            for run in [*self._polled.values()]:
                if run is not self.newest and now - run.viewed_at > _VIEWED_S:
                    del self._polled[run.id]
            followed = [*self._polled.values()]
        slow = int(self.status.get("ranks") or 0) >= SLOW_RANKS
        runs = not slow or self.newest is None or now - self._asked_runs > SLOW_S
        asked: list[Request[Any]] = [query.Status(), *([query.Runs()] if runs else [])]
        parts = [(run, run.questions(now)) for run in followed]
        with self.lock:
            used = dict.fromkeys(each for each in self._used if not isinstance(each, _OF_STEPS))
            pages = self._as_asked(used)
        every = [*asked, *(q for _, part in parts for q in part), *pages]
        answers = self._question(every)
        status, at = answers[0], len(asked)
        changed = bool(status != self.status)
        with self.lock:
            self.status = status
            if runs:
                changed |= self.runs != answers[1]
                self.runs, self._asked_runs = answers[1], now
            for run, part in parts:
                changed |= run.take(part, answers[at : at + len(part)])
                at += len(part)
            changed |= self._keep_answers(used, answers[at:], self.version + 1)
        newest = status["run"]
        if newest is not None and newest not in self._polled:
            changed |= self._follow(newest, now)
        for run in [*self._polled.values()]:
            changed |= self._catch_up(run, now)
        return changed

    def _follow(self, run_id: str, now: float) -> bool:
        """Begin with a run."""
        run = RunState(run_id, self._limits)
        for again in (0.0, SLOW_S + 1):  # samples can be asked for once the nodes are known
            questions = run.questions(now + again)
            answers = self._question(questions)
            with self.lock:
                run.take(questions, answers)
        run.viewed_at = now
        with self.lock:
            self._polled[run_id] = run
            others = {
                other.viewed_at: name for name, other in self._polled.items() if other is not self.newest
            }
            while len(self._polled) > _MAX_RUNS:
                del self._polled[others.pop(min(others))]
        return True

    def _catch_up(self, run: RunState, began: float) -> bool:
        """Read on in a run that has more stored than one answer holds, for a while."""
        changed, more = False, True
        while more and not run.whole and self.timer() - began < _SLICE_S:
            (times,) = self._question([query.Times(run.id)])
            with self.lock:
                more = run.take_times(times)
            changed |= more
        return changed

    def _caught_up(self) -> bool:
        return all(run.whole for run in [*self._polled.values()])

    def _selected(self, named: str | None) -> RunState | None:
        """
        Return the run of that id or name, from here on followed. Called without `lock`. Raises QueryError for
        one that is not there, or cannot be read.
        """
        if named is None or not self.runs:
            return self.newest
        run_id = next((run["id"] for run in reversed(self.runs) if named in (run["id"], run["name"])), None)
        if run_id is None:
            raise QueryError(f"there is none of that name in session {self.source.target!r}")
        now = self.timer()
        if run_id not in self._polled:
            self._follow(run_id, now)
            self._catch_up(self._polled[run_id], now)
        run = self._polled.get(run_id)
        if run is not None:
            run.viewed_at = now
        return run

    def _failed(self, error: QueryError) -> bool:
        """Note that there was no answer: what is known stays."""
        before = self.stale_since_ns, self.trouble
        if self.status and self.stale_since_ns is None:
            self.stale_since_ns = self.clock()
        self.trouble = str(error)
        return before != (self.stale_since_ns, self.trouble)
