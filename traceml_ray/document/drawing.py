"""
What the charts of all faces have in common: colours, the ends of a scale, and where lines and bars are.

Which rows a rank × time heatmap has: a rank each, or of many each node, as its worst rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from traceml_ray import text
from traceml_ray.analysis.shapes import StepColumns
from traceml_ray.analysis.spread import MISSING, excess, level
from traceml_ray.analysis.verdict_shapes import VerdictInfo
from traceml_ray.analysis.window import UInt8

STAGES = {
    "post_sync": "#9a63b8",
    "data": "#c77c11",
    "prepare": "#86891c",
    "forward": "#1b9696",
    "backward": "#3b6fc4",
    "sync_wait": "#8b939c",
}
"""In the order of `traceml_ray.stages`."""
BLUE, ORANGE, RED, GREY, ROSE, GREEN = "#3b82c4", "#d9731a", "#d03b3b", "#8b939c", "#c2568f", "#5a9e3c"
RUN_STYLES: tuple[tuple[str, str], ...] = (
    ("#1f77b4", "solid"), ("#d55e00", "dash"), ("#009e73", "dot"), ("#b0569a", "dashdot"),
    ("#c99000", "solid"), ("#3fa7dc", "dash"), ("#8b939c", "dot"), ("#7f5539", "dashdot"),
)  # fmt: skip
"""
Colour and dash of each of up to eight runs: after the colours of Okabe and Ito, which people who do not see
red or green tell apart, as they hold on light and on dark; dashes tell them apart without any colour.
"""
DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "8 3 2 3"}
"""Dashes as SVG has them."""
HEAT_COLOURS: dict[float, tuple[int, int, int, float]] = {
    0.25: (20, 70, 150, 1.0),
    0.5: (59, 130, 196, 1.0),
    0.85: (59, 130, 196, 0.35),
    1.0: (139, 147, 156, 0.08),
    1.12: (232, 150, 50, 0.35),
    1.5: (232, 140, 50, 1.0),
    2.0: (212, 85, 20, 1.0),
    4.0: (150, 15, 85, 1.0),
}
"""By ratio to the median. That shows the ground, so that the colours hold on light and on dark."""
HEAT_MISSING = (139, 147, 156, 0.6)
HEAT_MARKS = (0.25, 0.5, 1, 2, 4)
"""Under the scale."""
_NARROW = 0.002
"""Share of the model below which a layer is no box of an icicle."""
_CHARS = 150
"""That fit across one."""
_DEPTHS = ("rgba(107,119,133,.35)", "rgba(59,111,196,.4)", "rgba(27,150,150,.4)")
"""Of boxes, by how deep they lie."""
_FLAT = 0.25
"""Changes of a time by less than this share are drawn as small ones."""
_SPIKE = 3.0
"""A value this many times over the 98th percentile does not set the scale."""
Array = np.ndarray[Any, Any]


class Bar(NamedTuple):
    """A bar of a waterfall, ms."""

    name: str
    base: float
    width: float
    colour: str
    label: str


class Box(NamedTuple):
    """A layer in an icicle: from `start`, `width` wide (ms), `depth` boxes below the model."""

    name: str
    label: str
    """What fits into it."""
    depth: int
    start: float
    width: float
    colour: str


def css(colour: tuple[int, int, int, float]) -> str:
    """Return a colour as style sheets and SVG have it."""
    return "rgba({},{},{},{:g})".format(*colour)


def heat_palette() -> Array:
    """Return the colour of each of the 256 levels of `spread.deviations`, (256, 4) uint8 RGBA."""
    levels = [float(level(ratio)) for ratio in HEAT_COLOURS]
    channels = np.array([(*rgb, 255 * alpha) for *rgb, alpha in HEAT_COLOURS.values()])
    channels_of_level = np.array([np.interp(np.arange(256), levels, channel) for channel in channels.T]).T
    channels_of_level[MISSING] = (*HEAT_MISSING[:3], 255 * HEAT_MISSING[3])
    palette: Array = np.rint(channels_of_level).astype(np.uint8)
    return palette


def cap(values: Array) -> float | None:
    """Return where a scale ends so that one slow first step does not press all others flat; None: nowhere."""
    values = values[np.isfinite(values)]
    usual = float(np.percentile(values, 98)) if len(values) else 0.0
    return 1.25 * usual if usual > 0 and values.max() > _SPIKE * usual else None


def time_scale(values: Array) -> tuple[float, float] | None:
    """
    Return the ends of a scale of times on which noise looks flat: from the smallest value to the largest one,
    or to where `cap` ends it, and at least a quarter above the smallest. None where nothing is known.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low = float(known.min())
    high = cap(known) or float(known.max())
    return low, max(high, (1 + _FLAT) * low)


