"""The memory of one rank process in one place (a device, or the host), and its counters without gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from traceml_ray.signals.memory.robust import median, noise, starts
from traceml_ray.signals.memory.shapes import NO_STEP, Float, Int64, Series

MOST_BYTES = float(1 << 60)
"""Anything larger is no size."""
LEAST_TOTAL = float(1 << 20)
"""Anything smaller is no device, and no limit."""
_HOST = ("rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes")
_WARM_STEPS = 2
"""Number of steps after the first that still are warm-up."""
_WARM_SHARE = 5
"""Warm-up is at most one in so many of the samples."""
_QUARTER = 4
_REACHED = 0.9
_BLOCKS = 20
"""
Number of blocks of samples. If no steps are known, loading ends at the first level that is held for two of
them.
"""
_BLOCK = 4
"""Least number of samples in such a block."""
_LEVEL = 0.02
"""Share within which a level must be held."""
_NOISE = 6.0
"""Number of standard deviations of the noise within which a level may be held instead."""
_TAIL_S = 30.0
"""Longest time of a last step that may be the end of the process, in which it releases its memory, in s."""
_FALL = 0.05
"""What falls by this share in it is not the level of the run."""


@dataclass(frozen=True)
class Track:
    """One counter of one place, where it is known."""

    t_ns: Int64
    s: Float
    """(n,) seconds since the first sample."""
    step: Float
    """(n,), NaN: not known."""
    x: Float
    """(n,) bytes."""
    settled: int
    """The first sample after warm-up; n: none."""

    def __len__(self) -> int:
        """Return the number of samples after warm-up."""
        return len(self.x) - self.settled

    @cached_property
    def after(self) -> Track:
        """Return the part after warm-up."""
        first = self.settled
        return (
            Track(self.t_ns[first:], self.s[first:], self.step[first:], self.x[first:], 0) if first else self
        )

    def newest(self, n: int) -> Track:
        """Return the last n samples of one that has no warm-up any more."""
        return Track(self.t_ns[-n:], self.s[-n:], self.step[-n:], self.x[-n:], 0)

    @cached_property
    def interval_s(self) -> float:
        """Return the usual time between samples; 0 for fewer than two."""
        return median(self.s[1:] - self.s[:-1]) if len(self.s) > 1 else 0.0

    @cached_property
    def per_step(self) -> float:
        """Return the samples to a step; 0: not known."""
        low, high = self.steps_between(0, len(self.x) - 1)
        return len(self.x) / (high - low) if low is not None and high is not None and high > low else 0.0

    def step_at(self, index: int) -> int | None:
        """Return the step at a sample."""
        return (
            None if not 0 <= index < len(self.step) or np.isnan(self.step[index]) else int(self.step[index])
        )

    def steps_between(self, first: int, last: int) -> tuple[int | None, int | None]:
        """Return the first and the last step that are known between two samples."""
        known = self.step[first : last + 1]
        known = known[~np.isnan(known)]
        return (int(known[0]), int(known[-1])) if len(known) else (None, None)

    def s_per_step(self, first: int = 0) -> float | None:
        """Return the seconds to a step from a sample on; None: not known."""
        known = np.flatnonzero(~np.isnan(self.step[first:])) + first
        if len(known) < 2:
            return None
        steps = self.step[known[-1]] - self.step[known[0]]
        return float((self.s[known[-1]] - self.s[known[0]]) / steps) if steps > 0 else None

    def last(self, n: int = 3) -> float:
        """Return the median of the last n samples."""
        return median(self.x[-n:])


@dataclass(frozen=True)
class Place:
    """One rank process's memory on one device, or on its host."""

    rank: int
    node: str
    process: str
    device: int | None
    """None: the host."""
    bound_ns: int
    samples: int
    t_ns: Int64
    step: Float
    columns: Mapping[str, Float]
    settled: int | None
    """The first sample after warm-up; None: nothing says when that was, each counter tells by itself."""
    last: int | None
    """The first sample of the last step, where that may be the end of the process."""
    tracks: dict[str, Track | None] = field(default_factory=dict)
    """Those that have been asked for."""

    def track(self, name: str) -> Track | None:
        """Return a counter, None where it is not known."""
        if name not in self.tracks:
            column = self.columns.get(name)
            self.tracks[name] = None if column is None else self._track(column)
        return self.tracks[name]

    @cached_property
    def gap(self) -> Track | None:
        """Return what the driver counts for the process and torch's allocator does not."""
        used, reserved = self.columns.get(self.gap_from or ""), self.columns.get("reserved_bytes")
        if used is None or reserved is None:
            return None
        return self._track(np.maximum(used - reserved, 0.0))

    @cached_property
    def claimed(self) -> Track | None:
        """
        Return what is used of the device, without what torch's allocator holds for this process and does not
        use.
        """
        columns = [self.columns.get(f"{name}_bytes") for name in ("device_used", "reserved", "allocated")]
        used, reserved, allocated = columns
        if used is None or reserved is None or allocated is None:
            return None
        return self._track(used - np.maximum(reserved - allocated, 0.0))

    @cached_property
    def gap_from(self) -> str | None:
        """Return the counter that the gap is measured from: the process's own, or the whole device's."""
        for name in ("process_bytes", "device_used_bytes"):
            column = self.columns.get(name)
            if column is not None and np.isfinite(column).any():
                return name
        return None

    def latest(self, name: str) -> float | None:
        """Return the newest value of a counter."""
        track = self.track(name)
        return track.last() if track is not None else None

    @cached_property
    def total(self) -> float | None:
        """Return how much the device has, or the host's limit."""
        total = self.latest(self.used_total[1])
        return None if total is None or total < LEAST_TOTAL else total

    @property
    def used_total(self) -> tuple[str, str]:
        """Return the counters of what is used of what; of a device at least what torch holds of it."""
        if self.device is None:
            return "limit_used_bytes", "limit_bytes"
        return "device_used_bytes" if self.asked_driver else "reserved_bytes", "device_total_bytes"

    @cached_property
    def asked_driver(self) -> bool:
        """Whether what is used of the device is known, and not only what torch holds of it."""
        used = self.columns.get("device_used_bytes")
        return used is not None and bool(np.isfinite(used).any())

    def _track(self, column: Float) -> Track | None:
        known = (column >= 0) & (column <= MOST_BYTES)
        if self.last is not None:
            known[_end(column, self.last) :] = False
        if known.all():
            t, step, x, settled = self.t_ns, self.step, column, self.settled
        else:
            t, step, x = self.t_ns[known], self.step[known], column[known]
            settled = None if self.settled is None else int(np.count_nonzero(known[: self.settled]))
        if not len(x):
            return None
        return Track(t, (t - t[0]) / 1e9, step, x, _plateau(x) if settled is None else settled)


