"""
One step of all ranks, with stages and spans as bars on one clock: where each rank spent its time, and which
ranks reached the exchange last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from dash import html

from traceml_ray import text
from traceml_ray.analysis import row_table
from traceml_ray.document import drawing
from traceml_ray.document.model import Column, Table
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.store.step_shapes import OneStep, StepSpan
from traceml_ray.views import figures
from traceml_ray.views.run_state import RunState
from traceml_ray.views.values import Array, rounded, whole_number

from ..charts import chart
from ..elements import facts, link, part, table, trail
from ..route import Route
from ..session_cache import SessionCache

_TOGETHER = (
    "All rows share one clock: a row begins when its rank left the previous exchange, which all ranks leave "
    "together. The clocks of nodes are not compared. "
)
_ALONE = "These ranks do not wait for each other: a row begins when its rank's own step began. "
_SPANS = (
    "Thin bars are named spans. Each is drawn from the start of its stage: when it began is not recorded."
)
_LISTED = 200


def data(cache: SessionCache, run: RunState, route: Route) -> dict[str, Any]:
    """Return the step whose number is the key of `route` on all ranks, and the node of each rank."""

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
    verdict = view["verdict"]
    alone = view["world"] == 1 or (verdict is not None and verdict.label == "accounting_only")
    drawn = _gantt_rows(
        step, view["nodes"], _marked(view, route), route.get("open"), route.get("order") == "late"
    )
    body += [
        facts("step-facts", _facts(view, step)),
        chart(
            "step-gantt",
            "All ranks on one clock",
            _gantt(step, drawn),
            "Stages of each rank in this step, from when it left the previous exchange",
            route,
            series=drawing.STAGES,
            colours=_span_colours(step) if len(drawn) <= _FEW else None,
            height=_height(drawn),
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
    for label, order in (("by node", None), ("latest first", "late")):
        shown.append(link(label, route.here(order=order), "chip", on=route.get("order") == order))
    return html.Div(shown, id="step-around", className="chips")


def _why_empty(step: OneStep | None, number: int) -> str:
    if step is None:
        return "Reading the step …"
    first, last = step.first, step.last
    if first is None or last is None:
        return "Single steps of this run are not kept."
    if number < first:
        why = f"Step {number:,} is kept only as part of a mean."
    else:
        why = f"No rank has reported step {number:,}."
    return f"{why} Single steps are kept from {first:,} to {last:,}."


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
        "last to arrive": last,
        "measured on": device,
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
    note = f"{rest:,} more ranks arrived earlier." if rest else "Stages in ms, the latest rank first."
    return table(Table("The step, by rank", columns, shown, note), route)


def _stage(sums: Mapping[int, Any], stage: int, rank: int) -> float:
    return float(sums[rank][stage])


_MOST_ROWS = 128
"""Largest number of ranks shown one per row. In a larger job a row is a node, drawn as its last rank."""
_FEW = 32
"""Largest number of rows that are high enough to show spans below the stages."""
_FEW_PX, _MANY_PX, _AXES_PX = 22, 9, 46
_LABELS = 40
_SPAN_PALETTE = drawing.ROSE, drawing.GREEN, drawing.ORANGE, "#6b7785", drawing.BLUE


class _GanttRow(NamedTuple):
    """A row of the drawing: one rank."""

    rank: int
    label: str
    named: bool = False


def _gantt_rows(
    step: OneStep,
    node_of: Mapping[int, str],
    named: Collection[int],
    opened: str | None,
    latest: bool,
) -> list[_GanttRow]:
    """
    Return the rows to draw: one per rank up to _MOST_ROWS ranks, else one per node. `opened` and the `named`
    ranks always have separate rows. `latest`: ranks that arrived last come first.
    """
    late = dict(zip(step.ranks, np.nan_to_num(step.late, nan=-1.0).tolist(), strict=True))
    groups: dict[str, list[int]] = {}
    for rank in step.ranks:
        groups.setdefault(node_of.get(rank, ""), []).append(rank)
    rows = []
    for node, node_ranks in groups.items():
        if len(late) <= _MOST_ROWS or node == opened:
            rows += [
                _GanttRow(rank, f"{node}  {rank}" if rank == node_ranks[0] else str(rank), rank in named)
                for rank in node_ranks
            ]
        else:
            worst = max(node_ranks, key=lambda rank: late[rank])
            shown = dict.fromkeys([worst, *(rank for rank in node_ranks if rank in named)])
            rows += [_GanttRow(rank, f"{node}  {rank}", rank in named) for rank in shown]
    if latest:
        rows.sort(key=lambda row: -late[row.rank])
        rows = [row._replace(label=f"{node_of.get(row.rank, '')}  {row.rank}") for row in rows]
    return rows


def _height(drawn: Sequence[_GanttRow]) -> int:
    """Return the height of the figure in px."""
    return _AXES_PX + len(drawn) * (_FEW_PX if len(drawn) <= _FEW else _MANY_PX)


def _span_colours(step: OneStep) -> dict[str, str]:
    """Return the colours of the named spans."""
    return dict(zip(sorted({span.name for span in step.spans}), cycle(_SPAN_PALETTE), strict=False))


def _gantt(step: OneStep, drawn: Sequence[_GanttRow]) -> figures.Figure:
    """Return the stages of each row from left to right, and in a small figure its spans under them."""
    few, row_of_rank = len(drawn) <= _FEW, {row.rank: number for number, row in enumerate(drawn)}
    mine = [index for index, rank in enumerate(step.row_ranks) if rank in row_of_rank]
    whose = [step.row_ranks[index] for index in mine]
    stages = np.asarray(step.stages, float)[mine].reshape(-1, len(STAGES))
    begins = _begins(whose, stages)
    traces = [
        _bars(
            name,
            drawing.STAGES[name],
            [row_of_rank[rank] for rank in whose],
            begins[:, column],
            stages[:, column],
            [f"rank {rank}" for rank in whose],
            0.62 if few else 0.9,
        )
        for column, name in enumerate(STAGES)
    ]
    if few:
        traces.append(
            _span_bars(step, row_of_rank, dict(zip(whose, range(len(whose)), strict=True)), begins, stages)
        )
    every = max(1, -(-len(drawn) // _LABELS))
    ticks = [number for number, row in enumerate(drawn) if row.named or number % every == 0]
    labels = [
        f"<b>▲ {drawn[number].label}</b>" if drawn[number].named else drawn[number].label for number in ticks
    ]
    yaxis = {
        "tickvals": ticks,
        "ticktext": labels,
        "range": [len(drawn) - 0.4, -0.6],
        "showgrid": False,
        "automargin": True,
    }
    return figures.figure(
        traces,
        "ms since the previous exchange",
        "",
        barmode="overlay",
        hovermode="closest",
        yaxis=yaxis,
        bargap=0,
    )


def _begins(whose: Sequence[int], stages: Array) -> Array:
    """Return the time at which each stage of each row begins. A rank's second row follows its first."""
    ranks = np.asarray(whose)
    return row_table.begins(stages, np.r_[False, ranks[1:] == ranks[:-1]][: len(ranks)])


