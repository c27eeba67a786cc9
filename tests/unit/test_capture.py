"""A capture on one rank, with torch's own profiler and a real loop: the steps asked for, or why not."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from captured_rank import Rank
from torch.autograd import profiler
from torch.optim.optimizer import register_optimizer_step_post_hook

from traceml_ray.agent import capture
from traceml_ray.agent.capture import TraceFile, TraceTooLargeError
from traceml_ray.agent.torch_profiler import TorchProfiler, without_line
from traceml_ray.stages import FLAG_EXCLUDED, SEGMENT_BITS
from traceml_ray.wire.messages import TRACE_NAME


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.captures.abandon()
    made.patches.remove()
    assert made.recorder.step_hook is None
    assert not torch.autograd._profiler_enabled() and not profiler._is_profiler_enabled


def _steps(document: dict[str, Any]) -> int:
    return sum(event.get("name") == "Optimizer.step#SGD.step" for event in document["traceEvents"])


def _elsewhere(*calls: Callable[[], object]) -> None:
    """Call these in another thread."""

    def call() -> None:
        for one in calls:
            one()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _during_start(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have `act` called in another thread while the next profiler is turned on."""
    start = TorchProfiler.start

    def meanwhile(profiler: TorchProfiler) -> None:
        monkeypatch.setattr(TorchProfiler, "start", start)
        _elsewhere(act)
        start(profiler)

    monkeypatch.setattr(TorchProfiler, "start", meanwhile)


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
    document = rank.trace()
    assert _steps(document) in (1, 2)  # it is on from the end of a step to the end of another
    assert {"aten::addmm", "aten::mm"} <= {event.get("name") for event in document["traceEvents"]}
    assert status.start_ns and status.stop_ns and status.export_ns
    rank.train(2)
    assert rank.status.steps == status.steps


