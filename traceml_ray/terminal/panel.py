"""
Renders a snapshot as lines: `panel` for a window, `line` for a log.

The panes fill the window: nodes, ranks, one rank, signals by page, events, output, health, and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.text import Text

from traceml_ray import text
from traceml_ray.document.drawing import time_scale
from traceml_ray.document.model import SIGNS, Facts, Table, per_rank_columns, picked
from traceml_ray.document.terminal import (
    HEAD,
    QUIET,
    TONES,
    PaneSection,
    cell_of,
    cut,
    flow,
    framed,
    listed,
    paragraphs,
    section_panes,
    table,
    wrap,
)
from traceml_ray.reports.contents import sinks_table
from traceml_ray.reports.headlines import unsaid
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.views import PAGES, VIEWS, sections_of
from traceml_ray.terminal.sections import DRAWN_STEPS, events, of_steps, output, stages_of
from traceml_ray.views import health
from traceml_ray.views.ranks import badness, busy_lines, costs_of, evidence_of
from traceml_ray.views.state import OVER
from traceml_ray.views.tables import (
    ERRORS,
    EVENT,
    EVENTS,
    RANK_STATE,
    RELAYS,
    ledger_columns,
    node_columns,
    rank_columns,
    slowest_relays,
)

from . import sections
from .snapshot import PANES, Choice, PanelState

KEYS = {
    f"1 … {len(PANES)}, Tab": "panes",
    "↑ ↓ PgUp PgDn": "scroll",
    "s": "ranks, nodes and layers in their order, or the slowest first",
    "r 12 Enter": "one rank alone; Esc: back",
    "p, Space": "pause",
    "?": "these keys",
    "q, Ctrl-C": "quit",
}


def help_pane(_of: PanelState, _choice: Choice, width: int) -> list[PaneSection]:
    """Return the list of keys, and the meaning of the signs."""
    lines = table([[Text(keys, HEAD), about] for keys, about in KEYS.items()], width)
    lines += [
        Text(),
        *wrap(
            "◆ critical  ▲ warning, or named  △ notice, or the slowest rank  ● for your information", width
        ),
    ]
    about = "Times are of each rank's own work, without its waiting for others. n/a: not known."
    lines += wrap(about, width)
    return [PaneSection("KEYS", lambda most: lines[:most], len(lines))]


def nodes_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """
    Return all nodes: their times, the cost that the verdict assigns to them, and their present
    and past load.
    """
    evidence, costs = evidence_of(snapshot.verdict and snapshot.verdict.judged), costs_of(snapshot.findings)
    named = sorted({node["label"] for node in snapshot.nodes} & {*evidence}, key=text.natural)
    lines = paragraphs(Facts(*((node, "; ".join(evidence[node])) for node in named)), width)
    columns = [
        column
        for column in node_columns(costs, evidence, snapshot.loads)
        if any(_is_known(column.value(node)) for node in snapshot.nodes)
    ]
    spare = "°C past", "RAM past", "W", "rank", "worst ms", "skew", "VRAM", "median ms", "°C", "RAM", "ranks"
    block = Table(f"Nodes{of_steps(snapshot)}", columns, snapshot.nodes, badness=badness, spare=spare)
    return [
        listed(block, choice.scroll, width, worst=choice.sort == "time"),
        PaneSection("BESIDE THE VERDICT", lambda most: cut(lines, most), len(lines)),
    ]


def _is_known(value: object) -> bool:
    """Whether a value is known. A line is known if any of its values is."""
    values = value if isinstance(value, list) else [value]
    return any(one not in (None, "") for one in values)


def ranks_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return all ranks: where each runs, its state, and the stages of its steps."""
    rows = [*snapshot.rows]
    if choice.sort == "time":
        rows.sort(key=lambda row: -(row["busy_ms"] or 0.0))
    suspects = snapshot.verdict.judged.suspects if snapshot.verdict else ()
    late = {(suspect.rank, suspect.stage) for suspect in suspects}
    quiet = [stage for stage in ("prepare", "post_sync") if stage not in {name for _, name in late}]
    columns = [
        column
        for column in rank_columns(
            any(row["role"] for row in rows), late, busy_lines(snapshot.columns, DRAWN_STEPS)
        )
        if column.name not in ("local rank", "GPU", "exit code")  # these are on the page of the rank
    ]
    of_signals = per_rank_columns(sections_of(snapshot.signals), lambda row: row["rank"])
    order = "the slowest first" if choice.sort == "time" else "named ones first"
    spare = (
        *(column.name for column in of_signals),
        "now in",
        "last step",
        "state",
        *quiet,
        "node",
        "by step",
        "role",
    )
    title = f"Ranks{of_steps(snapshot)} (ms; {order})"
    return [listed(Table(title, [*columns, *of_signals], rows, spare=spare), choice.scroll, width)]


