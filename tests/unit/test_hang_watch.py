"""What the aggregator makes of a run that stands still: when it says so, what it asks, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions import SECOND, Clock, Rank, Relay, aggregation, ask
from snapshot import Snapshot

from traceml_ray.document.text import WIDTH
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.settings import Settings
from traceml_ray.stages import DATA, FORWARD, POST_SYNC, SYNC_WAIT
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

Where = Callable[[int], wire.OpenStage | None]


class Job:
    """Three ranks on one node that report once a second; `stands` moves nothing but the clock."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self.folder = folder
        self.clock = clock or Clock()
        self.aggregator: AggregatorCore = aggregation(folder, self.clock, world_size=3)
        self.ranks = [Rank(i, 3, node_id="node-0") for i in range(3)]
        self.relay = Relay()
        self.commands: list[wire.Command] = []

    def runs(self, seconds: int, steps: int = 10) -> None:
        for _ in range(seconds):
            self._report([rank.batch(steps) for rank in self.ranks])

    def stands(self, seconds: int, *where: wire.OpenStage | None, since: float = 0.0) -> list[str]:
        """The ranks are at `where` (None: silent), for `since` s already; the labels second by second."""
        labels = []
        for second in range(seconds):
            batches = []
            for rank, position in zip(self.ranks, where, strict=True):
                if position is not None:
                    ns = int((since + second + 1) * SECOND)
                    opened = wire.OpenStage(
                        position.step, position.stage, ns, position.span, ns if position.span else None
                    )
                    batches.append(rank.batch(0, open=opened))
            labels.append(self._report(batches))
        return labels

    def _report(self, batches: list[bytes], **fields: Any) -> str:
        self.clock.tick()
        answer = self.aggregator.ingest(self.relay.message(*batches, **fields))
        self.commands = codec.decode(answer, wire.RelayReply).commands
        self.aggregator.judge()
        return self.aggregator.verdict.label if self.aggregator.verdict else ""

    def answers(self, rank: int, where: str, call: str | None = None, text: str = "") -> None:
        (command,) = self.commands
        data: dict[str, Any] = {"dump": command.args["id"], "where": where, "call": call}
        event = wire.Event("stacks", self.clock(), message=text, data=data)
        self._report([self.ranks[rank].batch(0, events=[event])])

    def says(self, rank: int, **known: Any) -> None:
        """A rank's answer to where it is."""
        (command,) = self.commands
        assert command.name == "where"
        data = {"dump": command.args["id"], "where": "train (train.py:60)", "call": None, **known}
        self._report([self.ranks[rank].batch(0, events=[wire.Event("standing", self.clock(), data=data)])])

    def history(self) -> list[dict[str, Any]]:
        self.aggregator.commit()
        with SessionFile(self.folder / "session.sqlite") as session:
            return session.verdicts()[0]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def at(stage: int, step: int = 80, span: str | None = None) -> wire.OpenStage:
    return wire.OpenStage(step, stage, 0, span)


WAITS = at(SYNC_WAIT)


def test_hang_is_found_within_25_seconds_and_its_rank_named(job: Job) -> None:
    job.runs(8)
    labels = job.stands(25, WAITS, at(FORWARD), WAITS)
    assert labels.index("hang") in (19, 20) and set(labels[20:]) == {"hang"}
    verdict = job.aggregator.verdict
    assert verdict is not None
    assert (verdict.rank, verdict.stage, verdict.from_step, verdict.node) == (1, "forward", 80, "host-0")


def test_ten_long_steps_are_waited_for(job: Job) -> None:
    for _ in range(12):
        job._report([rank.batch(1, [0, 0, 0, 1000, 4000, 0]) for rank in job.ranks])
    assert "hang" not in job.stands(48, WAITS, at(FORWARD), WAITS)
    assert job.stands(4, WAITS, at(FORWARD), WAITS, since=48)[-1] == "hang"


