"""`group_wide`: what became slower than it was when all was well, and the baseline that says so."""

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from snapshot import Snapshot
from unit.sample_windows import RECORDED, judge, judge_run, of_ms, processes, synced, window
from unit.test_verdict import WILD
from unit.test_worked_cases import LATE_DATA, PLAIN, WAITS

from traceml_ray.analysis.baseline import Baseline, Learner
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import judge_window
from traceml_ray.stages import DATA, SEGMENT_BITS, STAGES, SYNC_WAIT

AT_ONCE = Thresholds(hold_s=0, hold_group_s=0, hold_steps=0, hold_cost_s=0)
LEARNED = 10 + 50 + 5 * 50
"""Steps after which a run has its baseline: warm-up, what follows it, five windows."""
SOON = Thresholds(hold_group_s=2)
W1 = Baseline(
    level_ns=tuple(ms * 1e6 for ms in PLAIN), mad_ns=(0.0,) * 6, sd_ns=(0.0,) * 6, step_ns=11e6,
    steps=250, ranks=3, source="session good",
)  # fmt: skip
BALANCED = of_ms([PLAIN] * 3)
SLOW = of_ms([LATE_DATA] * 3)
MAJORITY = of_ms([WAITS, LATE_DATA, LATE_DATA])


def rows(*parts):
    return np.concatenate([np.tile(row, (steps, 1, 1)) for row, steps in parts])


def noisy(seed, steps, ranks, noise):
    """Stationary rows (K, R, 6): stages of 1.6 to 8 ms."""
    random = np.random.default_rng(seed)
    mean = random.uniform(0.2, 1.0, 5) * 8e6
    factor = 1 + noise * random.standard_normal((steps, ranks, 5))
    return synced((mean * np.maximum(factor, 0.1)).astype(np.int64), np.full(steps, 1_000_000))


def slower(d, stage, begin, share):
    """The same rows with `stage` of all ranks longer by `share` of the step from step `at` on."""
    more = int(share * d[:begin, 0].sum(axis=1).mean())
    if stage == SYNC_WAIT:
        d[begin:, :, SYNC_WAIT] += more
        return d
    local = d[:, :, :SYNC_WAIT].copy()
    local[begin:, :, stage] += more
    return synced(local, np.full(len(d), 1_000_000))


def live(d, run=None, every=10, first=30):
    """The verdict after each `every` steps."""
    run = run or RunJudge(AT_ONCE)
    whole = window(d)
    ends = range(first, len(d) + 1, every)
    return run, {end: run.update(whole.select(slice(max(0, end - 50), end))) for end in ends}


def labels(verdicts, first=0, last=10**9):
    return {verdict.label for end, verdict in verdicts.items() if first <= end <= last}


