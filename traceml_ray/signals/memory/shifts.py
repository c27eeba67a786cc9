"""
Detects changes of level: steps that are held, and spikes that go back.

Also rates the current state: fragmentation of the allocator, and how near the limit is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from traceml_ray.signals.memory.limits import MemoryLimits
from traceml_ray.signals.memory.shapes import Float, Int64, Severity
from traceml_ray.signals.memory.tracks import LEAST_TOTAL, MOST_BYTES, Place, Track, mad_sigma, median, noise
from traceml_ray.signals.memory.trend import Ramp, ramp

_NOT_RAMP = 3
"""If there is a ramp, a step must be this many times what the ramp grows within the same samples."""
_GRADUAL = 0.25
"""
Two steps are one gradual rise if every few samples between them rise by at least this share of
the steps.
"""
_LONG = 8
"""A change that lasts longer than the number of samples divided by this is no spike."""


@dataclass(frozen=True)
class Shift:
    """A step that is held, or a gradual rise that has ended."""

    start: int
    """Index of the first higher sample."""
    from_ns: int
    """Time of the last sample before it."""
    at_ns: int
    """Time of the first higher sample."""
    end_ns: int
    """Time of the first sample at the new level."""
    last_at: int
    """Index of that sample."""
    to_ns: int
    delta: float
    level: float
    """Level before it, in bytes."""
    noise: float
    warm: bool
    """Whether it is part of the warm-up."""
    step: int | None

    @property
    def took_s(self) -> float:
        """Return the time from its first higher sample to the last, in s."""
        return (self.end_ns - self.at_ns) / 1e9


@dataclass(frozen=True)
class Spikes:
    """All short rises of one counter above its level."""

    count: int
    samples: int
    of_samples: int
    from_ns: int
    to_ns: int
    """End of the last rise, in ns."""
    peak: float
    """Highest rise above the level, in bytes."""
    noise: float
    times: tuple[tuple[int, int], ...]
    """(begin, end) of each rise in ns: the last sample before it and its first sample."""


def shifts(track: Track, limits: MemoryLimits, growing: Ramp | None = None) -> list[Shift]:
    """
    Return the steps of a counter in order of time, including those of its warm-up.

    Steps between which the counter continues to rise are one step. A rise that is part of `growing` is not a
    step.
    """
    x, w = track.x, limits.step_samples
    n = len(x)
    if n < 2 * w:
        return []
    levels = _levels(x, w)
    rises = levels[w:] - levels[:-w]
    if rises.max() < limits.min_growth_bytes:
        return []
    noisy = noise(x)
    least = max(limits.min_growth_bytes, limits.noise * noisy)
    if growing is not None:
        least = max(least, _NOT_RAMP * growing.slope * track.interval_s * w)
    jumps, tops = rises.copy(), []
    for _ in range(limits.max_steps):
        top = int(np.argmax(jumps))
        if jumps[top] < least:
            break
        if levels[top + w :].min() >= float(levels[top]) + limits.step_kept * jumps[top]:
            tops.append(top)
        jumps[max(top - w, 0) : top + w + 1] = 0.0
    steps = [_shift(track, levels, rises, group, w, noisy) for group in _groups(sorted(tops), rises)]
    return [step for step in steps if growing is None or not _is_part(step, rises, w, growing)]


def _groups(tops: list[int], rises: Float) -> list[list[int]]:
    """Return groups of steps. In each group the counter rises all the time, so the group is one rise."""
    groups: list[list[int]] = []
    for top in tops:
        if groups:
            last = groups[-1][-1]
            if rises[last : top + 1].min() >= _GRADUAL * min(rises[last], rises[top]):
                groups[-1].append(top)
                continue
        groups.append([top])
    return groups


def _is_part(step: Shift, rises: Float, w: int, growing: Ramp) -> bool:
    """Return whether a step is the beginning of lasting growth: the counter continues to rise after it."""
    if step.took_s and (growing.bend == "slows" or growing.from_ns <= step.at_ns):
        return True
    after = step.last_at + w // 2
    return after < len(rises) and rises[after] >= _GRADUAL * step.delta


def spikes(
    track: Track, limits: MemoryLimits, growing: Ramp | None, steps: list[Shift], least: int
) -> Spikes | None:
    """Return the short rises of a counter above its level. None if there are none, or too few samples."""
    after = track.after
    n = len(after.x)
    if n < least or after.x.max() - after.x.min() < limits.min_growth_bytes:
        return None
    above = after.x - _level(track, growing, steps, limits.step_samples)
    sigma = mad_sigma(above)
    out = above > max(limits.min_growth_bytes, limits.noise * sigma)
    edges = np.diff(out.astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    short = (ends < n) & (ends - begins <= max(limits.step_samples, n // _LONG))
    where = np.concatenate([np.arange(0), *map(np.arange, begins[short], ends[short])])
    if not len(where):
        return None
    return Spikes(
        count=int(np.count_nonzero(short)),
        samples=len(where),
        of_samples=n,
        from_ns=int(after.t_ns[where[0]]),
        to_ns=int(after.t_ns[where[-1] + 1]),
        peak=float(above[where].max()),
        noise=sigma,
        times=tuple((int(after.t_ns[max(begin - 1, 0)]), int(after.t_ns[begin])) for begin in begins[short]),
    )


def _levels(x: Float, w: int) -> Float:
    """Return the running median of w samples (w is odd)."""
    middle: Float = np.sort(sliding_window_view(x, w), axis=1)[:, w // 2]
    return middle


def _level(track: Track, growing: Ramp | None, steps: list[Shift], rim: int) -> Float:
    """Return the level after warm-up: a ramp, constant pieces between steps, or the median."""
    after = track.after
    if growing is not None:
        rising: Float = growing.slope * np.maximum(after.s - after.s[growing.first], 0.0)
        return rising + median(after.x - rising)
    ends = sorted({step.start - track.settled for step in steps if step.start > track.settled})
    level = np.empty(len(after.x))
    for begin, end in zip([0, *ends], [*ends, len(level)], strict=True):
        level[begin:end] = median(after.x[begin:end])
    for step in steps:
        if step.last_at > step.start:  # during a gradual rise there is no level
            first, last = (max(n - track.settled, 0) for n in (step.start - rim, step.last_at + rim))
            level[first:last] = after.x[first:last]
    return level


def _shift(track: Track, levels: Float, rises: Float, tops: list[int], w: int, noisy: float) -> Shift:
    """Return the step at one of `tops`, or the gradual rise that contains all of them."""
    low, high = tops[0], tops[-1]
    steep = _GRADUAL * float(rises[tops].min())
    while low > 0 and rises[low - 1] >= steep:
        low -= 1
    while high + 1 < len(rises) and rises[high + 1] >= steep:
        high += 1
    if len(tops) > 1 or high - low >= 2 * w:
        first, last = min(low + w + 1, len(track.x) - 1), high + w - 1
    else:
        low = high = tops[0]
        first = last = low + 1 + int(np.argmax(np.diff(track.x[low : low + 2 * w])))
    level = float(levels[low])
    return Shift(
        start=first,
        from_ns=int(track.t_ns[first - 1]),
        at_ns=int(track.t_ns[first]),
        end_ns=int(track.t_ns[last]),
        last_at=last,
        to_ns=int(track.t_ns[-1]),
        delta=float(levels[high + w]) - level,
        level=level,
        noise=noisy,
        warm=last < track.settled,
        step=track.step_at(first),
    )


Bool = np.ndarray[Any, np.dtype[np.bool_]]
_LEAST = 5
_RECENT = 10
"""The current state is the median of the last tenth of the samples, at least five"""
_MOST = 60
"""and at most this many."""


@dataclass(frozen=True)
class Fragmentation:
    """Memory that torch's allocator holds in unused pieces of partly used blocks."""

    severity: Severity
    inactive: float
    reserved: float
    allocated: float | None
    from_ns: int
    to_ns: int
    retries: int | None
    """Number of times the allocator had to empty its cache since the first sample."""


