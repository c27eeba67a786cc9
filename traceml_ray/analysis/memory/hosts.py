"""When the memory of a host is full: by all of its ranks together, not by the slope of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from traceml_ray.analysis.memory.alone import Alone
from traceml_ray.analysis.memory.growing import Growth, HostGrowth, finding_of, is_large, severity_of
from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.shapes import Severity
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
