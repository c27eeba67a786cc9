"""
From marks to rows: which stage the training thread is in, and when a row is whole.

The recorder is a switch: at every moment it is in exactly one stage, and a mark moves the time
since the mark before into that stage. So a row is a partition, whatever order the marks come in.

A backward that ends leaves its row *pending*: an optimizer step closes it, another backward
without one in between (gradient accumulation) takes it back in. What happens after the backward
already counts for the next row, because rows are cut at sync exit.

Marks are made on the training thread, between two kernels, with cold caches: there a line of Python
costs five times what a hot loop shows. So the marks of the usual step are only written down there
(which one and when, in `log`), and understood later, a hundred at a time, by the agent's thread
(`settle`). The methods are the marks made at once; each settles what was written down before it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from threading import RLock, get_ident
from time import perf_counter_ns
from typing import Any, TypeVar

from traceml_ray.agent.ring import StepRing
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

(
    DATA_BEGIN,
    DATA_END,
    FORWARD_BEGIN,
    BACKWARD_BEGIN,
    GRADIENTS_DONE,
    BACKWARD_END,
    SYNCED_BACKWARD_END,
    SYNC_BEGIN,
    SYNC_END,
    OPTIMIZER_BEGIN,
    OPTIMIZER_END,
    COST,
) = range(12)
"""The marks of the usual step; COST says when the one before it was done being made."""

LOG_SIZE = 1 << 17
"""What is written beyond this pushes out the oldest."""
SETTLE_AT = LOG_SIZE // 2
"""With so much written, a backward settles by itself: the agent's thread does not come round."""
LOCK_S = 0.2
"""Longest wait of a mark for the agent's thread, which holds the lock for a millisecond."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _at_once(method: Method) -> Method:
    """Make `method` a mark that is made now, by this thread, after all that were written down."""

    @functools.wraps(method)
    def mark(self: Recorder, *args: Any) -> Any:
        called = self.clock()
        if not self._lock.acquire(timeout=LOCK_S):
            raise TimeoutError("the agent's thread does not let go of the recorder")
        try:
            self._replay()
            self.now, self.thread = self.clock(), get_ident()
            result = method(self, *args)
            if self.thread == self.owner:
                self.ready = 0 if self.depth else self.owner
                self._cost_ns += self.clock() - called
            return result
        finally:
            self._lock.release()

    return mark  # type: ignore[return-value]


class Recorder:
    """The state machine of one process; methods named `*_begin` and `*_end` are the marks."""

    __slots__ = (
        "_acc",
        "_before_sync",
        "_before_wait",
        "_cost_ns",
        "_foreign_ns",
        "_last_iterator",
        "_last_loader",
        "_lock",
        "_manual",
        "_mark",
        "_optimizer_began",
        "_pending",
        "_pending_flags",
        "_pending_synced",
        "_resume",
        "_split",
        "_stage",
        "_step",
        "_step_in_backward",
        "_train_loaders",
        "_waited",
        "_waits",
        "_weighed",
        "_written",
        "_written_ns",
        "clock",
        "coupled",
        "depth",
        "first",
        "last",
        "log",
        "now",
        "optimizer_ns",
        "optimizer_steps",
        "owner",
        "peers",
        "ready",
        "ring",
        "segment",
        "thread",
        "usual_iterator",
        "weigh",
    )

    def __init__(self, ring: StepRing, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.ring = ring
        self.clock = clock
        self.log: deque[int] = deque(maxlen=LOG_SIZE)
        """
        Marks written down and not yet understood: which, when, which, when, … A signal may come between
        the two, so a mark without its time is nothing: times are all larger than marks.
        """
        self.ready = 0
        """The thread that may write marks down: the one that trains, outside of a backward."""
        self.usual_iterator = 0
        """The id of the iterator that feeds training, where there is just one."""
        self.weigh = True
        """The next mark that can is to say what it cost."""
        self.now = clock()
        """The time of the mark that is being understood, and its thread."""
        self.thread = 0
        self.owner: int | None = None
        """The thread that trains; None until one has."""
        self.peers: Callable[[], bool] | None = None
        """Does the backward that ends now exchange gradients? None: nobody to exchange with."""
        self.coupled = False
        """Waits for peers cannot be told apart inside forward and backward (FSDP, device clock)."""
        self._manual = False
        self.segment = 0
        self.optimizer_ns = 0
        self.optimizer_steps = 0
        self._step = self._mark = 0
        self._cost_ns = self._written = self._written_ns = self._weighed = 0
        self._lock = RLock()
        self._train_loaders: set[int] = set()
        self._waited: set[int] = set()
        self._reset()

    def _reset(self) -> None:
        """Forget the open row; the next one is a first row again."""
        self._acc = [0, 0, 0, 0, 0, 0]
        self._pending: list[int] | None = None
        self._pending_flags = 0
        self._pending_synced = self._split = self._step_in_backward = False
        self._stage, self.last, self.first, self.depth = POST_SYNC, self.now, True, 0
        self._waits = self.usual_iterator = self._last_iterator = self._last_loader = self._foreign_ns = 0
        self._resume = self._before_wait = POST_SYNC
        self._before_sync: int | None = None
        self._optimizer_began = 0
        self._waited.clear()

    # -- what was written down ---------------------------------------------------------------

    def settle(self) -> None:
        """Understand what was written down until now (or leave it to the thread that is at it)."""
        if self._lock.acquire(blocking=False):
            try:
                self._replay()
                self.weigh = True
            finally:
                self._lock.release()

    def _replay(self) -> None:
        log = self.log
        self.thread = self.owner or 0
        for _ in range(len(log)):
            value = log.popleft()
            if value <= COST:
                self._mark = value
            elif self._mark == COST:
                self._written_ns += value - self.now
                self._weighed += 1
            else:
                self.now = value
                self._written += 1
                _UNDERSTAND[self._mark](self)

    # -- the training thread -----------------------------------------------------------------

    def write(self, mark: int) -> bool:
        """Write `mark` down, if this thread may; False: its method has to be called instead."""
        if get_ident() != self.ready:
            return False
        log = self.log
        log.append(mark)
        log.append(self.clock())
        return True

    def mine(self) -> bool:
        """Return whether this thread is the one that trains (or nobody has trained yet)."""
        return self.owner is None or get_ident() == self.owner

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
        self.owner = self.thread
        return True

    def _to(self, stage: int) -> None:
        self._acc[self._stage] += self.now - self.last
        self.last = self.now
        self._stage = stage

    def _fold(self) -> None:
        """What ran since sync exit was not for this step, but for its own fetches: it is `post_sync`."""
        self._to(POST_SYNC)
        acc = self._acc
        acc[POST_SYNC] += self._foreign_ns + acc[PREPARE] + acc[FORWARD]
        acc[DATA] -= self._foreign_ns
        self._foreign_ns = acc[PREPARE] = acc[FORWARD] = 0
        self._waited &= self._train_loaders

    # -- data ----------------------------------------------------------------------------------

    @_at_once
    def data_begin(self, iterator: Any) -> bool:
        """Mark: this thread starts to wait for `iterator`; True when a `data_end` has to follow."""
        if not self._may() or self.depth:
            return False
        if self._waits:  # a loader inside a loader
            self._waits += 1
            return True
        if id(iterator) != self.usual_iterator:
            # Iterators come and go with the epochs: the loader (noted on them) is who feeds the step.
            loader = getattr(iterator, "__dict__", {}).get("_traceml_loader") or id(iterator)
            if loader in self._train_loaders and not self._waited <= self._train_loaders:
                self._fold()
            self._last_loader, self._last_iterator = loader, id(iterator)
            self.usual_iterator = 0  # the next wait of the usual loader has to look at this one first
        self._data_begin()
        return True

    def _data_begin(self) -> None:
        self._waits = 1
        self._before_wait = self._stage
        self._resume = FORWARD if self._stage == FORWARD else PREPARE
        self._to(DATA)

    @_at_once
    def data_end(self, got: bool) -> None:
        """Mark: the data is there, or (`got` False) there was none: then it was no wait of this step."""
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
        if self._last_iterator != self.usual_iterator:
            self._waited.add(self._last_loader)
            if self._last_loader not in self._train_loaders:
                self._foreign_ns += self.now - self.last
        self._to(self._resume)

    @_at_once
    def new_iterator(self) -> None:
        """An iterator was made: its id may be that of one that is gone."""
        self.usual_iterator = 0

    # -- forward -------------------------------------------------------------------------------

    @_at_once
    def forward_begin(self, training: bool) -> None:
        """Mark: the root module is called; not `training` is an evaluation (or a look at the model)."""
        if self.depth or not self._own():
            return
        if training:
            self._forward_begin()
        elif self._last_loader not in self._train_loaders:
            self._fold()

    def _forward_begin(self) -> None:
        if self._stage != FORWARD:
            self._to(FORWARD)

    # -- backward ------------------------------------------------------------------------------

    @_at_once
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
        self._to(BACKWARD)
        self.depth = 1
        self._split = self._step_in_backward = False
        if self._pending is not None:
            self._take_back()
        if self._waited:
            self._learn_loaders()

    def _take_back(self) -> None:
        """Another backward before an optimizer step: a synced one stands as a segment, others go on."""
        assert self._pending is not None
        if self._pending_synced:
            self._emit()
            self.segment = min(self.segment + 1, MAX_SEGMENT)
        else:
            self._acc = [a + b for a, b in zip(self._acc, self._pending, strict=True)]
            self._pending = None

    def _learn_loaders(self) -> None:
        """The loaders waited for on the way to a backward are the ones that feed training."""
        if self._waited != self._train_loaders:
            self._train_loaders = set(self._waited)
        self.usual_iterator = self._last_iterator if len(self._waited) == 1 else 0
        self._waited.clear()
        self._foreign_ns = 0

    @_at_once
    def gradients_done(self) -> None:
        """Mark: this rank's own gradients are done; what follows inside the backward is waiting."""
        self._gradients_done()

    def _gradients_done(self) -> None:
        if self.depth:
            self._to(SYNC_WAIT)
            self._split = True

    @_at_once
    def backward_end(self, ok: bool) -> None:
        """Mark: a backward has returned (`ok`) or raised. The outermost one leaves its row pending."""
        self._backward_end(ok, self.peers is not None and self.peers())

    def _backward_end(self, ok: bool, synced: bool) -> None:
        if self.depth > 1:
            self.depth -= 1
            self._to(BACKWARD)
            return
        self.depth = 0
        self._to(POST_SYNC)
        if not ok:
            return
        flags = 0 if synced else FLAG_NO_PEERS
        if not self._split:
            flags |= FLAG_NO_SPLIT
        if self.coupled:
            flags |= FLAG_COUPLED
        self._pending_flags, self._pending_synced, self._pending = flags, synced, self._acc
        self._acc = [0, 0, 0, 0, 0, 0]
        if self._step_in_backward and not self._manual:
            self._close_step()

    @_at_once
    def sync_begin(self) -> bool:
        """Mark: the framework waits for peers outside a backward (DDP's buffers); pass on to `sync_end`."""
        if self.depth or not self._may():
            return False
        self._sync_begin()
        return True

    def _sync_begin(self) -> None:
        self._before_sync = self._stage
        self._to(SYNC_WAIT)

    @_at_once
    def sync_end(self, began: bool) -> None:
        """Mark: that wait is over; the stage it interrupted goes on."""
        if began:
            self._sync_end()

    def _sync_end(self) -> None:
        if self._before_sync is not None:
            self._to(self._before_sync)
            self._before_sync = None

    # -- what closes a row -----------------------------------------------------------------------

    @_at_once
    def optimizer_begin(self) -> bool:
        """
        Mark: an optimizer (or `GradScaler`) step: it closes the pending row, if there is one.

        Returns what `optimizer_end` wants: whether this step is one of ours to measure.
        """
        if not self._may():
            return False
        if self.depth:
            self._step_in_backward = True
            return False
        self._optimizer_begin()
        return True

    def _optimizer_begin(self) -> None:
        self._optimizer_began = self.now
        if self._pending is not None and not self._manual:
            self._close_step()
        if self._stage != POST_SYNC:
            self._to(POST_SYNC)

    @_at_once
    def optimizer_end(self, began: bool) -> None:
        """Mark: the optimizer step is over; backwards that ran inside it (LBFGS) are its row."""
        if began:
            self._optimizer_end()

    def _optimizer_end(self) -> None:
        self.optimizer_ns += self.now - self._optimizer_began
        self.optimizer_steps += 1
        if self._pending is not None and not self._manual and not self.depth:
            self._close_step()

    @property
    def manual(self) -> bool:
        """Steps are cut by `trace_step`, not by the optimizer."""
        return self._manual

    @manual.setter
    @_at_once
    def manual(self, manual: bool) -> None:
        self._manual = manual

    @_at_once
    def close_traced(self) -> None:
        """End of a `trace_step`: its last backward closes the row, else the row ends here."""
        if self._pending is None:
            self._to(POST_SYNC)
            self._pending, self._acc = self._acc, [0, 0, 0, 0, 0, 0]
            self._pending_flags = FLAG_NO_BACKWARD | FLAG_NO_PEERS
        self._close_step()

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

    # -- how it stands ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that is open, of the marks made until now."""
        self.settle()
        return self._step

    @property
    def stage(self) -> int:
        """The stage that the training thread is in."""
        self.settle()
        return self._stage

    @property
    def marks_ns(self) -> int:
        """Time that the marks have taken on the training thread; of those written down, a few are weighed."""
        return self._cost_ns + self._written_ns * self._written // max(1, self._weighed)

    def open_stage(self) -> OpenStage:
        """Return where the training thread stands now."""
        self.settle()
        stage, last = self._stage, self.last
        return OpenStage(self._step, stage, max(0, self.clock() - last))

    def tail_ns(self) -> int:
        """Return the time since the last sync exit, which belongs to no row."""
        self.settle()
        return sum(self._acc) + max(0, self.clock() - self.last)


_UNDERSTAND: dict[int, Callable[[Recorder], None]] = {
    DATA_BEGIN: Recorder._data_begin,
    DATA_END: Recorder._data_end,
    FORWARD_BEGIN: Recorder._forward_begin,
    BACKWARD_BEGIN: Recorder._backward_begin,
    GRADIENTS_DONE: Recorder._gradients_done,
    BACKWARD_END: lambda recorder: recorder._backward_end(True, False),
    SYNCED_BACKWARD_END: lambda recorder: recorder._backward_end(True, True),
    SYNC_BEGIN: Recorder._sync_begin,
    SYNC_END: Recorder._sync_end,
    OPTIMIZER_BEGIN: Recorder._optimizer_begin,
    OPTIMIZER_END: Recorder._optimizer_end,
}
