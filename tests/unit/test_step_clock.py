"""When steps were over, as axes of steps say it."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest

from traceml_ray import text
from traceml_ray.analysis.shapes import RunTimeline
from traceml_ray.document.model import Column
from traceml_ray.document.step_clock import StepClock, tick_steps
from traceml_ray.document.timezone import clocks, name, timezone_of
from traceml_ray.views import figures

BEGAN = datetime(2026, 11, 27, 23, 50, tzinfo=timezone.utc)
"""In UTC; in Berlin it is 0:50 of the next day."""


def timeline(columns: int = 60, every: int = 10, step_s: float = 2.0, **fields: Any) -> RunTimeline:
    """Steps 0, 1, …; `every` in each column, a step takes `step_s`."""
    first = np.arange(columns) * every
    last = first + every - 1
    t_ns = int(BEGAN.timestamp()) * 10**9 + np.int64(1e9 * step_s) * (last + 1)
    made = {"first": first, "last": last, "step_ms": np.full(columns, 1e3 * step_s), "t_ns": t_ns}
    return RunTimeline(**{**made, **fields})


def clock_of(**fields: Any) -> StepClock:
    clock = StepClock.of(timeline(**fields))
    assert clock is not None
    return clock


def test_step_has_the_time_at_which_it_was_over() -> None:
    clock = clock_of()
    assert clock.span == (0, 599)
    with timezone_of("UTC"):
        assert clock.texts([0, 4, 9]) == ["23:50:02", "23:50:10", "23:50:20"]


def test_step_whose_time_is_not_known_has_none() -> None:
    assert clock_of().times([-1, 600]) == [None, None]
    assert clock_of().texts([600]) == [""]
    assert StepClock.of(timeline(t_ns=None)) is None
    assert StepClock.of(None) is None


def test_first_column_of_unknown_length_begins_with_its_last_step() -> None:
    clock = clock_of(step_ms=np.full(60, np.nan))
    assert clock.times([8, 9]) == [None, int(clock.t_ns[0])]


def test_date_is_said_where_midnight_of_the_reader_is_between() -> None:
    clock = clock_of()
    with timezone_of("UTC"):
        assert clock.texts([9, 599]) == ["27 Nov 23:50:20", "28 Nov 00:10:00"]
    with timezone_of("Europe/Berlin"):
        assert (clock.texts([9, 599]), name()) == (["00:50:20", "01:10:00"], "Europe/Berlin")


def test_times_that_are_hours_apart_are_written_without_seconds() -> None:
    with timezone_of("Europe/Berlin"):
        long = clock_of(step_s=60.0)
        assert long.texts([9, 599], brief=True) == ["01:00", "10:50"]
        assert clocks([None, 0]) == ["", "01:00:00"]


@pytest.mark.parametrize(
    ("last", "least", "ticks"), [(300, 60.2, [0, 100, 200, 300]), (6, 1.2, [0, 2, 4, 6])]
)
def test_ticks_are_where_plotly_has_them(last: int, least: float, ticks: list[int]) -> None:
    assert [*tick_steps(0, last, least)] == ticks


def test_axis_of_steps_has_the_time_under_each_tick() -> None:
    frame = figures.frame_of(clock_of(), (-0.5, 599.5))
    with timezone_of("Europe/Berlin"):
        drawn = figures.lines([5, 15], {"a": [1.0, 2.0]}, "ms", frame=frame)
    axis = drawn["layout"]["xaxis"]
    assert axis["labelalias"]["200"] == "200<br>00:56:42"
    assert [*axis["labelalias"]] == ["0", "200", "400"]
    assert axis["title"]["text"].startswith("step, time (CE")
    assert [trace["name"] for trace in drawn["data"]] == ["a"]  # the page says the time under the mouse


def test_figure_that_stands_alone_says_the_time_under_the_mouse_and_where_it_is_zoomed() -> None:
    frame = figures.frame_of(clock_of(), alone=True)
    with timezone_of("UTC"):
        drawn = figures.lines([5, 15], {"a": [1.0, 2.0]}, "ms", frame=frame)
    assert drawn["data"][-1]["text"] == ["23:50:12", "23:50:32"]
    assert drawn["layout"]["xaxis"]["labelalias"]["7"] == "7<br>27 Nov 23:50:16"


def test_axis_of_a_run_without_times_says_steps_only() -> None:
    drawn = figures.lines([5, 15], {"a": [1.0, 2.0]}, "ms", frame=figures.frame_of(None, (0, 20)))
    assert drawn["layout"]["xaxis"]["title"]["text"] == "step"
    assert "labelalias" not in drawn["layout"]["xaxis"]


def test_text_writes_moments_in_the_timezone_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = "2026-11-27T23:50:02.5+00:00"
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert (text.date(moment), text.clock(moment)) == ("2026-11-28 00:50:02", "00:50:02")
        assert text.dated(moment) == text.with_dates(moment) == "2026-11-28 00:50:02 CET"
        assert Column("began", str, "date").head() == f"began ({text.zone()})" != "began (UTC)"
        with timezone_of("UTC"):
            assert text.dated(moment) == "2026-11-27 23:50:02 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_is_no_moment_is_written_as_it_is() -> None:
    assert text.dated("2026-99-27T23:50:02+00:00") == "2026-99-27 23:50:02 UTC"
    assert text.date("no moment") == "no moment"
