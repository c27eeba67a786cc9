"""
The marks of a training thread, as numbers, and sums of the time in named spans.

A span lies inside a stage: an optimizer step, a checkpoint, or a span that the user names. Spans are stored
as sums, never as columns of a row.

- DATA_BEGIN: a wait for the same iterator as the wait before begins.
- DATA_EXHAUSTED: the iterator that was waited for had no more data.
- BACKWARD_FAILED: the backward raised.
- SCALER_BEGIN: a `GradScaler` step begins.
- CLOSURE_BEGIN: an optimizer step with a closure begins.
- BRACKET_BEGIN: SYNC_BEGIN of FSDP on a device, where all of its waits have marks.
- COST: the time at which making the mark before it was finished.

From SPANS on there are two marks for each name of `SpanSums`: a span of that name begins, and ends.
"""

from __future__ import annotations

from collections import deque

from traceml_ray.wire.messages import SpanSum

MAX_CALLS = 1 << 14
"""Largest number of collectives that are kept until the agent has read them."""
MAX_NAMES = 256
_MAX_IN_GROUPS = 128
"""Once there are this many names, collectives of further process groups are summed without their group."""
_Key = tuple[str, int, bool, str | None]
MAX_NAME_CHARS = 64
EVALUATION_SPAN, CHECKPOINT_SPAN, RESTORE_SPAN = "evaluation", "checkpoint", "checkpoint load"
CHECKPOINT_WAIT_SPAN = "checkpoint wait"
"""The training thread waits for a checkpoint that is written beside it."""
_KNOWN = (
    *(EVALUATION_SPAN, "optimizer", "fetch", "collate", "workers"),
    *(CHECKPOINT_SPAN, RESTORE_SPAN, CHECKPOINT_WAIT_SPAN),
)
EVALUATION, OPTIMIZER, FETCH, COLLATE, WORKERS, CHECKPOINT, RESTORE, CHECKPOINT_WAIT = range(len(_KNOWN))
"""Numbers of the spans that are derived from the marks of a step, and of checkpoints."""
TIMED = frozenset({EVALUATION, CHECKPOINT, RESTORE, CHECKPOINT_WAIT})
"""Spans whose begin and end are kept, see `span_times`."""


TimedCall = tuple[int, int, int, int]
"""A collective: number of its span, step, time (ns), and bytes, as `Steps.size` counts them."""


class SpanSums:
    """
    Sums per name and stage. The recorder writes them under its lock; the agent collects them.

    Spans outside the rows that are judged (in the first row and in the tail) are summed separately, as
    `apart`. `collect` returns what was swapped out one call earlier. So an update in progress is never lost,
    and no lock is needed.
    """

    def __init__(self) -> None:
        self._now: dict[_Key, list[int]] = {}
        self._before: dict[_Key, list[int]] = {}
        self._numbers: dict[tuple[str, str | None], int] = {
            (name, None): number for number, name in enumerate(_KNOWN)
        }
        self.names = list(_KNOWN)
        self.groups: list[str | None] = [None] * len(_KNOWN)
        """Process group of a collective, indexed by the number of its name. None for other spans."""
        self.refused = 0
        """Number of spans that were refused because there were too many names."""
        self.calls: deque[TimedCall] = deque(maxlen=MAX_CALLS)
        """Collectives that are over, the oldest first. The agent removes what it has read."""
        self.call_count = 0
        """Number of collectives that were added to `calls`, including those that had no room."""

    def number(self, name: str, group: str | None = None) -> int | None:
        """Return the number of a span's name (in a process group). None if there are too many names."""
        number = self._numbers.get((name, group))
        if number is None:
            if len(self.names) >= (MAX_NAMES if group is None else _MAX_IN_GROUPS):
                if group is not None:
                    return self.number(name)
                self.refused += 1
                return None
            self.names.append(name[:MAX_NAME_CHARS])
            self.groups.append(group)
            number = self._numbers[name, group] = len(self.names) - 1
        return number

    def add_call(self, number: int, step: int, ns: int, size: int) -> None:
        """Keep a collective that is over, see `TimedCall`."""
        self.calls.append((number, step, ns, size))
        self.call_count += 1

    def add(
        self, name: str, stage: int, step: int, ns: int, size: int, apart: bool, group: str | None = None
    ) -> None:
        """Add one span of `ns` nanoseconds in `stage` of `step`, which moved `size` bytes."""
        key = (name, stage, apart, group)
        entry = self._now.get(key)
        if entry is None:
            self._now[key] = [1, ns, ns, step, step, size]
            return
        entry[0] += 1
        entry[1] += ns
        if ns > entry[2]:
            entry[2] = ns
        entry[4] = step
        entry[5] += size

    def collect(self) -> list[SpanSum]:
        """Return the sums of the previous tick."""
        done, self._before, self._now = self._before, self._now, {}
        return [
            SpanSum(name, stage, count, total, longest, first, last, size or None, group)
            for (name, stage, _, group), (count, total, longest, first, last, size) in done.items()
        ]


(
    DATA_BEGIN,
    DATA_END,
    DATA_EXHAUSTED,
    FORWARD_BEGIN,
    EVAL_MODE_FORWARD_BEGIN,
    NO_GRAD_FORWARD_BEGIN,
    BACKWARD_BEGIN,
    GRADIENTS_DONE,
    BACKWARD_END,
    SYNCED_BACKWARD_END,
    BACKWARD_FAILED,
    SYNC_BEGIN,
    SYNC_END,
    OPTIMIZER_BEGIN,
    SCALER_BEGIN,
    CLOSURE_BEGIN,
    OPTIMIZER_END,
    REDUCED,
    COLLATED,
    BRACKET_BEGIN,
    COST,
    SPANS,
) = range(22)
END = SPANS + 2 * MAX_NAMES
"""Every mark is below this number; every time is above it."""

EVENTS = -(1 << 62)
"""EVENTS - n, before the time of a mark: event n of the device's clock was recorded at that mark."""
OPTIMIZERS = -(1 << 61)
"""OPTIMIZERS - n, before the mark of a step: the optimizer with id n steps from here on."""
STARTED = 1 << 52
"""
Added to the bytes of a collective whose call only starts it. The call takes no time; the wait for it does.
"""
BATCHES = 2 * EVENTS
"""BATCHES - n, without a time: the batch that was waited for last has size n, see `batch_size`."""
