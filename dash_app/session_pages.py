"""The cache of a session, updated once a tick, and the data of the pages made from it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

from traceml_ray.reports import listing
from traceml_ray.store.query import QueryError
from traceml_ray.views.run_state import RunState
from traceml_ray.views.session_poll import keep_newest
from traceml_ray.views.source import Source, SourceError, StoredSource

from . import shell
from .pages import DATA, has_nothing, sessions
from .route import Route
from .session_cache import SessionCache

_MAX_OTHERS = 8
"""Largest number of past sessions that are open at the same time."""
_Key = tuple[Route, str | None]
"""Key of a cached page: its route and the id of its run."""


class SessionPages(SessionCache):
    """
    The data of all pages, the same for all browsers. Arguments are those of `SessionPoll`.

    Any thread may call `poll` and `view`; none holds `lock` while the source is asked, so a slow source
    delays only those who need its answer.
    """

    def __init__(self, source: Source, **how: Any) -> None:
        super().__init__(source, **how)
        self._views: OrderedDict[_Key, tuple[int, dict[str, Any]]] = OrderedDict()
        self._viewed: set[_Key] = set()
        self._headed: tuple[Any, dict[str, Any]] = None, {}
        """The newest header, preceded by the version it was made from."""
        self._others: OrderedDict[str, SessionPages] = OrderedDict()
        self._watched_at = float("-inf")

    def note_watched(self) -> None:
        """Record that a browser has asked for a page."""
        self._watched_at = self.timer()

    def watched_within(self, seconds: float) -> bool:
        """Return whether a browser has asked in the last `seconds`."""
        return self.timer() - self._watched_at <= seconds

    def header(self, route: Route) -> dict[str, Any]:
        """
        Return the header of all pages (`shell.data`) for what a URL selects: `run` by id or name, `session`
        by the name of a stored one in the same folder.
        """
        return self._select(route)[-1]

    def of(self, name: str | None) -> SessionPages:
        """
        Return the pages of the stored session called `name`; None: of this session.

        Raises QueryError if there is none of that name, or it cannot be read.
        """
        return self._other(name) or self

    def run_of(self, route: Route) -> RunState | None:
        """Return the run that a URL selects; None: there is none."""
        return self._select(route)[1]

    def view(self, route: Route) -> dict[str, Any]:
        """Return the data of a page together with its header. Raises KeyError for an unknown page."""
        pages, run, header = self._select(route)
        if has_nothing(route.page, header):
            return header
        key = route, run.id if run else None
        with pages.lock:
            pages._viewed.add(key)
        body = pages._body(key, run)
        header = pages._header(run)
        if route.page == "sessions" and len(names := sessions.sides_of(route)) > 1:
            sides = [Route("side", "", (("session", name),)) for name in names]
            body = {**body, "sides": [self.view(side) for side in sides]}
        return {**header, **body}

    def _select(self, route: Route) -> tuple[SessionPages, RunState | None, dict[str, Any]]:
        """Return the session and run that a URL selects, and their header."""
        pages, what = self, "session"
        try:
            pages, what = self._other(route.get("session")) or self, "run"
            run = pages.selected(route.get("run"))
        except QueryError as error:
            runs = [entry.name for entry in reversed(pages.runs)]
            name, names = str(route.get(what)), runs if what == "run" else listing.names(self.source.out)
            others = (other for other in names if other != name)
            return pages, None, shell.missing(pages, what, name, str(error), others)
        return pages, run, pages._header(run)

    def _header(self, run: RunState | None) -> dict[str, Any]:
        """
        Return the header. It is made once for all browsers until there is an answer or a second
        has passed.
        """
        with self.lock:
            if self._as_of(run) == self._headed[0]:
                return self._headed[1]
        _, headed = self.make(lambda: (self._as_of(run), shell.data(self, run)))
        with self.lock:
            self._headed = headed
        return headed[1]

    def _as_of(self, run: RunState | None) -> tuple[object, ...]:
        """Return the key that a header depends on. Called with `lock` held."""
        return run and run.id, self.version, self.answered, self.clock() // 1_000_000_000

    def _other(self, name: str | None) -> SessionPages | None:
        """
        Return the pages of the stored session called `name`, as far as it has been read. None: it is this
        session. The file is closed once the session is no longer kept and no thread reads it.

        Raises QueryError if the session does not exist or cannot be read.
        """
        if name is None or name in (self.status and self.status.session, self.source.target):
            return None
        if name not in listing.names(self.source.out):
            with self.lock:
                self._others.pop(name, None)
            raise SourceError(f"no session has that name under {self.source.out}")
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
        if other.status is None:
            raise SourceError(other.trouble)
        return other

    def _body(self, key: _Key, run: RunState | None) -> dict[str, Any]:
        """Return the data of a page; computed again only if the session has a new version."""
        route, _ = key
        with self.lock:
            version, body = self._views.get(key, (-1, {}))
            if version == self.version:
                return body
        version, body = self.make(lambda: DATA[route.page](self, run, route))
        with self.lock:  # not before: another browser would be sent a page whose answers are under way
            keep_newest(self._views, key, (version, body))
        return body

    def _renewed(self) -> None:
        """Remake the pages that were viewed since the last call, before a browser waits for them."""
        super()._renewed()
        with self.lock:
            viewed, self._viewed = self._viewed, set()
        for key in viewed:
            try:
                self._body(key, self._polled.get(key[1] or ""))
            except Exception as error:
                self.errors.note("page", error, key[0].page)
