"""Captures of a session on a played clock: the same steps of all ranks, and an end whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from traceml_ray.analysis.verdict import Verdict
from traceml_ray.errors import Errors
from traceml_ray.identity import RankIdentity
from traceml_ray.monitor import captures
from traceml_ray.monitor.captures import CaptureCoordinator, Wanted
from traceml_ray.monitor.live_steps import RunNow
from traceml_ray.monitor.profile_files import ProfileFiles
from traceml_ray.stages import SEGMENT_BITS
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import TracePart

TRACE = bytes(range(256)) * 4


def _process(rank: int, step: int) -> RankProcess:
    identity = RankIdentity(rank, rank, 0, 4, 4, 1, "host", "node", "run", 0, 100 + rank, "explicit")
    return RankProcess(rank + 1, f"process-{rank}", identity, last_key=step << SEGMENT_BITS)


class Job:
    """A run of four ranks, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.errors = 1000.0, folder, Errors()
        self.files = ProfileFiles(folder, self.errors)
        self.captures = CaptureCoordinator(
            self.files, folder.name, self.errors, lambda: int(self.now * 1e9), lambda: self.now
        )
        self.ranks = {rank: _process(rank, 100 + rank) for rank in range(4)}
        self.over: Profile | None = None
        self.step_s = 0.1

    def ask(self, ranks: str = "all", **more: Any) -> None:
        self.captures.ask(Wanted(wire.ProfileRequest(ranks, **more), "it was requested.", ("me",)))

    def turn(self, seconds: float = 1.0, runs: bool = True) -> None:
        self.now += seconds
        assert self.files.wait(240)
        labels = {process.id: "node-1" for process in self.ranks.values()}
        verdict = Verdict(label="healthy", mean_step_ms=1e3 * self.step_s)
        run = RunNow("run", "name", self.ranks, labels, {"node": (5, 2)}, verdict, self.step_s)
        self.over = self.captures.tick([run] if runs else []) or self.over
        assert self.files.wait(240)

    @property
    def command(self) -> Mapping[str, Any]:
        (command,) = [command for command in self.captures.commands() if command.name == "profile"]
        return command.args

    def say(
        self,
        rank: int,
        state: str,
        reason: str = "",
        total: int | None = None,
        served: tuple[int, int] | None = None,
    ) -> None:
        """Have a rank say how far it is; one without steps what it has `served`, from when to when."""
        args, steps = self.command, []
        if state == "sending":
            first = args["first_step"]
            steps = [(first + n, 10 * n, 10 * n + 10, None) for n in range(args["steps"])]
            steps = steps if served is None else [(0, *served, None)]
        about: Any = args["id"], args["number"], state, reason, total, steps, 10, 20, 30, served is not None
        self.captures.ingest(f"process-{rank}", wire.Capture(*about))

    def send(
        self, rank: int, offset: int, data: bytes = b"", number: int | None = None, failure: str = ""
    ) -> int | None:
        """Have a rank's relay send a part of its trace; return where the relay is to go on."""
        args, who = self.command, f"process-{rank}"
        number = number or args["number"]
        part = TracePart(codec.VERSION, who, args["id"], number, len(TRACE), offset, data, failure)
        reply = self.captures.accept_part(part)
        assert self.files.wait(240)
        return reply.offset

    def capture(self, *ranks: int) -> None:
        for rank in ranks:
            self.say(rank, "sending", total=len(TRACE))
            self.send(rank, 0, TRACE)

    def state(self, rank: int) -> tuple[str, str | None]:
        profile = self.over or profiles.under_way(self.folder)
        assert profile is not None
        (about,) = [one for one in profile.ranks if one.rank == rank]
        return about.state, about.reason


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_all_ranks_are_asked_for_the_same_steps_ahead_of_all(job: Job) -> None:
    job.ask(steps=2, shapes=True)
    job.turn()
    args = job.command
    assert args["first_step"] > 103 + captures.AHEAD_S / job.step_s
    assert (args["ranks"], args["steps"], args["shapes"], args["stacks"]) == ("0,1,2,3", 2, 1, 0)
    job.capture(0, 1, 2, 3)
    job.turn()
    assert job.over is not None and job.over.requests == ["me"] and not job.captures.busy
    path = profiles.finish(job.folder, job.over)
    assert [(path / str(rank.file)).read_bytes() for rank in job.over.captured] == [TRACE] * 4
    first = job.over.ranks[0]
    assert (first.node, first.clock_offset_ns, first.clock_bound_ns) == ("node-1", 5, 2)
    assert (first.start_ms, len(first.steps)) == (1e-5, 2)


