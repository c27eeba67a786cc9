"""Numbers of the steps of a run that need no history: a rank beside its peers."""

from __future__ import annotations

import numpy as np

from traceml_ray.analysis.shapes import RankTimes
from traceml_ray.analysis.step_numbers import stages_beside_peers
from traceml_ray.stages import DATA, N_STAGES, STAGES


def times(data_ms: list[float], ranks: list[int]) -> RankTimes:
    stages = np.ones((len(ranks), N_STAGES))
    stages[:, DATA] = data_ms
    busy = stages.sum(axis=1)
    return RankTimes(steps=9, ranks=ranks, busy_ms=busy, over=busy, stages=stages)


def test_a_rank_is_beside_the_median_of_the_ranks_that_are_not_named() -> None:
    rank, peers = stages_beside_peers(times([2, 30, 3, 40, 4], [0, 2, 5, 6, 7]), 2, [2, 6])
    assert [*rank] == [*peers] == [*STAGES]
    assert (rank["data"], peers["data"]) == (30, 3)
    assert (rank["forward"], peers["forward"]) == (1, 1)


def test_times_that_are_not_known_do_not_count() -> None:
    _, peers = stages_beside_peers(times([2, 30, np.nan], [0, 1, 2]), 1, [])
    assert peers["data"] == 2


def test_without_other_ranks_there_are_no_peers() -> None:
    rank, peers = stages_beside_peers(times([30, 40], [0, 1]), 1, [0])
    assert rank["data"] == 40
    assert np.isnan([*peers.values()]).all()
