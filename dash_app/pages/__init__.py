"""
The pages, one a file: `data(cache, run, route)` is what a page shows, `layout(view, route)` draws it, where
`view` is that data and `shell.data`. Where there is no run to show, `start` stands in for most of them.

Parts (`components.part`) and graphs have an id: while a page stays, a browser is sent those that changed.
What is around them depends on the node or rank and on which parts there are, on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from . import (
    events,
    health,
    layers,
    memory,
    node,
    overview,
    profile,
    profiles,
    rank,
    ranks,
    sessions,
    signals,
    step,
)

PAGES: dict[str, ModuleType] = {
    "overview": overview,
    "node": node,
    "rank": rank,
    "ranks": ranks,
    "step": step,
    "layers": layers,
    "memory": memory,
    "signals": signals,
    "profiles": profiles,
    "profile": profile,
    "events": events,
    "sessions": sessions,
    "health": health,
}
DATA: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: page.data for name, page in PAGES.items()},
    "cell": overview.cell,
    "side": sessions.side,
}


def has_nothing(page: str, header: Mapping[str, Any]) -> bool:
    """Return whether `start` stands in for a page: there is no run to show on it."""
    without_run = ("sessions",) if header["state"] == "missing" else ("sessions", "health")
    return header["session"]["run"] is None and page not in without_run
