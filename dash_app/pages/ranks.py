"""All ranks in one table: the state of each, where it runs, and where its time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dash import html

from traceml_ray import text
from traceml_ray.document.model import Column, Table, per_rank_columns
from traceml_ray.signals.views import sections_of
from traceml_ray.store import query
from traceml_ray.views.machines import gpu_of
from traceml_ray.views.ranks import NAMED, SILENT, rank_rows
from traceml_ray.views.run_state import RunState
from traceml_ray.views.tables import rank_columns
from traceml_ray.views.values import as_dict

from .. import listing
from ..elements import died, keys_of, part, table, trail
from ..route import Route
from ..session_cache import SessionCache

_WITH_PROCESSES = 6


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the ranks that the URL asks for, named ranks first, and the number of ranks in each state."""
    rows = rank_rows(cache, run)
    states = Counter(row["state"] for row in rows)
    node, state = route.get("node"), route.get("state")
    rows = [row for row in rows if node in (None, row["node"], row["node_key"])]
    rows = [row for row in rows if state in (None, row["state"])]
    chosen = listing.choose(rows, route, _words, _keys(_columns(run, True, ())))
    nodes = tuple(dict.fromkeys(row["node_key"] for row in chosen.items if row["node_key"]))
    asked = cache.ask(query.GetNodeSamples(nodes, _WITH_PROCESSES)) or ()
    samples: dict[str, list[Any]] = {}
    for name, sample in asked:
        samples.setdefault(name, []).append(as_dict(sample))
    for row in chosen.items:
        if process := run.ranks.get(row["rank"]):
            row["gpu"] = gpu_of(process.identity, samples.get(row["node_key"] or "", ()))
    suspects = {(one.rank, one.stage) for one in (run.verdict.suspects if run.verdict else ())}
    roles = any(process.work for process in run.ranks.values())
    ended = any(process.exit_code is not None for process in run.ranks.values())
    columns = [one for one in _columns(run, roles, suspects) if ended or one.name != "exit code"]
    return {"chosen": chosen, "states": dict(states), "columns": columns}


def _columns(run: RunState, roles: bool, suspects: Collection[tuple[int, str]]) -> list[Column]:
    """Return the columns; the columns of signals are last."""
    of_signals = per_rank_columns(sections_of(run.signals), lambda row: row["rank"])
    return [*rank_columns(roles, suspects), *of_signals]


def _keys(columns: Sequence[Column]) -> listing.Keys:
    """Return by what ranks are sorted: not by GPUs, which are asked for the ranks of a page alone."""
    return keys_of(column for column in columns if column.name != "GPU")


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
    ranks = view["columns"]
    heads = listing.heads(ranks, _keys(ranks), route)
    block = Table("Ranks", ranks, chosen.items, empty="No rank matches.")
    rows = table(block, route, heads=heads, cells={"state": _died})
    rows_panel = html.Div([rows, listing.pages(chosen, route, "rank")], id="rank-table", className="panel")
    return html.Div(
        [
            trail(route, ("ranks", None)),
            html.Div([html.H1("Ranks"), listing.field("ranks and nodes")], className="title-row"),
            part(bar),
            part(rows_panel),
            html.P(
                "Busy: median time of a step without waiting, ms. ÷ med: busy ÷ that of the median rank. "
                "Stages: mean of a step, ms.",
                className="hint",
            ),
        ]
    )


def _died(row: Mapping[str, Any]) -> Any:
    """Return the state of a rank. For a dead rank, also how, when and where it died."""
    if row["death"]:
        return html.Span(["◆ ", *died(row["death"])], className="sev critical")
    tone = "sev warning" if row["state"] in (NAMED, SILENT) else ""
    return html.Span(f"▲ {row['state']}", className=tone) if tone else text.words(row["state"])
