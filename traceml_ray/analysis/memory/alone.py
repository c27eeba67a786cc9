"""What can be said of one rank process's memory by itself, without the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from traceml_ray.analysis.memory import sentences
from traceml_ray.analysis.memory.growth import Rise, floor_growth, rises
from traceml_ray.analysis.memory.levels import Full, fragmentation, fullness
from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.robust import median
from traceml_ray.analysis.memory.shapes import (
    Confidence,
    Counter,
    Finding,
    Kind,
    RankMemory,
    Series,
    Severity,
    Value,
)
from traceml_ray.analysis.memory.shifts import Shift, Spikes, shifts, spikes
from traceml_ray.analysis.memory.tracks import Place, Track, places
from traceml_ray.analysis.memory.trend import Forecast, Ramp, forecast, ramp

Sharing = Literal["own", "shared", "unknown"]
_LOWER: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}
_MOST_OVER = 99.0
"""Of a growth that is even to the byte."""
_USS_LEAST = 2
_OWN_SHARE = 0.3
"""Growth of RSS of which less than this share is USS is of pages that are shared, or of files."""


@dataclass(frozen=True)
class Hidden:
    """A change of the hidden gap, which collectives may explain."""

    finding: Finding
    begin_ns: int
    """It began between this sample"""
    end_ns: int
    """and this one; of a drift, its whole time."""
    delta: float
    noise: float
    warm: bool
    """Only collectives make a finding of it: during warm-up libraries take memory."""


@dataclass(frozen=True)
class Alone:
    """The judgement of one place, and what the comparison with other ranks needs of it."""

    rank: int
    node: str
    process: str
    device: int | None
    bound_ns: int
    interval_ns: int
    """Between samples, usually."""
    span: tuple[int, int] | None
    """The times of the first and last sample after warm-up."""
    certain: bool
    """The end of the warm-up is known."""
    has_gap: bool
    peak: float | None
    """Highest use after warm-up: of torch's allocator, or RSS."""
    peak_share: float | None
    """That over what there is."""
    row: RankMemory
    grown: dict[Counter, float] = field(default_factory=dict)
    """By how much each counter has grown since its baseline, whether that counts or not."""
    findings: list[Finding] = field(default_factory=list)
    rises: list[tuple[Counter, Rise]] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    full: Full | None = None


def alone(series: Series, limits: MemoryLimits) -> list[Alone]:
    """Return the judgement of each place of a rank process."""
    with np.errstate(all="ignore"):
        return [_Judging(place, limits).result() for place in places(series)]


