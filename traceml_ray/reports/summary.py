"""
Builds `summary.json` (schema `traceml_ray/summary/1`) from a session file alone, at any time.

Times are milliseconds, shares 0..1, percentages are named `_pct`, moments are ISO 8601 in UTC. Unknown values
are None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict

from traceml_ray.analysis.baseline import Baseline
from traceml_ray.analysis.busy import StepSummary, step_summary
from traceml_ray.analysis.episodes import Brief
from traceml_ray.analysis.hang import hangs, still_open
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.labels import LABELS, Label
from traceml_ray.analysis.reasons import is_imbalance, with_span
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_stats import FirstSteps, Timeline, span
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.track import Episode
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.verdict_shapes import TimedEpisode, verdict_info
from traceml_ray.analysis.window import missing_of
from traceml_ray.reports import stored_totals
from traceml_ray.reports.deaths import headline
from traceml_ray.reports.headlines import conclude
from traceml_ray.reports.machines import Machines, with_advice
from traceml_ray.reports.profiles import profiles_block
from traceml_ray.reports.run_facts import (
    RunFacts,
    events_block,
    moment,
    overhead_of,
    ranks_block,
    session_block,
)
from traceml_ray.reports.stored_totals import (
    StoredSpans,
    StoredTotals,
    first_steps_of,
    reduce,
    with_stored_reason,
)
from traceml_ray.signals.view import Records, Run
from traceml_ray.signals.views import VIEWS, confirmed, findings_of, with_causes
from traceml_ray.stages import STAGES
from traceml_ray.store.rank_processes import RankProcess, label_nodes, node_key
from traceml_ray.store.results import NodeInfo, RunInfo
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import (
    BaselineInfo,
    BaselineStage,
    Covers,
    SpanStatistics,
    StageStatistics,
    StepStatistics,
    Summary,
)

SCHEMA = "traceml_ray/summary/1"
_MAX_EXPLAINED = 50
_MAX_EPISODES = 200
_MAX_FAILED = 2
"""Largest number of ranks named by a failure whose last printed lines are shown."""


class RunReport(NamedTuple):
    """A summary, with the other data of a report with charts."""

    summary: Summary
    facts: RunFacts
    """Facts of the run."""
    history: StepHistory | None
    """Step history that the statistics cover; None without any step."""
    signals: dict[str, Any]
    """The answer of each signal, by name."""


def summarize(session: SessionFile, thresholds: Thresholds, run: str | None = None) -> Summary:
    """
    Return the summary of a run of `session` (None: the default run of the session, see `SessionFile`).

    Raises `SessionFileError` if the file cannot be read.
    """
    return report_of(session, thresholds, run).summary


def report_of(session: SessionFile, thresholds: Thresholds, run: str | None = None) -> RunReport:
    """Return the summary of a run with the other data of a report with charts."""
    with session.at_one_moment():
        facts = RunFacts(session if run is None else session.for_run(run), thresholds)
        return _report(facts, _Answers())


def summaries(session: SessionFile, thresholds: Thresholds) -> Iterator[Summary]:
    """
    Yield the summary. For a long run, first yield the summary of its newest steps, which takes the same time
    for any length of the run. Raises `SessionFileError`.
    """
    return (report.summary for report in reports(session, thresholds))


def reports(session: SessionFile, thresholds: Thresholds) -> Iterator[RunReport]:
    """Yield the same summaries, each with the other data of a report with charts."""
    with session.at_one_moment():
        facts = RunFacts(session, thresholds)
        answers = _Answers()
        if facts.stored > stored_totals.MAX_ROWS:
            yield _report(facts, answers, newest=True)
        yield _report(facts, answers)


def _report(facts: RunFacts, answers: _Answers, newest: bool = False) -> RunReport:
    session = facts.session
    totals = reduce(session, facts.thresholds, session.baseline(), newest=newest)
    history = totals.history if totals else None
    summary, signals = _summary(facts, answers, totals)
    return RunReport(summary, facts, history, signals)


_Answers = dict[tuple[str, frozenset[int]], Any]
"""Answers of signals that do not use steps, by name and by the processes that failed. They are read once."""


def _signals(
    facts: RunFacts, known: _Answers, history: StepHistory | None, failed: Mapping[int, RankProcess]
) -> dict[str, Any]:
    """
    Return the answer of each signal on the whole run. `failed` is as in `Run`; `known` are the answers of
    another report at the same moment. Raises `SessionFileError`.
    """
    records = Records()
    over = facts.fact("status") not in ("running", None)
    steps = history if history is not None and history.ranks else None
    run = Run(
        facts.session, records, steps, facts.ranks, facts.world_size, over, True, failed, facts.processes
    )
    answers = {}
    for name, view in VIEWS.items():
        key = name, frozenset(process.id for process in failed.values())
        if view.of_steps or key not in known:
            records.read(facts.session, view.states)
            run = dataclasses.replace(run, read=records.besides(view, facts.session))
            known[key] = view.answer(run, view.question(facts.run.get("id")))
        answers[name] = known[key]
    return answers


def _failed(facts: RunFacts, verdict: Verdict) -> dict[int, RankProcess]:
    """Return the processes of the ranks that a failure's verdict names first."""
    if LABELS[verdict.label].kind != "failure":
        return {}
    named = [*dict.fromkeys([*([] if verdict.rank is None else [verdict.rank]), *verdict.ranks])]
    return facts.processes_of(named[:_MAX_FAILED], facts.deaths)


