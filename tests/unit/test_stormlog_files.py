"""Stormlog's files: the same numbers out of every form, and a reason for each that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stormlog_example import BEGAN_NS, MIB, SECOND, events, of_cpu, write

from traceml_ray.importers.stormlog import read_stormlog
from traceml_ray.signals.memory.recordings import (
    NoSamplesError,
    Recording,
    RefusedFileError,
)

LEVELS = [100 * MIB, 120 * MIB, None, 90 * MIB]


def only(path: Path) -> Recording:
    (recording,) = read_stormlog(path).recordings
    return recording


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("name", ["events.json", "segment-000001.jsonl", "track.csv"])
def test_every_form_and_schema_gives_the_same_numbers(tmp_path: Path, name: str, version: int) -> None:
    recording = only(
        write(tmp_path / name, events(LEVELS, rank=3, world=8, version=version, outside=50 * MIB))
    )
    assert (recording.rank, recording.world_size, recording.node, recording.device) == (3, 8, "node-a", 0)
    assert recording.wall and recording.run is None and recording.bound_ns is None
    assert [*recording.t_ns] == [BEGAN_NS + second * SECOND for second in range(4)]
    mib = {name: values / MIB for name, values in recording.columns.items()}
    np.testing.assert_array_equal(mib["allocated_bytes"], [100, 120, np.nan, 90])
    np.testing.assert_array_equal(mib["reserved_bytes"], [102, 122, np.nan, 92])
    np.testing.assert_array_equal(mib["device_used_bytes"], [152, 172, np.nan, 142])
    np.testing.assert_array_equal(mib["inactive_split_bytes"], [1, 1, np.nan, 1])
    np.testing.assert_array_equal(mib["device_total_bytes"], [80_000] * 4)


@pytest.mark.parametrize("key", ["events", "telemetry_events"])
def test_events_are_also_read_inside_of_an_object(tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"session_summary": {"status": "completed"}, key: events([MIB] * 3)}))
    assert len(only(path).t_ns) == 3


def test_csv_with_whole_numbers_written_as_floats_keeps_its_times(tmp_path: Path) -> None:
    records = events([MIB, 3 * MIB])
    for record in records:
        record["allocator_allocated_bytes"] = float(record["allocator_allocated_bytes"])
        record["timestamp_ns"] += 1  # more digits than a float has
    recording = only(write(tmp_path / "x.csv", records))
    assert [*recording.t_ns] == [BEGAN_NS + 1, BEGAN_NS + SECOND + 1]
    assert [*recording.columns["allocated_bytes"]] == [MIB, 3 * MIB]


def test_used_memory_that_repeats_the_allocator_is_not_known(tmp_path: Path) -> None:
    recording = only(write(tmp_path / "x.json", events(LEVELS)))
    assert "device_used_bytes" not in recording.columns
    assert recording.columns["device_total_bytes"][0] == 80_000 * MIB


def test_cpu_tracker_gives_resident_memory_of_the_host(tmp_path: Path) -> None:
    recording = only(write(tmp_path / "x.csv", of_cpu([300 * MIB, 301 * MIB])))
    assert recording.device is None
    assert {name: [*values] for name, values in recording.columns.items()} == {
        "rss_bytes": [300 * MIB, 301 * MIB]
    }


def test_several_events_about_one_sample_count_once(tmp_path: Path) -> None:
    records = events([5 * MIB, 6 * MIB, 7 * MIB])
    peak = records[1] | {"event_type": "peak", "timestamp_ns": records[1]["timestamp_ns"] + 80_000}
    start = events([0])[0] | {"event_type": "start", "timestamp_ns": BEGAN_NS - SECOND}
    recording = only(write(tmp_path / "x.json", [start, records[0], records[1], peak, records[2]]))
    assert [*recording.columns["allocated_bytes"]] == [5 * MIB, 6 * MIB, 7 * MIB]


def test_processes_ranks_and_devices_of_one_file_are_apart(tmp_path: Path) -> None:
    records = events([MIB], rank=0, world=2) + events([MIB], rank=0, world=2, device=1)
    records += events([MIB], rank=1, world=2)
    recordings = read_stormlog(write(tmp_path / "x.json", records)).recordings
    assert sorted((one.rank, one.device) for one in recordings) == [(0, 0), (0, 1), (1, 0)]


def test_world_of_one_says_no_rank_and_torchruns_none_no_run(tmp_path: Path) -> None:
    recording = only(write(tmp_path / "x.json", events([MIB], job="none")))
    assert (recording.rank, recording.world_size, recording.run) == (None, None, None)
    assert only(write(tmp_path / "x.json", events([MIB], job="j7", rank=1, world=2))).run == "j7"


def test_times_that_are_not_of_the_wall_clock_are_marked(tmp_path: Path) -> None:
    assert not only(write(tmp_path / "x.json", events([MIB] * 3, began_ns=0))).wall


def test_events_without_a_version_are_read_as_a_dump_after_an_oom_has_them(tmp_path: Path) -> None:
    records = [
        {
            "timestamp": (BEGAN_NS + second * SECOND) / 1e9,
            "event_type": "sample",
            "session_id": "s",
            "memory_allocated": second * MIB,
            "memory_reserved": second * MIB + 5,
            "memory_change": 1,
            "device_id": 2,
            "rank": 1,
            "world_size": 4,
            "inactive_memory": 3,
            "device_total": 9 * MIB,
            "backend": "cuda",
        }
        for second in range(4)
    ]
    recording = only(write(tmp_path / "events.json", records))
    assert (recording.rank, recording.world_size, recording.device) == (1, 4, 2)
    assert abs(int(recording.t_ns[0]) - BEGAN_NS) < 1000
    assert [*recording.columns["allocated_bytes"]] == [0, MIB, 2 * MIB, 3 * MIB]
    assert recording.columns["device_total_bytes"][0] == 9 * MIB


def timeline(folder: Path, **more: Any) -> Path:
    seconds = [BEGAN_NS / 1e9 + second for second in range(5)]
    body = {"timestamps": seconds, "allocated": [1e6, 2e6, None, 4e6, 5e6], "reserved": [9e6] * 5, **more}
    folder.mkdir(exist_ok=True)
    (folder / "telemetry_timeline.json").write_text(json.dumps(body))
    return folder / "telemetry_timeline.json"


def test_timeline_is_that_of_the_process_in_the_manifest_beside_it(tmp_path: Path) -> None:
    path = timeline(tmp_path)
    session = {"session_id": "s", "host": "node-b", "pid": 7, "rank": 3, "world_size": 8, "job_id": "j"}
    path.with_name("manifest.json").write_text(json.dumps({"version": 2, "session": session}))
    recording = only(path)
    assert (recording.rank, recording.world_size, recording.node, recording.run, recording.device) == (
        3,
        8,
        "node-b",
        "j",
        0,
    )
    assert {*recording.columns} == {"allocated_bytes", "reserved_bytes"}
    assert np.isnan(recording.columns["allocated_bytes"][2])
    assert recording.wall and np.diff(recording.t_ns).tolist() == [SECOND] * 4


@pytest.mark.parametrize("where", [None, "metadata", "distributed_identity"])
def test_timeline_says_its_rank_itself(tmp_path: Path, where: str | None) -> None:
    identity = {"rank": 5, "local_rank": 1, "world_size": 8}
    recording = only(timeline(tmp_path, **({where: identity} if where else identity)))
    assert (recording.rank, recording.world_size) == (5, 8)


def test_timeline_of_a_cpu_is_resident_memory(tmp_path: Path) -> None:
    path = timeline(tmp_path)
    path.with_name("environment.json").write_text('{"system": {"detected_backend": "cpu"}}')
    path.with_name("manifest.json").write_text("not JSON at all")
    recording = only(path)
    assert (recording.device, recording.rank, [*recording.columns]) == (None, None, ["rss_bytes"])


def test_timeline_whose_lists_differ_in_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedFileError, match="differ in length: timestamps 5, allocated 5, reserved 1"):
        read_stormlog(timeline(tmp_path, reserved=[1.0]))


def changed(**fields: Any) -> list[dict[str, Any]]:
    records = events([MIB] * 3, rank=1, world=2)
    records[1] |= fields
    return records


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schema_version": 5}, "record 2 has schema 5; 2 to 4 are read"),
        ({"timestamp_ns": "now"}, "timestamp_ns"),
        ({"timestamp_ns": -1}, "timestamp_ns"),
        ({"allocator_allocated_bytes": -5}, "allocator_allocated_bytes"),
        ({"allocator_allocated_bytes": 1 << 80}, "allocator_allocated_bytes"),
        ({"rank": 5}, "rank 5 of a world of 2"),
        ({"rank": 1 << 40}, "rank"),
    ],
)
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.csv"])
def test_wrong_value_is_refused_with_its_place(
    tmp_path: Path, name: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RefusedFileError) as error:
        read_stormlog(write(tmp_path / name, changed(**fields)))
    assert reason in str(error.value)
    assert not isinstance(error.value, NoSamplesError)


def test_missing_field_is_named(tmp_path: Path) -> None:
    records = changed()
    for record in records:
        del record["device_id"]
    for name in ("x.json", "x.jsonl", "x.csv"):
        with pytest.raises(RefusedFileError, match="device_id"):
            read_stormlog(write(tmp_path / name, records))


@pytest.mark.parametrize("contents", ["", "[1, 2", "\x00\x01", "{'a': 1}", "[" * 100_000, '{"events": [}'])
def test_file_that_is_no_json_is_refused(tmp_path: Path, contents: str) -> None:
    (tmp_path / "x.json").write_text(contents)
    with pytest.raises(RefusedFileError, match="it is not valid JSON"):
        read_stormlog(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("x.json", "{}"),
        ("x.json", "[]"),
        ("x.json", "17"),
        ("x.json", '[1, "a"]'),
        ("x.json", '{"events": {"a": 1}}'),
        ("x.json", '{"timestamps": [], "allocated": []}'),
        ("x.jsonl", '{"a": 1}\n'),
        ("x.jsonl", ""),
        ("x.csv", "a,b\n1,2\n"),
        ("x.csv", ""),
    ],
)
def test_file_about_something_else_holds_no_samples(tmp_path: Path, name: str, contents: str) -> None:
    (tmp_path / name).write_text(contents)
    with pytest.raises(NoSamplesError):
        read_stormlog(tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_last_line_that_is_being_written_is_left_out(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, events([MIB] * 5))
    path.write_bytes(path.read_bytes()[:-300])
    file = read_stormlog(path)
    assert [len(recording.t_ns) for recording in file.recordings] == [4]
    assert "last line is incomplete" in file.notes[0]


def test_line_that_is_broken_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", events([MIB] * 5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:50] + "\n", *lines[3:]]))
    with pytest.raises(RefusedFileError, match="record 3:"):
        read_stormlog(path)
