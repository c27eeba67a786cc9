"""Recordings of many files as series of one run: who is who, and on whose clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stormlog_example import BEGAN_NS, MIB, SECOND, events, write

from traceml_ray.analysis.node_clock import UNCOMPARED_BOUND_NS
from traceml_ray.importers.gather import gather
from traceml_ray.signals.memory.recordings import MergedRecordings, merge


def merged(*paths: Path) -> MergedRecordings:
    gathered = gather(paths)
    assert gathered.refused == {}
    return merge([recording for file in gathered.files for recording in file.contents.recordings])


def test_files_of_one_process_are_one_series_with_each_sample_once(tmp_path: Path) -> None:
    records = events([second * MIB for second in range(10)], rank=1, world=2)
    write(tmp_path / "segment-000002.jsonl", records[4:])
    write(tmp_path / "segment-000001.jsonl", records[:6])
    write(tmp_path / "export.csv", records)
    one_run = merged(tmp_path)
    (series,) = one_run.timed
    assert [*series.columns["allocated_bytes"]] == [second * MIB for second in range(10)]
    assert (np.diff(series.t_ns) == SECOND).all()
    assert (series.rank, one_run.present, one_run.world_size, one_run.notes) == (1, {1}, 2, [])


def test_sample_whose_time_differs_a_little_between_files_is_one(tmp_path: Path) -> None:
    """Two cuts of one session, each put on one clock by what it knows of the clocks."""
    records = events([second * MIB for second in range(20)], rank=1, world=2)
    later = [record | {"timestamp_ns": record["timestamp_ns"] + 3_000_000} for record in records[3:15]]
    write(tmp_path / "whole.json", records[:6] + records[9:])
    write(tmp_path / "cut.json", later)
    (series,) = merged(tmp_path).timed
    assert [*series.columns["allocated_bytes"]] == [second * MIB for second in range(20)]
    assert (np.diff(series.t_ns) > 0).all()


def test_rank_that_starts_late_keeps_its_time(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", events([MIB] * 60, rank=0, world=2))
    write(tmp_path / "rank1.json", events([MIB] * 9, rank=1, world=2, began_ns=BEGAN_NS + 40 * SECOND))
    late = merged(tmp_path).timed[1]
    assert (late.rank, late.t_ns[0]) == (1, BEGAN_NS + 40 * SECOND)


def test_processes_of_unknown_number_are_numbered_by_the_names_of_their_files(tmp_path: Path) -> None:
    for number, name in enumerate(("c", "a", "b")):
        write(tmp_path / f"{name}.json", events([number * MIB], pid=number + 1))
    write(tmp_path / "named.json", events([7 * MIB], rank=1, world=4))
    one_run = merged(tmp_path)
    levels = {series.rank: series.columns["allocated_bytes"][0] / MIB for series in one_run.timed}
    assert levels == {0: 1, 1: 7, 2: 2, 3: 0}
    assert len(one_run.notes) == 1 and "ranks 0, 2 and 3 are numbered" in one_run.notes[0]


def test_one_process_alone_is_rank_0_without_a_word(tmp_path: Path) -> None:
    one_run = merged(write(tmp_path / "x.json", events([MIB]) + events([MIB], device=1)))
    assert [(series.rank, series.device) for series in one_run.timed] == [(0, 0), (0, 1)]
    assert one_run.notes == []


def test_of_several_runs_the_newest_is_taken(tmp_path: Path) -> None:
    for number, job in enumerate(("new", "old")):
        began = BEGAN_NS - number * 3600 * SECOND
        write(tmp_path / f"{job}.json", events([MIB] * 3, job=job, rank=1, world=2, began_ns=began))
    write(tmp_path / "none.json", events([MIB] * 3, rank=0, world=2))
    one_run = merged(tmp_path)
    assert (one_run.run, [series.rank for series in one_run.timed]) == ("new", [0, 1])
    assert len(one_run.notes) == 1 and "about new; not about old" in one_run.notes[0]


def test_clocks_of_several_nodes_have_an_assumed_bound(tmp_path: Path) -> None:
    one = write(tmp_path / "0.json", events([MIB], rank=0, world=2))
    other = write(tmp_path / "1.json", events([MIB], rank=1, world=2, host="node-b"))
    assert [series.bound_ns for series in merged(one).timed] == [0]
    one_run = merged(one, other)
    assert [series.bound_ns for series in one_run.timed] == [UNCOMPARED_BOUND_NS] * 2
    assert "node-a and node-b were not compared" in one_run.notes[0]


def test_files_that_do_not_say_the_node_may_be_of_several(tmp_path: Path) -> None:
    one = write(tmp_path / "0.json", events([MIB], rank=0, world=2, host="unknown"))
    other = write(tmp_path / "1.json", events([MIB], rank=1, world=2, host="unknown"))
    assert [(series.node, series.bound_ns) for series in merged(one).timed] == [("", 0)]
    one_run = merged(one, other)
    assert [series.bound_ns for series in one_run.timed] == [UNCOMPARED_BOUND_NS] * 2
    assert "nodes that are not known were not compared" in one_run.notes[0]


def test_ranks_without_wall_clock_times_are_apart(tmp_path: Path) -> None:
    write(tmp_path / "0.json", events([MIB] * 3, rank=0, world=2))
    write(tmp_path / "1.json", events([MIB] * 3, rank=1, world=2, began_ns=0))
    one_run = merged(tmp_path)
    assert [series.rank for series in one_run.timed] == [0]
    assert [(series.rank, [*series.t_ns]) for series in one_run.untimed] == [(1, [0, SECOND, 2 * SECOND])]
    assert "rank 1 have no wall-clock times" in one_run.notes[0]
