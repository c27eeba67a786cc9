"""Hidden memory that stands with communication: communicator buffers, above all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from traceml_ray import text
from traceml_ray.analysis.memory.alone import Alone, Hidden
from traceml_ray.analysis.memory.limits import SHOWN, SYNCHRONY, MemoryLimits
from traceml_ray.analysis.memory.sentences import where
from traceml_ray.analysis.memory.shapes import (
    Attribution,
    AttributionKind,
    Collective,
    Finding,
    Sensitivity,
)

_CLASSES: tuple[AttributionKind, ...] = ("collective_confident", "collective_likely", "collective_suspect")
_NORMAL = (
    "These are buffers that a communicator keeps, which is normal: plan with them. Fewer process groups, or "
    "a smaller NCCL_BUFFSIZE, need less."
)
WORLD = "world"
"""The process group of all ranks, which needs no name."""
_WIDER = 2
"""With sensitivity `high`, times may be so many times as far apart."""


@dataclass(frozen=True)
class Explained:
    """A hidden change and what it stands with."""

    process: str
    hidden: Hidden
    attribution: Attribution

    def finding(self) -> Finding:
        """Return the finding with its explanation; buffers that are made once need no action."""
        finding = self.hidden.finding
        sure = self.attribution.kind != "collective_suspect"
        once = sure and finding.kind in ("step_change", "transient_spike")
        return Finding(
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
    """A rank's use of one operation of one process group."""

    op: str
    group: str | None
    first_ns: int
    last_ns: int
    bytes: int | None


def explain(
    all_of: Sequence[Alone],
    collectives: Sequence[Collective],
    sensitivity: Sensitivity,
    limits: MemoryLimits,
) -> list[Explained]:
    """Return the hidden changes that stand with collectives, as surely as `sensitivity` asks for."""
    hidden = [(each, change) for each in all_of for change in each.hidden]
    if not hidden:
        return []
    uses = _uses(collectives)
    shown = _CLASSES[: SHOWN[sensitivity]]
    found = []
    for each, change in hidden:
        attribution = _attribute(each, change, uses.get(each.rank, []), hidden, all_of, sensitivity, limits)
        if attribution is not None and attribution.kind in shown:
            found.append(Explained(each.process, change, attribution))
    return found


def _uses(collectives: Sequence[Collective]) -> dict[int, list[_Use]]:
    """Return what each rank used, each operation and group once, the first use first."""
    by_key: dict[tuple[int, str, str | None], list[Collective]] = defaultdict(list)
    for each in collectives:
        by_key[each.rank, each.op, each.group].append(each)
    uses: dict[int, list[_Use]] = defaultdict(list)
    for (rank, op, group), parts in by_key.items():
        sizes = [part.bytes for part in parts if part.bytes is not None]
        use = _Use(
            op,
            group,
            min(part.first_ns for part in parts),
            max(part.last_ns for part in parts),
            sum(sizes) if sizes else None,
        )
        uses[rank].append(use)
    for each_of in uses.values():
        each_of.sort(key=lambda use: (use.first_ns, use.op, use.group or ""))
    return uses


def _attribute(
    at: Alone,
    change: Hidden,
    uses: list[_Use],
    hidden: list[tuple[Alone, Hidden]],
    all_of: Sequence[Alone],
    sensitivity: Sensitivity,
    limits: MemoryLimits,
) -> Attribution | None:
    slack = at.interval_ns * (_WIDER if sensitivity == "high" else 1)
    begin, end = change.begin_ns - slack, change.end_ns + slack
    new = [use for use in uses if begin <= use.first_ns <= end]
    active = [use for use in uses if use.first_ns <= end and use.last_ns >= begin]
    others, same = _others(at, change, hidden, all_of, slack)
    synchrony = same / others if others else None
    together = synchrony is not None and synchrony >= SYNCHRONY[sensitivity]
    if change.finding.kind == "persistent_drift":
        groups = {use.group for use in new}
        if len(groups) < limits.drift_groups:
            return None
        kind = _CLASSES[0] if together else _CLASSES[1]
    elif new:
        kind = _CLASSES[0] if together else _CLASSES[1]
    elif active and together and not change.warm:
        kind = _CLASSES[2]
    else:
        return None
    use = (new or active)[0]
    return Attribution(
        kind=kind,
        rank=at.rank,
        device=at.device,
        finding=change.finding.kind,
        from_ns=change.finding.from_ns,
        op=use.op,
        group=use.group,
        bytes=round(change.delta),
        evidence={
            "first_uses": len(new),
            "groups": len({use.group for use in new}),
            "apart_s": abs(use.first_ns - change.end_ns) / 1e9 if new else None,
            "other_ranks": others,
            "synchrony": synchrony,
            "over_noise": change.delta / change.noise if change.noise else None,
            "collective_bytes": use.bytes,
        },
        why=_why(at, change, use, bool(new), len({each.group for each in new}), others, same),
    )


def _others(
    at: Alone, change: Hidden, hidden: list[tuple[Alone, Hidden]], all_of: Sequence[Alone], slack: int
) -> tuple[int, int]:
    """Return how many other ranks have a hidden gap, and how many of them changed alike at the time."""
    ranks = {each.rank for each in all_of if each.has_gap and each.rank != at.rank}
    same = set()
    for each, other in hidden:
        if each.rank in ranks and other.finding.kind == change.finding.kind:
            near = slack + max(each.interval_ns - at.interval_ns, 0) + each.bound_ns + at.bound_ns
            if other.begin_ns - near <= change.end_ns and other.end_ns + near >= change.begin_ns:
                same.add(each.rank)
    return len(ranks), len(same)


def _why(at: Alone, change: Hidden, use: _Use, new: bool, groups: int, others: int, same: int) -> str:
    who = where(at.rank, at.node, at.device)
    what = use.op if use.group in (None, WORLD) else f"{use.op} in group {use.group}"
    also = f"; {same:,} of {text.count(others, 'other rank')} saw the same then" if others else ""
    if change.finding.kind == "persistent_drift":
        return (
            f"{who}: memory outside torch's allocator grew by {text.size(change.delta)} while "
            f"{groups:,} process groups were first used{also}."
        )
    with_ = f"with the first {what}" if new else f"during {what}"
    return f"{who}: memory outside torch's allocator rose by {text.size(change.delta)} {with_}{also}."
