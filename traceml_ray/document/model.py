"""
What people read of a session, with no word of where or how: sentences, tables, lines, drawings, numbers and
gauges. `text`, `html`, `terminal` and the web app's components render it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from traceml_ray import text
from traceml_ray.document.drawing import Bar, Box, HeatRow

Array = np.ndarray[Any, Any]


class ColumnUnit(NamedTuple):
    """How the values of a column are written."""

    written: Callable[[Any], str]
    number: bool = True
    """Whether they are numbers, which stand at the right."""


WORDS = ColumnUnit(lambda value: "" if value is None else str(value), number=False)
FIGURES = ColumnUnit(WORDS.written)
"""Numbers that are written already."""
PLAIN = ColumnUnit(text.plain)
NUMBER = ColumnUnit(text.number)
ALIGNED = ColumnUnit(partial(text.number, aligned=True))
MS, SIZE, FACTOR = ColumnUnit(text.ms), ColumnUnit(text.size), ColumnUnit(text.times)
PERCENT, SHARE = ColumnUnit(text.percent), ColumnUnit(text.share)
OVER = ColumnUnit(partial(text.percent, sign=True))
DURATION, AGE = ColumnUnit(text.duration), ColumnUnit(text.age)
DATE, CLOCK = ColumnUnit(text.date, number=False), ColumnUnit(text.clock, number=False)
RANKS = ColumnUnit(text.ranges, number=False)


def known(unit: ColumnUnit) -> ColumnUnit:
    """Return a unit that writes nothing where a value is not known."""
    return unit._replace(written=lambda value: "" if value is None else unit.written(value))


@dataclass(frozen=True)
class Column:
    """A column of a table: what it has of an item, and its unit."""

    name: str
    value: Callable[[Any], Any]
    """A number or a text; None: not known."""
    unit: ColumnUnit = WORDS

    def cell(self, item: Any) -> str:
        """Return what is written of an item."""
        return self.unit.written(self.value(item))


class Table(NamedTuple):
    """A titled table with a row for each item, and a note below it."""

    title: str
    columns: Sequence[Column]
    items: Sequence[Any]
    note: str = ""

    def cells(self) -> tuple[list[Column], list[list[str]]]:
        """Return the columns, without those that stay empty, and the cells of each row."""
        rows = [[column.cell(item) for column in self.columns] for item in self.items]
        kept = [index for index in range(len(self.columns)) if any(row[index] for row in rows)]
        return [self.columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


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


class Heat(NamedTuple):
    """Ranks, or nodes, by step."""

    label: str
    first: Array
    """First and last step of each column, (C,) each."""
    last: Array
    rows: Sequence[HeatRow]
    levels: Array
    """Of each row (`spread.deviations`), (rows, C) uint8."""


class Bars(NamedTuple):
    """Bars that begin where the one before ends, with their numbers as a table."""

    label: str
    bars: Sequence[Bar]
    table: Table


class Boxes(NamedTuple):
    """Boxes, each above those that are inside it."""

    label: str
    boxes: Sequence[Box]


Drawing = StepChart | Heat | Bars | Boxes
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
    per_rank: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By unit or name: the number of each rank."""
    gauges: Sequence[Gauge] = ()
