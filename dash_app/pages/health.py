"""Health of the monitor itself: rows produced, stored and dropped, its cost, its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.views import health
from traceml_ray.views.run_state import RunState

from ..components import Columns, facts, node_link, panel, part, table
from ..route import Route
from ..session_cache import SessionCache

_MOST = 200
_RELAYS = 24


def data(cache: SessionCache, run: RunState | None, _route: Route) -> dict[str, Any]:
    """Return the ledger, the cost and the errors of the monitor, and the state of its relays."""
    return health.health(cache, run, "dashboard")


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    errors = sorted(view["errors"].items(), key=lambda item: -item[1])
    counts: Columns = {"where": lambda error: error[0], ">times": lambda error: f"{error[1]:,}"}
    panels = {
        "Ledger, in rows": _ledger(view["ledger"], view["state"] in ("stored", "finished")),
        "Relays, one on each node": _relays(view["relays"], route),
        "Errors, swallowed and counted": html.Div(
            table(counts, errors[:_MOST], empty="None.", label="Errors"), id="health-errors"
        ),
    }
    return html.Div(
        [
            html.H1("Health of the monitor"),
            facts("health-facts", health.facts(view)),
            html.Div([panel(title, part(body)) for title, body in panels.items()], className="grid two"),
        ]
    )


def _relays(relays: Iterable[Mapping[str, Any]], route: Route) -> html.Div:
    ordered = sorted(relays, key=lambda relay: (relay["alive"], -(relay["age_s"] or 0)))
    columns: Columns = {
        "node": lambda relay: node_link(relay["node_id"], relay["label"], route),
        "state": lambda relay: "alive" if relay["alive"] else "lost",
        ">last message": lambda relay: text.age(relay["age_s"]),
        ">ranks": lambda relay: text.plain(len(relay["ranks"])),
        ">clock": _clock,
    }
    rest = len(ordered) - _RELAYS
    more = f"{rest:,} more nodes; those that are lost or silent for longest are shown." if rest > 0 else ""
    rows = table(columns, ordered[:_RELAYS], label="Relays")
    return html.Div([rows, html.P(more, className="hint")], id="health-relays")


def _clock(relay: Mapping[str, Any]) -> str:
    """Return by how much a node's clock is ahead of the aggregator's: "+5 ± 0.3 ms"."""
    offset, bound = relay["clock_offset_ns"], relay["clock_bound_ns"]
    if offset is None or bound is None:
        return text.NA
    return f"{text.number(-offset / 1e6, sign=True)} ± {text.ms(bound / 1e6)}"


def _ledger(ledger: Mapping[str, Any] | None, over: bool) -> html.Div:
    """Return the ledger of rows: of all ranks together, then of each rank that lost rows or was cut short."""
    if ledger is None:
        missing = html.P("Not known while the aggregator does not answer.", className="empty")
        return html.Div(missing, id="health-ledger")
    columns: Columns = {
        ">rank": lambda row: row[0],
        ">produced": lambda row: f"{row[1]['produced']:,}",
        ">stored": lambda row: f"{row[1]['stored']:,}",
        ">in flight": lambda row: f"{row[1]['in_flight']:,}",
        ">dropped": lambda row: f"{sum(row[1]['dropped'].values()):,}",
        "dropped where": lambda row: health.dropped_text(row[1]["dropped"]),
        "after the last report": lambda row: "unknown" * (over and row[1].get("unreported", 0) is None),
    }
    rows = table(
        columns, [("all", {**ledger, "unreported": 0}), *health.losing(ledger, over)[:_MOST]], label="Ledger"
    )
    note = "produced = stored + in flight + dropped. Ranks without a loss are in the sum alone."
    return html.Div([rows, html.P(note, className="hint")], id="health-ledger")
