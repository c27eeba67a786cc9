"""Time in named spans inside the stages (optimizer, checkpoint, a user's own): sums, never columns."""

from __future__ import annotations

from traceml_ray.wire import SpanSum

MAX_NAMES = 256
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
        self._now: dict[tuple[str, int, bool], list[int]] = {}
        self._before: dict[tuple[str, int, bool], list[int]] = {}
        self._numbers = {name: number for number, name in enumerate(_KNOWN)}
        self.names = list(_KNOWN)
        self.refused = 0
        """Spans whose name was one too many."""

    def number(self, name: str) -> int | None:
        """Return the number of a span's name; None when there are too many of them."""
        found = self._numbers.get(name)
        if found is None:
            if len(self.names) >= MAX_NAMES:
                self.refused += 1
                return None
            self.names.append(name[:MAX_NAME_CHARS])
            found = self._numbers[name] = len(self.names) - 1
        return found

    def add(self, name: str, stage: int, step: int, ns: int, size: int, apart: bool) -> None:
        """Add one span of `ns` nanoseconds in `stage` of `step`, with `size` bytes moved."""
        key = (name, stage, apart)
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
            SpanSum(name, stage, count, total, longest, first, last, size or None)
            for (name, stage, _), (count, total, longest, first, last, size) in done.items()
        ]
