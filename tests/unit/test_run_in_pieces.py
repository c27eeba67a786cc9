"""A run in pieces comes to what it comes to in one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sample_windows import align, exact, of_ms, processes, synced, window
from unit.test_step_history import check_stats

from traceml_ray.analysis.history import Replay
from traceml_ray.analysis.step_history import StepHistory
from traceml_ray.analysis.step_stats import Histograms
from traceml_ray.analysis.thresholds import Thresholds

LIMITS = Thresholds()
SECOND = 1_000_000_000


def run(steps=600, ranks=3):
    """Steps of three exchanges each, a rank late for a while, and noise."""
    rng = np.random.default_rng(1)
    local = rng.gamma(20, 1e5, (3 * steps, ranks, 5)).astype(np.int64)
    local[600:1200, 1, 1] += 8_000_000
    return window(synced(local, np.full(3 * steps, 100_000)), exchanges=3)


RUN = run()


def pieces(whole, cuts):
    edges = [0, *sorted(cuts), len(whole.starts)]
    rows = [*whole.starts.tolist(), len(whole.keys)]
    return [whole.select(slice(rows[a], rows[b])) for a, b in pairwise(edges)]


def synced_rows(ranks, steps):
    """Rows whose stages are all different, of ranks that wait for each other."""
    local = np.random.default_rng(2).gamma(20, 1e5, (steps, ranks, 5)).astype(np.int64)
    return synced(local, np.full(steps, 100_000))


def busy(rank_rows):
    return rank_rows.rows[:, :5].sum(axis=1) / 1e6


CUTS = st.lists(st.integers(0, 600), max_size=12)


@settings(max_examples=6, deadline=None)
@given(CUTS)
def test_verdicts_are_the_same_in_any_pieces(cuts):
    judged = []
    for parts in ([RUN], pieces(RUN, cuts)):
        replay = Replay(600)
        for part in parts:
            replay.add(part)
        judged.append(replay.done())
    one, several = judged
    assert list(several.periods) == list(one.periods)
    assert several.episodes.episodes == one.episodes.episodes
    assert several.run_verdict() == one.run_verdict()
    assert several.baseline == one.baseline


@pytest.mark.parametrize(("ranks", "steps", "error"), [(3, 6000, 0.125), (70, 3000, 0.25), (300, 700, 1.0)])
def test_statistics_of_steps_that_are_summed_up_are_within_their_error(ranks, steps, error):
    """Of more steps than are kept one by one."""
    history, every = StepHistory(LIMITS, deep=True), processes(synced_rows(ranks, steps))
    for begin in range(0, len(every[0].keys), 200):
        history.add_rows([rank_rows.select(slice(begin, begin + 200)) for rank_rows in every])
        history.advance(range(ranks), 0, ranks)
    stats = history.stats()
    assert stats.error_pct == pytest.approx(error, rel=0.01)
    window = align(every, ranks).since(LIMITS.warmup_steps)
    check_stats(history, exact(window), stats.error_pct / 100)
    assert stats.mean_stages() == pytest.approx(window.d.mean(axis=0) / 1e6, rel=1e-5)
    assert stats.between == (LIMITS.warmup_steps, window.last_step)
    line = history.timeline(1)
    assert line.took.sum() == pytest.approx(every[1].rows.sum(), rel=1e-6)
    assert history.counts() == dict.fromkeys(range(ranks), len(every[0].keys))


def test_a_step_longer_than_any_clock_tells_is_shown_as_the_longest():
    rows = processes(synced_rows(1, 3000))
    rows[0].rows[:, :] = np.iinfo(np.int64).max
    history = StepHistory(LIMITS)
    history.add_rows(rows)
    history.advance((0,), 0, 1)
    with np.errstate(invalid="raise"):
        assert (history.timeline(0).took > 0).all()


def test_ranks_that_come_later_leave_the_statistics_of_the_others():
    every = processes(synced_rows(80, 9000))
    history = StepHistory(LIMITS)
    history.add_rows([rank_rows.select(slice(0, 6000)) for rank_rows in every[:2]])
    history.advance((), 0, 2)
    before = history.stats()
    assert before.error_pct < 0.13
    history.add_rows([rank_rows.select(slice(6000, None)) for rank_rows in every])
    history.advance((), 0, 80)
    after = history.stats()
    assert 0.24 < after.error_pct < 0.26
    assert after.busy()[:2] == pytest.approx(
        np.median([busy(rank_rows)[10:] for rank_rows in every[:2]], axis=1), rel=0.003
    )
    assert np.isfinite(after.busy()).all()
    assert history.counts() == {rank: 9000 if rank < 2 else 3000 for rank in range(80)}


def test_absurd_row_is_left_out_of_the_statistics():
    bad = of_ms([[1, 2, 0, 3, 4, 5], [1, 2, 0, 3, 4, 5]], 40)
    bad[27, 0, 0] = -1
    history = StepHistory(LIMITS)
    history.add_rows(processes(bad))
    history.advance((), 0, 2)
    assert history.absurd == 1
    assert history.stats().steps == 29 and history.stats().step(0.5) == [15]
    assert StepHistory(LIMITS).stats() is None


@given(
    st.lists(st.just(0) | st.integers(1000, 86_400 * SECOND), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.25, 0.5, 0.95, 1.0]),
    st.integers(0, 60),
    st.integers(0, 60),
    st.booleans(),
)
def test_quantile_is_within_the_error_of_one_of_the_values(values, share, cut, more, coarser):
    histograms = Histograms(1, np.log(1.005), 86_400e3)
    column = np.array(values)[:, None] / 1e6
    rest = column[cut:]
    histograms.add(column[:cut])
    if coarser:
        histograms.coarser()
    histograms.add(np.concatenate([rest[more:], [[np.nan]]]))
    exact = np.sort(values)[int(share * (len(values) - 1))] / 1e6
    assert histograms.quantile(share, rest[:more])[0] == pytest.approx(exact, rel=0.0101)
    assert histograms.quantile_of_all(share, rest[:more]) == histograms.quantile(share, rest[:more])[0]
