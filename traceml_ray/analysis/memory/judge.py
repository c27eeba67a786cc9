"""
The memory analysis over all ranks of a run.

When the memory of a host is full: by all of its ranks together, not by the slope of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from traceml_ray import text
from traceml_ray.analysis.memory import sentences
from traceml_ray.analysis.memory.alone import Alone, alone
from traceml_ray.analysis.memory.attribution import explain
from traceml_ray.analysis.memory.cause import first_cause, incidents
from traceml_ray.analysis.memory.growth import Growth, HostGrowth, finding_of, is_large, severity_of
from traceml_ray.analysis.memory.limits import MEMORY, MemoryLimits
from traceml_ray.analysis.memory.robust import median
from traceml_ray.analysis.memory.shapes import (
    Collective,
    Memory,
    MemoryFinding,
    RankMemory,
    Sensitivity,
    Series,
    Severity,
)
from traceml_ray.analysis.memory.trend import Forecast, forecast


def with_hosts(judged: Sequence[Alone], limits: MemoryLimits) -> list[Alone]:
    """
    Return the judgements of the ranks; where several ranks of one host grow, forecast and severity are those
    of the host.
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


def _running(ranks: list[Alone], limits: MemoryLimits) -> list[Alone]:
    """Return the processes that still run: one that has ended takes no more memory."""
    ends = [one.span[1] for one in ranks if one.span is not None]
    newest = max(ends, default=0)

    def runs(one: Alone) -> bool:
        late_ns = max(limits.ended_s * 1e9, limits.step_samples * one.interval_ns)
        return one.span is not None and newest - one.span[1] <= late_ns

    return [one for one in ranks if runs(one)]


def _by_host(ranks: list[Alone], growing: list[Alone], limits: MemoryLimits) -> list[Alone]:
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
    one: Alone, left: float | None, host: HostGrowth, slows: bool, steepest: float, limits: MemoryLimits
) -> Alone:
    """Return a rank that has a share of the growth of its host, with what is left of the host's memory."""
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
    """Return the severity by the host's forecast; of a rank with a small share of the growth, by its own."""
    if growth.ramp.recent < limits.host_share * steepest:
        until = forecast(growth.ramp, growth.left, growth.ramp.recent)
    return severity_of(growth, until, limits)


def _full_in(one: Alone, full_s: float | None) -> Alone:
    return one if one.full is None else replace(one, full=replace(one.full, full_s=full_s))


_ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}
_Found = tuple[str, MemoryFinding]
"""A finding, and the process that it is about."""
_ALIKE_RANKS = 3
"""With fewer, growing alike says nothing."""
_HOST = -1
"""Sorts the host's memory before that of devices."""


def judge(
    series: Sequence[Series],
    collectives: Sequence[Collective] = (),
    expected: int | None = None,
    sensitivity: Sensitivity = "medium",
    limits: MemoryLimits = MEMORY,
) -> Memory:
    """
    Return what can be said about the memory of a run. Never raises on any values in the arrays.

    Args:
        series: one per rank process and device, in any order.
        collectives: when ranks were in which collectives.
        expected: how many ranks the run has; None: not known, then none is missing.
        sensitivity: how weak the evidence may be by which hidden memory is put down to collectives.
        limits: the thresholds.
    """
    judged = [each for one in series for each in alone(one, limits)]
    return compare(judged, collectives, expected, sensitivity, limits)


def compare(
    judged: Sequence[Alone],
    collectives: Sequence[Collective] = (),
    expected: int | None = None,
    sensitivity: Sensitivity = "medium",
    limits: MemoryLimits = MEMORY,
) -> Memory:
    """Return the same from the judgements of the ranks by themselves; arguments as of `judge`."""
    judged = with_hosts(_in_order(judged), limits)
    explained = explain(judged, collectives, sensitivity, limits)
    instead = {id(each.hidden.finding): (each.process, each.finding()) for each in explained}
    found = [
        instead.pop(id(finding), (each.process, finding)) for each in judged for finding in each.findings
    ]
    found += instead.values()  # of the warm-up
    found = _alike(found, judged, limits)
    found += _nearly_full(judged) + _imbalances(judged, limits)
    found.sort(key=lambda each: order_of(each[1]))
    cause, onset = first_cause(judged, expected, limits)
    present = {each.rank for each in judged}
    return Memory(
        first_cause=cause,
        collective_onset=onset,
        findings=[finding for _, finding in found],
        collectives=[each.attribution for each in explained],
        incidents=incidents(judged),
        ranks=_table(judged, found),
        missing_ranks=[rank for rank in range(expected or 0) if rank not in present],
    )


def _in_order(judged: Sequence[Alone]) -> list[Alone]:
    """Return them by rank, device and time; a process with several devices has its host in each: once."""
    judged = sorted(
        judged,
        key=lambda each: (
            each.rank,
            _device(each.device),
            each.span or (0, 0),
            each.process,
            -each.row.samples,
        ),
    )
    once = {(each.rank, each.device, each.process): each for each in reversed(judged)}
    return list(reversed(once.values()))