def rank_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return everything about one rank."""
    row = next((row for row in snapshot.rows if row["rank"] == choice.rank), None)
    if row is None:
        return [PaneSection(f"RANK {choice.rank}", lambda _: [Text("There is no rank with that number.")], 1)]
    facts = {
        "node": row["node"] or text.NA,
        "local rank": text.plain(row["local_rank"]),
        "last step": text.plain(row["last_step"]),
        "now in": row["open_stage"] or text.NA,
        "busy": text.ms(row["busy_ms"]),
        "÷ median rank": text.times(row["over"]),
    }
    shown = flow([Text(f"{name} ").append(value, HEAD) for name, value in facts.items()], width)
    state = cell_of(RANK_STATE, row)
    if lines := busy_lines(snapshot.columns, DRAWN_STEPS):
        values = lines(row["rank"])
        drawn_line = text.sparkline(values, width // 3, time_scale(np.array(values, dtype=float)))
        shown.append(Text("÷ median rank by step ").append(drawn_line, HEAD))
    shown.insert(0, Text("state ").append_text(state if isinstance(state, Text) else Text(state, HEAD)))
    sections = [PaneSection(f"RANK {choice.rank}", lambda most: shown[:most], len(shown))]
    if row["stages"]:
        stages = {name: ms or 0.0 for name, ms in row["stages"].items()}
        sections.append(stages_of(f"Its step{of_steps(snapshot)}", stages, width))
    return [*sections, output(snapshot, width, choice.rank), events(snapshot, width, choice.rank)]


def events_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return what happened, newest first."""
    columns = [*picked(EVENTS, "time"), EVENT, *picked(EVENTS, "node", "what")]
    block = Table(f"Events ({text.zone()}), newest first", columns, snapshot.events, spare=("node",))
    return [listed(block, choice.scroll, width)]


def output_pane(snapshot: PanelState, _choice: Choice, width: int) -> list[PaneSection]:
    """Return the last output of the selected rank; without one, of the rank that the verdict names."""
    return [output(snapshot, width)]


def signals_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return the signals of a page: their findings, facts about the run, and their tables."""
    steps = [one for one in snapshot.findings if one.signal == "steps"]
    verdict = snapshot.verdict.judged if snapshot.verdict else None
    worst, panes = choice.sort == "time", list[PaneSection]()
    for name, answer in snapshot.answers.items():
        view = VIEWS[name]
        mine = unsaid([*steps, *view.findings(answer, steps, verdict)])[len(steps) :]
        findings = _findings(mine, width)
        content = [*view.details(answer)]
        panes += section_panes(text.words(name), findings, content, width, choice.scroll, worst)
    return panes or [PaneSection(choice.pane.upper(), lambda _: [Text("Nothing is known yet.")], 1)]


def _findings(findings: Sequence[Finding], width: int) -> list[Text]:
    """Return findings in sentences with advice; the same advice is printed once."""
    lines, advice = list[Text](), set[str]()
    for one in findings:
        sentences = " ".join([SIGNS[one.severity], one.why, *({one.next} - advice)]).replace("`", "")
        advice.add(one.next)
        lines += wrap(sentences, width, TONES[one.severity])
    return lines


def health_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return the state of the monitor itself: its rows, relays, cost and errors."""
    if snapshot.health is None:
        return [PaneSection("HEALTH OF THE MONITOR", lambda _: [Text("No answer yet.")], 1)]
    cost = flow(
        [Text(f"{name} ").append(value, HEAD) for name, value in health.facts(snapshot.health).items()], width
    )
    over, ledger = snapshot.state in OVER, snapshot.health["ledger"]
    rows = [Text("Not known while the aggregator does not answer.")]
    if ledger is not None:
        losing = [("all", ledger), *health.losing(ledger, over)]
        block = Table("", ledger_columns(over), losing, spare=("after the last report",))
        rows = [*listed(block, 0, width).lines(1 + len(losing))]
    errors = sorted(snapshot.health["errors"].items(), key=lambda item: -item[1])
    relays = slowest_relays(snapshot.health["relays"])
    return [
        PaneSection("HEALTH OF THE MONITOR", lambda most: cost[:most], len(cost)),
        PaneSection("LEDGER, IN ROWS", lambda most: cut(rows, most), len(rows), min(2, len(rows))),
        listed(Table("Errors, swallowed and counted", ERRORS, errors), choice.scroll, width),
        listed(Table("Relays", RELAYS, relays, spare=("clock", "last message")), choice.scroll, width),
        *([listed(sinks_table(sinks), choice.scroll, width)] if (sinks := snapshot.health["sinks"]) else ()),
    ]


