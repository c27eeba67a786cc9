"""
A snapshot as lines: `panel` for a window, `line` for a log.

The panes that fill the window: nodes, ranks, one rank, memory, events, layers, health, and the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from rich.text import Text

from traceml_ray import text
from traceml_ray.document.model import SIGNS, Column, Table, per_rank_columns, picked
from traceml_ray.document.terminal import (
    HEAD,
    MARK,
    QUIET,
    TONES,
    PaneSection,
    cell_of,
    cut,
    flow,
    framed,
    listed,
    table,
    wrap,
)
from traceml_ray.signals.layers.view import NOTHING, about_layers, layers_sentences
from traceml_ray.signals.memory.view import first_words
from traceml_ray.signals.sharding.view import sharding_facts
from traceml_ray.signals.views import sections_of
from traceml_ray.terminal.sections import bar, event_cells, legend, of_steps, output
from traceml_ray.views import health
from traceml_ray.views.ranks import evidence_of, worst_first
from traceml_ray.views.state import OVER
from traceml_ray.views.tables import (
    ERRORS,
    EVENT,
    EVENTS,
    RANK_STATE,
    RELAYS,
    layer_columns,
    layer_rank_columns,
    ledger_columns,
    memory_columns,
    rank_columns,
    slowest_relays,
)

from . import sections
from .snapshot import PANES, Choice, PanelState

KEYS = {
    f"1 … {len(PANES)}, Tab": "panes",
    "↑ ↓ PgUp PgDn": "scroll",
    "s": "ranks and layers in their order, or the slowest first",
    "r 12 Enter": "one rank alone; Esc: back",
    "p, Space": "pause",
    "?": "these keys",
    "q, Ctrl-C": "quit",
}
_NO_LAYERS = f"{NOTHING.replace('`', '')}."


def help_pane(_of: PanelState, _choice: Choice, width: int) -> list[PaneSection]:
    """Return the list of keys, and the meaning of the signs."""
    lines = table([[Text(keys, HEAD), about] for keys, about in KEYS.items()], width)
    lines += [Text(), *wrap("◆ critical  ▲ warning, or the worst rank  ● for your information", width)]
    about = "Times are of each rank's own work, without its waiting for others. n/a: not known."
    lines += wrap(about, width)
    return [PaneSection("KEYS", lambda most: lines[:most], len(lines))]


def nodes_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return all nodes with their times and load."""
    rows = sorted(snapshot.nodes, key=worst_first) if choice.sort == "time" else snapshot.nodes
    evidence = evidence_of(snapshot.verdict)
    columns = [
        Column("node", lambda node: node["label"]),
        Column("ranks", lambda node: len(node["ranks"]), "figures", _lost, _lost_tone),
        Column("median ms", lambda node: node["median_ms"], "aligned"),
        Column("worst ms", lambda node: node["worst_ms"], "aligned"),
        Column("rank", lambda node: node["worst_rank"], "plain"),
        Column("skew", lambda node: node["skew_pct"], "percent"),
        Column("slower", lambda node: node["slower_pct"], "more"),
        Column("CPU", lambda node: node["cpu_pct"], "percent"),
        Column("RAM", lambda node: node["mem_pct"], "percent"),
        Column("GPU", lambda node: node["gpu_util_pct"], "percent"),
        Column("VRAM", lambda node: node["gpu_mem_pct"], "percent"),
        Column("°C", lambda node: node["gpu_temperature_c"], "whole"),
        Column("W", lambda node: node["gpu_power_w"], "whole"),
        Column("evidence", lambda node: "; ".join(evidence.get(node["label"], ())), tone=_doubt(evidence)),
    ]
    drop = "°C", "W", "rank", "worst ms"
    return [listed(Table(f"NODES{of_steps(snapshot)}", columns, rows), choice.scroll, width, drop)]


def _lost(node: Mapping[str, Any]) -> str:
    return f"{len(node['ranks'])}" if node["alive"] else "lost"


def _lost_tone(node: Mapping[str, Any]) -> str:
    return "" if node["alive"] else "critical"


def _doubt(evidence: Mapping[str, Any]) -> Callable[[Any], str]:
    return lambda node: "warning" if node["label"] in evidence else ""


