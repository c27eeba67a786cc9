"""
The pages, one a file: `data(cache, run, **selection)` is what a page shows, `layout(view, route)` draws it,
where `view` is that data and `shell.data`. `SELECTION` names what the query of a URL may select.

Parts (`components.part`) and graphs have an id: while a page stays, a browser is sent those that changed.
What is around them depends on the node or rank and on which parts there are, on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import events, health, node, overview, rank, sessions, start

PAGES: dict[str, ModuleType] = {
    "overview": overview,
    "node": node,
    "rank": rank,
    "events": events,
    "sessions": sessions,
    "health": health,
}
DATA: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: page.data for name, page in PAGES.items()},
    "cell": overview.cell,
    "header": lambda _cache, _run: {},
}

__all__ = ["DATA", "PAGES", "sessions", "start"]
