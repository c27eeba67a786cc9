"""What one rank does more of than others; what it waits for is no cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import WALL_NS, operation, written

from traceml_ray.reports.profiles import render_difference
from traceml_ray.store.profiles import ProfileStep
from traceml_ray.traces import difference as sets
from traceml_ray.traces.difference import OUTSIDE, Difference, RecordingError, difference
from traceml_ray.traces.sources import Source

MS = 1_000_000
ROW = [10 * MS, 10 * MS, 0, 40 * MS, 30 * MS, 10 * MS]
"""Of steps of 100 ms; a row begins 10 ms before its step, and has forward from 10 ms of the step to 50 ms."""


def steps(number: int) -> tuple[ProfileStep, ...]:
    begins = [WALL_NS + number * 100 * MS for number in range(number)]
    return tuple(
        ProfileStep(number, begin, begin + 100 * MS, begin + 90 * MS, ROW)
        for number, begin in enumerate(begins)
    )


def at_ms(name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    return operation(name, begin * 1000, length * 1000, **more)


def gloo(begin: float, length: float) -> dict[str, Any]:
    return at_ms("gloo:all_reduce", begin, length, cat="user_annotation", tid=9)


def compared(tmp_path: Path, *ranks: list[dict[str, Any]], n: int = 2, **asked: Any) -> Difference:
    """Return rank 0 beside the others; what happens in the first step happens in all."""
    sources = []
    for rank, events in enumerate(ranks):
        repeated = [event | {"ts": event["ts"] + 100_000 * number} for number in range(n) for event in events]
        sources.append(Source(written(tmp_path / f"{rank}.json", repeated), rank, steps=steps(n)))
    return difference(sources, 0, **asked)


def more(difference: Difference) -> dict[str, float]:
    return {row.name: round(row.more_ms, 3) for row in difference.operations if abs(row.more_ms) > 1e-6}


MM, ADD = at_ms("aten::mm", 20, 10), at_ms("aten::add", 60, 10)


def test_extra_calls_are_named_beside_the_median(tmp_path: Path) -> None:
    extra = [at_ms("aten::copy_", 32 + number, 0.5) for number in range(8)]
    difference = compared(tmp_path, [MM, ADD, *extra], [MM, ADD], [MM], [MM, ADD])
    assert more(difference) == {"aten::copy_": 4.0, OUTSIDE: -4.0}
    assert (difference.others, difference.steps, difference.step_ms) == ([1, 2, 3], 2, 100.0)
    assert difference.sentences == [
        "rank 0 spends 4 ms a step more in `aten::copy_` (8 calls more) than the median of ranks 1-3."
    ]
    text = render_difference(difference)
    assert text.startswith("Rank 0 spends 4 ms") and "aten::copy_" in text.split("per step, of 2 steps")[1]


def test_python_functions_are_the_same_at_another_address(tmp_path: Path) -> None:
    name = "<built-in method acquire of _thread.lock object at 0x7f{:04x}>"
    difference = compared(
        tmp_path, *([at_ms(name.format(rank), 10, 20, cat="python_function")] for rank in (0, 1))
    )
    assert {row.name for row in difference.operations} == {name.partition(" at")[0] + ">", OUTSIDE}


def test_calls_that_take_longer_are_named_as_many(tmp_path: Path) -> None:
    difference = compared(tmp_path, [MM, at_ms("aten::add", 60, 19)], [MM, ADD], beside=1)
    assert difference.sentences == [
        "rank 0 spends 9 ms a step more in `aten::add` (same number of calls) than rank 1."
    ]


def test_only_operations_of_the_stage_are_compared(tmp_path: Path) -> None:
    mine = [MM, at_ms("aten::relu", 35, 5), ADD, at_ms("aten::t", 75, 20)]
    difference = compared(tmp_path, mine, [MM, ADD], stage="forward")
    assert more(difference) == {"aten::relu": 5.0, OUTSIDE: -5.0} and difference.step_ms == 40
    assert "a step of `forward` more in `aten::relu`" in difference.sentences[0]
    assert more(compared(tmp_path, mine, [MM, ADD], stage="backward"))["aten::t"] == 20
    # Of the first step that was recorded, the optimizer had run before.
    assert compared(tmp_path, mine, [MM, ADD], stage="post_sync").steps == 1
    for number, stage, reason in ((1, "post_sync", "no complete `post"), (2, "middle", "is not a stage")):
        with pytest.raises(RecordingError, match=reason):
            compared(tmp_path, mine, [MM], n=number, stage=stage)


def test_waiting_in_a_collective_is_no_cause(tmp_path: Path) -> None:
    late = [MM, at_ms("aten::slow", 30, 40), gloo(70, 5)]
    waiting = [MM, gloo(30, 45)]
    difference = compared(tmp_path, late, waiting)
    assert more(difference) == {"aten::slow": 40.0} and round(difference.waiting_ms) == 5
    assert difference.sentences[1] == "It waits 40 ms a step less than rank 1: the others wait for it."
    difference = compared(tmp_path, waiting, late)
    assert more(difference) == {"aten::slow": -40.0} and difference.waits[0].name == "gloo:all_reduce"
    assert difference.sentences == [
        "rank 0 spends clearly more time a step in no operation than rank 1.",
        "It waits 40 ms a step more than rank 1: it waits for others.",
    ]


def test_the_sentence_on_waiting_and_its_table_have_one_figure(tmp_path: Path) -> None:
    """Three collectives in flight at once, the first behind a backward, are waited for once."""
    mine = [MM, gloo(70, 5)]
    waiting = [
        MM,
        gloo(25, 30),
        at_ms("gloo:all_reduce", 35, 40, cat="user_annotation", tid=10),
        at_ms("gloo:broadcast", 40, 20, cat="user_annotation", tid=11),
    ]
    difference = compared(tmp_path, mine, waiting)
    assert difference.other_waiting_ms == pytest.approx(45)  # from the end of mm, 30, to 75
    rows = {row.name: (row.self_cpu_ms, row.other_self_cpu_ms, row.more_ms) for row in difference.waits}
    assert rows["gloo:all_reduce"] == pytest.approx((5, 45, -40)) and "gloo:broadcast" not in [
        name for name, (_, other, _) in rows.items() if other > 1e-6
    ]
    assert sum(more for _, _, more in rows.values()) == pytest.approx(-40)
    assert difference.sentences[-1] == "It waits 40 ms a step less than rank 1: the others wait for it."


@pytest.mark.parametrize("category", ["user_annotation", "python_function"])
def test_waiting_inside_of_a_range_or_function_is_no_cause(tmp_path: Path, category: str) -> None:
    def around(begin: float, length: float) -> dict[str, Any]:
        return at_ms("train", begin, length, cat=category)

    difference = compared(tmp_path, [around(10, 80), MM, gloo(30, 45)], [around(10, 80), MM, gloo(70, 5)])
    assert more(difference) == {"train": -40.0}
    assert difference.waiting_ms - difference.other_waiting_ms == pytest.approx(40)


def test_time_in_no_operation_is_told_apart_from_waiting(tmp_path: Path) -> None:
    difference = compared(
        tmp_path, [MM, at_ms("aten::add", 60, 10), gloo(30, 20)], [MM, at_ms("aten::add", 60, 35)]
    )
    assert more(difference) == {OUTSIDE: 5.0, "aten::add": -25.0}
    assert difference.sentences[0].startswith("rank 0 spends 5 ms a step more outside of operations")


def test_waiting_for_a_device_and_its_work_are_told_apart(tmp_path: Path) -> None:
    def launched(length: float, nccl: float) -> list[dict[str, Any]]:
        return [
            at_ms("aten::mm", 20, 2, args={"External_id": 1}),
            at_ms("record_param_comms", 30, 1, args={"External_id": 2}),
            at_ms("cudaStreamSynchronize", 40, length + nccl, cat="cuda_runtime"),
            at_ms("gemm", 21, length, cat="kernel", pid=0, tid=7, args={"External_id": 1}),
            at_ms("ncclDevKernel_AllReduce", 50, nccl, cat="kernel", pid=0, tid=8, args={"External_id": 2}),
        ]

    difference = compared(tmp_path, launched(25, 2), launched(5, 22), n=1)
    assert more(difference) == {"aten::mm": 20.0} and difference.operations[0].on_device
    assert "more in `aten::mm` on the device (same number of calls)" in difference.sentences[0]
    assert {row.name for row in difference.waits} == {"record_param_comms", "cudaStreamSynchronize"}


def test_traces_without_known_steps_are_compared_by_their_own_or_whole(tmp_path: Path) -> None:
    marked = [at_ms("ProfilerStep#3", 0, 100, cat="user_annotation"), MM]
    for events, number in (([MM, ADD], 0), (marked, 1)):
        sources = [Source(written(tmp_path / f"{rank}.json", events), rank) for rank in (0, 1)]
        compared_traces = difference(sources, 0)
        assert compared_traces.steps == number and more(compared_traces) == {}
        with pytest.raises(RecordingError, match="rows of these steps"):
            difference(sources, 0, stage="forward")


def test_ranks_that_were_not_recorded_are_refused(tmp_path: Path) -> None:
    sources = [Source(written(tmp_path / "0.json", [MM]), 0), Source(written(tmp_path / "1.json", []), 1)]
    for asked, reason in (
        ((5,), "rank 5 was not recorded: the profile has ranks 0 and 1"),
        ((0, 7), "rank 7 was not recorded"),
        ((0, 0), "nothing to compare"),
        ((0, 1), "nothing was recorded of rank 1"),
    ):
        with pytest.raises(RecordingError, match=reason):
            difference(sources, *asked)
    with pytest.raises(RecordingError, match="only rank 0 was recorded"):
        difference(sources[:1], 0)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=8)


def _set(drawn: list[tuple[int, int]]) -> tuple[Any, set[int]]:
    pairs = np.array(drawn, np.int64).reshape(-1, 2)
    return sets.union(pairs[:, 0], pairs.sum(axis=1)), {
        t for begin, n in drawn for t in range(begin, begin + n)
    }


@given(spans, spans)
def test_sets_of_time_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    (a, points_a), (b, points_b) = _set(one), _set(other)
    for made, points in (
        (a, points_a),
        (sets.both(a, b), points_a & points_b),
        (sets.without(a, b), points_a - points_b),
    ):
        assert {t for begin, end in made.tolist() for t in range(begin, end)} == points
        assert sets.length(made) == len(points)
        assert {t for t in range(50) if sets.within(np.array([t]), made)[0]} == points
        assert (made[1:, 0] >= made[:-1, 1]).all() and (made[:, 1] > made[:, 0]).all()
