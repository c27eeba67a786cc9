"""
Finds the cause of memory growth: the rank whose memory grew first, or that several ranks grew at once. Also
attributes hidden memory to communication, above all to communicator buffers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from traceml_ray import text
from traceml_ray.signals.memory.findings import Hidden, RankFindings
from traceml_ray.signals.memory.growth import Rise
from traceml_ray.signals.memory.limits import SHOWN, SYNCHRONY, MemoryLimits
from traceml_ray.signals.memory.sentences import COUNTERS, where
from traceml_ray.signals.memory.shapes import (
    Attribution,
    AttributionKind,
    Collective,
    CollectiveOnset,
    Confidence,
    Counter,
    FirstCause,
    Incident,
    Int64,
    MemoryFinding,
    Sensitivity,
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

    place: RankFindings
    counter: Counter
    rise: Rise
    delta: float
    """Largest growth of the rank in the incident, in bytes."""

    @property
    def at_ns(self) -> int:
        return self.rise.at_ns

    @property
    def is_proven(self) -> bool:
        """
        Return whether a random walk would hardly grow like this: the growth came at once, or continues as
        leaks do.
        """
        return self.rise.end == "step" or bool(self.place.growths)

    def error_ns(self, other: _Grower) -> int:
        """Return the error of the time between two onsets, in ns: from clocks, sampling and noise."""
        same = self.place.node == other.place.node != ""
        clocks = 0 if same else self.place.bound_ns + other.place.bound_ns
        sampling = max(self.place.interval_ns, other.place.interval_ns)
        return clocks + sampling + round(math.hypot(self.rise.spread_ns, other.rise.spread_ns))

    def testifies(self, first: _Grower) -> bool:
        """
        Return whether this rank shows that `first` grew before it. A rank that grew from its first sample on
        was never seen flat, so it shows nothing.
        """
        return not self.rise.from_start or self.at_ns <= first.at_ns

    def follows(self, first: _Grower) -> bool:
        """Return whether this rank was flat when `first` began, and grew later by more than the error."""
        return self.testifies(first) and self.at_ns - first.at_ns > first.error_ns(self)


def incidents(all_of: Sequence[RankFindings]) -> list[Incident]:
    """Return all growth of all ranks, the earliest first."""
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
    Return the rank that grew first, and the ranks that grew at once: each of the gravest incident of its
    kind.

    The gravest incident has the most severe finding, and among those the largest growth. Incidents of devices
    and of hosts are separate.

    Args:
        all_of: the judgement of each place.
        expected: number of ranks. None: the ranks in `all_of`.
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
            growers = sorted([*growers, *later], key=lambda one: (one.at_ns, one.place.rank))
            if len(growers) == 1 and growers[0].rise.end == "over":
                # for example a cache that has filled: the incident is listed, but nothing continues to grow
                continue
            cause = _cause(growers, set(alike), all_of, expected, limits)
            causes.append((_gravity(growers[:1]), cause))
    gravest = max(causes, key=lambda one: one[0], default=None)
    widest = max(onsets, key=lambda one: one[0], default=None)
    return gravest[1] if gravest else None, widest[1] if widest else None


def _small_growth(
    growers: Sequence[_Grower], places: Sequence[RankFindings], limits: MemoryLimits
) -> tuple[dict[int, _Grower | None], list[_Grower]]:
    """
    Return the ranks whose growth is below the threshold, but not much smaller than that of the first rank.

    Returns two groups: ranks whose onset cannot be distinguished from the first one's, or is earlier (None:
    onset not known), and ranks that began later.
    """
    first, counted = growers[0], {one.place.rank for one in growers}
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
    """Return how grave this growth is: by the findings on the ranks' memory, then the size, then the time."""
    findings = [finding for one in growers for finding in one.place.findings]
    worst = max((_SEVERITIES.index(finding.severity) for finding in findings), default=-1)
    return worst, max(one.delta for one in growers), -growers[0].at_ns


