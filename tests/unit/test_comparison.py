"""Two sessions compared: what is worse, by how much, where; and what is not said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played import Played, played_to_end
from sessions import LIMITS, MS
from snapshot import Snapshot

from traceml_ray.analysis import comparison
from traceml_ray.analysis.comparison import MemorySeries, compare_memory
from traceml_ray.cli import main
from traceml_ray.reports.answers import Answers
from traceml_ray.reports.comparison import (
    Comparison,
    ask_side,
    compare,
    compared,
    regressed,
    render_comparison,
    to_json,
)
from traceml_ray.stages import DATA
from traceml_ray.store.session import SessionError

RAMP = np.linspace(0, 4, 500)
STEP_MS = 21.0
"""About what a step takes in `Played`."""


class Slower(Played):
    """All ranks take `more_ms` longer in data."""

    more_ms = 0.15 * STEP_MS

    def rows(self, n: int) -> np.ndarray:
        rows = super().rows(n)
        rows[:, :, DATA] += int(self.more_ms * MS)
        return rows


class Busier(Played):
    """All that ranks do takes longer by a fifth, as beside other work."""

    def rows(self, n: int) -> np.ndarray:
        return (super().rows(n) * 1.2).astype("<i8")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    played_to_end(out / "good")
    played_to_end(out / "again", seed=1)
    played_to_end(out / "late", late=2, late_ms=0.15 * STEP_MS, seed=2)
    played_to_end(out / "slow", kind=Slower, seed=3)
    played_to_end(out / "busy", kind=Busier, seed=5)
    played_to_end(out / "busy-late", kind=Busier, late=2, late_ms=0.15 * STEP_MS / 1.2, seed=6)
    played_to_end(out / "large", 6, seed=4)
    played_to_end(out / "short", seconds=4)
    played_to_end(out / "device", device=True)
    return out


def of(comparison: Comparison, what: str) -> Any:
    return next(change for change in comparison.changes if change.what == what)


def test_equal_runs_are_no_different(out: Path) -> None:
    comparison = compare("good", "again", out=out)
    assert (comparison.word, comparison.stage, comparison.ranks) == ("no difference", None, [])
    assert {change.word for change in comparison.changes} <= {"no difference", None}
    assert abs(comparison.change_pct or 0) < 1 and (comparison.low_pct or 0) < 0 < (comparison.high_pct or 0)


@pytest.mark.parametrize(("name", "ranks"), [("late", {2}), ("slow", {0, 1, 2, 3})])
def test_regression_is_measured_and_placed(out: Path, name: str, ranks: set[int]) -> None:
    comparison = compare("good", name, out=out)
    assert (comparison.word, comparison.stage) == ("worse", "data")
    assert comparison.change_pct == pytest.approx(15, abs=1.5)
    assert (comparison.low_pct or 0) < (comparison.change_pct or 0) < (comparison.high_pct or 0)
    assert {rank_change.rank for rank_change in comparison.ranks} == ranks
    assert of(comparison, "data").change == pytest.approx(3.1, abs=0.3)
    assert {of(comparison, stage).word for stage in ("forward", "sync_wait")} == {"no difference"}
    assert regressed(comparison, 5) and not regressed(comparison, 30)
    assert ("rank 2 (host-0)" if name == "late" else "all 4 ranks") in comparison.headline
    assert "took 1.00× as long" in comparison.where or "took 0.99× as long" in comparison.where
    back = compare(name, "good", out=out)
    assert (back.word, back.stage, {rank_change.rank for rank_change in back.ranks}) == (
        "better",
        "data",
        ranks,
    )


def test_what_a_busy_machine_does_to_all_stages_is_no_stage_of_a_regression(out: Path) -> None:
    comparison = compare("good", "busy", out=out)
    assert (comparison.word, comparison.stage, comparison.ranks) == ("worse", None, [])
    assert comparison.change_pct == pytest.approx(20, abs=1)
    assert "No single stage explains it: all work of the ranks took 1.20× as long" in comparison.where
    late = compare("good", "busy-late", out=out)  # of what is longer, that is told apart
    assert (late.word, late.stage, [rank_change.rank for rank_change in late.ranks]) == ("worse", "data", [2])
    assert late.change_pct == pytest.approx(15, abs=1.5)
    assert of(late, "step").change_pct > 30 and "the ranks' other work took 1.20× as long" in late.where


def test_comparison_is_the_same_each_time_and_all_of_it_is_data(out: Path) -> None:
    texts = [to_json(compare("good", "late", out=out)) for _ in range(2)]
    assert texts[0] == texts[1]
    document = json.loads(texts[0])
    assert document["schema"] == "traceml_ray/comparison/1"
    assert document["a"]["session"] == "good" and document["b"]["verdict"].startswith("straggler: rank 2")


def test_jobs_of_different_sizes_are_compared_as_far_as_they_can_be(out: Path) -> None:
    comparison = compare("good", "large", out=out)
    assert comparison.word == "no difference" and comparison.ranks == []
    assert "rank by rank: A has ranks 0-3, B ranks 0-5" in comparison.cannot
    assert any("1.50× the work" in note for note in comparison.notes)


def test_too_few_steps_are_said_to_be_too_few(out: Path) -> None:
    comparison = compare("good", "short", out=out)
    assert (comparison.word, comparison.change_pct) == (None, None) and not regressed(comparison, 1)
    assert "B has 29, 30 are needed" in comparison.headline
    assert of(comparison, "throughput").b > 0


def test_stages_of_a_device_are_not_compared_with_those_of_a_host(out: Path) -> None:
    comparison = compare("good", "device", out=out)
    assert comparison.word == "no difference" and of(comparison, "data").word is None
    assert any("B has its stages by the device's clock" in reason for reason in comparison.cannot)


def test_session_without_a_device_has_its_memory_compared(out: Path) -> None:
    comparison = compare("good", "again", out=out)
    assert "memory of devices: neither session used a device" in comparison.cannot
    assert of(comparison, "host memory").a == 1400 << 20


def test_memory_is_that_of_the_rank_that_has_most() -> None:
    rng = np.random.default_rng(0)
    a, b = (
        [
            MemorySeries(rank=rank, samples=1e9 * level + rng.normal(0, 1e6, 60))
            for rank, level in enumerate(sizes)
        ]
        for sizes in ((1.0, 2.0), (2.4, 2.0))
    )
    compared_memory = compare_memory("host memory", a, b)
    assert (compared_memory.word, compared_memory.rank_a, compared_memory.rank_b) == ("worse", 1, 0)
    assert compared_memory.change_pct == pytest.approx(20, abs=0.2)
    assert compare_memory("host memory", a, a).word == "no difference"
    assert "not measured in B" in compare_memory("host memory", a, []).why
    few = [MemorySeries(rank=0, samples=np.ones(5))]
    assert "only 5 samples" in compare_memory("host memory", few, b).why


def _series(memory: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """An autoregressive series (n,) of mean 0."""
    series = rng.normal(size=n + 200)
    for index in range(1, len(series)):
        series[index] += memory * series[index - 1]
    return series[200:]


def test_blocks_are_as_long_as_steps_remember_each_other() -> None:
    rng = np.random.default_rng(1)
    lengths = [
        np.mean([comparison.block_length(_series(memory, 400, rng)) for _ in range(20)])
        for memory in (0.0, 0.5, 0.9)
    ]
    assert lengths[0] < 4 < lengths[1] < lengths[2]
    spike = np.r_[np.zeros(200), 1e6, np.zeros(200)] + rng.normal(size=401)
    assert comparison.block_length(spike) < 5
    assert comparison.block_length(np.ones(100)) == comparison.block_length(np.ones(2)) == 1


@pytest.mark.parametrize("memory", [0.0, 0.6, 0.8])
def test_interval_holds_the_mean_of_correlated_steps_about_as_often_as_it_says(memory: float) -> None:
    """Steps drawn one by one hold it in 60 % of the cases at 0.8."""
    rng, n, inside = np.random.default_rng(2), 250, 0
    for _ in range(150):
        series = _series(memory, n, rng)
        block = comparison.block_length(series)
        half = comparison.student(n / block, 0.975) * comparison.error_of_means(series[:, None], block)[0]
        inside += abs(series.mean()) <= half
    assert inside / 150 > 0.87


def test_replicates_scatter_as_the_error_of_the_mean_says() -> None:
    series = _series(0.7, 300, np.random.default_rng(3))
    block = comparison.block_length(series)
    starts = comparison.starts_of_blocks(300, block, 2000)
    drawn = comparison.means(series[:, None], block, starts)
    scatter = drawn.replicates.std() * comparison.few_blocks(300 / block)
    assert scatter == pytest.approx(comparison.error_of_means(series[:, None], block)[0], rel=0.07)
    assert drawn.values[0] == pytest.approx(series.mean())
    tails = comparison.quantiles_of(series, (0.5, 0.95), block, starts)
    assert np.all(tails.replicates[:, 0] < tails.replicates[:, 1])


def test_run_that_drifts_may_differ_by_as_much_from_the_next() -> None:
    noise = np.random.default_rng(4).normal(20, 1, 500)
    still, rises = (
        float(comparison.drift(np.array([values[part].mean() for part in comparison.parts_of(500)])))
        for values in (noise, noise + RAMP)
    )
    assert still < 0.3 and rises == pytest.approx(np.std(RAMP), rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("good", "late"), 0),
        (("good", "late", "--fail-on-regression", "5%"), 3),
        (("good", "late", "--fail-on-regression", "30%"), 0),
        (("good", "again", "--fail-on-regression", "1"), 0),
        (("good", "short", "--fail-on-regression", "5%"), 1),
        (("good", "gone"), 2),
    ],
)
def test_exit_code_says_whether_there_is_a_regression(
    out: Path, arguments: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments, "--out", str(out)]) == code
    output = capsys.readouterr()
    assert len(output.err.splitlines()) == (code in (1, 2)) and bool(output.out) == (code != 2)


@pytest.mark.parametrize("given", ["x", "-1", "0", "nan", "1e9"])
def test_gate_is_a_percentage(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "a", "b", f"--fail-on-regression={given}"])
    assert "is not a percentage" in capsys.readouterr().err


def test_text_of_a_comparison(out: Path, snapshot: Snapshot) -> None:
    snapshot("comparison", render_comparison(compare("good", "late", out=out)))


def test_run_that_goes_on_is_compared_as_it_is_now(out: Path, tmp_path: Path) -> None:
    job = Played(tmp_path / "live", 4, late=2, late_ms=0.15 * STEP_MS, onset=0, gpus=0, seed=2)
    for _ in range(8):
        job.play(10)
    stored, live = ask_side(Answers(out / "good", LIMITS).reply), ask_side(job.aggregator.query)
    comparison = compared(stored, live)
    assert (comparison.word, comparison.stage, [rank_change.rank for rank_change in comparison.ranks]) == (
        "worse",
        "data",
        [2],
    )
    assert "B still runs: its steps so far are compared." in comparison.notes
    job.aggregator.close()


def test_missing_session_is_named(out: Path) -> None:
    with pytest.raises(SessionError, match="no session 'gone'"):
        compare("gone", out=out)
