"""Busy time per rank, node and stage."""

from collections.abc import Sequence

import numpy as np
import pytest
from unit.sample_windows import RECORDED, of_ms, processes

from traceml_ray.analysis.busy import StepSummary, step_summary
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.stages import FLAG_NO_PEERS, FLAG_NO_SPLIT, STAGES

LIMITS = Thresholds(warmup_steps=0)
ROWS = of_ms([[1, 2, 0, 3, 4, 5], [1, 2, 0, 4, 4, 4], [1, 6, 0, 3, 4, 1], [1, 2, 0, 3, 4, 5]], 20)


def summary_of(
    d: np.ndarray, flags: int = 0, exchanges: int = 1, missing: Sequence[int] = ()
) -> StepSummary | None:
    history = StepHistory(LIMITS, deep=True)
    every = [
        rank_rows
        for rank_rows in processes(d, flags=flags, exchanges=exchanges)
        if rank_rows.rank not in missing
    ]
    history.add_rows(every)
    history.advance((), 0, len(every))
    stats = history.stats()
    return step_summary(stats, history.ranks, history.nodes, missing) if stats else None


def test_busy_summary_covers_ranks_and_nodes():
    summary = summary_of(ROWS)
    assert summary.count == 20
    assert summary.median_ms == summary.p95_ms == 15
    assert summary.per_rank_median_ms == {0: 10, 1: 11, 2: 14, 3: 10}
    assert summary.per_node_median_ms == {"node-0": 10.5, "node-1": 12}
    assert (summary.busy_median_ms, summary.busy_p95_ms) == (10.5, 14)
    assert (summary.worst_rank, summary.worst_node) == (2, "node-1")
    assert summary.global_skew_pct == pytest.approx(100 * 3.5 / 10.5)
    assert summary.node_skew_pct == pytest.approx(100 * 1.5 / 10.5)


def test_step_times_are_of_whole_steps_for_any_number_of_exchanges():
    short = of_ms([[0, 0, 0, 1, 1, 1], [0, 0, 0, 2, 1, 0]])
    first = of_ms([[9, 6, 0, 1, 1, 1], [9, 6, 0, 2, 1, 0]])
    summary = summary_of(np.tile(np.concatenate([first, short, short]), (20, 1, 1)), exchanges=3)
    assert (summary.count, summary.exchanges) == (20, 3)
    assert summary.median_ms == summary.p95_ms == 24
    assert summary.per_rank_median_ms == {0: 21, 1: 24}
    stages = {stage.name: stage for stage in summary.stages}
    assert (stages["data"].exposed_ms, stages["data"].median_ms) == (6, 6)
    assert (stages["forward"].median_ms, stages["forward"].max_ms) == (4.5, 6)
    assert sum(stage.exposed_ms for stage in stages.values()) == 24


def test_stage_summary_has_medians_worst_ranks_and_exposed_shares():
    stages = {stage.name: stage for stage in summary_of(ROWS).stages}
    assert list(stages) == list(STAGES)
    assert (stages["data"].median_ms, stages["data"].max_ms, stages["data"].worst_rank) == (2, 6, 2)
    assert stages["data"].exposed_ms == 6
    assert sum(stage.exposed_share for stage in stages.values()) == pytest.approx(1)
    assert stages["sync_wait"].worst_rank is None


def test_busy_time_shows_a_slow_rank_that_equal_rows_hide():
    d = RECORDED["f4_backward_8"]
    summary = summary_of(d)
    whole = np.median(d.sum(axis=2), axis=0)
    assert np.ptp(whole) < 0.05 * whole.mean()
    assert summary.worst_rank == 3
    assert summary.global_skew_pct > 50


def test_missing_ranks_are_none_not_zero():
    summary = summary_of(ROWS, missing=[3, 5])
    assert summary.per_rank_median_ms == {0: 10, 1: 11, 2: 14, 3: None, 5: None}


def test_single_rank_has_no_skew():
    flags = FLAG_NO_PEERS | FLAG_NO_SPLIT
    summary = summary_of(of_ms([[1, 2, 0, 3, 4, 0]], 5), flags)
    assert summary.per_rank_median_ms == {0: 10}  # its backward is all its own
    assert (summary.worst_rank, summary.worst_node) == (None, None)
    assert (summary.global_skew_pct, summary.node_skew_pct) == (None, None)


def test_backward_that_holds_the_waiting_is_not_busy_time():
    merged = ROWS.copy()
    merged[:, :, 4] += merged[:, :, 5]
    merged[:, :, 5] = 0
    summary = summary_of(merged, FLAG_NO_SPLIT)
    assert summary.per_rank_median_ms == {0: 6, 1: 7, 2: 10, 3: 6}


@pytest.mark.parametrize("d", [np.empty((0, 2, 6), np.int64), np.full((3, 2, 6), 2**63 - 1), -ROWS])
def test_busy_summary_is_none_without_usable_rows(d):
    assert summary_of(d) is None