class TestRule:
    @pytest.mark.parametrize("case", [SLOW, MAJORITY], ids=["all", "most"])
    def test_worked_cases_w10_and_w12_are_drift_from_w1(self, case, snapshot: Snapshot):
        rows50 = window(np.tile(case, (50, 1, 1)), first_step=100)
        assert judge(rows50).label == "healthy"
        verdict = judge(rows50, baseline=W1)
        assert (verdict.label, verdict.stages, verdict.rank, verdict.ranks) == (
            "group_wide", ("data",), None, (),
        )  # fmt: skip
        assert verdict.cost_pct == pytest.approx(100 * 4 / 15)
        assert verdict.rank_hours_per_hour == pytest.approx(3 * 4 / 15)
        assert (verdict.from_step, verdict.to_step, verdict.confidence) == (100, 149, "high")
        snapshot("verdict", verdict.why, verdict.next)
        assert msgspec.json.decode(msgspec.json.encode(verdict), type=type(verdict)) == verdict

    def test_late_rank_takes_precedence_over_drift(self):
        late = of_ms([WAITS, WAITS, LATE_DATA], 50)
        assert judge(window(late), baseline=W1) == judge(window(late))

    def test_imbalance_without_cost_does_not_hide_a_drift(self, snapshot: Snapshot):
        d = of_ms([PLAIN, PLAIN, [1, 4, 0, 1, 4, 1]], 50)
        snapshot("verdict", judge(window(d), baseline=W1).why)
        d[:, :, 4] += 3_000_000
        assert judge(window(d), baseline=W1).stage == "backward"

    def test_single_rank_is_healthy(self):
        assert judge(window(SLOW[:, :1].repeat(50, axis=0)), baseline=W1).label == "healthy"

    @pytest.mark.parametrize(("more", "label"), [(0.3, "healthy"), (0.4, "group_wide")])
    def test_drift_threshold_is_three_percent_of_the_step(self, more, label):
        d = of_ms([[1, 2 + more, 0, 3, 4, 1]] * 3, 50)
        assert judge(window(d), baseline=W1).label == label

    @pytest.mark.parametrize(("mad", "label"), [(1.4, "healthy"), (1.2, "group_wide")])
    def test_drift_threshold_is_three_mads(self, mad, label):
        wide = msgspec.structs.replace(W1, mad_ns=(mad * 1e6,) * 6)
        assert judge(window(np.tile(SLOW, (50, 1, 1))), baseline=wide).label == label

    def test_time_that_moves_to_another_stage_costs_nothing(self):
        assert judge(window(of_ms([[1, 4, 0, 1, 4, 1]] * 3, 50)), baseline=W1).label == "healthy"

    def test_checkpoint_is_no_drift_but_a_stall_in_every_fifth_step_is(self):
        d = rows((BALANCED, 50))
        d[20, :, 0] += 500_000_000
        assert judge(window(d), baseline=W1).label == "healthy"
        d = rows((BALANCED, 50))
        d[::5, :, DATA] += 20_000_000
        assert judge(window(d), baseline=W1).stage == "data"

    @pytest.mark.parametrize("ranks", [2, 3, 8])
    def test_stages_that_slow_down_alike_are_one_finding(self, ranks, snapshot: Snapshot):
        d = of_ms([[1.2, 2.4, 0, 3.6, 4.8, 1.2]] * ranks, 50)
        verdict = judge(window(d), baseline=W1)
        assert (verdict.label, verdict.stage, verdict.stages) == ("group_wide", None, ())
        assert verdict.cost_pct == pytest.approx(100 * 2.2 / 13.2)
        if ranks == 3:
            snapshot("verdict", verdict.why, verdict.next)

    @pytest.mark.parametrize(
        ("ms", "stage", "cost"),
        [
            ([1.3, 2.3, 0, 3.3, 4.3, 1.3], None, 1.5),  # each by less than what is looked at
            ([1.1, 2, 0, 3, 8.2, 1.1], "backward", 4.2),
            ([1, 3, 0, 5, 4, 1], "forward", 2),  # the others by half as much
            ([2, 2, 0, 4, 4, 2], None, 3),
        ],
    )
    def test_stage_is_named_where_it_carries_the_slowdown(self, ms, stage, cost):
        verdict = judge(window(of_ms([ms] * 3, 50)), baseline=W1)
        assert (verdict.label, verdict.stage) == ("group_wide", stage)
        assert verdict.cost_pct == pytest.approx(100 * cost / sum(ms))

    def test_largest_stage_is_not_named_where_all_stages_slow_down(self):
        most = msgspec.structs.replace(W1, level_ns=(1e6, 1e6, 0, 1e6, 16e6, 1e6), step_ns=20e6)
        alike = judge(window(of_ms([[1.3, 1.3, 0, 1.3, 20.8, 1.3]] * 2, 50)), baseline=most)
        assert (alike.stage, alike.cost_pct) == (None, pytest.approx(100 * 6 / 26))
        alone = judge(window(of_ms([[1, 1, 0, 1, 22, 1]] * 2, 50)), baseline=most)
        assert (alone.stage, alone.cost_pct) == ("backward", pytest.approx(100 * 6 / 26))

    def test_rank_that_became_slow_in_all_stages_is_no_group_wide_drift(self):
        d = rows((BALANCED[:, :2], 30), (of_ms([[1, 2, 0, 3, 4, 6], [1.5, 3, 0, 4.5, 6, 1]]), 20))
        assert judge(window(d), baseline=W1).label != "group_wide"

    def test_step_of_several_rows_is_their_sum(self):
        d = rows((BALANCED, 50))
        d[1::2, :, DATA] = 30_000_000
        halves = window(d)
        keys = (np.arange(50) // 2 << SEGMENT_BITS) + np.arange(50) % 2
        two = msgspec.structs.replace(W1, level_ns=(2e6, 32e6, 0, 6e6, 8e6, 2e6), step_ns=50e6)
        segments = type(halves)(**{**vars(halves), "keys": keys})
        assert judge(segments, baseline=two).label == "healthy"
        less = msgspec.structs.replace(two, level_ns=(2e6, 28e6, 0, 6e6, 8e6, 2e6), step_ns=46e6)
        assert judge(segments, baseline=less).excess_pct == pytest.approx(8)

    def test_drift_begins_at_the_change_point(self, snapshot: Snapshot):
        verdict = judge(window(rows((BALANCED, 33), (SLOW, 17)), first_step=100), baseline=W1)
        assert (verdict.stage, verdict.from_step) == ("data", 133)
        snapshot("verdict", verdict.why)
        assert verdict.cost_pct == pytest.approx(100 * 4 / 15, rel=0.001)


class TestBaseline:
    def test_baseline_is_learned_after_the_first_windows_and_never_changes(self):
        run, verdicts = live(rows((SLOW, 60), (BALANCED, 400)))
        assert labels(verdicts) == {"healthy"}
        assert run.baseline.level_ns == tuple(ms * 1e6 for ms in PLAIN)
        assert (run.baseline.from_step, run.baseline.to_step, run.baseline.steps) == (60, 309, 250)
        learned = run.baseline
        _, after = live(rows((BALANCED, 460), (SLOW, 200)), run, first=470)
        assert run.baseline is learned
        assert labels(after, 480) == {"group_wide"}

    def test_baseline_is_not_learned_from_windows_with_a_fault(self):
        late = of_ms([WAITS, WAITS, LATE_DATA])
        run, _ = live(rows((BALANCED, 160), (late, 300), (BALANCED, 200)))
        assert run.baseline.level_ns == tuple(ms * 1e6 for ms in PLAIN)
        assert run.baseline.to_step > 460

    def test_baseline_does_not_judge_the_windows_it_is_learned_from(self):
        run, _ = live(rows((BALANCED, 400)))
        baseline = msgspec.structs.replace(run.baseline, step_ns=1e6, level_ns=(1e5,) * 6)
        whole = window(rows((BALANCED, 400)))
        begin = baseline.to_step
        assert judge(whole.select(slice(begin - 20, begin + 30)), baseline=baseline).label == "healthy"
        assert judge(whole.select(slice(begin + 1, begin + 51)), baseline=baseline).label == "group_wide"

    def test_baseline_does_not_follow_a_slow_drift(self):
        """Half a thousandth of the step more in every step: never more than 0.5 % between two windows."""
        d = np.repeat(rows((BALANCED, 1)), 1500, axis=0)
        d[LEARNED:, :, DATA] += (np.arange(1500 - LEARNED) * 5_500)[:, None]
        run, verdicts = live(d)
        named_at = next(end for end, verdict in verdicts.items() if verdict.label == "group_wide")
        # 3 % of the step is passed 60 steps after the drift began, by the mean of a window 25 later.
        assert LEARNED + 60 <= named_at <= LEARNED + 100
        assert labels(verdicts, named_at) == {"group_wide"}
        assert run.baseline.step_ns == 11e6
        last = run.periods[-1]
        assert last.excess_pct == pytest.approx(100 * 6.4 / 17.4, abs=1)
        assert last.cost_range_pct[0] < last.cost_pct < last.cost_range_pct[1] < last.excess_pct

    def test_baseline_is_reset_by_another_world_size_not_by_a_missing_rank(self):
        run, _ = live(rows((BALANCED, 400)))
        learned = run.baseline
        run.update(
            type(window(SLOW))(**{**vars(window(np.tile(SLOW, (50, 1, 1))[:, :2], 400)), "expected": 3})
        )
        assert run.baseline is learned
        run.update(window(np.tile(SLOW, (50, 1, 1))[:, :2], 450))
        assert run.baseline is None

    def test_given_baseline_is_used_at_once_for_any_number_of_ranks(self):
        run = RunJudge(AT_ONCE, baseline=msgspec.structs.replace(W1, ranks=None))
        _, verdicts = live(rows((of_ms([LATE_DATA] * 5), 60)), run)
        assert labels(verdicts) == {"group_wide"}

    def test_learner_holds_no_more_than_it_needs(self):
        learner = Learner(Thresholds(baseline_after_steps=0))
        learned = [
            learner.add(judge_window(window(rows((BALANCED, 50)), end), Thresholds()).evidence)
            for end in range(0, 250, 10)
        ]
        assert [end for end, baseline in enumerate(learned) if baseline] == [20]


class TestHistory:
    def test_drift_has_a_beginning_and_an_end(self):
        run = judge_run(processes(rows((BALANCED, 403), (SLOW, 200), (BALANCED, 300))), 3, thresholds=SOON)
        periods = [(period.label, period.stage, period.from_step, period.to_step) for period in run.periods]
        assert periods[:2] == [("healthy", None, 10, 402), ("group_wide", "data", 403, periods[1][3])]
        assert [period[0] for period in periods] == ["healthy", "group_wide", "healthy"]
        assert 590 <= periods[1][3] <= 615
        assert periods[2][2:] == (periods[1][3] + 1, 902)

    def test_verdict_of_the_run_gives_the_share_of_a_drift(self, snapshot: Snapshot):
        run = judge_run(processes(rows((BALANCED, 500), (SLOW, 500))), 3, thresholds=SOON)
        whole = run.run_verdict()
        assert (whole.label, whole.stage, whole.rank, whole.from_step, whole.to_step) == (
            "group_wide", "data", None, 500, 999,
        )  # fmt: skip
        assert whole.cost_pct == pytest.approx(100 * 500 * 4 / (500 * 15 + 490 * 11), abs=1)
        assert whole.chronic is True
        snapshot("verdict", whole.why)

    def test_drift_in_a_tenth_of_the_run_is_in_the_history_only(self):
        run = judge_run(processes(rows((BALANCED, 5000), (SLOW, 200), (BALANCED, 440))), 3, thresholds=SOON)
        assert run.run_verdict().label == "healthy"
        assert "group_wide" in {period.label for period in run.periods}

    def test_drift_is_chronic_by_its_share_of_windows(self):
        _, verdicts = live(rows((BALANCED, 500), (SLOW, 200)))
        first = next(end for end, verdict in verdicts.items() if verdict.label == "group_wide")
        assert (verdicts[first].chronic, verdicts[700].chronic, verdicts[700].pattern) == (
            False, True, "lasting",
        )  # fmt: skip

    def test_drift_just_at_the_threshold_does_not_come_and_go(self):
        for seed in range(6):
            run, verdicts = live(slower(noisy(seed, 1000, 4, 0.10), seed, 400, 0.035))
            assert [period.label for period in run.periods] == ["healthy", "group_wide"]
            assert verdicts[1000].label == "group_wide"

    def test_judging_more_often_changes_nothing(self):
        whole = window(rows((BALANCED, 433), (SLOW, 120), (BALANCED, 100)))
        seldom, often = RunJudge(), RunJudge()
        for end in range(50, 651, 10):
            last = whole.select(slice(end - 50, end))
            verdicts = [often.update(last) for _ in range(3)]
            assert seldom.update(last) == verdicts[0] == verdicts[-1]
        assert (seldom.run_verdict(), seldom.periods, seldom.baseline) == (
            often.run_verdict(),
            often.periods,
            often.baseline,
        )

    def test_straggler_of_the_run_stays_the_headline(self):
        late = of_ms([WAITS, WAITS, LATE_DATA])
        run = judge_run(processes(rows((BALANCED, 350), (SLOW, 250), (late, 700))), 3)
        assert (run.run_verdict().label, run.run_verdict().rank) == ("straggler", 2)


@pytest.mark.parametrize("name", ["h2", "h3", "h4", "late3"])
def test_recorded_runs_do_not_drift_from_their_own_first_windows(name):
    d = RECORDED[name]
    soon = Thresholds(warmup_steps=0, baseline_after_steps=0, baseline_windows=2)
    run = judge_run(processes(d), d.shape[1], thresholds=soon)
    assert run.baseline.to_step == 99
    assert "group_wide" not in {period.label for period in run.periods}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4, 8, 16]), st.floats(0, 0.15))
