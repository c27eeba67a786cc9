"""
The tables of a session file, which is one SQLite database; how the file is opened, and how damage is found.
Also reads records of signals from older files, which had no table for them.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from traceml_ray.signals.experts.records import EXPERTS, MAX_ROUTERS, RouterTokens
from traceml_ray.signals.kind import Kind
from traceml_ray.signals.kinds import KINDS
from traceml_ray.signals.sharding.records import SHARDING, Sharding
from traceml_ray.store.rank_processes import COLUMNS as RANK_PROCESS
from traceml_ray.store.rank_processes import NODE_COLUMNS as NODE
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import ready


def older_records(connection: sqlite3.Connection, kind: Kind[Any]) -> Iterator[tuple[int, Any]]:
    """
    Yield (process, record) of a kind from an older file that has no table for the kind. Raises
    `sqlite3.Error`, and the exceptions of `schema.NONSENSE`.
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


SCHEMA = 2
"""Version of the tables below. After a release has written it, any change of a table needs a new version."""
_APPLICATION = 0x54724D4C  # "TrML" in the file's header: tells a session from any other database

LISTS = {
    "chunk": ("process", "first_row", "n", "keys", "flags", "rows", "host_rows", "leads"),
    "process_sample": ("process", *wire.ProcessSample.__struct_fields__),
    "clock": ("node_id", "t_ns", "offset_ns", "bound_ns"),
    "span": ("process", *wire.SpanSum.__struct_fields__),
    "event": ("process", "node_id", *wire.Event.__struct_fields__, "run"),
    "verdict": ("t_ns", "body", "run"),
    "rollup": ("process", "first_row", "n", "first_key", "last_key", "sums"),
    **{kind.table: (kind.owner, *kind.fields) for kind in KINDS.values() if kind.keep == "all"},
}
"""Tables that grow: name → columns after `id`. `id` numbers the rows in order of arrival."""
_KEYED = {
    "meta": ("key", "value"),
    "node": NODE,
    "relay": ("incarnation", "last_seq"),
    **{kind.table: ("id", kind.owner, *kind.fields) for kind in KINDS.values() if kind.keep != "all"},
}
"""Tables with one row for each value of their first column."""
_MAX_VALUES = 999
"""Largest number of values in one statement; newer versions of SQLite accept more."""
_INDEXES = {
    "clock": "node_id",
    "span": "last_step",
    **{kind.table: kind.index for kind in KINDS.values() if kind.index},
}
"""
Indexed column of each table that has an index. No index is by rank process: with one, each commit would write
a page per rank.
"""


def insert(table: str) -> str:
    """Return the statement with which `write` appends rows to one of `LISTS`."""
    return f"INSERT INTO {table}({', '.join(LISTS[table])}) VALUES ?"


def update(table: str, key: str, columns: Sequence[str]) -> str:
    """Return the statement with which `write` sets `columns` of the rows with `key`, or inserts new rows."""
    values = ", ".join(f"{name} = excluded.{name}" for name in columns)
    return (
        f"INSERT INTO {table}({key}, {', '.join(columns)}) VALUES ? ON CONFLICT({key}) DO UPDATE SET {values}"
    )


def write(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """
    Run `statement` with its `?` replaced by rows, as many per statement as SQLite allows. Each statement
    releases the GIL, and waits for it again if another thread is busy.
    """
    if not rows:
        return
    columns = [*zip(*rows, strict=True)]
    empty = [column.count(None) == len(rows) for column in columns]
    values, width = _bound([column for column, is_empty in zip(columns, empty, strict=True) if not is_empty])
    most = _MAX_VALUES // len(columns)
    places = f"({', '.join('NULL' if is_empty else '?' for is_empty in empty)})"
    for first in range(0, len(rows), most):
        some = min(most, len(rows) - first)
        connection.execute(
            statement.replace("?", ", ".join([places] * some)), values[first * width : (first + some) * width]
        )


def _bound(columns: Sequence[tuple[Any, ...]]) -> tuple[list[Any], int]:
    """
    Return the values of columns row by row, and the number of columns.

    Python looks for an adapter of each value that is None or bytes. Until 3.11 it makes an exception that
    says that there is none, which takes longer than all else that is done with the value, and holds the GIL.
    So values that are None in all rows are not bound, and bytes are bound as `bytearray`: it has no adapter.
    """
    width = len(columns)
    values: list[Any] = [None] * (width * len(columns[0]))
    for place, column in enumerate(columns):
        plain = set(map(type, column)) != {bytes}
        values[place::width] = column if plain else map(bytearray, column)
    return values, width


def _keyed(name: str, kind: str = "TABLE") -> str:
    key, *columns = _KEYED[name]
    return f"CREATE {kind} {name}({key} PRIMARY KEY, {', '.join(columns)})"


def _statements() -> Iterator[str]:
    yield f"CREATE TABLE rank_process(id INTEGER PRIMARY KEY, {', '.join(RANK_PROCESS[1:])})"
    yield from map(_list, LISTS)
    yield "CREATE TABLE kept(id INTEGER PRIMARY KEY, run UNIQUE, body)"
    yield from map(_keyed, _KEYED)
    yield from map(_index, _INDEXES)


def _index(name: str) -> str:
    return f"CREATE INDEX {name}_of ON {name}({_INDEXES[name]})"


def _list(name: str, kind: str = "TABLE") -> str:
    # Without a type, no join by `rank_process.id` uses an index.
    typed = ["process INT" if column == "process" else column for column in LISTS[name]]
    return f"CREATE {kind} {name}(id INTEGER PRIMARY KEY, {', '.join(typed)})"


NETWORK_FILESYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs"),
    *("afs", "9p", "wekafs", "pvfs2", "orangefs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.beegfs"),
    *("fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"),
}
"""File systems on which SQLite's WAL does not work: its shared memory is not shared between machines."""


