"""Several runs in one session: told, judged, ended and summed up each by itself; restarts with their cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import (
    LIMITS,
    Clock,
    Rank,
    Relay,
    aggregation,
    ask,
    check_ledger,
    confirmed,
    run_message,
    written_summary,
)
from snapshot import Snapshot

from traceml_ray.live_session import Session
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.finish import OTHERS_S
from traceml_ray.reports.files import text_of, write_reports
from traceml_ray.reports.status import render_status
from traceml_ray.reports.summary import summarize
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.store import query
from traceml_ray.store.query import QueryError
from traceml_ray.store.session import SessionFolder
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

BALANCED = [1, 2, 0, 3, 4, 1]
WAITING = [1, 2, 0, 3, 4, 5]
LATE = [1, 6, 0, 3, 4, 1]


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Fit:
    """A run of some ranks whose rows go to `aggregator`, ten steps a second."""

    def __init__(self, aggregator: AggregatorCore, run: str, world: int = 2, attempt: int = 0) -> None:
        self.aggregator, self.run = aggregator, run
        self.relay = Relay(0, f"{run}-{attempt}-{world}")
        who = {"job_id": run, "attempt": attempt, "source": "ray_train"}
        self.ranks = [Rank(rank, world, **who) for rank in range(world)]

    def step(self, late: int | None = None, **fields: Any) -> None:
        rows = [
            BALANCED if late is None else LATE if rank == late else WAITING for rank in range(len(self.ranks))
        ]
        batches = [rank.batch(10, ms, **fields) for rank, ms in zip(self.ranks, rows, strict=True)]
        self.aggregator.ingest(self.relay.message(*batches))

    def end(self) -> None:
        self.aggregator.ingest(self.relay.message(*(rank.batch(0, final=True) for rank in self.ranks)))


def _second(aggregator: AggregatorCore, clock: Clock) -> None:
    clock.tick()
    assert aggregator.commit()
    aggregator.judge()


def _summary(folder: Path, run: str | None = None) -> dict[str, Any]:
    with SessionFile(folder / "session.sqlite") as session:
        summary: dict[str, Any] = written_summary(session, LIMITS, run)
        return summary


def _text(folder: Path, run: str) -> str:
    with SessionFile(folder / "session.sqlite") as session:
        return text_of(summarize(session, LIMITS, run), folder)


# -- what is told of a run -----------------------------------------------------------------------


def test_run_ends_when_none_of_its_ranks_may_still_deliver(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    fit = Fit(aggregator, "a")
    assert run_message(aggregator, "a", info={"name": "first fit", "world_size": 2}) == wire.Finished(
        codec.VERSION, "noted"
    )
    for _ in range(5):
        fit.step()
        _second(aggregator, clock)
    assert run_message(aggregator, "a", status="finished").waiting == 2
    assert not (tmp_path / "summary.json").exists()
    aggregator.ingest(
        fit.relay.message(fit.ranks[0].batch(0, final=True), fit.ranks[1].batch(0, produced=57, final=True))
    )
    assert run_message(aggregator, "a", status="finished").waiting == 1  # 7 rows of rank 1 are on their way
    clock.tick(OTHERS_S)
    assert run_message(aggregator, "a", status="finished") == wire.Finished(
        codec.VERSION, "written", waiting=1
    )
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    (run,) = summary["runs"]
    assert (run["id"], run["name"], run["status"], run["label"]) == ("a", "first fit", "finished", "healthy")
    assert summary["session"]["status"] == "running"
    assert check_ledger(tmp_path)["dropped"]["relay"] == 7
    assert "run first fit: finished" in (tmp_path / "report.txt").read_text()


def test_run_ended_twice_is_unchanged(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    fit = Fit(aggregator, "a")
    fit.step()
    fit.end()
    event = wire.Event("note", 5, message="the controller says")
    for _ in range(3):
        assert run_message(aggregator, "a", status="failed", events=[event]).waiting == 0
        clock.tick(10)
    summary = _summary(tmp_path)
    assert [event["message"] for event in summary["events"]] == ["the controller says"]
    assert summary["runs"][0]["ended_at"] == summary["runs"][0]["started_at"]
    aggregator.close()
    restarted = aggregation(tmp_path, clock)
    assert run_message(restarted, "a", status="failed", events=[event]).waiting == 0
    assert len(_summary(tmp_path)["events"]) == 1


def test_run_that_is_over_leaves_the_others_alone(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    fits = [Fit(aggregator, "a"), Fit(aggregator, "b")]
    for _ in range(5):
        for fit in fits:
            fit.step(spans=[wire.SpanSum("checkpoint", 0, 1, 5, 5, 0, 0)])
        _second(aggregator, clock)
    for fit in fits:
        aggregator.ingest(fit.relay.message(fit.ranks[0].batch(0, produced=60)))
    assert run_message(aggregator, "a", status="failed").pending
    clock.tick(OTHERS_S)
    assert run_message(aggregator, "a", status="failed").ok
    ledgers = {run.id: run.ledger for run in ask(aggregator, "runs")}
    assert (ledgers["a"].dropped.relay, ledgers["a"].in_flight) == (10, 0)
    assert (ledgers["b"].dropped.relay, ledgers["b"].in_flight) == (0, 10)
    with aggregator.stored() as file:
        assert [span["count"] for span in file.for_run("a").spans()] == [5, 5]
    for fit in fits:
        fit.step(late=1)  # as for `a`, too late
    _second(aggregator, clock)
    kept = [len(aggregator._steps.rows_of(process.id, 1)[0]) for process in ask(aggregator, "processes")]
    assert kept == [0, 0, 1, 1]
    assert aggregator.commit()
    assert check_ledger(tmp_path)["stored"] == 240


def test_run_records_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceml_ray.store.rank_processes.MAX_RUNS", 4)
    aggregator = aggregation(tmp_path)
    for run in range(8):
        assert run_message(
            aggregator, f"run-{run}", info={"name": "x" * 10_000}, status="finished" if run else None
        ).ok
    with aggregator.stored() as file:
        runs = file.meta()["runs"]
    assert list(runs) == ["run-0", "run-5", "run-6", "run-7"]  # run-0 goes on
    assert len(runs["run-0"]["name"]) == 500


def test_undecodable_run_message_is_answered(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    finished = codec.decode(aggregator.end(b"\xc1"), wire.Finished)
    assert not finished.ok
    assert aggregator.errors == {"end: garbage": 1}


# -- runs do not mix -----------------------------------------------------------------------------


def test_newest_run_with_rows_is_shown_unless_another_is_requested(
    tmp_path: Path, clock: Clock, snapshot: Snapshot
) -> None:
    aggregator = aggregation(tmp_path / "s", clock)
    first = Fit(aggregator, "a", 4)
    for _ in range(12):
        first.step(late=3)
        _second(aggregator, clock)
    first.end()
    run_message(aggregator, "a", info={"name": "tune", "world_size": 4}, status="finished")
    second = Fit(aggregator, "b", 2)
    assert ask(aggregator, "summary")["run"] == "a"
    for _ in range(12):
        second.step(strategy="ddp")
        _second(aggregator, clock)
    third = Fit(aggregator, "c", 8)
    aggregator.ingest(third.relay.message(third.ranks[0].batch(0)))  # no rows yet
    _second(aggregator, clock)
    summary = ask(aggregator, "summary")
    assert (summary["run"], summary["verdict"]["label"], summary["session"]["world_size"]) == (
        "b",
        "healthy",
        2,
    )
    assert list(summary["ranks"]) == list(summary["ledger"]["per_rank"]) == ["0", "1"]
    assert summary["ledger"]["stored"] == 720
    assert [(run["id"], run["label"], run["ledger"]["stored"]) for run in summary["runs"]] == [
        ("a", "straggler", 480), ("b", "healthy", 240), ("c", None, 0),
    ]  # fmt: skip
    older = ask(aggregator, "summary", run="a")
    assert (older["run"], older["verdict"]["rank"], older["steps"]["count"]) == ("a", 3, 120)
    assert {span["label"] for span in older["verdicts"]} == {"straggler"}
    assert ask(aggregator, "verdict")["label"] == ask(aggregator, "status").verdict == "healthy"
    assert ask(aggregator, "verdict", run="a")["ranks"] == [3]
    with pytest.raises(QueryError, match="no run 'x'"):
        ask(aggregator, "verdict", run="x")
    assert len(ask(aggregator, "ranks", run="a")) == 4
    assert [verdict.label for verdict in ask(aggregator, "verdicts", run="a")] == ["straggler"]
    assert [verdict.label for verdict in ask(aggregator, "verdicts")] == ["healthy"]
    assert [run.id for run in ask(aggregator, "runs")] == ["a", "b", "c"]
    with aggregator.stored() as file:
        snapshot("report", text_of(summarize(file, LIMITS), Path("<folder>")))
    assert "healthy" in render_status(aggregator.query, tmp_path, None, clock())


def test_deaths_and_events_are_those_of_the_run(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    first, second = Fit(aggregator, "a"), Fit(aggregator, "b")
    for _ in range(5):
        first.step()
        second.step()
        _second(aggregator, clock)
    error = wire.Event("exception", clock(), message="ValueError: bad label")
    aggregator.ingest(first.relay.message(first.ranks[1].batch(0, final=True, events=[error])))
    _second(aggregator, clock)
    assert ask(aggregator, "verdict", run="a")["label"] == "rank_lost"
    assert ask(aggregator, "verdict", run="b")["label"] == "healthy"
    summary = _summary(tmp_path, "b")
    assert (summary["verdict"]["label"], summary["events"]) == ("healthy", [])
    assert _summary(tmp_path, "a")["verdict"]["exit_reason"] == "ValueError: bad label"
    assert [event.rank for event in ask(aggregator, "events", run="a")] == [1]
    assert ask(aggregator, "events", run="b") == []


def test_concurrent_runs_are_judged_as_each_would_be_alone(tmp_path: Path, clock: Clock) -> None:
    """Same ranks, same times; one has a late rank, one restarts in between."""
    aggregator = aggregation(tmp_path / "both", clock)
    alone = aggregation(tmp_path / "alone", clock)
    late, both, single = Fit(aggregator, "a", 4), Fit(aggregator, "b", 4), Fit(alone, "a", 4)
    for second in range(16):
        if second == 8:
            both = Fit(aggregator, "b", 4, attempt=1)
        for fit in (late, single):
            fit.step(late=2 if second >= 4 else None)
        both.step()
        _second(aggregator, clock)
        alone.commit()
        alone.judge()
    assert ask(aggregator, "verdict", run="a") == ask(alone, "verdict")
    assert ask(aggregator, "verdict", run="a")["ranks"] == [2]
    assert ask(aggregator, "verdict", run="b")["label"] == "healthy"
    changes = [ask(who, "verdicts", run="a") for who in (aggregator, alone)]
    assert changes[0] == changes[1] != []
    assert not aggregator.errors


def test_judging_of_every_live_run_continues_after_an_aggregator_restart(
    tmp_path: Path, clock: Clock
) -> None:
    aggregator = aggregation(tmp_path, clock)
    fits = [Fit(aggregator, "a", 3), Fit(aggregator, "b", 3)]
    for _ in range(10):
        for late, fit in enumerate(fits):
            fit.step(late=late)
        _second(aggregator, clock)
    aggregator.close()
    restarted = aggregation(tmp_path, clock)
    restarted.judge()
    assert [ask(restarted, "verdict", run=run)["ranks"] for run in "ab"] == [[0], [1]]


def test_summary_of_a_torchrun_job_keeps_what_the_launcher_reported(tmp_path: Path, clock: Clock) -> None:
    """One run, called as the session: what the launcher said of it holds."""
    aggregator = aggregation(tmp_path / "job", clock, world_size=2, nnodes=1)
    fit = Fit(aggregator, "job")
    for _ in range(5):
        fit.step()
        _second(aggregator, clock)
    fit.end()
    other = Rank(0, 1, job_id="notebook")
    aggregator.ingest(Relay(0, "x").message(other.batch(0)))
    failure = wire.RankFailure(1, 1, 4242, 1, 5, "ImportError: x")  # a process that never reported
    aggregator.finish(wire.Finish(codec.VERSION, 1, [failure]))
    summary = json.loads((tmp_path / "job" / "summary.json").read_bytes())
    assert (summary["run"], summary["session"]["nnodes"], summary["session"]["world_size"]) == ("job", 1, 2)
    assert summary["verdict"]["exit_reason"] == "ImportError: x"
    assert _summary(tmp_path / "job", "notebook")["verdict"]["label"] == "telemetry_limited"
    assert "run job" in (tmp_path / "job" / "report.txt").read_text()


# -- restarts ------------------------------------------------------------------------------------


def test_restart_is_an_event_with_its_cost(tmp_path: Path, clock: Clock, snapshot: Snapshot) -> None:
    aggregator = aggregation(tmp_path, clock)
    first, other = Fit(aggregator, "a", 4), Fit(aggregator, "b", 2)
    for _ in range(3):
        first.step()
        other.step()
        _second(aggregator, clock)
    clock.tick(11)
    aggregator.ingest(first.relay.message(first.ranks[0].batch(0)))  # a sign of life, but no steps
    second = Fit(aggregator, "a", 3, attempt=1)
    aggregator.ingest(second.relay.message(second.ranks[0].batch(0)))
    clock.tick(5)
    for _ in range(2):
        second.step()
        first.step()  # what a relay still held of the attempt before
        other.step()
        _second(aggregator, clock)
    (event,) = _summary(tmp_path, "a")["events"]
    assert (event["kind"], event["rank"]) == ("restart", None)
    assert event["data"] == {"attempt": 1, "seconds": 17.0, "world_size_before": 4, "world_size_after": 3}
    snapshot("report", event["message"])
    assert _summary(tmp_path, "b")["events"] == []
    assert [run["attempts"] for run in _summary(tmp_path)["runs"]] == [2, 1]
    assert event["message"] in _text(tmp_path, "a")
    with SessionFile(tmp_path / "session.sqlite", run="a") as session:
        assert len(session.ranks()) == 3
    asked = object.__new__(Session)
    asked._ask = lambda request: query.ask_one(aggregator.query, request)  # type: ignore[method-assign]
    assert [rank.attempt for rank in asked.ranks("a")] == [1] * 3
    every = asked.ranks("a", every_attempt=True)
    assert [rank.attempt for rank in every] == [0] * 4 + [1] * 3


def test_restart_is_noticed_across_a_restart_of_the_aggregator(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    Fit(aggregator, "a").step()
    aggregator.commit()
    aggregator.close()
    clock.tick(20)
    restarted = aggregation(tmp_path, clock)
    second = Fit(restarted, "a", attempt=2)
    second.step()
    restarted.commit()
    restarted.close()
    again = aggregation(tmp_path, clock)
    second.aggregator = again
    second.step()
    again.commit()
    (event,) = _summary(tmp_path)["events"]
    assert (event["data"]["attempt"], event["data"]["seconds"]) == (2, 20.0)


def test_attempt_is_judged_from_its_own_beginning(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    chronic = []
    for attempt, seconds in ((0, 20), (1, 4)):
        fit = Fit(aggregator, "a", 3, attempt)
        for _ in range(seconds):
            fit.step(late=2)
            _second(aggregator, clock)
        assert ask(aggregator, "verdict")["ranks"] == [2]
        chronic.append(ask(aggregator, "verdict")["chronic"])
    assert chronic == [True, None]


# -- the end of a job of several nodes -----------------------------------------------------------


def _leave(
    aggregator: AggregatorCore, node: int, code: int = 0, nodes: int = 2, **fields: Any
) -> wire.Finished:
    message = wire.Finish(codec.VERSION, code, node_id=f"node-{node}", nodes=nodes, **fields)
    answer = codec.decode(aggregator.end(codec.encode(message)), wire.Finished)
    aggregator.endings.write_due()
    return answer


def test_session_is_over_when_the_last_node_has_left(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    ranks = [Rank(i, 3, per_node=1) for i in range(3)]
    for node, rank in enumerate(ranks):
        aggregator.ingest(Relay(node).message(rank.batch(20)))
    assert _leave(aggregator, 0, -15).waiting == 2  # 3 were seen, whatever it says
    assert _leave(aggregator, 0, -15) == wire.Finished(codec.VERSION, "waiting", "host-1, host-2", 2)
    aggregator.commit()
    aggregator.close()
    restarted = aggregation(tmp_path, clock)
    failure = wire.RankFailure(1, 0, ranks[1].identity.pid, -9, clock())
    assert _leave(restarted, 1, 1, failures=[failure], stop=False).waiting == 1
    assert _leave(restarted, 2, stop=False).waiting == 0
    assert not (tmp_path / "summary.json").exists()  # the first, of the launcher that ends it, asks again
    assert _leave(restarted, 0, -15).pending
    assert _leave(restarted, 0, -15) == wire.Finished(codec.VERSION, "written")
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert (summary["session"]["status"], summary["session"]["exit_code"]) == ("failed", 1)
    assert summary["verdict"]["exit_reason"] == "SIGKILL"


def test_lost_node_is_not_waited_for(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    for node in range(2):
        aggregator.ingest(Relay(node).message(Rank(node, 2, per_node=1).batch(5)))
    aggregator.node_state("node-1", "host-1", "10.0.0.2", False)
    assert not _leave(aggregator, 0).waiting
    assert aggregator.over


def test_node_that_never_reported_is_waited_for_unless_forced(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path)
    aggregator.ingest(Relay().message(Rank(0, 2, per_node=1).batch(5)))
    assert _leave(aggregator, 0) == wire.Finished(codec.VERSION, "waiting", "1 that never reported", 1)
    assert not (tmp_path / "summary.json").exists()
    _leave(aggregator, 0, force=True)
    assert (tmp_path / "summary.json").exists() and aggregator.over


def test_nothing_is_written_after_the_end(tmp_path: Path, clock: Clock) -> None:
    """A writer that is killed in the middle of it leaves a file that has to be repaired."""
    aggregator, relay, rank = aggregation(tmp_path, clock), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(30), rank.batch(0, final=True)))
    _leave(aggregator, 0, nodes=1)
    assert aggregator.over
    before = (tmp_path / "session.sqlite").read_bytes()
    sample = NodeSample(1, 50.0, 8, 0.5, 1, 2, 3, 4, 5, None, [])
    late = relay.message(node=[sample])
    aggregator.ingest(late)
    assert aggregator.commit() and aggregator.endings.complete
    assert confirmed(aggregator.ingest(late)) == 2  # its relay need not keep it
    assert ask(aggregator, "ledger").stored == 30
    counted = ask(aggregator, "status").errors
    assert counted == {"node sample: not stored, the session is over": 1}
    aggregator.close()
    restarted = aggregation(tmp_path, clock)  # by Ray, after it was killed
    assert restarted.over and restarted.endings.complete
    restarted.ingest(relay.message(node=[sample]))
    assert restarted.commit()
    restarted.close()
    assert (tmp_path / "session.sqlite").read_bytes() == before


def test_rows_that_come_after_an_ordered_end_are_in_the_files_when_these_are_written_again(
    tmp_path: Path, clock: Clock
) -> None:
    aggregator, relay, rank = aggregation(tmp_path, clock), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(30)))
    _leave(aggregator, 0, -15, nodes=1, force=True)  # the monitor alone: training goes on
    before = (tmp_path / "session.sqlite").read_bytes()
    late = relay.message(rank.batch(20))
    aggregator.ingest(late)
    assert aggregator.commit()
    assert confirmed(aggregator.ingest(late)) == 1
    assert (tmp_path / "session.sqlite").read_bytes() == before
    assert not aggregator.endings.complete
    aggregator.endings.prepare_again()
    later = relay.message(rank.batch(5))
    aggregator.ingest(later)
    assert aggregator.commit() and confirmed(aggregator.ingest(later)) == 3
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    assert aggregator.endings.complete
    assert json.loads((tmp_path / "summary.json").read_bytes())["ledger"]["stored"] == 55
    aggregator.close()
    assert check_ledger(tmp_path)["stored"] == 55


@pytest.mark.parametrize(
    "late", [{"events": [wire.Event("note", 1)]}, {"spans": [wire.SpanSum("eval", 5, 1, 1, 1, 1, 1)]}]
)
def test_what_ranks_report_after_the_end_makes_the_files_incomplete(
    late: dict[str, Any], tmp_path: Path, clock: Clock
) -> None:
    aggregator, relay, rank = aggregation(tmp_path, clock), Relay(), Rank(0, 1)
    aggregator.ingest(relay.message(rank.batch(30)))
    _leave(aggregator, 0, nodes=1)
    assert aggregator.endings.complete
    aggregator.ingest(relay.message(rank.batch(0, **late)))
    assert not aggregator.endings.complete
    aggregator.close()


# -- the account ---------------------------------------------------------------------------------


@given(data=st.data())
@hypothesis.settings(max_examples=20, deadline=None)
def test_ledger_balances_for_any_order_of_messages(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Runs and attempts in any order; rows dropped, lost on the way, sent twice; runs ended early."""
    folder = tmp_path_factory.mktemp("session")
    clock = Clock()
    aggregator, relay = aggregation(folder, clock), Relay()
    ranks = [
        Rank(rank, 2, job_id=run, attempt=attempt, process_id=f"{run}{attempt}{rank}")
        for run in "ab" for attempt in range(2) for rank in range(2)
    ]  # fmt: skip
    draw = data.draw
    for _ in range(draw(st.integers(1, 25))):
        act = draw(
            st.sampled_from(["rows", "rows", "rows", "lose", "drop", "end", "finish", "restart", "gone"])
        )
        rank = draw(st.sampled_from(ranks))
        if act == "rows":
            message = relay.message(rank.batch(draw(st.integers(0, 9))))
            for _ in range(draw(st.integers(1, 2))):
                aggregator.ingest(message)
        elif act == "lose":
            rank.batch(draw(st.integers(1, 5)))
        elif act == "drop":
            rank.batch(4)
            rank.dropped += draw(st.integers(0, 4))
        elif act == "end":
            aggregator.ingest(relay.message(rank.batch(2, final=True), dropped={rank.process_id: 1}))
        elif act == "finish":
            run_message(aggregator, rank.identity.job_id, status="finished")
        elif act == "gone":
            aggregator.node_state("node-0", "host-0", "10.0.0.1", draw(st.booleans()))
        else:
            aggregator.commit()
            aggregator.close()
            aggregator = aggregation(folder, clock)
        clock.tick(draw(st.integers(0, 3)))
        aggregator.judge()
    assert aggregator.commit()
    check_ledger(folder)
    assert not aggregator.errors
    aggregator.finish(wire.Finish(codec.VERSION, 0))
    assert check_ledger(folder)["in_flight"] == 0
    with SessionFile(folder / "session.sqlite") as session:
        attempts = [
            event.data["attempt"] for event in session.for_run("a").events()[0] if event.kind == "restart"
        ]
        assert attempts in ([], [1])
        write_reports(SessionFolder(folder), session, LIMITS)
    aggregator.close()


def test_end_of_a_run_waits_for_its_ranks_but_not_behind_a_silent_relay(tmp_path: Path, clock: Clock) -> None:
    aggregator = aggregation(tmp_path, clock)
    fit = Fit(aggregator, "a")
    fit.relay.node = wire.NodeIdentity("node-a", "host", "10.0.0.1")
    fit.step()
    assert run_message(aggregator, "a", status="finished").waiting == 2
    clock.tick(3)
    assert aggregator.endings.is_silent("node-a") and not aggregator.endings.is_silent("node-b")
    assert run_message(aggregator, "a", status="finished").waiting == 0
