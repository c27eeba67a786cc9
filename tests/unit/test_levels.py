"""Is a rank late by more than the levels at which ranks' work stays differ?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from traceml_ray.analysis.chance import least_lateness, usually_alike


def drawn(seed: int, steps: int, ranks: int, stay: int = 1, noise: float = 0.02) -> np.ndarray:
    """Work of ranks (steps, ranks), 40 to 160, drawn anew every `stay` steps, by each rank at its own."""
    random = np.random.default_rng(seed)
    columns = []
    for _ in range(ranks):
        begin = int(random.integers(stay))
        columns.append(np.repeat(random.uniform(40, 160, -(-steps // stay) + 1), stay)[begin : begin + steps])
    return np.stack(columns, axis=1) * np.exp(noise * random.standard_normal((steps, ranks)))


def late(work: np.ndarray, rank: int) -> tuple[np.ndarray, float]:
    """The rank's column, and by how much it is later than the others."""
    column = np.arange(work.shape[1]) == rank
    return column, float(work[-50:, rank].mean() - np.median(work[-50:, ~column].mean(axis=0)))


@pytest.mark.parametrize("stay", [20, 50])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_level_of_work_that_stays_is_no_lateness(stay: int, ranks: int) -> None:
    refused = 0
    for seed in range(40):
        work = drawn(seed, 150, ranks, stay)
        column, lateness = late(work, int(work[-50:].mean(axis=0).argmax()))
        refused += lateness < least_lateness(work, column, lateness, 50)
    assert refused >= 39


@pytest.mark.parametrize(("ranks", "steps"), [(2, 50), (3, 30), (8, 20), (64, 20)])
def test_late_rank_beside_ranks_that_work_alike_is_late(ranks: int, steps: int) -> None:
    work = 100 + 3 * np.random.default_rng(ranks).standard_normal((steps, ranks))
    work[:, 1] += 15
    column, lateness = late(work, 1)
    assert lateness > least_lateness(work, column, lateness, steps)


def test_what_all_ranks_have_in_common_is_no_level() -> None:
    common = np.repeat(np.random.default_rng(1).uniform(40, 160, 20), 20)[:, None]
    for ranks in (2, 3, 8):
        work = common + np.random.default_rng(2).normal(0, 2, (400, ranks))
        work[:, 0] += 25
        column, lateness = late(work, 0)
        assert lateness > least_lateness(work, column, lateness, 50)


def test_work_drawn_anew_in_each_step_has_no_levels() -> None:
    work = drawn(3, 200, 8)
    column, lateness = late(work + 20 * (np.arange(8) == 2), 2)
    assert least_lateness(work, column, lateness, 50) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_were_late_in_turn_before_usually_worked_alike(ranks: int) -> None:
    """Each rank was late for 80 of 180 steps, one after another: what is late now is no level."""
    work = 100 + 2 * np.random.default_rng(ranks).standard_normal((1000, ranks))
    for number, begin in enumerate(range(100, 1000, 180)):
        work[begin : begin + 80, number % ranks] += 40
    work[-60:, 0] += 40
    column, lateness = late(work, 0)
    assert usually_alike(work, column, np.array([lateness]))[0]


@pytest.mark.parametrize("stay", [20, 50])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_whose_work_stays_at_levels_are_not_usually_alike(stay: int, ranks: int) -> None:
    for seed in range(40):
        work = drawn(seed, 1000, ranks, stay)
        column, lateness = late(work, int(work[-50:].mean(axis=0).argmax()))
        assert not usually_alike(work, column, np.array([lateness])).any()


def test_few_steps_do_not_show_what_is_usual() -> None:
    work = np.full((190, 4), 100.0)
    assert not usually_alike(work, np.arange(4) == 1, np.array([50.0])).any()


@given(
    arrays(np.float64, st.tuples(st.integers(1, 60), st.integers(1, 6)), elements=st.floats(0, 1e12)),
    st.integers(0, 5),
    st.floats(1, 1e12),
)
def test_any_work_has_an_answer(work: np.ndarray, rank: int, lateness: float) -> None:
    column = np.arange(work.shape[1]) == rank % work.shape[1]
    assert least_lateness(work, column, lateness, len(work)) >= 0
    assert usually_alike(work, column, np.array([lateness])).shape == (1,)
