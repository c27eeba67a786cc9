"""The parts of the panel, each made of a snapshot for a width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS
from traceml_ray.reports.conclusion import Conclusion
from traceml_ray.reports.headlines import also, part_of
from traceml_ray.reports.memory import first_words
from traceml_ray.reports.severity import tone_of
from traceml_ray.stages import STAGES
from traceml_ray.views.nodes import evidence_of, worst_first
from traceml_ray.views.severity import SIGNS
from traceml_ray.views.state import RUN_OVER
from traceml_ray.views.values import natural, number

from .lines import HEAD, MARK, QUIET, TONES, Section, cut, fit, flow, table, wrap
from .snapshot import Choice, Snapshot

MOST_CELLS = 32
"""Of a larger job the grid shows only so many ranks, the slowest."""
_LABEL = 9
_FIRST = 3
"""Parts of the verdict that have a line in any case: what, why, next."""
_SHORT = 8
_MANY, _WORST = 16, 8
_SEEN = 0.005
"""%: less is written as 0."""
_LEAST_SHARE = 0.005
"""Of a step: a stage with less is not listed."""
_STAGES = {
    "post_sync": ("▒", "magenta"),
    "data": ("█", "yellow"),
    "prepare": ("▚", "green"),
    "forward": ("▓", "cyan"),
    "backward": ("░", "blue"),
    "sync_wait": ("·", QUIET),
}
"""How a stage is drawn: by form and by colour."""


def title_of(of: Snapshot) -> str:
    """Return "TraceML — Multi-Node DDP  (2 nodes × 4 GPUs = 8 ranks)"."""
    ranks, nodes = of.facts["world_size"], of.facts["nnodes"]
    kind = "Multi-Node " * bool(nodes and nodes > 1) + text.one_line(of.facts["strategy"] or "").upper()
    kind = "" if kind == "SINGLE" else kind
    return f"TraceML{f' — {kind}' if kind else ''}{_size(of, ranks, nodes)}"


def _size(of: Snapshot, ranks: int | None, nodes: int | None) -> str:
    if not ranks:
        return ""
    if not nodes or ranks == 1:
        return f"  ({text.count(ranks, 'rank')})"
    per_node = {len(node["ranks"]) for node in of.nodes if node["ranks"]}
    if len(per_node) != 1 or per_node != {ranks / nodes}:
        return f"  ({text.count(nodes, 'node')}, {text.count(ranks, 'rank')})"
    (each,) = per_node
    gpus = all((node["gpus"] or 0) >= each for node in of.nodes if node["ranks"])
    unit = text.count(each, "GPU") if gpus else f"{each:,} process{'es' * (each > 1)}"
    return f"  ({text.count(nodes, 'node')} × {unit} = {text.count(ranks, 'rank')})"


def head(of: Snapshot, width: int) -> list[Text]:
    """Return the session, its step, its skew and the straggler, on one line."""
    label = of.verdict["label"] if of.verdict else ""
    kind = LABELS[label].kind if label in LABELS else ""
    straggler = text.ranks(of.named) if kind == "finding" and of.named else text.NA
    straggler = "none" if kind == "healthy" else "none yet" if kind == "watching" else straggler
    step = text.NA if of.step is None else f"{of.step:,}"
    skew = number(of.times.get("skew_pct")) if of.times else None
    facts = {
        "SESSION": text.one_line(of.facts["id"]),
        "STEP": step,
        "GLOBAL SKEW": text.percent(skew),
        "STRAGGLER": straggler,
    }
    used = sum(len(name) + len(value) + 4 for name, value in facts.items()) - 3
    for name, value in rates(of).items():  # as many as there is room for
        if (used := used + len(name) + len(value) + 4) <= width:
            facts[name] = value
    rest = sum(len(name) + len(value) + 4 for name, value in facts.items()) - len(facts["SESSION"]) - 3
    facts["SESSION"] = fit(facts["SESSION"], max(_SHORT, width - rest)).plain.rstrip()
    line = Text()
    for name, value in facts.items():
        named = MARK if name == "STRAGGLER" and kind == "finding" else HEAD
        line.append(" │ " if line else "", QUIET).append(f"{name} ").append(value, named)
    return [line]


def rates(of: Snapshot) -> dict[str, str]:
    """Return what the job gets through, its MFU and how long it will take, where they are known."""
    known = of.throughput
    if known is None:
        return {}
    found = dict[str, str]()
    for name in ("tokens", "samples"):
        if not found and known.get(f"{name}_per_s") is not None:
            found[f"{name.upper()}/S"] = text.number(known.get(f"{name}_per_s"))  # type: ignore[arg-type]
    if known["mfu_pct"] is not None:
        found["MFU"] = text.percent(known["mfu_pct"])
    if known["eta_s"] is not None:
        found["LEFT"] = text.duration(known["eta_s"])
    return found


def verdict(of: Snapshot, width: int, most: int) -> Section:
    """Return the verdict, why, what to do, what it costs and since when; and how fresh and complete it is."""
    late = "bold yellow" if of.state == "stale" else ""
    note = Text().append(of.badge, late).append(f" · {of.coverage}")
    known, first = of.verdict, of.first
    more = first is not None and first.subject != "steps"  # something is more severe than the verdict
    parts = [] if known is None else [
        *(_first(of, first) if first is not None and more else ()),
        ("Steps" if more else "Verdict", headline(known), TONES[tone_of(known)[0]] or HEAD),
        ("Why", known["why"], ""),
        ("Next", known["next"] if known["label"] != "healthy" else "", ""),
        ("Cost", known["cost"], ""),
        *(("" if at else "Also", line, "") for at, line in enumerate(also(known))),
        ("", known["began"], ""),
        ("Restarts", of.facts["restarted"], ""),
    ]  # fmt: skip
    if of.state != "live" or known is None:
        at = 0 if known is None else 3 if of.state in RUN_OVER else 1
        parts.insert(at, ("State", of.state_text, late))
    least = _FIRST + 2 * (of.tone == "critical")  # what ends a run is more than a line long
    shown = [(label, wrap(said, width - _LABEL, style)) for label, said, style in parts if said]
    want = sum(len(lines) for _, lines in shown)
    return Section("VERDICT", lambda size: _labelled(shown, size), min(want, most), min(want, least), note)


def _first(of: Snapshot, first: Conclusion) -> list[tuple[str, str, str]]:
    """Return what is more severe than the verdict on the steps."""
    shown = f"{of.sign} {first.headline}"
    return [("Verdict", shown, TONES[of.tone]), ("Why", first.why, ""), ("Next", first.next, "")]


def headline(known: Mapping[str, Any]) -> str:
    """Return the verdict on the steps in one line, with its cost."""
    cost = known["cost_pct"] if known["label"] != "healthy" else None
    return f"{tone_of(known)[1]} {known['headline']}" + (
        f", {text.percent(cost)} {part_of(known)}" if cost else ""
    )


def _labelled(parts: Sequence[tuple[str, Sequence[Text]]], most: int) -> list[Text]:
    """Return parts in at most so many lines: a line of each of the first, then the rest, in order."""
    sizes = list[int]()
    for at, (_, lines) in enumerate(parts):
        kept = sum(min(len(other), 1 + (most > 4)) for _, other in parts[at + 1 : _FIRST])
        left = most - sum(sizes)
        sizes.append(min(len(lines), max(left - kept, min(left, 1))))
    found = []
    for (label, lines), size in zip(parts, sizes, strict=True):
        for at, line in enumerate(cut(lines, size)):
            found.append(Text().append(f"{label if at == 0 else '':<{_LABEL}}", HEAD).append_text(line))
    return found


def node_summary(of: Snapshot, width: int) -> Section:
    """Return the busy time of each node, its slowest rank, and by how much it is above the fastest node."""
    timed = [node for node in of.nodes if node["median_ms"] is not None or not node["alive"]]
    ordered = sorted(timed, key=lambda node: natural(node["label"]))
    fastest = min(
        (node for node in timed if node["slower_pct"] is not None),
        key=lambda node: node["slower_pct"],
        default={"label": ""},
    )["label"]

    def lines(most: int) -> list[Text]:
        few = len(ordered) <= most
        shown = ordered if few else sorted(timed, key=worst_first)[: most - 1]
        rows = [_node(node, of) for node in shown]
        for against in (f" vs {fastest}", ""):  # that is in the title, too
            found = table([[*row[:-1], _beside(row[-1], against)] for row in rows], None)
            if max(line.cell_len for line in found) <= width:
                break
        found = [fit(line, width) for line in found]
        return found if few else [*found, _more(len(ordered) - len(shown), "node", 2)]

    note = Text(f"← above the fastest, {fastest}" if len(ordered) > 1 and fastest else "", QUIET)
    return Section(f"NODE SUMMARY{of_steps(of)}", lines, _listed(ordered), min(4, len(ordered)), note)


def of_steps(of: Snapshot) -> str:
    """Return ", steps 35–89": which steps the numbers are of, where that is not plain."""
    if of.steps is not None:
        return f", steps {of.steps[0]:,}–{of.steps[1]:,}"
    return ", all steps" if of.times and of.times.get("steps") and of.times["of_all"] else ""


def _listed(nodes: Sequence[object]) -> int:
    """Return how many lines a list of nodes has: of many only the worst."""
    return len(nodes) if len(nodes) <= _MANY else _WORST + 1


def _beside(over: Text | str, against: str) -> Text:
    return Text("").append_text(over).append(against) if isinstance(over, Text) and over else Text("")


def _node(node: Mapping[str, Any], of: Snapshot) -> list[Text | str]:
    if not node["alive"]:
        return [node["label"], Text("◆ lost", TONES["critical"]), "", "", ""]
    late = bool({*of.named} & {*node["ranks"]})
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


def rank_grid(of: Snapshot, width: int, choice: Choice) -> Section:
    """Return the busy time of each rank, the named ones marked; of a large job the slowest ones."""
    times: Mapping[str, Any] = of.times or {"ranks": (), "busy_ms": ()}
    busy = dict(zip(times["ranks"], map(float, times["busy_ms"]), strict=True))
    # One that is not known is no slow one.
    slowest = sorted(busy, key=lambda rank: -busy[rank] if busy[rank] == busy[rank] else math.inf)
    cells = {rank: _cell(rank, busy[rank], of) for rank in slowest[:MOST_CELLS]}
    wide = max((cell.cell_len for cell in cells.values()), default=1) + 2
    per_line = _per_line(max(1, (width + 2) // wide), of)
    want = -(-len(cells) // per_line)

    def lines(most: int) -> list[Text]:
        shown = slowest[: min(len(cells), most * per_line)]
        if choice.sort == "rank" and len(shown) == len(busy):
            shown = sorted(shown)
        padded = [fit(cells[rank], wide - 2) for rank in shown]
        return flow(padded, per_line * wide - 2)

    few = len(cells) < len(busy)
    note = f"slowest of {len(busy):,} (key 3)" if few else ""
    return Section(
        f"RANK GRID{of_steps(of)} (step time without waiting, ms)",
        lines,
        want,
        min(want, 4) if few else want,
        note,
    )


def _per_line(most: int, of: Snapshot) -> int:
    """Return how many ranks are on a line: those of whole nodes, or of an even part of one."""
    own = max((len(node["ranks"]) for node in of.nodes), default=0)
    if not own or (of.times and len(of.times["ranks"]) > MOST_CELLS):
        return most
    if own <= most:
        return most // own * own
    return next((n for n in range(most, most // 2, -1) if own % n == 0), most)


def _cell(rank: int, busy_ms: float, of: Snapshot) -> Text:
    worst = of.times["worst_rank"] if of.times and of.times["steps"] else None
    dead, named = rank in of.dead, rank in of.named
    digits = len(str(of.times["ranks"][-1])) if of.times else 1
    found = Text(f"rank{rank:<{digits}}  {text.number(busy_ms, aligned=True):>6} ")
    sign = "◆" if dead else "▲" if named or (rank == worst and not of.named) else " "
    found.append(sign)
    found.stylize(TONES["critical"] if dead else MARK if named else HEAD if sign != " " else "")
    return found


def exposed(of: Snapshot, width: int) -> Section:
    """Return where the time of a step goes: a bar, and its parts in numbers."""
    stages = of.times.get("stages") if of.times and of.times["steps"] else None
    if not stages:
        return Section("EXPOSED TIME", lambda _: [], 0)
    total = sum(stages.values())
    found = [bar(stages, width), *flow(legend(stages), width)]
    title = f"EXPOSED TIME OF A STEP{of_steps(of)} (mean {text.ms(total)})"
    return Section(title, lambda most: found[:most], len(found), 2)


def legend(stages: Mapping[str, float]) -> list[Text]:
    """Return the stages of a step that can be seen in a bar, the longest first, in numbers."""
    total = sum(stages.values())
    return [
        Text()
        .append(f"{_STAGES[name][0]} ", _STAGES[name][1])
        .append(f"{name} {text.ms(ms)} ")
        .append(text.share(ms / total), HEAD)
        for name, ms in sorted(stages.items(), key=lambda each: -each[1])
        if total and ms >= _LEAST_SHARE * total
    ]


def bar(stages: Mapping[str, float], width: int) -> Text:
    """Return a bar of the stages of a step, by form and by colour."""
    total, found, until = sum(stages.values()), Text(), 0.0
    for name in STAGES:
        until += stages.get(name, 0.0)
        end = round(width * until / total) if total else 0
        sign, style = _STAGES[name]
        found.append(sign * (end - found.cell_len), style)
    return found


def memory(of: Snapshot, width: int) -> Section:
    """Return which rank's memory grew, and who uses most of what there is."""
    found = of.memory
    if found is None or not found.ranks:
        shown = _fullest_nodes(of)
        return Section("MEMORY", lambda most: shown[:most], len(shown))
    used = [row for row in found.ranks if row.used_bytes is not None and row.total_bytes]
    fullest = max(used, key=lambda row: (row.used_bytes or 0) / (row.total_bytes or 1), default=None)
    lines = [line for sentence in first_words(found) for line in wrap(sentence, width)]
    if found.findings:
        severe = found.findings[0].severity
        lines[0] = Text().append(f"{SIGNS[severe]} ", TONES[severe]).append_text(lines[0])
    if fullest is not None:
        share = text.share((fullest.used_bytes or 0) / (fullest.total_bytes or 1))
        of_all = f"{text.size(fullest.used_bytes)} of {text.size(fullest.total_bytes)}, {share}"
        device = "host" if fullest.device is None else f"GPU {fullest.device}"
        lines.append(Text(f"fullest: rank {fullest.rank} ({fullest.node}, {device}) {of_all}"))
    return Section("MEMORY", lambda most: [*lines[: most - 1], lines[-1]], len(lines), 1)


