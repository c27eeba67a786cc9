"""Which rank's memory grew first, or that several grew at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traceml_ray import text
from traceml_ray.signals.memory.findings import RankFindings
from traceml_ray.signals.memory.growth import Rise
from traceml_ray.signals.memory.limits import MemoryLimits
from traceml_ray.signals.memory.sentences import COUNTERS, where
from traceml_ray.signals.memory.shapes import (
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

    at: RankFindings
    counter: Counter
    rise: Rise
    delta: float
    """The largest growth of the rank in the incident."""

    @property
    def at_ns(self) -> int:
        return self.rise.at_ns

    @property
    def is_proven(self) -> bool:
        """Whether chance (a random walk) hardly grows so: it came at once, or goes on as leaks do."""
        return self.rise.end == "step" or bool(self.at.growths)

    def error_ns(self, other: _Grower) -> int:
        """Return how far the time between two onsets may be off: clocks, sampling, noise."""
        same = self.at.node == other.at.node != ""
        clocks = 0 if same else self.at.bound_ns + other.at.bound_ns
        sampling = max(self.at.interval_ns, other.at.interval_ns)
        return clocks + sampling + round(math.hypot(self.rise.spread_ns, other.rise.spread_ns))

    def testifies(self, first: _Grower) -> bool:
        """
        Whether this rank says that `first` grew before it: one that grew from its own first sample on was
        not seen to be flat before.
        """
        return not self.rise.from_start or self.at_ns <= first.at_ns

    def follows(self, first: _Grower) -> bool:
        """Whether this rank was flat when `first` began, and grew later by more than the error."""
        return self.testifies(first) and self.at_ns - first.at_ns > first.error_ns(self)


def incidents(all_of: Sequence[RankFindings]) -> list[Incident]:
    """Return every growth of every rank, the earliest first."""
    grown = [
        Incident(
            rank=place.rank,
            node=place.node,
            device=place.device,
            at_ns=rise.at_ns,
            delta_bytes=round(rise.delta),
            counter=counter,
        )
        for place in all_of
        for counter, rise in place.rises
    ]
    return sorted(grown, key=lambda i: (i.at_ns, i.rank, -1 if i.device is None else i.device, i.counter))


def first_cause(
    all_of: Sequence[RankFindings], expected: int | None, limits: MemoryLimits
) -> tuple[FirstCause | None, CollectiveOnset | None]:
    """
    Return who grew first and who grew at once, each of the gravest incident of its kind: with the most severe
    finding, then with the largest growth. Incidents of devices and of hosts are apart.

    Args:
        all_of: the judgement of each place.
        expected: how many ranks there are; None: those in `all_of`.
        limits: the thresholds.
    """
    ranks = len({place.rank for place in all_of})
    expected = max(expected or 0, ranks)
    causes: list[tuple[_Gravity, FirstCause]] = []
    onsets: list[tuple[_Gravity, CollectiveOnset]] = []
    if expected < 2:
        return None, None
    for host in (False, True):
        places = [place for place in all_of if (place.device is None) == host]
        others = len({place.rank for place in places}) - 1
        for growers in _clusters(places, limits):
            together = _together(growers)
            alike, later = _small_growth(growers, places, limits)
            shared = len(alike) >= limits.near_ranks * others > 0
            if len(together) > 1 or (alike and shared):
                onset = _onset(together, alike if shared else {}, expected)
                onsets.append((_gravity(together), onset))
                continue
            growers = sorted([*growers, *later], key=lambda one: (one.at_ns, one.at.rank))
            if len(growers) == 1 and growers[0].rise.end == "over":
                continue  # a cache that has filled, say: the incident is listed, and nothing goes on
            cause = _cause(growers, set(alike), all_of, expected, limits)
            causes.append((_gravity(growers[:1]), cause))
    gravest = max(causes, key=lambda one: one[0], default=None)
    widest = max(onsets, key=lambda one: one[0], default=None)
    return gravest[1] if gravest else None, widest[1] if widest else None


def _small_growth(
    growers: Sequence[_Grower], places: Sequence[RankFindings], limits: MemoryLimits
) -> tuple[dict[int, _Grower | None], list[_Grower]]:
    """
    Return the ranks whose growth does not count though it is not much less than that of the first: those that
    cannot be told from the first by time, or began before it (None: when is not known), and those that began
    later.
    """
    first, counted = growers[0], {one.at.rank for one in growers}
    least = limits.near_growth * first.delta
    alike: dict[int, _Grower | None] = {}
    later: dict[int, _Grower] = {}
    for place in places:
        if place.rank in counted or place.grown.get(first.counter, 0.0) < least:
            continue
        rise = place.small.get(first.counter)
        grower = None if rise is None else _Grower(place, first.counter, rise, rise.delta)
        if grower is not None and grower.follows(first):
            later[place.rank] = grower
        else:
            alike[place.rank] = grower
    return alike, [grower for rank, grower in later.items() if rank not in alike]


def _gravity(growers: Sequence[_Grower]) -> _Gravity:
    """Return how grave it is that these grew: by the findings on their memory, then the growth, then time."""
    findings = [finding for one in growers for finding in one.at.findings]
    worst = max((_SEVERITIES.index(finding.severity) for finding in findings), default=-1)
    return worst, max(one.delta for one in growers), -growers[0].at_ns


def _clusters(all_of: Sequence[RankFindings], limits: MemoryLimits) -> list[list[_Grower]]:
    """Return the incidents of the run: of each, one growth of each rank, the earliest first."""
    grown = [_Grower(place, counter, rise, rise.delta) for place in all_of for counter, rise in place.rises]
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
    """Return those that cannot be told from the earliest, by the error of when both began."""
    first = growers[0]
    together = [first]
    for one in growers[1:]:
        from_starts = first.rise.from_start and one.rise.from_start
        near = one.testifies(first) and not one.follows(first)
        if near or from_starts:
            together.append(one)
    return together


def _onset(together: list[_Grower], alike: Mapping[int, _Grower | None], expected: int) -> CollectiveOnset:
    first, most = together[0], max(together, key=lambda one: one.delta)
    ranks = sorted({one.at.rank for one in together} | alike.keys())
    who = "all ranks" if len(ranks) == expected else text.ranks(ranks)
    what = COUNTERS[most.counter]
    others = [*together[1:], *alike.values()]
    known = [first.error_ns(other) for other in others if other is not None]
    bound = max(known) if len(known) == len(others) else None
    within = "" if bound is None else f" to within {text.duration(bound / 1e9)}"
    return CollectiveOnset(
        at_ns=first.at_ns,
        bound_ns=bound,
        ranks=ranks,
        delta_bytes=round(most.delta),
        counter=most.counter,
        why=f"{what[0].upper()}{what[1:]} of {who} grew at the same time{within}, as far as their clocks and "
        f"samples can tell, by up to {text.size(most.delta)}: no rank is the cause.",
    )


def _cause(
    growers: list[_Grower],
    near: set[int],
    all_of: Sequence[RankFindings],
    expected: int,
    limits: MemoryLimits,
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
        confidence="low" if near else _confidence(first, leads, bool(witnesses), coverage, limits),
        coverage=coverage,
        why=_why(first, lead, error, len(growers), coverage, expected, near),
        next=_NEXT,
    )


def _coverage(all_of: Sequence[RankFindings], first: _Grower) -> int:
    """Return how many ranks were observed, after their warm-up, when the first one began to grow."""
    near = 2 * first.at.interval_ns + first.at.bound_ns
    return len(
        {
            place.rank
            for place in all_of
            if place.span is not None
            and place.span[0] - place.bound_ns - near <= first.at_ns <= place.span[1] + place.bound_ns + near
        }
    )


def _confidence(
    first: _Grower, leads: float, witnessed: bool, coverage: float, limits: MemoryLimits
) -> Confidence:
    """Return how sure it is; `leads` is the lead in error bounds, before others that grew, if `witnessed`."""
    settled = first.at.certain or _flat_s(first) >= limits.settled_s
    if coverage < limits.low_coverage or leads < limits.low_lead or not settled:
        return "low"
    if not (first.is_proven or witnessed):
        return "low"
    large = first.delta >= 2 * first.rise.threshold and first.rise.end in ("step", "grows")
    if not first.is_proven:
        return "medium"
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
    since = "" if first.rise.step is None else f" from step {first.rise.step:,} on"
    what = f"{COUNTERS[first.counter]} grew by {text.size(first.delta)}{since}"
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
