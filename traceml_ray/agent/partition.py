"""
The switch: at every moment the training thread is in exactly one stage.

A mark moves the time since the mark before into that stage. So the times are a partition, whatever order the
marks come in.
"""

from __future__ import annotations

from traceml_ray.agent.open_spans import OpenSpans
from traceml_ray.stages import DATA, FORWARD, N_STAGES, POST_SYNC, PREPARE


class Partition:
    """The open row: time (ns) per stage, and in the spans inside them, since the last sync exit."""

    __slots__ = ("last", "spans", "stage", "times")

    def __init__(self, spans: OpenSpans, now: int) -> None:
        self.spans = spans
        self.forget(now)

    def forget(self, now: int) -> None:
        """Begin a row now, with nothing in it."""
        self.times = [0] * N_STAGES
        self.stage, self.last = POST_SYNC, now
        self.spans.forget()

    def to(self, stage: int, now: int) -> None:
        """Be in `stage` from `now` on."""
        if self.spans.open:
            self.spans.spread(self.stage, now)
        self.times[self.stage] += now - self.last
        self.last = now
        self.stage = stage

    def instead(self, stage: int, now: int) -> None:
        """Count the time since the last mark in `stage`, and stay in it."""
        self.stage = stage
        self.to(stage, now)

    def take(self) -> list[int]:
        """Return the times of the row that ends with the last mark, and begin another one."""
        times, self.times = self.times, [0] * N_STAGES
        return times

    def fold(self, foreign_ns: int, now: int) -> int:
        """
        Count what ran since sync exit, with `foreign_ns` of waiting for data, as `post_sync`: it was not for
        this step, but for the fetches of something else (an evaluation). Return how long that took.
        """
        self.to(POST_SYNC, now)
        self.spans.fold()
        times = self.times
        folded = foreign_ns + times[PREPARE] + times[FORWARD]
        times[POST_SYNC] += folded
        times[DATA] -= foreign_ns
        times[PREPARE] = times[FORWARD] = 0
        return folded
