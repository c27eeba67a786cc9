"""
Builds the rows of steps: how a row is filled, when it is pending after a backward, and what closes it.

At every moment the training thread is in exactly one stage, and in any number of spans. A mark adds the time
since the mark before to the stage (`Partition`). So the times are a partition, whatever the order of the
marks. `OpenSpans` keeps the open spans, the spans that are over, and the time of each in the open row.
`StepSpans` makes the spans that are derived from the marks of a step: its optimizer, evaluations, and the
parts of a wait for data. `DataWaits` decides which waits for data feed training: those of loaders waited for
before a backward.

An optimizer step closes a row. Another backward without an optimizer step in between reopens the row
(gradient accumulation). If the row has exchanged gradients, it becomes a segment of the step instead. The row
of another optimizer that steps in the same iteration is a segment, too.

`Iterations` decides which optimizer steps belong to one iteration of the training loop, and so to one step of
a row's key:

If a script takes batches from a loader, an iteration begins with a batch. An optimizer that steps without a
new batch, and has not stepped in this iteration, continues it: the generator after the discriminator, the
actor after the critic. An optimizer that steps again without a new batch begins another iteration, unless the
loop began like that: several steps on each batch. Without a loader each optimizer step is one iteration.

All of this follows from the order of calls, which is the same on all ranks, and never from time. It is
decided in the first iterations, so a later action of a single rank (an evaluation) does not change it.
"""

from __future__ import annotations

from traceml_ray.agent.device import NO_EVENT, Cut, Cuts, DeviceClock, without_forward
from traceml_ray.agent.marks import COLLATE, EVALUATION, FETCH, OPTIMIZER, STARTED, TIMED, WORKERS, SpanSums
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.span_times import TimedSpans
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    N_STAGES,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
    SYNC_WAIT,
)

MOST_STEPS = 8
"""Largest number of optimizer steps in one iteration."""
_FED_WITHIN = 8
"""If a script takes batches from a loader, it does so within this number of optimizer steps."""
_LEARNED_FROM, _TWICE = 16, 2
"""
Number of batches after which the usual number of optimizer steps per batch is learned, and how many of them
must show it.
"""


class Iterations:
    """
    Iterations of one process. The caller holds the lock of the log. Optimizers are identified
    by a number.
    """

    __slots__ = (
        *("_batches", "_fed", "_learned", "_on_batch", "_repeated", "_since_start", "_stepped"),
        *("_steps", "_usual", "has_batch"),
    )

    def __init__(self) -> None:
        self._since_start = 0
        """Number of optimizer steps so far, counted up to `_FED_WITHIN`."""
        self._fed = False
        """Whether the script takes batches from a loader."""
        self._batches = self._repeated = self._learned = 0
        """
        Number of batches that are over; of those with several optimizer steps; and the largest number of
        steps among these.
        """
        self._usual = 1
        """Number of optimizer steps in the iteration before."""
        self.forget()

    def forget(self) -> None:
        """Forget the open iteration. The next row begins one."""
        self.has_batch = False
        """Whether a batch was taken for the open row."""
        self._on_batch = self._steps = 0
        """Number of optimizer steps since the newest batch, and in this iteration."""
        self._stepped: set[int] = set()
        """The optimizers that have stepped in this iteration."""

    def goes_on(self, optimizer: int) -> bool:
        """
        Return whether the row that a step of `optimizer` closes belongs to the same iteration as the row
        before.
        """
        if self.has_batch or not self._fed or not 0 < self._steps < MOST_STEPS:
            return False
        return optimizer not in self._stepped or (self._repeated >= _TWICE and self._on_batch < self._learned)

    def may_go_on(self) -> bool:
        """
        Return whether the open row may continue the iteration before, while its optimizer has not stepped.

        Only a row on the first batch may.
        """
        return self._fed and not self.has_batch and not self._batches and 0 < self._steps < MOST_STEPS

    def closed(self, optimizer: int, goes_on: bool) -> bool:
        """Record that a row is closed. Return whether another row of this iteration is expected."""
        if self._since_start < _FED_WITHIN:
            self._since_start += 1
            self._fed = self._fed or self.has_batch
        if self.has_batch:
            self._note_batch()
            self._on_batch = 0
        if not goes_on:
            self._usual = max(1, self._steps)
            self._steps = 0
            self._stepped.clear()
        self._on_batch += 1
        self._steps += 1
        self._stepped.add(optimizer)
        self.has_batch = False
        return self._fed and self._steps < self._usual

    def _note_batch(self) -> None:
        """Record the number of optimizer steps on the batch that is over."""
        if self._on_batch and self._batches < _LEARNED_FROM:
            self._batches += 1
            if 1 < self._on_batch <= MOST_STEPS:
                self._repeated += 1
                self._learned = max(self._learned, self._on_batch)


