"""The baseline in a session's file: kept over restarts, given by another session, shown in the report."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from sessions import LIMITS, Clock, Rank, Relay, aggregation
from snapshot import Snapshot

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.ray import config
from traceml_ray.reports.baseline import checked
from traceml_ray.reports.summary import summarize
from traceml_ray.reports.text import render
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store.session_file import SessionFile

BALANCED = [1.0, 2, 0, 3, 4, 1]
SLOW = [1.0, 6, 0, 3, 4, 1]


def feed(aggregator: AggregatorCore, relay: Relay, ranks: list[Rank], steps: int, ms: list[float]) -> None:
    for _ in range(0, steps, 10):
        aggregator.ingest(relay.message(*(rank.batch(10, ms) for rank in ranks)))
        aggregator.judge()
    aggregator.commit()


def label(aggregator: AggregatorCore) -> str | None:
    return aggregator.verdict.label if aggregator.verdict else None


def kept(aggregator: AggregatorCore) -> dict[str, object]:
    with SessionFile(aggregator.folder.sqlite) as session:
        found: dict[str, object] = session.meta().get("baselines", {})
        return found


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A session of two ranks, 400 steps, in `tmp_path/good`."""
    aggregator = aggregation(tmp_path / "good")
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, BALANCED)
    return tmp_path / "good"


def judged_by(folder: Path, baseline: str | None, out: Path) -> AggregatorCore:
    folder.mkdir(parents=True, exist_ok=True)
    return AggregatorCore(folder, Settings(baseline=baseline, out=str(out), thresholds=LIMITS), {}, Clock())


def test_a_restarted_aggregator_goes_on_with_what_was_learned(tmp_path: Path) -> None:
    clock, relay, ranks = Clock(), Relay(), [Rank(0), Rank(1)]
    aggregator = aggregation(tmp_path, clock)
    feed(aggregator, relay, ranks, 350, BALANCED)
    learned = kept(aggregator)
    assert learned["job"]["from_step"] < learned["job"]["to_step"] < 350  # type: ignore[index]
    restarted = aggregation(tmp_path, clock)
    feed(restarted, relay, ranks, 60, SLOW)
    assert label(restarted) == "group_wide"
    assert kept(restarted) == learned


def test_a_new_attempt_is_judged_by_the_one_before(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, BALANCED)
    feed(aggregator, Relay(0, "again"), [Rank(0, attempt=1), Rank(1, attempt=1)], 60, SLOW)
    assert label(aggregator) == "group_wide"
    assert kept(aggregator)["job"]["source"] == "attempt 0"  # type: ignore[index]


@pytest.mark.parametrize("by", ["name", "path", "file"])
def test_a_session_is_judged_by_the_one_that_is_given(tmp_path: Path, good: Path, by: str) -> None:
    named = {"name": "good", "path": str(good), "file": str(good / "session.sqlite")}[by]
    aggregator = judged_by(tmp_path / "now", named, tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 70, SLOW)
    assert aggregator.verdict is not None
    assert (aggregator.verdict.label, aggregator.verdict.stage) == ("group_wide", "data")
    assert "(session good)" in aggregator.verdict.why


def test_the_report_says_what_it_was_measured_from(tmp_path: Path, good: Path, snapshot: Snapshot) -> None:
    aggregator = judged_by(tmp_path / "now", good.name, tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 100, SLOW)
    with SessionFile(tmp_path / "now" / "session.sqlite") as session:
        summary = summarize(session, LIMITS)
    assert (summary["verdict"]["label"], summary["verdict"]["chronic"]) == ("group_wide", True)
    assert summary["baseline"]["source"] == "session good"
    assert summary["baseline"]["stages"][1] == {"name": "data", "exposed_ms": 2.0, "mad_ms": 0.0}
    snapshot("report", render(summary, Path("<folder>")))