def _fullest_nodes(of: Snapshot) -> list[Text]:
    """Return the nodes with the least free memory: of a large job, ranks are on a pane of their own."""
    found = []
    for name, words in (("mem_pct", "RAM"), ("gpu_mem_pct", "VRAM")):
        known = [node for node in of.nodes if node[name] is not None]
        if known:
            fullest = max(known, key=lambda node: float(node[name]))
            found.append(f"{words} {text.percent(fullest[name])} ({fullest['label']})")
    beside = "; ranks: key 4" if of.facts["memory"] else ""
    return [Text(f"fullest: {', '.join(found)}{beside}")] if found else []


def health(of: Snapshot, width: int) -> Section:
    """Return how busy, full, hot and anomalous each node is."""
    evidence = evidence_of(of.verdict)
    ordered = sorted(of.nodes, key=lambda node: natural(node["label"]))

    def lines(most: int) -> list[Text]:
        few = len(ordered) <= most
        worst = sorted(of.nodes, key=lambda node: (node["label"] not in evidence, *worst_first(node)))
        shown = ordered if few else worst[: most - 1]
        found = table([_health(node, evidence.get(node["label"], [])) for node in shown], width)
        return found if few else [*found, _more(len(ordered) - len(shown), "node", 2)]

    return Section("NODE HEALTH", lines, _listed(ordered), min(2, len(ordered)))


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


