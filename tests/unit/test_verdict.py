"""The verdict on recorded runs, on degraded telemetry, on noise and on garbage."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from snapshot import Snapshot
from unit.sample_windows import EXPECTED, RECORDED, align, judge, of_ms, processes, synced, window

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.stages import (
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_INSEPARABLE,
    FLAG_NO_BACKWARD,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FLAG_NO_PEERS,
    FLAG_NO_SPLIT,
    FORWARD,
    STAGES,
    SYNC_WAIT,
)

WAITS = [1, 2, 0, 3, 4, 5]
LATE_DATA = of_ms([WAITS, WAITS, [1, 6, 0, 3, 4, 1], WAITS], 50)
LATE_BACKWARD = of_ms([WAITS, WAITS, [1, 2, 0, 3, 8, 1], WAITS], 50)
BALANCED = of_ms([[1, 2, 1, 3, 4, 1]] * 4, 50)


def test_rank_late_once_in_a_step_of_several_exchanges_is_late_in_every_step():
    late = of_ms([[1, 2, 0, 3, 4, 5], [5, 2, 0, 3, 4, 1]])
    others = of_ms([[1, 0, 0, 3, 4, 1], [1, 0, 0, 3, 4, 1]])
    verdict = judge(window(np.tile(np.concatenate([late, others, others]), (50, 1, 1)), exchanges=3))
    assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", "post_sync", 1)
    assert (verdict.window_steps, verdict.confidence, verdict.pattern) == (50, "high", "lasting")
    assert verdict.mean_step_ms == pytest.approx(15 + 2 * 9)
    assert verdict.cost_pct == pytest.approx(100 * 4 / 33)
    assert "100 % of the last 50 steps" in verdict.why


def test_rank_that_became_late_in_steps_of_several_exchanges_is_named_from_there_on():
    calm = of_ms([[1, 2, 0, 3, 4, 1]] * 3, 2)
    late = of_ms([[1, 2, 0, 3, 4, 7]] * 2 + [[7, 2, 0, 3, 4, 1]])
    d = np.concatenate([np.tile(calm, (38, 1, 1)), np.tile(np.concatenate([late, calm[:1]]), (12, 1, 1))])
    verdict = judge(window(d, 100, exchanges=2))
    assert (verdict.label, verdict.stage, verdict.rank, verdict.from_step) == (
        "straggler",
        "post_sync",
        2,
        138,
    )


def sliding(name):
    d = RECORDED[name]
    return [window(d[begin : begin + 50], begin) for begin in range(0, len(d) - 49, 10)]


HEALTHY = [name for name, expected in EXPECTED.items() if expected["label"] == "healthy"]
FAULTY = [name for name, expected in EXPECTED.items() if expected["label"] == "straggler"]


@pytest.mark.parametrize("name", HEALTHY)
def test_no_recorded_healthy_window_names_a_rank(name):
    """These ranks had fewer cores than they could use, so they took turns in being late."""
    for verdict in map(judge, sliding(name)):
        assert verdict.label in ("healthy", "imbalance")
        assert verdict.ranks == () == verdict.also


@pytest.mark.parametrize("name", FAULTY)
def test_recorded_windows_with_a_fault_name_its_rank_and_stage_and_no_other(name):
    """In a single window that rank may be late no more often than by chance; see the whole runs."""
    expected, verdicts = EXPECTED[name], [judge(recorded) for recorded in sliding(name)]
    named = [verdict for verdict in verdicts if verdict.rank is not None]
    assert len(named) >= 0.8 * len(verdicts)
    for verdict in named:
        assert (verdict.label, verdict.stage) == ("straggler", expected["stage"])
        assert verdict.ranks == (expected["rank"],)
        assert verdict.pattern == "lasting"


@pytest.mark.parametrize("name", ["ns3"])
def test_recorded_windows_without_an_exchange_are_no_verdict(name):
    for verdict in map(judge, sliding(name)):
        assert (verdict.label, verdict.ranks) == ("accounting_only", ())


def test_recorded_late_fault_is_seen_from_its_onset_on():
    verdicts = [judge(recorded) for recorded in sliding("late3")]
    labels = [verdict.label for verdict in verdicts]
    first = labels.index("straggler")
    assert set(labels[:first]) <= {"healthy", "imbalance"}
    assert set(labels[first:]) == {"straggler"}
    assert first * 10 + 50 <= 120 + 20  # judged by the second window that holds any of it
    for verdict in verdicts[first:]:
        assert (verdict.stage, verdict.ranks, verdict.pattern) == ("data", (0,), "lasting")
        assert abs(verdict.from_step - max(120, verdict.to_step - 49)) <= 3


def test_onset_of_a_recorded_fault_is_found_over_the_whole_run():
    verdict = judge(window(RECORDED["late3"]), whole_run=True)
    assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", "data", 0)
    assert abs(verdict.from_step - 120) <= 3


def noisy(random, ranks, noise, steps=50):
    mean = random.uniform(0.2, 1.0, 5) * 8e6
    factor = 1 + noise * random.standard_normal((steps, ranks, 5))
    return synced((mean * np.maximum(factor, 0.1)).astype(np.int64), np.full(steps, 1_000_000))


def test_balanced_noise_has_no_straggler():
    random = np.random.default_rng(20260601)
    blamed = []
    for trial in range(300):
        ranks, noise = int(random.integers(2, 65)), float(random.uniform(0, 0.15))
        verdict = judge(window(noisy(random, ranks, noise)))
        if verdict.label not in ("healthy", "imbalance") or verdict.rank is not None:
            blamed.append((trial, ranks, noise, verdict.why))
    assert blamed == []


def begun(random, ranks, share, stage, late, noise=0.03):
    """A window of 50 steps in whose last `late` the last rank is late by `share` of the longer step."""
    local = noisy(random, ranks, noise)[:, :, :SYNC_WAIT].copy()
    step = float(local.sum(axis=2).max(axis=1).mean()) + 1e6
    local[50 - late :, -1, stage] += int(step * share / (1 - share))
    return window(synced(local, np.full(50, 1_000_000)), first_step=1000)


class TestNewlyLate:
    @pytest.mark.parametrize("share", [0.15, 0.3, 0.6])
    @pytest.mark.parametrize("stage", range(SYNC_WAIT))
    def test_straggler_is_named_after_ten_late_steps(self, stage, share):
        random = np.random.default_rng(stage)
        for ranks in (2, 3, 4, 16):
            verdict = judge(begun(random, ranks, share, stage, 10))
            assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", STAGES[stage], ranks - 1)
            assert abs(verdict.from_step - 1040) <= 2
            assert (verdict.confidence, verdict.window_steps, verdict.to_step) == ("medium", 50, 1049)
            assert verdict.cost_pct == pytest.approx(100 * share, abs=5)

    def test_straggler_stays_named_until_the_whole_window_shows_it(self):
        random = np.random.default_rng(1)
        for late in range(10, 51):
            verdict = judge(begun(random, 4, 0.2, FORWARD, late))
            assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", "forward", 3), late

    def test_straggler_is_not_named_after_five_late_steps(self):
        random = np.random.default_rng(2)
        assert judge(begun(random, 4, 0.2, FORWARD, 5)).label == "healthy"

    def test_recurring_lateness_is_named_from_the_start_of_the_window(self):
        local = noisy(np.random.default_rng(3), 4, 0.03)[:, :, :SYNC_WAIT].copy()
        for first in (2, 14, 26, 40):
            local[first : first + 8, 3, FORWARD] += 4_000_000
        verdict = judge(window(synced(local, np.full(50, 1_000_000))))
        assert (verdict.label, verdict.rank, verdict.from_step) == ("straggler", 3, 0)


def test_ranks_late_in_turn_are_no_set_of_stragglers():
    for seed in range(20):
        local = noisy(np.random.default_rng(seed), 2, 0.05)[:, :, :SYNC_WAIT].copy()
        local[::2, 0, FORWARD] += 12_000_000
        local[1::2, 1, FORWARD] += 12_000_000
        verdict = judge(window(synced(local, np.full(50, 1_000_000))))
        assert (verdict.label, verdict.pattern, verdict.rank) == ("imbalance", "rotating", None)


@pytest.mark.parametrize("stage", range(SYNC_WAIT))
def test_fault_is_found_in_noise(stage):
    random = np.random.default_rng(stage)
    for _ in range(10):
        ranks = int(random.integers(2, 33))
        rank = int(random.integers(ranks))
        d = noisy(random, ranks, 0.10)
        local = d[:, :, :SYNC_WAIT].copy()
        local[:, rank, stage] += int(0.25 * d[0, 0].sum())
        verdict = judge(window(synced(local, np.full(50, 1_000_000))))
        assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", STAGES[stage], (rank,))


class TestTelemetry:
    def test_missing_ranks_are_named(self, snapshot: Snapshot):
        verdict = judge(align(processes(LATE_DATA), 6, missing=[4, 5]))
        assert verdict.label == "telemetry_limited"
        snapshot("verdict", verdict.why)
        assert verdict.coverage == pytest.approx(4 / 6)
        assert verdict.confidence is None
        assert verdict.mean_step_ms == 15

    def test_run_with_few_ranks_missing_is_judged_with_less_confidence(self):
        d = np.repeat(LATE_DATA, [14, 14, 1, 10], axis=1)
        assert judge(align(processes(d), 39)).confidence == "high"
        verdict = judge(align(processes(d), 40, missing=[39]))
        assert (verdict.label, verdict.rank, verdict.confidence) == ("straggler", 28, "medium")

    def test_rows_that_do_not_line_up_are_telemetry_limited(self, snapshot: Snapshot):
        one, other = processes(LATE_DATA)[:2]
        shifted = replace(other, keys=other.keys + (1000 << 8))
        verdict = judge(align([one, shifted], 2))
        assert (verdict.label, verdict.window_steps, verdict.exposed_ms) == ("telemetry_limited", 0, None)
        snapshot("verdict", verdict.why)

    def test_rows_mostly_not_common_are_telemetry_limited(self, snapshot: Snapshot):
        one, other = processes(LATE_DATA)[:2]
        seldom = replace(other, keys=other.keys[::3], flags=other.flags[::3], rows=other.rows[::3])
        verdict = judge(align([one, seldom], 2))
        assert verdict.label == "telemetry_limited"
        snapshot("verdict", verdict.why)

    @pytest.mark.parametrize("value", [-1, -(2**63), 2**63 - 1, 2 * 86_400 * 10**9])
    def test_absurd_durations_are_named(self, value, snapshot: Snapshot):
        d = LATE_DATA.copy()
        d[7, 3, DATA] = value
        verdict = judge(window(d, first_step=100))
        assert verdict.label == "telemetry_limited"
        snapshot("verdict", verdict.why)

    def test_steps_too_short_to_time_are_telemetry_limited(self):
        assert judge(window(LATE_DATA // 100)).label == "telemetry_limited"

    def test_ranks_on_different_clocks_are_telemetry_limited(self, snapshot: Snapshot):
        flags = np.array([0, 0, FLAG_DEVICE_CLOCK, FLAG_DEVICE_CLOCK])
        verdict = judge(window(LATE_DATA, flags=flags))
        assert verdict.label == "telemetry_limited"
        snapshot("verdict", verdict.why)

    def test_single_row_on_another_clock_costs_only_that_step(self):
        flags = np.full((50, 4), FLAG_DEVICE_CLOCK)
        flags[3, 1] = 0
        d = LATE_DATA.copy()
        d[3, 1] = [60_000_000, 0, 0, 0, 0, 0]
        verdict = judge(window(d, flags=flags))
        assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", "data", 2)

    @pytest.mark.parametrize("off", [slice(0, 12), slice(40, 50), slice(5, 30, 3)])
    def test_rows_without_the_devices_clock_are_left_out_where_most_have_it(self, off: slice):
        """A device clock begins after some steps, may end before the last, and has no times of some."""
        flags = np.full((50, 4), FLAG_DEVICE_CLOCK)
        flags[off] = FLAG_INSEPARABLE
        d = LATE_DATA.copy()
        d[off] = BALANCED[off]
        verdict = judge(window(d, flags=flags))
        assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", "data", 2)
        flags[:30] = FLAG_INSEPARABLE
        assert judge(window(d, flags=flags)).label == "accounting_only"


class TestInferredExchange:
    def judge(self, d, flags=0):
        return judge(
            align([replace(rank, strategy="all_reduce (inferred)") for rank in processes(d, 0, flags)], 4)
        )

    def test_inferred_exchange_that_ranks_leave_together_is_judged(self, snapshot: Snapshot):
        late, balanced = self.judge(LATE_DATA), self.judge(BALANCED)
        assert (late.label, late.stage, late.rank) == ("straggler", "data", 2)
        assert balanced.label == "healthy"
        snapshot("verdict", late.why, balanced.why)

    def test_inferred_exchange_that_ranks_leave_apart_is_not_judged(self, snapshot: Snapshot):
        d = np.array(BALANCED)
        d[::2, 0, DATA] += 6_000_000  # ahead in one step and behind in the next: in the end, even
        d[1::2, 1, DATA] += 6_000_000
        verdict = self.judge(d)
        assert (verdict.label, verdict.rank) == ("accounting_only", None)
        assert self.judge(of_ms([[1, 2, 0, 3, 4, 0]] * 3 + [[1, 6, 0, 3, 4, 0]], 50)).why == verdict.why
        snapshot("verdict", verdict.why)

    def test_inferred_exchange_on_a_device_is_not_judged(self, snapshot: Snapshot):
        verdict = self.judge(LATE_DATA, FLAG_INSEPARABLE)
        assert verdict.label == "accounting_only"
        snapshot("verdict", verdict.why)

    def test_collective_waits_outside_an_exchange_are_mentioned(self, snapshot: Snapshot):
        verdict = judge(window(LATE_DATA, flags=FLAG_NO_PEERS))
        assert verdict.label == "accounting_only"
        snapshot("verdict", verdict.why)


class TestMarksOfSomeRanks:
    """Rank 0 fetches for all, the others get their batches from it: only it has a data wait."""

    def judge(self, *rows):
        return judge(window(of_ms(rows, 50), flags=np.array([[0, FLAG_NO_DATA, FLAG_NO_DATA]], np.uint8)))

    def test_rank_is_named_by_the_marks_that_it_has_itself(self, snapshot: Snapshot):
        verdict = self.judge([1, 43, 0, 3, 4, 1], [1, 0, 0, 3, 4, 44], [1, 0, 0, 3, 4, 44])
        assert (verdict.label, verdict.stage, verdict.rank) == ("straggler", "data", 0)
        assert verdict.stages == ("data",)
        assert verdict.suspects[0].stage == "data"
        snapshot("verdict", verdict.why, verdict.next)

    def test_rank_late_in_a_stage_that_others_have_too_is_named_by_it(self, snapshot: Snapshot):
        verdict = self.judge([31, 4, 0, 3, 4, 1], [1, 0, 0, 3, 4, 35], [1, 0, 0, 3, 4, 35])
        assert (verdict.stage, verdict.rank) == ("post_sync", 0)
        snapshot("verdict", verdict.why, verdict.next)

    def test_merged_stage_is_named_where_two_stages_could_be_the_cause(self):
        verdict = self.judge([30, 30, 0, 3, 4, 1], [30, 0, 0, 3, 4, 31], [30, 0, 0, 3, 4, 31])
        assert (verdict.stage, verdict.rank) == ("post_sync", 0)

    def test_rank_without_the_mark_is_named_by_the_merged_stage(self):
        verdict = self.judge([1, 4, 0, 3, 4, 27], [31, 0, 0, 3, 4, 1], [1, 0, 0, 3, 4, 31])
        assert (verdict.stage, verdict.rank) == ("post_sync", 1)
        assert "No data wait was seen on ranks 1 and 2, so" in verdict.why


class TestMissingMarks:
    def test_missing_split_still_finds_local_faults(self, snapshot: Snapshot):
        d = LATE_DATA.copy()
        d[:, :, 4] += d[:, :, 5]
        d[:, :, 5] = 0
        verdict = judge(window(d, flags=FLAG_NO_SPLIT))
        assert (verdict.label, verdict.stage, verdict.rank, verdict.confidence) == (
            "straggler",
            "data",
            2,
            "medium",
        )
        assert verdict.cost_pct == pytest.approx(100 * 4 / 15)
        snapshot("verdict", verdict.why)

    def test_missing_split_blames_no_rank_for_backward(self, snapshot: Snapshot):
        d = LATE_BACKWARD.copy()
        d[:, :, 4] += d[:, :, 5]
        d[:, :, 5] = 0
        d[:, 2, 4] += 2_000_000  # even where it differs
        d[:, 2, 1] -= 2_000_000
        verdict = judge(window(d, flags=FLAG_NO_SPLIT))
        assert (verdict.label, verdict.rank) == ("healthy", None)
        snapshot("verdict", verdict.why)

    def test_split_missing_on_one_rank_blames_no_rank(self):
        d = of_ms([[1, 2, 0, 3, 4, 1]] * 4, 50)
        d[:, 1, 4] += d[:, 1, 5]
        d[:, 1, 5] = 0
        assert judge(window(d, flags=np.array([0, FLAG_NO_SPLIT, 0, 0]))).label == "healthy"

    def test_missing_data_mark_explains_what_post_sync_holds(self, snapshot: Snapshot):
        d = LATE_DATA.copy()
        d[:, :, 0] += d[:, :, 1]
        d[:, :, 1] = 0
        verdict = judge(window(d, flags=FLAG_NO_DATA))
        assert (verdict.stage, verdict.rank) == ("post_sync", 2)
        snapshot("verdict", verdict.why)

    @pytest.mark.parametrize(
        ("flags", "into", "merged"),
        [
            ([0, FLAG_NO_DATA, 0, 0], 0, (1, 2)),
            ([0, FLAG_NO_FORWARD, 0, 0], 3, (2,)),
        ],
    )
    def test_mark_missing_on_one_rank_blames_no_rank(self, flags, into, merged):
        d = BALANCED.copy()
        for stage in merged:
            d[:, 1, into] += d[:, 1, stage]
            d[:, 1, stage] = 0
        assert judge(window(d)).suspects  # without the flag the row would look odd
        assert not judge(window(d, flags=np.array(flags))).suspects

    def test_data_and_forward_marks_missing_on_different_ranks_blame_no_rank(self):
        d = BALANCED.copy()
        d[:, 1, :4] = np.array([4, 0, 0, 3]) * 10**6
        d[:, 2, :4] = np.array([1, 2, 0, 4]) * 10**6
        assert judge(window(d, flags=np.array([0, FLAG_NO_DATA, FLAG_NO_FORWARD, 0]))).label == "healthy"

    def test_missing_forward_mark_is_in_the_verdict(self, snapshot: Snapshot):
        d = LATE_DATA.copy()
        d[:, :, [DATA, FORWARD]] = d[:, :, [FORWARD, DATA]]
        verdict = judge(window(d, flags=FLAG_NO_FORWARD))
        assert verdict.stage == "forward"
        snapshot("verdict", verdict.why)

    @pytest.mark.parametrize("flag", [FLAG_NO_PEERS, FLAG_NO_BACKWARD, FLAG_NO_PEERS | FLAG_NO_SPLIT])
    def test_rows_without_any_exchange_are_accounting_only(self, flag):
        verdict = judge(window(LATE_DATA, flags=flag))
        assert (verdict.label, verdict.confidence, verdict.rank) == ("accounting_only", None, None)
        assert verdict.exposed_ms == (1, 6, 0, 3, 4, 1)

    def test_roles_that_differ_are_accounting_only(self, snapshot: Snapshot):
        verdict = judge(window(LATE_DATA, flags=np.array([FLAG_NO_PEERS, 0, 0, 0])))
        assert verdict.label == "accounting_only"
        snapshot("verdict", verdict.why)

    def test_coupled_ranks_are_never_called_healthy(self, snapshot: Snapshot):
        verdict = judge(window(BALANCED, flags=FLAG_INSEPARABLE))
        assert verdict.label == "accounting_only"
        snapshot("verdict", verdict.why)

    def test_steps_without_exchange_add_up_to_the_next(self):
        """Ranks late in turn between two exchanges are level at the exchange: nobody gains."""
        one, other = [1, 6, 0, 3, 4, 0], [1, 2, 0, 3, 4, 0]
        pair = np.concatenate([of_ms([one, other, other]), of_ms([other, one, one])])
        pair[1, :, SYNC_WAIT] = 1_000_000
        flags = np.tile([[FLAG_NO_PEERS] * 3, [0] * 3], (25, 1))
        verdict = judge(window(np.tile(pair, (25, 1, 1)), flags=flags))
        assert verdict.label == "healthy"
        assert judge(window(np.tile(pair, (25, 1, 1)))).label != "healthy"

    def test_single_rank_is_healthy_without_suspects(self, snapshot: Snapshot):
        verdict = judge(window(LATE_DATA[:, :1], flags=FLAG_NO_PEERS | FLAG_NO_SPLIT))
        assert (verdict.label, verdict.suspects) == ("healthy", ())
        snapshot("verdict", verdict.why)


class TestConfidence:
    @pytest.mark.parametrize(
        ("steps", "confidence"), [(50, "high"), (30, "medium"), (20, "medium"), (19, "low")]
    )
    def test_confidence_depends_on_the_window(self, steps, confidence):
        assert judge(window(LATE_DATA[:steps])).confidence == confidence
        assert judge(window(BALANCED[:steps])).confidence == confidence

    def test_small_excess_has_medium_confidence(self):
        d = of_ms([WAITS, WAITS, [1, 3, 0, 3, 4, 4]], 50)
        assert judge(window(d)).confidence == "medium"

    def test_barely_persistent_lateness_has_low_confidence(self):
        """Which rank is late in two stretches may be chance; which is in 28 single steps of 50, is not."""
        stretches = np.concatenate([LATE_DATA[:14], BALANCED[:12], LATE_DATA[:14], BALANCED[:10]])
        verdict = judge(window(stretches))
        assert (verdict.rank, verdict.confidence) in ((None, "low"), (2, "low"))
        late = np.random.default_rng(1).permutation(np.arange(50) < 28)
        mixed = np.where(late[:, None, None], LATE_DATA[:50], BALANCED[:50])
        verdict = judge(window(mixed))
        assert (verdict.label, verdict.rank, verdict.confidence) == ("straggler", 2, "low")


def test_whole_node_is_named_as_such(snapshot: Snapshot):
    d = of_ms([WAITS, WAITS, [1, 6, 0, 3, 4, 1], [1, 6, 0, 3, 4, 1], WAITS, WAITS], 50)
    verdict = judge(window(d))
    snapshot("verdict", verdict.why, verdict.next)
    assert (verdict.rank, verdict.ranks, verdict.node, verdict.nodes) == (2, (2, 3), "node-1", ("node-1",))


def test_suspects_are_sorted_and_small_ones_left_out():
    d = of_ms([[1, 2, 0, 3, 4, 5], [1, 2, 0, 3.3, 4, 4.7], [1, 6, 0, 3, 4, 1], [1, 2, 0, 3.1, 4, 4.9]], 50)
    suspects = judge(window(d)).suspects
    assert [(s.stage, s.rank, s.node) for s in suspects] == [("data", 2, "node-1"), ("forward", 1, "node-0")]
    assert suspects[0].excess_ms == pytest.approx(4)
    assert suspects[0].gain_ms == pytest.approx(3.7)  # then rank 1 is the last to arrive
    assert suspects[1].gain_ms == 0


def test_thresholds_are_taken_from_the_settings():
    assert judge(window(LATE_DATA), Thresholds(min_excess=0.3)).rank == 2  # by the transient rule
    strict = Thresholds(min_excess=0.3, transient_excess=0.3, rotating_excess=0.3)
    assert judge(window(LATE_DATA), strict).label == "healthy"


def test_rank_lost_verdict_round_trips_through_json():
    lost = Verdict(
        label="rank_lost", rank=3, ranks=(3,), last_step=41, open_stage="data", exit_reason="SIGKILL"
    )
    assert msgspec.json.decode(msgspec.json.encode(lost), type=Verdict) == lost


WILD = hnp.arrays(
    np.int64,
    st.tuples(st.integers(0, 8), st.integers(0, 5), st.just(6)),
    elements=st.integers(-(2**63), 2**63 - 1)
    | st.integers(0, 10**7)
    | st.sampled_from([0, 86_400 * 10**9, 10**7]),
)
SANE = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 8), st.integers(1, 5), st.just(5)),
    elements=st.integers(0, 9).map(lambda ms: ms * 1_000_000),
)


@given(WILD, st.data())
def test_judge_never_raises(d, data):
    flags = data.draw(hnp.arrays(np.uint8, d.shape[:2]))
    missing = data.draw(st.sets(st.integers(0, 9), max_size=2))
    verdict = judge(align(processes(d, flags=flags), data.draw(st.integers(0, 9)), missing=missing))
    assert verdict.label
    assert verdict.why
    assert msgspec.json.encode(verdict)


def test_steps_beyond_the_sum_of_int64_are_telemetry_limited():
    limits = Thresholds(max_step_ns=1 << 60)
    d = np.full((60, 2, 6), (1 << 60) // 6, dtype=np.int64)
    verdict = judge(window(d), limits)
    assert (verdict.label, verdict.exposed_ms) == ("telemetry_limited", None)


@given(SANE, st.integers(1, 9))
def test_percentages_stay_within_bounds(local, exchange):
    verdict = judge(window(synced(local, np.full(len(local), exchange * 1_000_000))))
    for share in (verdict.gain_pct, verdict.cost_pct):
        assert share is None or 0 <= share <= 100
    assert all(0 <= suspect.gain_ms <= verdict.mean_step_ms for suspect in verdict.suspects)
    assert sum(verdict.exposed_ms) == pytest.approx(verdict.mean_step_ms)
    assert verdict.from_step <= verdict.to_step


@given(SANE, st.integers(1, 9), st.randoms(use_true_random=False))
def test_renumbering_the_ranks_renumbers_the_verdict(local, exchange, random):
    d = synced(local, np.full(len(local), exchange * 1_000_000))
    order = random.sample(range(d.shape[1]), d.shape[1])
    one, other = judge(window(d)), judge(window(d[:, order]))
    assert (one.label, one.stage, one.pattern) == (other.label, other.stage, other.pattern)
    assert one.gain_pct == pytest.approx(other.gain_pct)
    assert set(one.ranks) == {order[rank] for rank in other.ranks}


def test_unequal_work_beside_a_late_rank_is_of_its_own_stages_and_says_so():
    random = np.random.default_rng(5)
    local = np.array([1, 2, 0.5, 10, 20]) * np.ones((200, 8, 1))
    local[:, :, FORWARD:] *= random.uniform(0.4, 1.6, (200, 8, 1))
    local[:, 3, DATA] += 15
    verdict = judge(window(synced((local * 1e6).astype(np.int64), np.full(200, 1_000_000))))
    late, uneven = sorted((verdict, *verdict.also), key=lambda one: one.label, reverse=True)
    assert (late.label, late.rank, late.stage) == ("straggler", 3, "data")
    assert (uneven.label, uneven.stage, "data" in uneven.stages) == ("imbalance", "backward", False)
    assert uneven.why.startswith("Apart from rank 3 (node-1), no rank is late more often than the others")