def _clusters(all_of: Sequence[RankFindings], limits: MemoryLimits) -> list[list[_Grower]]:
    """Return the incidents of the run. Each contains one growth per rank, the earliest first."""
    grown = [_Grower(place, counter, rise, rise.delta) for place in all_of for counter, rise in place.rises]
    grown.sort(key=lambda one: (one.at_ns, one.place.rank, one.counter))
    clusters: list[list[_Grower]] = []
    for one in grown:
        if not clusters or one.at_ns - clusters[-1][-1].at_ns > limits.cluster_s * 1e9:
            clusters.append([])
        clusters[-1].append(one)
    return [_earliest_of_ranks(cluster) for cluster in clusters]


def _earliest_of_ranks(cluster: list[_Grower]) -> list[_Grower]:
    by_rank: dict[int, _Grower] = {}
    for one in cluster:
        known = by_rank.get(one.place.rank)
        if known is None:
            by_rank[one.place.rank] = one
        elif one.delta > known.delta:
            by_rank[one.place.rank] = _Grower(known.place, known.counter, known.rise, one.delta)
    return sorted(by_rank.values(), key=lambda one: (one.at_ns, one.place.rank))


def _together(growers: list[_Grower]) -> list[_Grower]:
    """Return the growths whose onset cannot be distinguished from the earliest, given the errors of both."""
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
    ranks = sorted({one.place.rank for one in together} | alike.keys())
    who = "all ranks" if len(ranks) == expected else text.ranks(ranks)
    what = COUNTERS[most.counter]
    others = [*together[1:], *alike.values()]
    known = [first.error_ns(other) for other in others if other is not None]
    bound = max(known) if len(known) == len(others) else None
    within = "" if bound is None else f": {text.duration(bound / 1e9)}"
    return CollectiveOnset(
        at_ns=first.at_ns,
        bound_ns=bound,
        ranks=ranks,
        delta_bytes=round(most.delta),
        counter=most.counter,
        why=f"{what[0].upper()}{what[1:]} of {who} grew at the same time (within the error of clocks and "
        f"samples{within}), by up to {text.size(most.delta)}: no rank is the cause.",
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
    coverage = _coverage_of_growth(all_of, first) / expected
    return FirstCause(
        rank=first.place.rank,
        node=first.place.node,
        device=first.place.device,
        at_ns=first.at_ns,
        lead_ns=lead,
        lead_bound_ns=error,
        delta_bytes=round(first.delta),
        counter=first.counter,
        confidence="low" if near else _confidence(first, leads, bool(witnesses), coverage, limits),
        coverage=coverage,
        why=_why_first(first, lead, error, len(growers), coverage, expected, near),
        next=_NEXT,
    )


def _coverage_of_growth(all_of: Sequence[RankFindings], first: _Grower) -> int:
    """
    Return the number of ranks that were observed, after their warm-up, when the first one
    began to grow.
    """
    near = 2 * first.place.interval_ns + first.place.bound_ns
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
    """
    Return the confidence. `leads`: the lead in error bounds before other ranks that grew, if
    `witnessed`.
    """
    settled = first.place.certain or _flat_s(first) >= limits.settled_s
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
    """Return how long the memory had held its level before it grew, in s."""
    return 0.0 if first.place.span is None else (first.at_ns - first.place.span[0]) / 1e9


def _why_first(
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
    who = where(first.place.rank, first.place.node, first.place.device)
    unseen = expected - round(coverage * expected)
    seen = f" ({text.count(unseen, 'rank')} not observed then)" if unseen else ""
    if lead is None or error is None:
        if grown > 1:
            return f"{who} grew first: {what}; the others grew from their own start on{seen}."
        others = f"{text.ranks(near)} grew by at least half as much" if near else "no other rank grew"
        return f"{who} grew {'most' if near else 'alone'}: {what}; {others}{seen}."
    return (
        f"{who} grew first: {what}, {text.duration(lead / 1e9)} before any other rank (error of clocks "
        f"and samples: {text.duration(error / 1e9)}){seen}."
    )


_CLASSES: tuple[AttributionKind, ...] = ("collective_confident", "collective_likely", "collective_suspect")
_NORMAL = (
    "These are buffers that a communicator keeps, which is normal: plan for them. Fewer process groups, or a "
    "smaller NCCL_BUFFSIZE, need less."
)
WORLD = "world"
"""The process group of all ranks, which is not named in sentences."""
_COMPARED = 8
"""Largest number of spikes of a rank that are compared with those of others."""
_WIDER = 2
"""With sensitivity `high`, times may differ by this factor more."""


@dataclass(frozen=True)
class Explained:
    """A hidden change with its explanation: what it coincides with."""

    process: str
    hidden: Hidden
    attribution: Attribution

    def finding(self) -> MemoryFinding:
        """Return the finding with its explanation. Buffers that are made once need no action."""
        finding = self.hidden.finding
        sure = self.attribution.kind != "collective_suspect"
        once = sure and finding.kind in ("step_change", "transient_spike")
        return MemoryFinding(
            kind=finding.kind,
            rank=finding.rank,
            node=finding.node,
            device=finding.device,
            severity="info" if once else finding.severity,
            confidence=finding.confidence,
            from_ns=finding.from_ns,
            to_ns=finding.to_ns,
            evidence={
                **finding.evidence,
                "collective": self.attribution.op,
                "group": self.attribution.group,
                "collective_bytes": self.attribution.evidence["collective_bytes"],
                "attribution": self.attribution.kind,
            },
            next=[_NORMAL] if once else finding.next,
            why=self.attribution.why if sure else finding.why,
        )


@dataclass(frozen=True)
class _Use:
    """The use of one operation of one process group by a rank."""

    op: str
    group: str | None
    firsts: Int64
    """
    Beginning of each interval of use (n,), in ns, ascending: one interval for the whole run,
    or n marks.
    """
    lasts: Int64
    """Latest end of these intervals so far (n,), in ns."""
    bytes: int | None

    @property
    def first_ns(self) -> int:
        """Return the time of the first use, in ns."""
        return int(self.firsts[0])

    def overlaps(self, begins: Int64, ends: Int64) -> float:
        """Return the share of some intervals (ns) in which it was in use."""
        before = np.searchsorted(self.firsts, ends, side="right")
        return float(np.mean((before > 0) & (self.lasts[np.maximum(before - 1, 0)] >= begins)))


class _Changes:
    """Hidden changes of one kind on all ranks. Finds the ranks that changed at the same time."""

    def __init__(self, hidden: Sequence[tuple[RankFindings, Hidden]], all_of: Sequence[RankFindings]) -> None:
        self._ranks = {rank: index for index, rank in enumerate({one.rank for one in all_of if one.has_gap})}
        rows = [
            (begin, end, self._ranks[one.rank], one.interval_ns, one.bound_ns)
            for one, change in hidden
            if one.rank in self._ranks
            for begin, end in change.times
        ]
        columns = np.array(sorted(rows), np.int64).reshape(-1, 5).T
        self._begin, self._end, self._rank, self._interval, self._bound = (
            *map(np.ascontiguousarray, columns),
        )
        self._longest = int((self._end - self._begin).max(initial=0))
        self._most = int(self._interval.max(initial=0) + self._bound.max(initial=0))

    def alike(self, one: RankFindings, change: Hidden, slack: int) -> _Alike:
        """
        Return how many other ranks have a hidden gap, and how many of them changed alike at
        the same time.
        """
        times = change.times[:: -(-len(change.times) // _COMPARED)]
        counts = np.zeros(len(self._ranks), np.int64)
        for begin, end in times:
            changed = np.zeros(len(self._ranks), np.bool_)
            changed[self._at(begin, end, one, slack)] = True
            counts += changed
        alike = 2 * counts >= len(times)
        alike[self._ranks[one.rank]] = False
        return _Alike(len(self._ranks) - 1, int(np.count_nonzero(alike)))

    def _at(self, begin: int, end: int, one: RankFindings, slack: int) -> Int64:
        """
        Return the ranks that changed between two times (ns), within the precision of clocks
        and samples.
        """
        most = slack + self._most + one.bound_ns
        some = slice(*np.searchsorted(self._begin, (begin - self._longest - most, end + most + 1)))
        near = np.maximum(self._interval[some] - one.interval_ns, 0) + self._bound[some]
        near += slack + one.bound_ns
        at_once = (self._begin[some] - near <= end) & (self._end[some] + near >= begin)
        return self._rank[some][at_once]


@dataclass(frozen=True)
class _Alike:
    """Number of other ranks that changed at the same time."""

    others: int
    same: int

    @property
    def synchrony(self) -> float | None:
        """Return the share of the other ranks that changed. None if there are no other ranks."""
        return self.same / self.others if self.others else None


def explain(
    all_of: Sequence[RankFindings],
    collectives: Sequence[Collective],
    sensitivity: Sensitivity,
    limits: MemoryLimits,
) -> list[Explained]:
    """Return the hidden changes that coincide with collectives, as certain as `sensitivity` requires."""
    hidden = [(place, change) for place in all_of for change in place.hidden]
    if not hidden:
        return []
    uses = _uses(collectives)
    # A collective has peers: for a rank that marks none, the marks of the others count.
    unmarked = any(one.rank not in uses for one, _ in hidden)
    of_others = _marks_of_any(collectives) if unmarked else []
    kinds = {change.finding.kind for _, change in hidden}
    changes = {
        kind: _Changes([pair for pair in hidden if pair[1].finding.kind == kind], all_of) for kind in kinds
    }
    shown = _CLASSES[: SHOWN[sensitivity]]
    explained = []
    for one, change in hidden:
        slack = one.interval_ns * (_WIDER if sensitivity == "high" else 1)
        alike = changes[change.finding.kind].alike(one, change, slack)
        together = alike.synchrony is not None and alike.synchrony >= SYNCHRONY[sensitivity]
        evidence = _evidence(one, change, uses.get(one.rank) or of_others, slack, limits)
        kind = _class(change, evidence, together, bool(uses), limits)
        if kind in shown:
            attribution = _attribution(kind, one, change, evidence, alike)
            explained.append(Explained(one.process, change, attribution))
    return explained


def _uses(collectives: Sequence[Collective]) -> dict[int, list[_Use]]:
    """Return each use of a collective operation and group by a rank, the first use first."""
    by_key: dict[tuple[int, str, str | None], list[Collective]] = defaultdict(list)
    for collective in collectives:
        by_key[collective.rank, collective.op, collective.group].append(collective)
    uses: dict[int, list[_Use]] = defaultdict(list)
    for (rank, op, group), parts in by_key.items():
        sizes = [part.bytes for part in parts if part.bytes is not None]
        firsts, lasts = np.array(sorted((part.first_ns, part.last_ns) for part in parts), np.int64).T
        use = _Use(op, group, firsts, np.maximum.accumulate(lasts), sum(sizes) if sizes else None)
        uses[rank].append(use)
    for each_of in uses.values():
        each_of.sort(key=lambda use: (use.first_ns, use.op, use.group or ""))
    return uses


def _marks_of_any(collectives: Sequence[Collective]) -> list[_Use]:
    """
    Return the collectives of all ranks as if one rank had used them, without collectives of groups: not all
    ranks are in those.
    """
    marks = [replace(mark, rank=0) for mark in collectives if mark.group is None]
    return _uses(marks).get(0, [])


@dataclass(frozen=True)
class _Evidence:
    """The uses of collectives that coincide with a change of hidden memory."""

    new: list[_Use]
    """Operations that were used for the first time at that moment."""
    marked: list[_Use]
    """
    Operations used at that moment and not used for most of the time. Such a coincidence is unlikely to be
    chance.
    """
    active: list[_Use]
    """Operations used at that moment."""
    share: float
    """Share of the changes (a spike may occur several times) that coincide with `marked`."""

    @property
    def best(self) -> _Use | None:
        """Return the most significant use."""
        return next(iter([*self.new, *self.marked, *self.active]), None)


def _evidence(
    one: RankFindings, change: Hidden, uses: list[_Use], slack: int, limits: MemoryLimits
) -> _Evidence:
    begins, ends = np.array(change.times, np.int64).T
    begins, ends = begins - slack, ends + slack
    hits_of = [(use, use.overlaps(begins, ends)) for use in uses]
    often = [use for use, hits in hits_of if hits >= limits.marked_changes]
    new = [use for use in often if begins[0] <= use.first_ns <= ends[0]]
    active = [use for use, hits in hits_of if hits]
    marked, share = [], 0.0
    for use, hits in hits_of:
        if hits >= limits.marked_changes and _coverage(one, change, use) <= limits.marked_share:
            marked.append(use)
            share = max(share, hits)
    return _Evidence(new, marked, active, share)


def _coverage(one: RankFindings, change: Hidden, use: _Use) -> float:
    """Return the share of the time in which a change would coincide with a use by chance, 0..1."""
    if one.span is None or one.span[1] <= one.span[0]:
        return 1.0
    begin, end = change.times[0]
    before, after = end - begin + one.interval_ns, one.interval_ns
    highs = np.clip(use.lasts + before, *one.span)
    earlier = np.concatenate([[one.span[0]], highs[:-1]])
    lows = np.maximum(np.clip(use.firsts - after, *one.span), earlier)
    return float(np.maximum(highs - lows, 0).sum()) / (one.span[1] - one.span[0])


def _class(
    change: Hidden, evidence: _Evidence, together: bool, any_known: bool, limits: MemoryLimits
) -> AttributionKind | None:
    """
    Return the certainty that a change is caused by collectives. None: no sign of it.

    Args:
        change: a change of the hidden gap.
        evidence: the collectives of its rank at that time.
        together: whether enough other ranks changed alike at that time.
        any_known: whether it is known when any rank was in which collectives.
        limits: the thresholds.
    """
    sure = _CLASSES[0] if together else _CLASSES[1]
    if change.finding.kind == "persistent_drift":
        return sure if len({use.group for use in evidence.new}) >= limits.drift_groups else None
    if evidence.new or evidence.marked:
        return sure
    if not together or (change.warm and change.finding.kind == "step_change"):
        return None
    return _CLASSES[2] if evidence.active or not any_known else None


def _attribution(
    kind: AttributionKind, one: RankFindings, change: Hidden, evidence: _Evidence, alike: _Alike
) -> Attribution:
    use = evidence.best
    groups = len({first_use.group for first_use in evidence.new})
    return Attribution(
        kind=kind,
        rank=one.rank,
        device=one.device,
        finding=change.finding.kind,
        from_ns=change.finding.from_ns,
        op=None if use is None else use.op,
        group=None if use is None else use.group,
        bytes=round(change.delta),
        evidence={
            "first_uses": len(evidence.new),
            "groups": groups,
            "marked_share": evidence.share if evidence.marked else None,
            "apart_s": abs(use.first_ns - change.end_ns) / 1e9 if use and evidence.new else None,
            "other_ranks": alike.others,
            "synchrony": alike.synchrony,
            "over_noise": change.delta / change.noise if change.noise else None,
            "collective_bytes": None if use is None else use.bytes,
        },
        why=_why(one, change, evidence, groups, alike),
    )


def _why(one: RankFindings, change: Hidden, evidence: _Evidence, groups: int, alike: _Alike) -> str:
    who, use = where(one.rank, one.node, one.device), evidence.best
    saw = f"{alike.same:,} of {text.count(alike.others, 'other rank')} saw the same then"
    also = f"; {saw}" if alike.others else ""
    if change.finding.kind == "persistent_drift":
        return (
            f"{who}: memory outside torch's allocator grew by {text.size(change.delta)} while "
            f"{groups:,} process groups were first used{also}."
        )
    rose = f"{who}: memory outside torch's allocator rose by {text.size(change.delta)}"
    if use is None:
        return f"{rose}; {saw}, as with a collective, but none is recorded."
    what = use.op if use.group in (None, WORLD) else f"{use.op} in group {use.group}"
    return f"{rose} {'with the first' if evidence.new else 'during'} {what}{also}."