def waterfall(before: Mapping[str, float], since: Mapping[str, float]) -> list[Bar]:
    """Return what a step took before and takes since, and between them what each stage has added, ms."""
    total = sum(before.values()), sum(since.values())
    bars, bottom = [Bar("before", 0.0, total[0], GREY, text.ms(total[0]))], total[0]
    for stage in STAGES:
        change = since[stage] - before[stage]
        colour, label = ORANGE if change > 0 else BLUE, f"{text.number(change, sign=True)} ms"
        bars.append(Bar(stage, min(bottom, bottom + change), abs(change), colour, label))
        bottom += change
    return [*bars, Bar("since", 0.0, total[1], GREY, text.ms(total[1]))]


def stage_bars(stages: Mapping[str, float]) -> list[Bar]:
    """Return the stages of a step (ms), each from where the one before it ends."""
    bars, begin = list[Bar](), 0.0
    for stage in STAGES:
        bars.append(Bar(stage, begin, stages.get(stage, 0.0), STAGES[stage], text.ms(stages.get(stage, 0.0))))
        begin += stages.get(stage, 0.0)
    return bars


class Nested(Protocol):
    """A layer (`signals.layers.judge.Layer`), which may have others inside it."""

    @property
    def name(self) -> str:
        """What it is called; "" is the model itself."""

    @property
    def parent(self) -> int | None:
        """Index of the layer that it is in."""

    @property
    def total_ms(self) -> float:
        """Time of a step in it and in the layers inside it (ms)."""


def icicle(layers: Sequence[Nested], named: Collection[str | None]) -> list[Box]:
    """
    Return layers as boxes, what is inside a layer below it, in the
    order of the model; ORANGE are those of `named`. Boxes too narrow to be seen are left out.
    """
    inside: dict[int | None, list[int]] = {}
    for index, one in enumerate(layers):
        inside.setdefault(one.parent, []).append(index)
    whole = sum(layers[index].total_ms for index in inside.get(None, ()))
    boxes: list[Box] = []
    waiting = [(inside.get(None, []), 0, 0.0)]
    while waiting:
        children, depth, start = waiting.pop()
        for index in children:
            one, name = layers[index], layers[index].name
            width = one.total_ms
            if width >= _NARROW * whole > 0:
                colour = ORANGE if name in named else _DEPTHS[depth % len(_DEPTHS)]
                fits = int(_CHARS * width / whole)
                label = _short(name)
                label = label if len(label) <= fits else ""
                boxes.append(Box(name or "model", label, depth, start, width, colour))
                waiting.append((inside.get(index, []), depth + 1, start))
            start += width
    return boxes


def _short(name: str) -> str:
    """Return the end of a layer's name: "mlp", "blocks.3"."""
    before, _, last = name.rpartition(".")
    return f"{before.rpartition('.')[2]}.{last}" if before and last.isdecimal() else last or "model"


def spark(values: Sequence[float | None], between: tuple[float, float] | None, size: tuple[int, int]) -> str:
    """Return a sparkline as the path of an SVG; nothing where fewer than two values are known."""
    width, height = size
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    low, high = between or (min(known), max(known))
    span = (high - low) or 1.0
    across = width / max(1, len(values) - 1)
    points = [
        None if v is None else f"{i * across:.1f} {height - 2 - (height - 4) * (v - low) / span:.1f}"
        for i, v in enumerate(values)
    ]
    pairs = zip([None, *points], points, strict=False)
    return "".join(("L" if before else "M") + point for before, point in pairs if point)


HEIGHT = 278
"""px of all rows, where they are many."""
_MOST_ROWS = 128
"""Of ranks: with more, a row of one rank is too thin to be seen."""
_WORST = 40
"""Ranks of more that have a row of their own, the costliest first."""
_MOST_GROUPS, _MOST_NAMED = 200, 8


class HeatRow(NamedTuple):
    """What is drawn as one row."""

    lines: Sequence[int]
    """Of the data's `z`: one, or several, of which the worst is drawn."""
    name: str
    """In full: "rank 5 (node-1)", "worst of node-1"."""
    node: str
    rank: int | None = None
    """Of a row that is one rank."""
    first: bool = False
    """Whether it is the first of its node."""
    named: bool = False
    """Whether the verdict names it."""
    height: int = 1
    href: str | None = None
    """Where a click leads, on a face that has links."""
    toggle: str | None = None
    """Link that opens or closes its node."""


