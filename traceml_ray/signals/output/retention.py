"""The last lines of rank processes in the session file are kept few."""

from __future__ import annotations

import sqlite3

_OLD = """
DELETE FROM output WHERE id IN (SELECT id FROM (SELECT id, lines, unfinished,
  count(lines) OVER newer AS above, max(id) OVER whole AS newest FROM output
  WINDOW whole AS (PARTITION BY process, stream, by_relay),
  newer AS (PARTITION BY process, stream, by_relay ORDER BY id DESC ROWS UNBOUNDED PRECEDING))
WHERE id < newest AND (lines IS NULL OR above > ?))
"""
"""Entries without a line (`lines` is null: a progress bar) but the newest, and all before the last lines."""


class OutputRetention:
    """
    Keeps the table small: after many entries, all but the last lines of each stream are deleted.

    Args:
        most: how many lines of a stream are kept.
    """

    def __init__(self, connection: sqlite3.Connection, most: int) -> None:
        self._connection, self._most = connection, most
        self.entries = self._count()
        """In the file; the writer adds what it writes."""
        self._limit = _FEW

    def due(self) -> bool:
        """Return whether there are too many."""
        return self.entries > self._limit

    def prune(self) -> None:
        """Delete what is old, within the caller's transaction."""
        self._connection.execute(_OLD, (self._most,))
        self.entries = self._count()
        self._limit = max(_FEW, 2 * self.entries)

    def _count(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM output").fetchone()[0])


_FEW = 4096
"""Entries of all streams together that are no trouble."""
