"""A session file stays within its bound: what is oldest becomes sums, and nothing is lost in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import MS, SECOND, Clock, Rank, Relay, ask

from traceml_ray import wire
from traceml_ray.actors.aggregation import Aggregation
from traceml_ray.reports.summary import summarize
from traceml_ray.reports.text import render
from traceml_ray.settings import Settings
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import DATA

LIMIT = 400_000
ROW = [1, 2, 0, 3, 3, 1]
PEAK = 9 << 30


class Job:
    """Ranks that report each second, `steps` rows at a time, with a look at process and node."""

    def __init__(self, folder: Path, ranks: int = 4) -> None:
        self.folder, self.clock = folder, Clock()
        self.ranks = [Rank(number, ranks) for number in range(ranks)]
        self.relay = Relay()
        self.open()

    def open(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.aggregator = Aggregation(self.folder, Settings(session_bytes=LIMIT), {}, self.clock)

    def run(self, seconds: int, steps: int = 20, **more: Any) -> None:
        for second in range(seconds):
            self.clock.tick()
            process = wire.ProcessSample(self.clock(), 50.0, PEAK if second == 7 else 1 << 30, 9, 0, 0)
            sample = wire.NodeSample(self.clock(), *[None] * 9)
            batches = [rank.batch(steps, process=process, **more) for rank in self.ranks]
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
    assert "Covers     not the whole run: " in text
    assert f"of steps {covers['from_step']}" in " ".join(text.split())


def test_report_of_more_rows_than_are_read_says_what_it_covers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.reports.summary._MAX_ROWS", 400)
    for seconds, covers in ((5, (0, 99, 400, 100.0)), (5, (100, 199, 400, 50.0))):
        job.run(seconds)
        with SessionFile(job.aggregator.folder.sqlite) as session:
            summary = summarize(session, Settings().thresholds)
        assert tuple(summary["steps"]["covers"].values()) == covers
        assert ("Covers " in render(summary, job.folder)) is (covers[-1] < 100)


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
