"""The bundles of a session, as pages list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dash import html

from traceml_ray import text
from traceml_ray.results import BundleInfo
from traceml_ray.store import query

from .components import Columns, part, rank_link, step_link, table, when
from .route import Route
from .session_cache import SessionCache

PATH = "/bundles/"


def data(cache: SessionCache) -> Sequence[BundleInfo]:
    """Return the bundles, the newest first."""
    return (cache.ask(query.Bundles()) or [])[::-1]


def rows(bundles: Sequence[Mapping[str, Any]], route: Route) -> Any:
    """Return the bundles as a table."""
    session = f"?session={quote(name)}" if (name := route.get("session")) else ""
    columns: Columns = {
        "began": lambda one: when(one["time"]),
        "reason": lambda one: one["reason"],
        ">rank": lambda one: rank_link(one["rank"], route),
        ">step": lambda one: step_link(one["step"], route),
        "why": lambda one: one["why"],
        ">size": lambda one: text.size(one["bytes"]),
        "download": lambda one: html.A(one["name"], href=f"{PATH}{quote(one['name'])}.tar{session}"),
    }
    none = "None: no rank has died, hung or run out of memory."
    return part(html.Div(table(columns, bundles, empty=none, label="Bundles"), id="bundles"))
