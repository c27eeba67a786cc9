"""The newest check of each rank's node, and its presentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from traceml_ray import text
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.document.model import Column, Facts, Gauge, Section, Table
from traceml_ray.signals.check.confirm import confirmed, explained
from traceml_ray.signals.check.judge import LIMITS, CheckResult, Level, Slow, judged, rate
from traceml_ray.signals.check.judge_during import judged_during, newest_set, together
from traceml_ray.signals.check.records import CHECKS, DURING, Checked
from traceml_ray.signals.finding import Finding, OnSteps, key_of, known
from traceml_ray.signals.view import SLOW_RANKS, Run, View
from traceml_ray.store.query import OfRun
from traceml_ray.store.rank_processes import RankProcess, process_labels

_EVERY_S = 30.0
MOST_ROWS = 40
"""Largest number of rows of the table."""
_STATES = {"slow": "slow", "alike": "", "unsure": "not sure", "no peers": "no peers"}
_TONES = {"slow": "warning", "unsure": "notice"}
_LABELS = {"device": "slow_device", "link": "slow_link"}


def blocks(result: CheckResult, *, named: bool = True) -> list[Facts | Table]:
    """Return what people read of a check. With `named`, also why each slow part is named, and what to do."""
    slow = [pair for one in result.slow * named for pair in (("Slow", one.why), ("Next", one.next))]
    return [
        Facts(("Check", headline(result)), *slow),
        table(result),
        Facts.listed("Not sure", result.unsure),
        Facts.listed("Note", result.notes),
        Facts.listed("Error", result.errors),
    ]


def headline(result: CheckResult) -> str:
    """Return what a check says in one or two sentences."""
    nodes = text.count(result.nodes, "node")
    where = " during training" if result.kind == DURING else ""
    took = where + (f" in {text.duration(result.seconds)}" if result.seconds is not None else "")
    if result.slow:
        names = text.listed([one.name for one in result.slow[:3]], max(0, len(result.slow) - 3))
        return f"{nodes} checked{took}: {names} {'is' if len(result.slow) == 1 else 'are'} slower than peers."
    if not result.levels:
        return f"Nothing was measured on {nodes}."
    seen = {row.probe: row for row in result.levels if row.sees is not None}
    if not seen:
        return f"{nodes} checked{took}: nothing could be compared."
    least = {
        probe: max(row.sees for row in result.levels if row.probe == probe and row.sees is not None)
        for probe in seen
    }
    limits = [f"{text.share(share)} ({LIMITS[probe].about})" for probe, share in least.items()]
    nothing = f"{nodes} checked{took}: nothing is slower than its peers"
    return f"{nothing}. Differences are named from {text.listed(limits)} on."


def table(result: CheckResult) -> Table:
    """Return the subjects of a check, the slow ones first, then those that are lowest."""
    rows = result.levels
    of_many = f" (the {MOST_ROWS} lowest of {len(rows):,})" if len(rows) > MOST_ROWS else ""
    return Table(
        f"Measured by the check{of_many}",
        _columns(len({row.node for row in rows})),
        rows[:MOST_ROWS],
        empty="Nothing was measured.",
    )


def _below(row: Level) -> float | None:
    return None if row.lower is None else -100 * row.lower


def _columns(nodes: int) -> list[Column]:
    node = Column("node", lambda row: row.node, "name")
    return [
        *([node] if nodes > 1 else []),
        Column("part", lambda row: row.subject, "name"),
        Column("probe", lambda row: LIMITS[row.probe].short),
        Column("measured", lambda row: row.value, "figures", written=lambda row: rate(row.value, row.unit)),
        Column("peers", lambda row: row.usual, "figures", written=_peers),
        Column("difference", _above, "figures", written=lambda row: _known(_above(row), text.percent)),
        Column("trials vary", _spread, "figures", written=lambda row: _known(row.spread, text.share)),
        Column("", lambda row: _STATES[row.state], tone=lambda row: _TONES.get(row.state, "")),
    ]


def _peers(row: Level) -> str:
    return "" if row.usual is None else rate(row.usual, row.unit)


def _above(row: Level) -> float | None:
    """Return the difference from the peers in %, negative if it is lower."""
    return None if row.lower is None else -100 * row.lower


def _spread(row: Level) -> float | None:
    return row.spread


def _known(value: float | None, written: Callable[[float], str]) -> str:
    return "" if value is None else written(value)


class GetCheck(OfRun[CheckResult], frozen=True):
    """What the newest check of the nodes of the run says. Without a check it has no levels."""


class CheckView(View[CheckResult]):
    """See `View`."""

    name = "check"
    question = GetCheck
    polled = True
    finds = MappingProxyType({})

    def answer(self, run: Run, asked: GetCheck) -> CheckResult:
        """Return what the newest check of each rank says."""
        labels = process_labels(run.file.cluster(), run.ranks.values())
        records = run.file.records_of(CHECKS, labels.keys())
        return of_ranks(records, run.ranks, labels)

    def findings(
        self, answer: CheckResult, steps: Sequence[Finding], verdict: OnSteps | None
    ) -> list[Finding]:
        """Return the parts that are slower than their peers."""
        return [_finding(one, explained(one, steps, answer.ranks)) for one in answer.slow]

    def confirmed(self, verdict: Verdict, answer: CheckResult) -> Verdict:
        """Return a verdict with what the check says of the machines of stragglers."""
        return confirmed(verdict, answer)

    def every_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 30 s."""
        return _EVERY_S if world < SLOW_RANKS else None

    def polls_s(self, ranks: Mapping[int, RankProcess], world: int) -> float | None:
        """Return 30 s."""
        return _EVERY_S if world < SLOW_RANKS else None

    def block(self, answer: CheckResult) -> Any:
        """Return the answer as plain values, with the rows of the table."""
        return msgspec.to_builtins(msgspec.structs.replace(answer, levels=[*table(answer).items]))

    def sections(self, answer: CheckResult) -> Sequence[Section]:
        """Return what the check says, and what it measured. Nothing without a check."""
        if not answer.levels and not answer.errors:
            return ()
        return [Section("tables", blocks(answer, named=False), "Check of the nodes", gauges=_gauges(answer))]

    def brief(self, answer: CheckResult) -> Facts:
        """Return nothing: what is slow is a finding, or part of the verdict."""
        return Facts()


