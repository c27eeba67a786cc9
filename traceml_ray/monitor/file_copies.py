"""Copies of the session file for downloads, and the files that may be read from outside."""

from __future__ import annotations

import secrets
from pathlib import Path

from traceml_ray.files import read_part
from traceml_ray.store.query import QueryError
from traceml_ray.store.session import REPORTS
from traceml_ray.store.session_file import SessionFile

_PREFIX = "snapshot-"
_MOST = 3
"""Copies at the same time; another one replaces the oldest."""


class Snapshots:
    """In the session folder `folder`. Copies that an earlier aggregator left are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.remove()

    def make(self, session: SessionFile) -> str:
        """Copy the session file as it stands; return the name of the copy."""
        for old in sorted(self._copies(), key=lambda path: path.stat().st_mtime_ns)[: 1 - _MOST]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{_PREFIX}{secrets.token_hex(4)}.sqlite"
        path.touch(mode=0o600)
        try:
            session.copy_to(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path.name

    def read(self, name: str, offset: int, n: int) -> bytes:
        """
        Return at most `n` bytes of a copy or of a report, b"" beyond its end.

        Raises QueryError for any other name, and for a file that is not there (yet, or any more).
        """
        if name not in REPORTS and name not in {path.name for path in self._copies()}:
            raise QueryError(f"there is no file called {name!r} to be read")
        try:
            return read_part(self._folder / name, offset, n)
        except FileNotFoundError:
            raise QueryError(f"there is no {name} at present: reports are written at the end") from None

    def remove(self, name: str | None = None) -> None:
        """Remove the copy of that name; None: all of them."""
        for path in self._copies():
            if name in (None, path.name):
                path.unlink(missing_ok=True)

    def _copies(self) -> list[Path]:
        return list(self._folder.glob(f"{_PREFIX}*.sqlite"))
