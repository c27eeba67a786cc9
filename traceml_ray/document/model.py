"""
What people read of a session, with no word of where or how: sentences, tables, lines, drawings, numbers and
gauges. `text`, `html`, `terminal` and the web app's components render it.
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
"""Signs of severities: no face shows them by colour alone."""


ColumnUnit = Literal[
    "words", "name", "code", "sentence", "date", "clock", "ranks", "line",
    "figures", "plain", "number", "value", "count", "whole", "aligned", "three digits",
    "more of three digits", "ms", "size", "factor", "percent", "more", "share", "duration", "age",
    "known figures", "known plain", "known value", "known aligned", "known three digits", "known size",
    "known ms", "known duration", "known percent",
]  # fmt: skip
"""
What the values of a column are: of the first line text, which stands at the left, and lines (numbers by
step), which a face that cannot draw leaves out. `date` is a moment in the timezone of the face. `figures` are
written already; of what is `known` nothing is written where it is not known, in place of "n/a".
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
"""What has a page (a `rank`, `node`, `step`, `profile`, or the page of a signal), and which."""


@dataclass(frozen=True)
class Column:
    """A column of a table: what it has of an item, and its unit."""

    name: str
    value: Callable[[Any], Any]
    """A number or a text, by which rows are sorted; None: not known."""
    unit: ColumnUnit = "words"
    written: Callable[[Any], str] | None = None
    """What is written of an item; None: its value, by the unit."""
    tone: Callable[[Any], str] | None = None
    """How bad an item's value is (a severity); "": not at all. A face shows it by sign and colour."""
    link: Callable[[Any], Link | None] | None = None
    """What an item's value leads to, on a face that has pages."""
    scale: tuple[float, float] | None = None
    """Ends of the scale of lines; None: the lines of a table share one that holds them all."""

    def cell(self, item: Any) -> str:
        """Return what is written of an item."""
        if self.written:
            return self.written(item)
        value = self.value(item)
        known = self.unit.startswith("known ")
        return "" if known and value is None else _WRITTEN[self.unit.removeprefix("known ")](value)

    def head(self) -> str:
        """Return what is above it: its name, of moments with the timezone that they are shown in."""
        return f"{self.name} ({text.zone()})" if self.unit == "date" else self.name

    @property
    def number(self) -> bool:
        """Whether its values are numbers, which stand at the right."""
        return self.unit not in _LEFT


