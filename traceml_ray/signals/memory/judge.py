"""
The memory analysis over all ranks of a run.

The forecast for a host is based on all of its ranks together, not on the slope of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.identity import RankFilter
from traceml_ray.signals.memory import sentences
from traceml_ray.signals.memory.cause import explain, first_cause, incidents
from traceml_ray.signals.memory.findings import RankFindings, rank_findings
from traceml_ray.signals.memory.growth import Growth, HostGrowth, finding_of, is_large, severity_of
from traceml_ray.signals.memory.limits import MEMORY, MemoryLimits
from traceml_ray.signals.memory.recordings import MergedRecordings
from traceml_ray.signals.memory.shapes import (
    Collective,
    Memory,
    MemoryFinding,
    RankMemory,
    Sensitivity,
    Series,
    Severity,
)
from traceml_ray.signals.memory.tracks import median
from traceml_ray.signals.memory.trend import Forecast, forecast


def with_hosts(judged: Sequence[RankFindings], limits: MemoryLimits) -> list[RankFindings]:
    """
    Return the judgements of the ranks. If several ranks of one host grow, their forecast and severity are
    those of the host.
    """
    hosts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, one in enumerate(judged):
        if one.device is None and one.node and one.total is not None:
            hosts[one.node, round(one.total)].append(index)
    changed = [*judged]
    for indices in hosts.values():
        ranks = [judged[index] for index in indices]
        growing = [one for one in _running(ranks, limits) if one.growths]
        if len(growing) > 1:
            for index, one in zip(indices, _by_host(ranks, growing, limits), strict=True):
                changed[index] = one
    return changed


def _running(ranks: list[RankFindings], limits: MemoryLimits) -> list[RankFindings]:
    """Return the processes that still run. A process that has ended uses no more memory."""
    ends = [one.span[1] for one in ranks if one.span is not None]
    newest = max(ends, default=0)

    def runs(one: RankFindings) -> bool:
        late_ns = max(limits.ended_s * 1e9, limits.step_samples * one.interval_ns)
        return one.span is not None and newest - one.span[1] <= late_ns

    return [one for one in ranks if runs(one)]


def _by_host(
    ranks: list[RankFindings], growing: list[RankFindings], limits: MemoryLimits
) -> list[RankFindings]:
    growths = [growth for one in growing for growth in one.growths]
    unshared = [growth.ramp.recent for growth in growths if growth.sharing != "shared"]
    shared = [growth.ramp.recent for growth in growths if growth.sharing == "shared"]
    together = sum(unshared) + max(shared, default=0.0)  # shared pages are counted in each process
    host = HostGrowth(len(growing), max(together, *(growth.slope_of_all for growth in growths)))
    steepest = max(growth.ramp.recent for growth in growths)
    slowing = sum(growth.ramp.recent for growth in growths if growth.ramp.bend == "slows")
    slows = slowing > together / 2
    left = min((growth.left for growth in growths if growth.left is not None), default=None)
    full_s = None if left is None or slows else left / host.slope
    members = {id(one) for one in growing}
    return [
        _member(one, left, host, slows, steepest, limits) if id(one) in members else _full_in(one, full_s)
        for one in ranks
    ]


def _member(
    one: RankFindings,
    left: float | None,
    host: HostGrowth,
    slows: bool,
    steepest: float,
    limits: MemoryLimits,
) -> RankFindings:
    """Return a rank that contributes to the growth of its host, with what is left of the host's memory."""
    findings = [finding for finding in one.findings if finding.kind != "creep"]
    soonest: Forecast | None = None
    for growth in one.growths:
        until = forecast(growth.ramp, left, host.slope)
        until = None if until is None else replace(until, earliest=slows)
        if not is_large(growth, until, limits):
            continue
        findings.append(finding_of(one.spot, growth, until, _severity(growth, until, steepest, limits), host))
        soonest = until
    when = None if soonest is None or soonest.earliest else soonest
    row = msgspec.structs.replace(
        one.row,
        forecast_s=None if when is None else when.s,
        forecast_steps=None if when is None else when.steps,
    )
    return replace(_full_in(one, None if when is None else when.s), findings=findings, row=row)


def _severity(growth: Growth, until: Forecast | None, steepest: float, limits: MemoryLimits) -> Severity:
    """
    Return the severity by the host's forecast. A rank with a small share of the growth is judged by its own
    forecast.
    """
    if growth.ramp.recent < limits.host_share * steepest:
        until = forecast(growth.ramp, growth.left, growth.ramp.recent)
    return severity_of(growth, until, limits)


def _full_in(one: RankFindings, full_s: float | None) -> RankFindings:
    return one if one.full is None else replace(one, full=replace(one.full, full_s=full_s))


_ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}
_Found = tuple[str, MemoryFinding]
"""A finding, and the process that it is about."""
_ALIKE_RANKS = 3
"""With fewer ranks than this, growing alike is not significant."""
_HOST = -1
"""Sort key of the host's memory: before devices."""


