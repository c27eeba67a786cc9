"""
A snapshot as lines: `panel` for a window, `line` for a log.

The panes that fill the window: nodes, ranks, one rank, memory, events, layers, health, and the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.text import Text

from traceml_ray import text
from traceml_ray.reports.severity import SIGNS
from traceml_ray.signals.layers.judge import Layers
from traceml_ray.signals.layers.sections import NOTHING, about_layers, layer_name, layers_sentences, region_of
from traceml_ray.signals.memory.sections import first_words
from traceml_ray.signals.sharding.sections import sharding_facts
from traceml_ray.stages import STAGES
from traceml_ray.terminal.sections import bar, event_cells, legend, of_steps, output
from traceml_ray.views import health
from traceml_ray.views.ranks import NAMED, SERVES, SILENT, evidence_of, worst_first
from traceml_ray.views.state import OVER

from . import sections
from .lines import HEAD, MARK, QUIET, TONES, Cell, PaneSection, cut, flow, framed, table, wrap
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
_Columns = dict[str, Callable[[Any], Cell]]
"""Cell functions by column header; a header that begins with `>` marks a column of numbers."""


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
    columns: _Columns = {
        "node": lambda node: node["label"],
        ">ranks": lambda node: str(len(node["ranks"])) if node["alive"] else Text("lost", TONES["critical"]),
        ">median ms": lambda node: text.number(node["median_ms"], aligned=True),
        ">worst ms": lambda node: text.number(node["worst_ms"], aligned=True),
        ">rank": lambda node: text.plain(node["worst_rank"]),
        ">skew": lambda node: text.percent(node["skew_pct"]),
        ">slower": lambda node: text.percent(node["slower_pct"], sign=True),
        ">CPU": lambda node: text.percent(node["cpu_pct"]),
        ">RAM": lambda node: text.percent(node["mem_pct"]),
        ">GPU": lambda node: text.percent(node["gpu_util_pct"]),
        ">VRAM": lambda node: text.percent(node["gpu_mem_pct"]),
        ">°C": lambda node: text.number(node["gpu_temperature_c"], 0),
        ">W": lambda node: text.number(node["gpu_power_w"], 0),
        "evidence": lambda node: Text("; ".join(evidence.get(node["label"], ())), MARK),
    }
    drop = ">°C", ">W", ">rank", ">worst ms"
    return [_listed(f"NODES{of_steps(snapshot)}", rows, columns, choice, width, drop)]


def ranks_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return all ranks: where each is, its state, and what its steps are made of."""
    suspects = {
        (suspect["rank"], suspect["stage"]) for suspect in (snapshot.verdict or {}).get("suspects") or ()
    }

    def stage(name: str) -> Callable[[Any], Cell]:
        def cell(row: Mapping[str, Any]) -> Cell:
            shown = text.number(row["stages"].get(name), aligned=True)
            return Text(f"▲{shown}", MARK) if (row["rank"], name) in suspects else shown

        return cell

    columns: _Columns = {
        ">rank": _number,
        "node": lambda row: row["node"] or text.NA,
        **({"role": lambda row: row["role"] or ""} if any(row["role"] for row in snapshot.rows) else {}),
        "state": _state,
        ">step": lambda row: text.plain(row["last_step"]),
        "in": lambda row: row["open_stage"] or text.NA,
        ">busy": lambda row: Text(text.number(row["busy_ms"], aligned=True), HEAD),
        ">÷ med": lambda row: text.times(row["over"]),
        **{f">{name}": stage(name) for name in STAGES},
    }
    rows = [*snapshot.rows]
    if choice.sort == "time":
        rows.sort(key=lambda row: -(row["busy_ms"] or 0.0))
    order = "the slowest first" if choice.sort == "time" else "named ones first"
    title = f"RANKS{of_steps(snapshot)} (ms; {order})"
    return [_listed(title, rows, columns, choice, width, ("in", ">step", "state", "node", "role"))]


def _number(row: Mapping[str, Any]) -> Cell:
    if row["death"]:
        return Text(f"◆ {row['rank']}", TONES["critical"])
    return Text(f"▲ {row['rank']}", MARK) if row["state"] in (NAMED, SILENT) else str(row["rank"])