MAX_SEGMENT = (1 << SEGMENT_BITS) - 1
_NEVER = 1 << 62
"""A step number that no run reaches."""


class SlowedSteps:
    """
    Steps that the monitor itself slows: FLOPs are counted, or torch's profiler is on. Statistics exclude
    their rows. Any thread may change it.
    """

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}
        """Cause → (first slowed step, last slowed step)."""

    def begin(self, why: str, step: int, most: int = _NEVER) -> None:
        """Record that steps are slower because of `why`, from `step` to at most `most`."""
        self._ranges[why] = step, most

    def end(self, why: str, step: int) -> None:
        """Record that `step` is the last slowed step. Does nothing if there was no `begin`."""
        if why in self._ranges:
            self._ranges[why] = self._ranges[why][0], step

    def __contains__(self, step: int) -> bool:
        if not self._ranges:
            return False
        # `tuple` copies the values in one operation, while other threads may add some.
        return any(first <= step <= last for first, last in tuple(self._ranges.values()))


class RowBuilder:
    """Numbers the rows of one process and pushes complete rows into the ring."""

    __slots__ = (
        *(
            "_begun",
            "_first_step",
            "_iterations",
            "_newest",
            "cuts",
            "depth",
            "device",
            "ended",
            "exchange_ns",
        ),
        *(
            "first",
            "first_data",
            "first_row",
            "flags",
            "goes_on",
            "last_row",
            "lengths",
            "pending",
            "ring",
            "segment",
            "slowed",
            "step",
        ),
        *("stepped", "synced"),
    )

    def __init__(self, ring: StepRing) -> None:
        self.ring = ring
        self.device: DeviceClock | None = None
        """The device clock that rows pass through on their way into the ring. None if no device is read."""
        self.step = self.segment = 0
        self.slowed = SlowedSteps()
        self._iterations = Iterations()
        self.goes_on = False
        """
        Whether an optimizer has stepped and more rows of that step are expected. Then `step` is still that
        step.
        """
        self._begun = self._newest = (0, 0)
        """
        (step, segment) of the first row since an optimizer has stepped, and of the newest row
        before it.
        """
        self.ended = 0
        """When the pending row ended. Like the next ones, in ns on the clock of the marks."""
        self.first_row: tuple[int, int] | None = None
        """When the first row began, and when it ended."""
        self.first_data = 0
        """Part of the first row in which it waited for data, in ns."""
        self.last_row: int | None = None
        """When the newest complete row ended."""
        self.lengths = _NEVER, _NEVER
        """Time from the end of a row to the end of the next one, of the two newest ones, in ns."""
        self.forget()

    def forget(self) -> None:
        """Forget the open row. The next row is a first row again."""
        self.pending: list[int] | None = None
        """Time in each stage up to the end of the last backward, in ns. None if no row is pending."""
        self.cuts: list[Cut] = []
        """The cuts of the pending row."""
        self.flags = 0
        self.synced = False
        """Whether the last backward has exchanged gradients."""
        self.exchange_ns: int | None = None
        """
        Part of the pending `sync_wait` spent on the exchange, in ns, if the rest was a wait for ranks that do
        other work. Such a row is split into two; only the second ends in an exchange.
        """
        self.stepped = False
        """Whether an optimizer has taken a step since the last backward."""
        self.first, self._first_step = True, -1
        """Whether the next row is the first row; the step of the first row."""
        self.depth = 0
        """Number of nested backwards that the training thread is in."""
        self._iterations.forget()
        if self.goes_on:
            self._begin_step()

    def set_pending(self, taken: tuple[list[int], list[Cut]], flags: int, synced: bool, now: int) -> None:
        """Store a row that ends now as pending."""
        (self.pending, self.cuts), self.flags, self.synced, self.stepped = taken, flags, synced, False
        self.exchange_ns, self.ended = None, now

    def reopen(self) -> tuple[list[int], list[Cut]]:
        """Return the times and cuts of the pending row, which continues."""
        times, self.pending = self.pending, None
        cuts, self.cuts = self.cuts, []
        assert times is not None
        return times, cuts

    def extend(self, times: list[int], cuts: list[Cut], now: int) -> None:
        """Add times and cuts after its backward to the pending row, which ends now."""
        assert self.pending is not None
        self.ended = now
        self.pending = [a + b for a, b in zip(self.pending, times, strict=True)]
        self.cuts = self.cuts + cuts

    def infer(self, inseparable: bool) -> None:
        """
        Treat the end of the pending row as an exchange. All its waits were seen, so its waits are separated
        from work.
        """
        self.synced = True
        self.flags &= ~(FLAG_NO_PEERS | FLAG_NO_SPLIT)
        if inseparable:
            self.flags |= FLAG_INSEPARABLE

    def close_segment(self) -> None:
        """Close the pending row. The step continues."""
        if not self.goes_on and self._is_unplaced and self._iterations.may_go_on():
            self._replace(True)
        self._emit()
        self.segment = min(self.segment + 1, MAX_SEGMENT)

    def note_batch(self) -> None:
        """Record that a batch was taken for the open row: it belongs to another step than the row before."""
        self._iterations.has_batch = True
        if self.goes_on and self._is_unplaced:
            self._begin_step()

    def close_step(self, optimizer: int = 0, *, traced: bool = False) -> None:
        """
        Close the pending row because `optimizer` (a number, 0: unknown) steps. The step is counted unless
        more of its rows are expected. With `traced` the script has said that a step is over.
        """
        goes_on = not traced and self._iterations.goes_on(optimizer)
        if goes_on != self.goes_on:
            self._replace(goes_on)
        self._emit()
        self._newest = self.step, self.segment
        if traced:
            self._iterations.forget()
            self.goes_on = False
        else:
            self.goes_on = self._iterations.closed(optimizer, goes_on)
        if self.goes_on:
            self.segment = min(self.segment + 1, MAX_SEGMENT)
            self._begun = self.step, self.segment
        else:
            self._begin_step()

    @property
    def _is_unplaced(self) -> bool:
        """Return whether no row has been finished since an optimizer stepped."""
        return (self.step, self.segment) == self._begun

    def _begin_step(self) -> None:
        self.step, self.segment, self.goes_on = self.step + 1, 0, False
        self._begun = self.step, 0

    def _replace(self, goes_on: bool) -> None:
        """Move the pending row to another step than expected, unless rows of that step are finished."""
        step, segment = self._newest
        if not self._is_unplaced:
            return
        if not goes_on:
            self._begin_step()
        elif self.step == step + 1:  # otherwise a framework has set the count
            self.step, self.segment, self.goes_on = step, min(segment + 1, MAX_SEGMENT), True

    def number(self, done: int) -> None:
        """Set the number of steps done. The numbers of rows only grow."""
        if self.pending is None and done > self.step:
            self.step, self.segment, self.goes_on = done, 0, False

    def skip(self, lost: int) -> None:
        """Count rows that were never made, each as one step."""
        self.ring.dropped += lost
        self.step += lost

    def _emit(self) -> None:
        if self.step in self.slowed or self.step == self._first_step:
            self.flags |= FLAG_EXCLUDED
        (row, cuts), flags, exchange = self.reopen(), self.flags, None
        if self.exchange_ns is not None and not self.first:
            exchange = [*[0] * SYNC_WAIT, self.exchange_ns]
            row[SYNC_WAIT] -= self.exchange_ns
            flags |= FLAG_NO_PEERS
        if not row[DATA]:
            flags |= FLAG_NO_DATA
        if not row[FORWARD]:
            flags |= FLAG_NO_FORWARD
            row[FORWARD], row[PREPARE] = row[PREPARE], 0
            cuts = without_forward(cuts)
        if self.first:
            flags |= FLAG_EXCLUDED
            self.first, self._first_step = False, self.step
            # a first row starts at its first data wait, because there was no sync before it
            row[POST_SYNC] = 0
            if self.first_row is None:
                self.first_row, self.first_data = (self.ended - sum(row), self.ended), row[DATA]
        if self.last_row is not None:
            self.lengths = self.lengths[1], self.ended - self.last_row
        self.last_row = self.ended
        key = self.step << SEGMENT_BITS | self.segment
        if self.device is None:
            self.ring.push(key, flags, row)
        else:
            self.device.put(key, flags, row, cuts)
        if exchange is not None:
            self.segment = min(self.segment + 1, MAX_SEGMENT)
            self.ring.push(self.step << SEGMENT_BITS | self.segment, self.flags, exchange)


