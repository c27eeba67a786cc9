"""The newest memory samples of one place of a run that goes on, in bounded room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from traceml_ray.analysis.memory.shapes import NO_STEP, Float, Int64
from traceml_ray.signals.memory.records import MemorySample

FIELDS = (
    *("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "peak_bytes", "retries", "process_bytes"),
    *("device_used_bytes", "device_total_bytes", "rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes"),
)
"""What is judged of a sample."""
SIZE = 512
"""Samples of one place, at most: the newest half as they came, the others evenly over the time before."""
_FIRST_SIZE = 32
_RARE = "uss_bytes"
"""Not in every sample: the newest of those that go stays with the one before them."""
_PEAK = "peak_bytes"
"""The most since the sample before: of those that go, the highest stays with the one before them."""


class KeptSamples:
    """
    Samples of one rank process on one device, in order of time.

    When there is no room, of what is older than the newest half only each `every`-th that came is kept; when
    that takes more than a quarter, `every` doubles.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.taken = 0
        """Samples that have come."""
        self._size = size
        self._every = 1
        self._old = self._n = 0
        """Of `n` samples the first `old` are thinned."""
        self._number: Int64 = np.empty(_FIRST_SIZE, np.int64)
        self._t_ns: Int64 = np.empty(_FIRST_SIZE, np.int64)
        self._step: Int64 = np.empty(_FIRST_SIZE, np.int64)
        self._columns: dict[str, Float] = {}

    @classmethod
    def of(cls, t_ns: Int64, step: Int64, columns: Mapping[str, Float], size: int = SIZE) -> KeptSamples:
        """Return what would be kept of samples that have come, but for the peaks of those that are not."""
        kept, n = cls(size), len(t_ns)
        if not n:
            return kept
        while max(n - size // 2, 0) > size // 4 * kept._every:
            kept._every *= 2
        older = np.arange(0, max(n - size // 2, 0), kept._every)
        chosen = np.concatenate([older, np.arange(max(n - size // 2, 0), n)])
        kept._number, kept._t_ns, kept._step = chosen, t_ns[chosen], step[chosen]
        kept._columns = {name: columns[name][chosen] for name in FIELDS if name in columns}
        kept._old = len(older) if kept._every > 1 else 0
        kept._n, kept.taken = len(chosen), n
        return kept

    def add(self, sample: MemorySample) -> None:
        """Add a sample."""
        if self._n == len(self._t_ns):
            self._make_room()
        at = self._n
        self._number[at] = self.taken
        self._t_ns[at] = sample.t_ns
        self._step[at] = NO_STEP if sample.step is None else sample.step
        for name in FIELDS:
            value = getattr(sample, name)
            column = self._columns.get(name)
            if column is not None:
                column[at] = np.nan if value is None else value
            elif value is not None:
                column = self._columns[name] = np.full(len(self._t_ns), np.nan)
                column[at] = value
        self._n += 1
        self.taken += 1

    @property
    def nbytes(self) -> int:
        """Return how much room the samples take."""
        return sum(each.nbytes for each in (self._number, self._t_ns, self._step, *self._columns.values()))

    def arrays(self) -> tuple[Int64, Int64, dict[str, Float]]:
        """Return copies of the times, the steps and what was measured, see `shapes.Series`."""
        n = self._n
        columns = {name: column[:n].copy() for name, column in self._columns.items()}
        return self._t_ns[:n].copy(), self._step[:n].copy(), columns

    def _make_room(self) -> None:
        n = self._n
        if n < self._size:
            more = min(n, self._size - n)
            self._number, self._t_ns, self._step = (
                _longer(each, more, NO_STEP) for each in (self._number, self._t_ns, self._step)
            )
            self._columns = {name: _longer(each, more, np.nan) for name, each in self._columns.items()}
            return
        if self._every == 1 or self._old > self._size // 4:
            self._every *= 2
            self._old = self._thin(0, self._old)
        self._old = self._thin(self._old, self._n - self._size // 2)

    def _thin(self, first: int, end: int) -> int:
        """Keep those samples from `first` to `end` whose turn it is; return where they end."""
        kept = first + np.flatnonzero(self._number[first:end] % self._every == 0)
        done, rest = first + len(kept), self._n - end
        columns: dict[str, Any] = {"number": self._number, "t_ns": self._t_ns, "step": self._step}
        for name, column in (*columns.items(), *self._columns.items()):
            values = column[kept]
            if len(kept) and name == _PEAK:
                values = np.fmax.reduceat(column[:end], kept)
            elif len(kept) and name == _RARE:
                parts = np.split(column[kept[0] : end], kept[1:] - kept[0])
                values = np.array([_newest(part) for part in parts])
            column[first:done] = values
            column[done : done + rest] = column[end : end + rest].copy()
        self._n = done + rest
        return done


def _longer(column: Any, more: int, fill: float) -> Any:
    return np.concatenate([column, np.full(more, fill, column.dtype)])


def _newest(values: Float) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else float("nan")
