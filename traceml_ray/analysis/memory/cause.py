"""Which rank's memory grew first, or that several grew at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traceml_ray import text
from traceml_ray.analysis.memory.alone import Alone
from traceml_ray.analysis.memory.growth import Rise
from traceml_ray.analysis.memory.limits import MemoryLimits
from traceml_ray.analysis.memory.sentences import COUNTERS, where
from traceml_ray.analysis.memory.shapes import (
    CollectiveOnset,
    Confidence,
    Counter,
    FirstCause,
    Incident,
)

_Gravity = tuple[int, float, int]
_SEVERITIES = ("info", "warning", "critical")
_NEXT = [
    "Look at what this rank does that the others do not: its data, logging, checkpoints, hooks.",
    "Compare its memory with that of a rank that did not grow, from that time on.",
]


@dataclass(frozen=True)
class _Grower:
    """The earliest growth of a rank in an incident."""

    at: Alone
    counter: Counter
    rise: Rise
    delta: float
    """The largest growth of the rank in the incident."""

    @property
    def at_ns(self) -> int:
        return self.rise.at_ns

    def error_ns(self, other: _Grower) -> int:
        """Return how far the time between two onsets may be off: clocks, sampling, noise."""
        same = self.at.node == other.at.node != ""
        clocks = 0 if same else self.at.bound_ns + other.at.bound_ns
        sampling = max(self.at.interval_ns, other.at.interval_ns)
        return clocks + sampling + max(self.rise.spread_ns, other.rise.spread_ns)

    def testifies(self, first: _Grower) -> bool:
        """
        Whether this rank says that `first` grew before it: one that grew from its own first sample on was
        not seen to be flat before.
        """
        return not self.rise.from_start or self.at_ns <= first.at_ns


def incidents(all_of: Sequence[Alone]) -> list[Incident]:
    """Return every growth of every rank, the earliest first."""
    found = [
        Incident(
            rank=each.rank,
            node=each.node,
            device=each.device,
            at_ns=rise.at_ns,
            delta_bytes=round(rise.delta),
            counter=counter,
        )
        for each in all_of
        for counter, rise in each.rises
    ]
    return sorted(found, key=lambda i: (i.at_ns, i.rank, -1 if i.device is None else i.device, i.counter))


def first_cause(
    all_of: Sequence[Alone], expected: int | None, limits: MemoryLimits
) -> tuple[FirstCause | None, CollectiveOnset | None]:
    """
    Return who grew first and who grew at once, each of the gravest incident of its kind: with the most severe
    finding, then with the largest growth. Incidents of devices and of hosts are apart.

    Args:
        all_of: the judgement of each place.
        expected: how many ranks there are; None: those in `all_of`.
        limits: the thresholds.
    """
    ranks = len({each.rank for each in all_of})
    expected = max(expected or 0, ranks)
    causes: list[tuple[_Gravity, FirstCause]] = []
    onsets: list[tuple[_Gravity, CollectiveOnset]] = []
    if expected < 2:
        return None, None
    for host in (False, True):
        places = [each for each in all_of if (each.device is None) == host]
        for growers in _clusters(places, limits):
            together = _together(growers)
            near = _near(growers, places, limits)
            alike = len(near) >= limits.near_ranks * (len({each.rank for each in places}) - 1) > 0
            if len(together) > 1 or (near and alike):
                onset = _onset(together, near if alike else set(), expected)
                onsets.append((_gravity(together), onset))
            else:
                cause = _cause(growers, near, all_of, expected, limits)
                causes.append((_gravity(growers[:1]), cause))
    gravest = max(causes, key=lambda one: one[0], default=None)
    widest = max(onsets, key=lambda one: one[0], default=None)
    return gravest[1] if gravest else None, widest[1] if widest else None


def _near(growers: Sequence[_Grower], places: Sequence[Alone], limits: MemoryLimits) -> set[int]:
    """Return the ranks whose growth does not count, and is not far from that of the first."""
    first, counted = growers[0], {one.at.rank for one in growers}
    least = limits.near_growth * first.delta
    return {
        each.rank
        for each in places
        if each.rank not in counted and each.grown.get(first.counter, 0.0) >= least
    }


def _gravity(growers: Sequence[_Grower]) -> _Gravity:
    """Return how grave it is that these grew: by the findings on their memory, then the growth, then time."""
    findings = [finding for one in growers for finding in one.at.findings]
    worst = max((_SEVERITIES.index(finding.severity) for finding in findings), default=-1)
    return worst, max(one.delta for one in growers), -growers[0].at_ns


def _clusters(all_of: Sequence[Alone], limits: MemoryLimits) -> list[list[_Grower]]:
    """Return the incidents of the run: of each, one growth of each rank, the earliest first."""
    grown = [_Grower(each, counter, rise, rise.delta) for each in all_of for counter, rise in each.rises]
    grown.sort(key=lambda one: (one.at_ns, one.at.rank, one.counter))
    clusters: list[list[_Grower]] = []
    for one in grown:
        if not clusters or one.at_ns - clusters[-1][-1].at_ns > limits.cluster_s * 1e9:
            clusters.append([])
        clusters[-1].append(one)
    return [_earliest_of_ranks(cluster) for cluster in clusters]


def _earliest_of_ranks(cluster: list[_Grower]) -> list[_Grower]:
    by_rank: dict[int, _Grower] = {}
    for one in cluster:
        known = by_rank.get(one.at.rank)
        if known is None:
            by_rank[one.at.rank] = one
        elif one.delta > known.delta:
            by_rank[one.at.rank] = _Grower(known.at, known.counter, known.rise, one.delta)
    return sorted(by_rank.values(), key=lambda one: (one.at_ns, one.at.rank))


def _together(growers: list[_Grower]) -> list[_Grower]:
    """Return those that cannot be told from the earliest: each within the error of one before it."""
    first = growers[0]
    together = [first]
    for one in growers[1:]:
        from_starts = first.rise.from_start and one.rise.from_start
        last = together[-1]
        near = one.testifies(first) and one.at_ns - last.at_ns <= last.error_ns(one)
        if near or from_starts:
            together.append(one)
    return together


def _onset(together: list[_Grower], near: set[int], expected: int) -> CollectiveOnset:
    most = max(together, key=lambda one: one.delta)
    ranks = sorted({one.at.rank for one in together} | near)
    who = "all ranks" if len(ranks) == expected else text.ranks(ranks)
    what = COUNTERS[most.counter]
    return CollectiveOnset(
        at_ns=together[0].at_ns,
        ranks=ranks,
        delta_bytes=round(most.delta),
        counter=most.counter,
        why=f"{what[0].upper()}{what[1:]} of {who} grew at the same time, as far as their clocks and samples "
        f"can tell, by up to {text.size(most.delta)}: no rank is the cause.",
    )


def _cause(
    growers: list[_Grower], near: set[int], all_of: Sequence[Alone], expected: int, limits: MemoryLimits
) -> FirstCause:
    first = growers[0]
    witnesses = [one for one in growers[1:] if one.testifies(first)]
    lead = witnesses[0].at_ns - first.at_ns if witnesses else None
    error = first.error_ns(witnesses[0]) if witnesses else None
    leads = min(
        ((one.at_ns - first.at_ns) / max(first.error_ns(one), 1) for one in witnesses),
        default=limits.high_lead,
    )
    coverage = _coverage(all_of, first) / expected
    return FirstCause(
        rank=first.at.rank,
        node=first.at.node,
        device=first.at.device,
        at_ns=first.at_ns,
        lead_ns=lead,
        lead_bound_ns=error,
        delta_bytes=round(first.delta),
        counter=first.counter,
        confidence="low" if near else _confidence(first, leads, coverage, limits),
        coverage=coverage,
        why=_why(first, lead, error, len(growers), coverage, expected, near),
        next=_NEXT,
    )


def _coverage(all_of: Sequence[Alone], first: _Grower) -> int:
    """Return how many ranks were observed, after their warm-up, when the first one began to grow."""
    near = 2 * first.at.interval_ns + first.at.bound_ns
    return len(
        {
            each.rank
            for each in all_of
            if each.span is not None
            and each.span[0] - each.bound_ns - near <= first.at_ns <= each.span[1] + each.bound_ns + near
        }
    )


def _confidence(first: _Grower, leads: float, coverage: float, limits: MemoryLimits) -> Confidence:
    """Return how sure it is; `leads` is the lead in error bounds."""
    settled = first.at.certain or _flat_s(first) >= limits.settled_s
    if coverage < limits.low_coverage or leads < limits.low_lead or not settled:
        return "low"
    large = first.delta >= 2 * first.rise.threshold
    if leads >= limits.high_lead and coverage >= limits.high_coverage and large:
        return "high"
    return "medium"


def _flat_s(first: _Grower) -> float:
    """Return for how long it had its own level before it grew."""
    return 0.0 if first.at.span is None else (first.at_ns - first.at.span[0]) / 1e9


def _why(
    first: _Grower,
    lead: int | None,
    error: int | None,
    grown: int,
    coverage: float,
    expected: int,
    near: set[int],
) -> str:
    at = "" if first.rise.step is None else f" from step {first.rise.step:,} on"
    what = f"{COUNTERS[first.counter]} grew by {text.size(first.delta)}{at}"
    who = where(first.at.rank, first.at.node, first.at.device)
    unseen = expected - round(coverage * expected)
    seen = f" ({text.count(unseen, 'rank')} not observed then)" if unseen else ""
    if lead is None or error is None:
        if grown > 1:
            return f"{who} grew first: {what}; the others grew after they had started{seen}."
        others = f"that of {text.ranks(near)} by half of it at least" if near else "that of no other rank"
        return f"{who} grew {'most' if near else 'alone'}: {what}, {others}{seen}."
    return (
        f"{who} grew first: {what}, {text.duration(lead / 1e9)} before any other rank, where clocks and "
        f"samples are good to {text.duration(error / 1e9)}{seen}."
    )
