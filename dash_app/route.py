"""What a URL shows: the page, its node or rank, and the selection."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from traceml_ray.views.values import whole_number

# Not Dash Pages: its routes are known to its own callback alone, and a refresh and a link need them as well.
_PATHS = {
    "": "overview",
    "node": "node",
    "rank": "rank",
    "ranks": "ranks",
    "step": "step",
    "layers": "layers",
    "memory": "memory",
    "signals": "signals",
    "profiles": "profiles",
    "profile": "profile",
    "events": "events",
    "sessions": "sessions",
    "ledger": "health",
}
SCOPE = ("session", "run")
"""Query names that a link to another page keeps."""
RANGE = ("from", "to")
"""Query names that a link to another page of the same run keeps: the range of steps."""
TOKEN = "token"
"""Query name of the token. It is not part of a selection, so no link has it."""
_MAX_NAMES, _MAX_VALUE = 16, 1024
"""Largest number of query names read from a URL, and longest value in characters. Others are ignored."""


class Route(msgspec.Struct, frozen=True):
    """
    What a URL shows: a page (a name in `pages.PAGES`), its key (a node, rank, step or profile; "": none),
    and the rest of the selection as names and values.
    """

    page: str = "overview"
    key: str = ""
    query: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, pathname: str | None, search: str | None) -> Route | None:
        """Return what a URL shows, from its path and its query. None: there is no such page. Never raises."""
        first, _, key = (pathname or "/").strip("/").partition("/")
        page = _PATHS.get(first)
        if page is None or bool(key) != (page in ("node", "rank", "step", "profile")):
            return None
        if page in ("rank", "step") and whole_number(key) is None:
            return None
        query = tuple(
            (name, value)
            for name, value in parse_qsl((search or "").lstrip("?"))[:_MAX_NAMES]
            if name != TOKEN and len(value) <= _MAX_VALUE
        )
        return cls(page, unquote(key), query)

    def get(self, name: str) -> str | None:
        """Return the value of a query name; None: the URL does not have it."""
        return dict(self.query).get(name)

    def select(self, *names: str) -> dict[str, str]:
        """Return the values of those of the `names` that the URL has."""
        return {name: value for name, value in self.query if name in names}

    def to(self, page: str, key: Any = "", /, **query: Any) -> str:
        """
        Return the link to a page and its key. Session, run and the range of steps stay; `query` changes
        values, None removes one. Where it changes session or run the range does not stay.
        """
        path = next(path for path, name in _PATHS.items() if name == page)
        url = f"/{path}" + (f"/{quote(str(key), safe='')}" if key != "" else "")
        kept = SCOPE if query.keys() & {*SCOPE} else (*SCOPE, *RANGE)
        given = {name: value for name, value in {**self.select(*kept), **query}.items() if value is not None}
        return url + ("?" + urlencode(given) if given else "")

    def here(self, **query: Any) -> str:
        """
        Return the link to this page with some of the selection changed; None removes a value. With another
        session or run the range of steps is removed.
        """
        kept = dict(self.query)
        if query.keys() & {*SCOPE}:
            kept = {name: value for name, value in kept.items() if name not in RANGE}
        return self.to(self.page, self.key, **{**kept, **query})

    def lasting(self, session: str | None, run: str | None) -> str:
        """
        Return a permanent link to this page and its whole selection. It names the session and the run,
        because a URL without them shows the newest ones. None: there is no such link.
        """
        return self.to(self.page, self.key, **{**dict(self.query), "session": session, "run": run})