_MAX_OPEN = 32
_MAX_CLOSED = 1024


class Span:
    """A named span: the stage in which it began, and its time (ns) in each stage since the row began."""

    __slots__ = ("began", "foreign_ns", "number", "paused", "size", "stage", "times")

    def __init__(self, number: int, stage: int, began: int) -> None:
        self.number, self.stage, self.began = number, stage, began
        self.size = self.foreign_ns = 0
        self.times = [0] * N_STAGES
        self.paused = False
        """Whether the time of the span is currently not counted."""

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
    The spans of the open row.

    `open` holds the open spans in the order in which they began. `over` holds finished spans that wait to be
    added to `sums`: until a backward has ended their row, their time may still be reclassified.
    """

    __slots__ = ("_since", "lost", "open", "over", "sums")

    def __init__(self, sums: SpanSums) -> None:
        self.sums = sums
        self.open: list[Span] = []
        self.over: list[Span] = []
        self.lost = 0
        """Number of spans that were dropped while open, because too many others began."""
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
        """Return the spans whose time is counted, the innermost last."""
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
        """End `span`. Returns True if the finished spans must be added to `sums` now."""
        self.spread(stage, now)
        if span in self.open:
            self.open.remove(span)
            if all(other.number != span.number for other in self.open):  # not inside a span of the same name
                self.over.append(span)
        return len(self.over) > _MAX_CLOSED

    def drop(self, span: Span | None) -> None:
        """Discard a span that never ended."""
        if span in self.open:
            self.open.remove(span)

    def innermost_ns(self, now: int) -> int | None:
        """Return how long the innermost span has been open in this row, in ns. None if there is none."""
        running = self.running()
        return sum(running[-1].times) + max(0, now - self._since) if running else None

    def cut(self, step: int, apart: bool) -> None:
        """
        Count the time of open spans in a row that ends. Of spans with the same name, only the outermost
        counts.
        """
        seen = set()
        for span in self.open:
            if span.number not in seen and any(span.times):
                self._hand_out(span, step, apart)
            seen.add(span.number)
            span.times, span.foreign_ns = [0] * N_STAGES, 0

    def extend(self, step: int, apart: bool) -> None:
        """End the row now. Time after its backward belongs to it (see `RowBuilder.extend`)."""
        for span in (*self.open, *self.over):
            span.times[BACKWARD] += span.times[POST_SYNC]
            span.times[POST_SYNC] = 0
        self.cut(step, apart)
        self.hand_out(step, apart)

    def hand_out(self, step: int, apart: bool) -> None:
        """Add the finished spans to `sums`, for `step`. With `apart`, add each one separately."""
        for span in self.over:
            self._hand_out(span, step, apart)
        self.over = []

    def _hand_out(self, span: Span, step: int, apart: bool) -> None:
        """Add the time of a span in the open row. It counts once in each stage it was in."""
        name, group = self.sums.names[span.number], self.sums.groups[span.number]
        for stage, ns in enumerate(span.times):
            if ns:
                self.sums.add(name, stage, step, ns, span.size, apart, group)
                span.size = 0
        if not any(span.times):
            self.sums.add(name, span.stage, step, 0, span.size, apart, group)


class Partition:
    """
    The open row: time (ns) per stage since the last sync exit, and in the spans inside the stages.

    If a device's clock is read, `cuts` is the same row by the events at its marks, else None.
    """

    __slots__ = ("cuts", "event", "foreign_ns", "last", "spans", "stage", "times")

    def __init__(self, spans: OpenSpans, now: int) -> None:
        self.spans = spans
        self.cuts: Cuts | None = None
        self.event = NO_EVENT
        """Number of the event that was recorded at the mark being applied."""
        self.forget(now)

    def forget(self, now: int) -> None:
        """Begin an empty row at `now`."""
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
        """Count the time since the last mark as `stage`. The current stage does not change."""
        self.stage = stage
        self.to(stage, now)

    def pop(self) -> tuple[list[int], list[Cut]]:
        """Return times and cuts of the row that ends with the last mark, and begin a new row."""
        times, self.times, self.foreign_ns = self.times, [0] * N_STAGES, 0
        return times, self.cuts.pop() if self.cuts is not None else []

    def foreign(self, since: int, now: int) -> None:
        """Mark the data wait that just ended: its loader does not feed training."""
        self.foreign_ns += now - since
        for span in self.spans.running():
            span.foreign_ns += now - max(since, span.began)
        if self.cuts is not None:
            self.cuts.foreign()

    def commit(self) -> None:
        """Mark all data waits of this row: their loaders feed training."""
        self.foreign_ns = 0
        if self.cuts is not None:
            self.cuts.commit()

    def reclassify(self, now: int) -> int:
        """
        Count the time since sync exit, including data waits for foreign loaders, as `post_sync`. It was spent
        on something else (an evaluation), not on this step. Returns that time, in ns.
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
    """The open wait for data, and the loaders waited for since the last backward."""

    __slots__ = (
        *("before", "collated", "depth", "exhausted", "loader"),
        *("named", "resume", "training", "waited", "workers"),
    )

    def __init__(self) -> None:
        self.named = (0, 0)
        """(loader, number of its workers) of the next wait, if it is not the loader of the last wait."""
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
        """Stage that the wait interrupted, and stage that follows the wait."""
        self.waited.clear()
        self.exhausted = False
        """Whether a loader that feeds training was exhausted since the last backward."""

    def begin(self) -> bool:
        """Begin a wait. Returns False for a loader inside a loader."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.loader, self.workers = self.named
        self.collated = 0
        return True

    def interrupt(self, stage: int) -> None:
        """Record the stage in which the wait begins."""
        self.before = stage
        self.resume = FORWARD if stage == FORWARD else PREPARE

    def end(self) -> bool:
        """End a wait. Returns False for a loader inside a loader."""
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
    """Begins and ends spans in the open row, including those that a script names. Times are in ns."""

    __slots__ = (
        *("_evaluated", "_partition", "_rows", "_spans", "_timed"),
        *("evaluated", "evaluated_with", "evaluation", "optimizer", "times"),
    )

    def __init__(self, partition: Partition, rows: RowBuilder) -> None:
        self._partition = partition
        self._rows = rows
        self._spans = partition.spans
        self.times = TimedSpans()
        self.evaluated_with = 0
        """The loader that was waited for before the newest forward of an evaluation."""
        self.evaluated = 0
        """When a forward of the evaluation began, or its loader was exhausted, for the last time (ns)."""
        self.forget()

    def forget(self) -> None:
        """Forget the open row."""
        self.evaluation: Span | None = None
        self.optimizer: Span | None = None
        self._timed = False
        """Whether the open evaluation is between steps. Otherwise it is part of one: labels of a teacher."""
        self._evaluated = False
        """Whether an evaluation in this row has ended, added to the sums early or not."""

    def extend(self) -> None:
        """End the row now: see `OpenSpans.extend`."""
        self._evaluated = False
        self._spans.extend(self._rows.step, self._rows.first)

    def hand_out(self) -> None:
        """Add the time of spans in a row that ends: of those that are over, and of those that are open."""
        self._evaluated = False
        if self._spans.open:
            self._spans.cut(self._rows.step, self._rows.first)
        if self._spans.over:
            self._spans.hand_out(self._rows.step, self._rows.first)

    def begin(self, number: int, now: int) -> Span:
        """Begin a span of this number (see `SpanSums`)."""
        return self._spans.begin(number, self._partition.stage, now)

    def begin_named(self, number: int, now: int) -> None:
        """Begin a span that a script or a patch has named."""
        self.begin(number, now)
        if number in TIMED:
            self.times.begin(self._spans.sums.names[number], now, self._rows.step)

    def end(self, number: int, size: int, now: int) -> bool:
        """End the innermost span of this number that a script has named. Returns False if there is none."""
        for span in reversed(self._spans.open):
            if span.number == number and span not in (self.evaluation, self.optimizer):
                sums = self._spans.sums
                if sums.groups[number] is not None and not self._rows.first:
                    sums.add_call(number, self._rows.step, now - span.began, size)
                span.size = size & (STARTED - 1)
                self._end(span, now)
                if number in TIMED:
                    self.times.end(self._spans.sums.names[number], now)
                return True
        return False

    def _end(self, span: Span, now: int) -> None:
        if self._spans.end(span, self._partition.stage, now):
            self._spans.hand_out(self._rows.step, self._rows.first)

    def begin_evaluation(self, reclassified_ns: int, now: int) -> None:
        """
        Begin an evaluation. Its fetches took `reclassified_ns`, unless an earlier evaluation of the row
        includes them.
        """
        self.evaluated = now
        if self.evaluation is not None:
            return
        self.evaluation = self.begin(EVALUATION, now)
        self.evaluation.times[POST_SYNC] = fetches_ns = 0 if self._evaluated else reclassified_ns
        self._timed = self._partition.stage == POST_SYNC
        if self._timed:
            self.times.begin(self._spans.sums.names[EVALUATION], now - fetches_ns, self._rows.step)

    def end_evaluation(self, now: int) -> None:
        """End the evaluation, if there is one."""
        if self.evaluation is not None:
            self._end(self.evaluation, now)
            # before the first row other work may follow it: a summary of the model is printed, then data load
            self._end_time(now if self._rows.last_row is not None else self.evaluated)
            self.evaluation = None
            self._evaluated = True

    def end_training(self) -> None:
        """End the time of an evaluation with its newest mark: training is over, and other work may follow."""
        self._end_time(self.evaluated)

    def _end_time(self, now: int) -> None:
        if self._timed:
            self._timed = False
            self.times.end(self._spans.sums.names[EVALUATION], now)

    def begin_optimizer(self, now: int) -> None:
        """Begin an optimizer step. An announced step (`GradScaler`) that never began is discarded."""
        self.drop_optimizer()
        self.optimizer = self.begin(OPTIMIZER, now)

    def drop_optimizer(self) -> None:
        """Discard the open optimizer step."""
        self._spans.drop(self.optimizer)
        self.optimizer = None

    def pause_optimizer(self, paused: bool = True) -> None:
        """
        Pause or resume counting: the time of a closure, from its data or forward to the end of its backward,
        does not count.
        """
        if self.optimizer is not None:
            self.optimizer.paused = paused

    def end_optimizer(self, now: int) -> None:
        """End the optimizer step. A step that is still paused is discarded."""
        if self.optimizer is not None:
            if self.optimizer.paused:
                self._spans.drop(self.optimizer)
            else:
                self._end(self.optimizer, now)
            self.optimizer = None

    def waited(self, data: DataWaits, since: int, now: int) -> None:
        """Count a wait for data that feeds training: as waiting for workers, or as fetching and collating."""
        if data.workers:
            self._add(WORKERS, now - since)
        elif data.collated > since:
            self._add(FETCH, data.collated - since)
            self._add(COLLATE, now - data.collated)

    def _add(self, number: int, ns: int) -> None:
        sums = self._spans.sums
        sums.add(sums.names[number], DATA, self._rows.step, ns, 0, self._rows.first)
