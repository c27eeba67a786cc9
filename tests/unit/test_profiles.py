"""Profiles on disk: they appear whole, are bounded, and only their own files are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from played import Played

from traceml_ray.store import profiles
from traceml_ray.store.profiles import Profile, RankProfile


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
    (found,) = profiles.profiles_of(tmp_path)
    assert found.path == path and [rank.rank for rank in found.profile.captured] == [0]
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
    ((found,), _) = msgspec.structs.astuple(profiles.listed(played.folder))
    assert found.profile.ranks[0].reason == "its trace could not be kept: No space left on device"
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
