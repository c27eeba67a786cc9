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
from traceml_ray.signals.collectives.records import CallReport, CollectivesReport, GroupReport
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
                        position.step,
                        position.stage,
                        ns,
                        position.span,
                        ns if position.span else None,
                        position.still_ns,
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

    def says(self, rank: int, *calls: CallReport, where: str = "train (train.py:60)", **known: Any) -> None:
        """A rank's answer to where it is, with the collectives that it has called."""
        (command,) = self.commands
        asked = str(command.args["id"])
        data = {"dump": asked, "where": where, "call": None, **known}
        kind = "standing" if command.name == "where" else "stacks"
        event = wire.Event(kind, self.clock(), data=data)
        groups = [GroupReport("0", "default_pg", [(0, 3, 1)]), GroupReport("1", "pairs", [(0, 3, 1)])]
        report = CollectivesReport(self.clock(), asked, "recorder", groups, [*calls])
        self._report([self.ranks[rank].batch(0, events=[event], last_calls=[report])])

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


def test_busy_rank_is_asked_again_and_hangs_once_it_is_stuck(job: Job) -> None:
    job.runs(8)
    labels, asked = [], []
    for second in range(70):
        still_s = 0.5 if second < 50 else 20.0
        busy = wire.OpenStage(80, POST_SYNC, 0, still_ns=int(still_s * SECOND))
        labels += job.stands(1, busy, WAITS, WAITS, since=second)
        asked += [str(command.args["id"]) for command in job.commands]
    assert labels[20:49] == ["stalled"] * 29 and labels[51:] == ["hang"] * 19
    assert len(set(asked)) == 3, "at 15 and 30 s, and for the stacks"


def test_rank_that_falls_silent_late_is_not_the_cause(job: Job) -> None:
    """Its machine may be overloaded. One that stops the others has been silent for as long as they wait."""
    job.runs(8)
    busy = wire.OpenStage(80, POST_SYNC, 0, still_ns=0)
    labels = job.stands(60, busy, WAITS, WAITS)
    labels += job.stands(20, busy, None, WAITS, since=60)
    assert set(labels[20:]) == {"stalled"}
    verdict = job.aggregator.verdict
    assert verdict is not None and verdict.ranks == (0,)


def test_first_step_that_compiles_is_no_hang(job: Job) -> None:
    """No rank has closed a row yet, so nothing is known of how long a step may take."""
    labels = job.stands(300, at(SYNC_WAIT, 0), at(FORWARD, 0), at(SYNC_WAIT, 0))
    assert not {"hang", "stalled"} & set(labels)
    job._report([rank.batch(1) for rank in job.ranks[:2]])
    assert "hang" not in job.stands(60, WAITS, at(FORWARD, 0), WAITS)


def test_groups_made_in_another_order_before_the_first_step_are_a_hang_after_two_minutes(job: Job) -> None:
    labels = []
    for second in range(130):
        if job.commands and second in (17, 32, 62):
            for rank in range(3):
                job.answers(rank, f"make_groups (train.py:{3 + rank // 2})", "new_group")
        where = wire.OpenStage(0, DATA, 0, still_ns=second * SECOND)
        labels += job.stands(1, where, where, where, since=second)
    assert set(labels[:100]) <= {"", "telemetry_limited"} and labels[-1] == "hang"
    verdict = job.aggregator.verdict
    assert verdict is not None and (verdict.ranks, verdict.last_step) == ((2,), None)


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


