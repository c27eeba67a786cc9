"""A lasting growth of memory: how grave it is, and what a finding says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traceml_ray.analysis.memory import sentences
from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.shapes import Confidence, Counter, Finding, Kind, Severity, Value
from traceml_ray.analysis.memory.trend import Forecast, Ramp

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
) -> Finding:
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
    return Finding(
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