def _state(row: Mapping[str, Any]) -> Cell:
    if row["death"]:
        return Text(f"◆ {row['death']['how']}", TONES["critical"])
    late = row["state"] not in ("running", "finished", SERVES)
    return Text(f"▲ {row['state']}", MARK) if late else text.words(row["state"])


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
    state = _state(row)
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
    memory, shards = snapshot.memory, _shards(snapshot, width)
    if memory is None or not memory.ranks:
        return [PaneSection("MEMORY", lambda _: [Text("No sample of a rank's memory.")], 1), *shards]
    sentences = [line for sentence in first_words(memory) for line in wrap(sentence, width)]
    for finding in memory.findings:
        lines = wrap(f"{SIGNS[finding.severity]} {finding.why}", width, TONES[finding.severity])
        sentences += lines if finding.why not in first_words(memory) else []
    columns: _Columns = {
        ">rank": lambda row: str(row.rank),
        "node": lambda row: row.node,
        "on": lambda row: "host" if row.device is None else f"GPU {row.device}",
        ">used": lambda row: text.size(row.used_bytes),
        ">in all": lambda row: text.size(row.total_bytes),
        ">allocated +": lambda row: text.size(row.allocated_growth_bytes),
        ">reserved +": lambda row: text.size(row.reserved_growth_bytes),
        ">RSS +": lambda row: text.size(row.rss_growth_bytes),
        ">hidden": lambda row: text.size(row.gap_bytes),
        ">runs out in": lambda row: "" if row.forecast_s is None else text.duration(row.forecast_s),
        "finding": lambda row: Text(text.words(row.anomaly or ""), TONES[row.severity or "info"]),
    }
    rows = [*memory.ranks]
    if choice.sort == "time":
        rows.sort(key=lambda row: -(row.used_bytes or 0) / (row.total_bytes or 1))
    listed = _listed("EACH RANK", rows, columns, choice, width, (">hidden", ">reserved +", "node", ">in all"))
    return [
        PaneSection("MEMORY", lambda most: sentences[:most], len(sentences), min(3, len(sentences))),
        *shards,
        listed,
    ]


def _shards(snapshot: PanelState, width: int) -> list[PaneSection]:
    """Return how FSDP2 divides the model, where it does."""
    lines = [line for _, fact in sharding_facts(snapshot.sharding).pairs for line in wrap(fact, width)]
    return [PaneSection("SHARDS", lambda most: lines[:most], len(lines), min(2, len(lines)))] if lines else []


def events_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return what happened, newest first."""
    columns: _Columns = {
        "time": lambda event: event_cells(event)[0],
        "kind": lambda event: event_cells(event)[1],
        "node": lambda event: event["node"] or "",
        "what": lambda event: event["text"],
    }
    return [_listed("EVENTS (UTC), newest first", snapshot.events, columns, choice, width, ("node",))]


def output_pane(snapshot: PanelState, _choice: Choice, width: int) -> list[PaneSection]:
    """Return the last output of the selected rank, else of the named one."""
    return [output(snapshot, width)]


def layers_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return which layer takes longer on a rank, and all layers in numbers."""
    layers = snapshot.layers
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
    columns, drop = _layer_columns(layers)
    order = "; the slowest first" if choice.sort == "time" else ""
    title = f"EACH LAYER (ms a step, without those inside{order})"
    listed = _listed(title, places, columns, choice, width, drop)
    return [PaneSection("LAYERS", lambda most: cut(lines, most), len(lines), min(3, len(lines))), listed]


def health_pane(snapshot: PanelState, choice: Choice, width: int) -> list[PaneSection]:
    """Return how the monitor itself is doing: its rows, relays, cost and errors."""
    if snapshot.health is None:
        return [PaneSection("HEALTH OF THE MONITOR", lambda _: [Text("No answer yet.")], 1)]
    cost = flow(
        [Text(f"{name} ").append(value, HEAD) for name, value in health.facts(snapshot.health).items()], width
    )
    rows = _ledger_rows(snapshot.health["ledger"], snapshot.state in OVER, width)
    relays: _Columns = {
        "node": lambda relay: relay["label"],
        "state": lambda relay: "alive" if relay["alive"] else Text("◆ lost", TONES["critical"]),
        ">last message": lambda relay: text.age(relay["age_s"]),
        ">ranks": lambda relay: f"{len(relay['ranks']):,}",
    }
    ordered = sorted(snapshot.health["relays"], key=lambda relay: (relay["alive"], -(relay["age_s"] or 0)))
    errors = sorted(snapshot.health["errors"].items(), key=lambda item: -item[1])
    counts: _Columns = {">times": lambda error: f"{error[1]:,}", "where": lambda error: error[0]}
    return [
        PaneSection("HEALTH OF THE MONITOR", lambda most: cost[:most], len(cost)),
        PaneSection("LEDGER, IN ROWS", lambda most: cut(rows, most), len(rows), min(2, len(rows))),
        _listed("ERRORS, SWALLOWED AND COUNTED", errors, counts, choice, width, ()),
        _listed("RELAYS", ordered, relays, choice, width, (">last message",)),
    ]


