"""
All events, newest first. Search, filters and page number are in the URL. Also the bundles of a session, as
pages list them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from dash import html

from traceml_ray import text
from traceml_ray.analysis.episodes import Brief
from traceml_ray.document.model import SIGNS, Table, picked
from traceml_ray.reports.headlines import brief
from traceml_ray.reports.manifest import BUNDLES
from traceml_ray.store import query
from traceml_ray.store.results import BundleInfo
from traceml_ray.views.events import events_of
from traceml_ray.views.run_state import RunState
from traceml_ray.views.tables import EVENTS, episode_columns

from .. import listing
from ..elements import aria, panel, part, rank_link, step_link, table
from ..route import Route
from ..session_cache import SessionCache

BUNDLES_PATH = "/bundles/"


def bundles_of(cache: SessionCache) -> Sequence[BundleInfo]:
    """Return the bundles of a session, newest first. Empty until the answer has arrived."""
    return (cache.ask(query.GetBundles()) or [])[::-1]


def bundle_table(bundles: Sequence[BundleInfo], route: Route, live: bool) -> Any:
    """Return bundles as a table with links that download them; if `live`, with a button that asks for one."""
    session = f"?session={quote(name)}" if (name := route.get("session")) else ""

    def download(one: BundleInfo) -> html.A:
        href = f"{BUNDLES_PATH}{quote(one.name)}.tar{session}"
        return html.A(one.name, href=href, download=f"{one.name}.tar")

    none = "None: no rank has died, hung or run out of memory."
    shown = [table(Table("Bundles", BUNDLES, bundles, empty=none), route, cells={"folder": download})]
    if live and not session:
        ask = html.Button("Keep the last minutes now", className="chip")
        shown.append(html.Form(ask, action=BUNDLES_PATH.rstrip("/"), method="post", **aria(label="Bundles")))
    return part(html.Div(shown, id="bundles"))


_SHOWN = 200
"""Largest number of episodes shown."""
_LAST_S = {"10 min": 600, "1 h": 3600, "24 h": 86400}


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """
    Return the newest events that the URL asks for (by kind, severity, time, rank, node), episodes,
    bundles.
    """
    events = events_of(cache, run)
    kinds, severities = (Counter(event[name] for event in events) for name in ("kind", "severity"))
    newest = max((event["t_ns"] for event in events), default=0)
    now = newest if cache.source.stored else cache.clock()
    tests: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
        "kind": lambda event, kind: event["kind"] == kind,
        "severity": lambda event, severity: event["severity"] == severity,
        "rank": lambda event, rank: str(event["rank"]) == rank,
        "node": lambda event, node: event["node"] in (node, run.labels.get(node)),
        "last": lambda event, last: now - event["t_ns"] <= _LAST_S.get(last, 1 << 40) * 1e9,
    }
    for name, asked in route.select(*tests).items():
        events = [event for event in events if tests[name](event, asked)]
    verdict = run.verdict
    return {
        "chosen": listing.choose(events, route, _words, {}),
        "kinds": dict(kinds),
        "severities": {name: severities[name] for name in SIGNS if severities[name]},
        "episodes": run.episodes,
        "brief": brief((verdict.brief if verdict else None) or Brief()),
        "share_of": "of the run" if verdict and verdict.about == "run" else "of its time",
        "bundles": bundles_of(cache),
    }


def _words(event: Mapping[str, Any]) -> str:
    rank = "" if event["rank"] is None else f"rank {event['rank']}"
    named = text.words(event["kind"]), event["severity"], rank, event["node"], event["stage"], event["text"]
    return " ".join(map(str, filter(None, named)))


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    chosen = view["chosen"]
    rows = [event_table(chosen.items, route), listing.pages(chosen, route, "event")]
    return html.Div(
        [
            html.H1("Events"),
            panel("Episodes, the costliest first", part(_episodes(view, route))),
            panel(
                "Bundles: the last minutes of every rank",
                bundle_table(view["bundles"], route, view["state"] == "live"),
            ),
            html.Div([html.H2("All events"), listing.field("events")], className="title-row"),
            part(html.Div(_filters(view, route), id="event-filter")),
            part(html.Div(rows, id="event-table", className="panel")),
        ]
    )


def _episodes(view: Mapping[str, Any], route: Route) -> html.Div:
    """Return a table of the causes that were named, and what each cost."""
    columns = episode_columns(view["share_of"], view["session"]["gpus"])
    block = Table("Episodes", columns, view["episodes"][:_SHOWN], view["brief"], "No cause was named.")
    return html.Div(table(block, route), id="episodes")


def _named(name: str, cell: Any) -> Any:
    """Return a cell with the name of its column, for a window too narrow for columns."""
    return cell and html.Span([html.Span(f"{name} ", className="narrow"), cell])


def _filters(view: Mapping[str, Any], route: Route) -> list[html.Nav]:
    """Return links for severity, time and kind, and one to remove each other filter that is set."""
    severities = {f"{SIGNS[name]} {name} {n:,}": name for name, n in view["severities"].items()}
    kinds = {f"{text.words(kind)} {n:,}": kind for kind, n in sorted(view["kinds"].items())}
    times = {f"last {name}": name for name in _LAST_S}
    filters = {name: route.get(name) for name in ("rank", "node") if route.get(name)}
    return [
        listing.chips(route, "severity", {"any severity": None, **severities}, "Severity"),
        listing.chips(route, "last", {"any time": None, **times}, "Time"),
        listing.chips(route, "kind", {"all kinds": None, **kinds}, "Kind"),
        *(listing.chips(route, name, {f"{name} {value} ✕": None}, name) for name, value in filters.items()),
    ]


def event_table(events: Sequence[Mapping[str, Any]], route: Route, *names: str) -> Any:
    """Return events as tables, one for each group; `names` selects columns, by default all."""
    columns = picked(EVENTS, *names) if names else EVENTS
    cells = {
        "rank": lambda event: _named("rank", rank_link(event["rank"], route)),
        "step": lambda event: _named("step", step_link(event["step"], route)),
    }
    body: list[Any] = []
    for group, rows in groupby(events, key=itemgetter("group")):
        body += [html.H3(group or "Before")] if body or group else []
        body.append(table(Table(group or "Events", columns, [*rows]), route, cells=cells))
    if not body:
        return table(Table("Events", columns, (), empty="No event of this kind yet."), route)
    return html.Div(body, className="events")
