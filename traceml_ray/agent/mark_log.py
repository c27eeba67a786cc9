"""
The log of marks: how marks are written and applied later.

Marks are made on the training thread, between two kernels, with cold caches. There a line of Python costs
five times as much as in a hot loop. So the marks of a usual step are only appended to a log (which mark, and
when). The agent's thread applies them later, a hundred at a time (`replay`).

Other marks are immediate (`immediate_mark`): they replay the log first. While another thread is reading the
log, they are appended to it with their arguments instead, so that no mark waits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any, NamedTuple, TypeVar

from traceml_ray.agent.device import NO_EVENT, DeviceClock, first_event
from traceml_ray.agent.marks import BATCHES, COST, END, EVENTS, OPTIMIZERS
from traceml_ray.agent.steps import Steps

LOG_SIZE = 1 << 17
"""Largest number of items in the log. Beyond it, the oldest are lost."""
REPLAY_AT = LOG_SIZE // 2
"""
From this number of items on, a backward replays the log itself, because the agent's thread does not keep up.
"""
LOCK_S = 0.2
"""
Longest time that the agent's thread waits for the lock, in s. A mark holds it for a millisecond at most.
"""

Method = TypeVar("Method", bound=Callable[..., Any])


class Deferred(NamedTuple):
    """A mark in the log, with all arguments that are needed to apply it later."""

    method: Callable[..., Any]
    time: int
    thread: int
    args: tuple[Any, ...]
    event: int = NO_EVENT


def immediate_mark(method: Method) -> Method:
    """
    Decorator: run the mark now, after replaying the log.

    If another thread holds the lock, append the mark to the log instead, and return True. The matching end
    mark must still be made; it is ignored if this mark is rejected later.
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
                if event != NO_EVENT:
                    called += self.device.took_ns(event)  # `recorded_ns` already includes it
            result = method(self, *args)
            if self.thread == self.owner:
                self.ready = 0 if self.steps.rows.depth else self.owner
                self._cost_ns += self.clock() - called
            return result
        finally:
            self._lock.release()

    return mark  # type: ignore[return-value]


class MarkLog:
    """
    The log of marks, its lock, and the id of the thread that may write to it. `steps` applies
    the marks.
    """

    __slots__ = (
        *("_cost_ns", "_event", "_followers", "_lock", "_losing", "_mark", "_weighed", "_written"),
        *("_written_ns", "clock", "device", "log", "lost_marks", "lost_rows", "newest", "now", "owner"),
        *("ready", "stamp", "steps", "thread", "weigh"),
    )

    def __init__(self, clock: Callable[[], int], steps: Steps) -> None:
        self.clock = clock
        self.stamp = clock
        """
        Clock for marks that bound a stage. On a device it also records an event, and writes its number to the
        log.
        """
        self._followers: list[Callable[[Callable[[], int]], None]] = []
        self.device: DeviceClock | None = None
        self.newest = NO_EVENT
        """Number of the newest event that has been applied."""
        self.steps = steps
        self.log: deque[int | Deferred] = deque(maxlen=LOG_SIZE)
        """
        ks that are written and not applied yet, as alternating items: mark, time, mark, time, …

        A signal may arrive between the two, so a mark without its time is ignored. This works because every
        time is larger than every mark. A negative item holds one of these: the size of the span that ends
        next; (OPTIMIZERS) the optimizer that steps; (EVENTS) the event that was recorded at this mark;
        (BATCHES) the size of the batch that was waited for last.
        """
        self.ready = 0
        """
        Id of the thread that may write to the log: the training thread, outside of a backward. 0 after a mark
        had to be deferred, until the next immediate mark.
        """
        self.lost_marks = self.lost_rows = 0
        """
        Number of marks that the log had no room for; `lost_rows` is the number of rows they
        would have made.
        """
        self.weigh = True
        """Whether the next optimizer mark is followed by COST."""
        self.now = clock()
        """Time of the mark that is being applied. `thread` is the id of its thread."""
        self.thread = 0
        self.owner: int | None = None
        """Id of the thread that trains. None until one has."""
        self._mark, self._event = 0, NO_EVENT
        self._cost_ns = self._written = self._written_ns = self._weighed = 0
        self._lock = RLock()
        self._losing = False

    def write(self, mark: int) -> bool:
        """Write `mark` to the log, if this thread may. False: call the method of the mark instead."""
        if get_ident() != self.ready:
            return False
        log = self.log
        log.append(mark)
        log.append(self.stamp())
        return True

    def mine(self) -> bool:
        """Return whether this thread is the training thread, or there is no training thread yet."""
        return self.owner is None or get_ident() == self.owner

    def replay(self, wait_s: float = 0.0) -> bool:
        """Apply all marks in the log. Returns False if another thread held the lock for all of `wait_s`."""
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
        self.lost_marks += len(log) == LOG_SIZE  # possibly more than one was lost
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
        """After marks were lost, continue with a first row, as many steps later as backwards were lost."""
        if self._losing:
            lost, self.lost_rows = self.lost_rows, 0
            self.steps.rows.skip(lost)
            self.steps.forget(self.now)
            self._losing = False

    def _defer(self, method: Callable[..., Any], called: int, args: tuple[Any, ...]) -> bool:
        """
        Append a mark with its arguments to the log, from any thread. If there is no room, count the mark as
        lost.
        """
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
        """
        Call `use` with `stamp` now and whenever it changes: hooks of the usual step keep it in
        a variable.
        """
        self._followers.append(use)
        use(self.stamp)

    def stamp_with(self, stamp: Callable[[], int]) -> None:
        """Set `stamp`, the clock of marks that bound a stage."""
        self.stamp = stamp
        for use in self._followers:
            use(stamp)

    def use(self, device: DeviceClock) -> None:
        """Also read this device's clock at every mark from now on."""
        with self._lock:
            self._replay()
            self.device = device
            self.steps.use(device)
        self.stamp_with(device.stamper(self.log.append))

    def stop_device_clock(self) -> bool:
        """
        Return to the CPU's clock alone. Rows that wait for the device are passed on without its times.

        Returns False if that is not possible yet, because a mark holds the lock: recording its event may
        block as long as the device does.
        """
        self.stamp_with(self.clock)
        if not self._lock.acquire(timeout=LOCK_S):
            return False
        try:
            self._replay()
            if self.device is not None:
                self.device.flush()
                self._cost_ns += self.device.recorded_ns
                self.device = None
                self.steps.use(None)
        finally:
            self._lock.release()
        return True

    def _event_now(self) -> int:
        """Record an event for a mark that is immediate or deferred. Only the training thread calls this."""
        if self.device is None or get_ident() != self.owner:
            return NO_EVENT
        return self.device.record()

    def first_event(self) -> int:
        """Return the number of the oldest event that an open row still needs. 0 if that is not known now."""
        if not self._lock.acquire(timeout=LOCK_S):
            return 0
        try:
            event = first_event(self.steps.open_cuts())
            return self.newest + 1 if event == NO_EVENT else event
        finally:
            self._lock.release()

    def _room(self) -> bool:
        """Return whether the log has room for a mark that may be left out. If not, count the mark."""
        if not self._losing and (len(self.log) < REPLAY_AT or self.replay()):
            return True
        self.lost_marks += 1
        return False

    @property
    def marks_ns(self) -> int:
        """
        Time that marks have taken on the training thread, in ns, including the events of a device. Of the
        marks in the log, only a few are measured.
        """
        device = self.device
        events_ns = device.recorded_ns if device is not None else 0
        return self._cost_ns + events_ns + self._written_ns * self._written // max(1, self._weighed)
