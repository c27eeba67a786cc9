"""
From marks to rows: which stage the training thread is in, and when a row is whole.

The recorder is a switch: at every moment it is in exactly one stage, and a mark moves the time
since the mark before into that stage. So a row is a partition, whatever order the marks come in.

A backward that ends leaves its row *pending*: an optimizer step closes it, another backward
without one in between (gradient accumulation) takes it back in. What happens after the backward
already counts for the next row, because rows are cut at sync exit.

How marks come here: see `mark_log`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from traceml_ray.agent.details import COLLATE, EVALUATION, FETCH, OPTIMIZER, WORKERS
from traceml_ray.agent.mark_log import (
    BACKWARD_BEGIN,
    BACKWARD_END,
    CLOSURE_BEGIN,
    COLLATED,
    DATA_BEGIN,
    DATA_END,
    EVAL_MODE_FORWARD_BEGIN,
    FORWARD_BEGIN,
    GRADIENTS_DONE,
    LOCK_S,
    NO_GRAD_FORWARD_BEGIN,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    PARTS,
    REDUCED,
    SCALER_BEGIN,
    SYNC_BEGIN,
    SYNC_END,
    SYNCED_BACKWARD_END,
    Deferred,
    MarkLog,
    at_once,
)
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.stretches import Stretch, Stretches
from traceml_ray.wire import (
    BACKWARD,
    DATA,
    FLAG_COUPLED,
    FLAG_FIRST,
    FLAG_NO_BACKWARD,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    POST_SYNC,
    PREPARE,
    SEGMENT_BITS,
    SYNC_WAIT,
    OpenStage,
)

MAX_SEGMENT = (1 << SEGMENT_BITS) - 1
SILENT_OWNER_NS = 5_000_000_000


class Recorder(MarkLog):
    """The state machine of one process; methods named `*_begin` and `*_end` are the marks."""

    __slots__ = (
        *("_acc", "_before_sync", "_before_wait", "_collated", "_evaluation", "_foreign_ns"),
        *("_last_loader", "_named", "_optimizer", "_pending", "_pending_flags", "_pending_synced"),
        *("_reduced_inside", "_reduces_in_step", "_resume", "_scaling", "_split", "_stage", "_step"),
        *("_step_in_backward", "_stepped", "_train_loaders", "_waited", "_waits", "_workers", "coupled"),
        *("first", "inferred", "iterator", "last", "manual", "on_device", "parts", "peers", "ring"),
        *("segment", "several"),
    )

    def __init__(self, ring: StepRing, clock: Callable[[], int] = perf_counter_ns) -> None:
        super().__init__(clock)
        self.ring = ring
        self.iterator = 0
        """The id of the iterator that the training thread has waited for last."""
        self.several = False
        """Some step has had several backwards that exchanged gradients, or might have."""
        self.peers: Callable[[], bool] | None = None
        """Does the backward that ends now exchange gradients? None: nobody to exchange with."""
        self.coupled = False
        """Waits for peers cannot be told apart inside forward and backward (on a device, tensor parallel)."""
        self.inferred = self.on_device = False
        """
        Rows are cut where a reduction ended, because nothing else says where gradients are exchanged; and
        that ran on a device, so that its waits are not on this clock.
        """
        self.manual = False
        """Steps are cut by `trace_step`, not by the optimizer."""
        self.segment = 0
        self.parts = Stretches()
        """The named parts; they go to `parts.details` once it is known which row they are of."""
        self._step = 0
        self._named = (0, 0)
        self._reduces_in_step = False
        self._train_loaders: set[int] = set()
        self._waited: set[int] = set()
        self._reset()

    def _reset(self) -> None:
        """Forget the open row; the next one is a first row again."""
        self._acc = [0, 0, 0, 0, 0, 0]
        self._pending: list[int] | None = None
        self._pending_flags = 0
        self._pending_synced = self._split = self._step_in_backward = False
        self._reduced_inside = self._scaling = self._stepped = False
        self._stage, self.last, self.first, self.depth = POST_SYNC, self.now, True, 0
        self._waits = self._last_loader = self._foreign_ns = 0
        self._resume = self._before_wait = POST_SYNC
        self._before_sync: list[int] = []
        self.parts.forget()
        self._evaluation: Stretch | None = None
        self._optimizer: Stretch | None = None
        self._collated = self._workers = self._size = 0
        self._waited.clear()

    def _understand(self, mark: int) -> None:
        if mark < PARTS:
            _UNDERSTAND[mark](self)
        else:
            self._part(mark)

    def _recover(self, lost: int) -> None:
        self.ring.dropped += lost
        self._step += lost
        self._reset()

    # -- the training thread -----------------------------------------------------------------

    def _may(self) -> bool:
        """Return whether the mark's thread is the one that trains (or nobody has trained yet)."""
        return self.owner is None or self.thread == self.owner

    def _own(self, *, take_over: bool = False) -> bool:
        """Return whether the mark counts; a new training thread takes over from a silent one."""
        if self.owner == self.thread:
            return True
        if self.owner is not None:
            if self.depth or not take_over or self.now - self.last < SILENT_OWNER_NS:
                return False
            self._reset()
            self.ready = 0
        self.owner = self.thread
        return True

    def _to(self, stage: int) -> None:
        if self.parts.open:
            self.parts.spread(self._stage, self.now)
        self._acc[self._stage] += self.now - self.last
        self.last = self.now
        self._stage = stage

    def _fold(self) -> int:
        """
        What ran since sync exit was not for this step, but for its own fetches: it is `post_sync`.

        Returns how long that took, from the first of those fetches on.
        """
        self._to(POST_SYNC)
        acc = self._acc
        self.parts.fold()
        folded = self._foreign_ns + acc[PREPARE] + acc[FORWARD]
        acc[POST_SYNC] += folded
        acc[DATA] -= self._foreign_ns
        self._foreign_ns = acc[PREPARE] = acc[FORWARD] = 0
        self._waited &= self._train_loaders
        return folded

    # -- data ----------------------------------------------------------------------------------

    def data_begin(self, iterator: Any) -> bool:
        """Mark: this thread starts to wait for `iterator`; True when a `data_end` has to follow."""
        mine = get_ident() == self.ready
        if mine and id(iterator) == self.iterator:
            self.log.append(DATA_BEGIN)
            self.log.append(self.clock())
            return True
        # Iterators come and go with the epochs: the loader (noted on them) is who feeds the step.
        known = getattr(iterator, "__dict__", {})
        named = known.get("_traceml_loader") or id(iterator), known.get("_num_workers") or 0
        if mine:
            self.iterator = id(iterator)
            self.log.append(Deferred(_BEGIN_WAIT, self.clock(), self.ready, named))
            return True
        if self.mine():
            self.iterator = 0
        return bool(self._begin_wait(*named))

    @at_once
    def _begin_wait(self, loader: int, workers: int) -> bool:
        if not self._may() or self.depth:
            return False
        self._named = loader, workers
        self._data_begin()
        return True

    def _data_begin(self) -> None:
        if self._waits:  # a loader inside a loader
            self._waits += 1
            return
        self._last_loader, self._workers = self._named
        if self._last_loader in self._train_loaders:
            self._train_again()
        self._waits = 1
        self._collated = 0
        self._before_wait = self._stage
        self._resume = FORWARD if self._stage == FORWARD else PREPARE
        self._to(DATA)
        self._in_closure()

    def _train_again(self) -> None:
        """An evaluation, if there was one, is over; where the root was not called, its fetches tell."""
        folded = 0 if self._waited <= self._train_loaders else self._fold()
        if folded:
            self._begin_evaluation(folded)
        self._end_evaluation()

    def data_end(self, got: bool) -> None:
        """Mark: the data is there, or (`got` False) there was none: then it was no wait of this step."""
        if get_ident() != self.ready:
            self._end_wait(got)
        elif got:
            self.log.append(DATA_END)
            self.log.append(self.clock())
        else:
            self.log.append(Deferred(_END_WAIT, self.clock(), self.ready, (got,)))

    @at_once
    def _end_wait(self, got: bool) -> None:
        if self._may():
            self._data_end(got)

    def _data_end(self, got: bool = True) -> None:
        if self._waits != 1:
            self._waits = max(0, self._waits - 1)
            return
        self._waits = 0
        if not got:
            self._stage = self._before_wait
            self._to(self._stage)
            return
        self._waited.add(self._last_loader)
        if self._last_loader not in self._train_loaders:
            self._foreign_ns += self.now - self.last
            for part in self.parts.running():
                part.foreign_ns += self.now - max(self.last, part.began)
        elif self._workers:
            self._add(WORKERS, self.now - self.last)
        elif self._collated > self.last:
            self._add(FETCH, self._collated - self.last)
            self._add(COLLATE, self.now - self._collated)
        self._to(self._resume)

    def _note_collated(self) -> None:
        """The samples of a batch are there; what follows inside the wait puts them together."""
        if self._waits == 1:
            self._collated = self.now

    def new_iterator(self) -> None:
        """An iterator was made: its id may be that of one that is gone."""
        self.iterator = 0

    # -- forward -------------------------------------------------------------------------------

    @at_once
    def forward_begin(self, mark: int) -> None:
        """Mark, one of the three FORWARD_BEGIN: the root module is called."""
        if not self.depth and self._own():
            _UNDERSTAND[mark](self)

    def _forward_begin(self) -> None:
        self._end_evaluation()
        if self._stage != FORWARD:
            self._to(FORWARD)
        self._in_closure()

    def _eval_mode_forward_begin(self) -> None:
        """
        Of a module in eval mode, with gradients: frozen layers are trained like that, and some evaluate so.

        It is no forward of a step where the step's data has not come yet. Where another loader's has, it is
        known later who that was for (see `_train_again`).
        """
        if self._train_loaders and self._pending is None and not self._acc[DATA]:
            self._no_grad_forward_begin()
        else:
            self._forward_begin()

    def _no_grad_forward_begin(self) -> None:
        """It is an evaluation, or a look at the model."""
        self._begin_evaluation(0 if self._last_loader in self._train_loaders else self._fold())

    # -- backward ------------------------------------------------------------------------------

    @at_once
    def backward_begin(self) -> bool:
        """Mark: a backward starts; False when it is not one of the training thread's."""
        if not self._own(take_over=True):
            return False
        if self.depth:
            self.depth += 1
        else:
            self._backward_begin()
        return True

    def _backward_begin(self) -> None:
        self._end_evaluation()
        self._to(BACKWARD)
        if self._scaling:
            self._end_skipped()
        if self.parts.over:
            self.parts.hand_out(self._step, self.first)
        self.depth = 1
        self._split = self._step_in_backward = self._reduced_inside = False
        if self._pending is not None:
            self._take_back()
        if self._waited:
            self._learn_loaders()
        self._in_closure()

    def _take_back(self) -> None:
        """Another backward before an optimizer step: a synced one stands as a segment, others go on."""
        assert self._pending is not None
        if self._pending_synced:
            self.several = True
            self._emit()
            self.segment = min(self.segment + 1, MAX_SEGMENT)
        else:
            self._acc = [a + b for a, b in zip(self._acc, self._pending, strict=True)]
            self._pending = None

    def _learn_loaders(self) -> None:
        """The loaders waited for on the way to a backward are the ones that feed training."""
        if self._waited != self._train_loaders:
            self._train_loaders = set(self._waited)
        self._waited.clear()
        self._foreign_ns = 0

    @at_once
    def gradients_done(self) -> None:
        """Mark: this rank's own gradients are done; what follows inside the backward is waiting."""
        self._gradients_done()

    def _gradients_done(self) -> None:
        if self.depth:
            self._to(SYNC_WAIT)
            self._split = True

    def backward_end(self, ok: bool) -> None:
        """Mark: a backward has returned (`ok`) or raised. The outermost one leaves its row pending."""
        outermost = self.depth < 2
        self._end_backward(ok, outermost and self.peers is not None and self.peers())

    @at_once
    def _end_backward(self, ok: bool, synced: bool) -> None:
        if self._may():
            self._backward_end(ok, synced)

    def _backward_end(self, ok: bool, synced: bool) -> None:
        if self.depth != 1:
            self.depth = max(0, self.depth - 1)
            if self.depth:
                self._to(BACKWARD)
            return
        self.depth = 0
        self._to(POST_SYNC)
        if self._optimizer is not None:
            self._optimizer.paused = False
        if self.parts.open:
            self.parts.cut(self._step, self.first)
        if not ok:
            return
        flags = 0 if synced else FLAG_NO_PEERS
        if not self._split:
            flags |= FLAG_NO_SPLIT
        if self.coupled:
            flags |= FLAG_COUPLED
        self._pending_flags, self._pending_synced, self._pending = flags, synced, self._acc
        self._acc = [0, 0, 0, 0, 0, 0]
        self._stepped = False
        if self._reduced_inside:
            self._infer()
        if self._step_in_backward and not self.manual:
            self._close_step()

    def sync_begin(self) -> bool:
        """
        Mark: the training thread blocks for its peers, inside whatever stage; pass on to `sync_end`.

        Such a wait is no time of that stage: else who is on time is blamed for waiting for who is late.
        It is written down at any time, as a part is, since no row is cut by it; not where the waits that
        matter are not on this clock anyway.
        """
        if self.coupled or get_ident() != self.owner or not self._room():
            return False
        self.log.append(SYNC_BEGIN)
        self.log.append(self.clock())
        return True

    def _sync_begin(self) -> None:
        self._before_sync.append(self._stage)
        self._to(SYNC_WAIT)

    def sync_end(self, began: bool) -> None:
        """Mark: that wait is over; the stage it interrupted goes on."""
        if began:
            self.log.append(SYNC_END)
            self.log.append(self.clock())

    def _sync_end(self) -> None:
        if self._before_sync:
            self._to(self._before_sync.pop())

    # -- an exchange that nothing tells of ---------------------------------------------------------

    def reduced(self, on_device: bool) -> None:
        """Mark: a reduction over several ranks, or the wait for one, is over. Written down as a part is."""
        if self.peers is None and get_ident() == self.owner and self._room():
            self.on_device = self.on_device or on_device
            self.log.append(REDUCED)
            self.log.append(self.clock())

    def _reduced(self) -> None:
        """
        Between a backward and the optimizer, or inside either, it is taken for the exchange of gradients.

        The pending row then ends here. One whose optimizer reduces in its `step` is closed when that is over.
        """
        if self.peers is not None:
            return
        if self.depth:
            self._reduced_inside = True
        elif self._pending is None:
            stepping = self._optimizer is not None and not self._optimizer.paused
            self._reduces_in_step = self._reduces_in_step or stepping
        elif not self._stepped:
            self._extend()
            self._infer()

    def _extend(self) -> None:
        """The pending row goes on until now; what is no wait is work on gradients, so it is `backward`."""
        assert self._pending is not None
        self._to(self._stage)
        acc = self._acc
        acc[BACKWARD] += acc[POST_SYNC]
        acc[POST_SYNC] = 0
        self._pending = [a + b for a, b in zip(self._pending, acc, strict=True)]
        self._acc = [0, 0, 0, 0, 0, 0]
        self.parts.extend(self._step, self.first)

    def _infer(self) -> None:
        """All waits of such a row were seen, so its backward is its own."""
        self.inferred = self._pending_synced = True
        self._pending_flags &= ~(FLAG_NO_PEERS | FLAG_NO_SPLIT)
        if self.on_device:
            self.coupled = True
            self._pending_flags |= FLAG_COUPLED

    # -- what closes a row -----------------------------------------------------------------------

    @at_once
    def optimizer_begin(self, closure: bool = False) -> bool:
        """
        Mark: an optimizer step: it closes the pending row, if there is one.

        With a `closure` the row is closed when the step is over: the backward in it goes on with what is
        pending. Returns what `optimizer_end` wants: whether this step is one of ours to measure.
        """
        if not self._may_step():
            return False
        if closure:
            self._closure_begin()
        else:
            self._optimizer_begin()
        return True

    @at_once
    def scaler_begin(self) -> None:
        """Mark: a `GradScaler` step: one of the optimizer begins in it, unless there was an overflow."""
        if self._may_step():
            self._scaler_begin()

    def _may_step(self) -> bool:
        if not self._may():
            return False
        self._step_in_backward = self._step_in_backward or self.depth > 0
        return not self.depth

    def _scaler_begin(self) -> None:
        self._optimizer_begin()
        self._scaling = True

    def _end_skipped(self) -> None:
        """GradScaler has called no optimizer: where that is what exchanges, the row is still pending."""
        self._scaling = False
        self.parts.drop(self._optimizer)
        self._optimizer = None
        if self._pending is not None and not self.manual:
            self._close_step()

    def _optimizer_begin(self) -> None:
        outermost = self._optimizer is None or self._scaling
        reduces = self._reduces_in_step and outermost
        if self._pending is not None and not self.manual and not reduces:
            self._close_step()
        if self._stage != POST_SYNC:
            self._to(POST_SYNC)
        self._begin_optimizer()

    def _closure_begin(self) -> None:
        self._begin_optimizer()
        if self._stage != POST_SYNC:  # the data of this step is there: the closure is what uses it
            self._in_closure()

    def _begin_optimizer(self) -> None:
        self._end_evaluation()
        self._scaling = False
        self.parts.drop(self._optimizer)  # GradScaler has skipped it
        self._optimizer = self.parts.begin(OPTIMIZER, self._stage, self.now)

    def _in_closure(self) -> None:
        """From here to the end of a backward the time is not the optimizer's, if one has begun."""
        if self._optimizer is not None:
            self._optimizer.paused = True

    @at_once
    def optimizer_end(self, began: bool) -> None:
        """Mark: the optimizer step is over; backwards that ran inside it (LBFGS) are its row."""
        if began and self._may():
            self._optimizer_end()

    def _optimizer_end(self) -> None:
        if self._optimizer is not None:
            if self._optimizer.paused:
                self.parts.drop(self._optimizer)
            else:
                self._end_part(self._optimizer)
            self._optimizer = None
        self._stepped = True
        if self._pending is not None and not self.manual and not self.depth:
            self._close_step()

    @at_once
    def trace(self) -> None:
        """Have steps cut by `trace_step` from here on, until `close_traced`."""
        self.manual = True

    @at_once
    def close_traced(self) -> None:
        """End of a `trace_step`: its last backward closes the row, else the row ends here."""
        self.manual = False
        if self._pending is None:
            self._to(POST_SYNC)
            self.parts.hand_out(self._step, self.first)
            self._pending, self._acc = self._acc, [0, 0, 0, 0, 0, 0]
            self._pending_flags = FLAG_NO_BACKWARD | FLAG_NO_PEERS
        self._close_step()

    @at_once
    def number(self, done: int) -> None:
        """Say how many steps are done, where a framework counts them; the numbers of rows only grow."""
        if self._pending is None:
            self._step = max(self._step, done)

    def _close_step(self) -> None:
        """Close the pending row and count a step."""
        self._emit()
        self._step += 1
        self.segment = 0

    def _emit(self) -> None:
        row, flags = self._pending, self._pending_flags
        assert row is not None
        self._pending = None
        if not row[DATA]:
            flags |= FLAG_NO_DATA
        if not row[FORWARD]:
            flags |= FLAG_NO_FORWARD
            row[FORWARD], row[PREPARE] = row[PREPARE], 0
        if self.first:
            flags |= FLAG_FIRST
            self.first = False
            row[POST_SYNC] = 0  # there was no sync before: a first row starts at its first data wait
        self.ring.push(self._step << SEGMENT_BITS | self.segment, flags, row)

    # -- named parts -----------------------------------------------------------------------------

    def part_begin(self, number: int) -> bool:
        """Mark: the part of this number (see `Details`) begins; True when `part_end` has to follow."""
        return self._note(PARTS + 2 * number)

    def part_end(self, number: int, size: int = 0) -> None:
        """Mark: it ends, having moved `size` bytes."""
        self._note(PARTS + 2 * number + 1, size)

    def _note(self, mark: int, size: int = 0) -> bool:
        """Write a mark of a part down; the training thread may at any time, since no row is cut by it."""
        if get_ident() == self.owner:
            if not self._room():
                return False
            if size:
                self.log.append(-size)
            self.log.append(mark)
            self.log.append(self.clock())
            return True
        return bool(self.owner is None and self._part_at_once(mark, size))

    @at_once
    def _part_at_once(self, mark: int, size: int) -> bool:
        self._size = size
        self._part(mark)
        return True

    def _part(self, mark: int) -> None:
        number, ends = divmod(mark - PARTS, 2)
        if not ends:
            self.parts.begin(number, self._stage, self.now)
            return
        ours = (self._evaluation, self._optimizer)
        for part in reversed(self.parts.open):
            if part.number == number and part not in ours:
                part.size, self._size = self._size, 0
                self._end_part(part)
                return

    def _end_part(self, part: Stretch) -> None:
        if self.parts.end(part, self._stage, self.now) or self.depth:
            self.parts.hand_out(self._step, self.first)

    def _begin_evaluation(self, folded: int) -> None:
        """It began so much earlier, with its first fetch, unless one before it has had that time."""
        if self._evaluation is not None:
            return
        again = any(part.number == EVALUATION for part in self.parts.over)
        self._evaluation = self.parts.begin(EVALUATION, self._stage, self.now)
        self._evaluation.sums[POST_SYNC] = 0 if again else folded

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._end_part(self._evaluation)
            self._evaluation = None

    def _add(self, number: int, ns: int) -> None:
        details = self.parts.details
        details.add(details.names[number], DATA, self._step, ns, 0, self.first)

    def finish(self) -> None:
        """Hand out the parts of the tail, which is in no row: each by itself."""
        if not self.settle(LOCK_S):
            raise TimeoutError("a mark does not let go of the recorder")
        with self._lock:
            self.parts.hand_out(self._step, apart=True)

    # -- how it stands ---------------------------------------------------------------------------

    def open_stage(self) -> OpenStage:
        """Return where the training thread stands now."""
        self.settle()
        stage, last = self._stage, self.last
        part = None if self._evaluation is None else "evaluation"
        part_ns = self.parts.innermost_ns(self.clock())
        return OpenStage(self._step, stage, max(0, self.clock() - last), part, part_ns)

    def tail_ns(self) -> int:
        """Return the time since the last sync exit, which belongs to no row."""
        self.settle()
        return sum(self._acc) + max(0, self.clock() - self.last)


