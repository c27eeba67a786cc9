"""
Keeps a session file within a bound: beyond it, the oldest rows are folded into sums of about ten seconds.

What was folded still counts as stored. The number of steps and their mean are of these rows, too, and so is
the time at which things were; other statistics and verdicts are of the rows that are left, and the report
says of which. Of samples that old, one in ten is kept, and of a process the one with the most memory; named
parts go.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

import numpy as np

from traceml_ray import wire

_TABLE = """CREATE TABLE IF NOT EXISTS rollup(id INTEGER PRIMARY KEY, stream_id INT, first_row INT, n INT,
    first_key INT, last_key INT, sums BLOB, max_ns INT)"""
CHUNKS = 10
"""Of a stream in one sum: its agent sends about one a second."""
EVENTS = 100_000
"""So many are kept in a file beyond its bound: only what goes wrong has so many to tell."""


class Retention:
    """
    Folds what is oldest in a session file that has grown beyond `limit` bytes.

    `cursors` says how far the samples are thinned, by table, and how many `rows` were folded. The caller
    keeps in it, and with the file, what `fold` returned, once that is on disk.
    """

    def __init__(self, connection: sqlite3.Connection, limit: int, cursors: dict[str, int]) -> None:
        self.cursors = cursors
        self._connection = connection
        self._limit = limit

    def due(self) -> bool:
        """Whether the file is beyond its bound; pages that are free again count as room."""
        pages = self._one("PRAGMA page_count") - self._one("PRAGMA freelist_count")
        return bool(pages * self._one("PRAGMA page_size") > self._limit)

    def fold(self, streams: int) -> dict[str, int]:
        """Fold one slice, of so many streams, within the caller's transaction; return the new cursors."""
        self._connection.execute("DELETE FROM event WHERE id <= (SELECT max(id) FROM event) - ?", (EVENTS,))
        slice_ = CHUNKS * max(1, streams)
        newest = self._one("SELECT max(id) FROM chunk") or 0
        query = "SELECT id, stream_id, first_row, n, keys, rows FROM chunk WHERE id < ? ORDER BY id LIMIT ?"
        chunks = self._connection.execute(query, (newest - slice_, slice_)).fetchall()
        if not chunks:
            return self.cursors  # what is being looked at stays
        last = chunks[-1][0]
        self._connection.execute(_TABLE)
        insert = f"INSERT INTO rollup VALUES(NULL, {', '.join('?' * 7)})"
        self._connection.executemany(insert, _sums(chunks))
        self._connection.execute("DELETE FROM chunk WHERE id <= ?", (last,))
        rows = self.cursors.get("rows", 0) + sum(chunk[3] for chunk in chunks)
        return {"rows": rows, **self._thin(last / newest)}

    def _thin(self, share: float) -> dict[str, int]:
        """Thin out the samples among the oldest `share` of each kind; return where that ended."""
        largest = "SELECT id FROM (SELECT id, max(rss_bytes) FROM process_sample WHERE id > ?1 AND id <= ?2"
        kept = {
            "process_sample": f"id NOT IN ({largest} GROUP BY stream_id))",
            "node_sample": "t_ns / 1000000000 % 10 != 0",
            "detail": "true",
        }
        ends = {}
        for table, rest in kept.items():
            newest = self._one(f"SELECT max(id) FROM {table}") or 0
            since, last = self.cursors.get(table, 0), int(share * newest)
            self._connection.execute(
                f"DELETE FROM {table} WHERE id > ?1 AND id <= ?2 AND {rest}", (since, last)
            )
            ends[table] = max(since, last)
        return ends

    def _one(self, query: str) -> Any:
        return self._connection.execute(query).fetchone()[0]


def _sums(chunks: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows of the table, each of up to ten chunks of one stream."""
    streams: dict[int, list[tuple[Any, ...]]] = {}
    for chunk in chunks:
        streams.setdefault(chunk[1], []).append(chunk)
    found = []
    for stream, own in streams.items():
        for at in range(0, len(own), CHUNKS):
            part = own[at : at + CHUNKS]
            keys = np.frombuffer(b"".join(chunk[4] for chunk in part), "<i8")
            rows = np.frombuffer(b"".join(chunk[5] for chunk in part), "<i8").reshape(-1, wire.N_STAGES)
            longest = int(rows.sum(axis=1).max())
            sums = rows.sum(axis=0).astype("<i8").tobytes()
            found.append((stream, part[0][2], len(keys), int(keys[0]), int(keys[-1]), sums, longest))
    return found
