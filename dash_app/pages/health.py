"""How the monitor itself is doing: what was produced, stored and dropped, what it costs, what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from dash import html

from traceml_ray import text
from traceml_ray.reports.summary import overhead_of
from traceml_ray.store import query
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import age_s, number

from ..components import Columns, facts, node_link, panel, part, table
from ..route import Route
from ..session_cache import SessionCache

_MOST = 200
_RELAYS = 24


def data(cache: SessionCache, run: RunState | None, _route: Route) -> dict[str, Any]:
    """Return the ledger, the cost and the errors of the monitor, and the state of its relays."""
    processes = list(run.ranks.values()) if run else []
    nodes = run.nodes if run else []
    errors = {f"aggregator, {place}": n for place, n in (cache.status.get("errors") or {}).items()}
    errors |= {f"dashboard, {place}": n for place, n in cache.errors.items()}
    errors |= {
        f"relay of {node['label']}, {place}": n for node in nodes for place, n in node["errors"].items()
    }
    errors |= {
        f"rank {process.rank}, {place}": n for process in processes for place, n in process.errors.items()
    }
    poll = np.array(cache.poll_ms or [np.nan])
    sent, seconds = _sent(processes)
    starts = Counter(
        event["node_id"] for event in (run.events if run else ()) if event["kind"] == "relay_start"
    )
    return {
        "ledger": cache.ask(query.Ledger(run.id if run else None)),
        "bytes_per_s": sent / seconds if seconds else None,
        "overhead": overhead_of(processes),
        "errors": errors,
        "restarts": sum(max(0, n - 1) for n in starts.values()),
        "relays": [{**node, "age_s": age_s(cache.clock(), node["last_seen_ns"])} for node in nodes],
        "poll_ms": {"p50": number(np.median(poll)), "p95": number(np.percentile(poll, 95))},
    }


def _sent(processes: Iterable[RankProcess]) -> tuple[int, float]:
    """Return how many bytes the agents have sent, and over how many seconds."""
    known = [process for process in processes if process.sent_bytes is not None]
    seconds = max(((process.last_seen_ns - process.first_seen_ns) / 1e9 for process in known), default=0.0)
    return sum(process.sent_bytes or 0 for process in known), seconds


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    errors = sorted(view["errors"].items(), key=lambda each: -each[1])
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
            facts("health-facts", _facts(view)),
            html.Div([panel(title, part(body)) for title, body in panels.items()], className="grid two"),
        ]
    )


def _facts(view: Mapping[str, Any]) -> dict[str, Any]:
    cost, polls = view["overhead"], view["poll_ms"]
    return {
        "on the training thread": text.unit(cost["training_thread_us_per_step"], "µs a step"),
        "agent": text.unit(cost["agent_cpu_pct"], "% of a core"),
        "sent by the ranks": text.size(view["bytes_per_s"], "/s"),
        "relays started anew": view["restarts"],
        "one poll of this page's server": f"{text.ms(polls['p50'])}, p95 {text.ms(polls['p95'])}",
    }


def _relays(relays: Iterable[Mapping[str, Any]], route: Route) -> html.Div:
    known = sorted(relays, key=lambda relay: (relay["alive"], -(relay["age_s"] or 0)))
    columns: Columns = {
        "node": lambda relay: node_link(relay["node_id"], relay["label"], route),
        "state": lambda relay: "alive" if relay["alive"] else "lost",
        ">last message": lambda relay: text.age(relay["age_s"]),
        ">ranks": lambda relay: text.plain(len(relay["ranks"])),
        ">clock": _clock,
    }
    rest = len(known) - _RELAYS
    more = f"{rest:,} more nodes; those that are lost or silent for longest are shown." if rest > 0 else ""
    rows = table(columns, known[:_RELAYS], label="Relays")
    return html.Div([rows, html.P(more, className="hint")], id="health-relays")


def _clock(relay: Mapping[str, Any]) -> str:
    """Return by how much a node's clock is ahead of the aggregator's: "+5 ± 0.3 ms"."""
    offset, bound = relay["clock_offset_ns"], relay["clock_bound_ns"]
    if offset is None or bound is None:
        return text.NA
    return f"{text.number(-offset / 1e6, sign=True)} ± {text.ms(bound / 1e6)}"


def _ledger(ledger: Mapping[str, Any] | None, over: bool) -> html.Div:
    """Return what became of the rows: of all ranks, then of each one that lost any or is cut short."""
    if ledger is None:
        missing = html.P("Not known while the aggregator does not answer.", className="empty")
        return html.Div(missing, id="health-ledger")
    losing = [
        (rank, rows)
        for rank, rows in ledger["per_rank"].items()
        if sum(rows["dropped"].values()) or (over and rows["unreported"] is None)
    ]
    columns: Columns = {
        ">rank": lambda row: row[0],
        ">produced": lambda row: f"{row[1]['produced']:,}",
        ">stored": lambda row: f"{row[1]['stored']:,}",
        ">in flight": lambda row: f"{row[1]['in_flight']:,}",
        ">dropped": lambda row: f"{sum(row[1]['dropped'].values()):,}",
        "dropped where": lambda row: _places(row[1]["dropped"]),
        "after the last report": lambda row: "unknown" * (over and row[1].get("unreported", 0) is None),
    }
    rows = table(columns, [("all", {**ledger, "unreported": 0}), *losing[:_MOST]], label="Ledger")
    note = "produced = stored + in flight + dropped. Ranks without a loss are in the sum alone."
    return html.Div([rows, html.P(note, className="hint")], id="health-ledger")


def _places(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{text.words(place)} {rows:,}" for place, rows in dropped.items() if rows)
