"""Is a rank late more often than chance has it, and by how much beyond chance?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.analysis.chance import beyond_chance, correlation_steps, least_z, scores_of, z_late


def drawn(seed: int, steps: int, ranks: int, stay: int = 1) -> np.ndarray:
    """Work of ranks (steps, ranks) that is drawn anew every `stay` steps."""
    random = np.random.default_rng(seed)
    blocks = random.uniform(5, 60, (-(-steps // stay) + 1, ranks))
    begin = int(random.integers(stay))
    return np.repeat(blocks, stay, axis=0)[begin : begin + steps]


@pytest.mark.parametrize("stay", [1, 5, 20, 50])
@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_work_that_varies_names_nobody(stay: int, ranks: int) -> None:
    for seed in range(20):
        past = drawn(seed, 1000, ranks, stay)
        for steps in (50, 200):
            assert z_late(past[-steps:], range(ranks), correlation_steps(past)).max() < least_z(ranks, steps)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 24), (3, 16), (8, 10), (64, 10)])
def test_rank_that_is_always_the_last_is_soon_late_by_more_than_chance(ranks: int, steps: int) -> None:
    lateness = np.random.default_rng(ranks).normal(0, 1, (steps, ranks))
    lateness[:, 1] += 20
    assert z_late(lateness, [1])[0] >= least_z(ranks, steps)


def test_small_fault_in_loud_work_shows_in_many_steps() -> None:
    past = drawn(3, 1000, 8)
    past[:, 5] += 12
    assert z_late(past, range(8)).argmax() == 5 and z_late(past, [5])[0] >= least_z(8, 1000)


def test_ranks_that_are_late_alike_are_all_late() -> None:
    lateness = np.zeros((50, 4))
    lateness[:, 2:] = 4, 3.9
    assert (z_late(lateness, [2, 3]) >= least_z(4, 50)).all()


def test_newest_steps_are_held_against_those_before() -> None:
    lateness = np.random.default_rng(1).normal(0, 1, (50, 2))
    lateness[-10:, 0] += 30
    assert z_late(lateness, [0], newest=10)[0] >= 4.2 > z_late(lateness[-10:], [0])[0]


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 40), st.booleans())
def test_scores_depend_on_order_only_and_are_a_permutation_for_ranks(
    seed: int, ranks: int, steps: int, ties: bool
) -> None:
    random = np.random.default_rng(seed)
    lateness = random.integers(0, 3, (steps, ranks)) * 1.0 if ties else random.normal(0, 1, (steps, ranks))
    scores = scores_of(lateness)
    assert scores.mean() == pytest.approx((1 - 1 / scores.size) / 2)
    assert np.allclose(scores_of(7 * lateness + 3), scores)
    order = random.permutation(ranks)
    assert np.allclose(scores_of(lateness[:, order]), scores[:, order])


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.booleans())
def test_z_of_a_rank_does_not_depend_on_its_number(seed: int, ranks: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    lateness, order = random.exponential(1, (30, ranks)), random.permutation(ranks)
    lateness = np.floor(2 * lateness) if ties else lateness
    assert np.allclose(z_late(lateness[:, order], range(ranks), 1), z_late(lateness, range(ranks), 1)[order])


@pytest.mark.parametrize(("stay", "low", "high"), [(1, 1, 1.2), (5, 3, 8), (20, 12, 32)])
def test_work_that_stays_for_some_steps_is_one_piece_of_evidence(stay: int, low: float, high: float) -> None:
    times = [correlation_steps(drawn(seed, 1000, 8, stay)) for seed in range(10)]
    assert low <= np.median(times) <= high


def test_rank_that_becomes_late_is_no_autocorrelation() -> None:
    for ranks in (2, 8):
        lateness = np.random.default_rng(ranks).normal(0, 1, (300, ranks))
        lateness[150:, 0] += 10
        assert correlation_steps(lateness) < 1.5


@given(st.integers(0, 2**32 - 1), st.integers(1, 10**8))
def test_lateness_beyond_chance_is_what_was_added(seed: int, more: int) -> None:
    excess = np.random.default_rng(seed).normal(0, 1e7, (400, 8)).astype(np.int64)
    excess[:, 2] += more
    beyond = beyond_chance(excess, [2], [0, 1, 3, 4, 5, 6, 7])
    assert beyond.mean() == pytest.approx(more, abs=2.5e6)


def test_stalls_that_others_have_as_well_are_chance() -> None:
    excess = np.zeros((100, 4), np.int64)
    for rank in range(4):
        excess[rank::20, rank] = 1000
    assert beyond_chance(excess, [0], [1, 2, 3]).sum() <= 1000
    excess[:, 1:] = 0
    assert beyond_chance(excess, [0], [1, 2, 3]).sum() == 5000
