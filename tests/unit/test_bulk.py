"""Traces on their way from a rank's file to the session's folder, beside the rows: all of it, or why not."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions import Clock, NoSamples, Rank, Relay, Straight, aggregation, ask

from traceml_ray.monitor import bulk, profile_files
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.bulk import RETRY_S, TraceSender, open_trace
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import Settings
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, RankProfile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import FOLDER_PREFIX, PART_BYTES, TRACE_NAME, TracePart, TraceReply

TRACE = os.urandom(5 * PART_BYTES + 100)


def leave_trace(place: Path, process_id: str, trace: bytes = TRACE) -> Path:
    """Leave a trace as a rank does; return its folder."""
    folder = place / f"{FOLDER_PREFIX}{process_id}-x"
    folder.mkdir(0o700, parents=True)
    (folder / TRACE_NAME).write_bytes(trace)
    return folder


class Way(Straight):
    """The way to the aggregator, which may be gone; it knows what went."""

    def __init__(self, aggregator: AggregatorCore) -> None:
        super().__init__(aggregator)
        self.up, self.parts = True, list[TracePart]()

    def send_part(self, data: bytes) -> bool:
        assert len(data) <= wire.MAX_BATCH_BYTES and not self._parts, "one call at a time"
        if not self.up:
            self._parts.append(ConnectionError("the actor died"))
            return True
        self.parts.append(codec.decode(data, TracePart))
        return super().send_part(data)

    @property
    def sent(self) -> list[int]:
        """Offsets of the parts that had something in them."""
        return [part.offset for part in self.parts if part.data]


class Session:
    """A session with one rank that is asked for a profile; its relay is the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spool, self.clock = folder / "session", folder / "spool", Clock()
        self.spool.mkdir()
        self.aggregator = aggregation(self.folder, self.clock)
        self.relay, self.rank = Relay(), Rank(0, 1)
        for _ in range(3):
            self.say()
            self.aggregator.judge()
        ask(self.aggregator, "start_profile", request=wire.ProfileRequest("0"), id="me")
        self.aggregator.judge()
        (command,) = codec.decode(self.say(), wire.RelayReply).commands
        self.args: dict[str, Any] = dict(command.args)
        self.trace = leave_trace(self.spool, self.rank.process_id)
        self.way = Way(self.aggregator)
        self.sender = self.new_sender()

    def new_sender(self) -> TraceSender:
        return TraceSender(self.way, self.spool, self.clock.timer)

    def say(self, **fields: Any) -> bytes:
        reply = self.aggregator.ingest(self.relay.message(self.rank.batch(10, **fields)))
        assert self.aggregator.commit()
        return reply

    def capture(self, folder: Path | None = None, size: int = len(TRACE), number: int = 0) -> wire.Capture:
        number = number or self.args["number"]
        steps = [(self.args["first_step"], 1, 2, None)]
        place = str(folder or self.trace)
        return wire.Capture(self.args["id"], number, "sending", "", size, steps, folder=place)

    def offer(self, capture: wire.Capture | None = None) -> None:
        """The relay gets a batch that says where the trace is, and passes it on."""
        capture = capture or self.capture()
        self.say(capture=capture)
        self.sender._running = True  # the test takes its turns
        self.sender.offer(self.rank.process_id, capture)

    def turn(self, turns: int = 1000, until: Callable[[], object] = lambda: False) -> None:
        for _ in range(turns):
            wait_s = self.sender.tick()
            assert self.aggregator._profiling._files.wait(240)
            if wait_s is None or until():
                return
            self.clock.tick(wait_s)

    def restart_aggregator(self) -> None:
        """It is killed: nothing of it goes on."""
        assert self.aggregator._profiling._files.wait(240)
        self.aggregator._writer.close()
        self.aggregator = aggregation(self.folder, self.clock)
        self.way.attach(self.aggregator)
        self.aggregator.judge()

    def over(self) -> Profile:
        """Return what became of the profile."""
        self.aggregator.judge()
        assert self.aggregator._profiling._files.wait(240)
        (stored,) = profiles.profiles_of(self.folder)
        return stored.profile

    def kept(self) -> bytes:
        (rank,) = self.over().ranks
        assert rank.state == "captured", rank
        return (self.folder / profiles.FOLDER / self.args["id"] / str(rank.file)).read_bytes()

    def failed(self) -> str:
        (rank,) = self.over().ranks
        assert rank.state == "failed"
        return str(rank.reason)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def test_trace_comes_whole_and_slowly_beside_the_rows(session: Session) -> None:
    began = session.clock.now
    session.offer()
    session.turn()
    assert session.kept() == TRACE
    assert session.way.sent == [*range(0, len(TRACE), PART_BYTES)]
    assert session.clock.now - began >= 1e9 * 5 * PART_BYTES / (32 << 20)
    before = len(session.way.parts)
    session.offer()
    session.turn()
    assert len(session.way.parts) == before