class _Judging:
    """Goes through the rules for one place."""

    def __init__(self, place: Place, limits: MemoryLimits) -> None:
        self._place, self._limits = place, limits
        self._findings: list[Finding] = []
        self._hidden: list[Hidden] = []
        self._forecasts: list[Forecast] = []

    def result(self) -> Alone:
        """Return what all rules say."""
        place, limits = self._place, self._limits
        host = place.device is None
        main: Counter = "rss_bytes" if host else "allocated_bytes"
        track = place.track(main)
        counters: list[tuple[Counter, Track]] = [(main, track)] if track is not None else []
        gap = None if host else place.gap
        if gap is not None:
            counters.append(("gap_bytes", gap))
        if track is not None:
            growing = self._grows("creep", main, track, limits.creep_samples, floor=not host)
            if host:
                self._shifts(main, track, growing)
        if gap is not None:
            growing = self._grows("persistent_drift", "gap_bytes", gap, limits.drift_samples)
            self._shifts("gap_bytes", gap, growing)
        self._fragmentation()
        full = fullness(place, limits)
        own = track if track is not None else gap
        peak = _peak(place, track)
        return Alone(
            rank=place.rank,
            node=place.node,
            process=place.process,
            device=place.device,
            bound_ns=place.bound_ns,
            interval_ns=round(own.interval_s * 1e9) if own is not None else 0,
            span=(int(own.after.t_ns[0]), int(own.t_ns[-1])) if own is not None and len(own) else None,
            certain=place.settled is not None,
            has_gap=gap is not None,
            peak=peak,
            peak_share=None if peak is None or place.total is None else peak / place.total,
            row=self._row(gap),
            grown={counter: _grown(counter, each) for counter, each in counters},
            findings=self._findings,
            rises=[(counter, rise) for counter, each in counters for rise in rises(each, limits)],
            hidden=self._hidden,
            full=full,
        )

    def _grows(
        self, kind: Kind, counter: Counter, track: Track, least: int, floor: bool = False
    ) -> Ramp | None:
        """Note a lasting growth where it is large enough; return it also where it is not."""
        place, limits = self._place, self._limits
        growing = ramp(track, limits, least, floor)
        if growing is None:
            return None
        if kind == "creep" and growing.steps is not None and growing.steps < limits.creep_steps:
            return growing
        left = forecast(place, growing, limits)
        soon = left is not None and left.s <= limits.forecast_s and growing.samples >= limits.drift_samples
        if growing.grown < (limits.forecast_growth_bytes if soon else limits.min_growth_bytes):
            return growing
        if left is not None:
            self._forecasts.append(left)
        confidence = self._sure(growing.confidence(limits))
        sharing = _sharing(place, growing) if counter == "rss_bytes" else "unknown"
        severity = "info" if sharing == "shared" else _grow_severity(growing, left, confidence, limits)
        why = sentences.growing(place, counter, growing, left)
        if sharing == "shared":
            why = why.removesuffix(".") + "; its own pages (USS) do not grow, so it is shared or file pages."
        evidence = _ramp_evidence(counter, growing, left)
        if counter == "gap_bytes":
            evidence["gap_from"] = place.gap_from
        finding = self._add(kind, severity, confidence, growing.from_ns, growing.to_ns, evidence, why)
        if kind == "persistent_drift":
            self._hidden.append(Hidden(finding, growing.from_ns, growing.to_ns, growing.grown, 0.0, False))
        return growing

    def _shifts(self, counter: Counter, track: Track, growing: Ramp | None) -> None:
        """Note steps and spikes."""
        limits = self._limits
        held = shifts(track, limits, growing)
        hidden = counter == "gap_bytes"
        for shift in held:
            if shift.warm and not hidden:
                continue
            self._step(counter, shift, hidden)
        found = spikes(track, limits, growing, held)
        if found is not None:
            self._spikes(counter, found, hidden)

    def _step(self, counter: Counter, shift: Shift, hidden: bool) -> None:
        place, limits = self._place, self._limits
        total = place.total
        small = total is not None and shift.delta < limits.step_of_total * total
        finding = _finding(
            place,
            "step_change",
            "info" if small or not hidden or shift.warm else "warning",
            self._sure("high" if shift.delta > 2 * limits.noise * shift.noise else "medium"),
            (shift.at_ns, shift.to_ns),
            {
                "counter": counter,
                "delta_bytes": round(shift.delta),
                "before_bytes": round(shift.level),
                "noise_bytes": round(shift.noise),
                "step": shift.step,
                **({"gap_from": place.gap_from} if hidden else {}),
            },
            sentences.shifted(place, counter, shift),
        )
        if not shift.warm:
            self._findings.append(finding)
        if hidden:
            self._hidden.append(
                Hidden(finding, shift.from_ns, shift.at_ns, shift.delta, shift.noise, shift.warm)
            )

    def _spikes(self, counter: Counter, found: Spikes, hidden: bool) -> None:
        place = self._place
        used, total = place.track(place.used_total[0]), place.total
        highest = float(used.after.x.max()) if used is not None and len(used) else None
        near = highest is not None and total is not None and highest >= self._limits.near_limit[1] * total
        finding = self._add(
            "transient_spike",
            "warning" if near else "info",
            self._sure("high" if found.samples > 1 else "medium"),
            found.from_ns,
            found.to_ns,
            {
                "counter": counter,
                "peak_bytes": round(found.peak),
                "count": found.count,
                "share": found.samples / found.of_samples,
                "noise_bytes": round(found.noise),
                "highest_used_bytes": None if highest is None else round(highest),
            },
            sentences.spiking(place, counter, found),
        )
        if hidden:
            self._hidden.append(Hidden(finding, found.from_ns, found.from_ns, found.peak, found.noise, False))

    def _fragmentation(self) -> None:
        place = self._place
        found = fragmentation(place, self._limits)
        if found is None:
            return
        evidence: dict[str, Value] = {
            "inactive_split_bytes": round(found.inactive),
            "reserved_bytes": round(found.reserved),
            "inactive_share": found.inactive / found.reserved,
            "unallocated_share": None
            if found.allocated is None
            else max(1 - found.allocated / found.reserved, 0.0),
            "alloc_retries": found.retries,
        }
        why = sentences.fragmented(place, found.inactive, found.reserved)
        confidence: Confidence = "high" if (found.to_ns - found.from_ns) >= 10e9 else "medium"
        self._add("fragmentation", found.severity, confidence, found.from_ns, found.to_ns, evidence, why)

    def _sure(self, confidence: Confidence) -> Confidence:
        """Return less where the end of the warm-up is only guessed."""
        return confidence if self._place.settled is not None else _LOWER[confidence]

    def _add(
        self,
        kind: Kind,
        severity: Severity,
        confidence: Confidence,
        from_ns: int,
        to_ns: int,
        evidence: dict[str, Value],
        why: str,
    ) -> Finding:
        finding = _finding(self._place, kind, severity, confidence, (from_ns, to_ns), evidence, why)
        self._findings.append(finding)
        return finding

    def _row(self, gap: Track | None) -> RankMemory:
        place = self._place
        used, total = place.latest(place.used_total[0]), place.total
        soonest = min(self._forecasts, key=lambda left: left.s, default=None)
        allocated, reserved, rss = (
            place.track(name) for name in ("allocated_bytes", "reserved_bytes", "rss_bytes")
        )
        return RankMemory(
            rank=place.rank,
            node=place.node,
            process=place.process,
            device=place.device,
            samples=place.samples,
            allocated_growth_bytes=_whole(None if allocated is None else floor_growth(allocated)),
            reserved_growth_bytes=_whole(_median_growth(reserved)),
            rss_growth_bytes=_whole(_median_growth(rss)),
            gap_bytes=_whole(None if gap is None else gap.last()),
            used_bytes=_whole(used),
            total_bytes=_whole(total),
            forecast_steps=None if soonest is None else soonest.steps,
            forecast_s=None if soonest is None else soonest.s,
            anomaly=None,
            severity=None,
            rise_bytes=_whole(_rise(rss if place.device is None else allocated)),
        )


