"""
Events of a run, newest first: changes of the verdict, deaths and others. Also the current episode, with what
else happened when it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.reports.deaths import FATAL
from traceml_ray.reports.headlines import current_episode, named, severity
from traceml_ray.reports.run_facts import moment
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.store.results import EventRow
from traceml_ray.store.step_shapes import DeathInfo, VerdictChange
from traceml_ray.views.state import RUN_OVER, CurrentEpisode, state_of

from .run_state import RunState
from .session_poll import SessionPoll

_QUIET = {"exit", "relay_start", "process_ended", "attach", "bundle_request"}
"""Kinds of events that are shown only if they have a message."""
CAUSE, FOLLOWED = "First cause", "What followed"


def events_of(cache: SessionPoll, run: RunState) -> list[dict[str, Any]]:
    """
    Return the events and the changes of verdict, newest first. If ranks died, the first cause comes before
    them, followed by its consequences in order of time.
    """
    deaths = cache.deaths(run)
    events = [event for event in run.events if event.message or event.kind not in _QUIET]
    events = [event for event in events if not (deaths and event.kind in FATAL)]
    all_events = [_event(run, event) for event in events] + [_change(verdict) for verdict in run.verdicts]
    all_events.sort(key=lambda event: -event["t_ns"])
    since = min((death.t_ns for death in deaths), default=1 << 63)
    after = [event | {"group": FOLLOWED} for event in all_events if event["t_ns"] >= since]
    after += [_death(run, death) for death in deaths]
    after.sort(key=lambda event: (event["group"] != CAUSE, event["t_ns"]))
    return [*after, *all_events[len(after) - len(deaths) :]][: run.events.maxlen]


def _death(run: RunState, death: DeathInfo) -> dict[str, Any]:
    return {
        **_known(death, "t_ns", "rank", "step", "stage"),
        "kind": "death",
        "severity": "critical",
        "node": run.node_of(death.rank),
        "text": f"rank {death.rank}: {death.how}",
        "group": CAUSE if death.first else FOLLOWED,
    }


def _event(run: RunState, event: EventRow) -> dict[str, Any]:
    rank = event.rank if event.rank is not None else event.data.get("rank")
    stage, node = event.stage, event.node_id
    return {
        **_known(event, "t_ns", "kind", "step"),
        "severity": severity(event.kind),
        "rank": rank,
        "node": run.labels.get(node, node) if node else run.node_of(rank),
        "stage": None if stage is None else STAGES[stage],
        "text": event.message.partition("\n")[0][:500],
    }


def _change(verdict: VerdictChange) -> dict[str, Any]:
    return {
        **_known(verdict, "t_ns", "rank", "node", "stage"),
        "kind": "verdict",
        "severity": severity(verdict.label),
        "step": verdict.from_step if verdict.from_step is not None else verdict.last_step,
        "text": named(verdict) + (f": {verdict.why}" if verdict.why else ""),
    }


def _known(event: VerdictChange | DeathInfo | EventRow, *names: str) -> dict[str, Any]:
    return {"time": moment(event.t_ns), "group": "", **{name: getattr(event, name) for name in names}}


_AT_ONCE_S = 10.0
"""Events this close (s) to the beginning of an episode may be related to it."""
_NO_CHANGES = {"exit", "process_ended", "attach", "stacks", "standing", "swallowed"}
"""Kinds of events that are never considered related to an episode."""
_AROUND_STEPS = 2
"""A checkpoint at most this many steps from the beginning of an episode is mentioned with it."""
_SETTLED_STEPS = 1000
"""Number of later steps after which nothing more is reported about a step."""
_CHANGES = 3
_MESSAGE = 100
"""Longest message of a related event, in characters."""


def incident(cache: SessionPoll, run: RunState) -> CurrentEpisode | None:
    """
    Return the episode that the verdict is about, with what else happened when it began. In a run that has
    ended, no episode is still open.
    """
    episode = current_episode(run.verdict, run.episodes)
    if episode is None:
        return None
    began = datetime.fromisoformat(episode.started_at).timestamp() if episode.started_at else None
    at_once = [event for event in run.events if began and abs(event.t_ns / 1e9 - began) <= _AT_ONCE_S]
    alike: dict[tuple[str, str], list[EventRow]] = {}
    for event in at_once:
        if event.kind not in _NO_CHANGES:
            alike.setdefault((event.kind, _short(event.message)), []).append(event)
    changes = _checkpoint(cache, run, episode.from_step)
    changes += [_change_text(run, *what, events) for what, events in alike.items()]
    goes_on = episode.goes_on and state_of(cache, run) not in RUN_OVER
    shown = msgspec.structs.replace(episode, goes_on=goes_on)
    return CurrentEpisode(shown, changes[:_CHANGES], len(run.episodes) == 1)


def _short(message: str) -> str:
    """Return the first words of a message."""
    line = message.partition("\n")[0]
    return line if len(line) <= _MESSAGE else f"{line[:_MESSAGE].rsplit(' ', 1)[0].rstrip(' ;,.')} …"


def _checkpoint(cache: SessionPoll, run: RunState, step: int) -> list[str]:
    """Return a text if a checkpoint was written near `step`; nothing if every step writes one."""
    first = max(0, step - _AROUND_STEPS)
    over = (run.last_step or 0) > step + _SETTLED_STEPS
    asked = query.GetSpans(run.id, min(run.ranks, default=0), first, step + _AROUND_STEPS)
    spans = cache.ask(asked, lambda _: over) or ()
    written = any(span.name == "checkpoint" and span.times_per_step < 0.5 for span in spans)
    return ["a checkpoint was written"] * written


def _change_text(run: RunState, kind: str, message: str, events: Sequence[EventRow]) -> str:
    ranks = {event.rank for event in events if event.rank is not None}
    nodes = {run.labels.get(event.node_id or "", "") for event in events}
    who = text.ranks(ranks) if ranks else text.listed(sorted(filter(None, nodes)))
    return ": ".join(filter(None, (" of ".join(filter(None, (text.words(kind), who))), message)))
