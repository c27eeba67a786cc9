"""
Fence: only the writer that claimed a session file last may write to it.

`transactions` in `meta` counts the transactions of all writers. A writer notes the count, its epoch, before
it reads the file, and adds one in each of its own transactions; the claim is its first transaction. A
transaction that finds another count writes nothing: another writer has written since, so what this writer
knows of the file is out of date. The same holds if another file is at the path. A writer that was stopped,
and continues after another has taken over the session, therefore writes nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

from traceml_ray.files import remove
from traceml_ray.store.schema import SessionFileError, connect, transaction

_SIDE = ("", "-wal", "-shm", "-journal")
"""Suffixes of a database's files: the database itself, and the files that SQLite finds by its name."""


class Fenced(RuntimeError):  # noqa: N818 - a state more than an error
    """Another writer has taken over the session: this writer writes nothing any more."""


class Fence:
    """
    Claims the session file at `path` for the writer that owns `connection`. `found` identifies the file as it
    was opened; None: it was created. If the claim cannot be written now, for example on a full disk or if
    `now` is False, the first transaction claims the file, unless another writer has written by then.

    The writer must read the file after the claim. Raises `Fenced` if the file was replaced meanwhile,
    `SessionFileError` if it cannot be read.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, opened: tuple[int, int] | None, *, now: bool = True
    ) -> None:
        self.broken = False
        """Whether another writer has taken over the session."""
        self._connection = connection
        self._path = path
        if now:
            with contextlib.suppress(sqlite3.OperationalError):
                claim(connection)
        try:
            self._epoch = self._counted = _transactions(connection)
        except sqlite3.Error as error:
            raise SessionFileError(f"{path}: cannot read the session file: {error}") from error
        self._file = identity(path)
        if opened not in (None, self._file):
            raise self._fenced()

    def check(self) -> None:
        """
        Raise `Fenced` if another writer has the session, OSError if the file is gone. Call it inside a
        transaction.
        """
        identity_now = identity(self._path)
        if identity_now is None:
            raise FileNotFoundError(f"{self._path}: the session file is gone")
        if self.broken or identity_now != self._file or _transactions(self._connection) != self._epoch:
            raise self._fenced()
        self._counted = self._epoch

    def count(self) -> None:
        """
        Check the fence and count the transaction. Call it inside the transaction, before it writes. Raises
        like `check`.
        """
        self.check()
        self._counted = _count(self._connection)

    def committed(self) -> None:
        """Raise `Fenced` if the committed data went into a file that is no longer the session's file."""
        if identity(self._path) != self._file:
            raise self._fenced()
        self._epoch = self._counted

    def _fenced(self) -> Fenced:
        self.broken = True
        return Fenced(f"{self._path}: another process has taken this session over")


def identity(path: Path) -> tuple[int, int] | None:
    """
    Return device and inode of the file at `path`; None if there is no file.

    The file is not opened: closing it would release this process's locks on the file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def claim(connection: sqlite3.Connection) -> None:
    """
    Count a transaction that writes nothing else. Earlier writers cannot write any more after it.

    Raises `sqlite3.Error` if the file is locked or cannot be written.
    """
    with transaction(connection):
        _count(connection)


def _count(connection: sqlite3.Connection) -> int:
    number = _transactions(connection) + 1
    connection.execute("REPLACE INTO meta VALUES('transactions', ?)", (str(number),))
    return number


def _transactions(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM meta WHERE key = 'transactions'").fetchone()
    return int(row[0]) if row else 0


def take_over(path: Path, wait_s: float) -> None:
    """
    Make sure that no earlier writer of the session file at `path` writes any more.

    If a writer holds the lock for longer than `wait_s` (it was stopped, or its disk hangs, inside a
    transaction), a copy of the committed data replaces the file. Raises like `connect`, and OSError.
    """
    if not path.is_file():
        return
    try:
        with contextlib.closing(connect(path, timeout=wait_s)) as connection:
            claim(connection)
    except (sqlite3.OperationalError, SessionFileError) as error:
        if "locked" not in str(error):
            raise
        _replace(path, wait_s)


def _replace(path: Path, wait_s: float) -> None:
    hung, copy = path.with_name(f"{path.name}.hung"), path.with_name(f"{path.name}.copy")
    _rename(path, hung)  # from here on, what its writer commits is not taken for stored
    remove(path.parent.glob("*.tmp"))  # reports that it was about to put in place
    try:
        copy.touch(mode=0o600)
        try:
            _backup(hung, copy, wait_s)
        except sqlite3.OperationalError:  # stopped while it wrote pages: nobody may read
            for suffix in _SIDE:
                if suffix != "-shm" and _side(hung, suffix).exists():
                    shutil.copyfile(_side(hung, suffix), _side(copy, suffix))
            _plain(copy)
        copy.rename(path)
    except BaseException:
        _rename(hung, path)
        remove(_side(copy, suffix) for suffix in _SIDE)
        raise
    remove(_side(hung, suffix) for suffix in _SIDE)


def _backup(source: Path, target: Path, wait_s: float) -> None:
    connection, into = sqlite3.connect(source, timeout=wait_s, isolation_level=None), sqlite3.connect(target)
    with contextlib.closing(connection), contextlib.closing(into):
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM meta").fetchone()  # raises, where `backup` waits for ever
        connection.backup(into)
    _plain(target)


def _plain(path: Path) -> None:
    """Merge a database that nobody else uses into one file, so that SQLite needs no other file to read it."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        connection.execute("SELECT count(*) FROM meta").fetchone()


def _rename(path: Path, to: Path) -> None:
    for suffix in _SIDE:
        with contextlib.suppress(FileNotFoundError):
            _side(path, suffix).rename(_side(to, suffix))


def _side(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