_UNDERSTAND: dict[int, Callable[[Recorder], None]] = {
    DATA_BEGIN: Recorder._data_begin,
    DATA_END: Recorder._data_end,
    FORWARD_BEGIN: Recorder._forward_begin,
    EVAL_MODE_FORWARD_BEGIN: Recorder._eval_mode_forward_begin,
    NO_GRAD_FORWARD_BEGIN: Recorder._no_grad_forward_begin,
    BACKWARD_BEGIN: Recorder._backward_begin,
    GRADIENTS_DONE: Recorder._gradients_done,
    BACKWARD_END: lambda recorder: recorder._backward_end(True, False),
    SYNCED_BACKWARD_END: lambda recorder: recorder._backward_end(True, True),
    SYNC_BEGIN: Recorder._sync_begin,
    SYNC_END: Recorder._sync_end,
    OPTIMIZER_BEGIN: Recorder._optimizer_begin,
    SCALER_BEGIN: Recorder._scaler_begin,
    CLOSURE_BEGIN: Recorder._closure_begin,
    OPTIMIZER_END: Recorder._optimizer_end,
    REDUCED: Recorder._reduced,
    COLLATED: Recorder._note_collated,
}

_BEGIN_WAIT, _END_WAIT = unwrap(Recorder._begin_wait), unwrap(Recorder._end_wait)
