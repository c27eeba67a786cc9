"""
The files of a profile while it is made: written in the background, since a disk may hang.

Work on files that may take long, by a thread of its own: no row, verdict or question waits for a disk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from traceml_ray.errors import Errors
from traceml_ray.files import free_name, stamp
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile
from traceml_ray.wire import messages as wire


class Background:
    """
    Does jobs one after another, in their order, in a thread that there is while jobs wait.

    Args:
        place: counts what jobs raise, and names the thread.
        errors: the aggregator's, by place.
        most_bytes: of the data that waiting jobs hold.
    """

    def __init__(self, place: str, errors: Errors, most_bytes: int) -> None:
        self._place, self._errors, self._most_bytes = place, errors, most_bytes
        self._changed = threading.Condition()  # held for moments only, never while a job runs
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._bytes = 0
        self._running = False

    def add(self, job: Callable[[], object], size: int = 0) -> bool:
        """Have a job done that holds `size` bytes; False where too many wait already, then it is not done."""
        with self._changed:
            if size and self._bytes + size > self._most_bytes:
                return False
            if not self._running:
                threading.Thread(target=self._run, name=f"traceml-{self._place}", daemon=True).start()
                self._running = True
            self._jobs.append((job, size))
            self._bytes += size
            return True

    def wait(self, seconds: float) -> bool:
        """Wait at most so long until all jobs are done; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running = False
                    self._changed.notify_all()
                    return
                job, size = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                self._errors.note(self._place, error)
            with self._changed:
                self._bytes -= size


MOST_BYTES = 64 << 20
"""Largest size of traces waiting for the disk, in bytes; further pieces are refused and sent again."""
_PLACE = "profile"


class ProfileFiles:
    """
    One per session. Nothing here waits for the disk but `wait`, and the first call of all.

    Args:
        folder: of the session.
        errors: the aggregator's, by place.
    """

    def __init__(self, folder: Path, errors: Errors) -> None:
        self._folder, self._errors = folder, errors
        self._background = Background(_PLACE, errors, MOST_BYTES)
        self._ids = profiles.names_of(folder)
        self._lock = threading.Lock()  # of the manifest; held for moments only
        self._manifest: tuple[str, bytes] | None = None
        """The newest that is to be written, with the id of its profile."""
        self._failed: dict[tuple[str, int, str], str] = {}
        self.full = False
        """The last piece was not taken: too much waits for the disk."""
        profiles.clear_unfinished(folder)  # of an aggregator that was killed

    def new_id(self, t_ns: int) -> str:
        """Return an id for a profile that was asked for at `t_ns`, ns since the epoch."""
        self._ids.append(free_name(stamp(t_ns), self._ids))
        return self._ids[-1]

    def do(self, job: Callable[[], object]) -> None:
        """Have a job done when what waits is written; what it raises is counted."""
        self._background.add(job)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long until all is written; return whether it is."""
        return self._background.wait(seconds)

    def clear(self) -> None:
        """Have what was written of the profile that is made removed."""
        self.do(self._clear)

    def show(self, profile: Profile) -> None:
        """Have others see how far a profile is."""
        with self._lock:
            waits, self._manifest = self._manifest is not None, (profile.id, profiles.encoded(profile))
        if not waits:
            self.do(self._write_manifest)

    def add_piece(self, name: str, piece: wire.TracePiece) -> bool:
        """Have a piece of the file `name` written; False where too much waits: then it has to come again."""
        self.full = not self._background.add(lambda: self._write(name, piece), len(piece.data))
        return not self.full

    def failure(self, profile: str, number: int, name: str | None) -> str | None:
        """Return why a file of the capture of this `number` could not be written; None: it could, so far."""
        return None if name is None else self._failed.get((profile, number, name))

    # -- in the background ---------------------------------------------------------------------------

    def settle(self, profile: Profile) -> None:
        """Note of the ranks of a profile that is over which traces could not be written. A job calls it."""
        failed = {
            name: why for (profile_id, _, name), why in self._failed.items() if profile_id == profile.id
        }
        self._failed.clear()
        for rank in profile.captured:
            if why := failed.get(str(rank.file)):
                rank.state, rank.reason = "failed", why

    def _clear(self) -> None:
        self._failed.clear()
        profiles.clear_unfinished(self._folder)

    def _write_manifest(self) -> None:
        with self._lock:
            manifest, self._manifest = self._manifest, None
        if manifest is not None:
            profiles.write_manifest(profiles.unfinished(self._folder, manifest[0]), manifest[1])

    def _write(self, name: str, piece: wire.TracePiece) -> None:
        about = piece.id, piece.number, name
        if about in self._failed:
            return
        try:
            path = profiles.unfinished(self._folder, piece.id) / name
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, piece.data, piece.offset)
            finally:
                os.close(fd)
        except OSError as error:
            self._errors.note("trace", error)
            self._failed[about] = f"its trace could not be kept: {error.strerror}"


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`: a disk that fills up takes a part of it first. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
