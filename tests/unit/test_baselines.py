"""The baseline in a session's file: kept over restarts, given by another session, shown in the report."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from sessions import LIMITS, Clock, Rank, Relay, aggregation, written_summary
from snapshot import Snapshot

from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.ray import actors
from traceml_ray.reports.baseline import checked
from traceml_ray.reports.files import text_of
from traceml_ray.settings import SettingError, Settings
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of

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
        baselines: dict[str, object] = session.meta().get("baselines", {})
        return baselines


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A session of two ranks, 400 steps, in `tmp_path/good`."""
    aggregator = aggregation(tmp_path / "good")
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, BALANCED)
    return tmp_path / "good"


def judged_by(folder: Path, baseline: str | None, out: Path) -> AggregatorCore:
    folder.mkdir(parents=True, exist_ok=True)
    return AggregatorCore(folder, Settings(baseline=baseline, out=str(out), thresholds=LIMITS), {}, Clock())


def test_restarted_aggregator_continues_with_the_learned_baseline(tmp_path: Path) -> None:
    clock, relay, ranks = Clock(), Relay(), [Rank(0), Rank(1)]
    aggregator = aggregation(tmp_path, clock)
    feed(aggregator, relay, ranks, 350, BALANCED)
    learned = kept(aggregator)
    assert learned["job"]["from_step"] < learned["job"]["to_step"] < 350  # type: ignore[index]
    restarted = aggregation(tmp_path, clock)
    feed(restarted, relay, ranks, 60, SLOW)
    assert label(restarted) == "group_wide"
    assert kept(restarted) == learned


def test_new_attempt_is_judged_by_the_baseline_of_the_one_before(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, BALANCED)
    feed(aggregator, Relay(0, "again"), [Rank(0, attempt=1), Rank(1, attempt=1)], 60, SLOW)
    assert label(aggregator) == "group_wide"
    assert kept(aggregator)["job"]["source"] == "attempt 0"  # type: ignore[index]


@pytest.mark.parametrize("by", ["name", "path", "file"])
def test_session_is_judged_by_the_given_baseline_session(tmp_path: Path, good: Path, by: str) -> None:
    named = {"name": "good", "path": str(good), "file": str(good / "session.sqlite")}[by]
    aggregator = judged_by(tmp_path / "now", named, tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 70, SLOW)
    assert aggregator.verdict is not None
    assert (aggregator.verdict.label, aggregator.verdict.stage) == ("group_wide", "data")
    assert "(session good)" in aggregator.verdict.why


def test_report_names_its_baseline(tmp_path: Path, good: Path, snapshot: Snapshot) -> None:
    aggregator = judged_by(tmp_path / "now", good.name, tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 100, SLOW)
    with SessionFile(tmp_path / "now" / "session.sqlite") as session:
        summary = written_summary(session, LIMITS)
    assert (summary["verdict"]["label"], summary["verdict"]["chronic"]) == ("group_wide", True)
    assert summary["baseline"]["source"] == "session good"
    assert summary["baseline"]["stages"][1] == {"name": "data", "exposed_ms": 2.0, "mad_ms": 0.0}
    snapshot("report", text_of(summary_of(summary), Path("<folder>")))


def test_report_of_a_drift_agrees_with_the_live_verdicts(tmp_path: Path) -> None:
    aggregator, relay, ranks = aggregation(tmp_path), Relay(), [Rank(0), Rank(1)]
    feed(aggregator, relay, ranks, 400, BALANCED)
    feed(aggregator, relay, ranks, 400, SLOW)
    with SessionFile(tmp_path / "session.sqlite") as session:
        live = [(verdict["label"], verdict["from_step"]) for verdict in session.verdicts()[0]]
        summary = written_summary(session, LIMITS)
    spans = [(span["label"], span["from_step"], span["to_step"]) for span in summary["verdicts"]]
    assert spans == [("healthy", 11, 399), ("group_wide", 400, 799)]
    assert live[-1] == ("group_wide", 400)
    assert (summary["verdict"]["label"], summary["verdict"]["from_step"]) == ("group_wide", 400)
    assert "of this run: 11 ms a step" in text_of(summary_of(summary), tmp_path)


def test_report_has_no_baseline_line_where_none_is_used(good: Path) -> None:
    with SessionFile(good / "session.sqlite") as session:
        summary = written_summary(session, LIMITS)
    assert summary["baseline"]["steps"] == 250
    assert "Baseline" not in text_of(summary_of(summary), good)


class TestChecked:
    def test_baseline_session_becomes_a_path(self, tmp_path: Path, good: Path) -> None:
        assert checked(Settings(baseline="good", out=str(tmp_path))).baseline == str(good)
        assert checked(Settings()) == Settings()

    def test_missing_baseline_session_is_refused_with_a_list_of_those_there(
        self, tmp_path: Path, good: Path
    ) -> None:
        message = f"baseline='godo': no session 'godo' under {tmp_path}; sessions there: good"
        with pytest.raises(SettingError, match=message):
            checked(Settings(baseline="godo", out=str(tmp_path)))

    def test_baseline_is_checked_when_a_driver_starts_a_session(self, tmp_path: Path, good: Path) -> None:
        made = actors.configure(Settings(baseline=good.name, out=str(tmp_path)))
        assert made.settings.baseline == str(good)
        with pytest.raises(SettingError, match="no session 'godo'"):
            actors.configure(Settings(baseline="godo", out=str(tmp_path)))

    def test_baseline_session_of_too_few_steps_is_refused(self, tmp_path: Path) -> None:
        feed(aggregation(tmp_path / "short"), Relay(), [Rank(0), Rank(1)], 100, BALANCED)
        with pytest.raises(SettingError, match=r"too few healthy steps to be a baseline.*about 310 steps"):
            checked(Settings(baseline="short", out=str(tmp_path)))

    def test_baseline_that_is_no_session_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "session.sqlite").write_bytes(b"no database" * 100)
        with pytest.raises(SettingError, match=r"baseline='bad': .*session.sqlite"):
            checked(Settings(baseline="bad", out=str(tmp_path)))

    def test_baseline_named_like_the_new_session_is_refused(self, tmp_path: Path, good: Path) -> None:
        with pytest.raises(SettingError, match="choose another name for the new session"):
            checked(Settings(session="good", baseline="good", out=str(tmp_path)))

    def test_session_with_a_given_baseline_is_a_baseline_by_its_own_steps(
        self, tmp_path: Path, good: Path
    ) -> None:
        aggregator = judged_by(tmp_path / "now", good.name, tmp_path)
        feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, SLOW)
        third = judged_by(tmp_path / "third", "now", tmp_path)
        feed(third, Relay(), [Rank(0), Rank(1)], 70, SLOW)
        assert label(third) == "healthy"


def test_unreadable_baseline_is_counted_and_changes_nothing_else(tmp_path: Path) -> None:
    aggregator = judged_by(tmp_path / "now", "gone", tmp_path)
    feed(aggregator, Relay(), [Rank(0), Rank(1)], 400, BALANCED)
    assert label(aggregator) == "healthy"
    assert aggregator.errors == {"baseline: SettingError": 1}
    assert aggregator.commit()
    with SessionFile(aggregator.folder.sqlite) as session:
        (message,) = [event.message for event in session.events()[0] if event.kind == "swallowed"]
    assert "baseline='gone': no session 'gone' under" in message
    assert msgspec.convert(kept(aggregator)["job"], dict)["source"] == ""
