"""
Copies the last minutes of every rank from a session file into a new session file.

SQLite copies without holding the GIL, and reads a bounded number of the newest entries: a job with many ranks
gets fewer minutes. The copy has all rank processes, nodes and facts of the session. It lacks the rows that
were compacted (`retention`).
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from traceml_ray.signals.kinds import KINDS
from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store.schema import connect, transaction

MAX_ROWS = 500_000
"""Largest number of rows of steps in a bundle, of all ranks together."""
MAX_SAMPLES = 300_000
"""Largest number of entries of each table of samples, and of spans."""
MAX_EVENTS = 5_000
"""Largest number of events, and of verdicts."""
_WHOLE = ("meta", "node", "rank_process", *(kind.table for kind in KINDS.values() if kind.bundle == "all"))
_SAMPLES = {
    "process_sample": "process",
    **{kind.table: kind.owner for kind in KINDS.values() if kind.bundle == "seconds"},
}
"""Tables of samples, and whose they are."""
_NEWEST = ("event", "verdict", *(kind.table for kind in KINDS.values() if kind.bundle == "newest"))
_OF_STEPS = ("span", *(kind.table for kind in KINDS.values() if kind.bundle == "steps"))


def cut(source: Path, target: Path, seconds: float, batches: int) -> None:
    """
    Write the last `seconds` of the session file `source` into the new file `target`.

    The seconds of a rank process or node end at its own newest sample, because the clocks of nodes differ,
    and one may have ended before the others. Of steps, the newest `batches` of each rank process are copied.

    Raises `SessionFileError`, OSError, `sqlite3.Error`; `target` may then be incomplete.
    """
    connect(target, create=True).close()
    with contextlib.closing(connect(source)) as connection:
        connection.execute("ATTACH DATABASE ? AS cut", (str(target),))
        with transaction(connection, "DEFERRED"):  # one moment of `source`, which is only read
            for table in _WHOLE:
                _copy(connection, table, "true")
            connection.execute("DELETE FROM cut.meta WHERE key = 'folded'")
            _cut_steps(connection, batches)
            for table, whose in _SAMPLES.items():
                _cut_samples(connection, table, whose, int(seconds * 1e9))
            for table in _NEWEST:
                _copy(connection, table, f"id > {_newest(table, MAX_EVENTS)}")
        connection.execute("DETACH DATABASE cut")
    with contextlib.closing(connect(target)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # one file, with no `-wal` beside it


def _newest(table: str, most: int) -> str:
    """Return SQL for an id: the newest `most` entries of the table have a larger one."""
    return f"(SELECT coalesce(max(id), 0) - {most} FROM main.{table})"


def _copy(connection: sqlite3.Connection, table: str, where: str, *values: object) -> None:
    if columns := _columns(connection, table):
        names = ", ".join(columns)
        connection.execute(
            f"INSERT INTO cut.{table}({names}) SELECT {names} FROM main.{table} WHERE {where}", values
        )


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    """Return the columns that a table has in both files; an empty list if an older file lacks the table."""
    there, here = (
        [row[1] for row in connection.execute(f"PRAGMA {name}.table_info({table})")]
        for name in ("main", "cut")
    )
    return [name for name in there if name in here]


def _cut_steps(connection: sqlite3.Connection, batches: int) -> None:
    """Copy the newest batches of rows of each rank process, with their spans and batch sizes."""
    mean = "(SELECT max(1, avg(n)) FROM (SELECT n FROM main.chunk ORDER BY id DESC LIMIT 1000))"
    floor = f"(SELECT coalesce(max(id), 0) - {MAX_ROWS} / {mean} FROM main.chunk)"
    number = "row_number() OVER (PARTITION BY process ORDER BY id DESC)"
    of_each = f"SELECT id FROM (SELECT id, {number} AS at FROM main.chunk WHERE id > {floor}) WHERE at <= ?"
    _copy(connection, "chunk", f"id IN ({of_each})", batches)
    first = "SELECT keys FROM cut.chunk WHERE id IN (SELECT min(id) FROM cut.chunk GROUP BY process)"
    keys = [int.from_bytes(keys[:8], "little", signed=True) for (keys,) in connection.execute(first) if keys]
    step = min(keys, default=0) >> SEGMENT_BITS
    for table in _OF_STEPS:
        _copy(connection, table, f"id > {_newest(table, MAX_SAMPLES)} AND last_step >= ?", step)


def _cut_samples(connection: sqlite3.Connection, table: str, whose: str, window_ns: int) -> None:
    floor = _newest(table, MAX_SAMPLES)
    newest = f"SELECT {whose} AS whose, max(t_ns) AS last_ns FROM main.{table} WHERE id > {floor} GROUP BY 1"
    if columns := _columns(connection, table):
        names = ", ".join(f"t.{name}" for name in columns)
        connection.execute(
            f"INSERT INTO cut.{table}({', '.join(columns)}) SELECT {names} "
            f"FROM main.{table} t JOIN ({newest}) n ON t.{whose} = n.whose "
            f"WHERE t.id > {floor} AND t.t_ns >= n.last_ns - ?",
            (window_ns,),
        )
