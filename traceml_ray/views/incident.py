"""The episode that the present verdict is about, and what else happened when it began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from traceml_ray import text
from traceml_ray.reports.present import present
from traceml_ray.store import query

from .run_state import RunState
from .session_poll import SessionPoll
from .state import RUN_OVER, state_of

_AT_ONCE_S = 10.0
"""So close to the beginning of an episode an event may have to do with it,"""
_NO_CHANGES = {"exit", "process_ended", "attach", "stacks", "flight_recorder", "standing", "swallowed"}
"""but for these kinds."""
_AROUND_STEPS = 2
"""A checkpoint so near to an onset is said beside it."""
_SETTLED_STEPS = 1000
"""So much later, no more is reported about a step."""
_CHANGES = 3
_MESSAGE = 100
"""Characters of what is said of each."""


def incident(cache: SessionPoll, run: RunState, verdict: Mapping[str, Any]) -> dict[str, Any] | None:
    """
    Return the episode that the verdict is about, and what else happened when it began; of a run that is over
    none goes on.
    """
    episode = present(verdict)
    if episode is None:
        return None
    began = episode.get("started_at") and datetime.fromisoformat(episode["started_at"]).timestamp()
    at_once = [event for event in run.events if began and abs(event["t_ns"] / 1e9 - began) <= _AT_ONCE_S]
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in at_once:
        if event["kind"] not in _NO_CHANGES:
            alike.setdefault((event["kind"], _short(event["message"])), []).append(event)
    changes = _checkpoint(cache, run, episode["from_step"])
    changes += [_change(run, *what, events) for what, events in alike.items()]
    alone = len(verdict["episodes"]) == 1
    goes_on = episode["goes_on"] and state_of(cache, run) not in RUN_OVER
    return {**episode, "goes_on": goes_on, "changes": changes[:_CHANGES], "alone": alone}


def _short(message: str) -> str:
    """Return the first words of a message."""
    line = message.partition("\n")[0]
    return line if len(line) <= _MESSAGE else f"{line[:_MESSAGE].rsplit(' ', 1)[0].rstrip(' ;,.')} …"


def _checkpoint(cache: SessionPoll, run: RunState, step: int) -> list[str]:
    """Return that a checkpoint was written about then; nothing where each step writes one."""
    first = max(0, step - _AROUND_STEPS)
    over = (run.last_step or 0) > step + _SETTLED_STEPS
    asked = query.Spans(run.id, min(run.ranks, default=0), first, step + _AROUND_STEPS)
    spans = cache.ask(asked, lambda _: over) or ()
    written = any(span["name"] == "checkpoint" and span["times_per_step"] < 0.5 for span in spans)
    return ["a checkpoint was written"] * written


def _change(run: RunState, kind: str, message: str, events: Sequence[Mapping[str, Any]]) -> str:
    ranks = {event["rank"] for event in events if event["rank"] is not None}
    nodes = {run.labels.get(event["node_id"] or "", "") for event in events}
    who = text.ranks(ranks) if ranks else text.listed(sorted(filter(None, nodes)))
    return ": ".join(filter(None, (" of ".join(filter(None, (text.words(kind), who))), message)))
