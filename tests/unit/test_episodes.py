"""What is named, for how long, and what it costs: on played rows, whose own times are the clock."""

import itertools
import re

import msgspec
import numpy as np
import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from unit.sample_windows import judge_run, of_ms, processes, synced, window

from traceml_ray.analysis.episodes import Episodes
from traceml_ray.analysis.evidence import gather
from traceml_ray.analysis.history import RunJudge
from traceml_ray.analysis.verdict import DEFAULTS, Verdict, judge_window
from traceml_ray.monitor.live_verdict import PACKER
from traceml_ray.stages import (
    BACKWARD,
    DATA,
    FLAG_NO_DATA,
    FLAG_NO_FORWARD,
    FORWARD,
    POST_SYNC,
    PREPARE,
    STAGES,
    SYNC_WAIT,
)
from traceml_ray.text import percent

QUIET = [1, 2, 0, 3, 4, 1]
EXCHANGE = 1_000_000


def played(steps, step_ms, *late, ranks=2, noise=0.03, seed=0, swings=0.0, machine=()):
    """
    Rows (K, R, 6) of `steps` steps that wait for each other. `late`: (stage, rank, first, end, share of the
    faulty step). `swings`: for stretches of 0.2 to 1 s one rank or the other is slower by about so much.
    `machine`: (first, end, factor) of steps in which all stages of all ranks take so much longer.
    """
    random = np.random.default_rng(seed)
    local = step_ms * 1e6 * np.array([0.1, 0.1, 0.05, 0.25, 0.5]) * np.ones((steps, ranks, 1))
    begin = 0
    while swings and begin < steps:
        length = int(random.uniform(200, 1000) / step_ms)
        more = 1 + random.exponential(swings)
        local[begin : begin + length, random.integers(ranks), random.choice([FORWARD, BACKWARD])] *= more
        begin += length + int(random.exponential(1000) / step_ms)
    for first, end, factor in machine:
        local[first:end] *= np.clip(random.normal(factor, 0.2 * factor, local[first:end].shape), 1, None)
    local *= np.clip(random.normal(1, noise, local.shape), 0.5, 2)
    for stage, rank, first, end, share in late:
        local[first:end, rank, stage] += share / (1 - share) * step_ms * 1e6
    return synced(local.astype(np.int64), np.full(steps, EXCHANGE))


def live(d, every_s=0.5, run=None):
    """The judge, and what it said, with the step and the time, every `every_s` of the rows."""
    run = run or RunJudge()
    whole, ends_s = window(d), np.cumsum(d.sum(axis=2).mean(axis=1)) / 1e9
    verdicts = []
    for end_s in np.arange(every_s, ends_s[-1], every_s):
        end = int(np.searchsorted(ends_s, end_s))
        verdicts.append((end, end_s, run.update(whole.select(slice(max(0, end - 400), end)))))
    return run, verdicts


def changes(verdicts):
    """What stood in turn, without what was only watched in between."""
    headlines = []
    for _, _, verdict in verdicts:
        what = verdict.label, verdict.stage, verdict.ranks
        if verdict.label != "watching" and (not headlines or headlines[-1] != what):
            headlines.append(what)
    return headlines


def names(verdict):
    """The ranks that a finding names; those that are only watched are not named."""
    return verdict.ranks if verdict.meaning.kind == "finding" else ()


def named(verdicts):
    return {names(verdict) for _, _, verdict in verdicts if names(verdict)}


def watched(verdicts):
    return [verdict for _, _, verdict in verdicts if verdict.label == "watching"]


def since(d, step, at_s):
    """How long after `step` began it was."""
    return at_s - d[:step].sum(axis=2).mean(axis=1).sum() / 1e9


@pytest.mark.parametrize("first", range(364, 368))
def test_fault_in_long_steps_is_named_as_soon_at_any_judging_offset(first):
    """The first full window that shows it holds few of its steps: it says little of how much is lost."""
    d = played(first + 50, 45, (DATA, 1, first, None, 0.6), ranks=3, noise=0.05, seed=first)
    _, verdicts = live(d)
    _, t_s, _ = next(judged for judged in verdicts if names(judged[2]))
    assert since(d, first, t_s) <= DEFAULTS.hold_s + 0.7


