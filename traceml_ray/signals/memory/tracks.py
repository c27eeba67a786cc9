"""
The memory of one rank process in one place (a device, or the host), as counters without gaps.

Also robust statistics of such curves: noise, slopes, and whether a curve is a ramp or a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from traceml_ray.signals.memory.shapes import NO_STEP, Float, Int64, Series

Index = np.ndarray[Any, np.dtype[np.intp]]
TO_SIGMA = 1.4826
"""Factor from a median absolute deviation to the standard deviation of a Gaussian."""
_FEW = 8
"""Number of values up to which Python sorts faster than numpy."""
_STARTS = 8
"""Number of parts of the points. A ramp may begin at each part, up to part `_LATEST`."""
_LATEST = 6
"""Last part at which a ramp may begin."""
_HINGES = 48
"""Number of times that are tested as onset of a growth."""
_FITTED = 20
"""Smallest number of samples for such a fit."""
_SIGMAS = 3.0
"""Error of an onset, in standard errors."""


def median(x: Float) -> float:
    """Return the median of (n,), n > 0. Skips the checks that make `np.median` slow."""
    n = len(x)
    half = n // 2
    if n <= _FEW:
        few = sorted(x.tolist())
        return float(few[half] if n % 2 else (few[half - 1] + few[half]) / 2)
    part = x.copy()
    part.partition(half if n % 2 else (half - 1, half))
    return float(part[half]) if n % 2 else float(part[half - 1] + part[half]) / 2


def mad_sigma(x: Float) -> float:
    """Return the robust standard deviation of (n,) around its median. 0 for fewer than two values."""
    return TO_SIGMA * median(np.abs(x - median(x))) if len(x) > 1 else 0.0


def noise(x: Float) -> float:
    """Return the robust standard deviation of the noise of a curve. Steps and bends do not count as noise."""
    return mad_sigma(x[2:] - 2 * x[1:-1] + x[:-2]) / 6**0.5 if len(x) > 3 else 0.0


def lowered(low: Float, threshold: float) -> int:
    """
    Return the index from which a curve stays at its lowest level, if it began more than `threshold` above
    that level. At that point memory was released. 0: no memory was released.
    """
    base = max(1, len(low) // 8)
    lowest = float(low.min())
    if lowest >= low[:base].min() - threshold:
        return 0
    return min(int(np.argmax(low <= lowest + threshold / 2)) + 1, len(low) - 1)


def starts(n: int, size: int) -> Index:
    """Return the begins of blocks of `size` in n values. A remainder belongs to the last block."""
    return np.arange(max(n // size, 1), dtype=np.intp) * size


def block_means(x: Float, begins: Index) -> Float:
    """Return the mean of each block."""
    sums: Float = np.add.reduceat(x, begins)
    return sums / np.diff(begins, append=len(x))


def block_medians(x: Float, size: int) -> Float:
    """Return the median of each block of `size`. The blocks are those of `starts`."""
    blocks = max(len(x) // size, 1)
    if size == 1 or blocks == 1:
        return x if size == 1 else np.array([median(x)])
    whole = np.sort(x[: blocks * size].reshape(blocks, size), axis=1)
    return (whole[:, (size - 1) // 2] + whole[:, size // 2]) / 2


@lru_cache(64)
def _pairs(n: int) -> tuple[Index, Index]:
    first, second = np.triu_indices(n, 1)
    return first, second


def theil_sen(t: Float, y: Float) -> float:
    """
    Return the median slope over all pairs of n points (n ≥ 2, at most a few hundred). 0 if there are no
    pairs.
    """
    first, second = _pairs(len(t))
    across = t[second] - t[first]
    if not (across > 0).all():
        first, second, across = first[across > 0], second[across > 0], across[across > 0]
    return median((y[second] - y[first]) / across) if len(across) else 0.0


def r_squared(t: Float, y: Float, slope: float) -> float:
    """Return the share of the variance of y that a line with that slope explains."""
    rest = y - slope * t
    rest = rest - rest.mean()
    around = y - y.mean()
    total = float(around @ around)
    return 1 - float(rest @ rest) / total if total > 0 else 0.0


def over_walk(t: Float, y: Float, most: int, least: int, floor: bool = False) -> float:
    """
    Return how improbable the growth of y over t is for a random walk, in standard deviations of a Gaussian.

    It is Student's t of the increments of at most `most` blocks, or of the last blocks, at least `least`.
    With `floor`, the lowest values of the blocks are used instead of their means.
    """
    begins = starts(len(y), max(1, len(y) // (most + 1)))
    ys = np.minimum.reduceat(y, begins) if floor else block_means(y, begins)
    across, up = np.diff(block_means(t, begins)), np.diff(ys)
    across, up = across[across > 0], up[across > 0]
    highest = 0.0
    for first in range(max(1, len(up) - least + 1)):
        rest, durations = len(up) - first - 1, across[first:]
        total, grown = float(durations.sum()), float(up[first:].sum())
        if rest < 1 or grown <= 0:
            continue
        off = up[first:] - grown / total * durations
        spread = float((off * off / durations).sum()) / rest
        chance = np.log1p(grown * grown / total / spread / rest) if spread > 0 else np.inf
        highest = max(highest, (8 * rest + 1) / (8 * rest + 3) * float(np.sqrt(rest * chance)))
    return highest


def best_ramp(t: Float, y: Float, least: int) -> tuple[int, float]:
    """
    Return the index at which a ramp that is flat before best explains y, and the explained share of the
    variance. At least `least` of the n points follow the index.
    """
    around = y - y.mean()
    total = float(around @ around)
    if total <= 0:
        return 0, 0.0
    begins = sorted({n * len(t) // _STARTS for n in range(_LATEST + 1)})
    begins = [begin for begin in begins if begin == 0 or len(t) - begin >= least]
    ramps = np.maximum(0.0, t[None, :] - t[begins][:, None])
    ramps -= ramps.mean(axis=1, keepdims=True)
    sizes = np.einsum("ij,ij->i", ramps, ramps)
    along = ramps @ around
    shares = np.where((sizes > 0) & (along > 0), along**2 / np.where(sizes > 0, sizes, 1.0) / total, 0.0)
    best = int(np.argmax(shares))
    if shares[0] >= shares[best] - 0.01:
        best = 0
    return begins[best], float(shares[best])


def hinge(t: Float, y: Float, began: float, error: float) -> tuple[float, float]:
    """
    Return (onset, error): when y left its level to grow along a line.

    The result is a least-squares fit to all n points. Autocorrelated noise reduces the effective number of
    points.

    Args:
        t: (n,) seconds, ascending.
        y: (n,) bytes.
        began: estimate of the onset.
        error: error of the estimate. Both are returned if the points are not more precise.
    """
    tried = np.linspace(max(began - 3 * error, t[0]), min(began + 3 * error, t[-1]), _HINGES)
    if len(t) < _FITTED or tried[0] >= tried[-1]:
        return began, error
    ramps = np.maximum(t[None, :] - tried[:, None], 0.0)
    ramps -= ramps.mean(axis=1, keepdims=True)
    around = y - y.mean()
    sizes = np.maximum(np.einsum("ij,ij->i", ramps, ramps), 1e-9)
    slopes = (ramps @ around) / sizes
    rests = float(around @ around) - slopes**2 * sizes
    best = int(np.argmin(rests))
    rest = around - slopes[best] * ramps[best]
    total = float(rest @ rest)
    if slopes[best] <= 0 or total <= 0:
        return began, error
    lasting = min(max(float(rest[1:] @ rest[:-1]) / total, 0.0), 0.95)
    points = max(len(t) * (1 - lasting) / (1 + lasting), 4.0)
    near = np.flatnonzero(rests <= float(rests[best]) * (1 + _SIGMAS**2 / points))
    low, high = tried[max(near[0] - 1, 0)], tried[min(near[-1] + 1, _HINGES - 1)]
    return float(tried[best]), min(float(max(high - tried[best], tried[best] - low)), error)


def steps_share(y: Float) -> float:
    """Return the share of the variance of y that at most three steps explain."""
    around = y - y.mean()
    total = float(around @ around)
    return _between(y, 2) / total if total > 0 else 0.0


def _between(y: Float, depth: int) -> float:
    """Return by how much steps reduce the sum of squares."""
    n = len(y)
    if n < 2 or depth == 0:
        return 0.0
    sums = np.cumsum(y - y.mean())[:-1]
    left = np.arange(1, n)
    gains = sums**2 * (n / (left * (n - left)))
    split = int(np.argmax(gains)) + 1
    return float(gains[split - 1]) + _between(y[:split], depth - 1) + _between(y[split:], depth - 1)


MOST_BYTES = float(1 << 60)
"""Larger values are invalid sizes."""
LEAST_TOTAL = float(1 << 20)
"""Smaller values are not the memory of a device, and not a limit."""
_HOST = ("rss_bytes", "uss_bytes", "limit_bytes", "limit_used_bytes")
_WARM_STEPS = 2
"""Number of steps after the first that still count as warm-up."""
_WARM_SHARE = 5
"""Warm-up takes at most the number of samples divided by this."""
_QUARTER = 4
_REACHED = 0.9
_BLOCKS = 20
"""
Number of blocks of samples. If no steps are known, loading ends at the first level that is held for two
blocks.
"""
_BLOCK = 4
"""Smallest number of samples in such a block."""
_LEVEL = 0.02
"""Share within which a level must be held."""
_NOISE = 6.0
"""Number of standard deviations of the noise within which a level may be held instead."""
_TAIL_S = 30.0
"""Longest duration of a last step that may be the end of the process, which releases its memory, in s."""
_FALL = 0.05
"""If memory falls by this share in that step, the step is not at the level of the run."""


@dataclass(frozen=True)
class Track:
    """One counter of one place, at the samples where it is known."""

    t_ns: Int64
    s: Float
    """(n,) seconds since the first sample."""
    step: Float
    """(n,). NaN: not known."""
    x: Float
    """(n,) bytes."""
    settled: int
    """Index of the first sample after warm-up. n: there is none."""

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
        """Return the last n samples of a track without warm-up."""
        return Track(self.t_ns[-n:], self.s[-n:], self.step[-n:], self.x[-n:], 0)

    @cached_property
    def interval_s(self) -> float:
        """Return the usual time between samples in s. 0 for fewer than two samples."""
        return median(self.s[1:] - self.s[:-1]) if len(self.s) > 1 else 0.0

    @cached_property
    def per_step(self) -> float:
        """Return the number of samples per step. 0: not known."""
        low, high = self.steps_between(0, len(self.x) - 1)
        return len(self.x) / (high - low) if low is not None and high is not None and high > low else 0.0

    def step_at(self, index: int) -> int | None:
        """Return the step at a sample."""
        return (
            None if not 0 <= index < len(self.step) or np.isnan(self.step[index]) else int(self.step[index])
        )

    def steps_between(self, first: int, last: int) -> tuple[int | None, int | None]:
        """Return the first and the last known step between two samples."""
        known = self.step[first : last + 1]
        known = known[~np.isnan(known)]
        return (int(known[0]), int(known[-1])) if len(known) else (None, None)

    def s_per_step(self, first: int = 0) -> float | None:
        """Return the seconds per step from a sample on. None: not known."""
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
    """The memory of one rank process on one device, or on its host."""

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
    """
    Index of the first sample after warm-up. None: steps do not show it, so each counter
    decides by itself.
    """
    last: int | None
    """Index of the first sample of the last step, if that step may be the end of the process."""
    tracks: dict[str, Track | None] = field(default_factory=dict)
    """Tracks that have been requested."""

    def track(self, name: str) -> Track | None:
        """Return a counter. None if it is not known."""
        if name not in self.tracks:
            column = self.columns.get(name)
            self.tracks[name] = None if column is None else self._track(column)
        return self.tracks[name]

    @cached_property
    def gap(self) -> Track | None:
        """Return the gap: memory that the driver counts for the process and torch's allocator does not."""
        used, reserved = self.columns.get(self.gap_from or ""), self.columns.get("reserved_bytes")
        if used is None or reserved is None:
            return None
        return self._track(np.maximum(used - reserved, 0.0))

    @cached_property
    def claimed(self) -> Track | None:
        """
        Return the used memory of the device, without memory that torch's allocator holds for this process and
        does not use.
        """
        columns = [self.columns.get(f"{name}_bytes") for name in ("device_used", "reserved", "allocated")]
        used, reserved, allocated = columns
        if used is None or reserved is None or allocated is None:
            return None
        return self._track(used - np.maximum(reserved - allocated, 0.0))

    @cached_property
    def gap_from(self) -> str | None:
        """
        Return the counter from which the gap is computed: the process's own, or that of the
        whole device.
        """
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
        """Return the memory of the device, or the host's limit, in bytes."""
        total = self.latest(self.used_total[1])
        return None if total is None or total < LEAST_TOTAL else total

    @property
    def used_total(self) -> tuple[str, str]:
        """
        Return (counter of used memory, counter of total memory). If the driver was not asked, the use of a
        device is at least what torch holds.
        """
        if self.device is None:
            return "limit_used_bytes", "limit_bytes"
        return "device_used_bytes" if self.asked_driver else "reserved_bytes", "device_total_bytes"

    @cached_property
    def asked_driver(self) -> bool:
        """Return whether the used memory of the device is known, and not only what torch holds of it."""
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
    """Return the places of a series: its device, and the host if the samples include it."""
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
    """
    Return the first sample after warm-up: the first step is over, and two more steps if there are samples of
    them.
    """
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
    """Return the first sample of the last step. None if that step lasted longer than the end of a process."""
    known = np.flatnonzero(~np.isnan(step))
    if not len(known) or step[known[0]] == step[known[-1]]:
        return None
    first = int(known[np.argmax(step[known] >= step[known[-1]])])
    return first if int(t_ns[-1]) - int(t_ns[first]) <= _TAIL_S * 1e9 else None


