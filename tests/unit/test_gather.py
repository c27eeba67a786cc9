"""Which files a path stands for, and what becomes of those that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sessions import SECOND, Clock, Rank, Relay, aggregation
from stormlog_example import MIB, events, write

from traceml_ray.importers.gather import gather
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.store.bundles import Manifest
from traceml_ray.store.excerpt import cut


def session(folder: Path, ranks: int = 2) -> Path:
    """A session of one run whose ranks have each sent 5 samples of their process."""
    clock = Clock()
    aggregator, relay = aggregation(folder, clock), Relay()
    every = [Rank(number, ranks) for number in range(ranks)]
    for second in range(5):
        sample = MemorySample(clock.now, 2 * second, None, rss_bytes=(100 + second) * MIB)
        aggregator.ingest(relay.message(*(rank.batch(2, memory=[sample]) for rank in every)))
        clock.tick()
    aggregator.commit()
    return folder


def test_session_gives_each_rank_its_resident_memory(tmp_path: Path) -> None:
    folder = session(tmp_path / "s")
    for path in (folder, folder / "session.sqlite", tmp_path):
        gathered = gather([path])
        assert (gathered.refused, gathered.passed_over) == ({}, [])
        (source,) = gathered.files
        assert (source.path, source.contents.format) == (folder / "session.sqlite", "traceml-ray session")
        ranks = source.contents.recordings
        assert [
            (source_rank.rank, source_rank.world_size, source_rank.run, source_rank.node)
            for source_rank in ranks
        ] == [
            (0, 2, "job", "host-0"),
            (1, 2, "job", "host-0"),
        ]
        assert [*ranks[1].columns["rss_bytes"]] == [(100 + second) * MIB for second in range(5)]
        assert ranks[1].step is not None and [*ranks[1].step] == [0, 2, 4, 6, 8]
        assert ranks[1].t_ns[4] - ranks[1].t_ns[0] == 4 * SECOND
        assert ranks[1].first_step_ns == ranks[1].t_ns[1]


def test_bundle_says_what_it_was_made_of(tmp_path: Path) -> None:
    folder = session(tmp_path / "s") / "bundles" / "20261123T081701-oom"
    folder.mkdir(parents=True)
    cut(tmp_path / "s/session.sqlite", folder / "session.sqlite", 60, 10)
    unknown: dict[str, Any] = dict.fromkeys(("run", "node", "step", "stage", "exception", "traceback"))
    lists: dict[str, Any] = {name: [] for name in ("causes", "deaths", "silent_ranks", "environment")}
    manifest = Manifest(
        session="s",
        reason="oom",
        time="2026-11-23T08:17:01+00:00",
        t_ns=1,
        rank=1,
        why="rank 1 ran out of memory",
        ranks={},
        memory_from=[],
        settings={},
        files={},
        **{"traceml_ray": "1"} | unknown | lists,
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (source,) = gather([folder.parent]).files
    assert source.contents.format == "traceml-ray bundle"
    assert source.contents.notes == ["2026-11-23 08:17:01 UTC: rank 1 ran out of memory"]
    assert [recording.rank for recording in source.contents.recordings] == [0, 1]
    (source,) = gather([tmp_path]).files  # the session has all that its bundles have
    assert source.contents.format == "traceml-ray session"


def test_folder_is_read_with_all_below_it_and_a_file_once(tmp_path: Path) -> None:
    first = write(tmp_path / "a/events.json", events([MIB]))
    write(tmp_path / "b/deep/track.csv", events([MIB]))
    (tmp_path / "b/link").symlink_to(tmp_path)  # no circle
    (tmp_path / "b/notes.txt").write_text("of no interest")
    (tmp_path / "b/manifest.json").write_text("{}")
    (tmp_path / "b/other.json").write_text('{"a": 1}')
    (tmp_path / "b/catalog.sqlite").write_bytes(b"of another program")
    gathered = gather([tmp_path, first, tmp_path / "a"])
    assert [file.path.name for file in gathered.files] == ["events.json", "track.csv"]
    assert [path.name for path in gathered.passed_over] == ["catalog.sqlite", "other.json"]
    assert gathered.refused == {}


def test_file_that_cannot_be_used_stops_no_other(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", events([MIB]))
    (tmp_path / "cut.json").write_text(good.read_text()[:-20])
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "model.pt").write_text("x")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/session.sqlite").write_bytes(b"x" * 5000)
    os.mkfifo(tmp_path / "pipe.json")
    names = ("cut.json", "empty.json", "model.pt", "gone.json", "gone", "bad", "pipe.json", "a\0b")
    gathered = gather([*(tmp_path / name for name in names), good])
    assert [file.path for file in gathered.files] == [good]
    reasons = {path.relative_to(tmp_path).as_posix(): why for path, why in gathered.refused.items()}
    expected = {
        "cut.json": "it is not valid JSON: Input data was truncated",
        "empty.json": "it has no memory samples",
        "model.pt": "it is neither a session (session.sqlite) nor one of .csv, .json, .jsonl",
        "gone.json": "No such file or directory",
        "gone": "No such file or directory",
        "bad/session.sqlite": "cannot use the session file: file is not a database",
        "pipe.json": "not a regular file",
        "a\0b": "embedded null byte",
    }
    assert {name: why for name, why in reasons.items() if why != expected[name]} == {}
    assert reasons.keys() == expected.keys()


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank_3/events.json", 3),
        ("run/rank-12_track.json", 12),
        ("rank7/out/track.json", 7),
        ("rank_1/events-rank2.json", 2),
        ("local_rank_3/events.json", None),
        ("frank3/events.json", None),
        ("rank/events.json", None),
    ],
)
def test_rank_that_a_file_does_not_say_is_in_its_name(tmp_path: Path, name: str, rank: int | None) -> None:
    top = tmp_path / "rank_99"
    path = write(top / "in" / name, events([MIB]))
    (file,) = gather([top / "in"]).files
    assert [recording.rank for recording in file.contents.recordings] == [rank]
    if rank in (3, 12, 2):
        (file,) = gather([path]).files
        assert [recording.rank for recording in file.contents.recordings] == [rank]


def test_rank_that_a_file_says_is_not_taken_from_its_name(tmp_path: Path) -> None:
    write(tmp_path / "rank_3/events.json", events([MIB], rank=1, world=4))
    (file,) = gather([tmp_path]).files
    assert file.contents.recordings[0].rank == 1