def events(of: Snapshot, width: int) -> Section:
    """Return what happened, newest first."""
    found = table([event_cells(event) for event in of.events[:MOST_CELLS]], width)
    return Section("EVENTS (UTC)", lambda most: found[:most], len(found), 1)


def event_cells(event: Mapping[str, Any]) -> list[Text | str]:
    """Return the time, the sign and the words of an event."""
    tone = event["severity"]
    return [
        text.clock(event["time"]),
        Text(f"{SIGNS[tone]} {text.words(event['kind'])}", TONES[tone]),
        event["text"],
    ]


def output(of: Snapshot, width: int, rank: int | None = None) -> Section:
    """Return what a rank printed last, the newest line at the end; those of stderr are marked."""
    found = of.output
    if found is None or rank not in (None, found["rank"]):
        return Section("LAST OUTPUT", lambda _: [], 0)
    shown: list[Text] = []
    for each in found["lines"]:
        if each["skipped"]:
            shown.append(Text(f"… {text.count(each['skipped'], 'more line')}", QUIET))
        err = each["stream"] == "stderr"
        shown.append(Text().append("! " if err else "  ", MARK).append(text.one_line(each["text"])))
    if not shown:
        shown = [Text(f"No line is known{f' ({why})' if (why := found['missing']) else ''}.", QUIET)]
    note = Text("! stderr", QUIET)
    title = f"LAST OUTPUT OF RANK {found['rank']}"
    return Section(title, lambda most: [fit(line, width) for line in shown[-most:]], len(shown), 3, note)
