"""Memory that grows all the time: its slope, and when it is full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.robust import (
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
from traceml_ray.analysis.memory.shapes import Confidence, Float
from traceml_ray.analysis.memory.tracks import Place, Track

_COARSE_POINTS = 24
"""Blocks of a second try, which see the floor of a slow saw."""
_FEWEST = 5
"""Points that a slope needs."""


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
    """What is left at a slope."""

    left: float
    """Bytes."""
    s: float
    steps: int | None


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
    return next((each for each in chain(whole, newest) if each is not None), None)


def forecast(place: Place, growing: Ramp, limits: MemoryLimits) -> Forecast | None:
    """
    Return when the device or the host is full; None: not known. Memory that torch's allocator holds and does
    not use is counted as free; on a host, the others may grow as well.
    """
    used, total = place.latest(place.used_total[0]), place.total
    if used is None or total is None:
        return None
    left, slope = max(total - used, 0.0), growing.slope
    if place.device is not None:
        reserved, allocated = place.latest("reserved_bytes"), place.latest("allocated_bytes")
        if reserved is not None and allocated is not None:
            left += max(reserved - allocated, 0.0)
    else:
        slope = max(slope, _all_together(place, growing, limits))
    seconds = left / slope
    steps = None if not growing.slope_step else int(seconds * growing.slope / growing.slope_step)
    return Forecast(left, seconds, steps)


def r2_limit(samples: int, limits: MemoryLimits) -> float:
    """Return how well a line must fit so many samples."""
    if samples < limits.short_samples:
        return limits.r2_shortest
    return limits.r2_short if samples < limits.drift_samples else limits.r2


def _newest(after: Track, few: int, limits: MemoryLimits, floor: bool) -> Ramp | None:
    """Return the growth of the newest samples, None where it is within what was used before, as of a saw."""
    found = _ramp(after.newest(few), 1, limits, floor)
    if found is None or found.over_walk < limits.over_walk_short:
        return None
    first = len(after.x) - few + found.first
    beyond = after.last() - float(after.x[: first + 1].max())
    return replace(found, first=first) if beyond >= limits.beyond * found.grown else None


def _ramp(after: Track, size: int, limits: MemoryLimits, floor: bool) -> Ramp | None:
    at = starts(len(after.x), size)
    y = np.minimum.reduceat(after.x, at) if floor else block_medians(after.x, size)
    t = block_means(after.s, at) if size > 1 else after.s
    skipped = lowered(y, max(limits.min_growth_bytes, limits.noise * noise(y)))
    t, y = t[skipped:], y[skipped:]
    part = max(len(y) // 4, 1)
    if len(y) < _FEWEST or median(y[-part:]) - median(y[:part]) < limits.forecast_growth_bytes / 2:
        return None
    begin, share = best_ramp(t, y, max(_FEWEST, len(y) // 4))
    if share <= steps_share(y):
        return None
    t, y, first = t[begin:], y[begin:], (skipped + begin) * size
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
    )


def _goes_on(t: Float, y: Float, slope: float, limits: MemoryLimits) -> bool:
    """Whether it still grows: the last third, or the last half of few points."""
    part = len(t) // 3 if len(t) >= limits.short_samples else len(t) // 2 + 1
    return theil_sen(t[-part:], y[-part:]) >= limits.still_grows * slope


def _all_together(place: Place, growing: Ramp, limits: MemoryLimits) -> float:
    """
    Return the slope of what is used of the host's memory since `growing` began, bytes a second; 0 while that
    is not sure: other programs come and go.
    """
    used = place.track("limit_used_bytes")
    if used is None:
        return 0.0
    first = int(np.searchsorted(used.t_ns, growing.from_ns))
    n = len(used.x) - first
    if n < limits.short_samples:
        return 0.0
    size = -(-n // _COARSE_POINTS)
    t, y = block_means(used.s[first:], starts(n, size)), block_medians(used.x[first:], size)
    slope = theil_sen(t, y)
    return slope if r_squared(t, y, slope) >= limits.r2_short else 0.0
