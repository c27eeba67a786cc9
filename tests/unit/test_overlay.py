"""Up to eight runs over each other: table, lines over steps and time, what their scripts have logged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from played import Played, played_to_end

from traceml_ray.analysis.thresholds import COMPARE
from traceml_ray.cli import main
from traceml_ray.reports import overlay
from traceml_ray.settings import Settings
from traceml_ray.signals.logged.records import LoggedValues


class Logging(Played):
    """Each rank logs a loss that falls."""

    def of_rank(self, rank: int) -> dict[str, object]:
        first, last, loss = self.step, self.step + 9, 4.0 / (1 + self.step)
        return {"logged": [LoggedValues("loss", first, last, 10, loss, loss, last=loss)]}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    played_to_end(out / "good", gpus=1, kind=Logging)
    played_to_end(out / "late", gpus=1, kind=Logging, late=2, late_ms=6.0, seed=2)
    played_to_end(out / "short", gpus=1, seconds=4, seed=3)
    return out


@pytest.fixture(scope="module")
def runs(out: Path) -> list[overlay.OverlaidRun]:
    names = ["good", "late", "short"]
    return overlay.stored_runs(overlay.ask_run, names, [None] * 3, Settings.load(out=str(out)))


def test_each_run_is_a_row_compared_with_the_first(runs: list[overlay.OverlaidRun]) -> None:
    good, late, short = overlay.table_of([run.known for run in runs]).runs
    assert [row.name for row in (good, late, short)] == ["A", "B", "C"]
    assert [row.session for row in (good, late, short)] == ["good", "late", "short"]
    assert good.verdict == "healthy" and "rank 2" in (late.verdict or "")
    assert (good.word, late.word, short.word) == (None, "worse", None)
    assert late.change_pct == pytest.approx(28.6, abs=2)
    assert late.stages_ms["data"] - good.stages_ms["data"] == pytest.approx(6.0, abs=0.5)
    assert late.step_ms == pytest.approx(sum(late.stages_ms.values()))
    assert good.steps_per_s == pytest.approx(1e3 / (good.step_ms or 1))
    assert good.host_bytes == 1400 << 20 and good.device_bytes == 40 << 30


def test_lines_are_over_steps_and_over_the_time_since_the_first_step(
    runs: list[overlay.OverlaidRun],
) -> None:
    step_ms, loss = overlay.charts(runs)
    assert [line.name for line in step_ms.lines["step"]] == ["A: good", "B: late", "C: short"]
    assert {len({line.colour for line in step_ms.lines[axis]}) for axis in overlay.X_AXES} == {3}
    assert len({(line.dash, line.colour) for line in step_ms.lines["step"]}) == 3
    good, _, short = step_ms.lines["time"]
    took_s = 1e-3 * float(np.sum(runs[0].columns.step_ms[1:]))  # type: ignore[union-attr]
    assert good.x[-1] == pytest.approx(took_s, rel=0.05) and short.x[-1] < 0.6 * good.x[-1]
    assert step_ms.lines["step"][2].x[-1] == 39
    assert [line.name for line in loss.lines["step"]] == ["A: good", "B: late"], "C has logged nothing"
    assert (loss.label, loss.unit) == ("loss", "")
    assert loss.lines["step"][0].values[0] == 4.0 and loss.lines["step"][0].values[-1] == 4 / 71


def test_run_whose_times_are_not_known_is_drawn_over_steps_only(runs: list[overlay.OverlaidRun]) -> None:
    unknown = [runs[0], runs[1]._replace(clock=None)]
    step_ms, *_ = overlay.charts(unknown)
    assert len(step_ms.lines["step"]) == 2
    assert [line.name for line in step_ms.lines["time"]] == ["A: good"]


def test_more_than_eight_runs_are_refused_with_what_to_do(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *["good"] * 10, "--sessions", str(out)]) == 2
    printed = capsys.readouterr().err
    assert "10 sessions: at most 8 are compared at once. Leave out 2, or compare them in groups" in printed


def test_command_prints_a_table_data_or_a_page(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = ["compare", "good", "late", "short", "--sessions", str(out)]
    assert main(three) == 0
    shown = capsys.readouterr().out
    assert re.search(r"B +26\.\d ms +26\.\d ms +\+28\.\d % worse", shown), shown
    assert "B: worse by" in shown and "C has 29, 30 are needed" in shown
    assert main([*three, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == overlay.SCHEMA
    assert [row["session"] for row in data["runs"]] == ["good", "late", "short"]
    assert [one["word"] for one in data["comparisons"]] == ["worse", None]
    page = tmp_path / "runs.html"
    assert main([*three, "--html", str(page)]) == 0
    drawn = page.read_text()
    assert drawn.count('type="radio"') == 4, "step time and loss, each over steps or time"
    assert "stroke-dasharray" in drawn and "B: late" in drawn
    assert main([*three, "--fail-on-regression", "10%"]) == 3
    same, gate = ["compare", "good", "good", "good"], ["--sessions", str(out), "--fail-on-regression", "10%"]
    assert main([*same, *gate]) == 0
    assert main([*same, "short", *gate]) == 1, "too short to be compared"
    assert main(["compare", "good", "late", "--sessions", str(out), "--html", str(page)]) == 0
    assert "A: good" in page.read_text()


def test_page_of_eight_runs_has_as_many_styles(runs: list[overlay.OverlaidRun]) -> None:
    eight = [*runs, *runs, *runs][:8]
    drawn = overlay.charts(eight)[0].lines["step"]
    assert len({line.colour for line in drawn}) == 8 and len({line.dash for line in drawn}) == 4
    assert (
        overlay.as_page(eight, overlay.table_of([run.known for run in eight], COMPARE)).count(b"<tr>")
        == 2 * 9
    )
