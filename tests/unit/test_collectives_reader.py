"""What a rank reports of torch's flight recorder: the calls that matter, bounded."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceml_ray.signals.collectives import agent
from traceml_ray.signals.collectives.agent import CollectivesReader, ranges, report_of
from traceml_ray.signals.collectives.dumps import parsed
from traceml_ray.signals.collectives.records import AT_END, LAST_CALLS, MAX_CALLS
from traceml_ray.signals.collectives.reported import as_dump, collectives_of
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

NOW = 1_000_000_000_000


def entry(number: int, group: str = "0", **more: Any) -> dict[str, Any]:
    """Return an entry as torch records it, made `number` ms after the start."""
    return {
        "record_id": number - 1,
        "process_group": (group, "default_pg" if group == "0" else f"group {group}"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": NOW - 10**9 + number * 10**6,
        "input_sizes": [[8, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8, 4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "frames": [
            {"name": "all_reduce", "filename": f"{agent.__file__}", "line": 3},
            {"name": "average", "filename": "/job/train.py", "line": 60},
            {"name": "main", "filename": "/job/train.py", "line": 90},
        ],
        **more,
    }


def report(*entries: dict[str, Any], **members: list[int]) -> Any:
    made = report_of([{"entries": list(entries)}], "h1", NOW, members)
    assert made is not None
    assert codec.size_of(made) < agent.MAX_BYTES + 100
    return LAST_CALLS.decode(codec.encode_part(made))


def test_call_is_reported_with_the_line_of_the_user() -> None:
    made = report(entry(1), entry(2, retired=False), **{"0": [0, 1, 2, 3]})
    first, second = made.calls
    assert (first.finished, second.finished) == (True, False)
    assert (second.op, second.number, second.where) == ("all_reduce", 2, "average (train.py:60)")
    assert second.age_ns == 998_000_000
    (group,) = made.groups
    assert (group.name, group.description, group.ranks) == ("0", "default_pg", [(0, 4, 1)])
    assert (group.enqueued, group.completed, made.whole) == (2, 1, True)
    rank = collectives_of(made, 3)
    assert rank.groups[0].ranks == (0, 1, 2, 3)
    assert (rank.calls[1].in_sizes, rank.calls[1].created_ns) == (((8, 4),), NOW - 998_000_000)


def test_oldest_unfinished_call_is_reported_whatever_came_after() -> None:
    calls = [entry(i, retired=i < 500) for i in range(1, 2001)]
    made = report(*calls)
    numbers = [call.number for call in made.calls]
    assert 500 in numbers and 499 in numbers and 2000 in numbers
    assert len(numbers) == agent.FINISHED + agent.PENDING + agent.NEWEST
    assert made.whole and not report(*calls[1:]).whole, (
        "a call before the oldest known one may be in any group"
    )


def test_nccl_calls_are_finished_when_they_are_completed() -> None:
    made = report(entry(1, profiling_name="nccl:_all_gather_base", state="completed", retired=False))
    assert made.calls[0].finished and made.calls[0].op == "_all_gather_base"


def test_many_groups_and_long_calls_stay_within_the_limits() -> None:
    shapes = [[[10**6] * 40] * 40, ["Float"] * 40]
    long = {"input_sizes": shapes[0], "input_dtypes": shapes[1]}
    calls = [entry(i, str(group), retired=False, **long) for group in range(300) for i in range(1, 9)]
    made = report(*calls, **{str(group): list(range(0, 8192, 2)) for group in range(300)})
    assert 0 < len(made.calls) <= MAX_CALLS and made.groups[0].ranks == [(0, 4096, 2)]


def test_recorder_without_calls_gives_no_report() -> None:
    assert report_of([{}, {"entries": []}], "h1", NOW, {}) is None


@given(st.sets(st.integers(0, 200)))
def test_ranges_have_the_same_ranks(ranks: set[int]) -> None:
    listed = [first + i * distance for first, count, distance in ranges(ranks) for i in range(count)]
    assert sorted(listed) == sorted(ranks)


def reader(monkeypatch: pytest.MonkeyPatch, asked: list[tuple[bool, ...]]) -> CollectivesReader:
    def dump(*args: bool) -> bytes:
        asked.append(args)
        return pickle.dumps({"entries": [entry(1)]})

    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace", dump, raising=False)
    monkeypatch.delattr("torch._C._distributed_c10d._dump_nccl_trace", raising=False)
    return CollectivesReader(
        SimpleNamespace(missing={}, instrumentation=SimpleNamespace(collectives=SimpleNamespace(log=None)))
    )  # type: ignore[arg-type]


def test_recorder_is_read_on_command_and_after_an_exception_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []
    made = reader(monkeypatch, asked)
    assert (made.collect(False), made.collect(True), asked) == ([], [], [])
    made.handle_command(wire.Command("where", {"id": "h1"}))
    assert [one.asked for one in made.collect(False)] == ["h1"]
    monkeypatch.setattr(sys, "last_value", RuntimeError("Connection closed by peer"), raising=False)
    assert [one.asked for one in made.collect(True)] == [AT_END]


def test_call_that_raised_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reader(monkeypatch, [])
    for error, finished in ((ValueError("x"), True), (RuntimeError("[gloo/pair.cc:553] Read error"), False)):
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        ((call,),) = [one.calls for one in made.collect(True)]
        assert call.finished == finished


def raised_at(*places: tuple[str, str, int]) -> RuntimeError:
    """Return an error of gloo that was raised through functions (name, file, line), the outermost first."""
    namespace: dict[str, Any] = {"text": "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"}
    inner = "raise RuntimeError(text)"
    for name, path, line in reversed(places):
        blank = "\n" * (line - 2)
        exec(compile(f"{blank}def {name}():\n  {inner}", path, "exec"), namespace)
        inner = f"{name}()"
    with pytest.raises(RuntimeError) as caught:
        namespace[places[0][0]]()
    return caught.value


@pytest.mark.parametrize(
    ("line", "through", "finished"),
    [
        (60, ("all_reduce", "/lib/site-packages/torch/distributed/distributed_c10d.py", 2), False),
        (75, ("_wait_batch_p2p", "/lib/site-packages/torch/distributed/pipelining/schedules.py", 2), True),
        (75, ("wait", str(agent.__file__), 2), False),
    ],
)
def test_send_that_raised_at_another_line_leaves_the_newest_collective_finished(
    line: int, through: tuple[str, str, int], finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch records no sends of gloo, so the newest recorded call is an older one. A handle is waited for."""
    made = reader(monkeypatch, [])
    monkeypatch.setattr(
        sys, "last_value", raised_at(("average", "/job/train.py", line), through), raising=False
    )
    ((call,),) = [one.calls for one in made.collect(True)]
    assert call.finished == finished


