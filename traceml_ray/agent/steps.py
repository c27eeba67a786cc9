"""
The state machine of a step: what marks mean, which stage the training thread is in, and when a row is
complete.

It also holds what is known about how this rank exchanges gradients with its peers. Rows end at sync exit: a
backward that ends leaves its row pending (see `rows`), and time after it already counts for the next row.
"""

from __future__ import annotations

from collections.abc import Callable

from traceml_ray.agent import marks
from traceml_ray.agent.batch_size import WorkSums
from traceml_ray.agent.device import Cut, Cuts, DeviceClock
from traceml_ray.agent.marks import SpanSums
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.rows import DataWaits, OpenSpans, Partition, RowBuilder, StepSpans
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_INSEPARABLE,
    FLAG_NO_BACKWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    POST_SYNC,
    PREPARE,
    SYNC_WAIT,
)
from traceml_ray.wire.messages import OpenStage

PAUSE_SPAN = "pause"
"""Name of a time between two steps in which nothing is known to happen, see `span_times`."""
PAUSE_NS = 1_000_000_000
"""Shortest such time in ns."""
STREAMED = "exchanged on a device"
"""Reason why waits are not seen: only the device's own clock shows them."""


class GradientExchange:
    """
    How this rank exchanges gradients. The patches of DDP, FSDP and others set it; it is read where rows are
    ended and flagged.
    """

    __slots__ = (
        *("_clocked", "_seen", "_sharded", "bracketed", "inseparable", "inferred", "on_device", "peers"),
        *("reasons", "roles", "several"),
    )

    def __init__(self) -> None:
        self.peers: Callable[[], bool] | None = None
        """Returns whether the backward that ends now exchanges gradients. None: there are no peers."""
        self.reasons: set[str] = set()
        """Reasons why waits for peers inside forward and backward cannot be separated from work."""
        self.inseparable = False
        """Whether waits inside forward and backward cannot be separated from work."""
        self.several = False
        """Whether some step has had, or may have had, several backwards that exchanged gradients."""
        self.inferred = False
        """
        Whether rows end where a reduction ended, because nothing else shows where gradients
        are exchanged.
        """
        self.on_device = False
        """Whether such a reduction ran on a device. Then its waits are not on the clock of the rows."""
        self.bracketed = 0
        """Number of functions whose waits on a device have marks."""
        self.roles = False
        """
        Whether ranks wait for others that do other work (stages of a pipeline, tensor-parallel ranks) and
        their rows show it. These waits are separated from the exchange of gradients.
        """
        self._seen: set[str] = set()
        self._sharded = False
        self._clocked = False

    def couple(self, reason: str) -> None:
        """Record why waits are not seen."""
        self.reasons.add(reason)
        self._decide()

    def see(self, reason: str) -> None:
        """Record why ranks wait for others that do other work, if the CPU's clock shows these waits."""
        self._seen.add(reason)
        self._decide()

    def shard(self) -> None:
        """
        Record that FSDP waits for this rank's peers inside forward and backward, too: there are two kinds of
        waits there.
        """
        self._sharded = True
        self._decide()

    def clock(self, on: bool) -> None:
        """Record whether rows are timed on the device's clock from now on."""
        self._clocked = on
        self._decide()

    def _decide(self) -> None:
        reasons = self.reasons - {STREAMED} if self._clocked else self.reasons
        self.inseparable = bool(reasons or (self._seen and (self._sharded or self._clocked)))
        self.roles = bool(self._seen) and not self.inseparable

    @property
    def streamed(self) -> bool:
        """Whether waits are on a device's streams, so that a row on the CPU's clock does not show them."""
        return STREAMED in self.reasons