def test_relay_that_is_killed_half_way_goes_on_where_it_was(session: Session) -> None:
    session.offer()
    session.turn(until=lambda: len(session.way.sent) == 3)
    session.way.part_replies(0)
    session.sender = session.new_sender()
    session.offer()
    session.turn()
    assert session.kept() == TRACE
    assert session.way.sent == [*range(0, len(TRACE), PART_BYTES)]


def test_aggregator_that_is_killed_half_way_goes_on_where_it_was(session: Session) -> None:
    session.offer()
    session.turn(until=lambda: len(session.way.sent) == 3)
    session.way.up = False
    session.turn(6)
    session.restart_aggregator()
    session.way.up = True
    session.say(capture=session.capture())
    commands = session.aggregator._profiling.commands
    assert [command.args["id"] for command in commands] == [session.args["id"]]  # a rank keeps its trace
    session.turn()
    assert session.kept() == TRACE
    assert session.way.sent == [*range(0, len(TRACE), PART_BYTES)]
    (profile,) = (stored.profile for stored in profiles.profiles_of(session.folder))
    assert profile.requests == ["me"] and profile.ranks[0].steps


def test_profile_under_way_when_its_aggregator_was_killed_ends_with_a_reason(session: Session) -> None:
    session.aggregator.judge()
    assert session.aggregator._profiling._files.wait(240)
    session.restart_aggregator()
    session.aggregator.finish(wire.Finish(codec.VERSION, 0))
    assert session.failed() == "the session ended before its trace had arrived"


def test_what_waited_when_the_aggregator_was_killed_is_done_after_what_was_begun(
    session: Session,
) -> None:
    request = wire.ProfileRequest("0", 1, shapes=True)
    session.aggregator.ingest(session.relay.message(requests=[wire.MeasureRequest("later", request)]))
    session.offer()
    session.turn(until=lambda: len(session.way.sent) == 2)
    assert session.aggregator.commit()
    session.restart_aggregator()
    session.say(capture=session.capture())
    session.turn()
    assert session.kept() == TRACE
    session.aggregator.judge()
    (command,) = session.aggregator._profiling.commands
    assert (command.args["steps"], command.args["shapes"]) == (1, 1)
    assert session.aggregator.commit() and session.aggregator._profiling.waiting() == []
    session.restart_aggregator()
    assert session.aggregator._profiling.waiting() == []
    (command,) = session.aggregator._profiling.commands
    assert (command.args["steps"], command.args["shapes"]) == (1, 1)
    assert not session.aggregator.errors


def test_requests_that_cannot_be_read_again_are_counted(session: Session) -> None:
    session.aggregator._profiling._ask_again([{}, {"requests": ["a"], "steps": "x"}, {"requests": 3}])
    assert session.aggregator.errors["profile that waited: KeyError"] == 1
    assert session.aggregator.errors["profile that waited: ValueError"] == 1
    assert session.aggregator.errors["profile that waited: TypeError"] == 1