def _summary(facts: RunFacts, known: _Answers, totals: StoredTotals | None) -> tuple[Summary, dict[str, Any]]:
    """Return the summary, and the answers of signals that it contains."""
    judged, lines = (totals.judged, totals.lines) if totals else (None, {})
    machines = Machines(facts.session.machines, facts.ranks, facts.every, facts.labels)
    spans, dated = StoredSpans(facts.session, facts.ranks), (lines, facts.thresholds.warmup_steps)
    stood = hangs(facts.session.verdicts()[0])
    ended = facts.fact("status") != "running"
    judged_run = judged.run_verdict(ended=ended) if judged else _no_step(facts)
    performance = _with_span(judged_run, facts, totals, spans)
    verdict, signals = _outcome(facts, known, totals, performance, stood)
    verdict = with_advice(machines.with_evidence(verdict, *dated), facts.ranks.values())
    verdict = confirmed(_with_first_steps(verdict, first := first_steps_of(facts, totals)), signals)
    verdicts = _changes(facts, totals, spans)
    by_step = sorted([*verdicts, *stood], key=lambda verdict: verdict.from_step or 0)
    every = [with_advice(verdict, facts.ranks.values()) for verdict in by_step]
    episodes = _episodes(judged, verdicts, facts, lines)
    findings = findings_of(verdict, episodes, signals)
    blocks, more = _blocks(signals)
    busy = _busy(facts, totals)
    summary = Summary(
        schema=SCHEMA,
        session=session_block(facts),
        run=facts.run.get("id"),
        runs=[_run(entry, verdict.label if entry is facts.run else None) for entry in facts.runs],
        steps=_steps(facts, totals, busy),
        stages=[StageStatistics(**asdict(stage)) for stage in busy.stages] if busy else [],
        first_steps=first,
        spans=_spans(spans, totals),
        conclusion=conclude(verdict, findings),
        verdict=verdict_info(verdict),
        findings=findings,
        suspects=[*performance.suspects],
        roles=[*performance.roles],
        verdicts=[verdict_info(one) for one in machines.newest_with_evidence(every, *dated)],
        episodes=episodes,
        brief=judged.episodes.brief if judged else Brief(),
        baseline=_baseline(judged.baseline if judged else None),
        ranks=ranks_block(facts, facts.deaths),
        profiles=profiles_block(facts.session.path.parent, facts.run.get("id")),
        events=events_block(facts),
        ledger=facts.session.ledger(),
        overhead=overhead_of(facts.ranks.values()),
        **blocks,
    )
    rounded: Summary = _rounded(summary)
    return msgspec.structs.replace(rounded, **blocks, more=more), signals