def test_what_was_recorded_lies_inside_its_steps_on_the_wall_clock(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(5)
    steps, document = rank.status.steps, rank.trace()
    base = document["baseTimeNanoseconds"]
    times = [base + 1000 * e["ts"] for e in document["traceEvents"] if e.get("cat") == "cpu_op"]
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


def test_capture_that_is_begun_anew_while_its_profiler_is_turned_on_ends_first(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    _during_start(monkeypatch, lambda: rank.ask(first_step=6, number=2))
    rank.train(2)
    assert rank.status.state == "armed" and not torch.autograd._profiler_enabled()
    rank.train(7)
    assert rank.status.state == "sending" and [step[0] for step in rank.status.steps] == [6, 7]


def test_step_comes_in_time_although_turning_the_profiler_on_takes_longer_than_its_limit(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit_passes() -> None:
        rank.now = 1000.0
        rank.captures.tick()

    rank.train(1)
    rank.ask(first_step=2)
    _during_start(monkeypatch, limit_passes)
    rank.train(4)
    status = rank.status
    assert status.state == "sending" and [step[0] for step in status.steps] == [2, 3]


def test_end_of_watching_while_the_profiler_is_turned_on_leaves_none_on(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch goes through the hooks of an optimizer meanwhile: none of them may go from under it."""
    steps: list[int] = []
    script = register_optimizer_step_post_hook(lambda *_: steps.append(1))

    def detach() -> None:
        rank.captures.abandon()
        rank.patches.remove()

    rank.train(1)
    rank.ask(first_step=2)
    _during_start(monkeypatch, detach)
    rank.train(3)
    script.remove()
    assert len(steps) == 4 and rank.recorder.step_hook is None
    assert not torch.autograd._profiler_enabled() and not profiler._is_profiler_enabled


def test_profiler_of_another_thread_that_starts_while_ours_is_turned_on_wins(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were both on, torch would crash when ours is turned off."""
    prepare = profiler.profile._prepare_trace
    names: list[str] = []

    def other() -> None:
        with torch.profiler.profile() as users_profiler:
            torch.ones(3) + 1
        names.extend(event.key for event in users_profiler.key_averages())

    thread = threading.Thread(target=other)

    def meanwhile(ours: Any, *args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread.start()
            while rank.captures.status and rank.captures.status.state == "armed":
                time.sleep(0.01)
        prepare(ours, *args)

    monkeypatch.setattr(profiler.profile, "_prepare_trace", meanwhile)
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(2)
    thread.join()
    assert rank.status.state == "failed" and "a profiler of its own" in rank.status.reason
    assert "aten::add" in names and not torch.autograd._profiler_enabled()


def test_device_that_fails_leaves_no_profiler_on(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(2)
    now = rank.captures._now
    assert now is not None
    monkeypatch.setattr(now._profiler, "_device", SimpleNamespace(synchronize=lambda: 1 / 0))
    rank.train(2)
    assert rank.status.state == "failed" and "ZeroDivisionError" in rank.status.reason
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("options", [{}, {"memory": 1, "stacks": 1}], ids=["plain", "memory and stacks"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_child_that_is_forked_during_a_capture_records_nothing(rank: Rank, options: dict[str, int]) -> None:
    rank.train(1)
    rank.ask(first_step=2, **options)
    rank.train(2)
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            rank.captures.forked()
            on = torch.autograd._profiler_enabled() or profiler._is_profiler_enabled or sys.getprofile()
            before = psutil.Process().memory_info().rss
            tensor = torch.ones(4)
            for _ in range(20_000):
                tensor = tensor + 1
            grown = psutil.Process().memory_info().rss - before
            with torch.profiler.profile() as users_profiler:
                torch.ones(3) + 1
            own_works = "aten::add" in {event.key for event in users_profiler.key_averages()}
            os.write(writes, f"{bool(on)} {grown < 10 << 20} {own_works}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        assert answer.read() == b"False True True"
    os.waitpid(child, 0)
    rank.train(3)
    assert rank.status.state == "sending" and [step[0] for step in rank.status.steps] == [2, 3]


def test_rows_that_a_profile_slows_are_in_no_statistic(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is turned off in the step after; a trace is written while more steps are done."""
    rank.train(6)
    rank.ask(first_step=8)
    rank.train(7)
    save = TorchProfiler.save

    def while_it_trains(ours: TorchProfiler, path: Path) -> None:
        save(ours, path)
        rank.train(2)

    monkeypatch.setattr(TorchProfiler, "save", while_it_trains)
    assert rank.status.state == "sending"
    rank.train(4)
    assert rank.recorder.replay(60.0)
    _, keys, flags, _ = rank.recorder.steps.rows.ring.drain(100)
    steps = np.frombuffer(keys, "<i8") >> SEGMENT_BITS
    marked = np.frombuffer(flags, np.uint8) & FLAG_EXCLUDED != 0
    assert steps[marked].tolist() == [0, 8, 9, 10, 13, 14, 15] and len(steps) >= 18


def test_script_that_profiles_already_is_left_alone(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    with torch.profiler.profile() as users_profiler:
        rank.train(4)
    assert rank.status.state == "refused" and "a profiler is on already" in rank.status.reason
    assert users_profiler.key_averages()


def test_script_that_starts_its_profiler_wins(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=5)
    rank.train(2)
    with torch.profiler.profile() as users_profiler:
        rank.train(3)
    assert rank.status.state == "failed" and "a profiler of its own" in rank.status.reason
    assert any(event.key == "aten::addmm" for event in users_profiler.key_averages())
    rank.train(6)
    assert rank.recorder.step_hook is None


def test_profiler_of_another_thread_wins_and_nothing_is_saved(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=1000)  # more than it makes until the other thread gets a core
    rank.train(2)
    names: list[str] = []
    begins = threading.Event()

    def other() -> None:
        begins.set()
        with torch.profiler.profile() as users_profiler:
            torch.ones(3) + 1
        names.extend(event.key for event in users_profiler.key_averages())

    thread = threading.Thread(target=other)
    thread.start()
    assert begins.wait(240)
    while thread.is_alive():
        rank.train(1)
        thread.join(0.01)
    assert "aten::add" in names and rank.recorder.step_hook is None
    rank.train(5)
    assert rank.status.state == "failed" and not rank.status.folder


def test_steps_that_do_not_come_are_given_up(rank: Rank) -> None:
    rank.ask(first_step=1000)
    rank.train(2)
    rank.now = 61.0
    status = rank.status
    assert status.state == "refused" and "did not come within 60 s" in status.reason
    assert rank.recorder.step_hook is None


def test_evaluation_among_its_steps_is_not_recorded_for_long(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=3, record_s=10.04321)
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
    assert rank.status.state == "failed" and not rank.status.folder


def test_end_of_watching_turns_the_profiler_off(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2, steps=5)
    rank.train(2)
    assert torch.autograd._profiler_enabled()
    _elsewhere(rank.captures.abandon, rank.patches.remove)  # as `detach` of another thread
    rank.train(1)
    assert not torch.autograd._profiler_enabled() and rank.captures.status is None


@pytest.mark.parametrize("is_on", [False, True])
def test_profiler_that_fails_ends_the_capture_alone(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    start = profiler.profile._start_trace

    def fails(ours: Any) -> None:
        if is_on:
            start(ours)
        raise ZeroDivisionError

    monkeypatch.setattr(profiler.profile, "_start_trace", fails)
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(4)
    assert rank.status.state == "refused" and "ZeroDivisionError" in rank.status.reason
    assert sum(rank.patches.errors.values()) == 1 and not torch.autograd._profiler_enabled()


def test_trace_is_let_go_when_nobody_asks_any_more(rank: Rank) -> None:
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(5)
    folder = Path(rank.status.folder)
    assert rank.status.state == "sending" and [file.name for file in folder.iterdir()] == [TRACE_NAME]
    rank.now = capture.KEPT_S + 1
    rank.captures.tick()
    assert rank.captures.status is None and not folder.exists()


def test_trace_that_is_too_large_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceTooLargeError, match="ask for fewer steps"):
        TraceFile(lambda path: path.write_bytes(bytes(2000)), str(tmp_path), "p", max_bytes=1000)
    assert not list(tmp_path.iterdir())


def test_line_of_c_code_is_kept_out_and_all_else_comes_through(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)

    def c_prints(line: bytes) -> None:
        library.fputs(line, ctypes.c_void_p.in_dll(library, "stderr"))

    with pytest.raises(ZeroDivisionError), without_line(b"no error"):
        c_prints(b"ERROR: no error\n")
        c_prints(b"of the script\n")
        os.write(2, b"first\n")
        raise ZeroDivisionError
    c_prints(b"no error after\n")
    assert capfd.readouterr().err == "first\nof the script\nno error after\n"


def test_agent_goes_on_while_a_large_trace_is_compressed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, pack = threading.Event(), TraceFile.pack

    def waits(file: TraceFile) -> None:
        goes_on.wait(240)
        pack(file)

    monkeypatch.setattr(TraceFile, "pack", waits)
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(4)
    for _ in range(3):
        rank.captures.tick()
        status = rank.captures.status
        assert status is not None and status.state == "recording" and not status.folder
    goes_on.set()
    assert rank.status.state == "sending" and rank.trace()["traceEvents"]


@pytest.mark.parametrize("ends", ["fails", "is let go"])
def test_rows_count_again_after_a_trace_that_could_not_be_compressed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    goes_on = threading.Event()

    def full(_: TraceFile) -> None:
        goes_on.wait(240)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceFile, "pack", full)
    rank.train(1)
    rank.ask(first_step=2)
    rank.train(4)
    rank.captures.tick()
    if ends == "fails":
        goes_on.set()
        status = rank.status
        assert status.state == "failed" and "No space left on device" in status.reason and not status.folder
    else:
        rank.captures.abandon()
    rank.train(4)
    assert rank.recorder.replay(60.0)
    assert rank.recorder.steps.rows.step not in rank.recorder.steps.rows.slowed
    goes_on.set()
    goes_on.set()
