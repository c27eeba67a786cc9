"""
A finding: one struct for findings about steps, memory, layers, shards, experts and nodes. Also converts
verdicts to findings.

The views of other signals make their own findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from traceml_ray import text
from traceml_ray.analysis.anomalies import Anomaly
from traceml_ray.analysis.labels import LABELS, Severity
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import TimedEpisode, VerdictInfo

Value = int | float | str | bool | None
OnSteps = Verdict | VerdictInfo
"""A verdict on steps, as judged or as answered."""
MOST = 100
"""Largest number of findings that are listed for a run."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "notice", "info")
"""The most severe first."""
_NODES = 2
"""Number of nodes that are listed in a headline. Further nodes are counted."""
_KEY_RANKS = 8


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was found in a run. None means "not known"; an empty tuple, that nothing is named."""

    key: str
    """Identifies the finding in its run. It does not change while the same thing is found."""
    signal: str
    """Subject: the name of its view (`signals.views`), `nodes`, or `steps` for findings of the verdict."""
    label: str
    """Kind of finding: a label of a verdict, `memory_creep`, `slow_layer`, …"""
    severity: Severity
    """critical, warning, notice or info."""
    ranks: tuple[int, ...] = ()
    """Global ranks that are named; empty: none."""
    nodes: tuple[str, ...] = ()
    """Nodes of `ranks`, or the node that the finding is about, by their labels."""
    device: int | None = None
    """Device index in its process (for `nodes`: in its node). None: no device, or the host's memory."""
    stages: tuple[str, ...] = ()
    """Stages of the step in which ranks are late, the worst first."""
    what: str | None = None
    """The layer, router, span, kind of collective or quantity of a node that the finding is about."""
    from_step: int | None = None
    """First step that shows it; None: not known."""
    to_step: int | None = None
    """Last step that shows it; None: not known."""
    from_ns: int | None = None
    """When it began (ns since the epoch, aggregator's clock)."""
    to_ns: int | None = None
    """When it was last seen (ns since the epoch, aggregator's clock)."""
    cost: float | None = None
    """Share (0..1) of time that a fix saves. `about` says what it is a share of."""
    about: Literal["now", "run"] = "now"
    """What `cost` is a share of: the time since the finding began (`now`), or the whole run (`run`)."""
    cost_s: float | None = None
    """`cost` in seconds."""
    confidence: str | None = None
    """low, medium, high."""
    why: str = ""
    """Explanation in sentences for a person."""
    next: str = ""
    """What to do."""
    evidence: dict[str, Value] = {}
    """Numbers and words by name. The end of a name is its unit."""
    explains: str | None = None
    """Key of a finding that this one may explain: both were seen at the same place and time."""

    @property
    def headline(self) -> str:
        """Kind and ranks in one line: "memory creep: rank 2 (node-0)"."""
        what = (
            None
            if self.signal == "steps"
            else text.words(self.what or "")
            if self.signal == "nodes"
            else self.what
        )
        inside = self.what if self.label == "stalled" else " and ".join(self.stages)
        return headline(self.label, self.ranks, self.nodes, what=what, inside=inside or "")


def headline(
    label: str, ranks: Sequence[int], nodes: Sequence[str], *, what: str | None = None, inside: str = ""
) -> str:
    """Return kind, subject and ranks in one line: "straggler: rank 5 (node-1) in data"."""
    who = text.ranks(ranks)
    where = text.listed(list(nodes[:_NODES]), max(0, len(nodes) - _NODES))
    place = f"{who} ({where})" if who and where else who or where
    about = " on ".join(filter(None, (what, place)))
    return text.words(label) + (f": {about}" if about else "") + (f" in {inside}" if inside else "")


def key_of(label: str, ranks: Iterable[int] = (), *parts: object) -> str:
    """Return the key of a finding: its kind, the ranks that it names, and what else distinguishes it."""
    named = sorted(ranks)
    more = [f"+{len(named) - _KEY_RANKS}"] * (len(named) > _KEY_RANKS)
    who = ",".join([*map(str, named[:_KEY_RANKS]), *more])
    return ":".join([label, *(str(part) for part in (who, *parts) if part not in (None, ""))])


