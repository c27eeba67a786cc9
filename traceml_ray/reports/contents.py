"""
The contents of a report: builds blocks of facts and tables from a summary. The text report and `report.html`
lay them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.labels import LABELS, Meaning
from traceml_ray.analysis.uneven_work import ExpertLoad, sentence
from traceml_ray.analysis.verdict import Stack
from traceml_ray.analysis.verdict_shapes import TimedEpisode, VerdictInfo
from traceml_ray.document.model import SIGNS, Column, Facts, Section, Table, per_rank_columns
from traceml_ray.reports.headlines import (
    beside,
    brief,
    cost_of,
    costs,
    current_episode,
    line_of,
    lost,
    named,
    part_of,
    restarted,
    wasted,
)
from traceml_ray.signals.finding import Finding
from traceml_ray.store.results import EarlierStart, RunInfo, SinkState, WholeLedger
from traceml_ray.store.summary_shape import (
    EventInfo,
    RankOverhead,
    SpanStatistics,
    StageStatistics,
    StepStatistics,
    Summary,
    SummaryNode,
    SummaryRank,
)

_MAX_RANKS = 32
_MAX_ROUTERS = 3
_MAX_LINES = 20
_MAX_FINDINGS = 6
_WORTH = 0.03
_MOST_OF = 0.5
"""Share of the steps above which a named cause shows in the medians over all steps."""


def runs_table(runs: Sequence[RunInfo], chosen: str | None) -> Table:
    """Return the table of runs, if there are several. `chosen` is the run that the report covers."""
    mark = " (selected)"
    columns = [
        Column("run", lambda run: run.name),
        Column("status", lambda run: run.status),
        Column(f"began ({text.zone()})", lambda run: run.started_at, "clock"),
        Column("ranks", lambda run: run.world_size, "plain"),
        Column("attempts", lambda run: run.attempts, "plain"),
        Column("rows", lambda run: run.ledger.stored, "plain"),
        Column("verdict", lambda run: text.words(run.label or text.NA) + mark * (run.id == chosen)),
    ]
    return Table("Runs of this session", columns, runs[-_MAX_LINES:] if len(runs) > 1 else [])


def verdict_facts(summary: Summary) -> Facts:
    """Return the verdict, its cost, its reason, anomalies at the same time, and what to do."""
    verdict, first = summary.verdict, summary.conclusion
    is_first = first.subject == "steps"
    # What is more severe than the verdict on the steps comes before it.
    before = (("Verdict", first.headline), ("Why", first.why), ("Next", first.next))
    return Facts(
        *(() if is_first else before),
        ("Verdict" if is_first else "Steps are", named(verdict)),
        ("", ", ".join(about_verdict(summary))),
        ("Why", verdict.why),
        ("", verdict.note),
        *(("", line) for line in evidence(summary.findings)),
        ("Next", verdict.next if is_first or meaning(verdict).kind == "finding" else ""),
    )


def findings_facts(summary: Summary) -> Facts:
    """Return the other findings, each with its cost, its reason, and what to do."""
    shown, lines = findings_beside(summary), list[tuple[str, str]]()
    advised = {summary.conclusion.next, summary.verdict.next}
    for one in shown[:_MAX_FINDINGS]:
        following = "" if one.next in advised else one.next
        lines += [
            ("" if lines else "Also", f"{SIGNS[one.severity]} {line_of(one)}"),
            ("", one.why),
            ("", following),
        ]
        advised.add(one.next)
    left = len(shown) - _MAX_FINDINGS
    return Facts(*lines, ("", f"and {text.count(left, 'more finding')}" if left > 0 else ""))


FINDINGS = [
    Column("", lambda one: one.severity, tone=lambda one: one.severity),
    Column("finding", lambda one: one.headline),
    Column("cost", cost_of, "figures"),
    Column("confidence", lambda one: one.confidence),
    Column("why, and what to do", lambda one: f"{one.why} {one.next}".strip(), "sentence"),
]


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the table of all findings besides the verdict, including those that are only information."""
    verdict_key = next((one.key for one in findings if one.signal == "steps"), None)
    shown = [one for one in findings if one.key != verdict_key]
    return Table(
        "Findings besides the verdict", FINDINGS, shown, empty="Nothing was found besides the verdict."
    )