def test_ranks_that_report_rarely_are_given_more_time(job: Job) -> None:
    """With a report every 30 s the rows are up to so old, and a rank seen waiting need not wait any more."""
    (job.folder / "seldom").mkdir()
    job.aggregator = AggregatorCore(job.folder / "seldom", Settings(interval=30.0), {}, job.clock)
    for _ in range(3):
        places = zip(job.ranks, (WAITS, at(DATA), WAITS), strict=True)
        job._report([rank.batch(300, open=where) for rank, where in places])
        assert "hang" not in [job._report([]) for _ in range(29)]
    assert job.stands(40, WAITS, at(DATA), WAITS, since=30)[-1] == "hang"


def test_stopped_rank_is_named_though_it_was_last_seen_waiting(job: Job) -> None:
    job.runs(8)
    job.stands(1, WAITS, WAITS, WAITS)
    labels = job.stands(24, WAITS, None, WAITS, since=1)
    assert "hang" in labels
    verdict = job.aggregator.verdict
    assert verdict is not None and verdict.rank == 1 and "does not answer" in verdict.why


def test_silent_node_is_no_evidence_against_its_rank(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.ranks[1] = Rank(1, 3, node_id="node-1")
    job.runs(8)
    job.aggregator.ingest(Relay(1).message())
    job.stands(30, WAITS, None, WAITS)
    verdict = job.aggregator.verdict
    assert verdict is not None and verdict.rank is None


def test_open_checkpoint_is_a_stall(job: Job, snapshot: Snapshot) -> None:
    job.runs(8)
    assert job.stands(24, at(POST_SYNC, span="checkpoint"), WAITS, WAITS)[-1] == "stalled"
    verdict = job.aggregator.verdict
    assert verdict is not None and (verdict.rank, verdict.span) == (0, "checkpoint")
    job.aggregator.finish(wire.Finish(codec.VERSION, -2))
    snapshot("report", (job.folder / "report.txt").read_text().partition("\n\n")[2].partition("\n\n")[0])


def test_first_step_that_compiles_is_no_hang(job: Job) -> None:
    """No rank has closed a row yet, so nothing is known of how long a step may take."""
    labels = job.stands(300, at(SYNC_WAIT, 0), at(FORWARD, 0), at(SYNC_WAIT, 0))
    assert not {"hang", "stalled"} & set(labels)
    job._report([rank.batch(1) for rank in job.ranks[:2]])
    assert "hang" not in job.stands(60, WAITS, at(FORWARD, 0), WAITS)


def test_long_validation_on_all_ranks_alike_is_no_hang(job: Job) -> None:
    """Nobody waits; and whoever comes out of it first has waited for a small part of the time only."""
    job.runs(8)
    busy = at(POST_SYNC, span="evaluation")
    labels = job.stands(120, busy, busy, busy) + job.stands(20, WAITS, busy, at(DATA))
    assert not {"hang", "stalled"} & set(labels)


def test_job_that_has_ended_does_not_hang(job: Job) -> None:
    job.runs(8)
    job._report([rank.batch(0, final=True, open=at(SYNC_WAIT)) for rank in job.ranks])
    assert "hang" not in job.stands(60, None, None, None)


def test_hang_that_resolves_stays_in_the_history_only(job: Job) -> None:
    job.runs(8)
    job.stands(30, WAITS, at(DATA), WAITS)
    job.runs(8)
    assert job.aggregator.verdict is not None and job.aggregator.verdict.label != "hang"
    last = [verdict for verdict in job.history() if verdict["label"] == "hang"][-1]
    assert last["lasted_s"] == pytest.approx(31)
    job.aggregator.finish(wire.Finish(codec.VERSION, 0))
    summary = json.loads((job.folder / "summary.json").read_text())
    assert summary["verdict"]["label"] != "hang"
    hangs = [(v["rank"], v["from_step"], v["lasted_s"]) for v in summary["verdicts"] if v["label"] == "hang"]
    assert hangs == [(1, 80, 31.0)]


def test_stacks_are_requested_once_from_each_rank_and_shown_in_the_verdict(
    job: Job, snapshot: Snapshot
) -> None:
    job.runs(8)
    places = at(POST_SYNC), at(POST_SYNC), WAITS
    assert job.commands == []
    job.stands(22, *places)
    (command,) = job.commands
    assert (command.name, command.args["run"]) == ("dump", "job")
    job.answers(
        1, "evaluate (train.py:88)", None, "thread MainThread, training:\n  /job/train.py:88 in evaluate"
    )
    job.answers(0, "mean (train.py:60)", "all_reduce", "thread MainThread, training:\n  train.py:60 in mean")
    job.answers(2, "train (train.py:40)", None, "thread MainThread, training:\n  train.py:40 in train")
    verdict = job.aggregator.verdict
    assert verdict is not None
    assert verdict.rank == 1
    snapshot("verdict", verdict.why)
    assert [stack.ranks for stack in verdict.stacks] == [(1,), (0,), (2,)]
    assert [c.args["id"] for c in job.commands] == [command.args["id"]], "the same, for who has missed it"
    job.stands(15, *places, since=25)
    assert job.commands == []
    job.aggregator.finish(wire.Finish(codec.VERSION, -15))
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["verdict"]["label"], summary["verdict"]["rank"]) == ("hang", 1)
    text = (job.folder / "report.txt").read_text()
    assert "/job/train.py:88 in evaluate" in text and max(map(len, text.splitlines())) <= WIDTH


