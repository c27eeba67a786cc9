"""Profiles on disk: they appear whole, are bounded, and only their own files are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from played import Played
from sessions import Clock, Rank, Relay, aggregation, ask

from traceml_ray.monitor.captures import MAX_WAITING
from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, RankProfile
from traceml_ray.store.query import QueryError
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.messages import TracePart, TraceReply


def _profile(name: str, *ranks: RankProfile) -> Profile:
    return Profile(
        id=name,
        session="s",
        run=None,
        time="2026-01-01T00:00:00Z",
        t_ns=1,
        why="it was requested.",
        first_step=10,
        n_steps=3,
        ranks=list(ranks),
        traceml_ray="0",
    )


def _stored(folder: Path, name: str, size: int = 1000) -> Path:
    here = profiles.unfinished(folder, name)
    (here / "rank-0.json.gz").write_bytes(bytes(size))
    (here / "rank-1.json.gz").write_bytes(b"half of it")
    captured = RankProfile(0, "captured", file="rank-0.json.gz")
    return profiles.finish(folder, _profile(name, captured, RankProfile(1, "failed", "it ended")))


def test_profile_appears_whole_and_without_traces_that_are_not(tmp_path: Path) -> None:
    assert not profiles.names_of(tmp_path)
    path = _stored(tmp_path, "a")
    (listed,) = profiles.profiles_of(tmp_path)
    assert listed.path == path and [rank.rank for rank in listed.profile.captured] == [0]
    assert {file.name for file in path.iterdir()} == {"profile.json", "rank-0.json.gz"}
    assert profiles.read_part(tmp_path, "a", "rank-0.json.gz", 990, 100) == bytes(10)


def test_profile_without_room_for_its_traces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(folder: Path, profile: Profile) -> None:
        if len([*profiles.unfinished(folder, profile.id).iterdir()]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(folder, profile)

    original = profiles.show
    monkeypatch.setattr(profiles, "show", show)
    played = Played(tmp_path / "s", 1)
    (profiles.unfinished(played.folder, "a") / "rank-0.json.gz").write_bytes(b"trace")
    played.aggregator._profiling._finish(_profile("a", RankProfile(0, "captured", file="rank-0.json.gz")))
    ((listed,), _) = msgspec.structs.astuple(profiles.listed(played.folder))
    assert listed.profile.ranks[0].reason == "its trace could not be kept: No space left on device"
    played.aggregator.close()


def test_only_own_files_of_a_profile_are_read(tmp_path: Path) -> None:
    _stored(tmp_path, "a")
    (tmp_path / "secret").write_text("x")
    for profile, name in (("a", "../../secret"), ("..", "secret"), (".unfinished-b", "x"), ("a", "\0")):
        assert profiles.read_part(tmp_path, profile, name, 0, 10) == b""
    assert not profiles.remove_profile(tmp_path, "..") and profiles.remove_profile(tmp_path, "a")


def test_oldest_profiles_go_first_and_the_newest_stays(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        _stored(tmp_path, name, 10_000)
    assert profiles.prune(tmp_path, 25_000) == ["a"]
    assert profiles.prune(tmp_path, 1) == ["b"] and profiles.names_of(tmp_path) == ["c"]


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    profiles.unfinished(tmp_path, "a"), profiles.unfinished(tmp_path, "b")
    profiles.clear_unfinished(tmp_path, but="b")
    assert [path.name for path in (tmp_path / profiles.FOLDER).iterdir()] == [".unfinished-b"]


def test_manifest_that_names_a_foreign_file_is_refused(tmp_path: Path) -> None:
    here = profiles.unfinished(tmp_path, "a")
    profiles.finish(tmp_path, _profile("a", RankProfile(0, "captured", file="../../x")))
    assert not here.exists() and not profiles.profiles_of(tmp_path)
    with pytest.raises(ValueError, match="is not the name of a trace"):
        profiles.read_profile(tmp_path / profiles.FOLDER / "a")


def test_disk_that_hangs_holds_up_neither_rows_nor_verdict_nor_questions_nor_the_end(tmp_path: Path) -> None:
    """The file of a trace is a FIFO that nobody reads: whoever opens it waits."""
    clock = Clock()
    aggregator, relay, rank = aggregation(tmp_path, clock), Relay(), Rank(0, 1)
    for _ in range(3):
        aggregator.ingest(relay.message(rank.batch(40)))
        aggregator.judge()
    ask(aggregator, "start_profile", request=wire.ProfileRequest("0"), id="me")
    aggregator.judge()
    (command,) = codec.decode(aggregator.ingest(relay.message(rank.batch(1))), wire.RelayReply).commands
    profile, number = str(command.args["id"]), int(command.args["number"] or 0)
    fifo = profiles.unfinished(tmp_path, profile) / profiles.trace_name(0)
    os.mkfifo(fifo)
    capture = wire.Capture(profile, number, "sending", "", 5, [(200, 1, 2, None)])
    part = TracePart(codec.VERSION, rank.process_id, profile, number, 5, 0, b"trace")
    try:
        aggregator.ingest(relay.message(rank.batch(40, capture=capture)))
        for _ in range(3):
            reply = codec.decode(aggregator.bulk(codec.encode(part)), TraceReply)
            assert reply.offset == 5 and reply.pause_s > 0  # it is held, and no other is taken
        for _ in range(3):
            aggregator.ingest(relay.message(rank.batch(40)))
            clock.tick()
            assert aggregator.commit()
            aggregator.judge()
        assert aggregator.verdict is not None and aggregator.verdict.to_step == 280
        assert ask(aggregator, "verdict")["label"] == aggregator.verdict.label
        aggregator.ingest(relay.message(rank.batch(0, final=True)))
        aggregator.finish(wire.Finish(codec.VERSION, 0))
        assert (tmp_path / "summary.json").exists()
        assert aggregator.errors["profile: not written before the end"] == 1
    finally:
        os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))


def test_rank_and_relay_ask_for_the_same_as_a_driver(tmp_path: Path) -> None:
    aggregator, relay, rank = aggregation(tmp_path, Clock()), Relay(), Rank(0, 1)
    request = wire.ProfileRequest("0")
    by_rank, by_relay = (wire.MeasureRequest(who, request) for who in ("rank", "relay"))
    aggregator.ingest(relay.message(rank.batch(40, requests=[by_rank]), requests=[by_relay]))
    ask(aggregator, "start_profile", request=request, id="driver")
    aggregator.judge()
    profile = profiles.under_way(tmp_path)
    while profile is None:
        profile = profiles.under_way(tmp_path)
    assert profile.requests == ["rank", "relay", "driver"]


def test_request_that_is_one_too_many_is_refused_at_once(tmp_path: Path) -> None:
    aggregator = aggregation(tmp_path, Clock())
    for rank in range(MAX_WAITING):
        ask(aggregator, "start_profile", request=wire.ProfileRequest(str(rank)), id=f"me{rank}")
    with pytest.raises(QueryError, match="no profile: 8 profiles wait already; ask again"):
        ask(aggregator, "start_profile", request=wire.ProfileRequest("9"), id="last")
    ask(aggregator, "start_profile", request=wire.ProfileRequest("0"), id="joins")
