"""Sends the life of a rank process: its birth, its first and newest step, checkpoints and evaluations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from traceml_ray.agent.marks import CHECKPOINT_SPAN, CHECKPOINT_WAIT_SPAN, EVALUATION_SPAN, RESTORE_SPAN
from traceml_ray.agent.patch.checkpoint import BESIDE
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.span_times import TimedNow, TimedSpan
from traceml_ray.agent.steps import PAUSE_SPAN
from traceml_ray.errors import Errors
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.goodput.records import Life, LifeInterval, OpenInterval, What

_WHAT: dict[str, What] = {
    CHECKPOINT_SPAN: "checkpoint_save",
    CHECKPOINT_WAIT_SPAN: "checkpoint_save",
    RESTORE_SPAN: "checkpoint_restore",
    BESIDE: "checkpoint_save_async",
    EVALUATION_SPAN: "evaluation",
    PAUSE_SPAN: "pause",
}
"""What each timed span is."""
_FIRST_S, _SOON_S, _LONGEST_S = 1.0, 10.0, 300.0
"""
Time between two lives in s, if nothing has changed: a share of the time since the first, within these
bounds.
"""
_SOON, _LATER = 0.25, 0.005
_SET_NS = 1_000_000_000
"""Change of the wall clock that is sent at once."""
_READ_NS, _MOST_READS = 1_000_000, 5
"""Largest error with which the difference of two clocks is good enough, in ns; how often they are read."""
_BOOT_DIGITS = 15
_AT_ONCE, _AT_ONCE_EVERY_S = 32, 10.0
"""Number of changes that are sent at once, and the time in s after which another one may be."""


def born_ns() -> int | None:
    """Return when this process was started, in ns since the epoch. None if the system does not say."""
    try:
        # the 22nd field; the name of the process, which may hold anything, ends with the last bracket
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf(
            "SC_CLK_TCK"
        )
        return time.time_ns() - age_ns
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def boot() -> int | None:
    """Return a number of this boot of the machine. None if the system does not say."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text()
        return int(known.replace("-", "").strip()[:_BOOT_DIGITS], 16)
    except (OSError, ValueError):
        return None


def up_ns() -> int | None:
    """Return the time since this machine was booted, in ns, which nobody sets. None: no clock says it."""
    try:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return None


def ahead_ns(wall_ns: Callable[[], int], other_ns: Callable[[], int]) -> int:
    """
    Return by how much a clock is ahead of another one, in ns. If this thread has to wait between the two,
    they are read again.
    """
    best, error = 0, 1 << 62
    for _ in range(_MOST_READS):
        before, wall, after = other_ns(), wall_ns(), other_ns()
        if after - before < error:
            best, error = wall - before - (after - before) // 2, after - before
        if error < _READ_NS:
            break
    return best


class LifeReport(Collector):
    """
    Reports the life of one process.

    Args:
        recorder: knows the times of rows and spans.
        errors: counts intervals that are lost.
        part_of_run_ns: see `Rank`.
        wall_ns: ns since the epoch.
        up_ns: ns since the machine was booted, or None.
    """

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        part_of_run_ns: int | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        up_ns: Callable[[], int | None] = up_ns,
    ) -> None:
        self._recorder, self._errors, self._wall_ns, self._up_ns = recorder, errors, wall_ns, up_ns
        self._boot = boot()
        self._wall: int | None = None
        """By how much the wall clock was ahead of the clock of the marks in the newest life."""
        self._part_of_run_ns, self._attached = part_of_run_ns, recorder.clock()
        self._born: int | None = None
        """When it attached and when the process was started, in ns on the clock of the marks."""
        self._lost = 0
        self._began: int | None = None
        self._due = self._sent = 0
        self._known: object = None
        """What the newest life was sent for."""

    @classmethod
    def of_rank(cls, rank: Rank) -> LifeReport:
        """Make the report of a rank."""
        return cls(rank.recorder, rank.errors, rank.part_of_run_ns)

    def install(self) -> None:
        """Read when the process was started. A process that was forked while it was watched is read anew."""
        born = born_ns()
        if born is not None and self._part_of_run_ns is not None:
            born = max(born, self._part_of_run_ns)
        if born is not None:
            # the wall clock may be set while the process runs: then both move with it, as all other times do
            self._born = born - ahead_ns(self._wall_ns, self._recorder.clock)
            self._attached = max(self._attached, self._born)

    def collect(self, final: bool) -> list[LifeInterval | Life]:
        """Return the intervals that are over, and the life if it has changed or is due."""
        times = self._recorder.span_times(final)
        if times is None:
            return []
        lost, self._lost = self._recorder.steps.times.lost - self._lost, self._recorder.steps.times.lost
        self._errors.count("intervals of checkpoints and evaluations lost: no room", lost)
        wall = ahead_ns(self._wall_ns, self._recorder.clock)
        booted = self._booted_ns() if times.over else None
        records: list[LifeInterval | Life] = [
            LifeInterval(
                span.number,
                _WHAT[span.name],
                span.began + wall,
                span.ended + wall,
                span.busy,
                span.count,
                _step_of(span),
                booted,
            )
            for span in times.over
        ]
        if self._is_due(times, final, bool(records), wall):
            records.append(self._life(times, wall, final))
        return records

    def _booted_ns(self) -> int | None:
        """Return when the machine was booted, by its wall clock as it is set now (ns)."""
        if self._up_ns() is None:
            return None
        return ahead_ns(self._wall_ns, lambda: self._up_ns() or 0)

    def _is_due(self, times: TimedNow, final: bool, over: bool, wall: int) -> bool:
        """
        Return whether to send the life now. Changes are sent at once (also that the wall clock was set), but
        not more often than `_AT_ONCE` allows.
        """
        now = times.now
        self._began = began = now if self._began is None else self._began
        known = times.first_row is None, [(span.number, span.over, span.count) for span in times.pending]
        allowed = self._sent < _AT_ONCE + (now - began) / (_AT_ONCE_EVERY_S * 1e9)
        changed = over or known != self._known
        changed = changed or (self._wall is not None and abs(wall - self._wall) > _SET_NS)
        if not (final or now >= self._due or (changed and allowed)):
            return False
        self._wall = wall
        passed_s = (now - began) / 1e9
        gap_s = min(_LONGEST_S, max(_FIRST_S, min(_SOON_S, _SOON * passed_s), _LATER * passed_s))
        self._due, self._known, self._sent = now + int(gap_s * 1e9), known, self._sent + 1
        return True

    def _life(self, times: TimedNow, wall: int, final: bool) -> Life:
        first, last = times.first_row, times.last_row
        return Life(
            times.now + wall,
            self._attached + wall,
            None if self._born is None else self._born + wall,
            None if first is None else first[0] + wall,
            None if first is None else first[1] + wall,
            None if last is None else last + wall,
            times.step,
            times.now + wall if final else None,
            [_pending(span, times.now) for span in times.pending],
            None if first is None else times.first_data,
            self._booted_ns(),
            self._boot,
        )


def _pending(span: TimedSpan, now: int) -> OpenInterval:
    ended_ago = now - span.ended if span.over else None
    return OpenInterval(
        span.number, _WHAT[span.name], now - span.began, ended_ago, span.busy, span.count, _step_of(span)
    )


def _step_of(span: TimedSpan) -> int | None:
    """Return the step that a span is about. What a wait is for was begun in an earlier step."""
    return None if span.name == CHECKPOINT_WAIT_SPAN else span.step