def test_ranks_that_died_of_the_hang_are_not_its_cause(job: Job) -> None:
    job.runs(8)
    job.stands(25, WAITS, at(DATA), WAITS)
    error = wire.Event("exception", job.clock(), message="RuntimeError: Socket Timeout")
    for rank in job.ranks:
        job._report([rank.batch(0, final=True, events=[error])])
    job.aggregator.finish(wire.Finish(codec.VERSION, 1))
    verdict = json.loads((job.folder / "summary.json").read_text())["verdict"]
    assert (verdict["label"], verdict["rank"], verdict["lasted_s"]) == ("hang", 1, None)


def test_restarted_aggregator_goes_on_with_the_same_hang(tmp_path: Path, job: Job) -> None:
    job.runs(8)
    job.stands(22, WAITS, at(FORWARD), WAITS)
    (before,) = job.commands
    for rank in (0, 1, 2):
        job.answers(rank, f"f{rank} (train.py:{rank})", None, f"thread MainThread, training:\n  f{rank}")
    assert job.aggregator.commit()
    job.aggregator.close()
    job.aggregator = aggregation(tmp_path, job.clock)
    job.stands(3, WAITS, at(FORWARD), WAITS, since=26)
    (after,) = job.commands
    assert after.args == before.args
    verdict = ask(job.aggregator, "verdict")
    assert (verdict["label"], verdict["rank"], verdict["stacks"][0]["ranks"]) == ("hang", 1, [1])


def test_pending_collective_without_a_mark_is_found_by_asking_ranks(job: Job, snapshot: Snapshot) -> None:
    job.runs(8)
    where = at(FORWARD), at(FORWARD), at(FORWARD)
    assert "hang" not in job.stands(21, *where)
    for rank in (0, 2):
        job.says(rank, pending="all_reduce", pending_seq=57, pending_ns=21 * SECOND)
    assert job.aggregator.verdict is not None and job.aggregator.verdict.label == "healthy"
    job.says(1)
    verdict = job.aggregator.verdict
    assert verdict is not None and (verdict.label, verdict.rank) == ("hang", 1)
    snapshot("verdict", verdict.why)
    assert job.stands(1, *where, since=24) == ["hang"]
    assert [command.name for command in job.commands] == ["dump"]
    with SessionFile(job.folder / "session.sqlite") as session:
        assert "standing" not in {event.kind for event in session.events()[0]}


def test_busy_ranks_are_asked_at_growing_intervals(job: Job) -> None:
    job.runs(8)
    asked = []
    for second in range(200):
        job.stands(1, at(POST_SYNC), at(POST_SYNC), at(POST_SYNC), since=second)
        asked += [str(command.args["id"]) for command in job.commands]
    assert len(set(asked)) == 4
    job.runs(1)
    assert job.commands == []
    assert {verdict["label"] for verdict in job.history()} == {"healthy"}