def findings_beside(summary: Summary) -> list[Finding]:
    """
    Return the findings of a summary that are not shown with its verdict. For a failed run, these include
    those that are only information.
    """
    failed = meaning(summary.verdict).kind == "failure"
    every = beside(summary.findings, summary.conclusion.key, all_of=failed)
    return [one for one in every if one.signal != "nodes"]  # these are evidence of the verdict


def about_verdict(summary: Summary) -> list[str]:
    """Return the confidence of a verdict, the cost of its cause, and the cost of all causes."""
    verdict, about = summary.verdict, list[str]()
    if verdict.confidence:
        about.append(f"confidence {verdict.confidence}")
    transient = verdict.pattern == "transient"
    if verdict.chronic is not None or transient:
        about.append("chronic" if verdict.chronic else "transient" if transient else "now and then")
    if verdict.cost_pct:
        about.append(f"costs {costs(verdict)}")
        about.append(wasted(verdict.rank_hours_per_hour, has_gpus(summary)))
    if verdict.lost_s and verdict.lost_s != verdict.cost_s:
        about.append(f"all causes together {lost(verdict)}")
    return about


def has_gpus(summary: Summary) -> bool:
    """Return whether the ranks of the run have GPUs. If not, costs are in rank-hours."""
    return any(node["gpus"] for node in summary.system.nodes)


def evidence(findings: Sequence[Finding]) -> list[str]:
    """Return the anomalies of the named nodes. They are evidence, not the cause of the verdict."""
    nodes: dict[str, list[str]] = {}
    for one in findings:
        if one.signal == "nodes":
            nodes.setdefault(one.nodes[0], []).append(one.why)
    return [f"at the same time on {node}: {'; '.join(sentences)}" for node, sentences in nodes.items()]


def _of_a_part(summary: Summary) -> str:
    """
    Return a note that medians over all steps hide the named cause, if it was present in only a part of the
    steps.
    """
    episode = current_episode(summary.verdict, summary.episodes)
    steps = 0 if episode is None else episode.to_step - episode.from_step + 1
    if episode is None or steps > _MOST_OF * summary.steps.count:
        return ""
    return f" (of all steps; the named cause was in steps {episode.from_step:,}–{episode.to_step:,})"


def steps_facts(summary: Summary) -> Facts:
    """
    Return the time of a step, the differences between ranks and nodes, and the steps that these numbers
    cover.
    """
    steps = summary.steps
    before = ("Restarts", restarted(earlier_of(summary)))
    if steps.median_ms is None:
        return Facts(before, *_baseline(summary))
    times = f"median {text.ms(steps.median_ms)}, p95 {text.ms(steps.p95_ms)}"
    several = (steps.exchanges or 0) > 1.05  # else a single step was cut in two
    exchanges = f" of {text.number(steps.exchanges)} exchanges" if several else ""
    error_pct = steps.covers.error_pct if steps.covers else 0.0
    within = f"; medians and percentiles within {text.percent(error_pct)}" if error_pct else ""
    skew = node = ""
    if steps.worst_rank is not None and steps.global_skew_pct is not None:
        worst, over = steps.per_rank_median_ms[str(steps.worst_rank)], steps.global_skew_pct
        skew = f"rank {steps.worst_rank} is busy longest: {text.ms(worst)} a step without waiting, "
        skew += f"{text.percent(over)} over the median of {text.ms(steps.busy_median_ms)}"
        skew += _of_a_part(summary)
    if steps.worst_node is not None and steps.node_skew_pct is not None:
        node = f"slowest node {steps.worst_node}, {text.percent(steps.node_skew_pct)} over the fastest"
    after = f"of the {text.plain(steps.judged)} after warm-up{within}"
    return Facts(
        ("Steps", f"{text.count(steps.count, 'step')}{exchanges}, {times} ({after})"),
        before,
        ("Skew", skew),
        ("" if skew else "Skew", node),
        ("GPU idle", _idle(steps)),
        *_experts(summary.experts),
        ("Covers", _covers(steps)),
        ("Sampled", _sampled(steps)),
        *_baseline(summary),
    )


