"""Judges the memory of one rank process by itself, without the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.growth import (
    Growth,
    Rise,
    Sharing,
    Spot,
    finding_of,
    floor_growth,
    is_large,
    least_growth,
    rises,
    severity_of,
)
from traceml_ray.signals.memory.limits import MemoryLimits
from traceml_ray.signals.memory.shapes import (
    Confidence,
    Counter,
    Kind,
    MemoryFinding,
    RankMemory,
    Series,
    Severity,
    Value,
)
from traceml_ray.signals.memory.shifts import Full, Shift, Spikes, fragmentation, fullness, shifts, spikes
from traceml_ray.signals.memory.tracks import Place, Track, median, places
from traceml_ray.signals.memory.trend import Forecast, Ramp, forecast, free, ramp, slope_of_all

_LOWER: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}
_WARM_SHARE = 5
"""One in this many of the samples that a drift needs may be from the warm-up."""
_USS_LEAST = 2
_OWN_SHARE = 0.3
"""If less than this share of a growth of RSS is USS, the growth consists of shared pages or files."""


@dataclass(frozen=True)
class Hidden:
    """A change of the hidden gap, which collectives may explain."""

    finding: MemoryFinding
    times: tuple[tuple[int, int], ...]
    """
    (begin, end) of each change in ns: the last sample before it and the first sample after it. A spike may
    have several changes. For a drift it is the whole time.
    """
    delta: float
    noise: float
    warm: bool
    """
    Whether it becomes a finding only if a collective explains it: it occurred in the warm-up, or there are
    few samples.
    """

    @property
    def end_ns(self) -> int:
        """Return the end of the first change, in ns."""
        return self.times[0][1]


@dataclass(frozen=True)
class RankFindings:
    """The judgement of one place, with everything that the comparison with other ranks needs."""

    rank: int
    node: str
    process: str
    device: int | None
    bound_ns: int
    interval_ns: int
    """Usual time between samples, in ns."""
    span: tuple[int, int] | None
    """Times of the first and the last sample after warm-up, in ns."""
    certain: bool
    """Whether the end of the warm-up is known."""
    has_gap: bool
    peak: float | None
    """Highest use after warm-up, in bytes: of torch's allocator, or RSS."""
    peak_share: float | None
    """`peak` as a share of the available memory."""
    total: float | None
    """Memory of the device, or limit of the host, in bytes."""
    row: RankMemory
    grown: dict[Counter, float] = field(default_factory=dict)
    """Growth of each counter since its baseline, in bytes, whether it exceeds the threshold or not."""
    findings: list[MemoryFinding] = field(default_factory=list)
    rises: list[tuple[Counter, Rise]] = field(default_factory=list)
    small: dict[Counter, Rise] = field(default_factory=dict)
    """First growth below the threshold, of counters without growth above it."""
    hidden: list[Hidden] = field(default_factory=list)
    full: Full | None = None
    growths: list[Growth] = field(default_factory=list)
    """Lasting growth, including growth that is too small for a finding."""

    @property
    def spot(self) -> Spot:
        """Return the place whose memory this is."""
        return Spot(self.rank, self.node, self.device)


def rank_findings(series: Series, limits: MemoryLimits) -> list[RankFindings]:
    """Return the judgement of each place of a rank process."""
    with np.errstate(all="ignore"):
        return [_Judging(place, limits).result() for place in places(series)]


