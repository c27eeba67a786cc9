"""How long each rank and node was busy: the step times that a slow rank cannot hide behind."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from traceml_ray.analysis.evidence import Rows, absurd, comparable
from traceml_ray.analysis.frontier import Frontier, chain
from traceml_ray.analysis.spread import spread
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Int64, Window
from traceml_ray.wire import STAGES, SYNC_WAIT


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """
    One stage, per step: `exposed_ms` is the mean of its exposed time, `exposed_share` (0..1) that
    over the mean step; `median_ms` and `max_ms` are the median and the largest of the ranks'
    medians, the latter `worst_rank`'s (`None` for waiting, which is nobody's fault).
    """

    name: str
    exposed_ms: float
    exposed_share: float
    median_ms: float
    max_ms: float
    worst_rank: int | None


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """
    Step times of a window; ms, `None` where there is nothing to tell.

    `median_ms` and `p95_ms` are of the whole step, however many exchanges it has: `exchanges`, on average.
    All else is **busy time** (the row without its
    waiting), because rows are equally long on every rank, however slow one of them is: per rank
    the median over steps, per node the median of its ranks' values, skew in % as
    (worst − median) ÷ median over ranks and (slowest − fastest) ÷ fastest over nodes.
    Backward counts as waiting where it is not told apart from it.
    """

    count: int
    exchanges: float
    median_ms: float
    p95_ms: float
    busy_median_ms: float
    busy_p95_ms: float
    per_rank_median_ms: dict[int, float | None]
    """Missing ranks are there, with `None`; of very many, the lowest."""
    per_node_median_ms: dict[str, float]
    worst_rank: int | None
    worst_node: str | None
    global_skew_pct: float | None
    node_skew_pct: float | None
    stages: tuple[StageSummary, ...]


def summarise(window: Window, thresholds: Thresholds) -> StepSummary | None:
    """
    Return the step times of `window`, or `None` when it holds no rows or absurd ones.

    Of several groups of ranks that exchange gradients, the step is that of the slowest.
    """
    if not window.d.size or absurd(window, thresholds) is not None:
        return None
    rows = comparable(window)
    busy = window.by_step(busy_ns(rows)) / 1e6
    frontier = max(frontiers(window, rows), key=lambda each: each.total_ns)
    exposed = window.by_step(frontier.exposed)
    step = exposed.sum(axis=1) / 1e6
    per_rank = np.median(busy, axis=0)
    apart = spread(per_rank[:, None], window.nodes)
    per_node = dict(zip(apart.nodes, apart.per_node[:, 0].tolist(), strict=True))
    ranks: list[int] = window.ranks.tolist()
    return StepSummary(
        count=len(step),
        exchanges=len(window.keys) / len(step),
        median_ms=float(np.median(step)),
        p95_ms=float(np.percentile(step, 95)),
        busy_median_ms=float(apart.median[0]),
        busy_p95_ms=float(np.percentile(busy, 95)),
        per_rank_median_ms={
            **dict(zip(ranks, per_rank.tolist(), strict=True)),
            **dict.fromkeys(window.missing),
        },
        per_node_median_ms=per_node,
        worst_rank=ranks[int(apart.worst[0])] if len(ranks) > 1 else None,
        worst_node=max(per_node, key=lambda node: per_node[node]) if len(per_node) > 1 else None,
        global_skew_pct=_known(apart.global_skew_pct[0]),
        node_skew_pct=_known(apart.node_skew_pct[0]),
        stages=_stages(window.by_step(rows.d), exposed, ranks),
    )


def busy_ns(rows: Rows) -> Int64:
    """Return how long each rank worked in each row, ns (K, R): without its waiting."""
    busy: Int64 = (rows.d * ~rows.waits[:, None, :]).sum(axis=2)
    return busy


def frontiers(window: Window, rows: Rows, behind: Sequence[Int64 | None] = ()) -> list[Frontier]:
    """
    Return the frontier of each group of ranks, see `Window.by_group`; `rows` are those of `window`.

    `behind` is where each group ended before, see `chain`.
    """
    groups = [group for group in window.by_group() if len(group.ranks)]
    before = behind or [None] * len(groups)
    return [
        chain((rows if group is window else comparable(group)).d, late)
        for group, late in zip(groups, before, strict=True)
    ]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _stages(d: Int64, by_step: Int64, ranks: list[int]) -> tuple[StageSummary, ...]:
    """Return the stages of `d` (S, R, 6), whose exposed time is `by_step` (S, 6)."""
    exposed = by_step.sum(axis=0)
    medians = np.median(d, axis=0) / 1e6
    return tuple(
        StageSummary(
            name=name,
            exposed_ms=float(exposed[stage]) / len(d) / 1e6,
            exposed_share=float(exposed[stage]) / max(int(exposed.sum()), 1),
            median_ms=float(np.median(medians[:, stage])),
            max_ms=float(medians[:, stage].max()),
            worst_rank=ranks[int(np.argmax(medians[:, stage]))]
            if stage != SYNC_WAIT and len(ranks) > 1
            else None,
        )
        for stage, name in enumerate(STAGES)
    )
