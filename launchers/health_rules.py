"""
What a health check of Ray Train decides about a run. Pure functions of what was seen of the run, and of
limits: no Ray, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Annotated, Literal

import msgspec

from traceml_ray import text
from traceml_ray.analysis.labels import DEATHS, LABELS, ReasonKind
from traceml_ray.identity import RankIdentity
from traceml_ray.settings import SettingError
from traceml_ray.signals.finding import Finding
from traceml_ray.store.results import LiveVerdict, NodeInfo
from traceml_ray.wire.codec import ready

Action = Literal["diagnose", "reattempt", "evict"]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
_WORK: frozenset[ReasonKind] = frozenset({"tokens", "samples", "data", "between_steps", "experts"})
"""Reasons for a late rank that lie in its share of the work. Another node would be late with it, too."""
_MILDEST_FIRST: tuple[Action, ...] = ("diagnose", "reattempt", "evict")
_LOOKS = 2
"""Number of looks that `stale_s` must be long enough for."""


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a health check decides what. Every duration is in seconds."""

    dry_run: bool = True
    """Whether decisions are only logged and noted in the session, and not handed to Ray Train."""
    allowed: tuple[Action, ...] = _MILDEST_FIRST
    """The decisions that may be made at all."""
    diagnose_s: Seconds = 120.0
    """How long a straggler, a hang or a dead rank must have been named before it is diagnosed, once."""
    straggler_s: Seconds = 900.0
    """How long a straggler must have been named before its node is evicted."""
    straggler_cost_pct: Annotated[float, msgspec.Meta(gt=0, le=100)] = 10.0
    """Share of time (%) that a straggler must cost during all of that time."""
    hang_s: Seconds = 300.0
    """How long a hang must have been named before the run is attempted again."""
    dead_s: Seconds = 120.0
    """How long a rank must have been named as dead before the run is attempted again."""
    max_evictions: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Largest number of nodes that are evicted in a run."""
    stale_s: Seconds = 60.0
    """Age of the newest answer above which nothing is decided, and longest gap between two answers."""
    poll_s: Seconds = 5.0
    """Time between two looks at the run."""

    @classmethod
    def checked(cls, fields: Mapping[str, object]) -> HealthLimits:
        """Return the limits with these fields. Raises SettingError for an unknown field or a bad value."""
        try:
            limits = msgspec.convert(dict(fields), ready(cls))
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise SettingError(f"health check: {error}. Its settings: {known}") from None
        if limits.stale_s < _LOOKS * limits.poll_s:
            raise SettingError(
                f"health check: stale_s={limits.stale_s:g} must be at least {_LOOKS} times "
                f"poll_s={limits.poll_s:g}"
            )
        return limits


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a look at a run has shown, and that may call for a decision."""

    kind: str
    """`straggler`, the label of a failure in which no rank died, or `dead`."""
    key: str
    """Key of the finding. It stays the same while the same thing is found."""
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    """Ray's ids of the nodes of `ranks`, sorted. Empty if one of them is not known."""
    cost_pct: float = 0.0
    """Share of time that it costs (%); 0 if it is not known."""
    of_node: bool = False
    """Whether a straggler is sure, lasting, on one node, and not explained by its share of the work."""
    text: str = ""
    """Kind, ranks and node in one line."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one attempt of a run at one time."""

    asked_s: float
    """When the questions were asked, in s of a monotonic clock."""
    signs: tuple[Sign, ...] = ()
    doubt: str = ""
    """Why the data is partial; "" if it is whole. From partial data nothing is decided."""
    nodes: int = 0
    """Number of nodes with ranks of the run."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and why."""

    action: Action
    key: str
    """Key of the finding that it is about."""
    nodes: tuple[str, ...]
    """Ray's ids of the nodes to evict or diagnose."""
    reason: str


def look_at(
    findings: Sequence[Finding],
    verdict: LiveVerdict | None,
    ranks: Sequence[RankIdentity],
    nodes: Sequence[NodeInfo],
    *,
    attempt: int,
    asked_s: float,
    now_ns: int,
    stale_s: float,
) -> Look:
    """
    Return what answers of a session show of the attempt `attempt` of a run.

    Args:
        findings: findings of the run.
        verdict: verdict on the run; None: there is none yet.
        ranks: identities of the rank processes that the answers are about.
        nodes: nodes of the cluster.
        attempt: number of the attempt that runs now.
        asked_s: when the questions were asked, in s of a monotonic clock.
        now_ns: the present time, in ns since the epoch.
        stale_s: longest time since a node of the run was last seen, in s.
    """
    node_of = {rank.global_rank: rank.node_id for rank in ranks}
    run_nodes = {node_id for node_id in node_of.values() if node_id is not None}
    doubt = _doubt(verdict, ranks, attempt) or _silent(nodes, run_nodes, now_ns, stale_s)
    signs = [] if verdict is None else [_sign(finding, verdict, node_of) for finding in _judged(findings)]
    return Look(asked_s=asked_s, signs=tuple(signs), doubt=doubt, nodes=len(run_nodes))