def test_long_steps_are_asked_for_two_ahead(job: Job) -> None:
    job.step_s = 60.0
    job.ask()
    job.turn()
    assert job.command["first_step"] == 103 + 1 + captures.AHEAD_STEPS


def test_ranks_that_have_not_reported_are_waited_for_then_named(job: Job) -> None:
    late = {rank: job.ranks.pop(rank) for rank in (2, 3)}
    job.ask("0,1")
    job.turn()
    assert job.command["ranks"] == "0,1"
    job.capture(0, 1)
    job.turn()
    assert job.over is not None
    profiles.finish(job.folder, job.over)
    job.over = None
    job.ask()
    job.turn()
    assert not job.captures.commands()
    job.ranks[2] = late[2]
    job.turn(captures.KNOWN_S)
    assert job.command["ranks"] == "0,1,2"
    assert job.state(3) == ("refused", "it has not reported so far")


def test_trace_without_room_is_given_up_with_the_reason(job: Job) -> None:
    job.ask("0,1")
    job.turn()
    for rank in (0, 1):
        job.say(rank, "sending", total=len(TRACE))
    (profiles.unfinished(job.folder, job.command["id"]) / profiles.trace_name(0)).mkdir()
    job.send(0, 0, TRACE)
    job.send(1, 0, TRACE)
    job.turn()
    assert job.state(0) == ("failed", "its trace could not be kept: Is a directory")
    assert job.state(1)[0] == "captured" and job.errors["trace: IsADirectoryError"]


def test_rank_that_was_past_the_step_has_all_begin_anew_further_ahead(job: Job) -> None:
    job.ask("0,1")
    job.turn()
    before = job.command
    job.say(0, "armed")
    job.capture(1)
    job.say(0, "refused", f"step {before['first_step']} was over when the request came")
    job.turn()
    after = job.command
    assert after["number"] == 2 and after["first_step"] > before["first_step"] and after["id"] == before["id"]
    job.send(1, 0, b"of the first", number=1)
    job.capture(0, 1)
    job.turn()
    assert job.over is not None and len(job.over.captured) == 2
    assert (profiles.unfinished(job.folder, job.over.id) / "rank-1.json.gz").read_bytes() == TRACE


def test_rank_that_is_late_again_and_again_is_named(job: Job) -> None:
    job.ask("0")
    for _ in range(captures.MAX_NUMBER):
        job.turn()
        job.say(0, "refused", "step 1 was over when the request came")
    job.turn()
    assert job.state(0) == ("refused", "step 1 was over when the request came")


def test_rank_that_cannot_holds_up_nobody_and_says_why(job: Job) -> None:
    job.ranks[3].final = True
    job.ask("0-3,9")
    job.turn()
    job.say(0, "refused", "a profiler is on already: the script's own")
    job.capture(1)
    job.turn(captures.ANSWER_S + 1)  # of rank 2 nothing is heard
    assert job.over is not None
    assert [job.state(rank)[0] for rank in (0, 1, 2, 3, 9)] == [
        *("refused", "captured", "refused", "refused", "refused")
    ]
    assert "has not answered" in str(job.state(2)[1]) and "has ended" in str(job.state(3)[1])
    assert job.state(9)[1] == "no such rank"


def test_rank_that_dies_is_lost_with_what_came_of_its_trace(job: Job) -> None:
    job.ask("0,1")
    job.turn()
    job.capture(0)
    job.say(1, "sending", total=len(TRACE))
    job.send(1, 0, TRACE[:100])
    job.ranks[1].lost = True
    job.turn()
    assert job.over is None  # its relay may have the rest
    job.turn(captures.ENDED_S + 1)
    assert job.over is not None and job.state(1) == ("failed", "it ended before its trace was written")
    path = profiles.finish(job.folder, job.over)
    assert {file.name for file in path.iterdir()} == {"profile.json", "rank-0.json.gz"}


