"""Calls of collectives in the user's code, where torch records none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from traceml_ray.agent.patch.call_log import MAX_CALLS, CallLog
from traceml_ray.agent.patch.collectives import WORLD, Collectives
from traceml_ray.agent.patch.patcher import Patcher
from traceml_ray.agent.recorder import Recorder, Spans
from traceml_ray.agent.ring import StepRing
from traceml_ray.signals.collectives.agent import read


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collectives]:
    """Patches of a torch without a flight recorder, in a job of two ranks that is played."""
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        monkeypatch.delattr(f"torch._C._distributed_c10d.{name}", raising=False)
    patcher, recorder = Patcher(), Recorder(StepRing(16))
    patched = Collectives(recorder, Spans(recorder, patcher.failed), patcher.failed)
    patched.patch(patcher)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield patched
    dist.destroy_process_group()
    patcher.restore()


def average() -> None:
    dist.all_reduce(torch.ones(8, 4))


def test_calls_are_reported_with_number_size_and_line(collectives: Collectives) -> None:
    average()
    dist.barrier()
    pair = dist.new_group([0, 1])
    dist.broadcast(torch.ones(2, dtype=torch.int64), 0, group=pair)
    report = read("h1", collectives.log)
    assert report is not None and (report.source, report.whole) == ("marks", True)
    names = [group.name for group in report.groups]
    calls = [
        (names[one.group] == WORLD, one.op, one.number, one.input_sizes, one.input_dtypes)
        for one in report.calls
    ]
    assert calls == [
        (True, "all_reduce", 1, [[8, 4]], ["float32"]),
        (True, "barrier", 2, [], []),
        (False, "broadcast", 1, [[2]], ["int64"]),
    ]
    line = average.__code__.co_firstlineno + 1
    assert report.calls[0].where == f"average (test_call_log.py:{line})"
    assert all(call.finished for call in report.calls)
    assert report.groups[names.index(WORLD)].ranks == [(0, 2, 1)]


def test_call_that_raised_is_not_finished(collectives: Collectives) -> None:
    average()
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")  # type: ignore[arg-type]
    report = read("h1", collectives.log)
    assert report is not None and [call.finished for call in report.calls] == [True, False]


def test_log_is_bounded_and_counts_on() -> None:
    log = CallLog()

    def collective() -> None:
        log.begin("barrier", "0", ())

    for _ in range(MAX_CALLS + 5):
        collective()
    entries = log.entries()
    assert len(entries) == MAX_CALLS
    assert (entries[0]["record_id"], entries[-1]["collective_seq_id"]) == (5, MAX_CALLS + 5)


def test_torch_that_records_calls_needs_no_log() -> None:
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch records none")
    patcher, recorder = Patcher(), Recorder(StepRing(16))
    patched = Collectives(recorder, Spans(recorder, patcher.failed), patcher.failed)
    patched.patch(patcher)
    patcher.restore()
    assert patched.log is None
