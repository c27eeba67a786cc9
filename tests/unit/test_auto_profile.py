"""Which verdicts have a run profiled without being asked, how often, and beside whom."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from traceml_ray.analysis.roles import median_rank
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import Window
from traceml_ray.monitor.captures import Wanted
from traceml_ray.monitor.profiling import AutoProfile
from traceml_ray.settings import Settings

LATE = Verdict(
    label="straggler", rank=5, ranks=(5,), stage="data", chronic=True, from_step=10, mean_step_ms=100.0
)


class Run:
    """A run that is judged, on a played clock."""

    def __init__(self, **settings: Any) -> None:
        self.now = 100.0
        self.auto = AutoProfile(Settings(**settings), lambda: self.now)

    def check(self, verdict: Verdict | None, run: str = "run", **changes: Any) -> Wanted | None:
        if verdict is not None:
            verdict = msgspec.structs.replace(verdict, **changes)
        return self.auto.check(run, verdict, lambda _: 2)


def test_lasting_straggler_is_profiled_beside_the_median() -> None:
    profile = Run().check(LATE)
    assert profile is not None and profile.by_itself
    assert (profile.request.ranks, profile.request.steps, profile.request.run) == ("2,5", 3, "run")
    assert (profile.suspect, profile.median, profile.stage) == (5, 2, "data")
    assert profile.why == "rank 5 is late in data in most steps; rank 2 is the median of the others."


@pytest.mark.parametrize(
    "changes",
    [{"chronic": False}, {"chronic": None}, {"label": "healthy", "rank": None, "ranks": ()},
     {"label": "rank_lost"}, {"label": "rotating", "rank": None, "ranks": ()}],
)  # fmt: skip
def test_what_does_not_last_or_names_nobody_is_not_profiled(changes: dict[str, Any]) -> None:
    assert Run().check(LATE, **changes) is None and Run().check(None) is None


@pytest.mark.parametrize(("step_ms", "steps"), [(1.0, 3), (4000.0, 2), (9000.0, 1), (11_000.0, 0), (None, 0)])
def test_long_steps_are_profiled_fewer_at_a_time(step_ms: float | None, steps: int) -> None:
    profile = Run().check(LATE, mean_step_ms=step_ms)
    assert (profile.request.steps if profile else 0) == steps


def test_drift_of_all_ranks_is_profiled_on_the_median() -> None:
    profile = Run().check(LATE, label="group_wide", rank=None, ranks=())
    assert profile is not None and profile.request.ranks == "2" and profile.suspect is None


def test_the_same_verdict_is_profiled_once_and_others_after_a_pause() -> None:
    run = Run()
    assert run.check(LATE) is not None and run.check(LATE) is None
    run.now += 29 * 60
    assert run.check(LATE, rank=6, ranks=(6,)) is None
    assert run.check(LATE, run="another") is not None
    run.now += 61
    assert run.check(LATE) is None
    assert run.check(LATE, rank=6, ranks=(6,)) is not None


def test_a_run_is_profiled_three_times_at_most() -> None:
    run, profiles = Run(), 0
    for rank in range(10, 20):
        run.now += 3600
        profiles += run.check(LATE, rank=rank, ranks=(rank,)) is not None
    assert profiles == 3
    assert Run(auto_profile=0).check(LATE) is None


def _window(spent: list[list[int]]) -> Window:
    """Return a window of one step: ns in each stage of each rank."""
    ranks, flags = np.arange(len(spent)), np.zeros((1, len(spent)), np.uint8)
    d = np.array([spent], np.int64)
    return Window(np.zeros(1, np.int64), ranks, ("a",) * len(spent), d, flags, len(spent))


def test_median_rank_is_of_the_stage_and_not_a_suspect() -> None:
    window = _window([[0, n, 9 - n, 0, 0, 0] for n in (1, 5, 3, 2, 8)])
    assert median_rank(window, (4,), "data") == 3
    assert median_rank(window, (0, 1, 2, 3, 4), "data") is None
