"""
The files of a profile while it is made: written in the background, since a disk may hang.

Work on files that may take long, by a thread of its own: no row, verdict or question waits for a disk.
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
    Does jobs one after another, in their order, in a thread that there is while jobs wait.

    Args:
        place: counts what jobs raise, and names the thread.
        errors: the aggregator's, by place.
    """

    def __init__(self, place: str, errors: Errors) -> None:
        self._place, self._errors = place, errors
        self._changed = threading.Condition()  # held for moments only, never while a job runs
        self._jobs: deque[Callable[[], object]] = deque()
        self._running = False

    def add(self, job: Callable[[], object]) -> None:
        """Have a job done."""
        with self._changed:
            if not self._running:
                threading.Thread(target=self._run, name=f"traceml-{self._place}", daemon=True).start()
                self._running = True
            self._jobs.append(job)

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
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                self._errors.note(self._place, error)


_PLACE = "profile"


@dataclass(eq=False)
class _TraceFile:
    """How far the file of a trace is."""

    written: int = 0
    """Bytes of it on the disk."""
    waiting: int = 0
    """Bytes of the part that waits for the disk."""
    failure: str = ""
    """Why it cannot be written."""


class ProfileFiles:
    """
    One per session. Nothing here waits for the disk but `wait`, and the first call of all.

    Args:
        folder: of the session.
        errors: the aggregator's, by place.
    """

    def __init__(self, folder: Path, errors: Errors) -> None:
        self._folder, self._errors = folder, errors
        self._background = Background(_PLACE, errors)
        self._ids = profiles.names_of(folder)
        self._lock = threading.Lock()  # of the manifest and of `_traces`; held for moments only
        self._manifest: tuple[str, bytes] | None = None
        """The newest that is to be written, with the id of its profile."""
        self._traces: dict[tuple[str, int, str], _TraceFile] = {}
        """Trace files by (id of the profile, number of its command, name of the file)."""
        self.left = profiles.under_way(folder)
        """The profile that an aggregator before this one, which was killed, has left; None: none."""
        profiles.clear_unfinished(folder, None if self.left is None else self.left.id)

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

    def go_on(self, profile: str, number: int, name: str) -> int:
        """Go on with a file that an aggregator before this one has begun; return how much of it is there."""
        path = profiles.unfinished(self._folder, profile) / name
        there = path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
        self._traces[profile, number, name] = _TraceFile(there)
        return there

    def add_part(self, name: str, part: TracePart) -> bool:
        """
        Have a part of the file `name` written; False where it does not go on where the file ends, or the part
        before it waits for the disk: then it has to come again.
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
        Return how much of a file is written and how much waits for the disk, in bytes, and why it cannot be
        written ("": it can, so far).
        """
        with self._lock:
            trace = self._traces.get((profile, number, name), _TraceFile())
            return trace.written, trace.waiting, trace.failure

    # -- in the background ---------------------------------------------------------------------------

    def note_lost_traces(self, profile: Profile) -> None:
        """Note of the ranks of a profile that is over which traces could not be written. A job calls it."""
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
    """Write all of `data`: a disk that fills up takes a part of it first. Raises OSError."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
