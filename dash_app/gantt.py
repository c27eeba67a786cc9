"""The stages and spans of one step of many ranks, as bars on one clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from traceml_ray import text
from traceml_ray.analysis import row_table
from traceml_ray.document import drawing
from traceml_ray.stages import STAGES
from traceml_ray.store.step_shapes import OneStep, StepSpan
from traceml_ray.views import figures
from traceml_ray.views.values import Array, rounded

MOST_ROWS = 128
"""Largest number of ranks shown one per row. In a larger job a row is a node, drawn as its last rank."""
FEW = 32
"""Largest number of rows that are high enough to show spans below the stages."""
_FEW_PX, _MANY_PX, _AXES_PX = 22, 9, 46
_LABELS = 40
_SPANS = drawing.ROSE, drawing.GREEN, drawing.ORANGE, "#6b7785", drawing.BLUE


class GanttRow(NamedTuple):
    """A row of the drawing: one rank."""

    rank: int
    label: str
    named: bool = False


def rows(
    step: OneStep,
    node_of: Mapping[int, str],
    named: Collection[int],
    opened: str | None,
    latest: bool,
) -> list[GanttRow]:
    """
    Return what is drawn, rank by rank up to MOST_ROWS, else node by node: `opened` and the `named` ranks are
    rows of their own. `latest`: those that came last are first.
    """
    late = dict(zip(step.ranks, np.nan_to_num(step.late, nan=-1.0).tolist(), strict=True))
    groups: dict[str, list[int]] = {}
    for rank in step.ranks:
        groups.setdefault(node_of.get(rank, ""), []).append(rank)
    rows = []
    for node, node_ranks in groups.items():
        if len(late) <= MOST_ROWS or node == opened:
            rows += [
                GanttRow(rank, f"{node}  {rank}" if rank == node_ranks[0] else str(rank), rank in named)
                for rank in node_ranks
            ]
        else:
            worst = max(node_ranks, key=lambda rank: late[rank])
            shown = dict.fromkeys([worst, *(rank for rank in node_ranks if rank in named)])
            rows += [GanttRow(rank, f"{node}  {rank}", rank in named) for rank in shown]
    if latest:
        rows.sort(key=lambda row: -late[row.rank])
        rows = [row._replace(label=f"{node_of.get(row.rank, '')}  {row.rank}") for row in rows]
    return rows


def height(drawn: Sequence[GanttRow]) -> int:
    """Return the height of the figure in px."""
    return _AXES_PX + len(drawn) * (_FEW_PX if len(drawn) <= FEW else _MANY_PX)


def spans(step: OneStep) -> dict[str, str]:
    """Return the colours of the named spans."""
    return dict(zip(sorted({span.name for span in step.spans}), cycle(_SPANS), strict=False))


def figure(step: OneStep, drawn: Sequence[GanttRow]) -> figures.Figure:
    """Return the stages of each row from left to right, and in a small figure its spans under them."""
    few, row_of_rank = len(drawn) <= FEW, {row.rank: number for number, row in enumerate(drawn)}
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
        "ms since the exchange before",
        "",
        barmode="overlay",
        hovermode="closest",
        yaxis=yaxis,
        bargap=0,
    )


def _begins(whose: Sequence[int], stages: Array) -> Array:
    """Return when each stage of each row begins: a rank's second row follows its first."""
    ranks = np.asarray(whose)
    return row_table.begins(stages, np.r_[False, ranks[1:] == ranks[:-1]][: len(ranks)])


def _span_bars(
    step: OneStep,
    row_of_rank: Mapping[int, int],
    row_of: Mapping[int, int],
    begins: Array,
    stages: Array,
) -> dict[str, Any]:
    """Return the spans, each from where its stage begins: where inside the stage is not recorded."""
    shown = [span for span in step.spans if span.rank in row_of][
        ::-1
    ]  # shorter spans are drawn over longer ones
    colours = spans(step)
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
