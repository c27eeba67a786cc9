"""
The ranks of a run: where each one runs, its state, and where its time goes.

Also the nodes of a run: the times of their ranks, and how loaded they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from traceml_ray.analysis.shapes import StepColumns, StepTimes
from traceml_ray.analysis.spread import MISSING, ratio
from traceml_ray.analysis.step_stats import MAX_BINS
from traceml_ray.analysis.verdict_shapes import VerdictInfo
from traceml_ray.analysis.window import missing_of
from traceml_ray.signals.finding import Finding
from traceml_ray.stages import STAGES
from traceml_ray.store import query
from traceml_ray.store.rank_processes import node_key
from traceml_ray.text import natural

from .run_state import RunState, load_of
from .session_poll import SessionPoll
from .values import by_stage, number, rounded

_MOST_MISSING = 1024
NAMED, DIED, SILENT = "named by the verdict", "died", "no report"
SERVES = "serves RPC, no steps"
_NO_TIMES: dict[str, Any] = {"busy_ms": None, "over": None, "stages": {}}
_NO_REPORT: dict[str, Any] = {
    **dict.fromkeys(
        ("node", "node_key", "role", "local_rank", "gpu", "exit_code", "last_step", "open_stage", "death")
    ),
    "hostname": "",
    "state": SILENT,
    **_NO_TIMES,
}


def rank_rows(
    cache: SessionPoll, run: RunState, steps: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """
    Return a row for each rank: where it runs, and the stages of its steps (a first and a last step may be
    given). Named ranks come first, then dead ranks.
    """
    asked = query.GetRankTimes(run.id) if steps is None else query.GetRankTimes(run.id, True, *steps)
    times = cache.ask(asked)
    busy, over, stages = (
        (rounded(values.reshape(-1), 4) for values in (times.busy_ms, times.over, times.stages))
        if times
        else ([], [], [])
    )
    index_of_rank = {rank: index for index, rank in enumerate(times.ranks if times else ())}
    dead = {death.rank: death for death in cache.deaths(run)}
    named, reporting = {*run.named["ranks"]}, run.reporting()
    rows = [{**_NO_REPORT, "rank": rank} for rank in missing_of(run.world, run.ranks, _MOST_MISSING)]
    for rank, process in run.ranks.items():
        rank_position, index, identity = (
            position(run, rank, reporting),
            index_of_rank.get(rank),
            process.identity,
        )
        key = node_key(process) if identity else None
        row = {
            **rank_position,
            "state": DIED if rank in dead else NAMED if rank in named else rank_position["state"],
            "node": None if key is None else run.labels.get(key, key),
            "node_key": key,
            "hostname": identity.hostname if identity else "",
            "exit_code": process.exit_code,
            "gpu": None,
            "death": dead.get(rank),
        }
        if index is None:
            row |= _NO_TIMES
        else:
            mine = stages[index * len(STAGES) : (index + 1) * len(STAGES)]
            row["stages"] = dict(zip(STAGES, mine, strict=True))
            row["busy_ms"], row["over"] = busy[index], over[index]
        rows.append(row)
    first = {NAMED: 0, DIED: 1}
    return sorted(rows, key=lambda row: (first.get(row["state"], 2), row["rank"]))


def position(run: RunState, rank: int, reporting: Collection[int] | None = None) -> dict[str, Any]:
    """Return the local rank and the state of a rank. `reporting`: the ranks that still report."""
    process = run.ranks[rank]
    reporting = run.reporting() if reporting is None else reporting
    going = SERVES if process.serves else "running"
    identity = process.identity
    return {
        "rank": rank,
        "local_rank": identity.local_rank if identity else None,
        "last_step": process.last_step,
        "open_stage": None if process.ended or process.serves else process.stage,
        "role": process.work,
        "state": process.end or (going if rank in reporting else "silent"),
    }


def busy_lines(columns: StepColumns | None, most: int) -> Callable[[int], list[float | None]] | None:
    """
    Return a function of a rank. Its result is the rank's busy time relative to the median rank in each of the
    newest `most` columns; None if the rows of `columns` are nodes, or if nothing is known.
    """
    if columns is None or columns.by != "rank" or not columns.z.size:
        return None
    index_of_rank = {rank: index for index, rank in enumerate(columns.ranks)}
    levels = columns.z[:, -most:]

    def line(rank: int) -> list[float | None]:
        index = index_of_rank.get(rank)
        if index is None:
            return []
        known = levels[index] != MISSING
        return [
            value if there else None
            for value, there in zip(ratio(levels[index]).tolist(), known.tolist(), strict=True)
        ]

    return line


_NODE_TIMES = "median_ms", "worst_ms", "skew_pct", "slower_pct"
_ABOUT_NODE = "node_id", "label", "hostname", "address", "alive", "ranks"


def nodes(run: RunState, times: StepTimes | None) -> list[dict[str, Any]]:
    """
    Return the nodes of a run: lost nodes first, then nodes that the verdict names, then the
    others by name.
    """
    times_by_node = times.nodes if times else {}
    listed = {node.label for node in run.nodes}
    known = [{name: getattr(node, name) for name in _ABOUT_NODE} for node in run.nodes]
    cards = []
    for node in [*known, *(_unlisted(run, label) for label in times_by_node if label not in listed)]:
        node_times = times_by_node.get(node["label"])
        shown = {name: number(getattr(node_times, name, None)) for name in _NODE_TIMES}
        worst = node_times.worst_rank if node_times else None
        load = load_of(run.samples.get(node["node_id"], {}))
        named = node["label"] in run.named["nodes"]
        cards.append({**node, "named": named, "worst_rank": worst, **shown, **load})
    return sorted(cards, key=lambda card: (card["alive"], not card["named"], natural(card["label"])))


def _unlisted(run: RunState, label: str) -> dict[str, Any]:
    """Return a node that is known only through its ranks."""
    ranks = [rank for rank in run.ranks if run.node_of(rank) == label]
    about = {"node_id": label, "label": label, "hostname": label, "address": None}
    return {**about, "alive": True, "ranks": ranks}


def badness(node: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """
    Return a sort key for nodes: lost nodes are worst, then those that the verdict names, then the
    slowest.
    """
    return not node["alive"], node["named"], node["slower_pct"] or 0.0


def evidence_of(verdict: VerdictInfo | None) -> dict[str, list[str]]:
    """Return the node anomalies that accompany a verdict, by node."""
    sentences_by_node: dict[str, list[str]] = {}
    for anomaly in (verdict.machine if verdict else None) or ():
        sentences_by_node.setdefault(anomaly.node, []).append(anomaly.text)
    return sentences_by_node


def rank_steps(cache: SessionPoll, run: RunState, rank: int, shown: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the stage times by step, in ms, of a rank, of the median rank and of the rank's host (None: the
    host has no separate rows). Also return the spans inside the stages, with their shares of the stages.

    `shown` has the `first` and the `last` step. Without them, the newest steps are returned.
    """
    steps = cache.ask(query.GetRankSteps(run.id, rank, MAX_BINS, **shown))
    if steps is None or not (numbers := steps.steps.tolist()):
        return {"stages": {}, "median": {}, "host": None, "spans": []}
    spans, mean = cache.ask(query.GetSpans(run.id, rank, numbers[0], numbers[-1])) or [], steps.mean
    return {
        "stages": {"steps": numbers, **by_stage(steps.stages)},
        "median": by_stage(steps.median),
        "host": None if steps.host is None else by_stage(steps.host),
        "spans": [
            {**msgspec.structs.asdict(span), "share": _share_of_stage(span.ms, mean[span.stage])}
            for span in spans
        ],
    }


def _share_of_stage(ms: float, stage_ms: float) -> float | None:
    return min(1.0, ms / stage_ms) if stage_ms > 0 else None


def costs_of(findings: Sequence[Finding]) -> dict[str, float]:
    """Return, by node that the verdict names, the share (0..1) of the time that fixing it would save."""
    costs: dict[str, float] = {}
    for finding in findings:
        if finding.signal == "steps" and finding.cost is not None:
            for node in finding.nodes:
                costs[node] = max(finding.cost, costs.get(node, 0.0))
    return costs
