"""
The parts of the overview: blocks of the document (`document.model`), made from a snapshot for a
given width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.document.drawing import stage_bars, time_scale
from traceml_ray.document.model import SIGNS, Bars, Column, Lines, Table, picked
from traceml_ray.document.terminal import (
    HEAD,
    LINE,
    MARK,
    QUIET,
    TONES,
    PaneSection,
    brief_table,
    cut,
    fit,
    grid,
    paragraphs,
    printed,
    stacked,
    wrap,
)
from traceml_ray.reports.headlines import beside, line_of, part_of, tone_of
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.output.view import output_lines
from traceml_ray.signals.views import VIEWS, signal_numbers
from traceml_ray.store.summary_shape import Conclusion
from traceml_ray.text import natural
from traceml_ray.views.ranks import badness, evidence_of
from traceml_ray.views.state import RUN_OVER
from traceml_ray.views.tables import EVENT, EVENTS
from traceml_ray.views.values import by_rank, number

from .snapshot import PANES, Choice, PanelState, ShownVerdict

MOST_CELLS = 32
"""Largest number of ranks in the grid. For a larger job, the grid shows the slowest ranks."""
DRAWN_STEPS = 64
"""Number of newest steps that a line covers."""
_MOST_DRAWN = 32
"""Largest number of characters of the line for the whole job."""
_LABEL = 9
_FIRST = 3
"""Number of parts of the verdict that always have a line: what, why, next."""
_SHORT = 8
_SIGNALS = 4
"""Largest number of lines about signals."""
_WORST = 8
_SEEN = 0.005
"""Percentages below this are shown as 0."""


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
    """Return one line with the session, its step time, its skew, the straggler, and the stages of a step."""
    label = snapshot.verdict.judged.label if snapshot.verdict else ""
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
    for name, value in rates(snapshot).items():  # as many as fit
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
    """
    Return the number of cells left beside `facts`, if the name of the session is cut to `session`
    cells.
    """
    cut_off = max(0, len(facts["SESSION"]) - session) if session else 0
    return width - sum(len(name) + len(value) + 4 for name, value in facts.items()) + 3 + cut_off


def _step_line(snapshot: PanelState, most: int) -> str:
    """Return the time of the newest steps as bars, after a space. Empty if there is no room."""
    if snapshot.columns is None or most < LINE:
        return ""
    step_ms = snapshot.columns.step_ms
    newest = step_ms if snapshot.state in RUN_OVER else step_ms[-DRAWN_STEPS:]
    bars = text.sparkline(newest.tolist(), most, time_scale(newest))
    return f" {bars}" if bars else ""


def rates(snapshot: PanelState) -> dict[str, str]:
    """Return the known numbers of signals that are shown on the one line."""
    return dict(number.short for number in signal_numbers(snapshot.signals) if number.short)


def verdict(snapshot: PanelState, width: int, most: int) -> PaneSection:
    """Return the verdict with reason, advice, cost and beginning, and how recent and complete its data is."""
    late = "bold yellow" if snapshot.state == "stale" else ""
    note = Text().append(snapshot.badge, late).append(f" · {snapshot.coverage}" if snapshot.coverage else "")
    step_verdict, first = snapshot.verdict, snapshot.first
    more = first is not None and first.subject != "steps"  # something is more severe than the verdict
    parts = [] if step_verdict is None else [
        *(_first(snapshot, first) if first is not None and more else ()),
        (
            "Steps" if more else "Verdict",
            headline(step_verdict),
            TONES[tone_of(step_verdict.judged)[0]] or HEAD,
        ),
        ("Why", step_verdict.why, ""),
        ("Next", step_verdict.judged.next if step_verdict.judged.label != "healthy" else "", ""),
        ("Cost", step_verdict.cost, ""),
        ("", step_verdict.began, ""),
        ("Restarts", snapshot.facts["restarted"], ""),
    ]  # fmt: skip
    if snapshot.state != "live" or step_verdict is None:
        position = 0 if step_verdict is None else 3 if snapshot.state in RUN_OVER else 1
        parts.insert(position, ("State", snapshot.state_text, late))
    least = _FIRST + 2 * (snapshot.tone == "critical")  # a failure that ends a run needs more than one line
    shown = [
        (label, wrap(value.replace("`", ""), width - _LABEL, style)) for label, value, style in parts if value
    ]
    want = sum(len(lines) for _, lines in shown)
    return PaneSection(
        "VERDICT", lambda size: _labelled(shown, size), min(want, most), min(want, least), note
    )


def _first(snapshot: PanelState, first: Conclusion) -> list[tuple[str, str, str]]:
    """Return the conclusion that is more severe than the verdict on the steps."""
    shown = f"{snapshot.sign} {first.headline}"
    return [("Verdict", shown, TONES[snapshot.tone]), ("Why", first.why, ""), ("Next", first.next, "")]


def findings(snapshot: PanelState, width: int) -> PaneSection:
    """Return the other findings, one line each with cost and reason, in the order of all faces."""
    others = beside(snapshot.findings, snapshot.first.key if snapshot.first else None)
    others = [one for one in others if one.signal != "nodes"]  # shown beside their node
    rows = [_finding(one, width) for one in others]

    def lines(most: int) -> list[Text]:
        few = len(rows) <= most
        left = text.count(len(rows) - most + 1, "more finding")
        return rows if few else [*rows[: most - 1], Text(f"… {left}", QUIET)]

    return PaneSection("ALSO FOUND", lines, min(len(rows), _WORST), min(len(rows), 2))


def _finding(one: Finding, width: int) -> Text:
    row = Text().append(f"{SIGNS[one.severity]} {line_of(one)}  ", TONES[one.severity]).append(one.why)
    return fit(row, width)


def headline(verdict: ShownVerdict) -> str:
    """Return the verdict on the steps in one line, with its cost."""
    judged = verdict.judged
    cost = judged.cost_pct if judged.label != "healthy" else None
    spent = f", {text.percent(cost)} {part_of(judged)}" if cost else ""
    return f"{tone_of(judged)[1]} {verdict.headline}{spent}"


def _labelled(parts: Sequence[tuple[str, Sequence[Text]]], most: int) -> list[Text]:
    """Return parts in at most `most` lines: one line for each of the first parts, then the rest in order."""
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
    """
    Return the busy time of each node, its slowest rank, and how much slower it is than the
    fastest node.
    """
    timed = [node for node in _by_name(snapshot) if node["median_ms"] is not None or not node["alive"]]
    others = [node for node in timed if node["slower_pct"] is not None]
    fastest = min(others, key=lambda node: node["slower_pct"])["label"] if others else ""

    def late(node: Mapping[str, Any]) -> str:
        return "warning" if {*snapshot.named} & {*node["ranks"]} else ""

    def worst(node: Mapping[str, Any]) -> str:
        rank = "" if node["worst_rank"] is None else f" (rank {node['worst_rank']})"
        return f"{text.ms(node['worst_ms'])}{rank}"

    def over(node: Mapping[str, Any]) -> str:
        slower = node["slower_pct"] or 0.0
        return f"← {text.percent(slower, sign=True)}" if slower >= _SEEN else ""

    def alive(written: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda node: written(node) if node["alive"] else ""

    columns = [
        Column("node", lambda node: node["label"]),
        Column("", lambda node: "" if node["alive"] else "lost", tone=_lost),
        Column(
            "median", lambda node: node["median_ms"], written=alive(lambda node: text.ms(node["median_ms"]))
        ),
        Column("worst", lambda node: node["worst_ms"], written=alive(worst), tone=late),
        Column(
            "skew", lambda node: node["skew_pct"], written=alive(lambda node: text.percent(node["skew_pct"]))
        ),
        Column(" ", over),
        Column("  ", lambda node: f"vs {fastest}" * bool(over(node))),  # that is in the title, too
    ]
    note = f"← above the fastest, {fastest}" if len(timed) > 1 and fastest else ""
    title = f"Node summary{of_steps(snapshot)}"
    block = Table(title, columns, timed, note, badness=badness, spare=("  ",))
    return brief_table(block, width, _more_nodes, least=4, named="=")


def _by_name(snapshot: PanelState) -> list[Mapping[str, Any]]:
    return sorted(snapshot.nodes, key=lambda node: natural(node["label"]))


def _lost(node: Mapping[str, Any]) -> str:
    return "" if node["alive"] else "critical"


def _more_nodes(count: int) -> str:
    return f"{text.count(count, 'more node')} (key {PANES.index('nodes') + 1})"


def of_steps(snapshot: PanelState) -> str:
    """Return ", steps 35–89", the steps that the numbers cover, if that is not obvious."""
    if snapshot.steps is not None:
        return f", steps {snapshot.steps[0]:,}–{snapshot.steps[1]:,}"
    return ", all steps" if snapshot.times and snapshot.times.steps and snapshot.times.of_all else ""


def rank_grid(snapshot: PanelState, width: int, choice: Choice) -> PaneSection:
    """Return the busy time of each rank, with the named ranks marked. For a large job, the slowest ranks."""
    busy = {rank: float(ms) for rank, ms in by_rank(snapshot.times, "busy_ms").items()}
    slowest = sorted(busy, key=lambda rank: _slowness(busy[rank]), reverse=True)[:MOST_CELLS]
    digits = len(str(max(busy, default=0)))
    columns = [
        Column(
            "rank", lambda rank: rank, written=lambda rank: f"rank{rank:<{digits}}", tone=_rank_tone(snapshot)
        ),
        Column(
            "busy",
            lambda rank: busy[rank],
            written=lambda rank: f"{text.number(busy[rank], aligned=True):>6}",
        ),
    ]
    few = len(slowest) < len(busy)
    block = Table(
        f"Rank grid{of_steps(snapshot)} (step time without waiting, ms)",
        columns,
        sorted(slowest) if choice.sort == "rank" and not few else slowest,
        f"slowest of {len(busy):,} (key {PANES.index('ranks') + 1})" if few else "",
        badness=lambda rank: _slowness(busy[rank]),
    )
    return grid(block, width, lambda most: _per_line(most, snapshot))


def _slowness(busy_ms: float) -> float:
    """Return the sort key of ranks. A rank whose time is unknown does not count as slow."""
    return busy_ms if busy_ms == busy_ms else -math.inf


def _rank_tone(snapshot: PanelState) -> Callable[[int], str]:
    worst = snapshot.times.worst_rank if snapshot.times and snapshot.times.steps else None

    def tone(rank: int) -> str:
        if rank in snapshot.dead:
            return "critical"
        slowest = rank == worst and not snapshot.named
        return "warning" if rank in snapshot.named else "notice" if slowest else ""

    return tone


def _per_line(most: int, snapshot: PanelState) -> int:
    """Return the number of ranks on a line: those of whole nodes, or of an equal part of one node."""
    most_ranks = max((len(node["ranks"]) for node in snapshot.nodes), default=0)
    if not most_ranks or (snapshot.times and len(snapshot.times.ranks) > MOST_CELLS):
        return most
    if most_ranks <= most:
        return most // most_ranks * most_ranks
    return next((n for n in range(most, most // 2, -1) if most_ranks % n == 0), most)


def exposed(snapshot: PanelState, width: int) -> PaneSection:
    """Return where the time of a step goes: a bar, and its parts as numbers."""
    stages = snapshot.times.stages if snapshot.times else {}
    mean = f"(mean {text.ms(sum(stages.values()))})" if stages else ""
    return stages_of(f"Exposed time of a step{of_steps(snapshot)} {mean}", stages, width, 2)


def stages_of(title: str, stages: Mapping[str, float], width: int, least: int = 1) -> PaneSection:
    """Return the stages of a step (ms) as a bar and as numbers."""
    bars = stage_bars(stages)
    columns = [Column("stage", lambda bar: bar.name), Column("ms", lambda bar: bar.width, "aligned")]
    return stacked(Bars(title, bars, Table(title, columns, bars)), width, least)


def signals(snapshot: PanelState, width: int) -> PaneSection:
    """Return one or two lines with what is known of each signal. All have a first line before one has two."""
    briefs = {name: VIEWS[name].brief(answer) for name, answer in snapshot.answers.items()}
    written = [lines for facts in briefs.values() if (lines := paragraphs(facts, width))]
    title = ", ".join(text.words(name).upper() for name, facts in briefs.items() if facts.pairs)
    count = sum(map(len, written))
    return PaneSection(
        title,
        lambda most: _first_lines(written, most),
        min(count, max(_SIGNALS, len(written))),
        min(count, 2),
    )


def _first_lines(paragraphs: Sequence[Sequence[Text]], most: int) -> list[Text]:
    """Return at most `most` lines. The first lines of all paragraphs come before a second line of one."""
    places = sorted((line, number) for number, lines in enumerate(paragraphs) for line in range(len(lines)))
    counts = Counter(number for _, number in places[:most])
    return [line for number, lines in enumerate(paragraphs) for line in cut(lines, counts[number])]


def _fullest_nodes(snapshot: PanelState) -> str:
    """Return the nodes with the least free memory."""
    parts = []
    for name, words in (("mem_pct", "RAM"), ("gpu_mem_pct", "VRAM")):
        measured = [node for node in snapshot.nodes if node[name] is not None]
        if len(measured) > _WORST:  # if there are fewer, all of them can be shown
            fullest = max(measured, key=lambda node: float(node[name]))
            parts.append(f"{words} {text.percent(fullest[name])} ({fullest['label']})")
    return f"fullest: {', '.join(parts)}" if parts else ""


def health(snapshot: PanelState, width: int) -> PaneSection:
    """Return how busy, full, hot and anomalous each node is."""
    evidence = evidence_of(snapshot.verdict and snapshot.verdict.judged)
    columns = [
        Column("node", lambda node: node["label"]),
        Column("", lambda node: "" if node["alive"] else "lost", tone=_lost),
        Column(
            "CPU",
            lambda node: node["cpu_pct"],
            written=lambda node: text.percent(node["cpu_pct"]) * node["alive"],
        ),
        Column("RAM", lambda node: node["mem_pct"], "percent"),
        Column("GPU", lambda node: node["gpu_util_pct"], "known percent"),
        Column("VRAM", lambda node: node["gpu_mem_pct"], "known percent"),
        Column(" ", _in_unit("gpu_temperature_c", "°C")),
        Column("  ", _in_unit("gpu_power_w", "W")),
        Column("   ", lambda node: "; ".join(evidence.get(node["label"], ())), tone=_anomalous(evidence)),
    ]
    block = Table(
        "Node health",
        columns,
        _by_name(snapshot),
        _fullest_nodes(snapshot),
        badness=lambda node: (node["label"] in evidence, *badness(node)),
    )
    return brief_table(block, width, _more_nodes, least=2, named=" ")


def _in_unit(name: str, unit: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that formats a number of a node with its unit. Unknown numbers (no GPUs) give ""."""
    return lambda node: "" if node[name] is None else text.unit(node[name], unit, 0)