def added(column: str) -> str:
    """
    Return SQL for the sum of an integer column; null if all values are null. The sum uses floating point:
    SQLite fails if a sum of integers exceeds 64 bits, which a damaged message can cause.
    """
    return f"CAST(round(sum({column} * 1.0)) AS INT)"


class SessionFileError(ValueError):
    """A session file that cannot be read. The message names the file and the defect."""


NONSENSE = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
    msgspec.MsgspecError,
)
"""Exceptions raised if the content of a file makes no sense."""


@contextlib.contextmanager
def legible(path: Path) -> Iterator[None]:
    """Convert exceptions in the block that come from invalid contents of the file to `SessionFileError`."""
    try:
        yield
    except SessionFileError:
        raise
    except NONSENSE as error:
        detail = f"{type(error).__name__}: {str(error)[:200]}"
        raise SessionFileError(f"{path}: the session file is damaged ({detail})") from error


def connect(
    path: Path, *, create: bool = False, timeout: float = 5.0, immutable: bool = False
) -> sqlite3.Connection:
    """
    Open the session file at `path`. `create` creates it if it does not exist. The call waits for another
    process's lock, at most `timeout` seconds. `immutable`: nobody writes to the file, so no lock is taken.

    Raises `SessionFileError` if the file does not exist, is damaged, is not a session, or has another schema.
    """
    if not create and not path.is_file():
        raise SessionFileError(f"{path}: no such session file")
    where = f"{path.absolute().as_uri()}?immutable=1" if immutable else path
    try:
        connection = sqlite3.connect(
            where, timeout=timeout, isolation_level=None, check_same_thread=False, uri=immutable
        )
    except sqlite3.Error as error:
        raise SessionFileError(f"{path}: cannot open the session file: {error}") from error
    try:
        _set_up(connection, path, create)
    except sqlite3.Error as error:
        connection.close()
        raise SessionFileError(f"{path}: cannot use the session file: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def damaged(path: Path) -> bool:
    """Return whether the file at `path` is not a database, or an incomplete one. Reads the whole file."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok")
    except sqlite3.OperationalError:  # it cannot be read now, which says nothing of what is in it
        return False
    except sqlite3.DatabaseError:
        return True


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit everything that is done in the block, or nothing."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _set_up(connection: sqlite3.Connection, path: Path, create: bool) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if create and empty:
        path.chmod(0o600)
        if not on_network_filesystem(path):
            connection.execute("PRAGMA journal_mode=WAL")
        stamps = f"PRAGMA application_id={_APPLICATION}", f"PRAGMA user_version={SCHEMA}"
        connection.executescript(";".join(["BEGIN", *_statements(), *stamps, "COMMIT"]))
    elif application != _APPLICATION:
        raise SessionFileError(f"{path}: this is a database, but not a traceml-ray session")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA:
        age, hint = ("a newer", "upgrade") if version > SCHEMA else ("an older", "it cannot be read any more")
        raise SessionFileError(
            f"{path}: written by {age} traceml-ray (schema {version}; this one reads {SCHEMA}): {hint}"
        )
    with legible(path):
        _add_records(connection, create)
    connection.execute("PRAGMA synchronous=NORMAL")


def _add_records(connection: sqlite3.Connection, create: bool) -> None:
    """
    Add the tables of signals that an older file lacks: to the file, or to a temporary database of the reader.
    A table gets the records that the older file keeps elsewhere. See `session_file.records` for columns.
    """
    for kind in KINDS.values():
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({kind.table})")}
        if not there:
            with transaction(connection, "IMMEDIATE" if create else "DEFERRED"):
                _add_table(connection, kind, create)
        for name in kind.fields if there and create else ():
            if name not in there:
                connection.execute(f"ALTER TABLE {kind.table} ADD COLUMN {name}")


def _add_table(connection: sqlite3.Connection, kind: Kind[Any], create: bool) -> None:
    made = _list if kind.keep == "all" else _keyed
    connection.execute(made(kind.table, "TABLE" if create else "TEMP TABLE"))
    if create and kind.index:
        connection.execute(_index(kind.table))
    older = older_records(connection, kind)
    rows = [(kind.place(process, record), *kind.row(process, record)) for process, record in older]
    columns = ", ".join(("id", kind.owner, *kind.fields))
    write(connection, f"INSERT INTO {kind.table}({columns}) VALUES ?", rows)


def on_network_filesystem(path: Path) -> bool:
    """Return whether `path` is on a filesystem that other machines can write to."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return False
    holding = [mount for mount in mounts if path.resolve().is_relative_to(mount.mountpoint)]
    nearest = sorted(holding, key=lambda mount: len(mount.mountpoint))[-1:]  # of several there, the last
    return any(mount.fstype in NETWORK_FILESYSTEMS for mount in nearest)
