"""Renders the sections of a document as HTML without scripts."""

from __future__ import annotations

from traceml_ray.document.elements import CELL, NOTHING, Content, Markup, grid, join, sentence, tag
from traceml_ray.document.model import Drawing, Facts, Lines, Section, Table
from traceml_ray.document.svg import drawn, kpis
from traceml_ray.document.text import shortened

_MOST_LINES = 4
"""Largest number of ranks whose lines are shown."""
_LINES, _LINE = 60, 300
"""Largest number of lines of a traceback, a stack or a rank's printed output, and of characters of a line."""


def section(content: Section, most: int | None = None) -> Markup:
    """
    Return a section as HTML: its numbers, a titled box for its facts, lines and drawings, and one for each
    table. At most `most` rows of a table are shown.
    """
    shown = kpis(content.numbers) if content.numbers else NOTHING
    alone = () if content.title else [block for block in content.blocks if isinstance(block, Lines)]
    boxed = [_block(block) for block in content.blocks if block not in alone and not isinstance(block, Table)]
    tables = [block for block in content.blocks if isinstance(block, Table) and (block.items or block.note)]
    return join(
        shown,
        panel(content.title, boxed, half=content.half),
        (panel(one.title, _lines(one._replace(title=""))) for one in alone[:_MOST_LINES]),
        (panel(_title(content, one), _table(one, most), half=content.half) for one in tables),
    )


def _title(content: Section, table: Table) -> str:
    """Return the title of a table. If the table is the section's only content, it is the section's title."""
    return content.title if content.title and len(content.blocks) == 1 else table.title


def panel(title: str, *body: Content, half: bool = False) -> Markup:
    """Return a titled box; empty if it has no content."""
    inside = join(*body)
    if not inside:
        return NOTHING
    return tag("section", tag("h2", title), inside, cls="panel" if half else "panel wide")


def _block(block: Facts | Lines | Drawing) -> Markup:
    if isinstance(block, Facts):
        return _facts(block)
    if isinstance(block, Lines):
        return _lines(block)
    return drawn(block)


def _facts(block: Facts) -> Markup:
    """Return facts as a list of labels and texts."""
    named: list[tuple[str, list[Markup]]] = []
    for name, value in block.pairs:
        if name or not named:
            named.append((name, []))
        named[-1][1].append(tag("dd", sentence(shortened(value, 4 * CELL))))
    entries = (tag("div", tag("dt", name), values) for name, values in named)
    return tag("dl", entries, cls="facts") if named else NOTHING


def _lines(block: Lines) -> Markup:
    """Return printed lines unchanged. If there are many, only the last ones; of a long line, only its end."""
    marked = [f"{mark}  {line}" if mark else line for mark, line in block.lines[-_LINES:]]
    kept = [line if len(line) <= _LINE else f"…{line[1 - _LINE :]}" for line in marked]
    return join(
        tag("h3", sentence(block.title)) if block.title else None,
        tag("pre", "\n".join(kept), tabindex=0) if kept else None,
    )


def _table(block: Table, most: int | None) -> Markup:
    rows = block._replace(items=block.items[:most])
    left = len(block.items) - len(rows.items)
    more = f"{left:,} more are in report.txt or summary.json." if left else ""
    return join(grid(rows), (tag("p", note, cls="hint") for note in (block.note, more) if note))
