"""Verdicts over a run, live and afterwards."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from snapshot import Snapshot
from unit.sample_windows import EXPECTED, RECORDED, align, judge_run, of_ms, processes, synced, window

from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.thresholds import Thresholds

NO_WARMUP = Thresholds(warmup_steps=0)
SHORT = Thresholds(warmup_steps=0, hold_s=1)
AT_ONCE = Thresholds(warmup_steps=0, hold_s=0, hold_group_s=0, hold_steps=0, hold_cost_s=0)
WAITS = [1, 2, 0, 3, 4, 5]
BALANCED = of_ms([[1, 2, 0, 3, 4, 1]] * 3)
LATE_DATA = of_ms([WAITS, WAITS, [1, 6, 0, 3, 4, 1]])
LATE_FORWARD = of_ms([[1, 2, 0, 8, 4, 1], [1, 2, 0, 3, 4, 6], [1, 2, 0, 3, 4, 6]])


def rows(*parts):
    return np.concatenate([np.tile(row, (steps, 1, 1)) for row, steps in parts])


def periods(run):
    return [
        (period.label, period.stage, period.rank, period.from_step, period.to_step) for period in run.periods
    ]


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "late3"])
def test_recorded_runs_name_the_rank_of_their_fault_and_no_other(name):
    d, expected = RECORDED[name], EXPECTED[name]
    run = judge_run(processes(d, first_step=10), d.shape[1], thresholds=NO_WARMUP)
    whole, rank = run.run_verdict(), expected["rank"]
    assert {period.rank for period in run.periods} <= {None, rank}
    assert whole.rank == rank
    if rank is None:
        assert whole.label in (expected["label"], "imbalance") and not whole.also
        return
    last = run.periods[-1]
    assert (last.label, last.stage, last.rank, last.to_step) == ("straggler", expected["stage"], rank, 209)
    assert last.from_step <= 110
    assert (whole.label, whole.stage) == ("straggler", expected["stage"])


def test_recorded_late_fault_is_named_from_its_onset():
    run = judge_run(processes(RECORDED["late3"], first_step=10), 3, thresholds=SHORT)  # late for 1.7 s
    *before, late = run.periods
    assert (late.label, late.stage, late.rank, late.to_step) == ("straggler", "data", 0, 209)
    assert abs(late.from_step - 130) <= 3
    assert before[-1].to_step == late.from_step - 1
    assert {period.rank for period in before} <= {None}
    assert run.run_verdict().from_step == late.from_step


def test_verdict_changes_are_consecutive_spans():
    d = rows((BALANCED, 100), (LATE_DATA, 300), (LATE_FORWARD, 300), (BALANCED, 300))
    run = judge_run(processes(d), 3)
    spans = periods(run)
    assert [period[:3] for period in spans if period[0] == "straggler"] == [
        ("straggler", "data", 2),
        ("straggler", "forward", 0),
    ]
    assert (spans[0][0], spans[0][3], spans[-1][0], spans[-1][4]) == ("healthy", 10, "healthy", 999)
    assert spans[1][3] == 100
    assert all(a[4] + 1 == b[3] for a, b in pairwise(spans))


def test_warm_up_is_left_out():
    run = judge_run(processes(rows((LATE_DATA, 10), (BALANCED, 60)), first_step=1000), 3)
    assert [period.label for period in run.periods] == ["healthy"]
    assert (run.run_verdict().from_step, run.run_verdict().window_steps) == (1010, 60)


def test_warm_up_is_counted_from_the_first_step_of_the_run():
    late = window(rows((BALANCED, 50)), first_step=5000)
    assert RunJudge(first_step=0).update(late).from_step == 5000
    assert RunJudge().update(late).from_step == 5010


@pytest.mark.parametrize("steps", [0, 5, 29])
def test_short_run_is_not_judged(steps):
    run = judge_run(processes(rows((LATE_DATA, 50))[:steps]), 3)
    assert not run.periods
    assert run.run_verdict().label == "telemetry_limited"
    assert f"{max(steps - 10, 0)} step" in run.run_verdict().why


def test_missing_ranks_are_named_before_there_are_enough_steps(snapshot: Snapshot):
    run = judge_run(processes(rows((LATE_DATA, 15))), 9, missing=[3, 4, 5, 6, 7, 8])
    snapshot("verdict", run.run_verdict().why)


def test_run_without_rows_is_telemetry_limited():
    assert judge_run([], 4).run_verdict().label == "telemetry_limited"
    assert RunJudge().run_verdict().label == "telemetry_limited"


def test_straggler_is_chronic_by_its_share_of_windows():
    run = RunJudge(AT_ONCE)
    d = rows((BALANCED, 300), (LATE_DATA, 200))
    chronic = {}
    for end in range(50, 501, 10):
        verdict = run.update(window(d[end - 50 : end], end - 50))
        if verdict.label == "straggler":
            chronic[end] = verdict.chronic
    assert not chronic[min(chronic)]
    assert chronic[500]
    assert not run.run_verdict().chronic  # 40 % of the run


def test_judging_more_often_changes_nothing():
    d = rows((BALANCED, 200), (LATE_DATA, 60))
    seldom, often = RunJudge(), RunJudge()
    for end in range(50, 261, 10):
        last = window(d[end - 50 : end], end - 50)
        verdicts = [often.update(last) for _ in range(5)]
        assert seldom.update(last) == verdicts[0] == verdicts[-1]
    assert seldom.run_verdict() == often.run_verdict()
    assert periods(seldom) == periods(often)


def test_long_run_is_sampled_evenly_and_within_a_bound(snapshot: Snapshot):
    limits = Thresholds(run_steps=500, warmup_steps=0)
    run = RunJudge(limits)
    d = rows((LATE_DATA, 50))
    for start in range(0, 20_000, 50):
        run.update(window(d if start < 12_000 else rows((BALANCED, 50)), start))
        if start % 1000 == 0:
            assert run.run_verdict().window_steps <= 550
    whole = run.run_verdict()
    # A fault in 60 % of the run is named by the whole, long after it ended.
    assert (whole.label, whole.rank, whole.from_step, whole.to_step) == ("straggler", 2, 0, 19_999)
    assert whole.chronic
    snapshot("verdict", whole.why)


def test_rows_missing_for_a_while_do_not_hide_the_verdict_of_a_long_run():
    recorded = processes(rows((LATE_DATA, 9000)))
    lost = np.zeros(9000, dtype=bool)
    lost[700:790] = lost[5000:5090] = True  # once ninety steps are missing in a row, more than a window
    cut = recorded[1]
    recorded[1] = replace(cut, keys=cut.keys[~lost], flags=cut.flags[~lost], rows=cut.rows[~lost])
    run = judge_run(recorded, len(recorded))
    assert (run.run_verdict().label, run.run_verdict().rank) == ("straggler", 2)
    assert "telemetry_limited" in {
        period.label for period in run.periods
    }  # where they are missing it says so


def test_many_ranks_are_sampled_by_rows():
    run = RunJudge(Thresholds(run_rows=600, warmup_steps=0))
    for start in range(0, 2000, 50):
        run.update(window(rows((LATE_DATA, 50)), start))
    assert run.run_verdict().window_steps <= 250


def test_change_of_ranks_restarts_the_verdict_of_the_run():
    run = RunJudge(AT_ONCE)
    d = rows((LATE_DATA, 50))
    run.update(window(d, 0))
    without = align(processes(d[:, :2], 50), 2)
    run.update(without)
    assert (run.run_verdict().from_step, run.run_verdict().window_steps) == (50, 50)
    assert [period.label for period in run.periods] == ["straggler", "healthy"]


def test_sets_of_ranks_that_overlap_are_one_span():
    one = of_ms([WAITS, WAITS, [1, 6, 0, 3, 4, 1], [1, 2, 0, 3, 4, 5], WAITS])
    two = of_ms([WAITS, WAITS, [1, 6, 0, 3, 4, 1], [1, 6, 0, 3, 4, 1], WAITS])
    run = judge_run(processes(rows((one, 60), (two, 60))), 5)
    assert len(run.periods) == 1


def test_finding_that_recurs_is_measured_in_steps_of_several_exchanges():
    """Stalls in steps of two exchanges, often enough to be no chance: their time is that of all rows."""
    d = rows((BALANCED[:, :2], 2000))
    for row in range(200, 1960, 80):
        d[row, 0, 1] += 600_000_000
        d[row, 1, 5] += 600_000_000
    whole = judge_run(processes(d, exchanges=2), 2).run_verdict()
    assert (whole.label, whole.stage, whole.rank, whole.pattern) == ("straggler", "data", 0, "transient")


def late_together(steps, count, seed=0, share=(0, 1)):
    """Rows of six ranks, the first `count` about equally late: which is the latest is chance."""
    random = np.random.default_rng(seed)
    local = 1e6 * np.array([3, 6, 0, 9, 14]) * random.normal(1, 0.02, (steps, 6, 5))
    first, end = (int(part * steps) for part in share)
    local[first:end, :count, 1] += 12e6
    return synced(local.astype(np.int64), np.full(steps, 1_000_000))


def test_ranks_that_are_equally_late_are_chronic_together():
    run = judge_run(processes(late_together(600, 3)), 6, thresholds=AT_ONCE)
    whole = run.run_verdict()
    assert (whole.label, whole.stage, whole.ranks) == ("straggler", "data", (0, 1, 2))
    assert whole.chronic


def test_episodes_of_ranks_that_are_equally_late_are_added_up():
    """Three times they are late, each time another one most: together that is what cost most."""
    parts = [late_together(400, 2, seed, (0.5, 0.7)) for seed in range(4)]
    run = judge_run(processes(np.concatenate(parts)), 6, thresholds=AT_ONCE)
    episodes = run.episodes.episodes
    assert {episode.rank for episode in episodes if episode.ranks} == {0, 1}
    whole = run.run_verdict()
    assert (whole.label, whole.ranks) == ("straggler", (0, 1))
    cost_s = sum(episode.cost_s for episode in episodes if episode.ranks)
    assert whole.cost_pct == pytest.approx(100 * cost_s / whole.elapsed_s, rel=1e-3)
