"""
Opens the database of a session file for reading, even where nothing may be written: on a read-only mount, or
in another user's folder.

SQLite writes even to read: it rolls back an interrupted transaction (which left a `-journal`), and creates
the shared memory of a file in WAL mode. Where SQLite may not write, a file without a journal is opened as
immutable. A file with a journal is copied together with the journal; the copy is repaired and read.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceml_ray.store.schema import SessionFileError, connect, transaction

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.11 has it


MAX_COPIES = 4
"""Largest number of copies that this process keeps at the same time."""
_JOURNALS = ("-journal", "-wal")
_TRIES = 3
"""How many times copying a file is tried if another machine keeps writing to it."""
_log = logging.getLogger(__name__)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """
    Return a connection to the session file at `path`, or to a copy of it. If it is a copy, a log line says
    so.

    Raises `SessionFileError` as `schema.connect` does, and if a copy cannot be made.
    """
    try:
        return connect(path)
    except SessionFileError as error:
        if not isinstance(error.__cause__, sqlite3.OperationalError) or _may_write(path):
            raise
        refused = error
    try:
        if not any(_size(_beside(path, suffix)) for suffix in _JOURNALS):
            return connect(path, immutable=True)
        copy = _copies.of(path)
    except OSError as error:
        wrong = f"a copy cannot be made in {tempfile.gettempdir()}: {error.strerror}"
        raise SessionFileError(f"{refused}; {wrong} (TMPDIR sets the folder)") from error
    try:
        return connect(copy)
    except SessionFileError as error:
        raise SessionFileError(str(error).replace(str(copy), str(path))) from error


@dataclass
class _Copy:
    folder: tempfile.TemporaryDirectory[str]
    state: tuple[tuple[int, ...], ...]
    """State of the original files when they were copied, see `_state`."""
    path: Path


class _Copies:
    """
    Copies of session files with their journals, in private folders that are removed when
    this process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Path, _Copy] = {}

    def of(self, path: Path) -> Path:
        """Return the path of a copy of the current file. Raises OSError, `SessionFileError`."""
        with self._lock:
            path = path.absolute()
            known = self._made.pop(path, None)
            if known is not None and known.state != _state(path):
                known.folder.cleanup()
                known = None
            copy = self._made[path] = known or _copy(path)
            while len(self._made) > MAX_COPIES:
                self._made.pop(next(iter(self._made))).folder.cleanup()
            return copy.path

    def remove(self) -> None:
        """Remove all copies."""
        with self._lock:
            while self._made:
                self._made.popitem()[1].folder.cleanup()


_copies = _Copies()
atexit.register(_copies.remove)


def _copy(path: Path) -> _Copy:
    """Copy a file and its journals in one consistent state. Raises OSError, `SessionFileError`."""
    folder = tempfile.TemporaryDirectory(prefix="traceml-copy-")
    copy = Path(folder.name, path.name)
    try:
        for _ in range(_TRIES):
            before = _state(path)
            for suffix in ("", *_JOURNALS):
                _beside(copy, suffix).unlink(missing_ok=True)
                if _size(_beside(path, suffix)):
                    shutil.copyfile(_beside(path, suffix), _beside(copy, suffix))
            if _state(path) == before:
                _log.warning(
                    "traceml-ray: %s: a writer was killed while writing, and the file is read-only here: "
                    "reading a repaired copy in %s", path, folder.name
                )  # fmt: skip
                return _Copy(folder, before, copy)
        raise SessionFileError(f"{path}: the session file changes while it is copied; try again later")
    except BaseException:
        folder.cleanup()
        raise


def _may_write(path: Path) -> bool:
    """Return whether SQLite may write to the file and its folder. On a read-only mount not even root may."""
    return all(os.access(place, os.W_OK, effective_ids=True) for place in (path, path.parent))


def _state(path: Path) -> tuple[tuple[int, ...], ...]:
    """
    Return inode, size and mtime of the file and its journals. Each write to one of these
    files changes them.
    """
    state: list[tuple[int, ...]] = []
    for suffix in ("", *_JOURNALS):
        try:
            now = _beside(path, suffix).stat()
            state.append((now.st_ino, now.st_size, now.st_mtime_ns))
        except FileNotFoundError:
            state.append(())
    return tuple(state)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class Reader:
    """
    A connection to a session file that only reads it. `close` closes the connection, unless the caller gave
    it.

    Args:
        path: the session file.
        connection: an open connection to it, which stays open; None: a new one.
        run: id of the run to read; None: the newest run that has rows.

    Raises `SessionFileError` if the file cannot be read; so does each method that reads.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection | None = None, *, run: str | None = None
    ) -> None:
        self.path = path
        self.run = run
        self._owned = connection is None
        self._connection = connection or connect_to_read(path)

    def close(self) -> None:
        """Close the file."""
        if self._owned:
            self._connection.close()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    @contextlib.contextmanager
    def at_one_moment(self) -> Iterator[None]:
        """
        Make all reads in the block see the same state of the file. Without WAL this does nothing, because it
        would block the writer.
        """
        if self._connection.in_transaction or self._all("PRAGMA journal_mode") != [("wal",)]:
            yield
            return
        with transaction(self._connection, "DEFERRED"):
            yield

    def _top(self, table: str) -> int:
        return int(self._all(f"SELECT coalesce(max(id), 0) FROM {table}")[0][0])

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading(query, values) as cursor:
            return cursor.fetchall()

    def _dicts(self, query: str, *values: Any) -> list[dict[str, Any]]:
        with self._reading(query, values) as cursor:
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _iterate(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        with self._reading(query, values) as cursor:
            yield from cursor

    @contextlib.contextmanager
    def _reading(self, query: str, values: tuple[Any, ...]) -> Iterator[sqlite3.Cursor]:
        try:
            yield self._connection.execute(query, values)
        except sqlite3.Error as error:
            raise SessionFileError(f"{self.path}: cannot read the session file: {error}") from error