def test_torch_imports_nothing_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With lines, torch reads `torch._inductor`, and imports it where nobody has."""
    import torch

    asked: list[tuple[bool, ...]] = []
    made = reader(monkeypatch, asked)
    monkeypatch.delattr(torch, "_inductor", raising=False)
    made.handle_command(wire.Command("where", {"id": "h1"}))
    monkeypatch.setattr(torch, "_inductor", object(), raising=False)
    made.handle_command(wire.Command("where", {"id": "h2"}))
    assert asked == [(True, False, False), (True, True, False)]


def test_huge_ring_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []
    made = reader(monkeypatch, asked)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000000")
    made.handle_command(wire.Command("where", {"id": "h1"}))
    assert (made.collect(False), asked) == ([], [])


@given(st.booleans())
def test_dump_of_a_report_is_read_as_the_report(whole: bool) -> None:
    more: dict[str, Any] = {"retired": False, "profiling_name": "gloo:broadcast"}
    made = report(entry(1 if whole else 2), entry(3, "1", **more), **{"0": [0, 1, 2, 3], "1": [0, 3]})
    assert made.whole == whole
    read, expected = parsed(as_dump(made), 3, NOW), collectives_of(made, 3)
    assert (read.calls, read.whole, read.taken_ns) == (expected.calls, expected.whole, expected.taken_ns)
    assert {group.name: group for group in read.groups} == {group.name: group for group in expected.groups}