def _finding(
    place: Place,
    kind: Kind,
    severity: Severity,
    confidence: Confidence,
    times: tuple[int, int],
    evidence: dict[str, Value],
    why: str,
) -> Finding:
    return Finding(
        kind=kind,
        rank=place.rank,
        node=place.node,
        device=place.device,
        severity=severity,
        confidence=confidence,
        from_ns=times[0],
        to_ns=times[1],
        evidence=evidence,
        next=sentences.next_of(kind, place.device),
        why=why,
    )


def _grow_severity(
    growing: Ramp, left: Forecast | None, confidence: Confidence, limits: MemoryLimits
) -> Severity:
    """Return how bad growth is: by when memory is full, and a degree less where that is not sure."""
    sure = confidence != "low"
    if left is not None and left.s <= limits.critical_s:
        trusted = growing.seconds >= min(limits.trusted_s, limits.trusted_share * left.s)
        return "critical" if sure and trusted else "warning"
    return "warning" if sure and (left is None or left.s <= limits.forecast_s) else "info"


def _ramp_evidence(counter: Counter, growing: Ramp, left: Forecast | None) -> dict[str, Value]:
    return {
        "counter": counter,
        "bytes_per_s": growing.slope,
        "bytes_per_step": growing.slope_step,
        "grown_bytes": round(growing.grown),
        "r2": growing.r2,
        "over_walk": min(growing.over_walk, _MOST_OVER),
        "samples": growing.samples,
        "from_step": growing.from_step,
        "to_step": growing.to_step,
        "left_bytes": None if left is None else round(left.left),
        "forecast_s": None if left is None else left.s,
        "forecast_steps": None if left is None else left.steps,
    }


def _sharing(place: Place, growing: Ramp) -> Sharing:
    """Return whether growth of RSS is of the process's own pages, by the few samples of USS."""
    track = place.track("uss_bytes")
    if track is None:
        return "unknown"
    own = track.x[track.t_ns >= growing.from_ns]
    t_ns = track.t_ns[track.t_ns >= growing.from_ns]
    if len(own) < _USS_LEAST or t_ns[-1] <= t_ns[0]:
        return "unknown"
    slope = float(own[-1] - own[0]) / (float(t_ns[-1] - t_ns[0]) / 1e9)
    return "own" if slope >= _OWN_SHARE * growing.slope else "shared"


def _peak(place: Place, track: Track | None) -> float | None:
    peaks = place.track("peak_bytes") if place.device is not None else None
    own = peaks or track
    return float(own.after.x.max()) if own is not None and len(own) else None


def _grown(counter: Counter, track: Track) -> float:
    grown = floor_growth(track) if counter == "allocated_bytes" else _median_growth(track)
    return 0.0 if grown is None else grown


def _median_growth(track: Track | None) -> float | None:
    if track is None or len(track) < 2:
        return None
    x = track.after.x
    few = min(3, len(x) // 2)
    return median(x[-few:]) - median(x[:few])


def _rise(track: Track | None) -> float | None:
    """Return how far the newest value is above the level before, that of the first half."""
    if track is None or len(track) < 2:
        return None
    x = track.after.x
    return float(x[-1]) - median(x[: len(x) // 2])


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
