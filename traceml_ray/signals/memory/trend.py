"""
Memory that grows all the time: its slope, and when it is full.

Whether growth follows a line, slows down (a root, a logarithm, a cache that fills) or speeds up.
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
"""Growth may have begun so much earlier or later than assumed, as a share of its time."""
_LOGARITHMS = (0.3, 0.1, 0.03, 0.01)
_FILLING = (1.0, 0.5, 0.25)
_QUICKENING = (1.0, 0.5, 0.25)
"""Time constants of logarithms and exponentials, as shares of the time of growth."""
_REST = 0.5
"""Largest share of the variance left by the best line that a bent shape may leave."""
_EVIDENCE = 12.0
"""
Evidence that a bent shape needs with n points: it may leave at most exp(−this ÷ n) of what the line leaves,
because two shapes that fit equally well differ by chance.
"""
SLOWER = 0.8
_FASTER = 1.25
"""Factor by which the slope of the last third must differ from the whole's."""
_STRAIGHT = 0.85
"""
Share of the first half's slope that the second half's must reach, beyond its error, for a part to be
straight.
"""
_Rows = tuple[slice, slice, slice]


@lru_cache(64)
def _shapes(n: int) -> tuple[Float, _Rows]:
    """
    Return (shapes, n) centred and normalised curves over n points that are evenly spread in time, and which
    of them are lines, which slow down and which speed up.
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
    Return how growth is bent, and its slope of late (that of the last third; of a line the slope itself).

    Args:
        t: (n,) seconds, ascending.
        y: (n,) bytes.
        slope: of the line through them, bytes a second.
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
    """Return the least share of the variance of y that lines, slowing and quickening curves leave."""
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
    """Return the share of the variance of y that growth which slows down explains, 0..1."""
    return 1 - _unexplained(t, y)[1]


def straight(t: Float, y: Float) -> bool:
    """Whether the second half of growth is as steep as its first half, as surely as the noise allows."""
    half = len(t) // 2
    if half < _FEWEST:
        return False
    early, late = (theil_sen(t[part], y[part]) for part in (slice(None, half), slice(half, None)))
    if early <= 0 or late <= 0:
        return False
    error = _slope_error(t[:half], y[:half], early) / early + _slope_error(t[half:], y[half:], late) / late
    return late / early - error >= _STRAIGHT


def _slope_error(t: Float, y: Float, slope: float) -> float:
    """Return the standard error of the slope of a line through points whose errors are independent."""
    rest, around = y - slope * t, t - t.mean()
    return float(rest.std() / max(float(np.sqrt(around @ around)), 1e-9))


_COARSE_POINTS = 24
"""Blocks of a second try, which see the floor of a slow saw."""
_FEWEST = 5
"""Points that a slope needs."""
_LATER = 1 / 3
"""Of growth that slows down at first, what is after this share of its time may be a line."""


@dataclass(frozen=True)
class Ramp:
    """A lasting growth of one counter."""

    slope: float
    """Bytes a second."""
    slope_step: float | None
    """Bytes a step."""
    first: int
    """Sample of the track that it begins with."""
    from_ns: int
    to_ns: int
    from_step: int | None
    to_step: int | None
    grown: float
    r2: float
    over_walk: float
    """How improbable it would be for a random walk, in standard deviations."""
    samples: int
    bend: Bend = "line"
    """Whether it follows a line, slows down or speeds up."""
    recent: float = 0.0
    """Bytes a second of late: of a line `slope`, else the slope of the last third."""

    @property
    def seconds(self) -> float:
        """Return how long it has lasted."""
        return (self.to_ns - self.from_ns) / 1e9

    @property
    def steps(self) -> int | None:
        """Return over how many steps."""
        return None if self.from_step is None or self.to_step is None else self.to_step - self.from_step

    def confidence(self, limits: MemoryLimits) -> Confidence:
        """Return how sure it is, from the samples and the fit."""
        if self.samples < limits.short_samples:
            return "medium" if self.over_walk >= limits.over_walk_short else "low"
        return "high" if self.samples >= limits.drift_samples and self.r2 >= limits.r2_short else "medium"


@dataclass(frozen=True)
class Forecast:
    """How long the memory that is left lasts."""

    left: float
    """Bytes that are free."""
    s: float
    """Seconds until they are used."""
    steps: int | None
    """Steps until then."""
    earliest: bool = False
    """Growth slows down: the time is a lower bound, at the slope of late."""


def ramp(track: Track, limits: MemoryLimits, least: int, floor: bool = False) -> Ramp | None:
    """
    Return the lasting growth of a counter, None where there is none.

    Args:
        track: the counter.
        limits: the thresholds.
        least: fewest samples after warm-up.
        floor: go by the lowest value of each block of samples (memory that a step gives back is no growth),
            not by its median.
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
    Return the bytes that a device or a host has left; None: not known. Memory that torch's allocator holds
    and does not use is free.
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
    Return when memory is full; None: not known.

    Args:
        growing: the growth of one counter.
        left: bytes that are free; None: not known.
        slope: bytes a second by which everything in that memory grows, this counter among it.
    """
    if left is None or slope <= 0:
        return None
    seconds = left / slope
    steps = None if not growing.slope_step else int(seconds * growing.slope / growing.slope_step)
    return Forecast(left, seconds, steps, growing.bend == "slows")


def r2_limit(samples: int, limits: MemoryLimits) -> float:
    """Return how well a line must fit so many samples."""
    if samples < limits.short_samples:
        return limits.r2_shortest
    return limits.r2_short if samples < limits.drift_samples else limits.r2


def _newest(after: Track, few: int, limits: MemoryLimits, floor: bool) -> Ramp | None:
    """Return the growth of the newest samples, None where it is within what was used before, as of a saw."""
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
    Whether the newest growth, which begins with sample `first`, is the end of growth that slows down: as many
    samples before it grew, too, and all samples before it grew faster.
    """
    before = max(first - newest.samples, 0)
    if first - before < _FEWEST:
        return False
    all_before, just_before = _slope(after, 0, first), _slope(after, before, first)
    faster = max(just_before, all_before if just_before >= newest.slope / 2 else 0.0)
    return faster * SLOWER >= newest.slope


def _slope(after: Track, first: int, end: int) -> float:
    """Return the slope of the samples from `first` to `end`, by blocks."""
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
    """Return the growth of points from sample `first` on, None where they do not prove it."""
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
    """Whether it still grows: the last third, or the last half of few points."""
    part = len(t) // 3 if len(t) >= limits.short_samples else len(t) // 2 + 1
    return theil_sen(t[-part:], y[-part:]) >= limits.still_grows * slope


def slope_of_all(used: Track | None, growing: Ramp, limits: MemoryLimits) -> float:
    """
    Return the slope of all that is used of a host or a device since `growing` began, bytes a second; 0 while
    that is not sure: other programs come and go.
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