def _blocks(signals: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Return the blocks of signals that are fields of a summary, by name, and the other
    blocks as plain values.
    """
    blocks, more = dict[str, Any](), dict[str, Any]()
    for name, answer in signals.items():
        view = VIEWS[name]
        block = _rounded(view.block(answer)) if view.rounded else view.block(answer)
        if name in Summary.__struct_fields__:
            blocks[name] = block
        else:
            more[name] = msgspec.to_builtins(block, str_keys=True)
    return blocks, more


def _outcome(
    facts: RunFacts,
    known: _Answers,
    totals: StoredTotals | None,
    performance: Verdict,
    stood: Sequence[Verdict],
) -> tuple[Verdict, dict[str, Any]]:
    """
    Return the verdict on a run (a hang, a death, or the verdict on its steps), and the
    answers of signals.
    """
    stands = still_open(stood, facts.fact("status"))
    dead = None if stands else _headline(facts)
    verdict = stands or dead or performance
    signals = _signals(facts, known, totals.history if totals else None, _failed(facts, verdict))
    return verdict if dead is None else with_causes(dead, signals), signals


def _with_first_steps(verdict: Verdict, first: FirstSteps | None) -> Verdict:
    """Return a verdict whose note also says why the first steps took long."""
    if first is None:
        return verdict
    return msgspec.structs.replace(verdict, note="; ".join(filter(None, (verdict.note, first.why))))


def baseline_of(session: SessionFile, thresholds: Thresholds) -> Baseline | None:
    """Return the cost of a healthy step of `session`, or None. Raises `SessionFileError`."""
    kept = session.baseline()
    if kept is not None and not kept.source:
        return kept
    totals = reduce(session, thresholds)
    return totals.judged.baseline if totals else None


def runs_of(session: SessionFile) -> list[RunInfo]:
    """Return the runs of `session` as the summary lists them."""
    return [_run(entry) for entry in session.runs()]


def nodes_of(session: SessionFile) -> list[NodeInfo]:
    """Return the nodes of the cluster, with the ranks of the run that were seen there last."""
    nodes, labels = session.cluster(), label_nodes(session.cluster(), session.processes())
    ranks_of_node: dict[str, list[int]] = {}
    for rank, process in session.ranks().items():
        ranks_of_node.setdefault(node_key(process), []).append(rank)
    return [
        NodeInfo(
            **dataclasses.asdict(node),
            alive=node.lost_ns is None,
            label=labels[node.node_id],
            ranks=ranks_of_node.get(node.node_id, []),
            last_seen=moment(node.last_seen_ns),
            lost_at=moment(node.lost_ns),
        )
        for node in nodes
    ]


def _run(entry: dict[str, Any], label: Label | None = None) -> RunInfo:
    times = {name: moment(entry[name]) for name in ("started_at", "ended_at")}
    return RunInfo(**{**entry, **times, "label": label or entry["label"]})


def _headline(facts: RunFacts) -> Verdict | None:
    """Return the verdict on a run that ended with a death."""
    if not facts.deaths or facts.fact("status") in ("finished", "stopped"):
        return None
    return headline(facts.deaths, lambda death: facts.node_of(death.rank), facts.ranks, facts.world_size)


def _with_span(verdict: Verdict, facts: RunFacts, totals: StoredTotals | None, spans: StoredSpans) -> Verdict:
    """Return `verdict` with the span that explains it and with its reason, if there are any."""
    if totals is None:
        return verdict
    also = tuple(_with_span(one, facts, totals, spans) for one in verdict.also)
    if verdict.rank is not None:
        verdict = with_span(verdict, totals.window(verdict), spans.find, facts.thresholds)
    return msgspec.structs.replace(with_stored_reason(verdict, facts, totals), also=also)


def _changes(facts: RunFacts, totals: StoredTotals | None, spans: StoredSpans) -> list[Verdict]:
    """Return the changes of verdict. The newest ones that name a rank or an imbalance have their reasons."""
    changes = list(totals.judged.periods) if totals else []
    named = [
        index for index, verdict in enumerate(changes) if verdict.rank is not None or is_imbalance(verdict)
    ]
    for index in named[-_MAX_EXPLAINED:]:
        changes[index] = _with_span(changes[index], facts, totals, spans)
    return changes


def _episodes(
    judged: RunJudge | None, changes: Sequence[Verdict], facts: RunFacts, lines: Mapping[int, Timeline]
) -> list[TimedEpisode]:
    """Return the episodes, the costliest first, with their times and the late span."""
    known = {(change.label, change.stage, change.from_step): change.span for change in changes}
    shown = []
    if judged is None:
        return []
    for episode in judged.episodes.episodes[:_MAX_EPISODES]:
        rank = min(lines) if episode.rank is None else episode.rank
        last_ns = facts.ranks[rank].last_rows_ns if rank in facts.ranks else None
        when: tuple[int | None, int | None] = (None, None)
        if rank in lines and last_ns is not None:
            when = span(lines[rank], last_ns, episode.from_step, episode.to_step) or when
        inside = known.get((episode.label, episode.stage, episode.from_step))
        began, ended = map(moment, when)
        fields = asdict(_of_the_run(episode, judged))
        shown.append(TimedEpisode(**fields, span=inside, started_at=began, ended_at=ended))
    return shown


def _of_the_run(episode: Episode, judged: RunJudge) -> Episode:
    """Return an episode with its cost as a share of the run, as the verdict on the run has it."""
    cost_pct = 100 * episode.cost_s / max(judged.episodes.clock.now_ns / 1e9, 1e-9)
    return msgspec.structs.replace(episode, cost_pct=min(100.0, cost_pct), cost_range_pct=None)


def _spans(spans: StoredSpans, totals: StoredTotals | None) -> list[SpanStatistics]:
    if totals is None or totals.stats is None:
        return []
    return spans.block(totals.stage_ns(), *totals.stats.between)


def _baseline(baseline: Baseline | None) -> BaselineInfo | None:
    if baseline is None:
        return None
    return BaselineInfo(
        from_step=baseline.from_step,
        to_step=baseline.to_step,
        steps=baseline.steps,
        source=baseline.source or None,
        step_ms=baseline.step_ns / 1e6,
        stages=[
            BaselineStage(name=name, exposed_ms=level / 1e6, mad_ms=mad / 1e6)
            for name, level, mad in zip(STAGES, baseline.level_ns, baseline.mad_ns, strict=True)
        ],
    )


_NO_STEP_NEXT = (
    "A step is a backward pass followed by an optimizer step; where the script does it another way, "
    "mark it with `with traceml_ray.trace_step(model):`."
)


def _no_step(facts: RunFacts) -> Verdict:
    missing = {f"{name}: {why}" for process in facts.processes for name, why in process.missing.items()}
    reason = "; ".join(sorted(missing)) or "no optimizer step ran after a backward pass"
    why = f"no step was seen: {reason if facts.processes else 'no rank ever reported'}"
    return Verdict(label="telemetry_limited", why=why, next=_NO_STEP_NEXT)


def _busy(facts: RunFacts, totals: StoredTotals | None) -> StepSummary | None:
    if totals is None or totals.stats is None:
        return None
    history, missing = totals.history, missing_of(facts.world_size, totals.history.ranks)
    return step_summary(totals.stats, history.ranks, history.nodes, missing)


def _steps(facts: RunFacts, totals: StoredTotals | None, busy: StepSummary | None) -> StepStatistics:
    of_busy = asdict(busy) if busy else {}
    of_busy.pop("stages", None)
    for name in ("per_rank_median_ms", "per_rank_gpu_idle_pct"):
        of_busy[name] = {str(rank): value for rank, value in of_busy.get(name, {}).items()}
    of_run: dict[str, Any] = {
        "count": min(totals.counts.values()) if totals else 0,
        "judged": busy.count if busy else 0,
        "mean_ms": totals.mean_ns() / 1e6 if totals else None,
        "covers": _covers(facts, totals),
    }
    return StepStatistics(**{**of_busy, **of_run})


def _covers(facts: RunFacts, totals: StoredTotals | None) -> Covers | None:
    """
    Return the steps and rows that statistics and verdict over the run cover, and the share that the number of
    steps and their mean cover; None if there are no steps.
    """
    if totals is None:
        return None
    return Covers(
        from_step=totals.first_step,
        to_step=totals.last_step,
        rows=totals.read,
        rows_pct=100 * totals.read / max(totals.read, facts.stored),
        error_pct=totals.stats.error_pct if totals.stats else 0.0,
        counted_pct=100 * totals.counted / max(totals.counted, facts.stored),
        timed_pct=100 * totals.timed,
    )


def _rounded(value: Any) -> Any:
    """Return `value` with floats rounded to four decimals; values that are not finite become None."""
    if isinstance(value, float):
        return round(value, 4) if np.isfinite(value) else None
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: _rounded(part) for name, part in asdict(value).items()})
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_rounded, value))
    return value
