"""Sends the life of a rank process: its birth, its first and newest step, checkpoints and evaluations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from traceml_ray.agent.marks import CHECKPOINT_SPAN, EVALUATION_SPAN, RESTORE_SPAN
from traceml_ray.agent.patch.checkpoint import BESIDE
from traceml_ray.agent.recorder import Recorder
from traceml_ray.agent.span_times import TimedNow, TimedSpan
from traceml_ray.agent.steps import PAUSE_SPAN
from traceml_ray.errors import Errors
from traceml_ray.signals.collector import Collector, Rank
from traceml_ray.signals.goodput.records import Life, LifeInterval, OpenInterval, What

_WHAT: dict[str, What] = {
    CHECKPOINT_SPAN: "checkpoint_save",
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


class LifeReport(Collector):
    """
    Reports the life of one process.

    Args:
        recorder: knows the times of rows and spans.
        errors: counts intervals that are lost.
        part_of_run_ns: see `Rank`.
        wall_ns: ns since the epoch.
    """

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        part_of_run_ns: int | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._recorder, self._errors, self._wall_ns = recorder, errors, wall_ns
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
            self._born = born - self._wall_ns() + self._recorder.clock()
            self._attached = max(self._attached, self._born)

    def collect(self, final: bool) -> list[LifeInterval | Life]:
        """Return the intervals that are over, and the life if it has changed or is due."""
        times = self._recorder.span_times(final)
        if times is None:
            return []
        lost, self._lost = self._recorder.steps.times.lost - self._lost, self._recorder.steps.times.lost
        self._errors.count("intervals of checkpoints and evaluations lost: no room", lost)
        wall = self._wall_ns() - times.now
        records: list[LifeInterval | Life] = [
            LifeInterval(
                span.number,
                _WHAT[span.name],
                span.began + wall,
                span.ended + wall,
                span.busy,
                span.count,
                span.step,
            )
            for span in times.over
        ]
        if self._is_due(times, final, bool(records)):
            records.append(self._life(times, wall, final))
        return records

    def _is_due(self, times: TimedNow, final: bool, over: bool) -> bool:
        """
        Return whether to send the life now. Changes are sent at once, but not more often than `_AT_ONCE`
        allows.
        """
        now = times.now
        self._began = began = now if self._began is None else self._began
        known = times.first_row is None, [(span.number, span.over, span.count) for span in times.pending]
        allowed = self._sent < _AT_ONCE + (now - began) / (_AT_ONCE_EVERY_S * 1e9)
        if not (final or now >= self._due or ((over or known != self._known) and allowed)):
            return False
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
        )


def _pending(span: TimedSpan, now: int) -> OpenInterval:
    ended_ago = now - span.ended if span.over else None
    return OpenInterval(
        span.number, _WHAT[span.name], now - span.began, ended_ago, span.busy, span.count, span.step
    )
