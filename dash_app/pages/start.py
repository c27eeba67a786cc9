"""The page shown if there is no run: why, and how to start one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import dcc, html

from ..components import link, part
from ..route import Route

_OFFERED = 24
"""Largest number of other sessions or runs offered if one cannot be read."""
_WAYS = {
    "In place of torchrun": "python -m traceml_ray.launch --nproc-per-node 4 train.py",
    "On a Ray cluster, in the driver": "session = traceml_ray.start()\nTorchTrainer(…).fit()",
    "In any Ray actor or task": "traceml_ray.attach()",
    "Under any other launcher": "traceml-ray run -- accelerate launch train.py",
}


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
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
    newest = dcc.Link("the newest run of this dashboard's own session", href="/")
    links = [
        link(other, route.to("overview", **{"run": None, what: other}), "chip")
        for other in view["others"][:_OFFERED]
    ]
    every = dcc.Link("all sessions", href=route.to("sessions", session=None, run=None))
    others = html.Div(
        [html.P(["Others to look at: ", newest, ", ", every, "."]), html.Nav(links, className="chips")]
    )
    return html.Div(
        [html.H1(f"{what.capitalize()} {name} cannot be read"), part(html.Div(others, id="others"))]
    )
