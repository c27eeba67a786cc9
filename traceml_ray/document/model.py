"""
The document that people read about a session, independent of where and how it is shown: sentences, tables,
lines, drawings, numbers and gauges. `text`, `html`, `terminal` and the web app's components render it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from traceml_ray import text
from traceml_ray.document.drawing import Bar, Box, HeatRow
from traceml_ray.document.step_clock import StepClock

Array = np.ndarray[Any, Any]


SIGNS = {"critical": "◆", "warning": "▲", "notice": "△", "info": "●"}
"""Signs of severities. Every renderer shows them, so that colour is never the only mark."""


ColumnUnit = Literal[
    "words", "name", "code", "sentence", "date", "clock", "ranks", "line",
    "figures", "plain", "number", "value", "count", "whole", "aligned", "three digits",
    "more of three digits", "ms", "size", "factor", "percent", "more", "share", "duration", "age",
    "known figures", "known plain", "known value", "known aligned", "known three digits", "known size",
    "known ms", "known duration", "known percent",
]  # fmt: skip
"""
Units of the values of a column. Those of the first line are text, aligned to the left, and lines (numbers by
step), which a renderer that cannot draw leaves out. `date` is a moment in the timezone of the renderer.
`figures` are already formatted. `known` values are left empty if they are not known, instead of "n/a".
"""
_WRITTEN: dict[str, Callable[[Any], str]] = {
    "words": lambda value: "" if value is None else str(value),
    "name": text.plain,
    "code": text.plain,
    "sentence": lambda value: (value or "").replace("`", ""),
    "line": lambda _: "",
    "date": text.date,
    "clock": text.clock,
    "ranks": text.ranges,
    "figures": lambda value: "" if value is None else str(value),
    "plain": text.plain,
    "number": text.number,
    "value": text.value,
    "count": lambda value: f"{value:,}",
    "whole": lambda value: text.number(value, 0),
    "aligned": lambda value: text.number(value, aligned=True),
    "three digits": lambda value: text.number(value, 3),
    "more of three digits": lambda value: text.number(value, 3, sign=True),
    "ms": text.ms,
    "size": text.size,
    "factor": text.times,
    "percent": text.percent,
    "more": lambda value: text.percent(value, sign=True),
    "share": text.share,
    "duration": text.duration,
    "age": text.age,
}
_LEFT = "words", "name", "code", "sentence", "date", "clock", "ranks", "line"
Link = tuple[str, Any]
"""
Target of a link: kind of the page (`rank`, `node`, `step`, `profile`, or the page of a
signal), and its item.
"""


@dataclass(frozen=True)
class Column:
    """A column of a table: the value that it shows of an item, and the unit."""

    name: str
    value: Callable[[Any], Any]
    """Returns the value of an item, a number or a text by which rows are sorted; None: not known."""
    unit: ColumnUnit = "words"
    written: Callable[[Any], str] | None = None
    """Returns the text of an item; None: the value is formatted by its unit."""
    tone: Callable[[Any], str] | None = None
    """Returns the severity of an item's value; "": none. A renderer shows it by sign and colour."""
    link: Callable[[Any], Link | None] | None = None
    """Returns the target of an item's link, for a renderer with pages."""
    scale: tuple[float, float] | None = None
    """Ends of the scale of lines; None: the lines of a table share a scale that fits them all."""

    def cell(self, item: Any) -> str:
        """Return the text of an item's cell."""
        if self.written:
            return self.written(item)
        value = self.value(item)
        known = self.unit.startswith("known ")
        return "" if known and value is None else _WRITTEN[self.unit.removeprefix("known ")](value)

    def head(self) -> str:
        """Return the head of the column: its name. For moments, it includes the timezone."""
        return f"{self.name} ({text.zone()})" if self.unit == "date" else self.name

    @property
    def number(self) -> bool:
        """Whether the values are numbers, which are aligned to the right."""
        return self.unit not in _LEFT


