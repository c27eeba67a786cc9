"""The worked cases of the method, by their numbers: rows, exposed time, leaders, verdict."""

import msgspec
import numpy as np
import pytest
from snapshot import Snapshot
from unit.sample_windows import judge, of_ms, window

from traceml_ray.analysis.evidence import chain
from traceml_ray.analysis.verdict import Verdict

ALL = "all"
PLAIN = [1, 2, 0, 3, 4, 1]
WAITS = [1, 2, 0, 3, 4, 5]
LATE_DATA = [1, 6, 0, 3, 4, 1]

ROWS = {
    "W1": [PLAIN] * 3,
    "W2": [WAITS, WAITS, LATE_DATA],
    "W3": [[1, 2, 0, 3, 40, 3]] * 2 + [[1, 5, 0, 3, 40, 0.5]],
    "W4": [[1, 2, 0, 7, 4, 1], WAITS, WAITS],
    "W5": [WAITS, [1, 2, 0, 3, 8, 1], WAITS],
    "W6": [WAITS, WAITS, [5, 2, 0, 3, 4, 1]],
    "W7": [LATE_DATA, [1, 2, 0, 7, 4, 1], WAITS],
    "W8": [[1, 2, 0, 3, 4, 7]] * 2 + [[1, 5, 0, 6, 4, 1]],
    "W9": [PLAIN],
    "W10": [LATE_DATA] * 3,
    "W11": [WAITS, WAITS, LATE_DATA, [1, 5.9, 0, 3, 4, 1.1]],
    "W12": [WAITS, LATE_DATA, LATE_DATA],
    "W13": [[1, 2, 0, 3, 4, 0], [1, 2, 0, 3, 8, 0], [1, 2, 0, 3, 4, 0]],
    "W16": [PLAIN, PLAIN, [1, 4, 0, 1, 4, 1]],
    "W17": [[0] * 6] * 3,
}
EXPOSED = {
    "W1": (PLAIN, [ALL] * 6),
    "W2": (LATE_DATA, [ALL, [2], [2], [2], [2], ALL]),
    "W3": ([1, 5, 0, 3, 40, 0.5], [ALL, [2], [2], [2], [2], [2]]),
    "W4": ([1, 2, 0, 7, 4, 1], [ALL, ALL, ALL, [0], [0], ALL]),
    "W5": ([1, 2, 0, 3, 8, 1], [ALL, ALL, ALL, ALL, [1], ALL]),
    "W6": ([5, 2, 0, 3, 4, 1], [[2], [2], [2], [2], [2], ALL]),
    "W7": (LATE_DATA, [ALL, [0], [0], [0, 1], [0, 1], ALL]),
    "W8": ([1, 5, 0, 6, 4, 1], [ALL, [2], [2], [2], [2], ALL]),
    "W9": (PLAIN, [ALL] * 6),
    "W10": (LATE_DATA, [ALL] * 6),
    "W11": (LATE_DATA, [ALL, [2], [2], [2], [2], ALL]),
    "W12": (LATE_DATA, [ALL, [1, 2], [1, 2], [1, 2], [1, 2], ALL]),
    "W13": ([1, 2, 0, 3, 8, 0], [ALL, ALL, ALL, ALL, [1], [1]]),
    "W16": ([1, 4, 0, 1, 4, 1], [ALL, [2], [2], ALL, ALL, ALL]),
    "W17": ([0] * 6, [ALL] * 6),
}
VERDICTS = {
    "W1": ("healthy", (), ()),
    "W2": ("straggler", ("data",), (2,)),
    "W3": ("straggler", ("data",), (2,)),
    "W4": ("straggler", ("forward",), (0,)),
    "W5": ("straggler", ("backward",), (1,)),
    "W6": ("straggler", ("post_sync",), (2,)),
    "W7": ("co_critical", ("data", "forward"), (0, 1)),
    "W8": ("ambiguous", ("data", "forward"), (2,)),
    "W9": ("healthy", (), ()),
    "W10": ("healthy", (), ()),
    "W11": ("straggler", ("data",), (2, 3)),
    "W12": ("healthy", (), ()),
    "W13": ("accounting_only", (), ()),
    "W16": ("healthy", (), ()),
    "W17": ("telemetry_limited", (), ()),
}


@pytest.mark.parametrize("case", EXPOSED)
def test_worked_cases_have_their_exposed_time_and_leaders(case):
    exposed, leaders = EXPOSED[case]
    frontier = chain(of_ms(ROWS[case]))
    assert (frontier.exposed[0] / 1e6).tolist() == pytest.approx(exposed)
    ranks = range(len(ROWS[case]))
    for stage, who in enumerate(leaders):
        assert np.flatnonzero(frontier.leaders[0, :, stage]).tolist() == list(ranks if who is ALL else who)


@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize("case", VERDICTS)
def test_worked_cases_have_their_verdict(case, steps):
    verdict = judge(window(of_ms(ROWS[case], steps)))
    assert (verdict.label, verdict.stages, verdict.ranks) == VERDICTS[case]
    assert verdict.pattern != "transient"
    assert verdict.why
    assert verdict.next


@pytest.mark.parametrize(
    ("case", "excess", "gain"), [("W2", 26.7, 26.7), ("W3", 6.1, 6.1), ("W11", 26.7, 26.7)]
)
def test_worked_cases_have_their_cost(case, excess, gain):
    verdict = judge(window(of_ms(ROWS[case], 50)))
    assert verdict.excess_pct == pytest.approx(excess, abs=0.05)
    assert verdict.cost_pct == verdict.gain_pct == pytest.approx(gain, abs=0.05)
    assert verdict.rank_hours_per_hour == pytest.approx(verdict.cost_pct / 100 * len(ROWS[case]))


def test_w7_gains_from_fixing_both_ranks_only():
    verdict = judge(window(of_ms(ROWS["W7"], 50)))
    assert verdict.gain_pct == 0
    assert verdict.cost_pct == pytest.approx(100 * 4 / 15)


def test_w14_is_an_imbalance():
    d = np.concatenate(
        [of_ms([LATE_DATA if rank == k % 3 else WAITS for rank in range(3)]) for k in range(6)]
    )
    assert (chain(d).exposed == np.array(LATE_DATA) * 10**6).all()
    verdict = judge(window(d))
    assert (verdict.label, verdict.stage, verdict.rank, verdict.pattern) == (
        "imbalance",
        "data",
        None,
        "rotating",
    )
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_w15_is_transient(snapshot: Snapshot):
    late = of_ms([[1, 2, 0, 3, 4, 31], [1, 32, 0, 3, 4, 1], [1, 2, 0, 3, 4, 31]])
    d = np.concatenate([late if k % 5 == 4 else of_ms([PLAIN] * 3) for k in range(10)])
    verdict = judge(window(d, first_step=100))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", "data", (1,))
    assert verdict.pattern == "transient"
    assert verdict.gain_pct == pytest.approx(100 * 60 / 170)
    assert verdict.from_step == 104
    snapshot("verdict", verdict.why)


def test_w16_has_a_suspect_without_gain(snapshot: Snapshot):
    verdict = judge(window(of_ms(ROWS["W16"], 50)))
    snapshot("verdict", verdict.why)
    assert verdict.suspects[0].rank == 2
    assert verdict.suspects[0].gain_ms == 0
