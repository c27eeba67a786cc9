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
    snapshot: Snapshot, choice: Choice, width: int, height: int | None, foot: str | None = None
) -> list[Text]:
    """
    Return the whole screen as lines of `width` cells.

    Args:
        snapshot: the session's newest answers.
        choice: the pane to show, and how.
        width: cells per line.
        height: number of lines returned; None: as many as the content needs.
        foot: text of the lowest line; None: the list of keys.
    """
    inner = width - 4
    if choice.rank is not None:
        body = rank_pane(snapshot, choice, inner)
    elif choice.pane in DRAWN:
        body = DRAWN[choice.pane](snapshot, choice, inner)
    else:
        body = _overview(snapshot, choice, inner)
    overview = choice.pane == PANES[0] and choice.rank is None
    parts = [sections.verdict(snapshot, inner, _VERDICT if overview else _BRIEF), *body]
    below = _keys(choice, inner) if foot is None else Text(foot)
    return framed(sections.title_of(snapshot), sections.head(snapshot, inner), parts, below, width, height)


def _overview(snapshot: Snapshot, choice: Choice, width: int) -> list[Section]:
    failed = [sections.output(snapshot, width)] if snapshot.tone == "critical" else []
    return [
        *failed,
        sections.node_summary(snapshot, width),
        sections.rank_grid(snapshot, width, choice),
        sections.exposed(snapshot, width),
        sections.health(snapshot, width),
        sections.memory(snapshot, width),
        sections.events(snapshot, width),
    ]


def _keys(choice: Choice, width: int) -> Text:
    """Return the panes with their keys, the one that is shown in brackets, and what other keys have room."""
    tabs = Text()
    for number, name in enumerate(PANES, 1):
        shown = name == choice.pane and choice.rank is None
        tabs.append(f"[{number} {name}] " if shown else f"{number} {name} ", "bold" if shown else QUIET)
    room = width - 1 - tabs.cell_len
    more = next((more for more in ("? help q quit", "? help") if len(more) < room), "?")
    return tabs.append(more, QUIET)


def line(snapshot: Snapshot, clock: str) -> str:
    """Return what is known in one line, as a log has it."""
    times = snapshot.times or {}
    parts = [
        f"{clock} {snapshot.badge}",
        f"step {snapshot.step:,}" if snapshot.step is not None else "",
        f"median {text.ms(times.get('median_ms'))}" if times.get("steps") else "",
        f"skew {text.percent(times.get('skew_pct'))}" if times.get("steps") else "",
        *(f"{name.lower()} {value}" for name, value in sections.rates(snapshot).items()),
        f"{snapshot.sign} {snapshot.first.headline}"
        if snapshot.first and snapshot.first.subject != "steps"
        else "",
        sections.headline(snapshot.verdict) if snapshot.verdict else snapshot.state_text,
        snapshot.verdict["cost"] if snapshot.verdict else "",
        snapshot.coverage,
        snapshot.state_text if snapshot.state == "stale" else "",
    ]
    return "  ".join(map(text.one_line, filter(None, parts)))