def _anomalous(evidence: Mapping[str, Any]) -> Callable[[Any], str]:
    return lambda node: "warning" if node["label"] in evidence else ""


def events(snapshot: PanelState, width: int, rank: int | None = None) -> PaneSection:
    """Return the newest events, or those of a rank, newest first."""
    shown = [event for event in snapshot.events if rank in (None, event["rank"])][:MOST_CELLS]
    title = f"{'Events' if rank is None else 'Its events'} ({text.zone()})"
    return brief_table(Table(title, [*picked(EVENTS, "time"), EVENT, *picked(EVENTS, "what")], shown), width)


def output(snapshot: PanelState, width: int, rank: int | None = None) -> PaneSection:
    """Return the last output of a rank, the newest line last; stderr lines are marked."""
    last_output = snapshot.output
    if last_output is None or rank not in (None, last_output.rank):
        return PaneSection("LAST OUTPUT", lambda _: [], 0)
    block = output_lines(last_output)
    lines = [("!" if mark == "stderr" else " ", line) for mark, line in block.lines]
    if not lines:
        missing = last_output.missing
        nothing = f"No output is known: {missing}." if missing else "This rank has printed nothing."
        lines = [("", nothing)]
    return printed(Lines(block.title, lines), width, Text("! stderr", QUIET))
