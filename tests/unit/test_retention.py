"""A session file stays within its bound: what is oldest becomes sums, and nothing is lost in them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import MS, SECOND, Clock, Rank, Relay, ask, written_summary

from traceml_ray.agent.batch_size import packed
from traceml_ray.analysis.step_history import Reduction, begun
from traceml_ray.analysis.window import RankRows
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.reports.files import text_of, write_reports
from traceml_ray.reports.stored_totals import folded_steps
from traceml_ray.reports.summary import summaries
from traceml_ray.settings import Settings
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.stages import DATA, SEGMENT_BITS
from traceml_ray.store.history_reader import MAX_RANKS, pack, unpack
from traceml_ray.store.retention import Retention
from traceml_ray.store.session_file import Folded, SessionFile
from traceml_ray.store.summary_shape import plain, summary_of
from traceml_ray.wire import messages as wire

LIMITS = Settings().thresholds
LIMIT = 400_000
ROW = [1, 2, 0, 3, 3, 1]
GIB = 1 << 30
PEAK = 9 << 30
ERROR_PCT = 0.1245
"""Of medians, where not all steps are kept one by one."""


class Job:
    """Ranks that report each second, `steps` rows at a time, with a look at process and node."""

    def __init__(self, folder: Path, ranks: int = 4, limit: int = LIMIT) -> None:
        self.folder, self.clock, self.limit = folder, Clock(), limit
        self.ranks = [Rank(number, ranks) for number in range(ranks)]
        self.relay = Relay()
        self.open()

    def open(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.aggregator = AggregatorCore(self.folder, Settings(session_bytes=self.limit), {}, self.clock)

    def run(self, seconds: int, steps: int = 20, late: int | None = None, **more: Any) -> None:
        """`late` is the rank that is 10 ms late out of loading data."""
        waits = None if late is None else [*ROW[:5], ROW[5] + 10]
        for second in range(seconds):
            self.clock.tick()
            process = wire.ProcessSample(self.clock(), 50.0, PEAK if second == 7 else 1 << 30, 9, 0, 0)
            sample = NodeSample(self.clock(), *[None] * 9)
            rows = {late: [ROW[0], ROW[1] + 10, *ROW[2:]]}
            memory = [self.memory(second, device) for device in (0, 1)]
            batches = [
                rank.batch(steps, rows.get(number, waits), process=process, memory=memory, **more)
                for number, rank in enumerate(self.ranks)
            ]
            self.aggregator.ingest(self.relay.message(*batches, node=[sample]))
            assert self.aggregator.commit()

    def memory(self, second: int, device: int) -> MemorySample:
        most, uss = PEAK if second == 7 else GIB, GIB if second % 30 == 4 else None
        return MemorySample(self.clock(), second, device, GIB, peak_bytes=most, uss_bytes=uss)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("session.sqlite"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


def test_session_file_stays_near_its_bound_however_long_the_run(job: Job) -> None:
    job.run(600)
    grown = job.size
    job.run(600)
    assert LIMIT / 2 < grown < 2 * LIMIT
    assert job.size < 1.3 * grown  # what is folded away comes to a twelfth of it
    assert not job.aggregator.errors


def test_spans_and_a_flood_of_events_stay_within_the_bound(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceml_ray.store.retention.EVENTS", 500)
    part = wire.SpanSum("load", DATA, 20, 9, 9, 0, 20)
    for second in range(600):
        events = [wire.Event("note", second, message=f"{second} {n}" + "x" * 100) for n in range(5)]
        job.run(1, 5, spans=[part], events=events)
    assert job.size < 2 * LIMIT
    with SessionFile(job.aggregator.folder.sqlite) as session:
        events, [(details,)] = session.events()[0], session._all("SELECT count(*) FROM span")
    assert 500 <= len(events) < 2500 and events[-1].message.startswith("599 4")
    assert 0 < details < 4 * 300


def test_sums_of_spans_over_64_bits_are_the_largest_number_and_no_error(job: Job) -> None:
    most = (1 << 63) - 1
    part = wire.SpanSum("all_reduce", DATA, most, 9, 9, 0, 20, bytes=most)
    for _ in range(300):
        job.run(1, 5, spans=[part])
    with SessionFile(job.aggregator.folder.sqlite) as session:
        ((folded,),) = session._all("SELECT count(*) FROM span WHERE total_ns > 9")
        sums = {(group["count"], group["bytes"]) for group in session.groups()}
    assert folded and sums == {(most, most)}
    assert not job.aggregator.errors


def test_sizes_of_batches_go_with_the_rows_of_their_steps(job: Job) -> None:
    for second in range(300):
        job.run(1, sizes=packed([(20 * second + index, 4, 1000 * second + index) for index in range(20)]))
    assert job.size < 2 * LIMIT
    with SessionFile(job.aggregator.folder.sqlite) as session:
        (sizes,) = session._all("SELECT min(first_step), max(last_step), count(*) FROM step_sizes")
        rows = session._all("SELECT keys FROM chunk")
    first = min(int.from_bytes(keys[:8], "little") >> SEGMENT_BITS for (keys,) in rows)
    assert sizes[1] == 300 * 20 - 1
    assert sizes[2] < 0.4 * 4 * 300
    assert 0 < sizes[0] <= first + 20 * 30


def test_samples_of_memory_that_are_old_are_thinned_and_the_most_is_kept(job: Job) -> None:
    job.run(400)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        thinned = session.meta()["folded"]["memory_sample"]
        all_samples, _ = session.memory_samples()
        assert [(samples.process, samples.device) for samples in all_samples] == [
            (p, d) for p in range(1, 5) for d in (0, 1)
        ]
        for samples in all_samples:
            query = "SELECT t_ns, peak_bytes, uss_bytes FROM memory_sample WHERE id <= ?"
            query += " AND process = ? AND device = ?"
            old = session._all(query, thinned, samples.process, samples.device)
            seconds = (old[-1][0] - old[0][0]) / SECOND
            assert seconds > 100 and seconds / 10 <= len(old) < seconds / 5
            assert {t // (10 * SECOND) for t, _, _ in old} == {
                *range(old[0][0] // (10 * SECOND), old[-1][0] // (10 * SECOND) + 1)
            }
            assert max(peak for _, peak, _ in old) == PEAK
            assert sum(uss is not None for _, _, uss in old) >= seconds // 30
            assert (np.diff(samples.t_ns[len(old) :]) == SECOND).all()  # the newest are all there


def test_folded_rows_add_up(job: Job) -> None:
    job.run(400)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        assert session._all("SELECT count(*) FROM rollup")[0][0] > 10
        for process, rank in zip(session.processes(), job.ranks, strict=True):
            folded = session._all("SELECT first_row, n, sums FROM rollup WHERE process = ?", process.id)
            whole = session._all("SELECT first_row, n FROM chunk WHERE process = ?", process.id)
            spans = sorted([row[:2] for row in folded] + whole)
            assert all(first + n == other for (first, n), (other, _) in pairwise(spans))
            assert sum(n for _, n in spans) == rank.produced == process.stored
            sums = np.sum([np.frombuffer(row[2], "<i8") for row in folded], axis=0)
            assert (sums == np.array(ROW) * MS * sum(row[1] for row in folded)).all()
        peaks = {peak for peak, _ in session.memory().values()}
        assert peaks == {PEAK}


def test_statistics_and_ledger_include_folded_rows(job: Job) -> None:
    job.run(400)
    ledger = ask(job.aggregator, "ledger")
    assert ledger.stored == ledger.produced == 400 * 20 * 4
    assert 0 < ledger.folded < ledger.stored
    with SessionFile(job.aggregator.folder.sqlite) as session:
        summary = written_summary(session, Settings().thresholds)
    text = text_of(summary_of(summary), job.folder)
    assert f"the oldest {ledger.folded:,} stored rows are kept as sums" in text
    assert "Covers " not in text and "within 0.12 %" in text
    assert list(summary["steps"]["covers"].values()) == [0, 7999, ledger.stored, 100, ERROR_PCT, 100, 100]


@pytest.mark.parametrize("kept", ["DELETE FROM kept", "UPDATE kept SET body = x'789c'"])
def test_report_of_folded_rows_with_only_sums_states_its_limits(job: Job, kept: str) -> None:
    job.run(200)
    job.aggregator.close()
    with contextlib.closing(sqlite3.connect(job.aggregator.folder.sqlite)) as older:
        older.execute(kept)
        older.commit()
        chunks = older.execute("SELECT n, keys FROM chunk").fetchall()
    left = sum(n for n, _ in chunks), min(int.from_bytes(keys[:8], "little") for _, keys in chunks)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        summary, ledger = written_summary(session, Settings().thresholds), session.ledger()
    covers = summary["steps"]["covers"]
    assert covers["to_step"] == 200 * 20 - 1
    assert covers["rows"] == ledger.stored - ledger.folded
    assert (covers["rows"], covers["from_step"]) == (left[0], left[1] >> SEGMENT_BITS)
    assert covers["rows_pct"] == pytest.approx(100 * covers["rows"] / ledger.stored, abs=1e-3)
    assert covers["counted_pct"] == 100
    assert (summary["steps"]["count"], summary["steps"]["mean_ms"]) == (200 * 20, sum(ROW))
    text = " ".join(text_of(summary_of(summary), job.folder).split())
    assert "Covers not the whole run: medians, shares, the verdict and its history are of steps" in text
    assert "; the 4,000 steps and their mean, 10 ms, are of the whole run" in text
    assert f"of steps {covers['from_step']:,}" in text


def job_of(folder: Path, limit: int, closed: bool = False) -> Job:
    """A job with a slow rank at first, and another one later; `closed`: its aggregator was restarted."""
    job = Job(folder, limit=limit)
    job.run(100, late=1, spans=[wire.SpanSum("load", DATA, 20, 200 * MS, 10 * MS, 0, 19)])
    job.run(100)
    if closed:
        job.aggregator.close()
        job.open()
    job.run(40, late=2)
    job.run(60)
    return job


@pytest.fixture(scope="module")
def folded_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("job") / "folded", LIMIT)


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("job") / "whole", 1 << 30)


def report_of(job: Job) -> dict[str, Any]:
    with SessionFile(job.aggregator.folder.sqlite) as session:
        return written_summary(session, Settings().thresholds)


def without_moments(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """They are as exact as the sums of the rows that they are taken from."""
    return [{**episode, "started_at": None, "ended_at": None} for episode in episodes]


def without_machine(block: Any) -> Any:
    """Where rows are folded, samples are thinned: of a time in between there may be too few to know."""
    if isinstance(block, list):
        return [{**episode, "machine": None} if "machine" in episode else episode for episode in block]
    return block


@pytest.mark.parametrize("closed", [False, True])
def test_report_of_folded_rows_equals_that_of_all_rows(
    folded_job: Job, whole_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    monkeypatch.setattr("traceml_ray.reports.stored_totals.PIECE_ROWS", 1000)
    folded = report_of(job_of(tmp_path / "folded", LIMIT, closed) if closed else folded_job)
    whole = report_of(whole_job)
    assert folded["ledger"]["folded"] > 240 * 20 * 4
    for block in ("steps", "stages", "verdict", "verdicts", "suspects", "brief", "baseline", "spans"):
        assert without_machine(folded[block]) == without_machine(whole[block])
    assert without_moments(folded["episodes"]) == without_moments(whole["episodes"])
    assert [(episode["rank"], episode["to_step"]) for episode in folded["episodes"]] == [(1, 1999), (2, 4799)]
    for one, other in zip(folded["episodes"], whole["episodes"], strict=True):
        for name in ("started_at", "ended_at"):
            moments = [datetime.fromisoformat(episode[name]).timestamp() for episode in (one, other)]
            assert abs(moments[0] - moments[1]) < 300 / 40


def test_report_of_folded_rows_is_within_one_percent_of_an_exact_one(folded_job: Job, whole_job: Job) -> None:
    folded, whole = report_of(folded_job), report_of(whole_job)
    assert whole["steps"]["covers"]["error_pct"] == folded["steps"]["covers"]["error_pct"] == ERROR_PCT
    for name in ("count", "mean_ms", "judged"):
        assert folded["steps"][name] == whole["steps"][name]
    for name in ("median_ms", "p95_ms", "busy_median_ms", "busy_p95_ms"):
        assert folded["steps"][name] == pytest.approx(whole["steps"][name], rel=0.01)
    for rank, median in whole["steps"]["per_rank_median_ms"].items():
        assert folded["steps"]["per_rank_median_ms"][rank] == pytest.approx(median, rel=0.01)
    assert folded["verdict"] == whole["verdict"]
    assert without_moments(folded["episodes"]) == without_moments(whole["episodes"])


def test_report_is_of_one_moment_while_rows_are_folded(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run(150)
    before = report_of(job)
    folded = SessionFile.folded

    def while_it_is_read(self: SessionFile) -> dict[int, Folded]:
        monkeypatch.setattr(SessionFile, "folded", folded)
        result = folded(self)
        job.run(100)
        return result

    monkeypatch.setattr(SessionFile, "folded", while_it_is_read)
    assert report_of(job)["steps"] == before["steps"]
    assert report_of(job)["steps"]["count"] == 250 * 20


def test_rows_that_could_not_be_folded_are_folded_later(
    folded_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses in the middle of it."""
    whole = report_of(folded_job)
    thin, refused = Retention._thin, []

    def refuse(self: Retention, share: float) -> dict[str, int]:
        if len(refused) < 20:
            refused.append(share)
            raise sqlite3.OperationalError("disk I/O error")
        return thin(self, share)

    monkeypatch.setattr(Retention, "_thin", refuse)
    job = job_of(tmp_path / "refused", LIMIT)
    assert job.aggregator.errors == {"fold: OperationalError": 20}
    again = report_of(job)
    for block in ("steps", "stages", "verdict", "verdicts", "suspects", "brief", "baseline"):
        assert without_machine(again[block]) == without_machine(whole[block])


