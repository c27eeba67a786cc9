"""
From marks to rows: which stage the training thread is in, and when a row is whole.

The recorder is a switch: at every moment it is in exactly one stage, and a mark moves the time
since the mark before into that stage. So a row is a partition, whatever order the marks come in.

A backward that ends leaves its row *pending*: an optimizer step closes it, another backward
without one in between (gradient accumulation) takes it back in. What happens after the backward
already counts for the next row, because rows are cut at sync exit.

Everything here runs on the training thread, between two kernels, with cold caches: there a Python
call costs three times what a hot loop shows. So the common path of each mark is one flat function
over slots, and everything rare stands in a function of its own. The agent only reads.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

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
SAMPLE_STEPS = 64
"""One step in so many has the time inside its own marks measured."""


class Recorder:
    """The state machine of one process; methods named `*_begin` and `*_end` are the marks."""

    __slots__ = (
        "_acc",
        "_before_wait",
        "_foreign_ns",
        "_iterator",
        "_last_iterator",
        "_last_loader",
        "_pending",
        "_pending_flags",
        "_pending_synced",
        "_resume",
        "_sampling",
        "_split",
        "_step_in_backward",
        "_train_loaders",
        "_waited",
        "_waits",
        "clock",
        "coupled",
        "depth",
        "first",
        "last",
        "manual",
        "marks_ns",
        "optimizer_ns",
        "optimizer_steps",
        "owner",
        "peers",
        "ring",
        "segment",
        "stage",
        "step",
    )

    def __init__(self, ring: StepRing, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.ring = ring
        self.clock = clock
        self.step = 0
        self.segment = 0
        self.owner: int | None = None
        """The thread that trains; None until one has."""
        self.peers: Callable[[], bool] | None = None
        """Does the backward that ends now exchange gradients? None: nobody to exchange with."""
        self.coupled = False
        """Waits for peers cannot be told apart inside forward and backward (FSDP, device clock)."""
        self.manual = False
        """Steps are cut by `trace_step`, not by the optimizer."""
        self.marks_ns = 0
        self.optimizer_ns = 0
        self.optimizer_steps = 0
        self._train_loaders: set[int] = set()
        self._waited: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Forget the open row; the next one is a first row again."""
        self._acc = [0, 0, 0, 0, 0, 0]
        self._pending: list[int] | None = None
        self._pending_flags = 0
        self._pending_synced = self._split = self._step_in_backward = self._sampling = False
        self.stage, self.last, self.first, self.depth = POST_SYNC, self.clock(), True, 0
        self._waits = self._iterator = self._last_iterator = self._last_loader = self._foreign_ns = 0
        self._resume = self._before_wait = POST_SYNC
        self._waited.clear()

    # -- the training thread -----------------------------------------------------------------

    def mine(self) -> bool:
        """Return whether this thread is the one that trains (or nobody has trained yet)."""
        return self.owner is None or get_ident() == self.owner

    def _own(self, *, take_over: bool = False) -> bool:
        """Return whether this thread may mark; a new training thread takes over from a silent one."""
        me = get_ident()
        if self.owner == me:
            return True
        if self.owner is not None:
            if self.depth or not take_over or self.clock() - self.last < SILENT_OWNER_NS:
                return False
            self.reset()
        self.owner = me
        return True

    def _to(self, stage: int) -> None:
        now = self.clock()
        self._acc[self.stage] += now - self.last
        self.last = now
        self.stage = stage

    def _fold(self) -> None:
        """What ran since sync exit was not for this step (but for fetches of the training loaders): `post_sync`."""
        self._to(POST_SYNC)
        acc = self._acc
        acc[POST_SYNC] += self._foreign_ns + acc[PREPARE] + acc[FORWARD]
        acc[DATA] -= self._foreign_ns
        self._foreign_ns = acc[PREPARE] = acc[FORWARD] = 0
        self._waited &= self._train_loaders

    # -- data ----------------------------------------------------------------------------------

    def data_begin(self, iterator: Any) -> bool:
        """Mark: this thread starts to wait for `iterator`; True when a `data_end` has to follow."""
        if id(iterator) != self._iterator or self._waits or self.depth or get_ident() != self.owner:
            return self._other_data_begin(iterator)
        now = self.clock()
        stage = self.stage
        self._acc[stage] += now - self.last
        self.last = now
        self.stage = DATA
        self._before_wait = stage
        self._resume = FORWARD if stage == FORWARD else PREPARE
        self._waits = 1
        if self._sampling:
            self.marks_ns += self.clock() - now
        return True

    def _other_data_begin(self, iterator: Any) -> bool:
        """Any wait but the usual one: of another loader, nested, or of a thread that does not train."""
        if not self.mine() or self.depth:
            return False
        self._waits += 1
        if self._waits > 1:  # a loader inside a loader
            return True
        # Iterators come and go with the epochs: the loader (noted on them) is who feeds the step.
        loader = getattr(iterator, "__dict__", {}).get("_traceml_loader") or id(iterator)
        if loader in self._train_loaders and not self._waited <= self._train_loaders:
            self._fold()
        self._last_loader, self._last_iterator = loader, id(iterator)
        self._iterator = 0  # the next wait of the usual loader has to look at this one first
        self._before_wait = self.stage
        self._resume = FORWARD if self.stage == FORWARD else PREPARE
        self._to(DATA)
        return True

    def data_end(self, got: bool) -> None:
        """Mark: the data is there, or (`got` False) there was none: then it was no wait of this step."""
        if self._waits != 1:
            self._waits = max(0, self._waits - 1)
            return
        self._waits = 0
        if got:
            now, last = self.clock(), self.last
            self._acc[DATA] += now - last
            self.last = now
            self.stage = self._resume
            if self._last_iterator != self._iterator:
                self._waited.add(self._last_loader)
                if self._last_loader not in self._train_loaders:
                    self._foreign_ns += now - last
            if self._sampling:
                self.marks_ns += self.clock() - now
        else:
            self.stage = self._before_wait
            self._to(self.stage)

    def new_iterator(self) -> None:
        """An iterator was made: its id may be that of one that is gone."""
        self._iterator = 0

    # -- forward -------------------------------------------------------------------------------

    def forward_begin(self, training: bool) -> None:
        """Mark: the root module is called; not `training` is an evaluation (or a look at the model)."""
        if self.depth or not training or get_ident() != self.owner:
            self._other_forward(training)
            return
        stage = self.stage
        if stage == FORWARD:
            return
        now = self.clock()
        self._acc[stage] += now - self.last
        self.last = now
        self.stage = FORWARD
        if self._sampling:
            self.marks_ns += self.clock() - now

    def _other_forward(self, training: bool) -> None:
        if self.depth or not self._own():
            return
        if training:
            if self.stage != FORWARD:
                self._to(FORWARD)
        elif self._last_loader not in self._train_loaders:
            self._fold()

    # -- backward ------------------------------------------------------------------------------

    def backward_begin(self) -> bool:
        """Mark: a backward starts; False when it is not one of the training thread's."""
        if self.depth or get_ident() != self.owner:
            if not self._own(take_over=True):
                return False
            if self.depth:
                self.depth += 1
                return True
        now = self.clock()
        self._acc[self.stage] += now - self.last
        self.last = now
        self.stage = BACKWARD
        self.depth = 1
        self._split = self._step_in_backward = False
        if self._pending is not None:
            self._take_back()
        if self._waited:
            self._learn_loaders()
        if self._sampling:
            self.marks_ns += self.clock() - now
        return True

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
        self._iterator = self._last_iterator if len(self._waited) == 1 else 0
        self._waited.clear()
        self._foreign_ns = 0

    def gradients_done(self) -> None:
        """Mark: this rank's own gradients are done; what follows inside the backward is waiting."""
        if self.depth:
            now = self.clock()
            self._acc[self.stage] += now - self.last
            self.last = now
            self.stage = SYNC_WAIT
            self._split = True
            if self._sampling:
                self.marks_ns += self.clock() - now

    def backward_end(self, ok: bool) -> None:
        """Mark: a backward has returned (`ok`) or raised. The outermost one leaves its row pending."""
        now = self.clock()
        acc = self._acc
        acc[self.stage] += now - self.last
        self.last = now
        if self.depth > 1:
            self.depth -= 1
            self.stage = BACKWARD
            return
        self.depth = 0
        self.stage = POST_SYNC
        if not ok:
            return
        synced = self.peers is not None and self.peers()
        flags = 0 if synced else FLAG_NO_PEERS
        if not self._split:
            flags |= FLAG_NO_SPLIT
        if self.coupled:
            flags |= FLAG_COUPLED
        self._pending_flags, self._pending_synced, self._pending = flags, synced, acc
        self._acc = [0, 0, 0, 0, 0, 0]
        if self._step_in_backward and not self.manual:
            self._close_step()
        if self._sampling:
            self.marks_ns += self.clock() - now

    def sync_begin(self) -> int | None:
        """Mark: the framework waits for peers outside a backward (DDP's buffers); pass on to `sync_end`."""
        if self.depth or not self.mine():
            return None
        before = self.stage
        self._to(SYNC_WAIT)
        return before

    def sync_end(self, before: int | None) -> None:
        """Mark: that wait is over; the stage it interrupted goes on."""
        if before is not None:
            self._to(before)

    # -- what closes a row -----------------------------------------------------------------------

    def optimizer_begin(self) -> int:
        """
        Mark: an optimizer (or `GradScaler`) step: it closes the pending row, if there is one.

        Returns what `optimizer_end` wants: the time, or 0 when this step is none of ours to measure.
        """
        if not self.mine():
            return 0
        if self.depth:
            self._step_in_backward = True
            return 0
        now = self.clock()
        if self._pending is not None and not self.manual:
            self._close_step()
        if self.stage != POST_SYNC:
            self._to(POST_SYNC)
        if self._sampling:
            self.marks_ns += self.clock() - now
        return now

    def optimizer_end(self, began: int) -> None:
        """Mark: the optimizer step is over; backwards that ran inside it (LBFGS) are its row."""
        if not began:
            return
        self.optimizer_ns += self.clock() - began
        self.optimizer_steps += 1
        if self._pending is not None and not self.manual and not self.depth:
            self._close_step()

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
        self.step += 1
        self.segment = 0
        self._sampling = not self.step % SAMPLE_STEPS

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
        self.ring.push(self.step << SEGMENT_BITS | self.segment, flags, row)

    # -- read by the agent -----------------------------------------------------------------------

    def open_stage(self) -> OpenStage:
        """Return where the training thread stands now (a glance, not a lock)."""
        stage, last = self.stage, self.last
        return OpenStage(self.step, stage, max(0, self.clock() - last))

    def tail_ns(self) -> int:
        """Return the time since the last sync exit, which belongs to no row."""
        return sum(self._acc) + max(0, self.clock() - self.last)
