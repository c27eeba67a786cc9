"""Spans that follow from the marks of a step: its optimizer, evaluations, and what a wait for data was."""

from __future__ import annotations

from traceml_ray.agent.data_waits import DataWaits
from traceml_ray.agent.open_spans import Span
from traceml_ray.agent.partition import Partition
from traceml_ray.agent.rows import Rows
from traceml_ray.agent.span_sums import COLLATE, EVALUATION, FETCH, OPTIMIZER, WORKERS
from traceml_ray.stages import DATA, POST_SYNC


class StepSpans:
    """Begins and ends spans in the open row, those that a script names among them; times are in ns."""

    __slots__ = ("_evaluated", "_partition", "_rows", "_spans", "evaluation", "optimizer")

    def __init__(self, partition: Partition, rows: Rows) -> None:
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

    def begin_evaluation(self, folded: int, now: int) -> None:
        """Begin an evaluation; its fetches took `folded` ns, unless one before it has had that time."""
        if self.evaluation is not None:
            return
        self.evaluation = self.begin(EVALUATION, now)
        self.evaluation.times[POST_SYNC] = 0 if self._evaluated else folded

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
