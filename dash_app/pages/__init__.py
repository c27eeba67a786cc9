"""
The pages. Each has `layout(view)`, the elements with their ids, and `parts(view, place)`: the content of
them, `{id: {property: value}}`, of which a browser is sent what has changed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import events, health, node, overview, rank, sessions, start

Parts = dict[str, dict[str, Any]]
PAGES: dict[str, ModuleType] = {
    "overview": overview,
    "node": node,
    "rank": rank,
    "events": events,
    "sessions": sessions,
    "health": health,
}

__all__ = ["PAGES", "Parts", "start"]
