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
_LONG = 8
"""What lasts longer than this part of all samples is no spike."""


@dataclass(frozen=True)
class Shift:
    """A step that is held."""

    at: int
    """The first sample after it."""
    from_ns: int
    """The last sample before it."""
    at_ns: int
    to_ns: int
    delta: float
    level: float
    """Bytes before it."""
    noise: float
    warm: bool
    """It is part of the warm-up."""
    step: int | None


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


def shifts(track: Track, limits: MemoryLimits, growing: Ramp | None = None) -> list[Shift]:
    """Return the steps of a counter, also those of its warm-up, in order of time."""
    x, w = track.x, limits.step_samples
    n = len(x)
    if n < 2 * w:
        return []
    levels = _levels(x, w)
    jumps = levels[w:] - levels[:-w]
    if jumps.max() < limits.min_growth_bytes:
        return []
    noisy = noise(x)
    least = max(limits.min_growth_bytes, limits.noise * noisy)
    if growing is not None:
        least = max(least, _NOT_RAMP * growing.slope * track.interval_s * w)
    found: list[Shift] = []
    for _ in range(limits.max_steps):
        best = int(np.argmax(jumps))
        if jumps[best] < least:
            break
        base = float(levels[best])
        if levels[best + w :].min() >= base + limits.step_kept * jumps[best]:
            at = best + 1 + int(np.argmax(np.diff(x[best : best + 2 * w])))
            found.append(_shift(track, at, base, float(jumps[best]), noisy))
        jumps[max(best - w, 0) : best + w + 1] = 0.0
    return sorted(found, key=lambda shift: shift.at)


def spikes(track: Track, limits: MemoryLimits, growing: Ramp | None, steps: list[Shift]) -> Spikes | None:
    """Return the short rises above the level of a counter after warm-up, None without any."""
    after = track.after
    n = len(after.x)
    if n < limits.spike_samples or after.x.max() - after.x.min() < limits.min_growth_bytes:
        return None
    above = after.x - _level(track, growing, steps)
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
    )


def _levels(x: Float, w: int) -> Float:
    """Return the median of each w samples (w is odd)."""
    middle: Float = np.sort(sliding_window_view(x, w), axis=1)[:, w // 2]
    return middle


def _level(track: Track, growing: Ramp | None, steps: list[Shift]) -> Float:
    """Return the level after warm-up: a ramp, pieces between steps, or the median."""
    after = track.after
    if growing is not None:
        rising: Float = growing.slope * np.maximum(after.s - after.s[growing.first], 0.0)
        return rising + median(after.x - rising)
    ends = sorted({step.at - track.settled for step in steps if step.at > track.settled})
    level = np.empty(len(after.x))
    for begin, end in zip([0, *ends], [*ends, len(level)], strict=True):
        level[begin:end] = median(after.x[begin:end])
    return level


def _shift(track: Track, at: int, base: float, delta: float, noisy: float) -> Shift:
    return Shift(
        at=at,
        from_ns=int(track.t_ns[at - 1]),
        at_ns=int(track.t_ns[at]),
        to_ns=int(track.t_ns[-1]),
        delta=delta,
        level=base,
        noise=noisy,
        warm=at < track.settled,
        step=track.step_at(at),
    )