class Steps:
    """The state machine of one process. `apply` processes its marks in order, under the lock of the log."""

    __slots__ = (
        *("_apart_ns", "_before_sync", "_data", "_exchange", "_own", "_reduced_inside", "_reduces_in_step"),
        *("_scaling", "_split", "_step_in_backward", "manual", "now", "optimizer", "partition"),
        *("rows", "size", "spans", "sums", "times", "work"),
    )

    def __init__(self, ring: StepRing, exchange: GradientExchange, now: int) -> None:
        self.sums = SpanSums()
        self.spans = OpenSpans(self.sums)
        self.partition = Partition(self.spans, now)
        self.rows = RowBuilder(ring)
        self.manual = False
        """Whether `trace_step` ends the steps, instead of the optimizer."""
        self._exchange = exchange
        self._data = DataWaits()
        self.work = WorkSums(self._data)
        self._own = StepSpans(self.partition, self.rows)
        self.times = self._own.times
        self._reduces_in_step = False
        """Whether the optimizer reduces gradients in its `step`."""
        self.optimizer = 0
        """Number of the optimizer that steps now or stepped last. 0 is unknown."""
        self.forget(now)

    def forget(self, now: int) -> None:
        """Forget the open row. The next row is a first row again."""
        self.now = now
        """Time of the mark that is being applied."""
        self.size = 0
        """
        Bytes that the span which ends next has moved; STARTED is added for a collective that
        was only started.
        """
        self.partition.forget(now)
        self.rows.forget()
        self._data.forget()
        self._own.forget()
        self.times.forget(now)
        self._split = self._reduced_inside = self._step_in_backward = False
        """
        State of the open backward: own gradients are done; a reduction ended in it; an optimizer stepped in
        it.
        """
        self._scaling = False
        """Whether a `GradScaler` step has begun and no optimizer has stepped in it yet."""
        self._before_sync: list[int] = []
        self._apart_ns = 0
        """
        Part of the open row's `sync_wait` that was over when this rank's own gradients were
        done, in ns.
        """

    def apply(self, mark: int, now: int) -> None:
        """Apply `mark`, made at the time `now`."""
        if now - self.now > PAUSE_NS:
            self._pause(now)
        self.now = now
        if mark < marks.SPANS:
            _MEANING[mark](self)
        else:
            self._span(mark)

    def _pause(self, now: int) -> None:
        """
        Record that nothing is known of the time since the last mark, if it was between two steps, and longer
        than both steps before. On a device the host may have waited for its queue, so it says nothing.
        """
        rows = self.rows
        between = self.partition.stage == POST_SYNC and not self.spans.open and rows.last_row is not None
        on_device = rows.device is not None or self._exchange.streamed or self._exchange.on_device
        if between and not on_device and now - self.now > 2 * min(rows.lengths):
            self.times.add(PAUSE_SPAN, self.now, now, rows.step)

    def _to(self, stage: int) -> None:
        self.partition.to(stage, self.now)

    # -- data ----------------------------------------------------------------------------------

    def wait_for(self, loader: int, workers: int) -> None:
        """Record what the next DATA_BEGIN waits for: the id of a loader and the number of its workers."""
        self._data.named = loader, workers

    def _data_begin(self) -> None:
        data = self._data
        if not data.begin():
            return
        if data.feeds_training():
            self._train_again()
        data.interrupt(self.partition.stage)
        self._to(DATA)
        self._own.pause_optimizer()

    def _train_again(self) -> None:
        """End the evaluation, if there was one. If the root was not called in it, its fetches show it."""
        reclassified_ns = 0 if self._data.waited <= self._data.training else self._reclassify()
        if reclassified_ns:
            self._own.begin_evaluation(reclassified_ns, self.now)
        self._own.end_evaluation(self.now)

    def _reclassify(self) -> int:
        self._data.waited &= self._data.training
        return self.partition.reclassify(self.now)

    def _data_end(self) -> None:
        data, since = self._data, self.partition.last
        if data.end():
            data.waited.add(data.loader)
            self._to(data.resume)
            if data.feeds_training():
                self._own.waited(data, since, self.now)
            else:
                self.partition.foreign(since, self.now)

    def _data_exhausted(self) -> None:
        """Cancel the wait: it does not belong to this step."""
        if self._data.end():
            if self._data.loader == self._own.evaluated_with:
                self._own.evaluated = self.now
            self._data.exhausted = self._data.exhausted or self._data.feeds_training()
            self.partition.reassign(self._data.before, self.now)

    def _collated(self) -> None:
        """The samples of a batch are ready. The rest of the wait collates them."""
        if self._data.depth == 1:
            self._data.collated = self.now

    # -- forward -------------------------------------------------------------------------------

    def _forward_begin(self) -> None:
        self._own.end_evaluation(self.now)
        if self.partition.stage != FORWARD:
            self._to(FORWARD)
        self._own.pause_optimizer()

    def _eval_mode_forward_begin(self) -> None:
        """
        Handle a forward of a module in eval mode with gradients. Frozen layers are trained like that, and
        some scripts evaluate so.

        It is not a forward of a step if the step's data has not arrived yet. If data of another loader has
        arrived, it is decided later what that data was for (see `_train_again`).
        """
        if self._data.training and self.rows.pending is None and not self.partition.times[DATA]:
            self._no_grad_forward_begin()
        else:
            self._forward_begin()

    def _no_grad_forward_begin(self) -> None:
        """Handle a forward without gradients: an evaluation, or a summary of the model that is printed."""
        self._own.evaluated_with = self._data.loader
        self._own.begin_evaluation(0 if self._data.feeds_training() else self._reclassify(), self.now)

    # -- backward ------------------------------------------------------------------------------

    def _backward_begin(self) -> None:
        self._own.end_evaluation(self.now)
        self._to(BACKWARD)
        if self._scaling:
            self._end_skipped()
        self.rows.depth = 1
        self._split = self._step_in_backward = self._reduced_inside = False
        if self.rows.pending is not None:
            self._reopen()
        if self._data.waited or self._data.exhausted:
            self._hold_batch()
        self._own.pause_optimizer()

    def _hold_batch(self) -> None:
        """
        Record a wait for a loader that feeds training, even for an exhausted one: a script may hold back one
        batch.
        """
        self.rows.note_batch()
        self._data.exhausted = False
        if self._data.waited:
            self.work.commit(self.rows.step)
            self.partition.commit()

    def _reopen(self) -> None:
        """
        Handle another backward before an optimizer step. A row that exchanged gradients is a segment; other
        rows continue.
        """
        if self.rows.synced:
            self._exchange.several = True
            self.rows.close_segment()
        else:
            pending, cuts = self.rows.reopen()
            self.partition.times = [a + b for a, b in zip(self.partition.times, pending, strict=True)]
            if self.partition.cuts is not None:
                self.partition.cuts.list[:0] = cuts

    def _gradients_done(self) -> None:
        """Count the rest of the backward as waiting."""
        if self.rows.depth:
            self._to(SYNC_WAIT)
            self._split = True
            if self._exchange.roles:
                self._apart_ns = self.partition.times[SYNC_WAIT]

    def _backward_end(self) -> None:
        if self._backward_over():
            self._end_row(synced=False)

    def _synced_backward_end(self) -> None:
        if self._backward_over():
            self._end_row(synced=True)

    def _backward_over(self) -> bool:
        """Handle the end of a backward. Returns whether it is the outermost one."""
        rows = self.rows
        if rows.depth != 1:
            rows.depth = max(0, rows.depth - 1)
            if rows.depth:
                self._to(BACKWARD)
            return False
        rows.depth = 0
        self._to(POST_SYNC)
        self._own.pause_optimizer(False)
        return True

    def _end_row(self, synced: bool) -> None:
        flags = 0 if synced else FLAG_NO_PEERS
        flags |= 0 if self._split else FLAG_NO_SPLIT
        apart = synced and self._exchange.roles
        if self._exchange.inseparable or (apart and not self._split):
            flags |= FLAG_INSEPARABLE
        exchange_ns = max(0, self.partition.times[SYNC_WAIT] - self._apart_ns)
        self._set_pending(flags, synced)
        self.rows.exchange_ns = exchange_ns if apart and self._split else None
        if self._reduced_inside:
            self._infer()
        if self._step_in_backward:
            self._close_step()

    def _set_pending(self, flags: int, synced: bool) -> None:
        self._own.hand_out()
        self.rows.set_pending(self.partition.pop(), flags, synced, self.now)

    # -- waits for peers, and inferred exchanges -----------------------------------------------------

    def _sync_begin(self) -> None:
        self._before_sync.append(self.partition.stage)
        self._to(SYNC_WAIT)

    def _sync_end(self) -> None:
        if self._before_sync:
            self._to(self._before_sync.pop())

    def _reduced(self) -> None:
        """
        Treat a reduction as the exchange of gradients if it is between a backward and the optimizer, or
        inside either.

        The pending row then ends here. If the optimizer reduces in its `step`, the row is closed when the
        step is over.
        """
        if self._exchange.peers is not None:
            return
        if self.rows.depth:
            self._reduced_inside = True
        elif self.rows.pending is None:
            optimizer = self._own.optimizer
            stepping = optimizer is not None and not optimizer.paused
            self._reduces_in_step = self._reduces_in_step or stepping
        elif not self.rows.stepped:
            self._extend()
            self._infer()

    def _extend(self) -> None:
        """
        Extend the pending row until now. Time that is not waiting is work on gradients, so it counts as
        `backward`.
        """
        self._to(self.partition.stage)
        times, cuts = self.partition.pop()
        times[BACKWARD] += times[POST_SYNC]
        times[POST_SYNC] = 0
        self.rows.extend(times, cuts, self.now)
        self._own.extend()

    def _infer(self) -> None:
        exchange = self._exchange
        exchange.inferred = True
        if exchange.on_device:
            exchange.couple("reduced on a device")
        self.rows.infer(exchange.on_device)

    # -- what closes a row -----------------------------------------------------------------------

    def step_in_backward(self) -> bool:
        """Record an optimizer step that begins now. Returns whether it is inside a backward."""
        self._step_in_backward = self._step_in_backward or self.rows.depth > 0
        return self.rows.depth > 0

    def _scaler_begin(self) -> None:
        self._optimizer_begin()
        self._scaling = True

    def _end_skipped(self) -> None:
        """
        Handle a GradScaler step that called no optimizer. If the optimizer is what exchanges gradients, the
        row is still pending.
        """
        self._scaling = False
        self._own.drop_optimizer()
        self._close_step()

    def _optimizer_begin(self) -> None:
        outermost = self._own.optimizer is None or self._scaling
        if not (self._reduces_in_step and outermost):
            self._close_step()
        if self.partition.stage != POST_SYNC:
            self._to(POST_SYNC)
        self._begin_optimizer()

    def _closure_begin(self) -> None:
        self._begin_optimizer()
        # the data of this step has arrived: the closure is what uses it
        if self.partition.stage != POST_SYNC:
            self._own.pause_optimizer()

    def _begin_optimizer(self) -> None:
        self._own.end_evaluation(self.now)
        self._scaling = False
        self._own.begin_optimizer(self.now)

    def _optimizer_end(self) -> None:
        """End an optimizer step. Backwards that ran inside it (LBFGS) belong to its row."""
        self._own.end_optimizer(self.now)
        self.rows.stepped = True
        if not self.rows.depth:
            self._close_step()

    def close_traced(self, now: int) -> None:
        """End a `trace_step`. Its last backward closes the row; without a backward the row ends here."""
        self.now, self.manual = now, False
        if self.rows.pending is None:
            self._to(POST_SYNC)
            self._set_pending(FLAG_NO_BACKWARD | FLAG_NO_PEERS, False)
        self.rows.close_step(traced=True)

    def _close_step(self) -> None:
        """Close the pending row, if there is one, unless `trace_step` closes rows."""
        if self.rows.pending is not None and not self.manual:
            self.rows.close_step(self.optimizer)

    # -- spans -----------------------------------------------------------------------------------

    def _span(self, mark: int) -> None:
        number, ends = divmod(mark - marks.SPANS, 2)
        if not ends:
            self._own.begin_named(number, self.now)
        elif self._own.end(number, self.size, self.now):
            self.size = 0

    def hand_out_tail(self) -> None:
        """Count the spans of the tail, which belongs to no row, each separately."""
        self._own.end_training()
        self.spans.hand_out(self.rows.step, apart=True)

    # -- on a device's clock -------------------------------------------------------------------------

    def _bracket_begin(self) -> None:
        if self.partition.cuts is not None:
            self.partition.cuts.sample()
        self._sync_begin()

    def use(self, device: DeviceClock | None) -> None:
        """Pass rows through `device` from now on. None: no longer."""
        self._exchange.clock(device is not None)
        self.rows.device, self.rows.cuts = device, []
        self.partition.cuts = None if device is None else Cuts()

    def open_cuts(self) -> list[Cut]:
        """Return the cuts of the row that is pending or open, with an empty cut at the newest mark."""
        cuts = self.partition.cuts
        return [] if cuts is None else [*self.rows.cuts, *cuts.list, Cut(POST_SYNC, cuts.last, cuts.last)]

    # -- now -------------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """
        The current step of the training thread. Between an optimizer step and the begin of the next step (its
        data, or its forward) this is the step before, also during an evaluation.
        """
        rows, part = self.rows, self.partition
        open_already = rows.pending is not None or rows.depth or rows.goes_on
        waits = part.stage == POST_SYNC and not any(
            part.times[stage] for stage in (DATA, PREPARE, FORWARD, BACKWARD)
        )
        if not open_already and (waits or self._own.evaluation is not None):
            return max(0, rows.step - 1)
        return rows.step

    def open_stage(self, now: int) -> OpenStage:
        """Return the stage that the training thread is in."""
        part = None if self._own.evaluation is None else "evaluation"
        open_ns = max(0, now - self.partition.last)
        return OpenStage(self.rows.step, self.partition.stage, open_ns, part, self.spans.innermost_ns(now))

    def tail_ns(self, now: int) -> int:
        """Return the time since the last sync exit, in ns. It belongs to no row."""
        return sum(self.partition.times) + max(0, now - self.partition.last)


_MEANING: dict[int, Callable[[Steps], object]] = {
    marks.DATA_BEGIN: Steps._data_begin,
    marks.DATA_END: Steps._data_end,
    marks.DATA_EXHAUSTED: Steps._data_exhausted,
    marks.FORWARD_BEGIN: Steps._forward_begin,
    marks.EVAL_MODE_FORWARD_BEGIN: Steps._eval_mode_forward_begin,
    marks.NO_GRAD_FORWARD_BEGIN: Steps._no_grad_forward_begin,
    marks.BACKWARD_BEGIN: Steps._backward_begin,
    marks.GRADIENTS_DONE: Steps._gradients_done,
    marks.BACKWARD_END: Steps._backward_end,
    marks.SYNCED_BACKWARD_END: Steps._synced_backward_end,
    marks.BACKWARD_FAILED: Steps._backward_over,
    marks.SYNC_BEGIN: Steps._sync_begin,
    marks.SYNC_END: Steps._sync_end,
    marks.OPTIMIZER_BEGIN: Steps._optimizer_begin,
    marks.SCALER_BEGIN: Steps._scaler_begin,
    marks.CLOSURE_BEGIN: Steps._closure_begin,
    marks.OPTIMIZER_END: Steps._optimizer_end,
    marks.REDUCED: Steps._reduced,
    marks.COLLATED: Steps._collated,
    marks.BRACKET_BEGIN: Steps._bracket_begin,
}
