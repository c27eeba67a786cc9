"""A capture on one rank, with torch's own profiler and a real loop: the steps asked for, or why not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_rank import Rank
from torch.autograd import profiler

from traceml_ray import wire
from traceml_ray.agent import capture
from traceml_ray.agent.trace_file import TraceFile, TraceTooLargeError


@pytest.fixture
def rank() -> Iterator[Rank]:
    found = Rank()
    yield found
    found.captures.abandon()
    found.patches.remove()
    assert found.recorder.at_step is None
    assert not torch.autograd._profiler_enabled() and not profiler._is_profiler_enabled


def _steps(found: dict[str, Any]) -> int:
    return sum(event.get("name") == "Optimizer.step#SGD.step" for event in found["traceEvents"])


def test_steps_that_were_asked_for_are_recorded_and_sent(rank: Rank) -> None:
    rank.train(3)
    rank.ask(first_step=5)
    assert rank.status.state == "armed"
    rank.train(2)
    assert rank.status.state == "recording"
    rank.train(2)
    status = rank.status
    assert status.state == "sending" and [step[0] for step in status.steps] == [5, 6]
    for _, begin, end, exit_ns in status.steps:
        assert exit_ns is not None and begin < exit_ns < end
    assert status.steps[0][2] == status.steps[1][1]
    found = rank.trace()
    assert _steps(found) in (1, 2)  # it is on from the end of a step to the end of another
    assert {"aten::addmm", "aten::mm"} <= {event.get("name") for event in found["traceEvents"]}
    assert status.start_ns and status.stop_ns and status.export_ns
    rank.train(2)
    assert rank.status.steps == status.steps


def test_what_was_recorded_lies_inside_its_steps_on_the_wall_clock(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(5)
    steps, found = rank.status.steps, rank.trace()
    base = found["baseTimeNanoseconds"]
    times = [base + 1000 * e["ts"] for e in found["traceEvents"] if e.get("cat") == "cpu_op"]
    slack = 5_000_000  # torch keeps its own time between two readings of the wall clock
    assert steps[0][1] - slack < min(times) and max(times) < steps[-1][2] + slack


def test_capture_is_the_same_however_often_the_command_comes(rank: Rank) -> None:
    for _ in range(4):
        rank.ask(first_step=2)
        rank.train(1)
    rank.ask(first_step=2)
    assert rank.status.state == "sending" and len(rank.status.steps) == 2


def test_step_that_is_over_is_refused_and_a_later_number_begins_anew(rank: Rank) -> None:
    rank.train(5)
    rank.ask(first_step=2)
    rank.train(1)
    assert rank.status.state == "refused" and "was over when the request came" in rank.status.reason
    rank.ask(first_step=8, number=2)
    rank.train(6)
    assert rank.status.state == "sending" and rank.status.number == 2


def test_capture_that_is_begun_anew_while_it_records_ends_first(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(2)
    assert rank.status.state == "recording"
    rank.ask(first_step=6, number=2)
    rank.train(2)
    assert rank.status.state == "armed" and not torch.autograd._profiler_enabled()
    rank.train(5)
    assert rank.status.state == "sending" and [step[0] for step in rank.status.steps] == [6, 7]


def test_script_that_profiles_already_is_left_alone(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    with torch.profiler.profile() as own:
        rank.train(4)
    assert rank.status.state == "refused" and "a profiler is on already" in rank.status.reason
    assert own.key_averages()


def test_script_that_starts_its_profiler_wins(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=5)
    rank.train(2)
    with torch.profiler.profile() as own:
        rank.train(3)
    assert rank.status.state == "failed" and "a profiler of its own" in rank.status.reason
    assert any(event.key == "aten::addmm" for event in own.key_averages())
    rank.train(6)
    assert rank.recorder.at_step is None


def test_profiler_of_another_thread_wins_and_nothing_is_saved(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=3)
    rank.train(2)
    names: list[str] = []

    def other() -> None:
        with torch.profiler.profile() as own:
            torch.ones(3) + 1
        names.extend(event.key for event in own.key_averages())

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive():
        rank.train(1)
        thread.join(0.01)
    assert "aten::add" in names and rank.recorder.at_step is None
    rank.train(5)
    assert rank.status.state == "failed" and not rank.captures.pieces(10)


def test_steps_that_do_not_come_are_given_up(rank: Rank) -> None:
    rank.ask(first_step=1000)
    rank.train(2)
    rank.now = 61.0
    status = rank.status
    assert status.state == "refused" and "did not come within 60 s" in status.reason
    assert rank.recorder.at_step is None


def test_evaluation_among_its_steps_is_not_recorded_for_long(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=3, record_s=10)
    rank.train(2)
    assert rank.status.state == "recording"
    loader = iter(torch.utils.data.DataLoader(torch.ones(40, 4)))
    next(loader), next(loader)
    rank.now = 5.0
    assert rank.status.state == "recording"
    rank.now = 20.0
    assert rank.status.state == "failed" and "took longer than 10 s" in rank.status.reason
    next(loader)
    assert not torch.autograd._profiler_enabled()
    rank.train(5)
    assert rank.status.state == "failed" and not rank.captures.pieces(1)


def test_end_of_watching_turns_the_profiler_off(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=5)
    rank.train(2)
    assert torch.autograd._profiler_enabled()
    ended = threading.Thread(target=rank.captures.abandon)  # as `detach` of another thread
    ended.start()
    ended.join()
    rank.patches.remove()
    rank.train(1)
    assert not torch.autograd._profiler_enabled() and rank.captures.status is None


def test_profiler_that_fails_ends_the_capture_alone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler.profile, "_start_trace", lambda _: 1 / 0)
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(4)
    assert rank.status.state == "refused" and "ZeroDivisionError" in rank.status.reason
    assert sum(rank.patches.errors.values()) == 1


def test_pieces_that_were_lost_are_sent_again(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "PIECE_BYTES", 500)
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(5)
    total = rank.status.total_bytes
    first = rank.captures.pieces(4)
    assert [piece.offset for piece in first] == [0, 500, 1000, 1500]
    rank.captures.lose(500)
    assert rank.captures.pieces(1)[0] == first[1]
    rank.captures.obey(wire.Command("trace", {"profile": "p", "process": "x", "offset": 1000}))
    rest = rank.captures.pieces(10_000)
    assert rest[0].offset == 1000 and rest[-1].offset + len(rest[-1].data) == total


def test_trace_is_let_go_when_nobody_asks_any_more(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(5)
    assert rank.status.state == "sending"
    rank.now = capture.KEPT_S + 1
    rank.captures.turn()
    assert rank.captures.status is None and not rank.captures.pieces(1)


def test_trace_that_is_too_large_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceTooLargeError, match="ask for fewer steps"):
        TraceFile(lambda path: path.write_bytes(bytes(2000)), str(tmp_path), max_bytes=1000)
    assert not list(tmp_path.iterdir())