def called(number: int, op: str = "all_reduce", age_s: float = 18, size: int = 4, **more: Any) -> CallReport:
    """Return a call that goes on."""
    values: dict[str, Any] = {"where": f"{op}_here (train.py:7)", "finished": False, "group": 0, **more}
    shapes: dict[str, Any] = {"input_sizes": [[size]], "output_sizes": [[size]]}
    types: dict[str, Any] = {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    age_ns = int(age_s * SECOND)
    return CallReport(number=number, op=op, point_to_point=False, age_ns=age_ns, **shapes, **types, **values)


def test_pending_collective_without_a_mark_is_found_by_asking_ranks(job: Job, snapshot: Snapshot) -> None:
    job.runs(8)
    where = at(FORWARD), at(FORWARD), at(FORWARD)
    assert "hang" not in job.stands(16, *where)
    for rank in (0, 2):
        job.says(rank, called(56, finished=True), called(57))
    job.says(1, called(56, finished=True))
    assert job.aggregator.verdict is not None and job.aggregator.verdict.label == "healthy"
    assert job.stands(3, *where, since=19)[-1] == "hang"
    verdict = job.aggregator.verdict
    assert verdict is not None and (verdict.label, verdict.rank) == ("hang", 1)
    snapshot("verdict", verdict.why)
    assert [command.name for command in job.commands] == ["dump"]
    with SessionFile(job.folder / "session.sqlite") as session:
        assert "standing" not in {event.kind for event in session.events()[0]}


def test_other_operation_is_named_before_the_first_step_too(job: Job, snapshot: Snapshot) -> None:
    where = at(SYNC_WAIT, 0), at(SYNC_WAIT, 0), at(SYNC_WAIT, 0)
    job.stands(17, *where)
    job.says(0, called(1))
    job.says(1, called(1, "all_gather"), where="gather_sizes (train.py:41)")
    job.says(2, called(1))
    assert job.stands(4, *where, since=20)[-1] == "hang"
    verdict = job.aggregator.verdict
    assert verdict is not None and (verdict.rank, verdict.last_step, verdict.confidence) == (1, None, "high")
    snapshot("verdict", verdict.why, verdict.next)


def test_late_rank_before_the_first_step_is_no_hang(job: Job) -> None:
    """It may compile, or load."""
    where = at(SYNC_WAIT, 0), at(FORWARD, 0), at(SYNC_WAIT, 0)
    labels = []
    for second in range(100):
        if job.commands and second in (17, 32, 62):
            job.says(0, called(5, age_s=second))
            job.says(1, called(4, finished=True))
            job.says(2, called(5, age_s=second))
        labels += job.stands(1, *where, since=second)
    assert not {"hang", "stalled"} & set(labels)


def test_mismatch_that_nobody_waits_in_is_no_hang(job: Job) -> None:
    job.runs(8)
    where = at(FORWARD), at(FORWARD), at(FORWARD)
    job.stands(16, *where)
    for rank, size in ((0, 4), (1, 8), (2, 4)):
        job.says(rank, called(1, size=size, finished=True))
    assert "hang" not in job.stands(30, *where, since=19)


def test_rank_that_does_not_answer_is_named_before_a_mismatch(job: Job) -> None:
    job.runs(8)
    job.stands(1, WAITS, WAITS, WAITS)
    job.stands(15, WAITS, None, WAITS, since=1)
    for rank, op in ((0, "all_reduce"), (2, "barrier")):
        job.says(rank, called(7, op))
    assert job.stands(8, WAITS, None, WAITS, since=18)[-1] == "hang"
    verdict = job.aggregator.verdict
    assert verdict is not None and verdict.rank == 1


def test_reports_for_an_earlier_hang_are_not_used(job: Job) -> None:
    job.runs(8)
    job.stands(16, WAITS, WAITS, WAITS)
    for rank, op in ((0, "all_reduce"), (1, "all_gather"), (2, "all_reduce")):
        job.says(rank, called(7, op, age_s=16))
    assert job.stands(3, WAITS, WAITS, WAITS, since=19)[-1] == "hang"
    job.runs(8)
    assert job.stands(25, WAITS, WAITS, WAITS)[-1] == "hang"
    verdict = job.aggregator.verdict
    assert verdict is not None and verdict.ranks == ()


def test_ranks_that_wait_for_each_other_over_two_groups(job: Job, snapshot: Snapshot) -> None:
    job.runs(8)
    job.stands(16, WAITS, WAITS, WAITS)
    job.says(0, called(2, group=1, finished=True), called(7))
    job.says(1, called(6, finished=True), called(3, group=1, where="pairs_first (train.py:58)"))
    job.says(2, called(2, group=1, finished=True), called(7))
    assert job.stands(3, WAITS, WAITS, WAITS, since=19)[-1] == "hang"
    verdict = job.aggregator.verdict
    assert verdict is not None and verdict.ranks == (1,)
    snapshot("verdict", verdict.why, verdict.next)


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