def earlier_of(summary: Summary) -> Sequence[EarlierStart]:
    """Return the earlier starts of the run, which the summary does not cover."""
    return next((run.earlier for run in summary.runs if run.id == summary.run), ())


def _idle(steps: StepStatistics) -> str:
    """Return the share of time in which GPUs wait for their hosts; "" without device clocks."""
    idle = {rank: pct for rank, pct in steps.per_rank_gpu_idle_pct.items() if pct is not None}
    if not idle:
        return ""
    most, middle = max(idle, key=lambda rank: idle[rank]), sorted(idle.values())[(len(idle) - 1) // 2]
    return (
        f"rank {most}'s waits for its host {text.percent(idle[most])} of the time; median "
        f"{text.percent(middle)}"
    )


def _experts(loads: Sequence[ExpertLoad]) -> list[tuple[str, str]]:
    """Return the imbalance of the expert load, for the least even routers."""
    pairs = [
        ("" if number else "Experts", sentence(load)) for number, load in enumerate(loads[:_MAX_ROUTERS])
    ]
    more = len(loads) - len(pairs)
    return [*pairs, *([("", f"and {text.count(more, 'more router')} that are more even")] if more else [])]


def _sampled(steps: StepStatistics) -> str:
    """Return which numbers cover only some steps, if device clocks are not read in all steps."""
    timed_pct = steps.covers.timed_pct if steps.covers else 100.0
    if timed_pct > 99:
        return ""
    return (
        f"the device's clock was read in {text.percent(timed_pct)} of the steps; all figures but the number "
        "of steps and their mean cover these steps"
    )


def _covers(steps: StepStatistics) -> str:
    """Return which steps the numbers and the verdict cover, if they leave out the oldest rows."""
    covers = steps.covers
    if covers is None or covers.rows_pct == 100:
        return ""
    all_counted = covers.counted_pct == 100
    what = "medians, shares, the verdict and its history" if all_counted else "all numbers"
    line = f"not the whole run: {what} are of steps {covers.from_step:,}–{covers.to_step:,}, "
    line += f"{text.percent(covers.rows_pct)} of the rows that were stored"
    if all_counted:
        mean = text.ms(steps.mean_ms)
        line += f"; the {text.plain(steps.count)} steps and their mean, {mean}, are of the whole run"
    return line


def _baseline(summary: Summary) -> list[tuple[str, str]]:
    """Return the baseline, if it was given or a drift from it was found."""
    baseline = summary.baseline
    drifted = any(meaning(one).names == "all" for one in [summary.verdict, *summary.verdicts])
    if baseline is None or not (baseline.source or drifted):
        return []
    where = baseline.source or f"steps {baseline.from_step:,}–{baseline.to_step:,} of this run"
    return [("Baseline", f"{where}: {text.ms(baseline.step_ms)} a step")]


def stages_table(stages: Sequence[StageStatistics]) -> Table:
    """Return the table of the step time by stage."""
    columns = [
        Column("stage", lambda stage: stage.name),
        Column("exposed ms", lambda stage: stage.exposed_ms, "aligned"),
        Column("share", lambda stage: stage.exposed_share, "share"),
        Column("", lambda stage: "█" * round(20 * stage.exposed_share)),
        Column("median ms", lambda stage: stage.median_ms, "aligned"),
        Column("largest ms", lambda stage: stage.max_ms, "aligned"),
        Column("on", _of_rank),
    ]
    return Table("Where the time of a step goes (exposed: what the job waited for)", columns, stages)


def spans_table(spans: Sequence[SpanStatistics], step_ms: float | None) -> Table:
    """Return the spans that take a noticeable share of a step."""
    columns = [
        Column("span", lambda span: span.name),
        Column("in", lambda span: span.stage),
        Column("median ms", lambda span: span.median_ms, "aligned"),
        Column("largest ms", lambda span: span.max_ms, "aligned"),
        Column("on", _of_rank),
        Column("of its stage", lambda span: span.share, "share"),
    ]
    large = [span for span in spans if step_ms and span.max_ms >= _WORTH * step_ms]
    return Table("Parts inside the stages (mean per step)", columns, large[:_MAX_LINES])


def _of_rank(stage: StageStatistics | SpanStatistics) -> str:
    """Return the rank with the largest time, if that time is above the median."""
    alone = stage.worst_rank is not None and stage.max_ms > 1.01 * stage.median_ms
    return f"rank {stage.worst_rank}" if alone else ""


def nodes_table(summary: Summary) -> Table:
    """
    Return the table of nodes: their ranks, and how busy and how full they were. If there are many, only the
    worst.
    """
    busy, nodes = summary.steps.per_node_median_ms, summary.session.nodes
    measured = {node["node_id"]: node for node in summary.system.nodes}

    def sampled(node: SummaryNode, name: str) -> Any:
        return measured.get(node.node_id, {}).get(name)

    columns = [
        Column("node", lambda node: node.hostname + " (lost)" * node.lost),
        Column("ranks", lambda node: node.ranks, "ranks"),
        Column("busy ms", lambda node: busy.get(node.hostname), "aligned"),
        Column("cpu (peak)", lambda node: _spread(sampled(node, "cpu_pct"), text.percent), "figures"),
        Column("memory (peak)", lambda node: _spread(sampled(node, "mem_used_bytes"), text.size), "figures"),
        Column("gpus", lambda node: _load(sampled(node, "gpus") or []), "figures"),
    ]
    named, title = {*summary.verdict.nodes}, "Nodes"
    if len(nodes) > _MAX_RANKS:
        title = f"Nodes (the worst {_MAX_RANKS} of {len(nodes):,})"
        order = sorted(
            range(len(nodes)),
            key=lambda index: (
                not nodes[index].lost,
                nodes[index].hostname not in named,
                -(busy.get(nodes[index].hostname) or 0),
            ),
        )
        nodes = [nodes[index] for index in sorted(order[:_MAX_RANKS])]
    return Table(title, columns, nodes)


def _load(gpus: Sequence[dict[str, Any]]) -> str:
    load = [gpu["util_pct"]["median"] for gpu in gpus if gpu.get("util_pct")]
    return f"{len(gpus)} × {text.percent(sum(load) / len(load))}" if load else text.NA


def ranks_table(summary: Summary, sections: Iterable[Section]) -> Table:
    """
    Return the table of ranks: their times, the values of signals, and how they ended. If there are many, only
    the worst.
    """
    busy, ranks = summary.steps.per_rank_median_ms, summary.ranks
    median = summary.steps.busy_median_ms
    idle = summary.steps.per_rank_gpu_idle_pct
    listed, title = list(ranks), "Ranks"
    if len(listed) > _MAX_RANKS:
        worst = sorted(listed, key=lambda rank: (ranks[rank].ended != "died", -(busy.get(rank) or 0)))
        listed = sorted(worst[:_MAX_RANKS], key=int)
        title = f"Ranks (the worst {_MAX_RANKS} of {len(ranks):,})"
    over = {rank: 100 * (ms / median - 1) for rank, ms in busy.items() if median and ms is not None}
    columns = [
        Column("rank", str, "figures"),
        Column("name", lambda rank: ranks[rank].name or ""),
        Column("node", lambda rank: text.plain(ranks[rank].node)),
        *([Column("role", lambda rank: _role(ranks[rank]))] if any(map(_role, ranks.values())) else []),
        Column("busy ms", lambda rank: busy.get(rank), "aligned"),
        Column("to median", lambda rank: over.get(rank), "more"),
        *([Column("gpu idle", lambda rank: idle.get(rank), "percent")] if idle else []),
        *per_rank_columns(sections, int),
        Column("last step", lambda rank: ranks[rank].last_step, "plain"),
        Column("end", lambda rank: _end(ranks[rank])),
    ]
    return Table(title, columns, listed)


def _role(rank: SummaryRank) -> str:
    """Return the role of a rank, if not all ranks do the same work."""
    worker = rank.placement.get("worker")
    serves = ", serves, no steps" * rank.serves
    return " ".join(filter(None, [rank.role, f"RPC {worker}{serves}" if worker else ""]))


def roles_table(summary: Summary) -> Table:
    """
    Return the table of the time that the ranks of each role wait for other roles; empty if all ranks do the
    same work.
    """
    members: dict[str, list[int]] = {}
    for number, rank in summary.ranks.items():
        members.setdefault(rank.role or "", []).append(int(number))
    columns = [
        Column("role", lambda one: one.role),
        Column("ranks", lambda one: str(one.size), "figures"),
        Column("", lambda one: members.get(one.role, []), "ranks"),
        Column("bubble", lambda one: one.bubble, "share"),
    ]
    title = "Roles (bubble: share of the time in which ranks wait for other roles)"
    return Table(title, columns, summary.roles)


def _end(rank: SummaryRank) -> str:
    attempt = f", attempt {rank.attempt}" if rank.attempt else ""
    return (rank.exit_reason or rank.ended or "no last message") + attempt


def suspects_table(summary: Summary) -> Table:
    """Return the table of late ranks; empty if no rank is late."""
    healthy = meaning(summary.verdict).kind == "healthy"
    columns = [
        Column("rank", lambda suspect: f"rank {suspect.rank}"),
        Column("node", lambda suspect: suspect.node),
        Column("stage", lambda suspect: suspect.stage),
        Column("late by ms a step", lambda suspect: suspect.excess_ms, "aligned"),
        Column("fixing saves ms a step", lambda suspect: suspect.gain_ms, "aligned"),
        Column(part_of(summary.verdict), lambda suspect: suspect.cost_pct, "percent"),
    ]
    return Table("Suspects", columns, [] if healthy else summary.suspects)


def history_table(summary: Summary) -> Table:
    """Return the table of the hangs, the episodes, and the steps without a possible verdict."""
    episodes, verdicts = summary.episodes, summary.verdicts
    costly = {(episode.label, episode.from_step) for episode in episodes}
    others = [verdict for verdict in verdicts if (verdict.label, verdict.from_step) not in costly]
    hung = [verdict for verdict in others if verdict.began_ns is not None]
    blind = [verdict for verdict in others if meaning(verdict).kind == "abstention"]
    columns = [
        Column("steps", lambda one: f"{text.plain(one.from_step)}–{text.plain(one.to_step)}"),
        Column("verdict", lambda one: text.words(one.label)),
        Column("stage", lambda one: ", ".join(one.stages) or "all" * (meaning(one).names == "all")),
        Column("who", lambda one: text.ranks(one.ranks)),
        Column("lasted", _lasted, "figures"),
        Column("cost", lambda one: one.cost_s if isinstance(one, TimedEpisode) else None, "known duration"),
        Column("of the run", _of_the_run, "figures"),
    ]
    title = "Episodes, the costliest first"
    return Table(title, columns, [*hung, *episodes, *blind][:_MAX_LINES], brief(summary.brief))


def meaning(verdict: VerdictInfo) -> Meaning:
    """Return the explanation of a verdict's label."""
    return LABELS[verdict.label]


def _of_the_run(one: VerdictInfo | TimedEpisode) -> str:
    return text.percent(one.cost_pct) if isinstance(one, TimedEpisode) else ""


def _lasted(one: VerdictInfo | TimedEpisode) -> str:
    if isinstance(one, TimedEpisode):
        return text.duration(one.seconds)
    goes_on = one.began_ns is not None and one.lasted_s is None
    return "to the end" if goes_on else "" if one.began_ns is None else text.duration(one.lasted_s)


def last_stacks(verdicts: Sequence[VerdictInfo]) -> list[Stack]:
    """
    Return the stacks of the ranks in the last hang: all threads of the named rank, then
    the other ranks.
    """
    every = [span.stacks for span in verdicts if span.stacks]
    return every[-1] if every else []


def events_table(events: Sequence[EventInfo]) -> Table:
    """Return the table of the newest events that have a message."""
    silent = ("exit", "relay_start", "process_ended")
    worth = [event for event in events if event.message or event.kind not in silent]
    worth = [event for event in worth if event.kind != "stacks"]
    columns = [
        Column("time", lambda event: event.time, "clock"),
        Column("kind", lambda event: event.kind),
        Column("who", lambda event: event.node or "" if event.rank is None else f"rank {event.rank}"),
        Column("what", lambda event: event.message.partition("\n")[0]),
    ]
    return Table(f"Events ({text.zone()})", columns, worth[-_MAX_LINES:])


def sinks_table(sinks: Sequence[SinkState]) -> Table:
    """Return how the places are doing that the session is reported to."""
    return Table("Sinks", SINKS, sinks)


SINKS = [
    Column("sink", lambda sink: sink.name, "name"),
    Column("where", lambda sink: sink.where),
    Column("sent", lambda sink: sink.sent, "count"),
    Column("failed", lambda sink: sink.failed, "count"),
    Column("dropped", lambda sink: sink.dropped, "count"),
    Column("newest failure", lambda sink: sink.error, tone=lambda sink: "warning" if sink.error else ""),
]
"""Columns of the places that a session is reported to (`results.SinkState`)."""


def ledger_facts(ledger: WholeLedger) -> Facts:
    """Return the ledger of the rows as facts."""
    counts = {name: f"{getattr(ledger, name):,}" for name in ("produced", "stored", "in_flight", "folded")}
    total = ledger.dropped.total
    places = ", ".join(f"{where} {rows:,}" for where, rows in ledger.dropped.by_place.items())
    unknown = [rank for rank, entry in ledger.per_rank.items() if entry.unreported is None]
    who = text.ranks(int(rank) for rank in unknown if rank.isdigit()) or "a process of unknown rank"
    line = f"{counts['produced']} rows produced = {counts['stored']} stored + {counts['in_flight']} in flight"
    line += f" + {total:,} dropped" + f" ({places})" * (total > 0)
    folded = f"the oldest {counts['folded']} stored rows are kept as sums and statistics, not one by one"
    missing = f"not known: rows that {who} produced after the last report"
    return Facts(("Ledger", line), ("", folded * (ledger.folded > 0)), ("", missing * bool(unknown)))


def overhead_facts(overhead: RankOverhead) -> Facts:
    """Return the cost of the monitor as facts."""
    names = {
        "training_thread_us_per_step": "µs a step on the training thread",
        "agent_cpu_pct": "% of a core for the agent",
        "bytes_per_step": "bytes a step sent",
    }
    values = {what: getattr(overhead, name) for name, what in names.items()}
    known = [f"{text.number(value)} {what}" for what, value in values.items() if value is not None]
    return Facts(("Monitor", f"{', '.join(known)} ({overhead.of})" if known else ""))


def _spread(spread: dict[str, float | None] | None, written: Callable[[float | None], str]) -> str:
    return f"{written(spread['median'])} ({written(spread['peak'])})" if spread else text.NA
