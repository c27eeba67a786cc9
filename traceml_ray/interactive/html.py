"""
HTML of a session and its tables for notebooks. It has no script, and works on light and
dark backgrounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from traceml_ray import document, interactive, text
from traceml_ray.document.elements import Content, Markup, grid, tag
from traceml_ray.document.html import section
from traceml_ray.document.model import Column, Table
from traceml_ray.document.timezone import timezone_of
from traceml_ray.interactive.frames import TIMES
from traceml_ray.reports.document import SECTIONS, ChartData
from traceml_ray.reports.page import verdict_box
from traceml_ray.reports.run_facts import moment

_CLASS = "traceml-ray"
_SHOWN, _CELL = 20, 120
"""Largest number of rows of a table, and of characters of a cell, in a notebook."""
_PARTS = "numbers", "by rank"


def page_of_session(chart_data: ChartData, heading: str) -> str:
    """Return the verdict, the numbers and the heatmap of a session as HTML."""
    with timezone_of("UTC"):  # as all moments of a report
        sections = [section(made) for part in _PARTS for made in SECTIONS[part](chart_data)]
    return _page(tag("p", heading, cls="hint"), verdict_box(chart_data), sections)


def page_of_table(columns: Mapping[str, Sequence[Any]], rows: int, about: str = "") -> str:
    """Return the first rows of a table as HTML. `about` describes the table."""
    shown = range(min(rows, _SHOWN))
    made = [_column(name, values) for name, values in columns.items()]
    left = f" {text.count(len(shown), 'row')} of {rows:,} shown." if rows > len(shown) else ""
    note = f"{about or text.count(rows, 'row')}.{left} .to_pandas() has all rows."
    return _page(grid(Table(note, made, shown)), tag("p", note, cls="hint"))


def _column(name: str, values: Sequence[Any]) -> Column:
    """Return a column of a table; moments are written as dates in UTC."""
    if name in TIMES:
        shown = [None if value is None else text.date(moment(int(value))) for value in values[:_SHOWN]]
        return Column(TIMES[name], lambda index: shown[index] or "", "date")
    first = next((value for value in values[:_SHOWN] if value is not None), None)
    numeric = isinstance(first, (int, float, np.number)) and not isinstance(first, bool)
    return Column(name, lambda index: _cell(values[index]), "figures" if numeric else "words")


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float):
        return text.number(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
        return text.ranges(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))[:_CELL]
    return ("" if value == {} else str(value))[:_CELL]


def _page(*content: Content) -> str:
    return str(tag("div", tag("style", style()), *content, cls=_CLASS))


@cache
def style() -> Markup:
    """Return the report's style sheet, limited to this HTML. The notebook keeps its own style."""
    report = resources.files(document).joinpath("report.css").read_text("utf-8")
    ours = resources.files(interactive).joinpath("notebook.css").read_text("utf-8")
    return Markup("\n".join([*scoped(report, f".{_CLASS}"), ours]))


def scoped(sheet: str, box: str) -> Iterable[str]:
    """
    Yield the rules of a style sheet, limited to elements inside `box`. Rules for the page and for printing
    are left out.
    """
    for name, body in re.findall(r"([^{}]+)\{((?:[^{}]|\{[^{}]*\})*)\}", sheet):
        selector = re.sub(r"/\*.*?\*/", "", name, flags=re.S).strip()
        if selector.startswith("@media (max-width"):
            yield f"{selector} {{ {' '.join(scoped(body, box))} }}"
        elif not selector.startswith("@") and selector not in (":root", "body", "*"):
            inside = ", ".join(f"{box} {one.strip()}" for one in selector.split(","))
            yield f"{inside} {{{body}}}"