def test_rank_that_dies_while_its_trace_is_sent_loses_nothing_of_it(session: Session) -> None:
    session.offer()
    session.turn(until=lambda: len(session.way.sent) == 2)
    session.aggregator.ingest(session.relay.message(lost=[session.rank.process_id]))
    session.sender.process_ended(session.rank.process_id)
    (session.spool / f"{FOLDER_PREFIX}{session.rank.process_id}-half").mkdir(0o700)  # as it was killed
    session.aggregator.judge()
    session.turn()
    assert session.kept() == TRACE and not list(session.spool.iterdir())


def test_rank_that_is_killed_leaves_nothing_behind(session: Session) -> None:
    session.sender._running = True
    session.sender.process_ended(session.rank.process_id)
    session.turn()
    assert not list(session.spool.iterdir())


def test_capture_that_is_begun_anew_is_sent_instead(session: Session) -> None:
    session.offer(session.capture(number=9))  # nobody wants that
    session.offer()
    session.turn()
    assert session.kept() == TRACE
    assert {part.number for part in session.way.parts if part.data} == {session.args["number"]}


def _link(session: Session) -> wire.Capture:
    (session.trace / TRACE_NAME).rename(session.spool / "elsewhere")
    (session.trace / TRACE_NAME).symlink_to(session.spool / "elsewhere")
    return session.capture()


def _linked_folder(session: Session) -> wire.Capture:
    (session.spool / "link").symlink_to(session.trace)
    return session.capture(session.spool / "link")


def _fifo(session: Session) -> wire.Capture:
    (session.trace / TRACE_NAME).unlink()
    os.mkfifo(session.trace / TRACE_NAME)
    return session.capture()


def _open_to_others(session: Session) -> wire.Capture:
    session.trace.chmod(0o755)
    return session.capture()


def _gone(session: Session) -> wire.Capture:
    (session.trace / TRACE_NAME).unlink()
    return session.capture()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_link, "Too many levels of symbolic links"),
        (_linked_folder, "Not a directory"),
        (_fifo, "is not a regular file of this user"),
        (_open_to_others, "is not private to this user"),
        (_gone, "No such file or directory"),
        (lambda session: session.capture(size=len(TRACE) + 1), f"has {len(TRACE)} bytes, not"),
    ],
)
def test_file_that_is_not_as_the_rank_said_is_not_read_and_the_reason_is_there(
    session: Session, change: Callable[[Session], wire.Capture], why: str
) -> None:
    capture = change(session)
    with pytest.raises(OSError, match=why):
        open_trace(capture.folder, capture.total_bytes or 0)
    session.offer(capture)
    session.turn()
    assert session.failed().startswith("its trace could not be read on its node: ")
    assert why in session.failed()


def test_file_that_becomes_shorter_is_given_up(session: Session) -> None:
    session.offer()
    session.turn(until=lambda: len(session.way.sent) == 2)
    os.truncate(session.trace / TRACE_NAME, 10)
    session.turn()
    assert "has become shorter" in session.failed()


