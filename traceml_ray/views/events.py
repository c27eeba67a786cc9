"""What happened in a run: events, changes of the verdict and deaths, newest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceml_ray.reports.deaths import FATAL
from traceml_ray.reports.headlines import named
from traceml_ray.reports.summary import moment
from traceml_ray.stages import STAGES
from traceml_ray.store.step_shapes import DeathInfo

from .run_state import RunState
from .session_poll import SessionPoll
from .severity import severity

_QUIET = {"exit", "relay_start", "process_ended", "attach", "bundle_request"}
"""Kinds that are shown only with a message."""
CAUSE, FOLLOWED = "First cause", "What followed"


def events_of(cache: SessionPoll, run: RunState) -> list[dict[str, Any]]:
    """
    Return the events and the changes of verdict, newest first; where ranks died, before them the first cause,
    and in order of time what followed.
    """
    deaths = cache.deaths(run)
    events = [event for event in run.events if event["message"] or event["kind"] not in _QUIET]
    events = [event for event in events if not (deaths and event["kind"] in FATAL)]
    all_events = [_event(run, event) for event in events] + [_change(verdict) for verdict in run.verdicts]
    all_events.sort(key=lambda event: -event["t_ns"])
    since = min((death["t_ns"] for death in deaths), default=1 << 63)
    after = [event | {"group": FOLLOWED} for event in all_events if event["t_ns"] >= since]
    after += [_death(run, death) for death in deaths]
    after.sort(key=lambda event: (event["group"] != CAUSE, event["t_ns"]))
    return [*after, *all_events[len(after) - len(deaths) :]][: run.events.maxlen]


def _death(run: RunState, death: DeathInfo) -> dict[str, Any]:
    return {
        **_known(death, "t_ns", "rank", "step", "stage"),
        "kind": "death",
        "severity": "critical",
        "node": run.node_of(death["rank"]),
        "text": f"rank {death['rank']}: {death['how']}",
        "group": CAUSE if death["first"] else FOLLOWED,
    }


def _event(run: RunState, event: Mapping[str, Any]) -> dict[str, Any]:
    rank = event["rank"] if event["rank"] is not None else event["data"].get("rank")
    stage, node = event["stage"], event["node_id"]
    return {
        **_known(event, "t_ns", "kind", "step"),
        "severity": severity(event["kind"]),
        "rank": rank,
        "node": run.labels.get(node, node) if node else run.node_of(rank),
        "stage": None if stage is None else STAGES[stage],
        "text": event["message"].partition("\n")[0][:500],
    }


def _change(verdict: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_known(verdict, "t_ns", "rank", "node", "stage"),
        "kind": "verdict",
        "severity": severity(verdict["label"]),
        "step": verdict["from_step"] if verdict["from_step"] is not None else verdict["last_step"],
        "text": named(dict(verdict)) + (f": {verdict['why']}" if verdict["why"] else ""),
    }


def _known(event: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {"time": moment(event["t_ns"]), "group": "", **{name: event[name] for name in names}}
