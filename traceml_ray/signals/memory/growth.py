"""
Detects growth of a rank above its own settled baseline, on the monotone envelope. Rates the severity of a
lasting growth and makes its finding.
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
"""Smallest number of samples."""
_HELD = 3
"""Number of samples at the end that must all be above the threshold."""
_LEVELS = 10
"""A rise begins where growth reaches the threshold divided by this."""
_FLAT_SHARE = 0.2
"""A pause between levels of slow growth lasts at least this share of the whole time."""
_SMALL = 0.25
"""From this share of the threshold on, growth below the threshold gets an onset time."""
_NOISY = 3
"""If noise shifts the onset by more samples than this, a fit to all samples is more precise."""
_NEAR_TOP = 0.9
_BENT = 0.7
"""Growth is bent if its first half takes less than this share of the time of its second half."""
_BENT_ERROR = 0.25
"""Error of the onset of bent growth, as a share of the time of its first half."""
_MARGIN = 0.1
"""The time of a rise is measured from this share of it to the same share below its top."""
_LATE = 0.25
"""Last part of a rise, as a share of its time. The slope of this part shows how the rise ends."""
_LATE_SAMPLES = 8
"""Smallest number of samples in that last part."""
_OVER, _SLOWING = 0.16, 0.65
"""
Slope of the last part divided by the slope of the whole. Up to the first value the rise is over; up to the
second it slows down (a square root has 0.54).
"""
End = Literal["step", "grows", "slows", "over"]


@dataclass(frozen=True)
class Rise:
    """One growth of one counter."""

    at_ns: int
    """Onset of the growth, in ns."""
    spread_ns: int
    """Error of `at_ns` in ns: noise divided by slope."""
    delta: float
    """Size of the growth, in bytes."""
    threshold: float
    """Size from which on growth is reported, in bytes."""
    from_start: bool
    """Whether it grew from its first settled sample on. Then its onset is not known."""
    step: int | None
    end: End = "grows"
    """How it ends: it came at once, still grows, slows down, or is over."""


@dataclass(frozen=True)
class _Envelope:
    """
    Growth of blocks of samples above the baseline: bounded by the lowest later value and the highest earlier
    value.

    A spike affects only the highest value. The current tooth of a sawtooth affects only the lowest value.
    """

    first: int
    """First sample of the first block."""
    size: int
    growth: Float
    """(blocks,), monotonically increasing."""
    low: float
    """Lowest value of the baseline."""
    threshold: float
    noise: float


def rises(track: Track, limits: MemoryLimits, small: bool = False) -> list[Rise]:
    """
    Return all lasting growth of a counter after warm-up, the earliest first.

    Args:
        track: the counter.
        limits: the thresholds.
        small: also return growth below the threshold but above its noise.
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
    """
    Return the smallest growth that is reported, in bytes, without regard to noise. With `small`, the smallest
    growth that gets an onset time.
    """
    share = _SMALL if small else 1.0
    return share * max(limits.min_growth_bytes, limits.growth_of_peak * float(track.after.x.max(initial=0.0)))


def floor_growth(track: Track) -> float | None:
    """
    Return the growth of the lowest values since the baseline, in bytes. None if there are too
    few samples.
    """
    x = track.after.x
    if len(x) < _LEAST:
        return None
    size = _size(track.after)
    return float(x[-size:].min() - x[:size].min())


def _size(track: Track) -> int:
    """
    Return the number of samples per block. Longer steps need more samples, so that each block covers a whole
    step.
    """
    n = len(track.x)
    size = max(1, int(n**0.5 / 2), int(np.ceil(1.5 * track.per_step)) if track.per_step > 1 else 1)
    return max(1, min(size, n // 6))


def _envelope(track: Track, limits: MemoryLimits, least: float) -> _Envelope | None:
    """Return the envelope. None if nothing has grown by `least` bytes above its noise and stayed there."""
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
    """
    Return the onset of a rise from `base` to `top` (growth, bytes): a line through the rise, extended down to
    its base.
    """
    delta = top - base
    noisy = 3 * max(envelope.noise, noise(track.x))
    mark = base + max(envelope.threshold / _LEVELS, min(noisy, delta / 3))
    last = len(lowest) - 1

    def reached(growth: float) -> int:
        return min(int(np.searchsorted(lowest, envelope.low + growth)), last)

    begun = reached(mark)
    begun_s = float(track.s[begun])

    def along(high: float) -> tuple[float, float]:
        """Return when a line from `mark` to `high` left the base, and the error from noise, in seconds."""
        across_s = float(track.s[reached(high)]) - begun_s
        slope = (high - mark) / across_s if across_s > 0 else float("inf")
        return begun_s - (mark - base) / slope, min(noisy / slope, across_s)

    half = max(mark, base + delta / 2)
    (wide_s, spread_s), (near_s, _) = along(half), along((mark + half) / 2)
    # If growth is bent, a line through its beginning is closer; the difference between both lines is an
    # error.
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
        ):  # the growth is bent: a line through its beginning would come too early
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
    """Return how a rise by `delta` above `level` ends. `lowest` is the lowest value from each sample on."""
    shares = np.linspace(_MARGIN, 1 - _MARGIN, _LEVELS - 1)
    last = len(lowest) - 1
    reached = np.minimum(np.searchsorted(lowest, level + shares * delta), last)
    if reached[-1] - reached[0] <= _HELD:
        return "step"
    flat_s = float(track.s[last] - track.s[reached[-1]])
    # with stair-like growth the last pause may not be the end
    pause_s = float(np.diff(track.s[reached]).max())
    begun, late = (
        int(np.searchsorted(track.s, track.s[-1] - part * (float(track.s[-1]) - began_s)))
        for part in (1, _LATE)
    )
    held = last - _HELD  # memory above this level may still be released
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
    """The place whose memory this is: a rank process on a device, or (None) on its host."""

    rank: int
    node: str
    device: int | None


@dataclass(frozen=True)
class Growth:
    """The lasting growth of one counter, including growth that is too small for a finding."""

    kind: Kind
    counter: Counter
    ramp: Ramp
    confidence: Confidence
    sharing: Sharing
    """For RSS: whether the process's own pages grow."""
    left: float | None
    """Free bytes of the device or the host. None: not known."""
    slope_of_all: float
    """Growth of all used memory of the device or the host, in bytes per second. 0: not certain."""
    upper_bound: bool
    """Whether `left` is an upper bound, because the driver was not asked."""
    gap_from: str | None = None
    """For a gap: the counter from which it is computed."""


@dataclass(frozen=True)
class HostGrowth:
    """Growth of a whole host, to which several ranks contribute."""

    ranks: int
    """Number of ranks that grow."""
    slope: float
    """Growth of all its processes, in bytes per second."""


def is_large(growth: Growth, left: Forecast | None, limits: MemoryLimits) -> bool:
    """
    Return whether growth is large enough for a finding. A smaller growth suffices if memory is full within a
    day.
    """
    ramp = growth.ramp
    sure = left is not None and not left.earliest and ramp.samples >= limits.drift_samples
    soon = sure and left is not None and left.s <= limits.forecast_s
    return ramp.grown >= (limits.forecast_growth_bytes if soon else limits.min_growth_bytes)


def severity_of(growth: Growth, left: Forecast | None, limits: MemoryLimits) -> Severity:
    """
    Return the severity of growth, from when memory is full. It is one level lower if that is
    not certain.
    """
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
        spot: the place whose memory it is.
        growth: the growth of one of its counters.
        left: forecast of when memory is full.
        severity: its severity.
        host: growth of the whole host, on which `left` is based. None: `left` is based on the rank's own
            memory.
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
