"""How long each rank and node was busy: the step times that a slow rank cannot hide behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from traceml_ray.analysis.evidence import Rows, absurd, comparable
from traceml_ray.analysis.frontier import Frontier, chain
from traceml_ray.analysis.spread import spread
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.window import Float, Int64, Window
from traceml_ray.stages import STAGES, SYNC_WAIT


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
    busy = window.by_step(busy_ns(rows))
    frontier = max(frontiers(window, rows), key=lambda each: each.total_ns)
    exposed = window.by_step(frontier.exposed)
    step = exposed.sum(axis=1)
    times = StepTimes(
        count=len(step),
        rows=len(window.keys),
        quantiles=(float(np.median(step)), float(np.percentile(step, 95))),
        busy=np.median(busy, axis=0),
        busy_p95=float(np.percentile(busy, 95)),
        stages=np.median(window.by_step(rows.d), axis=0),
        exposed=exposed.sum(axis=0),
    )
    return step_summary(window, times)


@dataclass(frozen=True)
class StepTimes:
    """What a summary of steps is made from; ns, R ranks."""

    count: int
    rows: int
    quantiles: tuple[float, ...]
    """Median and p95 of the step."""
    busy: Float
    """Median of each rank's busy time (R,)."""
    busy_p95: float
    stages: Float
    """Median of each rank's stages (R, 6)."""
    exposed: Int64
    """Sum over the steps (6,)."""


def step_summary(window: Window, times: StepTimes) -> StepSummary:
    """Return the summary of `times`, of the ranks of `window`."""
    per_rank = times.busy / 1e6
    apart = spread(per_rank[:, None], window.nodes)
    per_node = dict(zip(apart.nodes, apart.per_node[:, 0].tolist(), strict=True))
    ranks: list[int] = window.ranks.tolist()
    median_ns, p95_ns = times.quantiles
    return StepSummary(
        count=times.count,
        exchanges=times.rows / times.count,
        median_ms=median_ns / 1e6,
        p95_ms=p95_ns / 1e6,
        busy_median_ms=float(apart.median[0]),
        busy_p95_ms=times.busy_p95 / 1e6,
        per_rank_median_ms={
            **dict(zip(ranks, per_rank.tolist(), strict=True)),
            **dict.fromkeys(window.missing),
        },
        per_node_median_ms=per_node,
        worst_rank=ranks[int(apart.worst[0])] if len(ranks) > 1 else None,
        worst_node=max(per_node, key=lambda node: per_node[node]) if len(per_node) > 1 else None,
        global_skew_pct=_known(apart.global_skew_pct[0]),
        node_skew_pct=_known(apart.node_skew_pct[0]),
        stages=_stages(times, ranks),
    )


def busy_ns(rows: Rows) -> Int64:
    """Return how long each rank worked in each row, ns (K, R): without its waiting."""
    busy: Int64 = np.einsum("krs,ks->kr", rows.d, (~rows.waits).astype(np.int64))
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


def _stages(times: StepTimes, ranks: list[int]) -> tuple[StageSummary, ...]:
    medians = times.stages / 1e6
    return tuple(
        StageSummary(
            name=name,
            exposed_ms=float(times.exposed[stage]) / times.count / 1e6,
            exposed_share=float(times.exposed[stage]) / max(int(times.exposed.sum()), 1),
            median_ms=float(np.median(medians[:, stage])),
            max_ms=float(medians[:, stage].max()),
            worst_rank=ranks[int(np.argmax(medians[:, stage]))]
            if stage != SYNC_WAIT and len(ranks) > 1
            else None,
        )
        for stage, name in enumerate(STAGES)
    )
