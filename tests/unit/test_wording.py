"""The sentences people read."""

import numpy as np
from snapshot import Snapshot
from unit.sample_windows import of_ms, window

from traceml_ray.analysis.verdict import judge

WAITS = [1, 2, 0, 3, 4, 5]


def test_two_ranks(snapshot: Snapshot) -> None:
    verdict = judge(window(of_ms([WAITS, [1, 6, 0, 3, 4, 1]], 50)))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", "data", (1,))
    snapshot("verdict", verdict.why, verdict.next)


def test_one_step(snapshot: Snapshot) -> None:
    snapshot("verdict", judge(window(of_ms([WAITS, [1, 6, 0, 3, 4, 1]]))).why)


def test_a_fault_that_just_began(snapshot: Snapshot) -> None:
    d = np.concatenate([of_ms([[1, 2, 0, 3, 4, 1]] * 2, 30), of_ms([WAITS, [1, 6, 0, 3, 4, 1]], 20)])
    verdict = judge(window(d, first_step=100))
    assert (verdict.from_step, verdict.transient) == (130, False)
    snapshot("verdict", verdict.why)


def test_two_stages_of_one_rank(snapshot: Snapshot) -> None:
    d = of_ms([[1, 2, 0, 3, 4, 7], [1, 2, 0, 3, 4, 7], [1, 5, 0, 6, 4, 1]], 50)
    verdict = judge(window(d))
    assert (verdict.label, verdict.ranks, verdict.stages) == ("ambiguous", (2,), ("data", "forward"))
    snapshot("verdict", verdict.why)


def test_two_causes(snapshot: Snapshot) -> None:
    d = of_ms([[1, 6, 0, 3, 4, 1], [1, 2, 0, 7, 4, 1], WAITS], 50)
    verdict = judge(window(d))
    assert verdict.label == "co_critical"
    snapshot("verdict", verdict.why, verdict.next)


def test_many_ranks_are_counted_not_listed(snapshot: Snapshot) -> None:
    rows = [[1, 6, 0, 3, 4, 1] if rank % 3 == 0 else WAITS for rank in range(60)]
    verdict = judge(window(of_ms(rows, 50)))
    assert len(verdict.ranks) == len(verdict.nodes) == 20
    snapshot("verdict", verdict.why)


def test_healthy(snapshot: Snapshot) -> None:
    verdict = judge(window(of_ms([[1, 2, 0, 3, 4, 1]] * 3, 50)))
    assert (verdict.label, verdict.rank) == ("healthy", None)
    snapshot("verdict", verdict.why)


def test_every_stage_has_advice():
    for stage in range(5):
        row, wait = [1, 2, 1, 3, 4, 1], [1, 2, 1, 3, 4, 5]
        row[stage] += 4
        verdict = judge(window(of_ms([wait, row, wait], 50)))
        assert verdict.rank == 1
        assert verdict.next.startswith("Look at ")
        assert "{" not in verdict.next
