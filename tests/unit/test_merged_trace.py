"""One trace of many ranks: valid, on one clock, with arrows between the parts of a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import WALL_NS, operation, profiled, training, written
from trace_format import check, processes

from traceml_ray.analysis.row_table import begins
from traceml_ray.stages import STAGES
from traceml_ray.store.profiles import Profile, ProfileStep, RankProfile, StoredProfile
from traceml_ray.traces import sources
from traceml_ray.traces.chrome import TraceError
from traceml_ray.traces.merged_trace import MergedSummary, merge
from traceml_ray.traces.sources import Source, intervals

MS = 1_000_000


def _steps(*ends_ms: float) -> tuple[ProfileStep, ...]:
    """Return steps of 10 ms each, whose rows end 2 ms before they do."""
    row = [1 * MS, 1 * MS, 0, 3 * MS, 4 * MS, 1 * MS]
    ends = [WALL_NS + round(end * MS) for end in ends_ms]
    return tuple(
        ProfileStep(number, end - 10 * MS, end, end - 2 * MS, row) for number, end in enumerate(ends)
    )


def _gloo(name: str, begin_ms: float, length_ms: float, dims: int = 4) -> dict[str, Any]:
    event = operation(f"gloo:{name}", begin_ms * 1000, length_ms * 1000, cat="user_annotation", tid=9)
    return event | {"args": {"Input Dims": [[dims]]}}


def _job(tmp_path: Path, *ranks: list[dict[str, Any]], **more: Any) -> list[Source]:
    return [
        Source(written(tmp_path / f"rank-{rank}.json.gz", events), rank, "ab", "node-0", 0, 1000, **more)
        for rank, events in enumerate(ranks)
    ]


def _arrows(document: dict[str, Any]) -> list[tuple[str, float, str, float]]:
    names = processes(document)
    ends: dict[int, list[Any]] = {}
    for event in document["traceEvents"]:
        if event.get("cat") == "collective":
            ends.setdefault(event["id"], []).extend((names[event["pid"]], event["ts"] / 1000))
    return sorted(tuple(ends_of_arrow) for ends_of_arrow in ends.values())  # type: ignore[misc]


def test_real_traces_become_one_that_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = training()
    for rank in (0, 1):
        profiled(tmp_path / f"rank{rank}.json", run, profile_memory=True, record_shapes=True)
    done: list[float] = []
    merged = merge(sources.sources_of_files([tmp_path]), tmp_path / "m.json.gz", progress=done.append)
    document = check(tmp_path / "m.json.gz")
    assert sorted(processes(document).values()) == [rank.label for rank in merged.ranks]
    assert sum(event["name"] == "aten::mm" for event in document["traceEvents"]) == 2 * 2 * 3
    assert {event["cat"] for event in document["traceEvents"] if event["ph"] == "s"} == {"fwdbwd"}
    assert done == [0.25, 0.5, 0.75, 1.0] and merged.notes[0].startswith(
        "Times are by the clock of each node"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.json", "rank1.json", "m.json.gz"}


def test_ranks_are_on_one_clock_and_say_how_far_off(tmp_path: Path) -> None:
    events = [operation("aten::mm", 1000, 500)]
    late = [operation("aten::mm", 3_001_000, 500)]  # by a clock that is 3 s ahead
    ranks = _job(tmp_path, events, late)
    ranks[1] = Source(ranks[1].path, 1, "cd", "node-1", -3_000_000_000, 250_000)
    merge(ranks, tmp_path / "m.json.gz")
    document = check(tmp_path / "m.json.gz")
    assert [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"] == [0.0, 0.0]
    assert document["baseTimeNanoseconds"] == WALL_NS + MS
    stated = [(rank["clock_offset_ns"], rank["clock_bound_ns"]) for rank in document["traceml_ray"]["ranks"]]
    assert stated == [(0, 1000), (-3_000_000_000, 250_000)] and document["traceml_ray"]["notes"] == []
    labels = [event["args"] for event in document["traceEvents"] if event["name"] == "process_labels"]
    assert labels == [{"labels": "clock ± 0 ms"}, {"labels": "clock ± 0.25 ms"}]


def test_steps_and_rows_are_a_process_of_their_own(tmp_path: Path) -> None:
    steps = _steps(20, 30)
    merge(_job(tmp_path, [operation("aten::mm", 12_000, 5)], steps=steps), tmp_path / "m.json.gz")
    document = check(tmp_path / "m.json.gz")
    names = processes(document)
    assert sorted(names.values()) == ["node-0 / rank 0", "node-0 / rank 0 / steps"]
    steps_shown = [event for event in document["traceEvents"] if event.get("cat") == "step"]
    begin = (document["baseTimeNanoseconds"] - WALL_NS) / MS
    laid = [(event["name"], event["ts"] / 1000 + begin, event["dur"] / 1000) for event in steps_shown]
    assert laid[:2] == [("step 0", 10, 10), ("step 1", 20, 10)]
    assert laid[2:8] == [
        ("row 0", 8, 10),
        ("post_sync", 8, 1),
        ("data", 9, 1),
        ("forward", 10, 3),
        ("backward", 13, 4),
        ("sync_wait", 17, 1),
    ]


def test_stages_of_a_row_are_laid_out_backwards_from_its_end_and_rows_do_not_overlap() -> None:
    steps = [*_steps(20, 29.5)]
    pieces = intervals([*steps, ProfileStep(9, WALL_NS + 40 * MS, WALL_NS + 50 * MS, None)])
    rows = [piece for piece in pieces if not piece.stage]
    assert [(piece.end_ns - piece.begin_ns) / MS for piece in rows] == [10, 9.5]
    assert rows[0].end_ns == rows[1].begin_ns and {piece.stage for piece in pieces} - {""} < {*STAGES}
    stages = np.array([[1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1]])
    assert begins(stages).tolist() == [[0, 1, 3, 6, 10, 15], [0, 1, 2, 3, 4, 5]]
    assert begins(stages, np.array([False, True]))[1].tolist() == [21, 22, 23, 24, 25, 26]


def test_arrows_go_from_the_rank_that_came_last_to_those_that_waited(tmp_path: Path) -> None:
    ranks = [[_gloo("all_reduce", begin, 20 - begin), _gloo("all_reduce", 22, 1)] for begin in (11, 15, 13)]
    merged = merge(_job(tmp_path, *ranks, steps=_steps(20, 30)), tmp_path / "m.json.gz")
    assert (merged.collectives, merged.unmatched, merged.apart) == (2, 0, 0)
    document = check(tmp_path / "m.json.gz")
    base = (document["baseTimeNanoseconds"] - WALL_NS) / MS
    first = [arrow for arrow in _arrows(document) if arrow[1] + base < 20]
    assert [(arrow[0][-1], arrow[2][-1]) for arrow in first] == [("1", "0"), ("1", "2")]
    assert all(arrow[1] + base == 15 and arrow[3] + base == pytest.approx(20) for arrow in first)


def test_parts_are_matched_within_a_step_and_only_where_all_have_equally_many(tmp_path: Path) -> None:
    whole = [
        _gloo("all_reduce", 12, 1),
        _gloo("all_reduce", 22, 1),
        _gloo("broadcast", 24, 1),
        _gloo("barrier", 5, 1),
    ]
    less = [_gloo("all_reduce", 22.5, 1), _gloo("broadcast", 24, 1, dims=5)]
    merged = merge(_job(tmp_path, whole, less, steps=_steps(20, 30)), tmp_path / "m.json.gz")
    assert (merged.collectives, merged.unmatched) == (1, 3)  # the barrier is before what was recorded
    assert len(_arrows(check(tmp_path / "m.json.gz"))) == 1


def test_numbers_of_torch_tell_collectives_of_groups_apart(tmp_path: Path) -> None:
    def nccl(seq: int, begin: float, group: str) -> dict[str, Any]:
        args = {"Collective name": "allreduce", "Process Group Name": group, "Seq": seq}
        return operation("ncclDevKernel_AllReduce", begin, 9, cat="kernel", pid=0, tid=20) | {"args": args}

    listed = [{"pg_name": "0", "ranks": [0, 1, 2]}, {"pg_name": "1", "ranks": [0, 1]}]
    for rank, events in enumerate(
        (
            [nccl(4, 0, "0"), nccl(7, 10, "1")],
            [nccl(4, 1, "0"), nccl(7, 12, "1")],
            [nccl(4, 2, "0"), nccl(8, 20, "0")],
        )
    ):
        info = {"rank": rank, "world_size": 3, "pg_config": listed}
        written(tmp_path / f"{rank}.json", [operation("aten::mm", 0, 1), *events], distributedInfo=info)
    merged = merge(sources.sources_of_files([tmp_path]), tmp_path / "m.json.gz")
    assert (merged.collectives, merged.unmatched) == (2, 1)
    document = check(tmp_path / "m.json.gz")
    assert [(arrow[0], arrow[2]) for arrow in _arrows(document)] == [
        ("rank 1 / GPU 0", "rank 0 / GPU 0"),
        ("rank 2 / GPU 0", "rank 0 / GPU 0"),
        ("rank 2 / GPU 0", "rank 1 / GPU 0"),
    ]


def test_parts_that_clocks_cannot_have_so_far_apart_have_no_arrow(tmp_path: Path) -> None:
    ranks = [[_gloo("all_reduce", begin, 1)] for begin in (11, 15)]
    merged = merge(_job(tmp_path, *ranks, steps=_steps(20)), tmp_path / "m.json.gz")
    assert (merged.collectives, merged.apart) == (1, 1)
    assert _arrows(check(tmp_path / "m.json.gz")) == []


def test_ids_and_threads_of_ranks_stay_apart(tmp_path: Path) -> None:
    flow = [
        {"ph": kind, "id": given, "pid": 7, "tid": 7, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd"} | more
        for given in (1, "0x1")
        for kind, ts, more in (("s", 1, {}), ("f", 5, {"bp": "e"}))
    ]
    other = operation("x", 0, 3, pid="helper", tid="worker")
    ends = [{"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 3, "s": "g"}]
    merge(_job(tmp_path, *[[operation("a", 0, 9), other, *flow, *ends]] * 2), tmp_path / "m.json.gz")
    document = check(tmp_path / "m.json.gz")
    assert len({event["id"] for event in document["traceEvents"] if event["ph"] == "s"}) == 4
    assert len(processes(document)) == 4 and "node-0 / rank 1 / helper" in processes(document).values()


def test_traces_without_a_wall_clock_begin_together_and_it_is_said(tmp_path: Path) -> None:
    for rank, begin in enumerate((5000, 900)):
        written(tmp_path / f"rank{rank}.json", [operation("a", begin, 2)], baseTimeNanoseconds=0)
    merged = merge(sources.sources_of_files([tmp_path]), tmp_path / "m.json.gz")
    document = check(tmp_path / "m.json.gz")
    assert [event["ts"] for event in document["traceEvents"] if event["ph"] == "X"] == [0, 0]
    assert [note for note in merged.notes if "rank 1: its times are not of the wall clock" in note]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    good = written(tmp_path / "a.json", [operation("a", 1, 2)])
    bad = tmp_path / "b.json"
    bad.write_bytes(good.read_bytes()[:-20])
    for given in ([], [Source(good), Source(bad)]):
        with pytest.raises(TraceError):
            merge(given, tmp_path / "m.json.gz")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json"}


def test_profile_says_who_and_why(tmp_path: Path) -> None:
    rank = RankProfile(5, "captured", node_id="ab", node="node-1", file="rank-5.json.gz", clock_offset_ns=7)
    written(tmp_path / "rank-5.json.gz", [operation("a", 1, 2)])
    profile = Profile(
        id="p1",
        session="s",
        run=None,
        time="",
        t_ns=1,
        why="it was asked for.",
        first_step=1,
        n_steps=3,
        ranks=[RankProfile(6, "failed"), rank],
        traceml_ray="0",
    )
    merged: MergedSummary = merge(
        sources.sources_of_profile(StoredProfile(tmp_path, profile)), tmp_path / "m.json.gz", profile
    )
    assert merged.profile == "p1" and [rank.label for rank in merged.ranks] == ["node-1 / rank 5"]
    assert check(tmp_path / "m.json.gz")["traceml_ray"]["why"] == "it was asked for."


def test_arrows_go_from_calls_to_what_they_run(tmp_path: Path) -> None:
    def ran(name: str, *begins: float) -> list[dict[str, Any]]:
        return [operation(name, begin, 8, cat="user_annotation") for begin in begins]

    called = "rpc_async#run({} -> worker1)".format
    ranks = [
        ran(called("trainer"), 10, 30) + ran("rpc_sync#other(trainer -> worker1)", 50),
        ran("run", 5, 15, 35, 45),  # one was asked for before
        ran(called("third"), 20),
    ]
    merged = merge(_job(tmp_path, *ranks), tmp_path / "m.json.gz")
    document = check(tmp_path / "m.json.gz")
    ends = [event["ts"] for event in document["traceEvents"] if event.get("cat") == "rpc"]
    assert merged.calls == 3 and [ts + 5 for ts in ends] == [10, 15, 20, 35, 30, 45]