def judge(
    series: Sequence[Series],
    collectives: Sequence[Collective] = (),
    expected: int | None = None,
    sensitivity: Sensitivity = "medium",
    limits: MemoryLimits = MEMORY,
) -> Memory:
    """
    Return the judgement of the memory of a run. Never raises, whatever values the arrays hold.

    Args:
        series: one per rank process and device, in any order.
        collectives: when ranks were in which collectives.
        expected: number of ranks of the run. None: not known; then no rank is reported missing.
        sensitivity: how weak the evidence may be for attributing hidden memory to collectives.
        limits: the thresholds.
    """
    judged = [place for one in series for place in rank_findings(one, limits)]
    return compare(judged, collectives, expected, sensitivity, limits)


def compare(
    judged: Sequence[RankFindings],
    collectives: Sequence[Collective] = (),
    expected: int | None = None,
    sensitivity: Sensitivity = "medium",
    limits: MemoryLimits = MEMORY,
) -> Memory:
    """Return the same as `judge`, from the separate judgements of the ranks. Arguments as of `judge`."""
    judged = with_hosts(_in_order(judged), limits)
    explained = explain(judged, collectives, sensitivity, limits)
    reassigned = {id(one.hidden.finding): (one.process, one.finding()) for one in explained}
    findings = [
        reassigned.pop(id(finding), (place.process, finding))
        for place in judged
        for finding in place.findings
    ]
    findings += reassigned.values()  # findings from the warm-up
    findings = _alike(findings, judged, limits)
    findings += _nearly_full(judged) + _imbalances(judged, limits)
    findings.sort(key=lambda entry: order_of(entry[1]))
    cause, onset = first_cause(judged, expected, limits)
    present = {place.rank for place in judged}
    return Memory(
        first_cause=cause,
        collective_onset=onset,
        findings=[finding for _, finding in findings],
        collectives=[one.attribution for one in explained],
        incidents=incidents(judged),
        ranks=_table(judged, findings),
        missing_ranks=[rank for rank in range(expected or 0) if rank not in present],
    )


def judge_recordings(
    merged: MergedRecordings, chosen: RankFilter, sensitivity: Sensitivity = "medium"
) -> Memory:
    """
    Return the judgement of the chosen ranks. Ranks without wall-clock times are judged one by one, so none of
    them is named as earlier than others.
    """
    expected = {rank for rank in range(merged.world_size or 0) if rank in chosen}
    timed = [series for series in merged.timed if series.rank in chosen]
    alone: dict[int, list[Series]] = {}
    for series in merged.untimed:
        if series.rank in chosen:
            alone.setdefault(series.rank, []).append(series)
    clocks = [timed, *alone.values()]
    count = len(expected | {rank for rank in merged.present if rank in chosen})
    parts = [judge(group, _used_by(group, merged), count, sensitivity) for group in clocks if group]
    return msgspec.structs.replace(_together(parts), missing_ranks=sorted(expected - merged.present))


def _used_by(series: Sequence[Series], merged: MergedRecordings) -> list[Collective]:
    """
    Return the collectives of the ranks of some series. Collectives of other ranks may be on
    another clock.
    """
    ranks = {one_series.rank for one_series in series}
    return [use for use in merged.collectives if use.rank in ranks]


def _together(parts: Sequence[Memory]) -> Memory:
    """Return judgements from separate clocks as one."""
    grew = [part for part in parts if part.first_cause or part.collective_onset]
    only = grew[0] if len(grew) == 1 else Memory()
    return Memory(
        first_cause=only.first_cause,
        collective_onset=only.collective_onset,
        findings=sorted(
            (finding for part in parts for finding in part.findings),
            key=order_of,
        ),
        collectives=[attribution for part in parts for attribution in part.collectives],
        incidents=sorted(
            (incident for part in parts for incident in part.incidents), key=lambda incident: incident.at_ns
        ),
        ranks=sorted(
            (row for part in parts for row in part.ranks),
            key=lambda row: (row.rank, -1 if row.device is None else row.device),
        ),
    )


def _in_order(judged: Sequence[RankFindings]) -> list[RankFindings]:
    """
    Return the judgements by rank, device and time. The host of a process with several devices, which each
    device's series contains, is included once.
    """
    judged = sorted(
        judged,
        key=lambda place: (
            place.rank,
            _device(place.device),
            place.span or (0, 0),
            place.process,
            -place.row.samples,
        ),
    )
    once = {(place.rank, place.device, place.process): place for place in reversed(judged)}
    return list(reversed(once.values()))


def order_of(finding: MemoryFinding) -> tuple[int, float, int, int, int, str]:
    """
    Sort key: the most severe first, then the earliest forecast of full memory, then the
    earliest finding.
    """
    until = finding.evidence.get("forecast_s", finding.evidence.get("full_s"))
    full_s = until if isinstance(until, float) else float("inf")
    order = _ORDER[finding.severity]
    return order, full_s, finding.from_ns, finding.rank, _device(finding.device), finding.kind


def _device(device: int | None) -> int:
    return _HOST if device is None else device


