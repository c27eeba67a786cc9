"""What older session files have of signals elsewhere: records had no tables of their own."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec

from traceml_ray.signals.experts.records import EXPERTS, MAX_ROUTERS, RouterTokens
from traceml_ray.signals.kind import Kind
from traceml_ray.signals.sharding.records import SHARDING, Sharding
from traceml_ray.wire.codec import ready


def older_records(connection: sqlite3.Connection, kind: Kind[Any]) -> Iterator[tuple[int, Any]]:
    """
    Yield (process, record) of a kind from an older file that has no table for it. Raises `sqlite3.Error`, and
    one of `schema.NONSENSE`.
    """
    if kind is SHARDING and _columns(connection, "sharding"):
        for process, body in connection.execute("SELECT process, body FROM sharding"):
            yield process, msgspec.json.decode(body, type=ready(Sharding))
    if kind is EXPERTS and "experts" in _columns(connection, "rank_process"):
        for process, body in connection.execute("SELECT id, experts FROM rank_process"):
            routers = [*json.loads(body or "{}").items()][:MAX_ROUTERS]
            yield from ((process, RouterTokens(number, *router)) for number, router in enumerate(routers))


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
