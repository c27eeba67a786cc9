"""
Steps and segments: the row that a backward has left pending, and what closes it.

An optimizer step closes it; another backward without one in between takes it back in (gradient accumulation),
or, where it has exchanged gradients, makes it a segment of the step. So is the row of another optimizer that
steps in the same iteration (see `iterations`).

Which optimizer steps are one iteration of the training loop, and so one step of a row's key.

Where a script takes batches from a loader, an iteration begins with a batch. An optimizer that steps without
a new one, and has not stepped since the iteration began, goes on with it: the generator after the
discriminator, the actor after the critic. One that steps again without a new batch begins another iteration,
unless that is how the loop began: several steps on each batch. Without a loader each optimizer step is one.

All of this follows from the order of calls, which is the same on all ranks, and never from time. It is
settled in the first iterations, so that what one rank does alone later (an evaluation) changes nothing.
"""

from __future__ import annotations

from traceml_ray.agent.cuts import Cut, without_forward
from traceml_ray.agent.device import DeviceClock
from traceml_ray.agent.ring import StepRing
from traceml_ray.stages import (
    DATA,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
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
