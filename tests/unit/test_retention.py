"""A session file stays within its bound: what is oldest becomes sums, and nothing is lost in them."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import MS, SECOND, Clock, Rank, Relay, ask

from traceml_ray import wire
from traceml_ray.actors.aggregation import Aggregation
from traceml_ray.reports.files import write_reports
from traceml_ray.reports.summary import summaries, summarize
from traceml_ray.reports.text import render
from traceml_ray.reports.whole import _folded_steps
from traceml_ray.settings import Settings
from traceml_ray.store.session_file import Folded, SessionFile
from traceml_ray.wire import DATA

LIMIT = 400_000
ROW = [1, 2, 0, 3, 3, 1]
PEAK = 9 << 30


class Job:
    """Ranks that report each second, `steps` rows at a time, with a look at process and node."""

    def __init__(self, folder: Path, ranks: int = 4, limit: int = LIMIT) -> None:
        self.folder, self.clock, self.limit = folder, Clock(), limit
        self.ranks = [Rank(number, ranks) for number in range(ranks)]
        self.relay = Relay()
        self.open()

    def open(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.aggregator = Aggregation(self.folder, Settings(session_bytes=self.limit), {}, self.clock)

    def run(self, seconds: int, steps: int = 20, late: int | None = None, **more: Any) -> None:
        """`late` is the rank that is 10 ms late out of loading data."""
        waits = None if late is None else [*ROW[:5], ROW[5] + 10]
        for second in range(seconds):
            self.clock.tick()
            process = wire.ProcessSample(self.clock(), 50.0, PEAK if second == 7 else 1 << 30, 9, 0, 0)
            sample = wire.NodeSample(self.clock(), *[None] * 9)
            rows = {late: [ROW[0], ROW[1] + 10, *ROW[2:]]}
            batches = [
                rank.batch(steps, rows.get(number, waits), process=process, **more)
                for number, rank in enumerate(self.ranks)
            ]
            self.aggregator.ingest(self.relay.message(*batches, sample=sample))
            assert self.aggregator.commit()

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("session.sqlite"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


def test_the_file_stays_near_its_bound_however_long_it_runs(job: Job) -> None:
    job.run(600)
    grown = job.size
    job.run(600)
    assert LIMIT / 2 < grown < 2 * LIMIT
    assert job.size < 1.2 * grown  # what is folded away comes to a twelfth of it
    assert not job.aggregator.errors


def test_named_parts_and_a_flood_of_events_stay_within_it_too(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.store.retention.EVENTS", 500)
    part = wire.Detail("load", DATA, 20, 9, 9, 0, 20)
    for second in range(600):
        told = [wire.Event("note", second, message=f"{second} {n}" + "x" * 100) for n in range(5)]
        job.run(1, 5, details=[part], events=told)
    assert job.size < 2 * LIMIT
    with SessionFile(job.aggregator.folder.sqlite) as session:
        events, [(details,)] = session.events()[0], session._all("SELECT count(*) FROM detail")
    assert 500 <= len(events) < 1000 and events[-1]["message"].startswith("599 4")
    assert 0 < details < 4 * 300


def test_what_is_folded_adds_up(job: Job) -> None:
    job.run(400)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        assert session._all("SELECT count(*) FROM rollup")[0][0] > 10
        for stream, rank in zip(session.streams(), job.ranks, strict=True):
            folded = session._all(
                "SELECT first_row, n, sums, max_ns FROM rollup WHERE stream_id = ?", stream.id
            )
            whole = session._all("SELECT first_row, n FROM chunk WHERE stream_id = ?", stream.id)
            spans = sorted([each[:2] for each in folded] + whole)
            assert all(first + n == other for (first, n), (other, _) in pairwise(spans))
            assert sum(n for _, n in spans) == rank.produced == stream.stored
            sums = np.sum([np.frombuffer(each[2], "<i8") for each in folded], axis=0)
            assert (sums == np.array(ROW) * MS * sum(each[1] for each in folded)).all()
            assert {each[3] for each in folded} == {sum(ROW) * MS}
        peaks = {peak for peak, _ in session.memory().values()}
        assert peaks == {PEAK}


def test_statistics_and_ledger_go_on_and_say_so(job: Job) -> None:
    job.run(400)
    ledger = ask(job.aggregator, "ledger")
    assert ledger["stored"] == ledger["produced"] == 400 * 20 * 4
    assert 0 < ledger["folded"] < ledger["stored"]
    with SessionFile(job.aggregator.folder.sqlite) as session:
        summary = summarize(session, Settings().thresholds)
    assert summary["steps"]["median_ms"] == pytest.approx(sum(ROW))
    text = render(summary, job.folder)
    assert f"the oldest {ledger['folded']} stored rows are kept as sums" in text
    covers = summary["steps"]["covers"]
    assert covers["to_step"] == 400 * 20 - 1
    assert covers["rows"] == ledger["stored"] - ledger["folded"] == 4 * (400 * 20 - covers["from_step"])
    assert covers["rows_pct"] == pytest.approx(100 * covers["rows"] / ledger["stored"], abs=1e-3)
    assert covers["counted_pct"] == 100
    assert (summary["steps"]["count"], summary["steps"]["mean_ms"]) == (400 * 20, sum(ROW))
    text = " ".join(text.split())
    assert "Covers not the whole run: medians, shares, the verdict and its history are of steps" in text
    assert "; the 8000 steps and their mean, 10.00 ms, are of the whole run" in text
    assert f"of steps {covers['from_step']}" in text


@pytest.mark.parametrize("pieces", [1 << 20, 4000])
def test_number_and_mean_of_steps_are_of_those_that_were_folded_too(
    job: Job, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr("traceml_ray.reports.whole.MAX_ROWS", pieces)
    monkeypatch.setattr("traceml_ray.reports.whole.PIECE_ROWS", 1000)
    job.run(200, late=1)
    job.run(200)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        summary = summarize(session, Settings().thresholds)
    assert summary["ledger"]["folded"] > 200 * 20 * 4
    assert (summary["steps"]["count"], summary["steps"]["mean_ms"]) == (400 * 20, 15)
    assert summary["steps"]["median_ms"] == pytest.approx(10, rel=0.01)


def test_a_step_that_is_cut_in_two_by_folding_counts_once() -> None:
    keys = np.array([[0, 2], [2, 5], [7, 9], [3, 4], [9, 12]])
    segments = np.array([[0, 1], [2, 0], [0, 0], [0, 0], [1, 0]])
    first, last = (keys << wire.SEGMENT_BITS | segments).T
    counts = np.array([7, 10, 2, 2, 9])
    folded = Folded(counts, first, last, np.zeros((5, 6), np.int64))
    assert _folded_steps(folded, 20) == 3 + 3 + 2 + 3
    assert _folded_steps(folded, 12) == 3 + 3 + 2 + 2


def test_report_of_more_rows_than_fit_into_memory_is_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "job", limit=1 << 30)
    job.run(30, late=1)
    job.run(20)
    summary = {}
    for rows in (1 << 20, 400):
        monkeypatch.setattr("traceml_ray.reports.whole.MAX_ROWS", rows)
        monkeypatch.setattr("traceml_ray.reports.whole.PIECE_ROWS", rows)
        with SessionFile(job.aggregator.folder.sqlite) as session:
            summary[rows] = summarize(session, Settings().thresholds)
        text = render(summary[rows], job.folder)
        assert "Covers " not in text
        assert ("within 1 %" in " ".join(text.split())) is (rows == 400)
    at_once, piecewise = summary.values()
    steps = piecewise["steps"]
    assert list(steps["covers"].values()) == [0, 999, 4000, 100.0, 1.0, 100.0]
    assert (steps["count"], steps["judged"]) == (1000, 989)
    assert piecewise["verdict"]["rank"] == 1 and piecewise["verdict"]["elapsed_s"] > 15
    assert [each["to_step"] for each in piecewise["episodes"]] == [599]
    for name in ("median_ms", "p95_ms", "busy_median_ms", "busy_p95_ms"):
        assert steps[name] == pytest.approx(at_once["steps"][name], rel=0.01)
        steps[name] = at_once["steps"][name]
    for rank, median in at_once["steps"]["per_rank_median_ms"].items():
        assert steps["per_rank_median_ms"][rank] == pytest.approx(median, rel=0.01)
    for one, other in zip(piecewise["stages"], at_once["stages"], strict=True):
        assert one["exposed_ms"] == other["exposed_ms"]
        assert one["worst_rank"] == other["worst_rank"]
        assert one["max_ms"] == pytest.approx(other["max_ms"], rel=0.01)
    for block in ("parts", "ledger", "baseline", "brief", "memory", "events"):
        assert piecewise[block] == at_once[block]
    (one,), (other,) = piecewise["episodes"], at_once["episodes"]
    for name in ("started_at", "ended_at"):  # of ten rows at a time
        moments = [datetime.fromisoformat(each.pop(name)).timestamp() for each in (one, other)]
        assert abs(moments[0] - moments[1]) <= 0.2
    for block in ("episodes", "verdicts", "verdict"):
        assert piecewise[block] == at_once[block]


def test_reports_and_live_summary_of_a_long_run_are_first_of_its_newest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "job", limit=1 << 30)
    job.run(20)
    monkeypatch.setattr("traceml_ray.reports.whole.MAX_ROWS", 400)
    live = ask(job.aggregator, "summary")["steps"]["covers"]
    with SessionFile(job.aggregator.folder.sqlite) as session:
        newest, whole = [each["steps"]["covers"] for each in summaries(session, Settings().thresholds)]
        assert (
            write_reports(job.aggregator.folder, session, Settings().thresholds)["steps"]["covers"] == whole
        )
    assert list(newest.values()) == [300, 399, 400, 25.0, 0.0, 25.0]
    assert live == newest
    assert list(whole.values()) == [0, 399, 1600, 100.0, 1.0, 100.0]
    assert json.loads(job.aggregator.folder.summary_json.read_text())["steps"]["covers"] == whole


def test_it_goes_on_where_it_was_after_a_restart(job: Job) -> None:
    job.run(300)
    before = ask(job.aggregator, "ledger")["folded"]
    job.aggregator.close()
    job.open()
    job.run(100)
    ledger = ask(job.aggregator, "ledger")
    assert ledger["folded"] > before
    assert ledger["stored"] == ledger["produced"] == 400 * 20 * 4
    with SessionFile(job.aggregator.folder.sqlite) as session:
        kept = [sample["t_ns"] for sample in session.node_samples()[0]]
    assert kept == sorted(set(kept))
    assert sum(t // SECOND % 10 == 0 for t in kept) == 40


def test_a_session_within_its_bound_is_left_as_it_is(job: Job) -> None:
    job.run(20)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        assert session.ledger()["folded"] == 0
        assert not session._all("SELECT 1 FROM sqlite_master WHERE name = 'rollup'")
