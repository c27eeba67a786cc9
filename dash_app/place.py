"""What a URL shows: the page, what it is of, and the selection."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

PAGES = {
    "": "overview",
    "node": "node",
    "rank": "rank",
    "events": "events",
    "sessions": "sessions",
    "ledger": "health",
}
WHAT = ("session", "run")
"""What all pages are of: a link to another page keeps it."""


class Place(msgspec.Struct, frozen=True):
    """`page` as the board names it, `key` the node or rank, `query` the rest of the selection."""

    page: str = "overview"
    key: str = ""
    query: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, pathname: str | None, search: str | None) -> Place | None:
        """Read a URL; None where it is of no page."""
        first, _, key = (pathname or "/").strip("/").partition("/")
        page = PAGES.get(first)
        if page is None or bool(key) != (page in ("node", "rank")) or (page == "rank" and not is_number(key)):
            return None
        query = tuple((k, v) for k, v in parse_qsl((search or "").lstrip("?"))[:8] if len(v) <= 200)
        return cls(page, unquote(key), query)

    def get(self, name: str) -> str | None:
        """Return one value of the query."""
        return dict(self.query).get(name)

    def to(self, page: str, key: Any = "", /, **query: Any) -> str:
        """Return the link to another page; the run stays."""
        kept = {name: value for name, value in self.query if name in WHAT}
        path = next(path for path, name in PAGES.items() if name == page)
        given = {name: value for name, value in {**kept, **query}.items() if value is not None}
        url = f"/{path}" + (f"/{quote(str(key), safe='')}" if key != "" else "")
        return url + ("?" + urlencode(given) if given else "")

    def here(self, **query: Any) -> str:
        """Return the link to this page with some of the selection changed; None takes a value out."""
        return self.to(self.page, self.key, **{**dict(self.query), **query})


def is_number(key: str) -> bool:
    """Tell whether a part of a URL can be a rank."""
    return key.isdecimal() and len(key) < 10
