"""Growth of a rank above its own settled baseline, on the monotone envelope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.robust import lowered, noise, starts
from traceml_ray.analysis.memory.shapes import Float
from traceml_ray.analysis.memory.tracks import Track

_LEAST = 4
"""Fewest samples."""
_HELD = 3
"""Samples at the end that must all be above."""
_LEVELS = 10
"""A rise begins where a tenth of the threshold is reached."""
_FLAT_SHARE = 0.2
"""Slow growth takes its time from level to level: a pause is at least this share of all the time."""


@dataclass(frozen=True)
class Rise:
    """One growth of one counter."""

    at_ns: int
    """When it began,"""
    spread_ns: int
    """to within so much, by noise over slope."""
    delta: float
    """Bytes."""
    threshold: float
    """From so many bytes on it counts."""
    from_start: bool
    """It grew from its first settled sample on: when that began is not known."""
    step: int | None


@dataclass(frozen=True)
class _Envelope:
    """
    Growth of blocks of samples: how far both the lowest value from here on and the highest up to here are
    above the baseline's. A spike moves only the highest, a tooth of a saw in progress only the lowest.
    """

    first: int
    """Sample that the first block begins with."""
    size: int
    growth: Float
    """(blocks,), never falls."""
    low: float
    """Lowest value of the baseline."""
    threshold: float
    noise: float


def rises(track: Track, limits: MemoryLimits) -> list[Rise]:
    """Return every growth of a counter after warm-up that it has kept, the earliest first."""
    after = track.after
    if len(after.x) < _LEAST:
        return []
    envelope = _envelope(after, limits)
    if envelope is None:
        return []
    size, growth = envelope.size, envelope.growth
    level = np.floor(growth * (_LEVELS / envelope.threshold))
    up = np.flatnonzero(np.diff(level, prepend=0.0) > 0)
    t = after.s[np.minimum(envelope.first + up * size, len(after.s) - 1)]
    flat_s = max(limits.apart_s, _FLAT_SHARE * float(after.s[-1] - after.s[0]))
    parts = np.split(up, np.flatnonzero(np.diff(t) > flat_s) + 1)
    unit = envelope.threshold / _LEVELS
    held = [(part, float(level[part[0] - 1]) * unit if part[0] else 0.0) for part in parts]
    kept = [(part, base) for part, base in held if growth[part[-1]] - base >= envelope.threshold]
    if not kept:
        kept = [(up, 0.0)]
    lowest = np.minimum.accumulate(after.x[::-1])[::-1]
    return [_rise(after, envelope, lowest, base, float(growth[part[-1]])) for part, base in kept]


def floor_growth(track: Track) -> float | None:
    """Return by how much the lowest values have grown since the baseline; None: too few samples."""
    x = track.after.x
    if len(x) < _LEAST:
        return None
    size = _size(track.after)
    return float(x[-size:].min() - x[:size].min())


def _size(track: Track) -> int:
    """Return the samples to a block: a longer step needs more, so that each block has seen all of one."""
    n = len(track.x)
    size = max(1, int(n**0.5 / 2), int(np.ceil(1.5 * track.per_step)) if track.per_step > 1 else 1)
    return max(1, min(size, n // 6))


def _envelope(track: Track, limits: MemoryLimits) -> _Envelope | None:
    """Return the envelope, None where nothing has grown and stayed."""
    x, size = track.x, _size(track)
    at = starts(len(x), size)
    low, high = np.minimum.reduceat(x, at), np.maximum.reduceat(x, at)
    noisy = max(noise(low), noise(high))
    threshold = max(limits.min_growth_bytes, limits.growth_of_peak * float(x.max()), limits.noise * noisy)
    first = lowered(low, threshold)
    low, high = low[first:], high[first:]
    base = max(1, len(low) // 8)
    ground, ceiling = low[:base].min(), high[:base].max()
    lasting = np.minimum.accumulate(low[::-1])[::-1] - ground
    growth = np.maximum(np.minimum(lasting, np.maximum.accumulate(high) - ceiling), 0.0)
    end = len(growth) - -(-_HELD // size) + 1
    if end < 1 or growth[end - 1] < threshold:
        return None
    return _Envelope(first * size, size, growth[:end], float(ground), threshold, noisy)


def _rise(track: Track, envelope: _Envelope, lowest: Float, base: float, top: float) -> Rise:
    """Return when a rise from `base` to `top` (growth, bytes) began: a line through it, down to its base."""
    delta = top - base
    noisy = 3 * max(envelope.noise, noise(track.x))
    mark = base + max(envelope.threshold / _LEVELS, min(noisy, delta / 3))
    half = max(mark, base + delta / 2)
    last = len(lowest) - 1
    begun = min(int(np.searchsorted(lowest, envelope.low + mark)), last)
    midway = min(int(np.searchsorted(lowest, envelope.low + half)), last)
    begun_s, across_s = float(track.s[begun]), float(track.s[midway] - track.s[begun])
    slope = (half - mark) / across_s if across_s > 0 else float("inf")
    began_s = max(begun_s - (mark - base) / slope, float(track.s[envelope.first]))
    spread_s = min(noisy / slope, across_s)
    return Rise(
        at_ns=int(track.t_ns[0]) + round((began_s - float(track.s[0])) * 1e9),
        spread_ns=round(spread_s * 1e9),
        delta=delta,
        threshold=envelope.threshold,
        from_start=base == 0 and began_s <= track.s[envelope.first] + track.interval_s,
        step=track.step_at(int(np.searchsorted(track.s, began_s))),
    )