@pytest.mark.parametrize(("share", "within_s"), [(0.15, 4.0), (0.3, 2.6), (0.6, 2.6)])
@pytest.mark.parametrize("step_ms", [12, 45])
def test_fault_is_named_in_time_and_not_before_two_seconds(share, within_s, step_ms):
    first = 30_000 // step_ms
    d = played(first + 10_000 // step_ms, step_ms, (DATA, 1, first, None, share))
    _, verdicts = live(d, every_s=0.25)
    _, t_s, verdict = next(judged for judged in verdicts if names(judged[2]))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", "data", (1,))
    assert 2.0 <= since(d, first, t_s) <= within_s
    assert abs(verdict.from_step - first) <= 2
    assert changes(verdicts)[-2:] == [("healthy", None, ()), ("straggler", "data", (1,))]


@pytest.mark.parametrize(
    ("stage", "flag", "merged"),
    [
        (DATA, FLAG_NO_DATA, (POST_SYNC, DATA, PREPARE)),
        (PREPARE, FLAG_NO_FORWARD, (FORWARD, PREPARE)),
        (FORWARD, FLAG_NO_DATA | FLAG_NO_FORWARD, (POST_SYNC, DATA, PREPARE, FORWARD)),
    ],
)
def test_rank_is_named_though_the_others_lack_a_mark(stage, flag, merged):
    """One rank loads for all: the others have no data wait, and its stages are compared as one."""
    d = played(200, 40, (stage, 0, 0, None, 0.6))
    into, *others = merged
    for other in others:
        d[:, 1, into] += d[:, 1, other]
        d[:, 1, other] = 0
    whole, run = window(d, flags=np.array([0, flag])), RunJudge()
    for end in range(60, 201, 10):
        verdict = run.update(whole.select(slice(0, end)))
    assert (verdict.label, verdict.stage, verdict.ranks) == ("straggler", STAGES[stage], (0,))
    cost_s = (200 - verdict.from_step) * 60e-3
    assert verdict.from_step == DEFAULTS.warmup_steps and abs(verdict.cost_s - cost_s) < 0.1 * cost_s


def test_fault_in_long_steps_is_named_after_ten_of_them():
    d = played(100, 2000, (FORWARD, 0, 70, None, 0.4))
    _, verdicts = live(d, every_s=2)
    end, _, verdict = next(judged for judged in verdicts if names(judged[2]))
    assert (verdict.ranks, verdict.from_step) == ((0,), 70)
    assert 80 <= end <= 84


def test_note_names_all_ranks_and_stages():
    """Two ranks are late together for a second, later a third one in two stages."""
    pair = [(DATA, rank, 400, 440, 0.4) for rank in (0, 1)]
    other = [(stage, 2, 800, 840, 0.3) for stage in (DATA, FORWARD)]
    _, verdicts = live(played(1000, 25, *pair, *other, ranks=6), 0.25)
    notes = {verdict.note.partition(" for ")[0] for _, _, verdict in verdicts}
    assert notes == {"", "ranks 0 and 1 late in `data`", "rank 2 late in `data` and `forward`"}


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.6])
def test_lateness_under_two_seconds_is_a_note_and_then_a_brief_episode(seconds):
    step_ms, first = 12, 1000
    d = played(2500, step_ms, (DATA, 1, first, first + int(seconds * 1000 / step_ms / 1.4), 0.4))
    run, verdicts = live(d, every_s=0.1)
    assert named(verdicts) == set()
    assert {verdict.label for _, _, verdict in verdicts[20:]} == {"healthy"}
    notes = [verdict.note for _, _, verdict in verdicts if verdict.note]
    assert any(note.startswith("rank 1 late in `data` for 0.") for note in notes)
    assert (run.episodes.episodes, run.episodes.brief.count) == ([], 1)
    assert run.episodes.brief.cost_s == pytest.approx(0.4 * seconds, rel=0.2)
    assert run.run_verdict().label == "healthy"


def test_name_is_taken_back_two_seconds_after_the_last_late_step():
    d = played(1500, 20, (DATA, 0, 400, 800, 0.3))
    _, verdicts = live(d, every_s=0.25)
    back = next(t_s for end, t_s, verdict in verdicts if end > 800 and verdict.label == "healthy")
    assert 2.0 < since(d, 800, back) <= 2.5
    assert changes(verdicts)[-3:] == [
        ("healthy", None, ()),
        ("straggler", "data", (0,)),
        ("healthy", None, ()),
    ]
    assert "not seen for" in next(verdict.note for end, _, verdict in verdicts if end > 840 and verdict.ranks)


def test_episode_has_begin_end_rank_stage_and_its_whole_cost():
    d = played(3000, 20, (DATA, 0, 400, 800, 0.3), (BACKWARD, 1, 1200, 2400, 0.5))
    run, _ = live(d)
    long, short = run.episodes.episodes
    assert (long.label, long.stage, long.rank, short.stage, short.rank) == (
        "straggler", "backward", 1, "data", 0,
    )  # fmt: skip
    for episode, first, last, share, step in ((long, 1200, 2399, 0.5, 20), (short, 400, 799, 0.3, 20)):
        cost_s = (last + 1 - first) * share / (1 - share) * step / 1e3
        assert abs(episode.from_step - first) <= 2 and abs(episode.to_step - last) <= 2
        assert episode.cost_s == pytest.approx(cost_s, rel=0.03)
        assert episode.rank_hours == pytest.approx(2 * episode.cost_s / 3600)
        assert episode.cost_pct == pytest.approx(100 * share, abs=3)
        assert episode.cost_range_pct[0] <= episode.cost_pct <= episode.cost_range_pct[1] + 1
        assert not episode.goes_on


def test_onset_stays_and_the_cost_is_smooth():
    d = played(4000, 20, (FORWARD, 1, 1000, None, 0.3), noise=0.15)
    _, verdicts = live(d)
    late = [verdict for _, _, verdict in verdicts if names(verdict)]
    assert len(late) > 50 and len({verdict.from_step for verdict in late}) == 1
    assert abs(late[0].from_step - 1000) <= 3
    costs = [verdict.cost_pct for verdict in late[4:]]
    assert max(map(abs, np.diff(costs))) < 0.5
    assert all(
        low <= cost <= high for cost, (low, high) in ((v.cost_pct, v.cost_range_pct) for v in late[4:])
    )
    lost = [verdict.lost_s for verdict in late]
    assert lost == sorted(lost)


