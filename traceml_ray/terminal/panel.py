"""A snapshot as lines: `panel` for a window, `line` for a log."""

from __future__ import annotations

from rich.text import Text

from traceml_ray import text

from . import sections
from .lines import QUIET, Section, framed
from .panes import DRAWN, rank_pane
from .snapshot import PANES, Choice, Snapshot

_VERDICT, _BRIEF = 12, 4
"""Lines that the verdict may have: on the overview, on other panes."""


def panel(
    of: Snapshot, choice: Choice, width: int, height: int | None, foot: str | None = None
) -> list[Text]:
    """
    Return what is known in lines of `width` cells, exactly `height` of them; None: as many as it needs.

    Args:
        of: what is known.
        choice: the pane that is shown, and how.
        width: cells of a line.
        height: lines.
        foot: what stands in the lowest line; None: the keys.
    """
    inner = width - 4
    if choice.rank is not None:
        body = rank_pane(of, choice, inner)
    elif choice.pane in DRAWN:
        body = DRAWN[choice.pane](of, choice, inner)
    else:
        body = _overview(of, choice, inner)
    overview = choice.pane == PANES[0] and choice.rank is None
    parts = [sections.verdict(of, inner, _VERDICT if overview else _BRIEF), *body]
    below = _keys(choice, inner) if foot is None else Text(foot)
    return framed(sections.title_of(of), sections.head(of, inner), parts, below, width, height)


def _overview(of: Snapshot, choice: Choice, width: int) -> list[Section]:
    failed = [sections.output(of, width)] if of.tone == "critical" else []
    return [
        *failed,
        sections.node_summary(of, width),
        sections.rank_grid(of, width, choice),
        sections.exposed(of, width),
        sections.health(of, width),
        sections.memory(of, width),
        sections.events(of, width),
    ]


def _keys(choice: Choice, width: int) -> Text:
    """Return the panes with their keys, the one that is shown in brackets, and what other keys have room."""
    found = Text()
    for at, name in enumerate(PANES, 1):
        shown = name == choice.pane and choice.rank is None
        found.append(f"[{at} {name}] " if shown else f"{at} {name} ", "bold" if shown else QUIET)
    room = width - 1 - found.cell_len
    more = next((more for more in ("? help q quit", "? help") if len(more) < room), "?")
    return found.append(more, QUIET)


def line(of: Snapshot, clock: str) -> str:
    """Return what is known in one line, as a log has it."""
    times = of.times or {}
    parts = [
        f"{clock} {of.badge}",
        f"step {of.step:,}" if of.step is not None else "",
        f"median {text.ms(times.get('median_ms'))}" if times.get("steps") else "",
        f"skew {text.percent(times.get('skew_pct'))}" if times.get("steps") else "",
        *(f"{name.lower()} {value}" for name, value in sections.rates(of).items()),
        f"{of.sign} {of.first.headline}" if of.first and of.first.subject != "steps" else "",
        sections.headline(of.verdict) if of.verdict else of.state_text,
        of.verdict["cost"] if of.verdict else "",
        of.coverage,
        of.state_text if of.state == "stale" else "",
    ]
    return "  ".join(map(text.one_line, filter(None, parts)))
