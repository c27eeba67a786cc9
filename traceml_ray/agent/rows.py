"""
Rows of a step: how one is filled, the row that a backward has left pending, and what closes it.

At every moment the training thread is in exactly one stage, and in some spans. A mark moves the time since
the mark before into the stage (`Partition`). So the times are a partition, whatever order the marks come in.
`OpenSpans` has which spans are open, which are over, and what each took of the open row; `StepSpans` makes
those that follow from the marks of a step: its optimizer, evaluations, and what a wait for data was.
`DataWaits` has which waits for data feed training: those of loaders waited for on the way to a backward.

An optimizer step closes a row; another backward without one in between takes it back in (gradient
accumulation), or, where it has exchanged gradients, makes it a segment of the step. So is the row of another
optimizer that steps in the same iteration.

Which optimizer steps are one iteration of the training loop, and so one step of a row's key (`Iterations`):

Where a script takes batches from a loader, an iteration begins with a batch. An optimizer that steps without
a new one, and has not stepped since the iteration began, goes on with it: the generator after the
discriminator, the actor after the critic. One that steps again without a new batch begins another iteration,
unless that is how the loop began: several steps on each batch. Without a loader each optimizer step is one.

All of this follows from the order of calls, which is the same on all ranks, and never from time. It is
settled in the first iterations, so that what one rank does alone later (an evaluation) changes nothing.
"""

from __future__ import annotations

from traceml_ray.agent.device import NO_EVENT, Cut, Cuts, DeviceClock, without_forward
from traceml_ray.agent.marks import COLLATE, EVALUATION, FETCH, OPTIMIZER, WORKERS, SpanSums
from traceml_ray.agent.ring import StepRing
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
"""Optimizer steps of one iteration at most."""
_FED_WITHIN = 8
"""Optimizer steps within which a script has taken a batch from a loader, if it takes any."""
_LEARNED_FROM, _TWICE = 16, 2
"""Batches from which it is learned how often optimizers step on one, and how many of them must show it."""


class Iterations:
    """Of one process, under the lock of the log. Optimizers are told apart by a number."""

    __slots__ = (
        *("_batches", "_fed", "_learned", "_on_batch", "_repeated", "_since_start", "_stepped"),
        *("_steps", "_usual", "has_batch"),
    )

    def __init__(self) -> None:
        self._since_start = 0
        """Optimizer steps so far, counted up to `_FED_WITHIN`."""
        self._fed = False
        """The script takes batches from a loader."""
        self._batches = self._repeated = self._learned = 0
        """Batches that are over; those with several optimizer steps; the most of these."""
        self._usual = 1
        """Optimizer steps of the iteration before."""
        self.forget()

    def forget(self) -> None:
        """Forget the open iteration; the next row begins one."""
        self.has_batch = False
        """A batch was taken for the open row."""
        self._on_batch = self._steps = 0
        """Optimizer steps since the newest batch, and of this iteration."""
        self._stepped: set[int] = set()
        """The optimizers of this iteration."""

    def goes_on(self, optimizer: int) -> bool:
        """Return whether the row that a step of `optimizer` closes belongs to the iteration before it."""
        if self.has_batch or not self._fed or not 0 < self._steps < MOST_STEPS:
            return False
        return optimizer not in self._stepped or (self._repeated >= _TWICE and self._on_batch < self._learned)

    def may_go_on(self) -> bool:
        """Return whether the open row may, where its optimizer has yet to step: of the first batch."""
        return self._fed and not self.has_batch and not self._batches and 0 < self._steps < MOST_STEPS

    def closed(self, optimizer: int, goes_on: bool) -> bool:
        """Note that a row is closed; return whether another one of this iteration is expected."""
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
        """Note how many optimizer steps the batch that is over had."""
        if self._on_batch and self._batches < _LEARNED_FROM:
            self._batches += 1
            if 1 < self._on_batch <= MOST_STEPS:
                self._repeated += 1
                self._learned = max(self._learned, self._on_batch)


MAX_SEGMENT = (1 << SEGMENT_BITS) - 1
_NEVER = 1 << 62
"""A step that no run reaches."""


class SlowedSteps:
    """
    Steps that the monitor itself makes longer: FLOPs are counted, or torch's profiler is on. No statistic has
    their rows. Any thread may change it.
    """

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}
        """The first and the last step, by what makes them longer."""

    def begin(self, why: str, step: int, most: int = _NEVER) -> None:
        """Note that steps are longer because of `why`, from `step` to at most `most`."""
        self._ranges[why] = step, most

    def end(self, why: str, step: int) -> None:
        """Note that `step` is the last of these; nothing where there was no `begin`."""
        if why in self._ranges:
            self._ranges[why] = self._ranges[why][0], step

    def __contains__(self, step: int) -> bool:
        if not self._ranges:
            return False
        # `tuple` copies the values at once, while other threads may add some.
        return any(first <= step <= last for first, last in tuple(self._ranges.values()))


