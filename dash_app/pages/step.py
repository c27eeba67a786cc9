"""One step of all ranks: where each spent its time, and who came last to the exchange."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from dash import html

from traceml_ray import text
from traceml_ray.document import drawing
from traceml_ray.document.model import Column, Table
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.store.step_shapes import OneStep
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import whole_number

from .. import gantt
from ..charts import chart
from ..components import facts, link, part, trail
from ..document import table
from ..route import Route
from ..session_cache import SessionCache

_TOGETHER = (
    "One clock for all: each row begins where its rank left the exchange before, which ranks leave together. "
    "The clocks of nodes are not compared. "
)
_ALONE = "These ranks do not wait for each other: each row begins where its rank's own step began. "
_SPANS = "Thin bars are named spans; where inside its stage a span began is not recorded."
_LISTED = 200


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return one step of all ranks, and where they run."""

    def has_all_ranks(step: OneStep) -> bool:
        return len(step.ranks) >= run.world

    step = cache.ask(query.GetStep(run.id, int(route.key)), settled=has_all_ranks)
    nodes = {rank: run.node_of(rank) or text.NA for rank in run.ranks}
    return {"one": step, "nodes": nodes, "world": run.world, "named": [*run.named["ranks"]]}


def layout(view: Mapping[str, Any], route: Route) -> Any:
    """Return the elements of the page."""
    step, number = view["one"], int(route.key)
    head = html.Div(
        [part(html.H1(f"Step {number:,}", id="step-title")), part(_around(view, number, route))],
        className="title-row",
    )
    body: list[Any] = [_trail(view, number, route), head]
    if step is None or not step.ranks:
        return html.Div([*body, part(html.P(_why_empty(step, number), id="step-missing", className="empty"))])
    alone = view["world"] == 1 or (view["verdict"] or {}).get("label") == "accounting_only"
    drawn = gantt.rows(
        step, view["nodes"], _marked(view, route), route.get("open"), route.get("order") == "late"
    )
    body += [
        facts("step-facts", _facts(view, step)),
        chart(
            "step-gantt",
            "All ranks on one clock",
            gantt.figure(step, drawn),
            "Stages of each rank in this step, from where it left the exchange before",
            route,
            series=drawing.STAGES,
            colours=gantt.spans(step) if len(drawn) <= gantt.FEW else None,
            height=gantt.height(drawn),
            rows=_table(view, step, route),
        ),
        part(html.P((_ALONE if alone else _TOGETHER) + _SPANS, id="step-clock", className="hint")),
    ]
    return html.Div(body)


def _marked(view: Mapping[str, Any], route: Route) -> set[int]:
    """Return the ranks to mark: those the verdict names, and the rank that the link came from."""
    chosen = whole_number(route.get("rank"))
    return {*view["named"], *([] if chosen is None else [chosen])}


def _trail(view: Mapping[str, Any], number: int, route: Route) -> Any:
    rank = whole_number(route.get("rank"))
    node = None if rank is None else view["nodes"].get(rank)
    between = [(node, route.to("node", node)), (f"rank {rank}", route.to("rank", rank))] if node else []
    return trail(route, *between, (f"step {number:,}", None))


def _around(view: Mapping[str, Any], number: int, route: Route) -> html.Div:
    step, kept = view["one"], route.select("rank", "order", "open")
    numbers = [number for number in (step and step.last, view["step"]) if number is not None]
    last, first = max(numbers, default=number), (step and step.first) or 0
    shown = []
    if number > first:
        shown.append(link("← previous", route.to("step", min(number - 1, last), **kept), "chip"))
    if number < last:
        shown.append(link("next →", route.to("step", max(number + 1, first), **kept), "chip"))
        shown.append(link("newest", route.to("step", last, **kept), "chip"))
    for label, order in (("by node", None), ("last to come first", "late")):
        shown.append(link(label, route.here(order=order), "chip", on=route.get("order") == order))
    return html.Div(shown, id="step-around", className="chips")


def _why_empty(step: OneStep | None, number: int) -> str:
    if step is None:
        return "Being read."
    first, last = step.first, step.last
    if first is None or last is None:
        return "No step is kept one by one in this run."
    if number < first:
        return f"Step {number:,} is kept in sums only. Single steps are there from {first:,} to {last:,}."
    return f"No rank has reported step {number:,}. Single steps are there from {first:,} to {last:,}."


def _facts(view: Mapping[str, Any], step: OneStep) -> dict[str, Any]:
    late = np.asarray(step.late)
    last: str | None = None
    if np.isfinite(late).any():
        latest = int(np.nanargmax(late))
        rank = step.ranks[latest]
        last = f"rank {rank} ({view['nodes'].get(rank)}), {text.ms(late[latest])} after the median rank"
    device = f"GPU of {text.ranks(step.device)}" if step.device else "CPU"
    return {
        "took": text.ms(step.took_ms),
        "ranks": f"{len(step.ranks):,} of {view['world']:,}",
        "last to come": last,
        "times from": device,
    }


def _table(view: Mapping[str, Any], step: OneStep, route: Route) -> Any:
    sums = {rank: np.zeros(len(STAGES)) for rank in step.ranks}
    for rank, row in zip(step.row_ranks, step.stages, strict=True):
        sums[rank] += row
    late = dict(zip(step.ranks, step.late.tolist(), strict=True))
    spans: dict[int, list[str]] = {}
    for span in step.spans:
        spans.setdefault(span.rank, []).append(f"{span.name} {text.ms(span.ms)}")
    shown = sorted(step.ranks, key=lambda rank: -np.nan_to_num(late[rank], nan=-1e9))[:_LISTED]
    columns = [
        Column("rank", lambda rank: rank, "figures", link=lambda rank: ("rank", rank)),
        Column("node", lambda rank: view["nodes"].get(rank)),
        Column("after the median", lambda rank: late[rank], "ms"),
        *(Column(name, partial(_stage, sums, index), "aligned") for index, name in enumerate(STAGES)),
        Column("spans, mean", lambda rank: ", ".join(spans.get(rank, ()))),
    ]
    rest = len(step.ranks) - len(shown)
    note = f"{rest:,} more ranks came earlier." if rest else "Stages in ms, the last to come first."
    return table(Table("The step, by rank", columns, shown, note), route)


def _stage(sums: Mapping[int, Any], stage: int, rank: int) -> float:
    return float(sums[rank][stage])
