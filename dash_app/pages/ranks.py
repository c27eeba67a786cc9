"""All ranks in one table: what state each is in, where it runs, and where its time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.views.ranks import NAMED, SILENT, rank_rows
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import as_dict

from .. import listing
from ..components import Columns, died, node_link, part, rank_link, table, trail
from ..route import Route
from ..session_cache import SessionCache
from .node import gpu_of

_WITH_PROCESSES = 6
_KEYS: listing.Keys = {
    "rank": lambda row: row["rank"],
    "node": lambda row: row["node"],
    "role": lambda row: row["role"],
    "local rank": lambda row: row["local_rank"],
    "state": lambda row: row["state"],
    "exit code": lambda row: row["exit_code"],
    "last step": lambda row: row["last_step"],
    "busy": lambda row: row["busy_ms"],
    "÷ median": lambda row: row["over"],
    **{name: lambda row, name=name: row["stages"].get(name) for name in STAGES},  # type: ignore[misc]
}


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the ranks that the URL asks for, named ones first, and how many are in each state."""
    rows = rank_rows(cache, run)
    states = Counter(row["state"] for row in rows)
    node, state = route.get("node"), route.get("state")
    rows = [row for row in rows if node in (None, row["node"], row["node_key"])]
    rows = [row for row in rows if state in (None, row["state"])]
    chosen = listing.choose(rows, route, _words, _KEYS)
    nodes = tuple(dict.fromkeys(row["node_key"] for row in chosen.items if row["node_key"]))
    asked = cache.ask(query.GetNodeSamples(nodes, _WITH_PROCESSES)) or ()
    samples: dict[str, list[Any]] = {}
    for name, sample in asked:
        samples.setdefault(name, []).append(as_dict(sample))
    for row in chosen.items:
        if process := run.ranks.get(row["rank"]):
            row["gpu"] = gpu_of(process.identity, samples.get(row["node_key"] or "", ()))
    suspects = {(suspect["rank"], suspect["stage"]) for suspect in (run.verdict or {}).get("suspects") or ()}
    roles = any(process.work for process in run.ranks.values())
    return {"chosen": chosen, "states": dict(states), "suspects": suspects, "roles": roles}


def _words(row: Mapping[str, Any]) -> str:
    who = f"rank {row['rank']} {row['node']} {row['hostname']} {row['role'] or ''}"
    return f"{who} {row['state']} {row['open_stage']}"


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    chosen, states = view["chosen"], view["states"]
    chips = listing.states(route, states)
    if node := route.get("node"):
        chips.children += listing.chips(route, "node", {f"node {node} ✕": None}, "Node").children
    bar = html.Div(chips, id="rank-filter")
    columns = _columns(view, route)
    heads = listing.heads(columns, _KEYS, route)
    rows = table(columns, chosen.items, heads=heads, empty="No rank is like that.", label="Ranks")
    rows_panel = html.Div([rows, listing.pages(chosen, route, "rank")], id="rank-table", className="panel")
    return html.Div(
        [
            trail(route, ("ranks", None)),
            html.Div([html.H1("Ranks"), listing.field(route, "ranks and nodes")], className="title-row"),
            part(bar),
            part(rows_panel),
            html.P(
                "Busy: the median step without waiting. Stages: the mean of a step, ms.", className="hint"
            ),
        ]
    )


def _columns(view: Mapping[str, Any], route: Route) -> Columns:
    def stage(name: str) -> Any:
        def cell(row: Mapping[str, Any]) -> Any:
            shown = text.number(row["stages"].get(name), aligned=True)
            suspect = (row["rank"], name) in view["suspects"]
            return html.B(f"▲ {shown}", className="sev warning") if suspect else shown

        return cell

    return {
        ">rank": lambda row: rank_link(row["rank"], route),
        "node": lambda row: node_link(row["node_key"], row["node"], route),
        **({"role": lambda row: row["role"] or ""} if view["roles"] else {}),
        ">local rank": lambda row: text.plain(row["local_rank"]),
        ">GPU": lambda row: text.plain(row["gpu"]),
        "state": _state,
        ">exit code": lambda row: "" if row["exit_code"] is None else str(row["exit_code"]),
        ">last step": lambda row: text.plain(row["last_step"]),
        "now in": lambda row: row["open_stage"] or text.NA,
        ">busy": lambda row: text.number(row["busy_ms"], aligned=True),
        ">÷ median": lambda row: text.number(row["over"], 2) + "×" * (row["over"] is not None),
        **{f">{name}": stage(name) for name in STAGES},
    }


def _state(row: Mapping[str, Any]) -> Any:
    if row["death"]:
        return html.Span(["◆ ", *died(row["death"])], className="sev critical")
    if row["state"] in (NAMED, SILENT):
        return html.Span(f"▲ {row['state']}", className="sev warning")
    return text.words(row["state"])