def _span_bars(
    step: OneStep,
    row_of_rank: Mapping[int, int],
    row_of: Mapping[int, int],
    begins: Array,
    stages: Array,
) -> dict[str, Any]:
    """
    Return the spans, each drawn from the beginning of its stage: the position inside the stage is not
    recorded.
    """
    shown = [span for span in step.spans if span.rank in row_of][
        ::-1
    ]  # shorter spans are drawn over longer ones
    colours = _span_colours(step)
    places = [(row_of[span.rank], STAGES.index(span.stage)) for span in shown]
    return _bars(
        "span",
        [colours[span.name] for span in shown],
        [row_of_rank[span.rank] + 0.42 for span in shown],
        [begins[index] for index in places],
        [min(span.ms, stages[index]) for span, index in zip(shown, places, strict=True)],
        [_span_text(span) for span in shown],
        0.2,
    )


def _span_text(span: StepSpan) -> str:
    steps = f"step {span.from_step:,}"
    if span.to_step > span.from_step:
        steps = f"mean of steps {span.from_step:,}–{span.to_step:,}"
    return f"rank {span.rank}: {span.name}, {text.ms(span.ms)} ({steps})"


def _bars(
    name: str, colour: Any, y: Any, base: Any, x: Any, words: Sequence[str], width: float
) -> dict[str, Any]:
    more = "%{text}<extra></extra>" if name == "span" else "%{text}: " + name + " %{x:.3~f} ms<extra></extra>"
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": y,
        "base": rounded(base),
        "x": rounded(x),
        "width": width,
        "text": words,
        "textposition": "none",
        "marker": {"color": colour},
        "hovertemplate": more,
    }