def ordered(columns: StepColumns, absent: Mapping[int, str]) -> StepColumns:
    """
    Return the columns of a run with their lines in order of nodes and ranks, and one for each rank that is
    `absent` (by rank, where it belongs), unless a line is a node.
    """
    ranks, nodes = [*columns.ranks], [*columns.nodes]
    if columns.by != "node":
        ranks += absent
        nodes += absent.values()
    order = sorted(range(len(nodes)), key=lambda index: (text.natural(nodes[index]), ranks[index]))
    unknown = np.full((len(ranks) - len(columns.ranks), len(columns.first)), MISSING, np.uint8)
    return replace(
        columns,
        ranks=[ranks[index] for index in order],
        nodes=[nodes[index] for index in order],
        z=np.concatenate([columns.z, unknown])[order],
    )


def suspects(heat: StepColumns, verdict: VerdictInfo | None) -> set[int]:
    """Return the lines of `heat` that a verdict names."""
    if verdict is None or verdict.label == "healthy":
        return set()
    named: Sequence[int | str] = verdict.nodes if heat.by == "node" else verdict.ranks
    lines: Sequence[int | str] = heat.nodes if heat.by == "node" else heat.ranks
    return {index for index, line in enumerate(lines) if line in named[:_MOST_NAMED]}


def by_node(
    heat: StepColumns, named: set[int], opened: Collection[str] = (), shut: Collection[str] = ()
) -> list[HeatRow]:
    """
    Return the rows by node. A node has a row for each rank where these are few, where one of them is `named`,
    or a person has `opened` it, unless it was `shut`.
    """
    nodes, count = heat.nodes, len(heat.nodes)
    few = count <= _MOST_ROWS
    starts = [index for index in range(count) if index == 0 or nodes[index] != nodes[index - 1]]
    groups = starts if few else starts[:: -(-len(starts) // _MOST_GROUPS)]
    spans = [range(*both) for both in pairwise([*groups, count])]
    chosen = [
        span
        for span in spans
        if nodes[span[0]] in opened or ((few or named & {*span}) and nodes[span[0]] not in shut)
    ]
    many = max(1, sum(map(len, chosen)))
    high = 1 if few else max(1, min(round(12 * len(spans) / HEIGHT), round(0.7 * len(spans) / many)))
    rows = []
    for span in spans:
        if span in chosen:
            rows += [_single(heat, index)._replace(first=index == span[0], height=high) for index in span]
        else:
            node = nodes[span[0]]
            rows.append(HeatRow(span, f"worst of {node}", node, first=True))
    return _marked(rows, named)


def by_cost(heat: StepColumns, named: set[int]) -> list[HeatRow]:
    """Return the rows by what they cost, the others of many as one."""
    order = np.argsort(-np.nan_to_num(excess(heat.z), nan=-1.0), kind="stable").tolist()
    if len(order) <= _MOST_ROWS:
        return _marked([_single(heat, index)._replace(first=True) for index in order], named)
    worst = [_single(heat, index)._replace(first=True) for index in order[:_WORST]]
    rest = order[_WORST:]
    kind = "node" if heat.by == "node" else "rank"
    others = HeatRow(sorted(rest), f"worst of {text.count(len(rest), f'other {kind}')}", "others", first=True)
    return _marked([*worst, others], named)


def worst(heat: StepColumns, rows: Sequence[HeatRow]) -> UInt8:
    """Return the levels of each row, those of its worst line: (rows, C)."""
    z = heat.z + np.uint8(1)  # what is missing is 255, and now 0: less than any other
    levels: UInt8 = np.array([z[np.asarray(row.lines)].max(axis=0) for row in rows]) - np.uint8(1)
    return levels


def _single(heat: StepColumns, index: int) -> HeatRow:
    rank, node = heat.ranks[index], heat.nodes[index]
    return (
        HeatRow((index,), node, node)
        if heat.by == "node"
        else HeatRow((index,), f"rank {rank} ({node})", node, rank)
    )


def _marked(rows: Sequence[HeatRow], named: set[int]) -> list[HeatRow]:
    return [row._replace(named=len(row.lines) == 1 and row.lines[0] in named) for row in rows]
