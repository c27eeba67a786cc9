"""What the first steps of a run cost: counted by hand, and beside the verdict on a run that is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import QUIET, Played
from sessions import LIMITS, MS, written_summary

from traceml_ray.analysis.step_stats import first_steps
from traceml_ray.reports.files import text_of
from traceml_ray.stages import BACKWARD, DATA, FORWARD, N_STAGES, POST_SYNC, SYNC_WAIT
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of

S = 10**9
USUAL = S // 2


def rows(ranks: int, steps: int = 3, start_s: float = 0.0) -> np.ndarray:
    """Usual steps, ns (K, R, 6), before the first of which a rank needs `start_s` to build its model."""
    d = np.tile(np.array([0.1, 0.1, 0, 0.1, 0.2, 0]) * S, (steps, ranks, 1)).astype(np.int64)
    d[0, :, POST_SYNC] += int(start_s * S)
    return d


def found(d: np.ndarray, run_s: float = 150.0, split: bool = True) -> Any:
    ranks = np.arange(d.shape[1])
    return first_steps(d, np.full(len(ranks), split), ranks, USUAL, run_s * S)


def test_first_step_of_one_rank_is_said_with_its_cost() -> None:
    d = rows(4, start_s=60)
    d[0, :, FORWARD] += 8 * S
    d[0, 3, FORWARD] += 12 * S
    first = found(d)
    assert (first.steps, first.ranks, first.stage) == (1, (3,), "forward")
    assert (first.longest_s, first.others_s) == (pytest.approx(20.4), pytest.approx(8.4))
    assert (first.cost_s, first.cost_pct) == (pytest.approx(19.9), pytest.approx(100 * 19.9 / 150))
    assert first.why == (
        "the first step took 20 s on rank 3, 8.4 s on the others (compilation or warm-up, in `forward`): "
        "20 s more than usual, 13 % of the run"
    )


def test_several_first_steps_and_ranks_that_are_alike() -> None:
    d = rows(4, steps=5)
    d[:3, :, BACKWARD] += 7 * S
    first = found(d)
    assert (first.steps, first.ranks, first.others_s) == (3, (), None)
    assert "the first 3 steps took 22 s (compilation" in first.why
    d[0, :2, DATA] += 30 * S
    first = found(d)
    assert (first.ranks, first.stage) == ((0, 1), "data") and "start of its loader" in first.why


def test_rank_is_not_named_where_its_backward_may_be_waiting() -> None:
    d = rows(4)
    d[0, 1, BACKWARD] += 20 * S
    assert found(d).ranks == (1,)
    assert found(d, split=False).ranks == ()
    d[0, 1, FORWARD] += 60 * S
    assert found(d, run_s=300, split=False).ranks == (1,)


@pytest.mark.parametrize(("seconds", "run_s"), [(0.0, 10.0), (1.5, 10.0), (20.0, 250.0), (20.0, 0.0)])
def test_little_is_not_mentioned(seconds: float, run_s: float) -> None:
    d = rows(2, start_s=120)  # what is before the first step is none
    d[0, 0, FORWARD] += int(seconds * S)
    assert found(d, run_s) is None
    assert found(d[:0], run_s) is None


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 8]), st.integers(1, 9))
def test_cost_is_what_the_longest_rank_of_each_first_step_worked_beyond_usual(
    seed: int, ranks: int, long: int
) -> None:
    rng = np.random.default_rng(seed)
    d = rows(ranks, steps=10)
    d[:long, :, FORWARD:SYNC_WAIT] += rng.integers(S, 9 * S, (long, ranks, 2))
    d[:, :, SYNC_WAIT] = rng.integers(0, 9 * S, (10, ranks))
    first = found(d, run_s=1.0)
    work = d[:, :, :SYNC_WAIT].sum(axis=2)
    work[0] -= d[0, :, POST_SYNC]
    assert first.steps == long
    assert first.cost_s == pytest.approx((work[:long].max(axis=1).sum() - long * USUAL) / S)
    assert first.cost_pct == 100
    assert first.longest_s == pytest.approx(work[:long].sum(axis=0).max() / S)
    assert set(first.ranks) <= {*range(ranks)} and len(first.ranks) <= ranks // 2


class Compiled(Played):
    """In the first step all ranks compile for 3 s, and rank 2 for 6 s more."""

    def rows(self, n: int) -> np.ndarray:
        local = np.tile(np.array(QUIET), (self.world, n, 1)) + self._rng.uniform(
            0, 0.3, (self.world, n, N_STAGES)
        )
        if self.step == 0 and n:
            local[:, 0, FORWARD] += 3e3
            local[2, 0, FORWARD] += 6e3
        busy = local[:, :, :SYNC_WAIT].sum(axis=2)
        local[:, :, SYNC_WAIT] = busy.max(axis=0) - busy + QUIET[SYNC_WAIT]
        return (local * MS).astype("<i8")


def test_summary_of_a_run_that_is_over_says_what_the_first_step_cost(tmp_path: Path) -> None:
    played = Compiled(tmp_path / "s", 4, per_node=2, late=None)
    for _ in range(30):
        played.play(10)
    with SessionFile(played.folder / "session.sqlite") as file:
        assert written_summary(file, LIMITS)["first_steps"] is None  # its share is not known yet
    played.end()
    played.aggregator.close()
    with SessionFile(played.folder / "session.sqlite") as file:
        summary = written_summary(file, LIMITS)
    first = summary["first_steps"]
    assert (first["steps"], first["ranks"], first["stage"]) == (1, [2], "forward")
    assert first["longest_s"] == pytest.approx(9.02, abs=0.01)
    assert first["others_s"] == pytest.approx(3.02, abs=0.01)
    assert first["cost_pct"] == pytest.approx(100 * 9 / (9 + 300 * 0.0209), abs=1)
    assert summary["verdict"]["label"] == "healthy" and first["why"] in summary["verdict"]["note"]
    report = " ".join(text_of(summary_of(summary), tmp_path).split())
    assert "the first step took 9 s on rank 2, 3 s on the others" in report
