"""
A row as it is filled: at every moment the training thread is in exactly one stage, and in some spans.

A mark moves the time since the mark before into the stage (`Partition`). So the times are a partition,
whatever order the marks come in. `OpenSpans` has which spans are open, which are over, and what each took of
the open row; `StepSpans` makes those that follow from the marks of a step: its optimizer, evaluations, and
what a wait for data was. `DataWaits` has which waits for data feed training: those of loaders waited for on
the way to a backward.
"""

from __future__ import annotations

from traceml_ray.agent.cuts import NO_EVENT, Cut, Cuts
from traceml_ray.agent.rows import RowBuilder
from traceml_ray.agent.span_sums import COLLATE, EVALUATION, FETCH, OPTIMIZER, WORKERS, SpanSums
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
        """Whether time is not counted for the span at present."""

    def reclassify(self) -> None:
        """See `Partition.reclassify`."""
        times = self.times
        times[POST_SYNC] += self.foreign_ns + times[PREPARE] + times[FORWARD]
        times[DATA] -= self.foreign_ns
        self.foreign_ns = times[PREPARE] = times[FORWARD] = 0
        if self.stage in (PREPARE, FORWARD):
            self.stage = POST_SYNC


class OpenSpans:
    """
    The spans of the open row. Those in `open` are in the order in which they began; those in `over` wait to
    be added to `sums`: until a backward has ended their row, their time may still be reclassified.
    """

    __slots__ = ("_since", "lost", "open", "over", "sums")

    def __init__(self, sums: SpanSums) -> None:
        self.sums = sums
        self.open: list[Span] = []
        self.over: list[Span] = []
        self.lost = 0
        """Number of spans that were open when too many others began."""
        self._since = 0

    def forget(self) -> None:
        """Forget the open row."""
        self.open, self.over, self._since = [], [], 0

    def reclassify(self) -> None:
        """See `Partition.reclassify`."""
        for span in (*self.open, *self.over):
            span.reclassify()

    def spread(self, stage: int, now: int) -> None:
        """Add the time since the last mark, which was in `stage`, to every open span."""
        for span in self.running():
            span.times[stage] += now - self._since
        self._since = now

    def running(self) -> list[Span]:
        """Return the spans that time is added to, the innermost last."""
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
        """End `span`. Return True if so many are over that they must be handed out."""
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
        """Return how long the innermost span has been open in this row, in ns. None if there is none."""
        running = self.running()
        return sum(running[-1].times) + max(0, now - self._since) if running else None

    def cut(self, step: int, apart: bool) -> None:
        """
        Count the time of open spans in a row that ends. Of spans with the same name, the
        outermost counts.
        """
        seen = set()
        for span in self.open:
            if span.number not in seen and any(span.times):
                self._hand_out(span, step, apart)
            seen.add(span.number)
            span.times, span.foreign_ns = [0] * N_STAGES, 0

    def extend(self, step: int, apart: bool) -> None:
        """End the row now: what was after its backward belongs to that (see `RowBuilder.extend`)."""
        for span in (*self.open, *self.over):
            span.times[BACKWARD] += span.times[POST_SYNC]
            span.times[POST_SYNC] = 0
        self.cut(step, apart)
        self.hand_out(step, apart)

    def hand_out(self, step: int, apart: bool) -> None:
        """Add the spans that are over to `sums`, for `step`. With `apart`, each one separately."""
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
        """Number of the event that was recorded at the mark being applied."""
        self.forget(now)

    def forget(self, now: int) -> None:
        """Begin an empty row now."""
        self.times = [0] * N_STAGES
        self.foreign_ns = 0
        """Part of the time in `data` that was spent waiting for loaders that do not feed training, in ns."""
        self.stage, self.last = POST_SYNC, now
        self.spans.forget()
        if self.cuts is not None:
            self.cuts = Cuts()

    def to(self, stage: int, now: int) -> None:
        """Enter `stage` at `now`."""
        if self.spans.open:
            self.spans.spread(self.stage, now)
        self.times[self.stage] += now - self.last
        if self.cuts is not None:
            self.cuts.to(self.stage, self.event)
        self.last = now
        self.stage = stage

    def reassign(self, stage: int, now: int) -> None:
        """Count the time since the last mark as `stage`, and stay in it."""
        self.stage = stage
        self.to(stage, now)

    def pop(self) -> tuple[list[int], list[Cut]]:
        """Return times and cuts of the row that ends with the last mark, and begin a new one."""
        times, self.times, self.foreign_ns = self.times, [0] * N_STAGES, 0
        return times, self.cuts.pop() if self.cuts is not None else []

    def foreign(self, since: int, now: int) -> None:
        """The data wait that just ended was for a loader that does not feed training."""
        self.foreign_ns += now - since
        for span in self.spans.running():
            span.foreign_ns += now - max(since, span.began)
        if self.cuts is not None:
            self.cuts.foreign()

    def commit(self) -> None:
        """All data waits of this row were for loaders that feed training."""
        self.foreign_ns = 0
        if self.cuts is not None:
            self.cuts.commit()

    def reclassify(self, now: int) -> int:
        """
        Count the time since sync exit, including data waits for foreign loaders, as `post_sync`: it was for
        something else (an evaluation), not for this step. Return that time, in ns.
        """
        self.to(POST_SYNC, now)
        self.spans.reclassify()
        times = self.times
        reclassified_ns = self.foreign_ns + times[PREPARE] + times[FORWARD]
        times[POST_SYNC] += reclassified_ns
        times[DATA] -= self.foreign_ns
        self.foreign_ns = times[PREPARE] = times[FORWARD] = 0
        if self.cuts is not None:
            self.cuts.reclassify()
        return reclassified_ns