def test_disk_that_is_full_ends_it_with_the_reason(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        if offset > 2 * PART_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(fd, data[:1000], offset)  # a part of it, first

    written = os.pwrite
    monkeypatch.setattr(profile_files.os, "pwrite", full)
    session.offer()
    session.turn()
    assert session.failed() == "its trace could not be kept: No space left on device"
    assert session.sender.tick() is None
    assert not list((session.folder / profiles.FOLDER).glob("*/rank-*"))


def test_disk_that_hangs_takes_one_part_and_delays_no_row(session: Session) -> None:
    hangs, files = threading.Event(), session.aggregator._profiling._files
    session.offer()
    files.do(hangs.wait)
    try:
        for _ in range(200):
            session.clock.tick(session.sender.tick() or 0.0)
        assert session.way.sent[:2] == [0, PART_BYTES] and set(session.way.sent[1:]) == {PART_BYTES}
        before = session.rank.produced
        session.say()
        session.aggregator.judge()
        with session.aggregator.stored() as file:
            (process,) = file.ranks().values()
        assert process.next_row == before + 10
    finally:
        hangs.set()
    session.turn()
    assert session.kept() == TRACE


def test_calls_hold_no_lock_of_rows(session: Session) -> None:
    session.offer()
    done = threading.Event()

    def send() -> None:
        session.turn()
        done.set()

    with session.aggregator._writer.lock:
        threading.Thread(target=send, daemon=True).start()
        assert done.wait(240)
    assert session.kept() == TRACE


def test_file_of_a_rank_that_hangs_holds_up_neither_relay_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, opening = threading.Event(), threading.Event()

    def waits(folder: str, size: int) -> int:
        opening.set()
        hangs.wait(240)
        return open_trace(folder, size)

    monkeypatch.setattr(bulk, "open_trace", waits)
    aggregator, rank = aggregation(tmp_path / "session"), Rank(0, 1)
    relay = RelayCore(
        tmp_path / "run" / "relay.sock",
        wire.NodeIdentity("n", "host", "127.0.0.1"),
        Asked(aggregator),
        NoSamples(),  # type: ignore[arg-type]
        Settings(),
        spool=tmp_path,
    )
    trace = leave_trace(tmp_path, rank.process_id)
    capture = wire.Capture("p", 1, "sending", "", len(TRACE), folder=str(trace))
    try:
        relay.accept(rank.batch(10, capture=capture))
        assert opening.wait(240)
        for _ in range(3):
            relay.accept(rank.batch(10, capture=capture))
            for _ in range(5):
                relay.poll()
        assert aggregator.commit()
        with aggregator.stored() as file:
            assert file.processes()[0].next_row > 0
    finally:
        relay.close()
        hangs.set()
        aggregator.close()


class Asked(Straight):
    """An aggregator that wants all of a trace."""

    def send_part(self, data: bytes) -> bool:
        self._parts.append(codec.encode(TraceReply(codec.VERSION, codec.decode(data, TracePart).offset)))
        return True


def test_aggregator_that_is_not_there_is_asked_again(session: Session) -> None:
    session.offer()
    session.way.up = False
    assert session.sender.tick() == 0.0 and session.sender.tick() == 0.0
    assert session.sender.tick() == pytest.approx(RETRY_S)
    assert session.sender.errors["bulk call: ConnectionError"] == 1
    session.clock.tick(RETRY_S)
    session.way.up = True
    session.turn()
    assert session.kept() == TRACE


def test_thread_sends_by_itself_and_ends(session: Session) -> None:
    session.sender = TraceSender(session.way, session.spool)
    capture = session.capture()
    session.say(capture=capture)
    session.sender.offer(session.rank.process_id, capture)
    for thread in threading.enumerate():
        if thread.name == "traceml-bulk":
            thread.join(240)
            assert not thread.is_alive()
    assert session.kept() == TRACE


def test_reply_of_nobody_knows_whom_is_refused(session: Session) -> None:
    assert codec.decode(session.aggregator.bulk(b"x"), TraceReply).offset is None
    assert session.aggregator.errors["bulk: garbage"] == 1
    part = TracePart(codec.VERSION, "p", "p", 1, 10, 5, b"123456")
    session.aggregator.bulk(codec.encode(part))
    assert session.aggregator.errors["bulk: bad_columns"] == 1


def test_profile_of_a_process_that_is_not_known_any_more_is_failed(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.aggregator.judge()
    assert session.aggregator._profiling._files.wait(240)
    now = profiles.under_way(session.folder)
    assert now is not None
    now.ranks.append(RankProfile(1, "armed", process=99))
    profiles.show(session.folder, now)
    session.restart_aggregator()
    session.offer()
    session.turn()
    states = {rank.rank: (rank.state, rank.reason) for rank in session.over().ranks}
    assert states == {0: ("captured", None), 1: ("failed", "it is not known any more")}