def one_per_node(checks: Iterable[Checked]) -> list[Checked]:
    """
    Return the checks without repeated measures: if the ranks of a node have measured the same subject, only
    the first rank's measure of it is kept.
    """
    seen, kept = set[tuple[str, str, str]](), list[Checked]()
    for check in sorted(checks, key=lambda check: (check.node, check.rank or 0)):
        new = [one for one in check.measures if (check.node, one.probe, one.subject) not in seen]
        seen.update((check.node, one.probe, one.subject) for one in new)
        kept.append(msgspec.structs.replace(check, measures=new))
    return kept


def age(check: Checked) -> tuple[int, int]:
    """Return what orders the checks of a process. The newest has the largest."""
    return check.t_ns, check.number


def of_ranks(
    checks: Mapping[int, Iterable[Checked]], ranks: Mapping[int, RankProcess], labels: Mapping[int, str]
) -> CheckResult:
    """
    Return what the newest checks of a run say: those made without a job, and those made during training.

    Args:
        checks: the checks of each process, by its number. Only the newest matter: one without a job, one
            during training.
        ranks: the process of each rank.
        labels: of the nodes of these processes, by process.
    """
    full, during = list[Checked](), list[Checked]()
    for process in sorted(checks.keys() & labels.keys()):
        several = [msgspec.structs.replace(one, node=labels[process]) for one in checks[process]]
        for kept, is_during in ((full, False), (during, True)):
            mine = [one for one in several if (one.kind == DURING) is is_during]
            kept += [max(mine, key=age)] if mine else []
    newest = newest_set(during)
    straggler = ranks.get(newest[0].about) if newest and newest[0].about is not None else None
    while_trained = judged_during(newest, labels.get(straggler.id) if straggler is not None else None)
    return _placed(together(judged(one_per_node(full)), while_trained), ranks, labels)


def _placed(
    result: CheckResult, of_rank: Mapping[int, RankProcess], labels: Mapping[int, str]
) -> CheckResult:
    """Return the result with the ranks of nodes that have a slow part."""
    slow = {node for one in result.slow for node in one.nodes}
    ranks = dict[str, list[tuple[int, int]]]()
    for rank, process in of_rank.items():
        node = labels.get(process.id, "")
        if node in slow and process.identity is not None:
            ranks.setdefault(node, []).append((process.identity.local_rank, rank))
    ordered = {node: [rank for _, rank in sorted(pairs)] for node, pairs in ranks.items()}
    return msgspec.structs.replace(result, ranks=ordered)


def _finding(one: Slow, straggler: Finding | None) -> Finding:
    """Return the finding of a slow part. `straggler`: what it may explain."""
    return Finding(
        key=key_of(_LABELS.get(one.what, "slow_node"), (), *one.nodes, one.part),
        signal="check",
        label=_LABELS.get(one.what, "slow_node"),
        severity="notice",
        ranks=() if one.rank is None else (one.rank,),
        nodes=tuple(one.nodes),
        device=one.device,
        what=one.part,
        confidence=one.confidence,
        why=one.why,
        next=one.next,
        evidence=known({"lower": one.lower, "value": one.value, "usual": one.usual, "probe": one.probe}),
        explains=straggler.key if straggler else None,
    )


def _gauges(answer: CheckResult) -> list[Gauge]:
    about = "How much lower a part of a node measured than its peers in the last check, 0 to 1."
    series = [((*one.nodes[:1], one.part, one.probe), one.lower) for one in answer.slow]
    return [Gauge("check_lower", about, series, ("node", "part", "probe"), "ratio")]
