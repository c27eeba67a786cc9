"""How memory stands now: fragmentation of the allocator, and how near the limit is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.robust import median
from traceml_ray.analysis.memory.shapes import Int64, Severity
from traceml_ray.analysis.memory.tracks import LEAST_TOTAL, MOST_BYTES, Place
from traceml_ray.analysis.memory.trend import ramp

Bool = np.ndarray[Any, np.dtype[np.bool_]]
_LEAST = 5
_RECENT = 10
"""The state of now is the median of the last tenth of the samples, of five at least,"""
_MOST = 60
"""and of so many at most."""


@dataclass(frozen=True)
class Fragmentation:
    """What torch's allocator holds in pieces of blocks that are in use."""

    severity: Severity
    inactive: float
    reserved: float
    allocated: float | None
    from_ns: int
    to_ns: int
    retries: int | None
    """How often the allocator had to give its cache back since the first sample."""


@dataclass(frozen=True)
class Full:
    """How much is used of what there is."""

    severity: Severity
    used: float
    total: float
    cached: float | None
    """Held by torch's allocator and never used, by its peaks; None: not known."""
    full_s: float | None
    """At the present slope; None: it does not grow."""
    from_ns: int
    to_ns: int
    retries: int | None


def fragmentation(place: Place, limits: MemoryLimits) -> Fragmentation | None:
    """Return the fragmentation of a device's allocator, None where it is no matter."""
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
    Return how much is used of a device or of the host's limit, where that is near the limit. It is one degree
    less severe where it would not be near without what torch's allocator has cached and has not used.
    """
    used_name, total_name = place.used_total
    used, total = place.columns.get(used_name), place.columns.get(total_name)
    if used is None or total is None:
        return None
    known = (used <= MOST_BYTES) & (total >= LEAST_TOTAL) & (total <= MOST_BYTES) & (used >= 0)
    used, total, t_ns = used[known], total[known], place.t_ns[known]
    if not len(t_ns):
        return None
    now, of = median(used[-3:]), float(total[-1])
    warning, critical = limits.near_limit
    if now / of < warning:
        return None
    cached = _never_used(place)
    severe = now / of >= critical
    if cached is not None and (now - cached) / of < warning:
        severity: Severity = "warning" if severe else "info"
    else:
        severity = "critical" if severe else "warning"
    track = place.track(used_name)
    growing = ramp(track, limits, limits.short_samples) if track is not None else None
    return Full(
        severity=severity,
        used=now,
        total=of,
        cached=cached,
        full_s=max(of - now, 0.0) / growing.slope if growing is not None else None,
        from_ns=_since(used >= warning * total, t_ns),
        to_ns=int(t_ns[-1]),
        retries=retries(place),
    )


def retries(place: Place) -> int | None:
    """Return how often the allocator gave its cache back to find room, since the first sample."""
    track = place.track("retries")
    return None if track is None else int(track.x[-1] - track.x[0])


def _never_used(place: Place) -> float | None:
    """Return what torch's allocator holds above its highest allocation of late."""
    reserved = place.latest("reserved_bytes")
    peaks = place.track("peak_bytes") or place.track("allocated_bytes")
    if reserved is None or peaks is None or place.device is None:
        return None
    return max(reserved - float(peaks.x[-_MOST:].max()), 0.0)


def _since(bad: Bool, t_ns: Int64) -> int:
    """Return since when it has been bad: single good samples do not end it."""
    good = np.flatnonzero(~bad[:-1] & ~bad[1:])
    return (
        int(t_ns[good[-1] + 2])
        if len(good) and good[-1] + 2 < len(t_ns)
        else int(t_ns[0 if not len(good) else -1])
    )