def ranks_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return all ranks: where each is, its state, and what its steps are made of."""
    rows = [*snapshot.rows]
    if choice.sort == "time":
        rows.sort(key=lambda row: -(row["busy_ms"] or 0.0))
    suspects = (snapshot.verdict or {}).get("suspects") or ()
    late = {(suspect["rank"], suspect["stage"]) for suspect in suspects}
    columns = [
        column
        for column in rank_columns(any(row["role"] for row in rows), late)
        if column.name not in ("local rank", "GPU", "exit code")  # these are on its page
    ]
    of_signals = per_rank_columns(sections_of(snapshot.signals), lambda row: row["rank"])
    order = "the slowest first" if choice.sort == "time" else "named ones first"
    block = Table(f"RANKS{of_steps(snapshot)} (ms; {order})", [*columns, *of_signals], rows)
    drop = *(column.name for column in of_signals), "now in", "last step", "state", "node", "role"
    return [listed(block, choice.scroll, width, drop)]


def rank_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return everything about one rank."""
    row = next((row for row in snapshot.rows if row["rank"] == choice.rank), None)
    if row is None:
        return [PaneSection(f"RANK {choice.rank}", lambda _: [Text("There is no rank of that number.")], 1)]
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
    shown.insert(0, Text("state ").append_text(state if isinstance(state, Text) else Text(state, HEAD)))
    sections = [PaneSection(f"RANK {choice.rank}", lambda most: shown[:most], len(shown))]
    if row["stages"]:
        stages = {name: ms or 0.0 for name, ms in row["stages"].items()}
        drawn = [bar(stages, width), *flow(legend(stages), width)]
        sections.append(PaneSection(f"ITS STEP{of_steps(snapshot)}", lambda most: drawn[:most], len(drawn)))
    events = table([event_cells(event) for event in snapshot.events if event["rank"] == choice.rank], width)
    printed = output(snapshot, width, choice.rank)
    return [*sections, printed, PaneSection("ITS EVENTS (UTC)", lambda most: events[:most], len(events))]


def memory_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return what was found about the memory of the ranks, and each in numbers."""
    memory, shards = snapshot.answers.get("memory"), _shards(snapshot, width)
    if memory is None or not memory.ranks:
        return [PaneSection("MEMORY", lambda _: [Text("No sample of a rank's memory.")], 1), *shards]
    sentences = [line for sentence in first_words(memory) for line in wrap(sentence, width)]
    for finding in memory.findings:
        lines = wrap(f"{SIGNS[finding.severity]} {finding.why}", width, TONES[finding.severity])
        sentences += lines if finding.why not in first_words(memory) else []
    rows = [*memory.ranks]
    if choice.sort == "time":
        rows.sort(key=lambda row: -(row.used_bytes or 0) / (row.total_bytes or 1))
    drop = "samples", "hidden", "reserved +", "node", "in all"
    return [
        PaneSection("MEMORY", lambda most: sentences[:most], len(sentences), min(3, len(sentences))),
        *shards,
        listed(Table("EACH RANK", memory_columns(), rows), choice.scroll, width, drop),
    ]


def _shards(snapshot: PanelState, width: int) -> list[PaneSection]:
    """Return how FSDP2 divides the model, where it does."""
    facts = sharding_facts(snapshot.answers.get("sharding"))
    lines = [line for _, fact in facts.pairs for line in wrap(fact, width)]
    return [PaneSection("SHARDS", lambda most: lines[:most], len(lines), min(2, len(lines)))] if lines else []


def events_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return what happened, newest first."""
    columns = [*picked(EVENTS, "time"), EVENT, *picked(EVENTS, "node", "what")]
    return [
        listed(Table("EVENTS (UTC), newest first", columns, snapshot.events), choice.scroll, width, ["node"])
    ]


def output_pane(snapshot: PanelState, _choice: Choice, width: int) -> list[PaneSection]:
    """Return the last output of the selected rank, else of the named one."""
    return [output(snapshot, width)]