@pytest.mark.parametrize("runs", [True, False])
def test_trace_of_a_rank_or_run_that_has_ended_still_comes(job: Job, runs: bool) -> None:
    job.ask("0")
    job.turn()
    job.say(0, "sending", total=len(TRACE))
    job.ranks[0].lost = True
    for offset in range(0, len(TRACE), 256):
        job.turn(captures.ENDED_S - 1, runs=runs)
        job.send(0, offset, TRACE[offset : offset + 256])
    job.turn(runs=runs)
    assert job.over is not None and job.state(0) == ("captured", None)


def test_rank_that_was_restarted_is_another(job: Job) -> None:
    job.ask("0")
    job.turn()
    job.say(0, "recording")
    job.ranks[0] = _process(0, 5)
    job.ranks[0].process_id = "another"
    job.turn()
    assert job.state(0)[0] == "failed"


def test_relay_is_told_where_to_go_on(job: Job) -> None:
    job.ask("0")
    job.turn()
    assert job.send(0, 0) == 0
    assert job.send(0, 0, TRACE[:100]) == 100  # before the rank's batch is there
    job.say(0, "sending", total=len(TRACE))
    assert job.send(0, 200, TRACE[200:]) == 100  # a gap
    assert job.send(0, 0, TRACE[:100]) == 100  # a second time
    assert job.send(0, 100, TRACE[100:]) == len(TRACE)
    assert job.send(0, len(TRACE)) is None
    job.turn()
    assert job.state(0) == ("captured", None)
    assert (profiles.unfinished(job.folder, job.over.id) / "rank-0.json.gz").read_bytes() == TRACE


def test_trace_that_its_relay_cannot_read_is_given_up_with_the_reason(job: Job) -> None:
    job.ask("0,1")
    job.turn()
    job.say(0, "sending", total=len(TRACE))
    assert job.send(0, 0, failure="No such file or directory") is None
    job.turn()
    assert job.state(0) == ("failed", "its trace could not be read on its node: No such file or directory")
    assert job.state(1)[0] == "asked"


def test_parts_that_nobody_wants_are_refused(job: Job) -> None:
    job.ask("0")
    job.turn()
    assert job.send(1, 0, TRACE) is None and job.send(0, 0, TRACE, number=7) is None
    assert not list((job.folder / profiles.FOLDER).glob("*/rank-*"))


def test_pace_is_one_for_all_relays(job: Job) -> None:
    pace = captures.TracePace(lambda: job.now)
    assert pace.pause_s(captures.BYTES_PER_S) == pytest.approx(1.0)
    assert pace.pause_s(captures.BYTES_PER_S) == pytest.approx(2.0)
    job.now += 10.0
    assert pace.pause_s(0) == 0.0


def test_trace_that_does_not_come_is_given_up(job: Job) -> None:
    job.ask("0")
    job.turn()
    job.say(0, "sending", total=10)
    job.turn(captures.SEND_S - 10)
    assert job.state(0) == ("sending", None)
    job.turn(20.0)
    assert job.state(0) == ("failed", "the rest of its trace has not arrived")


def test_steps_that_never_end_are_given_up(job: Job) -> None:
    job.ask("0")
    job.turn()
    job.say(0, "recording")
    job.turn(float(job.command["limit_s"]) + captures.ANSWER_S + 1)
    assert job.state(0)[0] == "failed" and "has not ended its steps" in str(job.state(0)[1])


def test_requests_for_the_same_join_until_it_records(job: Job) -> None:
    for who in ("a", "b"):
        job.captures.ask(Wanted(wire.ProfileRequest("0"), "it was requested.", (who,)))
    job.turn()
    job.ask("0")
    job.say(0, "recording")
    job.ask("0")  # this one is for later steps
    job.capture(0)
    job.turn()
    assert job.over is not None and job.over.requests == ["a", "b", "me"] and job.captures.busy


def test_driver_may_ask_before_its_run_has_begun(job: Job) -> None:
    job.ask("0")
    job.turn(60.0, runs=False)
    assert job.over is None
    job.turn()
    assert job.command["ranks"] == "0"


