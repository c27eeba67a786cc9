"""The board: a session's cache, brought up to date once a tick, and the pages made of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.store import query
from traceml_ray.store.query import QueryError, Request

from . import sessions, views
from .followed import SLOW_RANKS, SLOW_S, Run
from .header import header
from .session_cache import SessionCache, keep
from .source import Source, SourceError, StoredSource

_MAX_RUNS = 3
"""Runs that are followed at the same time: the newest, and those that somebody looks at."""
_LOOKED_AT_S = 60.0
_MAX_OTHERS = 2
"""Past sessions that are open at the same time."""
_SLICE_S = 0.5
"""How long one tick reads on in a long run."""
_QUICK_S, _SHARE = 0.25, 5
"""A source that takes longer to answer is left alone for so many times as long."""


_Key = tuple[str, str | None, bytes]
"""Of a page: its name, run and selection."""


class Board(SessionCache):
    """
    What all browsers look at. Any thread may call `poll` and `view`; none holds `lock` while the source is
    asked, so one that is slow holds up only who needs its answer.

    Args:
        source: the session.
        clock: wall clock in ns.
        timer: by which it is measured how long the source takes, s.
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
        self._timer = timer
        self._limits = thresholds or Thresholds()
        self._followed: dict[str, Run] = {}
        self._views: OrderedDict[_Key, tuple[int, dict[str, Any]]] = OrderedDict()
        self._looked_at: set[_Key] = set()
        self._turn = threading.Lock()
        """Of who polls."""
        self._others: OrderedDict[str, Board] = OrderedDict()
        self._readers = 0
        """Of another session: how many threads look at it, for the board that it is kept by."""
        self._retired = False
        self._asked_runs = self._rest_until = 0.0
        self._over = False
        """Everything of a session that is over has been read."""

    def poll(self) -> bool:
        """Bring everything up to date; return whether anything changed. Never raises."""
        with self._turn:
            return self._poll()

    def _poll(self) -> bool:
        began = self._timer()
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
            changed = self._failed(QueryError(f"{type(error).__name__}: {error}"))
        took = self._timer() - began
        before = self.poll_ms[-1] / 1e3 if self.poll_ms else 0.0
        slow = min(took, before) - _QUICK_S  # twice: the first time there is more to read
        self._rest_until = began + took + (_SHARE * slow if slow > 0 and self._caught_up() else 0)
        self.poll_ms.append(1e3 * took)
        if changed:
            with self.lock:
                self.version += 1
                self._asked.update(dict.fromkeys(self._current, self.version))
                self._current = {}
            self._prepare()
        return changed

    def view(self, page: str, **selection: Any) -> dict[str, Any]:
        """
        Return what a page shows, with the header that all have; see `views` for the selections. `run` is one
        of the session (id or name), `session` another stored one beside it (name).

        Raises KeyError for a page that there is not.
        """
        with self._past(selection.pop("session", None)) as other:
            if other is not None:
                other.poll()  # until it has been read
                return other.view(page, **selection)
        named = selection.pop("run", None)
        run = self._selected(named)
        key = page, run.id if run else None, msgspec.json.encode(selection, order="deterministic")
        with self.lock:
            self._looked_at.add(key)
        body = self._made(key, run)
        with self.lock:
            return {**header(self, run, named), **body}

    @contextlib.contextmanager
    def _past(self, name: str | None) -> Iterator[Board | None]:
        """
        Give the board of a stored session of that name; None where there is none, or it is this one. Its file
        is closed when it is no longer kept and nobody looks at it.
        """
        other = None if name is None or name == self.status.get("session") else self._open(name)
        try:
            yield other
        finally:
            if other is not None:
                with self.lock:
                    other._readers -= 1
                    over = other._retired and not other._readers
                if over:
                    other.source.close()

    def _open(self, name: str) -> Board | None:
        """Return the board of a stored session with one reader more."""
        with self.lock:
            other = self._others.get(name)
            if other is not None:
                other._readers += 1
                return other
        if name not in sessions.names(self.source.out):
            return None
        try:
            source = StoredSource(Path(self.source.out) / name)
        except SourceError:
            return None
        with self.lock:
            other = self._others.setdefault(name, Board(source, clock=self.clock, thresholds=self._limits))
            other._readers += 1
            retired = [self._others.popitem(last=False)[1] for _ in range(len(self._others) - _MAX_OTHERS)]
            for board in retired:
                board._retired = True
            unused = [board.source for board in retired if not board._readers]
        for each in unused if other.source is source else [*unused, source]:  # another thread was quicker
            each.close()
        return other

    def _made(self, key: _Key, run: Run | None) -> dict[str, Any]:
        """Return a page as of now: made of what is known, and again once its questions are answered."""
        page, _, selection = key
        for _ in range(3):  # what is asked may depend on an answer
            with self.lock:
                version, body = self._views.get(key, (-1, {}))
                if version == self.version:
                    return body
                body = views.PAGES[page](self, run, **msgspec.json.decode(selection))
                wanted, self._wanted = self._wanted, {}
                keep(self._views, key, (self.version, body))
            if not self._fetch(wanted):
                break
            with self.lock:
                self._views.pop(key, None)
        return body

    def _prepare(self) -> None:
        """Make the pages anew that were looked at since the last time, before somebody waits for them."""
        with self.lock:
            looked_at, self._looked_at = self._looked_at, set()
            self._used = {}
        for key in looked_at:
            try:
                self._made(key, self._followed.get(key[1] or ""))
            except Exception as error:
                self.errors.note("page", error, key[0])

    @property
    def newest(self) -> Run | None:
        """The run that is shown where none is chosen."""
        return self._followed.get(self.status.get("run") or "")

    def _ask(self, now: float) -> bool:
        """Ask for what is new; several questions go in one message."""
        with self.lock:
            for run in [*self._followed.values()]:
                if run is not self.newest and now - run.looked_at > _LOOKED_AT_S:
                    del self._followed[run.id]
            followed = [*self._followed.values()]
        slow = int(self.status.get("ranks") or 0) >= SLOW_RANKS
        runs = not slow or self.newest is None or now - self._asked_runs > SLOW_S
        asked: list[Request[Any]] = [query.Status(), *([query.Runs()] if runs else [])]
        parts = [(run, run.questions(now)) for run in followed]
        with self.lock:
            used = dict.fromkeys(
                each for each in self._used if not isinstance(each, (query.Cell, query.Spans))
            )
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
            changed |= self._keep_answers(used, answers[at:], self.version)
            self._current = used
        newest = status["run"]
        if newest is not None and newest not in self._followed:
            changed |= self._follow(newest, now)
        for run in [*self._followed.values()]:
            changed |= self._catch_up(run, now)
        return changed

    def _follow(self, run_id: str, now: float) -> bool:
        """Begin with a run."""
        run = Run(run_id, self._limits)
        for again in (0.0, SLOW_S + 1):  # samples can be asked for once the nodes are known
            questions = run.questions(now + again)
            answers = self._question(questions)
            with self.lock:
                run.take(questions, answers)
        run.looked_at = now
        with self.lock:
            self._followed[run_id] = run
            others = {
                other.looked_at: name for name, other in self._followed.items() if other is not self.newest
            }
            while len(self._followed) > _MAX_RUNS:
                del self._followed[others.pop(min(others))]
        return True

    def _catch_up(self, run: Run, began: float) -> bool:
        """Read on in a run that has more stored than one answer holds, for a while."""
        changed, more = False, True
        while more and not run.whole and self._timer() - began < _SLICE_S:
            (times,) = self._question([query.Times(run.id)])
            with self.lock:
                more = run.take_times(times)
            changed |= more
        return changed

    def _caught_up(self) -> bool:
        return all(run.whole for run in [*self._followed.values()])

    def _selected(self, named: str | None) -> Run | None:
        """Return the run of that id or name, from here on followed. Called without `lock`."""
        if named is None:
            return self.newest
        run_id = next((run["id"] for run in reversed(self.runs) if named in (run["id"], run["name"])), None)
        if run_id is None:
            return self.newest
        now = self._timer()
        if run_id not in self._followed:
            try:
                self._follow(run_id, now)
                self._catch_up(self._followed[run_id], now)
            except QueryError as error:
                self.trouble = str(error)
        run = self._followed.get(run_id)
        if run is not None:
            run.looked_at = now
        return run or self.newest

    def _failed(self, error: QueryError) -> bool:
        """Note that there was no answer: what is known stays."""
        before = self.stale_since_ns, self.trouble
        if self.status and self.stale_since_ns is None:
            self.stale_since_ns = self.clock()
        self.trouble = str(error)
        return before != (self.stale_since_ns, self.trouble)
