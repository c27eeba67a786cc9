"""A capture of a worker of torch.distributed.rpc: what others have it do is recorded, and nothing crashes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from captured_rank import Rank
from torch.autograd import profiler
from torch.distributed import rpc

from traceml_ray.agent import torch_profiler
from traceml_ray.agent.capture import CaptureAgent
from traceml_ray.agent.torch_profiler import AllThreadsProfiler


def work(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """Return a worker that calls itself."""
    made_rank = Rank()
    ours = made_rank.patches
    made_rank.captures = CaptureAgent(
        made_rank.recorder, ours.spans, ours.errors, None, lambda: "p", lambda: made_rank.now, ours.rpc
    )
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    yield made_rank
    rpc.shutdown()
    made_rank.captures.abandon()
    made_rank.patches.remove()
    before = torch_profiler.AllThreadsProfiler._last
    if before is not None:
        before._end()
    assert not ours.errors and not ours.missing and not profiler._is_profiler_enabled


def _calls(n: int) -> None:
    for _ in range(n):
        rpc.rpc_sync("worker0", work, args=(torch.ones(4, 4),))
    rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1))


def _settle(rank: Rank) -> None:
    while rank.status.state == "recording":
        time.sleep(0.02)


def _names(rank: Rank) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in rank.trace()["traceEvents"]:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


def test_rank_without_steps_records_what_it_is_asked_to_do_until_the_others_are_done(rank: Rank) -> None:
    _calls(1)
    rank.ask(first_step=5)
    assert rank.status.state == "recording" and rank.recorder.step_hook is None
    _calls(3)
    rank.ask(first_step=5, over=1)
    _settle(rank)
    status = rank.status
    assert status.state == "sending" and status.serves
    ((step, begin_ns, end_ns, exit_ns),) = status.steps
    assert step == 0 and begin_ns < end_ns and exit_ns is None
    names = _names(rank)
    assert names["rpc_sync#work(worker0 -> worker0)"] == names["work"] == 3
    assert names["rpc_sync#aten::add(worker0 -> worker0)"] == 1
    assert names["aten::mm"] == 3 and names["aten::add"]
    _calls(1)
    assert not profiler._is_profiler_enabled


def test_rank_that_trains_and_serves_has_both_in_its_steps(rank: Rank) -> None:
    rank.train(2)
    rank.ask(first_step=3, steps=1)
    rank.train(1)
    assert rank.status.state == "recording"
    _calls(2)
    rank.train(1)
    _settle(rank)
    assert rank.status.state == "sending" and not rank.status.serves
    assert [step[0] for step in rank.status.steps] == [3]
    names = _names(rank)
    assert names["work"] == 2 and names["Optimizer.step#SGD.step"] >= 1


def test_serving_ends_by_itself_where_nobody_says_that_it_is_over(rank: Rank) -> None:
    rank.ask(first_step=5, serve_s=10.0)
    assert rank.status.state == "recording"
    rank.now = 11.0
    _settle(rank)
    assert rank.status.state == "sending"


def test_stacks_are_refused(rank: Rank) -> None:
    rank.ask(first_step=5, stacks=1)
    assert (rank.status.state, rank.status.reason) == (
        "refused",
        "in a job on torch.distributed.rpc, stacks cannot be recorded",
    )


def test_script_that_starts_its_profiler_wins_over_one_of_all_threads(rank: Rank) -> None:
    rank.ask(first_step=5)
    assert rank.status.state == "recording"
    with torch.profiler.profile() as users_profiler:
        _calls(1)
    assert rank.status.state == "failed" and users_profiler.key_averages()


def test_call_that_was_recorded_and_still_runs_keeps_the_next_capture_off(rank: Rank) -> None:
    running, go_on = threading.Event(), threading.Event()
    global wait_here

    def wait_here() -> None:
        running.set()
        go_on.wait(240)

    wait_here.__module__, wait_here.__qualname__ = __name__, "wait_here"
    rank.ask(first_step=5)
    assert rank.status.state == "recording"
    called = rpc.rpc_async("worker0", wait_here)
    assert running.wait(240)
    rank.ask(first_step=5, over=1)
    _settle(rank)
    rank.ask(first_step=5, number=2)
    assert rank.status.state == "refused" and "still runs" in rank.status.reason
    go_on.set()
    called.wait()
    rank.ask(first_step=5, number=3)
    assert rank.status.state == "recording"


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_child_that_is_forked_meanwhile_records_nothing(
    rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    rank.ask(first_step=5)
    assert rank.status.state == "recording"
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            rank.captures.forked()
            before = psutil.Process().memory_info().rss
            tensor = torch.ones(4)
            for _ in range(20_000):
                tensor = tensor + 1
            os.write(writes, str(psutil.Process().memory_info().rss - before < 10 << 20).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        assert answer.read() == b"True"
    os.waitpid(child, 0)
    assert "Toggling" not in capfd.readouterr().err


def test_capture_that_is_let_go_before_its_trace_is_written_turns_the_profiler_off(rank: Rank) -> None:
    rank.ask(first_step=5)
    assert rank.status.state == "recording"
    rank.ask(first_step=5, over=1)
    rank.captures.tick()
    rank.captures.abandon()
    while profiler._is_profiler_enabled:  # by a thread of its own, some time later
        time.sleep(0.02)
    assert AllThreadsProfiler._last is None