def places(series: Series) -> list[Place]:
    """Return the places of a series: its device, and the host where its samples have that, too."""
    t_ns, order = series.t_ns, None
    if len(t_ns) > 1 and (np.diff(t_ns) < 0).any():
        order = np.argsort(t_ns, kind="stable")
        t_ns = t_ns[order]
    columns = {name: column if order is None else column[order] for name, column in series.columns.items()}
    step = (series.step if order is None else series.step[order]).astype(np.float64)
    step[step <= NO_STEP] = np.nan
    settled = _settled(series.first_step_ns, t_ns, step)
    last = _last_step(t_ns, step)
    host = {name: columns[name] for name in _HOST if name in columns}
    devices = [] if series.device is None else [(series.device, columns)]
    hosts = [(None, host)] if host or series.device is None else []
    who = (series.rank, series.node, series.process)
    return [
        Place(*who, device, series.bound_ns, len(t_ns), t_ns, step, known, settled, last)
        for device, known in [*devices, *hosts]
    ]


def _settled(first_step_ns: int | None, t_ns: Int64, step: Float) -> int | None:
    """Return the first sample after warm-up: the first step is over, and two more where there are samples."""
    known = np.flatnonzero(~np.isnan(step))
    if first_step_ns is not None:
        index = int(np.searchsorted(t_ns, first_step_ns))
    elif len(known):
        later = known[step[known] > step[known[0]]]
        index = int(later[0]) if len(later) else len(t_ns)
    else:
        return None
    if index >= len(t_ns) or np.isnan(step[index]):
        return index
    warm = int(np.count_nonzero(step[index:] < step[index] + _WARM_STEPS))
    return index + min(warm, (len(t_ns) - index) // _WARM_SHARE)


def _last_step(t_ns: Int64, step: Float) -> int | None:
    """Return the first sample of the last step, None where that lasted longer than the end of a process."""
    known = np.flatnonzero(~np.isnan(step))
    if not len(known) or step[known[0]] == step[known[-1]]:
        return None
    first = int(known[np.argmax(step[known] >= step[known[-1]])])
    return first if int(t_ns[-1]) - int(t_ns[first]) <= _TAIL_S * 1e9 else None


def _end(x: Float, last: int) -> int:
    """Return the first sample from `last` on that is below the one before, or the first; n: none."""
    fallen = np.flatnonzero(x[last:] < (1 - _FALL) * x[max(last - 1, 0) : last + 1].max())
    return last + int(fallen[0]) if len(fallen) else len(x)


def _plateau(x: Float) -> int:
    """Return the first sample of the first level that is held: what is before is loading."""
    quarter = len(x) // _QUARTER
    if quarter < 2:
        return 0
    size = max(_BLOCK, len(x) // _BLOCKS)
    blocks = starts(len(x), size)
    low, high = np.minimum.reduceat(x, blocks), np.maximum.reduceat(x, blocks)
    near = max(_NOISE * noise(x), 0.0)
    spread = np.maximum(high[1:], high[:-1]) - np.minimum(low[1:], low[:-1])
    held = np.flatnonzero(spread <= np.maximum(_LEVEL * high[1:], near))
    if not len(held):  # it grows all the time: what was reached soon is loaded
        return int(np.argmax(x[:quarter] >= _REACHED * median(x[quarter // 2 : quarter])))
    first = int(blocks[held[0]])
    level = median(x[first : first + 2 * size])
    return int(np.argmax(x[: first + size] >= level - max(_LEVEL * level, near)))
