"""
When spans of a few names were open: evaluations and checkpoints. All other spans are kept as sums only.

At every moment the training thread is in at most one of these spans, the innermost. So the intervals of one
process do not overlap, except those that run beside the training thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

JOIN_NS = 1_000_000_000
"""Intervals of one name with less time between them are joined."""
LONGEST_NS = 300_000_000_000
"""Longest time over which intervals are joined."""
EXACT = 256
"""Number of intervals of one name that are kept one by one. Later ones are joined over `LONGEST_NS`."""
ROOM = 1 << 12
"""Number of intervals that are kept until the agent has read them. Further ones are lost, and counted."""


@dataclass
class TimedSpan:
    """A span, or several of one name that were joined. Times are on the clock of the marks, in ns."""

    number: int
    """Number of the span. Numbers grow."""
    name: str
    began: int
    ended: int
    busy: int
    """Time in these spans together."""
    count: int
    step: int
    """Step that was open when the last one began."""
    over: bool = True

    def join(self, began: int, ended: int, count: int, step: int) -> None:
        """Add a span that began later. Time in both counts once."""
        self.busy += max(0, ended - max(began, self.ended))
        self.ended = max(self.ended, ended)
        self.count += count
        self.step = max(self.step, step)


class TimedNow(NamedTuple):
    """The timed spans and the rows of a process at one moment. Times are on the clock of the marks, in ns."""

    now: int
    over: list[TimedSpan]
    pending: list[TimedSpan]
    first_row: tuple[int, int] | None
    """When the first row began, and when it ended."""
    last_row: int | None
    """When the newest complete row ended."""
    step: int
    """Step that is open."""
    first_data: int
    """Part of the first row in which it waited for data."""


class _Open:
    """
    An open span: since when it is the innermost one, and whether a part of it is stored. `depth` counts
    spans of this name inside each other.
    """

    __slots__ = ("began", "counted", "depth", "number", "step")

    def __init__(self, number: int, began: int, step: int) -> None:
        self.number, self.began, self.step = number, began, step
        self.depth, self.counted = 1, False


class TimedSpans:
    """The timed spans of one process. The caller holds the lock of the log."""

    __slots__ = ("_beside", "_held", "_next", "_open", "_over", "_sent", "lost")

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        """By name, in the order in which they began."""
        self._beside: dict[int, TimedSpan] = {}
        """What runs beside the training thread now, by number."""
        self._held: dict[str, TimedSpan] = {}
        """The newest span of each name that is over. The next one may be joined with it."""
        self._over: list[TimedSpan] = []
        self._sent: Counter[str] = Counter()
        self._next = 0
        self.lost = 0

    def begin(self, name: str, now: int, step: int) -> None:
        """Begin a span on the training thread. A span inside another of the same name counts once."""
        known = self._open.get(name)
        if known is not None:
            known.depth += 1
        else:
            self._pause(now)
            self._open[name] = _Open(self._number(), now, step)

    def end(self, name: str, now: int) -> None:
        """End a span. `now` may be before the last mark, if the span was over then."""
        known = self._open.get(name)
        if known is None:
            return
        known.depth -= 1
        if known.depth:
            return
        innermost = name == next(reversed(self._open))
        if innermost:
            self._pause(now)
        del self._open[name]
        if innermost:
            self._resume(now)

    def add(self, name: str, began: int, ended: int, step: int) -> None:
        """Add a span of the training thread that is over, unless it was inside another of this name."""
        if name not in self._open:
            self._pause(began)
            self._store(self._number(), name, began, ended, 1, step)
            self._resume(ended)

    @property
    def runs_beside(self) -> bool:
        """Return whether something runs beside the training thread."""
        return bool(self._beside)

    def begin_beside(self, name: str, now: int, step: int) -> int:
        """Begin something that runs beside the training thread. Return its number."""
        number = self._number()
        self._beside[number] = TimedSpan(number, name, now, now, 0, 1, step, over=False)
        return number

    def end_beside(self, number: int, now: int) -> None:
        """End what `begin_beside` began."""
        span = self._beside.pop(number, None)
        if span is not None:
            self._store(span.number, span.name, span.began, now, 1, span.step)

    def forget(self, now: int) -> None:
        """End all open spans of the training thread: marks were lost, or another thread trains."""
        self._pause(now)
        self._open.clear()

    def drain(self, now: int, final: bool) -> list[TimedSpan]:
        """Return the spans that are over and will not be joined any more; with `final`, all that are over."""
        for name, span in [*self._held.items()]:
            many = self._sent[name] >= EXACT and now - span.began < LONGEST_NS
            if final or (now - span.ended >= JOIN_NS and not many):
                self._release(name)
        over, self._over = self._over, []
        return over

    def pending(self, now: int) -> list[TimedSpan]:
        """Return the spans that `drain` has not returned: those not over, and those it holds back."""
        running = [
            TimedSpan(known.number, name, known.began, now, now - known.began, 1, known.step, over=False)
            for name, known in [*self._open.items()][-1:]
        ]
        running += [
            TimedSpan(span.number, span.name, span.began, now, now - span.began, 1, span.step, over=False)
            for span in self._beside.values()
        ]
        return [*self._held.values(), *running]

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _pause(self, now: int) -> None:
        """Store the innermost span up to now: another one begins in it, or it ends."""
        name = next(reversed(self._open), None)
        if name is not None and now > (known := self._open[name]).began:
            self._store(known.number, name, known.began, now, int(not known.counted), known.step)
            known.counted = True

    def _resume(self, now: int) -> None:
        """Let the innermost span go on."""
        if self._open:
            known = self._open[next(reversed(self._open))]
            known.began, known.number = max(known.began, now), self._number()

    def _store(self, number: int, name: str, began: int, ended: int, count: int, step: int) -> None:
        held = self._held.get(name)
        if held is not None:
            near = began - held.ended < JOIN_NS or self._sent[name] >= EXACT
            if near and began - held.began < LONGEST_NS:
                held.join(began, ended, count, step)
                return
            self._release(name)
        self._held[name] = TimedSpan(number, name, began, ended, ended - began, count, step)

    def _release(self, name: str) -> None:
        span = self._held.pop(name)
        self._sent[name] += 1
        if len(self._over) < ROOM:
            self._over.append(span)
        else:
            self.lost += span.count
