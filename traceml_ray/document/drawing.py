"""
The parts that the charts of all renderers share: colours, the ends of a scale, positions of lines and bars.

Also selects the rows of a rank × time heatmap: one per rank, or if there are many ranks, one per node that
shows its worst rank.
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
"""Dash patterns in SVG syntax: name → pattern."""
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
"""Ratios to the median that are marked below the scale."""
_NARROW = 0.002
"""Share of the model's time below which a layer gets no box in an icicle."""
_CHARS = 150
"""Number of characters that fit across an icicle."""
_DEPTHS = ("rgba(107,119,133,.35)", "rgba(59,111,196,.4)", "rgba(27,150,150,.4)")
"""Colours of boxes by depth."""
_FLAT = 0.25
"""Changes of a time by less than this share are drawn as small changes."""
_SPIKE = 3.0
"""A value this many times above the 98th percentile does not set the scale."""
Array = np.ndarray[Any, Any]


class Bar(NamedTuple):
    """A bar of a waterfall; times in ms."""

    name: str
    base: float
    width: float
    colour: str
    label: str


class Box(NamedTuple):
    """
    A layer in an icicle. It begins at `start`, is `width` wide (ms) and lies `depth`
    boxes below the model.
    """

    name: str
    label: str
    """Text that fits into the box."""
    depth: int
    start: float
    width: float
    colour: str


def css(colour: tuple[int, int, int, float]) -> str:
    """Return a colour in the syntax of style sheets and SVG."""
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
    """
    Return the end of a scale on which one slow first step does not flatten all other values; None: no end is
    needed.
    """
    values = values[np.isfinite(values)]
    usual = float(np.percentile(values, 98)) if len(values) else 0.0
    return 1.25 * usual if usual > 0 and values.max() > _SPIKE * usual else None


def time_scale(values: Array) -> tuple[float, float] | None:
    """
    Return the ends of a scale of times on which noise looks flat. It reaches from the smallest value to the
    largest one, or to the end that `cap` returns, and at least a quarter above the smallest. None if no value
    is known.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low = float(known.min())
    high = cap(known) or float(known.max())
    return low, max(high, (1 + _FLAT) * low)


def waterfall(before: Mapping[str, float], since: Mapping[str, float]) -> list[Bar]:
    """
    Return the bars of a step's time before and since the onset, with the change of each stage between them,
    ms.
    """
    total = sum(before.values()), sum(since.values())
    bars, bottom = [Bar("before", 0.0, total[0], GREY, text.ms(total[0]))], total[0]
    for stage in STAGES:
        change = since[stage] - before[stage]
        colour, label = ORANGE if change > 0 else BLUE, f"{text.number(change, sign=True)} ms"
        bars.append(Bar(stage, min(bottom, bottom + change), abs(change), colour, label))
        bottom += change
    return [*bars, Bar("since", 0.0, total[1], GREY, text.ms(total[1]))]


def stage_bars(stages: Mapping[str, float]) -> list[Bar]:
    """Return the bars of the stages of a step (ms). Each begins where the previous one ends."""
    bars, begin = list[Bar](), 0.0
    for stage in STAGES:
        bars.append(Bar(stage, begin, stages.get(stage, 0.0), STAGES[stage], text.ms(stages.get(stage, 0.0))))
        begin += stages.get(stage, 0.0)
    return bars


class Nested(Protocol):
    """A layer (`signals.layers.judge.Layer`), which may contain other layers."""

    @property
    def name(self) -> str:
        """Name of the layer; "" is the model itself."""

    @property
    def parent(self) -> int | None:
        """Index of the layer that contains this one."""

    @property
    def total_ms(self) -> float:
        """Time per step in the layer and in the layers inside it (ms)."""


def icicle(layers: Sequence[Nested], named: Collection[str | None]) -> list[Box]:
    """
    Return layers as boxes, in the order of the model. A layer inside another one is below it. The layers of
    `named` are ORANGE. Boxes too narrow to be seen are left out.
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
    """Return a sparkline as an SVG path; "" if fewer than two values are known."""
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
"""Height of all rows together if there are many, in px."""
_MOST_ROWS = 128
"""Largest number of ranks with a row each. With more, a row is too thin to be seen."""
_WORST = 40
"""Number of ranks with their own row if there are more, the costliest first."""
_MOST_GROUPS, _MOST_NAMED = 200, 8


class HeatRow(NamedTuple):
    """One row of a heatmap."""

    lines: Sequence[int]
    """Indices of the lines of `z` that the row shows. If there are several, the worst is drawn."""
    name: str
    """Full name of the row: "rank 5 (node-1)", "worst of node-1"."""
    node: str
    rank: int | None = None
    """Rank that the row shows; None: it shows several."""
    first: bool = False
    """Whether the row is the first of its node."""
    named: bool = False
    """Whether the verdict names the row's rank."""
    height: int = 1
    href: str | None = None
    """Target of a click, for a renderer with links."""
    toggle: str | None = None
    """Link that expands or collapses the row's node."""


def ordered(columns: StepColumns, absent: Mapping[int, str]) -> StepColumns:
    """
    Return the columns of a run with their lines in order of nodes and ranks. Each `absent` rank (rank → node)
    gets a line, unless lines are nodes.
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
    Return the rows by node. A node has one row per rank if it has few ranks, if one of them is `named`, or if
    a person has expanded it (`opened`); but not if it was collapsed (`shut`).
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
    """Return the rows in order of cost. If there are many, the others share one row."""
    order = np.argsort(-np.nan_to_num(excess(heat.z), nan=-1.0), kind="stable").tolist()
    if len(order) <= _MOST_ROWS:
        return _marked([_single(heat, index)._replace(first=True) for index in order], named)
    worst = [_single(heat, index)._replace(first=True) for index in order[:_WORST]]
    rest = order[_WORST:]
    kind = "node" if heat.by == "node" else "rank"
    others = HeatRow(sorted(rest), f"worst of {text.count(len(rest), f'other {kind}')}", "others", first=True)
    return _marked([*worst, others], named)


def worst(heat: StepColumns, rows: Sequence[HeatRow]) -> UInt8:
    """Return the levels of each row, taken from its worst line: (rows, C)."""
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
