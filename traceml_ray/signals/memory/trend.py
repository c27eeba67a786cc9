"""
Detects lasting growth of memory: its slope, and when memory is full.

Also classifies growth as linear, slowing down (a root, a logarithm, a cache that fills) or speeding up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from traceml_ray.signals.memory.limits import MemoryLimits
from traceml_ray.signals.memory.shapes import Confidence, Float
from traceml_ray.signals.memory.tracks import (
    Place,
    Track,
    best_ramp,
    block_means,
    block_medians,
    lowered,
    median,
    noise,
    over_walk,
    r_squared,
    starts,
    steps_share,
    theil_sen,
)

Bend = Literal["line", "slows", "quickens"]
_BEGINS = (-0.25, -0.125, 0.0, 0.125, 0.25)
"""Shifts of the onset that are tested, earlier or later than assumed, as shares of the duration of growth."""
_LOGARITHMS = (0.3, 0.1, 0.03, 0.01)
_FILLING = (1.0, 0.5, 0.25)
_QUICKENING = (1.0, 0.5, 0.25)
"""Time constants of logarithms and exponentials, as shares of the duration of growth."""
_REST = 0.5
"""A bent shape may leave at most this share of the variance that the best line leaves."""
_EVIDENCE = 12.0
"""
Evidence that a bent shape needs with n points: it may leave at most exp(−this ÷ n) of the variance that the
line leaves, because two equally good shapes differ by chance.
"""
SLOWER = 0.8
_FASTER = 1.25
"""Factor by which the slope of the last third must differ from the whole's."""
_STRAIGHT = 0.85
"""
Growth is straight if the slope of its second half is at least this share of the slope of its first half,
allowing for its error.
"""
_Rows = tuple[slice, slice, slice]


@lru_cache(64)
def _shapes(n: int) -> tuple[Float, _Rows]:
    """
    Return (shapes, n) centred and normalised curves over n points that are evenly spaced in time, and which
    of them are lines, slow down, or speed up.
    """
    unit = np.linspace(0.0, 1.0, n)
    lines, slowing, quickening = [], [], []
    for begin in _BEGINS:
        since = np.maximum(unit - begin, 0.0) / (1 - begin)
        lines.append(since)
        slowing.append(np.sqrt(since))
        slowing += [np.log1p(since / scale) for scale in _LOGARITHMS]
        slowing += [-np.expm1(-since / scale) for scale in _FILLING]
        quickening.append(since**2)
        quickening += [np.expm1(since / scale) for scale in _QUICKENING]
    curves = np.array([*lines, *slowing, *quickening])
    curves -= curves.mean(axis=1, keepdims=True)
    curves /= np.sqrt((curves**2).sum(axis=1, keepdims=True))
    bent = len(lines) + len(slowing)
    return curves, (slice(0, len(lines)), slice(len(lines), bent), slice(bent, None))


