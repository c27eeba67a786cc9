"""
The switch: at every moment the training thread is in exactly one stage.

A mark moves the time since the mark before into that stage. So the times are a partition, whatever order the
marks come in.
"""

from __future__ import annotations

from traceml_ray.agent.cuts import NO_EVENT, Cut, Cuts
from traceml_ray.agent.open_spans import OpenSpans
from traceml_ray.stages import DATA, FORWARD, N_STAGES, POST_SYNC, PREPARE


class Partition:
    """
    The open row: time (ns) per stage, and in the spans inside them, since the last sync exit.

    Where a device's clock is read, `cuts` is the same row by the events at its marks; else None.
    """

    __slots__ = ("cuts", "event", "foreign_ns", "last", "spans", "stage", "times")

    def __init__(self, spans: OpenSpans, now: int) -> None:
        self.spans = spans
        self.cuts: Cuts | None = None
        self.event = NO_EVENT
        """The number of the event that was recorded at the mark that is being understood."""
        self.forget(now)

    def forget(self, now: int) -> None:
        """Begin a row now, with nothing in it."""
        self.times = [0] * N_STAGES
        self.foreign_ns = 0
        """Of the time in `data`, what was waited for loaders that do not feed training."""
        self.stage, self.last = POST_SYNC, now
        self.spans.forget()
        if self.cuts is not None:
            self.cuts = Cuts()

    def to(self, stage: int, now: int) -> None:
        """Be in `stage` from `now` on."""
        if self.spans.open:
            self.spans.spread(self.stage, now)
        self.times[self.stage] += now - self.last
        if self.cuts is not None:
            self.cuts.to(self.stage, self.event)
        self.last = now
        self.stage = stage

    def instead(self, stage: int, now: int) -> None:
        """Count the time since the last mark in `stage`, and stay in it."""
        self.stage = stage
        self.to(stage, now)

    def take(self) -> tuple[list[int], list[Cut]]:
        """Return times and cuts of the row that ends with the last mark, and begin another one."""
        times, self.times, self.foreign_ns = self.times, [0] * N_STAGES, 0
        return times, self.cuts.take() if self.cuts is not None else []

    def foreign(self, since: int, now: int) -> None:
        """The wait for data that has just ended was for a loader that does not feed training."""
        self.foreign_ns += now - since
        for span in self.spans.running():
            span.foreign_ns += now - max(since, span.began)
        if self.cuts is not None:
            self.cuts.foreign()

    def learn(self) -> None:
        """All waits of this row were for what feeds training."""
        self.foreign_ns = 0
        if self.cuts is not None:
            self.cuts.learn()

    def fold(self, now: int) -> int:
        """
        Count what ran since sync exit, with the foreign waits for data, as `post_sync`: it was not for this
        step, but for something else (an evaluation). Return how long that took.
        """
        self.to(POST_SYNC, now)
        self.spans.fold()
        times = self.times
        folded = self.foreign_ns + times[PREPARE] + times[FORWARD]
        times[POST_SYNC] += folded
        times[DATA] -= self.foreign_ns
        self.foreign_ns = times[PREPARE] = times[FORWARD] = 0
        if self.cuts is not None:
            self.cuts.fold()
        return folded
