"""The page before any session: how to start one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import html

from ..route import Route

_WAYS = {
    "In place of torchrun": "python -m traceml_ray.launch --nproc-per-node 4 train.py",
    "On a Ray cluster, in the driver": "session = traceml_ray.start()\nTorchTrainer(…).fit()",
    "In any Ray actor or task": "traceml_ray.attach()",
    "Under any other launcher": "traceml-ray run -- accelerate launch train.py",
}


def layout(_view: Mapping[str, Any], _route: Route) -> Any:
    """Return the elements of the page."""
    ways = [html.Div([html.H2(way), html.Pre(code)], className="panel") for way, code in _WAYS.items()]
    hint = html.P("This page fills by itself once one runs.", className="hint")
    return html.Div([html.H1("Start a session"), hint, html.Div(ways, className="grid two")])