def bend(t: Float, y: Float, slope: float) -> tuple[Bend, float]:
    """
    Return how growth is bent, and its recent slope: that of the last third, or for a line the slope itself.

    Args:
        t: (n,) seconds, ascending.
        y: (n,) bytes.
        slope: slope of the line through them, bytes per second.
    """
    n = len(t)
    part = max(n // 3, 2)
    recent = theil_sen(t[-part:], y[-part:])
    lower, higher = recent <= SLOWER * slope, recent >= _FASTER * slope
    if n < _FEWEST or not (lower or higher):
        return "line", slope
    line, slows, quickens = _unexplained(t, y)
    most = min(_REST, float(np.exp(-_EVIDENCE / n))) * line
    if lower and slows <= most and slows <= quickens:
        return "slows", recent
    if higher and quickens <= most and quickens < slows:
        return "quickens", recent
    return "line", slope


def _unexplained(t: Float, y: Float) -> tuple[float, float, float]:
    """
    Return the smallest share of the variance of y that lines, slowing curves and quickening curves leave
    unexplained.
    """
    curves, rows = _shapes(len(t))
    even = np.interp(np.linspace(t[0], t[-1], len(t)), t, y)
    around = even - even.mean()
    total = float(around @ around)
    if total <= 0:
        return 1.0, 1.0, 1.0
    along = np.maximum(curves @ around, 0.0)
    left = np.maximum(1 - along**2 / total, 0.0)
    line, slows, quickens = (float(left[part].min()) for part in rows)
    return line, slows, quickens


def slowing_share(t: Float, y: Float) -> float:
    """Return the share of the variance of y that slowing growth explains, 0..1."""
    return 1 - _unexplained(t, y)[1]


def straight(t: Float, y: Float) -> bool:
    """Return whether the second half of growth is as steep as the first half, within the noise."""
    half = len(t) // 2
    if half < _FEWEST:
        return False
    early, late = (theil_sen(t[part], y[part]) for part in (slice(None, half), slice(half, None)))
    if early <= 0 or late <= 0:
        return False
    error = _slope_error(t[:half], y[:half], early) / early + _slope_error(t[half:], y[half:], late) / late
    return late / early - error >= _STRAIGHT


def _slope_error(t: Float, y: Float, slope: float) -> float:
    """Return the standard error of the slope of a line through points with independent errors."""
    rest, around = y - slope * t, t - t.mean()
    return float(rest.std() / max(float(np.sqrt(around @ around)), 1e-9))


_COARSE_POINTS = 24
"""Number of blocks of a second attempt, which detects the floor of a slow sawtooth."""
_FEWEST = 5
"""Smallest number of points for a slope."""
_LATER = 1 / 3
"""If growth slows down at first, the part after this share of its time may be a line."""


@dataclass(frozen=True)
class Ramp:
    """A lasting growth of one counter."""

    slope: float
    """Bytes per second."""
    slope_step: float | None
    """Bytes per step."""
    first: int
    """Index of the first sample of the track that belongs to it."""
    from_ns: int
    to_ns: int
    from_step: int | None
    to_step: int | None
    grown: float
    r2: float
    over_walk: float
    """How improbable it is for a random walk, in standard deviations."""
    samples: int
    bend: Bend = "line"
    """Whether it is linear, slows down or speeds up."""
    recent: float = 0.0
    """Recent slope in bytes per second: for a line `slope`, otherwise the slope of the last third."""

    @property
    def seconds(self) -> float:
        """Return its duration, in s."""
        return (self.to_ns - self.from_ns) / 1e9

    @property
    def steps(self) -> int | None:
        """Return the number of steps that it spans."""
        return None if self.from_step is None or self.to_step is None else self.to_step - self.from_step

    def confidence(self, limits: MemoryLimits) -> Confidence:
        """Return the confidence, from the number of samples and the fit."""
        if self.samples < limits.short_samples:
            return "medium" if self.over_walk >= limits.over_walk_short else "low"
        return "high" if self.samples >= limits.drift_samples and self.r2 >= limits.r2_short else "medium"


@dataclass(frozen=True)
class Forecast:
    """How long the remaining memory lasts."""

    left: float
    """Free bytes."""
    s: float
    """Seconds until memory is full."""
    steps: int | None
    """Steps until memory is full."""
    earliest: bool = False
    """Whether the time is a lower bound, at the recent slope, because growth slows down."""


def ramp(track: Track, limits: MemoryLimits, least: int, floor: bool = False) -> Ramp | None:
    """
    Return the lasting growth of a counter. None if there is none.

    Args:
        track: the counter.
        limits: the thresholds.
        least: smallest number of samples after warm-up.
        floor: use the lowest value of each block of samples instead of its median. Memory that a step
            releases again is then no growth.
    """
    after = track.after
    n = len(after.x)
    if n < max(least, _FEWEST):
        return None
    fine = -(-n // limits.trend_points)
    if floor and n >= limits.drift_samples:
        fine = max(fine, int(n**0.5 / 2))
    sizes = {fine, max(fine, n // _COARSE_POINTS)} if n >= limits.drift_samples else {1}
    whole = (_ramp(after, size, limits, floor) for size in sorted(sizes))
    newest = (_newest(after, few, limits, floor) for few in limits.newest if n > few)
    return next((one for one in chain(whole, newest) if one is not None), None)


def free(place: Place) -> float | None:
    """
    Return the free bytes of a device or a host. None: not known. Memory that torch's allocator holds and does
    not use counts as free.
    """
    used, total = place.latest(place.used_total[0]), place.total
    if used is None or total is None:
        return None
    left = max(total - used, 0.0)
    if place.device is not None:
        reserved, allocated = place.latest("reserved_bytes"), place.latest("allocated_bytes")
        if reserved is not None and allocated is not None:
            left += max(reserved - allocated, 0.0)
    return left


def forecast(growing: Ramp, left: float | None, slope: float) -> Forecast | None:
    """
    Return when memory is full. None: not known.

    Args:
        growing: the growth of one counter.
        left: free bytes. None: not known.
        slope: bytes per second by which all use of that memory grows, including this counter.
    """
    if left is None or slope <= 0:
        return None
    seconds = left / slope
    steps = None if not growing.slope_step else int(seconds * growing.slope / growing.slope_step)
    return Forecast(left, seconds, steps, growing.bend == "slows")


def r2_limit(samples: int, limits: MemoryLimits) -> float:
    """Return how well a line must fit this number of samples."""
    if samples < limits.short_samples:
        return limits.r2_shortest
    return limits.r2_short if samples < limits.drift_samples else limits.r2


def _newest(after: Track, few: int, limits: MemoryLimits, floor: bool) -> Ramp | None:
    """
    Return the growth of the newest samples. None if it stays within what was used before, as
    in a sawtooth.
    """
    newest = _ramp(after.newest(few), 1, limits, floor)
    if newest is None or newest.over_walk < limits.over_walk_short:
        return None
    first = len(after.x) - few + newest.first
    beyond = after.last() - float(after.x[: first + 1].max())
    if beyond < limits.beyond * newest.grown:
        return None
    return replace(newest, first=first, bend="slows" if _was_faster(after, first, newest) else newest.bend)


def _was_faster(after: Track, first: int, newest: Ramp) -> bool:
    """
    Return whether the newest growth, from sample `first` on, is the end of slowing growth: an equal number of
    samples before it grew, too, and all samples before it grew faster.
    """
    before = max(first - newest.samples, 0)
    if first - before < _FEWEST:
        return False
    all_before, just_before = _slope(after, 0, first), _slope(after, before, first)
    faster = max(just_before, all_before if just_before >= newest.slope / 2 else 0.0)
    return faster * SLOWER >= newest.slope


def _slope(after: Track, first: int, end: int) -> float:
    """Return the slope of the samples from `first` to `end`, computed from blocks."""
    size = -(-(end - first) // _COARSE_POINTS)
    t, y = after.s[first:end], after.x[first:end]
    return theil_sen(block_means(t, starts(len(t), size)), block_medians(y, size))


def _ramp(after: Track, size: int, limits: MemoryLimits, floor: bool) -> Ramp | None:
    begins = starts(len(after.x), size)
    y = np.minimum.reduceat(after.x, begins) if floor else block_medians(after.x, size)
    t = block_means(after.s, begins) if size > 1 else after.s
    skipped = lowered(y, max(limits.min_growth_bytes, limits.noise * noise(y)))
    t, y = t[skipped:], y[skipped:]
    part = max(len(y) // 4, 1)
    if len(y) < _FEWEST or median(y[-part:]) - median(y[:part]) < limits.forecast_growth_bytes / 2:
        return None
    begin, share = best_ramp(t, y, max(_FEWEST, len(y) // 4))
    if share < limits.least_share:
        return None
    by_steps = steps_share(y)
    if share <= by_steps:
        if slowing_share(t, y) <= by_steps:
            return None
        begin = 0
    begun = _evident(after, t[begin:], y[begin:], (skipped + begin) * size, limits, floor)
    if begun is None or begun.bend != "slows":
        return begun
    later = begin + int((len(t) - begin) * _LATER)
    if not straight(t[later:], y[later:]):
        return begun
    lasting = _evident(after, t[later:], y[later:], (skipped + later) * size, limits, floor)
    return begun if lasting is None or lasting.bend == "slows" else lasting


def _evident(after: Track, t: Float, y: Float, first: int, limits: MemoryLimits, floor: bool) -> Ramp | None:
    """Return the growth of points from sample `first` on. None if the points do not prove it."""
    n = len(after.x) - first
    slope = theil_sen(t, y)
    r2 = r_squared(t, y, slope)
    if slope <= 0 or r2 < r2_limit(n, limits) or not _goes_on(t, y, slope, limits):
        return None
    over = max(over_walk(t, y, blocks, limits.walk_least, floor) for blocks in limits.walk_blocks)
    if over < limits.over_walk:
        return None
    per_step = after.s_per_step(first)
    from_step, to_step = after.steps_between(first, len(after.x) - 1)
    bent, recent = bend(t, y, slope)
    return Ramp(
        slope=slope,
        slope_step=slope * per_step if per_step else None,
        first=first,
        from_ns=int(after.t_ns[first]),
        to_ns=int(after.t_ns[-1]),
        from_step=from_step,
        to_step=to_step,
        grown=slope * float(after.s[-1] - after.s[first]),
        r2=r2,
        over_walk=over,
        samples=n,
        bend=bent,
        recent=recent,
    )


def _goes_on(t: Float, y: Float, slope: float, limits: MemoryLimits) -> bool:
    """Return whether it still grows, from the last third, or from the last half if there are few points."""
    part = len(t) // 3 if len(t) >= limits.short_samples else len(t) // 2 + 1
    return theil_sen(t[-part:], y[-part:]) >= limits.still_grows * slope


def slope_of_all(used: Track | None, growing: Ramp, limits: MemoryLimits) -> float:
    """
    Return the slope of all used memory of a host or a device since `growing` began, in bytes per second. 0
    while it is not certain, because other programs start and end.
    """
    if used is None:
        return 0.0
    first = int(np.searchsorted(used.t_ns, growing.from_ns))
    n = len(used.x) - first
    if n < limits.short_samples:
        return 0.0
    size = -(-n // _COARSE_POINTS)
    t, y = block_means(used.s[first:], starts(n, size)), block_medians(used.x[first:], size)
    slope = theil_sen(t, y)
    if r_squared(t, y, slope) < limits.r2_short:
        return 0.0
    return bend(t, y, slope)[1]
