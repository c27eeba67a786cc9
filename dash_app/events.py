"""What happened in a run: events and changes of verdict, the newest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from traceml_ray.analysis.labels import LABELS, Severity
from traceml_ray.reports.headlines import brief, named
from traceml_ray.reports.summary import moment
from traceml_ray.stages import STAGES
from traceml_ray.store.nodes import node_key

if TYPE_CHECKING:
    from .followed import Run
    from .session_cache import SessionCache

_SEVERITY: dict[str, Severity] = {
    **{label: meaning.severity for label, meaning in LABELS.items()},
    **dict.fromkeys(("node_lost", "exception", "xid"), "critical"),
    **dict.fromkeys(("restart", "note", "swallowed"), "warning"),
}
NO_BRIEF = {"count": 0, "cost_s": 0.0}
_SILENT = {"exit", "relay_start", "process_ended", "attach"}
"""Of these only those with a message are worth telling."""


def events(
    _cache: SessionCache,
    run: Run | None,
    kind: str | None = None,
    rank: int | str | None = None,
    node: str | None = None,
) -> dict[str, Any]:
    """Return what happened, the newest first, of one kind, rank or node."""
    found = events_of(run) if run else []
    kinds = Counter(event["kind"] for event in found)
    if rank not in (None, ""):
        found = [event for event in found if event["rank"] == int(rank)]
    if node:
        label = run.labels.get(node) if run else None
        found = [event for event in found if event["node"] in (node, label)]
    if kind:
        found = [event for event in found if event["kind"] == kind]
    verdict: Mapping[str, Any] = (run and run.verdict) or {}
    return {
        "events": found,
        "kinds": dict(kinds),
        "episodes": [{**one, "headline": named(one)} for one in verdict.get("episodes") or ()],
        "brief": brief(verdict.get("brief") or NO_BRIEF),
    }


def severity(kind: str) -> Severity:
    """Return how bad a kind of event, or the label of a verdict, is."""
    return _SEVERITY.get(kind, "info")


def events_of(run: Run) -> list[dict[str, Any]]:
    """Return the events and the changes of verdict, the newest first."""
    worth = [event for event in run.events if event["message"] or event["kind"] not in _SILENT]
    found = [_event(run, event) for event in worth] + [_change(verdict) for verdict in run.verdicts]
    return sorted(found, key=lambda event: -event["t_ns"])[: run.events.maxlen]


def _event(run: Run, event: Mapping[str, Any]) -> dict[str, Any]:
    rank = event["rank"] if event["rank"] is not None else event["data"].get("rank")
    kind, stage = event["kind"], event["stage"]
    node = run.labels.get(event["node_id"], event["node_id"]) if event["node_id"] else node_of(run, rank)
    return {
        "id": f"e{event['id']}",
        "t_ns": event["t_ns"],
        "time": moment(event["t_ns"]),
        "kind": kind,
        "severity": severity(kind),
        "rank": rank,
        "node": node,
        "step": event["step"],
        "stage": None if stage is None else STAGES[stage],
        "text": event["message"].partition("\n")[0][:500],
    }


def _change(verdict: Mapping[str, Any]) -> dict[str, Any]:
    label = verdict["label"]
    return {
        "id": f"v{verdict['t_ns']}",
        "t_ns": verdict["t_ns"],
        "time": moment(verdict["t_ns"]),
        "kind": "verdict",
        "severity": severity(label),
        "rank": verdict["rank"],
        "node": verdict["node"],
        "step": verdict["from_step"] if verdict["from_step"] is not None else verdict["last_step"],
        "stage": verdict["stage"],
        "text": named(dict(verdict)) + (f": {verdict['why']}" if verdict["why"] else ""),
    }


def node_of(run: Run, rank: int | None) -> str | None:
    stream = run.ranks.get(rank) if rank is not None else None
    return run.labels.get(node_key(stream), node_key(stream)) if stream and stream.identity else None