def _ledger_rows(ledger: Mapping[str, Any] | None, over: bool, width: int) -> list[Text]:
    """Return what became of the rows of all ranks, then of each rank that lost any."""
    if ledger is None:
        return [Text("Not known while the aggregator does not answer.")]
    counts = ("produced", "stored", "in_flight")
    head = ["rank", *map(text.words, counts), "dropped", "where"]
    body: list[list[Cell]] = [[Text(name, QUIET) for name in head]]
    for rank, rows in [("all", ledger), *health.losing(ledger, over)]:
        dropped = sum(rows["dropped"].values())
        numbers = [*(rows[name] for name in counts), dropped]
        body.append([rank, *(f"{number:,}" for number in numbers), health.dropped_text(rows["dropped"])])
    return table(body, width, range(5))


def _layer_columns(layers: Layers) -> tuple[_Columns, list[str]]:
    """Return the columns of the table of layers, and those that a narrow window drops."""
    rows, several = layers.layers, len(layers.ranks) > 1
    stands_out = {(one.layer, one.rank) for one in layers.findings}

    def time(ms: float | None, index: int, rank: int | None) -> Cell:
        shown = text.number(ms, aligned=True)
        return Text(f"▲{shown}", MARK) if (rows[index].name, rank) in stands_out else shown

    def of_rank(rank: int) -> Callable[[Any], Cell]:
        return lambda index: time(layers.per_rank_ms[rank][index], index, rank)

    columns: _Columns = {
        "layer": lambda index: layer_name(rows[index]),
        "class": lambda index: f"{rows[index].kind}{region_of(rows[index])}",
        ">calls": lambda index: text.number(rows[index].calls),
        ">forward": lambda index: text.number(rows[index].forward_ms, aligned=True),
        ">backward": lambda index: text.number(rows[index].backward_ms, aligned=True),
        ">with inside": lambda index: text.number(rows[index].total_ms, aligned=True),
        ">of model": lambda index: text.share(rows[index].share),
        ">outputs": lambda index: text.size(rows[index].output_bytes),
        ">params": lambda index: text.size(rows[index].parameter_bytes),
        ">grads": lambda index: text.size(rows[index].gradient_bytes),
    }
    if several:
        columns |= {
            ">largest": lambda index: time(rows[index].worst_ms, index, rows[index].worst_rank),
            ">on rank": lambda index: text.plain(rows[index].worst_rank),
            **{f">rank {rank}": of_rank(rank) for rank in layers.per_rank_ms},
        }
    named = {one.rank for one in layers.findings}
    ranks = sorted(layers.per_rank_ms, key=lambda rank: (rank in named, -rank))
    first = [f">rank {rank}" for rank in ranks]
    return columns, [*first, ">grads", ">params", ">calls", ">outputs", "class", ">of model", ">with inside"]


def _listed(
    title: str, rows: Sequence[Any], columns: _Columns, choice: Choice, width: int, drop: Sequence[str]
) -> PaneSection:
    """Return a long table from the selected line on, without the columns in `drop` if it is too wide."""

    def lines(most: int) -> list[Text]:
        room = max(0, most - 1)
        first = min(choice.scroll, max(0, len(rows) - room))
        shown = rows[first : first + room]
        names, left = [*columns], [name for name in drop if name in columns]
        while True:
            body: list[list[Cell]] = [[Text(name.lstrip(">"), QUIET) for name in names]]
            body += [[columns[name](row) for name in names] for row in shown]
            right = [column for column, name in enumerate(names) if name.startswith(">")]
            drawn = table(body, None, right)
            if not left or max(line.cell_len for line in drawn) <= width:
                return drawn
            names.remove(left.pop(0))

    last = f"from {choice.scroll + 1:,} of {len(rows):,}" if choice.scroll else f"{len(rows):,}"
    return PaneSection(title, lines, len(rows) + 1, 2, last)


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