def _judged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings that may be signs. A hang that is over is none."""
    for finding in findings:
        if finding.signal == "steps" and _kind_of(finding) and finding.evidence.get("lasted_s") is None:
            yield finding


def _kind_of(finding: Finding) -> str:
    """Return the kind of the sign that a finding on steps is; "": it is none."""
    failures = (label for label, meaning in LABELS.items() if meaning.kind == "failure")
    if finding.label in DEATHS:
        return "dead"
    return finding.label if finding.label in ("straggler", *failures) else ""


def _doubt(verdict: LiveVerdict | None, ranks: Sequence[RankIdentity], attempt: int) -> str:
    if verdict is None or not ranks:
        return "there is no verdict yet"
    if any(rank.attempt != attempt for rank in ranks):
        return "the answers are about an earlier attempt"
    if len(ranks) != ranks[0].world_size:
        return f"{len(ranks)} of {ranks[0].world_size} ranks are known"
    if verdict.coverage is not None and verdict.coverage < 1:
        return f"{verdict.coverage:.0%} of the ranks report"
    return ""


def _silent(nodes: Sequence[NodeInfo], run_nodes: Set[str], now_ns: int, stale_s: float) -> str:
    """Return which nodes of the run the monitor does not hear of; "" if it hears of all."""
    since_ns = now_ns - int(stale_s * 1e9)
    heard = {node.node_id for node in nodes if node.alive and (node.last_seen_ns or 0) >= since_ns}
    silent = len(run_nodes - heard)
    return f"{silent} of {len(run_nodes)} nodes do not report" if silent else ""


def _sign(finding: Finding, verdict: LiveVerdict, node_of: Mapping[int, str | None]) -> Sign:
    known = {node_of.get(rank) for rank in finding.ranks}
    nodes = tuple(sorted(node_id for node_id in known if node_id is not None))
    whole = None not in known
    judgements = [one for one in (verdict, *verdict.also) if set(one.ranks) == set(finding.ranks)]
    work = any(one.reason is not None and one.reason.what in _WORK for one in judgements)
    lasting = finding.evidence.get("pattern") == "lasting"
    return Sign(
        kind=_kind_of(finding),
        key=finding.key,
        ranks=finding.ranks,
        nodes=nodes if whole else (),
        cost_pct=100 * (finding.cost or 0.0) if finding.about == "now" else 0.0,
        of_node=lasting and whole and len(nodes) == 1 and finding.confidence == "high" and not work,
        text=finding.headline,
    )


def decide(
    looks: Sequence[Look],
    limits: HealthLimits,
    *,
    now_s: float,
    since_s: float = 0.0,
    evictions: int = 0,
    made: Set[tuple[Action, str]] = frozenset(),
) -> Opinion | None:
    """
    Return what to do about a run: the most severe of all decisions that are due. None: nothing.

    Nothing is decided where the newest look is older than `stale_s` or partial. A sign must have been in
    every look for as long as its limit says, with no partial look and no gap above `stale_s` in between.

    Args:
        looks: looks at the run, the oldest first.
        limits: limits and allowed decisions.
        now_s: the present time, in s of the clock of the looks.
        since_s: when the attempt began; looks from before do not count.
        evictions: number of nodes evicted so far.
        made: decisions already made in this attempt: (action, key of the finding).
    """
    current = [look for look in looks if look.asked_s >= since_s]
    if not current or current[-1].doubt or now_s - current[-1].asked_s > limits.stale_s:
        return None
    due = [
        opinion
        for sign in current[-1].signs
        for opinion in _due(sign, current, limits, evictions)
        if opinion.action in limits.allowed and (opinion.action, opinion.key) not in made
    ]
    return max(due, key=lambda opinion: _MILDEST_FIRST.index(opinion.action), default=None)


def _due(sign: Sign, looks: Sequence[Look], limits: HealthLimits, evictions: int) -> Iterator[Opinion]:
    """Yield each decision that is due about a sign of the newest look."""

    def opinion(action: Action, what: str, lasted_s: float) -> Opinion:
        reason = f"{what}: {sign.text}, for {text.duration(lasted_s)}"
        return Opinion(action=action, key=sign.key, nodes=sign.nodes, reason=reason)

    lasted_s = _lasted_s(looks, limits, sign)
    if lasted_s >= limits.diagnose_s:
        yield opinion("diagnose", "diagnose", lasted_s)
    again_s = {"hang": limits.hang_s, "dead": limits.dead_s}.get(sign.kind)
    if again_s is not None and lasted_s >= again_s:
        yield opinion("reattempt", "attempt again", lasted_s)
    if sign.kind == "straggler" and evictions < limits.max_evictions and looks[-1].nodes > 1:
        costly_s = _lasted_s(looks, limits, sign, evictable=True)
        if costly_s >= limits.straggler_s:
            yield opinion("evict", f"evict node {sign.nodes[0]}", costly_s)


def _lasted_s(looks: Sequence[Look], limits: HealthLimits, sign: Sign, *, evictable: bool = False) -> float:
    """Return for how long a sign was in every look until the newest, in s; -1 if it is not in the newest."""
    first_s = None
    for look in reversed(looks):
        if first_s is not None and first_s - look.asked_s > limits.stale_s:
            break
        if look.doubt or not any(_is_same(sign, other, limits, evictable) for other in look.signs):
            break
        first_s = look.asked_s
    return -1.0 if first_s is None else looks[-1].asked_s - first_s


def _is_same(sign: Sign, other: Sign, limits: HealthLimits, evictable: bool) -> bool:
    same = (sign.key, sign.nodes) == (other.key, other.nodes)
    return same and (not evictable or (other.of_node and other.cost_pct >= limits.straggler_cost_pct))


def kept(looks: Sequence[Look], limits: HealthLimits) -> tuple[Look, ...]:
    """Return the looks that a decision may still need: those of the longest time that a limit asks for."""
    longest_s = max(limits.diagnose_s, limits.straggler_s, limits.hang_s, limits.dead_s) + limits.stale_s
    return tuple(look for look in looks if looks[-1].asked_s - look.asked_s <= longest_s)
