"""How the monitor itself is doing: what was produced, stored and dropped, what it costs, what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import html

from traceml_ray import text

from ..place import Place
from . import bits

_TITLES = {
    "ledger": "Ledger, in rows",
    "relays": "Relays, one on each node",
    "errors": "Errors, swallowed and counted",
}
_RANKS = 200
_RELAYS = 24


def layout(_: Mapping[str, Any]) -> Any:
    """Return the elements of the page."""
    panels = [bits.panel(title, html.Div(id=f"health-{name}")) for name, title in _TITLES.items()]
    facts = html.Div(id="health-facts")
    return html.Div([html.H1("Health of the monitor"), facts, html.Div(panels, className="grid two")])


def parts(view: Mapping[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return the content of the elements, by id."""
    known = sorted(view["relays"], key=lambda relay: (relay["alive"], -(relay["age_s"] or 0)))
    columns: bits.Columns = {
        "node": lambda relay: bits.node_link(relay["key"], relay["label"], place),
        "state": lambda relay: "alive" if relay["alive"] else "lost",
        ">last message": lambda relay: text.age(relay["age_s"]),
        ">ranks": lambda relay: text.plain(len(relay["ranks"])),
    }
    rest = max(len(known) - _RELAYS, 0)
    more = f"{rest:,} more nodes; those that are lost or silent for longest are shown." if rest else ""
    table = bits.table(columns, known[:_RELAYS])
    errors = sorted(view["errors"].items(), key=lambda each: -each[1])
    counts: bits.Columns = {"where": lambda error: error[0], ">times": lambda error: f"{error[1]:,}"}
    return {
        "health-facts": {"children": bits.facts(_facts(view))},
        "health-ledger": {"children": _ledger(view["ledger"], view["state"] in ("stored", "finished"))},
        "health-relays": {"children": [table, html.P(more, className="hint")]},
        "health-errors": {"children": bits.table(counts, errors[:_RANKS], empty="None.")},
    }


def _facts(view: Mapping[str, Any]) -> dict[str, str]:
    cost, polls = view["overhead"], view["poll_ms"]
    return {
        "on the training thread": text.unit(cost["training_thread_us_per_step"], "µs a step"),
        "agent": text.unit(cost["agent_cpu_pct"], "% of a core"),
        "sent by the ranks": text.size(view["bytes_per_s"], "/s"),
        "relays started anew": text.plain(view["restarts"]["relays"]),
        "one poll of this page's server": f"{text.ms(polls['p50'])}, p95 {text.ms(polls['p95'])}",
        "rows in its memory": text.size(view["memory_bytes"]),
    }


def _ledger(ledger: Mapping[str, Any] | None, over: bool) -> Any:
    """Return what became of the rows: of all ranks, then of each one that lost any or is cut short."""
    if ledger is None:
        return html.P("Not known while the aggregator does not answer.", className="empty")
    losing = {
        rank: of
        for rank, of in ledger["per_rank"].items()
        if sum(of["dropped"].values()) or (over and of["unreported"] is None)
    }
    columns: bits.Columns = {
        ">rank": lambda row: row[0],
        ">produced": lambda row: f"{row[1]['produced']:,}",
        ">stored": lambda row: f"{row[1]['stored']:,}",
        ">in flight": lambda row: f"{row[1]['in_flight']:,}",
        ">dropped": lambda row: f"{sum(row[1]['dropped'].values()):,}",
        "dropped where": lambda row: _places(row[1]["dropped"]),
        "after the last report": lambda row: "unknown" * (over and row[1].get("unreported", 0) is None),
    }
    rows = [("all", {**ledger, "unreported": 0}), *list(losing.items())[:_RANKS]]
    note = "produced = stored + in flight + dropped. Ranks without a loss are in the sum alone."
    return [bits.table(columns, rows, label="Ledger"), html.P(note, className="hint")]


def _places(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{text.words(place)} {rows:,}" for place, rows in dropped.items() if rows)