def test_a_report_of_a_drift_agrees_with_what_was_said_live(tmp_path: Path) -> None:
    aggregator, relay, ranks = aggregation(tmp_path), Relay(), [Rank(0), Rank(1)]
    feed(aggregator, relay, ranks, 400, BALANCED)
    feed(aggregator, relay, ranks, 400, SLOW)
    with SessionFile(tmp_path / "session.sqlite") as session:
        live = [(told["label"], told["from_step"]) for told in session.verdicts()[0]]
        summary = summarize(session, LIMITS)
    spans = [(span["label"], span["from_step"], span["to_step"]) for span in summary["verdicts"]]
    assert spans == [("healthy", 11, 399), ("group_wide", 400, 799)]
    assert live[-1] == ("group_wide", 400)
    assert (summary["verdict"]["label"], summary["verdict"]["from_step"]) == ("group_wide", 400)
    assert "of this run: 11 ms a step" in render(summary, tmp_path)


def test_no_line_about_a_baseline_where_nothing_is_measured_from_it(good: Path) -> None:
    with SessionFile(good / "session.sqlite") as session:
        summary = summarize(session, LIMITS)
    assert summary["baseline"]["steps"] == 250
    assert "Baseline" not in render(summary, good)


class TestChecked:
    def test_a_good_one_becomes_a_path(self, tmp_path: Path, good: Path) -> None:
        assert checked(Settings(baseline="good", out=str(tmp_path))).baseline == str(good)
        assert checked(Settings()) == Settings()

    def test_one_that_is_not_there(self, tmp_path: Path, good: Path) -> None:
        message = f"baseline='godo': no session 'godo' under {tmp_path}; sessions there: good"
        with pytest.raises(SettingError, match=message):
            checked(Settings(baseline="godo", out=str(tmp_path)))

    def test_it_is_checked_when_a_driver_starts_a_session(self, tmp_path: Path, good: Path) -> None:
        made = config.configure(Settings(baseline=good.name, out=str(tmp_path)))
        assert made.settings.baseline == str(good)
        with pytest.raises(SettingError, match="no session 'godo'"):
            config.configure(Settings(baseline="godo", out=str(tmp_path)))

    def test_one_of_too_few_steps(self, tmp_path: Path) -> None:
        feed(aggregation(tmp_path / "short"), Relay(), [Rank(0), Rank(1)], 100, BALANCED)
        with pytest.raises(SettingError, match=r"too few healthy steps to be a baseline.*about 310 steps"):
            checked(Settings(baseline="short", out=str(tmp_path)))

    def test_one_that_is_no_session(self, tmp_path: Path) -> None:
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "session.sqlite").write_bytes(b"no database" * 100)
        with pytest.raises(SettingError, match=r"baseline='bad': .*session.sqlite"):
            checked(Settings(baseline="bad", out=str(tmp_path)))

    def test_the_name_of_the_session_that_is_to_begin(self, tmp_path: Path, good: Path) -> None:
        with pytest.raises(SettingError, match="choose another name for this one"):
            checked(Settings(session="good", baseline="good", out=str(tmp_path)))

    def test_a_session_given_by_another_is_known_by_its_own_steps(self, tmp_path: Path, good: Path) -> None:
        aggregator = judged_by(tmp_path / "now", good.name, tmp_path)
        feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, SLOW)
        third = judged_by(tmp_path / "third", "now", tmp_path)
        feed(third, Relay(), [Rank(0), Rank(1)], 70, SLOW)
        assert label(third) == "healthy"


def test_one_that_cannot_be_read_is_counted_and_nothing_else(tmp_path: Path) -> None:
    aggregator = judged_by(tmp_path / "now", "gone", tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, BALANCED)
    assert label(aggregator) == "healthy"
    assert aggregator.errors == {"baseline: SettingError": 1}
    assert aggregator.commit()
    with SessionFile(aggregator.folder.sqlite) as session:
        (told,) = [event["message"] for event in session.events()[0] if event["kind"] == "swallowed"]
    assert "baseline='gone': no session 'gone' under" in told
    assert msgspec.convert(kept(aggregator)["job"], dict)["source"] == ""
