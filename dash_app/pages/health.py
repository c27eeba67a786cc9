"""Health of the monitor itself: rows produced, stored and dropped, its cost, its errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dash import html

from traceml_ray.document.model import Table
from traceml_ray.reports.contents import sinks_table
from traceml_ray.store.results import WholeLedger
from traceml_ray.views import health
from traceml_ray.views.run_state import RunState
from traceml_ray.views.tables import ERRORS, RELAYS, ledger_columns, slowest_relays

from ..elements import facts, panel, part, table
from ..route import Route
from ..session_cache import SessionCache

_MOST = 200
_RELAYS = 24


def data(cache: SessionCache, run: RunState | None, _route: Route) -> dict[str, Any]:
    """Return the ledger, the cost and the errors of the monitor, and the state of its relays."""
    return health.health(cache, run, "dashboard")


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    errors = sorted(view["errors"].items(), key=lambda item: -item[1])[:_MOST]
    shown = table(Table("Errors", ERRORS, errors, empty="None."), route)
    panels = {
        "Ledger, in rows": _ledger(view["ledger"], view["state"] in ("stored", "finished"), route),
        "Relays, one on each node": _relays(view["relays"], route),
        "Errors of the monitor": html.Div(shown, id="health-errors"),
    }
    if view["sinks"]:
        sinks = table(sinks_table(view["sinks"]), route)
        panels["Sinks, where the session is reported"] = html.Div(sinks, id="health-sinks")
    return html.Div(
        [
            html.H1("Health of the monitor"),
            facts("health-facts", health.facts(view)),
            html.Div([panel(title, part(body)) for title, body in panels.items()], className="grid two"),
        ]
    )


def _relays(relays: Collection[Mapping[str, Any]], route: Route) -> html.Div:
    rest = len(relays) - _RELAYS
    more = f"{rest:,} more nodes; those that are lost or silent for longest are shown." if rest > 0 else ""
    block = Table("Relays", RELAYS, slowest_relays(relays)[:_RELAYS], more)
    return html.Div(table(block, route), id="health-relays")


def _ledger(ledger: WholeLedger | None, over: bool, route: Route) -> html.Div:
    """Return the ledger of rows: of all ranks together, then of each rank that lost rows or was cut short."""
    if ledger is None:
        missing = html.P("Not known while the aggregator does not answer.", className="empty")
        return html.Div(missing, id="health-ledger")
    rows = [("all", ledger), *health.losing(ledger, over)[:_MOST]]
    note = "produced = stored + in flight + dropped. Ranks without a loss are only in the sum."
    return html.Div(table(Table("Ledger", ledger_columns(over), rows, note), route), id="health-ledger")
