"""The parts of the panel, each made of a snapshot for a width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.document.drawing import time_scale
from traceml_ray.document.model import SIGNS
from traceml_ray.document.terminal import (
    HEAD,
    LINE,
    MARK,
    QUIET,
    TONES,
    PaneSection,
    cut,
    fit,
    flow,
    paragraphs,
    table,
    wrap,
)
from traceml_ray.reports.headlines import beside, line_of, part_of, tone_of
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.views import VIEWS, signal_numbers
from traceml_ray.stages import STAGES
from traceml_ray.store.summary_shape import Conclusion
from traceml_ray.text import natural
from traceml_ray.views.ranks import badness, evidence_of
from traceml_ray.views.state import RUN_OVER
from traceml_ray.views.values import by_rank, number

from .snapshot import Choice, PanelState

MOST_CELLS = 32
"""Largest number of ranks in the grid; of a larger job it shows the slowest."""
DRAWN_STEPS = 64
"""Number of the newest steps that a line is of."""
_MOST_DRAWN = 32
"""Largest number of characters of the line of the whole job."""
_LABEL = 9
_FIRST = 3
"""Parts of the verdict that have a line in any case: what, why, next."""
_SHORT = 8
_SIGNALS = 4
"""Most lines about signals."""
_MANY, _WORST = 16, 8
_SEEN = 0.005
"""Percentages below this are written as 0."""
_LEAST_SHARE = 0.005
"""Smallest share of a step that a stage needs to be listed."""
_STAGES = {
    "post_sync": ("▒", "magenta"),
    "data": ("█", "yellow"),
    "prepare": ("▚", "green"),
    "forward": ("▓", "cyan"),
    "backward": ("░", "blue"),
    "sync_wait": ("·", QUIET),
}
"""How a stage is drawn: by form and by colour."""


def title_of(snapshot: PanelState) -> str:
    """Return "TraceML — Multi-Node DDP  (2 nodes × 4 GPUs = 8 ranks)"."""
    ranks, nodes = snapshot.facts["world_size"], snapshot.facts["nnodes"]
    kind = "Multi-Node " * bool(nodes and nodes > 1) + text.one_line(snapshot.facts["strategy"] or "").upper()
    kind = "" if kind == "SINGLE" else kind
    return f"TraceML{f' — {kind}' if kind else ''}{_size(snapshot, ranks, nodes)}"


def _size(snapshot: PanelState, ranks: int | None, nodes: int | None) -> str:
    if not ranks:
        return ""
    if not nodes or ranks == 1:
        return f"  ({text.count(ranks, 'rank')})"
    per_node = {len(node["ranks"]) for node in snapshot.nodes if node["ranks"]}
    if len(per_node) != 1 or per_node != {ranks / nodes}:
        return f"  ({text.count(nodes, 'node')}, {text.count(ranks, 'rank')})"
    (ranks_per_node,) = per_node
    gpus = all((node["gpus"] or 0) >= ranks_per_node for node in snapshot.nodes if node["ranks"])
    unit = (
        text.count(ranks_per_node, "GPU")
        if gpus
        else f"{ranks_per_node:,} process{'es' * (ranks_per_node > 1)}"
    )
    return f"  ({text.count(nodes, 'node')} × {unit} = {text.count(ranks, 'rank')})"


def head(snapshot: PanelState, width: int) -> list[Text]:
    """Return the session, its step, its skew, the straggler, and what a step takes, on one line."""
    label = snapshot.verdict["label"] if snapshot.verdict else ""
    kind = LABELS[label].kind if label in LABELS else ""
    straggler = text.ranks(snapshot.named) if kind == "finding" and snapshot.named else text.NA
    straggler = "none" if kind == "healthy" else "none yet" if kind == "watching" else straggler
    facts = {
        "SESSION": text.one_line(snapshot.facts["id"]),
        "STEP": text.NA if snapshot.step is None else f"{snapshot.step:,}",
        "GLOBAL SKEW": text.percent(number(snapshot.times.skew_pct) if snapshot.times else None),
        "STRAGGLER": straggler,
    }
    step_ms = text.ms(snapshot.times.median_ms) if snapshot.times else text.NA
    drawn = _step_line(snapshot, LINE)
    wide = bool(drawn) and _room(facts, width) >= len(f" │ STEP TIME {step_ms}{drawn}")
    if wide:
        facts["STEP TIME"] = f"{step_ms}{drawn}"
    elif _room(facts, width, _SHORT) >= len(drawn):
        facts["STEP"] += drawn
    for name, value in rates(snapshot).items():  # as many as there is room for
        if _room(facts, width) >= len(f" │ {name} {value}"):
            facts[name] = value
    if wide:
        facts["STEP TIME"] = step_ms + _step_line(snapshot, min(_MOST_DRAWN, LINE + _room(facts, width)))
    session = facts["SESSION"]
    facts["SESSION"] = fit(session, max(_SHORT, len(session) + min(0, _room(facts, width)))).plain.rstrip()
    line = Text()
    for name, value in facts.items():
        named = MARK if name == "STRAGGLER" and kind == "finding" else HEAD
        line.append(" │ " if line else "", QUIET).append(f"{name} ").append(value, named)
    return [line]


def _room(facts: Mapping[str, str], width: int, session: int | None = None) -> int:
    """Return how many cells are left beside facts; `session`: where that name is cut to so many."""
    cut_off = max(0, len(facts["SESSION"]) - session) if session else 0
    return width - sum(len(name) + len(value) + 4 for name, value in facts.items()) + 3 + cut_off


def _step_line(snapshot: PanelState, most: int) -> str:
    """Return how long the newest steps took as bars, after a space; nothing where there is no room."""
    if snapshot.columns is None or most < LINE:
        return ""
    step_ms = snapshot.columns.step_ms
    newest = step_ms if snapshot.state in RUN_OVER else step_ms[-DRAWN_STEPS:]
    bars = text.sparkline(newest.tolist(), most, time_scale(newest))
    return f" {bars}" if bars else ""


def rates(snapshot: PanelState) -> dict[str, str]:
    """Return the numbers of signals that have a place in one line, as far as they are known."""
    return dict(number.short for number in signal_numbers(snapshot.signals) if number.short)


def verdict(snapshot: PanelState, width: int, most: int) -> PaneSection:
    """Return the verdict with its reason, advice, cost and beginning, and how fresh and complete it is."""
    late = "bold yellow" if snapshot.state == "stale" else ""
    note = Text().append(snapshot.badge, late).append(f" · {snapshot.coverage}")
    step_verdict, first = snapshot.verdict, snapshot.first
    more = first is not None and first.subject != "steps"  # something is more severe than the verdict
    parts = [] if step_verdict is None else [
        *(_first(snapshot, first) if first is not None and more else ()),
        ("Steps" if more else "Verdict", headline(step_verdict), TONES[tone_of(step_verdict)[0]] or HEAD),
        ("Why", step_verdict["why"], ""),
        ("Next", step_verdict["next"] if step_verdict["label"] != "healthy" else "", ""),
        ("Cost", step_verdict["cost"], ""),
        ("", step_verdict["began"], ""),
        ("Restarts", snapshot.facts["restarted"], ""),
    ]  # fmt: skip
    if snapshot.state != "live" or step_verdict is None:
        position = 0 if step_verdict is None else 3 if snapshot.state in RUN_OVER else 1
        parts.insert(position, ("State", snapshot.state_text, late))
    least = _FIRST + 2 * (snapshot.tone == "critical")  # what ends a run is more than a line long
    shown = [(label, wrap(value, width - _LABEL, style)) for label, value, style in parts if value]
    want = sum(len(lines) for _, lines in shown)
    return PaneSection(
        "VERDICT", lambda size: _labelled(shown, size), min(want, most), min(want, least), note
    )


def _first(snapshot: PanelState, first: Conclusion) -> list[tuple[str, str, str]]:
    """Return the conclusion that is more severe than the verdict on the steps."""
    shown = f"{snapshot.sign} {first.headline}"
    return [("Verdict", shown, TONES[snapshot.tone]), ("Why", first.why, ""), ("Next", first.next, "")]


def findings(snapshot: PanelState, width: int) -> PaneSection:
    """Return what else was found, each with its cost and why, a line each, in the order of all faces."""
    others = beside(snapshot.findings, snapshot.first.key if snapshot.first else None)
    others = [one for one in others if one.signal != "nodes"]  # these are beside their node
    rows = [_finding(one, width) for one in others]

    def lines(most: int) -> list[Text]:
        few = len(rows) <= most
        left = text.count(len(rows) - most + 1, "more finding")
        return rows if few else [*rows[: most - 1], Text(f"… {left}", QUIET)]

    return PaneSection("ALSO FOUND", lines, min(len(rows), _WORST), min(len(rows), 2))


def _finding(one: Finding, width: int) -> Text:
    row = Text().append(f"{SIGNS[one.severity]} {line_of(one)}  ", TONES[one.severity]).append(one.why)
    return fit(row, width)


def headline(verdict: Mapping[str, Any]) -> str:
    """Return the verdict on the steps in one line, with its cost."""
    cost = verdict["cost_pct"] if verdict["label"] != "healthy" else None
    return f"{tone_of(verdict)[1]} {verdict['headline']}" + (
        f", {text.percent(cost)} {part_of(verdict)}" if cost else ""
    )


def _labelled(parts: Sequence[tuple[str, Sequence[Text]]], most: int) -> list[Text]:
    """Return parts in at most so many lines: a line of each of the first, then the rest, in order."""
    sizes = list[int]()
    for index, (_, lines) in enumerate(parts):
        kept = sum(min(len(other), 1 + (most > 4)) for _, other in parts[index + 1 : _FIRST])
        left = most - sum(sizes)
        sizes.append(min(len(lines), max(left - kept, min(left, 1))))
    drawn = []
    for (label, lines), size in zip(parts, sizes, strict=True):
        for index, line in enumerate(cut(lines, size)):
            drawn.append(Text().append(f"{label if index == 0 else '':<{_LABEL}}", HEAD).append_text(line))
    return drawn


def node_summary(snapshot: PanelState, width: int) -> PaneSection:
    """Return the busy time of each node, its slowest rank, and by how much it is above the fastest node."""
    timed = [node for node in snapshot.nodes if node["median_ms"] is not None or not node["alive"]]
    ordered = sorted(timed, key=lambda node: natural(node["label"]))
    fastest = min(
        (node for node in timed if node["slower_pct"] is not None),
        key=lambda node: node["slower_pct"],
        default={"label": ""},
    )["label"]

    def lines(most: int) -> list[Text]:
        few = len(ordered) <= most
        shown = ordered if few else sorted(timed, key=badness, reverse=True)[: most - 1]
        rows = [_node(node, snapshot) for node in shown]
        for against in (f" vs {fastest}", ""):  # that is in the title, too
            drawn = table([[*row[:-1], _beside(row[-1], against)] for row in rows], None)
            if max(line.cell_len for line in drawn) <= width:
                break
        drawn = [fit(line, width) for line in drawn]
        return drawn if few else [*drawn, _more(len(ordered) - len(shown), "node", 2)]

    note = Text(f"← above the fastest, {fastest}" if len(ordered) > 1 and fastest else "", QUIET)
    return PaneSection(
        f"NODE SUMMARY{of_steps(snapshot)}", lines, _listed(ordered), min(4, len(ordered)), note
    )


def of_steps(snapshot: PanelState) -> str:
    """Return ", steps 35–89", the steps that the numbers cover, if that is not obvious."""
    if snapshot.steps is not None:
        return f", steps {snapshot.steps[0]:,}–{snapshot.steps[1]:,}"
    return ", all steps" if snapshot.times and snapshot.times.steps and snapshot.times.of_all else ""


def _listed(nodes: Sequence[object]) -> int:
    """Return the function from a number of lines to the number of nodes shown: of many only the worst."""
    return len(nodes) if len(nodes) <= _MANY else _WORST + 1


def _beside(over: Text | str, against: str) -> Text:
    return Text("").append_text(over).append(against) if isinstance(over, Text) and over else Text("")


def _node(node: Mapping[str, Any], snapshot: PanelState) -> list[Text | str]:
    if not node["alive"]:
        return [node["label"], Text("◆ lost", TONES["critical"]), "", "", ""]
    late = bool({*snapshot.named} & {*node["ranks"]})
    rank = "" if node["worst_rank"] is None else f" (rank {node['worst_rank']})"
    slower = node["slower_pct"]
    return [
        node["label"],
        f"median={text.ms(node['median_ms'])}",
        Text(f"worst={text.ms(node['worst_ms'])}{rank}", MARK if late else ""),
        f"skew={text.percent(node['skew_pct'])}",
        Text(f"← {text.percent(slower, sign=True)}" if (slower or 0) >= _SEEN else "", MARK if late else ""),
    ]


def _more(count: int, noun: str, key: int) -> Text:
    return Text(f"… {text.count(count, f'more {noun}')} (key {key})", QUIET)


def rank_grid(snapshot: PanelState, width: int, choice: Choice) -> PaneSection:
    """Return the busy time of each rank, the named ones marked; of a large job the slowest ones."""
    busy = {rank: float(ms) for rank, ms in by_rank(snapshot.times, "busy_ms").items()}
    # One that is not known is no slow one.
    slowest = sorted(busy, key=lambda rank: -busy[rank] if busy[rank] == busy[rank] else math.inf)
    cells = {rank: _cell(rank, busy[rank], snapshot) for rank in slowest[:MOST_CELLS]}
    wide = max((cell.cell_len for cell in cells.values()), default=1) + 2
    per_line = _per_line(max(1, (width + 2) // wide), snapshot)
    want = -(-len(cells) // per_line)

    def lines(most: int) -> list[Text]:
        shown = slowest[: min(len(cells), most * per_line)]
        if choice.sort == "rank" and len(shown) == len(busy):
            shown = sorted(shown)
        padded = [fit(cells[rank], wide - 2) for rank in shown]
        return flow(padded, per_line * wide - 2)

    few = len(cells) < len(busy)
    note = f"slowest of {len(busy):,} (key 3)" if few else ""
    return PaneSection(
        f"RANK GRID{of_steps(snapshot)} (step time without waiting, ms)",
        lines,
        want,
        min(want, 4) if few else want,
        note,
    )


def _per_line(most: int, snapshot: PanelState) -> int:
    """Return how many ranks are on a line: those of whole nodes, or of an even part of one."""
    most_ranks = max((len(node["ranks"]) for node in snapshot.nodes), default=0)
    if not most_ranks or (snapshot.times and len(snapshot.times.ranks) > MOST_CELLS):
        return most
    if most_ranks <= most:
        return most // most_ranks * most_ranks
    return next((n for n in range(most, most // 2, -1) if most_ranks % n == 0), most)


def _cell(rank: int, busy_ms: float, snapshot: PanelState) -> Text:
    worst = snapshot.times.worst_rank if snapshot.times and snapshot.times.steps else None
    dead, named = rank in snapshot.dead, rank in snapshot.named
    digits = len(str(snapshot.times.ranks[-1])) if snapshot.times else 1
    cell = Text(f"rank{rank:<{digits}}  {text.number(busy_ms, aligned=True):>6} ")
    sign = "◆" if dead else "▲" if named or (rank == worst and not snapshot.named) else " "
    cell.append(sign)
    cell.stylize(TONES["critical"] if dead else MARK if named else HEAD if sign != " " else "")
    return cell


def exposed(snapshot: PanelState, width: int) -> PaneSection:
    """Return where the time of a step goes: a bar, and its parts in numbers."""
    stages = snapshot.times.stages if snapshot.times else None
    if not stages:
        return PaneSection("EXPOSED TIME", lambda _: [], 0)
    total = sum(stages.values())
    lines = [bar(stages, width), *flow(legend(stages), width)]
    title = f"EXPOSED TIME OF A STEP{of_steps(snapshot)} (mean {text.ms(total)})"
    return PaneSection(title, lambda most: lines[:most], len(lines), 2)


def legend(stages: Mapping[str, float]) -> list[Text]:
    """Return the stages of a step that can be seen in a bar, the longest first, in numbers."""
    total = sum(stages.values())
    return [
        Text()
        .append(f"{_STAGES[name][0]} ", _STAGES[name][1])
        .append(f"{name} {text.ms(ms)} ")
        .append(text.share(ms / total), HEAD)
        for name, ms in sorted(stages.items(), key=lambda item: -item[1])
        if total and ms >= _LEAST_SHARE * total
    ]


def bar(stages: Mapping[str, float], width: int) -> Text:
    """Return a bar of the stages of a step, by form and by colour."""
    total, drawn, until = sum(stages.values()), Text(), 0.0
    for name in STAGES:
        until += stages.get(name, 0.0)
        end = round(width * until / total) if total else 0
        sign, style = _STAGES[name]
        drawn.append(sign * (end - drawn.cell_len), style)
    return drawn


def signals(snapshot: PanelState, width: int) -> PaneSection:
    """Return in a line or two what is known of each signal."""
    briefs = {name: VIEWS[name].brief(answer) for name, answer in snapshot.answers.items()}
    lines = [line for facts in briefs.values() for line in paragraphs(facts, width)]
    title = ", ".join(text.words(name).upper() for name, facts in briefs.items() if facts.pairs)
    return PaneSection(title, lambda most: cut(lines, most), min(len(lines), _SIGNALS), min(len(lines), 2))


def _fullest_nodes(snapshot: PanelState) -> str:
    """Return the nodes with the least free memory."""
    parts = []
    for name, words in (("mem_pct", "RAM"), ("gpu_mem_pct", "VRAM")):
        measured = [node for node in snapshot.nodes if node[name] is not None]
        if len(measured) > _WORST:  # of fewer, all may be there
            fullest = max(measured, key=lambda node: float(node[name]))
            parts.append(f"{words} {text.percent(fullest[name])} ({fullest['label']})")
    return f"fullest: {', '.join(parts)}" if parts else ""


def health(snapshot: PanelState, width: int) -> PaneSection:
    """Return how busy, full, hot and anomalous each node is."""
    evidence = evidence_of(snapshot.verdict)
    ordered = sorted(snapshot.nodes, key=lambda node: natural(node["label"]))

    def lines(most: int) -> list[Text]:
        few = len(ordered) <= most
        worst = sorted(
            snapshot.nodes, key=lambda node: (node["label"] in evidence, *badness(node)), reverse=True
        )
        shown = ordered if few else worst[: most - 1]
        drawn = table([_health(node, evidence.get(node["label"], [])) for node in shown], width)
        return drawn if few else [*drawn, _more(len(ordered) - len(shown), "node", 2)]

    note = Text(_fullest_nodes(snapshot), QUIET)
    return PaneSection("NODE HEALTH", lines, _listed(ordered), min(2, len(ordered)), note)


def _health(node: Mapping[str, Any], evidence: Sequence[str]) -> list[Text | str]:
    heat, power = node["gpu_temperature_c"], node["gpu_power_w"]
    lost = Text("◆ lost", TONES["critical"])
    return [
        node["label"],
        f"CPU {text.percent(node['cpu_pct'])}" if node["alive"] else lost,
        f"RAM {text.percent(node['mem_pct'])}",
        f"GPU {text.percent(node['gpu_util_pct'])}",
        f"VRAM {text.percent(node['gpu_mem_pct'])}",
        f"{text.number(heat, 0)} °C",
        f"{text.number(power, 0)} W",
        Text(f"▲ {'; '.join(evidence)}" if evidence else "", MARK),
    ]


def events(snapshot: PanelState, width: int) -> PaneSection:
    """Return the events, newest first."""
    lines = table([event_cells(event) for event in snapshot.events[:MOST_CELLS]], width)
    return PaneSection("EVENTS (UTC)", lambda most: lines[:most], len(lines), 1)


def event_cells(event: Mapping[str, Any]) -> list[Text | str]:
    """Return the time, the sign and the words of an event."""
    tone = event["severity"]
    return [
        text.clock(event["time"]),
        Text(f"{SIGNS[tone]} {text.words(event['kind'])}", TONES[tone]),
        event["text"],
    ]


def output(snapshot: PanelState, width: int, rank: int | None = None) -> PaneSection:
    """Return the last output of a rank, the newest line last; stderr lines are marked."""
    last_output = snapshot.output
    if last_output is None or rank not in (None, last_output.rank):
        return PaneSection("LAST OUTPUT", lambda _: [], 0)
    shown: list[Text] = []
    for line in last_output.lines:
        if line.skipped:
            shown.append(Text(f"… {text.count(line.skipped, 'more line')}", QUIET))
        err = line.stream == "stderr"
        shown.append(Text().append("! " if err else "  ", MARK).append(text.one_line(line.text)))
    if not shown:
        shown = [
            Text(
                f"No output is known: {why}."
                if (why := last_output.missing)
                else "This rank has printed nothing.",
                QUIET,
            )
        ]
    note = Text("! stderr", QUIET)
    title = f"LAST OUTPUT OF RANK {last_output.rank}"
    return PaneSection(title, lambda most: [fit(line, width) for line in shown[-most:]], len(shown), 3, note)
