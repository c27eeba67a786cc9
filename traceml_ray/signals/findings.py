"""What a verdict names as findings. Those of other signals are made by their views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from traceml_ray.analysis.labels import LABELS, Label
from traceml_ray.signals.finding import Finding, key_of, known

_SHOWN = ("finding", "failure", "watching")
"""Kinds of labels that are findings: the others say that nothing was found, or why that is not known."""
_OF_VERDICT = (
    *("pattern", "chronic", "excess_pct", "gain_pct", "z", "rank_hours_per_hour", "host_bound", "coverage"),
    *("exit_reason", "open_stage", "lasted_s"),
)


def of_verdict(verdict: Mapping[str, Any]) -> list[Finding]:
    """Return what the verdict names, then what it names `also`; nothing where it names nothing."""
    shown = [one for one in (verdict, *(verdict.get("also") or ())) if LABELS[_label(one)].kind in _SHOWN]
    return [_named(one, verdict.get("episodes") or ()) for one in shown]


def _named(one: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> Finding:
    label, stages = _label(one), one["stages"] or ([one["stage"]] if one["stage"] else [])
    episode: Mapping[str, Any] = next(
        (
            episode
            for episode in episodes
            if episode["label"] == label and episode["from_step"] == one.get("from_step")
        ),
        {},
    )
    cost_pct, began_ns = one.get("cost_pct"), one.get("began_ns")
    return Finding(
        key=key_of(label, one["ranks"], "+".join(sorted(stages))),
        signal="steps",
        label=label,
        severity=LABELS[label].severity,
        ranks=tuple(one["ranks"]),
        nodes=nodes_named(one),
        stages=tuple(stages),
        what=one.get("span"),
        from_step=one.get("from_step"),
        to_step=one.get("to_step"),
        from_ns=began_ns if began_ns is not None else _ns(episode.get("started_at")),
        to_ns=_ns(episode.get("ended_at")),
        cost=None if cost_pct is None else cost_pct / 100,
        about=one.get("about") or "now",
        cost_s=one.get("cost_s"),
        confidence=one.get("confidence"),
        why=one["why"],
        next=one.get("next") or "",
        evidence=known({name: one.get(name) for name in _OF_VERDICT}),
    )


def _label(one: Mapping[str, Any]) -> Label:
    label: Label = one["label"]
    return label


def nodes_named(one: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the nodes of a verdict's ranks; an episode knows that of one rank only."""
    alone = [one["node"]] if one["node"] and len(one["ranks"]) == 1 else []
    return tuple(one.get("nodes") or alone)


def _ns(moment: str | None) -> int | None:
    """Return a moment as answers have it (ISO 8601, to the ms) in ns since the epoch."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1e3) * 1_000_000


def of_machine(anomalies: Iterable[Mapping[str, Any]], steps: Sequence[Finding]) -> list[Finding]:
    """Return what was anomalous on the nodes of the first of `steps` at its time: it may explain that."""
    explained = steps[0].key if steps else None
    return [
        Finding(
            key=key_of("node_anomaly", (), one["node"], one["kind"], one["device"]),
            signal="nodes",
            label="node_anomaly",
            severity="info",
            nodes=(one["node"],),
            device=one["device"],
            what=one["kind"],
            why=one["text"],
            evidence=known({name: one.get(name) for name in ("value", "usual")}),
            explains=explained,
        )
        for one in anomalies
    ]
