"""
The marks of a training thread, as numbers; time in named spans inside the stages (optimizer, checkpoint, a
user's own): sums, never columns.

DATA_BEGIN: the iterator waited for is the one of the wait before. DATA_EXHAUSTED: there was nothing more to
wait for. BACKWARD_FAILED: it has raised. SCALER_BEGIN: a `GradScaler` step begins; CLOSURE_BEGIN: an
optimizer step that is given a closure. BRACKET_BEGIN: SYNC_BEGIN of FSDP on a device, where all of its waits
have marks. COST says when the mark before it was done being made. From SPANS on there are two for each name
of `SpanSums`: a span of that name begins, and ends.
"""

from __future__ import annotations

from traceml_ray.wire.messages import SpanSum

MAX_NAMES = 256
_MAX_IN_GROUPS = 128
"""A job with more process groups has the rest of its collectives without them."""
_Key = tuple[str, int, bool, str | None]
MAX_NAME_CHARS = 64
_KNOWN = ("evaluation", "optimizer", "fetch", "collate", "workers")
EVALUATION, OPTIMIZER, FETCH, COLLATE, WORKERS = range(len(_KNOWN))
"""Numbers of the spans that follow from the marks of a step."""


class SpanSums:
    """
    Sums per name and stage, written by the recorder (under its lock) and collected by the agent.

    What is not in a row that is judged, the first one and the tail, has sums `apart`.
    `collect` hands out what was swapped away one call earlier, so that an update which is being made
    is never lost, and no lock is needed.
    """

    def __init__(self) -> None:
        self._now: dict[_Key, list[int]] = {}
        self._before: dict[_Key, list[int]] = {}
        self._numbers: dict[tuple[str, str | None], int] = {
            (name, None): number for number, name in enumerate(_KNOWN)
        }
        self.names = list(_KNOWN)
        self.groups: list[str | None] = [None] * len(_KNOWN)
        """Process group of a collective, by number of its name."""
        self.refused = 0
        """Spans whose name was one too many."""

    def number(self, name: str, group: str | None = None) -> int | None:
        """Return the number of a span's name (in a process group); None when there are too many of them."""
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

    def add(
        self, name: str, stage: int, step: int, ns: int, size: int, apart: bool, group: str | None = None
    ) -> None:
        """Add one span of `ns` nanoseconds in `stage` of `step`, with `size` bytes moved."""
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
        """Return the sums of the tick before this one."""
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
"""Marks are below this; times are all above."""

EVENTS = -(1 << 62)
"""EVENTS - n, before the time of a mark: event n of the device's clock was recorded there."""
OPTIMIZERS = -(1 << 61)
"""OPTIMIZERS - n, before the mark of its step: from here on it is optimizer n (its id) that steps."""
BATCHES = 2 * EVENTS
"""BATCHES - n, by itself: the batch that was waited for last is of size n, see `batch_size`."""
