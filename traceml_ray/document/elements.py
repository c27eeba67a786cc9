"""HTML elements as text. Everything that is not made here is text of a session, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import repeat
from typing import TypeAlias

from traceml_ray import text
from traceml_ray.document.model import SIGNS, Column, Table
from traceml_ray.document.text import shortened
from traceml_ray.text import one_line

CELL = 240
"""Largest number of characters of a cell."""
_VOID = {"meta", "img", "path", "rect", "line", "image", "stop", "input"}


class Markup(str):
    """Text that already is HTML. Only `tag` and `join` create it."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[str | None] | None"
NOTHING = Markup("")


def tag(name: str, *content: Content, **attributes: object) -> Markup:
    """
    Return an element. Its text is escaped unless it is `Markup`. An attribute that is None or False is left
    out. `cls` stands for `class`; `_` in a name becomes `-`, and is dropped at its end.
    """
    shown = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
            shown.append(f" {key}" if value is True else f' {key}="{escape(_legal(str(value)))}"')
    if name in _VOID and not content:
        return Markup(f"<{name}{''.join(shown)}/>")
    return Markup(f"<{name}{''.join(shown)}>{join(*content)}</{name}>")


def join(*content: Content) -> Markup:
    """Return the contents concatenated."""
    return Markup("".join(_inside(part) for part in content))


def _inside(content: Content) -> str:
    if content is None or isinstance(content, Markup):
        return content or ""
    if isinstance(content, str):
        return escape(_legal(content))
    return "".join(map(_inside, content))


def _legal(given: str) -> str:
    """Return text without the characters that HTML does not allow: surrogates and control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else one_line(c) for c in given)


def sentence(text_line: str) -> Markup:
    """
    Return a sentence as HTML: text in backticks becomes code, moments (ISO 8601) are
    written for people.
    """
    parts = enumerate(text_line.split("`"))
    return join(
        tag("code", text.with_dates(part)) if number % 2 else with_times(part) for number, part in parts
    )


def with_times(line: str) -> Markup:
    """Return a line with its moments (ISO 8601) as elements: "2023-11-14 22:13:25 UTC"."""
    pieces = enumerate(text.MOMENT.split(line))
    return join(moment_element(piece, named=True) if number % 2 else piece for number, piece in pieces)


def moment_element(moment: str, *, named: bool) -> Markup:
    """
    Return a moment (ISO 8601, UTC) as an element that report.js shows in the timezone of the reader:
    "2023-11-14 22:13:25"; if `named`, with the timezone.
    """
    shown = text.dated(moment) if named else text.date(moment)
    return tag("time", shown, datetime=moment, data_date="named" if named else "")


def grid(table: Table) -> Markup:
    """Return the rows of a table, without its title and note; empty if it has no rows."""
    columns, rows = table.cells()
    if not rows:
        return NOTHING
    styles = ["num" if column.number else None for column in columns]
    head = (
        tag("th", _head(column), scope="col", cls=cls) for column, cls in zip(columns, styles, strict=True)
    )
    body = (
        tag("tr", map(_cell, row, columns, styles, repeat(item)))
        for row, item in zip(rows, table.items, strict=True)
    )
    named = tag("caption", table.title, cls="unseen")
    inside = tag("table", named, tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", inside, cls="scroll", tabindex=0, role="region", aria_label=table.title)


def _head(column: Column) -> Markup:
    """Return the head of a column. A column of moments names the timezone."""
    if column.unit != "date":
        return join(column.head())
    return join(f"{column.name} (", tag("span", text.zone(), cls="zone"), ")")


def _cell(shown: str, column: Column, style: str | None, item: object) -> Markup:
    """Return a cell with its sign. In sentences, text in backticks becomes code."""
    tone = column.tone(item) if column.tone else ""
    sign = f"{SIGNS[tone]} " if tone in SIGNS else ""
    if column.unit == "sentence":
        return tag("td", sign, sentence(shortened(column.value(item) or "", 4 * CELL)), cls=style)
    moment = str(column.value(item)) if column.unit == "date" and not column.written else ""
    if text.MOMENT.fullmatch(moment):
        return tag("td", sign, moment_element(moment, named=False), cls=style)
    return tag("td", sign + shortened(shown, CELL), cls=style)
