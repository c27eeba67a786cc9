"""Everything that happened, newest first; the filter is in the URL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from dash import dcc, html

from traceml_ray import text
from traceml_ray.reports.deaths import FATAL
from traceml_ray.reports.headlines import brief, named
from traceml_ray.reports.summary import moment
from traceml_ray.stages import STAGES
from traceml_ray.step_shapes import DeathInfo

from ..components import SIGNS, Columns, aria, link, marked, panel, part, rank_link, severity, table
from ..route import Route
from ..run_state import RunState
from ..session_cache import SessionCache

NO_BRIEF = {"count": 0, "cost_s": 0.0}
_QUIET = {"exit", "relay_start", "process_ended", "attach"}
"""Kinds that are shown only with a message."""
_SHOWN = 200
CAUSE, FOLLOWED = "First cause", "What followed"


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return what happened, newest first, of the kind, rank or node in the URL."""
    kind, rank, node = (route.get(name) for name in ("kind", "rank", "node"))
    found = events_of(cache, run)
    kinds = Counter(event["kind"] for event in found)
    if rank:
        found = [event for event in found if str(event["rank"]) == rank]
    if node:
        found = [event for event in found if event["node"] in (node, run.labels.get(node))]
    if kind:
        found = [event for event in found if event["kind"] == kind]
    verdict = run.verdict or {}
    return {
        "events": found,
        "kinds": dict(kinds),
        "episodes": [{**one, "headline": named(one)} for one in verdict.get("episodes") or ()],
        "brief": brief(verdict.get("brief") or NO_BRIEF),
    }


def events_of(cache: SessionCache, run: RunState) -> list[dict[str, Any]]:
    """
    Return the events and the changes of verdict, newest first; where ranks died, before them the first cause,
    and in order of time what followed.
    """
    deaths = cache.deaths(run)
    events = [event for event in run.events if event["message"] or event["kind"] not in _QUIET]
    events = [event for event in events if not (deaths and event["kind"] in FATAL)]
    found = [_event(run, event) for event in events] + [_change(verdict) for verdict in run.verdicts]
    found.sort(key=lambda event: -event["t_ns"])
    since = min((death["t_ns"] for death in deaths), default=1 << 63)
    after = [event | {"group": FOLLOWED} for event in found if event["t_ns"] >= since]
    after += [_death(run, death) for death in deaths]
    after.sort(key=lambda event: (event["group"] != CAUSE, event["t_ns"]))
    return [*after, *found[len(after) - len(deaths) :]][: run.events.maxlen]


def _death(run: RunState, death: DeathInfo) -> dict[str, Any]:
    return {
        "t_ns": death["t_ns"],
        "time": moment(death["t_ns"]),
        "kind": "death",
        "severity": "critical",
        "rank": death["rank"],
        "node": run.node_of(death["rank"]),
        "step": death["step"],
        "stage": death["stage"],
        "text": f"rank {death['rank']}: {death['how']}",
        "group": CAUSE if death["first"] else FOLLOWED,
    }


def _event(run: RunState, event: Mapping[str, Any]) -> dict[str, Any]:
    rank = event["rank"] if event["rank"] is not None else event["data"].get("rank")
    kind, stage, node = event["kind"], event["stage"], event["node_id"]
    return {
        "t_ns": event["t_ns"],
        "time": moment(event["t_ns"]),
        "kind": kind,
        "severity": severity(kind),
        "rank": rank,
        "node": run.labels.get(node, node) if node else run.node_of(rank),
        "step": event["step"],
        "stage": None if stage is None else STAGES[stage],
        "text": event["message"].partition("\n")[0][:500],
        "group": "",
    }


def _change(verdict: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "t_ns": verdict["t_ns"],
        "time": moment(verdict["t_ns"]),
        "kind": "verdict",
        "severity": severity(verdict["label"]),
        "rank": verdict["rank"],
        "node": verdict["node"],
        "step": verdict["from_step"] if verdict["from_step"] is not None else verdict["last_step"],
        "stage": verdict["stage"],
        "text": named(dict(verdict)) + (f": {verdict['why']}" if verdict["why"] else ""),
        "group": "",
    }


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    events = view["events"]
    more = f"{_SHOWN} of {len(events):,} events; choose a kind to see others." if len(events) > _SHOWN else ""
    rows = event_table(events[:_SHOWN], route)
    return html.Div(
        [
            html.H1("Events"),
            panel("Episodes, the costliest first", part(_episodes(view, route))),
            part(
                html.Nav(_filter(view, route), id="event-filter", className="chips", **aria(label="Filter"))
            ),
            part(html.Div([rows, html.P(more, className="hint")], id="event-table", className="panel")),
        ]
    )


def _episodes(view: Mapping[str, Any], route: Route) -> html.Div:
    """Return a table of the causes that were named, and what each cost."""
    columns: Columns = {
        "what": lambda one: one["headline"],
        ">rank": lambda one: rank_link(one["rank"], route),
        ">steps": lambda one: f"{one['from_step']:,}–{one['to_step']:,}" + " …" * one["goes_on"],
        ">lasted": lambda one: text.duration(one["seconds"]),
        ">cost": lambda one: text.duration(one["cost_s"]),
        ">of it": lambda one: text.percent(one["cost_pct"]),
        ">GPU-hours": lambda one: text.number(one["gpu_hours"]),
    }
    rows = table(columns, view["episodes"][:_SHOWN], empty="No cause was named.", label="Episodes")
    return html.Div([rows, html.P(view["brief"], className="hint")], id="episodes")


def _severity(severity: str) -> html.Span:
    return html.Span([SIGNS[severity], " ", severity], className=f"sev {severity}")


def _filter(view: Mapping[str, Any], route: Route) -> list[dcc.Link]:
    """Return one link for each kind there is, and one to remove each filter that is set."""
    chosen = route.get("kind")
    kinds = {"all kinds": None} | {
        f"{text.words(kind)} {n:,}": kind for kind, n in sorted(view["kinds"].items())
    }
    links = [link(label, route.here(kind=kind), "chip", on=kind == chosen) for label, kind in kinds.items()]
    return links + [
        link(f"{name} {route.get(name)} ✕", route.here(**{name: None}), "chip", on=True)
        for name in ("rank", "node")
        if route.get(name)
    ]


def event_table(events: Sequence[Mapping[str, Any]], route: Route, *names: str) -> Any:
    """Return events as tables, one for each group; `names` are the columns, by default all."""
    columns: Columns = {
        "time, UTC": lambda event: html.Time(text.date(event["time"]), dateTime=event["time"] or ""),
        "severity": lambda event: _severity(event["severity"]),
        "kind": lambda event: text.words(event["kind"]),
        ">rank": lambda event: rank_link(event["rank"], route),
        "node": lambda event: event["node"],
        ">step": lambda event: "" if event["step"] is None else f"{event['step']:,}",
        "stage": lambda event: text.words(event["stage"] or ""),
        "what": lambda event: html.Span(marked(event["text"])),
    }
    shown = {name: columns[name] for name in names or columns}
    found: list[Any] = []
    for group, of in groupby(events, key=itemgetter("group")):
        found += [html.H3(group or "Before")] if found or group else []
        found.append(table(shown, of, label=group or "Events"))
    return html.Div(found) if found else table(shown, (), empty="No event of this kind yet.")
