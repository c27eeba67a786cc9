"""The accounting identity and its consequences, on any rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from unit.sample_windows import RECORDED

from traceml_ray.analysis.evidence import chain

ROWS = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(6)),
    elements=st.integers(0, 20) | st.integers(0, 10**12),
)


def columns(d, frontier):
    """Everything as one chain of columns: d (R, N), a (N,), slack (R, N), leaders (R, N)."""
    ranks = d.shape[1]
    flat = [x.transpose(1, 0, 2).reshape(ranks, -1) for x in (d, frontier.slack, frontier.leaders)]
    return flat[0], frontier.exposed.ravel(), flat[1], flat[2]


@given(ROWS)
def test_exposed_time_sums_exactly_to_the_elapsed_time(d):
    frontier = chain(d)
    assert frontier.exposed.sum() == frontier.total_ns == d.sum(axis=(0, 2)).max()


@given(ROWS)
def test_slack_is_never_negative_and_zero_for_leaders(d):
    _, _, slack, leaders = columns(d, chain(d))
    assert (slack >= 0).all()
    assert (leaders == (slack == 0)).all()
    assert leaders.any(axis=0).all()


@given(ROWS)
def test_exposed_time_is_bounded_by_the_rows(d):
    flat, a, slack, leaders = columns(d, chain(d))
    assert (a <= flat.max(axis=0)).all()
    before = np.concatenate([np.zeros((len(flat), 1), dtype=np.int64), slack[:, :-1]], axis=1)
    led_before = before == 0
    assert (np.where(led_before, flat, 0) <= a).all()
    assert ((flat - before == a) | ~leaders).all()


@given(ROWS, st.integers(1, 5))
def test_frontier_of_consecutive_pieces_equals_the_whole(d, cut):
    cut = min(cut, len(d))
    first, whole = chain(d[:cut]), chain(d)
    assert (whole.exposed[:cut] == first.exposed).all()
    if cut < len(d):
        second = chain(d[cut:], behind=first.slack[-1, :, -1])
        assert (whole.exposed[cut:] == second.exposed).all()
        assert (whole.slack[cut:] == second.slack).all()
        assert first.total_ns + second.total_ns == whole.total_ns


@given(ROWS, st.randoms(use_true_random=False))
def test_rank_order_does_not_change_the_frontier(d, random):
    order = random.sample(range(d.shape[1]), d.shape[1])
    one, other = chain(d), chain(d[:, order])
    assert (one.exposed == other.exposed).all()
    assert (one.leaders[:, order] == other.leaders).all()


@pytest.mark.parametrize("name", RECORDED)
def test_exposed_time_of_recorded_runs_adds_up(name):
    frontier = chain(RECORDED[name])
    assert frontier.exposed.sum() == RECORDED[name].sum(axis=(0, 2)).max()


def test_steps_started_from_zero_would_overstate_a_synced_run():
    d = RECORDED["f3_forward_10"]
    assert sum(chain(d[k : k + 1]).total_ns for k in range(len(d))) > chain(d).total_ns
