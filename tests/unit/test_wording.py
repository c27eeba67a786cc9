"""The sentences people read."""

import numpy as np
import pytest
from unit.sample_windows import of_ms, window

from traceml_ray.analysis import wording
from traceml_ray.analysis.verdict import judge

WAITS = [1, 2, 0, 3, 4, 5]


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ms"),
        (41_400_000, "41 ms"),
        (9_970_000, "10 ms"),
        (3_900_000, "3.9 ms"),
        (4_000_000, "4 ms"),
        (254_000, "0.25 ms"),
        (1_234_500_000, "1,234 ms"),
    ],
)
def test_milliseconds(ns, text):
    assert wording.ms(ns) == text


def test_percent():
    assert [wording.percent(share) for share in (0, 0.0606, 0.28, 1, 0.002)] == [
        "0 %",
        "6.1 %",
        "28 %",
        "100 %",
        "0.2 %",
    ]


def test_two_ranks():
    verdict = judge(window(of_ms([WAITS, [1, 6, 0, 3, 4, 1]], 50)))
    assert verdict.why == (
        "rank 1 (node-0) is 4 ms late out of `data` in 100 % of the last 50 steps; "
        "the other rank waits for it in `sync_wait`. Mending it saves 27 % of the step."
    )
    assert verdict.next == "Look at its DataLoader workers and the node's disk."


def test_one_step():
    assert "late out of `data` in the last step;" in judge(window(of_ms([WAITS, [1, 6, 0, 3, 4, 1]]))).why


def test_a_fault_that_just_began():
    d = np.concatenate([of_ms([[1, 2, 0, 3, 4, 1]] * 2, 30), of_ms([WAITS, [1, 6, 0, 3, 4, 1]], 20)])
    verdict = judge(window(d, first_step=100))
    assert "4 ms late out of `data` in 100 % of the 20 steps since step 130;" in verdict.why
    assert (verdict.from_step, verdict.transient) == (130, False)


def test_two_stages_of_one_rank():
    d = of_ms([[1, 2, 0, 3, 4, 7], [1, 2, 0, 3, 4, 7], [1, 5, 0, 6, 4, 1]], 50)
    verdict = judge(window(d))
    assert verdict.why == (
        "rank 2 (node-1) is late out of two stages in 100 % of the last 50 steps: "
        "`data` (3 ms) and `forward` (3 ms). One cause may well be behind both. "
        "Mending both saves 35 % of the step."
    )


def test_two_causes():
    d = of_ms([[1, 6, 0, 3, 4, 1], [1, 2, 0, 7, 4, 1], WAITS], 50)
    verdict = judge(window(d))
    assert verdict.why == (
        "Late at the same time: rank 0 (node-0) out of `data` (4 ms) "
        "and rank 1 (node-0) out of `forward` (4 ms). Mending the first alone saves 0 % of the step, "
        "all of it together 27 %."
    )
    assert verdict.next.startswith("Mend them together: on rank 0 (node-0) look at its DataLoader workers")


def test_many_ranks_are_counted_not_listed():
    rows = [[1, 6, 0, 3, 4, 1] if rank % 3 == 0 else WAITS for rank in range(60)]
    verdict = judge(window(of_ms(rows, 50)))
    assert verdict.why.startswith("ranks 0, 3, 6, 9, 12, 15, 18, 21 and 12 more (20 nodes) are 4 ms late")
    assert len(verdict.ranks) == len(verdict.nodes) == 20


def test_healthy():
    verdict = judge(window(of_ms([[1, 2, 0, 3, 4, 1]] * 3, 50)))
    assert verdict.why == (
        "No rank holds the others up: the largest lasting excess over peers is 0 % of the step (5 % counts)."
    )


def test_every_stage_has_advice():
    for stage in range(5):
        row, wait = [1, 2, 1, 3, 4, 1], [1, 2, 1, 3, 4, 5]
        row[stage] += 4
        verdict = judge(window(of_ms([wait, row, wait], 50)))
        assert verdict.rank == 1
        assert verdict.next.startswith("Look at ")
        assert "{" not in verdict.next
