"""The lock of the step histories: the thread that feeds and judges them waits for one reader at most."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StepsLock:
    """
    Held by one thread at a time. A feeder that waits gets it next, however many readers wait: the feeder's
    thread has to commit, while an answer may come later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader = threading.Lock()
        """Held by the one reader that may wait for the lock, or has it."""
        self._state = threading.Condition()
        self._feeders = 0
        """That wait for the lock, or have it."""

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Hold the lock to change the histories, or in the thread that does."""
        with self._state:
            self._feeders += 1
        try:
            with self._lock:
                yield
        finally:
            with self._state:
                self._feeders -= 1
                self._state.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock to read a history, in any other thread."""
        with self._reader:
            with self._state:
                self._state.wait_for(lambda: not self._feeders)
            with self._lock:
                yield
