"""
Makes the marks of a training thread: for the patches and the API, for named spans inside a stage, and for
waits for peers.

The patches write the marks of a usual step to the log themselves where they can (see `mark_log`). The methods
here make all other marks, and need not be fast. `steps` defines what marks mean.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from threading import Lock, get_ident
from time import perf_counter_ns
from typing import Any

from traceml_ray.agent import marks
from traceml_ray.agent.batch_size import BatchSizes, Counted
from traceml_ray.agent.mark_log import LOCK_S, REPLAY_AT, Deferred, MarkLog, immediate_mark
from traceml_ray.agent.marks import MAX_NAME_CHARS, SpanSums
from traceml_ray.agent.ring import StepRing
from traceml_ray.agent.span_times import TimedNow
from traceml_ray.agent.steps import GradientExchange, Steps
from traceml_ray.wire.messages import OpenStage

SILENT_OWNER_NS = 5_000_000_000


class Recorder(MarkLog):
    """The marks of one process. Methods named `*_begin` and `*_end` make marks."""

    __slots__ = ("_hooks_lock", "_step_hooks", "batches", "exchange", "iterator", "step_hook")

    def __init__(self, ring: StepRing, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.exchange = GradientExchange()
        super().__init__(clock, Steps(ring, self.exchange, clock()))
        self.iterator = 0
        """Id of the iterator that the training thread waited for last."""
        self.batches = BatchSizes()
        self._step_hooks: list[Callable[[], object]] = []
        self._hooks_lock = Lock()
        self.step_hook: Callable[[], object] | None = None
        """
        Called by the training thread after each optimizer step and at the first wait for an iterator. None
        unless a profile is requested, layers are measured or FLOPs are counted. See `add_step_hook`.
        """

    def add_step_hook(self, call: Callable[[], object]) -> None:
        """Also call `call` at each step, in addition to existing hooks."""
        with self._hooks_lock:
            self._step_hooks = [*self._step_hooks, call]
            self._call_each()

    def remove_step_hook(self, call: Callable[[], object]) -> None:
        """Stop calling `call`."""
        with self._hooks_lock:
            self._step_hooks = [other for other in self._step_hooks if other != call]
            self._call_each()

    def forked(self) -> None:
        """
        In a forked child of this process: call no hooks any more. A thread that no longer exists may hold the
        lock.
        """
        self._hooks_lock, self._step_hooks, self.step_hook = Lock(), [], None

    def _call_each(self) -> None:
        several = self._step_hooks

        def all_of_them() -> None:
            for call in several:
                call()

        self.step_hook = None if not several else several[0] if len(several) == 1 else all_of_them

    @property
    def sums(self) -> SpanSums:
        """Time in named spans, for complete rows."""
        return self.steps.sums

    # -- which thread trains -----------------------------------------------------------------

    def _may(self) -> bool:
        """Return whether the mark's thread is the training thread, or there is no training thread yet."""
        return self.owner is None or self.thread == self.owner

    def _accepts(self, *, take_over: bool = False) -> bool:
        """Return whether the mark counts. A new training thread takes over from one that makes no marks."""
        if self.owner == self.thread:
            return True
        if self.owner is not None:
            steps = self.steps
            if steps.rows.depth or not take_over or self.now - steps.partition.last < SILENT_OWNER_NS:
                return False
            steps.forget(self.now)
            self.ready = 0
        self.owner = self.thread
        return True

    def _apply(self, mark: int) -> None:
        self.steps.apply(mark, self.now)

    # -- data ----------------------------------------------------------------------------------

    def data_begin(self, iterator: Any) -> bool:
        """Mark: this thread starts to wait for `iterator`. If it returns True, `data_end` must follow."""
        ready = get_ident() == self.ready
        if ready and id(iterator) == self.iterator:
            self.log.append(marks.DATA_BEGIN)
            self.log.append(self.stamp())
            return True
        self.batches.forget()
        if self.step_hook is not None and get_ident() == self.owner:
            self.step_hook()
        # Each epoch makes new iterators. The loader, which is stored on them, identifies what feeds the step.
        known = getattr(iterator, "__dict__", {})
        named = known.get("_traceml_loader") or id(iterator), known.get("_num_workers") or 0
        if ready:
            self.iterator = id(iterator)
            event = self._event_now()
            self.log.append(Deferred(_BEGIN_WAIT, self.clock(), self.ready, named, event))
            return True
        if self.mine():
            self.iterator = 0
        return bool(self._begin_wait(*named))

    @immediate_mark
    def _begin_wait(self, loader: int, workers: int) -> bool:
        if not self._may() or self.steps.rows.depth:
            return False
        self.steps.wait_for(loader, workers)
        self._apply(marks.DATA_BEGIN)
        return True

    def data_end(self, got: bool) -> None:
        """
        Mark: the data has arrived, or (`got` False) there was none. Then the wait does not count for this
        step.
        """
        if self.write(marks.DATA_END if got else marks.DATA_EXHAUSTED):
            return
        self._end_wait(got)

    @immediate_mark
    def _end_wait(self, got: bool) -> None:
        if self._may():
            self._apply(marks.DATA_END if got else marks.DATA_EXHAUSTED)

    def batch(self, batch: Any) -> None:
        """Mark, after `data_end`: `batch` is the batch that was waited for."""
        if self.mine() and self._room():
            self.log.append(self.batches.mark(batch))

    @immediate_mark
    def count(self, samples: int | None, tokens: int | None) -> None:
        """Declare the samples and tokens of the open step. They replace the sizes read from its batches."""
        self.steps.work.declare(self.steps.rows.step, samples, tokens)

    def drain_work(self) -> Counted | None:
        """Return sums of the work in the steps since the last call. None if there were no steps."""
        if not self.replay(LOCK_S) or not self._lock.acquire(timeout=LOCK_S):
            return None
        try:
            return self.steps.work.drain(self.steps.rows.step)
        finally:
            self._lock.release()

    def drain_sizes(self) -> list[tuple[int, int, int]]:
        """Return the sizes of batches in the steps since the last call, see `SizeLog`."""
        if not self._lock.acquire(timeout=LOCK_S):
            return []
        try:
            return self.steps.work.sizes.drain()
        finally:
            self._lock.release()

    def new_iterator(self) -> None:
        """Record that an iterator was made. Its id may be that of a deleted iterator."""
        self.iterator = 0

    # -- forward and backward --------------------------------------------------------------------

    @immediate_mark
    def forward_begin(self, mark: int) -> None:
        """Mark, one of the three FORWARD_BEGIN: the root module is called."""
        if not self.steps.rows.depth and self._accepts():
            self._apply(mark)

    @immediate_mark
    def backward_begin(self) -> bool:
        """Mark: a backward starts. Returns False if it does not belong to the training thread."""
        if not self._accepts(take_over=True):
            return False
        if self.steps.rows.depth:
            self.steps.rows.depth += 1
        else:
            self._apply(marks.BACKWARD_BEGIN)
        return True

    @immediate_mark
    def gradients_done(self) -> None:
        """Mark: this rank's own gradients are done. The rest of the backward is waiting."""
        self._apply(marks.GRADIENTS_DONE)

    def backward_end(self, ok: bool) -> None:
        """Mark: a backward has returned (`ok`) or raised. The outermost backward leaves its row pending."""
        peers = self.exchange.peers
        outermost = self.steps.rows.depth < 2
        self._end_backward(ok, outermost and peers is not None and peers())

    @immediate_mark
    def _end_backward(self, ok: bool, synced: bool) -> None:
        if self._may():
            ended = marks.SYNCED_BACKWARD_END if synced else marks.BACKWARD_END
            self._apply(ended if ok else marks.BACKWARD_FAILED)

    # -- waits for peers, and reductions -----------------------------------------------------------

    def sync_begin(self) -> bool:
        """
        Mark: the training thread blocks for its peers, inside any stage. Pass the result to `sync_end`.

        Such a wait does not count for that stage. Otherwise a rank that is on time would be blamed for
        waiting for a late one. Like a span, the mark can be written at any time, since it ends no row. It is
        not written if the relevant waits are on another clock anyway, such as those of a device's other
        streams (FSDP gathers on one).
        """
        if self.exchange.inseparable or get_ident() != self.owner or not self._room():
            return False
        if self.device is not None and self.device.elsewhere():
            return False
        self.log.append(marks.SYNC_BEGIN)
        self.log.append(self.stamp())
        return True

    def sync_end(self, began: bool) -> None:
        """Mark: that wait is over. The interrupted stage continues."""
        if began:
            self.log.append(marks.SYNC_END)
            self.log.append(self.stamp())

    def bracket(self, mark: int) -> bool:
        """
        Mark: BRACKET_BEGIN or SYNC_END of a wait on a device's stream.

        Inside a backward autograd's thread may make this mark, while the training thread waits for it.
        """
        if self.owner is None or (self.ready and get_ident() != self.owner) or not self._room():
            return False
        self.log.append(mark)
        self.log.append(self.stamp())
        return True

    def reduced(self, on_device: bool) -> None:
        """
        Mark: a reduction over several ranks, or the wait for one, is over. It is written like the mark of a
        span.
        """
        exchange = self.exchange
        if exchange.peers is None and get_ident() == self.owner and self._room():
            exchange.on_device = exchange.on_device or on_device
            self.log.append(marks.REDUCED)
            self.log.append(self.clock())

    # -- what closes a row -----------------------------------------------------------------------

    @immediate_mark
    def optimizer_begin(self, closure: bool = False, optimizer: int = 0) -> bool:
        """
        Mark: a step of this `optimizer` (its id, 0: unknown) begins. It closes the pending row, if there is
        one.

        With a `closure` the row is closed when the step is over, because the backward in the closure extends
        the pending row. Returns the argument of `optimizer_end`: whether this step is measured.
        """
        if not self._may() or self.steps.step_in_backward():
            return False
        self.steps.optimizer = optimizer
        self._apply(marks.CLOSURE_BEGIN if closure else marks.OPTIMIZER_BEGIN)
        return True

    @immediate_mark
    def scaler_begin(self, optimizer: int = 0) -> None:
        """Mark: a `GradScaler` step. A step of `optimizer` begins inside it, unless there was an overflow."""
        if self._may() and not self.steps.step_in_backward():
            self.steps.optimizer = optimizer
            self._apply(marks.SCALER_BEGIN)

    @immediate_mark
    def optimizer_end(self, began: bool) -> None:
        """Mark: the optimizer step is over."""
        if began and self._may():
            self._apply(marks.OPTIMIZER_END)

    @immediate_mark
    def trace(self) -> None:
        """From now on let `trace_step` end the steps, until `close_traced`."""
        self.steps.manual = True

    @immediate_mark
    def close_traced(self) -> None:
        """End of a `trace_step`. Its last backward closes the row; without a backward the row ends here."""
        self.steps.close_traced(self.now)

    def step_now(self, wait_s: float) -> tuple[int, int, int] | None:
        """
        Return (number of the current step of the training thread, time in ns, end of the row of the step
        before).

        Returns None if the marks cannot be read within `wait_s`. The training thread calls this.
        """
        if not self.replay(wait_s):
            return None
        now = self.clock()
        return self.steps.rows.step, now, now - self.steps.tail_ns(now)

    def step_begins(self, wait_s: float) -> tuple[int, int, int] | None:
        """As `step_now`, but returns None also if an optimizer has stepped and the step continues."""
        now = self.step_now(wait_s)
        return None if self.steps.rows.goes_on else now

    @immediate_mark
    def number(self, done: int) -> None:
        """Set the number of steps done, if a framework counts them. The numbers of rows only grow."""
        self.steps.rows.number(done)

    def at_step(self, call: Callable[..., None], *args: Any) -> bool:
        """
        Call `call(step, *args)` when the log is replayed, with the training thread's current or last step.
        Any thread may call this; nothing waits. Returns False if the log has no room.
        """
        if len(self.log) >= REPLAY_AT and not self._room():
            return False
        self.log.append(Deferred(_call_at_step, self.clock(), get_ident(), (call, *args)))
        return True

    # -- spans -----------------------------------------------------------------------------------

    def span_begin(self, number: int) -> bool:
        """Mark: a span of this number (see `SpanSums`) begins. If it returns True, `span_end` must follow."""
        return self._note(marks.SPANS + 2 * number)

    def span_end(self, number: int, size: int = 0) -> None:
        """Mark: the span ends. It has moved `size` bytes."""
        self._note(marks.SPANS + 2 * number + 1, size)

    def _note(self, mark: int, size: int = 0) -> bool:
        """Write a mark of a span. The training thread may do so at any time, since the mark ends no row."""
        if get_ident() == self.owner:
            if not self._room():
                return False
            if size:
                self.log.append(-size)
            self.log.append(mark)
            self.log.append(self.clock())
            return True
        return bool(self.owner is None and self._immediate_span(mark, size))

    @immediate_mark
    def _immediate_span(self, mark: int, size: int) -> bool:
        self.steps.size = size
        self._apply(mark)
        return True

    # -- when spans were open ----------------------------------------------------------------------

    @immediate_mark
    def add_span_time(self, name: str, began: int, ended: int, step: int | None = None) -> None:
        """
        Record that the training thread was in a span of this name, one of those whose times are kept. `step`:
        number of steps that it is about, by default of those that are complete.
        """
        if self._may():
            self.steps.times.add(name, began, ended, self.steps.rows.step if step is None else step)

    @immediate_mark
    def begin_beside(self, name: str, began: int, running: list[int]) -> None:
        """Record that something runs beside the training thread. Its number is appended to `running`."""
        running.append(self.steps.times.begin_beside(name, began, self.steps.rows.step))

    @immediate_mark
    def end_beside(self, running: list[int]) -> None:
        """Record the end of what `begin_beside` was called with."""
        while running:
            self.steps.times.end_beside(running.pop(), self.now)

    def span_times(self, final: bool) -> TimedNow | None:
        """
        Return the times of spans that are over and were not returned before, of those that are pending (see
        `TimedSpans`), and of rows. None if another thread held the lock.
        """
        if not self._lock.acquire(timeout=LOCK_S):
            return None
        try:
            now, rows, times = self.clock(), self.steps.rows, self.steps.times
            over = times.drain(now, final)
            pending = times.pending(now)
            return TimedNow(now, over, pending, rows.first_row, rows.last_row, rows.step, rows.first_data)
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Count the spans of the tail. Raises TimeoutError if a mark does not release the lock."""
        if not self.replay(LOCK_S):
            raise TimeoutError("a mark does not let go of the recorder")
        with self._lock:
            self.steps.hand_out_tail()

    # -- now -------------------------------------------------------------------------------------

    def open_stage(self) -> OpenStage:
        """Return the stage that the training thread is in."""
        self.replay()
        return self.steps.open_stage(self.clock())

    def tail_ns(self) -> int:
        """Return the time since the last sync exit, in ns. It belongs to no row."""
        self.replay()
        return self.steps.tail_ns(self.clock())


_BEGIN_WAIT = unwrap(Recorder._begin_wait)


Begun = tuple[int, str | None]
"""(number of a span's name, name of the span around it)."""


class Spans:
    """Begins and ends spans on the training thread. Raises nothing."""

    def __init__(self, recorder: Recorder, failed: Callable[[str, BaseException], None]) -> None:
        self.innermost: str | None = None
        """
        Name of the innermost span that the training thread is in. `end` restores that of the
        span around it.
        """
        self._recorder = recorder
        self._failed = failed

    def begin(self, name: str, group: str | None = None) -> Begun | None:
        """
        Begin a span; with `group`, a collective in a process group. Returns None if `end` must not follow:
        the call came from another thread.
        """
        try:
            if not self._recorder.mine():
                return None
            name = str(name)[:MAX_NAME_CHARS]
            number = self._recorder.sums.number(name, group)
            if number is None or not self._recorder.span_begin(number):
                return None
            outer, self.innermost = self.innermost, name
            return number, outer
        except Exception as error:
            self._failed("span", error)
            return None

    def end(self, begun: Begun, size: int = 0) -> None:
        """End the span that `begin` began. `size` bytes were moved."""
        try:
            number, self.innermost = begun
            self._recorder.span_end(number, size)
        except Exception as error:
            self._failed("span", error)

    def sync_begin(self) -> bool:
        """Begin a wait for peers. If it returns True, `sync_end` must follow."""
        try:
            return self._recorder.sync_begin()
        except Exception as error:
            self._failed("sync", error)
            return False

    def sync_end(self) -> None:
        """End the wait that `sync_begin` began."""
        try:
            self._recorder.sync_end(True)
        except Exception as error:
            self._failed("sync", error)


def _call_at_step(recorder: Recorder, call: Callable[..., None], *args: Any) -> None:
    call(recorder.steps.current_step, *args)