def _end(x: Float, last: int) -> int:
    """
    Return the first sample from `last` on that is below the one before, otherwise the sample `last`. n: there
    is none.
    """
    fallen = np.flatnonzero(x[last:] < (1 - _FALL) * x[max(last - 1, 0) : last + 1].max())
    return last + int(fallen[0]) if len(fallen) else len(x)


def _plateau(x: Float) -> int:
    """Return the first sample of the first level that is held. Samples before it belong to loading."""
    quarter = len(x) // _QUARTER
    if quarter < 2:
        return 0
    size = max(_BLOCK, len(x) // _BLOCKS)
    blocks = starts(len(x), size)
    low, high = np.minimum.reduceat(x, blocks), np.maximum.reduceat(x, blocks)
    near = max(_NOISE * noise(x), 0.0)
    spread = np.maximum(high[1:], high[:-1]) - np.minimum(low[1:], low[:-1])
    held = np.flatnonzero(spread <= np.maximum(_LEVEL * high[1:], near))
    if not len(held):  # it grows all the time: what was reached soon counts as loading
        return int(np.argmax(x[:quarter] >= _REACHED * median(x[quarter // 2 : quarter])))
    first = int(blocks[held[0]])
    level = median(x[first : first + 2 * size])
    return int(np.argmax(x[: first + size] >= level - max(_LEVEL * level, near)))
