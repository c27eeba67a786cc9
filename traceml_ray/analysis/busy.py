"""
Busy time of ranks and nodes: step times in which a slow rank is visible, because they
leave out waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from traceml_ray.analysis.evidence import Frontier, Rows, chain, comparable
from traceml_ray.analysis.hosts import LATE
from traceml_ray.analysis.spread import quantiles, spread
from traceml_ray.analysis.step_stats import StepStats
from traceml_ray.analysis.window import Int64, Window
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_DEVICE_CLOCK,
    FORWARD,
    LEAD_UNKNOWN,
    POST_SYNC,
    PREPARE,
    STAGES,
    SYNC_WAIT,
)


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """
    Times of one stage, per step. `exposed_ms` is its mean exposed time; `exposed_share` (0..1) is this as a
    share of the mean step. `median_ms` and `max_ms` are the median and the largest of the ranks' medians;
    `worst_rank` has the largest (None for waiting, which no rank causes for itself).
    """

    name: str
    exposed_ms: float
    exposed_share: float
    median_ms: float
    max_ms: float
    worst_rank: int | None


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """
    Step times in ms; None: not known.

    `median_ms` and `p95_ms` are for the whole step, with all its exchanges (`exchanges`, mean). All other
    times are **busy time**: the row without its waiting. Rows are equally long on every rank, however slow
    one of them is, so only busy time shows a slow rank. Per rank it is the median over steps, per node the
    median of its ranks' values. Skew in % is (worst − median) ÷ median over ranks and (slowest − fastest) ÷
    fastest over nodes. Backward counts as waiting if the two cannot be separated.
    """

    count: int
    exchanges: float
    median_ms: float
    p95_ms: float
    busy_median_ms: float
    busy_p95_ms: float
    per_rank_median_ms: dict[int, float | None]
    """
    Median busy time per rank, in ms. Missing ranks are included, with `None`; if there are very many, only
    the lowest are.
    """
    per_node_median_ms: dict[str, float]
    per_rank_gpu_idle_pct: dict[int, float | None]
    """
    Share of each device's time in which it waited for its host, in %. Empty if no rank has a device clock.
    """
    worst_rank: int | None
    worst_node: str | None
    global_skew_pct: float | None
    node_skew_pct: float | None
    stages: tuple[StageSummary, ...]


def step_summary(
    stats: StepStats, ranks: Sequence[int], nodes: Sequence[str], missing: Iterable[int]
) -> StepSummary:
    """Return the step times of `stats`, which cover `ranks`. `nodes` is the node of each rank."""
    per_rank = stats.busy()
    apart = spread(per_rank[:, None], nodes)
    per_node = {
        node: ms for node, ms in zip(apart.nodes, apart.per_node[:, 0].tolist(), strict=True) if ms == ms
    }
    median_ms, p95_ms = stats.step(0.5, 0.95)
    known = dict(zip(ranks, (_known(ms) for ms in per_rank), strict=True))
    return StepSummary(
        count=stats.steps,
        exchanges=stats.rows / stats.steps,
        median_ms=median_ms,
        p95_ms=p95_ms,
        busy_median_ms=float(apart.median[0]),
        busy_p95_ms=stats.busy_of_all(0.95),
        per_rank_median_ms={**known, **dict.fromkeys(missing)},
        per_node_median_ms=per_node,
        per_rank_gpu_idle_pct=_idle(stats, ranks),
        worst_rank=ranks[int(apart.worst[0])] if len(ranks) > 1 else None,
        worst_node=max(per_node, key=lambda node: per_node[node]) if len(per_node) > 1 else None,
        global_skew_pct=_known(apart.global_skew_pct[0]),
        node_skew_pct=_known(apart.node_skew_pct[0]),
        stages=_stages(stats, ranks),
    )


def busy_ns(rows: Rows) -> Int64:
    """Return the time that each rank worked in each row, without waiting, ns (K, R)."""
    busy: Int64 = np.einsum("krs,ks->kr", rows.d, (~rows.waits).astype(np.int64))
    return busy


def idle_ns(window: Window) -> Int64 | None:
    """
    Return the time that each rank's device waited for its host in each row, and the part of the row for which
    this is known, ns (K, R, 2); None if the leads of the hosts are not known.

    A device waits in `data`, where no kernel runs. In a stage in which the host is late, it waits for the
    excess over its peers.
    """
    d, leads = window.d, window.leads
    if window.host is None or leads is None:
        return None
    idle, middle = d[:, :, DATA].copy(), (d.shape[1] - 1) // 2
    for stage in (POST_SYNC, PREPARE, FORWARD, BACKWARD):
        late = leads[:, :, LATE] & 1 << stage != 0
        if late.any():
            peers = np.partition(d[:, :, stage], middle, axis=1)[:, middle, None]
            idle += np.where(late, np.maximum(d[:, :, stage] - peers, 0), 0)
    known = (window.flags & FLAG_DEVICE_CLOCK != 0) & (leads[:, :, LATE] != LEAD_UNKNOWN)
    both: Int64 = np.stack([idle, d.sum(axis=2)], axis=-1) * known[..., None]
    return both


def frontiers(window: Window, rows: Rows, behind: Sequence[Int64 | None] = ()) -> list[Frontier]:
    """
    Return the frontier of each group of ranks, see `Window.by_group`. `rows` are the rows of `window`.

    `behind` is the slack in which each group's previous piece ended, see `chain`.
    """
    groups = [group for group in window.by_group() if len(group.ranks)]
    before = behind or [None] * len(groups)
    return [
        chain((rows if group is window else comparable(group)).d, late)
        for group, late in zip(groups, before, strict=True)
    ]


def _idle(stats: StepStats, ranks: Sequence[int]) -> dict[int, float | None]:
    share = {rank: _known(100 * share_idle) for rank, share_idle in zip(ranks, stats.idle(), strict=True)}
    return share if any(share_idle is not None for share_idle in share.values()) else {}


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _stages(stats: StepStats, ranks: Sequence[int]) -> tuple[StageSummary, ...]:
    medians = stats.stages()
    middle = quantiles(medians, (0.5,))[0]
    largest, worst = np.nanmax(medians, axis=0), np.nanargmax(medians, axis=0)
    return tuple(
        StageSummary(
            name=name,
            exposed_ms=float(stats.exposed[stage]),
            exposed_share=float(stats.exposed[stage] / max(stats.exposed.sum(), 1e-6)),
            median_ms=float(middle[stage]),
            max_ms=float(largest[stage]),
            worst_rank=ranks[int(worst[stage])] if stage != SYNC_WAIT and len(ranks) > 1 else None,
        )
        for stage, name in enumerate(STAGES)
    )
