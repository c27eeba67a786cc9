"""
What marks mean: which stage the training thread is in, and when a row is whole; what is known of how this
rank exchanges gradients with its peers.

Rows are cut at sync exit: a backward that ends leaves its row pending (see `rows`), and what happens after
it already counts for the next row.
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

STREAMED = "exchanged on a device"
"""Why waits are not seen, where only the device's own clock shows them."""


class GradientExchange:
    """Set by the patches of DDP, FSDP and others; read where rows are cut and flagged."""

    __slots__ = (
        *("_clocked", "_seen", "_sharded", "bracketed", "inseparable", "inferred", "on_device", "peers"),
        *("reasons", "roles", "several"),
    )

    def __init__(self) -> None:
        self.peers: Callable[[], bool] | None = None
        """Whether the backward that ends now exchanges gradients. None: there are no peers."""
        self.reasons: set[str] = set()
        """Why waits for peers inside forward and backward cannot be told apart."""
        self.inseparable = False
        """Whether waits inside forward and backward cannot be told apart from work."""
        self.several = False
        """Whether some step has had several backwards that exchanged gradients, or may have."""
        self.inferred = False
        """
        Whether rows are cut where a reduction ended, because nothing else shows where gradients are
        exchanged.
        """
        self.on_device = False
        """Whether such a reduction ran on a device: then its waits are not on the clock of the rows."""
        self.bracketed = 0
        """Number of functions whose waits on a device have marks."""
        self.roles = False
        """
        Ranks wait for others that do other work (stages of a pipeline, tensor-parallel ranks), and their rows
        show it: these waits are told apart from the exchange of gradients.
        """
        self._seen: set[str] = set()
        self._sharded = False
        self._clocked = False

    def couple(self, reason: str) -> None:
        """Note why waits are not seen."""
        self.reasons.add(reason)
        self._decide()

    def see(self, reason: str) -> None:
        """Note why ranks wait for others that do other work, where the CPU's clock shows these waits."""
        self._seen.add(reason)
        self._decide()

    def shard(self) -> None:
        """FSDP waits for this rank's peers inside forward and backward, too: waits are of two kinds there."""
        self._sharded = True
        self._decide()

    def clock(self, on: bool) -> None:
        """Rows are taken from the device's clock from here on, or no longer."""
        self._clocked = on
        self._decide()

    def _decide(self) -> None:
        reasons = self.reasons - {STREAMED} if self._clocked else self.reasons
        self.inseparable = bool(reasons or (self._seen and (self._sharded or self._clocked)))
        self.roles = bool(self._seen) and not self.inseparable

    @property
    def streamed(self) -> bool:
        """Waits are on a device's streams, so a row on the CPU's clock does not show them."""
        return STREAMED in self.reasons


