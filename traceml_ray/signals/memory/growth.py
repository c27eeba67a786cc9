"""
Growth of a rank above its own settled baseline, on the monotone envelope.

A lasting growth of memory: how grave it is, and what a finding says of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.limits import MemoryLimits
from traceml_ray.signals.memory.shapes import (
    Confidence,
    Counter,
    Float,
    Kind,
    MemoryFinding,
    Severity,
    Value,
)
from traceml_ray.signals.memory.tracks import Track, hinge, lowered, noise, starts
from traceml_ray.signals.memory.trend import Forecast, Ramp

_LEAST = 4
"""Fewest samples."""
_HELD = 3
"""Samples at the end that must all be above."""
_LEVELS = 10
"""A rise begins where a tenth of the threshold is reached."""
_FLAT_SHARE = 0.2
"""Slow growth takes its time from level to level: a pause is at least this share of all the time."""
_SMALL = 0.25
"""Growth from this share of the threshold on has a time at which it began, though it does not count."""
_NOISY = 3
"""Where noise moves the beginning by more samples than that, a fit to all samples tells it better."""
_NEAR_TOP = 0.9
_BENT = 0.7
"""Growth is bent if its first half takes less than this share of the time that its second half takes."""
_BENT_ERROR = 0.25
"""Error of the beginning of bent growth, as a share of the time of its first half."""
_MARGIN = 0.1
"""A rise takes the time from this share of it to the same share below its top."""
_LATE = 0.25
"""Last part of a rise, as a share of its time. Its slope shows how the rise ends."""
_LATE_SAMPLES = 8
"""Least number of samples in that last part."""
_OVER, _SLOWING = 0.16, 0.65
"""
Slope of the last part over that of the whole: up to the first value the rise is over, up to the second it
slows down (a root has 0.54).
"""
End = Literal["step", "grows", "slows", "over"]


@dataclass(frozen=True)
class Rise:
    """One growth of one counter."""

    at_ns: int
    """Time at which it began, in ns."""
    spread_ns: int
    """Error of `at_ns` in ns, from noise over slope."""
    delta: float
    """Size of the rise, in bytes."""
    threshold: float
    """Size from which on it counts, in bytes."""
    from_start: bool
    """Whether it grew from its first settled sample on. Then its beginning is not known."""
    step: int | None
    end: End = "grows"
    """How it ends: it came at once, still grows, grows more slowly than before, or is over."""


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


def rises(track: Track, limits: MemoryLimits, small: bool = False) -> list[Rise]:
    """
    Return every growth of a counter after warm-up that it has kept, the earliest first.

    Args:
        track: the counter.
        limits: the thresholds.
        small: also growth that does not count, beyond its noise.
    """
    after = track.after
    if len(after.x) < _LEAST:
        return []
    envelope = _envelope(after, limits, least_growth(track, limits, small))
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


def least_growth(track: Track, limits: MemoryLimits, small: bool = False) -> float:
    """Return from how many bytes on growth counts, but for noise; with `small`, from when on it is dated."""
    share = _SMALL if small else 1.0
    return share * max(limits.min_growth_bytes, limits.growth_of_peak * float(track.after.x.max(initial=0.0)))


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


def _envelope(track: Track, limits: MemoryLimits, least: float) -> _Envelope | None:
    """Return the envelope, None where nothing has grown by `least` bytes beyond its noise, and stayed."""
    x, size = track.x, _size(track)
    blocks = starts(len(x), size)
    low, high = np.minimum.reduceat(x, blocks), np.maximum.reduceat(x, blocks)
    noisy = max(noise(low), noise(high))
    threshold = max(least, limits.noise * noisy)
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
    last = len(lowest) - 1

    def reached(growth: float) -> int:
        return min(int(np.searchsorted(lowest, envelope.low + growth)), last)

    begun = reached(mark)
    begun_s = float(track.s[begun])

    def along(high: float) -> tuple[float, float]:
        """Return when a line from `mark` to `high` left the base, and the error by noise, in seconds."""
        across_s = float(track.s[reached(high)]) - begun_s
        slope = (high - mark) / across_s if across_s > 0 else float("inf")
        return begun_s - (mark - base) / slope, min(noisy / slope, across_s)

    half = max(mark, base + delta / 2)
    (wide_s, spread_s), (near_s, _) = along(half), along((mark + half) / 2)
    # Where growth is bent, the line through its beginning is nearer; how far both are apart is an error.
    bent_s = max(near_s - wide_s, 0.0)
    began_s = max(wide_s + bent_s, float(track.s[envelope.first]))
    if spread_s > _NOISY * track.interval_s:
        earliest = max(envelope.first, reached(base - envelope.threshold / _LEVELS) if base else 0)
        halfway = reached(half)
        fitted_s, error_s = hinge(
            track.s[earliest : halfway + 1], track.x[earliest : halfway + 1], began_s, spread_s
        )
        early_s = float(track.s[halfway]) - fitted_s
        later_s = float(track.s[reached(base + _NEAR_TOP * delta)] - track.s[halfway])
        if early_s < _BENT * later_s / (
            2 * _NEAR_TOP - 1
        ):  # it is bent: a line through its beginning comes too early
            error_s += _BENT_ERROR * early_s
        if error_s < spread_s:
            began_s, spread_s = fitted_s, error_s
    return Rise(
        at_ns=int(track.t_ns[0]) + round((began_s - float(track.s[0])) * 1e9),
        spread_ns=round((spread_s + bent_s) * 1e9),
        delta=delta,
        threshold=envelope.threshold,
        from_start=base == 0 and began_s <= track.s[envelope.first] + track.interval_s,
        step=track.step_at(int(np.searchsorted(track.s, began_s))),
        end=_end(track, began_s, base + envelope.low, delta, lowest),
    )


def _end(track: Track, began_s: float, level: float, delta: float, lowest: Float) -> End:
    """Return how a rise by `delta` from `level` on goes on; `lowest` is the lowest value from a sample on."""
    shares = np.linspace(_MARGIN, 1 - _MARGIN, _LEVELS - 1)
    last = len(lowest) - 1
    reached = np.minimum(np.searchsorted(lowest, level + shares * delta), last)
    if reached[-1] - reached[0] <= _HELD:
        return "step"
    flat_s = float(track.s[last] - track.s[reached[-1]])
    pause_s = float(np.diff(track.s[reached]).max())  # of stairs the last one may be no end
    begun, late = (
        int(np.searchsorted(track.s, track.s[-1] - part * (float(track.s[-1]) - began_s)))
        for part in (1, _LATE)
    )
    held = last - _HELD  # what comes after may be given back
    goes_on = float(lowest[held]) > level + (1 + _MARGIN) * delta
    if goes_on or held - late < _LATE_SAMPLES - _HELD:
        return "grows"
    late_slope = float(lowest[held] - lowest[late]) / float(track.s[held] - track.s[late])
    ratio = late_slope * float(track.s[held] - track.s[min(begun, held - 1)]) / delta
    if ratio <= _OVER and flat_s >= 2 * pause_s:
        return "over"
    return "slows" if ratio <= _SLOWING and flat_s >= pause_s else "grows"


Sharing = Literal["own", "shared", "unknown"]
_LESS_SEVERE: dict[Severity, Severity] = {"critical": "warning", "warning": "info", "info": "info"}
_MOST_OVER = 99.0
"""Cap of the evidence against a random walk, reached when growth is perfectly linear."""


@dataclass(frozen=True)
class Spot:
    """Whose memory it is: that of a rank process on a device, or (None) on its host."""

    rank: int
    node: str
    device: int | None


@dataclass(frozen=True)
class Growth:
    """The lasting growth of one counter, also where it is too small for a finding."""

    kind: Kind
    counter: Counter
    ramp: Ramp
    confidence: Confidence
    sharing: Sharing
    """Of RSS: whether the process's own pages grow."""
    left: float | None
    """Free bytes of the device or the host; None: not known."""
    slope_of_all: float
    """Bytes a second by which all that is used of the device or the host grows; 0: not sure."""
    upper_bound: bool
    """What is left is an upper bound: the driver was not asked."""
    gap_from: str | None = None
    """Of a gap: the counter that it is measured from."""