def test_one_capture_at_a_time_the_others_wait(job: Job) -> None:
    job.ask("0")
    job.ask("1")
    job.turn()
    assert job.command["ranks"] == "0"
    job.capture(0)
    job.turn()
    first = job.over
    job.turn()
    assert first is not None and job.command["ranks"] == "1"
    for steps in range(1, captures.MAX_WAITING + 4):
        job.ask("2", steps=steps)
    assert job.errors["profile: too many wait"] == 3


@pytest.mark.parametrize(
    ("ranks", "run", "error"),
    [("0-", None, "is not a rank"), ("0", "other", "run 'other' is not active")],
)
def test_request_that_means_nobody_says_why(job: Job, ranks: str, run: str | None, error: str) -> None:
    job.ask(ranks, run=run)
    job.turn()
    assert job.over is not None and error in str(job.over.error)


def test_run_that_ends_ends_its_capture(job: Job) -> None:
    job.ask()
    job.turn()
    job.capture(0)
    job.turn(runs=False)
    assert job.over is not None and job.state(0)[0] == "captured"
    assert job.state(1) == ("failed", "the run is over")


def test_session_that_ends_keeps_what_is_whole(job: Job) -> None:
    job.ask("0,1")
    job.turn()
    job.capture(1)
    over = job.captures.stop("the session is over")
    assert over is not None and [rank.rank for rank in over.captured] == [1]
    assert job.captures.stop("again") is None and not job.captures.commands()


def test_rank_without_steps_ends_with_the_others_and_has_their_steps(job: Job) -> None:
    job.ask("0,1,2", steps=2)
    job.turn()
    for rank in (0, 1):
        job.say(rank, "recording", served=(0, 0))
        job.say(2, "armed")
        job.turn(5.0)
        assert job.command["over"] == 0
    job.capture(2)
    job.turn()
    assert job.command["over"] == 1
    for rank in (0, 1):
        job.say(rank, "sending", total=len(TRACE), served=(-50, 100))
        job.send(rank, 0, TRACE)
    job.turn()
    assert job.over is not None and len(job.over.captured) == 3
    steps = [(step.step, step.begin_ns, step.end_ns) for step in job.over.ranks[2].steps]
    assert len(steps) == 2 and job.over.first_step == steps[0][0]
    for rank in job.over.ranks:
        assert [(step.step, step.begin_ns, step.end_ns) for step in rank.steps] == steps


def test_rank_that_began_to_serve_too_late_has_all_begin_anew(job: Job) -> None:
    job.ask("0,1", steps=2)
    job.turn()
    job.say(0, "recording", served=(0, 0))
    job.capture(1)
    job.turn()
    job.say(0, "sending", total=len(TRACE), served=(5, 100))
    before = job.command["first_step"]
    job.turn()
    assert job.command["number"] == 2 and job.command["first_step"] > before and job.command["over"] == 0
    assert job.state(0) == job.state(1) == ("asked", None)


def test_job_without_steps_is_recorded_for_as_many_seconds(job: Job) -> None:
    job.ask("0,1", steps=2)
    job.turn()
    for rank in (0, 1):
        job.say(rank, "recording", served=(0, 0))
    job.turn(1.5)
    assert job.command["over"] == 0
    job.turn(1.5)
    assert job.command["over"] == 1
    for rank, served in ((0, (0, 80)), (1, (30, 100))):
        job.say(rank, "sending", total=len(TRACE), served=served)
        job.send(rank, 0, TRACE)
    job.turn()
    assert job.over is not None and job.over.first_step is None
    assert job.over.extent == "2 seconds, since no rank has steps"
    assert [(rank.steps[0].begin_ns, rank.steps[0].end_ns) for rank in job.over.ranks] == [(30, 80)] * 2


def test_trace_that_a_hanging_disk_does_not_take_is_given_up_with_the_reason(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.ask("0")
    job.turn()
    hangs = threading.Event()
    job.files.do(hangs.wait)
    monkeypatch.setattr(job.files, "wait", lambda _: True)
    job.say(0, "sending", total=len(TRACE))
    assert job.send(0, 0, TRACE[:100]) == 100
    for _ in range(3):
        assert job.send(0, 100, TRACE[100:]) == 100  # one part waits, no more
        job.turn(captures.SEND_S / 2)
    assert job.over is not None
    assert job.over.ranks[0].reason == "its trace could not be kept: the disk takes too long"
    hangs.set()
