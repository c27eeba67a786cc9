"""Everything that happened, newest first; the filter is in the URL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html

from traceml_ray import text

from ..place import Place
from . import bits

_SHOWN = 200


def layout(_: Mapping[str, Any]) -> Any:
    """Return the elements of the page."""
    return html.Div(
        [
            html.H1("Events"),
            bits.panel("Episodes, the costliest first", html.Div(id="episodes")),
            html.Nav(id="event-filter", className="chips", **bits.aria(label="Filter")),
            html.Div(id="event-table", className="panel"),
        ]
    )


def parts(view: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the elements, by id."""
    events = view["events"]
    columns: bits.Columns = {
        "time, UTC": lambda event: _time(event["time"]),
        "severity": lambda event: _severity(event["severity"]),
        "kind": lambda event: text.words(event["kind"]),
        ">rank": lambda event: "" if event["rank"] is None else bits.rank_link(event["rank"], place, ""),
        "node": lambda event: event["node"] or "",
        ">step": lambda event: "" if event["step"] is None else f"{event['step']:,}",
        "stage": lambda event: text.words(event["stage"] or ""),
        "what": lambda event: html.Span(bits.marked(event["text"])),
    }
    more = f"{_SHOWN} of {len(events):,} events; choose a kind to see others." if len(events) > _SHOWN else ""
    table = bits.table(columns, events[:_SHOWN], empty="No event of this kind yet.", label="Events")
    return {
        "episodes": {
            "children": [_episodes(view["episodes"], place), html.P(view["brief"], className="hint")]
        },
        "event-filter": {"children": _filter(view, place)},
        "event-table": {"children": [table, html.P(more, className="hint")]},
    }


def _episodes(episodes: Sequence[Mapping[str, Any]], place: Place) -> Any:
    """Return a table of what was named, and what it cost."""
    columns: bits.Columns = {
        "what": lambda one: one["headline"],
        ">rank": lambda one: "" if one["rank"] is None else bits.rank_link(one["rank"], place, ""),
        ">steps": lambda one: f"{one['from_step']:,}–{one['to_step']:,}" + " …" * one["goes_on"],
        ">lasted": lambda one: text.duration(one["seconds"]),
        ">cost": lambda one: text.duration(one["cost_s"]),
        ">of it": lambda one: text.percent(one["cost_pct"]),
        ">GPU-hours": lambda one: text.number(one["gpu_hours"]),
    }
    return bits.table(columns, episodes[:_SHOWN], empty="No cause was named.", label="Episodes")


def _time(time: str | None) -> html.Time:
    return html.Time(text.date(time), dateTime=time or "")


def _severity(severity: str) -> html.Span:
    return html.Span([bits.SEVERITY.get(severity, "●"), " ", severity], className=f"sev {severity}")


def _filter(view: Mapping[str, Any], place: Place) -> list[Any]:
    """Return one link for each kind there is, and one to take out each filter that is set."""
    kinds = view.get("kinds") or Counter(event["kind"] for event in view["events"])
    chosen = place.get("kind")
    links = [_chip("all kinds", place.here(kind=None), chosen is None)]
    links += [
        _chip(f"{text.words(kind)} {count:,}", place.here(kind=kind), kind == chosen)
        for kind, count in sorted(kinds.items())
    ]
    return links + [
        _chip(f"{name} {place.get(name)} ✕", place.here(**{name: None}), True)
        for name in ("rank", "node")
        if place.get(name)
    ]


def _chip(text: str, href: str, on: bool) -> dcc.Link:
    return dcc.Link(text, href=href, className="chip on" if on else "chip")