@dataclass(frozen=True)
class HostGrowth:
    """The growth of a whole host, of which several ranks have a share."""

    ranks: int
    """That grow."""
    slope: float
    """Bytes a second, of all of its processes."""


def is_large(growth: Growth, left: Forecast | None, limits: MemoryLimits) -> bool:
    """Whether growth is worth a finding: by its size; less is enough where memory is full within a day."""
    ramp = growth.ramp
    sure = left is not None and not left.earliest and ramp.samples >= limits.drift_samples
    soon = sure and left is not None and left.s <= limits.forecast_s
    return ramp.grown >= (limits.forecast_growth_bytes if soon else limits.min_growth_bytes)


def severity_of(growth: Growth, left: Forecast | None, limits: MemoryLimits) -> Severity:
    """Return how grave growth is: by when memory is full, and a degree less where that is not sure."""
    if growth.sharing == "shared":
        return "info"
    severity = _by_time(growth.ramp, left, growth.confidence, limits)
    return _LESS_SEVERE[severity] if growth.ramp.bend == "slows" else severity


def finding_of(
    spot: Spot,
    growth: Growth,
    left: Forecast | None,
    severity: Severity,
    host: HostGrowth | None = None,
) -> MemoryFinding:
    """
    Return the finding about a growth.

    Args:
        spot: whose memory it is.
        growth: of one of its counters.
        left: when memory is full.
        severity: how grave that is.
        host: the growth of its whole host, which `left` goes by; None: of its own memory only.
    """
    ramp = growth.ramp
    why = sentences.growing(spot.rank, spot.node, spot.device, growth.counter, ramp)
    why += sentences.lasts(left, growth.upper_bound, None if host is None else (host.ranks, host.slope))
    if growth.sharing == "shared":
        why = why.removesuffix(".") + "; its own pages (USS) do not grow, so it is shared or file pages."
    return MemoryFinding(
        kind=growth.kind,
        rank=spot.rank,
        node=spot.node,
        device=spot.device,
        severity=severity,
        confidence=growth.confidence,
        from_ns=ramp.from_ns,
        to_ns=ramp.to_ns,
        evidence=_evidence(growth, left, host),
        next=sentences.next_of(growth.kind, spot.device),
        why=why,
    )