def test_run_that_is_late_from_its_first_step_is_named():
    d = played(1000, 30, (DATA, 1, 0, None, 0.15))
    run, verdicts = live(d)
    assert changes(verdicts)[0][0] == "telemetry_limited"  # nothing is said before it has lasted
    assert changes(verdicts)[-1] == ("straggler", "data", (1,))
    assert next(t_s for _, t_s, verdict in verdicts if names(verdict)) <= 6
    (period,) = run.periods
    assert (period.label, period.from_step) == ("straggler", 10)
    assert run.run_verdict().chronic


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step_ms", [12, 25, 50])
def test_jitter_of_full_cores_names_no_rank(step_ms, seed):
    d = played(60_000 // step_ms, step_ms, swings=0.2, seed=seed)
    assert any(rule.label != "healthy" for rule in single_windows(d)), "somebody is late now and then"
    run, verdicts = live(d)
    assert named(verdicts) == set()
    assert len(changes(verdicts)) <= 2
    assert run.run_verdict().label in ("healthy", "ambiguous")


def single_windows(d):
    """Yield what the rules say of each window by itself."""
    whole = window(d)
    for begin in range(0, len(d) - 50, 10):
        yield judge_window(whole.select(slice(begin, begin + 50)), DEFAULTS).verdict


@pytest.mark.parametrize("seed", range(4))
def test_fault_of_thirty_percent_is_named_despite_the_jitter_of_full_cores(seed):
    stage = [DATA, FORWARD, BACKWARD, 0][seed]
    d = played(5000, 12, (stage, seed % 2, 2500, None, 0.3), swings=0.2, seed=seed)
    run, verdicts = live(d)
    assert run.episodes.episodes[0].rank == seed % 2
    assert named(verdicts[: int(2500 * 0.012 / 0.5)]) == set()
    last = verdicts[-1][2]
    assert (last.label, last.ranks) == ("straggler", (seed % 2,))
    # As long as the jitter may explain it, nobody is named.
    assert 2490 <= last.from_step <= 2850


@pytest.mark.parametrize("step_ms", [12, 50])
def test_label_stays_while_others_use_the_machine_for_a_while(step_ms):
    def at(second):
        return int(second * 1000 / step_ms)

    spells = [(at(first), at(last), factor) for first, last, factor in SPELLS]
    d = played(at(70), step_ms, machine=spells)
    run, verdicts = live(d)
    step_s = d.sum(axis=2).mean(axis=1) / 1e9
    longer_s = sum((step_s[first:last] - step_s[: at(20)].mean()).sum() for first, last, _ in spells)
    assert changes(verdicts[10:]) == [("healthy", None, ())]
    notes = {verdict.note.partition(" for ")[0] for _, _, verdict in verdicts if verdict.label == "healthy"}
    assert notes == {"", "whole step slower"}
    assert any("of the 30 s that are needed" in verdict.why for verdict in watched(verdicts))
    spell_s = sum(step_s[first:last].sum() for first, last, _ in spells)
    assert len(watched(verdicts)) <= 2 * (spell_s + 2 * len(spells))
    assert run.episodes.episodes == []
    assert run.run_verdict().label == "healthy"
    after = judge_run(processes(d), 2)
    assert after.episodes.episodes == []
    assert after.episodes.brief.cost_s == pytest.approx(longer_s, rel=0.05)


SPELLS = [(20, 23, 1.2), (28, 38, 1.5), (45, 50, 1.8), (55, 64, 1.2)]
"""Seconds of the healthy run, and the factor."""


@pytest.mark.parametrize(
    ("fault", "stage", "share"),
    [
        ({"machine": [(1200, None, 1.25)]}, None, 0.25),
        ({"late": (BACKWARD, slice(None), 1200, None, 0.2)}, "backward", 0.2),
    ],
)
def test_lasting_slowdown_of_all_ranks_is_found_from_its_first_step(fault, stage, share):
    d = played(2200, 40, *([fault["late"]] if "late" in fault else []), machine=fault.get("machine", ()))
    run, verdicts = live(d)
    assert changes(verdicts)[-2:] == [("healthy", None, ()), ("group_wide", stage, ())]
    t_s = next(t_s for _, t_s, verdict in verdicts if verdict.label == "group_wide")
    assert 30 <= since(d, 1200, t_s) <= 33
    longer_s = (d[1200:].sum(axis=2).mean() - d[400:1200].sum(axis=2).mean()) * 1000 / 1e9
    (after,) = judge_run(processes(d), 2).episodes.episodes
    (episode,) = run.episodes.episodes
    for verdict_there in (episode, after, verdicts[-1][2]):
        assert abs(verdict_there.from_step - 1200) <= 3
    assert episode.cost_s == pytest.approx(longer_s, rel=0.05)
    assert after.cost_s == pytest.approx(episode.cost_s, rel=0.02)
    assert episode.cost_pct == pytest.approx(100 * share, abs=6)


def test_lasting_slowdown_is_found_after_worse_but_passing_ones():
    spells = [(first, first + 150, 1.8) for first in range(600, 2400, 300)]
    d = played(4200, 30, (FORWARD, slice(None), 2700, None, 0.15), machine=spells)
    run, verdicts = live(d)
    assert changes(verdicts)[-1] == ("group_wide", "forward", ())
    assert abs(run.episodes.episodes[0].from_step - 2700) <= 3


def test_short_run_slower_than_a_given_session_is_group_wide():
    good = judge_run(processes(played(500, 20)), 2).baseline.elsewhere("session good")
    slow = judge_run(processes(played(400, 20, machine=[(0, None, 1.3)])), 2, baseline=good)
    whole = slow.run_verdict()
    assert (whole.label, whole.from_step) == ("group_wide", 10)
    assert whole.lost_s == pytest.approx(whole.cost_pct / 100 * whole.elapsed_s)


def test_episodes_are_the_same_live_and_afterwards():
    d = played(2000, 20, (DATA, 0, 400, 800, 0.3), (BACKWARD, 1, 1200, 1700, 0.5))
    run, _ = live(d)
    after = judge_run(processes(d), 2)
    one, other = (
        [(e.label, e.stage, e.rank, e.from_step, e.to_step) for e in judged.episodes.episodes]
        for judged in (run, after)
    )
    assert one == other
    for episode, again in zip(run.episodes.episodes, after.episodes.episodes, strict=True):
        assert episode.cost_s == pytest.approx(again.cost_s, rel=0.02)


def test_steps_between_judgements_count_like_judged_ones():
    d = played(2000, 10, (DATA, 0, 400, None, 0.4))
    run, whole = RunJudge(), window(d)
    for end in range(50, 2001, 200):
        run.update(whole.select(slice(end - 50, end)))
    (episode,) = run.episodes.episodes
    full, _ = live(d)
    assert episode.cost_s == pytest.approx(full.episodes.episodes[0].cost_s, rel=0.15)
    assert run.episodes.clock.now_ns == pytest.approx(full.episodes.clock.now_ns, rel=0.1)


def test_sampled_steps_count_for_those_between_them():
    """One step in 8 has times: durations, costs and what is over are of all."""
    d = played(4000, 20, (DATA, 0, 800, 1600, 0.3))
    all_steps, _ = live(d)
    sampled, whole = RunJudge(), window(d).select(slice(0, None, 8))
    for end in range(10, 501, 6):
        sampled.update(whole.select(slice(max(0, end - 50), end)))
    (episode,), (full,) = sampled.episodes.episodes, all_steps.episodes.episodes
    assert episode.cost_s == pytest.approx(full.cost_s, rel=0.1)
    assert episode.seconds == pytest.approx(full.seconds, rel=0.1)
    assert episode.rank_hours == pytest.approx(full.rank_hours, rel=0.1)
    assert episode.cost_range_pct == pytest.approx(full.cost_range_pct, rel=0.3)
    assert sampled.run_verdict().elapsed_s == pytest.approx(all_steps.run_verdict().elapsed_s, rel=0.1)


def sampled(d, every, piece=6):
    """The judge, and what it said, where one step in `every` has times, and `d` are these steps."""
    run, whole, verdicts = RunJudge(), window(np.repeat(d, every, axis=0)).select(slice(0, None, every)), []
    for end in range(10, len(d) + 1, piece):
        verdicts.append((end, 0.0, run.update(whole.select(slice(max(0, end - 50), end)))))
    return run, verdicts


def test_name_of_a_rank_that_is_late_in_half_of_the_sampled_steps_stays():
    """A few steps with times that are not late in a row are as few where they are far apart."""
    random = np.random.default_rng(1)
    late = [(DATA, 0, step, step + 1, 0.4) for step in range(100, 300) if random.random() < 0.6]
    _, verdicts = sampled(played(300, 100, *late), 8, piece=2)
    labels = [label for label, *_ in changes(verdicts)]
    assert labels == ["telemetry_limited", "healthy", "straggler"]


@pytest.mark.parametrize("piece", [1, 5])
def test_chronic_is_by_windows_a_stride_of_sampled_steps_apart(piece):
    _, verdicts = sampled(played(220, 100, (DATA, 0, 100, None, 0.4)), 32, piece)
    chronic = {end: verdict.chronic for end, _, verdict in verdicts}
    assert (chronic[140], chronic[170]) == (False, True)


def test_stalls_of_sampled_steps_recur_where_they_are_two_seconds_apart():
    """One of four ranks is nine times in a row the one that stalls, which is no chance; twice may be."""
    d = stalled(300, 15, *[(step, 0, DATA, 0.3) for step in range(60, 276, 24)])
    (run, _), (twice, verdicts) = sampled(d, 8), sampled(d[:100], 8)
    assert named(verdicts) == set()
    verdict = run.run_verdict()
    assert (verdict.label, verdict.ranks, twice.run_verdict().label) == ("straggler", (0,), "healthy")


def stalled(steps, step_ms, *stalls, ranks=4, noise=0.03, seed=0):
    """Rows of a healthy run in which `stalls` (step, rank, stage, seconds) made single steps longer."""
    random = np.random.default_rng(seed)
    local = step_ms * 1e6 * np.array([0.1, 0.1, 0.05, 0.25, 0.5]) * np.ones((steps, ranks, 1))
    local *= np.clip(random.normal(1, noise, local.shape), 0.5, 2)
    for step, rank, stage, seconds in stalls:
        local[step, rank, stage] += seconds * 1e9
    return synced(local.astype(np.int64), np.full(steps, EXCHANGE))


def counted_s(run):
    """What all episodes and all that was brief cost."""
    run.episodes.close()
    return run.episodes.lost_s + run.episodes.brief.cost_s


@pytest.mark.parametrize(
    ("step_ms", "stalls", "brief"),
    [
        (100, [(200, 0, DATA, 5.0)], 1),
        (1000, [(step, 0, DATA, 3.0) for step in range(100, 104)], 1),
        (100, [(91, 0, DATA, 2.0), (130, 0, DATA, 1.0)], 1),
    ],
)
def test_late_steps_are_counted_once_however_long_the_window_shows_them(step_ms, stalls, brief):
    d = stalled(400, step_ms, *stalls)
    for run in (live(d)[0], live(d, every_s=3)[0], judge_run(processes(d), 4)):
        run.episodes.close()
        assert (len(run.episodes.episodes), run.episodes.brief.count) == (0, brief)
        assert run.episodes.brief.cost_s == pytest.approx(sum(stall[3] for stall in stalls), rel=0.06)


def test_episode_that_is_over_is_not_counted_again():
    d = stalled(200, 1000, *[(step, 0, DATA, 0.6) for step in range(100, 115)])
    for run in (live(d)[0], judge_run(processes(d), 4)):
        assert len(run.episodes.episodes) == 1
        assert counted_s(run) == pytest.approx(9, rel=0.06)


def test_resumed_judge_counts_no_late_step_again():
    d = stalled(400, 100, (200, 0, DATA, 5.0))
    first, second, whole = live(d[:235])[0], RunJudge(), window(d)
    assert counted_s(live(d[:235])[0]) == pytest.approx(5, rel=0.06)
    second.resume(PACKER.unpack(PACKER.pack(first.state())))
    for end in range(236, 401, 5):
        second.update(whole.select(slice(end - 200, end)))
    assert counted_s(second) == pytest.approx(5, rel=0.06)


def test_occasional_stalls_of_one_step_name_no_rank():
    for first in (100, 103, 107):
        d = stalled(600, 50, *[(step, 0, DATA, 2.5) for step in range(first, 600, 60)])
        for every_s in (0.35, 1.0):
            run, verdicts = live(d, every_s=every_s)
            assert named(verdicts) == set()
            assert counted_s(run) <= 1.05 * 2.5 * len(range(first, 600, 60))


@fuzz(1 / 3)
@given(
    st.lists(
        st.tuples(
            st.integers(40, 290),
            st.integers(0, 3),
            st.sampled_from([DATA, FORWARD, BACKWARD]),
            st.floats(0.2, 6),
        ),
        max_size=12,
    ),
    st.sampled_from([50, 200, 1000]),
    st.sampled_from([0.3, 1.0, 3.0]),
)
def test_late_steps_are_never_counted_twice(stalls, step_ms, every_s):
    d = stalled(300, step_ms, *stalls)
    at_most = sum(stall[3] for stall in stalls) + 0.05 * 300 * step_ms / 1e3
    for run in (live(d, every_s=every_s)[0], judge_run(processes(d), 4)):
        assert counted_s(run) <= at_most


class TestSideBySide:
    """Several findings of one window are named beside each other, each with its own cost."""

    def finding(self, rank, stage, pattern="lasting"):
        about = {"stage": stage, "stages": (stage,), "rank": rank, "ranks": (rank,), "node": "n"}
        return Verdict(label="straggler", pattern=pattern, why="It is late.", next="Look.", **about)

    def follow(self, d, *shown, episodes=None, first=50):
        """The verdicts in effect, by the step they are at; `shown`: (finding, first step, end) of windows."""
        episodes, named = episodes or Episodes(DEFAULTS), {}
        for end in range(first, len(d) + 1, 10):
            part = window(d).select(slice(end - 50, end))
            here = [one for one, begin, until in shown if begin < end and end - 50 < (until or end)]
            quiet = Verdict(label="healthy", window_steps=50, mean_step_ms=1.0, coverage=1.0)
            verdict = quiet if not here else msgspec.structs.replace(here[0], also=tuple(here[1:]))
            named[end] = episodes.update(part, verdict, gather(part), counts=True)
        return episodes, named

    def saves_and_late(self, steps=1000):
        """Rank 0 takes 600 ms more in every 10th step, rank 1 is late by 10 ms in each forward."""
        d = played(steps, 60, (FORWARD, 1, 0, None, 1 / 7), ranks=4, noise=0.005)
        d[::10, 0, POST_SYNC] += 600_000_000
        d[::10, 1:, SYNC_WAIT] += 600_000_000
        return d, self.finding(1, "forward"), self.finding(0, "post_sync", "transient")

    def test_costliest_is_the_headline_and_the_other_is_beside_it(self):
        d, late, saves = self.saves_and_late()
        _, named = self.follow(d, (late, 0, None), (saves, 0, None))
        last, step_s = named[1000], d.sum(axis=2).mean() / 1e9
        (other,) = last.also
        assert (last.rank, last.stage, other.rank, other.stage) == (0, "post_sync", 1, "forward")
        assert last.cost_pct == pytest.approx(100 * 0.06 / step_s, abs=1)
        assert other.cost_pct == pytest.approx(100 * 0.01 * 0.9 / step_s, abs=1)
        assert other.cost_s == pytest.approx(0.01 * 0.9 * 1000, rel=0.1)
        assert last.lost_s == pytest.approx(last.cost_s + other.cost_s)
        assert (other.also, other.suspects, other.exposed_ms, other.next) == ((), (), None, "Look.")

    def test_small_lasting_lateness_does_not_hide_what_comes_later(self):
        d, late, saves = self.saves_and_late()
        d[:500:10, 0, POST_SYNC] -= 600_000_000
        d[:500:10, 1:, SYNC_WAIT] -= 600_000_000
        _, named = self.follow(d, (late, 0, None), (saves, 500, None))
        assert (named[490].rank, named[490].also) == (1, ())
        named_at = next(end for end, verdict in named.items() if verdict.rank == 0)
        assert 510 <= named_at <= 540 and [one.rank for one in named[1000].also] == [1]

    def test_what_goes_on_is_the_headline_once_the_costlier_one_is_over(self):
        d, late, saves = self.saves_and_late(1500)
        d[700::10, 0, POST_SYNC] -= 600_000_000
        d[700::10, 1:, SYNC_WAIT] -= 600_000_000
        episodes, named = self.follow(d, (late, 0, None), (saves, 0, 700))
        assert (named[690].rank, named[1500].rank, named[1500].also) == (0, 1, ())
        assert {(one.rank, one.goes_on) for one in episodes.episodes} == {(0, False), (1, True)}
        assert len({verdict.rank for end, verdict in named.items() if end > 200}) == 2
        changed = [one.rank for one, other in itertools.pairwise(named.values()) if one.rank != other.rank]
        assert len(changed) <= 3, "the headline does not alternate"

    def test_resumed_episodes_go_on_with_all_that_is_named(self):
        d, late, saves = self.saves_and_late()
        first, before = self.follow(d[:500], (late, 0, None), (saves, 0, None))
        _, _, second = PACKER.unpack(PACKER.pack((None, None, first)))
        _, after = self.follow(d, (late, 0, None), (saves, 0, None), episodes=second, first=510)
        _, through = self.follow(d, (late, 0, None), (saves, 0, None))
        assert after[1000] == through[1000] and before[500] == through[500]

    @pytest.mark.parametrize("every", [12, 20, 33])
    def test_what_recurs_after_more_than_ten_steps_is_one_episode(self, every):
        d = played(1500, 60, ranks=4, noise=0.02)
        d[100:1000:every, 0, POST_SYNC] += 900_000_000
        d[100:1000:every, 1:, SYNC_WAIT] += 900_000_000
        _, verdicts = live(d)
        run = judge_run(processes(d), 4)
        (episode,), (now,) = run.episodes.episodes, {names(one) for *_, one in verdicts if names(one)}
        assert (episode.rank, episode.stage, episode.pattern, now) == (0, "post_sync", "transient", (0,))
        assert episode.cost_s == pytest.approx(0.9 * len(range(100, 1000, every)), rel=0.1)
        assert [label for label, *_ in changes(verdicts)][-2:] == ["straggler", "healthy"]
        last_s = next(t_s for end, t_s, one in verdicts if end > 1000 and not names(one))
        assert since(d, 1000, last_s) < 2 + 2.5 * every * 0.06

    def test_slowdown_of_all_ranks_is_not_named_beside_a_late_rank_that_explains_it(self):
        d = played(1200, 60, (DATA, 0, 0, None, 0.25), ranks=4, noise=0.005)
        all_ranks = Verdict(label="group_wide", stage="data", stages=("data",), excess_pct=20.0)
        late = self.finding(0, "data")
        _, first = self.follow(d, (all_ranks, 0, None), (late, 700, None))
        assert first[700].label == "group_wide"
        assert (first[1200].label, first[1200].rank, first[1200].also) == ("straggler", 0, ())
        _, after = self.follow(d, (late, 0, None), (all_ranks, 100, None))
        assert {one.label for verdict in after.values() for one in (verdict, *verdict.also)} <= {
            "straggler",
            "watching",
        }

    @pytest.mark.parametrize("every", [10, 13])
    def test_cost_before_a_name_counts_once_over_the_run(self, every):
        """It is followed for long before it is named, and in between no step is late for two seconds."""
        d = played(480, 60, ranks=4, noise=0.02)
        d[::every, 0, POST_SYNC] += 2_400_000_000
        d[::every, 1:, SYNC_WAIT] += 2_400_000_000
        run = judge_run(processes(d), 4)
        cost_s = 2.4 * len(range(10, 480, every))
        assert run.run_verdict().cost_s == pytest.approx(cost_s, rel=0.1)
        assert sum(one.cost_s for one in [*run.episodes.episodes, *run.episodes.passed]) <= 1.05 * cost_s

    def test_more_than_eight_are_counted(self):
        d = played(1200, 100, ranks=48, noise=0.005)
        for rank in range(12):
            d[rank::12, rank, DATA] += 300_000_000 + rank * 60_000_000
            d[rank::12, :, SYNC_WAIT] += 300_000_000 + rank * 60_000_000
            d[rank::12, rank, SYNC_WAIT] -= 300_000_000 + rank * 60_000_000
        findings = [(self.finding(rank, "data", "transient"), 0, None) for rank in range(12)]
        _, named = self.follow(d, *findings)
        last = named[1200]
        assert (last.rank, [one.rank for one in last.also]) == (11, [10, 9, 8, 7, 6, 5, 4, 3])
        assert "3 more are named" in last.note


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_late_one_after_another_are_each_named(ranks):
    """That others were late before is no sign of work that stays alike for long: in between all are alike."""
    stages = (DATA, BACKWARD, POST_SYNC, FORWARD, DATA, FORWARD)
    faults = [
        (stage, number % ranks, 300 + 180 * number, 380 + 180 * number, 0.3)
        for number, stage in enumerate(stages)
    ]
    d = played(1400, 50, *faults, ranks=ranks)
    _, verdicts = live(d)
    for stage, rank, first, end, _ in faults:
        last = [verdict for step, _, verdict in verdicts if first < step <= end][-1]
        assert (last.label, last.stage, last.rank) == ("straggler", STAGES[stage], rank), first


class TestWatching:
    """What is seen, but not named: it is never green, and says which condition is still lacking."""

    def states(self, verdicts):
        return [label for label, _ in itertools.groupby(verdict.label for _, _, verdict in verdicts)]

    def test_rank_that_is_late_in_too_few_windows_to_be_named_is_watched(self):
        late = [(DATA, 2, first, first + 34, 0.3) for first in range(1000, 4000, 100)]
        d = played(4000, 20, *late, ranks=4)
        run, verdicts = live(d)
        assert named(verdicts) == set()
        after = [(t_s, verdict) for _, t_s, verdict in verdicts if since(d, 1000, t_s) > 4]
        assert {(verdict.label, verdict.stage, verdict.ranks) for _, verdict in after} == {
            ("watching", "data", (2,))
        }
        assert self.states(verdicts)[-2:] == ["healthy", "watching"]
        t_s, last = after[-1]
        assert re.search(
            r"late in `data` for \d+ s, since step 1,0\d\d\..* windows, 67 % are needed", last.why
        )
        cost_s = len(late) * 34 * 0.3 / 0.7 * 0.02
        assert last.cost_s == pytest.approx(cost_s, rel=0.2)
        assert last.cost_pct == pytest.approx(100 * cost_s / since(d, 1000, t_s), rel=0.2)
        assert (last.next[:14], last.confidence, last.chronic) == ("If it stays: l", "low", None)
        run.episodes.close()
        whole = run.run_verdict()
        assert (whole.label, whole.ranks, whole.confidence) == ("straggler", (2,), "low")
        assert whole.cost_s == pytest.approx(cost_s, rel=0.05)
        assert whole.cost_pct == pytest.approx(100 * whole.cost_s / whole.elapsed_s)

    def test_lack_of_cost_is_said_in_numbers(self):
        d = played(3000, 2, (DATA, 1, 1500, None, 0.08), noise=0.01)
        _, verdicts = live(d, every_s=0.25)
        costs = [
            re.search(r"it has cost ([\d.]+) s of the 0.3 s", verdict.why) for verdict in watched(verdicts)
        ]
        assert len(costs) > 1 and all(costs)
        spent = [float(cost[1]) for cost in costs if cost]
        assert spent == sorted(spent) and 0.1 < spent[0] < spent[-1] <= 0.3
        assert self.states(verdicts)[-2:] == ["healthy", "watching"]

    def test_lack_of_time_is_said_where_nothing_was_said_of_the_run(self):
        d = played(300, 30, (DATA, 1, 0, None, 0.3), ranks=4)
        _, verdicts = live(d, every_s=0.25)
        assert self.states(verdicts) == ["telemetry_limited", "watching", "straggler"]
        assert all("s of the 2 s that are needed" in verdict.why for verdict in watched(verdicts))

    def test_rank_of_two_is_named_when_a_full_window_shows_it(self):
        """Lengths that stay for 20 steps show the same in fewer: the other rank has shorter ones."""
        d = played(100, 100, (DATA, 1, 0, None, 0.3))
        _, verdicts = live(d, every_s=0.25)
        assert self.states(verdicts) == ["telemetry_limited", "watching", "straggler"]
        named = next(step for step, _, verdict in verdicts if verdict.label == "straggler")
        assert DEFAULTS.warmup_steps + 50 <= named <= DEFAULTS.warmup_steps + 60
        why = watched(verdicts)[-1].why
        assert "steps of the run are known; with so few ranks 50 are needed" in why

    def test_usual_fluctuation_is_said_where_the_excess_is_not_above_it(self):
        d = played(7000, 12, (FORWARD, 1, 5000, None, 0.12), swings=0.4, seed=3)
        _, verdicts = live(d)
        lacks = [verdict.why for verdict in watched(verdicts) if verdict.ranks == (1,)]
        numbers = [
            re.search(r"excess of ([\d.]+) % is not above .* fluctuation of ([\d.]+) %", why) for why in lacks
        ]
        assert any(numbers)
        assert all(float(pair[1]) <= float(pair[2]) for pair in numbers if pair)

    def test_chance_is_said_in_standard_errors(self):
        """It is late beyond chance at first; then work varies so much that it may be chance."""
        random, steps = np.random.default_rng(0), np.arange(2000)
        local = 20e6 * np.array([0.1, 0.1, 0.05, 0.25, 0.5]) * np.ones((2000, 8, 1))
        spread = np.where(steps < 1140, 0.03, 0.8)[:, None]
        local[:, :, FORWARD] *= np.clip(random.normal(1, 1, (2000, 8)) * spread + 1, 0.2, 3)
        local[1000:, 1, FORWARD] += 1.5e6
        _, verdicts = live(synced(local.astype(np.int64), np.full(2000, EXCHANGE)))
        pattern = r"late ([\d.]+) standard errors more often than chance predicts; 4.2 are needed"
        lacks = [re.search(pattern, verdict.why) for verdict in watched(verdicts) if verdict.ranks == (1,)]
        assert [verdict.ranks for verdict in watched(verdicts)].count((1,)) > sum(map(bool, lacks)) >= 1
        assert all(0 < float(match[1]) < 4.2 for match in lacks if match)

    def test_it_is_watched_until_two_seconds_after_the_last_late_step(self):
        late = [(DATA, 2, first, first + 34, 0.3) for first in range(1000, 2000, 100)]
        d = played(3000, 20, *late, ranks=4)
        _, verdicts = live(d, every_s=0.25)
        assert self.states(verdicts) == ["telemetry_limited", "healthy", "watching", "healthy"]
        end = max(t_s for _, t_s, verdict in verdicts if verdict.label == "watching")
        assert 1.5 < since(d, 1934, end) <= 2.3
        assert "not seen for" in next(verdict.note for _, t_s, verdict in verdicts if t_s == end)

    def test_resumed_judge_goes_on_watching(self):
        late = [(DATA, 2, first, first + 34, 0.3) for first in range(1000, 4000, 100)]
        d, second = played(2600, 20, *late, ranks=4), RunJudge()
        first, before = live(d[:2500])
        second.resume(PACKER.unpack(PACKER.pack(first.state())))
        after = second.update(window(d).select(slice(2400, 2600)))
        assert (before[-1][2].label, after.label) == ("watching", "watching")
        assert after.from_step == before[-1][2].from_step and after.cost_s > before[-1][2].cost_s


def test_second_stage_that_shows_now_and_then_does_not_change_the_name():
    stretches = [(PREPARE, 1, first, first + 40, 0.4) for first in range(1000, 3000, 200)]
    d = played(3000, 20, (BACKWARD, 1, 600, None, 0.3), *stretches, noise=0.1)
    assert any(verdict.label == "ambiguous" for verdict in single_windows(d))
    _, verdicts = live(d)
    assert changes(verdicts)[-1] == ("straggler", "backward", (1,)) and len(changes(verdicts)) <= 4


def test_second_stage_that_stays_changes_the_name_after_two_seconds():
    d = played(2000, 20, (BACKWARD, 1, 600, None, 0.3), (PREPARE, 1, 1200, None, 0.35))
    _, verdicts = live(d, every_s=0.25)
    t_s = next(t_s for _, t_s, verdict in verdicts if verdict.label == "ambiguous")
    assert 2 <= since(d, 1200, t_s) <= 4
    assert [what[0] for what in changes(verdicts)[-2:]] == ["straggler", "ambiguous"]


@pytest.fixture(scope="module")
def undisturbed():
    """The rows of two faults, the judge that has seen all of them, and what it said."""
    d = played(2000, 20, (DATA, 0, 400, 800, 0.3), (BACKWARD, 1, 1200, None, 0.5))
    return d, *live(d)


@pytest.mark.parametrize("handover", [500, 1000, 1300])
def test_judge_goes_on_where_another_left_off(undisturbed, handover):
    d, through, verdicts = undisturbed
    first, _ = live(d[:handover])
    second = RunJudge()
    second.resume(PACKER.unpack(PACKER.pack(first.state())))
    whole = window(d)
    for end in range(handover + 200, 2001, 50):  # the windows that nobody judged are, too
        last = second.update(whole.select(slice(max(0, end - 400), end)))
    assert (last.label, last.ranks, last.from_step) == ("straggler", (1,), verdicts[-1][2].from_step)
    for one, other in zip(second.episodes.episodes, through.episodes.episodes, strict=True):
        assert (one.label, one.rank, one.from_step) == (other.label, other.rank, other.from_step)
        assert one.cost_s == pytest.approx(other.cost_s, rel=0.03)
        assert one.cost_range_pct == pytest.approx(other.cost_range_pct, abs=3)
    assert second.episodes.clock.now_ns == pytest.approx(d.sum(axis=2).mean(axis=1)[10:].sum(), rel=1e-3)


class TestWholeRun:
    def test_single_stall_is_no_straggler(self):
        d = played(800, 20)
        d[400, 0, DATA] += 3_000_000_000
        d[400, 1, SYNC_WAIT] += 3_000_000_000
        run, verdicts = live(d)
        assert named(verdicts) == set()
        assert run.run_verdict().label == "healthy"

    def test_stall_that_recurs_is_a_transient_straggler(self):
        d = played(2000, 20)
        d[100::100, 0, DATA] += 750_000_000
        d[100::100, 1, SYNC_WAIT] += 750_000_000
        whole = judge_run(processes(d), 2).run_verdict()
        assert (whole.label, whole.stage, whole.rank, whole.pattern) == ("straggler", "data", 0, "transient")
        assert whole.lost_s == pytest.approx(19 * 0.75, rel=0.1)

    @pytest.mark.parametrize("every", [200, 270])
    def test_stall_that_recurs_in_a_long_run_costs_what_all_of_it_cost(self, every):
        """The sample of a long run may miss every one of them: it is spread evenly, and so are they."""
        d = played(8000, 20)
        d[100::every, 0, DATA] += 1_500_000_000
        d[100::every, 1, SYNC_WAIT] += 1_500_000_000
        whole, cost_s = judge_run(processes(d), 2).run_verdict(), 1.5 * len(range(100, 8000, every))
        assert (whole.label, whole.stage, whole.rank, whole.pattern) == ("straggler", "data", 0, "transient")
        assert whole.cost_s == pytest.approx(cost_s, rel=0.1) and whole.lost_s == whole.cost_s
        assert whole.cost_pct == pytest.approx(100 * whole.cost_s / whole.elapsed_s)

    def test_costly_episode_is_the_verdict_of_the_run(self):
        run = judge_run(processes(played(3000, 20, (DATA, 1, 1000, 1800, 0.3))), 2)
        whole = run.run_verdict()
        assert (whole.label, whole.stage, whole.rank) == ("straggler", "data", 1)
        assert (abs(whole.from_step - 1000) <= 2, abs(whole.to_step - 1799) <= 2) == (True, True)
        assert whole.lost_s == pytest.approx(800 * 3 / 7 * 0.02, rel=0.05)
        assert whole.cost_pct == pytest.approx(100 * whole.lost_s / whole.elapsed_s, rel=0.01)

    @pytest.mark.parametrize("steps", [10, 15, 20])
    @pytest.mark.parametrize("step_ms", [20, 60, 250])
    def test_rank_that_is_late_in_the_last_steps_only_is_a_note(self, step_ms, steps):
        d = played(1000, step_ms, (DATA, 1, 1000 - steps, None, 0.2), ranks=4)
        run = judge_run(processes(d), 4)
        whole, lost_s = run.run_verdict(), steps * step_ms / 4 / 1e3
        assert (whole.label, whole.ranks, whole.about) == ("healthy", (), "run")
        assert "rank 1 late in `data`" in whole.note or "a cause was named once" in whole.note
        assert run.episodes.lost_s + run.episodes.brief.cost_s == pytest.approx(lost_s, rel=0.1)
        assert whole.lost_s <= 1.1 * lost_s

    def test_what_was_late_at_the_end_is_in_the_note_with_its_cost(self):
        d = played(1000, 20, (DATA, 1, 980, None, 0.2), ranks=4)
        note = judge_run(processes(d), 4).run_verdict().note
        assert re.fullmatch(
            r"rank 1 late in `data` in the last 20 steps: 0.(1|09) s, 0.4\d? % of the run", note
        )

    def test_cost_of_a_cause_is_the_share_of_the_run_in_every_figure(self):
        """Late at first only: what a fix saves of the run is less than what it saved of these steps."""
        d = played(3000, 20, (DATA, 1, 0, 1700, 0.3), ranks=4)
        whole = judge_run(processes(d), 4).run_verdict()
        cost_s = 1690 * 0.3 / 0.7 * 0.02
        assert (whole.label, whole.ranks) == ("straggler", (1,))
        assert (whole.cost_s, whole.lost_s) == (pytest.approx(cost_s, rel=0.05),) * 2
        assert whole.cost_pct == whole.gain_pct == pytest.approx(100 * whole.cost_s / whole.elapsed_s)
        assert f"Fixing it saves {percent(whole.cost_pct)} of the run." in whole.why

    def test_rank_named_in_one_stage_and_then_in_two_is_one_cause_of_the_run(self):
        first, second = (BACKWARD, 1, 100, 900, 0.2), (FORWARD, 1, 500, 900, 0.25)
        run = judge_run(processes(played(1600, 40, first, second, ranks=4)), 4)
        whole = run.run_verdict()
        assert (whole.label, whole.ranks, whole.also) == (whole.label, (1,), ())
        assert whole.cost_s == pytest.approx(run.episodes.lost_s) == whole.lost_s

    def test_cheap_episode_is_a_note(self):
        whole = judge_run(processes(played(9000, 20, (DATA, 1, 1000, 1200, 0.3))), 2).run_verdict()
        assert (whole.label, whole.rank) == ("healthy", None)
        assert "a cause was named once" in whole.note
        assert whole.lost_s == pytest.approx(200 * 3 / 7 * 0.02, rel=0.1)


def test_missing_telemetry_is_reported_at_once_and_the_episode_goes_on_after_it():
    d = played(1200, 20, (DATA, 1, 200, None, 0.3))
    run, whole = RunJudge(), window(d)
    for end in range(50, 601, 10):
        run.update(whole.select(slice(end - 50, end)))
    blind = type(whole)(**{**vars(whole.select(slice(560, 610))), "expected": 4})
    assert run.update(blind).label == "telemetry_limited"
    assert run.update(whole.select(slice(570, 620))).ranks == (1,)
    assert [period.label for period in run.periods] == [
        "healthy",
        "straggler",
        "telemetry_limited",
        "straggler",
    ]
    assert len(run.episodes.episodes) == 1


def test_balanced_rows_have_no_episode():
    run = judge_run(processes(np.tile(of_ms([QUIET] * 3), (400, 1, 1))), 3)
    assert (run.episodes.episodes, run.episodes.brief.count, run.run_verdict().lost_s) == ([], 0, 0)


@pytest.mark.parametrize("share", [0.18, 0.25])
def test_rank_late_in_two_stages_about_equally_has_one_episode(share: float) -> None:
    """Which of them is the smaller one, and whether that counts, changes from window to window."""
    rows = played(1500, 100, (DATA, 1, 200, None, 0.25), (FORWARD, 1, 200, None, share), noise=0.1)
    run, verdicts = live(rows, every_s=1.0)
    lost = [verdict.lost_s or 0.0 for *_, verdict in verdicts]
    assert len(run.episodes.episodes) == 1
    assert all(later >= before for before, later in itertools.pairwise(lost))
    assert len(changes(verdicts)) < 8