def test_stationary_noise_is_no_drift(seed, ranks, noise):
    run, verdicts = live(noisy(seed, 600, ranks, noise))
    assert run.baseline is not None
    assert labels(verdicts) <= {"healthy", "imbalance"}


@pytest.mark.parametrize("stage", range(6))
def test_drift_of_a_tenth_of_the_step_is_found_within_ten_steps(stage):
    latency, onset = [], []
    for seed in range(9):
        begin, noise = 400 + 7 * seed, (0.02, 0.05, 0.10)[seed % 3]
        d = slower(noisy(seed, begin + 60, (2, 4, 8)[seed // 3], noise), stage, begin, 0.10)
        run, before = live(d[:begin])
        assert labels(before) == {"healthy"}
        _, after = live(d, run, every=1, first=begin + 1)
        named_at = next(end for end, verdict in after.items() if verdict.label == "group_wide")
        latency.append(named_at - begin)
        onset.append(abs(after[begin + 40].from_step - begin))
        assert {verdict.stage for verdict in after.values()} <= {None, STAGES[stage]}
        assert after[begin + 60].stage == STAGES[stage]
        assert labels(after, named_at) == {"group_wide"}
    assert np.median(latency) <= 10
    assert max(latency) <= 20
    assert np.median(onset) <= 2


@given(st.integers(0, 2**32 - 1), st.sampled_from(range(6)))
@settings(max_examples=20, deadline=None)
def test_drift_ends_soon_after_the_slowdown(seed, stage):
    d = noisy(seed, 620, 4, 0.05)
    slow = slower(d.copy(), stage, 400, 0.15)
    slow[500:] = d[500:]
    _, verdicts = live(slow)
    assert verdicts[500].label == "group_wide"
    assert labels(verdicts, 520) == {"healthy"}


class TestGroups:
    def test_groups_that_wait_only_among_themselves_are_named(self, snapshot: Snapshot):
        slow = of_ms([PLAIN] * 4 + [LATE_DATA] * 3, 50)
        verdict = judge(window(slow), baseline=W1)
        assert (verdict.label, verdict.rank) == ("accounting_only", None)
        snapshot("verdict", verdict.why)

    def test_late_rank_in_one_group_is_not_held_against_the_other(self, snapshot: Snapshot):
        group = of_ms([WAITS, LATE_DATA], 50)
        verdict = judge(window(np.concatenate([group, of_ms([PLAIN, PLAIN], 50)], axis=1)))
        assert (verdict.label, verdict.rank) == ("accounting_only", None)
        snapshot("verdict", verdict.why)

    @pytest.mark.parametrize("ranks", [4, 16, 64])
    def test_independent_ranks_are_no_groups(self, ranks):
        random = np.random.default_rng(ranks)
        for _ in range(20):
            pace = random.uniform(1, 2, (ranks, 1))
            verdict = judge(window(of_ms(pace * np.array(PLAIN), 50)))
            assert verdict.label == "accounting_only"
            assert "these ranks do not wait for each other" in verdict.why


@given(WILD, st.integers(1, 60), st.booleans())
@example(np.array([[[4_600_000, *[0] * 5], [4_400_000, *[0] * 5]], [[0] * 6] * 2]), 1, True)
def test_judge_never_raises_whatever_the_rows_hold(d, steps, short):
    limits = Thresholds(first_window_steps=2, stride_steps=1 if short else 10)
    many = np.concatenate([d] * (steps // max(len(d), 1) + 1))
    assert judge(window(many), limits, baseline=W1).label


def test_late_rank_or_ranks_in_turn_are_no_group_wide_drift():
    quiet = noisy(5, 360, 4, 0.03)
    step = int(quiet[:, 0].sum(axis=1).mean())
    for late in ([3] * 20, [0, 1, 2, 3] * 5):
        local = quiet[:, :, :SYNC_WAIT].copy()
        for end, rank in enumerate(late, 340):
            local[end, rank, DATA] += step // 3
        d = synced(local, np.full(360, 1_000_000))
        run, _ = live(d[:340])
        named = live(d, run, every=1, first=341)[1]
        assert "group_wide" not in {verdict.label for verdict in named.values()}


def test_late_rank_leaves_no_drift_in_the_window():
    d = noisy(6, 420, 4, 0.03)
    local = d[:, :, :SYNC_WAIT].copy()
    step = int(d[:, 0].sum(axis=1).mean())
    local[340:360, 3, DATA] += step // 3
    local[340:, :, DATA] += step // 50  # and a drift that is none yet
    run, verdicts = live(synced(local, np.full(420, 1_000_000)), every=1)
    assert run.baseline is not None
    assert "group_wide" not in labels(verdicts)