def _by_time(ramp: Ramp, left: Forecast | None, confidence: Confidence, limits: MemoryLimits) -> Severity:
    sure = confidence != "low"
    if left is not None and left.s <= limits.critical_s:
        trusted = ramp.seconds >= min(limits.trusted_s, limits.trusted_share * left.s)
        return "critical" if sure and trusted else "warning"
    return "warning" if sure and (left is None or left.s <= limits.forecast_s) else "info"


def _evidence(growth: Growth, left: Forecast | None, host: HostGrowth | None) -> dict[str, Value]:
    ramp = growth.ramp
    when = None if left is None or left.earliest else left
    return {
        "counter": growth.counter,
        "bytes_per_s": ramp.slope,
        "bytes_per_step": ramp.slope_step,
        "recent_bytes_per_s": ramp.recent,
        "bend": ramp.bend,
        "grown_bytes": round(ramp.grown),
        "r2": ramp.r2,
        "over_walk": min(ramp.over_walk, _MOST_OVER),
        "samples": ramp.samples,
        "from_step": ramp.from_step,
        "to_step": ramp.to_step,
        "left_bytes": None if left is None else round(left.left),
        "forecast_s": None if when is None else when.s,
        "forecast_steps": None if when is None else when.steps,
        "earliest_s": left.s if left is not None and left.earliest else None,
        **({} if host is None else {"host_bytes_per_s": host.slope, "host_ranks": host.ranks}),
        **({"gap_from": growth.gap_from} if growth.counter == "gap_bytes" else {}),
    }