DRAWN: dict[str, Callable[[PanelState, Choice, int], list[PaneSection]]] = {
    "nodes": nodes_pane,
    "ranks": ranks_pane,
    **dict.fromkeys(PAGES, signals_pane),
    "events": events_pane,
    "output": output_pane,
    "health": health_pane,
    "help": help_pane,
}
"""Function that draws each pane, by name. `panel` draws the overview."""
assert {*DRAWN} >= {*PANES[1:]}


_VERDICT, _BRIEF = 12, 4
"""Largest number of lines of the verdict: on the overview, and on panes that need the other lines."""
_SMALL = 10
"""In a window with fewer lines, a pane has no head and no verdict: they would fill the window."""


def panel(
    snapshot: PanelState, choice: Choice, width: int, height: int | None, foot: str | None = None
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
    small = height is not None and height < _SMALL and not overview
    head = [] if small else sections.head(snapshot, inner)
    wanted = sum(1 + part.want for part in body if part.want)
    left = _VERDICT if overview or height is None else height - len(head) - 3 - wanted
    most = min(_VERDICT, max(_BRIEF, left))
    parts = [*([] if small else [sections.verdict(snapshot, inner, most)]), *body]
    below = _keys(choice, inner) if foot is None else Text(foot)
    return framed(sections.title_of(snapshot), head, parts, below, width, height)


def _overview(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    failed = [sections.output(snapshot, width)] if snapshot.tone == "critical" else []
    return [
        sections.findings(snapshot, width),
        *failed,
        sections.node_summary(snapshot, width),
        sections.rank_grid(snapshot, width, choice),
        sections.exposed(snapshot, width),
        sections.health(snapshot, width),
        sections.signals(snapshot, width),
        sections.events(snapshot, width),
    ]


def _keys(choice: Choice, width: int) -> Text:
    """
    Return the panes with their keys, the current one in brackets, and other keys as far as they fit. In a
    narrow window, first the gaps between keys and names shrink, then names are cut.
    """
    for gap, most in ((" ", 99), ("", 99), *(("", most) for most in range(7, -1, -1))):
        tabs = _tabs(choice, gap, most)
        if tabs.cell_len < width - 1:
            break
    room = width - 1 - tabs.cell_len
    more = next((more for more in ("? help q quit", "? help") if len(more) < room), "?")
    return tabs.append(more, QUIET)


def _tabs(choice: Choice, gap: str, most: int) -> Text:
    """Return the panes with their keys. Each name has at most `most` characters."""
    tabs = Text()
    for number, name in enumerate(PANES, 1):
        shown = name == choice.pane and choice.rank is None
        tabs.append("[" * shown).append(f"{number}", "bold").append(
            f"{gap}{name[:most]}", "bold" if shown else QUIET
        )
        tabs.append("]" if shown else "").append("" if shown and not gap else " ")
    return tabs


def line(snapshot: PanelState, clock: str) -> str:
    """Return the snapshot as one line of a log."""
    times = snapshot.times if snapshot.times and snapshot.times.steps else None
    parts = [
        f"{clock} {snapshot.badge}",
        f"step {snapshot.step:,}" if snapshot.step is not None else "",
        f"median {text.ms(times.median_ms)}" if times else "",
        f"skew {text.percent(times.skew_pct)}" if times else "",
        *(f"{name.lower()} {value}" for name, value in sections.rates(snapshot).items()),
        f"{snapshot.sign} {snapshot.first.headline}"
        if snapshot.first and snapshot.first.subject != "steps"
        else "",
        sections.headline(snapshot.verdict) if snapshot.verdict else snapshot.state_text,
        snapshot.verdict.cost if snapshot.verdict else "",
        snapshot.coverage,
        snapshot.state_text if snapshot.state == "stale" else "",
    ]
    return "  ".join(map(text.one_line, filter(None, parts)))