class Steps:
    """The state machine of one process; `apply` takes its marks in order, under the lock of the log."""

    __slots__ = (
        *("_apart_ns", "_before_sync", "_data", "_exchange", "_own", "_reduced_inside", "_reduces_in_step"),
        *("_scaling", "_split", "_step_in_backward", "manual", "now", "optimizer", "partition"),
        *("rows", "size", "spans", "sums", "work"),
    )

    def __init__(self, ring: StepRing, exchange: GradientExchange, now: int) -> None:
        self.sums = SpanSums()
        self.spans = OpenSpans(self.sums)
        self.partition = Partition(self.spans, now)
        self.rows = RowBuilder(ring)
        self.manual = False
        """Steps are cut by `trace_step`, not by the optimizer."""
        self._exchange = exchange
        self._data = DataWaits()
        self.work = WorkSums(self._data)
        self._own = StepSpans(self.partition, self.rows)
        self._reduces_in_step = False
        """The optimizer reduces gradients in its `step`."""
        self.optimizer = 0
        """A number of the optimizer that steps, or has last; 0 is not known."""
        self.forget(now)

    def forget(self, now: int) -> None:
        """Forget the open row; the next one is a first row again."""
        self.now = now
        """The time of the mark that is being understood."""
        self.size = 0
        """Bytes that the span which ends next has moved."""
        self.partition.forget(now)
        self.rows.forget()
        self._data.forget()
        self._own.forget()
        self._split = self._reduced_inside = self._step_in_backward = False
        """Of the backward that is open: own gradients are done, a reduction ended, an optimizer stepped."""
        self._scaling = False
        """A `GradScaler` step has begun, and no optimizer in it."""
        self._before_sync: list[int] = []
        self._apart_ns = 0
        """What of the open row's `sync_wait` was over when this rank's own gradients were done."""

    def apply(self, mark: int, now: int) -> None:
        """Do what `mark` means, at the time `now`."""
        self.now = now
        if mark < marks.SPANS:
            _MEANING[mark](self)
        else:
            self._span(mark)

    def _to(self, stage: int) -> None:
        self.partition.to(stage, self.now)

    # -- data ----------------------------------------------------------------------------------

    def wait_for(self, loader: int, workers: int) -> None:
        """Note whom the next DATA_BEGIN waits for: the id of a loader and the number of its workers."""
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
        """End the evaluation, if there was one; where the root was not called, its fetches show it."""
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
        """It was no wait of this step."""
        if self._data.end():
            self._data.exhausted = self._data.exhausted or self._data.feeds_training()
            self.partition.reassign(self._data.before, self.now)

    def _collated(self) -> None:
        """The samples of a batch are there; what follows inside the wait puts them together."""
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
        Of a module in eval mode, with gradients: frozen layers are trained like that, and some evaluate so.

        It is no forward of a step where the step's data has not come yet. Where another loader's has, it is
        known later who that was for (see `_train_again`).
        """
        if self._data.training and self.rows.pending is None and not self.partition.times[DATA]:
            self._no_grad_forward_begin()
        else:
            self._forward_begin()

    def _no_grad_forward_begin(self) -> None:
        """It is an evaluation, or a summary of the model that is printed."""
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
        """A loader that feeds training was waited for, also where it had no more: one batch is held back."""
        self.rows.note_batch()
        self._data.exhausted = False
        if self._data.waited:
            self.work.commit(self.rows.step)
            self.partition.commit()

    def _reopen(self) -> None:
        """Another backward before an optimizer step: a synced one is a segment, others go on."""
        if self.rows.synced:
            self._exchange.several = True
            self.rows.close_segment()
        else:
            pending, cuts = self.rows.reopen()
            self.partition.times = [a + b for a, b in zip(self.partition.times, pending, strict=True)]
            if self.partition.cuts is not None:
                self.partition.cuts.list[:0] = cuts

    def _gradients_done(self) -> None:
        """What follows inside the backward is waiting."""
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
        """A backward is over; return whether it is the outermost one."""
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
        self.rows.set_pending(self.partition.pop(), flags, synced)

    # -- waits for peers, and inferred exchanges -----------------------------------------------------

    def _sync_begin(self) -> None:
        self._before_sync.append(self.partition.stage)
        self._to(SYNC_WAIT)

    def _sync_end(self) -> None:
        if self._before_sync:
            self._to(self._before_sync.pop())

    def _reduced(self) -> None:
        """
        Between a backward and the optimizer, or inside either, it is taken for the exchange of gradients.

        The pending row then ends here. One whose optimizer reduces in its `step` is closed when that is over.
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
        """The pending row goes on until now; what is no wait is work on gradients, so it is `backward`."""
        self._to(self.partition.stage)
        times, cuts = self.partition.pop()
        times[BACKWARD] += times[POST_SYNC]
        times[POST_SYNC] = 0
        self.rows.extend(times, cuts)
        self._own.extend()

    def _infer(self) -> None:
        exchange = self._exchange
        exchange.inferred = True
        if exchange.on_device:
            exchange.couple("reduced on a device")
        self.rows.infer(exchange.on_device)

    # -- what closes a row -----------------------------------------------------------------------

    def step_in_backward(self) -> bool:
        """Note an optimizer step that begins now; return whether that is inside a backward."""
        self._step_in_backward = self._step_in_backward or self.rows.depth > 0
        return self.rows.depth > 0

    def _scaler_begin(self) -> None:
        self._optimizer_begin()
        self._scaling = True

    def _end_skipped(self) -> None:
        """GradScaler has called no optimizer: where that is what exchanges, the row is still pending."""
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
        if self.partition.stage != POST_SYNC:  # the data of this step is there: the closure is what uses it
            self._own.pause_optimizer()

    def _begin_optimizer(self) -> None:
        self._own.end_evaluation(self.now)
        self._scaling = False
        self._own.begin_optimizer(self.now)

    def _optimizer_end(self) -> None:
        """Backwards that ran inside the optimizer (LBFGS) are its row."""
        self._own.end_optimizer(self.now)
        self.rows.stepped = True
        if not self.rows.depth:
            self._close_step()

    def close_traced(self, now: int) -> None:
        """End of a `trace_step`: its last backward closes the row, else the row ends here."""
        self.now, self.manual = now, False
        if self.rows.pending is None:
            self._to(POST_SYNC)
            self._set_pending(FLAG_NO_BACKWARD | FLAG_NO_PEERS, False)
        self.rows.close_step(traced=True)

    def _close_step(self) -> None:
        """Close the pending row, if there is one, unless `trace_step` does."""
        if self.rows.pending is not None and not self.manual:
            self.rows.close_step(self.optimizer)

    # -- spans -----------------------------------------------------------------------------------

    def _span(self, mark: int) -> None:
        number, ends = divmod(mark - marks.SPANS, 2)
        if not ends:
            self._own.begin(number, self.now)
        elif self._own.end(number, self.size, self.now):
            self.size = 0

    def hand_out_tail(self) -> None:
        """Count the spans of the tail, which is in no row: each by itself."""
        self.spans.hand_out(self.rows.step, apart=True)

    # -- on a device's clock -------------------------------------------------------------------------

    def _bracket_begin(self) -> None:
        if self.partition.cuts is not None:
            self.partition.cuts.sample()
        self._sync_begin()

    def use(self, device: DeviceClock | None) -> None:
        """From here on pass rows through `device`; None: no longer."""
        self._exchange.clock(device is not None)
        self.rows.device, self.rows.cuts = device, []
        self.partition.cuts = None if device is None else Cuts()

    def open_cuts(self) -> list[Cut]:
        """Return the cuts of the row that is pending or open, and an empty one at the newest mark."""
        cuts = self.partition.cuts
        return [] if cuts is None else [*self.rows.cuts, *cuts.list, Cut(POST_SYNC, cuts.last, cuts.last)]

    # -- now -------------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """
        The step that the training thread is in. Between an optimizer step and what the next step begins with
        (its data, or its forward) that is the one before, also in an evaluation.
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
        """Return what the training thread is in."""
        part = None if self._own.evaluation is None else "evaluation"
        open_ns = max(0, now - self.partition.last)
        return OpenStage(self.rows.step, self.partition.stage, open_ns, part, self.spans.innermost_ns(now))

    def tail_ns(self, now: int) -> int:
        """Return the time since the last sync exit, which belongs to no row."""
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