def layers_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return which layer takes longer on a rank, and all layers in numbers."""
    layers = snapshot.answers.get("layers")
    if layers is None or not layers.ranks:
        lines = wrap(_NO_LAYERS if layers is not None else "No answer yet.", width)
        return [PaneSection("LAYERS", lambda most: lines[:most], len(lines))]
    tone = MARK if layers.findings else ""
    named = [line for sentence in layers_sentences(layers) for line in wrap(sentence, width, tone)]
    about = [about_layers(msgspec.structs.asdict(layers)), *layers.limits]
    lines = [*named, *(line for sentence in about for line in wrap(sentence, width, QUIET))]
    places = [*range(len(layers.layers))]
    if choice.sort == "time":
        places.sort(key=lambda index: -(layers.layers[index].forward_ms + layers.layers[index].backward_ms))
    columns = [*layer_columns(layers), *(layer_rank_columns(layers) if len(layers.ranks) > 1 else ())]
    named_ranks = {one.rank for one in layers.findings}
    ranks = sorted(layers.per_rank_ms, key=lambda rank: (rank in named_ranks, -rank))
    drop = *(f"rank {rank}" for rank in ranks), "grads", "params", "recomputed", "calls", "outputs", "class"
    order = "; the slowest first" if choice.sort == "time" else ""
    block = Table(f"EACH LAYER (ms a step, without those inside{order})", columns, places)
    return [
        PaneSection("LAYERS", lambda most: cut(lines, most), len(lines), min(3, len(lines))),
        listed(block, choice.scroll, width, (*drop, "of model", "with inside")),
    ]


def health_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return how the monitor itself is doing: its rows, relays, cost and errors."""
    if snapshot.health is None:
        return [PaneSection("HEALTH OF THE MONITOR", lambda _: [Text("No answer yet.")], 1)]
    cost = flow(
        [Text(f"{name} ").append(value, HEAD) for name, value in health.facts(snapshot.health).items()], width
    )
    over, ledger = snapshot.state in OVER, snapshot.health["ledger"]
    rows = [Text("Not known while the aggregator does not answer.")]
    if ledger is not None:
        losing = [("all", ledger), *health.losing(ledger, over)]
        rows = [
            *listed(Table("", ledger_columns(over), losing), 0, width, ["after the last report"]).lines(
                1 + len(losing)
            )
        ]
    errors = sorted(snapshot.health["errors"].items(), key=lambda item: -item[1])
    relays = Table("RELAYS", RELAYS, slowest_relays(snapshot.health["relays"]))
    return [
        PaneSection("HEALTH OF THE MONITOR", lambda most: cost[:most], len(cost)),
        PaneSection("LEDGER, IN ROWS", lambda most: cut(rows, most), len(rows), min(2, len(rows))),
        listed(Table("ERRORS, SWALLOWED AND COUNTED", ERRORS, errors), choice.scroll, width),
        listed(relays, choice.scroll, width, ("clock", "last message")),
    ]


DRAWN: dict[str, Callable[[PanelState, Choice, int], list[PaneSection]]] = {
    "nodes": nodes_pane,
    "ranks": ranks_pane,
    "memory": memory_pane,
    "events": events_pane,
    "output": output_pane,
    "layers": layers_pane,
    "health": health_pane,
    "help": help_pane,
}
"""Function that draws each pane, by name; the overview is drawn by `panel`."""
assert {*DRAWN} >= {*PANES[1:]}


_VERDICT, _BRIEF = 12, 4
"""Lines that the verdict may have: on the overview, on other panes."""


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
    parts = [sections.verdict(snapshot, inner, _VERDICT if overview else _BRIEF), *body]
    below = _keys(choice, inner) if foot is None else Text(foot)
    return framed(sections.title_of(snapshot), sections.head(snapshot, inner), parts, below, width, height)


def _overview(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    failed = [sections.output(snapshot, width)] if snapshot.tone == "critical" else []
    return [
        sections.findings(snapshot, width),
        *failed,
        sections.node_summary(snapshot, width),
        sections.rank_grid(snapshot, width, choice),
        sections.exposed(snapshot, width),
        sections.health(snapshot, width),
        sections.memory(snapshot, width),
        sections.events(snapshot, width),
        sections.signals(snapshot, width),
    ]


def _keys(choice: Choice, width: int) -> Text:
    """Return the panes with their keys, the current one in brackets, and other keys as far as they fit."""
    tabs = Text()
    for number, name in enumerate(PANES, 1):
        shown = name == choice.pane and choice.rank is None
        tabs.append(f"[{number} {name}] " if shown else f"{number} {name} ", "bold" if shown else QUIET)
    room = width - 1 - tabs.cell_len
    more = next((more for more in ("? help q quit", "? help") if len(more) < room), "?")
    return tabs.append(more, QUIET)


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
        snapshot.verdict["cost"] if snapshot.verdict else "",
        snapshot.coverage,
        snapshot.state_text if snapshot.state == "stale" else "",
    ]
    return "  ".join(map(text.one_line, filter(None, parts)))
