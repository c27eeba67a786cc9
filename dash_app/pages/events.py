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
    """Return what stands in them."""
    events = view["events"]
    rows = [
        (
            html.Time((event["time"] or text.NA).replace("T", " ")[:19], dateTime=event["time"] or ""),
            html.Span(
                [bits.SEVERITY.get(event["severity"], "●"), " ", event["severity"]],
                className=f"sev {event['severity']}",
            ),
            text.words(event["kind"]),
            "" if event["rank"] is None else bits.rank_link(event["rank"], place, ""),
            event["node"] or "",
            "" if event["step"] is None else f"{event['step']:,}",
            text.words(event["stage"] or ""),
            html.Span(bits.marked(event["text"])),
        )
        for event in events[:_SHOWN]
    ]
    headers = ("time, UTC", "severity", "kind", ">rank", "node", ">step", "stage", "what")
    more = f"{_SHOWN} of {len(events):,} events; choose a kind to see others." if len(events) > _SHOWN else ""
    table = bits.table(headers, rows, empty="No event of this kind yet.", label="Events")
    return {
        "episodes": {
            "children": [_episodes(view["episodes"], place), html.P(view["brief"], className="hint")]
        },
        "event-filter": {"children": _filter(view, place)},
        "event-table": {"children": [table, html.P(more, className="hint")]},
    }


def _episodes(episodes: Sequence[Mapping[str, Any]], place: Place) -> Any:
    """Return a table of what was named, and what it cost."""
    rows = [
        (
            one["headline"],
            "" if one["rank"] is None else bits.rank_link(one["rank"], place, ""),
            f"{one['from_step']:,}–{one['to_step']:,}" + " …" * one["goes_on"],
            text.duration(one["seconds"]),
            text.duration(one["cost_s"]),
            text.percent(one["cost_pct"]),
            text.number(one["gpu_hours"]),
        )
        for one in episodes[:_SHOWN]
    ]
    headers = ("what", ">rank", ">steps", ">lasted", ">cost", ">of it", ">GPU-hours")
    return bits.table(headers, rows, empty="Nobody was named.", label="Episodes")


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