class Table(NamedTuple):
    """A titled table with a row for each item, and a note below it."""

    title: str
    columns: Sequence[Column]
    items: Sequence[Any]
    note: str = ""
    empty: str = ""
    """What a page says in its place where there is no item; a report has no empty table."""
    badness: Callable[[Any], Any] | None = None
    """
    How bad an item is, by a number or what is sorted like one, where a person may have the worst items first;
    None: they have one order.
    """
    spare: Sequence[str] = ()
    """Names of the columns that a narrow face leaves out, the first of them first."""

    def cells(self) -> tuple[list[Column], list[list[str]]]:
        """Return the columns, without those that stay empty, and the cells of each row."""
        rows = [[column.cell(item) for column in self.columns] for item in self.items]
        kept = [index for index in range(len(self.columns)) if any(row[index] for row in rows)]
        return [self.columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


def picked(columns: Iterable[Column], *names: str) -> list[Column]:
    """Return the columns of these names, in their order."""
    return [column for name in names for column in columns if column.name == name]


class Facts:
    """(label, text) pairs, those without a text left out. One without a label goes on with that before."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = [pair for pair in pairs if pair[1]]

    @classmethod
    def listed(cls, label: str, sentences: Iterable[str]) -> Facts:
        """Return sentences under one label."""
        return cls(*((label if not number else "", sentence) for number, sentence in enumerate(sentences)))


class Lines(NamedTuple):
    """Lines as they were printed, with a title, and with a mark before each."""

    title: str
    lines: Sequence[tuple[str, str]]
    """Mark and text."""


class Line(NamedTuple):
    """A line of a chart: its values by column, and its colour."""

    name: str
    values: Array
    colour: str


class StepChart(NamedTuple):
    """Lines over the steps of a run, ms, on one scale."""

    label: str
    first: Array
    """First and last step of each column, (C,) each."""
    last: Array
    lines: Sequence[Line]
    stacked: bool = False
    """Whether each line lies on the one before, as an area."""
    band: tuple[str, Array, Array] | None = None
    """Name, lower and upper edge of what lies around the lines."""
    onset: int | None = None
    """Step at which what the verdict names began."""
    clock: StepClock | None = None
    """When steps were over; None: not known."""


class Heat(NamedTuple):
    """Ranks, or nodes, by step."""

    label: str
    first: Array
    """First and last step of each column, (C,) each."""
    last: Array
    rows: Sequence[HeatRow]
    levels: Array
    """Of each row (`spread.deviations`), (rows, C) uint8."""
    clock: StepClock | None = None
    """When steps were over; None: not known."""


class Bars(NamedTuple):
    """Bars that begin where the one before ends, with their numbers as a table."""

    label: str
    bars: Sequence[Bar]
    table: Table


class Boxes(NamedTuple):
    """Boxes, each above those that are inside it."""

    label: str
    boxes: Sequence[Box]


class OverlaidLine(NamedTuple):
    """The line of one of several runs, with places of its own."""

    name: str
    x: Array
    """(n,), ascending: steps, or seconds since the first step."""
    values: Array
    """(n,), all finite."""
    colour: str
    dash: str
    """One of `drawing.DASHES`."""


class Overlay(NamedTuple):
    """Lines of several runs over each other."""

    label: str
    unit: str
    """Unit of the values; "": they have none."""
    lines: Mapping[str, Sequence[OverlaidLine]]
    """By what they are drawn over: `step`, and `time`: since the first step of each run."""
    from_zero: bool = False
    """Whether the scale begins at 0."""


Drawing = StepChart | Heat | Bars | Boxes | Overlay
Block = Facts | Table | Lines | Drawing
"""A face that cannot draw leaves out drawings."""


@dataclass(frozen=True)
class Number:
    """
    A number of a run, with its line by step. Of several with the same `key` the last counts: a signal may put
    a better one in the place of that of the steps.
    """

    key: str
    label: str
    value: float | None
    unit: str
    about: str = ""
    """What it is of; "": of the steps that the other numbers are of."""
    line: Array = field(default_factory=lambda: np.empty(0))
    """By step, (C,); empty where it has none."""
    title: str = ""
    """More about it, where there is room."""
    short: tuple[str, str] | None = None
    """Name and value where there is one line for all; None: it is not there."""
    after: str = ""
    """Key of the number that it follows; "": it is one of the last."""

    def written(self, value: float | None) -> str:
        """Return a value of it without its unit; one without a unit may be of any size: "3e−05"."""
        return text.number(value) if self.unit else text.value(value)


@dataclass(frozen=True)
class Gauge:
    """A number as `/metrics` has it, in base units; see `dash_app.metrics`."""

    name: str
    about: str
    series: Sequence[tuple[Sequence[object], float | None]]
    """Values of the labels, and the number; one that is not known is left out."""
    labels: Sequence[str] = ()
    """Names of the labels, after that of the run."""
    unit: str = ""


class RankColumn(NamedTuple):
    """A number of each rank, as tables of ranks have it."""

    name: str
    unit: ColumnUnit
    values: Mapping[int, float | None]


@dataclass(frozen=True)
class Section:
    """What belongs together."""

    place: Literal["model", "steps", "tables", "ranks", "failure"] = "steps"
    """
    Where a report has it: about the model, beside the steps, with their tables, with those of ranks, or
    beside a failure.
    """
    blocks: Sequence[Block] = ()
    title: str = ""
    """Its name where it is framed; "": that of its table."""
    half: bool = False
    """Whether half the width of a page is enough."""
    numbers: Sequence[Number] = ()
    per_rank: Sequence[RankColumn] = ()
    gauges: Sequence[Gauge] = ()


def per_rank_columns(sections: Iterable[Section], rank_of: Callable[[Any], int]) -> list[Column]:
    """Return what sections know of each rank as columns, of items whose rank `rank_of` returns."""

    def column(one: RankColumn) -> Column:
        return Column(one.name, lambda item: one.values.get(rank_of(item)), one.unit)

    return [column(one) for section in sections for one in section.per_rank if one.values]