class Table(NamedTuple):
    """A titled table with a row for each item, and a note below it."""

    title: str
    columns: Sequence[Column]
    items: Sequence[Any]
    note: str = ""
    empty: str = ""
    """Text that a page shows if the table has no items. A report leaves out an empty table."""
    badness: Callable[[Any], Any] | None = None
    """
    Returns a sort key of an item, larger for worse items. A person may sort by it. None: the items have a
    fixed order.
    """
    spare: Sequence[str] = ()
    """Names of the columns that a narrow renderer leaves out, in the order in which they are left out."""

    def worst_first(self) -> Sequence[Any]:
        """Return the items, the worst first; in their order if it is fixed."""
        return self.items if self.badness is None else sorted(self.items, key=self.badness, reverse=True)

    def cells(self) -> tuple[list[Column], list[list[str]]]:
        """Return the columns that are not empty, and the cells of each row."""
        rows = [[column.cell(item) for column in self.columns] for item in self.items]
        kept = [index for index in range(len(self.columns)) if any(row[index] for row in rows)]
        return [self.columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


def picked(columns: Iterable[Column], *names: str) -> list[Column]:
    """Return the columns with these names, in the order of the names."""
    return [column for name in names for column in columns if column.name == name]


class Facts:
    """
    Pairs (label, text). Pairs without a text are left out. A pair without a label
    continues the previous one.
    """

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = [pair for pair in pairs if pair[1]]

    @classmethod
    def listed(cls, label: str, sentences: Iterable[str]) -> Facts:
        """Return sentences as facts under one label."""
        return cls(*((label if not number else "", sentence) for number, sentence in enumerate(sentences)))


class Lines(NamedTuple):
    """Lines as they were printed, with a title. Each line has a mark before it."""

    title: str
    lines: Sequence[tuple[str, str]]
    """Pairs of mark and text."""


class Line(NamedTuple):
    """A line of a chart: its value in each column, and its colour."""

    name: str
    values: Array
    colour: str


class StepChart(NamedTuple):
    """Lines over the steps of a run, in ms, on one scale."""

    label: str
    first: Array
    """First step of each column: (C,). `last` is the last step of each."""
    last: Array
    lines: Sequence[Line]
    stacked: bool = False
    """Whether each line is stacked on the previous one, as an area."""
    band: tuple[str, Array, Array] | None = None
    """Name, lower edge and upper edge of a band around the lines."""
    onset: int | None = None
    """Step at which the named cause began; None: none."""
    clock: StepClock | None = None
    """When steps were over; None: not known."""


class Heat(NamedTuple):
    """Heatmap of ranks, or nodes, by step."""

    label: str
    first: Array
    """First step of each column: (C,). `last` is the last step of each."""
    last: Array
    rows: Sequence[HeatRow]
    levels: Array
    """Level of each cell (`spread.deviations`): (rows, C) uint8."""
    clock: StepClock | None = None
    """When steps were over; None: not known."""


class Bars(NamedTuple):
    """Bars in a sequence, each beginning where the previous one ends, with their numbers as a table."""

    label: str
    bars: Sequence[Bar]
    table: Table


class Segment(NamedTuple):
    """A part of a strip: where it begins and how long it is, in the unit of its strip."""

    name: str
    """Name of its colour in the legend."""
    base: float
    width: float
    colour: str
    title: str
    """Text for a person who points at it."""


class Strip(NamedTuple):
    """A horizontal bar, divided into segments."""

    name: str
    segments: Sequence[Segment]
    length: float
    """Length of the whole bar, in the unit of the segments."""
    ends: tuple[str, str] = ("", "")
    """Texts below its begin and its end."""


class Strips(NamedTuple):
    """Strips, one below the other, with a common legend. Their numbers are in a table beside them."""

    label: str
    strips: Sequence[Strip]

    def legend(self) -> dict[str, str]:
        """Return the colour of each name, in the order of the segments."""
        return {part.name: part.colour for strip in self.strips for part in strip.segments}


class Boxes(NamedTuple):
    """Nested boxes. Each is above the boxes inside it."""

    label: str
    boxes: Sequence[Box]


class OverlaidLine(NamedTuple):
    """The line of one of several runs, with its own x positions."""

    name: str
    x: Array
    """Positions, ascending: (n,) steps, or seconds since the first step."""
    values: Array
    """Values: (n,), all finite."""
    colour: str
    dash: str
    """Name of the dash pattern, one of `drawing.DASHES`."""


class Overlay(NamedTuple):
    """A chart with the lines of several runs."""

    label: str
    unit: str
    """Unit of the values; "": no unit."""
    lines: Mapping[str, Sequence[OverlaidLine]]
    """Lines by x axis: `step`, and `time` since the first step of each run."""
    from_zero: bool = False
    """Whether the scale begins at 0."""


Drawing = StepChart | Heat | Bars | Strips | Boxes | Overlay
Block = Facts | Table | Lines | Drawing
"""A block of a section. A renderer that cannot draw leaves out drawings."""


@dataclass(frozen=True)
class Number:
    """
    A number of a run, with its line by step. If several have the same `key`, the last one counts, so that a
    signal may replace a number of the steps with a better one.
    """

    key: str
    label: str
    value: float | None
    unit: str
    about: str = ""
    """What the number covers; "": the same steps as the other numbers."""
    line: Array = field(default_factory=lambda: np.empty(0))
    """Values by step: (C,); empty if there are none."""
    title: str = ""
    """Further text, shown if there is room."""
    short: tuple[str, str] | None = None
    """Name and value for a single line of all numbers; None: the number is not in that line."""
    after: str = ""
    """Key of the number that this one follows; "": it is one of the last."""

    def written(self, value: float | None) -> str:
        """Return the formatted value without its unit. A value without a unit may have any size: "3e−05"."""
        return text.number(value) if self.unit else text.value(value)


@dataclass(frozen=True)
class Gauge:
    """A gauge of `/metrics`, in base units; see `dash_app.metrics`."""

    name: str
    about: str
    series: Sequence[tuple[Sequence[object], float | None]]
    """Pairs of label values and number. Unknown numbers are left out."""
    labels: Sequence[str] = ()
    """Names of the labels, after the label of the run."""
    unit: str = ""


class RankColumn(NamedTuple):
    """A number for each rank, for the tables of ranks."""

    name: str
    unit: ColumnUnit
    values: Mapping[int, float | None]


@dataclass(frozen=True)
class Section:
    """Blocks and numbers that belong together."""

    place: Literal["model", "steps", "tables", "ranks", "failure"] = "steps"
    """
    Place of the section in a report: about the model, beside the steps, with the tables of steps, with those
    of ranks, or beside a failure.
    """
    blocks: Sequence[Block] = ()
    title: str = ""
    """Title of the section's frame; "": the title of its table."""
    half: bool = False
    """Whether half the width of a page is enough."""
    numbers: Sequence[Number] = ()
    per_rank: Sequence[RankColumn] = ()
    gauges: Sequence[Gauge] = ()


def per_rank_columns(sections: Iterable[Section], rank_of: Callable[[Any], int]) -> list[Column]:
    """Return the rank numbers of sections as columns, for items whose rank `rank_of` returns."""

    def column(one: RankColumn) -> Column:
        return Column(one.name, lambda item: one.values.get(rank_of(item)), one.unit)

    return [column(one) for section in sections for one in section.per_rank if one.values]
