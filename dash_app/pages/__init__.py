"""
The pages. Each has `layout(view)`, the elements with their ids, and `parts(view, place)`:
what stands in them, `{id: {property: value}}`, of which a browser is sent what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..place import Place
from . import events, health, node, overview, rank, sessions, start

Parts = dict[str, dict[str, Any]]


class Page(Protocol):
    """A module of this package."""

    layout: Callable[[Mapping[str, Any]], Any]
    parts: Callable[[Mapping[str, Any], Place], Parts]


PAGES: dict[str, Any] = {
    "overview": overview,
    "node": node,
    "rank": rank,
    "events": events,
    "sessions": sessions,
    "health": health,
}

__all__ = ["PAGES", "Page", "Parts", "start"]
