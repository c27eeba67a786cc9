"""Work on files that may take long, by a thread of its own: no row, verdict or question waits for a disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from traceml_ray.errors import Errors


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
