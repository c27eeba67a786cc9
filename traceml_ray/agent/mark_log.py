"""
Where marks are written down, and how they are understood later.

Marks are made on the training thread, between two kernels, with cold caches: there a line of Python
costs five times what a hot loop shows. So the marks of the usual step are only written down there
(which one and when, in `log`), and understood later, a hundred at a time, by the agent's thread
(`replay`). Others are made at once (`immediate_mark`); each settles what was written down before it, and
is itself written down, with its arguments, while another thread is reading the log: no mark waits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any, NamedTuple, TypeVar

from traceml_ray.agent.cuts import NO_EVENT, first_event
from traceml_ray.agent.device import DeviceClock
from traceml_ray.agent.marks import BATCHES, COST, END, EVENTS, OPTIMIZERS
from traceml_ray.agent.steps import Steps

LOG_SIZE = 1 << 17
"""What is written beyond this pushes out the oldest."""
REPLAY_AT = LOG_SIZE // 2
"""With so much written, a backward settles by itself: the agent's thread does not come round."""
LOCK_S = 0.2
"""Longest wait of the agent's thread for the lock, which a mark holds for a millisecond at most."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Deferred(NamedTuple):
    """A mark in the log with all that it needs."""

    method: Callable[..., Any]
    time: int
    thread: int
    args: tuple[Any, ...]
    event: int = NO_EVENT


def immediate_mark(method: Method) -> Method:
    """
    Make `method` a mark that is made now, by this thread, after all that were written down.

    Where another thread has the lock it is written down; then it returns True, and the mark that ends what
    this one begins is to be made, which does nothing if this one turns out not to count.
    """

    @functools.wraps(method)
    def mark(self: MarkLog, *args: Any) -> Any:
        called = self.clock()
        if not self._lock.acquire(blocking=False):
            return self._defer(method, called, args)
        try:
            self._replay()
            self.now, self.thread = self.clock(), get_ident()
            if self.device is not None:
                self.steps.partition.event = event = self._event_now()
                self.newest = max(self.newest, event)
            result = method(self, *args)
            if self.thread == self.owner:
                self.ready = 0 if self.steps.rows.depth else self.owner
                self._cost_ns += self.clock() - called
            return result
        finally:
            self._lock.release()

    return mark  # type: ignore[return-value]


class MarkLog:
    """The log, the lock of whoever reads it, and who may write; `steps` takes what was written."""

    __slots__ = (
        *("_cost_ns", "_event", "_followers", "_lock", "_losing", "_mark", "_weighed", "_written"),
        *("_written_ns", "clock", "device", "log", "lost_marks", "lost_rows", "newest", "now", "owner"),
        *("ready", "stamp", "steps", "thread", "weigh"),
    )

    def __init__(self, clock: Callable[[], int], steps: Steps) -> None:
        self.clock = clock
        self.stamp = clock
        """The clock of marks that bound a stage: on a device it records an event, too, and writes it down."""
        self._followers: list[Callable[[Callable[[], int]], None]] = []
        self.device: DeviceClock | None = None
        self.newest = NO_EVENT
        """The newest event that is understood."""
        self.steps = steps
        self.log: deque[int | Deferred] = deque(maxlen=LOG_SIZE)
        """
        Marks written down and not yet understood: which, when, which, when, … A signal may come between
        the two, so a mark without its time is nothing: times are all larger than marks. What is below 0
        is the size of the span that ends next, (OPTIMIZERS) the optimizer that steps, (EVENTS) the event that
        was recorded at this mark, or (BATCHES) the size of the batch that was waited for last.
        """
        self.ready = 0
        """
        The thread that may write marks down: the one that trains, outside of a backward. 0 after one that
        had to be deferred, until one has been made at once again.
        """
        self.lost_marks = self.lost_rows = 0
        """What the log had no room for, and how many rows that would have been."""
        self.weigh = True
        """The next optimizer mark is to be followed by COST."""
        self.now = clock()
        """The time of the mark that is being understood, and its thread."""
        self.thread = 0
        self.owner: int | None = None
        """The thread that trains; None until one has."""
        self._mark, self._event = 0, NO_EVENT
        self._cost_ns = self._written = self._written_ns = self._weighed = 0
        self._lock = RLock()
        self._losing = False

    def write(self, mark: int) -> bool:
        """Write `mark` down, if this thread may; False: its method has to be called instead."""
        if get_ident() != self.ready:
            return False
        log = self.log
        log.append(mark)
        log.append(self.stamp())
        return True

    def mine(self) -> bool:
        """Return whether this thread is the one that trains (or none has yet)."""
        return self.owner is None or get_ident() == self.owner

    def replay(self, wait_s: float = 0.0) -> bool:
        """Understand what was written down until now; False: another thread was at it for `wait_s`."""
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            self._replay()
            self.weigh = True
        finally:
            self._lock.release()
        return True

    def _replay(self) -> None:
        log, partition = self.log, self.steps.partition
        self.thread = self.owner or 0
        self.lost_marks += len(log) == LOG_SIZE  # and maybe more of them
        for _ in range(len(log)):
            value = log.popleft()
            if isinstance(value, Deferred):
                self._written += 1
                self.now, self.thread = value.time, value.thread
                partition.event = value.event
                self.newest = max(self.newest, value.event)
                value.method(self, *value.args)
                self.thread = self.owner or 0
            elif value < 0:
                if value > OPTIMIZERS:
                    self.steps.size = -value
                elif value > EVENTS:
                    self.steps.optimizer = OPTIMIZERS - value
                elif value > BATCHES:
                    self._event = self.newest = EVENTS - value
                else:
                    self.steps.work.batch(BATCHES - value)
            elif value < END:
                self._mark, self._event = value, NO_EVENT
            elif self._mark == COST:
                self._written_ns += value - self.now
                self._weighed += 1
            else:
                self.now = value
                self._written += 1
                partition.event = self._event
                self.steps.apply(self._mark, value)
        self._recover()

    def _recover(self) -> None:
        """After marks were lost, go on in a first row, so many steps later as backwards were lost."""
        if self._losing:
            lost, self.lost_rows = self.lost_rows, 0
            self.steps.rows.skip(lost)
            self.steps.forget(self.now)
            self._losing = False

    def _defer(self, method: Callable[..., Any], called: int, args: tuple[Any, ...]) -> bool:
        """Write a mark down in full, wherever it is made; where there is no room, count it."""
        thread = get_ident()
        if thread == self.owner:
            self.ready = 0
        if self._losing or len(self.log) >= REPLAY_AT:
            self._losing = True
            self.lost_marks += 1
            self.lost_rows += method.__name__ == "_end_backward"
        else:
            event = NO_EVENT if self.device is None else self._event_now()
            self.log.append(Deferred(method, called, thread, args, event))
        return True

    # -- on a device's clock -------------------------------------------------------------------------

    def follow(self, use: Callable[[Callable[[], int]], None]) -> None:
        """Have `use` called with `stamp`, and each new one: hooks of the usual step have it in a variable."""
        self._followers.append(use)
        use(self.stamp)

    def stamp_with(self, stamp: Callable[[], int]) -> None:
        """Take the times of marks that bound a stage from `stamp`."""
        self.stamp = stamp
        for use in self._followers:
            use(stamp)

    def use(self, device: DeviceClock) -> None:
        """Read this device's clock, too, at every mark from here on."""
        with self._lock:
            self._replay()
            self.device = device
            self.steps.use(device)
        self.stamp_with(device.stamper(self.log.append))

    def stop_device_clock(self) -> bool:
        """
        Read the CPU's clock alone again; rows that wait for the device go out without it.

        False: not yet, since a mark holds the lock: recording its event may block as long as the device does.
        """
        self.stamp_with(self.clock)
        if not self._lock.acquire(timeout=LOCK_S):
            return False
        try:
            self._replay()
            if self.device is not None:
                self.device.flush()
                self.device = None
                self.steps.use(None)
        finally:
            self._lock.release()
        return True

    def _event_now(self) -> int:
        """Record an event for a mark that is made at once, or deferred; only the thread that trains does."""
        if self.device is None or get_ident() != self.owner:
            return NO_EVENT
        return self.device.record()

    def first_event(self) -> int:
        """Return the oldest event that is still needed for a row which is not over; 0: not known now."""
        if not self._lock.acquire(timeout=LOCK_S):
            return 0
        try:
            event = first_event(self.steps.open_cuts())
            return self.newest + 1 if event == NO_EVENT else event
        finally:
            self._lock.release()

    def _room(self) -> bool:
        """Return whether the log has room for a mark that may be left out; else it is counted."""
        if not self._losing and (len(self.log) < REPLAY_AT or self.replay()):
            return True
        self.lost_marks += 1
        return False

    @property
    def marks_ns(self) -> int:
        """Time that the marks have taken on the training thread; of those written down, a few are weighed."""
        return self._cost_ns + self._written_ns * self._written // max(1, self._weighed)
