"""
The files of a profile while it is being made. They are written in the background, since a disk may hang.

A separate thread does all file work that may take long: no row, verdict or question waits for a disk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from traceml_ray.errors import Errors
from traceml_ray.files import free_name, stamp
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile
from traceml_ray.wire.messages import TracePart


class Background:
    """
    Runs jobs one after another, in their order. Its thread exists only while jobs wait.

    Args:
        place: name under which errors of jobs are counted, and name of the thread.
        errors: the aggregator's error counts, by place.
    """

    def __init__(self, place: str, errors: Errors) -> None:
        self._place, self._errors = place, errors
        self._changed = threading.Condition()  # held for moments only, never while a job runs
        self._jobs: deque[Callable[[], object]] = deque()
        self._running = False

    def add(self, job: Callable[[], object]) -> None:
        """Add a job."""
        with self._changed:
            if not self._running:
                threading.Thread(target=self._run, name=f"traceml-{self._place}", daemon=True).start()
                self._running = True
            self._jobs.append(job)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` seconds until all jobs are done; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._running = False
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                self._errors.note(self._place, error)


_PLACE = "profile"


@dataclass(eq=False)
class _TraceFile:
    """State of the file of a trace."""

    written: int = 0
    """Number of bytes of the file that are on disk."""
    waiting: int = 0
    """Number of bytes of the part that waits for the disk."""
    failure: str = ""
    """Why the file cannot be written. "": no failure so far."""


class ProfileFiles:
    """
    The files of the profiles of one session. Only `wait` and the very first call wait for the disk.

    Args:
        folder: of the session.
        errors: the aggregator's error counts, by place.
    """

    def __init__(self, folder: Path, errors: Errors) -> None:
        self._folder, self._errors = folder, errors
        self._background = Background(_PLACE, errors)
        self._ids = profiles.names_of(folder)
        self._lock = threading.Lock()  # of the manifest and of `_traces`; held for moments only
        self._manifest: tuple[str, bytes] | None = None
        """The newest manifest to write, with the id of its profile."""
        self._traces: dict[tuple[str, int, str], _TraceFile] = {}
        """Trace files by (id of the profile, number of its command, name of the file)."""
        self.left = profiles.under_way(folder)
        """The unfinished profile that an earlier, killed aggregator has left. None: there is none."""
        profiles.clear_unfinished(folder, None if self.left is None else self.left.id)

    def new_id(self, t_ns: int) -> str:
        """Return an id for a profile that was requested at `t_ns`, in ns since the epoch."""
        self._ids.append(free_name(stamp(t_ns), self._ids))
        return self._ids[-1]

    def do(self, job: Callable[[], object]) -> None:
        """Run a job after the pending writes. An error that it raises is counted."""
        self._background.add(job)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` seconds until everything is written; return whether it is."""
        return self._background.wait(seconds)

    def clear(self) -> None:
        """Remove what was written of the profile that is being made."""
        self.do(self._clear)

    def show(self, profile: Profile) -> None:
        """Write the manifest, so that others can see the progress of a profile."""
        with self._lock:
            waits, self._manifest = self._manifest is not None, (profile.id, profiles.encoded(profile))
        if not waits:
            self.do(self._write_manifest)

    def go_on(self, profile: str, number: int, name: str) -> int:
        """Continue a file that an earlier aggregator has begun. Return the number of bytes it has."""
        path = profiles.unfinished(self._folder, profile) / name
        there = path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
        self._traces[profile, number, name] = _TraceFile(there)
        return there

    def add_part(self, name: str, part: TracePart) -> bool:
        """
        Write a part of the file `name` in the background. Return False if the part does not begin where the
        file ends, or if the previous part still waits for the disk. Then the part must be sent again.
        """
        with self._lock:
            trace = self._traces.setdefault((part.profile, part.number, name), _TraceFile())
            if trace.waiting or not part.data or part.offset != trace.written:
                return False
            trace.waiting = len(part.data)
        self.do(lambda: self._write(name, part, trace))
        return True

    def there(self, profile: str, number: int, name: str) -> tuple[int, int, str]:
        """
        Return how much of a file is written, how much waits for the disk (both in bytes), and why it cannot
        be written ("": no failure so far).
        """
        with self._lock:
            trace = self._traces.get((profile, number, name), _TraceFile())
            return trace.written, trace.waiting, trace.failure

    # -- in the background ---------------------------------------------------------------------------

    def note_lost_traces(self, profile: Profile) -> None:
        """
        For each rank of a finished profile, record that its trace could not be written. Called by
        a job.
        """
        for rank in profile.captured:
            _, _, failure = self.there(profile.id, profile.number, str(rank.file))
            if failure:
                rank.state, rank.reason = "failed", failure
        self._traces.clear()

    def _clear(self) -> None:
        profiles.clear_unfinished(self._folder)

    def _write_manifest(self) -> None:
        with self._lock:
            manifest, self._manifest = self._manifest, None
        if manifest is not None:
            profiles.write_manifest(profiles.unfinished(self._folder, manifest[0]), manifest[1])

    def _write(self, name: str, part: TracePart, trace: _TraceFile) -> None:
        try:
            path = profiles.unfinished(self._folder, part.profile) / name
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write_all(fd, part.data, part.offset)
            finally:
                os.close(fd)
            with self._lock:
                trace.written, trace.waiting = part.offset + len(part.data), 0
        except OSError as error:
            self._errors.note("trace", error)
            trace.failure = f"its trace could not be kept: {error.strerror}"


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`. A disk that fills up accepts only a part of it first. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