def test_rows_are_folded_into_sums_alone_where_statistics_fail(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run(150)

    def fail(*_: object) -> None:
        raise ValueError("of no use")

    with monkeypatch.context() as broken:
        broken.setattr(Reduction, "add", fail)
        job.run(150)
    assert job.aggregator.errors == {"fold: ValueError": 1}
    assert job.size < 2 * LIMIT
    steps = report_of(job)["steps"]
    assert (steps["count"], steps["covers"]["counted_pct"]) == (300 * 20, 100)
    assert 40 < steps["covers"]["rows_pct"] < 60


def test_ranks_that_ended_long_before_others_reported_are_in_the_report(job: Job) -> None:
    """What a rank could not send while it ran may come all at once."""
    job.run(1)
    for rank in job.ranks:
        for _ in range(199):
            job.clock.tick()
            job.aggregator.ingest(job.relay.message(rank.batch(20, ROW)))
            assert job.aggregator.commit()
    summary = report_of(job)
    assert summary["ledger"]["folded"] > 3 * 100 * 20
    steps = summary["steps"]
    assert (steps["count"], steps["judged"], steps["covers"]["rows_pct"]) == (4000, 3989, 100)
    assert set(steps["per_rank_median_ms"]) == {"0", "1", "2", "3"}
    assert summary["verdict"]["coverage"] == 1


def test_statistics_of_folded_rows_are_of_runs_up_to_a_size(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceml_ray.store.retention.MAX_RANKS", 3)
    job.run(200)
    summary = report_of(job)
    assert summary["steps"]["count"] == 200 * 20
    assert summary["steps"]["covers"]["rows_pct"] < 100
    assert not job.aggregator.errors


def rows_of(ranks: range, first: int, last: int, world: int) -> list[RankRows]:
    """Rows of these ranks, of steps of 200 ms."""
    keys = np.arange(first, last) << SEGMENT_BITS
    rows = np.tile(np.array(ROW) * 20 * MS, (last - first, 1))
    flags = np.zeros(len(keys), np.uint8)
    return [RankRows(rank, f"n{rank // 8}", keys, flags, rows, (0, world), None, rank + 1) for rank in ranks]


def test_statistics_of_the_largest_run_can_be_read_again() -> None:
    ranks = range(MAX_RANKS)
    newest = rows_of(ranks, 0, 1, MAX_RANKS)
    run = begun(newest, LIMITS, None)
    run.add(rows_of(ranks, 0, 40, MAX_RANKS), ranks, 0, MAX_RANKS)
    run.add(rows_of(ranks[1:], 40, 300, MAX_RANKS), ranks, 0, MAX_RANKS)  # these wait for rank 0
    again = unpack(pack(run), newest)
    assert again is not None and again.rows == run.rows == 40 * MAX_RANKS + 260 * (MAX_RANKS - 1)
    assert again.history.done == 39 << SEGMENT_BITS
    assert len(again.history.table.keys) == 261
    again.add(rows_of(range(1), 40, 300, MAX_RANKS), ranks, 0, MAX_RANKS)
    stats = again.history.stats()
    assert stats is not None and stats.steps == 300 - LIMITS.warmup_steps


def test_statistics_that_could_not_be_read_again_are_not_written(
    monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    """Its rows are folded into sums alone, and what was kept before is still used."""
    job.run(150)
    before = report_of(job)["steps"]["covers"]
    assert before["rows_pct"] == 100
    monkeypatch.setattr("traceml_ray.store.history_reader._PACKER._most", 1000)
    job.run(150)
    monkeypatch.undo()
    assert job.aggregator.errors == {"fold: ValueError": 1}
    steps = report_of(job)["steps"]
    assert (steps["count"], steps["covers"]["counted_pct"]) == (300 * 20, 100)
    assert 40 < steps["covers"]["rows_pct"] < 70


def test_unreadable_statistics_are_kept_aside(job: Job) -> None:
    job.run(150)
    job.aggregator.close()
    with contextlib.closing(sqlite3.connect(job.aggregator.folder.sqlite)) as other:
        other.execute("UPDATE kept SET body = x'789c'")
        other.commit()
    job.open()
    job.run(100)
    assert job.aggregator.errors == {"fold: ValueError": 1}
    with SessionFile(job.aggregator.folder.sqlite) as session:
        bodies = dict(session._all("SELECT run, body FROM kept ORDER BY id"))
    aside, newest = bodies
    assert (aside.split()[:2], newest) == (["job", "unreadable"], "job")
    assert bodies[aside] == b"\x78\x9c"
    steps = report_of(job)["steps"]
    assert steps["covers"]["counted_pct"] == 100 and 30 < steps["covers"]["rows_pct"] < 70


def test_node_half_a_minute_late_leaves_no_gap() -> None:
    """Its relay is slow; five steps a second."""
    world = 400
    early, late = range(world - 8), range(world - 8, world)
    run = begun(rows_of(range(world), 0, 1, world), LIMITS, None)
    for first in range(0, 400, 50):
        chunk = rows_of(early, first, first + 50, world) if first < 250 else []
        chunk += rows_of(late, first - 150, first - 100, world) if first >= 150 else []
        run.add(chunk, range(world), 0 if first >= 150 else len(late), world)
    stats = run.history.stats()
    assert stats is not None and stats.steps == 250 - LIMITS.warmup_steps
    assert run.history.left_out == 0


@pytest.mark.parametrize("limit", [LIMIT, 1 << 30])
def test_rows_too_late_for_statistics_are_not_counted_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Folded or not: there is a bound to the rows that wait for a rank."""
    monkeypatch.setattr("traceml_ray.analysis.step_history._DEEP_CELLS", 2400)
    monkeypatch.setattr("traceml_ray.reports.stored_totals.PIECE_ROWS", 500)
    job = Job(tmp_path / "job", limit=limit)
    late = []
    for second in range(200):
        job.clock.tick()
        batches = [rank.batch(20, ROW) for rank in job.ranks]
        late.append(batches.pop())
        if not 60 <= second < 120:
            batches, late = batches + late, []
        job.aggregator.ingest(job.relay.message(*batches))
        assert job.aggregator.commit()
    summary = report_of(job)
    assert (summary["ledger"]["folded"] > 0) is (limit == LIMIT)
    steps = summary["steps"]
    assert steps["judged"] < 3800
    assert steps["covers"]["rows"] == 4 * (steps["judged"] + 11)
    assert steps["covers"]["rows_pct"] < 95


def test_processes_of_earlier_attempts_do_not_delay_folding(job: Job) -> None:
    for attempt in range(50):
        job.ranks = [Rank(number, 4, attempt=attempt) for number in range(4)]
        job.run(1, final=attempt < 49)
    job.run(150)
    assert job.size < 2 * LIMIT


def test_rows_read_at_once_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "job", limit=1 << 30)
    job.run(60)
    job.aggregator.close()
    monkeypatch.setattr("traceml_ray.store.retention.SLICE_BYTES", 10_000, raising=False)
    keep, sizes = Retention._keep, []

    def note(self: Retention, by_process: dict[int, list[Any]]) -> None:
        sizes.append(sum(len(chunk.rows) for chunks in by_process.values() for chunk in chunks))
        keep(self, by_process)

    monkeypatch.setattr(Retention, "_keep", note)
    job.limit = 100_000
    job.open()
    job.run(5)
    assert sizes and max(sizes) < 10_000 + 5 * 20 * 48
    assert job.aggregator.errors == {}


def test_next_attempt_is_reported_by_its_own_rows(job: Job) -> None:
    job.run(200, late=1)
    job.ranks = [Rank(number, 4, attempt=1) for number in range(4)]
    job.run(200)
    assert report_of(job)["ledger"]["folded"] > 300 * 20 * 4
    summary = report_of(job)
    assert (summary["steps"]["count"], summary["steps"]["mean_ms"]) == (200 * 20, sum(ROW))
    assert summary["steps"]["covers"]["rows_pct"] == 100
    assert (summary["verdict"]["label"], summary["episodes"]) == ("healthy", [])


def test_sums_of_a_long_run_are_added_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceml_ray.store.retention.SUMS", 60)
    job.run(600)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        sums = session.folded().values()
    assert sum(len(part.counts) for part in sums) <= 60 + 4 * 3
    assert all(len(part.counts) >= 4 for part in sums)
    summary = report_of(job)
    assert (summary["steps"]["count"], summary["steps"]["mean_ms"]) == (600 * 20, sum(ROW))


def test_step_cut_in_two_by_folding_counts_once() -> None:
    keys = np.array([[0, 2], [2, 5], [7, 9], [3, 4], [9, 12]])
    segments = np.array([[0, 1], [2, 0], [0, 0], [0, 0], [1, 0]])
    first, last = (keys << SEGMENT_BITS | segments).T
    counts = np.array([7, 10, 2, 2, 9])
    steps = counts, first >> SEGMENT_BITS, last >> SEGMENT_BITS
    assert folded_steps(*steps, 20) == 3 + 3 + 2 + 3
    assert folded_steps(*steps, 12) == 3 + 3 + 2 + 2


def test_report_of_more_steps_than_are_kept_one_by_one_is_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "job", limit=1 << 30)
    job.run(30, late=1)
    job.run(20)
    summary = {}
    for steps in (1 << 20, 300):
        monkeypatch.setattr("traceml_ray.analysis.step_store._STEPS", steps)
        monkeypatch.setattr("traceml_ray.reports.stored_totals.PIECE_ROWS", steps)
        with SessionFile(job.aggregator.folder.sqlite) as session:
            summary[steps] = written_summary(session, Settings().thresholds)
        text = text_of(summary_of(summary[steps]), job.folder)
        assert "Covers " not in text
        assert ("within 0.12 %" in " ".join(text.split())) is (steps == 300)
    at_once, piecewise = summary.values()
    steps = piecewise["steps"]
    assert list(steps["covers"].values()) == [0, 999, 4000, 100.0, ERROR_PCT, 100.0, 100.0]
    assert (steps["count"], steps["judged"]) == (1000, 989)
    assert piecewise["verdict"]["rank"] == 1 and piecewise["verdict"]["elapsed_s"] > 15
    assert [episode["to_step"] for episode in piecewise["episodes"]] == [599]
    for name in ("median_ms", "p95_ms", "busy_median_ms", "busy_p95_ms"):
        assert steps[name] == pytest.approx(at_once["steps"][name], rel=0.01)
        steps[name] = at_once["steps"][name]
    for rank, median in at_once["steps"]["per_rank_median_ms"].items():
        assert steps["per_rank_median_ms"][rank] == pytest.approx(median, rel=0.01)
    for one, other in zip(piecewise["stages"], at_once["stages"], strict=True):
        assert one["exposed_ms"] == other["exposed_ms"]
        assert one["worst_rank"] == other["worst_rank"]
        assert one["max_ms"] == pytest.approx(other["max_ms"], rel=0.01)
    for block in ("spans", "ledger", "baseline", "brief", "memory", "events"):
        assert piecewise[block] == at_once[block]
    (one,), (other,) = piecewise["episodes"], at_once["episodes"]
    for name in ("started_at", "ended_at"):  # of ten rows at a time
        moments = [datetime.fromisoformat(episode.pop(name)).timestamp() for episode in (one, other)]
        assert abs(moments[0] - moments[1]) <= 0.2
    for block in ("episodes", "verdicts", "verdict"):
        assert piecewise[block] == at_once[block]


def test_live_summary_of_a_long_run_covers_newest_steps_and_the_report_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "job", limit=1 << 30)
    job.run(20)
    monkeypatch.setattr("traceml_ray.reports.stored_totals.MAX_ROWS", 400)
    live = ask(job.aggregator, "summary")["steps"]["covers"]
    with SessionFile(job.aggregator.folder.sqlite) as session:
        made = [plain(summary) for summary in summaries(session, Settings().thresholds)]
        assert write_reports(job.aggregator.folder, session, Settings().thresholds) == summary_of(made[1])
    newest, whole = (summary["steps"]["covers"] for summary in made)
    assert list(newest.values()) == [300, 399, 400, 25.0, 0.0, 25.0, 100.0]
    assert live == newest
    assert list(whole.values()) == [0, 399, 1600, 100.0, 0.0, 100.0, 100.0]
    assert json.loads(job.aggregator.folder.summary_json.read_text())["steps"]["covers"] == whole


def test_folding_goes_on_after_a_restart(job: Job) -> None:
    job.run(300)
    before = ask(job.aggregator, "ledger").folded
    job.aggregator.close()
    job.open()
    job.run(100)
    ledger = ask(job.aggregator, "ledger")
    assert ledger.folded > before
    assert ledger.stored == ledger.produced == 400 * 20 * 4
    with SessionFile(job.aggregator.folder.sqlite) as session:
        kept = [sample.t_ns for _, sample in session.node_samples(["node-0"], 1 << 20)]
    assert kept == sorted(set(kept))
    assert sum(t // SECOND % 10 == 0 for t in kept) == 40


def test_session_within_its_bound_is_not_folded(job: Job) -> None:
    job.run(20)
    with SessionFile(job.aggregator.folder.sqlite) as session:
        assert session.ledger().folded == 0
        assert session._all("SELECT count(*) FROM rollup") == [(0,)]
