"""The last lines that rank processes printed, in the session file: how they are read, and kept few."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from traceml_ray.store.reader import Reader

_STREAMS = {1: "stdout", 2: "stderr"}
_OLD = """
DELETE FROM output WHERE id IN (SELECT id FROM (SELECT id, lines, unfinished,
  count(lines) OVER newer AS above, max(id) OVER whole AS newest FROM output
  WINDOW whole AS (PARTITION BY process, stream, by_relay),
  newer AS (PARTITION BY process, stream, by_relay ORDER BY id DESC ROWS UNBOUNDED PRECEDING))
WHERE id < newest AND (lines IS NULL OR above > ?))
"""
"""Entries without a line (`lines` is null: a progress bar) but the newest, and all before the last lines."""


class Line(NamedTuple):
    """One line of output."""

    stream: str
    """stdout or stderr."""
    t_ns: int
    """When the line was read, in ns on the aggregator's clock."""
    text: str
    unfinished: bool
    """Whether the line has no end yet, like a progress bar or a prompt."""
    skipped: int
    """Lines before it that were not kept: so many came at once."""


class OutputReader(Reader):
    """Reads the last lines of rank processes."""

    def output(self, processes: Iterable[int], most: int) -> dict[int, list[Line]]:
        """
        Return the last lines of each of `processes` (ids) that printed any, `most` of each of its streams, in
        order of time.
        """
        lines_of_process: dict[int, dict[tuple[int, int], list[Line]]] = {}
        columns = "process, stream, by_relay, t_ns, lines, unfinished, skipped"
        wanted = ", ".join(str(int(process)) for process in processes)
        rows = self._iterate(f"SELECT {columns} FROM output WHERE process IN ({wanted}) ORDER BY id")
        for process, stream, by_relay, t_ns, lines, unfinished, skipped in rows:
            stream_lines = lines_of_process.setdefault(process, {}).setdefault((stream, by_relay), [])
            if stream_lines and stream_lines[-1].unfinished:
                stream_lines.pop()
            name, ended = _STREAMS[stream], lines.split("\n") if lines is not None else []
            stream_lines += [
                Line(name, t_ns, text, False, 0 if number else skipped) for number, text in enumerate(ended)
            ]
            stream_lines += [Line(name, t_ns, unfinished, True, 0)] if unfinished else []
        return {process: _in_order(streams, most) for process, streams in lines_of_process.items()}


def _in_order(streams: dict[tuple[int, int], list[Line]], most: int) -> list[Line]:
    """Return the last lines of all streams of a process, from (stream, whether the relay read them)."""
    every = list[Line]()
    for stream in _STREAMS:
        lines = joined(streams.get((stream, 1), []), streams.get((stream, 0), []))
        every += lines[-most:] if most else []
    return sorted(every, key=lambda line: line.t_ns)


def joined(in_file: list[Line], seen: list[Line]) -> list[Line]:
    """
    Return the lines of one stream, from those that the relay found `in_file` and those that the agent has
    `seen` in Python. The file has what C wrote as well, but not what was still in the stream's buffer.
    """
    if not in_file or not seen:
        return in_file or seen
    if in_file[-1].unfinished and seen[-1].unfinished:
        seen = seen[:-1]
    known = {line.text for line in in_file}
    last = max((index for index, line in enumerate(seen) if line.text in known), default=None)
    if last is None:
        return sorted([*in_file, *seen], key=lambda line: line.t_ns)
    return in_file + seen[last + 1 :]


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