class _Judging:
    """Applies the rules to one place."""

    def __init__(self, place: Place, limits: MemoryLimits) -> None:
        self._place, self._limits = place, limits
        self._findings: list[MemoryFinding] = []
        self._hidden: list[Hidden] = []
        self._growths: list[Growth] = []
        self._forecasts: list[Forecast] = []

    def result(self) -> RankFindings:
        """Return the combined result of all rules."""
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
            warm = min(gap.settled, limits.drift_samples // _WARM_SHARE)
            growing = self._grows("persistent_drift", "gap_bytes", gap, limits.drift_samples - warm)
            self._shifts("gap_bytes", gap, growing)
        self._name_growths()
        self._fragmentation()
        full = self._full()
        main_track = track if track is not None else gap
        peak = _peak(place, track)
        grown = {counter: _grown(counter, values) for counter, values in counters}
        risen = [(counter, rise) for counter, values in counters for rise in rises(values, limits)]
        return RankFindings(
            rank=place.rank,
            node=place.node,
            process=place.process,
            device=place.device,
            bound_ns=place.bound_ns,
            interval_ns=round(main_track.interval_s * 1e9) if main_track is not None else 0,
            span=(int(main_track.after.t_ns[0]), int(main_track.t_ns[-1]))
            if main_track is not None and len(main_track)
            else None,
            certain=place.settled is not None,
            has_gap=gap is not None,
            peak=peak,
            peak_share=None if peak is None or place.total is None else peak / place.total,
            total=place.total,
            row=self._row(gap),
            grown=grown,
            findings=self._findings,
            rises=risen,
            small=_small(counters, risen, grown, limits),
            hidden=self._hidden,
            full=full,
            growths=self._growths,
        )

    def _grows(
        self, kind: Kind, counter: Counter, track: Track, least: int, floor: bool = False
    ) -> Ramp | None:
        """
        Record a lasting growth of at least `least` samples. A growth with fewer samples or few steps is
        returned, too, but not recorded.
        """
        place, limits = self._place, self._limits
        growing = ramp(track, limits, limits.creep_samples, floor)
        if growing is None or len(track) < least:
            return growing
        if kind == "creep" and growing.steps is not None and growing.steps < limits.creep_steps:
            return growing
        used = place.track("limit_used_bytes") if place.device is None else place.claimed
        growth = Growth(
            kind=kind,
            counter=counter,
            ramp=growing,
            confidence=self._sure(growing.confidence(limits)),
            sharing=_sharing(place, growing) if counter == "rss_bytes" else "unknown",
            left=free(place),
            slope_of_all=slope_of_all(used, growing, limits),
            upper_bound=place.device is not None and not place.asked_driver,
            gap_from=place.gap_from,
        )
        self._growths.append(growth)
        return growing

    def _name_growths(self) -> None:
        """
        Make findings of growth that is large enough. All growth on a device together uses up what is left of
        it.
        """
        spot = Spot(self._place.rank, self._place.node, self._place.device)
        together = sum(growth.ramp.recent for growth in self._growths)
        for growth in self._growths:
            left = forecast(growth.ramp, growth.left, max(together, growth.slope_of_all))
            if not is_large(growth, left, self._limits):
                continue
            if left is not None and not left.earliest:
                self._forecasts.append(left)
            finding = finding_of(spot, growth, left, severity_of(growth, left, self._limits))
            self._findings.append(finding)
            if growth.kind == "persistent_drift":
                ramp_of = growth.ramp
                times = ((ramp_of.from_ns, ramp_of.to_ns),)
                self._hidden.append(Hidden(finding, times, ramp_of.grown, 0.0, False))

    def _full(self) -> Full | None:
        """Return how full memory is. The forecast is stated once, with the growth."""
        full = fullness(self._place, self._limits)
        slows = any(growth.ramp.bend == "slows" for growth in self._growths)
        if full is None or not (self._forecasts or slows):
            return full
        return replace(full, full_s=min((left.s for left in self._forecasts), default=None))

    def _shifts(self, counter: Counter, track: Track, growing: Ramp | None) -> None:
        """Record steps and spikes."""
        limits = self._limits
        held = shifts(track, limits, growing)
        hidden = counter == "gap_bytes"
        for shift in held:
            if shift.warm and not hidden:
                continue
            self._step(counter, shift, hidden)
        least = limits.marked_spike_samples if hidden else limits.spike_samples
        short_rises = spikes(track, limits, growing, held, least)
        if short_rises is not None:
            self._spikes(counter, short_rises, hidden)

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
                "took_s": shift.took_s,
                **({"gap_from": place.gap_from} if hidden else {}),
            },
            sentences.shifted(place, counter, shift),
        )
        if not shift.warm:
            self._findings.append(finding)
        if hidden:
            times = ((shift.from_ns, shift.end_ns),)
            self._hidden.append(Hidden(finding, times, shift.delta, shift.noise, shift.warm))

    def _spikes(self, counter: Counter, short_rises: Spikes, hidden: bool) -> None:
        place, limits = self._place, self._limits
        used, total = place.track(place.used_total[0]), place.total
        highest = float(used.after.x.max()) if used is not None and len(used) else None
        near = highest is not None and total is not None and highest >= limits.near_limit[1] * total
        finding = _finding(
            place,
            "transient_spike",
            "warning" if near else "info",
            self._sure("high" if short_rises.samples > 1 else "medium"),
            (short_rises.from_ns, short_rises.to_ns),
            {
                "counter": counter,
                "peak_bytes": round(short_rises.peak),
                "count": short_rises.count,
                "share": short_rises.samples / short_rises.of_samples,
                "noise_bytes": round(short_rises.noise),
                "highest_used_bytes": None if highest is None else round(highest),
            },
            sentences.spiking(place, counter, short_rises),
        )
        few = short_rises.of_samples < limits.spike_samples
        if not few:
            self._findings.append(finding)
        if hidden:
            self._hidden.append(Hidden(finding, short_rises.times, short_rises.peak, short_rises.noise, few))

    def _fragmentation(self) -> None:
        place = self._place
        split = fragmentation(place, self._limits)
        if split is None:
            return
        evidence: dict[str, Value] = {
            "inactive_split_bytes": round(split.inactive),
            "reserved_bytes": round(split.reserved),
            "inactive_share": split.inactive / split.reserved,
            "unallocated_share": None
            if split.allocated is None
            else max(1 - split.allocated / split.reserved, 0.0),
            "alloc_retries": split.retries,
        }
        why = sentences.fragmented(place, split.inactive, split.reserved)
        confidence: Confidence = "high" if (split.to_ns - split.from_ns) >= 10e9 else "medium"
        self._add("fragmentation", split.severity, confidence, split.from_ns, split.to_ns, evidence, why)

    def _sure(self, confidence: Confidence) -> Confidence:
        """Return a lower confidence if the end of the warm-up is only estimated."""
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
    ) -> MemoryFinding:
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
) -> MemoryFinding:
    return MemoryFinding(
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


def _sharing(place: Place, growing: Ramp) -> Sharing:
    """Return whether growth of RSS is of the process's own pages, from the few samples of USS."""
    track = place.track("uss_bytes")
    if track is None:
        return "unknown"
    unique = track.x[track.t_ns >= growing.from_ns]
    t_ns = track.t_ns[track.t_ns >= growing.from_ns]
    if len(unique) < _USS_LEAST or t_ns[-1] <= t_ns[0]:
        return "unknown"
    slope = float(unique[-1] - unique[0]) / (float(t_ns[-1] - t_ns[0]) / 1e9)
    return "own" if slope >= _OWN_SHARE * growing.slope else "shared"


def _small(
    counters: list[tuple[Counter, Track]],
    risen: list[tuple[Counter, Rise]],
    grown: dict[Counter, float],
    limits: MemoryLimits,
) -> dict[Counter, Rise]:
    """Return the onsets of counters whose growth is below the threshold."""
    counted = {counter for counter, _ in risen}
    small = {}
    for counter, track in counters:
        if counter not in counted and grown[counter] >= least_growth(track, limits, small=True):
            for rise in rises(track, limits, small=True)[:1]:
                small[counter] = rise
    return small


def _peak(place: Place, track: Track | None) -> float | None:
    peaks = place.track("peak_bytes") if place.device is not None else None
    highest = peaks or track
    return float(highest.after.x.max()) if highest is not None and len(highest) else None


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
    """Return how far the newest value exceeds the level of the first half."""
    if track is None or len(track) < 2:
        return None
    x = track.after.x
    return float(x[-1]) - median(x[: len(x) // 2])


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