def _table(judged: Sequence[RankFindings], findings: list[_Found]) -> list[RankMemory]:
    """Return the rows of the table, each with the most severe finding of its rank and device."""
    worst: dict[tuple[str, int, int | None], MemoryFinding] = {}
    for process, finding in findings:
        worst.setdefault((process, finding.rank, finding.device), finding)
    rows = []
    for place in judged:
        row, most_severe = place.row, worst.get((place.process, place.rank, place.device))
        if most_severe is not None:
            row = msgspec.structs.replace(row, anomaly=most_severe.kind, severity=most_severe.severity)
        rows.append(row)
    return rows


def _alike(findings: list[_Found], judged: Sequence[RankFindings], limits: MemoryLimits) -> list[_Found]:
    """Return the findings. Warnings of a creep that all ranks share at similar speed become information."""
    less: dict[int, MemoryFinding] = {}
    for host in (False, True):
        ranks = {place.rank for place in judged if (place.device is None) == host and place.span is not None}
        creeps = [f for _, f in findings if f.kind == "creep" and (f.device is None) == host]
        slopes = [slope for f in creeps if isinstance(slope := f.evidence["bytes_per_s"], float)]
        if len(ranks) < _ALIKE_RANKS or ranks != {f.rank for f in creeps}:
            continue
        if min(slopes) < limits.alike * median(np.array(slopes)):
            continue
        for f in creeps:
            less[id(f)] = msgspec.structs.replace(
                f,
                severity="info" if f.severity == "warning" else f.severity,
                evidence={**f.evidence, "alike": len(ranks)},
                why=f"{f.why.removesuffix('.')}; all {text.count(len(ranks), 'rank')} grow alike.",
            )
    return [(process, less.get(id(finding), finding)) for process, finding in findings]


def _nearly_full(judged: Sequence[RankFindings]) -> list[_Found]:
    """
    Return findings about devices and hosts that are nearly full. For a host, the rank that uses most is
    named.
    """
    full = [place for place in judged if place.full is not None]
    hosts: dict[tuple[str, int], list[RankFindings]] = defaultdict(list)
    for place in full:
        if place.device is None and place.full is not None:
            hosts[place.node, round(place.full.total)].append(place)
    most = [max(ranks, key=lambda place: (place.peak or 0.0, -place.rank)) for ranks in hosts.values()]
    devices = [place for place in full if place.device is not None]
    return [(place.process, _full(place)) for place in [*devices, *most]]


def _full(place: RankFindings) -> MemoryFinding:
    use = place.full
    assert use is not None
    return MemoryFinding(
        kind="near_limit",
        rank=place.rank,
        node=place.node,
        device=place.device,
        severity=use.severity,
        confidence="high",
        from_ns=use.from_ns,
        to_ns=use.to_ns,
        evidence={
            "used_bytes": round(use.used),
            "total_bytes": round(use.total),
            "used_share": use.used / use.total,
            "cached_bytes": None if use.cached is None else round(use.cached),
            "full_s": use.full_s,
            "alloc_retries": use.retries,
        },
        next=sentences.next_of("near_limit", place.device),
        why=sentences.near_limit(place.rank, place.node, place.device, use),
    )


def _imbalances(judged: Sequence[RankFindings], limits: MemoryLimits) -> list[_Found]:
    """Return findings about ranks that need more memory than the others, each from its newest process."""
    newest: dict[tuple[bool, int, int], RankFindings] = {}
    for place in judged:
        if place.peak is not None and place.span is not None:
            newest[place.device is None, place.rank, _device(place.device)] = place
    imbalances: list[_Found] = []
    for host in (False, True):
        peers = [place for (on_host, _, _), place in newest.items() if on_host == host]
        imbalances += _above(peers, limits)
    return imbalances


def _above(peers: list[RankFindings], limits: MemoryLimits) -> list[_Found]:
    if len(peers) <= limits.imbalance_peers:
        return []
    usual = median(np.array([place.peak or 0.0 for place in peers]))
    least = max(limits.imbalance * usual, limits.imbalance_bytes)
    above = [place for place in peers if (place.peak or 0.0) - usual > least]
    if len(above) > max(1.0, limits.imbalance_ranks * len(peers)):
        return []
    return [(place.process, _imbalance(place, usual, len(peers), limits)) for place in above]


def _imbalance(place: RankFindings, usual: float, peers: int, limits: MemoryLimits) -> MemoryFinding:
    assert place.peak is not None and place.span is not None
    near = place.peak_share is not None and place.peak_share >= limits.near_limit[0]
    what = "host memory" if place.device is None else "allocated memory"
    return MemoryFinding(
        kind="imbalance",
        rank=place.rank,
        node=place.node,
        device=place.device,
        severity="warning" if near else "info",
        confidence="high" if place.certain else "medium",
        from_ns=place.span[0],
        to_ns=place.span[1],
        evidence={
            "peak_bytes": round(place.peak),
            "median_bytes": round(usual),
            "above_bytes": round(place.peak - usual),
            "peak_share": place.peak_share,
            "peers": peers - 1,
        },
        next=sentences.next_of("imbalance", place.device),
        why=f"{sentences.where(place.rank, place.node, place.device)}: its peak of {what} is "
        f"{text.size(place.peak)}, {text.size(place.peak - usual)} above the median of the ranks "
        f"({text.size(usual)}).",
    )
