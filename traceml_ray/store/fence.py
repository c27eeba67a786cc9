"""
Keeps a session file for one writer, the one that claimed it last.

`transactions` in `meta` counts the transactions of all writers. A writer notes the number, its epoch, before
it reads what is in the file, and adds one in each transaction of its own (its claim is the first). A
transaction that meets another number writes nothing: somebody else has written since, and what this writer
knows of the file is out of date. The same holds where another file is at the path. So a writer that was
stopped, and goes on after another has taken the session over, writes nothing any more.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

from traceml_ray.files import remove
from traceml_ray.store.schema import SessionFileError, connect, transaction

_SIDE = ("", "-wal", "-shm", "-journal")
"""Suffixes of a database's files: itself, and those that SQLite finds by its name."""


class Fenced(RuntimeError):  # noqa: N818 - a state more than an error
    """Another writer has taken the session over: nothing of this one is written any more."""


class Fence:
    """
    Claims the session file at `path` for the writer whose `connection` it is, as it was opened at `found`
    (None: it was made). Where that cannot be written, as on a full disk, or not `now`, the first transaction
    claims it, unless somebody else has written by then.

    The writer reads what is in the file after this. Raises `Fenced` when the file was replaced meanwhile,
    `SessionFileError` when the file cannot be read.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, opened: tuple[int, int] | None, *, now: bool = True
    ) -> None:
        self.broken = False
        """Whether another writer has the session."""
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
        Raise `Fenced` where another writer has the session, OSError where the file is gone; called in a
        transaction.
        """
        identity_now = identity(self._path)
        if identity_now is None:
            raise FileNotFoundError(f"{self._path}: the session file is gone")
        if self.broken or identity_now != self._file or _transactions(self._connection) != self._epoch:
            raise self._fenced()
        self._counted = self._epoch

    def count(self) -> None:
        """Check, and count the transaction; called in it before it writes. Raises as `check`."""
        self.check()
        self._counted = _count(self._connection)

    def committed(self) -> None:
        """Raise `Fenced` when what was just committed went into a file that is no longer the session's."""
        if identity(self._path) != self._file:
            raise self._fenced()
        self._epoch = self._counted

    def _fenced(self) -> Fenced:
        self.broken = True
        return Fenced(f"{self._path}: another process has taken this session over")


def identity(path: Path) -> tuple[int, int] | None:
    """
    Return which file is at `path`, None where there is none.

    It is not opened for that: closing it would let go of this process's locks on it.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def claim(connection: sqlite3.Connection) -> None:
    """
    Count a transaction that writes nothing else: whoever wrote before has written for the last time.

    Raises `sqlite3.Error` when the file is locked, or cannot be written.
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

    Where one holds it locked for longer than `wait_s` (it was stopped, or its disk hangs, in the middle of a
    transaction), a copy of what is committed takes the file's place. Raises as `connect` does, and OSError.
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
    """Bring a database that nobody else uses into one file, which SQLite needs no others for."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        connection.execute("SELECT count(*) FROM meta").fetchone()


def _rename(path: Path, to: Path) -> None:
    for suffix in _SIDE:
        with contextlib.suppress(FileNotFoundError):
            _side(path, suffix).rename(_side(to, suffix))


def _side(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
