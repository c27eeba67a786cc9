"""
The pages by name. For each page, `data(cache, run, route)` returns the data, and `layout(view, route)` draws
it. `view` has the data and the header of all pages (`shell.data`). If there is no run to show, `start_layout`
replaces most pages.

Parts (`elements.part`) and graphs have an id. While a browser stays on a page, only parts that changed are
sent. The elements around them depend only on the node or rank and on which parts exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dash import dcc, html

from ..elements import link, part
from ..route import Route
from . import (
    events,
    health,
    layers,
    memory,
    node,
    overview,
    profiles,
    rank,
    ranks,
    sessions,
    signals,
    step,
)


class PageFunctions(NamedTuple):
    """The two functions that make a page."""

    data: Callable[..., dict[str, Any]]
    """Returns the data of the page, from the session's cache, the run and the route."""
    layout: Callable[[Mapping[str, Any], Route], Any]
    """Returns the elements of the page, from the data with the header and the route."""


PAGES = {
    "overview": PageFunctions(overview.data, overview.layout),
    "node": PageFunctions(node.data, node.layout),
    "rank": PageFunctions(rank.data, rank.layout),
    "ranks": PageFunctions(ranks.data, ranks.layout),
    "step": PageFunctions(step.data, step.layout),
    "layers": PageFunctions(layers.data, layers.layout),
    "memory": PageFunctions(memory.data, memory.layout),
    "signals": PageFunctions(signals.data, signals.layout),
    "profiles": PageFunctions(profiles.data, profiles.layout),
    "profile": PageFunctions(profiles.one_data, profiles.one_layout),
    "events": PageFunctions(events.data, events.layout),
    "sessions": PageFunctions(sessions.data, sessions.layout),
    "health": PageFunctions(health.data, health.layout),
}
DATA: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: page.data for name, page in PAGES.items()},
    "cell": overview.cell,
    "side": sessions.side,
}
"""Functions that make a view, by its name: a page, or something that a page requests in addition."""


def has_nothing(page: str, header: Mapping[str, Any]) -> bool:
    """Return whether `start_layout` replaces a page because there is no run to show."""
    without_run = ("sessions",) if header["state"] == "missing" else ("sessions", "health")
    return header["session"]["run"] is None and page not in without_run


_OFFERED = 24
"""Largest number of other sessions or runs offered if one cannot be read."""
_WAYS = {
    "In place of torchrun": "python -m traceml_ray.launch --nproc-per-node 4 train.py",
    "On a Ray cluster, in the driver": "session = traceml_ray.start()\nTorchTrainer(…).fit()",
    "In any Ray actor or task": "traceml_ray.attach()",
    "Under any other launcher": "traceml-ray run -- accelerate launch train.py",
}


def start_layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements that replace a page while there is no run to show."""
    if view["state"] == "missing":
        return _others(view, route)
    if view["state"] in ("finished", "stored"):
        return html.Div(html.H1("No rank has reported in this session"))
    if view["state"] == "unwatched":
        return html.Div(html.H1("No live monitor"))
    if view["state"] == "starting":
        hint = html.P("This page updates when the monitor is running.", className="hint")
        return html.Div([html.H1("The monitor is starting"), hint])
    if view["state"] != "empty":
        hint = html.P("This page updates after the first step.", className="hint")
        return html.Div([html.H1("The run is starting"), hint])
    ways = [html.Div([html.H2(way), html.Pre(code)], className="panel") for way, code in _WAYS.items()]
    hint = html.P("This page updates when a session runs.", className="hint")
    return html.Div([html.H1("Start a session"), hint, html.Div(ways, className="grid two")])


def _others(view: Mapping[str, Any], route: Route) -> html.Div:
    """Return links to other sessions or runs if the requested one cannot be read."""
    what, name = view["missing"], view["session"]["id"]
    newest = dcc.Link("the newest run of the dashboard's session", href="/")
    links = [
        link(other, route.to("overview", **{"run": None, what: other}), "chip")
        for other in view["others"][:_OFFERED]
    ]
    every = dcc.Link("all sessions", href=route.to("sessions", session=None, run=None))
    others = html.Div(
        [html.P(["Open instead: ", newest, ", ", every, "."]), html.Nav(links, className="chips")]
    )
    return html.Div(
        [html.H1(f"{what.capitalize()} {name} cannot be read"), part(html.Div(others, id="others"))]
    )