class DataWaits:
    """The wait for data that is open, and the loaders waited for since the last backward."""

    __slots__ = (
        *("before", "collated", "depth", "exhausted", "loader"),
        *("named", "resume", "training", "waited", "workers"),
    )

    def __init__(self) -> None:
        self.named = (0, 0)
        """The next wait's (loader, its workers), if it is not the loader of the last wait."""
        self.training: set[int] = set()
        """Ids of the loaders that feed training."""
        self.waited: set[int] = set()
        """Loaders waited for since the last backward."""
        self.forget()

    def forget(self) -> None:
        """Forget the open row."""
        self.depth = 0
        """Number of nested loaders that are being waited for."""
        self.loader = self.workers = 0
        """The loader waited for last."""
        self.collated = 0
        """Time at which the samples of the batch were ready, if known."""
        self.before = self.resume = POST_SYNC
        """The stage that the wait interrupted, and the one that follows it."""
        self.waited.clear()
        self.exhausted = False
        """Whether a loader that feeds training was exhausted since the last backward."""

    def begin(self) -> bool:
        """Begin a wait; False for a loader inside a loader."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.loader, self.workers = self.named
        self.collated = 0
        return True

    def interrupt(self, stage: int) -> None:
        """Note the stage in which the wait begins."""
        self.before = stage
        self.resume = FORWARD if stage == FORWARD else PREPARE

    def end(self) -> bool:
        """End a wait; False for a loader inside a loader."""
        outermost = self.depth == 1
        self.depth = max(0, self.depth - 1)
        return outermost

    def feeds_training(self) -> bool:
        """Return whether the loader waited for last is known to feed training."""
        return self.loader in self.training

    def commit(self) -> None:
        """Mark the loaders waited for before this backward as those that feed training."""
        if self.waited != self.training:
            self.training = set(self.waited)
        self.waited.clear()


class StepSpans:
    """Begins and ends spans in the open row, those that a script names among them; times are in ns."""

    __slots__ = ("_evaluated", "_partition", "_rows", "_spans", "evaluation", "optimizer")

    def __init__(self, partition: Partition, rows: RowBuilder) -> None:
        self._partition = partition
        self._rows = rows
        self._spans = partition.spans
        self.forget()

    def forget(self) -> None:
        """Forget the open row."""
        self.evaluation: Span | None = None
        self.optimizer: Span | None = None
        self._evaluated = False
        """One of the row is over, handed out early or not."""

    def extend(self) -> None:
        """End the row now: see `OpenSpans.extend`."""
        self._evaluated = False
        self._spans.extend(self._rows.step, self._rows.first)

    def hand_out(self) -> None:
        """Count what spans took of a row that ends: those that are over, and those that are open."""
        self._evaluated = False
        if self._spans.open:
            self._spans.cut(self._rows.step, self._rows.first)
        if self._spans.over:
            self._spans.hand_out(self._rows.step, self._rows.first)

    def begin(self, number: int, now: int) -> Span:
        """Begin a span of this number (see `SpanSums`)."""
        return self._spans.begin(number, self._partition.stage, now)

    def end(self, number: int, size: int, now: int) -> bool:
        """End the innermost span of this number that a script has named; False where there is none."""
        for span in reversed(self._spans.open):
            if span.number == number and span not in (self.evaluation, self.optimizer):
                span.size = size
                self._end(span, now)
                return True
        return False

    def _end(self, span: Span, now: int) -> None:
        if self._spans.end(span, self._partition.stage, now):
            self._spans.hand_out(self._rows.step, self._rows.first)

    def begin_evaluation(self, reclassified_ns: int, now: int) -> None:
        """Begin an evaluation. Its fetches took `reclassified_ns`, unless an earlier one has had it."""
        if self.evaluation is not None:
            return
        self.evaluation = self.begin(EVALUATION, now)
        self.evaluation.times[POST_SYNC] = 0 if self._evaluated else reclassified_ns

    def end_evaluation(self, now: int) -> None:
        """End the evaluation, if there is one."""
        if self.evaluation is not None:
            self._end(self.evaluation, now)
            self.evaluation = None
            self._evaluated = True

    def begin_optimizer(self, now: int) -> None:
        """Begin an optimizer step; nothing counts of one that was announced (`GradScaler`) and never came."""
        self.drop_optimizer()
        self.optimizer = self.begin(OPTIMIZER, now)

    def drop_optimizer(self) -> None:
        """Count nothing for the optimizer step that is open."""
        self._spans.drop(self.optimizer)
        self.optimizer = None

    def pause_optimizer(self, paused: bool = True) -> None:
        """Count no time: a closure's, from its data or forward to the end of its backward."""
        if self.optimizer is not None:
            self.optimizer.paused = paused

    def end_optimizer(self, now: int) -> None:
        """End the optimizer step; of one that is still paused nothing counts."""
        if self.optimizer is not None:
            if self.optimizer.paused:
                self._spans.drop(self.optimizer)
            else:
                self._end(self.optimizer, now)
            self.optimizer = None

    def waited(self, data: DataWaits, since: int, now: int) -> None:
        """Count a wait for data that feeds training: for workers, or for fetching and collating."""
        if data.workers:
            self._add(WORKERS, now - since)
        elif data.collated > since:
            self._add(FETCH, data.collated - since)
            self._add(COLLATE, now - data.collated)

    def _add(self, number: int, ns: int) -> None:
        sums = self._spans.sums
        sums.add(sums.names[number], DATA, self._rows.step, ns, 0, self._rows.first)