@dataclass(frozen=True)
class Full:
    """How full the memory is."""

    severity: Severity
    used: float
    total: float
    cached: float | None
    """Memory that torch's allocator holds and has never used, from its peaks, in bytes. None: not known."""
    full_s: float | None
    """Time until memory is full at the present slope, in s. None: it does not grow."""
    from_ns: int
    to_ns: int
    retries: int | None


def fragmentation(place: Place, limits: MemoryLimits) -> Fragmentation | None:
    """Return the fragmentation of a device's allocator. None if it is insignificant."""
    inactive, reserved = place.columns.get("inactive_split_bytes"), place.columns.get("reserved_bytes")
    if inactive is None or reserved is None or place.device is None:
        return None
    known = (inactive >= 0) & (inactive <= reserved) & (reserved > 0) & (reserved <= MOST_BYTES)
    inactive, reserved, t_ns = inactive[known], reserved[known], place.t_ns[known]
    n = len(t_ns)
    if n < _LEAST:
        return None
    recent = slice(-min(max(_LEAST, n // _RECENT), _MOST), None)
    now, held = median(inactive[recent]), median(reserved[recent])
    if now < limits.fragmentation_bytes or now / held < limits.fragmentation[0]:
        return None
    bad = (inactive >= limits.fragmentation_bytes) & (inactive / reserved >= limits.fragmentation[0])
    allocated = place.latest("allocated_bytes")
    return Fragmentation(
        severity="critical" if now / held > limits.fragmentation[1] else "warning",
        inactive=now,
        reserved=held,
        allocated=allocated,
        from_ns=_since(bad, t_ns),
        to_ns=int(t_ns[-1]),
        retries=retries(place),
    )


def fullness(place: Place, limits: MemoryLimits) -> Full | None:
    """
    Return how full a device or the host's limit is, if it is near the limit.

    The severity is one level lower if memory would not be near the limit without the part that torch's
    allocator has cached and not used.
    """
    used_name, total_name = place.used_total
    used, total = place.columns.get(used_name), place.columns.get(total_name)
    if used is None or total is None:
        return None
    known = (used <= MOST_BYTES) & (total >= LEAST_TOTAL) & (total <= MOST_BYTES) & (used >= 0)
    used, total, t_ns = used[known], total[known], place.t_ns[known]
    if not len(t_ns):
        return None
    now, full = median(used[-3:]), float(total[-1])
    warning, critical = limits.near_limit
    if now / full < warning:
        return None
    cached = _never_used(place)
    severe = now / full >= critical
    if cached is not None and (now - cached) / full < warning:
        severity: Severity = "warning" if severe else "info"
    else:
        severity = "critical" if severe else "warning"
    track = place.track(used_name)
    growing = ramp(track, limits, limits.short_samples) if track is not None else None
    return Full(
        severity=severity,
        used=now,
        total=full,
        cached=cached,
        full_s=max(full - now, 0.0) / growing.slope if growing is not None else None,
        from_ns=_since(used >= warning * total, t_ns),
        to_ns=int(t_ns[-1]),
        retries=retries(place),
    )


def retries(place: Place) -> int | None:
    """Return how often the allocator emptied its cache to find room, since the first sample."""
    track = place.track("retries")
    return None if track is None else int(track.x[-1] - track.x[0])


def _never_used(place: Place) -> float | None:
    """Return the bytes that torch's allocator holds above its recent highest allocation."""
    reserved = place.latest("reserved_bytes")
    peaks = place.track("peak_bytes") or place.track("allocated_bytes")
    if reserved is None or peaks is None or place.device is None:
        return None
    return max(reserved - float(peaks.x[-_MOST:].max()), 0.0)


def _since(bad: Bool, t_ns: Int64) -> int:
    """Return the time since which the state is bad. Single good samples do not interrupt it."""
    good = np.flatnonzero(~bad[:-1] & ~bad[1:])
    return (
        int(t_ns[good[-1] + 2])
        if len(good) and good[-1] + 2 < len(t_ns)
        else int(t_ns[0 if not len(good) else -1])
    )
