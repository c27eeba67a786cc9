"""What a sink is: a thin adapter from a session to one place outside."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from traceml_ray.errors import error_text
from traceml_ray.store.results import SinkState

from .report import Report

T = TypeVar("T")


class Sink(Protocol):
    """One place that a session is reported to. No method waits or raises; a thread of its own reports."""

    takes_reports: bool
    """Whether it is to be offered reports."""

    def offer(self, report: Report) -> None:
        """Take the newest report of the session, to be sent when its place can take it."""

    def state(self) -> SinkState:
        """Return how it is doing."""

    def close(self, deadline_s: float) -> None:
        """Send what is still to be sent, until `deadline_s` (`time.monotonic`) at the latest, and end."""


class Unusable:
    """In place of a sink, or of a sender, that cannot be used: it says why, and counts what is lost."""

    takes_reports = False

    def __init__(self, name: str, why: str) -> None:
        self._state = SinkState(name=name, where="", failed=1, error=why)

    def offer(self, item: object) -> None:
        """Count it."""
        self._state = replace(self._state, failed=self._state.failed + 1)

    def state(self) -> SinkState:
        """Return why it reports nothing."""
        return self._state

    def close(self, deadline_s: float) -> None:
        """Do nothing."""


class Sender(Generic[T]):
    """
    Sends items in a thread of its own, so that a place that hangs holds up nothing else. If more than `most`
    are waiting, the oldest is dropped and counted.

    Args:
        name: of the sink.
        where: URL or address, without secrets.
        send: sends one item; may wait, and raises if it fails. A failed item is not sent again.
        most: largest number of waiting items; 1: only the newest.
        every_s: least number of seconds between two items.
        again: send the newest item every `every_s` seconds as long as there is no newer one.
        end: called in the thread once the last item has been sent.
    """

    takes_reports = True

    def __init__(
        self,
        name: str,
        where: str,
        send: Callable[[T], object],
        *,
        most: int = 1,
        every_s: float = 0.0,
        again: bool = False,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self._send, self._end, self._every_s, self._most = send, end, every_s, most
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._again = again
        self._newest: tuple[T] | None = None
        self._closing = False
        self._state = SinkState(name=name, where=where)
        self._thread = threading.Thread(target=self._run, name=f"traceml-sink-{name}", daemon=True)
        self._thread.start()

    def offer(self, item: T) -> None:
        """Have `item` sent."""
        with self._changed:
            self._items.append(item)
            while len(self._items) > self._most:
                self._items.popleft()
                self._state = replace(self._state, dropped=self._state.dropped + 1)
            self._changed.notify_all()

    def state(self) -> SinkState:
        """Return how many items were sent, failed and were dropped."""
        return self._state

    def close(self, deadline_s: float) -> None:
        """Send what is waiting, until `deadline_s` (`time.monotonic`) at the latest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._send(item[0])
            except Exception as error:
                self._note(failed=1, error=error_text(error))
            else:
                self._note(sent=1)
        try:
            self._end()
        except Exception as error:
            self._note(failed=1, error=error_text(error))

    def _note(self, *, sent: int = 0, failed: int = 0, error: str = "") -> None:
        with self._changed:
            state = self._state
            self._state = replace(state, sent=state.sent + sent, failed=state.failed + failed, error=error)

    def _next(self) -> tuple[T] | None:
        """Wait for the next item and its time. None: the sink is closed, and nothing is waiting."""
        with self._changed:
            tried = self._state.sent + self._state.failed
            self._changed.wait_for(lambda: self._closing, self._every_s if tried else 0)
            if self._again and self._newest and not self._items and not self._closing:
                return self._newest
            self._changed.wait_for(lambda: self._items or self._closing)
            self._newest = (self._items.popleft(),) if self._items else None
            return self._newest


def close_all(closes: Iterable[Callable[[float], object]], deadline_s: float) -> None:
    """Call all of `closes` with `deadline_s`, at the same time: one that hangs takes no time from others."""
    threads = [threading.Thread(target=close, args=(deadline_s,), daemon=True) for close in closes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
