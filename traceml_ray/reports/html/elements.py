"""Elements of HTML as text. What is not made here is text of a session, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from traceml_ray import text
from traceml_ray.reports.layout import Facts, Table, shortened
from traceml_ray.text import one_line

_CELL = 240
_VOID = {"meta", "img", "path", "rect", "line", "image", "stop"}


class Markup(str):
    """Text that is HTML already. Only `tag` and `join` make it."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[str | None] | None"
NOTHING = Markup("")


def tag(name: str, *content: Content, **attributes: object) -> Markup:
    """
    Return an element. Text inside is escaped unless it is `Markup`; an attribute that is None or False is
    left out. `cls` is `class`, and `_` in a name is `-`, at its end nothing.
    """
    shown = []
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
            shown.append(f" {key}" if value is True else f' {key}="{escape(_legal(str(value)))}"')
    if name in _VOID:
        return Markup(f"<{name}{''.join(shown)}/>")
    return Markup(f"<{name}{''.join(shown)}>{join(*content)}</{name}>")


def join(*content: Content) -> Markup:
    """Return contents after each other."""
    return Markup("".join(_inside(part) for part in content))


def _inside(content: Content) -> str:
    if content is None or isinstance(content, Markup):
        return content or ""
    if isinstance(content, str):
        return escape(_legal(content))
    return "".join(map(_inside, content))


def _legal(given: str) -> str:
    """Return text without what cannot be in a file of HTML: half characters, controls."""
    return "".join(c if c.isprintable() or c in "\n\t" else one_line(c) for c in given)


def sentence(text_line: str) -> Markup:
    """Return a sentence with what is in backticks as code, and its moments (ISO 8601) as people write."""
    parts = enumerate(text.with_dates(text_line).split("`"))
    return join(tag("code", part) if number % 2 else part for number, part in parts)


def panel(title: str, *body: Content, wide: bool = False) -> Markup:
    """Return a titled box; nothing where it is empty."""
    inside = join(*body)
    if not inside:
        return NOTHING
    return tag("section", tag("h2", title), inside, cls="panel wide" if wide else "panel")


def facts(block: Facts) -> Markup:
    """Return names with what is to be said of each."""
    if not block.pairs:
        return NOTHING
    named: list[tuple[str, list[Markup]]] = []
    for name, value in block.pairs:
        if name or not named:
            named.append((name, []))
        named[-1][1].append(tag("dd", sentence(shortened(value, 4 * _CELL))))
    return tag("dl", (tag("div", tag("dt", name), values) for name, values in named), cls="facts")


def table(block: Table, most: int | None = None) -> Markup:
    """Return a table without its title, of at most `most` rows; nothing without any."""
    rows = block._replace(items=block.items[:most]).cells()
    left = len(block.items) - len(rows)
    more = f"{left:,} more are in report.txt or summary.json." if left else ""
    notes = [tag("p", note, cls="hint") for note in (block.note, more) if note]
    return join(grid(block.title, rows), notes)


def grid(label: str, rows: list[dict[str, str]]) -> Markup:
    """Return rows of cells by header; a header that begins with `>` is that of a column of numbers."""
    if not rows:
        return NOTHING
    kind = {header: "num" if header.startswith(">") else None for header in rows[0]}
    head = tag("tr", (tag("th", h.lstrip(">"), scope="col", cls=cls) for h, cls in kind.items()))
    body = (
        tag("tr", (tag("td", shortened(row[h], _CELL), cls=cls) for h, cls in kind.items())) for row in rows
    )
    inside = tag("table", tag("caption", label, cls="unseen"), tag("thead", head), tag("tbody", body))
    return tag("div", inside, cls="scroll", tabindex=0, role="region", aria_label=label)


def block(title: str, content: Table, most: int | None = None, *, wide: bool = False) -> Markup:
    """Return a table in a box; nothing without any row."""
    rows = table(content, most)
    return panel(title or content.title, rows, wide=wide) if content.items or content.note else NOTHING