def order_of(finding: MemoryFinding) -> tuple[int, float, int, int, int, str]:
    """Sort key: the most severe first, then what fills memory soonest, then the earliest."""
    until = finding.evidence.get("forecast_s", finding.evidence.get("full_s"))
    full_s = until if isinstance(until, float) else float("inf")
    order = _ORDER[finding.severity]
    return order, full_s, finding.from_ns, finding.rank, _device(finding.device), finding.kind


def _device(device: int | None) -> int:
    return _HOST if device is None else device


def _table(judged: Sequence[Alone], findings: list[_Found]) -> list[RankMemory]:
    """Return the lines of the table, each with the most severe finding of its rank and device."""
    worst: dict[tuple[str, int, int | None], MemoryFinding] = {}
    for process, finding in findings:
        worst.setdefault((process, finding.rank, finding.device), finding)
    rows = []
    for each in judged:
        row, found = each.row, worst.get((each.process, each.rank, each.device))
        if found is not None:
            row = msgspec.structs.replace(row, anomaly=found.kind, severity=found.severity)
        rows.append(row)
    return rows


def _alike(found: list[_Found], judged: Sequence[Alone], limits: MemoryLimits) -> list[_Found]:
    """Return the findings; warnings of a creep that all ranks share, each about as fast, are information."""
    less: dict[int, MemoryFinding] = {}
    for host in (False, True):
        ranks = {each.rank for each in judged if (each.device is None) == host and each.span is not None}
        creeps = [f for _, f in found if f.kind == "creep" and (f.device is None) == host]
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
    return [(process, less.get(id(finding), finding)) for process, finding in found]


def _nearly_full(judged: Sequence[Alone]) -> list[_Found]:
    """Return which devices are nearly full, and which hosts: of a host, by the rank that holds most."""
    full = [each for each in judged if each.full is not None]
    hosts: dict[tuple[str, int], list[Alone]] = defaultdict(list)
    for each in full:
        if each.device is None and each.full is not None:
            hosts[each.node, round(each.full.total)].append(each)
    most = [max(ranks, key=lambda each: (each.peak or 0.0, -each.rank)) for ranks in hosts.values()]
    devices = [each for each in full if each.device is not None]
    return [(each.process, _full(each)) for each in [*devices, *most]]


def _full(each: Alone) -> MemoryFinding:
    found = each.full
    assert found is not None
    return MemoryFinding(
        kind="near_limit",
        rank=each.rank,
        node=each.node,
        device=each.device,
        severity=found.severity,
        confidence="high",
        from_ns=found.from_ns,
        to_ns=found.to_ns,
        evidence={
            "used_bytes": round(found.used),
            "total_bytes": round(found.total),
            "used_share": found.used / found.total,
            "cached_bytes": None if found.cached is None else round(found.cached),
            "full_s": found.full_s,
            "alloc_retries": found.retries,
        },
        next=sentences.next_of("near_limit", each.device),
        why=sentences.near_limit(each.rank, each.node, each.device, found),
    )


def _imbalances(judged: Sequence[Alone], limits: MemoryLimits) -> list[_Found]:
    """Return the ranks that need more than the others, each by its newest process."""
    newest: dict[tuple[bool, int, int], Alone] = {}
    for each in judged:
        if each.peak is not None and each.span is not None:
            newest[each.device is None, each.rank, _device(each.device)] = each
    found: list[_Found] = []
    for host in (False, True):
        peers = [each for (on_host, _, _), each in newest.items() if on_host == host]
        found += _above(peers, limits)
    return found


def _above(peers: list[Alone], limits: MemoryLimits) -> list[_Found]:
    if len(peers) <= limits.imbalance_peers:
        return []
    usual = median(np.array([each.peak or 0.0 for each in peers]))
    least = max(limits.imbalance * usual, limits.imbalance_bytes)
    above = [each for each in peers if (each.peak or 0.0) - usual > least]
    if len(above) > max(1.0, limits.imbalance_ranks * len(peers)):
        return []
    return [(each.process, _imbalance(each, usual, len(peers), limits)) for each in above]


def _imbalance(each: Alone, usual: float, peers: int, limits: MemoryLimits) -> MemoryFinding:
    assert each.peak is not None and each.span is not None
    near = each.peak_share is not None and each.peak_share >= limits.near_limit[0]
    what = "host memory" if each.device is None else "allocated memory"
    return MemoryFinding(
        kind="imbalance",
        rank=each.rank,
        node=each.node,
        device=each.device,
        severity="warning" if near else "info",
        confidence="high" if each.certain else "medium",
        from_ns=each.span[0],
        to_ns=each.span[1],
        evidence={
            "peak_bytes": round(each.peak),
            "median_bytes": round(usual),
            "above_bytes": round(each.peak - usual),
            "peak_share": each.peak_share,
            "peers": peers - 1,
        },
        next=sentences.next_of("imbalance", each.device),
        why=f"{sentences.where(each.rank, each.node, each.device)}: its peak of {what} is "
        f"{text.size(each.peak)}, {text.size(each.peak - usual)} above the median of the ranks "
        f"({text.size(usual)}).",
    )
