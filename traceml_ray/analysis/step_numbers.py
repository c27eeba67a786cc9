"""The numbers that pages show of a step history. Views only draw them and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from traceml_ray.analysis.shapes import (
    BusyTimes,
    CellMeans,
    ChangedParts,
    NodeTimes,
    PartMeans,
    RankSteps,
    RankTimes,
    RunTimeline,
    StepColumns,
    StepTimes,
)
from traceml_ray.analysis.spread import Spread, Values, by_name, deviations, over_pct, quantiles, spread
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_stats import Columns, ended
from traceml_ray.analysis.step_store import ALL, Between
from traceml_ray.analysis.window import Float
from traceml_ray.stages import STAGES

MAX_LINES = 1024
"""Largest number of ranks with a line each in the heatmap. In a larger job a line is a node."""
_UNSEEN = 1.1
"""If the steps took more than this multiple of the time since the first report, they began before it."""


def times(
    history: StepHistory,
    whole: bool,
    world: int,
    wall_ms: float | None,
    stored: int,
    between: Between | None = None,
) -> StepTimes:
    """
    Return the numbers of a run, over the newest steps that a live verdict uses, over all steps (`whole`), or
    over a part of the run (`between`). In a part, a sum of several steps counts for each of these. `wall_ms`
    is the time since the first report, `stored` the number of stored rows.
    """
    if wall_ms is not None and history.total_ms() > _UNSEEN * wall_ms:
        wall_ms = None  # many steps were over before the first report
    all_read = history.taken >= 0.9 * stored
    productive_pct = min(100.0, 100 * history.total_ms() / wall_ms) if wall_ms and all_read else None
    unknown = np.full(len(history.ranks), np.nan)
    numbers = StepTimes(
        version=history.version,
        last_step=history.last_step,
        world=world,
        ranks=history.ranks,
        steps=0,
        of_all=whole and all_read,
        all_read=all_read,
        timed_pct=100 * history.timed(),
        wall_s=None if wall_ms is None else wall_ms / 1e3,
        productive_pct=productive_pct,
        busy_ms=unknown,
        gpu_idle_pct=unknown,
        nodes={},
    )
    if between is not None:
        return replace(numbers, **_part(history, between))
    stats = history.stats(None if whole else history.limits.window_steps)
    if stats is None:
        return numbers
    median, p95 = stats.step(0.5, 0.95)
    return replace(
        numbers,
        **_numbers(history, stats.steps, median, p95, stats.exposed, stats.busy()),
        waiting_pct=100 * history.waiting(None if whole else history.limits.window_steps),
        gpu_idle_pct=100 * stats.idle(),
    )


def _part(history: StepHistory, between: Between) -> dict[str, Any]:
    """Return the numbers of a part of a run. If all of it is warm-up: only `steps`, which is 0."""
    steps, exposed = history.mean_exposed(between)
    if not steps:
        return {"steps": 0}
    made = history.columns(between=between)
    median, p95 = quantiles(made.exposed.sum(axis=1)[:, None], (0.5, 0.95))[:, 0].tolist()
    numbers = _numbers(history, steps, median, p95, exposed, quantiles(made.busy.T, (0.5,))[0])
    return {**numbers, "waiting_pct": 100 * _mean(made.waiting[None, :, None]).item()}


def rank_times(history: StepHistory, whole: bool, between: Between | None = None) -> RankTimes:
    """Return the step times of each rank by stage, over the steps of `times`."""
    ranks, steps = history.ranks, 0
    busy, stages = np.full(len(ranks), np.nan), np.full((len(ranks), len(STAGES)), np.nan)
    if between is None:
        stats = history.stats(None if whole else history.limits.window_steps)
        if stats is not None:
            steps, busy, stages = stats.steps, stats.busy(), stats.mean_stages()
    elif steps := history.mean_exposed(between)[0]:
        busy = quantiles(history.columns(between=between).busy.T, (0.5,))[0]
        stages = _mean(history.stage_columns(between)[2])
    over = busy / quantiles(busy[:, None], (0.5,))[0] if steps else busy
    return RankTimes(steps=steps, ranks=ranks, busy_ms=busy, over=over, stages=stages)


def stages_beside_peers(
    times: RankTimes, rank: int, named: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """
    Return the mean time of `rank` in each stage, and the median over the ranks that are not `named` (ms).
    NaN: not known, or no such rank.
    """
    others = times.stages[~np.isin(times.ranks, [rank, *named])]
    peers = quantiles(others, (0.5,))[0] if len(others) else np.full(len(STAGES), np.nan)
    mean = times.stages[times.ranks.index(rank)]
    return dict(zip(STAGES, mean.tolist(), strict=True)), dict(zip(STAGES, peers.tolist(), strict=True))


def _numbers(
    history: StepHistory, steps: int, median_ms: float, p95_ms: float, exposed: Float, per_rank: Float
) -> dict[str, Any]:
    apart, ranks, step_ms = spread(per_rank[:, None], history.nodes), history.ranks, float(exposed.sum())
    worst = int(apart.worst[0])
    return {
        "steps": steps,
        "median_ms": median_ms,
        "p95_ms": p95_ms,
        "steps_per_s": 1e3 / step_ms if step_ms else np.nan,
        "worst_rank": ranks[worst] if worst >= 0 and len(ranks) > 1 else None,
        "worst_over": 1 + float(apart.global_skew_pct[0]) / 100,
        "skew_pct": float(apart.global_skew_pct[0]),
        "stages": dict(zip(STAGES, exposed.tolist(), strict=True)),
        "busy_ms": per_rank,
        "nodes": _by_node(apart, per_rank, history.nodes, ranks),
    }


def _by_node(
    apart: Spread, per_rank: Float, nodes: Sequence[str], ranks: Sequence[int]
) -> dict[str, NodeTimes]:
    """Return the busy time of each node, by its name."""
    median = dict(zip(apart.nodes, apart.per_node[:, 0].tolist(), strict=True))
    fastest = np.array(min((ms for ms in median.values() if ms == ms), default=np.nan))
    by_node = {}
    for node, places in by_name(nodes).items():
        mine, middle = per_rank[places], np.array(median[node])
        worst = None if np.isnan(mine).all() else places[int(np.nanargmax(mine))]
        largest = np.array(np.nan if worst is None else per_rank[worst])
        by_node[node] = NodeTimes(
            median_ms=float(middle),
            worst_rank=None if worst is None else ranks[worst],
            worst_ms=float(largest),
            skew_pct=float(over_pct(largest, middle)) if len(places) > 1 else None,
            slower_pct=float(over_pct(middle, fastest)) if len(median) > 1 else None,
        )
    return by_node


def columns(
    history: StepHistory,
    stage: str,
    between: Between | None,
    world: int,
    since: Sequence[Any] | None = None,
) -> StepColumns:
    """
    Return the data of charts by step: the newest steps, or a part of the run (`between`) in few columns.

    `since` is `next` of an earlier answer. If its token is still valid, the answer has only the columns from
    that step on, else all of them. `z` shows `stage`, or busy time (`total`). In a large job a line of `z` is
    a node: in each column, its slowest rank.
    """
    stage_index = STAGES.index(stage) if stage in STAGES else None
    token: list[int | str] = [*history.layout(between), stage, world]
    from_step = int(since[1]) if since and list(since[0]) == token else None
    made = history.columns(stage_index, between=between, since=from_step)
    by_node = len(history.ranks) + min(max(0, world - len(history.ranks)), MAX_LINES) > MAX_LINES
    ranks, nodes = history.ranks, history.nodes
    lines = [*by_name(nodes).values()] if by_node else [[place] for place in range(len(ranks))]
    answer = StepColumns(token=token, since=from_step, **_drawn(made, stage_index, lines, history, by_node))
    if from_step is not None:
        return answer
    first = [places[0] for places in lines]
    return replace(
        answer,
        by="node" if by_node else "rank",
        ranks=[ranks[place] for place in first],
        nodes=[nodes[place] for place in first],
    )


def _drawn(
    made: Columns, stage: int | None, lines: list[list[int]], history: StepHistory, by_node: bool
) -> dict[str, Any]:
    """Return the fields of `StepColumns` that are by column."""
    nodes: Sequence[str] = history.nodes
    count = len(made.first)
    if not lines:  # as for one rank without a step
        made, nodes, by_node = made._replace(busy=np.empty((1, 0)), values=np.empty((1, 0))), [""], False
    low, middle, high = quantiles(made.busy, (0.1, 0.5, 0.9))
    apart = spread(made.busy, nodes)
    values: Values = made.values
    usual = middle if stage is None else quantiles(values, (0.5,))[0]
    if by_node:
        values = np.array([np.fmax.reduce(values[places], axis=0) for places in lines])
    steps = made.exposed.sum(axis=1)
    positive = np.where(steps > 0, steps, np.nan)
    return {
        "first": made.first,
        "last": made.last,
        "exposed": made.exposed,
        "median_ms": middle,
        "p10_ms": low,
        "p90_ms": high,
        "worst_ms": np.where(apart.worst >= 0, made.busy[apart.worst, np.arange(count)], np.nan),
        "worst_rank": np.array([*history.ranks, -1])[apart.worst],
        "global_pct": apart.global_skew_pct,
        "node_pct": apart.node_skew_pct,
        "worst_over": 1 + apart.global_skew_pct / 100,
        "step_ms": steps,
        "steps_per_s": 1e3 / positive,
        "waiting_pct": 100 * made.waiting,
        "z": deviations(values, usual, middle)[: len(lines)],
    }


def spine(history: StepHistory, rank: int | None, end_ns: int | None, most: int) -> RunTimeline:
    """
    Return the whole run in at most `most` columns. The times are those of `rank`, whose newest rows had
    arrived by `end_ns`.
    """
    first, last, step_ms = history.step_means(ALL, most)
    t_ns = None
    if rank is not None and end_ns is not None and len(last):
        steps, ended_ns = ended(history.timeline(rank), end_ns)
        t_ns = np.interp(last, steps, ended_ns - end_ns).astype(np.int64) + end_ns
    return RunTimeline(first=first, last=last, step_ms=step_ms, t_ns=t_ns)


def change(history: StepHistory, before: Between, since: Between) -> ChangedParts:
    """Return the mean exposed time of each stage in two parts of a run."""
    return ChangedParts(before=_part_means(history, before), since=_part_means(history, since))


def _part_means(history: StepHistory, between: Between) -> PartMeans:
    steps, exposed = history.mean_exposed(between)
    return PartMeans(steps=steps, stages=dict(zip(STAGES, exposed.tolist(), strict=True)) if steps else None)


def busy(history: StepHistory, ranks: Sequence[int], most: int) -> BusyTimes:
    """Return the busy time of the known ranks among `ranks`, in the newest `most` steps."""
    known = [rank for rank in ranks if rank in history.who and rank in history.ranks]
    busy_ms = history.columns(most=most).busy[np.searchsorted(history.ranks, known)]
    return BusyTimes(ranks=known, busy_ms=busy_ms)


def of_rank(history: StepHistory, rank: int, most: int, between: Between | None = None) -> RankSteps:
    """Return the stages of a rank in the newest steps, or in a part of the run, as `columns` has them."""
    first, last, d = history.stage_columns(between, most)
    if rank not in history.ranks or not len(first):
        none = np.empty((0, len(STAGES)))
        return RankSteps(steps=np.empty(0, np.int64), stages=none, median=none, host=None, mean={})
    mine = d[history.ranks.index(rank)]
    mean = dict(zip(STAGES, _mean(mine[None])[0].tolist(), strict=True))
    host = history.host_stages(rank, last)
    return RankSteps(
        steps=last,
        stages=mine,
        median=quantiles(d, (0.5,))[0],
        host=None if host is None else np.where((first == last)[:, None], host, np.nan),
        mean=mean,
    )


def cell(history: StepHistory, rank: int, first: int, last: int, world: int) -> CellMeans:
    """
    Return the data of one cell of the heatmap: means over its steps `first` to `last`, for the rank (in a
    large job, the slowest of its node) and for the median rank. `stages` is empty if only sums are left.
    """
    if rank not in history.ranks:
        return CellMeans(rank=rank, node=None, steps=0, busy_ms=None, median_ms=None, over=None, stages={})
    who = history.ranks.index(rank)
    steps, d, single = history.stages(first, last)
    mean = _mean(d)
    total = _mean(single[..., None])[:, 0]
    if not len(steps):  # long ago: only sums are left
        shown = history.columns(between=ALL)
        columns = np.flatnonzero((shown.first <= first) & (shown.last >= last))
        total = shown.busy[:, columns[0]] if len(columns) else np.full(len(history.ranks), np.nan)
    if world > MAX_LINES:
        same = [
            i for i, node in enumerate(history.nodes) if node == history.nodes[who] and total[i] == total[i]
        ]
        who = max(same, key=lambda i: float(total[i]), default=who)
    middle, median = quantiles(mean, (0.5,))[0], quantiles(total, (0.5,))[0]
    stages = {name: (float(mean[who, i]), float(middle[i])) for i, name in enumerate(STAGES)}
    return CellMeans(
        rank=history.ranks[who],
        node=history.nodes[who],
        steps=int((~np.isnan(single[who])).sum()),
        busy_ms=float(total[who]),
        median_ms=float(median),
        over=float(total[who] / median) if median > 0 else None,
        stages=stages if len(steps) else {},
    )


def _mean(values: Values) -> Float:
    """Return the mean over the steps of the known values: (R, K, n) to (R, n)."""
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    mean: Float = np.where(count > 0, np.where(known, values, 0).sum(axis=1) / np.maximum(count, 1), np.nan)
    return mean
