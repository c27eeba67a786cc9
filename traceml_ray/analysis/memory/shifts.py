"""Changes of level: steps that are held, and spikes that go back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.robust import mad_sigma, median, noise
from traceml_ray.analysis.memory.shapes import Float
from traceml_ray.analysis.memory.tracks import Track
from traceml_ray.analysis.memory.trend import Ramp

_NOT_RAMP = 3
"""Once a ramp is found, a step must be so many times what the ramp grows within the same samples."""
_GRADUAL = 0.25
"""Two steps are one rise where in between each few samples rise by this share of them."""
_LONG = 8
"""What lasts longer than this part of all samples is no spike."""


@dataclass(frozen=True)
class Shift:
    """A step that is held, or a gradual rise that has ended."""

    at: int
    """Index of the first sample that is higher."""
    from_ns: int
    """Time of the last sample before it."""
    at_ns: int
    """Time of the first sample that is higher."""
    end_ns: int
    """Time of the first sample that has all of it,"""
    last_at: int
    """and its index."""
    to_ns: int
    delta: float
    level: float
    """Bytes before it."""
    noise: float
    warm: bool
    """It is part of the warm-up."""
    step: int | None

    @property
    def took_s(self) -> float:
        """Return how long it took from its first higher sample to the last."""
        return (self.end_ns - self.at_ns) / 1e9


@dataclass(frozen=True)
class Spikes:
    """All the short rises of one counter above its level."""

    count: int
    samples: int
    of_samples: int
    from_ns: int
    to_ns: int
    """The end of the last one."""
    peak: float
    """Bytes above the level."""
    noise: float
    times: tuple[tuple[int, int], ...]
    """(begin, end) ns of each: the last sample before it and its first sample."""


def shifts(track: Track, limits: MemoryLimits, growing: Ramp | None = None) -> list[Shift]:
    """
    Return the steps of a counter, also those of its warm-up, in order of time. Steps between which it rises
    on are one; a rise that is part of `growing` is none.
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
    """Return the steps that are one rise each: between them the counter rises all the time."""
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
    """Whether a step is the beginning of lasting growth: the counter rises on after it."""
    if step.took_s and (growing.bend == "slows" or growing.from_ns <= step.at_ns):
        return True
    after = step.last_at + w // 2
    return after < len(rises) and rises[after] >= _GRADUAL * step.delta


def spikes(
    track: Track, limits: MemoryLimits, growing: Ramp | None, steps: list[Shift], least: int
) -> Spikes | None:
    """Return the short rises above the level of a counter; None without any, or with too few samples."""
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
    """Return the median of each w samples (w is odd)."""
    middle: Float = np.sort(sliding_window_view(x, w), axis=1)[:, w // 2]
    return middle


def _level(track: Track, growing: Ramp | None, steps: list[Shift], rim: int) -> Float:
    """Return the level after warm-up: a ramp, pieces between steps, or the median."""
    after = track.after
    if growing is not None:
        rising: Float = growing.slope * np.maximum(after.s - after.s[growing.first], 0.0)
        return rising + median(after.x - rising)
    ends = sorted({step.at - track.settled for step in steps if step.at > track.settled})
    level = np.empty(len(after.x))
    for begin, end in zip([0, *ends], [*ends, len(level)], strict=True):
        level[begin:end] = median(after.x[begin:end])
    for step in steps:
        if step.last_at > step.at:  # a rise that took its time has no level
            first, last = (max(n - track.settled, 0) for n in (step.at - rim, step.last_at + rim))
            level[first:last] = after.x[first:last]
    return level


def _shift(track: Track, levels: Float, rises: Float, tops: list[int], w: int, noisy: float) -> Shift:
    """Return a step at one of `tops`, or the rise that all of them are part of."""
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
        at=first,
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
