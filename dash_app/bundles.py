"""The bundles of a session, as pages list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from dash import html

from traceml_ray import text
from traceml_ray.store import query
from traceml_ray.store.results import BundleInfo

from .components import Columns, aria, marked, part, rank_link, step_link, table, when
from .route import Route
from .session_cache import SessionCache

PATH = "/bundles/"


def data(cache: SessionCache) -> Sequence[BundleInfo]:
    """Return the bundles, the newest first."""
    return (cache.ask(query.GetBundles()) or [])[::-1]


def rows(bundles: Sequence[BundleInfo], route: Route, live: bool) -> Any:
    """Return the bundles as a table; of a session that is `live`, with a button that asks for one."""
    session = f"?session={quote(name)}" if (name := route.get("session")) else ""
    columns: Columns = {
        "began": lambda one: when(one.time),
        "reason": lambda one: one.reason,
        ">rank": lambda one: rank_link(one.rank, route),
        ">step": lambda one: step_link(one.step, route),
        "why": lambda one: marked(one.why),
        ">size": lambda one: text.size(one.bytes),
        "download": lambda one: html.A(
            one.name, href=f"{PATH}{quote(one.name)}.tar{session}", download=f"{one.name}.tar"
        ),
    }
    none = "None: no rank has died, hung or run out of memory."
    shown = [table(columns, bundles, empty=none, label="Bundles")]
    if live and not session:
        ask = html.Button("Keep the last minutes now", className="chip")
        shown.append(html.Form(ask, action=PATH.rstrip("/"), method="post", **aria(label="Bundles")))
    return part(html.Div(shown, id="bundles"))
