"""Spans on their way: which are open, which are over, and what each took of the open row."""

from __future__ import annotations

from traceml_ray.agent.span_sums import SpanSums
from traceml_ray.stages import BACKWARD, DATA, FORWARD, N_STAGES, POST_SYNC, PREPARE

_MAX_OPEN = 32
_MAX_CLOSED = 1024


class Span:
    """A named span: the stage it began in, and its time (ns) in each stage since the row began."""

    __slots__ = ("began", "foreign_ns", "number", "paused", "size", "stage", "times")

    def __init__(self, number: int, stage: int, began: int) -> None:
        self.number, self.stage, self.began = number, stage, began
        self.size = self.foreign_ns = 0
        self.times = [0] * N_STAGES
        self.paused = False
        """What happens now is not part of it."""

    def fold(self) -> None:
        """See `Partition.fold`."""
        times = self.times
        times[POST_SYNC] += self.foreign_ns + times[PREPARE] + times[FORWARD]
        times[DATA] -= self.foreign_ns
        self.foreign_ns = times[PREPARE] = times[FORWARD] = 0
        if self.stage in (PREPARE, FORWARD):
            self.stage = POST_SYNC


class OpenSpans:
    """
    The spans of the open row. Those in `open` are in the order in which they began; those in `over` wait to
    be added to `sums`: until a backward has ended their row, the time that they are in may yet be folded.
    """

    __slots__ = ("_since", "lost", "open", "over", "sums")

    def __init__(self, sums: SpanSums) -> None:
        self.sums = sums
        self.open: list[Span] = []
        self.over: list[Span] = []
        self.lost = 0
        """Those that were open when too many others began."""
        self._since = 0

    def forget(self) -> None:
        """Forget the open row."""
        self.open, self.over, self._since = [], [], 0

    def fold(self) -> None:
        """See `Partition.fold`."""
        for span in (*self.open, *self.over):
            span.fold()

    def spread(self, stage: int, now: int) -> None:
        """Count the time since the mark before, which was in `stage`, in every span that is open."""
        for span in self.running():
            span.times[stage] += now - self._since
        self._since = now

    def running(self) -> list[Span]:
        """Return those that time goes to, the innermost last."""
        return [span for span in self.open if not span.paused]

    def begin(self, number: int, stage: int, now: int) -> Span:
        """Begin a span of this number (see `SpanSums`)."""
        self.spread(stage, now)
        span = Span(number, stage, now)
        self.open.append(span)
        if len(self.open) > _MAX_OPEN:  # the oldest was never ended
            del self.open[0]
            self.lost += 1
        return span

    def end(self, span: Span, stage: int, now: int) -> bool:
        """End `span`. True when so many are over that they have to be handed out."""
        self.spread(stage, now)
        if span in self.open:
            self.open.remove(span)
            if all(other.number != span.number for other in self.open):  # not inside one of the same name
                self.over.append(span)
        return len(self.over) > _MAX_CLOSED

    def drop(self, span: Span | None) -> None:
        """Count nothing for a span that never ended."""
        if span in self.open:
            self.open.remove(span)

    def innermost_ns(self, now: int) -> int | None:
        """Return how long the innermost one has been open in this row, None where there is none."""
        running = self.running()
        return sum(running[-1].times) + max(0, now - self._since) if running else None

    def cut(self, step: int, apart: bool) -> None:
        """Count what open spans took of a row that ends; of those of one name the outermost."""
        seen = set()
        for span in self.open:
            if span.number not in seen and any(span.times):
                self._hand_out(span, step, apart)
            seen.add(span.number)
            span.times, span.foreign_ns = [0] * N_STAGES, 0

    def extend(self, step: int, apart: bool) -> None:
        """End the row now: what was after its backward belongs to that (see `Rows.extend`)."""
        for span in (*self.open, *self.over):
            span.times[BACKWARD] += span.times[POST_SYNC]
            span.times[POST_SYNC] = 0
        self.cut(step, apart)
        self.hand_out(step, apart)

    def hand_out(self, step: int, apart: bool) -> None:
        """Add those that are over to `sums`, as of `step`; `apart`: each by itself."""
        for span in self.over:
            self._hand_out(span, step, apart)
        self.over = []

    def _hand_out(self, span: Span, step: int, apart: bool) -> None:
        """Add what it took of the open row; it counts once in each stage it was in."""
        name, group = self.sums.names[span.number], self.sums.groups[span.number]
        for stage, ns in enumerate(span.times):
            if ns:
                self.sums.add(name, stage, step, ns, span.size, apart, group)
                span.size = 0
        if not any(span.times):
            self.sums.add(name, span.stage, step, 0, span.size, apart, group)
