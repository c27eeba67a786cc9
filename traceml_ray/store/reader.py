"""Questions to the database of a session file, and what goes wrong with them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceml_ray.store.read_only import connect_to_read
from traceml_ray.store.schema import SessionFileError, transaction

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.11 has it


class Reader:
    """
    A connection that only reads; one that is given stays open at the end.

    Raises `SessionFileError` for a file that cannot be read.
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
        """Let what is read inside be as it is now; not without WAL, where that would hold up the writer."""
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