class RowBuilder:
    """Numbers the rows of one process and puts those that are whole into the ring."""

    __slots__ = (
        *("_begun", "_first_step", "_iterations", "_newest", "cuts", "depth", "device", "exchange_ns"),
        *("first", "flags", "goes_on", "pending", "ring", "segment", "slowed", "step", "stepped", "synced"),
    )

    def __init__(self, ring: StepRing) -> None:
        self.ring = ring
        self.device: DeviceClock | None = None
        """What rows pass through on their way into the ring, where a device's clock is read."""
        self.step = self.segment = 0
        self.slowed = SlowedSteps()
        self._iterations = Iterations()
        self.goes_on = False
        """An optimizer has stepped, and more rows of that step are expected: `step` is that step still."""
        self._begun = self._newest = (0, 0)
        """Step and segment of the first row since an optimizer has stepped, and of the newest before."""
        self.forget()

    def forget(self) -> None:
        """Forget the open row; the next one is a first row again."""
        self.pending: list[int] | None = None
        """Time in each stage up to the end of the last backward, in ns. None if no row is pending."""
        self.cuts: list[Cut] = []
        """The pending row as cuts between events."""
        self.flags = 0
        self.synced = False
        """That backward has exchanged gradients."""
        self.exchange_ns: int | None = None
        """
        How long that took of the pending `sync_wait`, where the rest was for ranks that do other work: such a
        row becomes two, of which only the second one ends in an exchange.
        """
        self.stepped = False
        """An optimizer has taken a step since."""
        self.first, self._first_step = True, -1
        """The row that comes out next is the first one; the step of the first row."""
        self.depth = 0
        """How many backwards the training thread is in."""
        self._iterations.forget()
        if self.goes_on:
            self._begin_step()

    def set_pending(self, taken: tuple[list[int], list[Cut]], flags: int, synced: bool) -> None:
        """Leave a row pending."""
        (self.pending, self.cuts), self.flags, self.synced, self.stepped = taken, flags, synced, False
        self.exchange_ns = None

    def reopen(self) -> tuple[list[int], list[Cut]]:
        """Return times and cuts of the pending row, which goes on."""
        times, self.pending = self.pending, None
        cuts, self.cuts = self.cuts, []
        assert times is not None
        return times, cuts

    def extend(self, times: list[int], cuts: list[Cut]) -> None:
        """Add what was taken after its backward to the pending row."""
        assert self.pending is not None
        self.pending = [a + b for a, b in zip(self.pending, times, strict=True)]
        self.cuts = self.cuts + cuts

    def infer(self, inseparable: bool) -> None:
        """Take the end of the pending row for an exchange; all its waits were seen, so it has a split."""
        self.synced = True
        self.flags &= ~(FLAG_NO_PEERS | FLAG_NO_SPLIT)
        if inseparable:
            self.flags |= FLAG_INSEPARABLE

    def close_segment(self) -> None:
        """Close the pending row; the step goes on."""
        if not self.goes_on and self._is_unplaced and self._iterations.may_go_on():
            self._replace(True)
        self._emit()
        self.segment = min(self.segment + 1, MAX_SEGMENT)

    def note_batch(self) -> None:
        """Note that a batch was taken for the open row: it is of another step than the row before."""
        self._iterations.has_batch = True
        if self.goes_on and self._is_unplaced:
            self._begin_step()

    def close_step(self, optimizer: int = 0, *, traced: bool = False) -> None:
        """
        Close the pending row: `optimizer` (a number, 0: not known) steps. A step is counted, unless more of
        its rows are expected. With `traced` the script has said that a step is over.
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
        """Whether no row has come out since an optimizer has stepped."""
        return (self.step, self.segment) == self._begun

    def _begin_step(self) -> None:
        self.step, self.segment, self.goes_on = self.step + 1, 0, False
        self._begun = self.step, 0

    def _replace(self, goes_on: bool) -> None:
        """Put the pending row elsewhere than was expected, unless rows have come out there."""
        step, segment = self._newest
        if not self._is_unplaced:
            return
        if not goes_on:
            self._begin_step()
        elif self.step == step + 1:  # else a framework has counted
            self.step, self.segment, self.goes_on = step, min(segment + 1, MAX_SEGMENT), True

    def number(self, done: int) -> None:
        """Say how many steps are done; the numbers of rows only grow."""
        if self.pending is None and done > self.step:
            self.step, self.segment, self.goes_on = done, 0, False

    def skip(self, lost: int) -> None:
        """Count rows that were never made, each as a step."""
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
            row[POST_SYNC] = 0  # there was no sync before: a first row starts at its first data wait
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