def listed(steps: Sequence[Finding], others: Iterable[Finding], most: int = MOST) -> list[Finding]:
    """
    Return the findings of a run in the order in which every face lists them.

    The findings on steps come first, in their order (the verdict's first). The others follow by decreasing
    cost; at equal cost by decreasing severity.
    """
    rest = sorted(others, key=lambda one: (-(one.cost or 0.0), SEVERITIES.index(one.severity)))
    return _with_own_keys([*steps, *rest])[:most]


def _with_own_keys(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with unique keys: a repeated key gets a number appended."""
    seen, unique = dict[str, int](), list[Finding]()
    for one in findings:
        times = seen[one.key] = seen.get(one.key, 0) + 1
        unique.append(one if times == 1 else msgspec.structs.replace(one, key=f"{one.key}#{times}"))
    return unique


def known(values: Mapping[str, Any]) -> dict[str, Value]:
    """Return the known values, as evidence."""
    return {name: value for name, value in values.items() if value is not None}


_SHOWN = ("finding", "failure", "watching")
"""Kinds of labels that are findings. Other labels say that nothing was found, or why that is not known."""
_OF_VERDICT = (
    *("pattern", "chronic", "excess_pct", "gain_pct", "z", "rank_hours_per_hour", "host_bound", "coverage"),
    *("exit_reason", "open_stage", "lasted_s", "confirmed"),
)


def of_verdict(verdict: OnSteps, episodes: Iterable[TimedEpisode] = ()) -> list[Finding]:
    """
    Return the findings that the verdict names, then those in its `also`. Empty if it names nothing.
    `episodes`: the known episodes of the run.
    """
    began = {(episode.label, episode.from_step): episode for episode in reversed([*episodes])}
    shown = [one for one in (verdict, *verdict.also) if LABELS[one.label].kind in _SHOWN]
    return [_named(one, began.get((one.label, one.from_step))) for one in shown]


def _named(one: OnSteps, episode: TimedEpisode | None) -> Finding:
    stages = tuple(one.stages) or ((one.stage,) if one.stage else ())
    return Finding(
        key=key_of(one.label, one.ranks, "+".join(sorted(stages))),
        signal="steps",
        label=one.label,
        severity=LABELS[one.label].severity,
        ranks=tuple(one.ranks),
        nodes=nodes_named(one),
        stages=stages,
        what=one.span,
        from_step=one.from_step,
        to_step=one.to_step,
        from_ns=one.began_ns if one.began_ns is not None else _ns(episode.started_at if episode else None),
        to_ns=_ns(episode.ended_at if episode else None),
        cost=None if one.cost_pct is None else one.cost_pct / 100,
        about=one.about,
        cost_s=one.cost_s,
        confidence=one.confidence,
        why=one.why,
        next=one.next,
        evidence=known({name: getattr(one, name) for name in _OF_VERDICT}),
    )


def nodes_named(one: OnSteps | TimedEpisode) -> tuple[str, ...]:
    """Return the nodes of a verdict's ranks. An episode knows the node of only one rank."""
    alone = [one.node] if one.node and len(one.ranks) == 1 else []
    return tuple(one.nodes or alone)


def _ns(moment: str | None) -> int | None:
    """Return a time of an answer (ISO 8601, to the ms) in ns since the epoch."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1e3) * 1_000_000


def of_machine(anomalies: Iterable[Anomaly], steps: Sequence[Finding]) -> list[Finding]:
    """
    Return the anomalies on the nodes of the first of `steps` at its time, as findings that may
    explain it.
    """
    explained = steps[0].key if steps else None
    return [
        Finding(
            key=key_of("node_anomaly", (), one.node, one.kind, one.device),
            signal="nodes",
            label="node_anomaly",
            severity="info",
            nodes=(one.node,),
            device=one.device,
            what=one.kind,
            why=one.text,
            evidence=known({"value": one.value, "usual": one.usual}),
            explains=explained,
        )
        for one in anomalies
    ]
