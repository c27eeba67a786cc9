"""Opens the sessions that are asked about, and keeps the newest one open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from traceml_ray.interactive.stored import StoredSession
from traceml_ray.interactive.stored import open as open_session
from traceml_ray.settings import Settings
from traceml_ray.store.session import DATABASE


class Sessions:
    """
    The sessions of a folder. They are read from their files, also while they run: Ray is not needed, and no
    process of a job is asked. One question is answered at a time.

    Args:
        out: folder of sessions; None: as in the settings.
    """

    def __init__(self, out: str | None) -> None:
        self._out = out
        self._lock = Lock()
        self._session: StoredSession | None = None
        self._file: tuple[Path, int] | None = None
        """Folder of the open session, and the inode of its file: another session may get its name."""

    @property
    def out(self) -> str:
        """Folder of sessions."""
        return Settings.load(out=self._out).out

    @contextlib.contextmanager
    def opened(self, name: str | None) -> Iterator[StoredSession]:
        """Yield the named session; None: the running one, else the newest. Raises SessionError."""
        with self._lock:
            session = open_session(name, out=self.out)
            file = session.folder, (session.folder / DATABASE).stat().st_ino
            if self._session is not None and file == self._file:
                session.close()  # the open one has read the steps already
            else:
                self._close()
                self._session, self._file = session, file
            yield self._session

    def close(self) -> None:
        """Close the open session."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._file = None
